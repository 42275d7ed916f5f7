"""The progress bar: rate, energy, time left. Right in a terminal and in a notebook, silent when piped."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

EVERY = 0.25  # seconds between updates
STALL = 30.0  # seconds without a step after which the bar says so


class Stalled(ProgressColumn):
    """Nothing while steps come; drawn by rich's own thread, so it also speaks when a step hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.beat = time.monotonic()

    def render(self, task: Task) -> Text:
        quiet = time.monotonic() - self.beat
        return Text(f"no step for {quiet:.0f} s" if quiet > STALL and not task.finished else "", style="bold red")


class Progress:
    def __init__(self, steps: int, settings: dict[str, Any], show: bool | None = None, done: int = 0):
        console = Console(stderr=True)
        self._show = (console.is_terminal or console.is_jupyter) if show is None else show
        self._steps, self._last, self._began, self._done = steps, 0.0, time.monotonic(), done
        self._stalled = Stalled()
        if self._show:
            s = settings
            console.print(
                f"[bold]partita[/bold] {s['sampler']} · {s['groups']:,} group{'s' * (s['groups'] != 1)} · "
                f"{s['chains']} chains · {s['passes']:,} passes a step · {s['device']} · {s['engine']}",
                highlight=False,
            )
            for note in s["notes"]:
                console.print(f"  {note}", highlight=False)
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]} · energy {task.fields[energy]}"),
                TimeRemainingColumn(),
                self._stalled,
                console=console,
                transient=False,
            )
            self._burn_in = s["burn_in"]
            self._task = self._bar.add_task("burn-in", total=steps, completed=done, rate="… steps/s", energy="…")

    def __enter__(self) -> Progress:
        if self._show:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._show:
            self._bar.stop()

    def due(self, t: int) -> bool:
        """Whether it is time to update (reading the energy waits for the device, so not at every step)."""
        self._stalled.beat = time.monotonic()
        return self._show and (t == self._steps or time.monotonic() - self._last >= EVERY)

    def update(self, t: int, energy: float) -> None:
        self._last = time.monotonic()
        rate = f"{(t - self._done) / max(self._last - self._began, 1e-9):,.0f} steps/s"
        what = "burn-in" if t <= self._burn_in else "sampling"
        self._bar.update(self._task, completed=t, description=what, rate=rate, energy=f"{energy:.4g}")
