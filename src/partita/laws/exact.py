"""Exact stationary laws of structured samplers on Gaussian targets: what every sampler is tested against.

The energy is U(θ) = ½(θ−μ)'(Λ₀ + L_lik)(θ−μ). The prior's Λ₀ stays whole; the likelihood's L_lik is composed with masks
r_k and past draws θ̃_kj as in structured SG-MCMC (Alexos, Boyd & Mandt, ICML 2022):

    g(θ) = Λ₀(θ−μ) + (w/J) Σ_k Σ_j R_k L_lik (φ_kj−μ),   φ_kj = R_k θ + (I−R_k) θ̃_kj,   R_k = diag(r_k[labels])

Every group of every θ̃_kj is an independent row of the history. All is linear in θ and θ̃, so second moments obey an
affine recursion, solved here at any step size, with numpy and nothing else of this package: a second path.

D coordinates · M groups · K masks a step · J = `past` draws a mask · n configurations of a mask law · E chains, coupled
"""

from dataclasses import dataclass
from itertools import combinations, product
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Normalise = Literal["mean", "square"]


@dataclass(frozen=True, eq=False)
class MaskLaw:
    """r[c] with probability probs[c]; a step takes `repeats` independent ones, K = K0·repeats, weighted w."""

    probs: Array  # [n]
    r: Array  # [n, K0, M]
    repeats: int
    w: float

    def __post_init__(self) -> None:
        ok = self.r.ndim == 3 and self.probs.shape == self.r.shape[:1] and self.probs.min() >= 0
        if not (ok and abs(self.probs.sum() - 1) < 1e-9 and self.repeats >= 1 and 0 < self.w < np.inf):
            raise ValueError(f"expected probs [n] of sum 1, r [n, K0, M], repeats >= 1 and a finite w > 0, got {self}")

    def first(self) -> Array:
        """w Σ_k E[r_k] [M]: how strongly the likelihood pulls the mean of all chains; 1 where that mean is unbiased."""
        return self.w * self.repeats * np.einsum("c,cki->i", self.probs, self.r)

    def second(self) -> Array:
        """w Σ_k E[r_k r_k'] [M, M]: how strongly it pulls one chain while the past stays put."""
        return self.w * self.repeats * np.einsum("c,cki,ckj->ij", self.probs, self.r, self.r)


def one_hot(M: int, count: int | None = None) -> MaskLaw:
    """S: the M one-hot masks, w = 1; or `count` different ones of them, chosen uniformly, w = M/count."""
    K = M if count is None else count
    if not 1 <= K <= M:
        raise ValueError(f"count must be in 1..{M}, got {K}")
    r = np.eye(M)[list(combinations(range(M), K))]
    return MaskLaw(np.full(len(r), 1 / len(r)), r, 1, M / K)


def bernoulli(M: int, rho: float, K: int) -> MaskLaw:
    """S_d: K independent masks, r_i ~ Bernoulli(ρ), w = 1/(Kρ)."""
    return continuous(M, K, [0.0, 1.0], [1 - rho, rho])


def bernoulli_nonzero(M: int, rho: float, K: int) -> MaskLaw:
    """S_d with every mask conditioned on Σ_i r_i > 0: E r = ρ/(1−(1−ρ)^M), w = 1/(K E r)."""
    free = bernoulli(M, rho, K)
    some = free.r.sum((1, 2)) > 0
    nonzero = float(free.probs[some].sum())
    return MaskLaw(free.probs[some] / nonzero, free.r[some], K, nonzero / (K * rho))


def stratified(M: int, K: int) -> MaskLaw:
    """Each group is present in exactly one of the K masks, uniformly and independently; w = 1."""
    r = np.eye(K)[list(product(range(K), repeat=M))].transpose(0, 2, 1)
    return MaskLaw(np.full(len(r), 1 / len(r)), r, 1, 1.0)


def continuous(M: int, K: int, nodes: ArrayLike, weights: ArrayLike, normalise: Normalise = "mean") -> MaskLaw:
    """K independent masks of iid r_i, given by a quadrature exact up to r⁴ (all that second moments need).

    "mean": w = 1/(K E r). "square": w = 1/(K E r²) tempers no block of the likelihood but pulls its mean with E r/E r²
    instead of 1: beside a whole prior the mean is wrong by that likelihood power, and with E r = 0 nothing pulls it.
    """
    x, p = np.asarray(nodes, float), np.asarray(weights, float)
    moment = float(p @ x if normalise == "mean" else p @ x**2)
    if abs(moment) < 1e-12:
        raise ValueError("E r = 0 leaves the weight 1/(K E r) undefined; normalise='square' is the alternative")
    picks = np.array(list(product(range(len(x)), repeat=M)))
    return MaskLaw(p[picks].prod(1), x[picks][:, None], K, 1 / (K * moment))


def gauss(moments: ArrayLike) -> tuple[Array, Array]:
    """Three Gauss nodes and weights, exact up to x⁵, from E x⁰ … E x⁶ (Golub & Welsch 1969, by Cholesky)."""
    m = np.asarray(moments, float)
    C = np.linalg.cholesky(m[np.add.outer(np.arange(4), np.arange(4))]).T
    ratio, off = np.r_[0, np.diag(C, 1) / np.diag(C)[:3]], np.diag(C)[1:3] / np.diag(C)[:2]
    nodes, vectors = np.linalg.eigh(np.diag(np.diff(ratio)) + np.diag(off, 1) + np.diag(off, -1))
    return nodes, m[0] * vectors[0] ** 2


def uniform(M: int, K: int, low: float = 0.0, high: float = 1.0, normalise: Normalise = "mean") -> MaskLaw:
    """r_i ~ U(low, high), as its three Gauss-Legendre nodes."""
    mid, half = (low + high) / 2, (high - low) / 2 * np.sqrt(0.6)
    return continuous(M, K, [mid - half, mid, mid + half], [5 / 18, 4 / 9, 5 / 18], normalise)


def beta(M: int, K: int, a: float, b: float, normalise: Normalise = "mean") -> MaskLaw:
    """r_i ~ Beta(a, b): E rⁿ = Π_{t<n} (a+t)/(a+b+t)."""
    return continuous(M, K, *gauss(np.cumprod([1.0] + [(a + t) / (a + b + t) for t in range(6)])), normalise)


def gaussian(M: int, K: int, mean: float, s: float, normalise: Normalise = "mean") -> MaskLaw:
    """r_i ~ N(mean, s²), as its three Gauss-Hermite nodes."""
    return continuous(M, K, mean + s * np.sqrt(3) * np.array([-1, 0, 1]), [1 / 6, 2 / 3, 1 / 6], normalise)


def limit_cov(
    L_lik: ArrayLike,
    labels: ArrayLike,
    mask: MaskLaw | None,
    *,
    prior: ArrayLike | None = None,
    temperature: float = 1.0,
    ensemble: int | None = None,
) -> Array:
    """The law of θ as the step goes to 0, [D, D]: T P⁻¹, whatever the sampler and its preconditioner.

        P_ij = Λ₀_ij + w Σ_k E[r_k,i r_k,j] L_lik,ij          (i, j here: the groups of two coordinates)

    mask=None: the joint law, P = L. S: blockdiag(L). Bernoulli: (1−ρ) blockdiag(L) + ρL. Continuous, w = 1/(K E r):
    (Var r/E r) blockdiag(L) + (E r) L. ensemble=E: chains deviate from their mean with P, and their mean obeys
    P̄ = Λ₀ + w Σ_k E[R_k] L_lik, the joint L only if w Σ_k E r_k = 1 (not for "square"): T(P̄⁻¹/E + (1−1/E)P⁻¹).
    """
    L, g, Λ0, law = _setting(L_lik, labels, mask, prior)
    P, Pm = Λ0 + law.second()[np.ix_(g, g)] * L, Λ0 + law.first()[g, None] * L
    parts = [(1.0, P)] if ensemble is None else [(1 - 1 / ensemble, P), (1 / ensemble, Pm)]
    for _, X in parts:  # P̄ is not symmetric where E r differs between groups: the law then depends on the sampler
        if not np.allclose(X, X.T, atol=1e-9 * np.abs(X).max()) or np.linalg.eigvalsh(X)[0] <= 0:
            raise ValueError(
                f"the mean drift must be symmetric and positive definite to have a small-step law, got {X}"
            )
    return temperature * np.sum([share * np.linalg.inv(X) for share, X in parts], axis=0)


def stationary_mean(
    L_lik: ArrayLike, mu_lik: ArrayLike, labels: ArrayLike, mask: MaskLaw | None, prior: ArrayLike, mu_prior: ArrayLike
) -> Array:
    """m [D] when prior and likelihood have centres of their own, at any step, with own history and ensemble alike:

    Λ₀(m−μ₀) + w Σ_k E[R_k] L_lik(m−μ_lik) = 0; it is the posterior mean if w Σ_k E r_k = 1 (not for "square").
    """
    L, g, Λ0, law = _setting(L_lik, labels, mask, prior)
    FL = law.first()[g, None] * L
    return np.linalg.solve(Λ0 + FL, Λ0 @ np.asarray(mu_prior, float) + FL @ np.asarray(mu_lik, float))


@dataclass(frozen=True, eq=False)
class Overdamped:
    """SGLD, and pSGLD with frozen G [D] (None: 1): θ' = θ − (ε/2) G g + N(0, εTG)."""

    step_size: float
    G: ArrayLike | None = None

    def dynamics(self, D: int, T: float) -> tuple[Array, Array, Array]:
        """(F [D, D], Γ [D, D], noise [D, D]) of z' = F z − Γ g + N(0, noise), z = θ−μ."""
        G = np.diag(np.broadcast_to(np.asarray(1.0 if self.G is None else self.G, float), (D,)))
        return np.eye(D), self.step_size / 2 * G, self.step_size * T * G


@dataclass(frozen=True, eq=False)
class Underdamped:
    """SGHMC, mass by substitution (s [D]; None: 1): v' = v − h s g − hγ v + N(0, h(2γT − hV̂)), θ' = θ + h s v'."""

    time_step: float
    friction: float
    noise: float = 0.0  # V̂
    s: ArrayLike | None = None

    def dynamics(self, D: int, T: float) -> tuple[Array, Array, Array]:
        """(F [2D, 2D], Γ [2D, D], noise [2D, 2D]) of z' = F z − Γ g + N(0, noise), z = (θ−μ, v)."""
        h, γ = self.time_step, self.friction
        variance = h * (2 * γ * T - h * self.noise)
        if variance < 0:
            raise ValueError(f"the noise estimate leaves a variance of h(2γT − hV̂) = {variance} < 0")
        s = np.diag(np.broadcast_to(np.asarray(1.0 if self.s is None else self.s, float), (D,)))
        kick = np.vstack([h * s, np.eye(D)])  # what changes v' moves θ' too, which uses the NEW v
        F = np.block([[np.eye(D), (1 - h * γ) * h * s], [np.zeros((D, D)), (1 - h * γ) * np.eye(D)]])
        return F, kick @ (h * s), variance * kick @ kick.T


class Stationary(NamedTuple):
    cov: Array  # Cov θ [D, D]
    kinetic: float | None  # E|v|²/D, Underdamped only
    between: Array | None  # Cov(θ^c, θ^d) [D, D] between coupled chains, E > 1 only


def stationary_cov(
    L_lik: ArrayLike,
    labels: ArrayLike,
    mask: MaskLaw | None,
    sampler: Overdamped | Underdamped,
    *,
    prior: ArrayLike | None = None,
    temperature: float = 1.0,
    ensemble: int | None = None,
    past: int = 1,
    gradient_noise: ArrayLike | None = None,
    force: ArrayLike | None = None,
) -> Stationary:
    """The exact finite-step stationary law; labels [D], mask=None: joint. ValueError where there is none (unstable).

    Own history (ensemble=None): each group of θ̃ has its law under θ's, independent of all else (a long history).
    ensemble=E: each group of θ̃ is that of one of the E present states, itself included, picked uniformly.
    gradient_noise [D, D]: covariance of further additive noise of g. force [D] = L_lik(m−μ_lik): the likelihood's
    gradient at the mean, not 0 if the prior is centred elsewhere; random masks turn it into noise.

    With z' = A z + (1/J) Σ_kj B_k θ̃_kj + noise, B = Σ_k B_k, V = E[z_c z_c'], W = E[z_c z_d'], Q = V/E + (1−1/E)W the
    moment of z_c with any past draw and of two different past draws or groups (own history: 0), bars for means:

        V' = E[AVA' + AQB' + BQA' + BQB'] + (1/J) Σ_k E[B_k blockdiag(V−Q) B_k'] + noise
        W' = ĀWĀ' + ĀQB̄' + B̄QĀ' + B̄QB̄'                                    (masks are independent between chains)
    """
    if past < 1 or (ensemble is not None and ensemble < 1):
        raise ValueError(f"past and ensemble must be at least 1, got {past} and {ensemble}")
    L, g, Λ0, law = _setting(L_lik, labels, mask, prior)
    D, p, reps, r = len(g), law.probs, law.repeats, law.r[:, :, g]
    F, Γ, noise = sampler.dynamics(D, temperature)
    S = len(F)
    pull = law.w * (r.sum(1) - p @ r.sum(1)) * (0.0 if force is None else np.asarray(force, float))  # [n, D]
    extra = reps * (p[:, None] * pull).T @ pull + (0.0 if gradient_noise is None else np.asarray(gradient_noise, float))
    noise = noise + Γ @ extra @ Γ.T

    drive = lambda X: np.concatenate([-Γ @ X, np.zeros((*X.shape[:-2], S, S - D))], -1)  # g sees θ, not v
    Bk = drive(law.w * np.einsum("cki,ckj->ckij", r, 1 - r) * L)  # [n, K0, S, S]
    # F and Λ₀ are shared out over the independent repeats, so that A too is a plain sum of iid terms
    A, B = F / reps + drive(Λ0 / reps + law.w * np.einsum("cki,ckj->cij", r, r) * L), Bk.sum(1)  # [n, S, S]
    Am, Bm = (reps * np.tensordot(p, X, 1) for X in (A, B))

    def pair(X: Array, Y: Array) -> Array:  # V -> E[(ΣX) V (ΣY)'], sums over the repeats
        return reps * _moment(p, X, Y) + (reps**2 - reps) * np.kron(np.tensordot(p, X, 1), np.tensordot(p, Y, 1))

    same = np.pad(np.equal.outer(g, g).astype(float), (0, S - D)).ravel()  # blockdiag, as a factor on vec(V)
    own = reps / past * sum(_moment(p, X, X) for X in Bk.swapaxes(0, 1)) * same
    mixed = pair(A, B) + pair(B, A) + pair(B, B) - own
    if ensemble is None or ensemble == 1:  # alone, Q = V: the past is the present
        maps = [[pair(A, A) + own + (0.0 if ensemble is None else mixed)]]
    else:
        e, across = 1 / ensemble, np.kron(Am, Bm) + np.kron(Bm, Am) + np.kron(Bm, Bm)
        maps = [[pair(A, A) + own + e * mixed, (1 - e) * mixed], [e * across, np.kron(Am, Am) + (1 - e) * across]]
    unit, upper = np.eye(S * S).reshape(S, S, -1), np.triu_indices(S)
    pick, spread = unit[upper], np.maximum(unit[upper], unit[upper[::-1]])  # half the unknowns: V and W are symmetric
    step = np.block([[pick @ block @ spread.T for block in row] for row in maps])
    radius = np.abs(np.linalg.eigvals(step)).max()
    if not radius < 1 - 1e-12:
        raise ValueError(f"unstable: second moments grow by {radius:.6f} a step; take a smaller step")
    start = np.r_[pick @ noise.ravel(), np.zeros(len(step) - len(pick))]
    moments = (np.linalg.solve(np.eye(len(step)) - step, start).reshape(len(maps), -1) @ spread).reshape(-1, S, S)
    kinetic = float(np.trace(moments[0][D:, D:]) / D) if S > D else None
    return Stationary(moments[0][:D, :D], kinetic, moments[1][:D, :D] if len(maps) > 1 else None)


def _moment(p: Array, X: Array, Y: Array) -> Array:
    """E[X ⊗ Y] over lists [n, S, S]: the matrix [S², S²] of V -> E[X V Y'] on vec(V) by rows."""
    n, S = X.shape[:2]
    XY = (p[:, None] * X.reshape(n, -1)).T @ Y.reshape(n, -1)
    return XY.reshape(S, S, S, S).transpose(0, 2, 1, 3).reshape(S * S, S * S)


def _setting(
    L_lik: ArrayLike, labels: ArrayLike, mask: MaskLaw | None, prior: ArrayLike | None
) -> tuple[Array, NDArray[np.intp], Array, MaskLaw]:
    L, g = np.asarray(L_lik, float), np.asarray(labels, int)
    Λ0 = np.zeros_like(L) if prior is None else np.asarray(prior, float)
    law = mask or MaskLaw(np.ones(1), np.ones((1, 1, g.max() + 1)), 1, 1.0)
    if not L.shape == Λ0.shape == (len(g), len(g)) or g.min() < 0 or g.max() >= law.r.shape[2]:
        raise ValueError(f"expected [D, D] and labels in 0..M-1, got {L.shape}, {Λ0.shape}, {g}, M={law.r.shape[2]}")
    return L, g, Λ0, law


def regression() -> tuple[Array, Array, Array, Array]:
    """(X [100, 4], y [100], L, mu): correlated inputs and a one, σ = σ_prior = 1; L = X'X + I, μ = L⁻¹X'y."""
    rng = np.random.default_rng(0)
    x = rng.multivariate_normal(np.zeros(3), [[1, 0.8, 0.5], [0.8, 1, 0.6], [0.5, 0.6, 1]], 100)
    y = x @ np.array([1.5, -0.8, 1.3]) + 0.5 + rng.normal(size=100)
    X = np.column_stack([x, np.ones(100)])
    return X, y, X.T @ X + np.eye(4), np.linalg.solve(X.T @ X + np.eye(4), X.T @ y)


def _blockdiag(L: ArrayLike, labels: ArrayLike) -> Array:
    return np.where(np.equal.outer(np.asarray(labels), np.asarray(labels)), np.asarray(L, float), 0.0)


def kl_product(L: ArrayLike, labels: ArrayLike) -> float:
    """KL(q ‖ p) of the best product of groups, N(μ, blockdiag(L)⁻¹): ½(Σ_i log det L_ii − log det L)."""
    return float(np.linalg.slogdet(_blockdiag(L, labels))[1] - np.linalg.slogdet(np.asarray(L, float))[1]) / 2


def kappa(L: ArrayLike, labels: ArrayLike) -> float:
    """κ = λ_min(blockdiag(L)⁻¹L): with its own whole history S forgets its start as t^−κ, S_d as t^−κ/((1−ρ)+ρκ)."""
    return float(np.linalg.eigvals(np.linalg.solve(_blockdiag(L, labels), np.asarray(L, float))).real.min())
