"""Objects to tables and back, and what is said of tables that describe nothing."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import partita as pt
from partita.runs.describe import KINDS, LABELS, build, describe
from partita.structure import masks, partitions
from partita.target import FromFunction

SPACE = pt.ParameterSpace.of_module(pt.models.mlp(3, (4,), 2))  # 26 coordinates


def log_prob(output, y):
    return -((output - y) ** 2).sum(1)


@dataclass(frozen=True)
class Doubled:
    """A sampler of the user's: what it holds is described with it."""

    inner: pt.SGLD
    mask: masks.Mask = field(default_factory=lambda: masks.Gaussian(1, 0.5))
    widths: tuple[int, ...] = (1, 2)
    limit: int | None = 3
    activation: Callable[[], Any] = nn.ReLU
    extra: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Holder:
    held: Any = None


# every kind of KINDS, with defaults and without: a new one must come here
OBJECTS: dict[str, list[Any]] = {
    "sampler": [
        pt.SGLD(1e-4),
        pt.SGLD(pt.schedules.Cosine(1e-3, 1e-4)),
        pt.PSGLD(2e-3),
        pt.PSGLD(2, beta=0.9, adapt="always"),
        pt.SGHMC(0.01),
        pt.SGHMC(pt.schedules.Constant(1e-3), friction=5, noise=2.5, adapt="burn_in", beta=0.5),
    ],
    "schedule": [
        pt.schedules.Constant(1e-3),
        pt.schedules.Polynomial(1e-2),
        pt.schedules.Polynomial(1e-2, 10, 0.55),
        pt.schedules.Cosine(1e-3, 1e-22),
        pt.schedules.Cyclical(1e-3, 4, 1e-5),
    ],
    "structure": [
        pt.Joint(),
        pt.Structured(partitions.by_layer()),
        pt.Structured(partitions.each(), masks.Bernoulli(0.3, 2), pt.Window(8, every=3), past=2, share="split"),
        pt.Structured(partitions.by_name({"*.bias": "b", "*": 3}), masks.Gaussian(), pt.Ensemble(size=2)),
    ],
    "partition": [
        partitions.joint(),
        partitions.by_layer(),
        partitions.by_neuron(),
        partitions.by_neuron(side="in"),
        partitions.random(3),
        partitions.random(4, seed=7),
        partitions.cyclic(5),
        partitions.each(),
        partitions.by_name({"0.*": "first", "*.bias": "it's", "*": 'a "b"'}),
        partitions.from_labels([0, 1] * 13),
        partitions.from_labels(torch.arange(26) % 3),
    ],
    "mask": [
        *(masks.OneGroup(), masks.OneGroup(3), masks.Bernoulli(), masks.Bernoulli(0.25, 2, nonzero=True)),
        *(masks.Stratified(), masks.Stratified(3), masks.Uniform(), masks.Uniform(2, "square"), masks.Beta()),
        *(masks.Beta(1, 3, 2, "square"), masks.Gaussian(), masks.Gaussian(0, 1, 2, "square")),
    ],
    "history": [
        *(pt.Window(), pt.Window(8, 2, "drop", 5, "bfloat16", True), pt.Reservoir(), pt.Reservoir(9, burn_in="keep")),
        *(pt.Ensemble(), pt.Ensemble(4, warm_up=10)),
    ],
    "likelihood": [
        *(pt.Categorical(), pt.Categorical(ignore=0), pt.Bernoulli(), pt.Gaussian(), pt.Gaussian(0.5)),
        *(pt.Gaussian(log_scale_loc=-2, log_scale_sd=0.3), FromFunction(log_prob)),
    ],
    "prior": [
        *(
            pt.Normal(),
            pt.Normal(0.3, loc="module"),
            pt.Laplace(),
            pt.Laplace(2, 1.5),
            pt.StudentT(),
            pt.StudentT(5, 2),
        ),
        *(pt.Normal(pt.FanIn()), pt.Normal({"*.weight": pt.FanIn(2.0), "0.bias": 0.1, "*": pt.FanIn()})),
    ],
    "scale": [pt.FanIn(), pt.FanIn(0.5)],
    "augment": [pt.data.CropFlip(), pt.data.CropFlip(2, flip=False)],
}
CASES = [(place, obj) for place, objects in OBJECTS.items() for obj in objects]


def same(a, b):
    """Equality; a partition's rule is a new function each time, so what counts is what it does."""
    if isinstance(a, partitions.Partition):
        return repr(a) == repr(b) and torch.equal(a.groups(SPACE).labels, b.groups(SPACE).labels)
    if isinstance(a, pt.Structured):
        parts = [(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)]
        return type(a) is type(b) and all(same(x, y) for x, y in parts)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("place, obj", CASES, ids=[f"{p} {type(o).__name__} {i}" for i, (p, o) in enumerate(CASES)])
def test_what_is_described_can_be_built(place, obj):
    table = describe(obj)
    assert json.loads(json.dumps(table)) == table  # nothing but plain values
    again = build(table, place)
    assert same(again, obj)
    assert describe(again) == table


def test_every_kind_is_tested():
    made = {place: {describe(obj)["kind"] for obj in objects} for place, objects in OBJECTS.items()}
    assert made == {place: set(kinds) for place, kinds in KINDS.items()}


def test_every_public_part_has_a_kind():
    """Of the places where parts are added: a new one enters KINDS, too."""

    def parts(module, wanted):
        found = vars(module).items()
        return {
            n
            for n, f in found
            if not n.startswith("_") and getattr(f, "__module__", "") == module.__name__ and wanted(f)
        }

    def has(*methods):
        return lambda f: dataclasses.is_dataclass(f) and all(hasattr(f, m) for m in methods)

    from partita.structure import history
    from partita.target import likelihoods, priors

    def cuts(f):
        return inspect.isfunction(f) and inspect.signature(f).return_annotation == "Partition"

    assert parts(masks, has("sample", "weight")) == set(KINDS["mask"])
    assert parts(history, has("read")) == set(KINDS["history"])
    assert parts(partitions, cuts) == set(KINDS["partition"])
    assert parts(pt.schedules, has("largest")) == set(KINDS["schedule"])
    assert parts(likelihoods, has("log_prob")) == set(KINDS["likelihood"])
    assert parts(priors, has("bind")) == set(KINDS["prior"])
    assert {n for n in pt.__all__ if hasattr(getattr(pt, n), "heat")} == set(KINDS["sampler"])


def test_only_what_differs_from_the_defaults_is_said():
    assert describe(pt.PSGLD(2e-3, beta=0.99)) == {"kind": "PSGLD", "step_size": 2e-3}
    assert describe(pt.Structured(partitions.random(3, seed=0), pt.masks.OneGroup())) == {
        "kind": "Structured",
        "partition": {"kind": "random", "M": 3},
    }
    assert describe(pt.Ensemble()) == {"kind": "Ensemble"}


@pytest.mark.parametrize(
    "obj",
    [
        Doubled(pt.SGLD(1.0)),
        Doubled(pt.SGLD(1), masks.Bernoulli(), (), None, nn.Tanh, {"a": 1}),
        Doubled(pt.SGLD(1), masks.Gaussian(2.0)),
        Holder(pt.Normal(pt.FanIn(3))),
        Holder((1, "b", pt.Window(3))),
    ],
)
def test_classes_of_others(obj):
    table = describe(obj)
    assert table["kind"] == f"{__name__}:{type(obj).__name__}"
    assert build(table, "sampler") == obj


def test_plain_values_and_functions():
    assert describe((1, True, "a", torch.nn.ReLU, log_prob)) == [
        *(1, True, "a", "torch.nn.modules.activation:ReLU"),
        f"{__name__}:log_prob",
    ]


def local(output, y):
    return output


class Undescribed:
    pass


UNWRITTEN = {
    "lambda": (
        FromFunction(lambda o, y: o),
        r"FromFunction\.function is '.*<lambda>', expected one that can be imported",
    ),
    "method": (FromFunction(pt.SGLD(1).heat), r"FromFunction\.function is '.*', expected one that can be imported"),
    "tensor": (Holder(torch.zeros(3, 4)), r"Holder\.held is .*cannot be written to a recipe, expected a number"),
    "deep": (Holder({"a": [1, Undescribed()]}), r"Holder\.held\.a\[1\] is .*cannot be written"),
    "no dataclass": (Undescribed(), r"Undescribed is .*cannot be written to a recipe"),
    "rule": (
        pt.Structured(partitions.Partition("mine", lambda s: partitions.each().groups(s))),
        r"Structured\.partition is a partition with a rule of its own, 'mine', .*expected one of pt\.partitions",
    ),
    "labels": (
        partitions.from_labels([0] * (LABELS + 1)),
        r"Partition\.labels are 10,001 numbers, expected at most 10,000",
    ),
    "label": (partitions.by_name({"*": Undescribed()}), r"Partition is by_name\(.*\), whose values cannot be written"),
    "name": (partitions.Partition("each", partitions.each().rule), r"whose values cannot be written"),
}


@pytest.mark.parametrize("obj, message", UNWRITTEN.values(), ids=UNWRITTEN)
def test_what_cannot_be_written(obj, message):
    with pytest.raises(ValueError, match=message) as e:
        describe(obj)
    assert "\n" not in str(e.value)


def psgld(**settings):
    return {"kind": "PSGLD", "step_size": 1e-3, **settings}


def structured(**settings):
    return {"kind": "Structured", "partition": {"kind": "each"}, **settings}


REFUSED = {
    "setting": (
        "sampler",
        {"kind": "PSGLD", "step_sise": 1},
        r"^sampler\.step_sise is no setting of PSGLD, expected step_size$",
    ),
    "far setting": (
        "sampler",
        psgld(xyz=1),
        r"^sampler\.xyz is no setting of PSGLD, expected one of 'adapt', 'beta', 'step_size'$",
    ),
    "no settings": (
        "partition",
        {"kind": "each", "seed": 1},
        r"^partition\.seed is no setting of each, expected none$",
    ),
    "kind": (
        "sampler",
        {"kind": "PSGDL"},
        r"^sampler\.kind is 'PSGDL', expected one of 'PSGLD', 'SGHMC', 'SGLD' or .* \(nearest: 'PSGLD'\)$",
    ),
    "kind of another place": (
        "mask",
        {"kind": "PSGLD"},
        r"^mask\.kind is 'PSGLD', expected one of 'Bernoulli', 'Beta'",
    ),
    "kind no string": ("sampler", {"kind": 3}, r"^sampler\.kind is 3, expected one of 'PSGLD'"),
    "no kind": (
        "sampler",
        {},
        r"^sampler has no kind, expected a table whose kind is one of 'PSGLD', 'SGHMC', 'SGLD'$",
    ),
    "no table": ("sampler", "PSGLD", r"^sampler is 'PSGLD', expected a table whose kind is one of"),
    "string": ("sampler", psgld(step_size="big"), r"^sampler\.step_size is 'big', expected a number or a schedule$"),
    "bool": ("sampler", psgld(beta=True), r"^sampler\.beta is True, expected a number$"),
    "bool for int": ("mask", {"kind": "Bernoulli", "count": True}, r"^mask\.count is True, expected a whole number$"),
    "float for int": (
        "mask",
        {"kind": "OneGroup", "count": 1.0},
        r"^mask\.count is 1\.0, expected a whole number or 'none'$",
    ),
    "int for bool": ("augment", {"kind": "CropFlip", "flip": 1}, r"^augment\.flip is 1, expected true or false$"),
    "array": ("sampler", psgld(step_size=[1]), r"^sampler\.step_size is \[1\], expected a number or a schedule$"),
    "table": ("sampler", psgld(beta={"a": 1}), r"^sampler\.beta is \{'a': 1\}, expected a number$"),
    "inf": ("sampler", psgld(step_size=math.inf), r"^sampler: PSGLD's step_size is inf, expected a number above 0"),
    "refused": ("sampler", psgld(beta=2), r"^sampler: PSGLD got beta=2, expected a number in \[0, 1\)$"),
    "missing": ("sampler", {"kind": "PSGLD"}, r"^sampler has no step_size, expected a number or a schedule$"),
    "nested kind": (
        "structure",
        structured(mask={"kind": "Bernouli"}),
        r"^structure\.mask\.kind is 'Bernouli', .*\(nearest: 'Bernoulli'\)$",
    ),
    "nested value": (
        "structure",
        structured(mask={"kind": "Bernoulli", "rho": 2}),
        r"^structure\.mask: Bernoulli got rho=2",
    ),
    "nested type": (
        "structure",
        structured(history={"kind": "Window", "R": "a"}),
        r"^structure\.history\.R is 'a', expected a w",
    ),
    "schedule": (
        "sampler",
        psgld(step_size={"kind": "Cosine", "start": 1}),
        r"^sampler\.step_size has no end, expected a number$",
    ),
    "scale": (
        "prior",
        {"kind": "Normal", "scale": {"*": "x"}},
        r"^prior\.scale\.\* is 'x', expected a number or a scale$",
    ),
    "partition": ("partition", {"kind": "random"}, r"^partition has no M, expected a whole number$"),
    "labels": (
        "partition",
        {"kind": "from_labels", "labels": [0, "a"]},
        r"^partition\.labels\[1\] is 'a', expected a whole",
    ),
    "module": (
        "sampler",
        {"kind": "no.such:Thing"},
        r"^sampler\.kind is 'no\.such:Thing', expected a module that can be imp",
    ),
    "in a module": (
        "sampler",
        {"kind": "math:sqr"},
        r"^sampler\.kind is 'math:sqr', expected a name of math \(nearest: 'sqrt'\)$",
    ),
    "no call": ("sampler", {"kind": "math:pi"}, r"^sampler\.kind is 'math:pi', expected a class or function"),
    "code": (
        "sampler",
        {"kind": "os:system('true')"},
        r"^sampler\.kind is \"os:.*\", expected 'package\.module:name'$",
    ),
    "relative": ("sampler", {"kind": ".a:b"}, r"expected 'package\.module:name'$"),
    "function": (
        "likelihood",
        {"kind": "FromFunction", "function": "log_prob"},
        r"^likelihood\.function is 'log_prob', expected 'package\.module:name'$",
    ),
    "of others": ("sampler", {"kind": f"{__name__}:Doubled", "inner": 3}, r"^sampler\.inner is 3, expected a sampler$"),
}


@pytest.mark.parametrize("path, table, message", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(path, table, message):
    with pytest.raises(ValueError, match=message) as e:
        build(table, path)
    assert "\n" not in str(e.value)


def test_the_path_says_what_is_expected_or_the_caller_does():
    assert build({"kind": "Gaussian"}, "structure.mask") == masks.Gaussian()
    assert build({"kind": "Gaussian"}, "here", "likelihood") == pt.Gaussian()
    assert build({"kind": "Window"}, "here") == pt.Window()
    with pytest.raises(ValueError, match=r"^here\.kind is 'Gaussian', expected one of"):  # a mask or a likelihood?
        build({"kind": "Gaussian"}, "here")


def test_numbers_stay_what_they_are():
    assert build({"kind": "Normal", "scale": 2}, "prior") == pt.Normal(2)
    assert build({"kind": "OneGroup", "count": "none"}, "mask") == masks.OneGroup(None)
