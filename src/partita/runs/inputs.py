"""What the user brings as data, checked and made into batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from partita.engine.batches import Batches, Resident
from partita.runs.checks import whole
from partita.runs.loader import Loader
from partita.target import Batch
from partita.target.pairs import as_pair, check_lengths, check_values, what
from partita.target.trees import leaves, map_tree

DATASET_LIMIT = 4 * 2**30  # bytes: a larger Dataset belongs in a DataLoader


class NoData(Batches):
    """For a Density."""

    N = B = 1
    inside = True

    def draw(self, C: int) -> Batch:
        return None

    look = draw

    def head(self, rows: int) -> Batch:
        return None

    def targets(self) -> Tensor:
        return torch.empty(0)

    def inputs(self, rows: int) -> Iterator[Any]:
        return iter(())


def make_batches(
    data: Any,
    batch_size: int | None,
    device: torch.device,
    needs_data: bool = True,
    dtype: torch.dtype | None = None,
) -> Batches:
    """(x, y) tensors or arrays, a Dataset or a DataLoader -> batches on the device. Floating ARRAYS are cast to `dtype`
    (NumPy makes float64 of everything); tensors stay what their owner made them."""
    if not needs_data:
        if data is not None:
            raise ValueError(f"data is {what(data)}, expected none: a Density takes no data")
        return NoData()
    if data is None:
        raise ValueError("data is None, expected (x, y), a Dataset or a DataLoader")
    if isinstance(data, DataLoader):
        if batch_size is not None:
            raise ValueError(f"batch_size={batch_size} beside a DataLoader, which has its own: expected None")
        return Loader(data, device)
    x, y = _pair(data, dtype)
    n = check_lengths(x, y)
    size = min(n, 128) if batch_size is None else batch_size
    if not whole(size, 1):
        raise ValueError(f"batch_size is {batch_size!r}, expected a whole number of at least 1")
    if size > n:
        raise ValueError(f"batch_size is {size:,} with N = {n:,} data, expected at most N")
    check_values(x, y)
    x, y = map_tree(lambda t: t.to(device), (x, y))
    if device.type == "cuda":  # where convolutions are fastest on images with the channels last
        x = map_tree(lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t, x)
    return Resident(x, y, int(size))


def _pair(data: Any, dtype: torch.dtype | None) -> tuple[Any, Tensor]:
    if isinstance(data, TensorDataset):
        data = data.tensors
    elif isinstance(data, Dataset):
        data = _load(data)
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise ValueError(f"data is {what(data)}, expected a pair (x, y), a Dataset of pairs or a DataLoader")
    return as_pair(data, dtype)


def _load(dataset: Dataset) -> tuple[Any, Any]:
    """A map-style Dataset as tensors."""
    if not hasattr(dataset, "__len__"):
        raise ValueError("the Dataset has no length, expected a map-style one (or a DataLoader of one)")
    n = len(dataset)
    if n < 1:
        raise ValueError(f"the Dataset has {n} rows, expected at least 1")
    row, again = dataset[0], dataset[0]
    if not isinstance(row, (tuple, list)) or len(row) != 2:
        raise ValueError(f"the Dataset gives {what(row)}, expected pairs (x, y)")
    try:
        pair = default_collate([row])
    except TypeError:
        kinds = ", ".join(type(v).__name__ for v in row)
        raise ValueError(f"the Dataset gives pairs of ({kinds}), expected tensors, arrays or numbers") from None
    same = [torch.equal(a, b) for (_, a), (_, b) in zip(leaves(tuple(pair)), leaves(tuple(default_collate([again]))))]
    if not all(same):
        raise ValueError(
            "the Dataset gives another row 0 each time it is asked (a random transform?), expected fixed rows: pass a "
            "DataLoader of it, which is asked anew for every batch"
        )
    size = n * sum(t.numel() * t.element_size() for _, t in leaves(tuple(pair)))
    if size > DATASET_LIMIT:
        raise ValueError(
            f"the Dataset needs {size / 2**30:.1f} GiB as tensors ({n:,} rows), expected at most "
            f"{DATASET_LIMIT / 2**30:.0f}: pass a DataLoader"
        )
    x, y = default_collate([dataset[i] for i in range(n)])
    return x, y
