"""The exact law with a short window: against its limits, against all configurations written out, against particles."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from numpy.testing import assert_allclose

from partita.laws import exact
from partita.laws.exact import Overdamped, Underdamped, stationary_cov
from partita.laws.window import window_cov

L3 = np.array([[1.6, -0.5, 0.7], [-0.5, 1.3, 0.6], [0.7, 0.6, 1.8]])
PRIOR = np.array([[0.5, 0.1, 0.2], [0.1, 0.4, 0.0], [0.2, 0.0, 0.6]])
TWO = np.array([0, 0, 1])
G3, S3 = (1.3, 0.6, 0.9), (1.1, 0.8, 1.2)
SGLD, SGHMC = Overdamped(0.4, G3), Underdamped(0.4, 1.1, noise=0.5, s=S3)
BOTH = pytest.mark.parametrize("sampler", [SGLD, SGHMC], ids=["SGLD", "SGHMC"])
MASKS = {
    "S": exact.one_hot(2),
    "S, 1 of 2 groups a step": exact.one_hot(2, count=1),
    "Bernoulli": exact.bernoulli(2, 0.4, 2),
    "stratified": exact.stratified(2, 2),
    "U(0, 1)": exact.uniform(2, 2),
}


# ---------------------------------------------------------------------------------------------------------- limits
@BOTH
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("past", [1, 3])
def test_a_window_of_one_row_is_the_present(name: str, past: int, sampler: Overdamped | Underdamped) -> None:
    more = {"prior": PRIOR, "temperature": 0.7, "past": past, "gradient_noise": PRIOR, "force": [1, -2, 3]}
    got = window_cov(L3, TWO, MASKS[name], sampler, 1, **more)  # type: ignore[arg-type]
    cov, kinetic, _ = stationary_cov(L3, TWO, MASKS[name], sampler, ensemble=1, **more)  # type: ignore[arg-type]
    assert_allclose(got.cov, cov, rtol=1e-11, atol=1e-13)
    assert_allclose(got.lags, [cov], rtol=1e-11, atol=1e-13)
    assert (got.kinetic or 0) == pytest.approx(kinetic or 0, rel=1e-11)


@BOTH
@pytest.mark.parametrize("mask", [exact.one_hot(2), exact.bernoulli(2, 0.5, 2)], ids=["S", "Bernoulli"])
def test_a_long_window_is_own_history(mask: exact.MaskLaw, sampler: Overdamped | Underdamped) -> None:
    L = np.array([[1.6, 0.7], [0.7, 1.3]])
    sampler = Overdamped(0.5) if isinstance(sampler, Overdamped) else Underdamped(0.5, 1.0)
    own = stationary_cov(L, [0, 1], mask, sampler)
    laws = [window_cov(L, [0, 1], mask, sampler, R) for R in (16, 32, 64)]
    of = lambda law: np.append(law.cov, law.kinetic or 0)
    largest = lambda found: [np.abs(x - of(own)).max() for x in found]
    found = [of(law) for law in laws]
    halved = largest(found)
    assert_allclose([halved[1] / halved[0], halved[2] / halved[1]], 0.5, atol=0.035)  # an error of order 1/R
    once = [2 * found[1] - found[0], 2 * found[2] - found[1]]  # then of order 1/R²
    assert_allclose(largest(once)[1] / largest(once)[0], 0.25, atol=0.03)
    assert largest([(4 * once[1] - once[0]) / 3])[0] < 3e-4  # then 1/R³


def test_a_window_of_200_rows_is_own_history_within_a_percent() -> None:
    L, mask = np.array([[1.6, 0.7], [0.7, 1.3]]), exact.one_hot(2)
    own = stationary_cov(L, [0, 1], mask, Overdamped(0.5)).cov
    got = window_cov(L, [0, 1], mask, Overdamped(0.5), 200).cov
    assert 1e-4 < np.abs(got - own).max() < 1e-2 * own.max()


@BOTH
def test_joint_masks_do_not_see_the_window(sampler: Overdamped | Underdamped) -> None:
    cov, kinetic, _ = stationary_cov(L3, TWO, None, sampler, prior=PRIOR)
    for mask in (None, exact.bernoulli(2, 1.0, 2)):
        for R in (2, 7):
            got = window_cov(L3, TWO, mask, sampler, R, prior=PRIOR)
            assert_allclose(got.cov, cov, rtol=1e-10, atol=1e-13)
            assert (got.kinetic or 0) == pytest.approx(kinetic or 0, rel=1e-10)
            if isinstance(sampler, Overdamped):  # Cov(θ_t, θ_{t−s}) = Aˢ V
                A = np.eye(3) - 0.2 * np.diag(G3) @ (L3 + PRIOR)
                assert_allclose(got.lags, [np.linalg.matrix_power(A, s) @ cov for s in range(R)], atol=1e-12)


def test_small_steps_forget_nothing_but_the_window() -> None:
    """As ε → 0 with R fixed the rows are the present: the JOINT law, not the structured one."""
    laws = [window_cov(L3, TWO, exact.one_hot(2), Overdamped(ε), 6).cov for ε in (2e-4, 1e-4)]
    assert_allclose(2 * laws[1] - laws[0], np.linalg.inv(L3), atol=1e-5)


# ------------------------------------------------------------------------------------------ all configurations
Masks = list[tuple[float, np.ndarray]]  # probability, r [K, M]


def all_bernoulli(M: int, rho: float, K: int) -> Masks:
    bits = [np.reshape(b, (K, M)) for b in product([0.0, 1.0], repeat=M * K)]
    return [(float(np.prod(np.where(b == 1, rho, 1 - rho))), b) for b in bits]


NODES = 0.5 + np.sqrt(0.15) * np.array([-1, 0, 1])  # Gauss-Legendre on [0, 1]
ALL_UNIFORM: Masks = [
    (float(np.prod(np.take([5 / 18, 4 / 9, 5 / 18], i))), NODES[list(i)][None]) for i in product(range(3), repeat=2)
]


@dataclass
class Written:
    mask: exact.MaskLaw
    masks: Masks
    w: float
    sampler: Overdamped | Underdamped
    R: int
    labels: np.ndarray
    prior: np.ndarray | None = None
    past: int = 1
    force: tuple[float, ...] = (0.0, 0.0, 0.0)  # the likelihood's gradient at the mean

    def gradients(self, z: list[np.ndarray]) -> Iterator[tuple[float, np.ndarray]]:
        """(probability, g) for every mask and pick; the coordinates θ_{t−s} = z[s] [D, ·] are linear forms."""
        D, J, M = len(self.labels), self.past, 2
        L, force = L3[:D, :D], np.zeros((D, z[0].shape[1]))
        force[:, -1] = self.force[:D]  # the last form is the constant 1
        for p, r in self.masks:
            picks = list(product(range(self.R), repeat=len(r) * J * M))
            for pick in picks:
                rows = np.reshape(pick, (len(r), J, M))
                g = np.zeros((D, D)) @ z[0] if self.prior is None else self.prior[:D, :D] @ z[0]
                for k, j in product(range(len(r)), range(J)):
                    present = r[k, self.labels][:, None]
                    past = np.stack([z[rows[k, j, m]][i] for i, m in enumerate(self.labels)])
                    g = g + self.w / J * present * (L @ (present * z[0] + (1 - present) * past) + force)
                yield p / len(picks), g - force  # the prior's gradient at the mean

    def law(self) -> tuple[float, np.ndarray]:
        """The radius of second moments of the stack (z_t, …, z_{t−R+1}, 1), and their stationary value [n, n]."""
        D, R = len(self.labels), self.R
        S = D if isinstance(self.sampler, Overdamped) else 2 * D
        n, steps, noise = R * S + 1, [], np.zeros((S, S))
        for p, g in self.gradients([np.eye(D, n, k=s * S) for s in range(R)]):
            T = np.eye(n, k=-S)
            T[-1] = np.eye(n)[-1]
            if isinstance(self.sampler, Overdamped):
                ε, G = self.sampler.step_size, np.broadcast_to(self.sampler.G or 1.0, D)
                T[:D] = np.eye(D, n) - ε / 2 * G[:, None] * g
                noise = ε * np.diag(G)
            else:
                h, γ, s = self.sampler.time_step, self.sampler.friction, np.broadcast_to(self.sampler.s or 1.0, D)
                T[D:S] = (1 - h * γ) * np.eye(D, n, k=D) - h * s[:, None] * g
                T[:D] = np.eye(D, n) + h * s[:, None] * T[D:S]
                into = np.vstack([h * np.diag(s), np.eye(D)])
                noise = h * (2 * γ - h * self.sampler.noise) * into @ into.T
            steps.append((p, T))
        probs, flat = np.array([p for p, _ in steps]), np.array([T.ravel() for _, T in steps])
        assert_allclose(probs.sum(), 1)
        both = ((probs[:, None] * flat).T @ flat).reshape(n, n, n, n).transpose(0, 2, 1, 3).reshape(n * n, n * n)
        both[:, -1] += np.pad(noise, (0, n - S)).ravel()  # the moment of 1 with itself is 1
        moving = both[:-1, :-1]
        value = np.linalg.solve(np.eye(n * n - 1) - moving, both[:-1, -1])
        return float(np.abs(np.linalg.eigvals(moving)).max()), np.r_[value, 1].reshape(n, n)


ONE_EACH = np.array([0, 1])
SGLD2, SGHMC2 = Overdamped(0.4, G3[:2]), Underdamped(0.4, 1.1, noise=0.5, s=S3[:2])
S = (exact.one_hot(2), [(1.0, np.eye(2))], 1.0)
ONE_MASK = (exact.bernoulli(2, 0.5, 1), all_bernoulli(2, 0.5, 1), 2.0)
TWO_MASKS = (exact.bernoulli(2, 0.4, 2), all_bernoulli(2, 0.4, 2), 1.25)
FORCE = (1.0, -2.0, 1.5)
WRITTEN = {
    "S": Written(*S, SGLD2, 3, ONE_EACH),
    "S, group of two": Written(*S, SGLD, 3, TWO, prior=PRIOR),
    "S, past=2": Written(*S, SGLD, 2, TWO, past=2),
    "S_d K=1, past=2": Written(*ONE_MASK, SGLD, 2, TWO, PRIOR, past=2, force=FORCE),
    "S_d K=2": Written(*TWO_MASKS, SGLD, 2, TWO),
    "uniform": Written(exact.uniform(2, 1), ALL_UNIFORM, 2.0, SGLD2, 4, ONE_EACH),
    "SGHMC S": Written(*S, SGHMC2, 3, ONE_EACH, prior=PRIOR),
    "SGHMC S_d K=1": Written(*ONE_MASK, SGHMC, 3, TWO),
    "SGHMC S_d K=2": Written(*TWO_MASKS, SGHMC2, 2, ONE_EACH, prior=PRIOR, force=FORCE),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_every_mask_and_pick_written_out_gives_the_same_law(name: str) -> None:
    case = WRITTEN[name]
    D, R = len(case.labels), case.R
    prior = None if case.prior is None else case.prior[:D, :D]
    more = {"prior": prior, "past": case.past, "force": case.force[:D]}
    got = window_cov(L3[:D, :D], case.labels, case.mask, case.sampler, R, **more)  # type: ignore[arg-type]
    radius, stack = case.law()
    n = (len(stack) - 1) // R  # numbers in a state
    assert radius < 1
    assert_allclose(stack[:-1, -1], 0, atol=1e-12)
    assert_allclose(got.cov, stack[:D, :D], rtol=1e-9, atol=1e-12)
    assert_allclose(got.lags, [stack[:D, s * n : s * n + D] for s in range(R)], rtol=1e-9, atol=1e-12)
    assert (got.kinetic or 0) == pytest.approx(np.trace(stack[D:n, D:n]) / D, rel=1e-9)


@pytest.mark.parametrize("over", [True, False], ids=["SGLD", "SGHMC"])
def test_it_is_stable_exactly_when_the_second_moments_of_the_whole_stack_are(over: bool) -> None:
    make = lambda h: Overdamped(h) if over else Underdamped(h, 0.3)
    case = lambda h: Written(*S, make(h), 2, ONE_EACH)
    law = lambda h: window_cov(L3[:2, :2], ONE_EACH, S[0], make(h), 2)
    low, high = 0.4, 4.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if case(middle).law()[0] < 1 else (low, middle)
    assert_allclose(law(0.98 * low).cov, case(0.98 * low).law()[1][:2, :2], rtol=1e-8)
    law(low * (1 - 1e-6))
    with pytest.raises(ValueError, match="unstable: what masks and picks add"):  # although the mean contracts
        law(low * (1 + 1e-6))


def test_a_delay_can_feed_the_oscillations_of_momentum() -> None:
    law = lambda R: window_cov(L3[1:, 1:], ONE_EACH, S[0], Underdamped(0.2, 0.15), R)
    stationary_cov(L3[1:, 1:], ONE_EACH, S[0], Underdamped(0.2, 0.15))
    law(1), law(32)
    with pytest.raises(ValueError, match="unstable: the mean"):
        law(8)
    A, θ, v = L3[1:, 1:], [np.ones(2)] * 8, np.zeros(2)  # the mean, step by step; S: each group sees the other's past
    own = np.diag(np.diag(A))
    for _ in range(2_000):
        v = v - 0.2 * (own @ θ[-1] + (A - own) @ np.mean(θ[-8:], 0)) - 0.2 * 0.15 * v
        θ.append(θ[-1] + 0.2 * v)
    assert np.abs(θ[-1]).max() > 1e3


def test_refusals() -> None:
    with pytest.raises(ValueError, match="unstable: the mean"):
        window_cov(L3, TWO, None, Overdamped(2.5), 4)
    with pytest.raises(ValueError, match="unstable: the mean"):  # E r = 0: nothing holds a whole window where it is
        window_cov(L3, TWO, exact.gaussian(2, 1, 0.0, 1.0, "square"), Overdamped(0.05), 4)
    with pytest.raises(ValueError, match="at least 1"):
        window_cov(L3, TWO, None, SGLD, 0)
    with pytest.raises(ValueError, match="at least 1"):
        window_cov(L3, TWO, None, SGLD, 4, past=0)
    with pytest.raises(ValueError, match="labels"):
        window_cov(L3, TWO, exact.one_hot(1), SGLD, 4)


# ------------------------------------------------------------------------------------------------------- particles
@dataclass
class Case:
    structure: str
    sampler: Overdamped | Underdamped
    R: int
    prior: np.ndarray | None = None
    temperature: float = 1.0
    past: int = 1
    labels: tuple[int, ...] = (0, 0, 1)


CASES = {
    "SGLD S, 3": Case("S", Overdamped(0.5), 3),
    "SGLD S, 8, 3 groups": Case("S", Overdamped(0.4, G3), 8, labels=(0, 1, 2)),
    "SGLD S_d, 3, past=2": Case("S_d", Overdamped(0.4), 3, prior=PRIOR, past=2),
    "SGLD S_d, 8": Case("S_d", Overdamped(0.5, G3), 8, temperature=0.5),
    "SGHMC S, 3, past=2": Case("S", Underdamped(0.45, 0.9), 3, past=2),
    "SGHMC S, 8": Case("S", Underdamped(0.45, 0.9, 0.5, S3), 8, prior=PRIOR, temperature=0.8),
    "SGHMC S_d, 3": Case("S_d", Underdamped(0.4, 1.0, 0.8, S3), 3),
    "SGHMC S_d, 8, 3 groups": Case("S_d", Underdamped(0.4, 1.0), 8, prior=PRIOR, labels=(0, 1, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_particles_with_a_window_each_have_the_law(name: str) -> None:
    case = CASES[name]
    labels, M, T = np.array(case.labels), max(case.labels) + 1, case.temperature
    mask, w = (exact.one_hot(M), 1.0) if case.structure == "S" else (exact.bernoulli(M, 0.4, 2), 1 / 0.8)
    Λ0 = np.zeros((3, 3)) if case.prior is None else case.prior
    more = {"prior": case.prior, "temperature": T, "past": case.past}
    got = window_cov(L3, labels, mask, case.sampler, case.R, **more)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    n, burn, keep, R = 6_000, 70, 60, case.R
    θ = v = np.zeros((n, 3))
    rows, lag = np.zeros((R, n, 3)), R - 1  # state t in row t mod R; states before the first are 0, as is the first
    moments, kinetic, lagged = np.zeros((n, 3, 3)), np.zeros(n), np.zeros((n, 3, 3))
    for t in range(burn + keep):
        r = np.broadcast_to(np.eye(M), (n, M, M)) if case.structure == "S" else rng.random((n, 2, M)) < 0.4
        g = θ @ Λ0
        for k in range(r.shape[1]):
            present = r[:, k, labels]
            for _ in range(case.past):
                row = rng.integers(0, R, (n, M))[:, labels]
                past = rows[row, np.arange(n)[:, None], np.arange(3)]
                g += w / case.past * present * ((present * θ + (1 - present) * past) @ L3)
        if isinstance(case.sampler, Overdamped):
            ε, G = case.sampler.step_size, 1.0 if case.sampler.G is None else np.asarray(case.sampler.G)
            θ = θ - ε / 2 * G * g + rng.normal(size=θ.shape) * np.sqrt(ε * T * G)
        else:
            h, γ = case.sampler.time_step, case.sampler.friction
            s = 1.0 if case.sampler.s is None else np.asarray(case.sampler.s)
            v = v - h * s * g - h * γ * v + rng.normal(size=θ.shape) * np.sqrt(h * (2 * γ * T - h * case.sampler.noise))
            θ = θ + h * s * v
        rows[(t + 1) % R] = θ
        if t >= burn:
            oldest = rows[(t + 1 - lag) % R]
            moments += θ[:, :, None] * θ[:, None] / keep
            lagged += θ[:, :, None] * oldest[:, None] / keep
            kinetic += (v**2).mean(1) / keep
    se = lambda x: x.std(0) / np.sqrt(n)
    assert (np.abs(moments.mean(0) - got.cov) < 4.5 * se(moments)).all()
    assert (np.abs(lagged.mean(0) - got.lags[lag]) < 4.5 * se(lagged)).all()
    if got.kinetic is not None:
        assert abs(kinetic.mean() - got.kinetic) < 4.5 * se(kinetic)
    for ensemble in (None, 1):  # neither a long history nor the present alone comes near
        other = stationary_cov(L3, labels, mask, case.sampler, ensemble=ensemble, **more)  # type: ignore[arg-type]
        assert (np.abs(moments.mean(0) - other.cov) / se(moments)).max() > 10
