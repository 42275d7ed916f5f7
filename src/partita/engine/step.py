"""One step for C chains: batch, masks, past draw, composition, gradient, transition, history write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita.engine.batches import Batches
from partita.engine.chains import Energies
from partita.samplers.base import Rate, Sampler, State
from partita.structure.gradient import Bound, Gradient
from partita.target import Batch


@dataclass
class Chains:
    """The state of C chains, all of it tensors, which steps write into: θ [C, D], the sampler's and the history's."""

    theta: Tensor
    sampler: State
    history: State

    def aside(self) -> Chains:
        """The same states in tensors of their own, but for the history, which a step may leave alone."""
        return Chains(self.theta.clone(), {k: v.clone() for k, v in self.sampler.items()}, self.history)

    def become(self, theta: Tensor, sampler: State) -> None:
        mine = [self.theta, *self.sampler.values()]
        kept = lambda v: v.clone() if any(v is t for t in mine) else v  # before anything is written over
        new = [(self.sampler[k], kept(v)) for k, v in sampler.items() if v is not self.sampler[k]]
        for old, value in [(self.theta, kept(theta)), *new]:
            old.copy_(value)


@dataclass(frozen=True)
class Step:
    """θ ← transition(θ, g(θ; batch, masks, past draws)), for all chains at once."""

    sampler: Sampler
    structure: Bound
    batches: Batches
    energies: Energies
    temperature: float
    chunk: int
    augment: Callable[[Any], Any] | None = None  # x, leaves [C, B, ...] -> x

    @property
    def device(self) -> torch.device:
        return self.energies.target.space.values.device

    def init(self, theta: Tensor) -> Chains:
        scale = self.energies.target.prior_scale()
        return Chains(theta.clone(), self.sampler.init(theta, scale), self.structure.init(theta))

    def __call__(self, chains: Chains, rate: Rate, adapt: Rate, batch: Batch = None, write: bool = False) -> Gradient:
        """Moves the chains; the gradient is that at the states before. The minibatch is drawn here unless it is given;
        `write` shows the new states to the history."""
        batch = self.batches.draw(chains.theta.shape[0]) if batch is None else batch
        if self.augment is not None and batch is not None:
            batch = (self.augment(batch[0]), batch[1])
        grad = self.gradient(chains, batch)
        self.move(chains, grad.g, rate, adapt, write)
        return grad

    def gradient(self, chains: Chains, batch: Batch) -> Gradient:
        likelihood = lambda phi, first: self.energies.likelihood(phi, batch, first)
        return self.structure.gradient(chains.theta, chains.history, likelihood, self.energies.prior, self.chunk)

    def move(self, chains: Chains, g: Tensor, rate: Rate, adapt: Rate, write: bool) -> None:
        chains.become(*self.sampler.step(chains.theta, g, chains.sampler, rate, self.temperature, adapt))
        if write:
            self.remember(chains)

    def remember(self, chains: Chains) -> None:
        """Show the present states to the history."""
        if self.structure.history is not None:
            self.structure.history.write(chains.history, chains.theta)

    def forget(self, chains: Chains) -> None:
        """The history holds the present states alone."""
        if self.structure.history is not None:
            self.structure.history.restart(chains.history, chains.theta)
