"""Objects to plain tables and back: what a recipe, a run's record and a report say of a sampler or a structure.

    PSGLD(Cosine(2e-3, 1e-4))  <->  {"kind": "PSGLD", "step_size": {"kind": "Cosine", "start": 2e-3, "end": 1e-4}}

A table holds strings, numbers, booleans, arrays and tables. Settings at their defaults are left out; "none" is None. A
kind is a name of KINDS, or "package.module:name" for what others wrote: that is imported and called with the rest of the
table, so A TABLE THAT NAMES A MODULE RUNS THAT MODULE'S CODE. Read what you did not write before you build it.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import importlib
import inspect
import re
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from types import NoneType
from typing import Any, Literal

from partita import target
from partita.data import CropFlip
from partita.samplers import PSGLD, SGHMC, SGLD, Constant, Cosine, Cyclical, Polynomial, Sampler, Schedule
from partita.structure import Ensemble, History, Joint, Reservoir, Structure, Structured, Window, masks, partitions
from partita.structure.masks import Mask
from partita.structure.partitions import Partition
from partita.target import Likelihood, Prior
from partita.target.trees import short

Kinds = Mapping[str, Callable[..., Any]]


def _named(*made: Any) -> dict[str, Callable[..., Any]]:
    return {f.__name__: f for f in made}


_p, _m = partitions, masks
KINDS: dict[str, Kinds] = {  # what can stand in each place
    "sampler": _named(PSGLD, SGHMC, SGLD),
    "schedule": _named(Constant, Cosine, Cyclical, Polynomial),
    "structure": _named(Joint, Structured),
    "partition": _named(_p.joint, _p.by_layer, _p.by_neuron, _p.random, _p.cyclic, _p.each, _p.by_name, _p.from_labels),
    "mask": _named(_m.OneGroup, _m.Bernoulli, _m.Stratified, _m.Uniform, _m.Beta, _m.Gaussian),
    "history": _named(Window, Reservoir, Ensemble),
    "likelihood": _named(target.Bernoulli, target.Categorical, target.FromFunction, target.Gaussian),
    "prior": _named(target.Laplace, target.Normal, target.StudentT),
    "scale": _named(target.FanIn),
    "augment": _named(CropFlip),
}
PLACES: dict[Any, str] = {  # the type hint of a field -> what can stand there
    **{made: place for place, kinds in KINDS.items() for made in kinds.values()},
    **{Sampler: "sampler", Schedule: "schedule", Structure: "structure", Partition: "partition", Mask: "mask"},
    **{History: "history", Likelihood: "likelihood", Prior: "prior"},
}
LABELS = 10_000  # the most labels of from_labels that are written out
REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def describe(obj: Any, path: str | None = None) -> Any:
    """The table of an object, or a plain value as it is; `path` is what errors call it."""
    path = path or type(obj).__name__
    if obj is None or isinstance(obj, (bool, str)):
        return "none" if obj is None else obj
    if isinstance(obj, Real):
        return int(obj) if isinstance(obj, Integral) else float(obj)
    if isinstance(obj, Partition):
        return _partition(obj, path)
    if isinstance(obj, (tuple, list)):
        return [describe(v, f"{path}[{i}]") for i, v in enumerate(obj)]
    if isinstance(obj, Mapping) and all(isinstance(k, str) for k in obj):
        return {k: describe(v, f"{path}.{k}") for k, v in obj.items()}
    if isinstance(obj, type) or inspect.isroutine(obj):
        return _reference(obj, path)
    if dataclasses.is_dataclass(obj):
        given = {f.name: getattr(obj, f.name) for f in dataclasses.fields(obj) if f.init}
        kind = type(obj).__name__ if type(obj) in PLACES else _reference(type(obj), path)
        return {"kind": kind, **_changed(given, _defaults(type(obj)), path)}
    raise ValueError(
        f"{path} is {short(obj)}, which cannot be written to a recipe, expected a number, string, sequence, mapping, "
        "dataclass, or a function or class that can be imported"
    )


def _partition(partition: Partition, path: str) -> dict[str, Any]:
    """A partition's name is the call that made it, as long as the rule is ours."""
    if getattr(partition.rule, "__module__", "") != partitions.__name__:
        raise ValueError(
            f"{path} is a partition with a rule of its own, {short(partition.name)}, which cannot be written to a recipe, "
            "expected one of pt.partitions"
        )
    try:
        call: Any = ast.parse(partition.name, mode="eval").body
        kind, made = call.func.id, KINDS["partition"][call.func.id]
        args = [ast.literal_eval(a) for a in call.args]
        keywords = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
        given = inspect.signature(made).bind(*args, **keywords).arguments
    except (AttributeError, KeyError, SyntaxError, TypeError, ValueError):
        raise ValueError(f"{path} is {short(partition)}, whose values cannot be written to a recipe") from None
    if made is partitions.from_labels:  # its name says how many there are
        (n,) = given["labels"]
        if n > LABELS:
            raise ValueError(f"{path}.labels are {n:,} numbers, expected at most {LABELS:,} in a recipe")
        given["labels"] = partition.rule(types.SimpleNamespace(dim=n)).labels.tolist()
    return {"kind": kind, **_changed(given, _defaults(made), path)}


def _defaults(made: Callable[..., Any]) -> dict[str, Any]:
    signature = inspect.signature(made).parameters
    fields = dataclasses.fields(made) if isinstance(made, type) and dataclasses.is_dataclass(made) else ()
    made_anew = {f.name: f.default_factory() for f in fields if f.default_factory is not dataclasses.MISSING}
    return {n: p.default for n, p in signature.items() if p.default is not p.empty} | made_anew


def _changed(given: Mapping[str, Any], defaults: Mapping[str, Any], path: str) -> dict[str, Any]:
    """What is not at its default."""
    changed = {n: v for n, v in given.items() if n not in defaults or not _same(v, defaults[n])}
    return {n: describe(v, f"{path}.{n}") for n, v in changed.items()}


def _same(a: Any, b: Any) -> bool:
    with contextlib.suppress(Exception):  # of what compares in ways of its own, as tensors do
        return a is b or bool(a == b)
    return False


def _reference(obj: Any, path: str) -> str:
    """package.module:name of a function or class, when that leads back to it."""
    reference = f"{getattr(obj, '__module__', None)}:{getattr(obj, '__qualname__', None)}"
    with contextlib.suppress(ValueError):
        if not reference.startswith("__main__:") and _find(reference, path) is obj:
            return reference
    raise ValueError(f"{path} is {reference!r}, expected one that can be imported from a module")
    return reference


def build(table: Any, path: str, expected: str | None = None) -> Any:
    """The object a table describes, `expected` in one of the places of KINDS (default: the last word of `path`)."""
    return _built(table, path, _kinds([expected or path.rpartition(".")[2]]))


def _built(table: Any, path: str, kinds: Kinds) -> Any:
    call = prepared(table, path, kinds)
    try:
        return call()
    except (TypeError, ValueError) as e:
        raise ValueError(f"{path}: {e}") from e


def _kinds(places: Sequence[str]) -> Kinds:
    """What can stand in these places, or, where none is known, anywhere, if its name says enough."""
    known = [KINDS[p] for p in places if p in KINDS] or list(KINDS.values())
    count = Counter(name for kinds in known for name in kinds)
    return {name: made for kinds in known for name, made in kinds.items() if count[name] == 1}


def prepared(table: Any, path: str, kinds: Kinds) -> partial[Any]:
    """The call that a table describes, its settings checked by name and type."""
    if not isinstance(table, Mapping) or "kind" not in table:
        came = f"{path} has no kind" if isinstance(table, Mapping) else f"{path} is {table!r}"
        raise ValueError(f"{came}, expected a table whose kind is one of {listed(kinds)}")
    kind = table["kind"]
    if isinstance(kind, str) and ":" in kind:
        made = _find(kind, f"{path}.kind")
    elif isinstance(kind, str) and kind in kinds:
        made = kinds[kind]
    else:
        expected = f"one of {listed(kinds)} or 'package.module:name'{_close(kind, kinds)}"
        raise ValueError(f"{path}.kind is {short(kind)}, expected {expected}")
    return partial(made, **arguments(made, {k: v for k, v in table.items() if k != "kind"}, path, kind))


def arguments(
    made: Callable[..., Any],
    table: Mapping[str, Any],
    path: str,
    who: str,
    hints: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
) -> dict[str, Any]:
    """Keyword arguments of `made` from a table: the names it has, values of the types it says."""
    parameters = [p for n, p in inspect.signature(made).parameters.items() if n not in without]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    types_of = {**_hints(made), **(hints or {})}
    for key in table:
        if key not in named and not takes_all:
            near = nearest(key, named) or (f"one of {listed(named)}" if named else "none")
            raise ValueError(f"{path}.{key} is no setting of {who}, expected {near}")
    for name, p in named.items():
        if p.default is p.empty and name not in table:
            raise ValueError(f"{path} has no {name}, expected {_words(_options(types_of.get(name, Any)))}")
    return {k: fit(v, types_of.get(k, Any), f"{path}.{k}") for k, v in table.items()}


def fit(value: Any, hint: Any, path: str) -> Any:
    """A value of a table as what a type hint wants: arrays become tuples, tables objects, "none" None."""
    options = _options(hint)
    if value == "none" and NoneType in options:
        return None
    words = {_word(o): o for o in options if o is not NoneType and _word(o)}
    anything = not words  # a hint that says nothing to us: the object's own checks speak
    if isinstance(value, (list, tuple)):
        if anything or "an array" in words:
            items = {*typing.get_args(words.get("an array"))} - {...}
            item = items.pop() if len(items) == 1 else Any
            return tuple(fit(v, item, f"{path}[{i}]") for i, v in enumerate(value))
    elif isinstance(value, Mapping):
        places = [PLACES[o] for o in words.values() if o in PLACES]
        if (places or anything) and ("kind" in value or not (anything or "a table" in words)):
            return _built(value, path, _kinds(places))
        if anything or "a table" in words:
            item = (*typing.get_args(words.get("a table")), Any, Any)[1]
            return {k: fit(v, item, f"{path}.{k}") for k, v in value.items()}
    elif anything or _holds(value, options):
        return value
    elif isinstance(value, str) and REFERENCED in words:
        return _find(value, path)
    raise ValueError(f"{path} is {short(value)}, expected {_words(options)}")


def _holds(value: Any, options: Sequence[Any]) -> bool:
    choices = [a for o in options if typing.get_origin(o) is Literal for a in typing.get_args(o)]
    number = type(value) is int and float in options
    return number or type(value) in options or any(type(a) is type(value) and a == value for a in choices)


def _find(reference: str, path: str) -> Callable[..., Any]:
    """What package.module:name names."""
    came = f"{path} is {reference!r}, expected"
    if not REFERENCE.fullmatch(reference):
        raise ValueError(f"{came} 'package.module:name'")
    module, _, name = reference.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as e:
        raise ValueError(f"{came} a module that can be imported ({e})") from e
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{came} a name of {module}{_close(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{came} a class or function, which a {type(found).__name__} is not")
    return found


WORDS = {float: "a number", int: "a whole number", str: "a string", bool: "true or false", NoneType: "'none'"}
REFERENCED = "'package.module:name'"


def _hints(made: Callable[..., Any]) -> dict[str, Any]:
    """Type hints, as far as they can be resolved."""
    try:
        return typing.get_type_hints(vars(made).get("__init__", made) if isinstance(made, type) else made)
    except (AttributeError, NameError, TypeError):
        return {}


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _word(option: Any) -> str | None:
    """What a type is called in a message; None where a table cannot tell."""
    origin = typing.get_origin(option) or option
    if origin is Literal:
        return "a choice"
    if origin in (tuple, list, Sequence, Iterable):
        return "an array"
    if origin in (dict, Mapping):
        return "a table"
    if origin is Callable:
        return REFERENCED
    return WORDS.get(option) or (f"a {PLACES[option]}" if option in PLACES else None)


def _words(options: Sequence[Any]) -> str:
    words = [", ".join(map(repr, typing.get_args(o))) if _word(o) == "a choice" else _word(o) for o in options]
    return " or ".join(dict.fromkeys(w for w in words if w)) or "one"


def nearest(name: Any, names: Iterable[str]) -> str | None:
    """The name that was probably meant."""
    return next(iter(difflib.get_close_matches(str(name), list(names), n=1)), None)


def _close(name: Any, names: Iterable[str]) -> str:
    return f" (nearest: {near!r})" if (near := nearest(name, names)) else ""


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
