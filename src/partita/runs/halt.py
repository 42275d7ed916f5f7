"""Signals that ask a run to save and stop: Ctrl-C, SIGTERM, SIGUSR1 (preemption)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

SIGNALS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, n)]  # no SIGUSR1 on Windows


class Halt:
    """With `catch`, the first signal is noted (`asked`) and the run stops after the step it is in; a second one is as
    without us, but not while the run saves. Signals reach the main thread alone: elsewhere nothing is caught."""

    def __init__(self, catch: bool):
        self.asked = ""
        self._catch = catch and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}
        self._saving = False

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Inside, signals are noted and nothing else."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def __enter__(self) -> Halt:
        if self._catch:
            self._before = {s: signal.signal(s, self._note) for s in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._release()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked and not self._saving:
            self._release()
            os.kill(os.getpid(), number)
        self.asked = self.asked or f"stopped by {signal.Signals(number).name}"

    def _release(self) -> None:
        for s, handler in self._before.items():
            signal.signal(s, signal.SIG_DFL if handler is None else handler)
        self._before = {}
