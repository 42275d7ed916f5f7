"""Priors over θ: a family, one scale or one per name pattern, and a centre.

`bind(space)` turns a prior into numbers: loc [D], scale [D] and the energy -log p(θ), constants included.
The centre is 0 or the module's own values; the γ of normalisation layers are centred at 1.
"""

from __future__ import annotations

import fnmatch
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

import torch
from torch import Tensor

from partita.target.space import ParameterSpace, match_names


@dataclass(frozen=True)
class FanIn:
    """scale = gain / sqrt(fan_in) for weights, gain for vectors and scalars (biases)."""

    gain: float = 1.0


Scale = float | FanIn
Scales = Scale | Mapping[str, Scale]


class Prior(Protocol):
    def bind(self, space: ParameterSpace) -> BoundPrior:
        """This prior over that space."""


class Family(Protocol):
    def energy(self, z: Tensor) -> Tensor:
        """-log density of the standardised variable z, elementwise."""

    def draw(self, like: Tensor) -> Tensor:
        """Standardised draws shaped as `like`."""


class BoundPrior:
    """-log p(θ) = Σ_i family.energy((θ_i - loc_i) / scale_i) + log scale_i."""

    def __init__(self, family: Family, loc: Tensor, scale: Tensor):
        self.family, self.loc, self.scale = family, loc, scale
        self._log_scale = scale.double().log().sum().to(scale.dtype)

    def energy(self, theta: Tensor) -> Tensor:
        """θ [D] -> scalar."""
        return self.family.energy((theta - self.loc) / self.scale).sum() + self._log_scale

    def sample(self, n: int) -> Tensor:
        """[n, D] draws, from torch's current random state."""
        return self.loc + self.scale * self.family.draw(self.loc.expand(n, -1).contiguous())

    def to(self, device: torch.device) -> BoundPrior:
        return BoundPrior(self.family, self.loc.to(device), self.scale.to(device))


@dataclass(frozen=True)
class Normal:
    """p(θ_i) = N(loc, scale²)."""

    scale: Scales = 1.0
    loc: float | str = 0.0

    def bind(self, space: ParameterSpace) -> BoundPrior:
        return BoundPrior(self, _loc(self.loc, space), _scale(self.scale, space))

    def energy(self, z: Tensor) -> Tensor:
        return 0.5 * z**2 + 0.5 * math.log(2 * math.pi)

    def draw(self, like: Tensor) -> Tensor:
        return torch.randn_like(like)


@dataclass(frozen=True)
class Laplace:
    """p(θ_i) = exp(-|θ_i - loc| / scale) / (2 scale)."""

    scale: Scales = 1.0
    loc: float | str = 0.0

    def bind(self, space: ParameterSpace) -> BoundPrior:
        return BoundPrior(self, _loc(self.loc, space), _scale(self.scale, space))

    def energy(self, z: Tensor) -> Tensor:
        return z.abs() + math.log(2)

    def draw(self, like: Tensor) -> Tensor:
        return torch.empty_like(like).exponential_() * (2.0 * (torch.rand_like(like) < 0.5).to(like.dtype) - 1.0)


@dataclass(frozen=True)
class StudentT:
    """p(θ_i) ∝ (1 + z²/df)^(-(df+1)/2) / scale, z = (θ_i - loc) / scale."""

    df: float = 3.0
    scale: Scales = 1.0
    loc: float | str = 0.0

    def __post_init__(self) -> None:
        if not (isinstance(self.df, Real) and 0 < float(self.df) < math.inf):
            raise ValueError(f"StudentT got df={self.df!r}, expected a number above 0")

    def bind(self, space: ParameterSpace) -> BoundPrior:
        return BoundPrior(self, _loc(self.loc, space), _scale(self.scale, space))

    def energy(self, z: Tensor) -> Tensor:
        nu = self.df
        log_norm = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi)
        return 0.5 * (nu + 1) * torch.log1p(z**2 / nu) - log_norm

    def draw(self, like: Tensor) -> Tensor:
        chi2 = 2 * torch.distributions.Gamma(torch.full_like(like, self.df / 2), torch.ones_like(like)).sample()
        return torch.randn_like(like) * torch.sqrt(self.df / chi2)


def _loc(loc: float | str, space: ParameterSpace) -> Tensor:
    if loc == "module":
        return space.values.clone()
    if not isinstance(loc, Real) or not math.isfinite(loc):
        raise ValueError(f"prior loc is {reprlib.repr(loc)}, expected a number or 'module'")
    centre = torch.full((space.dim,), float(loc), dtype=space.values.dtype)
    for b in space.blocks:
        if b.is_norm_scale and loc == 0:
            centre[b.start : b.stop] = 1.0
    return centre


def _scale(scale: Scales, space: ParameterSpace) -> Tensor:
    spread = torch.empty(space.dim, dtype=space.values.dtype)
    patterns = scale if isinstance(scale, Mapping) else {"*": scale}
    match_names(list(patterns), list(space.names))  # every pattern must match something
    for b in space.blocks:
        first = next((p for p in patterns if fnmatch.fnmatchcase(b.name, p)), None)
        if first is None:
            raise ValueError(
                f"no prior scale for parameter {b.name!r}: got the patterns {list(patterns)}, expected one that "
                "matches it (add '*' as the last one for the rest)"
            )
        chosen = patterns[first]
        gain = chosen.gain if isinstance(chosen, FanIn) else chosen
        if not isinstance(gain, Real) or not 0 < float(gain) < math.inf:
            got = " ".join(reprlib.repr(chosen).split())
            raise ValueError(f"prior scale for {b.name!r} is {got}, expected a number above 0 or pt.FanIn(gain)")
        spread[b.start : b.stop] = float(gain) / math.sqrt(b.fan_in) if isinstance(chosen, FanIn) else float(gain)
    return spread
