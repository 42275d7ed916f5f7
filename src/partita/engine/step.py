"""One step for C chains: batch, masks, past draw, composition, gradient, transition, history write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from partita.engine.batches import Batches
from partita.engine.chains import Energies
from partita.samplers.base import Rate, Sampler
from partita.structure.gradient import Bound, Gradient
from partita.target import Batch

State = dict[str, Tensor]


@dataclass
class Chains:
    """The state of C chains, all of it tensors: θ [C, D], the sampler's and the history's."""

    theta: Tensor
    sampler: State
    history: State

    def clone(self) -> Chains:
        copy = lambda s: {k: v.clone() for k, v in s.items()}
        return Chains(self.theta.clone(), copy(self.sampler), copy(self.history))


@dataclass(frozen=True)
class Step:
    """θ⁺ = transition(θ, g(θ; batch, masks, past draws)), for all chains at once."""

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
        return Chains(theta, self.sampler.init(theta, scale), self.structure.init(theta))

    def __call__(self, chains: Chains, rate: Rate, adapt: Rate, batch: Batch = None) -> tuple[Chains, Gradient]:
        """The chains after one step (histories are not written here), and the gradient at the state before it. The
        minibatch is drawn here unless it is given."""
        batch = self.batches.draw(chains.theta.shape[0]) if batch is None else batch
        if self.augment is not None and batch is not None:
            batch = (self.augment(batch[0]), batch[1])
        grad = self.gradient(chains, batch)
        theta, sampler = self.sampler.step(chains.theta, grad.g, chains.sampler, rate, self.temperature, adapt)
        return Chains(theta, sampler, chains.history), grad

    def gradient(self, chains: Chains, batch: Batch) -> Gradient:
        likelihood = lambda phi, first: self.energies.likelihood(phi, batch, first)
        return self.structure.gradient(chains.theta, chains.history, likelihood, self.energies.prior, self.chunk)

    def remember(self, chains: Chains) -> None:
        """Show the present states to the history."""
        if self.structure.history is not None:
            self.structure.history.write(chains.history, chains.theta)

    def forget(self, chains: Chains) -> None:
        """The history holds the present states alone."""
        for k, v in self.structure.init(chains.theta).items():
            chains.history[k].copy_(v)


def chunk_size(passes: int, chains: int, bytes_per_pass: int, budget: int) -> tuple[int, int | None]:
    """How many of a step's compositions go at once, and how many chains (None: all), within a memory budget."""
    chunk = max(1, min(passes, budget // max(chains * bytes_per_pass, 1)))
    width = max(1, budget // max(bytes_per_pass, 1))
    return chunk, None if width >= chains else width
