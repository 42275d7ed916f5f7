"""The summary of a run: how well it mixed, at which temperature it ran, and what that means in plain words.

Mixing is judged over function values (what the network says at probe inputs), which are free of a network's
permutation symmetries, and over parameters. Shapes: C chains, S draws, V variables: [C, S, V].
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.answers import diagnostics

RHAT_MIXED = 1.05
HOTTEST = 2.0  # times T: above this a parameter is called hot, although the average is not
ENOUGH = 400  # states before one parameter's heat is told: the largest of 10^6 means of 400 v² is about 1.4
APART = 0.25  # how far E[(θ-θ̄)·g] may be from T, beside 4 standard errors
HISTORY_SPAN = 20  # a history must span this many IACs, or the chain samples nearly the joint law


@dataclass(frozen=True)
class Mixing:
    """Quantiles of R-hat, ESS (bulk and tail), IAC (in steps) and Monte Carlo error over V variables."""

    what: str
    variables: int
    rhat_median: float
    rhat_max: float
    unmixed: float  # share of variables with R-hat above 1.05
    ess_median: float
    ess_min: float
    iac_median: float
    iac_max: float
    tail_min: float  # ESS of the 5 % and 95 % quantiles (NaN: of coupled chains it is not told)
    error_max: float  # Monte Carlo standard error of a mean, as a share of the posterior's standard deviation
    resolved: bool  # whether the IAC is longer than what thinning hides

    @classmethod
    def of(cls, what: str, x: Tensor, thin: int, ensembles: int) -> Mixing:
        """x [C, S, V]; with coupled chains each of the `ensembles` is one chain, the mean of its members.

        A variable on which all chains agree for ever says nothing (R-hat NaN); one on which each chain is stuck at a
        value of its own says everything (R-hat inf, ESS 1).
        """
        rhat, ess, iac, tail = measure(x, ensembles)
        told = ~rhat.isnan()
        if not bool(told.any()):
            return cls(what, int(x.shape[-1]), *(math.nan,) * 9, resolved=False)
        stuck = rhat[told].isinf()
        rhat, ess, tail = rhat[told], ess[told].masked_fill(stuck, 1.0), tail[told].masked_fill(stuck, 1.0)
        iac = iac[told & iac.isfinite()] * thin
        return cls(
            what,
            int(x.shape[-1]),
            rhat.median().item(),
            rhat.max().item(),
            (rhat > RHAT_MIXED).float().mean().item(),
            ess.median().item(),
            ess.min().item(),
            iac.median().item() if iac.numel() else math.inf,
            iac.max().item() if iac.numel() else math.inf,
            tail.min().item(),
            (1 / ess.min().sqrt()).item(),
            resolved=bool(iac.numel()) and iac.median().item() > 2 * thin,
        )


def measure(x: Tensor, ensembles: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """R-hat, bulk ESS, IAC and tail ESS of each variable of [C, S, V].

    Coupled chains: the estimate is the ensemble's mean x̄_t, so R-hat and IAC are those of x̄ with the ensembles as
    chains, and ESS = Var x / Var(estimate), Var(estimate) = Var x̄ · IAC(x̄) / (ensembles · S).
    """
    C, S, V = x.shape
    if ensembles == C:
        found = diagnostics.diagnose(x, ("rhat", "ess_bulk", "iac", "ess_tail"))
        return found["rhat"], found["ess_bulk"], found["iac"], found["ess_tail"]
    mean = x.reshape(ensembles, C // ensembles, S, V).mean(1)
    found = diagnostics.diagnose(mean, ("rhat", "ess_mean", "iac"))
    ess = x.flatten(0, 1).var(0) / mean.flatten(0, 1).var(0) * found["ess_mean"]
    return found["rhat"], ess, found["iac"], torch.full_like(ess, math.nan)


@dataclass(frozen=True)
class Summary:
    chains: int
    draws: int
    ensembles: int
    target_temperature: float
    temperature: Tensor  # [M], E[(θ-θ̄)·g], mean over chains
    overall: float  # the same over all parameters, and its standard error over independent chains
    overall_error: float
    heat: float
    hottest: float  # the hottest parameter's
    mixing: tuple[Mixing, ...]
    composition_gap: float | None
    data: bool  # whether there are any: the gap is then per datum
    history_span: int | None  # R · every, in steps
    shares_past: bool  # chains from one start, each with a history of its own
    seconds: float
    stopped: str | None
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> list[str]:
        """What to make of it, in plain words."""
        said = [f"the run ended early: {self.stopped}"] if self.stopped else []
        if not self.mixing:
            return [*said, f"{self.draws} draws a chain are too few to judge: expected at least 4"]
        hot = self._heat()
        said += hot
        good = [m.what for m in self.mixing if m.unmixed == 0]
        for m in self.mixing:
            if m.what == "parameters" and "predictions" in good and m.unmixed > 0 and not hot:
                said.append(
                    f"single parameters have not mixed (R-hat up to {m.rhat_max:.2f}, above {RHAT_MIXED} in "
                    f"{100 * m.unmixed:.0f} %), predictions have: trust those, not statements about single weights"
                )
            elif math.isnan(m.rhat_max):
                said.append(f"R-hat of the {m.what} is undefined: they did not move")
            elif m.unmixed > 0:
                more = math.ceil(min(10.0, max(2.0, 400 / max(m.ess_min, 1))))
                said.append(
                    f"these chains have not mixed: R-hat up to {m.rhat_max:.2f}, above {RHAT_MIXED} in "
                    f"{100 * m.unmixed:.0f} % of the {m.what}; run about {more}x longer"
                    + ("" if hot else " or take larger steps")
                )
            else:
                said.append(
                    f"the {m.what} have mixed: R-hat at most {m.rhat_max:.3f}, ESS at least {m.ess_min:.0f}, so means are "
                    f"known to {100 * m.error_max:.0f} % of a standard deviation or better"
                )
        if self.ensembles == 1:
            said.append(
                "only one independent chain or ensemble: R-hat compares its halves, not chains with one another"
            )
        elif self.shares_past and good:
            said.append(
                "all chains began at one point, each with a history of its own: they forget it slowly, and R-hat cannot "
                "see what they share; start them apart, or use Ensemble"
            )
        iac = next((m.iac_median for m in self.mixing if m.resolved), None)
        if self.history_span is not None and iac is not None and self.history_span < HISTORY_SPAN * iac:
            said.append(
                f"the history spans {self.history_span:,} steps, {self.history_span / iac:.1f} autocorrelation times: "
                f"under {HISTORY_SPAN} the chain samples nearly the joint law; raise R or every"
            )
        if self.data and self.composition_gap is not None and self.composition_gap > 1:
            said.append(
                f"compositions cost {self.composition_gap:.2f} nats a datum more than present states: "
                "the partition tears the network apart"
            )
        return said

    def _heat(self) -> list[str]:
        """What is wrong with the temperature: that of the step, of its hottest parameter, or what the chains show."""
        T, excess = self.target_temperature, self.heat / self.target_temperature
        advice = lambda hot: "take smaller steps or larger batches" if hot else "run longer"
        if not math.isnan(excess) and not 0.8 < excess < 1.25:
            return [
                f"the chain runs {'hot' if excess > 1 else 'cold'}: temperature {self.heat:.3g} where {T:g} is asked; "
                + advice(excess > 1)
            ]
        off = abs(self.overall / T - 1)
        mixed = all(m.unmixed == 0 for m in self.mixing)
        if mixed and self.draws * self.ensembles >= ENOUGH and off > max(APART, 4 * self.overall_error / T):
            return [
                f"E[(θ-θ̄)·g] is {self.overall:.3g} ± {self.overall_error:.2g} where T = {T:g} is asked: these samples are "
                f"{'too wide' if self.overall > T else 'too narrow'} for their energy; do not trust their spread"
            ]
        if self.hottest > HOTTEST * T and self.draws * self.chains >= ENOUGH:
            return [
                f"the hottest parameter runs at temperature {self.hottest:.3g} where {T:g} is asked "
                f"(the average at {self.heat:.3g}): the step is too large for it"
            ]
        return []

    def __str__(self) -> str:
        units = "" if self.ensembles == self.chains else f" ({self.ensembles} independent ensembles)"
        t = self.temperature[self.temperature.isfinite()]
        lines = [
            f"{self.chains} chains{units} x {self.draws:,} draws, {self.seconds:.1f} s (medians and worst; IAC in steps)",
            f"{'':<20} {'R-hat':>6} {'max':>6} {'ESS':>7} {'min':>6} {'tails':>6} {'IAC':>7} {'max':>7}",
        ]
        for m in self.mixing:
            lines.append(
                f"{f'{m.what} ({m.variables:,})':<20} {m.rhat_median:6.3f} {m.rhat_max:6.3f} {m.ess_median:7.0f} "
                f"{m.ess_min:6.0f} {m.tail_min:6.0f} {m.iac_median:7.1f} {m.iac_max:7.1f}"
            )
        if t.numel():
            mixed = all(m.unmixed == 0 for m in self.mixing)
            lines.append(
                f"temperature {self.target_temperature:g}: E[(θ-θ̄)·g] {self.overall:.3f} "
                f"({t.min():.3f} to {t.max():.3f} by group){'' if mixed else ', which says nothing before mixing'},\n"
                f"  step heat {self.heat:.3f} on average, {self.hottest:.3g} in the hottest parameter"
            )
        if self.composition_gap is not None:
            lines.append(f"composition gap {self.composition_gap:.4g} nats{' a datum' if self.data else ''}")
        lines += [textwrap.fill(f"  {note}", 79, subsequent_indent="  ") for note in self.notes]
        return "\n".join([*lines, *(textwrap.fill("- " + v, 79, subsequent_indent="  ") for v in self.verdict)])
