"""R-hat, bulk and tail ESS beside ArviZ: the same float32 draws, which ArviZ gets as float64, the fastest it takes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from partita.answers import diagnostics

PART = 0.9  # the autoregression of the draws: an IAC of 19


def ours(variables: int) -> Callable[[int], None]:
    """A runner of `partita bench`: so many evaluations over 4 chains x 25,000 draws."""
    x = autoregression(4, 25_000, variables)
    return _repeatedly(lambda: our_values(x))


def arviz(variables: int) -> Callable[[int], None]:
    x = autoregression(4, 25_000, variables).double().numpy()
    return _repeatedly(lambda: arviz_values(x))


def our_values(x: Tensor) -> np.ndarray:
    """x [C, S, V] -> [3, V]: R-hat, bulk and tail ESS."""
    return torch.stack([*diagnostics.diagnose(x, ("rhat", "ess_bulk", "ess_tail")).values()]).numpy()


def arviz_values(x: np.ndarray) -> np.ndarray:
    from arviz_stats.base import array_stats

    axes = {"chain_axis": 0, "draw_axis": 1}
    bulk = array_stats.ess(x, method="bulk", **axes)
    tail = array_stats.ess(x, method="tail", prob=diagnostics.TAILS, **axes)
    return np.stack([array_stats.rhat(x, **axes), bulk, tail])


def autoregression(chains: int, draws: int, variables: int) -> Tensor:
    """x_t = 0.9 x_{t-1} + e_t, stationary, float32 [C, S, V]."""
    x = torch.randn(chains, draws, variables, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:, 0] /= (1 - PART**2) ** 0.5
    for t in range(1, draws):
        x[:, t] += PART * x[:, t - 1]
    return x.float()


def _repeatedly(f: Callable[[], np.ndarray]) -> Callable[[int], None]:
    def advance(times: int) -> None:
        for _ in range(times):
            f()

    return advance
