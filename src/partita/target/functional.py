"""FunctionalModule: call a private copy of any nn.Module with the parameters we give it.

The caller's module is copied once and never touched again. The copy is put into the one mode that samples right: eval
(so dropout is off), recurrent layers trainable with dropout 0, attention without its fused inference path (which vmap
cannot follow), and BatchNorm by a stated policy.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

Forward = Callable[[nn.Module, Any], Any]
POLICIES = ("recalibrate", "frozen")


class _Caller(nn.Module):
    """Gives a user's `forward(module, x)` the shape functional_call wants."""

    def __init__(self, module: nn.Module, forward: Forward):
        super().__init__()
        self.module = module
        self._forward = forward

    def forward(self, x: Any) -> Any:
        return self._forward(self.module, x)


class FunctionalModule:
    """f(tree, x) -> output, with every tensor that is not in the tree fixed."""

    def __init__(self, module: nn.Module, forward: Forward | None = None, batchnorm: str | None = None):
        self.norms_name = [n for n, m in module.named_modules() if isinstance(m, _BatchNorm)]
        if batchnorm not in (None, *POLICIES):
            raise ValueError(f"batchnorm is {batchnorm!r}, expected one of {POLICIES}")
        self.batchnorm = (batchnorm or "recalibrate") if self.norms_name else None
        self.copy = _detached_copy(module)
        _prepare(self.copy)
        self._norms = [m for m in self.copy.modules() if isinstance(m, _BatchNorm)]
        self._caller = _Caller(self.copy, forward or default_forward)
        if self.batchnorm == "frozen" and any(m.running_mean is None for m in self._norms):
            raise ValueError("batchnorm='frozen' needs running statistics, got a BatchNorm with none")
        self._plain = [(m, k) for m in self.copy.modules() for k, v in vars(m).items() if isinstance(v, Tensor)]
        if self.batchnorm == "recalibrate":
            for norm in self._norms:
                _ensure_statistics(norm)

    def __call__(self, tree: Mapping[str, Tensor], x: Any, statistics: Mapping[str, Tensor] | None = None) -> Any:
        """One forward pass. `statistics` are BatchNorm buffers of one draw; without them the policy's own mode."""
        if self.batchnorm != "recalibrate":
            return self._call(tree, x)
        if statistics is None:
            with self._norm_mode(training=True, tracking=False):
                return self._call(tree, x)
        with self._norm_mode(training=False, tracking=True):
            return self._call({**tree, **statistics}, x)

    @torch.no_grad()
    def recalibrate(self, tree: Mapping[str, Tensor], batches: Iterable[Any]) -> dict[str, Tensor]:
        """Running statistics of these weights: the plain average over `batches` ({} when nothing needs it)."""
        if self.batchnorm != "recalibrate":
            return {}
        buffers = {k: torch.zeros_like(v) for k, v in self.statistics().items()}
        with self._norm_mode(training=True, tracking=True):  # momentum None: cumulative average
            for x in batches:
                self._call({**tree, **buffers}, x)
        return buffers

    def statistics(self) -> dict[str, Tensor]:
        """The BatchNorm buffers {name: tensor}, as the copy holds them now."""
        keys = ("running_mean", "running_var", "num_batches_tracked")
        buffers = dict(self.copy.named_buffers())
        return {f"{n}.{k}" if n else k: buffers[f"{n}.{k}" if n else k] for n in self.norms_name for k in keys}

    def moved(self, device: torch.device) -> FunctionalModule:
        """This function with everything fixed on another device."""
        return FunctionalModule(copy.deepcopy(self.copy).to(device), self._caller._forward, self.batchnorm)

    def _call(self, tree: Mapping[str, Tensor], x: Any) -> Any:
        kept = [(m, k, vars(m)[k]) for m, k in self._plain]
        try:
            return functional_call(self._caller, {f"module.{k}": v for k, v in tree.items()}, (x,))
        finally:  # hooks such as the old weight_norm leave tensors of this very call on the module
            for m, k, v in kept:
                vars(m)[k] = v

    @contextlib.contextmanager
    def _norm_mode(self, training: bool, tracking: bool) -> Iterator[None]:
        for norm in self._norms:
            norm.training, norm.track_running_stats = training, tracking
        yield


def default_forward(module: nn.Module, x: Any) -> Any:
    """module(x), module(*x) for tuples and lists, module(**x) for dicts."""
    if isinstance(x, Mapping):
        return module(**x)
    return module(*x) if isinstance(x, (tuple, list)) else module(x)


def _detached_copy(module: nn.Module) -> nn.Module:
    """deepcopy, with the non-leaf tensors some hooks leave on modules (which deepcopy refuses) detached first."""
    memo: dict[int, Any] = {}
    for m in module.modules():
        for v in vars(m).values():
            if isinstance(v, Tensor) and not v.is_leaf:
                memo[id(v)] = v.detach().clone()
    twin = copy.deepcopy(module, memo)
    for p in twin.parameters():
        p.requires_grad_(False)
        p.grad = None
    return twin


def load_tree(module: nn.Module, tree: Mapping[str, Tensor]) -> nn.Module:
    """A detached copy of `module` that holds these parameters and buffers, trainable as in the original."""
    twin = _detached_copy(module)
    state = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    with torch.no_grad():
        for name, value in tree.items():
            if name in state:  # BatchNorm built without running statistics has nowhere to keep them
                state[name].copy_(value)
    for (_, p), (_, q) in zip(twin.named_parameters(), module.named_parameters()):
        p.requires_grad_(q.requires_grad)
    return twin


def _prepare(module: nn.Module) -> None:
    """Put the private copy into the mode that samples right (see the head of this file)."""
    module.eval()
    for m in module.modules():
        if isinstance(m, nn.RNNBase):
            m.train()  # cuDNN's backward exists in training mode only
            m.dropout = 0.0
        elif isinstance(m, nn.MultiheadAttention):
            m.training = True  # itself, not its children: the fused inference path is taken in eval only
            m.dropout = 0.0
        elif isinstance(m, nn.TransformerEncoderLayer):
            m.training = True
        elif isinstance(m, nn.TransformerEncoder):
            m.use_nested_tensor = False


def _ensure_statistics(norm: nn.Module) -> None:
    """Give BatchNorm layers built without running statistics the buffers that recalibration fills."""
    assert isinstance(norm, _BatchNorm)
    norm.momentum = None
    if norm.running_mean is None:
        norm.register_buffer("running_mean", torch.zeros(norm.num_features))
        norm.register_buffer("running_var", torch.ones(norm.num_features))
        norm.register_buffer("num_batches_tracked", torch.tensor(0))
