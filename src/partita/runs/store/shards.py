"""A shard: some draws of a group, in one immutable file of which any part can be read and trusted alone.

    step   int64 [n]                       the step of each draw
    theta  float32|float64|bfloat16 [n, C, D]
    stat.* [n, C, ...]                     BatchNorm statistics
    digests uint8 [blocks, 8], last        the first 8 bytes of sha256 of each 4 KiB of the data before it

The name carries the root: sha256(header with its length, digests). The root is checked when a shard is opened, the
digest of a block before anything of it is returned. Bytes are read (not mapped) and judged in our own memory: a mapped
file that someone shortens kills the process, and what was judged must be what is returned.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.runs.store import codec
from partita.runs.store.codec import CARRIERS, Entry, Layout
from partita.runs.store.disk import StoreError

BLOCK = 4 * 1024  # what a number is checked with: larger blocks cost columns, smaller ones the digests
PIECE = 32 * 2**20  # bytes looked at together
LONG_ROW = 32  # numbers from which a row is copied as a whole
NAME = re.compile(r"draws-(\d{8,18})-([1-9]\d{0,17})-([0-9a-f]{16})\.safetensors")
THETA = (torch.float32, torch.float64, torch.bfloat16)


def encode(steps: list[int], theta: Tensor, stats: dict[str, Tensor]) -> tuple[str, list[Any]]:
    """The end of the name, <n>-<root>.safetensors, and the pieces of the file, of theta [n, C, D] and stats {name: [n, C,
    ...]}."""
    tensors = {"theta": theta, "step": torch.tensor(steps), **{f"stat.{k}": v for k, v in stats.items()}}
    parts = [codec.as_bytes(tensors[name]) for name in codec.order(tensors)]
    data = np.concatenate(parts)
    digests = b"".join(_digest(data[a : a + BLOCK]) for a in range(0, data.size, BLOCK))
    tensors["digests"] = torch.frombuffer(bytearray(digests), dtype=torch.uint8).reshape(-1, 8)  # so the data's last
    head = codec.header(tensors, align=4096)
    root = hashlib.sha256(head + digests).hexdigest()[:16]
    return f"{len(steps)}-{root}.safetensors", [head, data, digests]


@dataclass(frozen=True)
class Shard:
    """An opened shard: its header and digests are right; `first` is the number of its first draw, n how many it has."""

    path: Path
    first: int
    n: int
    layout: Layout
    digests: bytes

    @property
    def theta(self) -> Entry:
        return self.layout.tensors["theta"]

    @property
    def kind(self) -> tuple:
        """What all shards of a group share: dtype, (C, D), and the names, dtypes and shapes of the statistics."""
        stats = {k: (e.dtype, e.shape[1:]) for k, e in self.layout.tensors.items() if k.startswith("stat.")}
        return (self.theta.dtype, self.theta.shape[1:], tuple(sorted(stats.items())))

    @property
    def size(self) -> int:
        """Bytes of the blocks."""
        return self.layout.tensors["digests"].begin

    def steps(self) -> list[int]:
        out = np.empty((1, self.n, 1), np.int64)
        self.fill(out, "step", np.arange(1), np.arange(1), np.arange(self.n), np.arange(self.n), range(1))
        return [int(t) for t in out.ravel()]

    def check(self) -> int:
        """Read and check every byte; how many they were."""
        again = open_shard(self.path)
        step = max(1, PIECE // BLOCK)
        with _opened(self.path) as fd:
            for a in range(0, self.blocks, step):
                self._fetch(fd, np.arange(a, min(self.blocks, a + step)))
        return again.layout.start + self.size + len(self.digests)

    @property
    def blocks(self) -> int:
        return len(self.digests) // 8

    def fill(
        self,
        out: np.ndarray,
        name: str,
        chains: np.ndarray,
        chains_at: np.ndarray,
        draws: np.ndarray,
        draws_at: np.ndarray,
        columns: range | np.ndarray,
    ) -> int:
        """out[chains_at, draws_at] = tensor `name` [n, C, ...] at these draws (from 0 in this shard), chains and columns
        (of what follows C, flat); out [c, s, columns] holds integers of the tensor's width. Gives the bytes touched."""
        e = self.layout.tensors[name]
        n, C = (*e.shape, 1)[:2]
        if not (len(chains) and len(draws) and len(columns)):
            return 0
        item, D = e.dtype.itemsize, (e.end - e.begin) // (n * C * e.dtype.itemsize)
        start = columns.start if isinstance(columns, range) and columns.step == 1 and len(columns) >= LONG_ROW else None
        row = len(columns) * (item if start is not None else 24) + min(D * item, len(columns) * BLOCK)  # at most, about
        together = max(1, PIECE // (row * len(chains)))
        touched = 0
        with _opened(self.path) as fd:
            for a in range(0, len(draws), together):
                t, at = draws[a : a + together], draws_at[a : a + together]
                rows = (t[:, None] * C + chains) * (D * item) + e.begin  # [s, c] bytes
                if start is not None:
                    touched += self._rows(fd, out, rows + start * item, chains_at, at, len(columns), item)
                else:
                    touched += self._numbers(fd, out, rows, chains_at, at, np.asarray(columns) * item, item)
        return touched

    def _rows(
        self,
        fd: int,
        out: np.ndarray,
        rows: np.ndarray,
        c: np.ndarray,
        s: np.ndarray,
        length: int,
        item: int,
    ) -> int:
        """Rows of neighbouring numbers, copied whole."""
        need = np.zeros(self.blocks, bool)
        begins = rows.tolist()
        for of_draw in begins:
            for begin in of_draw:
                need[begin // BLOCK : (begin + length * item - 1) // BLOCK + 1] = True
        flat, slot, touched = self._found(fd, need, item)
        for of_draw, at in zip(begins, s.tolist()):
            for begin, chain in zip(of_draw, c.tolist()):
                p = (int(slot[begin // BLOCK]) * BLOCK + begin % BLOCK) // item
                out[chain, at, :] = flat[p : p + length]
        return touched

    def _numbers(
        self, fd: int, out: np.ndarray, rows: np.ndarray, c: np.ndarray, s: np.ndarray, columns: np.ndarray, item: int
    ) -> int:
        """Numbers here and there; one never lies in two blocks."""
        at = rows[:, :, None] + columns  # [s, c, columns] bytes
        block = at // BLOCK
        need = np.zeros(self.blocks, bool)
        need[block] = True
        flat, slot, touched = self._found(fd, need, item)
        at -= (block - slot[block]) * BLOCK
        out[c[:, None], s] = flat[at // item].swapaxes(0, 1)
        return touched

    def _found(self, fd: int, need: np.ndarray, item: int) -> tuple[np.ndarray, np.ndarray, int]:
        """The needed blocks one after another, as integers of `item` bytes; which of them each block is; their bytes."""
        raw = self._fetch(fd, np.flatnonzero(need))
        return raw.view(CARRIERS[item]), np.cumsum(need) - 1, raw.size

    def _fetch(self, fd: int, blocks: np.ndarray) -> np.ndarray:
        """uint8 [len(blocks) · BLOCK]: these blocks (ascending), each checked. The file's last one may be shorter."""
        raw = np.empty(len(blocks) * BLOCK, np.uint8)
        view = raw.data
        ends = np.flatnonzero(np.diff(blocks, append=-2) != 1).tolist()
        runs = [(a, b + 1) for a, b in zip([0, *(e + 1 for e in ends[:-1])], ends)]  # neighbours, read at once
        if len(runs) > 1 and hasattr(os, "posix_fadvise"):  # ask for all of them before waiting for the first
            for a, b in runs:
                os.posix_fadvise(fd, self._offset(blocks[a]), (b - a) * BLOCK, os.POSIX_FADV_WILLNEED)
        for a, b in runs:
            first = int(blocks[a])
            length = min((b - a) * BLOCK, self.size - first * BLOCK)
            _read(fd, view[a * BLOCK : a * BLOCK + length], self._offset(first), self.path)
            for i in range(a, b):
                k = first + i - a
                block = view[i * BLOCK : min((i + 1) * BLOCK, a * BLOCK + length)]
                if _digest(block) != self.digests[8 * k : 8 * k + 8]:
                    raise StoreError(f"{self.path} is damaged in block {k}, expected the bytes of its digest")
        return raw

    def _offset(self, block: int | np.integer) -> int:
        return self.layout.start + int(block) * BLOCK


def open_shard(path: Path) -> Shard:
    """The shard at `path`, when its name, header and digests agree."""
    name = NAME.fullmatch(path.name)
    if name is None:
        raise StoreError(f"{path} is no name of a shard, expected draws-<first>-<n>-<hash>.safetensors")
    first, n, root = int(name[1]), int(name[2]), name[3]
    with _opened(path) as fd:
        size = os.fstat(fd).st_size
        length = codec.header_length(_take(fd, 0, min(8, size), path), size, str(path))
        head = _take(fd, 0, 8 + length, path)
        layout = codec.parse(head, size, str(path))
        last = layout.tensors.get("digests")
        if last is None or last.dtype != torch.uint8 or last.end != size - layout.start:
            raise StoreError(f"{path} does not end in digests, expected a shard of draws")
        if last.shape != (-(-last.begin // BLOCK), 8):  # before they are read: so many may not fit in memory
            raise StoreError(f"digests in {path} are {list(last.shape)}, expected one for each {BLOCK:,} bytes")
        digests = _take(fd, layout.start + last.begin, last.end - last.begin, path)
    if hashlib.sha256(head + digests).hexdigest()[:16] != root:
        raise StoreError(f"{path} is damaged in its header or digests, expected the hash in its name")
    shard = Shard(path, first, n, layout, digests)
    _check(shard)
    return shard


def _check(shard: Shard) -> None:
    """A header of the right hash may still be of something else."""
    tensors = dict(shard.layout.tensors)
    del tensors["digests"]
    theta, step = tensors.pop("theta", None), tensors.pop("step", None)
    if theta is None or theta.dtype not in THETA or len(theta.shape) != 3 or theta.shape[0] != shard.n:
        came = "missing" if theta is None else f"{theta.dtype} {list(theta.shape)}"
        raise StoreError(f"theta in {shard.path} is {came}, expected floats [{shard.n}, C, D]")
    if step is None or step.dtype != torch.int64 or step.shape != (shard.n,):
        raise StoreError(f"step in {shard.path} is {step}, expected int64 [{shard.n}]")
    for name, e in tensors.items():
        if not name.startswith("stat.") or e.shape[:2] != theta.shape[:2]:
            raise StoreError(f"{name} in {shard.path} is {list(e.shape)}, expected stat.* of {list(theta.shape[:2])}")
    for name, e in (("theta", theta), ("step", step), *tensors.items()):
        if e.begin % e.dtype.itemsize:
            raise StoreError(f"{name} in {shard.path} begins at byte {e.begin}, expected a multiple of its item")


def list_shards(folder: Path, known: dict[str, Shard] | None = None) -> list[Shard]:
    """The shards of a group in order, when they follow one another from draw 0 and are of one kind."""
    known = known or {}
    names = sorted(p.name for p in folder.glob("draws-*"))
    shards = sorted((known.get(name) or open_shard(folder / name) for name in names), key=lambda s: (s.first, s.n))
    at = 0
    for shard in shards:
        if shard.first != at:
            what = "a gap before it" if shard.first > at else "draws of another shard"
            raise StoreError(f"{shard.path} begins at draw {shard.first} with {what}, expected draw {at}")
        if shard.kind != shards[0].kind:
            raise StoreError(f"{shard.path} holds {_said(shard)}, expected {_said(shards[0])} as in the first shard")
        at += shard.n
    return shards


def _said(shard: Shard) -> str:
    dtype, (C, D), stats = shard.kind
    return f"{C} chains x {D} parameters of {dtype} with {len(stats)} statistics"


def _digest(block: Any) -> bytes:
    return hashlib.sha256(block).digest()[:8]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        raise StoreError(f"{path} cannot be opened ({e.strerror}), expected a shard that can be read") from e
    try:
        yield fd
    finally:
        os.close(fd)


def _take(fd: int, offset: int, length: int, path: Path) -> bytes:
    raw = bytearray(length)
    _read(fd, memoryview(raw), offset, path)
    return bytes(raw)


def _read(fd: int, view: memoryview, offset: int, path: Path) -> None:
    while view.nbytes:
        try:
            got = os.preadv(fd, [view], offset)
        except OSError as e:
            raise StoreError(f"{path} cannot be read ({e.strerror}), expected {view.nbytes:,} bytes") from e
        if not got:
            raise StoreError(f"{path} ends at byte {offset:,}, expected {view.nbytes:,} more")
        view, offset = view[got:], offset + got
