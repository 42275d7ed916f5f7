"""Predictions: what draws say at new inputs, averaged, with their uncertainty.

Shapes: S draws, n inputs, K classes. A Prediction holds every draw's predictive parameters: "probs" [S, n, K]
(Bernoulli: [S, n, ...]) or "mean" and "sd" [S, n, ...]; all its answers are averages over S.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import vmap

from partita.answers import scores as score
from partita.target import Posterior
from partita.target.likelihoods import Bernoulli, Categorical
from partita.target.pairs import check_values
from partita.target.posterior import forward_failed
from partita.target.trees import as_tensors, leaves, map_tree, rows

LIMIT = 2 * 2**30  # bytes a Prediction may hold; beyond it the draws are thinned evenly
PIECE = 2**22  # numbers whose quantiles are taken at once (of more than 2^24 older versions of torch refuse them)


class Prediction:
    """Predictive parameters of S draws at n inputs."""

    def __init__(self, draws: Mapping[str, Tensor], classes: bool, ignore: int | None = None):
        self.draws, self.classes, self._ignore = dict(draws), classes, ignore

    @property
    def probs(self) -> Tensor:
        """p(y | x) averaged over the draws, [n, K] (Bernoulli: [n, ...])."""
        return self._need("probs").mean(0)

    @property
    def mean(self) -> Tensor:
        """E y, [n, ...]; for classes the probabilities."""
        return self.probs if "probs" in self.draws else self._need("mean").mean(0)

    @property
    def sd(self) -> Tensor:
        """√Var y = √(E σ² + Var μ) over the draws, [n, ...]."""
        mean, sd = self._need("mean"), self._need("sd")
        return (sd.square().mean(0) + mean.var(0, unbiased=False)).sqrt()

    def entropy(self) -> Tensor:
        """H[E p], the whole uncertainty, in nats, [n, ...]."""
        return entropy_of(self.probs, self.classes)

    def mutual_information(self) -> Tensor:
        """H[E p] - E H[p], the part the parameters cause, [n, ...]."""
        return (self.entropy() - entropy_of(self._need("probs"), self.classes).mean(0)).clamp(min=0)

    def interval(self, mass: float = 0.95) -> tuple[Tensor, Tensor]:
        """Central interval. Regression: of y itself, quantiles of the mixture Σ_s N(μ_s, σ_s²)/S. Classes: of the
        probabilities over the draws."""
        if not isinstance(mass, Real) or not 0 < mass < 1:
            raise ValueError(f"interval got mass={mass!r}, expected a number in (0, 1)")
        q = torch.tensor([(1 - mass) / 2, (1 + mass) / 2])
        quantile = self._quantile_of_probs if "probs" in self.draws else self._quantile_of_mixture
        draws = self._need("probs" if "probs" in self.draws else "mean")
        each = max(1, PIECE // max(1, draws[:, 0].numel()))
        parts = [quantile(q, slice(a, a + each)) for a in range(0, draws.shape[1], each)]
        lower, upper = torch.cat(parts, dim=1)
        return lower, upper

    def scores(self, y: Any) -> dict[str, float]:
        """Classes: accuracy (of the average), individual_accuracy (mean over draws), nll, brier, ece (bins of equal width)
        and ece_mass (of equal counts). Regression: rmse, nll and crps of the mixture, coverage of the 95 % interval."""
        y = as_tensors(y, "y")
        if not isinstance(y, Tensor):
            raise ValueError(f"y is a {type(y).__name__}, expected one tensor or array")
        check_values((), y)
        y = y.to(next(iter(self.draws.values())).device)
        if "probs" not in self.draws:
            mean, sd = self._need("mean"), self._need("sd")
            if y.shape != mean.shape[1:]:
                raise ValueError(f"y has shape {tuple(y.shape)}, expected {tuple(mean.shape[1:])}")
            nll, crps = score.gaussian_mixture_nll(mean, sd, y), score.crps(mean, sd, y)
            (covered,) = score.coverages(mean, sd, y, (0.95,))
            return {"rmse": score.rmse(self.mean, y), "nll": nll, "crps": crps, "coverage95": covered}
        each, y = self._flat(y)
        return {**score.class_scores(each.mean(0), y), "individual_accuracy": score.individual_accuracy(each, y)}

    def ood(self, other: Prediction) -> dict[str, float]:
        """How well uncertainty tells the inputs of `other` from these: P(larger there), ties ½, of the entropy and of the
        mutual information. ½ is not at all."""
        return ood(self, other)

    def _flat(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Per-draw probabilities [S, m, K] or [S, m] and targets [m], tokens and labels flattened, padding left out."""
        p = self._need("probs")
        event = p.shape[1:-1] if self.classes else p.shape[1:]
        if y.shape != event:
            raise ValueError(f"y has shape {tuple(y.shape)}, expected {tuple(event)}")
        each = p.reshape(p.shape[0], -1, p.shape[-1]) if self.classes else p.reshape(p.shape[0], -1)
        y = y.reshape(-1)
        keep = y.long() != self._ignore if self._ignore is not None else torch.ones_like(y, dtype=torch.bool)
        return each[:, keep], y[keep]

    def _quantile_of_probs(self, q: Tensor, rows: slice) -> Tensor:
        """[2, n, ...] over the draws."""
        p = self.draws["probs"][:, rows]
        return p.quantile(q.to(p), dim=0)

    def _quantile_of_mixture(self, q: Tensor, rows: slice) -> Tensor:
        """[2, n, ...]: bisection on the mixture's distribution function; 60 halvings reach double precision."""
        mean, sd = self._need("mean")[:, rows].double(), self._need("sd")[:, rows].double()
        q = q.to(mean).reshape(2, *[1] * (mean.dim() - 1))
        low = (mean - 10 * sd).amin(0).expand(2, *mean.shape[1:])
        high = (mean + 10 * sd).amax(0).expand(2, *mean.shape[1:])
        for _ in range(60):
            mid = 0.5 * (low + high)
            below = torch.special.ndtr((mid.unsqueeze(1) - mean) / sd).mean(1) < q
            low, high = torch.where(below, mid, low), torch.where(below, high, mid)
        return (0.5 * (low + high)).to(self.draws["mean"].dtype)

    def _need(self, name: str) -> Tensor:
        if name not in self.draws:
            raise ValueError(
                f"this prediction has no {name!r}, expected one of what it holds: {', '.join(sorted(self.draws))} "
                f"({'entropies are of classes: see .sd, .interval()' if name == 'probs' else 'it is of classes'})"
            )
        return self.draws[name]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{k} {list(v.shape)}" for k, v in self.draws.items())
        return f"Prediction({shapes}; the first axis is the draws)"


def entropy_of(p: Tensor, classes: bool) -> Tensor:
    """In nats: of classes along the last axis, [..., K] -> [...]; or of labels, each on its own."""
    if classes:
        return torch.special.entr(p).sum(-1)
    return torch.special.entr(p) + torch.special.entr(1 - p)


class Uncertain(Protocol):
    def entropy(self) -> Tensor: ...

    def mutual_information(self) -> Tensor: ...


def ood(inside: Uncertain, outside: Uncertain) -> dict[str, float]:
    """AUROC of two scores that should be larger outside; of a Prediction, or of what `stream` gives."""
    return {
        "entropy": score.auroc(inside.entropy(), outside.entropy()),
        "mutual_information": score.auroc(inside.mutual_information(), outside.mutual_information()),
    }


def predict(
    target: Posterior,
    theta: Tensor,
    x: Any,
    statistics: Mapping[str, Tensor] | None = None,
    *,
    how: str = "vmap",
    draws_at_once: int = 16,
    rows_at_once: int = 1024,
) -> Prediction:
    """θ [S, D], BatchNorm statistics {name: [S, ...]} -> the Prediction at x, batched over draws and inputs."""
    x = as_inputs(x, theta.dtype, theta.device)
    theta, statistics = _within_limit(target, theta, x, statistics, how)
    parts = []
    for a in range(0, rows(x), rows_at_once):
        piece = map_tree(lambda t, a=a: t[a : a + rows_at_once], x)  # type: ignore[misc]
        some = [outputs(target, t, piece, stats, how) for t, stats in in_pieces(theta, statistics, draws_at_once)]
        parts.append({k: torch.cat([p[k] for p in some]) for k in some[0]})
    return prediction_of(target, {k: torch.cat([p[k] for p in parts], dim=1) for k in parts[0]})


def prediction_of(target: Posterior, draws: Mapping[str, Tensor]) -> Prediction:
    likelihood = target.likelihood
    ignore = likelihood.ignore if isinstance(likelihood, Categorical) else None
    return Prediction(draws, not isinstance(likelihood, Bernoulli), ignore)


def as_inputs(x: Any, dtype: torch.dtype, device: torch.device | None = None) -> Any:
    """x as tensors, arrays made of `dtype`, checked: one length, and finite."""
    x = map_tree(lambda t: t.to(device or t.device), as_tensors(x, dtype=dtype))
    sizes = {path: t.shape[0] if t.dim() else 0 for path, t in leaves(x)}
    if len(set(sizes.values())) != 1 or min(sizes.values()) < 1:
        raise ValueError(f"the inputs have unequal or no rows: {sizes}, expected one n of at least 1 for all")
    floats = [t for _, t in leaves(x) if t.is_floating_point() and t.numel()]
    if not all(bool(torch.stack(t.aminmax()).isfinite().all()) for t in floats):  # makes no arrays of the inputs' size
        check_values(x, torch.zeros(()))
    return x


def in_pieces(theta: Tensor, statistics: Any, each: int) -> Iterator[tuple[Tensor, dict[str, Tensor] | None]]:
    """θ [S, D] and statistics, `each` draws at a time."""
    for s in range(0, theta.shape[0], each):
        yield theta[s : s + each], {k: v[s : s + each] for k, v in statistics.items()} if statistics else None


@torch.no_grad()
def outputs(target: Posterior, theta: Tensor, x: Any, statistics: Any, how: str) -> dict[str, Tensor]:
    """What each draw of θ [s, D] predicts at x: {name: [s, n, ...]}."""
    if how == "vmap":
        with warnings.catch_warnings():  # torch says once a process that vmap runs some operations one by one
            warnings.filterwarnings("ignore", "There is a performance drop")
            return vmap(target.predict, in_dims=(0, None, 0 if statistics else None))(theta, x, statistics)
    each = [target.predict(t, x, {k: v[i] for k, v in (statistics or {}).items()} or None) for i, t in enumerate(theta)]
    return {k: torch.stack([e[k] for e in each]) for k in each[0]}


def try_outputs(target: Posterior, theta: Tensor, x: Any, statistics: Any, how: str) -> dict[str, Tensor]:
    """`outputs` at two rows; or an error that says what did not fit."""
    few = map_tree(lambda t: t[:2], x)
    try:
        return outputs(target, theta, few, statistics, how)
    except Exception as e:
        raise forward_failed(e, few, theta.dtype) from e


def _within_limit(target: Posterior, theta: Tensor, x: Any, statistics: Any, how: str) -> tuple[Tensor, Any]:
    one = {k: v[:1] for k, v in statistics.items()} if statistics else None
    n, probe = rows(x), try_outputs(target, theta[:1], x, one, how)
    per_draw = sum(v.numel() * v.element_size() for v in probe.values()) * n // min(2, n)
    if per_draw * theta.shape[0] <= LIMIT:
        return theta, statistics
    keep = max(1, LIMIT // per_draw)
    step = math.ceil(theta.shape[0] / keep)
    warnings.warn(
        f"predicting with one draw in {step}: {theta.shape[0]:,} draws x {n:,} inputs would take "
        f"{per_draw * theta.shape[0] / 2**30:.1f} GiB, more than {LIMIT / 2**30:.1f}",
        stacklevel=5,
    )
    return theta[::step], {k: v[::step] for k, v in statistics.items()} if statistics else None
