"""What belongs to torch as a whole: its random state, its switches for the time of a run, the time of its work."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """All that the random numbers of a run depend on, in every mode."""
    state = {"cpu": torch.get_rng_state()}
    return {**state, str(device): torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def set_rng_state(state: dict[str, Tensor]) -> None:
    for device, value in state.items():
        if device == "cpu":
            torch.set_rng_state(value)
        else:
            torch.cuda.set_rng_state(value, device)


@contextlib.contextmanager
def unchanged(device: torch.device) -> Iterator[None]:
    """torch's random state is afterwards what it was."""
    state = rng_state(device)
    try:
        yield
    finally:
        set_rng_state(state)


@contextlib.contextmanager
def switched(precision: str) -> Iterator[None]:
    """torch as a run wants it: tf32 products for "tf32" (otherwise as they are set), and cuDNN, whose shapes stay the
    same from step to step, may try its kernels once and keep the fastest."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    try:
        cudnn.benchmark = not cudnn.deterministic
        if precision == "tf32":
            cudnn.allow_tf32 = matmul.allow_tf32 = True
        yield
    finally:
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


def seconds(f: Callable[[], Any], device: torch.device) -> float:
    """Wall time of one call, its work on the device included."""
    _wait(device)
    began = time.perf_counter()
    f()
    _wait(device)
    return time.perf_counter() - began


def awake(device: torch.device, s: float = 0.2) -> None:
    """Keep a GPU busy until its clock is up: kernels compared while it climbs are compared unfairly."""
    end = time.perf_counter() + s
    while device.type == "cuda" and time.perf_counter() < end:
        x = torch.ones(2048, 2048, device=device)
        for _ in range(20):
            torch.mm(x, x)
        _wait(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
