"""Histories: where past draws θ̃ come from. A read gives every group its own independent row, so θ̃ ~ q̂ = Π_m q̂_m.

    Window(R)     the last R kept states of the chain itself
    Reservoir(R)  R states uniform over all those seen (algorithm R), rows aligned: row r is one state of every group
    Ensemble()    the present states of a chain's ensemble, itself included: no memory, always stable

Shapes: C chains, R rows, D coordinates, k compositions, M groups; θ [C, D], rows [C, R, D], θ̃ [C, k, D]. Histories keep
their state in a dict of tensors, so that a store can save it and a graph can hold it. A history keeps every `every`-th
state; the first row is θ⁰ (with `burn_in="drop"` the state in the middle of burn-in: what came before is dropped there, so
that the first kept draw finds a filled history), and `warm_up` joint steps fill it first. With `host=True` the rows of
chains on a GPU lie in pinned host memory, which the GPU reads over the bus: slower, for rows that do not fit its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class History(Protocol):
    """What structure/gradient.py and the engine ask of a history."""

    @property
    def every(self) -> int: ...

    @property
    def warm_up(self) -> int: ...

    @property
    def drops_burn_in(self) -> bool: ...

    @property
    def host(self) -> bool:
        """Its rows lie in the host's memory even when the chains are on a GPU."""

    def ensembles(self, C: int) -> int:
        """How many independent units C chains make."""

    def nbytes(self, C: int, D: int) -> int:
        """Memory its rows will take."""

    def span(self, steps: int) -> int | None:
        """Steps between the oldest and the newest state its rows can hold after `steps` of them (None: it has no past)."""

    def init(self, theta: Tensor) -> State:
        """The state that holds θ⁰ [C, D] alone."""

    def restart(self, state: State, theta: Tensor) -> None:
        """Forget all but θ [C, D], in place."""

    def write(self, state: State, theta: Tensor) -> None:
        """See the next kept state θ [C, D], in place."""

    def read(self, state: State, theta: Tensor, labels: Tensor, M: int, k: int, unread: Tensor | None = None) -> Tensor:
        """θ̃ [C, k, D]: an independent row for each chain, composition and group. Of groups that are `unread` [C, k, M]
        nothing is looked at, so that any value will do."""


@dataclass(frozen=True)
class _Rows:
    """What Window and Reservoir share: a [C, R, D] tensor, filled from the front, read uniformly."""

    R: int = 256
    every: int = 1
    burn_in: str = "keep"
    warm_up: int = 0
    dtype: str = "float32"
    host: bool = False

    def __post_init__(self) -> None:
        who = type(self).__name__
        _check_whole(who, 1, R=self.R, every=self.every)
        _check_whole(who, 0, warm_up=self.warm_up)
        if self.burn_in not in ("keep", "drop"):
            raise ValueError(f"{who} got burn_in={self.burn_in!r}, expected 'keep' or 'drop'")
        if self.dtype not in DTYPES:
            raise ValueError(f"{who} got dtype={self.dtype!r}, expected one of {sorted(DTYPES)}")
        if not isinstance(self.host, bool):
            raise ValueError(f"{who} got host={self.host!r}, expected True or False")

    @property
    def drops_burn_in(self) -> bool:
        return self.burn_in == "drop"

    def ensembles(self, C: int) -> int:
        return C

    def nbytes(self, C: int, D: int) -> int:
        return C * self.R * D * DTYPES[self.dtype].itemsize

    def init(self, theta: Tensor) -> State:
        shape, dtype = (theta.shape[0], self.R, theta.shape[1]), DTYPES[self.dtype]
        if self.host and theta.is_cuda:
            rows = _pinned(shape, dtype, theta.device)
        else:
            rows = torch.zeros(shape, dtype=dtype, device=theta.device)
        state = {"rows": rows, "seen": torch.ones((), dtype=torch.long, device=theta.device)}
        self.restart(state, theta)
        return state

    def restart(self, state: State, theta: Tensor) -> None:
        state["rows"][:, 0] = theta.to(state["rows"].dtype)  # no read reaches the others until they are written
        state["seen"].fill_(1)

    def read(self, state: State, theta: Tensor, labels: Tensor, M: int, k: int, unread: Tensor | None = None) -> Tensor:
        rows = state["rows"]
        n = state["seen"].clamp(max=self.R)  # while filling: only rows that hold a state, each equally likely
        u = torch.rand(theta.shape[0], k, M, device=theta.device)
        row = torch.minimum((u * n).long(), n - 1)  # [C, k, M]; rounding must not reach n
        if unread is not None:  # reads from one row share memory sectors; from a row each they do not
            row = row.masked_fill(unread, 0)
        return rows.gather(1, row[:, :, labels]).to(theta.dtype)


@dataclass(frozen=True)
class Window(_Rows):
    """The last R kept states: state s (from 0) goes to row s mod R.

    R · every must be long against the autocorrelation time, or the chain samples nearly the joint law. A window about as
    long as SGHMC's oscillation period can make it unstable: more friction or a longer window cures that.
    """

    def span(self, steps: int) -> int | None:
        return min(steps, self.R * self.every)

    def write(self, state: State, theta: Tensor) -> None:
        slot = state["seen"] % self.R
        state["rows"].index_copy_(1, slot.view(1), theta.to(state["rows"].dtype).unsqueeze(1))
        state["seen"] += 1


@dataclass(frozen=True)
class Reservoir(_Rows):
    """R states uniform over all seen. Algorithm R (Vitter 1985): state s (from 1) goes to row s - 1 while s <= R, then
    with probability R/s to a uniform row; each chain decides for itself, for all its groups at once. Since it forgets
    nothing by itself, it starts anew in the middle of burn-in (`burn_in="keep"` keeps what it saw before)."""

    burn_in: str = "drop"

    def span(self, steps: int) -> int | None:
        return steps

    def write(self, state: State, theta: Tensor) -> None:
        rows = state["rows"]
        state["seen"] += 1
        s = state["seen"]
        u = torch.rand(rows.shape[0], device=rows.device, dtype=torch.float64)  # float32 is too coarse for large s
        slot = torch.where(s <= self.R, s - 1, (u * s).long())  # [C]
        chain = torch.arange(rows.shape[0], device=rows.device)
        held = slot.clamp(max=self.R - 1)
        new = torch.where((slot < self.R)[:, None], theta.to(rows.dtype), rows[chain, held])
        rows[chain, held] = new


@dataclass(frozen=True)
class Ensemble:
    """Past draws from the PRESENT states of the chain's ensemble, itself included.

    The C chains form C/size ensembles (size None: one of all). Chains of one ensemble are coupled, so an ensemble counts
    as ONE chain for R-hat: run several. Exact law on a Gaussian: L⁻¹/size + (1 - 1/size) P⁻¹.
    """

    size: int | None = None
    warm_up: int = 0
    every: int = field(default=1, init=False)
    drops_burn_in: bool = field(default=False, init=False)
    host: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.size is not None and not _whole(self.size, 2):
            raise ValueError(f"Ensemble got size={self.size!r}, expected at least 2 chains")
        _check_whole("Ensemble", 0, warm_up=self.warm_up)

    def ensembles(self, C: int) -> int:
        size = C if self.size is None else self.size
        if C < 2:
            raise ValueError(f"Ensemble got chains={C}, expected at least 2: its past draws are the other chains")
        if C % size:
            raise ValueError(f"Ensemble got chains={C}, expected a multiple of its size, {size}")
        return C // size

    def nbytes(self, C: int, D: int) -> int:
        return 0

    def span(self, steps: int) -> int | None:
        return None

    def init(self, theta: Tensor) -> State:
        return {}

    def restart(self, state: State, theta: Tensor) -> None:
        return None

    write = restart

    def read(self, state: State, theta: Tensor, labels: Tensor, M: int, k: int, unread: Tensor | None = None) -> Tensor:
        C, D = theta.shape
        E = self.ensembles(C)
        size = C // E
        row = (torch.rand(E, size * k, M, device=theta.device) * size).long().clamp(max=size - 1)
        return theta.reshape(E, size, D).gather(1, row[:, :, labels]).view(C, k, D)


def _pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in pinned host memory as a tensor of the device: with unified addressing its kernels reach them by the same
    pointer, inside CUDA graphs too."""
    held = torch.zeros(shape, dtype=dtype, pin_memory=True)
    kind = {2: "<i2", 4: "<i4", 8: "<i8"}[dtype.itemsize]  # bits alone: this interface knows no bfloat16

    class Shared:
        memory = held  # the tensor made of it keeps it alive
        __cuda_array_interface__ = {"shape": shape, "typestr": kind, "data": (held.data_ptr(), False), "version": 3}  # noqa: RUF012

    with torch.cuda.device(device):
        return torch.as_tensor(Shared(), device=device).view(dtype)


def _whole(value: object, least: int) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _check_whole(who: str, least: int, **values: int) -> None:
    for name, value in values.items():
        if not _whole(value, least):
            raise ValueError(f"{who} got {name}={value!r}, expected a whole number of at least {least}")
