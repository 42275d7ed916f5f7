"""CUDA graphs: capture and time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

WARM = 3  # calls before a capture: libraries choose and load their kernels


def captured(f: Callable[[], Any], warm: Callable[[], Any] | None = None) -> torch.cuda.CUDAGraph:
    """The work f launches, as one graph; `warm` is called first (f itself, unless f must not run)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            (warm or f)()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return graph


def seconds(f: Callable[[], Any], device: torch.device) -> float:
    """Wall time of one call, its work on the device included."""
    _wait(device)
    began = time.perf_counter()
    f()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
