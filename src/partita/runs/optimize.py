"""Before sampling: a MAP (`optimize`) and a step size (`find_step`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from partita.engine.batches import Batches
from partita.engine.chains import Energies
from partita.engine.step import Chains, Step
from partita.runs.checks import number, whole
from partita.runs.monitors import recalibrated
from partita.runs.setup import prepare, seeded
from partita.samplers import Sampler
from partita.structure import Ensemble, Joint, Structure, Structured
from partita.target import Posterior, Target

LOW, HIGH = 1e-9, 1e1  # step sizes a search looks at
ENSEMBLE = 8  # chains a step size when an Ensemble says no size


@dataclass(frozen=True)
class Optimum:
    """θ [C, D] after optimisation, the energy per datum [steps] on the way, and the target."""

    theta: Tensor
    energy: Tensor
    target: Target
    statistics: dict[str, Tensor]  # BatchNorm buffers of each optimum, {name: [C, ...]}

    def module(self, chain: int = 0) -> nn.Module:
        if not isinstance(self.target, Posterior):
            raise ValueError("a Density has no module")
        return self.target.module(self.theta[chain], {k: v[chain] for k, v in self.statistics.items()})

    def __repr__(self) -> str:
        return f"Optimum(chains={self.theta.shape[0]}, energy per datum {self.energy[0]:.4g} -> {self.energy[-1]:.4g})"


def descend(energies: Energies, batches: Batches, theta: Tensor, steps: int, lr: float) -> tuple[Tensor, Tensor]:
    """Minimise U/N over each chain of θ [C, D] with Adam and a cosine-annealed rate; also the energies met, [steps].

    m ← m + (1-β₁)(g - m),  v ← v + (1-β₂)(g² - v),  θ ← θ - lr_t m̂ / (√v̂ + 1e-8),   g = ∇U/N, β = .9, .999
    (Kingma & Ba 2015; by hand, since torch.optim imports a compiler, which takes longer than many a run.)
    """
    m, v, met = torch.zeros_like(theta), torch.zeros_like(theta), []
    for t in range(1, steps + 1):
        u, du = energies.likelihood(theta.unsqueeze(1), batches.draw(theta.shape[0]))
        u0 = energies.prior_energy(theta)
        g = (du.squeeze(1) + energies.prior(theta)) / batches.N
        m, v = m + 0.1 * (g - m), v + 0.001 * (g * g - v)
        rate = lr * 0.5 * (1 + math.cos(math.pi * (t - 1) / steps))
        theta = theta - rate * m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        met.append((u.squeeze(1) + u0).mean() / batches.N)
    return theta, torch.stack(met)


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
    if not whole(steps, 1) or not number(lr) or not lr > 0:
        raise ValueError(f"optimize got steps={steps!r}, lr={lr!r}, expected a whole number of at least 1 and lr > 0")
    with seeded(seed, device, target) as dev:
        plan = prepare(target, data, Joint(), None, chains=chains, batch_size=batch_size, init=init, device=dev)
        theta, energy = descend(plan.step.energies, plan.step.batches, plan.theta, steps, lr)
        fixed = plan.step.energies.target
        statistics = recalibrated(fixed, theta, plan.step.batches) if isinstance(fixed, Posterior) else {}
    if not bool(theta.isfinite().all() & energy[-1].isfinite()):
        raise ValueError(f"the optimisation diverged (NaN or inf) with lr={lr:g}, expected a smaller one to work")
    return Optimum(theta.cpu(), energy.cpu(), target, {k: v.cpu() for k, v in statistics.items()})


@dataclass(frozen=True)
class StepSearch:
    """The step size found, and the curve it was read from: `heat` is the temperature each step leaves the chain at,
    over T (1 is right), on average over the parameters (stiff ones run hotter: a run's summary tells the hottest);
    `energy` the energy per datum; inf where the chain diverged."""

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
    steps: int = 500,
    map_steps: int = 500,
    limit: float = 1.2,
    seed: int = 0,
    device: str | torch.device = "auto",
) -> StepSearch:
    """The largest step size whose discretisation and gradient noise leave the chain below `limit` × T.

    One chain per step size, `steps` steps each; heat is the sampler's own estimate over the second half. Two rounds: half
    of the points on a coarse geometric grid from low to high (1e-9 to 10), all from one MAP; the rest between the largest
    coarse step that is not hot and the next one, all from where the former got to. A chain below T has not warmed up
    yet, which is not hot. `sampler` is a class (pt.SGLD) or an instance whose other settings are kept.
    """
    _check_search(low, high, points, steps, map_steps, limit)
    one = _instance(sampler)
    first, second = points - points // 2, points // 2
    own, per = _own_ensembles(structure if structure is not None else Joint())
    with seeded(seed, device, target) as dev:
        plan = prepare(target, data, own, one, chains=first * per, batch_size=batch_size, init="module", device=dev)
        start = plan.step.energies.target.start("fresh", 1).to(dev)
        best, _ = descend(replace(plan.step.energies, pieces=1), plan.step.batches, start, map_steps, 1e-2)
        chains = plan.step.init(best.expand(first * per, -1).clone())
        curve, ends = _heat(plan.step, chains, _between(low or LOW, high or HIGH, first, ends=True), per, steps)
        i = _last_cool(curve, limit)
        if i < 0:
            raise ValueError(
                f"no step size from {curve[0][0]:.1e} to {curve[-1][0]:.1e} stays below {limit:g} T, expected one: "
                "try a smaller low"
            )
        if i + 1 < first:
            warm = _take(ends, torch.arange(i * per, (i + 1) * per, device=dev).repeat(second))
            fine = _between(curve[i][0], curve[i + 1][0], second, ends=False)
            curve = sorted(curve + _heat(plan.step, warm, fine, per, steps, before=steps)[0])
    sizes, heat, energy = zip(*curve)
    return StepSearch(sizes[_last_cool(curve, limit)], sizes, heat, energy, limit)


FAINT = 0.2  # warmth below this extrapolates too far: such steps read colder than they will be, and are small anyway
Curve = list[tuple[float, float, float]]  # step size, heat over T, energy per datum


def _heat(
    step: Step, chains: Chains, sizes: list[float], per: int, steps: int, before: int = 0
) -> tuple[Curve, Chains]:
    """The curve over these step sizes, `per` chains each (inf where one diverged), and where the chains got to; they have
    taken about `before` such steps already."""
    n, T, history = len(sizes), step.temperature, step.structure.history
    rate = torch.tensor(sizes).to(chains.theta).repeat_interleave(per)[:, None]
    heat, energy = torch.zeros_like(rate[:, 0]), torch.zeros_like(rate[:, 0])
    warmth: Tensor | float = 0.0
    for t in range(1, steps + 1):
        grad = step(chains, rate, 1.0)
        if history is not None and t % history.every == 0:
            step.remember(chains)
        if t > steps // 2:
            share = 1 / (steps - steps // 2)
            heat += share * step.sampler.heat(grad.g, chains.sampler, rate, T).mean(1) / T
            warmth = warmth + share * step.sampler.warmth(rate[:, 0], before + t)
            energy += share * (grad.composed + step.energies.prior_energy(chains.theta)) / step.batches.N
    heat = heat / torch.as_tensor(warmth).clamp(min=FAINT)
    fine = (heat.isfinite() & energy.isfinite() & chains.theta.isfinite().all(1)).view(n, per).all(1)
    mean = lambda x: x.view(n, per).mean(1).masked_fill(~fine, math.inf).tolist()
    return list(zip(sizes, mean(heat), mean(energy))), chains


def _take(chains: Chains, which: Tensor) -> Chains:
    """These chains (repeats allowed), with what all chains share."""
    C = chains.theta.shape[0]
    take = lambda s: {k: v[which] if v.dim() > 1 and v.shape[0] == C else v.clone() for k, v in s.items()}
    return Chains(chains.theta[which], take(chains.sampler), take(chains.history))


def _last_cool(curve: Curve, limit: float) -> int:
    """The last point at most `limit` of the non-decreasing curve nearest to log heat; -1 when there is none.

    Heat grows with the step size but is seen with noise: neighbours in the wrong order are pooled into their mean.
    """
    pools: list[tuple[float, int]] = []
    for _, heat, _ in curve:
        value, count = math.log(min(max(heat, 1e-30), 1e30)), 1
        while pools and pools[-1][0] > value:
            before, n = pools.pop()
            value, count = (before * n + value * count) / (n + count), n + count
        pools.append((value, count))
    return sum(count for value, count in pools if value <= math.log(limit)) - 1


def _between(low: float, high: float, points: int, ends: bool) -> list[float]:
    """A geometric grid of three digits, with or without its ends."""
    grid = torch.logspace(math.log10(low), math.log10(high), points + (0 if ends else 2), dtype=torch.float64)
    return [float(f"{e:.3g}") for e in (grid if ends else grid[1:-1]).tolist()]


def _instance(sampler: Any) -> Sampler:
    one = sampler(1e-6) if isinstance(sampler, type) and hasattr(sampler, "heat") else sampler
    if isinstance(one, type) or not hasattr(one, "heat"):
        raise ValueError(
            f"find_step got sampler={sampler!r}, expected for example pt.SGLD or pt.SGHMC(1e-3, friction=2)"
        )
    return one


def _own_ensembles(structure: Structure) -> tuple[Structure, int]:
    """The structure, and the chains a step size needs: an ensemble must not mix chains of different step sizes."""
    if isinstance(structure, Structured) and isinstance(structure.history, Ensemble):
        size = structure.history.size or ENSEMBLE
        return replace(structure, history=replace(structure.history, size=size)), size
    return structure, 1


def _check_search(low: Any, high: Any, points: Any, steps: Any, map_steps: Any, limit: Any) -> None:
    if not number(limit) or not limit > 1:
        raise ValueError(f"find_step got limit={limit!r}, expected a number above 1 (heat over T)")
    if (low is None) != (high is None) or (low is not None and not (number(low) and number(high) and 0 < low < high)):
        raise ValueError(f"find_step got low={low!r}, high={high!r}, expected both, 0 < low < high, or neither")
    for name, value, least in (("points", points, 4), ("steps", steps, 2), ("map_steps", map_steps, 1)):
        if not whole(value, least):
            raise ValueError(f"find_step got {name}={value!r}, expected a whole number of at least {least}")
