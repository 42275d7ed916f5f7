"""FunctionalModule: call a private copy of any nn.Module with the parameters we give it.

The caller's module is copied once and never touched again. The copy is put into the one mode that samples right: eval
(so dropout is off), recurrent layers trainable with dropout 0, attention without its fused inference path (which vmap
cannot follow), and BatchNorm by a stated policy.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

Forward = Callable[[nn.Module, Any], Any]
POLICIES = ("recalibrate", "frozen")
MODES = ("training", "dropout", "momentum", "track_running_stats", "max_norm", "sparse")  # we change these
_MISSING = object()


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
        if batchnorm not in (None, *POLICIES):
            raise ValueError(f"batchnorm is {batchnorm!r}, expected one of {POLICIES}")
        if forward is not None and not callable(forward):
            raise ValueError(f"forward is {forward!r}, expected a function (module, x) -> output")
        self.norms_name = [n for n, m in module.named_modules() if isinstance(m, _BatchNorm)]
        self.batchnorm = (batchnorm or "recalibrate") if self.norms_name else None
        self.copy = _detached_copy(module)
        self._forward = forward or default_forward
        self._modes = [{k: vars(m)[k] for k in MODES if k in vars(m)} for m in self.copy.modules()]
        self._trainable = {n for n, p in module.named_parameters() if p.requires_grad}
        self._written: set[str] = set()  # shared with the copies on other devices
        self._max_norms = _max_norms(self.copy)
        _prepare(self.copy, self._max_norms)
        self._bind()
        if self.batchnorm == "frozen" and any(m.running_mean is None for m in self._norms):
            raise ValueError("batchnorm='frozen' got a BatchNorm without running statistics, expected some to keep")
        if self.batchnorm == "recalibrate":
            for norm in self._norms:
                _ensure_statistics(norm, next(self.copy.parameters()))

    def _bind(self) -> None:
        self._parts = list(self.copy.modules())
        self._norms = [m for m in self._parts if isinstance(m, _BatchNorm)]
        self._caller = _Caller(self.copy, self._forward)
        self._sets = [(m, k) for m in self._parts for k, v in vars(m).items() if isinstance(v, Tensor)]
        self._held = [c for m in self._parts for c in _containers(m)]  # the same before every call
        self._fills: list[Any] = []  # these containers and those attributes are known to change

    def __call__(self, tree: Mapping[str, Tensor], x: Any, statistics: Mapping[str, Tensor] | None = None) -> Any:
        """One forward pass. `statistics` are BatchNorm buffers of one draw; without them the policy's own mode."""
        if self.batchnorm != "recalibrate":
            return self._call(tree, x)
        if statistics is None:
            with self._norm_mode(training=True, tracking=False):
                return self._call(tree, x)
        with self._norm_mode(training=False, tracking=True):
            return self._call({**tree, **statistics}, x)

    def probe(self, tree: Mapping[str, Tensor], x: Any) -> tuple[Any, list[str]]:
        """The same, and look at what the module does to itself: from now on it gets copies of the tensors it writes into
        (those of the tree are returned), and attributes that it sets are known to change."""
        mine = {k: v.clone() for k, v in {**dict(self.copy.named_buffers()), **tree}.items()}
        before = {k: v._version for k, v in mine.items()}
        couples = self.batchnorm == "recalibrate"
        mode = self._norm_mode(training=True, tracking=False) if couples else contextlib.nullcontext()
        with mode:
            output = self._call(mine, x, look=True)
        self._written.update(k for k, v in mine.items() if v._version != before[k])
        return output, sorted(self._written & set(tree))

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

    def module(self, tree: Mapping[str, Tensor]) -> nn.Module:
        """A new module like the caller's own (its modes, what is trainable in it) that holds these tensors."""
        twin = _detached_copy(self.copy)
        state = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
        with torch.no_grad():
            for name, value in tree.items():
                state[name].copy_(value)
        for m, modes in zip(twin.modules(), self._modes):
            vars(m).update(modes)
        for name, p in twin.named_parameters():
            p.requires_grad_(name in self._trainable)
        return twin

    def held(self) -> dict[str, Tensor]:
        """The copy's own parameters and buffers."""
        return {k: v.detach() for k, v in (*self.copy.named_parameters(), *self.copy.named_buffers())}

    def moved(self, device: torch.device) -> FunctionalModule:
        """This function with everything fixed on another device."""
        twin = copy.copy(self)
        twin.copy = _detached_copy(self.copy).to(device)
        twin._bind()
        return twin

    def fresh(self) -> dict[str, Tensor]:
        """The parameters {name: tensor} as each layer's own reset_parameters() leaves them; those it reaches."""
        twin = _detached_copy(self.copy)
        parameters = {n: p for n, p in twin.named_parameters() if p.is_floating_point()}
        with torch.no_grad():
            for p in parameters.values():
                p.fill_(math.nan)
            for m in reversed(list(twin.modules())):  # a parent may overrule its children
                reset = getattr(m, "reset_parameters", None) or getattr(m, "_reset_parameters", None)
                if callable(reset) and not _needs_arguments(reset):
                    reset()
        return {n: p.detach() for n, p in parameters.items() if bool(p.isfinite().all())}

    def _call(self, tree: Mapping[str, Tensor], x: Any, look: bool = False) -> Any:
        """Whatever the call leaves on the modules (hooks of the old weight_norm, caches, counters) is gone after it."""
        mine = {f"module.{k}": v.clone() if k in self._written else v for k, v in self._cut(tree).items()}
        for k in self._written - set(tree):
            mine[f"module.{k}"] = self.copy.get_buffer(k).clone()
        if torch.compiler.is_compiling():  # which cannot follow the whole account, only what is known to change
            kept = [(m, k, vars(m).get(k, _MISSING)) for m, k in self._sets]
            account = [(c, c.copy()) for c in self._fills]
        else:
            kept, account = [], [(c, c.copy()) for c in self._held]
        try:
            return functional_call(self._caller, mine, (x,))
        finally:
            if look:
                self._note_changes(account)
            for m, k, v in kept:
                if v is not _MISSING:
                    vars(m)[k] = v
                elif k in vars(m):
                    del vars(m)[k]
            for container, items in account:
                container.clear()
                container.extend(items) if isinstance(container, list) else container.update(items)

    def _note_changes(self, account: list[tuple[Any, Any]]) -> None:
        attributes = {id(vars(m)): m for m in self._parts}
        for c, old in account:
            if m := attributes.get(id(c)):
                self._sets += [(m, k) for k, v in c.items() if old.get(k, _MISSING) is not v]
            elif len(c) != len(old) or any(a is not b for a, b in zip(_values(c), _values(old))):
                self._fills.append(c)

    def _cut(self, tree: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Embedding(max_norm) cuts long rows by writing into its weights; here by a function with a gradient."""
        if not self._max_norms:
            return tree
        fixed = dict(self.copy.named_parameters())
        cut = {}
        for name, (most, p) in self._max_norms.items():
            w = tree.get(name, fixed[name])
            norm = torch.linalg.vector_norm(w, p, dim=-1, keepdim=True)
            cut[name] = torch.where(norm > most, w * (most / (norm + 1e-7)), w)
        return {**tree, **cut}

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


def _containers(m: nn.Module) -> list[Any]:
    """A module's attributes, its buffers, and the plain lists and dicts it has."""
    d = vars(m)
    return [d, m._buffers, *(v for k, v in d.items() if type(v) in (list, dict) and k[0] != "_")]


def _values(c: Any) -> Iterable[Any]:
    return c.values() if isinstance(c, dict) else c


def _detached_copy(module: nn.Module) -> nn.Module:
    """deepcopy, with the non-leaf tensors that calls and hooks leave on modules (deepcopy refuses them) detached first."""
    memo: dict[int, Any] = {}
    for m in module.modules():
        for t in _tensors_in(vars(m)):
            if not t.is_leaf:
                memo[id(t)] = t.detach().clone()
    try:
        twin = copy.deepcopy(module, memo)
    except Exception as e:
        raise ValueError(
            f"the module cannot be copied ({type(e).__name__}: {str(e).strip().splitlines()[0][:120]}), expected one that "
            "copy.deepcopy can copy"
        ) from e
    for p in twin.parameters():
        p.requires_grad_(False)
        p.grad = None
    return twin


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in an attribute and in the containers it is made of."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for v in _values(value):
            yield from _tensors_in(v)


def _needs_arguments(function: Callable[..., Any]) -> bool:
    empty = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in empty for p in inspect.signature(function).parameters.values())


def _max_norms(module: nn.Module) -> dict[str, tuple[float, float]]:
    """{parameter: (max_norm, p)} of embeddings that cut their rows. Not of tied ones, whose other user sees the cuts."""
    every = [id(p) for _, p in module.named_parameters(remove_duplicate=False)]
    found = {}
    for n, m in module.named_modules():
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.max_norm is not None and every.count(id(m.weight)) == 1:
            found[f"{n}.weight" if n else "weight"] = (float(m.max_norm), float(m.norm_type))
    return found


def _prepare(module: nn.Module, max_norms: Container[str]) -> None:
    """Put the private copy into the mode that samples right (see the head of this file)."""
    module.eval()
    for name, m in module.named_modules():
        if isinstance(m, nn.RNNBase):
            m.training = True  # cuDNN's backward exists in training mode only
            m.dropout = 0.0
        elif isinstance(m, nn.MultiheadAttention):
            m.training = True  # itself, not its children: the fused inference path is taken in eval only
            m.dropout = 0.0
        elif isinstance(m, nn.TransformerEncoderLayer):
            m.training = True  # the encoder then leaves nested tensors alone, too
        elif isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
            m.sparse = False  # a gradient over all of θ is dense
            if f"{name}.weight".lstrip(".") in max_norms:
                m.max_norm = None


def _ensure_statistics(norm: nn.Module, like: Tensor) -> None:
    """Give BatchNorm layers built without running statistics the buffers that recalibration fills. They are not in
    the state_dict, which stays that of the caller's module."""
    assert isinstance(norm, _BatchNorm)
    norm.momentum = None
    if norm.running_mean is None:
        like = like if norm.weight is None else norm.weight
        zeros = torch.zeros(norm.num_features, dtype=like.dtype, device=like.device)
        norm.register_buffer("running_mean", zeros, persistent=False)
        norm.register_buffer("running_var", zeros + 1, persistent=False)
        norm.register_buffer("num_batches_tracked", torch.tensor(0, device=like.device), persistent=False)
