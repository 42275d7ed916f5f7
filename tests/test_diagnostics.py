"""Chain diagnostics against ArviZ, against loops that follow the formulas, and against known AR(1) answers."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from arviz_stats.base import array_stats
from scipy.signal import lfilter
from scipy.stats import norm, rankdata
from torch import Tensor

from partita.answers import diagnostics
from partita.answers.diagnostics import ess, iac, mcse, rhat
from partita.bench.diagnostics import arviz_values, autoregression, our_values

SIZES = [(2, 4), (2, 5), (2, 6), (3, 7), (2, 8), (2, 9), (4, 11), (3, 101), (4, 500), (2, 777)]
MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "rhat": rhat,
    "bulk": lambda x: ess(x, "bulk"),
    "tail": lambda x: ess(x, "tail"),
    "mean": lambda x: ess(x, "mean"),
    "iac": iac,
    "mcse": mcse,
}


def ar1(a: float, chains: int, draws: int, variables: int, seed: int = 0) -> Tensor:
    """Stationary AR(1), x_t = a x_{t-1} + e_t with e ~ N(0, 1): [C, S, V]."""
    noise = np.random.default_rng(seed).standard_normal((chains, draws, variables))
    noise[:, 0] /= math.sqrt(1 - a * a)
    return torch.from_numpy(lfilter([1.0], [1.0, -a], noise, axis=1))


def arviz(name: str, x: Tensor) -> np.ndarray:
    ary = x.double().numpy()
    if name in ("rhat", "mcse"):
        return getattr(array_stats, name)(ary, chain_axis=0, draw_axis=1)
    return array_stats.ess(ary, chain_axis=0, draw_axis=1, method=name, prob=(0.05, 0.95) if name == "tail" else None)


def inputs(chains: int, draws: int) -> Tensor:
    """[C, S, 60]: AR(1) from antithetic to sticky, some apart by chain, some with ties or of two values only."""
    plain = torch.cat([ar1(a, chains, draws, 12, seed) for seed, a in enumerate((-0.8, -0.3, 0.0, 0.6, 0.97))], dim=-1)
    plain[:, :, ::3] += torch.arange(chains)[:, None, None] * 0.5
    plain[:, :, 1::4] = plain[:, :, 1::4].round()
    plain[:, :, 2::8] = (plain[:, :, 2::8] > 0.3).double()
    return plain


@pytest.mark.parametrize("name", ["rhat", "bulk", "tail", "mean", "mcse"])
@pytest.mark.parametrize("chains, draws", SIZES)
def test_agrees_with_arviz(name: str, chains: int, draws: int) -> None:
    x = inputs(chains, draws)
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = arviz(name, x)
    found = MEASURES[name](x).numpy()
    stuck = expected > 1e6  # half chains that do not move: ArviZ finds 1e15 or so where the exact answer is infinite
    assert stuck.sum() < 30
    assert (found[stuck] == math.inf).all()
    np.testing.assert_allclose(found[~stuck], expected[~stuck], rtol=1e-9)


@pytest.mark.parametrize("draws", [8, 9, 60, 1001])  # ArviZ wants 4 in each half
def test_one_chain_is_its_two_halves(draws: int) -> None:
    x = ar1(0.7, 1, draws, 5)
    half = draws // 2

    def plain(values: np.ndarray) -> float:
        scores = norm.ppf((rankdata(values).reshape(2, half) - 0.375) / (2 * half + 0.25))
        return float(array_stats.rhat(scores, method="identity"))

    for column, found in zip(x[0].T.numpy(), rhat(x).tolist()):
        y = np.stack((column[:half], column[-half:]))
        assert found == pytest.approx(max(plain(y), plain(abs(y - np.median(y)))), rel=1e-9)
    for name in ("bulk", "tail", "mean", "mcse"):
        np.testing.assert_allclose(MEASURES[name](x).numpy(), arviz(name, x), rtol=1e-9)


def slow_iac(x: np.ndarray) -> float:
    """The docstring of `iac` as loops, x [C, S]: pooled autocorrelation, pairs while positive, never increasing."""
    chains, draws = x.shape
    x = x - x.mean(1, keepdims=True)
    gamma = np.array([sum(row[: draws - t] @ row[t:] for row in x) for t in range(draws)])
    rho = gamma / gamma[0]
    total, smallest, k = -1.0, math.inf, 0
    while k < (draws - 3) // 2 and rho[2 * k] + rho[2 * k + 1] > 0:
        smallest = min(smallest, rho[2 * k] + rho[2 * k + 1])
        total, k = total + 2 * smallest, k + 1
    total += rho[2 * k] if rho[2 * k] + rho[2 * k + 1] >= 0 else max(rho[2 * k], 0.0)
    return max(total, 1 / math.log10(chains * draws))


@pytest.mark.parametrize("chains, draws", [(1, 4), (1, 5), (1, 50), *SIZES])
def test_iac_agrees_with_loops(chains: int, draws: int) -> None:
    x = ar1(0.6, chains, draws, 8)
    expected = [slow_iac(column) for column in x.permute(2, 0, 1).numpy()]
    np.testing.assert_allclose(iac(x).numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("a", [-0.4, 0.0, 0.5, 0.8])
def test_ar1_time_and_size(a: float) -> None:
    """One estimate has relative sd sqrt(2 (2M+1) / N), M its window (Sokal 1997); at a = 0.8, N = 16000 the noise of rho
    ends the sum at M = 18, so sd 7 % and 1 % in the mean over 50 variables; the tail cut off costs 2 %, centring 1 %.
    """
    x, tau = ar1(a, 4, 4000, 50), (1 + a) / (1 - a)
    assert iac(x).mean().item() == pytest.approx(tau, rel=0.05)
    assert (16000 / ess(x, "mean")).mean().item() == pytest.approx(tau, rel=0.05)
    assert (rhat(x) - 1).abs().max() < 0.01


def test_antithetic_chains_stop_at_the_cap() -> None:
    x = ar1(-0.9, 4, 250, 10)  # (1+a)/(1-a) = 0.053, below 1/log10(1000) = 1/3
    assert iac(x).tolist() == pytest.approx([1 / 3] * 10)
    assert ess(x, "mean").tolist() == pytest.approx([3000.0] * 10)


def test_mcse_is_the_spread_of_means() -> None:
    """Over 1500 replications the sd of the mean is known to 1.8 %; the estimate itself is low by a few per cent."""
    x = ar1(0.5, 4, 500, 1500)
    spread = x.mean((0, 1)).std().item()
    assert mcse(x).square().mean().sqrt().item() == pytest.approx(spread, rel=0.08)


def test_iac_ignores_chain_means_and_ess_does_not() -> None:
    x = ar1(0.5, 4, 400, 3)
    apart = x + 10 * torch.arange(4.0)[:, None, None]
    assert iac(apart).tolist() == pytest.approx(iac(x).tolist(), rel=1e-9)
    assert (ess(apart, "mean") < 0.01 * ess(x, "mean")).all()
    assert (rhat(apart) > 2.5).all()


def test_folding_sees_scales_that_differ() -> None:
    x = ar1(0.0, 2, 1000, 4) * torch.tensor([1.0, 4.0])[:, None, None]
    assert (rhat(x) > 1.2).all()
    shuffled = x.permute(1, 0, 2).reshape(2, 1000, 4)  # both chains of both scales
    assert (rhat(shuffled) < 1.02).all()


@pytest.mark.parametrize("name", MEASURES)
def test_blocks_of_variables_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(3, 41).reshape(3, 41, 4, 3, 5)
    x[1, 7, 2, 1, 3] = math.nan
    whole = MEASURES[name](x)
    assert whole.shape == (4, 3, 5)
    assert whole.dtype == torch.float64
    assert whole.isnan().nonzero().tolist() == [[2, 1, 3]]
    alone = MEASURES[name](x[:, :, 3, 2, 4])
    assert alone.shape == ()
    assert alone.item() == pytest.approx(whole[3, 2, 4].item(), rel=1e-12)
    seen = []
    inner = diagnostics._autocovariance
    monkeypatch.setattr(diagnostics, "_autocovariance", lambda y: (seen.append(len(y)), inner(y))[1])
    monkeypatch.setattr(diagnostics, "BLOCK_BYTES", 7 * 8 * diagnostics.COPIES * 3 * 41)
    torch.testing.assert_close(MEASURES[name](x), whole, rtol=1e-12, atol=0, equal_nan=True)
    assert name == "rhat" or set(seen) == {7, 60 % 7}


@pytest.mark.parametrize("name", MEASURES)
def test_dtype_layout_and_gradient_do_not_matter(name: str) -> None:
    x = inputs(2, 30)
    single = x.float()
    turned = single.permute(2, 1, 0).contiguous().permute(2, 1, 0).requires_grad_()
    found = MEASURES[name](turned)
    assert not found.requires_grad
    torch.testing.assert_close(found, MEASURES[name](single.double()), rtol=1e-12, atol=0, equal_nan=True)
    assert MEASURES[name](x[:, :, :0]).shape == (0,)


@pytest.mark.parametrize("name", MEASURES)
def test_change_of_variable(name: str) -> None:
    """Ranks do not see a monotone change, and nothing but the standard error sees a scale, however small."""
    x = ar1(0.5, 2, 200, 4)
    found = MEASURES[name](x)
    scaled = 3e-20 * found if name == "mcse" else found
    torch.testing.assert_close(MEASURES[name](3e-20 * x), scaled, rtol=1e-9, atol=0)
    if name in ("bulk", "tail"):
        assert torch.equal(MEASURES[name](x.sinh()), found)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e-30, 1e8 / 3])
def test_constant_variable(value: float) -> None:
    x = torch.full((3, 51), value, dtype=torch.float64)
    found = {name: measure(x).item() for name, measure in MEASURES.items()}
    assert math.isnan(found["rhat"])
    assert math.isnan(found["iac"])
    assert found["bulk"] == found["tail"] == found["mean"] == 3 * 2 * 25 == array_stats.ess(x.numpy(), method="bulk")
    assert found["mcse"] == 0
    with np.errstate(invalid="ignore"):
        assert np.isnan(array_stats.rhat(x.numpy()))


def test_chains_stuck_apart() -> None:
    x = torch.tensor([0.1, 1 / 3, 0.7])[:, None].expand(3, 33)
    assert rhat(x) == math.inf
    assert iac(x).isnan()
    assert ess(x, "mean") <= 4  # of 96


def test_two_values_equally_often_have_constant_folds() -> None:
    x = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0]).repeat(2, 3)
    with np.errstate(invalid="ignore"):
        expected = float(array_stats.rhat(x.double().numpy()))
    assert rhat(x).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", MEASURES)
def test_not_finite_gives_nan_there_only(name: str, bad: float) -> None:
    x = ar1(0.3, 2, 20, 3)
    clean = MEASURES[name](x)
    x[1, 4, 1] = bad
    found = MEASURES[name](x)
    assert found[1].isnan()
    assert torch.equal(found[::2], clean[::2])


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize("shape", [(10,), (2, 3), (2, 3, 5), (0, 10), ()])
def test_wrong_shape_is_one_clear_line(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^\w+: x is \[.*\]; expected \[chains, draws >= 4, \.\.\.\]$") as caught:
        MEASURES[name](torch.zeros(shape))
    assert str(list(shape)) in str(caught.value)


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="kind is 'sd'; expected one of 'bulk', 'tail', 'mean'"):
        ess(torch.zeros(2, 10), "sd")


# ------------------------------------------------------------------------------------------- long chains, and in one pass
LONG = [(3, 3001), (2, 20001)]  # odd; halves beyond SHORT; N on both sides of RADIX


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chains, draws", LONG)
def test_one_pass_over_long_chains_agrees_with_arviz(chains: int, draws: int, dtype: torch.dtype) -> None:
    """Scores and indicators are float32 there, lags first end at n/10: from antithetic chains to one that never mixes."""
    x = torch.cat([ar1(a, chains, draws, 1, seed) for seed, a in enumerate((-0.8, 0.0, 0.97, 0.9999))], dim=-1)
    x = torch.cat((x, x[..., 2:3].round(), x[..., 1:2].tan(), -(x[..., 2:3] > 1).double(), 1e-4 * x[..., 1:2] + 10), -1)
    x = x.to(dtype)
    names = {"rhat": "rhat", "ess_bulk": "bulk", "ess_tail": "tail", "ess_mean": "mean", "mcse": "mcse"}
    found = diagnostics.diagnose(x, tuple(names))
    for name, theirs in names.items():
        np.testing.assert_allclose(found[name].numpy(), arviz(theirs, x), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("draws", [40, 1601])
def test_one_pass_gives_what_each_function_gives(draws: int) -> None:
    x = inputs(3, draws)[..., ::7].reshape(3, draws, 3, 3)
    x[1, 5, 2, 2] = math.nan
    found = diagnostics.diagnose(x)
    assert list(found) == ["rhat", "ess_bulk", "ess_tail", "mcse", "iac"]
    alone = {"rhat": rhat(x), "ess_bulk": ess(x), "ess_tail": ess(x, "tail"), "mcse": mcse(x), "iac": iac(x)}
    for name, expected in alone.items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=0, equal_nan=True)
    assert list(diagnostics.diagnose(x, ("iac", "ess_mean"))) == ["iac", "ess_mean"]
    with pytest.raises(ValueError, match=r"what is \('sd',\); expected some of 'rhat'.*'ess_mean'"):
        diagnostics.diagnose(x, ("sd",))


def test_sums_that_go_beyond_the_first_lags_are_those_of_all_lags(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.cat([ar1(a, 2, 1400, 4, 1) for a in (0.3, 0.9, 0.99, 0.9999)], dim=-1)
    calls = []
    inner = diagnostics._autocovariance
    monkeypatch.setattr(
        diagnostics, "_autocovariance", lambda y, *lags: (calls.append((len(y), *lags)), inner(y, *lags))[1]
    )
    first = {m: iac(x, m) for m in ("geyer", "sokal")}
    assert calls[0] == calls[2] == (16, 140)
    assert 4 <= calls[1][0] <= 8  # the slow ones again
    monkeypatch.setattr(diagnostics, "SHORT", 10**9)
    for method, found in first.items():
        torch.testing.assert_close(found, iac(x, method), rtol=1e-9, atol=0)


def slow_sokal(x: np.ndarray, c: float) -> float:
    chains, draws = x.shape
    x = x - x.mean(1, keepdims=True)
    gamma = [sum(row[: draws - t] @ row[t:] for row in x) for t in range(draws)]
    tau = 1.0
    for M in range(draws):
        tau += 2 * gamma[M] / gamma[0] if M else 0.0
        if c * tau <= M:
            break
    return max(tau, 1 / math.log10(chains * draws))


@pytest.mark.parametrize("chains, draws, c", [(1, 4, 5.0), (1, 50, 5.0), (3, 101, 5.0), (2, 777, 5.0), (2, 777, 8.0)])
def test_sokals_window_agrees_with_loops(chains: int, draws: int, c: float) -> None:
    x = torch.cat([ar1(a, chains, draws, 4) for a in (-0.5, 0.6, 0.95)], dim=-1)
    expected = [slow_sokal(column, c) for column in x.permute(2, 0, 1).numpy()]
    np.testing.assert_allclose(iac(x, "sokal", c).numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("a", [0.0, 0.5, 0.8])
def test_sokals_time_of_ar1(a: float) -> None:
    """The window M = 5 tau cuts off 2 a^M / (1 - a): below 1 %; else as `test_ar1_time_and_size`."""
    tau = (1 + a) / (1 - a)
    assert iac(ar1(a, 4, 4000, 50), "sokal").mean().item() == pytest.approx(tau, rel=0.05)


def test_sokal_of_what_does_not_move_and_of_wrong_words() -> None:
    assert iac(torch.ones(2, 2000, 1), "sokal").isnan()
    for method, window in (("sum", 5.0), ("sokal", 0.0), ("sokal", math.nan)):
        with pytest.raises(ValueError, match="expected 'geyer' or 'sokal' and a window above 0"):
            iac(torch.zeros(2, 10), method, window)


@pytest.mark.parametrize("n", [1, 2, 7, 100, 14062, 25000, 99999])
def test_lengths_of_transforms_are_even_and_have_small_factors(n: int) -> None:
    size = diagnostics._fast_length(n)
    smooth = lambda m: next((smooth(m // p) for p in (2, 3, 5) if m % p == 0), m) == 1
    assert size == next(m for m in itertools.count(n) if m % 2 == 0 and smooth(m))


def test_memory_stays_near_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks are as wide as BLOCK_BYTES allows, and one variable at least."""
    widths = []
    inner = diagnostics._measure
    monkeypatch.setattr(diagnostics, "_measure", lambda x, *rest: (widths.append(len(x)), inner(x, *rest))[1])
    diagnostics.diagnose(ar1(0.5, 4, 5000, 60))
    assert widths == [26, 26, 8]  # 2^26 / (8 · 16 · 20,000)
    monkeypatch.setattr(diagnostics, "BLOCK_BYTES", 1)
    widths.clear()
    diagnostics.diagnose(ar1(0.5, 2, 10, 3))
    assert widths == [1, 1, 1]


def test_the_two_sides_of_the_benchmark_compute_the_same() -> None:
    x = autoregression(2, 2000, 3)
    assert x.dtype == torch.float32
    np.testing.assert_allclose(our_values(x), arviz_values(x.double().numpy()), rtol=1e-6)
