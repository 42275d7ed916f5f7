"""The only writer of a group of chains."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.runs.store import checkpoints, disk, folder, shards
from partita.runs.store.disk import StoreError
from partita.runs.store.lease import Lease

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class SampleWriter:
    """Draws of one group, safe on disk after each `commit`. A context manager.

    It opens a group as the last writer left it, whatever ended that one: what was half-written is removed, what is
    damaged refused. `committed` counts the draws that are safe. The checkpoint of a commit is renamed into place before
    its draws are, so that there is never a draw without the state to go on from."""

    def __init__(
        self,
        path: Any,
        group: int = 0,
        dtype: str = "float32",
        commit_bytes: int = 16 * 2**20,
        commit_seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        if dtype not in DTYPES:
            raise StoreError(f"dtype is {dtype!r}, expected one of {', '.join(DTYPES)}")
        folder.about(path)
        self.folder = Path(path) / f"group-{group:03d}"
        self.dtype, self.commit_bytes, self.commit_seconds, self.clock = dtype, commit_bytes, commit_seconds, clock
        self.skipped: list[str] = []  # a line for each damaged checkpoint that `checkpoint` passed over
        self._rows: list[tuple[int, Tensor, dict[str, Tensor]]] = []
        self._unfinished: list[Path] = []  # files of a commit that did not come to its end, to be removed
        self._bytes = 0
        self._closed = False
        with disk.writing(self.folder):
            disk.folders(self.folder)
        self._lease = Lease(self.folder)
        try:
            self._recover()
        except BaseException:
            self._lease.release()
            raise
        self._last = clock()

    def _recover(self) -> None:
        with disk.writing(self.folder):
            for path in self.folder.glob("*.tmp"):
                disk.unlink(path)
            self._shards = shards.list_shards(self.folder)
            for shard in self._shards:
                shard.check()
            if self._shards and self._shards[0].theta.dtype != DTYPES[self.dtype]:
                stored = str(self._shards[0].theta.dtype).removeprefix("torch.")
                raise StoreError(f"dtype is {self.dtype!r}, expected {stored!r} as in {self.folder}")
            self.committed = sum(shard.n for shard in self._shards)
            self._forget(self.committed)
        self._serial = max((c.serial for c in checkpoints.list_checkpoints(self.folder)), default=0)

    def _forget(self, past: int) -> None:
        """Checkpoints past this draw are of draws that never came, or go. They may not come back after a power loss."""
        late = [c.path for c in checkpoints.list_checkpoints(self.folder) if c.next > past]
        for path in late:
            disk.unlink(path)
        disk.settle(self.folder)

    @property
    def checkpoint_next(self) -> int | None:
        """The `next` of what `checkpoint` gives: below `committed` when a checkpoint was lost or damaged."""
        found = self.newest()
        return None if found is None else found[0]

    def beat(self) -> None:
        """Still here: other hosts take a lease for free that shows no sign for long."""
        self._open()
        self._lease.beat()

    def checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """State and values of the newest undamaged checkpoint; see `checkpoint_next` and `rewind`."""
        found = self.newest()
        return None if found is None else found[1:]

    def newest(self) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
        """Both in one reading: next, state, values."""
        self.skipped = []
        return checkpoints.latest(self.folder, self.committed, self.skipped)

    def rewind(self, next: int) -> None:
        """Forget the draws from number `next` on, which must be where a commit ended."""
        self._open()
        ends = [0, *(shard.first + shard.n for shard in self._shards)]
        if next not in ends:
            near = min(ends, key=lambda end: abs(end - next))
            raise StoreError(f"rewind got {next!r}, expected where a commit ended, for example {near}")
        with disk.writing(self.folder):
            self._undo()
            self._forget(next)
            self._rows, self._bytes = [], 0
            while self.committed > next:  # one by one from the end: never a gap
                last = self._shards[-1]
                self._unfinished, self._shards, self.committed = [last.path], self._shards[:-1], last.first
                self._undo()

    def append(self, step: int, theta: Tensor, stats: dict[str, Tensor] | None = None) -> None:
        """One draw of every chain: theta [C, D], stats {name: [C, ...]}. It is copied."""
        self._open()
        stats = stats or {}
        if theta.dim() != 2 or not theta.numel() or not theta.is_floating_point():
            raise StoreError(f"theta is {theta.dtype} {list(theta.shape)}, expected floats [C, D]")
        row = {k: v.detach().to("cpu", copy=True) for k, v in stats.items()}
        kept = theta.detach().to("cpu", DTYPES[self.dtype], copy=True)
        kind = (kept.dtype, tuple(kept.shape), tuple(sorted((f"stat.{k}", (v.dtype, v.shape)) for k, v in row.items())))
        known = self._kind()
        if known is not None and kind != known:
            raise StoreError(f"a draw is {_said(kind)}, expected {_said(known)} as before")
        if any(v.shape[:1] != theta.shape[:1] for v in row.values()):
            raise StoreError(f"statistics are {_said(kind)}, expected [{theta.shape[0]}, ...] each")
        self._rows.append((int(step), kept, row))
        self._bytes += sum(t.numel() * t.element_size() for t in (kept, *row.values()))

    def _kind(self) -> tuple | None:
        if self._rows:
            _, theta, stats = self._rows[0]
            named = tuple(sorted((f"stat.{k}", (v.dtype, v.shape)) for k, v in stats.items()))
            return (theta.dtype, tuple(theta.shape), named)
        if not self._shards:
            return None
        return self._shards[0].kind

    @property
    def due(self) -> bool:
        """Time for a commit: enough bytes or seconds since the last one."""
        now = self.clock()
        self._last = min(self._last, now)  # a clock that went back starts anew
        return self._bytes >= self.commit_bytes or now - self._last >= self.commit_seconds

    def commit(self, state: dict[str, Tensor], values: dict[str, Any]) -> int:
        """Make the buffered draws and the state after them safe; the number of draws that are. When it fails, the
        buffered draws stay buffered and the next commit tries again."""
        self._open()
        next = self.committed + len(self._rows)
        name, pieces = checkpoints.encode(next, self._serial + 1, state, values)
        with disk.writing(self.folder):
            self._undo()
            self._lease.beat()
            try:
                self._put("ckpt.tmp", name, pieces)
                fresh = self._put_draws() if self._rows else []
                disk.settle(self.folder)
            except BaseException:
                with contextlib.suppress(OSError):  # what cannot be removed now is removed by the next commit
                    self._undo()
                raise
        # assignments alone: an interrupt cannot fall between them
        self._shards, self._rows, self._unfinished, self._bytes = self._shards + fresh, [], [], 0
        self.committed, self._serial = next, self._serial + 1
        self._last = self.clock()
        with contextlib.suppress(OSError):  # the draws are safe; the next commit prunes again
            for old in checkpoints.list_checkpoints(self.folder)[:-2]:
                disk.unlink(old.path)
        return next

    def _put_draws(self) -> list[shards.Shard]:
        steps = [step for step, _, _ in self._rows]
        theta = torch.stack([theta for _, theta, _ in self._rows])
        stats = {k: torch.stack([row[k] for _, _, row in self._rows]) for k in self._rows[0][2]}
        rest, pieces = shards.encode(steps, theta, stats)
        return [shards.open_shard(self._put("draws.tmp", f"draws-{self.committed:08d}-{rest}", pieces))]

    def _put(self, tmp: str, name: str, pieces: list[Any]) -> Path:
        path = self.folder / name
        self._unfinished += [self.folder / tmp, path]
        disk.save(self.folder / tmp, *pieces)
        if name.startswith("draws-"):
            disk.settle(self.folder)  # the checkpoint's name is safe before the draws have theirs
        disk.rename(self.folder / tmp, path)
        return path

    def _undo(self) -> None:
        """Remove what an unfinished commit (draws before their checkpoint) or rewind left; tried again until it works."""
        if self._unfinished:
            for path in reversed(self._unfinished):
                with contextlib.suppress(FileNotFoundError):
                    disk.unlink(path)
            disk.settle(self.folder)
            self._unfinished = []

    def _open(self) -> None:
        if self._closed:
            raise StoreError(f"the writer of {self.folder} is closed, expected an open one")

    def close(self) -> None:
        """Let others write. Draws that were not committed are gone."""
        if not self._closed:
            self._closed = True
            try:
                with contextlib.suppress(OSError):
                    self._undo()
            finally:
                self._lease.release()

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _said(kind: tuple) -> str:
    dtype, shape, stats = kind
    return f"{list(shape)} of {dtype}" + "".join(f", {k} {list(s)} of {t}" for k, (t, s) in stats)
