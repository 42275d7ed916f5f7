"""What a run watches while it goes: the temperature check, the composition gap, scores on data of the user's choice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from partita.answers.predictive import Prediction, predict
from partita.engine.batches import HEAD, RECALIBRATE, Resident
from partita.engine.step import Chains, Step
from partita.runs.inputs import make_batches
from partita.target import Posterior, Target
from partita.target.likelihoods import FromFunction
from partita.target.trees import map_tree

Record = dict[str, Any]


@dataclass(frozen=True)
class Moment:
    """What a monitor function sees: step t (of `steps`), θ [C, D], and whether the run still burns in."""

    t: int
    steps: int
    theta: Tensor
    burning_in: bool
    target: Any


Monitor = Callable[[Moment], Any]  # a dict is recorded, a string stops the run and says why; see `heard`


class TemperatureCheck:
    """E[(θ - θ̄)·g] = T for every coordinate, at any size (the virial theorem), from running co-moments per chain.

    With a finite step it reads T + (ε/4) E g²: the heat of discretisation and gradient noise shows.
    """

    def __init__(self, theta: Tensor):
        self.n = 0
        self._theta = torch.zeros_like(theta, dtype=torch.float64)
        self._g = torch.zeros_like(self._theta)
        self._co = torch.zeros_like(self._theta)

    def see(self, theta: Tensor, g: Tensor) -> None:
        """θ [C, D] and g(θ)."""
        self.n += 1
        d = theta - self._theta  # from the old mean of θ; g below from its new one (Welford)
        self._theta += d / self.n
        self._g += (g - self._g) / self.n
        self._co += d * (g - self._g)

    def state(self) -> dict[str, Tensor]:
        return {"n": torch.tensor(self.n), "theta": self._theta, "g": self._g, "co": self._co}

    def restore(self, state: dict[str, Tensor]) -> None:
        self.n = int(state["n"])
        self._theta, self._g, self._co = (state[k].to(self._co.device) for k in ("theta", "g", "co"))

    def groups(self, labels: Tensor, count: int) -> Tensor:
        """[C, M]: the temperature of each group (NaN before there are two states)."""
        if self.n < 2:
            return torch.full((self._co.shape[0], count), torch.nan)
        per = self._co / (self.n - 1)
        sums = torch.zeros(per.shape[0], count, dtype=per.dtype, device=per.device).index_add_(1, labels, per)
        return (sums / torch.bincount(labels, minlength=count)).cpu()


def composition_gap(step: Step, chains: Chains) -> Tensor:
    """[C]: mean of U_lik(φ) - U_lik(θ) over the compositions of one step, per datum, on one batch."""
    batch = step.batches.look(chains.theta.shape[0])
    composed = step.gradient(chains, batch).composed
    return (composed - step.energies.energy(chains.theta, batch)) / step.batches.N


class ScoreMonitor:
    """Scores of the chains' present states on (x, y), and of the average over all present states after burn-in."""

    def __init__(self, name: str, data: Any, target: Target):
        if not isinstance(target, Posterior):
            raise ValueError(f"monitor {name!r} holds data, but a Density makes no predictions: expected a function")
        if isinstance(data, (str, DataLoader)) or not isinstance(data, (tuple, list, Dataset)):
            raise ValueError(f"monitor {name!r} is a {type(data).__name__}, expected (x, y) or a function of a Moment")
        try:
            rows = make_batches(data, None, target.space.values.device, dtype=target.space.values.dtype)
            target.check(rows.head(HEAD), rows.targets())
        except ValueError as e:
            raise ValueError(f"monitor {name!r}: {e}") from None
        if isinstance(target.likelihood, FromFunction):
            raise ValueError(
                f"monitor {name!r} holds data to be scored, but a likelihood that is a function says nothing about scores: "
                "expected pt.Categorical(), pt.Gaussian(), pt.Bernoulli(), or a function of a Moment as monitor"
            )
        assert isinstance(rows, Resident)
        self.name, self.x, self.y = name, rows.x, rows.y
        self._mean: Prediction | None = None
        self._n = 0

    def attach(self, step: Step, device: torch.device) -> None:
        """What a run knows once it is set up."""
        self.step = step
        self.x, self.y = map_tree(lambda t: t.to(device), (self.x, self.y))

    def state(self) -> dict[str, Tensor]:
        """The running average."""
        return {"n": torch.tensor(self._n), **(self._sums if self._n else {})}

    def restore(self, state: dict[str, Tensor]) -> None:
        if state:
            self._n = int(state["n"])
            self._sums = {k: v.to(self.y.device) for k, v in state.items() if k != "n"}

    def __call__(self, moment: Moment) -> Record:
        target, batches = self.step.energies.target, self.step.batches
        assert isinstance(target, Posterior)
        stats = recalibrated(target, moment.theta, batches)
        now = predict(target, moment.theta, self.x, stats, how=self.step.energies.how)
        record = {f"{self.name}/now/{k}": v for k, v in now.scores(self.y).items()}
        if not moment.burning_in:
            self._add(now)
            assert self._mean is not None
            scores = self._mean.scores(self.y)
            scores.pop("individual_accuracy", None)  # of the average this would be its own accuracy
            record |= {f"{self.name}/{k}": v for k, v in scores.items()}
        return record

    def _add(self, now: Prediction) -> None:
        """One pseudo-draw that carries the running average (of regression: its mean and whole sd)."""
        mine = {"probs": now.probs} if "probs" in now.draws else {"mean": now.mean, "square": now.sd**2 + now.mean**2}
        self._n += 1
        if self._n == 1:
            self._sums = mine
        else:
            self._sums = {k: self._sums[k] + (v - self._sums[k]) / self._n for k, v in mine.items()}
        s = self._sums
        draws = s if "probs" in s else {"mean": s["mean"], "sd": (s["square"] - s["mean"] ** 2).clamp(min=0).sqrt()}
        self._mean = Prediction({k: v[None] for k, v in draws.items()}, now.classes, now._ignore)


def recalibrated(target: Posterior, theta: Tensor, batches: Any, rows: int = RECALIBRATE) -> dict[str, Tensor]:
    """BatchNorm statistics of each θ [S, D], {name: [S, ...]}; {} when the policy needs none."""
    if target.network.batchnorm != "recalibrate":
        return {}
    each = [target.recalibrate(t, batches.inputs(rows)) for t in theta]
    return {k: torch.stack([e[k] for e in each]) for k in each[0]}


def heard(said: Any) -> tuple[Record, str | None]:
    """What a monitor said: a record, and why the run is to stop."""
    if isinstance(said, Mapping):
        return {str(k): _plain(v) for k, v in said.items()}, None
    if said is None or isinstance(said, str):
        return {}, said
    raise ValueError(f"a monitor returned {said!r}, expected a dict to record, a string to stop the run, or None")


def _plain(value: Any) -> Any:
    """A number of NumPy or torch as Python's own, as records hold."""
    single = isinstance(value, np.generic) or (isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) == 1)
    return value.item() if single else value


def _named(name: str, f: Callable[[Moment], Any]) -> Monitor:
    """The function, with its name before all that it records: a number is recorded under the name itself."""

    def monitor(moment: Moment) -> Any:
        said = f(moment)
        if isinstance(said, Mapping):
            return {f"{name}/{k}": v for k, v in said.items()}
        if isinstance(said, Real) and not isinstance(said, bool):
            return {name: said}
        return said

    return monitor


def as_monitors(monitor: Any, target: Target) -> list[Monitor]:
    """{name: (x, y) or function}, a function, or a list of functions; whatever does not fit is refused."""
    if monitor is None:
        return []
    if isinstance(monitor, Mapping):
        return [_named(str(k), v) if callable(v) else ScoreMonitor(str(k), v, target) for k, v in monitor.items()]
    functions = list(monitor) if isinstance(monitor, (tuple, list)) else [monitor]
    for f in functions:
        if not callable(f):
            raise ValueError(f"monitor is a {type(f).__name__}, expected {{name: (x, y)}} or functions of a Moment")
    return functions
