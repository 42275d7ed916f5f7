"""θ in another order of its coordinates, in which a GPU finds every weight where and how its kernels want it.

    ψ = θ[order]:   tensors of two axes and more (norms aside), those of convolutions with the channels last; then the rest

One gather and one cast (of the first part, for a network in bfloat16) make all weights; else each is copied and cast by
itself, and again in the backward pass, which is a fifth of ResNet-20's kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from partita.target.space import Block, ParameterSpace


@dataclass(frozen=True)
class Packing:
    """`tree` of ψ [D] is what `ParameterSpace.tree` is of θ."""

    big: tuple[Block, ...]
    small: tuple[Block, ...]
    order: Tensor  # [D]: ψ = θ[order]
    back: Tensor  # [D]: θ = ψ[back]
    half: torch.dtype | None  # of the big tensors

    @classmethod
    def of(cls, space: ParameterSpace, half: torch.dtype | None) -> Packing:
        big = tuple(b for b in space.blocks if _is_big(b))
        small = tuple(b for b in space.blocks if not _is_big(b))
        place = torch.arange(space.dim, device=space.values.device)
        order = torch.cat([_last(place[b.start : b.stop].view(b.shape)).flatten() for b in (*big, *small)])
        return cls(big, small, order, order.argsort(), half)

    def tree(self, psi: Tensor) -> dict[str, Tensor]:
        """ψ [D] -> {name: [*shape]}."""
        n = sum(b.size for b in self.big)
        parts = (
            *psi[:n].to(self.half or psi.dtype).split([b.size for b in self.big]),
            *psi[n:].split([b.size for b in self.small]),
        )
        return {b.name: self._view(b, p) for b, p in zip((*self.big, *self.small), parts)}

    def _view(self, b: Block, part: Tensor) -> Tensor:
        wide = self.half is None or not _is_big(b)
        part = part.to(b.dtype) if wide else part
        if len(b.shape) < 4:
            return part.view(b.shape)
        return part.view(b.shape[0], *b.shape[2:], b.shape[1]).movedim(-1, 1)


def _is_big(b: Block) -> bool:
    return len(b.shape) > 1 and not b.is_norm_scale


def _last(t: Tensor) -> Tensor:
    """Axis 1 of convolutions' weights last."""
    return t.movedim(1, -1) if t.dim() > 3 else t
