"""Where the draws of a run go: memory, or a run folder. The loop sees no difference."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from partita.runs import store

SHARE = 0.05
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

    def __init__(self, path: Path, dtype: str):
        self.path, self.writer = path, store.SampleWriter(path, dtype=dtype)
        self._last, self._took, self._bytes = time.monotonic(), 0.0, 0
        self._first: list[Tensor] | None = [] if dtype == "bfloat16" and not self.writer.committed else None

    @property
    def due(self) -> bool:
        """Time to save. A checkpoint holds the whole history, so saving takes at most about a SHARE of the run's time,
        unless the draws that wait become too many."""
        rested = time.monotonic() - self._last >= self._took / SHARE
        return self.writer.due and (rested or self._bytes >= WAITING)

    def add(self, t: int, theta: Tensor, statistics: dict[str, Tensor]) -> None:
        self.writer.append(t, theta, statistics)
        self._bytes += theta.numel() * theta.element_size()
        if self._first is not None:
            self._first.append(theta.clone())
            if len(self._first) == FEW:
                _check_blur(torch.stack(self._first, 1))
                self._first = None

    def commit(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        began = time.monotonic()
        self.writer.commit({k: v.detach().cpu() for k, v in tensors.items()}, values)
        self._last, self._bytes = time.monotonic(), 0
        self._took = self._last - began

    def note(self, record: dict[str, Any]) -> None:
        store.note(self.path, record)

    def settle(self, settings: dict[str, Any]) -> None:
        """What has been decided by now (the engine): a run that goes on keeps to it."""
        store.update(self.path, settings=settings)

    def finish(self, settings: dict[str, Any], stopped: str | None) -> None:
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


def _check_blur(draws: Tensor) -> None:
    """[C, S, D]: bfloat16 keeps a number to 0.4 %, which must be well under the posterior's standard deviation."""
    narrow = draws.std(1).mean(0) < 0.01 * draws.mean(1).abs().mean(0)
    if bool(narrow.any()):
        share, least = narrow.float().mean().item(), (draws.std(1).mean(0) / draws.mean(1).abs().mean(0)).min().item()
        raise ValueError(
            f"rows='bfloat16' would blur the posterior: in {share:.1%} of the parameters its standard deviation is under "
            f"1 % of their size (least: {least:.2%}), expected rows='float32'"
        )
