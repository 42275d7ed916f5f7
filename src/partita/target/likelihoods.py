"""Likelihoods: log p(y | network output), one number per datum.

Shapes: B rows, K classes, T tokens; `output` is what the network returns for B rows, `y` the B targets, the result [B].
A likelihood with parameters of its own names them in `parameters()`; they join θ as "likelihood.<name>".

Anything with these six methods is a likelihood; a plain function (output, y) -> [B] is one too (see `as_likelihood`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.loss import _Loss

from partita.target.trees import leaves, map_tree, short

Params = Mapping[str, Tensor]
METHODS = ("parameters", "prior_energy", "sample", "log_prob", "check", "predict")


class Likelihood(Protocol):
    def parameters(self) -> dict[str, Tensor]:
        """Its own random parameters and their initial values."""

    def prior_energy(self, params: Params) -> Tensor:
        """-log of the prior over its own parameters, a scalar."""

    def sample(self, n: int) -> dict[str, Tensor]:
        """n draws of its own parameters from their prior, {name: [n, *shape]} (for init="prior")."""

    def log_prob(self, output: Any, y: Tensor, params: Params) -> Tensor:
        """log p(y_b | output_b), [B]."""

    def check(self, output: Any, y: Tensor) -> None:
        """Refuse targets that do not fit: `output` for the first rows, ALL targets `y`."""

    def predict(self, output: Any, params: Params) -> dict[str, Tensor]:
        """What one draw predicts: {"probs": ...} or {"mean": ..., "sd": ...}."""


class _NoParameters:
    def parameters(self) -> dict[str, Tensor]:
        return {}

    def sample(self, n: int) -> dict[str, Tensor]:
        return {}

    def prior_energy(self, params: Params) -> Tensor:
        return torch.zeros(())


@dataclass(frozen=True)
class Categorical(_NoParameters):
    """log softmax(output)[y]; logits [B, K] with y [B], or [B, T, K] with y [B, T] summed over the tokens of a row.

    Tokens whose target is `ignore` (padding) contribute nothing.
    """

    ignore: int = -100

    def __post_init__(self) -> None:
        if not isinstance(self.ignore, Integral):
            raise ValueError(f"Categorical got ignore={self.ignore!r}, expected a whole number")

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        k = output.shape[-1]
        nll = F.cross_entropy(
            _wide(output).reshape(-1, k), y.reshape(-1).long(), reduction="none", ignore_index=self.ignore
        )
        return -nll.reshape(y.shape[0], -1).sum(1)

    def check(self, output: Any, y: Tensor) -> None:
        logits = _tensor(output)
        if y.dtype.is_floating_point or y.dtype.is_complex or y.dtype == torch.bool:
            raise ValueError(f"Categorical got targets of dtype {y.dtype}, expected integer class indices")
        want = f"targets [N{', T' * (logits.dim() - 2)}] for logits {_show(logits)}"
        if logits.dim() < 2 or y.dim() != logits.dim() - 1 or y.shape[1:] != logits.shape[1:-1]:
            raise ValueError(f"Categorical got targets of shape {tuple(y.shape)}, expected {want}")
        kept = y[y.long() != self.ignore]
        if kept.numel() and (int(kept.min()) < 0 or int(kept.max()) >= logits.shape[-1]):
            raise ValueError(
                f"Categorical got class indices from {int(kept.min())} to {int(kept.max())}, "
                f"expected 0 to {logits.shape[-1] - 1} (the network returns {logits.shape[-1]} logits)"
            )

    def predict(self, output: Tensor, params: Params) -> dict[str, Tensor]:
        return {"probs": _wide(output).softmax(-1)}


@dataclass(frozen=True)
class Bernoulli(_NoParameters):
    """y log σ(o) + (1 - y) log σ(-o); logits and targets of one shape [B] or [B, L] (labels summed over a row)."""

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        o = _wide(output)
        return -F.binary_cross_entropy_with_logits(o, y.to(o.dtype), reduction="none").reshape(y.shape[0], -1).sum(1)

    def check(self, output: Any, y: Tensor) -> None:
        logits = _tensor(output)
        _same_shape("Bernoulli", logits, y)
        if not bool(((y == 0) | (y == 1)).all()):
            raise ValueError(f"Bernoulli got targets from {y.min().item():g} to {y.max().item():g}, expected 0 or 1")

    def predict(self, output: Tensor, params: Params) -> dict[str, Tensor]:
        return {"probs": _wide(output).sigmoid()}


@dataclass(frozen=True)
class Gaussian:
    """log N(y; output, σ²), summed over the outputs of a row; output and y of one shape [B] or [B, K].

    `scale` is σ, or "learn": then log σ is sampled with everything else, as the parameter "likelihood.log_scale" in a
    group of its own, under the prior log σ ~ N(log_scale_loc, log_scale_sd²).
    """

    scale: float | str = "learn"
    log_scale_loc: float = 0.0
    log_scale_sd: float = 1.0

    def __post_init__(self) -> None:
        if self.scale != "learn" and not (isinstance(self.scale, Real) and 0 < float(self.scale) < math.inf):
            raise ValueError(f"Gaussian got scale={self.scale!r}, expected a number above 0 or 'learn'")
        if not (isinstance(self.log_scale_loc, Real) and math.isfinite(self.log_scale_loc)):
            raise ValueError(f"Gaussian got log_scale_loc={self.log_scale_loc!r}, expected a number")
        if not (isinstance(self.log_scale_sd, Real) and 0 < float(self.log_scale_sd) < math.inf):
            raise ValueError(f"Gaussian got log_scale_sd={self.log_scale_sd!r}, expected a number above 0")

    def parameters(self) -> dict[str, Tensor]:
        return {"log_scale": torch.tensor(float(self.log_scale_loc))} if self.scale == "learn" else {}

    def prior_energy(self, params: Params) -> Tensor:
        if self.scale != "learn":
            return torch.zeros(())
        z = (params["log_scale"] - self.log_scale_loc) / self.log_scale_sd
        return 0.5 * z**2 + math.log(self.log_scale_sd * math.sqrt(2 * math.pi))

    def sample(self, n: int) -> dict[str, Tensor]:
        loc, sd = float(self.log_scale_loc), float(self.log_scale_sd)
        return {"log_scale": loc + sd * torch.randn(n)} if self.scale == "learn" else {}

    def _log_scale(self, params: Params, like: Tensor) -> Tensor:
        if self.scale == "learn":
            return params["log_scale"]
        return torch.full((), math.log(float(self.scale)), dtype=like.dtype, device=like.device)

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        o = _wide(output)
        log_scale = self._log_scale(params, o)
        z = (y.to(o.dtype) - o) * torch.exp(-log_scale)
        return (-0.5 * z**2 - log_scale - 0.5 * math.log(2 * math.pi)).reshape(y.shape[0], -1).sum(1)

    def check(self, output: Any, y: Tensor) -> None:
        _same_shape("Gaussian", _tensor(output), y)
        if not y.dtype.is_floating_point:
            raise ValueError(f"Gaussian got targets of dtype {y.dtype}, expected a real floating dtype")

    def predict(self, output: Tensor, params: Params) -> dict[str, Tensor]:
        o = _wide(output)
        return {"mean": o, "sd": self._log_scale(params, o).exp().expand(o.shape)}


@dataclass(frozen=True)
class FromFunction(_NoParameters):
    """A likelihood from a plain function (output, y) -> log-probabilities [B]."""

    function: Callable[[Any, Tensor], Tensor]

    def log_prob(self, output: Any, y: Tensor, params: Params) -> Tensor:
        return self.function(output, y)

    def check(self, output: Any, y: Tensor) -> None:
        self.predict(output, {})

    def check_alone(self, output: Any, y: Tensor, log_p: Tensor) -> None:
        """Refuse a function whose numbers depend on the other rows: [B, 1] against [B] broadcasts to [B, B]."""
        few = min(len(y), 4)
        with torch.no_grad():
            alone = [self.function(map_tree(lambda t, i=i: t[i : i + 1], output), y[i : i + 1]) for i in range(few)]  # type: ignore[misc]
        found = torch.stack([a.reshape(()) if a.numel() == 1 else a.new_full((), math.nan) for a in alone])
        if not torch.allclose(found, log_p[:few], rtol=1e-3, atol=1e-4, equal_nan=True):
            raise ValueError(
                f"the likelihood gives other log-probabilities for rows alone ({_few(found)}) than among others "
                f"({_few(log_p[:few])}), expected the same: output {_shapes(output)} and y {list(y.shape)} may broadcast"
            )

    def predict(self, output: Any, params: Params) -> dict[str, Tensor]:
        """The network's own output, every tensor of it: nobody said what it means."""
        found = dict(leaves(output, "output"))
        return {path: _tensor(t) for path, t in found.items()}


def as_likelihood(likelihood: Any) -> Likelihood:
    """The likelihood itself, or one made of a plain function."""
    if hasattr(likelihood, "log_prob") and not isinstance(likelihood, type):
        missing = [m for m in METHODS if not callable(getattr(likelihood, m, None))]
        if missing:
            raise ValueError(
                f"likelihood is a {type(likelihood).__name__} without {', '.join(missing)}, expected the methods "
                f"{', '.join(METHODS)}, or a function (output, y) -> [B]"
            )
        return likelihood
    if isinstance(likelihood, _Loss):
        raise ValueError(
            f"likelihood is the loss {likelihood}, expected log-probabilities: a loss has the other sign (pt.Categorical() "
            "for CrossEntropyLoss, pt.Gaussian() for MSELoss, pt.Bernoulli() for BCEWithLogitsLoss)"
        )
    if isinstance(likelihood, type) or not callable(likelihood):
        raise ValueError(
            f"likelihood is {short(likelihood)}, expected pt.Categorical(), pt.Gaussian(), pt.Bernoulli() or a function "
            "(output, y) -> [B]"
        )
    return FromFunction(likelihood)


def check_per_datum(log_prob: Any, rows: int) -> None:
    """One log-probability per datum, or an error: a sum or mean would be multiplied by N/B once more, silently."""
    if not isinstance(log_prob, Tensor) or tuple(log_prob.shape) != (rows,):
        came = f"shape {tuple(log_prob.shape)}" if isinstance(log_prob, Tensor) else type(log_prob).__name__
        raise ValueError(
            f"the likelihood returned {came} for {rows} rows, expected [B] = [{rows}]: "
            "one log-probability (not a loss, which has the other sign) per datum, neither summed nor averaged"
        )


def _few(t: Tensor) -> str:
    return ", ".join(f"{v:.4g}" for v in t.tolist())


def _shapes(output: Any) -> str:
    return ", ".join(str(list(t.shape)) for _, t in leaves(output))


def _wide(t: Tensor) -> Tensor:
    """At least float32: half precision cannot sum log-probabilities."""
    return t if t.dtype == torch.float64 else t.float()


def _tensor(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise ValueError(
            f"the network returned a {type(output).__name__}, expected a tensor: "
            "pass forward=lambda m, x: ... that picks it (for example m(**x).logits)"
        )
    return output


def _same_shape(who: str, output: Tensor, y: Tensor) -> None:
    if output.shape[1:] != y.shape[1:]:
        want = ["N", *map(str, output.shape[1:])]
        raise ValueError(
            f"{who} got targets of shape {tuple(y.shape)}, expected [{', '.join(want)}] to match the network's "
            f"output {_show(output)}"
        )


def _show(t: Tensor) -> str:
    return "[" + ", ".join(["B", *map(str, t.shape[1:])]) + "]"
