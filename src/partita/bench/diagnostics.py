"""R-hat, bulk and tail ESS beside ArviZ: the same draws, one thread each, timed in turn.

python -m partita.bench.diagnostics [variables [draws [chains [repeats]]]] [float64]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.answers import diagnostics

NAMES = ("rhat", "ess_bulk", "ess_tail")
PART = 0.9  # the autoregression of the draws: an IAC of 19
SLICE = 20  # variables ArviZ is given at once, so that the two take turns every second or two


def beside_arviz(
    variables: int = 200,
    draws: int = 25_000,
    chains: int = 4,
    repeats: int = 3,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> dict[str, Any]:
    """Seconds for R-hat + bulk ESS + tail ESS of `variables`, ours and ArviZ's, medians over `repeats`.

    {"ours_s", "arviz_s", "ratio" (of the wall times), "cpu_ratio" (of processor times: what other processes do on the
    machine touches it less), "error" (the largest relative difference of any of the three), "everything_s" (ours with
    MCSE and IAC), and what was measured}. ArviZ gets float64, the fastest it takes, and one variable after the other is
    what its array interface does by itself.
    """
    from arviz_stats.base import array_stats

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = autoregression(chains, draws, variables).to(device, dtype)
        array = x.double().cpu().numpy()
        axes = {"chain_axis": 0, "draw_axis": 1}

        def peer() -> list[Any]:
            parts = []
            for a in range(0, variables, SLICE):
                part = array[:, :, a : a + SLICE]
                bulk = array_stats.ess(part, method="bulk", **axes)
                tail = array_stats.ess(part, method="tail", prob=diagnostics.TAILS, **axes)
                parts.append(torch.from_numpy(np.stack([array_stats.rhat(part, **axes), bulk, tail])))
            return list(torch.cat(parts, dim=1))

        mine: Callable[[], list[Tensor]] = lambda: list(diagnostics.diagnose(x, NAMES).values())
        everything = lambda: diagnostics.diagnose(x)
        clocks: dict[str, list[tuple[float, float]]] = {"ours": [], "peer": [], "everything": []}
        mine()  # the first call loads the libraries
        for _ in range(repeats):
            found, first = _clock(mine, clocks["ours"], x), _clock(peer, clocks["peer"], x)
            _clock(everything, clocks["everything"], x)
    finally:
        torch.set_num_threads(threads)
    wall, cpu = ({k: statistics.median(v[i] for v in c) for k, c in clocks.items()} for i in (0, 1))
    error = max(((a.cpu() - b).abs() / b.abs()).max().item() for a, b in zip(found, first))
    return {
        "shape": [chains, draws, variables],
        "dtype": str(dtype)[6:],
        "device": device,
        "ours_s": wall["ours"],
        "arviz_s": wall["peer"],
        "everything_s": wall["everything"],
        "ratio": wall["peer"] / wall["ours"],
        "cpu_ratio": cpu["peer"] / cpu["ours"],
        "error": error,
    }


def ours(variables: int, draws: int = 25_000, chains: int = 4) -> Callable[[int], None]:
    """A runner of `partita bench`: so many evaluations over the same draws."""
    x = autoregression(chains, draws, variables).float()

    def advance(times: int) -> None:
        for _ in range(times):
            diagnostics.diagnose(x, NAMES)

    return advance


def arviz(variables: int, draws: int = 25_000, chains: int = 4) -> Callable[[int], None]:
    from arviz_stats.base import array_stats

    x, axes = autoregression(chains, draws, variables).numpy(), {"chain_axis": 0, "draw_axis": 1}

    def advance(times: int) -> None:
        for _ in range(times):
            array_stats.rhat(x, **axes)
            array_stats.ess(x, method="bulk", **axes)
            array_stats.ess(x, method="tail", prob=diagnostics.TAILS, **axes)

    return advance


def autoregression(chains: int, draws: int, variables: int) -> Tensor:
    """x_t = 0.9 x_{t-1} + e_t, stationary, float64 [C, S, V]."""
    x = torch.randn(chains, draws, variables, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:, 0] /= (1 - PART**2) ** 0.5
    for t in range(1, draws):
        x[:, t] += PART * x[:, t - 1]
    return x


def _clock(f: Callable[[], Any], into: list[tuple[float, float]], x: Tensor) -> Any:
    wall, cpu = time.perf_counter(), time.process_time()
    found = f()
    if x.is_cuda:
        torch.cuda.synchronize()
    into.append((time.perf_counter() - wall, time.process_time() - cpu))
    return found


if __name__ == "__main__":
    wide = torch.float64 if "float64" in sys.argv else torch.float32
    given = dict(zip(("variables", "draws", "chains", "repeats"), map(int, filter(str.isdigit, sys.argv[1:]))))
    for name, value in beside_arviz(**given, dtype=wide).items():  # type: ignore[arg-type]
        print(f"{name:>13} {value}")
