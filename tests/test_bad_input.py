"""Bad input: one clear line that names what came and what was expected, before any work is done.

Each row of the tables is a call that must fail with a ValueError whose message matches. Forward passes of steps would show
in `WORK`, so a row that is refused late fails too.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

import partita as pt

N = 50
X = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
R = X[:, :1] - X[:, 1:2]  # regression targets
MODEL = pt.models.mlp(4, (5,), 3)
DENSITY = pt.Density(lambda t: -(t * t).sum(), dim=2)
WORK: list[int] = []


class Working(nn.Linear):
    """A module that counts its forward passes."""

    def forward(self, x):
        WORK.append(1)
        return super().forward(x)


def posterior(model=None, likelihood=None, **settings):
    return pt.Posterior(MODEL if model is None else model, likelihood or pt.Categorical(), **settings)


def sample(target=None, data=(X, Y), **settings):
    target = posterior(Working(4, 3)) if target is None else target
    return pt.sample(target, data, **{"sampler": pt.SGLD(1e-3), "steps": 10, "batch_size": 10, **settings})


def structured(partition=None, mask=None, history=None, **settings):
    return pt.Structured(
        partition or pt.partitions.each(), mask or pt.masks.OneGroup(), history or pt.Window(4), **settings
    )


def with_value(value, where):
    x, y = X.clone(), R.clone()
    (x if where == "x" else y)[17] = value
    return x, y


def split_devices():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[1].to("meta")
    return posterior(model)


def frozen():
    model = nn.Linear(4, 3)
    model.requires_grad_(False)
    return posterior(model)


def gaussian(y, output=1):
    return lambda: sample(posterior(nn.Linear(4, output), pt.Gaussian(0.5)), (X, y))


def bernoulli(y):
    return lambda: sample(posterior(nn.Linear(4, 2), pt.Bernoulli()), (X, y))


def labels(given):
    return lambda: sample(DENSITY, None, batch_size=None, structure=structured(pt.partitions.from_labels(given)))


TABLE = {
    # parameters
    "unknown parameter": (lambda: posterior(random="0.wieght"), r"no parameter matches '0.wieght'.* 0\.weight"),
    "unknown parameters": (
        lambda: posterior(random=["*.bias", "head.*"]),
        r"no parameter matches 'head\.\*'.* 0\.bias",
    ),
    "unknown prior pattern": (
        lambda: posterior(prior=pt.Normal({"1.*": 1.0})),
        r"no parameter matches '1\.\*'.* 0\.bias",
    ),
    "uncovered by the prior": (
        lambda: posterior(prior=pt.Normal({"0.*": 1.0})),
        r"no prior scale for .*'2\.weight'.*expected",
    ),
    "nothing random": (frozen, r"no random parameter: got a Linear with 2 parameters .* expected at least one"),
    "mixed devices of a model": (split_devices, r"mixed devices: .*\['cpu', 'meta'\], expected one"),
    "no module": (lambda: posterior("mlp"), r"model is a str, expected an nn\.Module"),
    "no prior": (lambda: posterior(prior=0.3), r"prior is 0\.3, expected pt\.Normal"),
    "prior scale": (lambda: posterior(prior=pt.Normal(-1.0)), r"is -1\.0, expected a number above 0"),
    "temperature": (lambda: posterior(temperature=0.0), r"temperature is 0\.0, expected a number above 0"),
    "likelihood_power": (
        lambda: posterior(likelihood_power="B"),
        r"likelihood_power is 'B', expected a number above 0",
    ),
    # partitions, masks, histories
    "labels too few": (labels([0]), r"from_labels got torch\.int64 of shape \(1,\), expected integers \[D\] = \[2\]"),
    "labels too many": (labels([0, 1, 1]), r"of shape \(3,\), expected integers \[D\] = \[2\]"),
    "labels with a gap": (labels([0, 2]), r"labels with gaps: \{0, 2\}, expected \{0, 1\}"),
    "labels from one": (labels([1, 2]), r"\{1, 2\}, expected \{0, 1\}"),
    "labels not whole": (labels([0.0, 1.0]), r"from_labels got torch\.float32 of shape \(2,\), expected integers"),
    "by_name leaves some out": (
        lambda: sample(structure=structured(pt.partitions.by_name({"weight": 0}))),
        r"parameters without a group \['bias'\].*got patterns \['weight'\], expected every",
    ),
    "more groups than parameters": (
        lambda: sample(structure=structured(pt.partitions.random(99))),
        r"M=99 groups does not fit: expected a whole number from 1 to 15",
    ),
    "rho 0": (lambda: pt.masks.Bernoulli(0.0), r"rho=0\.0, expected a number in \(0, 1\]"),
    "rho 1.1": (lambda: pt.masks.Bernoulli(1.1), r"rho=1\.1, expected a number in \(0, 1\]"),
    "rho NaN": (lambda: pt.masks.Bernoulli(math.nan), r"rho=nan, expected a number in \(0, 1\]"),
    "rho a string": (lambda: pt.masks.Bernoulli("0.5"), r"rho='0\.5', expected a number in \(0, 1\]"),
    "more masks than groups": (
        lambda: sample(structure=structured(pt.partitions.joint(), pt.masks.OneGroup(2))),
        r"count=2, expected at most the number of groups, 1",
    ),
    "history rows": (lambda: pt.Window(0), r"R=0, expected a whole number of at least 1"),
    "history dtype": (lambda: pt.Window(4, dtype="int8"), r"dtype='int8', expected one of"),
    "a history as a mask": (lambda: structured(mask=pt.Window(4)), r"mask=Window.*expected for example pt\.masks"),
    "one chain in an ensemble": (
        lambda: sample(structure=structured(history=pt.Ensemble()), chains=1, init="module"),
        r"Ensemble got chains=1, expected at least 2",
    ),
    "an ensemble from spread starts": (
        lambda: sample(structure=structured(history=pt.Ensemble())),
        r"init is fresh with an Ensemble history, expected 'module', 'map' or one point \[D\]",
    ),
    "an ensemble from many points": (
        lambda: sample(structure=structured(history=pt.Ensemble()), init=torch.zeros(4, 15)),
        r"init is \[4, 15\] with an Ensemble history, expected",
    ),
    # likelihoods and targets
    "a likelihood summed": (
        lambda: sample(posterior(likelihood=lambda o, y: -nn.functional.cross_entropy(o, y, reduction="sum"))),
        r"the likelihood returned shape \(\) for 50 rows, expected \[B\] = \[50\]: one log-probability \(not a loss",
    ),
    "a loss as likelihood": (
        lambda: posterior(likelihood=nn.CrossEntropyLoss(reduction="none")),
        r"likelihood is the loss CrossEntropyLoss\(\), expected log-probabilities: a loss has the other sign",
    ),
    "a likelihood that broadcasts": (
        lambda: sample(posterior(likelihood=lambda o, y: -((o[:, :1] - y) ** 2).sum(1))),
        r"gives other log-probabilities for rows alone .* expected the same: output \[50, 3\] and y \[50\] may broadcast",
    ),
    "a prior that is a number": (
        lambda: pt.Posterior(nn.Linear(4, 3), pt.Categorical(), 0),
        r"prior is 0, expected pt\.Normal",
    ),
    "data where the prior belongs": (
        lambda: pt.Posterior(nn.Linear(4, 3), pt.Categorical(), (X, Y)),
        r"prior is a tuple, expected pt\.Normal",
    ),
    "patterns without groups": (lambda: pt.partitions.by_name(["0.*"]), r"by_name got .*, expected \{pattern: group\}"),
    "labels that are words": (
        lambda: pt.partitions.from_labels(["a"]),
        r"from_labels got a list that is no tensor, expected whole numbers",
    ),
    "shapes without names": (lambda: pt.Density(lambda t: t.sum(), shapes=[2]), r"Density got shapes=\[2\], expected"),
    "spread chains of an Ensemble": (
        lambda: sample(
            structure=pt.Structured(pt.partitions.each(), history=pt.Ensemble()), init="module", spread=10.0
        ),
        r"spread is 10 with an Ensemble history, expected at most 0\.1, a tenth of the prior's scale",
    ),
    "a warm-up longer than burn-in": (
        lambda: sample(structure=pt.Structured(pt.partitions.each(), history=pt.Window(4, warm_up=9)), burn_in=5),
        r"warm_up is 9 with burn_in=5, expected fewer steps",
    ),
    "scores of a likelihood that is a function": (
        lambda: sample(posterior(likelihood=lambda o, y: o.log_softmax(-1)[:, 0]), monitor={"t": (X, Y)}),
        r"monitor 't' holds data to be scored, but a likelihood that is a function says nothing about scores: expected",
    ),
    "a split that does not divide": (
        lambda: sample(structure=pt.Structured(pt.partitions.each(), pt.masks.Bernoulli(0.5, count=3), share="split")),
        r"share='split' got batch_size=10 for 3 compositions a step, expected a multiple",
    ),
    "another share": (
        lambda: pt.Structured(pt.partitions.each(), share="all"),
        r"share='all', expected 'batch' or 'split'",
    ),
    "a likelihood per class": (
        lambda: sample(posterior(likelihood=lambda o, y: o.log_softmax(-1))),
        r"the likelihood returned shape \(50, 3\) for 50 rows, expected \[B\]",
    ),
    "no likelihood": (lambda: posterior(likelihood="softmax"), r"likelihood is 'softmax', expected pt\.Categorical"),
    "class too large": (lambda: sample(data=(X, Y + 2)), r"class indices from 2 to 3, expected 0 to 2"),
    "class negative": (lambda: sample(data=(X, Y - 1)), r"class indices from -1 to 0, expected 0 to 2"),
    "class too large at the end": (
        lambda: sample(data=(X, torch.cat([Y[:-1], torch.tensor([7])]))),
        r"class indices from 0 to 7, expected 0 to 2",
    ),
    "classes as numbers": (
        lambda: sample(data=(X, Y.float())),
        r"targets of dtype torch\.float32, expected integer class",
    ),
    "classes one-hot": (lambda: sample(data=(X, Y[:, None])), r"targets of shape \(50, 1\), expected targets \[N\]"),
    "regression targets flat": (gaussian(R[:, 0]), r"targets of shape \(50,\), expected \[N, 1\] to match .* \[B, 1\]"),
    "regression targets wide": (gaussian(torch.cat([R, R], 1)), r"shape \(50, 2\), expected \[N, 1\]"),
    "binary targets": (bernoulli(2.0 * torch.ones(N, 2)), r"targets from 2 to 2, expected 0 or 1"),
    "binary shape": (bernoulli(torch.ones(N)), r"shape \(50,\), expected \[N, 2\]"),
    "inputs of another width": (lambda: sample(data=(X[:, :3], Y)), r"the forward pass failed .*50x3 and 4x3"),
    "a network that sums rows": (
        lambda: sample(posterior(forward=lambda m, x: m(x).mean(0))),
        r"the network returned \(3,\) for 50 rows, expected \[50, \.\.\.\]",
    ),
    "a network of dicts": (
        lambda: sample(posterior(forward=lambda m, x: {"logits": m(x)})),
        r"the network returned a dict, expected a tensor",
    ),
    "a density of vectors": (
        lambda: pt.Density(lambda t: -t * t, dim=2),
        r"log_prob .*shape \(2,\) .*expected a scalar",
    ),
    "a density without size": (
        lambda: pt.Density(lambda t: -(t * t).sum()),
        r"dim=None and shapes=None, expected exactly one",
    ),
    # data
    "NaN in x": (
        lambda: sample(data=with_value(math.nan, "x")),
        r"x holds NaN or inf in 1 of 50 rows \(first: 17\), expected",
    ),
    "inf in x": (lambda: sample(data=with_value(math.inf, "x")), r"x holds NaN or inf in 1 of 50 rows \(first: 17\)"),
    "NaN in y": (gaussian(with_value(math.nan, "y")[1]), r"y holds NaN or inf in 1 of 50 rows \(first: 17\)"),
    "N < B": (lambda: sample(batch_size=51), r"batch_size is 51 with N = 50 data, expected at most N"),
    "unequal rows": (lambda: sample(data=(X, Y[1:])), r"\{'x': 50, 'y': 49\}, expected one N"),
    "mixed devices": (
        lambda: sample(data=(X.to("meta"), Y)),
        r"mixed devices: \{'x': 'meta', 'y': 'cpu'\}, expected one",
    ),
    "words": (lambda: sample(data=(np.array(["a"] * N), Y)), r"x .*expected"),
    # samplers
    "eps 0": (lambda: pt.SGLD(0.0), r"SGLD's step_size is 0\.0, expected a number above 0"),
    "eps negative": (lambda: pt.SGLD(-1e-3), r"SGLD's step_size is -0\.001, expected a number above 0"),
    "eps NaN": (lambda: pt.PSGLD(math.nan), r"PSGLD's step_size is nan, expected a number above 0"),
    "eps a string": (lambda: pt.PSGLD("1e-3"), r"PSGLD's step_size is '1e-3', expected a number"),
    "h 0": (lambda: pt.SGHMC(0.0), r"SGHMC's time_step is 0\.0, expected a number above 0"),
    "friction": (lambda: pt.SGHMC(1e-3, friction=0.0), r"friction=0\.0, expected a number above 0"),
    "SGHMC noise below 0": (lambda: sample(sampler=pt.SGHMC(1e-2, noise=-1.0)), r"SGHMC.*-1(\.0)?[;,] expected"),
    "SGHMC noise too large": (
        lambda: sample(sampler=pt.SGHMC(1e-2, noise=201.0)),
        r"V̂=201; expected V̂ in \[0, 2γT/h\]",
    ),
    "SGHMC overshoots": (lambda: sample(sampler=pt.SGHMC(0.6, friction=2.0)), r"= 1\.2, expected at most 1"),
    "pSGLD without burn-in": (
        lambda: sample(sampler=pt.PSGLD(1e-3), burn_in=0),
        r"PSGLD got burn_in=0, expected at least 1",
    ),
    "SGHMC without burn-in": (
        lambda: sample(sampler=pt.SGHMC(1e-3, adapt="burn_in"), burn_in=0),
        r"got burn_in=0, expected at least 1",
    ),
    "adapt": (lambda: pt.PSGLD(1e-3, adapt="never"), r"adapt='never', expected 'burn_in' or 'always'"),
}

# argument of pt.sample -> values it cannot have, and what the message says
WRONG = {
    "target": (
        (MODEL, r"the target is a Sequential, expected pt\.Posterior\(\.\.\.\) or pt\.Density"),
        (pt.Posterior, r"the target is the class Posterior, expected"),
        (None, r"the target is a NoneType, expected"),
    ),
    "data": (
        (None, r"data is None, expected \(x, y\)"),
        (X, r"data is a Tensor, expected a pair"),
        ("mnist", r"data is a str, expected a pair"),
        ((X, "y"), r"y is a str, expected"),
    ),
    "sampler": (
        (pt.SGLD, r"sampler is .*SGLD.*, expected for example pt\.SGLD\(step_size=1e-4\)"),
        ("sgld", r"sampler is a str, expected"),
        (None, r"sampler is a NoneType, expected"),
        (torch.optim.SGD([torch.zeros(1)], 0.1), r"sampler is a SGD, expected"),
    ),
    "structure": (
        ("joint", r"structure is 'joint', expected pt\.Joint\(\) or pt\.Structured"),
        (pt.Structured, r"structure is .*Structured.*, expected"),
        (pt.partitions.each(), r"structure is each\(\), expected pt\.Joint\(\) or pt\.Structured"),
        (0, r"structure is 0, expected"),
    ),
    "steps": tuple((v, r"steps is .*, expected a whole number of at least 1") for v in (0, -5, 10.0, "10", None, True)),
    "burn_in": tuple(
        (v, r"burn_in is .*, expected a whole number from 0 to steps - 1 = 9") for v in (-1, 10, 2.5, "2")
    ),
    "thin": tuple((v, r"thin is .*, expected a whole number from 1 to steps - burn_in = 8") for v in (0, 9, 1.5, "2")),
    "chains": tuple((v, r"chains is .*, expected a whole number of at least 1") for v in (0, 2.0, "4", None, True)),
    "batch_size": tuple(
        (v, r"batch_size is .*, expected a whole number of at least 1") for v in (0, -1, 8.0, "8", True)
    ),
    "init": (
        ("random", r"init is 'random', expected 'fresh', 'module', 'prior', 'map' or a tensor \[D\] or \[C, D\]"),
        (None, r"init is a NoneType, expected 'fresh'"),
        (object(), r"init is a object, expected 'fresh'"),
        (torch.zeros(14), r"init has shape \[14\], expected \[15\] or \[4, 15\]"),
        (torch.zeros(3, 15), r"init has shape \[3, 15\], expected"),
        (0.0, r"init has shape \[\], expected"),
        (torch.full((15,), math.nan), r"init holds NaN or inf, expected finite numbers"),
        (torch.zeros(15, dtype=torch.bool), r"init holds torch.bool numbers, expected real ones"),
    ),
    "spread": tuple((v, r"spread is .*, expected a number of at least 0") for v in (-1.0, "1", math.nan, math.inf)),
    "seed": tuple((v, r"seed is .*, expected a whole number in \[0, 2\^32\)") for v in (-1, 2**32, 1.0, None, True)),
    "monitor": (
        ("test", r"monitor is a str, expected \{name: \(x, y\)\} or functions of a Moment"),
        ((X, Y), r"monitor is a Tensor, expected \{name: \(x, y\)\}"),
        ({"test": X}, r"monitor 'test' is a Tensor, expected \(x, y\) or a function"),
        ({"test": "x"}, r"monitor 'test' is a str, expected"),
        ({"test": (X, Y[1:])}, r"monitor 'test': the data have unequal .* expected one N"),
        ({"test": (X, Y.float())}, r"monitor 'test': .*targets of dtype torch\.float32, expected integer"),
        ({"test": (X[:, 1:], Y)}, r"monitor 'test': the forward pass failed"),
        ({"test": with_value(math.nan, "x")}, r"monitor 'test': x holds NaN"),
    ),
    "monitor_every": tuple(
        (v, r"monitor_every is .*, expected a whole number of at least 1") for v in (0, -1, 2.0, "5")
    ),
    "device": tuple((v, r"device is .*, expected 'auto', 'cpu' or 'cuda'") for v in ("gpu", None, 1.5, "meta")),
    "engine": tuple(
        (v, r"engine is .*, expected one of \('auto', 'eager', 'compile', 'graph'\)") for v in ("fast", None, 1)
    ),
    "precision": tuple(
        (v, r"precision is .*, expected one of \('float32', 'tf32', 'bf16'\)") for v in ("fp8", None, 16)
    ),
    "augment": tuple((v, r"augment is .*, expected a function") for v in ("flip", 4, pt.data.CropFlip)),
    "keep": tuple((v, r"keep is .*, expected 'auto' or 'all'") for v in ("none", None, 10)),
    "memory": tuple((v, r"memory is .*, expected a whole number of bytes") for v in (0, 1e9, "1 GB")),
    "out": tuple((v, r"out is .*, expected a folder") for v in (3, True, ["runs"])),
    "rows": tuple((v, r"rows is .*, expected 'float32' or 'bfloat16'") for v in ("float16", 2, "float32")),
    "recipe": tuple((v, r"recipe is .*, expected the text of a recipe") for v in (3, {"run": {}})),
    "progress": tuple((v, r"progress is .*, expected True, False or None") for v in ("no", 3)),
}
ROWS = [(argument, value, match) for argument, rows in WRONG.items() for value, match in rows]


def one_line(call, match):
    WORK.clear()
    with pytest.raises(ValueError, match=match) as e:
        call()
    message = str(e.value)
    assert "expected" in message
    assert "\n" not in message
    assert len(message) < 400
    assert len(WORK) <= 2  # looking once at how data and network fit is not work yet


@pytest.mark.parametrize("call, match", TABLE.values(), ids=TABLE)
def test_bad_input_is_refused_in_one_line(call, match):
    one_line(call, match)


@pytest.mark.parametrize("argument, value, match", ROWS, ids=[f"{a}={v!r:.20}" for a, v, _ in ROWS])
def test_no_argument_of_sample_takes_just_anything(argument, value, match):
    settings = {argument: value}
    target, data = settings.pop("target", posterior(Working(4, 3))), settings.pop("data", (X, Y))
    arguments = {"sampler": pt.SGLD(1e-3), "steps": 10, "batch_size": 10, **settings}
    one_line(lambda: pt.sample(target, data, **arguments), match)


def test_every_argument_of_sample_is_in_the_table():
    import inspect

    assert set(inspect.signature(pt.sample).parameters) - set(WRONG) == set()


def test_good_input_is_taken():
    """The table proves nothing if all is refused."""
    assert sample().samples.shape == (4, 8, 15)
    assert WORK


def test_a_monitor_of_data_for_a_density_is_refused():
    one_line(
        lambda: sample(DENSITY, None, batch_size=None, monitor={"test": (X, Y)}),
        r"monitor 'test' holds data, but a Density makes no predictions: expected a function",
    )
