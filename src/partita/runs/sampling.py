"""The only loop: burn in, step, keep, watch, stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from partita.engine.modes import Eager
from partita.engine.step import Chains, Step
from partita.runs.checks import check_choices, check_sampler, check_target, gib, lengths
from partita.runs.choose import choose_engine
from partita.runs.errors import DivergenceError
from partita.runs.monitors import (
    Moment,
    ScoreMonitor,
    TemperatureCheck,
    as_monitors,
    composition_gap,
    heard,
    recalibrated,
)
from partita.runs.progress import Progress
from partita.runs.run import Run
from partita.runs.setup import Plan, available_memory, prepare, seeded
from partita.runs.torchstate import switched
from partita.samplers import Sampler
from partita.structure import Joint, Structure
from partita.structure.gradient import Gradient
from partita.target import Posterior, Target

KEEP = 2 * 2**30  # bytes of draws that keep="auto" allows
CHECK_EVERY = 25  # steps between two looks for NaN


def sample(
    target: Target,
    data: Any = None,
    *,
    sampler: Sampler,
    structure: Structure | None = None,
    steps: int,
    burn_in: int | None = None,
    thin: int | None = None,
    chains: int = 4,
    batch_size: int | None = None,
    init: Any = "fresh",
    spread: float | None = None,
    seed: int = 0,
    monitor: Any = None,
    monitor_every: int | None = None,
    device: str | torch.device = "auto",
    engine: str = "auto",
    precision: str = "float32",
    augment: Callable[[Any], Any] | None = None,
    keep: str = "auto",
    memory: int | None = None,
    progress: bool | None = None,
) -> Run:
    """Sample a target with C chains at once, each with its own minibatches, masks and past draws.

    data            (x, y) tensors or arrays, a Dataset or a DataLoader; none for a Density
    steps, burn_in  all steps, and how many of them come first and are not kept (default: a quarter)
    thin            keep every thin-th state after burn-in (default: at most 1,000 draws a chain)
    batch_size      rows a chain sees a step (default: 128, or all when there are fewer)
    init, spread    "fresh" | "module" | "prior" | "map" | tensor [D] or [C, D]; plus spread · N(0, 1)
    monitor         {name: (x, y)} is scored, functions of a `Moment` are called, every monitor_every steps; a function
                    that returns a string stops the run, and the run records why
    engine          "eager"; "compile"; "graph", a CUDA graph of the compiled step; "auto" compiles when the run repays it
    precision       "bf16" or "tf32": the network's; θ, noise and the sampler's state stay float32 ("float32" leaves
                    torch's own tf32 switches as they are)
    augment         x -> x for the batches of all chains at once, leaves [C, B, ...], drawn anew for every row
    keep            "auto" thins further so that the draws take at most 2 GiB; "all" keeps what was asked or refuses
    memory          bytes the compositions of one step may take at once (default: 1 GiB, on a GPU a quarter of what is free)
    """
    check_target(target)
    check_sampler(sampler)
    steps, burn_in, thin = lengths(steps, burn_in, thin)
    check_choices(monitor_every, engine, precision, augment, keep, progress)
    sampler.check(target.temperature, burn_in)
    monitors = as_monitors(monitor, target)
    with seeded(seed, device, target) as dev, switched(precision):
        whole: Structure = Joint() if structure is None else structure
        plan = prepare(
            target,
            data,
            whole,
            sampler,
            chains=chains,
            batch_size=batch_size,
            init=init,
            device=dev,
            spread=spread,
            memory=memory,
            burn_in=burn_in,
            precision="bf16" if precision == "bf16" else "float32",
            augment=augment,
        )
        thin, notes = _fit_draws(plan, steps - burn_in, thin, keep)
        settings = {
            "target": repr(target),
            "sampler": repr(sampler),
            "structure": repr(whole),
            "groups": plan.step.structure.groups.count,
            "passes": plan.step.structure.passes,
            "steps": steps,
            "burn_in": burn_in,
            "thin": thin,
            "chains": chains,
            "batch_size": plan.step.batches.B,
            "N": plan.step.batches.N,
            "init": init if isinstance(init, str) else "tensor",
            "seed": seed,
            "device": str(dev),
            "engine": engine,
            "precision": precision,
            "chains_run": plan.step.energies.how,
            "notes": [*plan.notes, *notes],
        }
        loop = _Loop(plan, sampler, steps, burn_in, thin, settings, target)
        for m in monitors:
            if isinstance(m, ScoreMonitor):
                m.attach(plan.step, dev)
        with Progress(steps, settings, show=progress) as bar:
            return loop.go(monitors, monitor_every or max(1, steps // 10), bar)


class _Loop:
    """The state of one run while it goes."""

    def __init__(
        self, plan: Plan, sampler: Sampler, steps: int, burn_in: int, thin: int, settings: dict, target: Target
    ):
        self.plan, self.sampler, self.target = plan, sampler, target
        self.steps, self.burn_in, self.thin, self.settings = steps, burn_in, thin, settings
        self.step: Step = plan.step
        C, D = plan.theta.shape
        self.draws = torch.empty(C, (steps - burn_in) // thin, D, dtype=plan.theta.dtype)
        self.statistics: list[dict[str, Tensor]] = []
        self.kept: list[int] = []
        self.metrics: list[dict[str, Any]] = []
        self.temperature = TemperatureCheck(plan.theta)
        self.heat = torch.zeros(C, D, dtype=torch.float64, device=plan.device)
        self.chains = self.step.init(plan.theta)
        chosen = choose_engine(settings["engine"], self.step, self.chains, steps)
        self.engine = chosen.engine
        settings |= {"engine": chosen.engine.name, "engine_why": chosen.why}
        settings["notes"] += [chosen.why] if chosen.fell_back else []
        self.done = 0
        self.stopped: str | None = None

    def go(self, monitors: list, monitor_every: int, bar: Progress) -> Run:
        chains, history = self.chains, self.step.structure.history
        warm = Eager(self._joint())
        good, good_at, t = chains.theta.clone(), 0, 0
        began = time.perf_counter()
        try:
            for t in range(1, self.steps + 1):
                rate = self.sampler.schedule(t - 1, self.steps)
                engine = warm if history is not None and t <= history.warm_up else self.engine
                before = chains.theta.clone() if self._keeps(t - 1) else None
                forgets = t == self.plan.forget_at
                writes = history is not None and t % history.every == 0 and not forgets
                grad = engine.advance(chains, rate, 1.0 if t <= self.burn_in else 0.0, writes)
                self.done = t
                if forgets:
                    self.step.forget(chains)
                if before is not None:
                    self.temperature.see(before, grad.g)
                    self.heat += self.sampler.heat(grad.g, chains.sampler, rate, self.step.temperature)
                if t % CHECK_EVERY == 0 or t in (1, self.steps) or self._keeps(t):
                    self._check(chains, self._energy(grad), t, good, good_at)
                    good, good_at = chains.theta.clone(), t
                if self._keeps(t):
                    self._keep(chains, t)
                if t % monitor_every == 0 or t == self.steps:
                    self._watch(chains, monitors, t, time.perf_counter() - began)
                if bar.due(t):
                    bar.update(t, float(self._energy(grad).mean()) / self.step.batches.N)
                if self.stopped is not None:
                    break
        except KeyboardInterrupt:
            self.stopped = f"interrupted at step {t:,} of {self.steps:,}"
        except DivergenceError:
            raise
        except Exception as e:  # of a monitor or a data loader: what was sampled until then is not lost
            self.stopped = f"failed at step {t:,}: {type(e).__name__}"
            e.run = self._run()  # type: ignore[attr-defined]
            e.add_note(f"The run until then is in this exception's .run: {e.run}")  # type: ignore[attr-defined]
            raise
        finally:
            self.settings["seconds"] = time.perf_counter() - began
        return self._run()

    def _joint(self) -> Step:
        """The joint step that fills a history before anything is composed of it."""
        joint = Joint().bind(self.step.energies.target.space, self.plan.device)
        joint = replace(joint, history=self.step.structure.history)  # never read, but written
        return replace(self.step, structure=joint, energies=replace(self.step.energies, pieces=1))

    def _energy(self, grad: Gradient) -> Tensor:
        """U [C]: of the likelihood as the step met it, of the prior at the states it led to."""
        return grad.composed + self.step.energies.prior_energy(self.chains.theta)

    def _keeps(self, t: int) -> bool:
        return t > self.burn_in and (t - self.burn_in) % self.thin == 0

    def _keep(self, chains: Chains, t: int) -> None:
        self.draws[:, len(self.kept)] = chains.theta.cpu()
        target = self.step.energies.target
        if isinstance(target, Posterior) and target.network.batchnorm == "recalibrate":
            self.statistics.append(recalibrated(target, chains.theta, self.step.batches))
        self.kept.append(t)

    def _check(self, chains: Chains, energy: Tensor, t: int, good: Tensor, good_at: int) -> None:
        fine = chains.theta.isfinite().all(1) & energy.isfinite()
        if not bool(fine.all()):
            self.stopped = f"diverged at step {t:,}"
            bad = (~fine).nonzero().flatten().tolist()
            raise DivergenceError(bad, t, str(self.sampler), good.cpu(), good_at, self._run())

    def _watch(self, chains: Chains, monitors: list, t: int, seconds: float) -> None:
        record: dict[str, Any] = {"step": t, "seconds": seconds}
        with torch.random.fork_rng(devices=[self.plan.device] if self.plan.device.type == "cuda" else []):
            if self.step.structure.history is not None:
                record["composition_gap"] = float(composition_gap(self.step, chains).mean())
            moment = Moment(t, self.steps, chains.theta.clone(), t <= self.burn_in, self.step.energies.target)
            for monitor in monitors:
                found, stop = heard(monitor(moment))
                record = {**found, **record}
                if stop is not None:
                    self.stopped = f"stopped at step {t:,} by a monitor: {stop}"
        self.metrics.append(record)

    def _run(self) -> Run:
        groups = self.step.structure.groups
        n = self.temperature.n or math.nan
        stats = self.statistics[: len(self.kept)]  # an interrupt may fall between the two
        heat = (self.heat / n).float().cpu()
        self.settings["done"] = self.done
        return Run(
            target=self.target,
            samples=self.draws[:, : len(self.kept)],
            steps=self.kept,
            settings=self.settings,
            metrics=self.metrics,
            stopped=self.stopped,
            statistics={k: torch.stack([s[k].cpu() for s in stats], 1) for k in stats[0]} if stats else {},
            temperature=self.temperature.groups(groups.labels, groups.count),
            heat=heat.mean(1),
            hottest=heat.mean(0).max().item(),
            probe=self.plan.probe,
            ensembles=self.plan.ensembles,
            groups=groups,
            history=self.step.structure.history,
            forgotten=self.plan.forget_at or 0,
        )


def _fit_draws(plan: Plan, after: int, thin: int | None, keep: str) -> tuple[int, list[str]]:
    """The thinning that keeps the draws within memory, and a line where it is more than was asked for."""
    C, D = plan.theta.shape
    row = C * D * plan.theta.element_size()
    chosen = thin or max(1, math.ceil(after / 1000))
    need = after // chosen * row
    free = int(0.9 * available_memory(torch.device("cpu")))
    most = min(KEEP, free) if keep == "auto" else free
    if need <= most:
        return chosen, []
    arithmetic = f"{C} chains x {after // chosen:,} draws x {D:,} parameters = {gib(need)}"
    why = "90 % of what is free" if most == free else "keep='all' allows what is free"
    if keep == "all" or row > most:
        raise ValueError(f"the draws would take {arithmetic}, expected at most {gib(most)} ({why})")
    chosen = after // (most // row + 1) + 1  # the least with after // chosen <= most // row
    return chosen, [f"thin raised to {chosen}: {arithmetic}, more than {gib(most)} ({why})"]
