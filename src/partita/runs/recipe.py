"""A recipe: one experiment as one TOML text, checked whole before anything runs.

    [model] [likelihood] [prior] [data] [sampler] [structure] …     what: a `kind`, and its settings by their own names
    [posterior] [run]                                               settings of pt.Posterior and of pt.sample

Kinds are those of runs/describe.py, for models "mlp", "convnet" and "resnet", for data "digits" and "npz". One that names a
module, "package.module:name", is imported when the recipe is READ: treat such a recipe as a program. A model's is called to
make the network, a data set's to return (train, test), each a pair (x, y); test may be None.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from partita import data, models
from partita.runs.checks import check_choices, lengths, whole
from partita.runs.describe import Kinds, arguments, build, listed, nearest, prepared
from partita.runs.run import Run
from partita.runs.sampling import sample
from partita.runs.setup import STARTS
from partita.target import Posterior
from partita.target.pairs import what
from partita.target.trees import as_tensors, short

SECTIONS = {  # and an example of those that every recipe needs
    "model": 'kind = "mlp"',
    "likelihood": 'kind = "Categorical"',
    "prior": None,
    "posterior": None,
    "data": 'kind = "digits"',
    "augment": None,
    "sampler": 'kind = "PSGLD"',
    "structure": None,
    "run": "steps = 4000",
}
MODELS: Kinds = {"mlp": models.mlp, "convnet": models.convnet, "resnet": models.resnet}
RUN_HINTS = {"init": Literal[*STARTS], "monitor": bool}
NOT_IN_RUN = (
    "target",
    "out",
    "data",
    "sampler",
    "structure",
    "augment",
    "recipe",
)  # these are, or make, the other sections
NOT_IN_POSTERIOR = ("model", "likelihood", "prior", "forward")


def npz(path: str, x: str = "x", y: str = "y", x_test: str | None = None, y_test: str | None = None) -> Any:
    """The arrays of a NumPy archive; of a test set when there is one, under these names (default "x_test", "y_test")."""
    try:
        with np.load(path, allow_pickle=False) as found:
            arrays = {name: found[name] for name in found.files}
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise ValueError(f"npz got path={path!r}, expected a file written by numpy.savez ({e})") from None
    named = {"x": x, "y": y, "x_test": x_test or "x_test", "y_test": y_test or "y_test"}
    tested = x_test is not None or y_test is not None or bool({"x_test", "y_test"} & arrays.keys())
    for setting in named if tested else ("x", "y"):
        if named[setting] not in arrays:
            raise ValueError(
                f"npz got {setting}={named[setting]!r}, expected one of the file's arrays {listed(arrays)}"
            )
    made = {k: as_tensors(arrays[name], name, torch.get_default_dtype()) for k, name in named.items() if name in arrays}
    return (made["x"], made["y"]), ((made["x_test"], made["y_test"]) if tested else None)


DATA: Kinds = {"digits": data.digits, "npz": npz}


@dataclass(frozen=True)
class Recipe:
    """The tables of a recipe; whatever does not fit is refused here."""

    tables: Mapping[str, Mapping[str, Any]]

    def __post_init__(self) -> None:
        for name in self.tables:
            if name not in SECTIONS:
                near = nearest(name, SECTIONS)
                expected = f"[{near}]" if near else f"one of {listed(SECTIONS)}"
                raise ValueError(f"[{name}] is no section of a recipe, expected {expected}")
        for name, example in SECTIONS.items():
            if name not in self.tables and example is not None:
                raise ValueError(f"the recipe has no [{name}], expected one, for example {example}")
            if not isinstance(self.tables.get(name, {}), Mapping):
                raise ValueError(f"{name} is {short(self.tables[name])}, expected a table [{name}]")
        kept = {name: _plain(self.tables[name], name) for name in SECTIONS if name in self.tables}
        object.__setattr__(self, "tables", kept)
        self._model()
        self._data()
        self._target()
        self._check_run()

    @property
    def text(self) -> str:
        """The TOML that gives this recipe again."""
        return "\n".join(_lines(self.tables, ())).lstrip() + "\n"

    def posterior(self, seed: int | None = None) -> Posterior:
        """The network, made at the seed of the run (or another), under its likelihood and prior."""
        with _forked(self._run["seed"] if seed is None else seed):
            try:
                model = self._model()()
            except (TypeError, ValueError) as e:
                raise ValueError(f"model: {e}") from e
            return Posterior(model, **self._target())

    def data(self) -> tuple[Any, Any]:
        """(train, test or None), each (x, y)."""
        with _forked(self._run["seed"]):
            try:
                found = self._data()()
            except (TypeError, ValueError) as e:
                raise ValueError(f"data: {e}") from e
        pair = isinstance(found, (tuple, list)) and len(found) == 2
        if not pair or any(isinstance(part, (Tensor, np.ndarray)) for part in found):
            kind = self.tables["data"]["kind"]
            raise ValueError(f"data: {kind} returned {what(found)}, expected ((x, y), (x_test, y_test) or None)")
        return found[0], found[1]

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments for pt.sample, but for `monitor`, which needs the data."""
        made = {
            name: build(self.tables[name], name) for name in ("sampler", "structure", "augment") if name in self.tables
        }
        return {**made, **{k: v for k, v in self._arguments().items() if k != "monitor"}}

    @property
    def watches(self) -> bool:
        """Whether the run scores its test set while it goes."""
        return bool(self._run["monitor"])

    def sample(self, **more: Any) -> Run:
        """Run it; `more` settings of pt.sample go before the recipe's."""
        train, test = self.data()
        if self.watches and test is None:
            raise ValueError("run.monitor is true and the data have no test set, expected false or a test set")
        monitor = {"test": test} if self.watches else None
        given = {"monitor": monitor, **self.settings, **more}
        if given.get("out") is not None:  # a run folder holds its recipe
            given["recipe"] = self.text
        return sample(self.posterior(), train, **given)

    def _model(self) -> partial[Any]:
        return prepared(self.tables["model"], "model", MODELS)

    def _data(self) -> partial[Any]:
        return prepared(self.tables["data"], "data", DATA)

    def _target(self) -> dict[str, Any]:
        """Keyword arguments for pt.Posterior."""
        made = {name: build(self.tables[name], name) for name in ("likelihood", "prior") if name in self.tables}
        table = {**{"posterior": {}}, **self.tables}["posterior"]
        return made | arguments(Posterior, table, "posterior", "a posterior", without=(*NOT_IN_POSTERIOR, "self"))

    def _arguments(self) -> dict[str, Any]:
        """Keyword arguments for pt.sample out of [run]."""
        return arguments(sample, self.tables["run"], "run", "a run", RUN_HINTS, NOT_IN_RUN)

    @property
    def _run(self) -> dict[str, Any]:
        """[run] with the defaults of what it leaves out."""
        return {n: p.default for n, p in inspect.signature(sample).parameters.items()} | self._arguments()

    def _check_run(self) -> None:
        run = self._run
        try:
            lengths(run["steps"], run["burn_in"], run["thin"])
            check_choices(**{name: run[name] for name in inspect.signature(check_choices).parameters})
            _check_seed(run["seed"])
        except ValueError as e:
            raise ValueError(f"run.{e}") from None
        self.settings  # noqa: B018  builds the sampler and the structure


def parse(text: str, sets: Sequence[str] = (), name: str = "the recipe") -> Recipe:
    """The recipe in a TOML text; each of `sets`, "run.steps=4000", goes before what it says. Errors call it `name`."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ValueError(f"{name} is no TOML: {e}, expected a text such as [run] and below it steps = 4000") from None
    for one in sets:
        keys, value = _setting(one)
        inner = tables
        for key in keys[:-1]:
            if not isinstance(inner.get(key), dict):
                inner[key] = {}
            inner = inner[key]
        inner[keys[-1]] = value
    return Recipe(tables)


def load(path_or_name: str | Path, sets: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, or a bundled one by its bare name."""
    bundled = {p.name.removesuffix(".toml"): p for p in resources.files("partita").joinpath("recipes").iterdir()}
    path = Path(path_or_name)
    if str(path_or_name) in bundled:
        return parse(bundled[str(path_or_name)].read_text("utf-8"), sets, str(path_or_name))
    if not path.exists():
        raise ValueError(f"there is no recipe {str(path)!r}, expected a file or a bundled recipe: {listed(bundled)}")
    try:
        return parse(path.read_text("utf-8-sig"), sets, str(path))
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} cannot be read, expected a TOML file in UTF-8 ({e})") from None


def _setting(one: str) -> tuple[list[str], Any]:
    """The keys and the value of "a.b=c". A value that is no TOML but one bare word is a string."""
    key, _, value = (part.strip() for part in one.partition("="))
    word = json.dumps(value) if re.fullmatch(r"[^\s\"'\[\]{}#=,]+", value) else value
    for candidate in (value, word):
        with contextlib.suppress(ValueError):  # no TOML, or more than one key
            keys: list[str] = []
            inner = tomllib.loads(f"{key} = 0\n")
            while isinstance(inner, dict):
                (name,) = inner
                inner, keys = inner[name], [*keys, name]
            (read,) = tomllib.loads(f"value = {candidate}\n").values()
            return keys, read
    raise ValueError(f"the setting {one!r} is no key=value, expected for example run.steps=4000 or sampler.kind=SGLD")


def _check_seed(seed: Any) -> None:
    if not whole(seed, 0) or seed >= 2**32:
        raise ValueError(f"seed is {seed!r}, expected a whole number in [0, 2^32)")


@contextlib.contextmanager
def _forked(seed: int) -> Iterator[None]:
    """torch's random state seeded inside, and as it was outside."""
    _check_seed(seed)
    cuda = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed_all(seed)
        yield


# -- writing TOML ----------------------------------------------------------------------------------------------------------
def _plain(value: Any, path: str) -> Any:
    """A copy of a table's value, of nothing but what TOML and every setting know."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{path}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{path}[{i}]") for i, v in enumerate(value)]
    if type(value) not in (str, bool, int, float):
        raise ValueError(f"{path} is {short(value)}, expected a string, a number, true, false, an array or a table")
    return value


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """The lines of a table and those below it. The order of keys may matter (of name patterns the first that matches
    decides), so a table that stands before a plain value is written in its line."""
    if path:
        yield f"\n[{'.'.join(map(_key, path))}]"
    names = list(table)
    plain = [i for i, name in enumerate(names) if not isinstance(table[name], Mapping)]
    first = plain[-1] + 1 if plain else 0
    for name in names[:first]:
        yield f"{_key(name)} = {_value(table[name])}"
    for name in names[first:]:
        yield from _lines(table[name], (*path, name))


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str):  # JSON's strings are TOML's, but for one control character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
