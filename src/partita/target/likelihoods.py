"""Likelihoods: log p(y | network output), one number per datum.

Shapes: B rows, K classes, T tokens; `output` is what the network returns for B rows, `y` the B targets, the result [B].
A likelihood with parameters of its own names them in `parameters()`; they join θ as "likelihood.<name>".

Anything with these five methods is a likelihood; a plain function (output, y) -> [B] is one too (see `as_likelihood`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Params = Mapping[str, Tensor]


class Likelihood(Protocol):
    def parameters(self) -> dict[str, Tensor]:
        """Its own random parameters and their initial values."""

    def prior_energy(self, params: Params) -> Tensor:
        """-log of the prior over its own parameters, a scalar."""

    def log_prob(self, output: Any, y: Tensor, params: Params) -> Tensor:
        """log p(y_b | output_b), [B]."""

    def check(self, output: Any, y: Tensor) -> None:
        """Refuse targets that do not fit: `output` for the first rows, ALL targets `y`."""

    def predict(self, output: Any, params: Params) -> dict[str, Tensor]:
        """What one draw predicts: {"probs": ...} or {"mean": ..., "sd": ...}."""


class _NoParameters:
    def parameters(self) -> dict[str, Tensor]:
        return {}

    def prior_energy(self, params: Params) -> Tensor:
        return torch.zeros(())


@dataclass(frozen=True)
class Categorical(_NoParameters):
    """log softmax(output)[y]; logits [B, K] with y [B], or [B, T, K] with y [B, T] summed over the tokens of a row.

    Tokens whose target is `ignore` (padding) contribute nothing.
    """

    ignore: int = -100

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        k = output.shape[-1]
        nll = F.cross_entropy(
            output.reshape(-1, k).float(), y.reshape(-1).long(), reduction="none", ignore_index=self.ignore
        )
        return -nll.reshape(y.shape[0], -1).sum(1)

    def check(self, output: Any, y: Tensor) -> None:
        logits = _tensor(output)
        if y.dtype.is_floating_point or y.dtype.is_complex or y.dtype == torch.bool:
            raise ValueError(f"Categorical got targets of dtype {y.dtype}, expected integer class indices")
        want = f"targets [N{', T' * (logits.dim() - 2)}] for logits {_show(logits)}"
        if logits.dim() < 2 or y.dim() != logits.dim() - 1 or y.shape[1:] != logits.shape[1:-1]:
            raise ValueError(f"Categorical got targets of shape {tuple(y.shape)}, expected {want}")
        kept = y[y != self.ignore]
        if kept.numel() and (int(kept.min()) < 0 or int(kept.max()) >= logits.shape[-1]):
            raise ValueError(
                f"Categorical got class indices from {int(kept.min())} to {int(kept.max())}, "
                f"expected 0 to {logits.shape[-1] - 1} (the network returns {logits.shape[-1]} logits)"
            )

    def predict(self, output: Tensor, params: Params) -> dict[str, Tensor]:
        return {"probs": output.float().softmax(-1)}


@dataclass(frozen=True)
class Bernoulli(_NoParameters):
    """y log σ(o) + (1 - y) log σ(-o); logits and targets of one shape [B] or [B, L] (labels summed over a row)."""

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        o = output.float()
        return -F.binary_cross_entropy_with_logits(o, y.to(o.dtype), reduction="none").reshape(y.shape[0], -1).sum(1)

    def check(self, output: Any, y: Tensor) -> None:
        logits = _tensor(output)
        _same_shape("Bernoulli", logits, y)
        if not bool(((y == 0) | (y == 1)).all()):
            raise ValueError(f"Bernoulli got targets from {y.min().item():g} to {y.max().item():g}, expected 0 or 1")

    def predict(self, output: Tensor, params: Params) -> dict[str, Tensor]:
        return {"probs": output.float().sigmoid()}


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
        if self.scale != "learn" and not (isinstance(self.scale, (int, float)) and self.scale > 0):
            raise ValueError(f"Gaussian got scale={self.scale!r}, expected a number above 0 or 'learn'")
        if self.log_scale_sd <= 0:
            raise ValueError(f"Gaussian got log_scale_sd={self.log_scale_sd!r}, expected a number above 0")

    def parameters(self) -> dict[str, Tensor]:
        return {"log_scale": torch.tensor(float(self.log_scale_loc))} if self.scale == "learn" else {}

    def prior_energy(self, params: Params) -> Tensor:
        if self.scale != "learn":
            return torch.zeros(())
        z = (params["log_scale"] - self.log_scale_loc) / self.log_scale_sd
        return 0.5 * z**2 + math.log(self.log_scale_sd * math.sqrt(2 * math.pi))

    def _log_scale(self, params: Params, like: Tensor) -> Tensor:
        if self.scale == "learn":
            return params["log_scale"]
        return torch.full((), math.log(float(self.scale)), dtype=like.dtype, device=like.device)

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        log_scale = self._log_scale(params, output)
        z = (y - output) * torch.exp(-log_scale)
        return (-0.5 * z**2 - log_scale - 0.5 * math.log(2 * math.pi)).reshape(y.shape[0], -1).sum(1)

    def check(self, output: Any, y: Tensor) -> None:
        _same_shape("Gaussian", _tensor(output), y)
        if not y.dtype.is_floating_point:
            raise ValueError(f"Gaussian got targets of dtype {y.dtype}, expected a real floating dtype")

    def predict(self, output: Tensor, params: Params) -> dict[str, Tensor]:
        return {"mean": output, "sd": self._log_scale(params, output).exp().expand(output.shape)}


@dataclass(frozen=True)
class FromFunction(_NoParameters):
    """A likelihood from a plain function (output, y) -> log-probabilities [B]."""

    function: Callable[[Any, Tensor], Tensor]

    def log_prob(self, output: Any, y: Tensor, params: Params) -> Tensor:
        return self.function(output, y)

    def check(self, output: Any, y: Tensor) -> None:
        return None

    def predict(self, output: Any, params: Params) -> dict[str, Tensor]:
        return {"output": _tensor(output)}


def as_likelihood(likelihood: Any) -> Likelihood:
    """The likelihood itself, or one made of a plain function."""
    if hasattr(likelihood, "log_prob") and not isinstance(likelihood, type):
        return likelihood
    if isinstance(likelihood, type) or not callable(likelihood):
        raise ValueError(
            f"likelihood is {likelihood!r}, expected pt.Categorical(), pt.Gaussian(), pt.Bernoulli() or a function "
            "(output, y) -> [B]"
        )
    return FromFunction(likelihood)


def check_per_datum(log_prob: Any, rows: int) -> None:
    """One log-probability per datum, or an error: a sum or mean would be multiplied by N/B once more, silently."""
    if not isinstance(log_prob, Tensor) or tuple(log_prob.shape) != (rows,):
        came = f"shape {tuple(log_prob.shape)}" if isinstance(log_prob, Tensor) else type(log_prob).__name__
        raise ValueError(
            f"the likelihood returned {came} for {rows} rows, expected [B] = [{rows}]: "
            "one log-probability per datum, neither summed nor averaged"
        )


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
