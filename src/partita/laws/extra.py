"""Rows of the law table that need a target of their own: real data, minibatches, short windows, two modes.

Each is a function (seed) -> Result and stands in EXTRA under its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from partita.laws import exact, mixtures
from partita.laws.table import Result, compare, moments
from partita.laws.window import window_cov
from partita.runs.setup import prepare, seeded
from partita.samplers import SGHMC, SGLD, Sampler
from partita.structure import Ensemble, Joint, Structure, Structured, Window, masks, partitions
from partita.target import Density, Gaussian, Normal, Posterior

PANELS: dict[str, tuple[list[int] | None, float | None]] = {  # groups, ρ (None: S)
    "joint": (None, None),
    "S, two groups": ([0, 0, 1, 1], None),
    "S, four groups": ([0, 1, 2, 3], None),
    "S_d ρ=.5, two groups": ([0, 0, 1, 1], 0.5),
    "S_d ρ=.5, four groups": ([0, 1, 2, 3], 0.5),
}


def regression_posterior() -> tuple[Posterior, tuple[Tensor, Tensor]]:
    """Bayesian linear regression through nn.Linear: θ = (w1, w2, w3, b), σ = 1, prior N(0, 1), n = 100."""
    X, y, _, _ = exact.regression()
    x = torch.tensor(X[:, :3], dtype=torch.float32)
    return Posterior(nn.Linear(3, 1), Gaussian(1.0), Normal(1.0)), (x, torch.tensor(y, dtype=torch.float32)[:, None])


def panel_structure(panel: str, history: Ensemble | Window) -> Structure:
    groups, rho = PANELS[panel]
    if groups is None:
        return Joint()
    mask = masks.OneGroup() if rho is None else masks.Bernoulli(rho, count=4)
    return Structured(partitions.from_labels(groups), mask, history)


def regression(panel: str, seed: int, chains: int = 512, steps: int = 600) -> Result:
    """A panel of the toy regression, full batch, particle history (κ = .157 makes own history slow here)."""
    posterior, data = regression_posterior()
    _, _, L, mu = exact.regression()
    groups, rho = PANELS[panel]
    law = None if groups is None else exact.one_hot(len(set(groups))) if rho is None else None
    if groups is not None and rho is not None:
        law = exact.bernoulli(len(set(groups)), rho, 4)
    step, size = 0.004, 4
    labels = groups or [0] * 4
    prior = np.eye(4)
    # the prior is centred at 0 and the likelihood elsewhere: its force at the mean is what the prior balances
    cov = exact.stationary_cov(
        L - prior,
        labels,
        law,
        exact.Overdamped(step),
        prior=prior,
        ensemble=size if groups else None,
        force=-prior @ mu,
    ).cov
    start = torch.tensor(mu, dtype=torch.float32)
    with seeded(seed, "cpu", posterior) as dev:
        plan = prepare(
            posterior,
            data,
            panel_structure(panel, Ensemble(size)),
            SGLD(step),
            chains=chains,
            batch_size=100,
            init=start,
            device=dev,
            spread=0.1,
        )
        first, second = moments(plan.step, plan.step.init(plan.theta), start, steps, settle=150)
    return compare(f"regression: {panel}", first, second, cov, size if groups else 1)


class _Mean(nn.Module):
    """The network whose output is its parameter: the posterior of a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.mean.expand(x.shape[0], 3)


def minibatch(underdamped: bool, seed: int, chains: int = 1024, steps: int = 500) -> Result:
    """B = 5 of N = 40: the gradient noise of minibatches is exactly known here, and SGHMC's V̂ takes it out again.

    U_lik = (N/B) Σ_b ½|θ - y_b|²: noise covariance (N²/B) Cov y, whatever θ; Cov y is made s² I.
    """
    N, B, s = 40, 5, 0.3
    raw = np.random.default_rng(5).normal(size=(N, 3))
    raw -= raw.mean(0)
    y = s * raw @ np.linalg.inv(np.linalg.cholesky(raw.T @ raw / N)).T + np.array([1.0, -2.0, 0.5])
    noise = N**2 / B * s**2
    prior = np.eye(3) / 0.5**2
    h = 0.04
    sampler: Sampler = SGHMC(h, 2.0, noise=noise / 2) if underdamped else SGLD(0.01)
    dynamics = exact.Underdamped(h, 2.0, noise / 2) if underdamped else exact.Overdamped(0.01)
    L = N * np.eye(3)
    mean = np.linalg.solve(L + prior, L @ y.mean(0))
    cov = exact.stationary_cov(L, [0, 0, 0], None, dynamics, prior=prior, gradient_noise=noise * np.eye(3)).cov
    target = Posterior(_Mean(), Gaussian(1.0), Normal(0.5))
    data = (torch.zeros(N, 1), torch.tensor(y, dtype=torch.float32))
    start = torch.tensor(mean, dtype=torch.float32)
    with seeded(seed, "cpu", target) as dev:
        plan = prepare(target, data, Joint(), sampler, chains=chains, batch_size=B, init=start, device=dev, spread=0.15)
        first, second = moments(plan.step, plan.step.init(plan.theta), start, steps, settle=150)
    return compare(f"minibatch noise: {'SGHMC, V̂ half of it' if underdamped else 'SGLD'}", first, second, cov, 1)


def short_window(R: int, rho: float | None, seed: int, chains: int = 2048, steps: int = 400) -> Result:
    """A window of R rows, written and read by the chain itself from θ⁰ on: the exact law of that delay system."""
    L = np.array([[1.2, 0.5, -0.2], [0.5, 0.9, 0.3], [-0.2, 0.3, 1.0]])
    A = torch.tensor(L, dtype=torch.float32)
    law = exact.one_hot(3) if rho is None else exact.bernoulli(3, rho, 1)
    mask = masks.OneGroup() if rho is None else masks.Bernoulli(rho)
    cov = window_cov(L, [0, 1, 2], law, exact.Overdamped(0.4), R).cov
    target = Density(lambda th: -0.5 * th @ (A @ th), dim=3)
    with seeded(seed, "cpu", target) as dev:
        structure = Structured(partitions.each(), mask, Window(R))
        plan = prepare(target, None, structure, SGLD(0.4), chains=chains, batch_size=None, init="fresh", device=dev)
        first, second = moments(plan.step, plan.step.init(plan.theta), torch.zeros(3), steps, settle=300)
    return compare(f"Window({R}) from its first row: {'S' if rho is None else f'S_d ρ={rho:g}'}", first, second, cov, 1)


def two_modes(a: float, seed: int, chains: int = 4096, steps: int = 400) -> Result:
    """S-SGLD on ½N((a,a), ½I) + ½N(-(a,a), ½I): with a = 1.5 one of two mean-field optima, with a = .8 the only one.

    The exact law is the grid chain's at this step size. The window starts filled with independent draws of that law: a
    self-consistent law is one that chains with such a past have themselves.
    """
    eps = 0.15
    law = mixtures.grid_chain(a, eps)
    grid, q = (torch.tensor(v, dtype=torch.float32) for v in (law.grid, law.q))

    def log_p(th: Tensor) -> Tensor:
        near, far = (-((th - side) ** 2).sum() for side in (a, -a))
        return torch.logaddexp(near, far)

    target = Density(log_p, dim=2)
    mean = torch.full((2,), law.mean)
    with seeded(seed, "cpu", target) as dev:
        plan = prepare(
            target,
            None,
            Structured(partitions.each(), history=Window(500, every=10)),
            SGLD(eps),
            chains=chains,
            batch_size=None,
            init=mean,
            device=dev,
            spread=math.sqrt(law.var),
        )
        state = plan.step.init(plan.theta)
        rows = state.history["rows"]
        rows.copy_(grid[torch.multinomial(q, rows.numel(), replacement=True)].reshape(rows.shape))
        state.history["seen"].fill_(rows.shape[1])
        first, second = moments(plan.step, state, mean, steps, settle=100)
    return compare(f"two modes, a={a:g}: S against grid CAVI's chain", first, second, law.var * np.eye(2), 1)


EXTRA: dict[str, Callable[[int], Result]] = {
    **{f"regression/{p}": partial(regression, p) for p in PANELS},
    "minibatch/SGLD": partial(minibatch, False),
    "minibatch/SGHMC": partial(minibatch, True),
    "window/S": partial(short_window, 5, None),
    "window/S_d": partial(short_window, 8, 0.5),
    "modes/1.5": partial(two_modes, 1.5),
    "modes/0.8": partial(two_modes, 0.8),
}
