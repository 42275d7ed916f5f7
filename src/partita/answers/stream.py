"""Predictions of any number of draws at any number of inputs, in memory for the sums alone.

A Prediction holds S x n x K numbers: for a thousand draws at a million inputs of ten classes, 40 GB. `stream` goes over
the draws and over the inputs in blocks and keeps, for each input, means over the draws: 88 MB. What needs every draw at
once, quantiles over draws and the CRPS, is not to be had from them.

Shapes: S draws, n inputs, K classes, D parameters; s draws of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from partita.answers import scores as score
from partita.answers.predictive import (
    Prediction,
    Uncertain,
    as_inputs,
    entropy_of,
    in_pieces,
    ood,
    outputs,
    prediction_of,
    try_outputs,
)
from partita.target import Posterior
from partita.target.pairs import check_values
from partita.target.trees import as_tensors, map_tree, rows

Statistics = dict[str, Tensor] | None
Thetas = Callable[[], Iterable[Any]]  # each call gives blocks θ [s, D], or (θ, statistics {name: [s, ...]})


class Streamed:
    """What means over S draws say at n inputs; names and numbers are those of a Prediction.

    means: "probs" and "entropy" of classes; "mean" μ, "noise" σ² and "spread" Var μ of numbers; and, where targets y were
    given, "density", log p(y) of the mixture, and "below", its distribution function at y. All float64, on the host.
    """

    def __init__(
        self,
        draws: int,
        means: dict[str, Tensor],
        kind: Prediction,
        y: Tensor | None = None,
        hit_rate: float = math.nan,
    ):
        self.draws, self.means, self.y = draws, means, y
        self._kind, self._hit_rate = kind, hit_rate  # kind: an empty Prediction, which says what the numbers are

    @property
    def probs(self) -> Tensor:
        """p(y | x) averaged over the draws, [n, K] (Bernoulli: [n, ...])."""
        return self._need("probs")

    @property
    def mean(self) -> Tensor:
        """E y, [n, ...]; for classes the probabilities."""
        return self.probs if "probs" in self.means else self._need("mean")

    @property
    def sd(self) -> Tensor:
        """√Var y = √(E σ² + Var μ), [n, ...]."""
        return (self._need("noise") + self._need("spread")).sqrt()

    def entropy(self) -> Tensor:
        """H[E p], the whole uncertainty, in nats, [n, ...]."""
        return entropy_of(self.probs, self._kind.classes)

    def mutual_information(self) -> Tensor:
        """H[E p] - E H[p], the part the parameters cause, [n, ...]."""
        return (self.entropy() - self._need("entropy")).clamp(min=0)

    def interval(self, mass: float = 0.95) -> tuple[Tensor, Tensor]:
        raise ValueError(
            "interval needs every draw (quantiles over the draws, or of their mixture), and a stream keeps means; expected "
            "a Prediction: run.predict(x), of fewer inputs or draws"
        )

    def scores(self, y: Any = None) -> dict[str, float]:
        """Of the targets given to `stream` (y=None): all that a Prediction has but crps, which needs pairs of draws.
        Of other targets: those of averages, so without individual_accuracy (classes), nll and coverage95 (numbers)."""
        given = y is None
        y = self.y if given else as_tensors(y, "y")
        if not isinstance(y, Tensor):
            raise ValueError("scores got no y, nor did the stream, expected one tensor or array of targets")
        if "probs" in self.means:
            p = self.probs.float()  # a probability of 0 is then a Prediction's
            found = Prediction({"probs": p[None]}, self._kind.classes, self._kind._ignore).scores(y)
            return found | {"individual_accuracy": self._hit_rate} if given else _without(found, "individual_accuracy")
        found = {"rmse": score.rmse(self._need("mean"), y)}
        if given:
            (covered,) = score.central(self._need("below"), (0.95,))
            found |= {"nll": -self._need("density").mean().item(), "coverage95": covered}
        return found

    def ood(self, other: Uncertain) -> dict[str, float]:
        """As `Prediction.ood`; `other` may be either."""
        return ood(self, other)

    def _need(self, name: str) -> Tensor:
        if name not in self.means:
            raise ValueError(
                f"this stream has no {name!r}, expected one of what it holds: {', '.join(sorted(self.means))}"
            )
        return self.means[name]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{k} {list(v.shape)}" for k, v in self.means.items())
        return f"Streamed({self.draws:,} draws; {shapes})"


def stream(
    target: Posterior,
    theta_batches: Thetas | Tensor,
    x: Any,
    y: Any = None,
    how: str = "vmap",
    *,
    draws_at_once: int = 16,
    rows_at_once: int = 1024,
) -> Streamed:
    """Predictions at x of all draws, block by block.

    theta_batches() gives blocks of draws: θ [s, D], or (θ, BatchNorm statistics {name: [s, ...]}); a tensor [S, D] is one
    block. x: a tensor, an array or a tuple or dict of them; or a DataLoader or another iterable of batches of these (a
    batch that is a pair is (x, y), as everywhere in Partita, unless y is given here). Each block of draws is read once,
    and all inputs pass by it; where the inputs cannot be gone over again in the same order (an iterator, a shuffling
    DataLoader) it is the other way round: each batch is read once, and all draws anew for it.
    """
    inputs = _Inputs(x, y, target.space.values.dtype, rows_at_once)
    parts: list[_Means] = []

    def see(i: int, pair: tuple[Any, Tensor | None], theta: Tensor, statistics: Statistics) -> None:
        x, y = map_tree(lambda t: t.to(theta.device), pair[0]), pair[1]
        if i == len(parts):
            parts.append(_Means(rows(x), y))
        if i == parts[0].seen == 0:
            try_outputs(target, theta[:1], x, {k: v[:1] for k, v in statistics.items()} if statistics else None, how)
        for some, s in in_pieces(theta, statistics, draws_at_once):
            parts[i].add(prediction_of(target, outputs(target, some, x, s, how)), rows(x))

    if inputs.again:
        for theta, statistics in _blocks(theta_batches, target):
            for i, pair in enumerate(inputs):
                see(i, pair, theta, statistics)
    else:
        for i, pair in enumerate(inputs):
            parts.append(_Means(rows(pair[0]), pair[1]))
            for theta, statistics in _blocks(theta_batches, target):
                see(i, pair, theta, statistics)
    seen = sorted({part.seen for part in parts})
    if len(seen) != 1 or seen == [0]:
        raise ValueError(f"the inputs met {seen or 'no'} draws, expected the same blocks of draws and of x every time")
    means = {k: torch.cat([part.means[k] for part in parts]) for k in parts[0].means}
    labels = None if parts[0].y is None else torch.cat([p.y for p in parts if p.y is not None])
    scored = sum(part.scored for part in parts)
    rate = sum(part.hits for part in parts) / scored if scored and bool(means["probs"].isfinite().all()) else math.nan
    return Streamed(seen[0], means, prediction_of(target, {}), labels, rate)


def marginal_rows(theta: Tensor, labels: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
    """n draws of the product of the groups' marginals, the q̂ of the structured method: θ [C, S, D], labels [D] -> [n, D].

        row_i = (θ[c_i, s_i1] on group 1, ..., θ[c_i, s_iM] on group M),   c_i and every s_im uniform and independent:

    each group of coordinates takes an independent random draw of one chain, so that groups share nothing but their chain.
    """
    if theta.dim() != 3 or labels.shape != theta.shape[2:] or not theta.numel() or n < 1:
        raise ValueError(
            f"marginal_rows: theta is {list(theta.shape)}, labels {list(labels.shape)}, n = {n}; expected [C, S, D], not "
            "empty, [D] and n >= 1"
        )
    C, S, D = theta.shape
    device = None if generator is None else generator.device
    draw = lambda high, *shape: torch.randint(high, shape, generator=generator, device=device)
    chain, pick = draw(C, n, 1), draw(S, n, int(labels.max()) + 1)
    row = (chain * S + pick).to(theta.device)  # [n, M]
    out, flat, each = theta.new_empty(n, D), theta.reshape(C * S, D), max(1, 2**22 // D)
    for a in range(0, n, each):  # of the indices [n, D] at once, 8 bytes each, no more than 32 MB
        torch.gather(flat, 0, row[a : a + each, labels.to(row.device)], out=out[a : a + each])
    return out


class _Inputs:
    """Pieces (x, y or None) of at most `each` rows, checked; `again` says whether going over them again gives the same."""

    def __init__(self, x: Any, y: Any, dtype: torch.dtype, each: int):
        self.dtype, self.each, self.y = dtype, each, None if y is None else as_tensors(y, "y")
        tree = isinstance(x, (Tensor, Mapping, tuple, list)) or hasattr(x, "__array__")
        if not tree and not isinstance(x, Iterable):
            raise ValueError(f"x is a {type(x).__name__}, expected tensors, arrays, or an iterable of batches of them")
        self.batches: Iterable[Any] = [as_inputs(x, dtype)] if tree else x
        self.tree = tree
        shuffles = isinstance(x, DataLoader) and not isinstance(x.sampler, SequentialSampler)
        self.again = tree or not (shuffles or isinstance(x, Iterator))

    def __iter__(self) -> Iterator[tuple[Any, Tensor | None]]:
        n = 0
        for batch in self.batches:
            x, y = batch, None
            if not self.tree:
                pair = self.y is None and isinstance(batch, (tuple, list)) and len(batch) == 2
                x, y = (batch[0], as_tensors(batch[1], "y")) if pair else (batch, None)
                x = as_inputs(x, self.dtype)
            y = y if self.y is None else self.y[n : n + rows(x)]
            n += rows(x)
            if y is not None and len(y) != rows(x):
                raise ValueError(f"y has {len(y):,} rows where x has {rows(x):,}, expected as many")
            for a in range(0, rows(x), self.each):
                yield map_tree(lambda t, a=a: t[a : a + self.each], x), None if y is None else y[a : a + self.each]  # type: ignore[misc]
        if self.y is not None and n != len(self.y):
            raise ValueError(f"y has {len(self.y):,} rows where x has {n:,}, expected as many")


class _Means:
    """Means over the draws seen so far at n inputs."""

    def __init__(self, n: int, y: Tensor | None):
        if y is not None:
            check_values((), y)
        self.n, self.y, self.means, self.seen = n, y, dict[str, Tensor](), 0
        self.hits, self.scored = 0.0, 0  # right answers, and answers, of single draws

    def add(self, found: Prediction, n: int) -> None:
        """s more draws: mean ← mean + s/(seen + s) (their mean - mean); the variance of μ by Chan, Golub & LeVeque (1983),
        which never subtracts large squares."""
        if n != self.n:
            raise ValueError(
                f"a batch of x has {n} rows, which had {self.n} before, expected the same batches every time"
            )
        draws = found.draws
        if not {"probs"} <= set(draws) and not {"mean", "sd"} <= set(draws):
            raise ValueError(f"the draws predict {', '.join(draws)}, expected 'probs', or 'mean' and 'sd', to average")
        s = len(next(iter(draws.values())))
        share = s / (self.seen + s)
        if "probs" in draws:
            p = draws["probs"]
            self._mix("entropy", entropy_of(p, found.classes).mean(0, dtype=torch.float64), share)
            self._mix("probs", p.mean(0, dtype=torch.float64), share)
            if self.y is not None:
                each, y = found._flat(self.y.to(p.device))
                right = each.argmax(-1) == y if found.classes else (each > 0.5) == (y == 1)
                self.hits, self.scored = self.hits + right.sum().item(), self.scored + right.numel()
        else:
            mean, sd = draws["mean"].double(), draws["sd"].double()
            centre = mean.mean(0)
            apart = centre.cpu() - self.means.get("mean", 0.0)
            self._mix("spread", (mean - centre).square().mean(0), share)
            self.means["spread"] += share * (1 - share) * apart.square()
            self._mix("mean", centre, share)
            self._mix("noise", sd.square().mean(0), share)
            if self.y is not None:
                if self.y.shape != centre.shape:
                    raise ValueError(f"y has shape {tuple(self.y.shape)}, expected {tuple(centre.shape)}")
                y = self.y.to(mean)
                self._mix("below", torch.special.ndtr((y - mean) / sd).mean(0), share)
                density = score.log_density(mean, sd, y).logsumexp(0).cpu() - math.log(s)
                old = (
                    self.means.get("density", torch.full_like(density, -math.inf)) + math.log1p(-share)
                    if self.seen
                    else None
                )
                new = density + math.log(share)
                self.means["density"] = new if old is None else torch.logaddexp(old, new)
        self.seen += s

    def _mix(self, name: str, mean: Tensor, share: float) -> None:
        self.means[name] = self.means[name].lerp_(mean.cpu(), share) if name in self.means else mean.cpu()


def _blocks(theta_batches: Thetas | Tensor, target: Posterior) -> Iterator[tuple[Tensor, Statistics]]:
    """(θ [s, D], statistics) where the target is."""
    like = target.space.values
    for block in [theta_batches] if isinstance(theta_batches, Tensor) else theta_batches():
        theta, statistics = block if isinstance(block, (tuple, list)) else (block, None)
        if not isinstance(theta, Tensor) or theta.dim() != 2 or theta.shape[1] != len(like):
            came = list(theta.shape) if isinstance(theta, Tensor) else type(theta).__name__
            raise ValueError(f"a block of draws is {came}, expected a tensor [s, {len(like)}]")
        yield theta.to(like), {k: v.to(like.device) for k, v in statistics.items()} if statistics else None


def _without(d: dict[str, float], name: str) -> dict[str, float]:
    return {k: v for k, v in d.items() if k != name}
