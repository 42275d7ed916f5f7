"""Exact answers on a mixture of two Gaussians: what a product of groups can and cannot represent.

    p(θ) = ½ N(θ; (a, a), vI) + ½ N(θ; −(a, a), vI),   θ in R²

Structured SG-MCMC (Alexos, Boyd & Mandt, ICML 2022) with one group per coordinate tends, as the step goes to 0, to a
fixed point of coordinate-ascent mean field, log q_i = E_{q_−i}[log p] + const. KL(q‖p) is convex in q, but product laws
are no convex set: well separated modes have two such optima, close ones a single one. `grid_cavi` finds them on a grid;
`grid_chain` finds the law that the sampler has at a finite step.

n grid points; a density on the grid sums to 1 (it includes the spacing).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def log_prob(theta: ArrayLike, a: float, v: float = 0.5) -> Array:
    """log p(θ), normalised. theta [..., 2] -> [...]"""
    θ = np.asarray(theta, float)
    near, far = (-((θ - side) ** 2).sum(-1) / (2 * v) for side in (a, -a))
    return np.asarray(np.logaddexp(near, far) - np.log(4 * np.pi * v))


def drift(x: ArrayLike, y: ArrayLike, a: float, v: float = 0.5) -> Array:
    """∂U/∂x at (x, y), U = −log p: (x − a tanh(a(x+y)/v))/v; tanh is the difference of the responsibilities."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    return np.asarray((x - a * np.tanh(a * (x + y) / v)) / v)


class MeanField(NamedTuple):
    means: Array  # [2]
    vars: Array  # [2]
    kl: float  # KL(q‖p)
    grid: Array  # [n]
    q: Array  # [2, n]


class ChainLaw(NamedTuple):
    """The stationary law of one coordinate."""

    mean: float
    var: float
    grid: Array  # [n]
    q: Array  # [n]


def grid_cavi(
    a: float,
    v: float = 0.5,
    *,
    start: float | tuple[float, float] | None = None,
    n: int = 401,
    tol: float = 1e-12,
    max_iter: int = 20_000,
) -> MeanField:
    """A fixed point of log q_i = E_{q_−i}[log p] + const, from q_i = N(start_i, v); start=None is the mode (a, a).

    start=0 keeps the symmetric fixed point, which for large a is a saddle and not an optimum.
    """
    x = _grid(a, v, n)
    log_p = log_prob(np.stack(np.meshgrid(x, x, indexing="ij"), -1), a, v)  # [n, n]
    centres = np.broadcast_to(np.asarray(a if start is None else start, float), (2,))
    q1, q2 = (_normalise(-((x - c) ** 2) / (2 * v)) for c in centres)
    for _ in range(max_iter):
        old = q1
        q1 = _normalise(log_p @ q2)
        q2 = _normalise(q1 @ log_p)
        if not centres.any():  # rounding would otherwise grow until it leaves the saddle
            q1, q2 = ((q + q[::-1]) / 2 for q in (q1, q2))
        if np.abs(q1 - old).sum() < tol:
            break
    else:
        raise ValueError(f"no fixed point within {max_iter} sweeps at a={a}, v={v}")
    q = np.stack([q1, q2])
    means = q @ x
    # −Σ q log q + log dx is the entropy of the density that q is on a grid
    entropies = -(q * np.log(np.maximum(q, 1e-300))).sum(1) + np.log(x[1] - x[0])
    kl = float(-entropies.sum() - q1 @ log_p @ q2)
    return MeanField(means, q @ x**2 - means**2, kl, x, q)


def grid_chain(
    a: float,
    step_size: float,
    v: float = 0.5,
    *,
    n: int | None = None,
    tol: float = 1e-10,
    max_iter: int = 300,
) -> ChainLaw:
    """The law of either coordinate of S-SGLD at step ε, self-consistent and in the mode (+, +):

        x' = x − (ε/2) ∂₁U(x, y) + N(0, ε),   y ~ q independent of x,   q = the law of x

    Given q for y, x is a Markov chain; q is replaced by that chain's stationary law until nothing changes. As ε → 0 the
    stationary law is the mean-field update, so this tends to `grid_cavi`.
    """
    if not 0 < step_size < 4 * v:
        raise ValueError(f"expected a step_size in (0, 4v) = (0, {4 * v}), where the chain is stable, got {step_size}")
    if n is None:  # a third of √ε, the noise of one step, is a cell
        n = int(np.clip(6 * _grid(a, v, 2)[1] / np.sqrt(step_size), 201, 601))
    x = _grid(a, v, n)
    dx = x[1] - x[0]
    if dx > np.sqrt(step_size):
        raise ValueError(f"{n} grid points are too few for step_size={step_size}: a cell is wider than √step_size")
    to = x[:, None] - step_size / 2 * drift(x[:, None], x, a, v)  # [n (x), n (y)], where the noise starts from
    # The point mass at `to` becomes four grid masses (cubic Lagrange weights), which keep its first three moments
    cell = np.clip(((to - x[0]) / dx).astype(int), 1, n - 3)
    t = (to - x[cell]) / dx
    corners = np.stack(
        [
            -t * (t - 1) * (t - 2) / 6,
            (t + 1) * (t - 1) * (t - 2) / 2,
            -(t + 1) * t * (t - 2) / 2,
            (t + 1) * t * (t - 1) / 6,
        ]
    )
    slots = np.arange(n)[:, None] * n + cell + np.arange(-1, 3)[:, None, None]  # [4, n, n], into [x, to]
    noise = np.exp(-((x[:, None] - x) ** 2) / (2 * step_size))
    noise /= noise.sum(1, keepdims=True)
    q = grid_cavi(a, v, n=n).q[0]
    last = np.zeros(n)
    last[-1] = 1
    new, change = q, np.zeros(n)
    for _ in range(max_iter):
        kernel = np.bincount(slots.ravel(), (corners * q).ravel(), n * n).reshape(n, n) @ noise  # [x, x']
        balance = kernel.T - np.eye(n)
        balance[-1] = 1  # one balance equation is redundant; Σ q = 1 takes its place
        old, old_change, new = new, change, np.linalg.solve(balance, last)
        change = new - q
        if np.abs(change).sum() < tol:
            break
        # Anderson's step of depth one: near the point where the mode disappears plain iteration takes thousands
        bend = change - old_change
        q = new - (change @ bend) / (bend @ bend) * (new - old) if old_change.any() else new
    else:
        raise ValueError(f"no self-consistent law within {max_iter} iterations at a={a}, step_size={step_size}")
    assert new.min() > -1e-12, "the stationary law has negative mass beyond rounding"
    new = np.maximum(new, 0) / np.maximum(new, 0).sum()
    mean = float(new @ x)
    return ChainLaw(mean, float(new @ x**2 - mean**2), x, np.asarray(new, float))


def _grid(a: float, v: float, n: int) -> Array:
    return np.linspace(-1, 1, n) * (abs(a) + 8 * np.sqrt(v))


def _normalise(log_q: Array) -> Array:
    q = np.exp(log_q - log_q.max())
    return np.asarray(q / q.sum())
