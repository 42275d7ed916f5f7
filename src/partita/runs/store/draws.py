"""run.samples when it lives on disk: looks like a tensor, reads what is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.runs.store.reader import SampleReader, pick

# what a tensor knows without its numbers
SHAPE = {"size", "dim", "ndimension", "numel", "nelement", "stride", "layout", "element_size", "itemsize", "nbytes"}
KIND = {"is_floating_point", "is_complex", "is_contiguous", "is_cuda", "is_sparse", "requires_grad", "is_leaf", "grad"}
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
OTHERS = ("neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "bool", "float", "int", "contains")


class Draws:
    """The draws of a run [C, S, D]. Indexing reads the part asked for and gives a tensor; whatever else a tensor can do
    (methods, operators, torch's and numpy's functions) is done to all of them, read into memory for that one time."""

    def __init__(self, reader: SampleReader):
        self.reader = reader
        self.shape = torch.Size(reader.shape)
        self.dtype = reader.dtype
        self.device = torch.device("cpu")
        self.ndim = 3

    def tensor(self) -> Tensor:
        """All draws in memory."""
        return self.reader.read(draws=slice(0, self.shape[1]))  # the reader may have been refreshed since

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[c] for c in range(len(self)))

    def __getitem__(self, key: Any) -> Tensor:
        """[chain, draw, column], ints, slices and ..., and one list or vector of numbers, read only what they name."""
        keys = [k.item() if _is_number(k) else k for k in (key if isinstance(key, tuple) else (key,))]
        gaps = [i for i, k in enumerate(keys) if k is Ellipsis]
        if len(gaps) == 1:
            keys[gaps[0] : gaps[0] + 1] = [slice(None)] * (4 - len(keys))
        keys += [slice(None)] * (3 - len(keys))
        others = [k for k in keys if not isinstance(k, slice) and not _is_int(k)]
        if len(keys) != 3 or len(others) > 1 or not all(map(_is_vector, others)):
            return self.tensor()[key]
        names = zip(keys, self.shape, ("chain", "draw", "column"))
        parts = [range(n)[k] if isinstance(k, slice) else pick(k, n, what) for k, n, what in names]
        return self.reader.read(*parts)[tuple(0 if _is_int(k) else slice(None) for k in keys)]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in SHAPE | KIND:
            return getattr(torch.empty(self.shape, dtype=self.dtype, device="meta"), name)
        if not hasattr(Tensor, name):
            raise AttributeError(f"'Draws' object has no attribute {name!r}")
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*_read(args), **_read(kwargs or {}))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.tensor().numpy(), dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.tensor().__dlpack__(**kwargs)  # torch.as_tensor

    def __dlpack_device__(self) -> Any:
        return torch.empty(0).__dlpack_device__()

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        C, S, D = self.shape
        size = C * S * D * self.reader.stored.itemsize / 2**30
        return f"Draws({C} chains x {S:,} draws x {D:,} parameters, {self.dtype}, {size:.3g} GiB on disk)"


def _operator(name: str) -> Callable:
    def of_all(self: Draws, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*_read(args))

    return of_all


for _name in (*ARITHMETIC, *(f"r{name}" for name in ARITHMETIC), *OTHERS):
    setattr(Draws, f"__{_name}__", _operator(f"__{_name}__"))


def _read(value: Any) -> Any:
    """The same with all draws in the place of each Draws."""
    if isinstance(value, Draws):
        return value.tensor()
    if isinstance(value, list | tuple):
        return type(value)(_read(v) for v in value) if type(value) in (list, tuple) else value
    return {k: _read(v) for k, v in value.items()} if isinstance(value, dict) else value


def _is_number(key: Any) -> bool:
    """A tensor or array that stands for one int."""
    whole = str(getattr(key, "dtype", "")).removeprefix("torch.").startswith(("int", "uint16", "uint32", "uint64"))
    return isinstance(key, Tensor | np.ndarray) and key.ndim == 0 and whole


def _is_int(key: Any) -> bool:
    return hasattr(key, "__index__") and not isinstance(key, bool | Tensor | np.ndarray)


def _is_vector(key: Any) -> bool:
    if isinstance(key, list):
        return all(map(_is_int, key))
    return isinstance(key, Tensor | np.ndarray) and key.ndim == 1 and not str(key.dtype).endswith("uint8")  # a mask
