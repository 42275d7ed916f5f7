"""Signals that ask a run to save and stop: Ctrl-C, SIGTERM, SIGUSR1 (preemption)."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, n)]  # no SIGUSR1 on Windows


class Halt:
    """With `catch`, the first signal is noted (`asked`) and the run stops after the step it is in; a second one is as
    without us. Signals reach the main thread alone: elsewhere nothing is caught."""

    def __init__(self, catch: bool):
        self.asked = ""
        self._catch = catch and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Halt:
        if self._catch:
            self._before = {s: signal.signal(s, self._note) for s in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._release()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = f"stopped by {signal.Signals(number).name}"
        self._release()

    def _release(self) -> None:
        for s, handler in self._before.items():
            signal.signal(s, signal.SIG_DFL if handler is None else handler)
        self._before = {}
