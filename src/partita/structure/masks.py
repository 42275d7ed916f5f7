"""Mask laws: which groups show their present value (r = 1) and which a past one (r = 0).

A law is two methods: `sample(C, M, device) -> r [C, K, M]`, drawn jointly over the K masks of a step (one-hot and
stratified rows are not independent), and `weight(M) -> w`, with which Σ_k r_k ⊙ ∇U_lik(φ_k) becomes the gradient.

A law whose masks each keep exactly one group may say so with a third method, `kept(C, M, device) -> [C, K]`, the indices of
those groups: then no [K, M] is ever built, which at M = K = 42,200 would be 1.8 GB.

S of the paper is OneGroup(): w = 1. S_d is any other, w = 1 / (K · E r). Random numbers come from torch's current state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Protocol

import torch
from torch import Tensor


class Mask(Protocol):
    def sample(self, C: int, M: int, device: torch.device) -> Tensor:
        """r [C, K, M], float32 (boolean laws: bool)."""

    def weight(self, M: int) -> float:
        """w."""


@dataclass(frozen=True)
class OneGroup:
    """S: each mask keeps one group. All M of them every step, or `count` at random without replacement (w = M/count)."""

    count: int | None = None

    def __post_init__(self) -> None:
        _check_count("OneGroup", 1 if self.count is None else self.count)

    def kept(self, C: int, M: int, device: torch.device) -> Tensor:
        if self.count is None:
            return torch.arange(M, device=device).expand(C, M)
        return torch.rand(C, M, device=device).topk(self._fit(M), dim=1).indices

    def sample(self, C: int, M: int, device: torch.device) -> Tensor:
        return self.kept(C, M, device)[:, :, None] == torch.arange(M, device=device)

    def weight(self, M: int) -> float:
        return 1.0 if self.count is None else M / self._fit(M)

    def _fit(self, M: int) -> int:
        assert self.count is not None
        if self.count > M:
            raise ValueError(f"OneGroup got count={self.count}, expected at most the number of groups, {M}")
        return self.count


@dataclass(frozen=True)
class Bernoulli:
    """S_d: each group is kept with probability ρ, in each of `count` independent masks; w = 1 / (K E r).

    `nonzero=True` conditions each mask on keeping at least one group: E r = ρ / (1 - (1-ρ)^M). It is drawn without
    rejection: the first kept group J from P(J = j) ∝ (1-ρ)^j, zeros before it, independent Bernoulli(ρ) after it.
    """

    rho: float = 0.5
    count: int = 1
    nonzero: bool = False

    def __post_init__(self) -> None:
        if not _is_number(self.rho) or not 0 < self.rho <= 1:
            raise ValueError(f"Bernoulli got rho={self.rho!r}, expected a number in (0, 1]")
        _check_count("Bernoulli", self.count)

    def sample(self, C: int, M: int, device: torch.device) -> Tensor:
        fine = torch.float64 if self.rho < 1e-3 else torch.float32  # float32 draws are multiples of 2^-24
        r = torch.rand(C, self.count, M, device=device, dtype=fine) < self.rho
        if not self.nonzero or self.rho == 1:
            return r
        u = torch.rand(C, self.count, 1, device=device, dtype=torch.float64)
        first = (torch.log1p(-u * self._some(M)) / math.log1p(-self.rho)).floor().clamp(max=M - 1)
        index = torch.arange(M, device=device)
        return (index == first) | (r & (index > first))

    def weight(self, M: int) -> float:
        mean = self.rho / self._some(M) if self.nonzero else self.rho
        return 1.0 / (self.count * mean)

    def _some(self, M: int) -> float:
        """P(at least one group is kept) = 1 - (1-ρ)^M."""
        return -math.expm1(M * math.log1p(-self.rho)) if self.rho < 1 and M > 1 else self.rho


@dataclass(frozen=True)
class Stratified:
    """S_d whose K = `count` masks share the groups out: each group is present in exactly one of them; w = 1.

    The law is Bernoulli's with ρ = 1/K, without a group ever missing from a step.
    """

    count: int = 2

    def __post_init__(self) -> None:
        _check_count("Stratified", self.count)

    def sample(self, C: int, M: int, device: torch.device) -> Tensor:
        owner = (torch.rand(C, 1, M, device=device) * self.count).long().clamp(max=self.count - 1)
        return owner == torch.arange(self.count, device=device)[:, None]

    def weight(self, M: int) -> float:
        return 1.0


@dataclass(frozen=True)
class _Moments:
    """E r and E r² of a continuous law, and the two weights made of them."""

    mean: float
    square: float

    def weight(self, count: int, normalise: str) -> float:
        return 1.0 / (count * (self.mean if normalise == "mean" else self.square))


@dataclass(frozen=True)
class Uniform:
    """r ~ U(0, 1). normalise="mean": w = 1/(K E r), the paper's energy; "square": w = 1/(K E r²), keeps T = 1 in every
    group, but pulls the mean of the chains with E r/E r² of the likelihood: beside a prior with another centre the mean
    is that of a posterior with this likelihood power (1.5 for U(0, 1))."""

    count: int = 1
    normalise: str = "mean"

    def __post_init__(self) -> None:
        _check_continuous("Uniform", self.count, self.normalise, 0.5)

    def sample(self, C: int, M: int, device: torch.device) -> Tensor:
        return torch.rand(C, self.count, M, device=device)

    def weight(self, M: int) -> float:
        return _Moments(1 / 2, 1 / 3).weight(self.count, self.normalise)


@dataclass(frozen=True)
class Beta:
    """r ~ Beta(a, b), from two log-Gamma draws log G(a) = log G(a + 1) + log(u)/a, which cannot underflow."""

    a: float = 0.5
    b: float = 0.5
    count: int = 1
    normalise: str = "mean"

    def __post_init__(self) -> None:
        if not (_is_number(self.a) and _is_number(self.b) and self.a > 0 and self.b > 0):
            raise ValueError(f"Beta got a={self.a!r}, b={self.b!r}, expected numbers above 0")
        _check_continuous("Beta", self.count, self.normalise, self.a / (self.a + self.b))

    def sample(self, C: int, M: int, device: torch.device) -> Tensor:
        def log_gamma(a: float) -> Tensor:
            shape = torch.full((C, self.count, M), a + 1.0, device=device)
            u = 1 - torch.rand(C, self.count, M, device=device)  # in (0, 1]
            return torch._standard_gamma(shape).log() + u.log() / a

        return torch.sigmoid(log_gamma(self.a) - log_gamma(self.b))

    def weight(self, M: int) -> float:
        n = self.a + self.b
        moments = _Moments(self.a / n, self.a * (self.a + 1) / (n * (n + 1)))
        return moments.weight(self.count, self.normalise)


@dataclass(frozen=True)
class Gaussian:
    """r ~ N(mean, sd²). With mean 0 only normalise="square" is defined, and then no likelihood pulls the mean (Uniform)."""

    mean: float = 1.0
    sd: float = 1.0
    count: int = 1
    normalise: str = "mean"

    def __post_init__(self) -> None:
        if not _is_number(self.mean) or not _is_number(self.sd) or self.sd < 0 or self.mean == self.sd == 0:
            raise ValueError(
                f"Gaussian mask got mean={self.mean!r}, sd={self.sd!r}, expected a number and one >= 0, not both 0"
            )
        _check_continuous("Gaussian mask", self.count, self.normalise, self.mean)

    def sample(self, C: int, M: int, device: torch.device) -> Tensor:
        return self.mean + self.sd * torch.randn(C, self.count, M, device=device)

    def weight(self, M: int) -> float:
        return _Moments(self.mean, self.mean**2 + self.sd**2).weight(self.count, self.normalise)


def _is_number(x: object) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and math.isfinite(x)


def _check_count(who: str, count: int) -> None:
    if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{who} got count={count!r}, expected a whole number of at least 1")


def _check_continuous(who: str, count: int, normalise: str, mean: float) -> None:
    _check_count(who, count)
    if normalise not in ("mean", "square"):
        raise ValueError(f"{who} got normalise={normalise!r}, expected 'mean' (1/E r) or 'square' (1/E r²)")
    if normalise == "mean" and mean == 0:
        raise ValueError(f"{who} got E r = 0 with normalise='mean', whose weight 1/E r is undefined: use 'square'")
