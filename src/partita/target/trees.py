"""Inputs may be a tensor or tuples, lists and dicts of tensors: the few functions that walk them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def short(value: Any) -> str:
    """A value for messages, in a line."""
    said = " ".join(repr(value).split())
    return said if len(said) <= 80 else f"a {type(value).__name__}"


def map_tree(f: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """f applied to every tensor, the nesting kept."""
    if isinstance(tree, Mapping):
        return {k: map_tree(f, v) for k, v in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(map_tree(f, v) for v in tree)
    return f(tree)


def leaves(tree: Any, path: str = "x") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its path, for messages."""
    if isinstance(tree, Mapping):
        for k, v in tree.items():
            yield from leaves(v, f"{path}[{k!r}]")
    elif isinstance(tree, (tuple, list)):
        for i, v in enumerate(tree):
            yield from leaves(v, f"{path}[{i}]")
    else:
        yield path, tree


def zip_trees(f: Callable[[list[Tensor]], Tensor], trees: list[Any]) -> Any:
    """f applied to the list of corresponding tensors of trees of one shape."""
    first = trees[0]
    if isinstance(first, Mapping):
        return {k: zip_trees(f, [t[k] for t in trees]) for k in first}
    if isinstance(first, (tuple, list)):
        return tuple(zip_trees(f, [t[i] for t in trees]) for i in range(len(first)))
    return f(trees)


def as_tensors(tree: Any, path: str = "x", dtype: torch.dtype | None = None) -> Any:
    """NumPy arrays become tensors, floating ones of `dtype`; anything else than tensors, arrays and their nestings is
    refused."""
    if isinstance(tree, Mapping):
        return {k: as_tensors(v, f"{path}[{k!r}]", dtype) for k, v in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(as_tensors(v, f"{path}[{i}]", dtype) for i, v in enumerate(tree))
    if isinstance(tree, np.ndarray):
        made = _from_numpy(tree, path)
        return made.to(dtype) if dtype is not None and made.is_floating_point() else made
    if not isinstance(tree, Tensor):
        raise ValueError(f"{path} is a {type(tree).__name__}, expected a tensor, an array, or tuples or dicts of them")
    return tree.clone() if tree.is_inference() else tree  # no gradient can pass inference tensors


def _from_numpy(a: np.ndarray, path: str) -> Tensor:
    """Without a copy where torch can share it: not of arrays that are read-only, reversed or in foreign byte order."""
    if a.dtype.kind not in "biufc":
        raise ValueError(f"{path} is an array of dtype {a.dtype}, expected numbers")
    native = a.astype(a.dtype.newbyteorder("="), copy=False)
    if not native.flags.writeable or any(s < 0 for s in native.strides):
        native = native.copy()
    try:
        return torch.from_numpy(native)
    except TypeError:
        raise ValueError(f"{path} is an array of dtype {a.dtype}, expected one that torch has too") from None


def rows(tree: Any) -> int:
    """The length of the first axis."""
    return int(next(leaves(tree))[1].shape[0])
