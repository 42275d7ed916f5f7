"""Schedules: the step size at step t of a run of `horizon` steps. Past the horizon a schedule holds its last value.

Constant(ε)                     ε
Polynomial(a, b, power)         a (1 + t/b)^-power                                (Welling & Teh 2011)
Cosine(start, end)              from start to end along half a cosine
Cyclical(high, cycles, low)     a cosine from high to low, `cycles` times         (Zhang et al. 2020)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Protocol


class Schedule(Protocol):
    def __call__(self, t: int, horizon: int) -> float:
        """The step size at step t = 0, 1, …"""

    @property
    def largest(self) -> float:
        """The largest value it takes."""


@dataclass(frozen=True)
class Constant:
    value: float

    def __post_init__(self) -> None:
        _check(type(self).__name__, value=self.value)

    def __call__(self, t: int, horizon: int) -> float:
        return self.value

    @property
    def largest(self) -> float:
        return self.value


@dataclass(frozen=True)
class Polynomial:
    a: float
    b: float = 1000.0
    power: float = 0.33

    def __post_init__(self) -> None:
        _check(type(self).__name__, a=self.a, b=self.b, power=self.power)

    def __call__(self, t: int, horizon: int) -> float:
        return self.a * (1 + min(t, horizon) / self.b) ** -self.power

    @property
    def largest(self) -> float:
        return self.a


@dataclass(frozen=True)
class Cosine:
    start: float
    end: float

    def __post_init__(self) -> None:
        _check(type(self).__name__, start=self.start, end=self.end)

    def __call__(self, t: int, horizon: int) -> float:
        return self.end + (self.start - self.end) * 0.5 * (1 + math.cos(math.pi * min(t / max(horizon, 1), 1)))

    @property
    def largest(self) -> float:
        return max(self.start, self.end)


@dataclass(frozen=True)
class Cyclical:
    high: float
    cycles: int
    low: float

    def __post_init__(self) -> None:
        _check(type(self).__name__, high=self.high, cycles=self.cycles, low=self.low)
        if not isinstance(self.cycles, int):
            raise ValueError(f"Cyclical got cycles={self.cycles!r}, expected a whole number of at least 1")

    def __call__(self, t: int, horizon: int) -> float:
        phase = t * self.cycles % horizon / horizon if t < horizon else 1.0  # whole numbers: a restart is exact
        return self.low + (self.high - self.low) * 0.5 * (1 + math.cos(math.pi * phase))

    @property
    def largest(self) -> float:
        return max(self.high, self.low)


def as_schedule(value: float | Schedule, name: str) -> Schedule:
    """A number becomes a constant; a schedule stays itself."""
    if isinstance(value, Real) and not isinstance(value, bool):
        if not 0 < float(value) < math.inf:
            raise ValueError(f"{name} is {value!r}, expected a number above 0 or a schedule")
        return Constant(float(value))
    if not (callable(value) and hasattr(value, "largest")) or isinstance(value, type):
        raise ValueError(f"{name} is {value!r}, expected a number above 0 or a schedule")
    return value


def _check(who: str, **values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, Real) or not 0 < float(value) < math.inf:
            raise ValueError(f"{who} got {name}={value!r}, expected a number above 0")
