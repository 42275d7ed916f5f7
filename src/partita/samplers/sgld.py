"""Stochastic-gradient Langevin dynamics (Welling & Teh 2011)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from partita.samplers.base import Rate, State
from partita.samplers.schedules import Schedule, as_schedule


@dataclass(frozen=True)
class SGLD:
    """θ ← θ - (ε/2) g + N(0, εT).        ε = `step_size`, a number or a schedule."""

    step_size: float | Schedule

    def __post_init__(self) -> None:
        as_schedule(self.step_size, "SGLD's step_size")

    @property
    def schedule(self) -> Schedule:
        return as_schedule(self.step_size, "SGLD's step_size")

    def check(self, temperature: float, burn_in: int) -> None:
        return None

    def init(self, theta: Tensor, scale: Tensor) -> State:
        return {}

    def step(self, theta: Tensor, g: Tensor, state: State, rate: Rate, T: float, adapt: Rate) -> tuple[Tensor, State]:
        eps = rate
        return theta - 0.5 * eps * g + (eps * T) ** 0.5 * torch.randn_like(theta), state

    def heat(self, g: Tensor, state: State, rate: Rate, T: float) -> Tensor:
        """T + (ε/4) E g², from the stationarity of E θ²: the discretisation and the gradient noise heat the chain."""
        return T + 0.25 * rate * g * g

    def warmth(self, rate: Rate, t: int) -> Rate:
        return 1.0
