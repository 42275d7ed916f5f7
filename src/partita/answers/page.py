"""A page: sections of text, tables and figures, rendered to one HTML file that needs nothing but itself."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from partita.answers.canvas import DARK, LIGHT, Theme, png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tone = Literal["good", "care", "bad"]


@dataclass(frozen=True)
class Text:
    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True)
class Missing:
    """One quiet line that says what is not shown, and why."""

    kind: ClassVar[str] = "missing"
    text: str


@dataclass(frozen=True)
class Items:
    kind: ClassVar[str] = "items"
    items: Sequence[str]


@dataclass(frozen=True)
class Code:
    kind: ClassVar[str] = "code"
    text: str


@dataclass(frozen=True)
class Table:
    """The first column heads the rows; `words`: the others hold words, not numbers."""

    kind: ClassVar[str] = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False


@dataclass(frozen=True)
class Picture:
    """A figure as PNG, light and dark; `caption` is its text for those who cannot see it, too."""

    kind: ClassVar[str] = "picture"
    name: str
    caption: str
    light: bytes
    dark: bytes
    width: int
    height: int

    @property
    def light_uri(self) -> str:
        return _data_uri(self.light)

    @property
    def dark_uri(self) -> str:
        return _data_uri(self.dark)


@dataclass(frozen=True)
class Gallery:
    """Cards side by side where there is room for them."""

    kind: ClassVar[str] = "gallery"
    cards: Sequence[Picture | Table]

    @property
    def pictures(self) -> list[Picture]:
        return [c for c in self.cards if isinstance(c, Picture)]


Block = Text | Missing | Items | Code | Table | Gallery


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]

    @property
    def anchor(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")


@dataclass(frozen=True)
class Banner:
    """The verdict: a tone, a headline and its reasons. The mark and the words say it without the colour."""

    tone: Tone
    headline: str
    reasons: Sequence[str]
    name: str = ""

    @property
    def mark(self) -> str:
        return {"good": "✓", "care": "!", "bad": "✕"}[self.tone]


@dataclass(frozen=True)
class Page:
    title: str
    eyebrow: str
    banners: Sequence[Banner]
    facts: Sequence[str] = ()
    sections: Sequence[Section] = field(default=())
    footer: str = ""

    def html(self) -> str:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup

        here = resources.files("partita.answers")
        css, template = (here.joinpath(f"report.{end}").read_text("utf-8") for end in ("css", "html.j2"))
        env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        return env.from_string(template).render(page=self, css=Markup(css))

    def pictures(self) -> list[Picture]:
        return [p for s in self.sections for b in s.blocks if isinstance(b, Gallery) for p in b.pictures]

    def write(self, out: str | Path, name: str, known: Sequence[str]) -> Path:
        """`out` is a folder, or the path of the .html file itself. Pictures lie beside it, as <stem>-<picture>.png; those
        of the `known` ones that this page does not have are removed, since they are of an older page."""
        path = Path(out) if Path(out).suffix == ".html" else Path(out) / name
        beside = lambda picture: path.with_name(f"{path.stem}-{picture}.png")
        files = {beside(p.name): p.light for p in self.pictures()}
        files[path] = self.html().encode()  # last: the page appears when its pictures are there
        write_all(files)
        for old in {beside(k) for k in known} - set(files):
            old.unlink(missing_ok=True)
        return path


def write_all(files: dict[Path, bytes]) -> None:
    """All of them under temporary names first, so that an error (a full disk) leaves every old file as it was."""
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in files}
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary[path].open("wb") as f:
                f.write(content)
                f.flush()
                os.fsync(f.fileno())
        for path in files:
            temporary[path].replace(path)
    finally:
        for left in temporary.values():
            left.unlink(missing_ok=True)


def picture(name: str, caption: str, draw: Callable[[Theme], Figure]) -> Picture:
    """Drawn twice: a light card in a dark page dazzles, and one transparent figure is grey on both."""
    light, dark = (png(draw(theme), theme) for theme in (LIGHT, DARK))
    size = lambda at: int.from_bytes(light[at : at + 4], "big")  # of the PNG's header
    return Picture(name, caption, light, dark, size(16), size(20))


def attempt(what: str, build: Callable[[], Sequence[Block]]) -> Sequence[Block]:
    """The blocks, or one line that says why there are none: a report must come out of a run that went wrong, too."""
    try:
        return build()
    except Exception as e:
        return [Missing(f"{what}: not shown, {' '.join(str(e).split())[:300] or type(e).__name__}")]


def _data_uri(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()
