"""What is settled before the first step: how the chains run side by side, and which engine runs the step."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from partita.engine.chains import Energies, pick
from partita.engine.modes import Compiled, Eager, Graph, captured
from partita.engine.step import Chains, Step
from partita.runs.torchstate import seconds, unchanged
from partita.target import Batch, Posterior, Target
from partita.target.trees import leaves

MODES = ("auto", "eager", "compile", "graph")
PRECISIONS = ("float32", "tf32", "bf16")
AGREE = 0.05  # relative difference of two ways to one gradient that rounding may explain, bfloat16 included
# streams or a loop are taken where they need less than this share of vmap's time; on a GPU compiling fuses most of the
# many small kernels that eager passes on streams are timed with, and none of vmap's slow convolutions
SLOWER = {"cpu": 0.8, "cuda": 1.5}
COST = {"cpu": 30.0, "cuda": 60.0}  # seconds a compilation takes, about
SAVED = {"cpu": 0.4, "cuda": 0.8}  # of the eager time, about


Engine = Eager | Compiled | Graph


@dataclass(frozen=True)
class Choice:
    """An engine, why it was taken, and whether it is another one than was asked for."""

    engine: Engine
    why: str
    fell_back: bool = False


def choose_engine(mode: str, step: Step, chains: Chains, steps: int) -> Choice:
    """The engine for a run of `steps` steps from here. Neither the chains nor torch's random state change. What cannot be
    compiled runs eagerly."""
    cuda = step.device.type == "cuda"
    why, short = "as asked", False
    if mode == "auto":
        mode, why = _weigh(step, chains, steps)
    elif mode == "graph" and not cuda:
        mode, why, short = "compile", "engine='graph' needs CUDA: compiled instead", True
    if mode == "eager":
        return Choice(Eager(step), why)
    kind = Graph if mode == "graph" else Compiled
    for plain in (False, True):  # the fastest options are the newest ones, which now and then fail
        try:
            with _quiet():
                return Choice(_proven(kind(step, len(chains.theta), plain), step, chains), why, short)
        except Exception as e:
            said = [line.strip() for line in str(e).splitlines() if line.strip()] or [""]
            line = next((s for s in said if "Error" in s or "xplanation" in s), said[0])
            failed = f"engine='{mode}' falls back to eager: {type(e).__name__}: {line[:140]}"
            if type(e).__name__ not in ("InductorError", "BackendCompilerFailed"):
                break
    return Choice(Eager(step), failed, True)


def _proven(engine: Compiled, step: Step, chains: Chains) -> Compiled:
    """The engine, when it compiles and, where it draws the same random numbers, its gradient is the eager one."""
    with unchanged(step.device):
        grad = engine.probe(chains)
    alone = step.structure.history is None and step.augment is None  # then nothing can be drawn in another order
    if step.device.type == "cpu" or alone:
        with unchanged(step.device):
            same = step(chains.aside(), 0.0, 0.0, step.batches.look(len(chains.theta)))
        apart = float((grad.g - same.g).norm() / same.g.norm())
        if not apart <= AGREE and bool(same.g.isfinite().all()):
            raise RuntimeError(f"its gradient is {apart:.0%} off the eager one")
    return engine


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the compiler says of kernels that it tried and did not take."""
    logs = [logging.getLogger(f"torch._inductor.{name}") for name in ("select_algorithm", "ir", "scheduler")]
    before = [log.level for log in logs]
    try:
        for log in logs:
            log.setLevel(logging.CRITICAL)
        yield
    finally:
        for log, level in zip(logs, before):
            log.setLevel(level)


def _weigh(step: Step, chains: Chains, steps: int) -> tuple[str, str]:
    """Whether compiling is repaid, from the time of an eager gradient."""
    kind = step.device.type
    each, saved = math.inf, math.inf
    with unchanged(step.device):
        batch = step.batches.look(chains.theta.shape[0])
        for _ in range(4):  # the first is slower: when even that does not repay it, no more are needed
            each = min(each, seconds(lambda: step.gradient(chains, batch), step.device))
            saved = SAVED[kind] * steps * each
            if saved < 2 * COST[kind]:
                break
    mode = "eager" if saved < 2 * COST[kind] else "graph" if kind == "cuda" else "compile"
    about = (
        f"{steps:,} steps of {1e3 * each:.3g} ms; compiling takes about {COST[kind]:.0f} s and would save {saved:.0f} s"
    )
    return mode, f"engine {mode}: {about}"


def choose_chains(
    target: Target, n: int, batch: Batch, how: str = "auto", passes: int = 1, precision: str = "float32"
) -> tuple[Energies, str | None]:
    """Probe gradient and forward with two copies, nested if a step has several passes; the reason when only the loop
    works. Where the network has convolutions, under which vmap can be slow, both are timed. `batch` has a chain axis."""
    half = torch.bfloat16 if precision == "bf16" else None
    packed = target.packed(half) if target.space.values.is_cuda else None
    loop = Energies(target, n, "loop", precision=precision, packed=packed)
    theta = target.space.values.expand(2, -1).contiguous()
    theta = theta + 1e-3 * torch.linspace(-1, 1, theta.shape[1]).to(theta)
    try:
        try:
            u, du = loop.likelihood(theta[:1].unsqueeze(1), pick(batch, slice(1)))
        except Exception:
            if packed is None:
                raise
            loop = replace(loop, packed=None)  # a module may insist on the dtype of its own tensors
            u, du = loop.likelihood(theta[:1].unsqueeze(1), pick(batch, slice(1)))
    except Exception as e:
        raise ValueError(f"the gradient of the likelihood failed, expected one: {_first_line(e)}") from e
    if target.needs_data and not bool(du.any()) and bool(u.isfinite().all()):
        raise ValueError(
            "the likelihood does not depend on theta (its gradient is zero everywhere), expected it to: forward must "
            "call the module it is given, not another one"
        )
    side = "streams" if theta.device.type == "cuda" else "loop"
    if how in ("loop", "streams"):
        return replace(loop, how=how), None
    try:
        fast = replace(loop, how="vmap")
        two = pick(batch, slice(2))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # vmap runs some operations one by one
            _, same = fast.likelihood(theta.unsqueeze(1).repeat(1, min(passes, 2), 1), two)
        fast.energy(theta, two)
        apart = float((same[:1, :1] - du).norm() / du.norm())
        if not apart <= AGREE and bool(du.isfinite().all()):  # where it is not finite the run reports it
            raise RuntimeError(f"its gradient is {apart:.0%} off under vmap")
    except Exception as e:  # whatever vmap cannot follow, the loop can
        if how == "vmap":
            raise ValueError(f"chains='vmap' does not work for this module: {_first_line(e)}") from e
        return replace(loop, how=side), _first_line(e)
    slow = how == "auto" and isinstance(target, Posterior) and any(map(_convolves, target.network.copy.modules()))
    return (replace(loop, how=side) if slow and _loses(fast, replace(loop, how=side), theta, batch) else fast), None


def _convolves(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd)


def _loses(fast: Energies, loop: Energies, theta: Tensor, batch: Batch) -> bool:
    """Whether `loop` takes under a share SLOWER of the time of `fast`, best of three, on a GPU as graphs."""
    C = next(leaves(batch))[1].shape[0]
    phi = theta[:1].expand(C, -1).unsqueeze(1).contiguous()
    runs: list[Callable[[], Any]] = [partial(e.likelihood, phi, batch) for e in (fast, loop)]
    if theta.device.type == "cuda":
        runs = [captured(f, warm=3)[0].replay for f in runs]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(3):
        for f, took in zip(runs, times):
            took.append(seconds(f, theta.device))
    return min(times[1]) < SLOWER[theta.device.type] * min(times[0])


def bytes_per_pass(target: Target, n: int, batch: Batch) -> int:
    """Memory one forward and backward pass holds: what autograd saves, and θ-sized vectors. `batch` is one chain's."""
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    theta = target.space.values.detach().clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.enable_grad():
        target.likelihood_energy(theta * 1, batch, n)
    return sum(saved.values()) + 6 * theta.numel() * theta.element_size()


def _first_line(e: Exception) -> str:
    text = str(e).strip()
    return f"{type(e).__name__}: {text.splitlines()[0] if text else ''}"[:160]
