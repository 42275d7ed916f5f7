"""Read-only sight of the draws of a run: any part of them, nothing else, and nothing damaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index as as_int
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.runs.store import checkpoints, folder
from partita.runs.store.codec import CARRIERS
from partita.runs.store.disk import StoreError
from partita.runs.store.shards import Shard, list_shards

ALL = slice(None)


class SampleReader:
    """The draws that were committed when it was opened, or last refreshed: shape (C, S, D).

    The chains of all groups follow one another; S is the least number of draws over the groups, which never wait for
    one another. `touched` counts the bytes that were read and checked. A run without draws has shape (0, 0, 0)."""

    def __init__(self, path: Any):
        self.path = Path(path)
        self.touched = 0
        self._seen = _Seen((), 0)
        folder.about(path)
        self.refresh()

    def refresh(self) -> None:
        """Look again."""
        for attempt in range(3):  # a listing may miss the first of two shards that are made meanwhile
            try:
                self._seen = _look(self.path, self._seen)
                return
            except StoreError:
                if attempt == 2:
                    raise

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, S, D)."""
        groups = self._seen.groups
        shapes = [group[0].theta.shape for group in groups if group]
        return sum(shape[1] for shape in shapes), self._seen.draws, shapes[0][2] if shapes else 0

    @property
    def stored(self) -> torch.dtype:
        """Of the numbers on disk."""
        first = next((group[0] for group in self._seen.groups if group), None)
        return torch.float32 if first is None else first.theta.dtype

    @property
    def dtype(self) -> torch.dtype:
        """Of what `read` gives: float64 where it is stored, float32 otherwise."""
        return torch.float64 if self.stored == torch.float64 else torch.float32

    @property
    def steps(self) -> list[int]:
        """The step of each draw."""
        return self._seen.steps

    def read(self, chains: Any = ALL, draws: Any = ALL, columns: Any = ALL) -> Tensor:
        """[c, s, d]: these chains, draws and columns, each an int (an axis of length 1), a slice with any step, or whole
        numbers in a list or a vector. What lies beyond the end is an IndexError."""
        C, S, D = self.shape
        c, s, d = pick(chains, C, "chains"), pick(draws, S, "draws"), pick(columns, D, "columns")
        return self._gather("theta", c, s, d).to(self.dtype)

    def stats(self, draws: Any = ALL) -> dict[str, Tensor]:
        """{name: [C, s, ...]}: BatchNorm statistics of these draws."""
        C, S, _ = self.shape
        s = pick(draws, S, "draws")
        first = next((group[0] for group in self._seen.groups if group), None)
        out = {}
        for name, e in first.layout.tensors.items() if first is not None else ():
            if name.startswith("stat."):
                rest = e.shape[2:]
                values = self._gather(name, range(C), s, range(int(np.prod(rest, dtype=np.int64))))
                out[name.removeprefix("stat.")] = values.reshape(C, len(s), *rest)
        return out

    def batches(self, n: int, columns: Any = ALL) -> Iterator[Tensor]:
        """All draws, n at a time: [C, n, d], the last of them maybe fewer."""
        if as_int(n) < 1:
            raise StoreError(f"batches got n={n}, expected at least 1")
        for a in range(0, self.shape[1], n):
            yield self.read(draws=slice(a, min(a + n, self.shape[1])), columns=columns)

    def verify(self) -> int:
        """Read and check every byte of the run but its records and leases; how many they are."""
        total = folder.verify(self.path)
        for path in _groups(self.path):
            total += sum(shard.check() for shard in list_shards(path))
            for found in sorted(path.glob("ckpt-*.safetensors")):
                try:
                    total += checkpoints.load(found)[2]
                except StoreError:
                    if found.exists():  # a writer prunes
                        raise
        return total

    def _gather(self, name: str, c: range | np.ndarray, s: range | np.ndarray, d: range | np.ndarray) -> Tensor:
        """[c, s, d] of one tensor, from all groups and shards, as it is stored."""
        groups = [group for group in self._seen.groups if group]
        dtype = groups[0][0].layout.tensors[name].dtype if groups else self.dtype
        out = np.empty((len(c), len(s), len(d)), CARRIERS[dtype.itemsize])
        chains, draws = np.asarray(c, np.int64), np.asarray(s, np.int64)
        order = np.argsort(draws, kind="stable")
        ranked = draws[order]
        lowest = 0
        for group in groups:
            C = group[0].theta.shape[1]
            at = np.flatnonzero((chains >= lowest) & (chains < lowest + C))
            cuts = np.append(np.searchsorted(ranked, [shard.first for shard in group]), len(ranked))
            for shard, a, b in zip(group, cuts, cuts[1:]):
                if a < b:
                    mine = ranked[a:b] - shard.first
                    self.touched += shard.fill(out, name, chains[at] - lowest, at, mine, order[a:b], d)
            lowest += C
        return torch.from_numpy(out).view(dtype)

    def __repr__(self) -> str:
        C, S, D = self.shape
        return f"SampleReader({str(self.path)!r}: {C} chains x {S:,} draws x {D:,} parameters)"


@dataclass(frozen=True)
class _Seen:
    """The shards of each group, and how many draws all of them have."""

    groups: tuple[tuple[Shard, ...], ...]
    draws: int

    @cached_property
    def steps(self) -> list[int]:
        lines = []
        for group in self.groups:
            line: list[int] = []
            for shard in group:
                if shard.first < self.draws:
                    line += shard.steps()
            lines.append(line[: self.draws])
        if any(line != lines[0] for line in lines):
            raise StoreError(f"the groups of {self.groups[0][0].path.parents[1]} differ in steps, expected the same")
        return lines[0] if lines else []


def _groups(path: Path) -> list[Path]:
    return sorted(p for p in path.glob("group-*") if p.is_dir())


def _look(path: Path, before: _Seen) -> _Seen:
    known = {shard.path: shard for group in before.groups for shard in group}
    groups = []
    for where in _groups(path):
        mine = {p.name: shard for p, shard in known.items() if p.parent == where}
        groups.append(tuple(list_shards(where, mine)))
    filled = [group for group in groups if group]
    for group in filled[1:]:
        (dtype, (_, D), stats), (dtype_0, (_, D_0), stats_0) = group[0].kind, filled[0][0].kind
        shapes, shapes_0 = ([(k, t, s[1:]) for k, (t, s) in these] for these in (stats, stats_0))
        if (dtype, D, shapes) != (dtype_0, D_0, shapes_0):
            raise StoreError(
                f"{group[0].path} holds {D} parameters of {dtype}, {len(stats)} statistics, expected "
                f"{D_0} of {dtype_0}, {len(stats_0)} statistics as in {filled[0][0].path.parent.name}"
            )
    return _Seen(tuple(groups), min((sum(s.n for s in group) for group in groups), default=0))


def pick(index: Any, size: int, what: str) -> range | np.ndarray:
    """The numbers from 0 that an index stands for."""
    if isinstance(index, slice):
        for end in (index.start, index.stop):
            if end is not None and not -size <= as_int(end) <= size:
                raise IndexError(f"{what} got {end}, expected at most {size:,}")
        return range(size)[index]
    if isinstance(index, range) and (not len(index) or all(0 <= end < size for end in (index[0], index[-1]))):
        return index
    if (
        isinstance(index, bool)
        or not isinstance(index, Tensor | np.ndarray | Sequence)
        or isinstance(index, str | bytes)
    ):
        index = [as_int(index)] if not isinstance(index, bool) and hasattr(index, "__index__") else _wrong(index, what)
    numbers = np.asarray(index.cpu() if isinstance(index, Tensor) else index)
    if numbers.dtype == bool and numbers.shape == (size,):
        return np.flatnonzero(numbers)
    numbers = numbers.reshape(-1) if numbers.ndim == 0 or not numbers.size else numbers
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        _wrong(index, what)
    numbers = numbers.astype(np.int64)
    if numbers.size and not (-size <= numbers.min() and numbers.max() < size):
        raise IndexError(f"{what} got {numbers.min()} to {numbers.max()}, expected -{size:,} to {size - 1:,}")
    return np.where(numbers < 0, numbers + size, numbers)


def _wrong(index: Any, what: str) -> Any:
    raise IndexError(f"{what} got {str(index)[:60]}, expected a whole number, a slice or a vector of whole numbers")
