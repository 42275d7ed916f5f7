"""A sampler of the user's own through the table: `partita laws --sampler package.module:name`.

With a method `dynamics(G)` that returns its exact linear dynamics (an `exact.Overdamped`, an `exact.Underdamped`, or
another object with `dynamics(D, T)`) it is held to its finite-step law, as ours are. Without, to the law that every right
sampler has as its step h goes to 0, T P⁻¹, extrapolated from two: m(h) = m + b h + O(h²), so 2 m(h/2) - m(h) = m + O(h²).
"""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from partita.laws import exact
from partita.laws.table import (
    STEPS,
    Cell,
    D,
    Result,
    pairwise_cells,
    reading,
    setting,
    start,
    target_numbers,
)
from partita.laws.table import moments as measured
from partita.runs.checks import check_sampler
from partita.runs.setup import seeded

LONG = 3 * STEPS  # extrapolation doubles the noise
SETTLE = 150  # steps of size h that a sampler may take to forget its start


def load(name: str) -> Any:
    """The sampler that "package.module:name" means: an object, or something to be called without arguments."""
    module, colon, inner = name.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), inner)):
        raise ValueError(f"--sampler is {name!r}, expected package.module:name")
    try:
        found = getattr(importlib.import_module(module), inner)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"--sampler is {name!r}, expected a name that can be imported ({e})") from None
    if isinstance(found, type) or not hasattr(found, "step"):
        try:
            found = found()
        except TypeError as e:
            raise ValueError(
                f"--sampler is {name!r}, expected an object, or a class or function that needs no arguments ({e})"
            ) from None
    check_sampler(found)
    return found


def cells(name: str) -> list[Cell]:
    """The rows of one sampler: joint at every temperature, and those SGLD has in the pairwise cover."""
    joint = [Cell(name, "Joint", temperature=T) for T in (1.0, 0.5, 2.0)]
    return joint + [replace(c, sampler=name) for c in pairwise_cells() if c.sampler == "SGLD" and c.mask != "Joint"]


def small_step(cell: Cell, sampler: Any, seed: int) -> Result:
    """The cell held to its small-step law."""
    target, structure, _, ensemble, law, labels = setting(cell)
    L, mu_lik, prior, mu0 = target_numbers()
    mean = exact.stationary_mean(L, mu_lik, labels, law, prior, mu0)
    try:
        cov = exact.limit_cov(L, labels, law, prior=prior, temperature=cell.temperature, ensemble=ensemble)
    except ValueError:
        return Result(f"{cell} (has no small-step law)", 0.0, "-", 0, 0.0)
    units: list[np.ndarray] = []
    h = sampler.schedule(0, 1)
    for half in (1, 2):
        with seeded(seed + half, "cpu", target):
            plan, state = start(target, structure, sampler, mean, cov, torch.device("cpu"))
            centre = torch.tensor(mean, dtype=torch.float32)
            first, second = measured(plan.step, state, centre, half * LONG, half * SETTLE, rate=h / half)
        units.append(reading(first, second, cov, ensemble or 1))
    return _extrapolated(str(cell), units[0], units[1], cov)


def _extrapolated(name: str, whole: np.ndarray, half: np.ndarray, cov: np.ndarray) -> Result:
    """z of 2 m(h/2) - m(h) over independent units, less what O(h²) may be: with m(h) = m (1 + β h + …) the next term is
    about m β² h² / 2, and |m(h) - m(h/2)| = m β h / 2 says how large that is (twice as much is let through)."""
    upper = np.triu_indices(D)
    sizes = np.sqrt(np.concatenate([np.diag(cov), np.outer(np.diag(cov), np.diag(cov))[upper]]))
    n = len(whole)
    both = 2 * half - whole
    error, spread = both.mean(0), both.std(0, ddof=1) / math.sqrt(n)
    bend = 4 * ((whole - half).mean(0) / sizes) ** 2 * sizes
    z = np.maximum(np.abs(error) - bend, 0) / spread
    worst = int(np.argmax(np.where(np.isfinite(z), z, np.inf)))
    names = [f"mean[{i}]" for i in range(D)] + [f"cov[{i},{j}]" for i, j in zip(*upper)]
    at = float(z[worst]) if np.isfinite(z[worst]) else math.inf
    return Result(name, at, names[worst], len(z), float(np.abs(error / sizes).max()))
