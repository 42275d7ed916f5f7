"""Stochastic-gradient Hamiltonian Monte Carlo (Chen, Fox & Guestrin 2014), with the temperature in its place."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from partita.samplers import precondition
from partita.samplers.base import Rate, State
from partita.samplers.schedules import Schedule, as_schedule


@dataclass(frozen=True)
class SGHMC:
    """v ← v - h s g - hγv + N(0, h(2γT - hV̂)),    θ ← θ + h s v.        h = `time_step`, γ = `friction`.

    V̂ = `noise` is the variance of s·g at a fixed θ: of minibatches, masks and past draws. s = 1, or with
    `adapt="burn_in"` the diagonal G of precondition.py (a mass of 1/s², by substitution), frozen after burn-in.
    """

    time_step: float | Schedule
    friction: float = 1.0
    noise: float = 0.0
    adapt: str = "never"
    beta: float = 0.99

    def __post_init__(self) -> None:
        as_schedule(self.time_step, "SGHMC's time_step")
        for name, least in (("friction", "above"), ("noise", "of at least")):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and value >= 0
            if not number or (name == "friction" and value == 0):
                raise ValueError(f"SGHMC got {name}={value!r}, expected a number {least} 0")
        if self.adapt not in ("never", "burn_in") or not isinstance(self.beta, (int, float)) or not 0 <= self.beta < 1:
            raise ValueError(
                f"SGHMC got adapt={self.adapt!r}, beta={self.beta!r}, expected 'never' or 'burn_in', [0, 1)"
            )

    @property
    def schedule(self) -> Schedule:
        return as_schedule(self.time_step, "SGHMC's time_step")

    def check(self, temperature: float, burn_in: int) -> None:
        h, gamma = self.schedule.largest, self.friction
        if h * gamma > 1:
            raise ValueError(f"SGHMC got time_step*friction = {h * gamma:g}, expected at most 1 (v would overshoot)")
        if 2 * gamma * temperature - h * self.noise < 0:
            raise ValueError(
                f"SGHMC's noise variance 2γT - hV̂ = {2 * gamma * temperature - h * self.noise:g} at γ={gamma:g}, "
                f"T={temperature:g}, h={h:g}, V̂={self.noise:g}; expected V̂ in [0, 2γT/h]"
            )
        if self.adapt == "burn_in" and burn_in < 1:
            raise ValueError(f"SGHMC(adapt='burn_in') got burn_in={burn_in}, expected at least 1")

    def init(self, theta: Tensor, scale: Tensor) -> State:
        v = {"v": torch.zeros_like(theta)}
        return v if self.adapt == "never" else {**v, **precondition.init(theta, scale)}

    def step(self, theta: Tensor, g: Tensor, state: State, rate: Rate, T: float, adapt: Rate) -> tuple[Tensor, State]:
        h, gamma, s = rate, self.friction, torch.ones(())
        if self.adapt == "burn_in":
            state = precondition.update(state, g, self.beta, adapt)
            s = precondition.matrix(state, self.beta)
        noise = (h * (2 * gamma * T - h * self.noise)) ** 0.5 * torch.randn_like(theta)
        v = state["v"] - h * s * g - h * gamma * state["v"] + noise
        return theta + h * s * v, {**state, "v": v}

    def heat(self, g: Tensor, state: State, rate: Rate, T: float) -> Tensor:
        """E v², which is T when the step is small."""
        return state["v"] ** 2

    def warmth(self, rate: Rate, t: int) -> Rate:
        """1 - e^(-2γht): v starts at 0."""
        return 1 - math.exp(-1) ** (2 * self.friction * t * rate)
