"""Partitions: which coordinates of θ stay together. A partition is a function space -> one label per coordinate.

    joint()                    one group                       by_layer()     one a layer
    by_neuron(side="out")      one an output neuron (a conv's neuron is its channel), or an input one with side="in"
    random(M, seed)            M groups of equal size at random             cyclic(M)   coordinate i in group i mod M
    each()                     every coordinate alone
    by_name({pattern: label})  labels by name pattern          from_labels(labels)      your own, [D]

The groups of `space` cut by a partition p: `p.groups(space)`. A likelihood's own parameters (a learned scale) always
get a group of their own, except under joint, by_name and from_labels, which say it all.
"""

from __future__ import annotations

import bisect
import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

import torch
from torch import Tensor


class Space(Protocol):
    """What a partition reads of a parameter space: its blocks (name, shape, start, stop, size, layer, out_axis, groups)."""

    @property
    def dim(self) -> int: ...

    @property
    def blocks(self) -> Sequence[Any]: ...


@dataclass(frozen=True)
class Groups:
    """A partition of one space: labels [D] in 0..M-1, M = `count`, and the name of group i."""

    labels: Tensor
    count: int
    name: Callable[[int], str]

    @property
    def sizes(self) -> list[int]:
        return torch.bincount(self.labels, minlength=self.count).tolist()

    def describe(self, most: int = 12) -> str:
        """A line per group with its size; the middle of a long list is left out."""
        sizes, m = torch.bincount(self.labels, minlength=self.count), self.count
        total, least, largest = self.labels.numel(), int(sizes.min()), int(sizes.max())
        head = f"{m:,} group{'s' * (m != 1)} over {total:,} parameters (sizes {least:,} to {largest:,})"
        shown = list(range(m)) if m <= most else [*range(most - 2), m - 1]
        width = max(len(self.name(i)) for i in shown)
        lines = [f"  {i:>{len(str(m - 1))}}  {self.name(i):<{width}}  {int(sizes[i]):>9,}" for i in shown]
        if m > most:
            lines.insert(-1, f"  … {m - len(shown):,} more")
        return "\n".join([head, *lines])


@dataclass(frozen=True)
class Partition:
    """A named rule that cuts any space into groups."""

    name: str
    rule: Callable[[Space], Groups]

    def groups(self, space: Space) -> Groups:
        groups = self.rule(space)
        assert groups.labels.shape == (space.dim,)
        sizes = torch.bincount(groups.labels, minlength=groups.count)
        assert sizes.numel() == groups.count
        assert bool(sizes.all())
        return groups

    def describe(self, space: Space) -> str:
        """Groups and sizes over posterior.space (or a posterior, which has one)."""
        space = getattr(space, "space", space)
        if not hasattr(space, "blocks"):
            raise ValueError(f"describe got a {type(space).__name__}, expected posterior.space")
        return f"{self.name}: {self.groups(space).describe()}"

    def __repr__(self) -> str:
        return self.name


def joint() -> Partition:
    return Partition("joint()", lambda s: Groups(torch.zeros(s.dim, dtype=torch.long), 1, lambda i: "all"))


def by_layer() -> Partition:
    return Partition("by_layer()", lambda s: _by_key(s, lambda b: _whole(b, b.layer)))


def by_neuron(side: str = "out") -> Partition:
    if side not in ("out", "in"):
        raise ValueError(f"by_neuron got side={side!r}, expected 'out' or 'in'")

    def keys(b: Any) -> Keys:
        if len(b.shape) == 0:
            return _whole(b, b.name)
        if len(b.shape) == 1 and side == "in":  # no input neuron owns a bias
            return _whole(b, f"{b.layer}.bias")
        axis = (b.out_axis if side == "out" else 1 - b.out_axis) if len(b.shape) > 1 else 0
        index = torch.arange(b.shape[axis]).reshape([-1 if a == axis else 1 for a in range(len(b.shape))])
        count = b.shape[axis]
        if axis == 1 and b.groups > 1:  # a grouped convolution counts axis 1 anew in each group of axis 0
            part = torch.arange(b.shape[0]) // (b.shape[0] // b.groups)
            index = index + count * part.reshape([-1] + [1] * (len(b.shape) - 1))
            count *= b.groups
        # the inputs of two matrices of one layer (an RNN's x and h) are different neurons, their outputs the same ones
        owner = b.layer if side == "out" else b.name
        first = count * _THIRDS.get(b.name.rpartition(".")[2], 0) if side == "out" else 0
        return [f"{owner}[{first + i}]" for i in range(count)], index.expand(b.shape).reshape(-1)

    return Partition(f"by_neuron(side={side!r})", lambda s: _by_key(s, keys))


def random(M: int, seed: int = 0) -> Partition:
    """M groups whose sizes differ by at most one, dealt at random."""
    _check_count("random", M)

    def deal(n: int) -> Tensor:
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        labels = torch.empty(n, dtype=torch.long)
        labels[order] = torch.arange(n) % M
        return labels

    return Partition(f"random(M={M}, seed={seed})", lambda s: _dealt(s, M, deal))


def cyclic(M: int) -> Partition:
    _check_count("cyclic", M)
    return Partition(f"cyclic(M={M})", lambda s: _dealt(s, M, lambda n: torch.arange(n) % M))


def each() -> Partition:
    def rule(s: Space) -> Groups:
        starts = [b.start for b in s.blocks]

        def name(i: int) -> str:
            block = s.blocks[bisect.bisect_right(starts, i) - 1]
            return f"{block.name}[{i - block.start}]"

        return Groups(torch.arange(s.dim), s.dim, name)

    return Partition("each()", rule)


def by_name(labels: Mapping[str, Any]) -> Partition:
    """{pattern: group}: groups by shell-style name pattern; the first pattern that matches a parameter decides."""
    if not isinstance(labels, Mapping) or not labels:
        raise ValueError(
            f'by_name got {labels!r}, expected {{pattern: group}} such as {{"*.weight": "w", "*.bias": "b"}}'
        )

    def rule(s: Space) -> Groups:
        names = [b.name for b in s.blocks]
        found = {n: next((p for p in labels if fnmatch.fnmatchcase(n, p)), None) for n in names}
        unmatched = [n for n, p in found.items() if p is None]
        unused = [p for p in labels if p not in found.values()]
        if unmatched or unused:
            raise ValueError(
                f"by_name: patterns that decide nothing {unused}, parameters without a group {unmatched[:8]}; "
                f"got patterns {list(labels)}, expected every parameter of {names[:8]} to match one{_close(unused, names)}"
            )
        return _by_key(s, lambda b: _whole(b, str(labels[found[b.name] or ""])), own_group=False)

    return Partition(f"by_name({dict(labels)!r})", rule)


def from_labels(labels: Tensor | Sequence[int]) -> Partition:
    """Your own labels, [D], which must use every number from 0 to M - 1."""
    try:
        given = torch.as_tensor(labels).clone()
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(
            f"from_labels got a {type(labels).__name__} that is no tensor, expected whole numbers [D]"
        ) from None

    def rule(s: Space) -> Groups:
        if given.dtype.is_floating_point or given.is_complex() or given.dtype == torch.bool or given.shape != (s.dim,):
            raise ValueError(
                f"from_labels got {given.dtype} of shape {tuple(given.shape)}, expected integers [D] = [{s.dim}]"
            )
        used = given.unique().tolist()
        wanted = list(range(len(used)))
        if used != wanted:
            missing, extra = _short(sorted({*wanted} - {*used})), _short(sorted({*used} - {*wanted}))
            raise ValueError(
                f"from_labels got labels with gaps: {_short(used)}, expected {_short(wanted)} (0 to M - 1 for their "
                f"M = {len(used)} values); missing {missing}, unexpected {extra}"
            )
        return Groups(given.long().clone(), len(used), str)

    return Partition(f"from_labels([{given.numel()}])", rule)


Keys = tuple[list[str], Tensor]  # the names of a block's groups, and for each of its coordinates the place in that list
_THIRDS = {"k_proj_weight": 1, "v_proj_weight": 2}  # of MultiheadAttention's in_proj_bias: where their neurons begin


def _whole(b: Any, key: str) -> Keys:
    return [key], torch.zeros(b.size, dtype=torch.long)


def _by_key(s: Space, keys: Callable[[Any], Keys], own_group: bool = True) -> Groups:
    """Groups of equal keys, numbered in order of first appearance."""
    number: dict[str, int] = {}
    labels = []
    for b in s.blocks:
        names, local = _whole(b, b.name) if own_group and b.name.startswith("likelihood.") else keys(b)
        labels.append(torch.tensor([number.setdefault(k, len(number)) for k in names])[local])
    # what lies at the module's root has no path; "model" only as it is shown, since a submodule may be called that
    shown = ["model" + k if own_group and k[:1] in ("", "[", ".") else k for k in number]
    return Groups(torch.cat(labels), len(number), shown.__getitem__)


def _dealt(s: Space, M: int, deal: Callable[[int], Tensor]) -> Groups:
    own = [b for b in s.blocks if b.name.startswith("likelihood.")]
    rest = torch.ones(s.dim, dtype=torch.bool)
    for b in own:
        rest[b.start : b.stop] = False
    n = int(rest.sum())
    if n < M:
        raise ValueError(f"a partition into M={M!r} groups does not fit: expected a whole number from 1 to {n}")
    labels = torch.empty(s.dim, dtype=torch.long)
    labels[rest] = deal(n)
    for i, b in enumerate(own):
        labels[b.start : b.stop] = M + i
    return Groups(labels, M + len(own), lambda i: str(i) if i < M else own[i - M].name)


def _close(patterns: Sequence[str], names: Sequence[str]) -> str:
    """Names close to patterns that match none."""
    found = {n for p in patterns for n in difflib.get_close_matches(p, names, n=2, cutoff=0.6)}
    return f" (close: {', '.join(sorted(found))})" if found else ""


def _check_count(who: str, M: object) -> None:
    if not isinstance(M, Integral) or isinstance(M, bool) or M < 1:
        raise ValueError(f"{who} got M={M!r}, expected a whole number of at least 1")


def _short(numbers: list[int]) -> str:
    return "{" + ", ".join(map(str, numbers if len(numbers) <= 12 else [*numbers[:11], "…"])) + "}"
