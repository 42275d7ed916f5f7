"""Who writes a group: a lock that the system drops with its process, and a lease file that other hosts can read, since
locks are unreliable on network file systems.

lease.json: {"host", "pid", "started", "heartbeat"}, times in seconds since 1970.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import weakref
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from partita.runs.store import disk
from partita.runs.store.disk import StoreError

STALE = 600.0  # seconds without a heartbeat after which another host's lease is free

_held: weakref.WeakSet[Lease] = weakref.WeakSet()


class Lease:
    """The right to write in this folder, from now until `release`."""

    def __init__(self, folder: Path):
        try:
            import fcntl
        except ImportError:
            raise StoreError(f"{folder} cannot be locked here, expected Linux or macOS for runs on disk") from None
        self.folder = folder
        self.me: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
        with disk.writing(folder):
            self.fd: int | None = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except BlockingIOError:
                raise StoreError(self._taken(_read(folder))) from None
            except OSError:  # no locks on this file system: the lease alone has to do
                locked = False
            other = _read(folder)
            if other is not None and not self._gone(other, locked) and _age(other) < STALE:
                raise StoreError(
                    f"{self._taken(other)}; another host's lease is free {STALE:.0f} s after its last sign"
                )
            self._write()
        except BaseException:
            self._drop()
            raise
        _held.add(self)

    def beat(self) -> None:
        """Still here; refused when another process has taken over."""
        other = _read(self.folder)
        if other is not None and any(other[k] != self.me[k] for k in ("host", "pid", "started")):
            raise StoreError(f"{self._taken(other)}, which took over")
        self._write()

    def release(self) -> None:
        """Let others write; where the lease file cannot be removed, the lock goes anyway."""
        if self.fd is not None:
            try:
                other = _read(self.folder)
                if other is not None and all(other[k] == self.me[k] for k in ("host", "pid", "started")):
                    with contextlib.suppress(OSError):
                        disk.unlink(self.folder / "lease.json")
            finally:
                self._drop()

    def _gone(self, other: dict[str, Any], locked: bool) -> bool:
        """A process of this host that has no lock any more, or where there are no locks, does not run any more."""
        return other["host"] == self.me["host"] and (locked or not _alive(other["pid"]))

    def _drop(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def _write(self) -> None:
        path, tmp = self.folder / "lease.json", self.folder / "lease.json.tmp"
        with disk.writing(path):
            fd = disk.create(tmp)
            try:
                disk.write(fd, (json.dumps({**self.me, "heartbeat": time.time()}) + "\n").encode())
            finally:
                os.close(fd)
            disk.rename(tmp, path)  # not fsynced: after a power loss nobody holds it

    def _taken(self, other: dict[str, Any] | None) -> str:
        who = "another process"
        if other is not None:
            with contextlib.suppress(ValueError, OverflowError, OSError):
                since = datetime.fromtimestamp(other["started"], UTC).isoformat(" ", "seconds")
                who = f"process {other['pid']} on {other['host']} since {since}"
        return f"{self.folder} is written by {who}, expected no other writer"


def _read(folder: Path) -> dict[str, Any] | None:
    """The lease, if there is one that can be understood: one that a power loss has emptied holds nobody back."""
    try:
        lease = json.loads((folder / "lease.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    kinds = {"host": str, "pid": int, "started": int | float, "heartbeat": int | float}
    fits = isinstance(lease, dict) and all(isinstance(lease.get(k), kind) for k, kind in kinds.items())
    return lease if fits else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _age(lease: dict[str, Any]) -> float:
    """Seconds since the last heartbeat; clocks of two hosts differ, and clocks go back."""
    return max(0.0, time.time() - lease["heartbeat"])


def _forked() -> None:
    """A forked child (of a DataLoader) shares the lock: it would hold it after its parent has died."""
    for lease in list(_held):
        lease._drop()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)
