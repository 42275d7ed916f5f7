"""Runners timed in turn: block by block, so that what the machine does meanwhile falls on all of them alike."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

Advance = Callable[[int], float | None]  # takes so many steps; the seconds they took, where not all of the call counts

STARTED, PATIENCE = time.perf_counter(), 150.0  # seconds
PEERS = ("torch", "jax", "blackjax", "posteriors")


@dataclass(frozen=True)
class Runner:
    """One way to do a job. `make` compiles and warms what there is to; its time is reported apart."""

    job: str
    method: str
    chains: int
    who: str
    make: Callable[[], Advance]
    unit: int = 1  # steps come in multiples of it
    alone: bool = False  # its compiler tries kernels while it compiles, which others must not disturb


@dataclass
class Row:
    job: str
    method: str
    chains: int
    who: str
    group: int = 0  # rows of one group were timed in turn
    setup_s: float = 0.0
    steps: int = 0  # a block
    ms: list[float] = field(default_factory=list)  # a step, one entry a block
    failed: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def rate(self) -> float:
        """Chain-steps a second."""
        return 1e3 * self.chains / self.median


def measure(
    runners: list[Runner], blocks: int = 7, block_s: float = 0.25, limit_s: float = 20.0, turns: Path | None = None
) -> list[Row]:
    """The runners of one job in turn, `blocks` times: a block is about `block_s` seconds of steps. Fewer than `blocks`,
    but at least 3, where they would take over `limit_s`. Processes that share the file `turns` compile side by side, and
    time their blocks one process at a time once all of them have compiled."""
    rows, ready = [], []
    for r in runners:
        row = Row(r.job, r.method, r.chains, r.who)
        rows.append(row)
        began = time.perf_counter()
        try:
            with _turn(turns, r.alone):
                advance = r.make()
                if r.alone:
                    advance(r.unit)
            row.setup_s = time.perf_counter() - began
            ready.append((r, row, advance))
        except Exception as e:
            row.failed = _said(e)
    for r, row, advance in list(ready):
        with _turn(turns):
            try:
                each = _time(advance, r.unit)
            except Exception as e:
                row.failed = _said(e)
                ready.remove((r, row, advance))
                continue
            for share in (0.1, 0.5, 1.0):  # the first steps are slow ones
                row.steps = r.unit * max(1, int(share * block_s / each / r.unit))
                each = _time(advance, row.steps) if each * row.steps < 2 * block_s else each
    spent = 0.0
    for n in range(blocks):
        if n >= 3 and spent > limit_s:
            break
        for _, row, advance in ready:
            with _turn(turns):
                each = _time(advance, row.steps)
            row.ms.append(1e3 * each)
            spent += each * row.steps
    return rows


def _said(e: Exception) -> str:
    said = str(e).strip().splitlines() or [""]
    return f"{type(e).__name__}: {said[0][:160]}"


@contextlib.contextmanager
def _turn(turns: Path | None, alone: bool = True) -> Iterator[None]:
    """Beside the processes that share the file; or alone among them, when none of them is beside others any more (or has
    been for longer than PATIENCE)."""
    if turns is None:
        yield
        return
    import fcntl  # not on Windows

    with turns.open("w") as file, turns.with_suffix(".turn").open("w") as turn:
        while alone and time.perf_counter() - STARTED < PATIENCE:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
        fcntl.flock(file, fcntl.LOCK_UN if alone else fcntl.LOCK_SH)
        if alone:
            fcntl.flock(turn, fcntl.LOCK_EX)
        yield


def _time(advance: Advance, steps: int) -> float:
    """Seconds a step."""
    began = time.perf_counter()
    took = advance(steps)
    return (time.perf_counter() - began if took is None else took) / steps


def machine(threads: int) -> dict[str, Any]:
    versions = {}
    for name in PEERS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": threads,
        "gpu": gpu,
        "python": platform.python_version(),
        "versions": versions,
    }


def as_json(where: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    return {"machine": where, "rows": [asdict(r) for r in rows]}


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":")[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
