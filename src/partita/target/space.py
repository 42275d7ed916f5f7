"""ParameterSpace: named tensors <-> one flat vector θ ∈ R^D.

Shapes: θ [D] or [..., D]; a tree is {name: [..., *shape]}. Nothing here knows what a likelihood or a chain is.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_PARAMETRIZED = re.compile(r"(^|\.)parametrizations\.(\w+)\.original\d*$")
_RNN_LEAF = re.compile(r"_(l\d+(?:_reverse)?)$")
LIKELIHOOD = "likelihood."
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Block:
    """One named tensor inside θ: θ[start : start + size] viewed as `shape`, cast to `dtype`.

    `layer` is the module (or RNN sub-layer) that owns it, `out_axis` the axis its output neurons lie on, and
    `is_norm_scale` marks the γ of a normalisation layer, whose natural centre is 1.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    layer: str
    out_axis: int = 0
    is_norm_scale: bool = False
    groups: int = 1  # of a grouped convolution: axis 1 then counts within a group

    @property
    def size(self) -> int:
        return int(torch.Size(self.shape).numel())

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def fan_in(self) -> int:
        """Inputs that feed one output neuron; 1 for vectors and scalars (biases, scales)."""
        if len(self.shape) < 2:
            return 1
        return self.size // self.shape[self.out_axis] // (self.groups if self.out_axis == 1 else 1)


class ParameterSpace:
    """The map between θ ∈ R^D and named tensors, and nothing else."""

    def __init__(self, blocks: Sequence[Block], values: Tensor):
        if not blocks:
            raise ValueError("nothing is random: got no parameter to sample, expected at least one")
        self.blocks = tuple(blocks)
        self.names = tuple(b.name for b in self.blocks)
        self.sizes = [b.size for b in self.blocks]
        self.values = values.detach().clone()
        self.dim = int(values.numel())
        assert sum(self.sizes) == self.dim

    @classmethod
    def of_module(cls, module: nn.Module, random: str | Iterable[str] | None = None) -> ParameterSpace:
        """θ = the trainable parameters of `module`, or those whose names match a pattern; tied ones count once."""
        parameters = dict(module.named_parameters())  # each tensor once, under its first name
        first = {id(p): n for n, p in parameters.items()}
        for name, p in parameters.items():
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise ValueError(
                    f"parameter {name!r} is lazy and has no shape yet, expected one: call the module once first"
                )
        if random is None:
            chosen = [n for n, p in parameters.items() if p.requires_grad]
        else:
            patterns = (
                [random] if isinstance(random, str) else list(random) if isinstance(random, Iterable) else [random]
            )
            if not patterns or not all(isinstance(p, str) for p in patterns):
                got = " ".join(reprlib.repr(random).split())
                raise ValueError(f"random is {got}, expected a name pattern such as 'head.*', or several")
            every = dict(module.named_parameters(remove_duplicate=False))
            hit = {first[id(every[n])] for n in match_names(patterns, list(every))}
            chosen = [n for n in parameters if n in hit]
        if not chosen:
            raise ValueError(
                f"no random parameter: got a {type(module).__name__} with {len(parameters)} parameters and none "
                "trainable, expected at least one with requires_grad=True"
            )
        for name in chosen:
            if not parameters[name].dtype.is_floating_point:
                raise ValueError(f"parameter {name!r} is {parameters[name].dtype}, expected a real floating dtype")
        devices = {str(p.device) for p in parameters.values()}
        if len(devices) > 1:
            raise ValueError(f"mixed devices: the module's parameters lie on {sorted(devices)}, expected one device")
        return cls.of_tensors({n: parameters[n].detach() for n in chosen}, owners=dict(module.named_modules()))

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], owners: Mapping[str, nn.Module] | None = None) -> ParameterSpace:
        """θ = these tensors, in this order. θ is float64 when one of them is, else float32."""
        dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors.values()) else torch.float32
        blocks, start = [], 0
        for name, t in tensors.items():
            owner = (owners or {}).get(_plain(name).rpartition(".")[0])
            block = Block(name, tuple(t.shape), t.dtype, start, layer_of(name), groups=getattr(owner, "groups", 1))
            block = replace(
                block, out_axis=_out_axis(owner, block.shape), is_norm_scale=_is_norm_scale(owner, name, block.shape)
            )
            blocks.append(block)
            start += block.size
        flat = [t.detach().reshape(-1).to(dtype) for t in tensors.values()]
        return cls(blocks, torch.cat(flat) if flat else torch.empty(0))

    def extend(self, tensors: Mapping[str, Tensor]) -> ParameterSpace:
        """The same space with more tensors at its end."""
        if not tensors:
            return self
        if twice := set(self.names) & set(tensors):
            raise ValueError(f"the names {sorted(twice)} are taken by the module: got them twice, expected new ones")
        blocks, start, flat = list(self.blocks), self.dim, [self.values]
        for name, t in tensors.items():
            blocks.append(Block(name, tuple(t.shape), self.values.dtype, start, layer_of(name)))
            start += blocks[-1].size
            flat.append(t.detach().reshape(-1).to(self.values))
        return ParameterSpace(blocks, torch.cat(flat))

    def tree(self, theta: Tensor) -> dict[str, Tensor]:
        """θ [..., D] -> {name: [..., *shape]}. One split, because its backward is one cat."""
        if theta.shape[-1] != self.dim:
            raise ValueError(f"theta has {theta.shape[-1]} entries in its last axis, expected D = {self.dim}")
        lead = theta.shape[:-1]
        parts = theta.split(self.sizes, dim=-1)
        return {b.name: p.reshape((*lead, *b.shape)).to(b.dtype) for b, p in zip(self.blocks, parts)}

    def flatten(self, tree: Mapping[str, Tensor]) -> Tensor:
        """{name: [..., *shape]} -> θ [..., D]."""
        missing, extra = set(self.names) - set(tree), set(tree) - set(self.names)
        if missing or extra:
            raise ValueError(f"names do not match: missing {sorted(missing)}, unexpected {sorted(extra)}")
        parts = []
        for b in self.blocks:
            t = tree[b.name]
            lead = t.shape[: t.dim() - len(b.shape)]
            if tuple(t.shape[len(lead) :]) != b.shape:
                want = ", ".join(["...", *map(str, b.shape)])
                raise ValueError(f"{b.name!r} has shape {tuple(t.shape)}, expected [{want}]")
            parts.append(t.reshape(*lead, b.size).to(self.values.dtype))
        return torch.cat(parts, dim=-1)

    def select(self, patterns: str | Iterable[str]) -> list[Block]:
        """The blocks whose names match any of the patterns (where one matches none, the error has close names)."""
        names = match_names([patterns] if isinstance(patterns, str) else list(patterns), list(self.names))
        return [b for b in self.blocks if b.name in set(names)]

    def __repr__(self) -> str:
        return f"ParameterSpace(dim={self.dim:,}, blocks={len(self.blocks)})"


def match_names(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """The names that match at least one shell-style pattern, in their own order; every pattern must match something."""
    hit: set[str] = set()
    for pattern in patterns:
        found = fnmatch.filter(names, pattern)
        if not found:
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or list(names)[:3]
            raise ValueError(f"no parameter matches {pattern!r}, expected a name such as {', '.join(close)}")
        hit.update(found)
    return [n for n in names if n in hit]


def layer_of(name: str) -> str:
    """The layer a parameter belongs to: its module's path, and inside an RNN its own sub-layer ("lstm.l0")."""
    path, _, leaf = _plain(name).rpartition(".")
    rnn = _RNN_LEAF.search(leaf)
    parts = [path, rnn.group(1)] if rnn else [path]
    return ".".join(p for p in parts if p)


def _plain(name: str) -> str:
    """The name of a parametrised tensor as if it were not: a.parametrizations.weight.original0 -> a.weight."""
    return _PARAMETRIZED.sub(r"\1\2", name)


def _is_norm_scale(owner: nn.Module | None, name: str, shape: tuple[int, ...]) -> bool:
    if owner is None or name.rpartition(".")[2] != "weight":
        return False
    return isinstance(owner, _NORMS) or ("norm" in type(owner).__name__.lower() and len(shape) == 1)


def _out_axis(owner: nn.Module | None, shape: tuple[int, ...]) -> int:
    """PyTorch stores weights [out, in, ...], but those of transposed convolutions [in, out, ...]."""
    return 1 if owner is not None and "ConvTranspose" in type(owner).__name__ and len(shape) > 1 else 0
