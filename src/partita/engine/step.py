"""One step for C chains: batch, masks, past draw, composition, gradient, transition, history write."""

from __future__ import annotations

from dataclasses import dataclass

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

    def init(self, theta: Tensor) -> Chains:
        scale = self.energies.target.prior_scale()
        return Chains(theta, self.sampler.init(theta, scale), self.structure.init(theta))

    def __call__(self, chains: Chains, rate: Rate, adapt: Rate) -> tuple[Chains, Gradient]:
        """The chains after one step (histories are not written here), and the gradient at the state before it."""
        batch = self.batches.draw(chains.theta.shape[0])
        grad = self.gradient(chains, batch)
        theta, sampler = self.sampler.step(chains.theta, grad.g, chains.sampler, rate, self.temperature, adapt)
        return Chains(theta, sampler, chains.history), grad

    def gradient(self, chains: Chains, batch: Batch) -> Gradient:
        likelihood = lambda phi: self.energies.likelihood(phi, batch)
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


def device_of(device: str | torch.device, preferred: torch.device) -> torch.device:
    """ "auto": where the target lies if that is an accelerator, else CUDA when there is one."""
    if device != "auto":
        try:
            chosen = torch.device(device)
        except (RuntimeError, TypeError):
            raise ValueError(f"device is {device!r}, expected 'auto', 'cpu' or 'cuda'") from None
        if chosen.type not in ("cpu", "cuda"):
            raise ValueError(f"device is {device!r}, expected 'auto', 'cpu' or 'cuda'")
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {device!r} and this machine has no CUDA device, expected 'auto' or 'cpu'")
        return chosen
    if preferred.type != "cpu":
        return preferred
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
