"""The exact laws, against closed forms, against other solvers, and against particles without their algebra."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.linalg import solve_discrete_lyapunov

from partita.laws import exact, mixtures
from partita.laws.exact import Overdamped, Underdamped, limit_cov, stationary_cov

L4 = np.array([[1.6, -0.5, 0.6, 0.3], [-0.5, 1.3, 0.4, -0.5], [0.6, 0.4, 1.8, 0.5], [0.3, -0.5, 0.5, 1.5]])
PRIOR = np.array([[0.5, 0.1, 0.2, 0.0], [0.1, 0.4, 0.0, 0.1], [0.2, 0.0, 0.6, 0.1], [0.0, 0.1, 0.1, 0.3]])
TIGHT = 1.3 * (0.3 * np.eye(4) + 0.7)  # correlated enough to see that groups of a past draw are independent
LABELS = np.array([0, 0, 1, 2])
D4 = np.where(np.equal.outer(LABELS, LABELS), L4, 0)
G4, S4 = np.array([1.3, 0.6, 0.9, 1.1]), np.array([1.1, 0.8, 1.2, 0.9])


# ---------------------------------------------------------------------------------------------------- closed forms
CLOSED = {
    "joint": (None, L4),
    "S": (exact.one_hot(3), D4),
    "S, 2 of 3 groups a step": (exact.one_hot(3, count=2), D4),
    "Bernoulli": (exact.bernoulli(3, 0.3, 2), 0.7 * D4 + 0.3 * L4),
    "conditional Bernoulli": (exact.bernoulli_nonzero(3, 0.3, 2), 0.7 * D4 + 0.3 * L4),
    "stratified = Bernoulli(1/K)": (exact.stratified(3, 4), 0.75 * D4 + 0.25 * L4),
    "U(0, 1)": (exact.uniform(3, 2), 1 / 6 * D4 + 1 / 2 * L4),  # blocks tempered by E r²/E r = 2/3
    "U(0, 1), square": (exact.uniform(3, 2, normalise="square"), 1 / 4 * D4 + 3 / 4 * L4),
    "Beta(½, ½)": (exact.beta(3, 1, 0.5, 0.5), 1 / 4 * D4 + 1 / 2 * L4),  # 3/4
    "Beta(½, ½), square": (exact.beta(3, 1, 0.5, 0.5, "square"), 1 / 3 * D4 + 2 / 3 * L4),
    "N(1, .4²)": (exact.gaussian(3, 1, 1.0, 0.4), 0.16 * D4 + L4),  # 1 + s²
    "N(1, .4²), square": (exact.gaussian(3, 1, 1.0, 0.4, "square"), (0.16 * D4 + L4) / 1.16),
    "N(0, 1), square": (exact.gaussian(3, 1, 0.0, 1.0, "square"), D4),
}


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("prior", [None, PRIOR], ids=["", "prior"])
def test_small_step_law_is_the_closed_form_and_the_limit_of_the_finite_step_law(
    name: str, prior: np.ndarray | None
) -> None:
    mask, P = CLOSED[name]
    P = P if prior is None else P + prior
    law = limit_cov(L4, LABELS, mask, prior=prior, temperature=0.7)
    assert_allclose(law, 0.7 * np.linalg.inv(P), rtol=1e-12, atol=1e-12)
    for make in (lambda h: Overdamped(h, G4), lambda h: Underdamped(h, 2.0, noise=0.3, s=S4)):
        errors = [
            stationary_cov(L4, LABELS, mask, make(h), prior=prior, temperature=0.7).cov - law for h in (2e-4, 1e-4)
        ]
        assert_allclose(2 * errors[1] - errors[0], 0, atol=1e-6)  # linear in the step, so nothing is left at 0
        assert 0 < np.abs(errors[1]).max() < 1e-3


@pytest.mark.parametrize("name", ["joint", "S", "Bernoulli", "stratified = Bernoulli(1/K)", "U(0, 1)", "N(1, .4²)"])
@pytest.mark.parametrize("prior", [None, PRIOR], ids=["", "prior"])
def test_ensemble_small_step_law_is_joint_over_E_plus_the_rest_structured(name: str, prior: np.ndarray | None) -> None:
    mask, P = CLOSED[name]
    Λ0 = np.zeros((4, 4)) if prior is None else prior
    for E in (1, 2, 5):
        closed = np.linalg.inv(L4 + Λ0) / E + (1 - 1 / E) * np.linalg.inv(P + Λ0)
        assert_allclose(limit_cov(L4, LABELS, mask, prior=prior, ensemble=E), closed, rtol=1e-11, atol=1e-12)
        cov, _, between = stationary_cov(L4, LABELS, mask, Overdamped(1e-6), prior=prior, ensemble=E)
        assert_allclose(cov, closed, atol=1e-5)
        if between is not None:
            expected = (np.linalg.inv(L4 + Λ0) - np.linalg.inv(P + Λ0)) / E
            assert_allclose(between, expected, atol=1e-5)


def test_ensemble_mean_of_square_normalised_masks_obeys_a_sharpened_likelihood() -> None:
    mask, E = exact.uniform(3, 2, normalise="square"), 3  # E r/E r² = 3/2
    closed = np.linalg.inv(PRIOR + 1.5 * L4) / E + (1 - 1 / E) * np.linalg.inv(PRIOR + 0.25 * D4 + 0.75 * L4)
    assert_allclose(limit_cov(L4, LABELS, mask, prior=PRIOR, ensemble=E), closed, rtol=1e-12)
    got = stationary_cov(L4, LABELS, mask, Overdamped(1e-6), prior=PRIOR, ensemble=E).cov
    assert_allclose(got, closed, atol=1e-5)


def test_masks_of_mean_zero_leave_an_ensemble_without_a_mean() -> None:
    mask = exact.gaussian(3, 1, 0.0, 1.0, "square")
    with pytest.raises(ValueError, match="positive definite"):
        limit_cov(L4, LABELS, mask, ensemble=3)
    with pytest.raises(ValueError, match="unstable"):
        stationary_cov(L4, LABELS, mask, Overdamped(0.05), ensemble=3)
    with pytest.raises(ValueError, match="E r = 0"):
        exact.gaussian(3, 1, 0.0, 1.0)


def test_folded_normal_masks_temper_the_blocks_by_a_quarter() -> None:
    c = np.sqrt(2 / np.pi)
    law = exact.continuous(3, 1, *exact.gauss([1, c, 1, 2 * c, 3, 8 * c, 15]))
    assert_allclose(law.second(), np.where(np.eye(3) > 0, 1 / c, c), rtol=1e-12)  # 1/c = 1.2533


def test_quadratures_have_the_moments_of_their_laws() -> None:
    powers = np.arange(6)
    for mask, moments in (
        (exact.uniform(1, 1), 1 / (powers + 1)),
        (exact.uniform(1, 1, 0.5, 1.5), (1.5 ** (powers + 1) - 0.5 ** (powers + 1)) / (powers + 1)),
        (exact.beta(1, 1, 0.5, 0.5), [1, 1 / 2, 3 / 8, 5 / 16, 35 / 128, 63 / 256]),
        (exact.beta(1, 1, 2, 3), [1, 2 / 5, 1 / 5, 4 / 35, 1 / 14, 1 / 21]),
        (exact.gaussian(1, 1, 0.8, 0.5), [1, 0.8, 0.89, 1.112, 1.5571, 2.35768]),
    ):
        assert_allclose(mask.probs @ mask.r[:, 0] ** powers, moments, rtol=1e-12)


@pytest.mark.parametrize("make", [lambda: Overdamped(0.4, G4), lambda: Underdamped(0.4, 1.1, 0.5, S4)])
def test_joint_law_is_that_of_a_discrete_lyapunov_solver(make: Callable[[], Overdamped | Underdamped]) -> None:
    noise = 0.3 * np.linalg.inv(PRIOR)
    got = stationary_cov(L4, LABELS, None, make(), prior=PRIOR, temperature=0.6, gradient_noise=noise)
    H, Id = L4 + PRIOR, np.eye(4)
    if isinstance(make(), Overdamped):
        G = np.diag(G4)
        A, Q = Id - 0.2 * G @ H, 0.4 * 0.6 * G + 0.04 * G @ noise @ G
    else:
        h, γ, s = 0.4, 1.1, np.diag(S4)
        to_v = np.hstack([-h * s @ H, (1 - h * γ) * Id])  # of (θ, v)
        A = np.vstack([np.hstack([Id, np.zeros((4, 4))]) + h * s @ to_v, to_v])
        into = np.vstack([h * s, Id])
        Q = into @ (h * (2 * γ * 0.6 - h * 0.5) * Id + h * h * s @ noise @ s) @ into.T
    V = solve_discrete_lyapunov(A, Q)
    assert_allclose(got.cov, V[:4, :4], rtol=1e-10, atol=1e-12)
    if got.kinetic is not None:
        assert_allclose(got.kinetic, np.trace(V[4:, 4:]) / 4, rtol=1e-10)
    assert_allclose(
        got.cov, stationary_cov(L4 + PRIOR, LABELS, None, make(), temperature=0.6, gradient_noise=noise).cov
    )


def test_S_on_scalar_groups_at_a_finite_step() -> None:
    """V_i = [1 + (ε/4) Σ_{j≠i} L_ij² V_j] / [L_ii (1 − εL_ii/4)], no correlation."""
    ε, V = 0.6, np.ones(4)
    O2 = (L4 - np.diag(np.diag(L4))) ** 2
    for _ in range(200):
        V = (1 + ε / 4 * O2 @ V) / (np.diag(L4) * (1 - ε * np.diag(L4) / 4))
    got = stationary_cov(L4, range(4), exact.one_hot(4), Overdamped(ε)).cov
    assert_allclose(got, np.diag(V), rtol=1e-12, atol=1e-14)


def test_laws_that_must_coincide_at_a_finite_step() -> None:
    def law(mask: exact.MaskLaw | None, labels: np.ndarray = LABELS, **more: object) -> np.ndarray:
        return stationary_cov(L4, labels, mask, Overdamped(0.5), prior=PRIOR, **more).cov  # type: ignore[arg-type]

    one = np.zeros(4, int)
    assert_allclose(law(exact.bernoulli_nonzero(1, 0.3, 3), one), law(None, one))  # one group: nothing to cut
    assert_allclose(law(exact.bernoulli(3, 1.0, 2)), law(None))
    assert_allclose(law(exact.one_hot(3, 3)), law(exact.one_hot(3)))
    assert_allclose(law(exact.stratified(3, 1)), law(None))
    assert_allclose(law(None, ensemble=4), law(None))
    assert_allclose(law(exact.one_hot(3), ensemble=10**9), law(exact.one_hot(3)), rtol=1e-7)
    # independent repeats by their moments = the same law written out as one list of configurations
    half = exact.bernoulli(3, 0.4, 2)
    n = len(half.probs)
    both = np.concatenate([np.repeat(half.r, n, 0), np.tile(half.r, (n, 1, 1))], 1)
    written_out = exact.MaskLaw(np.outer(half.probs, half.probs).ravel(), both, 1, half.w)
    for E in (None, 1, 3):
        assert_allclose(law(written_out, ensemble=E, past=2, force=G4), law(half, ensemble=E, past=2, force=G4))
    # infinitely many masks: no noise from them, so plain Euler on P
    P = PRIOR + 0.6 * D4 + 0.4 * L4
    assert_allclose(law(exact.bernoulli(3, 0.4, 10**9)), np.linalg.inv(P @ (np.eye(4) - 0.125 * P)), rtol=1e-6)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="unstable"):
        stationary_cov(L4, LABELS, exact.one_hot(3), Overdamped(2.5))
    with pytest.raises(ValueError, match="noise estimate"):
        stationary_cov(L4, LABELS, None, Underdamped(0.5, 0.1, noise=1.0))
    with pytest.raises(ValueError, match="labels"):
        stationary_cov(L4, LABELS, exact.one_hot(2), Overdamped(0.1))
    with pytest.raises(ValueError, match="count"):
        exact.one_hot(3, 4)
    with pytest.raises(ValueError, match="sum 1"):
        exact.MaskLaw(np.ones(2), np.ones((2, 1, 3)), 1, 1.0)
    with pytest.raises(ValueError, match="at least 1"):
        stationary_cov(L4, LABELS, None, Overdamped(0.1), past=0)


def test_regression_has_its_reference_numbers() -> None:
    X, y, L, mu = exact.regression()
    assert X.shape == (100, 4)
    assert y.shape == (100,)
    sd = lambda cov: np.sqrt(np.diag(cov))
    close = lambda got, want: assert_allclose(got, want, atol=6e-5)
    four, two = np.arange(4), np.array([0, 0, 1, 1])
    close(mu, [1.1398, -0.5039, 1.3707, 0.4542])
    joint = limit_cov(L, four, None)
    close(sd(joint), [0.1650, 0.1853, 0.1251, 0.0999])
    close(sd(limit_cov(L, four, exact.one_hot(4))), [0.0932, 0.0931, 0.0932, 0.0995])
    close(sd(limit_cov(L, two, exact.one_hot(2))), [0.1649, 0.1647, 0.0934, 0.0998])
    half = limit_cov(L, four, exact.bernoulli(4, 0.5, 1))
    close(sd(half), [0.1036, 0.1056, 0.1001, 0.0997])
    assert_allclose(half[0, 1] / sd(half)[:2].prod(), -0.354, atol=6e-4)
    assert_allclose(joint[0, 1] / sd(joint)[:2].prod(), -0.738, atol=6e-4)
    assert_allclose([exact.kl_product(L, four), exact.kl_product(L, two)], [0.8698, 0.2962], atol=6e-5)
    assert_allclose(exact.kappa(L, four), 0.157, atol=6e-4)
    # the prior of its own, at 0: the same mean for every weight with w Σ_k E r_k = 1, and only for those
    lik = L - np.eye(4)
    mean = lambda mask: exact.stationary_mean(lik, np.linalg.solve(lik, X.T @ y), four, mask, np.eye(4), np.zeros(4))
    for mask in (None, exact.one_hot(4, 2), exact.stratified(4, 2), exact.bernoulli_nonzero(4, 0.2, 2)):
        assert_allclose(mean(mask), mu, rtol=1e-12)
    assert_allclose(mean(exact.uniform(4, 1)), mu, rtol=1e-12)
    sharper = np.linalg.solve(np.eye(4) + 1.5 * lik, 1.5 * X.T @ y)
    assert_allclose(mean(exact.uniform(4, 1, normalise="square")), sharper, rtol=1e-12)


# ------------------------------------------------------------------------------------------------------- particles
Draw = Callable[[np.random.Generator, int], np.ndarray]  # (rng, n) -> masks [n, K, 3]


def random_rows(rng: np.random.Generator, n: int) -> np.ndarray:  # 2 different one-hot rows of 3
    return np.eye(3)[np.argsort(rng.random((n, 3)), 1)[:, :2]]


def not_all_zero(rng: np.random.Generator, n: int) -> np.ndarray:  # K = 2, by rejection
    r = rng.random((n, 2, 3)) < 0.3
    while (empty := ~r.any(-1)).any():
        r[empty] = rng.random((int(empty.sum()), 3)) < 0.3
    return r


def one_of_two(rng: np.random.Generator, n: int) -> np.ndarray:
    first = rng.random((n, 1, 3)) < 0.5
    return np.concatenate([first, ~first], 1)


S = (exact.one_hot(3), lambda rng, n: np.broadcast_to(np.eye(3), (n, 3, 3)), 1.0)
TWO_GROUPS = (exact.one_hot(3, 2), random_rows, 3 / 2)
ONE_MASK = (exact.bernoulli(3, 0.5, 1), lambda rng, n: rng.random((n, 1, 3)) < 0.5, 2.0)
TWO_MASKS = (exact.bernoulli(3, 0.4, 2), lambda rng, n: rng.random((n, 2, 3)) < 0.4, 1 / 0.8)
NONZERO = (exact.bernoulli_nonzero(3, 0.3, 2), not_all_zero, (1 - 0.7**3) / (2 * 0.3))
STRATIFIED = (exact.stratified(3, 2), one_of_two, 1.0)
UNIFORM = (exact.uniform(3, 2), lambda rng, n: rng.random((n, 2, 3)), 1.0)
WIDE = (exact.uniform(3, 1, -0.5, 1.0), lambda rng, n: rng.uniform(-0.5, 1, (n, 1, 3)), 4.0)
GAUSS = (exact.gaussian(3, 1, 0.9, 0.4), lambda rng, n: rng.normal(0.9, 0.4, (n, 1, 3)), 1 / 0.9)
SQUARE = (exact.gaussian(3, 2, 0.9, 0.4, "square"), lambda rng, n: rng.normal(0.9, 0.4, (n, 2, 3)), 1 / (2 * 0.97))


@dataclass
class Case:
    mask: tuple[exact.MaskLaw, Draw, float]
    sampler: Overdamped | Underdamped
    prior: np.ndarray | None = None
    temperature: float = 1.0
    ensemble: int | None = None
    past: int = 1
    centres: tuple[np.ndarray, np.ndarray] | None = None  # of prior and likelihood
    L: np.ndarray = field(default_factory=lambda: L4)


SGLD, SGHMC = Overdamped(0.45), Underdamped(0.45, 0.9)
CASES = {
    "S": Case(S, SGLD),
    "S count": Case(TWO_GROUPS, SGLD),
    "S_d K=1": Case(ONE_MASK, Overdamped(0.3)),
    "S_d K=2": Case(TWO_MASKS, SGLD),
    "conditional": Case(NONZERO, SGLD),
    "stratified": Case(STRATIFIED, SGLD),
    "uniform": Case(UNIFORM, SGLD),
    "uniform, tight": Case(WIDE, Overdamped(0.25), L=TIGHT),
    "gaussian": Case(GAUSS, SGLD),
    "gaussian square, prior": Case(SQUARE, Overdamped(0.35), prior=PRIOR),
    "prior": Case(TWO_MASKS, Overdamped(0.35), prior=PRIOR),
    "past=2": Case(ONE_MASK, Overdamped(0.3), past=2),
    "past=2, uniform": Case(UNIFORM, SGLD, past=2),
    "T, G": Case(TWO_MASKS, Overdamped(0.4, G4), temperature=0.5),
    "SGHMC S": Case(S, SGHMC),
    "SGHMC S_d, V, s": Case(TWO_MASKS, Underdamped(0.4, 1.0, 0.8, S4), temperature=0.8),
    "ensemble S": Case(S, SGLD, ensemble=3),
    "ensemble S_d, prior, past=2": Case(ONE_MASK, Overdamped(0.3), prior=PRIOR, ensemble=3, past=2),
    "ensemble uniform, G": Case(UNIFORM, Overdamped(0.45, G4), ensemble=3),
    "ensemble uniform, tight": Case(WIDE, Overdamped(0.25), ensemble=3, L=TIGHT),
    "ensemble stratified": Case(STRATIFIED, SGLD, ensemble=2),
    "ensemble SGHMC S": Case(S, Underdamped(0.45, 0.9, 0.5, S4), ensemble=3, past=2),
    "ensemble SGHMC S_d": Case(TWO_MASKS, Underdamped(0.35, 1.0), prior=PRIOR, ensemble=3, temperature=0.5),
    "two centres": Case(ONE_MASK, Overdamped(0.25), prior=PRIOR, centres=(-2 * G4, 3 * S4)),
    "two centres, square, ensemble": Case(SQUARE, Overdamped(0.3), prior=PRIOR, ensemble=3, centres=(-2 * G4, 3 * S4)),
}


@pytest.mark.parametrize("name", CASES)
def test_particles_have_the_finite_step_law(name: str) -> None:
    """Particles take past draws from one another (own history) or from their own ensemble of E."""
    case = CASES[name]
    (law, draw, w), L = case.mask, case.L
    E = case.ensemble or 1
    centre_prior, centre_lik = case.centres or (np.zeros(4), np.zeros(4))
    Λ0 = np.zeros((4, 4)) if case.prior is None else case.prior
    mean = exact.stationary_mean(L, centre_lik, LABELS, law, Λ0, centre_prior)
    got = stationary_cov(
        L,
        LABELS,
        law,
        case.sampler,
        prior=case.prior,
        temperature=case.temperature,
        ensemble=case.ensemble,
        past=case.past,
        force=L @ (mean - centre_lik),
    )
    rng = np.random.default_rng(0)
    units, burn, keep = 15_000 // E, 55, 40
    n, θ = units * E, np.zeros((units * E, 4)) + mean
    v, first = np.zeros_like(θ), np.arange(n) // E * E
    sums = np.zeros((units, 4, 4)), np.zeros((units, 4, 4)), np.zeros(units), np.zeros((units, 4))
    for t in range(burn + keep):
        r = draw(rng, n)
        g = (θ - centre_prior) @ Λ0
        for k in range(r.shape[1]):
            present = r[:, k, LABELS]
            for _ in range(case.past):
                past = np.empty_like(θ)
                for group in range(3):
                    row = rng.integers(0, n, n) if case.ensemble is None else first + rng.integers(0, E, n)
                    past[:, group == LABELS] = θ[:, group == LABELS][row]
                φ = present * θ + (1 - present) * past
                g += w / case.past * present * ((φ - centre_lik) @ L)
        if isinstance(case.sampler, Overdamped):
            ε, G = case.sampler.step_size, 1.0 if case.sampler.G is None else np.asarray(case.sampler.G)
            θ = θ - ε / 2 * G * g + rng.normal(size=θ.shape) * np.sqrt(ε * case.temperature * G)
        else:
            h, γ, s = case.sampler.time_step, case.sampler.friction, case.sampler.s
            s = 1.0 if s is None else np.asarray(s)
            sd = np.sqrt(h * (2 * γ * case.temperature - h * case.sampler.noise))
            v = v - h * s * g - h * γ * v + rng.normal(size=θ.shape) * sd
            θ = θ + h * s * v
        if t >= burn:
            x = (θ - mean).reshape(units, E, 4)
            own, all_ = np.matmul(x.swapaxes(1, 2), x), np.einsum("ui,uj->uij", x.sum(1), x.sum(1))
            for total, term in zip(
                sums, (own / E, (all_ - own) / max(E * (E - 1), 1), (v**2).mean(1).reshape(units, E).mean(1), x.mean(1))
            ):
                total += term / keep
    se = lambda total: total.std(0) / np.sqrt(units)
    z = np.abs(sums[0].mean(0) - got.cov) / se(sums[0])
    assert z.max() < 4.5
    # what is tested differs clearly from the small-step law, so that finite-step terms cannot be missing
    limit = limit_cov(L, LABELS, law, prior=case.prior, temperature=case.temperature, ensemble=case.ensemble)
    assert (np.abs(sums[0].mean(0) - limit) / se(sums[0])).max() > 12
    if got.kinetic is not None:
        assert abs(sums[2].mean() - got.kinetic) < 4.5 * se(sums[2])
    if case.ensemble:
        assert got.between is not None
        assert (np.abs(sums[1].mean(0) - got.between) < 4.5 * se(sums[1])).all()
    # the mean of particles that draw from one another fluctuates as one ensemble: P̄, not P, has the say
    drift = Λ0 + law.first()[LABELS, None] * L
    assert (np.abs(sums[3].mean(0)) < 4.5 * np.sqrt(2 * case.temperature * np.diag(np.linalg.inv(drift)) / n)).all()


# -------------------------------------------------------------------------------------------------------- mixtures
def test_mixture_density_and_drift() -> None:
    x = np.linspace(-6, 6, 241)
    grid = np.stack(np.meshgrid(x, x, indexing="ij"), -1)
    p = np.exp(mixtures.log_prob(grid, 1.2))
    assert_allclose(p.sum() * 0.05**2, 1, rtol=1e-10)
    assert_allclose(p[180, 150], (np.exp(-((3 - 1.2) ** 2) - 0.3**2) + np.exp(-(4.2**2) - 2.7**2)) / np.pi / 2)
    points = np.random.default_rng(0).normal(size=(50, 2))
    up, down = points + np.array([1e-6, 0]), points - np.array([1e-6, 0])
    slope = (mixtures.log_prob(up, 1.2) - mixtures.log_prob(down, 1.2)) / 2e-6
    assert_allclose(mixtures.drift(points[:, 0], points[:, 1], 1.2), -slope, atol=1e-8)


@pytest.mark.parametrize(
    "a, start, mean, var, kl",
    [
        (1.5, None, 1.491, 0.514, 0.688),
        (1.5, -1.5, -1.491, 0.514, 0.688),
        (1.0, None, 0.737, 0.761, 0.564),
        (1.0, (-0.5, -0.1), -0.737, 0.761, 0.564),
        (1.0, 0.0, 0.0, 1.060, 0.620),
        (0.8, None, 0.0, 0.898, 0.324),
        (0.8, -0.8, 0.0, 0.898, 0.324),
    ],
)
def test_mean_field_fixed_points(a: float, start: float | None, mean: float, var: float, kl: float) -> None:
    got = mixtures.grid_cavi(a, start=start)
    for value, want in ((got.means, mean), (got.vars, var), (got.kl, kl)):
        assert_allclose(value, want, atol=6e-4)
    finer = mixtures.grid_cavi(a, start=start, n=801)
    assert_allclose([finer.vars[0], finer.kl], [got.vars[0], got.kl], atol=1e-9)


@pytest.mark.parametrize("a", [1.5, 1.0])
def test_chain_law_tends_to_mean_field(a: float) -> None:
    laws = [mixtures.grid_chain(a, ε) for ε in (0.04, 0.02, 0.01)]
    for values, want in (([q.mean for q in laws], "means"), ([q.var for q in laws], "vars")):
        once = [2 * values[1] - values[0], 2 * values[2] - values[1]]  # Richardson, twice: what is left at ε = 0
        assert_allclose((4 * once[1] - once[0]) / 3, getattr(mixtures.grid_cavi(a), want)[0], atol=2e-4)
        assert abs(values[1] - values[2]) > 1e-4


@pytest.mark.parametrize("a, step_size", [(1.5, 0.4), (1.2, 0.2), (0.8, 0.3)])
def test_chain_law_is_that_of_particles(a: float, step_size: float) -> None:
    """25 populations, each of whose particles draw their past from one another: its mean wanders as a whole."""
    law, rng, n, keep = mixtures.grid_chain(a, step_size), np.random.default_rng(1), 1_000, 60
    x = np.sqrt(law.var) * rng.normal(size=(2, 25, n)) + law.mean
    moments = np.zeros((25, 2))
    for t in range(60 + keep):
        y = np.take_along_axis(x[::-1], rng.integers(0, n, x.shape), -1)
        x = x - step_size / 2 * mixtures.drift(x, y, a) + np.sqrt(step_size) * rng.normal(size=x.shape)
        if t >= 60:
            moments += np.stack([x.mean((0, 2)), ((x - law.mean) ** 2).mean((0, 2))], -1) / keep
    error = np.abs(moments.mean(0) - [law.mean, law.var])
    assert (error < 4.5 * moments.std(0) / 5).all()
    assert (error < 0.02).all()


def test_chain_refuses_steps_it_cannot_resolve() -> None:
    with pytest.raises(ValueError, match="stable"):
        mixtures.grid_chain(1.0, 2.0)
    with pytest.raises(ValueError, match="too few"):
        mixtures.grid_chain(1.0, 1e-3, n=101)
