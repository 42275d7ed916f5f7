"""The gradient, in one formula. (Alexos, Boyd & Mandt, ICML 2022, with the prior kept whole.)

    g(θ) = ∇U_prior(θ) + w Σ_k r_k ⊙ ∇U_lik(φ_k),      φ_k = r_k θ + (1 - r_k) θ̃_k,   θ̃_k a past draw, held fixed

Joint: K = 1, r = 1, w = 1. Structured: masks r from a law, past draws θ̃ from a history; with `past` = J every mask is
paired with J independent past draws and w becomes w/J.

Shapes: C chains, K masks, J past draws, M groups, D coordinates; θ, g [C, D]; r [C, K, M]; φ [C, k, D] (k a chunk).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from partita.structure.history import History, Reservoir, State
from partita.structure.masks import Mask, OneGroup
from partita.structure.partitions import Groups, Partition
from partita.target.space import ParameterSpace

Likelihood = Callable[
    [Tensor, int], tuple[Tensor, Tensor]
]  # φ_a, φ_a+1, … [C, k, D], a -> U_lik [C, k], ∇U_lik [C, k, D]
Prior = Callable[[Tensor], Tensor]  # θ [C, D] -> ∇U_prior [C, D]


class Gradient(NamedTuple):
    """g [C, D]; `composed` the mean over the compositions of U_lik(φ) [C]."""

    g: Tensor
    composed: Tensor


@dataclass(frozen=True)
class Bound(ABC):
    """A structure on one space. The formula stands here; a structure says what its masks are, what it composes, and what
    its masks let through. `passes`: compositions (forward and backward passes) a step; `split`: each of them sees its own
    part of the minibatch."""

    groups: Groups
    passes: int = 1
    history: History | None = None
    split: bool = False

    def init(self, theta: Tensor) -> State:
        """The history's state."""
        return {} if self.history is None else self.history.init(theta)

    @abstractmethod
    def masks(self, C: int) -> Tensor | None:
        """The masks of one step, drawn jointly over k."""

    @abstractmethod
    def compose(self, theta: Tensor, state: State, r: Tensor | None, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """φ_k and r_k [C, |k|, D] of the compositions with these indices."""

    @abstractmethod
    def masked(self, r_k: Tensor | None, du: Tensor) -> Tensor:
        """w Σ_k r_k ⊙ ∇U_lik(φ_k), [C, D]."""

    def gradient(self, theta: Tensor, state: State, likelihood: Likelihood, prior: Prior, chunk: int) -> Gradient:
        """g(θ), `chunk` compositions at a time."""
        r = self.masks(theta.shape[0])
        g = prior(theta)
        composed = torch.zeros_like(g[:, 0])
        for a in range(0, self.passes, chunk):
            k = torch.arange(a, min(a + chunk, self.passes), device=theta.device)
            phi, r_k = self.compose(theta, state, r, k)
            u, du = likelihood(phi, a)
            g = g + self.masked(r_k, du)
            composed = composed + u.sum(1) / self.passes
        return Gradient(g, composed)


class Structure(Protocol):
    def bind(self, space: ParameterSpace, device: torch.device) -> Bound: ...


@dataclass(frozen=True)
class Joint:
    """The whole θ at once: ordinary SG-MCMC."""

    def bind(self, space: ParameterSpace, device: torch.device) -> BoundJoint:
        labels = torch.zeros(space.dim, dtype=torch.long, device=device)
        return BoundJoint(Groups(labels, 1, lambda i: "all"))


class BoundJoint(Bound):
    def masks(self, C: int) -> None:
        return None

    def compose(self, theta: Tensor, state: State, r: Tensor | None, k: Tensor) -> tuple[Tensor, None]:
        return theta.unsqueeze(1), None

    def masked(self, r_k: Tensor | None, du: Tensor) -> Tensor:
        return du.squeeze(1)


@dataclass(frozen=True)
class Structured:
    """Groups of a partition, masks of a law, past draws of a history. With OneGroup this is S, with the others S_d.

    share="batch": all compositions of a step see the whole minibatch. "split": each sees its own K-th of it, so that
    K > 1 costs about what K = 1 costs; as unbiased, with the noise of as many rows in all.
    """

    partition: Partition
    mask: Mask = field(default_factory=OneGroup)
    history: History = field(default_factory=lambda: Reservoir(256, every=10))
    past: int = 1
    share: str = "batch"

    def __post_init__(self) -> None:
        for name, what, method in (
            ("partition", "pt.partitions.by_layer()", "groups"),
            ("mask", "pt.masks.Bernoulli(0.5)", "weight"),
            ("history", "pt.Reservoir(256, every=10)", "read"),
        ):
            if not hasattr(getattr(self, name), method) or isinstance(getattr(self, name), type):
                raise ValueError(f"Structured got {name}={getattr(self, name)!r}, expected for example {what}")
        if not isinstance(self.past, Integral) or isinstance(self.past, bool) or self.past < 1:
            raise ValueError(f"Structured got past={self.past!r}, expected a whole number of at least 1")
        if self.share not in ("batch", "split"):
            raise ValueError(f"Structured got share={self.share!r}, expected 'batch' or 'split'")

    def bind(self, space: ParameterSpace, device: torch.device) -> BoundStructured:
        groups = self.partition.groups(space)
        groups = Groups(groups.labels.to(device), groups.count, groups.name)
        self.mask.weight(groups.count)  # refuses a law that does not fit M groups
        with torch.random.fork_rng(devices=[]):  # only its shape is wanted
            K = _draw(self.mask, 1, groups.count, torch.device("cpu")).shape[1]
        return BoundStructured(groups, K * self.past, self.history, self.share == "split", self.mask, self.past)


def _draw(mask: Mask, C: int, M: int, device: torch.device) -> Tensor:
    """r [C, K, M], or for a law that keeps one group a mask the index of that group, [C, K]."""
    kept = getattr(mask, "kept", None)
    return mask.sample(C, M, device) if kept is None else kept(C, M, device)


def _spread(r: Tensor, labels: Tensor) -> Tensor:
    """Masks as _draw gives them over coordinates: [C, k, D]."""
    return r[:, :, None] == labels if r.dim() == 2 else r[:, :, labels]


@dataclass(frozen=True)
class BoundStructured(Bound):
    mask: Mask = field(default_factory=OneGroup)
    past: int = 1

    def masks(self, C: int) -> Tensor:
        return _draw(self.mask, C, self.groups.count, self.groups.labels.device)

    def compose(self, theta: Tensor, state: State, r: Tensor | None, k: Tensor) -> tuple[Tensor, Tensor]:
        assert r is not None
        assert self.history is not None
        labels, M, J = self.groups.labels, self.groups.count, self.past
        r = r.index_select(1, k // J)
        unread = r if r.dtype == torch.bool else None
        r_k = _spread(r, labels)
        present = theta.unsqueeze(1)
        past = self.history.read(state, theta, labels, M, k.shape[0], unread)
        return torch.where(r_k, present, past) if r_k.dtype == torch.bool else past + r_k * (present - past), r_k

    def masked(self, r_k: Tensor | None, du: Tensor) -> Tensor:
        assert r_k is not None
        w = self.mask.weight(self.groups.count) / self.past
        return w * (r_k * du).sum(1)
