"""Every operation that changes the disk. The store reaches `create`, `write`, `fsync`, `rename`, `unlink` and `mkdir`
through this module only, so that tests can put a crash, a power loss or a full disk in the place of each one."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class StoreError(ValueError):
    """One line: what came, what was expected."""


def create(path: Path) -> int:
    """A descriptor of a new, empty file."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)


def write(fd: int, data: Any) -> None:
    """All of these bytes: os.write may take only some of them, and at most 2 GiB."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        view = view[os.write(fd, view) :]


def fsync(fd: int) -> None:
    os.fsync(fd)


def rename(old: Path, new: Path) -> None:
    os.replace(old, new)


def unlink(path: Path) -> None:
    os.unlink(path)


def mkdir(path: Path) -> None:
    os.mkdir(path)


def save(path: Path, *pieces: Any) -> None:
    """A file whose bytes are safe on disk; its name is so after `settle` of its folder."""
    fd = create(path)
    try:
        for piece in pieces:
            write(fd, piece)
        fsync(fd)
    finally:
        os.close(fd)


def settle(folder: Path) -> None:
    """What was made, renamed and removed in this folder is safe on disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(fd)
    except OSError as e:
        if e.errno != errno.EINVAL:  # a file system that has no such thing for folders
            raise
    finally:
        os.close(fd)


def replace(path: Path, *pieces: Any) -> None:
    """The file at `path` is either what it was or all of these bytes, whatever happens."""
    tmp = path.with_name(path.name + ".tmp")
    save(tmp, *pieces)
    rename(tmp, path)
    settle(path.parent)


def folders(path: Path) -> None:
    """Make this folder and those above it that are missing."""
    if path.is_dir():
        return
    folders(path.parent)
    try:
        mkdir(path)
    except FileExistsError:
        if not path.is_dir():  # a file; a folder is another process's, which came first
            raise
    settle(path.parent)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system says goes wrong, in one line."""
    try:
        yield
    except OSError as e:
        why = e.strerror or type(e).__name__
        raise StoreError(
            f"{e.filename or path} cannot be written ({why}), expected a disk with room and the right to write"
        ) from e


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Others who ask for the same folder wait; where the file system has no locks, nobody does."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            import fcntl  # not on Windows, where partita is imported all the same

            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
