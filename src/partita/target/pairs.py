"""The pair (x, y) every batch is: as tensors, of one length, on one device, finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from partita.target.trees import as_tensors, leaves


def as_pair(pair: Any, dtype: torch.dtype | None = None) -> tuple[Any, Tensor]:
    """x and y as tensors; floating arrays become `dtype`."""
    x, y = as_tensors(pair[0], "x", dtype), as_tensors(pair[1], "y", dtype)
    if not isinstance(y, Tensor):
        raise ValueError(f"y is {what(y)}, expected one tensor")
    return x, y


def what(data: Any) -> str:
    return f"a {type(data).__name__}{f' of {len(data)}' if isinstance(data, (tuple, list)) else ''}"


def check_lengths(x: Any, y: Tensor) -> int:
    sizes = {path: (int(t.shape[0]) if t.dim() else 0) for path, t in (*leaves(x), ("y", y))}
    if len(set(sizes.values())) != 1 or min(sizes.values()) < 1:
        raise ValueError(f"the data have unequal or no rows: {sizes}, expected one N of at least 1 for all")
    devices = {path: str(t.device) for path, t in (*leaves(x), ("y", y))}
    if len(set(devices.values())) != 1:
        raise ValueError(f"mixed devices: {devices}, expected one device for all the data")
    return int(y.shape[0])


def check_values(x: Any, y: Tensor) -> None:
    for path, t in (*leaves(x), ("y", y)):
        if t.dtype.is_floating_point and not bool(t.isfinite().all()):
            bad = (~t.isfinite()).reshape(t.shape[0], -1).any(1)
            row = int(bad.nonzero()[0])
            raise ValueError(
                f"{path} holds NaN or inf in {int(bad.sum()):,} of {t.shape[0]:,} rows (first: {row}), expected "
                "finite numbers"
            )
