"""What the arguments of a run may be. Every refusal is one line that names what came and what was expected."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from partita.runs.choose import MODES, PRECISIONS


def whole(value: Any, least: int) -> bool:
    """A whole number of at least `least`; True and False are not numbers here."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def number(value: Any) -> bool:
    """A finite real number."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def check_target(target: Any) -> None:
    if isinstance(target, type) or not hasattr(target, "likelihood_energy"):
        came = f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__name__}"
        raise ValueError(f"the target is {came}, expected pt.Posterior(...) or pt.Density(...)")


def check_sampler(sampler: Any) -> None:
    if isinstance(sampler, type) or not hasattr(sampler, "heat"):
        came = sampler if isinstance(sampler, type) else f"a {type(sampler).__name__}"
        raise ValueError(f"sampler is {came}, expected for example pt.SGLD(step_size=1e-4)")


def check_choices(monitor_every: Any, engine: Any, precision: Any, augment: Any, keep: Any, progress: Any) -> None:
    if monitor_every is not None and not whole(monitor_every, 1):
        raise ValueError(f"monitor_every is {monitor_every!r}, expected a whole number of at least 1")
    if engine not in MODES:
        raise ValueError(f"engine is {engine!r}, expected one of {MODES}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}, expected one of {PRECISIONS}")
    if augment is not None and (isinstance(augment, type) or not callable(augment)):
        raise ValueError(f"augment is {augment!r}, expected a function x [C, B, ...] -> x: pt.data.CropFlip()")
    if keep not in ("auto", "all"):
        raise ValueError(f"keep is {keep!r}, expected 'auto' or 'all'")
    if progress not in (None, True, False):
        raise ValueError(f"progress is {progress!r}, expected True, False or None (where it can be seen)")


def lengths(steps: Any, burn_in: Any, thin: Any) -> tuple[int, int, int | None]:
    """steps, burn_in (default: a quarter) and thin, when they fit one another."""
    if not whole(steps, 1):
        raise ValueError(f"steps is {steps!r}, expected a whole number of at least 1")
    burn = steps // 4 if burn_in is None else burn_in
    if not whole(burn, 0) or burn >= steps:
        raise ValueError(f"burn_in is {burn_in!r}, expected a whole number from 0 to steps - 1 = {steps - 1:,}")
    if thin is not None and (not whole(thin, 1) or thin > steps - burn):
        raise ValueError(f"thin is {thin!r}, expected a whole number from 1 to steps - burn_in = {steps - burn:,}")
    return steps, burn, thin


def gib(n: int) -> str:
    return f"{n / 2**30:.3g} GiB"
