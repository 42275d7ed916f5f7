"""Minibatches for C chains, each its own: (x, y) with leaves [C, B, ...].

Resident data lies on the device and rows are drawn with replacement inside the step, so the batch position is the
random state and nothing else; a batch of all N rows is the data itself, without noise. A DataLoader supplies C batches
a step, one for each chain.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset, default_collate

from partita.target import Batch
from partita.target.trees import as_tensors, leaves, map_tree, zip_trees

HEAD = 64  # rows looked at before a run
RECALIBRATE = 2048  # rows BatchNorm statistics are recomputed from
DATASET_LIMIT = 4 * 2**30  # bytes: a larger Dataset belongs in a DataLoader


class Batches(Protocol):
    N: int
    B: int

    def draw(self, C: int) -> Batch:
        """(x, y), leaves [C, B, ...]; None without data."""

    def look(self, C: int) -> Batch:
        """The same to look at: data that later draws give do not depend on it."""

    def head(self, rows: int) -> Batch:
        """The first rows, without a chain axis."""

    def targets(self) -> Tensor:
        """Every target that can be looked at beforehand."""

    def inputs(self, rows: int) -> Iterator[Any]:
        """About `rows` inputs in batches of B, always the same ones (to recalibrate BatchNorm with)."""


class NoData:
    """For a Density."""

    N = B = 1

    def draw(self, C: int) -> Batch:
        return None

    look = draw

    def head(self, rows: int) -> Batch:
        return None

    def targets(self) -> Tensor:
        return torch.empty(0)

    def inputs(self, rows: int) -> Iterator[Any]:
        return iter(())


class Resident:
    """Tensors on the device; B of N rows with replacement, or all of them."""

    def __init__(self, x: Any, y: Tensor, batch_size: int):
        self.x, self.y, self.N, self.B = x, y, int(y.shape[0]), batch_size

    def draw(self, C: int) -> Batch:
        if self.B == self.N:
            return map_tree(lambda t: t.expand(C, *t.shape), (self.x, self.y))
        index = torch.randint(self.N, (C, self.B), device=self.y.device)
        return map_tree(lambda t: t[index], (self.x, self.y))

    look = draw  # the caller keeps the random state

    def head(self, rows: int) -> Batch:
        return map_tree(lambda t: t[:rows], (self.x, self.y))

    def targets(self) -> Tensor:
        return self.y

    def inputs(self, rows: int) -> Iterator[Any]:
        stop = min(rows, self.N)
        whole = max(stop // self.B, 1) * self.B  # batches of one size, so that each counts the same
        for a in range(0, whole, self.B):
            yield map_tree(lambda t, a=a: t[a : a + self.B], self.x)  # type: ignore[misc]


class Loader:
    """A DataLoader of (x, y) pairs, gone through again and again; short last batches are left out."""

    def __init__(self, loader: DataLoader, device: torch.device):
        try:
            self.N = len(loader.dataset)  # type: ignore[arg-type]
        except TypeError:
            raise ValueError("the DataLoader's dataset has no length, expected one: N scales the likelihood") from None
        if loader.batch_sampler is None and not isinstance(loader.sampler, BatchSampler):
            raise ValueError("the DataLoader has batch_size=None, expected one that makes batches of single rows")
        if isinstance(getattr(loader.batch_sampler, "sampler", None), SequentialSampler):
            warnings.warn("the DataLoader does not shuffle: batches come in the data's own order", stacklevel=4)
        self.loader, self.device, self.B = loader, device, 0
        self._stream = self._forever()
        self._first = next(self._stream)
        self._stream = chain([self._first], self._stream)
        self._last = [self._first]
        self._inputs: list[Any] = []

    def draw(self, C: int) -> Batch:
        self._last = list(islice(self._stream, C))
        return zip_trees(torch.stack, self._last)

    def look(self, C: int) -> Batch:
        """The last batches drawn, once more."""
        return zip_trees(torch.stack, list(islice(cycle(self._last), C)))

    def head(self, rows: int) -> Batch:
        return map_tree(lambda t: t[:rows], self._first)

    def targets(self) -> Tensor:
        return self._first[1]

    def inputs(self, rows: int) -> Iterator[Any]:
        """Looked up once and put back: a second pass beside the first would move the loader's random state."""
        if not self._inputs:
            ahead = list(islice(self._stream, max(rows // self.B, 1)))
            self._stream = chain(ahead, self._stream)
            self._inputs = [x for x, _ in ahead]
        return iter(self._inputs)

    def _pair(self, batch: Any) -> tuple[Any, Tensor]:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(f"the DataLoader gives {_what(batch)}, expected pairs (x, y)")
        x, y = _as_pair(batch)
        _check_lengths(x, y)
        return map_tree(lambda t: t.to(self.device, non_blocking=True), (x, y))

    def _forever(self) -> Iterator[tuple[Any, Tensor]]:
        while True:
            full = 0
            for batch in self.loader:
                x, y = self._pair(batch)
                self.B = self.B or int(y.shape[0])
                if y.shape[0] == self.B:
                    full += 1
                    yield x, y
            if not full:
                raise ValueError(
                    f"the DataLoader gives no full batch in a pass over its N = {self.N:,} data, expected at least one"
                )


def make_batches(data: Any, batch_size: int | None, device: torch.device, needs_data: bool = True) -> Batches:
    """(x, y) tensors or arrays, a Dataset or a DataLoader -> batches on the device."""
    if not needs_data:
        if data is not None:
            raise ValueError(f"data is {_what(data)}, expected none: a Density takes no data")
        return NoData()
    if data is None:
        raise ValueError("data is None, expected (x, y), a Dataset or a DataLoader")
    if isinstance(data, DataLoader):
        if batch_size is not None:
            raise ValueError(f"batch_size={batch_size} beside a DataLoader, which has its own: expected None")
        loader = Loader(data, device)
        _check_values(*loader._first)
        return loader
    x, y = _pair(data)
    n = _check_lengths(x, y)
    size = min(n, 128) if batch_size is None else batch_size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"batch_size is {batch_size!r}, expected a whole number of at least 1")
    if size > n:
        raise ValueError(f"batch_size is {size:,} with N = {n:,} data, expected at most N")
    _check_values(x, y)
    x, y = map_tree(lambda t: t.to(device), (x, y))
    return Resident(x, y, size)


def _pair(data: Any) -> tuple[Any, Tensor]:
    if isinstance(data, TensorDataset):
        data = data.tensors
    elif isinstance(data, Dataset):
        data = _load(data)
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise ValueError(f"data is {_what(data)}, expected a pair (x, y), a Dataset of pairs or a DataLoader")
    return _as_pair(data)


def _as_pair(pair: Any) -> tuple[Any, Tensor]:
    x, y = as_tensors(pair[0], "x"), as_tensors(pair[1], "y")
    if not isinstance(y, Tensor):
        raise ValueError(f"y is {_what(y)}, expected one tensor")
    return x, y


def _load(dataset: Dataset) -> tuple[Any, Any]:
    """A map-style Dataset as tensors."""
    if not hasattr(dataset, "__len__"):
        raise ValueError("the Dataset has no length, expected a map-style one (or a DataLoader of one)")
    n = len(dataset)
    if n < 1:
        raise ValueError(f"the Dataset has {n} rows, expected at least 1")
    row = dataset[0]
    if not isinstance(row, (tuple, list)) or len(row) != 2:
        raise ValueError(f"the Dataset gives {_what(row)}, expected pairs (x, y)")
    try:
        pair = default_collate([row])
    except TypeError:
        kinds = ", ".join(type(v).__name__ for v in row)
        raise ValueError(f"the Dataset gives pairs of ({kinds}), expected tensors, arrays or numbers") from None
    size = n * sum(t.numel() * t.element_size() for _, t in leaves(tuple(pair)))
    if size > DATASET_LIMIT:
        raise ValueError(
            f"the Dataset needs {size / 2**30:.1f} GiB as tensors ({n:,} rows), expected at most "
            f"{DATASET_LIMIT / 2**30:.0f}: pass a DataLoader"
        )
    x, y = default_collate([dataset[i] for i in range(n)])
    return x, y


def _what(data: Any) -> str:
    return f"a {type(data).__name__}{f' of {len(data)}' if isinstance(data, (tuple, list)) else ''}"


def _check_lengths(x: Any, y: Tensor) -> int:
    sizes = {path: (int(t.shape[0]) if t.dim() else 0) for path, t in (*leaves(x), ("y", y))}
    if len(set(sizes.values())) != 1 or min(sizes.values()) < 1:
        raise ValueError(f"the data have unequal or no rows: {sizes}, expected one N of at least 1 for all")
    devices = {path: str(t.device) for path, t in (*leaves(x), ("y", y))}
    if len(set(devices.values())) != 1:
        raise ValueError(f"mixed devices: {devices}, expected one device for all the data")
    return int(y.shape[0])


def _check_values(x: Any, y: Tensor) -> None:
    for path, t in (*leaves(x), ("y", y)):
        if t.dtype.is_floating_point and not bool(t.isfinite().all()):
            bad = (~t.isfinite()).reshape(t.shape[0], -1).any(1)
            row = int(bad.nonzero()[0])
            raise ValueError(
                f"{path} holds NaN or inf in {int(bad.sum()):,} of {t.shape[0]:,} rows (first: {row}), expected "
                "finite numbers"
            )
