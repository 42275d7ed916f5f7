"""Before sampling: a MAP (`optimize`) and a step size (`find_step`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partita.engine.batches import Batches
from partita.engine.chains import Energies
from partita.runs.setup import prepare, seeded
from partita.samplers import Sampler
from partita.structure import Joint, Structure
from partita.target import Posterior, Target


@dataclass(frozen=True)
class Optimum:
    """θ [C, D] after optimisation, the energy per datum [steps / every] on the way, and the target."""

    theta: Tensor
    energy: Tensor
    target: Target

    def module(self, chain: int = 0) -> nn.Module:
        if not isinstance(self.target, Posterior):
            raise ValueError("a Density has no module")
        return self.target.module(self.theta[chain])

    def __repr__(self) -> str:
        return f"Optimum(chains={self.theta.shape[0]}, energy per datum {self.energy[0]:.4g} -> {self.energy[-1]:.4g})"


def descend(energies: Energies, batches: Batches, theta: Tensor, steps: int, lr: float) -> tuple[Tensor, Tensor]:
    """Minimise U/N over each chain of θ [C, D] with Adam and a cosine-annealed rate; also the energies met, [steps]."""
    theta = theta.clone().requires_grad_()
    adam = torch.optim.Adam([theta], lr=lr)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    met = []
    for _ in range(steps):
        here = theta.detach()
        u, du = energies.likelihood(here.unsqueeze(1), batches.draw(theta.shape[0]))
        u0, g0 = energies.prior(here)
        theta.grad = (du.squeeze(1) + g0) / batches.N
        met.append((u.squeeze(1) + u0).mean() / batches.N)
        adam.step()
        cosine.step()
    return theta.detach(), torch.stack(met)


def optimize(
    target: Target,
    data: Any = None,
    *,
    steps: int = 2_000,
    lr: float = 1e-2,
    batch_size: int | None = None,
    chains: int = 1,
    init: Any = "fresh",
    seed: int = 0,
    device: str | torch.device = "auto",
) -> Optimum:
    """The maximum a posteriori of each of `chains` starts: Adam on U/N."""
    if not isinstance(steps, int) or steps < 1 or not lr > 0:
        raise ValueError(f"optimize got steps={steps!r}, lr={lr!r}, expected a whole number of at least 1 and lr > 0")
    with seeded(seed, device, target) as dev:
        plan = prepare(target, data, Joint(), None, chains=chains, batch_size=batch_size, init=init, device=dev)
        theta, energy = descend(plan.step.energies, plan.step.batches, plan.theta, steps, lr)
    if not bool(theta.isfinite().all()):
        raise ValueError(f"the optimisation diverged (NaN or inf) with lr={lr:g}, expected a smaller one to work")
    return Optimum(theta.cpu(), energy.cpu(), target)


@dataclass(frozen=True)
class StepSearch:
    """The step size found, and the curve it was read from: `heat` is the temperature each step leaves the chain at,
    over T (1 is right); `energy` the energy per datum; inf where the chain diverged."""

    step_size: float
    steps: tuple[float, ...]
    heat: tuple[float, ...]
    energy: tuple[float, ...]
    limit: float

    def __str__(self) -> str:
        lines = ["step size   heat / T   energy per datum"]
        for e, h, u in zip(self.steps, self.heat, self.energy):
            mark = "  <- chosen" if e == self.step_size else ""
            lines.append(f"{e:9.2e}   {h:8.3f}   {u:.5g}{mark}")
        return "\n".join(lines)


def find_step(
    target: Target,
    data: Any = None,
    *,
    sampler: Any,
    structure: Structure | None = None,
    batch_size: int | None = None,
    low: float | None = None,
    high: float | None = None,
    points: int = 24,
    steps: int = 200,
    map_steps: int = 500,
    limit: float = 1.2,
    seed: int = 0,
    device: str | torch.device = "auto",
) -> StepSearch:
    """The largest step size whose discretisation and gradient noise leave the chain below `limit` × T.

    One chain per step size of a geometric grid, all from one MAP, `steps` steps each; heat is the sampler's own estimate
    over the second half. `sampler` is a class (pt.SGLD) or an instance whose other settings are kept. A bound not given
    is found: the grid spans nine decades below the largest step that can be stable at all.
    """
    if not limit > 1:
        raise ValueError(f"find_step got limit={limit!r}, expected a number above 1 (heat over T)")
    if (low is None) != (high is None) or (low is not None and high is not None and not 0 < low < high):
        raise ValueError(f"find_step got low={low!r}, high={high!r}, expected both, 0 < low < high, or neither")
    one: Sampler = sampler(1e-6) if isinstance(sampler, type) else sampler
    grid = torch.logspace(math.log10(low or 1e-9), math.log10(high or 1e0), points)
    with seeded(seed, device, target) as dev:
        plan = prepare(
            target, data, structure or Joint(), one, chains=points, batch_size=batch_size, init="module", device=dev
        )
        start = plan.step.energies.target.start("fresh", 1).to(dev)
        best, _ = descend(plan.step.energies, plan.step.batches, start, map_steps, 1e-2)
        chains = plan.step.init(best.expand(points, -1).clone())
        rate = grid.to(dev, best.dtype)[:, None]
        heat, energy = torch.zeros(points, device=dev), torch.zeros(points, device=dev)
        for t in range(steps):
            T = plan.step.temperature
            chains, grad = plan.step(chains, rate, 1.0)
            plan.step.remember(chains)
            if t >= steps // 2:
                share = 1 / (steps - steps // 2)
                heat += share * one.heat(grad.g, chains.sampler, rate, T) / T
                energy += share * (grad.composed + grad.prior) / plan.step.batches.N
        fine = heat.isfinite() & energy.isfinite() & chains.theta.isfinite().all(1)
        heat, energy = heat.masked_fill(~fine, math.inf).cpu(), energy.masked_fill(~fine, math.inf).cpu()
    stable = [i for i in range(points) if heat[i] <= limit and bool((heat[: i + 1] <= limit).all())]
    if not stable:
        raise ValueError(
            f"no step size from {grid[0]:.1e} to {grid[-1]:.1e} stays below {limit:g} T: try a smaller low"
        )
    i = stable[-1]
    to_tuple = lambda x: tuple(round(float(v), 12) for v in x)
    sizes = tuple(float(f"{e:.3g}") for e in grid.tolist())
    return StepSearch(sizes[i], sizes, to_tuple(heat), to_tuple(energy), limit)
