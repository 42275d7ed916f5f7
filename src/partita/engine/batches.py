"""Minibatches for C chains, each its own: (x, y) with leaves [C, B, ...].

Resident data lies on the device and rows are drawn with replacement, so the batch position is the random state and
nothing else; a batch of all N rows is the data itself, without noise. (A DataLoader's: runs/loader.py.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from partita.target import Batch
from partita.target.trees import map_tree

HEAD = 64  # rows looked at before a run
RECALIBRATE = 2048  # rows BatchNorm statistics are recomputed from


class Batches(Protocol):
    N: int
    B: int
    inside: bool  # draw belongs into compiled code: it is tensor work alone, and faster there

    def draw(self, C: int) -> Batch:
        """(x, y), leaves [C, B, ...]; None without data."""

    def look(self, C: int) -> Batch:
        """The same to look at: data that later draws give do not depend on it."""

    def head(self, rows: int) -> Batch:
        """A few rows, always the same ones, without a chain axis."""

    def targets(self) -> Tensor:
        """Every target that can be looked at beforehand."""

    def inputs(self, rows: int) -> Iterator[Any]:
        """About `rows` inputs in batches of B, always the same ones (to recalibrate BatchNorm with)."""

    def state(self) -> dict[str, Tensor]:
        """What the next batches depend on, beside torch's random state."""
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        return None


class Resident(Batches):
    """Tensors on the device; B of N rows with replacement, or all of them."""

    def __init__(self, x: Any, y: Tensor, batch_size: int):
        self.x, self.y, self.N, self.B = x, y, int(y.shape[0]), batch_size
        self.shuffles = False  # all rows in an order of each chain's own: masks share them out by position
        self.inside = y.is_cuda  # on the CPU index_select copies rows twice as fast as compiled code does

    def draw(self, C: int) -> Batch:
        if self.B == self.N and self.shuffles:
            index = torch.rand(C, self.N, device=self.y.device).argsort(1)
            return map_tree(lambda t: _rows(t, index), (self.x, self.y))
        if self.B == self.N:
            return map_tree(lambda t: t.expand(C, *t.shape), (self.x, self.y))
        index = torch.randint(self.N, (C, self.B), device=self.y.device)
        return map_tree(lambda t: _rows(t, index), (self.x, self.y))

    look = draw  # the caller keeps the random state

    def head(self, rows: int) -> Batch:
        index = torch.linspace(0, self.N - 1, min(rows, self.N), device=self.y.device).long()
        return map_tree(lambda t: t[index], (self.x, self.y))

    def targets(self) -> Tensor:
        return self.y

    def inputs(self, rows: int) -> Iterator[Any]:
        stop = min(rows, self.N)
        whole = max(stop // self.B, 1) * self.B  # batches of one size, so that each counts the same
        # at random, since data often come sorted by class
        order = torch.randperm(self.N, generator=torch.Generator().manual_seed(0))[:whole].to(self.y.device)
        for index in order.split(self.B):
            yield map_tree(lambda t, i=index: t[i], self.x)  # type: ignore[misc]


def _rows(t: Tensor, index: Tensor) -> Tensor:
    """t[index], and images in channels_last stay so."""
    if t.dim() == 4 and not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last):
        return _rows(t.permute(0, 2, 3, 1), index).permute(0, 1, 4, 2, 3)
    return t.index_select(0, index.flatten()).unflatten(0, index.shape)
