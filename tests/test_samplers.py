"""Schedules, and one step of every sampler by hand."""

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from partita.samplers import PSGLD, SGHMC, SGLD, Constant, Cosine, Cyclical, Polynomial, precondition
from partita.samplers.schedules import as_schedule

FAST = settings(max_examples=60, deadline=None)
C, D = 3, 5
F64 = torch.float64


# ---------------------------------------------------------------------------------------------------------- schedules
def test_constant() -> None:
    assert [Constant(0.3)(t, 10) for t in (0, 5, 10, 999)] == [0.3] * 4


def test_polynomial() -> None:
    schedule = Polynomial(0.1, b=50.0, power=0.55)
    for t in (0, 1, 50, 99, 100):
        assert schedule(t, 100) == pytest.approx(0.1 * (1 + t / 50) ** -0.55)
    assert schedule(0, 100) == 0.1
    assert schedule(50, 100) == pytest.approx(0.1 * 2**-0.55)


def test_cosine() -> None:
    schedule = Cosine(0.4, 0.1)
    assert schedule(0, 100) == pytest.approx(0.4)
    assert schedule(25, 100) == pytest.approx(0.25 + 0.15 * math.sqrt(0.5))
    assert schedule(50, 100) == pytest.approx(0.25)
    assert schedule(100, 100) == pytest.approx(0.1)
    assert Cosine(0.1, 0.4)(0, 100) == pytest.approx(0.1)  # up is as good as down
    assert schedule(1, 0) == pytest.approx(0.1)


def test_cyclical() -> None:
    schedule = Cyclical(0.4, 4, 0.1)
    for start in (0, 25, 50, 75):
        assert schedule(start, 100) == 0.4
        cycle = [schedule(start + i, 100) for i in range(25)]
        assert cycle == sorted(cycle, reverse=True)
        assert cycle == pytest.approx([0.25 + 0.15 * math.cos(math.pi * i / 25) for i in range(25)])
    assert schedule(100, 100) == 0.1


@FAST
@given(st.integers(1, 40), st.integers(1, 100), st.integers(0, 40))
@example(6, 20, 3)
def test_a_cycle_restarts_at_the_top_wherever_its_start_is_a_whole_step(cycles: int, horizon: int, k: int) -> None:
    """Not at the bottom, as when horizon/cycles is rounded: 20 steps of 6 cycles start one at step 10."""
    t, rest = divmod(k % cycles * horizon, cycles)
    if rest == 0 and t < horizon:
        assert Cyclical(1.0, cycles, 0.1)(t, horizon) == 1.0


SCHEDULES = [Constant(0.2), Polynomial(0.5, 10.0, 0.33), Cosine(0.4, 0.1), Cosine(0.1, 0.4), Cyclical(0.4, 3, 0.1)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("horizon", [1, 2, 7, 100])
def test_schedules_hold_their_last_value_and_keep_their_largest(schedule: Any, horizon: int) -> None:
    values = [schedule(t, horizon) for t in range(horizon + 1)]
    assert max(values) <= schedule.largest + 1e-15
    assert all(v > 0 for v in values)
    assert {schedule(t, horizon) for t in (horizon, horizon + 1, 10 * horizon)} == {values[-1]}
    if horizon == 100 and schedule != Cosine(0.1, 0.4):
        assert values[0] == pytest.approx(schedule.largest)


@pytest.mark.parametrize("value", [0, 0.0, -0.1, math.nan, math.inf, "a", None])
@pytest.mark.parametrize(
    "make, name",
    [
        (lambda v: Constant(v), "Constant got value"),
        (lambda v: Polynomial(v), "Polynomial got a"),
        (lambda v: Polynomial(1.0, b=v), "Polynomial got b"),
        (lambda v: Polynomial(1.0, power=v), "Polynomial got power"),
        (lambda v: Cosine(v, 0.1), "Cosine got start"),
        (lambda v: Cosine(0.1, v), "Cosine got end"),
        (lambda v: Cyclical(v, 2, 0.1), "Cyclical got high"),
        (lambda v: Cyclical(0.1, v, 0.1), "Cyclical got cycles"),
        (lambda v: Cyclical(0.1, 2, v), "Cyclical got low"),
        (lambda v: as_schedule(v, "SGLD's step_size"), "SGLD's step_size is"),
        (lambda v: SGLD(v), "SGLD's step_size is"),
        (lambda v: PSGLD(v), "PSGLD's step_size is"),
        (lambda v: SGHMC(v), "SGHMC's time_step is"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_step_size_that_is_not_above_0_is_refused(make: Any, name: str, value: Any) -> None:
    words = name.split("got ")[-1] + ("=" if "got" in name else " ") + repr(value)
    refused(lambda: make(value), [name, words, "expected a number above 0"])


def test_what_is_a_schedule() -> None:
    assert as_schedule(2, "x") == Constant(2.0)
    assert as_schedule(Cosine(0.2, 0.1), "x") == Cosine(0.2, 0.1)
    for value in (Cosine, True, lambda t, horizon: 0.1):
        refused(lambda value=value: as_schedule(value, "x"), ["x is", "a number above 0 or a schedule"])
    refused(lambda: Cyclical(0.2, 2.5, 0.1), ["cycles=2.5", "whole number"])  # type: ignore[arg-type]
    for sampler in (SGLD(0.2), PSGLD(0.2), SGHMC(0.2)):
        assert sampler.schedule == Constant(0.2)
    for sampler in (SGLD(Cosine(0.2, 0.1)), PSGLD(Cosine(0.2, 0.1)), SGHMC(Cosine(0.2, 0.1))):
        assert sampler.schedule == Cosine(0.2, 0.1)


def refused(make: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as e:
        make()
    said = str(e.value)
    assert "\n" not in said
    assert all(w in said for w in words), said


# ----------------------------------------------------------------------------------------------------------- one step
def point(seed: int = 0, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(C, D, dtype=dtype), 10 * torch.randn(C, D, dtype=dtype)


def noise(seed: int, like: Tensor) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn_like(like)


RATES = {"one": 0.02, "a chain each": torch.tensor([[0.01], [0.02], [0.4]], dtype=F64)}
rates = pytest.mark.parametrize("rate", RATES.values(), ids=RATES)
temperatures = pytest.mark.parametrize("T", [0.0, 0.5, 1.0, 2.0])
SCALE = torch.tensor([0.1, 0.5, 1.0, 2.0, 10.0], dtype=F64)


@rates
@temperatures
def test_sgld(rate: Any, T: float) -> None:
    theta, g = point()
    z = noise(1, theta)
    torch.manual_seed(1)
    new, state = SGLD(0.1).step(theta, g, {}, rate, T, 0.0)
    assert state == SGLD(0.1).init(theta, SCALE) == {}
    torch.testing.assert_close(new, theta - rate / 2 * g + math.sqrt(T) * rate**0.5 * z)


@rates
@temperatures
def test_psgld(rate: Any, T: float) -> None:
    """Four steps, two of them adapting: V̂ is the bias-corrected average of g² so far, then frozen."""
    theta, _ = point()
    sampler = PSGLD(0.1, beta=0.9)
    state = sampler.init(theta, SCALE)
    gs = [point(seed)[1] for seed in range(4)]
    V = torch.zeros_like(theta)
    for t, g in enumerate(gs):
        if t < 2:
            V = 0.9 * V + 0.1 * g**2
        G = 1 / (1 / SCALE + (V / (1 - 0.9 ** min(t + 1, 2))).sqrt())
        expected = theta - rate / 2 * G * g + (rate * T * G).sqrt() * noise(t, theta)
        torch.manual_seed(t)
        theta, state = sampler.step(theta, g, state, rate, T, 1.0 if t < 2 else 0.0)
        torch.testing.assert_close(theta, expected)
    torch.testing.assert_close(
        V / (1 - 0.81), (0.9 * gs[0] ** 2 + gs[1] ** 2) / 1.9
    )  # an average: its weights sum to 1


@rates
@temperatures
@pytest.mark.parametrize("adapt", ["never", "burn_in"])
def test_sghmc(rate: Any, T: float, adapt: str) -> None:
    theta, _ = point()
    sampler = SGHMC(0.1, friction=1.7, noise=0.4 if T else 0.0, adapt=adapt, beta=0.9)
    state = sampler.init(theta, SCALE)
    assert not state["v"].any()
    v, V = torch.zeros_like(theta), torch.zeros_like(theta)
    for t in range(4):
        g = point(t)[1]
        s: Any = 1.0
        if adapt == "burn_in":
            V = 0.9 * V + 0.1 * g**2 if t < 2 else V
            s = 1 / (1 / SCALE + (V / (1 - 0.9 ** min(t + 1, 2))).sqrt())
        variance = rate * (2 * 1.7 * T - rate * sampler.noise)
        v = v - rate * s * g - rate * 1.7 * v + variance**0.5 * noise(t, theta)
        expected = theta + rate * s * v
        torch.manual_seed(t)
        theta, state = sampler.step(theta, g, state, rate, T, 1.0 if t < 2 else 0.0)
        torch.testing.assert_close(theta, expected)
        torch.testing.assert_close(state["v"], v)


ALL = [SGLD(0.1), PSGLD(0.1), PSGLD(0.1, adapt="always"), SGHMC(0.1), SGHMC(0.1, adapt="burn_in")]


@pytest.mark.parametrize("sampler", ALL, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_a_step_changes_nothing_it_was_given_and_keeps_the_shape_of_its_state(sampler: Any, dtype: torch.dtype) -> None:
    theta, g = point(dtype=dtype)
    state = sampler.init(theta, SCALE.float())
    before = [x.clone() for x in (theta, g, *state.values())]
    new, after = sampler.step(theta, g, state, 0.1, 1.0, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, (theta, g, *state.values())))
    assert new.dtype == dtype
    assert {k: (v.shape, v.dtype) for k, v in after.items()} == {k: (v.shape, v.dtype) for k, v in state.items()}
    heat = sampler.heat(g, after, 0.1, 1.0)
    assert heat.shape == (C, D)
    assert heat.isfinite().all()


@pytest.mark.parametrize("sampler", ALL, ids=repr)
def test_chains_get_their_own_noise(sampler: Any) -> None:
    theta = torch.zeros(2, 1000)
    torch.manual_seed(0)
    new, _ = sampler.step(theta, theta, sampler.init(theta, torch.ones(1000)), 0.1, 1.0, 1.0)
    assert abs(torch.corrcoef(new)[0, 1]) < 0.15
    assert new.std() > 0


# ---------------------------------------------------------------------------------------------------- preconditioners
@pytest.mark.parametrize("sampler", [PSGLD(0.1), SGHMC(0.1, adapt="burn_in")], ids=["PSGLD", "SGHMC"])
def test_preconditioners_freeze_after_burn_in(sampler: Any) -> None:
    theta, g = point()
    state = sampler.init(theta, SCALE)
    _, state = sampler.step(theta, g, state, 0.1, 1.0, 1.0)
    frozen = {k: state[k].clone() for k in ("V", "n", "scale")}
    for t in range(5):
        _, state = sampler.step(theta, point(t)[1] * 100, state, 0.1, 1.0, 0.0)
        assert all(torch.equal(state[k], frozen[k]) for k in frozen)


def test_an_always_adapting_psgld_ignores_the_end_of_burn_in_and_warns() -> None:
    theta, g = point()
    sampler = PSGLD(0.1, adapt="always")
    state = sampler.init(theta, SCALE)
    _, state = sampler.step(theta, g, state, 0.1, 1.0, 0.0)
    torch.testing.assert_close(state["V"], 0.01 * g**2)
    assert int(state["n"]) == 1
    with pytest.warns(UserWarning, match="omits Γ.*stationary law is wrong"):
        sampler.check(1.0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PSGLD(0.1).check(1.0, 1)


@FAST
@given(
    st.lists(st.floats(-(2.0**50), 2.0**50, width=32), min_size=1, max_size=6),
    st.floats(2.0**-10, 2.0**10, width=32),
    st.floats(0, 0.999),
    st.integers(0, 6),
)
def test_no_entry_of_g_exceeds_the_priors_scale(gs: list[float], scale: float, beta: float, adapting: int) -> None:
    state = precondition.init(torch.zeros(1, 1), torch.tensor([scale]))
    assert float(precondition.matrix(state, beta)) == pytest.approx(scale)  # before any gradient
    for t, g in enumerate(gs):
        state = precondition.update(state, torch.tensor([[g]]), beta, float(t < adapting))
        G = float(precondition.matrix(state, beta))
        assert 0 < G <= scale * (1 + 1e-6)
    if adapting >= len(gs) and len(set(gs)) == 1:  # bias-corrected: a constant gradient is known after one step
        assert pytest.approx(1 / (1 / scale + abs(gs[0])), rel=1e-2) == G


# ----------------------------------------------------------------------------------------------- refusals, noiselessness
def test_psgld_refusals() -> None:
    refused(lambda: PSGLD(0.1).check(1.0, 0), ["PSGLD", "burn_in=0", "at least 1"])
    refused(lambda: PSGLD(0.1, adapt="never"), ["adapt='never'", "'burn_in' or 'always'"])
    for beta in (-0.1, 1.0, math.nan, "a"):
        refused(lambda b=beta: PSGLD(0.1, beta=b), [f"beta={beta!r}", "[0, 1)"])


def test_sghmc_refusals() -> None:
    for friction in (0, -1.0, math.nan, "a"):
        refused(lambda f=friction: SGHMC(0.1, f), [f"friction={friction!r}", "above 0"])
    for variance in (-0.1, math.nan, "a"):
        refused(lambda v=variance: SGHMC(0.1, noise=v), [f"noise={variance!r}", "at least 0"])
    refused(lambda: SGHMC(0.1, adapt="always"), ["adapt='always'", "'never' or 'burn_in'"])
    refused(lambda: SGHMC(0.1, beta=1.0), ["beta=1.0", "[0, 1)"])
    refused(lambda: SGHMC(0.1, adapt="burn_in").check(1.0, 0), ["adapt='burn_in'", "burn_in=0", "at least 1"])
    refused(lambda: SGHMC(0.5, friction=2.1).check(1.0, 0), ["time_step*friction = 1.05", "at most 1"])
    refused(lambda: SGHMC(Cosine(0.1, 0.6), friction=2.0).check(1.0, 0), ["= 1.2", "at most 1"])  # its largest step
    said = ["2γT - hV̂ = -0.1", "γ=1", "T=0.5", "h=0.1", "V̂=11", "V̂ in [0, 2γT/h]"]
    refused(lambda: SGHMC(0.1, noise=11.0).check(0.5, 0), said)
    SGHMC(0.5, friction=2.0).check(1.0, 0)  # 1 is still allowed
    SGHMC(0.5, noise=3.9, adapt="burn_in").check(1.0, 1)
    SGLD(0.1).check(1.0, 0)


@pytest.mark.parametrize("sampler", ALL, ids=repr)
def test_at_temperature_0_there_is_no_noise(sampler: Any) -> None:
    theta, g = point()
    a, b = (sampler.step(noise(s, theta) * 0 + theta, g, sampler.init(theta, SCALE), 0.1, 0.0, 1.0)[0] for s in (1, 2))
    assert torch.equal(a, b)


def test_sghmc_adds_no_noise_where_the_gradient_brings_all_of_it() -> None:
    sampler = SGHMC(0.25, friction=1.0, noise=8.0)  # V̂ = 2γT/h
    sampler.check(1.0, 0)
    theta, g = point()
    new, state = sampler.step(theta, g, {"v": torch.ones_like(theta)}, 0.25, 1.0, 0.0)
    v = torch.ones_like(theta) - 0.25 * g - 0.25
    assert torch.equal(state["v"], v)
    assert torch.equal(new, theta + 0.25 * v)


# --------------------------------------------------------------------------------------------------------------- heat
@rates
@temperatures
def test_heat_of_langevin_is_what_the_step_size_does_to_a_gaussian(rate: Any, T: float) -> None:
    """Var θ = T/(L(1 - εGL/4)) exactly, so E θ·g = T/(1 - εGL/4) where E g² = L² Var θ: the same number by two ways."""
    L = torch.linspace(0.5, 2.0, D, dtype=F64)
    theta = torch.zeros(C, D, dtype=F64)
    sampler = PSGLD(0.1)
    _, state = sampler.step(theta, point()[1], sampler.init(theta, SCALE), 0.1, 1.0, 1.0)
    for one, its, G in (
        (SGLD(0.1), {}, torch.ones(C, D, dtype=F64)),
        (sampler, state, precondition.matrix(state, 0.99)),
    ):
        hot = T / (1 - rate * G * L / 4)
        g = (L * hot).sqrt()
        torch.testing.assert_close(one.heat(g, its, rate, T), hot)


def test_heat_of_sghmc_is_the_mean_square_velocity() -> None:
    v = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 3.0]])
    assert SGHMC(0.1).heat(torch.zeros(2, 3), {"v": v}, 0.1, 1.0).tolist() == (v**2).tolist()
