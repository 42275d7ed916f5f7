"""Preconditioned SGLD (Li et al. 2016) with a preconditioner that freezes after burn-in."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.samplers import precondition
from partita.samplers.base import Rate, State
from partita.samplers.schedules import Schedule, as_schedule


@dataclass(frozen=True)
class PSGLD:
    """θ ← θ - (ε/2) G g + N(0, εTG),     G = 1 / (1/scale + √V̂), V̂ the moving average of g² (`beta`).

    G adapts during burn-in and then freezes: an ever-adapting G without its divergence term Γ samples the wrong law.
    `adapt="always"` is the paper's way, wrong law included.
    """

    step_size: float | Schedule
    beta: float = 0.99
    adapt: str = "burn_in"

    def __post_init__(self) -> None:
        as_schedule(self.step_size, "PSGLD's step_size")
        if not isinstance(self.beta, (int, float)) or not 0 <= self.beta < 1:
            raise ValueError(f"PSGLD got beta={self.beta!r}, expected a number in [0, 1)")
        if self.adapt not in ("burn_in", "always"):
            raise ValueError(f"PSGLD got adapt={self.adapt!r}, expected 'burn_in' or 'always'")

    @property
    def schedule(self) -> Schedule:
        return as_schedule(self.step_size, "PSGLD's step_size")

    def check(self, temperature: float, burn_in: int) -> None:
        if self.adapt == "always":
            warnings.warn("PSGLD(adapt='always') omits Γ, as the paper does: its stationary law is wrong", stacklevel=3)
        elif burn_in < 1:
            raise ValueError(f"PSGLD got burn_in={burn_in}, expected at least 1: its preconditioner adapts in burn-in")

    def init(self, theta: Tensor, scale: Tensor) -> State:
        return precondition.init(theta, scale)

    def step(self, theta: Tensor, g: Tensor, state: State, rate: Rate, T: float, adapt: Rate) -> tuple[Tensor, State]:
        eps = rate
        state = precondition.update(state, g, self.beta, 1.0 if self.adapt == "always" else adapt)
        G = precondition.matrix(state, self.beta)
        return theta - 0.5 * eps * G * g + (eps * T * G).sqrt() * torch.randn_like(theta), state

    def heat(self, g: Tensor, state: State, rate: Rate, T: float) -> Tensor:
        """T + (ε/4) E G g² (see SGLD.heat)."""
        return T + 0.25 * rate * precondition.matrix(state, self.beta) * g * g

    def warmth(self, rate: Rate, t: int) -> Rate:
        return 1.0
