"""Where the draws of a run go: memory, or a run folder. The loop sees no difference."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from partita.runs import store

SHARE = 0.05
BEAT = 60.0  # seconds between two signs of life
WAITING = 2**29  # bytes of draws
FEW = 32  # draws a chain from which the spread of the posterior is told


class InMemory:
    """Draws in a tensor; nothing outlives the process."""

    durable = due = False

    def __init__(self, C: int, most: int, D: int, dtype: torch.dtype):
        self._draws = torch.empty(C, most, D, dtype=dtype)
        self._statistics: list[dict[str, Tensor]] = []
        self.steps: list[int] = []

    def add(self, t: int, theta: Tensor, statistics: dict[str, Tensor]) -> None:
        self._draws[:, len(self.steps)] = theta
        self._statistics.append(statistics)
        self.steps.append(t)

    @property
    def samples(self) -> Tensor:
        return self._draws[:, : len(self.steps)]

    @property
    def statistics(self) -> dict[str, Tensor]:
        """{name: [C, S, ...]}."""
        kept = self._statistics[: len(self.steps)]  # an interrupt may fall between the two
        return {k: torch.stack([s[k] for s in kept], 1) for k in kept[0]} if kept else {}

    def commit(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        return None

    def note(self, record: dict[str, Any]) -> None:
        return None

    def settle(self, settings: dict[str, Any]) -> None:
        return None

    def finish(self, settings: dict[str, Any], stopped: str | None) -> None:
        return None

    def close(self) -> None:
        return None

    def __enter__(self) -> InMemory:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        return None


class OnDisk:
    """Draws, checkpoints and records in a run folder."""

    durable = True
    refused = ""  # why bfloat16 was

    def __init__(self, path: Path, dtype: str):
        self.path, self.writer = path, store.SampleWriter(path, dtype=dtype)
        self._last, self._took, self._bytes = time.monotonic(), 0.0, 0
        self._beat = self._last
        # bfloat16 is decided on once there are a few draws to judge by; until then they wait here
        self._waiting: list[tuple[int, Tensor, dict[str, Tensor]]] | None = None
        if dtype == "bfloat16" and not self.writer.committed:
            self._waiting = []

    @property
    def due(self) -> bool:
        """Time to save. A checkpoint holds the whole history, so saving takes at most about a SHARE of the run's time,
        unless the draws that wait become too many."""
        if time.monotonic() - self._beat > BEAT:
            self._beat = time.monotonic()
            self.writer.beat()
        rested = time.monotonic() - self._last >= self._took / SHARE
        return self.writer.due and (rested or self._bytes >= WAITING)

    def add(self, t: int, theta: Tensor, statistics: dict[str, Tensor]) -> None:
        self._bytes += theta.numel() * theta.element_size()
        if self._waiting is None:
            self.writer.append(t, theta, statistics)
            return
        self._waiting.append((t, theta.clone(), statistics))
        if len(self._waiting) == FEW:
            self._decide()

    def _decide(self) -> None:
        """bfloat16 where it does not blur the posterior, else θ's own dtype; and the draws that waited are written."""
        waiting, self._waiting = self._waiting or [], None
        if waiting and (refused := _blurred(torch.stack([theta for _, theta, _ in waiting], 1))):
            self.writer.dtype = str(waiting[0][1].dtype).removeprefix("torch.")
            settings = store.about(self.path)["settings"]
            store.update(self.path, settings={**settings, "rows": self.writer.dtype})
            self.refused = f"rows='bfloat16' refused, {self.writer.dtype} kept: {refused}"
            warnings.warn(self.refused, stacklevel=2)
        for t, theta, statistics in waiting:
            self.writer.append(t, theta, statistics)

    def commit(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        began = time.monotonic()
        if self._waiting:
            self._decide()
        self.writer.commit({k: v.detach().cpu() for k, v in tensors.items()}, values)
        self._last, self._bytes = time.monotonic(), 0
        self._took = self._last - began

    def note(self, record: dict[str, Any]) -> None:
        store.note(self.path, record)

    def settle(self, settings: dict[str, Any]) -> None:
        """What has been decided by now (the engine, the rows): a run that goes on keeps to it."""
        store.update(self.path, settings=settings)

    def finish(self, settings: dict[str, Any], stopped: str | None) -> None:
        settings |= {"rows": self.writer.dtype}
        settings["notes"] += [self.refused] if self.refused else []
        store.update(self.path, settings=settings, stopped=stopped, finished=stopped is None)
        self.close()

    @property
    def samples(self) -> Any:
        return store.Draws(store.SampleReader(self.path))

    @property
    def steps(self) -> list[int]:
        return store.SampleReader(self.path).steps

    @property
    def statistics(self) -> dict[str, Tensor]:
        return store.SampleReader(self.path).stats()

    def close(self) -> None:
        self.writer.close()

    def __enter__(self) -> OnDisk:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _blurred(draws: Tensor) -> str:
    """[C, S, D]: why bfloat16, which keeps a number to 0.4 %, would blur the posterior; "" where it would not."""
    if draws.shape[1] < FEW:
        return f"{draws.shape[1]} draws a chain are too few to tell what it would blur"
    sd, size = draws.std(1).mean(0), draws.mean(1).abs().mean(0)
    narrow = sd < 0.01 * size
    if not bool(narrow.any()):
        return ""
    return (
        f"in {narrow.float().mean().item():.1%} of the parameters the posterior's standard deviation is under 1 % of their "
        f"size (least: {(sd / size).min().item():.2%})"
    )
