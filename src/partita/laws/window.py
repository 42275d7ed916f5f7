"""The exact stationary law of structured samplers whose past draws are a chain's own last R states.

Setting and letters are those of exact.py: a Gaussian target, z = θ−μ (Overdamped) or (θ−μ, v) (Underdamped), and
z' = A z + (1/J) Σ_kj B_k θ̃_kj + noise. But now the history is short: its rows are z_t, z_{t−1}, …, z_{t−R+1}, the present
one INCLUDED (a state is written by the step that makes it, and read by the next; `Window(R, every=1)` once full), and
every group of every θ̃_kj is that of a row picked uniformly and independently. So z is a linear system with random
coefficients and delays, and its second moments are those of its lags:

    Γ(s) = E[z_t z_{t−s}'], s = 0..R−1, Γ(−s) = Γ(s)'        W(s) = E[θ̃ z_{t−s}'] = (1/R) Σ_u Γ(s−u)
    E[θ̃_i θ̃_j] = Γ(0)_ij within one group of one θ̃_kj, and else M_ij = (1/R) Σ_s W(s)_ij = (1/R²) Σ_su Γ(s−u)_ij

R = 1: every past draw is the present state, as with ensemble=1. R → ∞: own history, with an error of order 1/R. Between
the two, a delayed force feeds the oscillations of a sampler with momentum: both limits may be stable and this not.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from partita.laws.exact import Array, MaskLaw, Overdamped, Underdamped, _moment, _setting


class Windowed(NamedTuple):
    cov: Array  # Cov θ [D, D]
    kinetic: float | None  # E|v|²/D, Underdamped only
    lags: Array  # Cov(θ_t, θ_{t−s}) [R, D, D]


def window_cov(
    L_lik: ArrayLike,
    labels: ArrayLike,
    mask: MaskLaw | None,
    sampler: Overdamped | Underdamped,
    R: int,
    *,
    prior: ArrayLike | None = None,
    temperature: float = 1.0,
    past: int = 1,
    gradient_noise: ArrayLike | None = None,
    force: ArrayLike | None = None,
) -> Windowed:
    """The exact finite-step stationary law with a Window of R rows; arguments as for stationary_cov.

    ValueError where there is none (unstable).

    Given the rows, z' is its mean Ā z + (B̄/R) Σ_s z_{t−s} (bars: over masks) plus what masks, picks and noise add; that
    is uncorrelated in time, with covariance N. With m(s) = Ā Γ(s) + B̄ W(s), the moment of that mean and z_{t−s},

        Γ(s+1) = m(s)        Γ(0) = m(0) Ā' + (1/R) Σ_s m(s) B̄' + N                               (Γ is linear in N)
        N = C[AΓ(0)A'] + C[B W(0) A'] + C[A W(0)' B'] + C[BMB'] + (1/J) Σ_k E[B_k blockdiag(Γ(0)−M) B_k'] + noise

    where B = Σ_k B_k and C[XVY'] = E[XVY'] − X̄VȲ'. The first line is solved for a Γ per unit of N, as R S² linear
    equations (S = D or 2D: D = 4, R = 16 takes a fraction of a second), which turns the second into N = H N + noise.
    Both are positive maps, so there is a stationary law exactly if the mean is stable and H has a radius below 1.
    """
    if past < 1 or R < 1:
        raise ValueError(f"past and R must be at least 1, got {past} and {R}")
    L, g, Λ0, law = _setting(L_lik, labels, mask, prior)
    D, p, reps, r = len(g), law.probs, law.repeats, law.r[:, :, g]
    F, gain, noise = sampler.dynamics(D, temperature)
    S = len(F)
    pull = law.w * (r.sum(1) - p @ r.sum(1)) * (0.0 if force is None else np.asarray(force, float))  # [n, D]
    extra = reps * (p[:, None] * pull).T @ pull + (0.0 if gradient_noise is None else np.asarray(gradient_noise, float))
    noise = noise + gain @ extra @ gain.T

    drive = lambda X: np.concatenate([-gain @ X, np.zeros((*X.shape[:-2], S, S - D))], -1)  # g sees θ, not v
    Bk = drive(law.w * np.einsum("cki,ckj->ckij", r, 1 - r) * L)  # [n, K0, S, S]
    # F and Λ₀ are shared out over the independent repeats, so that A too is a plain sum of iid terms
    A, B = F / reps + drive(Λ0 / reps + law.w * np.einsum("cki,ckj->cij", r, r) * L), Bk.sum(1)  # [n, S, S]
    Am, Bm = (reps * np.tensordot(p, X, 1) for X in (A, B))
    stack = np.eye(R * S, k=-S)  # of the mean: rows move on by one
    stack[:S] = np.tile(Bm / R, R)
    stack[:S, :S] += Am
    _stable(stack, "the mean grows")

    # linear maps of all Γ(0..R−1), a vector of n = R S² numbers, to matrices as vectors of S² (by rows)
    one, unit = np.eye(S), np.eye(S * S)
    flip = unit.reshape(S, S, -1).swapaxes(0, 1).reshape(S * S, -1)  # transposes
    even = (unit + flip) / 2  # Γ(0) enters by its symmetric part only: nothing else of it is determined
    s, t = np.ogrid[:R, :R]
    half = np.where(t == 0, 0.5, 1.0) / R
    lag = np.eye(R * S * S).reshape(R, S * S, -1)  # Γ(s) [R, S², n]
    lag[0] = even @ lag[0]
    W = (np.kron(half * (t <= s), unit) + np.kron(half * (t < R - s), flip)).reshape(lag.shape)
    m = np.kron(Am, one) @ lag + np.kron(Bm, one) @ W
    system = np.eye(R * S * S).reshape(lag.shape)
    system[0] -= np.kron(one, Am) @ m[0] + np.kron(one, Bm) @ m.mean(0)
    system[1:] -= m[:-1]
    n = R * S * S
    lags = np.linalg.solve(system.reshape(n, n), np.pad(even, ((0, n - S * S), (0, 0))))  # [n, S²]: Γ per unit of N

    def spread(X: Array, Y: Array) -> Array:  # V -> C[XVY']
        return reps * (_moment(p, X, Y) - np.kron(np.tensordot(p, X, 1), np.tensordot(p, Y, 1)))

    same = np.pad(np.equal.outer(g, g).astype(float), (0, S - D)).ravel()  # blockdiag, as a factor on vec(V)
    own = reps / past * sum(_moment(p, X, X) for X in Bk.swapaxes(0, 1)) * same
    Γ0, W0, M = (X @ lags for X in (lag[0], W[0], W.mean(0)))  # [S², S²]
    H = (spread(A, A) + own) @ Γ0 + (unit + flip) @ spread(B, A) @ W0 + (spread(B, B) - own) @ M
    _stable(H, "what masks and picks add to the second moments grows")
    Γ = np.asarray(lags @ np.linalg.solve(unit - H, noise.ravel()), float).reshape(R, S, S)
    kinetic = float(np.trace(Γ[0, D:, D:]) / D) if S > D else None
    return Windowed(Γ[0, :D, :D], kinetic, Γ[:, :D, :D])


def _stable(X: Array, what: str) -> None:
    radius = np.abs(np.linalg.eigvals(X)).max()
    if not radius < 1 - 1e-12:
        raise ValueError(f"unstable: {what}, by a factor of {radius:.6f}; take a smaller step or another R")
