"""A checkpoint: all that a group needs to go on, as a safetensors file that is always checked whole.

ckpt-<next>-<sha256[:16] of the file>.safetensors; next = draws committed when it is the one to go on from. Metadata:
"values", the caller's JSON, and "serial", which tells the newest of those with one next (burn-in commits no draws).
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from partita.runs.store import codec
from partita.runs.store.disk import StoreError
from partita.runs.store.shards import list_shards

NAME = re.compile(r"ckpt-(\d{8,18})-([0-9a-f]{16})\.safetensors")


@dataclass(frozen=True, order=True)
class Checkpoint:
    """The newer of two is the greater one."""

    next: int
    serial: int
    path: Path


def encode(next: int, serial: int, state: dict[str, Tensor], values: dict[str, Any]) -> tuple[str, list[Any]]:
    """The name and the pieces of a checkpoint's file."""
    try:
        text = json.dumps(values)
    except (TypeError, ValueError) as e:
        raise StoreError(f"the values of a checkpoint are not plain ({e}), expected what JSON holds") from e
    pieces = codec.encode(state, {"values": text, "serial": str(serial)})
    hashed = hashlib.sha256()
    for piece in pieces:
        hashed.update(piece)
    return f"ckpt-{next:08d}-{hashed.hexdigest()[:16]}.safetensors", pieces


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    """State, values and the bytes of a checkpoint, when they are what was written."""
    name = NAME.fullmatch(path.name)
    if name is None:
        raise StoreError(f"{path} is no name of a checkpoint, expected ckpt-<next>-<hash>.safetensors")
    try:
        with open(path, "rb") as f:
            raw = bytearray(f.seek(0, 2))
            f.seek(0)
            got = f.readinto(raw)
    except OSError as e:
        raise StoreError(f"{path} cannot be read ({e.strerror}), expected a checkpoint") from e
    if got != len(raw) or hashlib.sha256(raw).hexdigest()[:16] != name[2]:
        raise StoreError(f"{path} is damaged, expected the hash in its name")
    state, metadata = codec.decode(raw, str(path))
    try:
        values = json.loads(metadata["values"])
    except (KeyError, ValueError, RecursionError):
        raise StoreError(f"{path} holds no values, expected a checkpoint") from None
    return state, values, len(raw)


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints of a group, oldest first, by their names and headers; their bytes are not judged."""
    found = []
    for path in folder.glob("ckpt-*"):
        name = NAME.fullmatch(path.name)
        if name is not None:
            found.append(Checkpoint(int(name[1]), _serial(path), path))
    return sorted(found)


def latest(folder: Path, most: int, skipped: list[str]) -> tuple[int, dict[str, Tensor], dict[str, Any]] | None:
    """next, state and values of the newest undamaged checkpoint with next <= most; what is damaged gets a line."""
    for found in reversed(list_checkpoints(folder)):
        if found.next <= most:
            try:
                return (found.next, *load(found.path)[:2])
            except StoreError as e:
                skipped.append(str(e))
    return None


def newest(path: Any, group: int = 0) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """State and values of a group's newest undamaged checkpoint, to look at: no lock is taken."""
    folder = Path(path) / f"group-{group:03d}"
    for _ in range(3):  # a writer may prune what has just been listed
        found = latest(folder, sum(shard.n for shard in list_shards(folder)), [])
        if found is not None:
            return found[1:]
    return None


def _serial(path: Path) -> int:
    """0 for a file that is damaged or gone: it counts as the oldest of its kind."""
    try:
        with open(path, "rb") as f:
            size = f.seek(0, 2)
            f.seek(0)
            first = f.read(8)
            raw = first + f.read(codec.header_length(first, size, str(path)))
        return int(codec.parse(raw, size, str(path)).metadata["serial"][:18])
    except (OSError, KeyError, ValueError):
        return 0
