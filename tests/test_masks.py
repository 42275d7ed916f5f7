"""Mask laws: shapes, exact distributions and moments, weights, refusals."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from partita.structure import masks
from partita.structure.masks import Bernoulli, Beta, Gaussian, OneGroup, Stratified, Uniform

CPU = torch.device("cpu")
M = 4
Z = 5.0  # standard errors
SMALL = 1e-4  # p-values; seeds are fixed, so a test that passes once always does


@dataclass(frozen=True)
class Law:
    """What a law with M = 4 groups must be. own, cross: w Σ_k E r_i² and w Σ_k E r_i r_j, the pull on own and others."""

    mask: Any
    K: int
    mean: float
    square: float
    w: float
    own: float
    cross: float
    dtype: torch.dtype = torch.bool
    fixed: bool = False


SOME = 1 - 0.7**M
REAL = torch.float32
LAWS = {
    "S": Law(OneGroup(), 4, 1 / 4, 1 / 4, 1, 1, 0, fixed=True),
    "S 3 of 4": Law(OneGroup(3), 3, 1 / 4, 1 / 4, 4 / 3, 1, 0),
    "Bernoulli": Law(Bernoulli(0.3), 1, 0.3, 0.3, 1 / 0.3, 1, 0.3),
    "Bernoulli K=3": Law(Bernoulli(0.3, count=3), 3, 0.3, 0.3, 1 / 0.9, 1, 0.3),
    "Bernoulli 1": Law(Bernoulli(1, count=2), 2, 1, 1, 1 / 2, 1, 1, fixed=True),
    "nonzero": Law(Bernoulli(0.3, 2, nonzero=True), 2, 0.3 / SOME, 0.3 / SOME, SOME / 0.6, 1, 0.3),
    "nonzero 1": Law(Bernoulli(1.0, 2, nonzero=True), 2, 1, 1, 1 / 2, 1, 1, fixed=True),
    "Stratified": Law(Stratified(3), 3, 1 / 3, 1 / 3, 1, 1, 1 / 3),
    "Uniform": Law(Uniform(2), 2, 1 / 2, 1 / 3, 1, 2 / 3, 1 / 2, REAL),
    "Uniform square": Law(Uniform(2, "square"), 2, 1 / 2, 1 / 3, 3 / 2, 1, 3 / 4, REAL),
    "Beta(.5, .5)": Law(Beta(), 1, 1 / 2, 3 / 8, 2, 3 / 4, 1 / 2, REAL),
    "Beta(.01, .01)": Law(Beta(0.01, 0.01), 1, 0.5, 1.01 / 2.04, 2, 1.01 / 1.02, 1 / 2, REAL),
    "Beta(1, 3) square": Law(Beta(1, 3, 2, "square"), 2, 1 / 4, 1 / 10, 5, 1, 5 / 8, REAL),
    "N(1, .5²)": Law(Gaussian(1, 0.5, 2), 2, 1, 1.25, 1 / 2, 1.25, 1, REAL),
    "N(1, 0)": Law(Gaussian(1.0, 0.0), 1, 1, 1, 1, 1, 1, REAL, fixed=True),
    "N(1, .5²) square": Law(Gaussian(1, 0.5, 2, "square"), 2, 1, 1.25, 1 / 2.5, 1, 1 / 1.25, REAL),
    "N(0, 1) square": Law(Gaussian(0, 1, 2, "square"), 2, 0, 1, 1 / 2, 1, 0, REAL),
    "N(-1, 1)": Law(Gaussian(-1, 1), 1, -1, 2, -1, -2, -1, REAL),
}
each_law = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
RANDOM = {name: law for name, law in LAWS.items() if not law.fixed}
random_law = pytest.mark.parametrize("law", RANDOM.values(), ids=RANDOM)


def draw(law: Law, C: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return law.mask.sample(C, M, CPU)


def near(samples: Tensor, exact: float | Tensor) -> None:
    """The mean over the first axis is `exact`, within Z standard errors."""
    x = samples.double()
    error = (x.mean(0) - exact).abs()
    assert (error <= Z * x.std(0) / math.sqrt(len(x)) + 1e-9).all(), error / (x.std(0) / math.sqrt(len(x)))


# -------------------------------------------------------------------------------------------------- shapes and moments
@each_law
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shape_dtype_device(law: Law, device: str) -> None:
    r = law.mask.sample(7, M, torch.device(device))
    assert r.shape == (7, law.K, M)
    assert r.dtype == law.dtype
    assert r.device.type == device


def test_s_over_many_groups_has_its_shape_without_its_memory() -> None:
    assert OneGroup().sample(1, 1_000_000, torch.device("meta")).shape == (1, 1_000_000, 1_000_000)


@each_law
def test_mean_and_mean_square(law: Law) -> None:
    r = draw(law, 20_000).double()
    if law.mask == OneGroup():
        r = r.mean(1)  # its rows are fixed
    near(r, law.mean)
    near(r * r if law.mask != OneGroup() else r, law.square)


@each_law
def test_weight(law: Law) -> None:
    assert law.mask.weight(M) == pytest.approx(law.w, rel=1e-12)
    square = getattr(law.mask, "normalise", "mean") == "square"
    assert law.mask.weight(M) * law.K * (law.square if square else law.mean) == pytest.approx(1, rel=1e-12)


@each_law
def test_weighted_second_moments(law: Law) -> None:
    """w Σ_k r_k r_k' is what a Gaussian's drift is made of: 1 on its diagonal for every law that keeps T = 1."""
    r = draw(law, 20_000).double()
    pull = law.mask.weight(M) * torch.einsum("cki,ckj->cij", r, r)
    near(pull, law.cross + (law.own - law.cross) * torch.eye(M, dtype=torch.float64))


@random_law
def test_chains_are_independent(law: Law) -> None:
    r = draw(law, 40_000).double().flatten(1)
    a, b = r[0::2], r[1::2]  # neighbours in one draw
    a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
    assert (a.T @ b / math.sqrt(len(a))).abs().max() < Z


@pytest.mark.parametrize("name", ["Bernoulli K=3", "nonzero", "Uniform", "Beta(1, 3) square", "N(1, .5²)"])
def test_masks_of_a_step_are_independent(name: str) -> None:
    r = draw(LAWS[name], 20_000).double()
    r = (r - r.mean(0)) / r.std(0)
    for k, l in itertools.combinations(range(r.shape[1]), 2):
        assert (r[:, k].T @ r[:, l] / math.sqrt(len(r))).abs().max() < Z


@random_law
def test_draws_follow_torchs_seed(law: Law) -> None:
    assert torch.equal(draw(law, 50, seed=3), draw(law, 50, seed=3))
    assert not torch.equal(draw(law, 50, seed=3), draw(law, 50, seed=4))


# --------------------------------------------------------------------------------------------------- S and stratified
def test_s_is_the_identity_for_every_chain() -> None:
    assert torch.equal(OneGroup().sample(3, 5, CPU), torch.eye(5, dtype=torch.bool).expand(3, 5, 5))


def test_s_with_a_count_takes_groups_without_replacement_and_every_set_alike() -> None:
    torch.manual_seed(0)
    r = OneGroup(2).sample(30_000, 5, CPU)
    assert (r.sum(2) == 1).all()
    assert (r.sum(1) <= 1).all()  # distinct
    sets = (r.any(1) * 2 ** torch.arange(5)).sum(1)
    counts = torch.bincount(sets)[torch.bincount(sets) > 0]
    assert len(counts) == 10
    assert stats.chisquare(counts.numpy()).pvalue > SMALL
    every = OneGroup(5).sample(10, 5, CPU)
    assert (every.sum(1) == 1).all()
    assert OneGroup(5).weight(5) == 1


@pytest.mark.parametrize("K", [1, 2, 5])
def test_stratified_gives_each_group_to_exactly_one_mask(K: int) -> None:
    torch.manual_seed(K)
    r = Stratified(K).sample(20_000, 3, CPU)
    assert (r.sum(1) == 1).all()
    owner = r.int().argmax(1)
    code = (owner * K ** torch.arange(3)).sum(1)  # which mask owns each of the three groups: all K³ alike
    assert K == 1 or stats.chisquare(torch.bincount(code, minlength=K**3).numpy()).pvalue > SMALL


# ----------------------------------------------------------------------------------------------- conditional Bernoulli
@pytest.mark.parametrize("rho", [0.02, 0.3, 0.5, 0.95])
def test_nonzero_bernoulli_has_the_exact_joint_distribution(rho: float) -> None:
    torch.manual_seed(1)
    n, outcomes = 40_000, list(itertools.product((0, 1), repeat=3))[1:]
    p = np.array([rho ** sum(o) * (1 - rho) ** (3 - sum(o)) for o in outcomes])
    p /= p.sum()
    r = Bernoulli(rho, count=2, nonzero=True).sample(n, 3, CPU)
    code = (r * torch.tensor([4, 2, 1])).sum(2)
    assert (code > 0).all()
    pairs = torch.bincount(code[:, 0] * 8 + code[:, 1], minlength=64).view(8, 8)[1:, 1:].numpy()
    for counts, expected in ((pairs.sum(0), n * p), (pairs.sum(1), n * p), (pairs, n * np.outer(p, p))):
        counts, expected = counts.ravel(), expected.ravel()
        rare = expected < 5
        if rare.any():
            counts = np.append(counts[~rare], counts[rare].sum())
            expected = np.append(expected[~rare], expected[rare].sum())
        assert stats.chisquare(counts, expected).pvalue > SMALL


@pytest.mark.parametrize("rho", [1e-9, 1e-5, 1e-4])
def test_nonzero_bernoulli_over_42200_groups(rho: float) -> None:
    torch.manual_seed(2)
    groups, law = 42_200, Bernoulli(rho, nonzero=True)
    r = torch.cat([law.sample(100, groups, CPU) for _ in range(6)])[:, 0]
    kept = r.sum(1)
    assert kept.min() >= 1
    assert 1 / law.weight(groups) == pytest.approx(rho / -math.expm1(groups * math.log1p(-rho)), rel=1e-9)
    if rho == 1e-9:
        assert (kept == 1).all()
    else:
        near(kept, groups / law.weight(groups))
    parts = r.view(len(r), 10, -1).sum((0, 2)).double()  # no part of the groups is favoured
    assert ((parts - parts.mean()).abs() < Z * parts.mean().sqrt()).all()


def test_a_tiny_rho_is_not_rounded_to_the_grid_of_float32_draws() -> None:
    torch.manual_seed(3)
    assert not any(Bernoulli(1e-12).sample(10, 1_000_000, CPU).any() for _ in range(10))  # 6 expected from 2^-24


@pytest.mark.parametrize("rho", [1e-12, 0.123, 0.5, 1.0])
def test_nonzero_bernoulli_of_one_group_is_the_joint_chain_exactly(rho: float) -> None:
    law = Bernoulli(rho, nonzero=True)
    assert law.weight(1) == 1.0
    assert law.sample(1000, 1, CPU).all()


# ---------------------------------------------------------------------------------------------------- continuous laws
@pytest.mark.parametrize("a, b", [(0.5, 0.5), (2.0, 3.0), (0.2, 4.0), (30.0, 1.0)])
def test_beta_follows_scipys(a: float, b: float) -> None:
    torch.manual_seed(4)
    r = Beta(a, b).sample(10_000, 2, CPU).flatten().double()
    assert stats.kstest(r.numpy(), stats.beta(a, b).cdf).pvalue > SMALL
    near(r, a / (a + b))


def test_beta_with_tiny_shapes_has_no_nan_and_the_right_law() -> None:
    torch.manual_seed(5)
    r = Beta(0.01, 0.01).sample(20_000, 2, CPU).flatten()
    assert ((r >= 0) & (r <= 1)).all()  # false for NaN
    grid = np.concatenate([10.0 ** np.arange(-35, 0), 1 - 10.0 ** np.arange(-6, 0)])  # within what float32 resolves
    empirical = np.searchsorted(np.sort(r.double().numpy()), grid, side="right") / len(r)
    assert np.abs(empirical - stats.beta(0.01, 0.01).cdf(grid)).max() < 1.95 / math.sqrt(len(r))
    assert ((Beta(1e-4, 1e-4).sample(10_000, 2, CPU) - 0.5).abs() <= 0.5).all()


def test_beta_survives_a_uniform_draw_of_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *shape, device: torch.zeros(shape, device=device))  # once in 2^24 draws
    assert Beta(0.01, 0.01).sample(100, 2, CPU).isfinite().all()


def test_uniform_and_gaussian_follow_scipys() -> None:
    torch.manual_seed(6)
    u, g = (law.sample(10_000, 2, CPU).flatten().double().numpy() for law in (Uniform(), Gaussian(0.3, 2.0)))
    assert stats.kstest(u, stats.uniform.cdf).pvalue > SMALL
    assert stats.kstest(g, stats.norm(0.3, 2.0).cdf).pvalue > SMALL


# ----------------------------------------------------------------------------------------------------------- refusals
BAD: list[tuple[Any, dict[str, Any], list[str]]] = [
    *[(Bernoulli, {"rho": v}, [f"rho={v!r}", "(0, 1]"]) for v in (0, 0.0, -0.1, 1.1, math.nan, math.inf, "a", None, True)],
    *[(law, {"count": v}, [f"count={v!r}", "at least 1"]) for v in (0, -1, 1.5, "2", True)
      for law in (OneGroup, Bernoulli, Stratified, Uniform, Beta, Gaussian)],
    *[(Beta, {"a": v}, [f"a={v!r}", "above 0"]) for v in (0, -1, math.nan, math.inf, "a")],
    *[(Beta, {"b": v}, [f"b={v!r}", "above 0"]) for v in (0, -1, math.nan)],
    *[(law, {"normalise": "sum"}, ["normalise='sum'", "'mean'", "'square'"]) for law in (Uniform, Beta, Gaussian)],
    (Gaussian, {"mean": 0}, ["E r = 0", "normalise='mean'", "use 'square'"]),
    (Gaussian, {"mean": 0, "sd": 0, "normalise": "square"}, ["mean=0, sd=0", "not both 0"]),
    *[(Gaussian, {"sd": v}, [f"sd={v!r}", ">= 0"]) for v in (-1, math.nan, math.inf, "a")],
    *[(Gaussian, {"mean": v}, [f"mean={v!r}"]) for v in (math.nan, math.inf, "a")],
]  # fmt: skip


@pytest.mark.parametrize("law, arguments, words", BAD, ids=lambda v: getattr(v, "__name__", str(v)))
def test_a_law_that_cannot_be_is_refused_in_one_line(law: Any, arguments: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as e:
        law(**arguments)
    said = str(e.value)
    assert "\n" not in said
    assert said.startswith(law.__name__)
    assert all(w in said for w in words), said


def test_more_masks_than_groups_are_refused_by_both_methods() -> None:
    for method in (lambda: OneGroup(4).weight(3), lambda: OneGroup(4).sample(2, 3, CPU)):
        with pytest.raises(ValueError, match="count=4, expected at most the number of groups, 3"):
            method()


def test_every_law_is_in_the_table() -> None:
    public = {v for v in vars(masks).values() if isinstance(v, type) and hasattr(v, "sample")} - {masks.Mask}
    assert public == {type(law.mask) for law in LAWS.values()}
