"""What a run folder holds besides draws and checkpoints: what the run is, what is fixed, what was watched."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from partita.runs.store import codec, disk
from partita.runs.store.disk import StoreError

FORMAT = 1
OURS = ("format", "sha256")  # keys of run.json that the store writes


def create(path: Any, about: dict[str, Any], fixed: dict[str, Tensor], recipe: str | None = None) -> None:
    """A new run folder. `about` is a dict of plain values, `fixed` {name: tensor}, `recipe` a text.

    run.json comes last: a folder without it is no run, and can be made again."""
    folder = Path(path)
    with disk.writing(folder):
        disk.folders(folder)
        with disk.alone(folder):
            if (folder / "run.json").exists():
                raise StoreError(f"{folder} holds a run already, expected a new folder")
            if any(folder.glob("group-*/draws-*")):
                raise StoreError(f"{folder} holds draws but no run.json, expected a new folder")
            files = {"fixed.safetensors": b"".join(bytes(p) for p in codec.encode(fixed))}
            if recipe is not None:
                files["recipe.toml"] = recipe.encode()
            body = _plain(about)
            for name, raw in files.items():
                disk.replace(folder / name, raw)
            try:
                _write(folder, body, {name: hashlib.sha256(raw).hexdigest() for name, raw in files.items()})
            except BaseException:
                with contextlib.suppress(OSError):  # or a second try would find a run
                    disk.unlink(folder / "run.json")
                raise


def about(path: Any) -> dict[str, Any]:
    """What the run is: the dict given to `create`, "format", and what `update` added."""
    return {key: value for key, value in _read(Path(path)).items() if key != "sha256"}


def update(path: Any, **values: Any) -> None:
    """Add to, or replace in, what the run is."""
    folder, new = Path(path), _plain(values)
    _read(folder)  # a folder that is no run is not touched
    with disk.writing(folder), disk.alone(folder):
        old = _read(folder)
        _write(folder, {**{k: v for k, v in old.items() if k not in OURS}, **new}, old["sha256"])


def fixed(path: Any) -> dict[str, Tensor]:
    """The tensors that are not random, in the order they were given."""
    raw = _file(Path(path), "fixed.safetensors")
    assert raw is not None
    return codec.decode(bytearray(raw), str(Path(path) / "fixed.safetensors"))[0]


def recipe(path: Any) -> str | None:
    """The recipe, if the run was given one."""
    raw = _file(Path(path), "recipe.toml")
    return None if raw is None else raw.decode()


def note(path: Any, record: dict[str, Any]) -> None:
    """One more line of metrics.jsonl."""
    text = json.dumps(_plain(record), separators=(", ", ": ")) + "\n"
    file = Path(path) / "metrics.jsonl"
    with disk.writing(file):
        fd = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            end = os.fstat(fd).st_size
            torn = (
                end > 0 and os.pread(fd, 1, end - 1) != b"\n"
            )  # it is closed first, or this record would be torn, too
            disk.write(fd, b"\n" * torn + text.encode())
        finally:
            os.close(fd)


def notes(path: Any) -> list[dict[str, Any]]:
    """The records of metrics.jsonl; lines that a crash has torn are left out."""
    try:
        lines = (Path(path) / "metrics.jsonl").read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as e:
        raise StoreError(f"{Path(path) / 'metrics.jsonl'} cannot be read ({e.strerror}), expected records") from e
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def verify(path: Any) -> int:
    """Check run.json and the files that it vouches for; how many bytes they are."""
    folder = Path(path)
    files = [name for name in _read(folder)["sha256"] if name != "run.json"]
    return (folder / "run.json").stat().st_size + sum(len(_file(folder, name) or b"") for name in files)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """The values as JSON gives them back."""
    if not isinstance(values, dict) or any(key in values for key in OURS):
        raise StoreError(f"a record is {str(values)[:60]!r}, expected a dict without the keys {' and '.join(OURS)}")
    try:
        return json.loads(json.dumps(values))
    except (TypeError, ValueError, RecursionError) as e:
        raise StoreError(f"a record holds more than plain values ({e}), expected what JSON holds") from e


def _write(folder: Path, body: dict[str, Any], sums: dict[str, str]) -> None:
    whole = {"format": FORMAT, **body, "sha256": {k: v for k, v in sums.items() if k != "run.json"}}
    whole["sha256"]["run.json"] = _sum(whole)
    disk.replace(folder / "run.json", (json.dumps(whole, indent=1) + "\n").encode())


def _read(folder: Path) -> dict[str, Any]:
    """run.json as it stands, checked."""
    try:
        raw = (folder / "run.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{folder} is no run, expected a folder with run.json") from None
    except OSError as e:
        raise StoreError(f"{folder / 'run.json'} cannot be read ({e.strerror}), expected a run") from e
    try:
        whole = json.loads(raw)
    except (ValueError, RecursionError):
        raise StoreError(f"{folder / 'run.json'} is not JSON, expected what a run is") from None
    if not isinstance(whole, dict) or type(whole.get("format")) is not int:
        raise StoreError(f"{folder / 'run.json'} is no JSON object with a format, expected what a run is")
    if whole["format"] != FORMAT:
        newer = ": a newer Partita wrote it" if whole["format"] > FORMAT else ""
        raise StoreError(f"{folder} has format {whole['format']}, expected {FORMAT}{newer}")
    sums = whole.get("sha256")
    if not isinstance(sums, dict) or not all(isinstance(v, str) for v in sums.values()):
        raise StoreError(f"{folder / 'run.json'} is damaged, expected sha256 of its files")
    if sums.get("run.json") != _sum({**whole, "sha256": {k: v for k, v in sums.items() if k != "run.json"}}):
        raise StoreError(f"{folder / 'run.json'} is damaged, expected the sha256 in it")
    return whole


def _sum(whole: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()


def _file(folder: Path, name: str) -> bytes | None:
    """A file that run.json vouches for; None when there was none."""
    wanted = _read(folder)["sha256"].get(name)
    if wanted is None:
        return None
    try:
        raw = (folder / name).read_bytes()
    except OSError as e:
        raise StoreError(f"{folder / name} cannot be read ({e.strerror}), expected it in a run") from e
    if hashlib.sha256(raw).hexdigest() != wanted:
        raise StoreError(f"{folder / name} is damaged, expected the sha256 in run.json")
    return raw
