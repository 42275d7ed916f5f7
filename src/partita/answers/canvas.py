"""The paper the figures are drawn on: themes, panels, legends, and the way to PNG. No pyplot and no rcParams."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # matplotlib takes half a second to import: `import partita` must not pay it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

WIDTH = 5.2  # inches: at 9 points the letters stay legible when a phone shows the figure 360 pixels wide
DPI = 160


@dataclass(frozen=True)
class Theme:
    """Colours. `cycle` can be told apart by colour-blind readers (Okabe & Ito's set, darker or lighter to fit)."""

    name: str
    face: str
    ink: str
    quiet: str
    grid: str
    band: str
    cycle: tuple[str, ...]


LIGHT = Theme(
    *("light", "#ffffff", "#22262b", "#5d6670", "#d9dde2", "#e6e9ed"),
    ("#0072b2", "#d55e00", "#009e73", "#b3508c", "#b8860b", "#3f4752"),
)
DARK = Theme(
    *("dark", "#1b1f24", "#e4e7eb", "#9aa4af", "#3a414a", "#30363e"),
    ("#56b4e9", "#f0803c", "#2fc79a", "#e59ac5", "#e9c62b", "#c9d1d9"),
)


def png(figure: Figure, theme: Theme) -> bytes:
    """In 256 colours of its own, a third of the size; without metadata, so that one figure is always the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image  # matplotlib brings it

    figure.set_dpi(DPI)
    canvas, buffer = FigureCanvasAgg(figure), io.BytesIO()
    canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())
    few = drawn.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(buffer, "png", compress_level=8)
    return buffer.getvalue()


def panels(
    theme: Theme,
    count: int,
    title: str,
    each: float,
    left: float = 0.66,
    top: float = 0.6,
    gap: float = 0.0,
    width: float = WIDTH,
    ratios: Sequence[float] = (),
    share: bool = False,
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, one below another, in the theme's colours. Margins are in inches and fixed: matplotlib's
    own layouts measure every letter twice, half of the time a report would take."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, top + (each + gap) * count - gap + 0.46), facecolor=theme.face)
    height = figure.get_figheight()
    figure.text(0.14 / width, 1 - 0.2 / height, title, va="center", fontsize=10.5, fontweight="bold", color=theme.ink)
    edges = {"left": left / width, "right": 1 - 0.24 / width, "top": 1 - top / height, "bottom": 0.46 / height}
    figure.subplots_adjust(**edges, hspace=gap / each)
    below = {"height_ratios": ratios} if ratios else None
    grid = figure.subplots(count, 1, squeeze=False, sharex=share, gridspec_kw=below)
    axes = list(grid[:, 0])
    for ax in axes:
        ax.set_facecolor(theme.face)
        ax.grid(True, color=theme.grid, lw=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(colors=theme.quiet, labelsize=8, length=2.5, width=0.6, which="both")
        for side, spine in ax.spines.items():
            spine.set(visible=side in ("left", "bottom"), color=theme.grid)
    return figure, axes


def name(ax: Axes, theme: Theme, left: str, right: str) -> None:
    short = left if len(left) <= 44 else left[:20] + " … " + left[-20:]
    ax.set_title(short.replace("$", r"\$"), loc="left", fontsize=8.5, color=theme.ink, pad=3)
    ax.set_title(right, loc="right", fontsize=8.5, color=theme.quiet, pad=3)


def legend(ax: Axes, theme: Theme, always: bool = False) -> None:
    if len(ax.get_legend_handles_labels()[1]) > 1 or always:
        legend = ax.legend(fontsize=8, frameon=False, labelcolor=theme.ink)
        legend.set_zorder(5)


def percent() -> FuncFormatter:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda v, _: f"{100 * v:.4g} %")


def plain_log(ax: Axes, low: float, high: float) -> None:
    """Ticks 1, 2, 5, 10, … in plain numbers; even ones where the axis is too short for those."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, MaxNLocator, NullLocator

    steps = (1, 2, 5) if high / low < 200 else (1,)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: Locator = FixedLocator([m * 10.0**k for k in exponents for m in steps])
    ax.xaxis.set_major_locator(MaxNLocator(4) if high / low < 8 else ticks)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    ax.set_xlim(low, high)
