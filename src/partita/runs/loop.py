"""The only loop: burn in, step, keep, watch, save, stop."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from partita.engine.modes import Eager
from partita.engine.step import Chains, Step
from partita.runs.choose import choose_engine
from partita.runs.errors import DivergenceError
from partita.runs.halt import Halt
from partita.runs.keeping import InMemory, OnDisk
from partita.runs.monitors import Moment, ScoreMonitor, TemperatureCheck, composition_gap, heard, recalibrated
from partita.runs.progress import Progress
from partita.runs.run import Run
from partita.runs.setup import Plan
from partita.runs.torchstate import rng_state, set_rng_state
from partita.samplers import Sampler
from partita.structure import Joint
from partita.structure.gradient import Gradient
from partita.target import Posterior, Target

CHECK_EVERY = 25  # steps between two looks for NaN


class Loop:
    """The state of one run while it goes. `settings` are those of `sample`; the schedule's `horizon` stays that of the
    first call when a run is made longer."""

    def __init__(self, plan: Plan, sampler: Sampler, target: Target, settings: dict[str, Any], kept: InMemory | OnDisk):
        self.plan, self.sampler, self.target, self.kept, self.settings = plan, sampler, target, kept, settings
        self.steps, self.burn_in, self.thin = settings["steps"], settings["burn_in"], settings["thin"]
        self.step: Step = plan.step
        self.metrics: list[dict[str, Any]] = []
        self.temperature = TemperatureCheck(plan.theta)
        self.heat = torch.zeros_like(plan.theta, dtype=torch.float64)
        self.chains = self.step.init(plan.theta)
        self.done = 0
        self.seconds = 0.0
        self.stopped: str | None = None

    def begin(self, monitors: list) -> None:
        """What comes before the first step. The start is saved first of all: choosing an engine may take a minute, and a
        run that is killed meanwhile can be gone on with."""
        if self.done == 0:
            self._save(monitors)
        chosen = choose_engine(self.settings["engine"], self.step, self.chains, self.steps)
        self.engine = chosen.engine
        self.settings |= {"engine": chosen.engine.name, "engine_why": chosen.why}
        self.settings["notes"] += [chosen.why] if chosen.fell_back else []
        self.kept.settle(self.settings)

    def go(self, monitors: list, bar: Progress, halt: Halt) -> Run:
        chains, history = self.chains, self.step.structure.history
        warm = Eager(self._joint())
        good, good_at, t = chains.theta.clone(), self.done, self.done
        before_now, began = self.seconds, time.perf_counter()
        whole = True  # the state is that after a step, not within one
        try:
            for t in range(self.done + 1, self.steps + 1):
                whole = False
                rate = self.sampler.schedule(min(t, self.settings["horizon"]) - 1, self.settings["horizon"])
                engine = warm if history is not None and t <= history.warm_up else self.engine
                before = chains.theta.clone() if self._keeps(t - 1) else None
                forgets = t == self.plan.forget_at
                writes = history is not None and t % history.every == 0 and not forgets
                grad = engine.advance(chains, rate, 1.0 if t <= self.burn_in else 0.0, writes)
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
                self.done, self.seconds = t, before_now + time.perf_counter() - began
                whole = True
                if t % self.settings["monitor_every"] == 0 or t == self.steps:
                    self._watch(chains, monitors, t)
                if bar.due(t):
                    bar.update(t, float(self._energy(grad).mean()) / self.step.batches.N)
                if self.kept.due:
                    with halt.waits():
                        self._save(monitors)
                if halt.asked and t < self.steps:
                    self.stopped = self.stopped or f"{halt.asked} at step {t:,} of {self.steps:,}"
                if self.stopped is not None:
                    break
        except KeyboardInterrupt:
            self.stopped = f"interrupted at step {t:,} of {self.steps:,}"
            return self._run()  # perhaps within a step: what was saved before stands
        except DivergenceError:
            self.kept.close()
            raise
        except Exception as e:  # of a monitor or a data loader: what was sampled until then is not lost
            self.stopped = f"failed at step {t:,}: {type(e).__name__}"
            if whole:  # within a step, what was saved before stands
                self._save(monitors)
            e.run = self._run()  # type: ignore[attr-defined]
            e.add_note(f"The run until then is in this exception's .run: {e.run}")  # type: ignore[attr-defined]
            raise
        with halt.waits():
            self._save(monitors)
            return self._run()

    # -- what a checkpoint holds -------------------------------------------------------------------------------------
    def state(self, monitors: list) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that the rest of the run depends on: tensors, and plain values."""
        parts = {
            "sampler": self.chains.sampler,
            "history": self.chains.history,
            "random": rng_state(self.plan.device),
            "batches": self.step.batches.state(),
            "temperature": self.temperature.state(),
            **{f"monitor {m.name}": m.state() for m in monitors if isinstance(m, ScoreMonitor)},
        }
        tensors = {f"{part}/{k}": v for part, inside in parts.items() for k, v in inside.items()}
        values = {"t": self.done, "seconds": self.seconds, "stopped": self.stopped}
        return {"theta": self.chains.theta, "heat": self.heat, **tensors}, values

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any], monitors: list) -> None:
        """Go on from what `state` gave. Last of all torch's random state, which the others move."""
        part = lambda name: {k[len(name) + 1 :]: v for k, v in tensors.items() if k.startswith(f"{name}/")}
        into = {"theta": self.chains.theta, "heat": self.heat}
        into |= {f"sampler/{k}": v for k, v in self.chains.sampler.items()}
        into |= {f"history/{k}": v for k, v in self.chains.history.items()}
        if other := sorted(k for k in tensors if k.startswith(("sampler/", "history/")) and k not in into):
            raise ValueError(f"the checkpoint holds {', '.join(other)}, expected none: another sampler or structure?")
        for name, mine in into.items():
            saved = tensors.get(name)
            if saved is None or saved.shape != mine.shape:
                came = "nothing" if saved is None else list(saved.shape)
                raise ValueError(f"the checkpoint holds {came} as {name}, expected {list(mine.shape)}: other settings?")
            mine.copy_(saved)
        self.temperature.restore(part("temperature"))
        for m in monitors:
            if isinstance(m, ScoreMonitor):
                m.restore(part(f"monitor {m.name}"))
        self.step.batches.restore(part("batches"))
        self.done, self.seconds = values["t"], values["seconds"]
        set_rng_state({**rng_state(self.plan.device), **part("random")})

    def _save(self, monitors: list) -> None:
        if self.kept.durable:
            self.kept.commit(*self.state(monitors))

    # -- the parts of a step -----------------------------------------------------------------------------------------
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
        target, statistics = self.step.energies.target, {}
        if isinstance(target, Posterior):
            statistics = recalibrated(target, chains.theta, self.step.batches)
        self.kept.add(t, chains.theta.cpu(), {k: v.cpu() for k, v in statistics.items()})

    def _check(self, chains: Chains, energy: Tensor, t: int, good: Tensor, good_at: int) -> None:
        fine = chains.theta.isfinite().all(1) & energy.isfinite()
        if not bool(fine.all()):
            self.stopped, bad = f"diverged at step {t:,}", (~fine).nonzero().flatten().tolist()
            if self.kept.durable:
                tensors, values = self.state([])
                self.kept.commit(tensors, {**values, "diverged": bad})
            raise DivergenceError(bad, t, str(self.sampler), good.cpu(), good_at, self._run())

    def _watch(self, chains: Chains, monitors: list, t: int) -> None:
        record: dict[str, Any] = {"step": t, "seconds": self.seconds}
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
        self.kept.note(record)

    def _run(self) -> Run:
        self.settings |= {"done": self.done, "seconds": self.seconds}
        self.kept.finish(self.settings, self.stopped)
        return finished(
            self.plan, self.target, self.settings, self.kept, self.metrics, self.stopped, self.temperature, self.heat
        )


def finished(
    plan: Plan,
    target: Target,
    settings: dict[str, Any],
    kept: InMemory | OnDisk,
    metrics: list[dict[str, Any]],
    stopped: str | None,
    temperature: TemperatureCheck,
    heat: Tensor,
) -> Run:
    """What `sample` gives back."""
    groups = plan.step.structure.groups
    heat = (heat / (temperature.n or math.nan)).float().cpu()
    return Run(
        target=target,
        samples=kept.samples,
        steps=kept.steps,
        settings=settings,
        metrics=metrics,
        stopped=stopped,
        statistics=kept.statistics,
        temperature=temperature.groups(groups.labels, groups.count),
        heat=heat.mean(1),
        hottest=heat.mean(0).max().item(),
        probe=plan.probe,
        ensembles=plan.ensembles,
        groups=groups,
        history=plan.step.structure.history,
        forgotten=plan.forget_at or 0,
    )
