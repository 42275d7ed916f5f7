"""Run: what sampling gives back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from partita.answers.predictive import Prediction, predict
from partita.answers.stream import Streamed, marginal_rows, stream
from partita.answers.summary import Mixing, Summary
from partita.runs.checks import whole
from partita.structure.partitions import Groups
from partita.target import ParameterSpace, Posterior, Target
from partita.target.trees import leaves, map_tree

MOST_PARAMETERS = 1_000  # looked at by summary(), evenly spread over θ
BLOCK = 64  # draws of all chains read at once when predictions are streamed
PIECE = 10_000_000  # outputs of one row predicted at once


@dataclass
class Run:
    """Posterior samples and what was seen on the way.

    samples [C, S, D]; steps: the step of each draw; statistics: BatchNorm buffers of each draw {name: [C, S, ...]};
    temperature [C, M] per group; heat [C], and `hottest` that of the hottest parameter; metrics: one record per monitor
    step; stopped: why it ended early; forgotten: the step after which the history started anew.
    """

    target: Target
    samples: Any  # a Tensor, or what reads like one from disk
    steps: list[int]
    settings: dict[str, Any]
    metrics: list[dict[str, Any]]
    stopped: str | None
    statistics: dict[str, Tensor]
    temperature: Tensor
    heat: Tensor
    hottest: float
    probe: Any
    ensembles: int
    groups: Groups
    history: Any  # or what is known of its span
    forgotten: int = 0

    @property
    def space(self) -> ParameterSpace:
        return self.target.space

    def module(self, chain: int = 0, draw: int = -1) -> nn.Module:
        """A new module with the weights (and BatchNorm statistics) of one draw, in eval mode: dropout is off in the
        energy, too."""
        target = self._posterior("module()")
        C, S, _ = self._draws().shape
        if not (whole(chain, -C) and chain < C and whole(draw, -S) and draw < S):
            raise ValueError(
                f"module got chain={chain!r}, draw={draw!r}, expected whole numbers, chain < {C}, draw < {S}"
            )
        return target.module(self.samples[chain, draw], {k: v[chain, draw] for k, v in self.statistics.items()}).eval()

    def predict(self, x: Any, draws: int | None = None, rows: str = "joint", seed: int = 0) -> Prediction:
        """Predictions at x, averaged over all draws of all chains, or `draws` of them evenly spread.

        rows="joint": each draw is one state of a chain, as it was sampled. "marginals": each group takes a state of its own
        (of one chain), the product of marginals q̂ that a structured method stands for; `seed` says which.
        """
        target = self._posterior("predict()")
        C, S, _ = self._draws().shape
        if draws is not None and (not whole(draws, 1) or draws > C * S):
            raise ValueError(f"predict got draws={draws!r}, expected a whole number from 1 to {C * S:,}")
        if rows not in ("joint", "marginals"):
            raise ValueError(f"predict got rows={rows!r}, expected 'joint' or 'marginals'")
        if rows == "marginals":
            if self.statistics:
                raise ValueError(
                    "predict got rows='marginals', expected 'joint': BatchNorm statistics belong to whole states"
                )
            theta, stats = self._marginals(draws or C * S, seed), {}
        else:
            pick = torch.linspace(0, C * S - 1, draws or C * S).round().long()
            theta, stats = self._rows(pick), {k: v.flatten(0, 1)[pick] for k, v in self.statistics.items()}
        device = torch.device(self.settings["device"])
        return self._predict(target.to(device), theta, x, stats)

    def _predict(self, target: Posterior, theta: Tensor, x: Any, stats: dict[str, Tensor]) -> Prediction:
        device = target.space.values.device
        stats = {k: v.to(device) for k, v in stats.items()}
        prediction = predict(target, theta.to(device), x, stats, how=self.settings["chains_run"])
        prediction.draws = {k: v.cpu() for k, v in prediction.draws.items()}
        return prediction

    def stream(self, x: Any, y: Any = None) -> Streamed:
        """Predictions of all draws with only their means in memory: for inputs by the million, a DataLoader of them, or
        more draws than fit. With the targets y it has .scores()."""
        C, S, _ = self._draws().shape
        each = max(1, BLOCK // C)

        def blocks() -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
            for a in range(0, S, each):
                stats = {k: v[:, a : a + each].flatten(0, 1) for k, v in self.statistics.items()}
                yield self.samples[:, a : a + each].flatten(0, 1), stats

        target = self._posterior("stream()").to(torch.device(self.settings["device"]))
        return stream(target, blocks, x, y, how=self.settings["chains_run"])

    def summary(self) -> Summary:
        """R-hat, ESS and IAC over parameters and function values, temperature, composition gap, verdict."""
        x, thin = self.samples, int(self.settings["thin"])
        mixing: list[Mixing] = []
        if x.shape[1] >= 4:
            if isinstance(self.target, Posterior):
                mixing.append(Mixing.of("predictions", self._functions(), thin, self.ensembles))
            step = max(1, -(-x.shape[2] // MOST_PARAMETERS))
            mixing.append(Mixing.of("parameters", x[:, :, ::step], thin, self.ensembles))
        kept = [m for m in self.metrics if "composition_gap" in m and m["step"] > int(self.settings["burn_in"])]
        gaps = [m["composition_gap"] for m in kept]
        mean, error = self._temperature()
        return Summary(
            chains=int(self.settings["chains"]),
            draws=x.shape[1],
            ensembles=self.ensembles,
            target_temperature=self.target.temperature,
            temperature=self.temperature.mean(0),
            overall=mean,
            overall_error=error,
            heat=float(self.heat.mean()),
            hottest=self.hottest,
            mixing=tuple(mixing),
            composition_gap=sum(gaps) / len(gaps) if gaps else None,
            data=isinstance(self.target, Posterior),
            history_span=self._history_span(),
            shares_past=self.history is not None
            and self.history.span(1) is not None
            and self.settings["init"] in ("module", "tensor"),
            seconds=float(self.settings.get("seconds", 0.0)),
            stopped=self.stopped,
            notes=tuple(self.settings.get("notes", ())),
        )

    def report(self, out: str | Path, test: tuple[Any, Any] | None = None) -> Path:
        """report.html with its pictures in the folder `out`: verdict, scores on `test`, calibration, traces, settings."""
        from partita.answers.report import report

        return report(self, out, test)

    def to_arviz(self, parameters: Sequence[str] | None = None, test: tuple[Any, Any] | None = None) -> Any:
        """For ArviZ (an extra): the draws under the module's own names and shapes; with `test` the predictions there."""
        from partita.answers.arviz import to_arviz

        return to_arviz(self, parameters, test)

    def _history_span(self) -> int | None:
        """Steps between the oldest and the newest state the history holds."""
        if self.history is None:
            return None
        return self.history.span(int(self.settings["done"]) - self.forgotten)

    def _temperature(self) -> tuple[float, float]:
        """E[(θ-θ̄)·g] over all parameters, and its standard error over the independent chains or ensembles."""
        sizes = torch.tensor(self.groups.sizes, dtype=self.temperature.dtype)
        units = (self.temperature @ sizes / sizes.sum()).view(self.ensembles, -1).mean(1)
        error = units.std().item() / self.ensembles**0.5 if self.ensembles > 1 else math.inf
        return units.mean().item(), error

    def _functions(self) -> Tensor:
        """[C, S, V]: what each draw predicts at the probe inputs (log-probabilities, or means); never thinned."""
        C, S, _ = self.samples.shape
        target = self._posterior("summary()")
        target = target.to(torch.device(self.settings["device"]))
        stats = {k: v.flatten(0, 1) for k, v in self.statistics.items()}
        few = lambda n: map_tree(lambda t: t[:n], self.probe[0])
        at = lambda rows, a, b: (
            self._predict(
                target, self._rows(torch.arange(a, min(b, C * S))), few(rows), {k: v[a:b] for k, v in stats.items()}
            ).draws
        )
        one = at(1, 0, 1)
        name = next(n for n in ("probs", "mean", *one) if n in one)
        rows = max(1, MOST_PARAMETERS // max(1, one[name].numel()))
        each = max(1, PIECE // max(1, one[name].numel()))
        values = torch.cat([at(rows, a, a + each)[name].flatten(1)[:, :MOST_PARAMETERS] for a in range(0, C * S, each)])
        return (values.log().clamp(min=-50) if name == "probs" else values).reshape(C, S, -1)

    def _marginals(self, n: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return marginal_rows(self.samples[:], self.groups.labels.cpu(), n, generator)

    def _rows(self, pick: Tensor) -> Tensor:
        """[n, D] of draws counted over all chains; from disk those alone."""
        C, S, D = self.samples.shape
        if len(pick) == C * S:
            return self.samples[:].reshape(C * S, D)
        return torch.cat([self.samples[c, pick[pick // S == c] % S] for c in range(C)])

    def _draws(self) -> Any:
        if self.samples.shape[1] == 0:
            raise ValueError(f"the run kept no draws ({self.stopped or 'it has none'})")
        return self.samples

    def _posterior(self, who: str) -> Posterior:
        if not isinstance(self.target, Posterior):
            raise ValueError(f"{who} needs a pt.Posterior, this run sampled a {type(self.target).__name__}")
        return self.target

    def __repr__(self) -> str:
        C, S, D = self.samples.shape
        rest = f", stopped: {self.stopped}" if self.stopped else ""
        n = next(iter(leaves(self.probe)))[1].shape[0] if self.probe is not None else 0
        return f"Run({C} chains x {S:,} draws x {D:,} parameters, {n} probe inputs{rest})"
