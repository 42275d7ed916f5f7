"""How a step is run: eagerly, compiled, or compiled and captured in a CUDA graph.

    advance(chains, rate, adapt, write) -> chains, gradient

All three run the same `Step`. Compiled: where all chains go through vmap the whole step is one compiled function, else
its parts are (the passes of the loop share one), and Python calls them in turn. A graph is that work captured once, with
the states in place, and replayed. Chains that were given are spent: a graph writes into them.

On the CPU compiled code draws torch's own random numbers, so that it equals eager code up to rounding; on CUDA it draws
its own, from torch's generator, so that the state of that generator is still the whole state.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from partita.engine.chains import AGREE
from partita.engine.graphs import captured, seconds
from partita.engine.step import Chains, Step
from partita.structure.gradient import Gradient
from partita.target import Batch
from partita.target.trees import map_tree, zip_trees

MODES = ("auto", "eager", "compile", "graph")
PRECISIONS = ("float32", "tf32", "bf16")
WHOLE = 4  # so many chunks are unrolled into one compiled step
COST = {"cpu": 30.0, "cuda": 60.0}  # seconds a compilation takes, about
SAVED = {"cpu": 0.4, "cuda": 0.8}  # of the eager time, about

Run = Callable[[Chains, Tensor, Tensor, Batch], tuple[Chains, Gradient]]


class Eager:
    name = "eager"

    def __init__(self, step: Step):
        self.step = step

    def advance(self, chains: Chains, rate: float, adapt: float, write: bool) -> tuple[Chains, Gradient]:
        chains, grad = self.step(chains, rate, adapt)
        if write:
            self.step.remember(chains)
        return chains, grad


class Compiled:
    name = "compile"

    def __init__(self, step: Step, run: Run):
        self.step, self.run = step, run
        self.rate, self.adapt = _dials(step.device)
        self.set: tuple[float, float] = (0.0, 0.0)

    def advance(self, chains: Chains, rate: float, adapt: float, write: bool) -> tuple[Chains, Gradient]:
        self.dial(rate, adapt)
        batch = None if self.step.batches.inside else self.step.batches.draw(chains.theta.shape[0])
        chains, grad = self.run(chains, self.rate, self.adapt, batch)
        if write:
            self.step.remember(chains)
        return chains, grad

    def dial(self, rate: float, adapt: float) -> None:
        """Rate and adaptation are tensors, so that nothing is compiled or captured anew when they change."""
        if (rate, adapt) != self.set:
            self.rate.fill_(rate)
            self.adapt.fill_(adapt)
            self.set = (rate, adapt)


class Graph(Compiled):
    name = "graph"

    def __init__(self, step: Step, run: Run):
        super().__init__(step, run)
        self.graphs: dict[bool, tuple[torch.cuda.CUDAGraph, list[Gradient]]] = {}
        self.chains: Chains | None = None
        self.batch: Batch = None

    def advance(self, chains: Chains, rate: float, adapt: float, write: bool) -> tuple[Chains, Gradient]:
        self.dial(rate, adapt)
        if self.chains is None:
            self.chains = chains
        elif chains is not self.chains:
            _assign(self.chains, chains)
        if not self.step.batches.inside:
            self._fill(self.step.batches.draw(chains.theta.shape[0]))
        if write not in self.graphs:
            self.graphs[write] = self._capture(write)
        graph, grad = self.graphs[write]
        graph.replay()
        return self.chains, grad[0]

    def _fill(self, batch: Batch) -> None:
        if self.batch is None:
            self.batch = map_tree(torch.clone, batch)
        else:
            zip_trees(lambda pair: pair[0].copy_(pair[1], non_blocking=True), [self.batch, batch])

    def _capture(self, write: bool) -> tuple[torch.cuda.CUDAGraph, list[Gradient]]:
        chains, out = self.chains, []
        assert chains is not None
        step = lambda: self.run(chains, self.rate, self.adapt, self.batch)

        def whole() -> None:
            new, grad = step()
            _assign(chains, new)
            out.append(grad)
            if write:
                self.step.remember(chains)

        with unchanged(self.step.device):
            graph = captured(whole, warm=step)
        return graph, out


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
    try:
        batch = step.batches.look(chains.theta.shape[0])
        with unchanged(step.device):
            run = compiled(step)
            _, grad = run(chains, *_dials(step.device), None if step.batches.inside else batch)
        if not cuda:  # the same random numbers, so the same gradient
            with unchanged(step.device):
                _, same = step(chains, 0.0, 0.0, None if step.batches.inside else batch)
            if float((grad.g - same.g).norm() / same.g.norm()) > AGREE:
                raise RuntimeError("its gradient is not the eager one")
        return Choice((Graph if mode == "graph" else Compiled)(step, run), why, short)
    except Exception as e:
        said = [line.strip() for line in str(e).splitlines() if line.strip()] or [""]
        line = next((s for s in said if "Error" in s or "xplanation" in s), said[0])
        return Choice(Eager(step), f"engine='{mode}' falls back to eager: {type(e).__name__}: {line[:140]}", True)


def compiled(step: Step) -> Run:
    """The step as compiled code."""
    # torch's own random numbers on the CPU: inductor's are not vectorised there
    options: dict[str, Any] = {"fallback_random": step.device.type == "cpu"}
    make = lambda f: torch.compile(f, fullgraph=True, dynamic=False, options=options)
    if step.energies.how == "vmap" and step.structure.passes <= WHOLE * step.chunk:
        return make(step.__call__)
    parts = lambda whole, *names: _with(whole, **{name: make(getattr(whole, name)) for name in names})
    return replace(
        step,
        batches=parts(step.batches, "draw") if step.batches.inside else step.batches,
        structure=parts(step.structure, "masks", "compose", "masked"),
        energies=parts(step.energies, "value_and_gradient", "prior"),
        sampler=parts(step.sampler, "step"),
    )


@contextlib.contextmanager
def unchanged(device: torch.device) -> Iterator[None]:
    """torch's random state is afterwards what it was."""
    state = rng_state(device)
    try:
        yield
    finally:
        set_rng_state(state)


@contextlib.contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Matrix products and convolutions in tf32; off leaves torch as it is set."""
    if not on:
        yield
        return
    backends: tuple[Any, Any] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [b.allow_tf32 for b in backends]
    try:
        for b in backends:
            b.allow_tf32 = True
        yield
    finally:
        for b, was in zip(backends, before):
            b.allow_tf32 = was


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """All that the random numbers of a run depend on, in every mode."""
    state = {"cpu": torch.get_rng_state()}
    return {**state, str(device): torch.cuda.get_rng_state(device)} if device.type == "cuda" else state


def set_rng_state(state: dict[str, Tensor]) -> None:
    for device, value in state.items():
        if device == "cpu":
            torch.set_rng_state(value)
        else:
            torch.cuda.set_rng_state(value, device)


def _with(whole: Any, **methods: Any) -> Any:
    """The same object with some of its methods replaced."""
    twin = copy.copy(whole)
    twin.__dict__.update(methods)
    return twin


def _weigh(step: Step, chains: Chains, steps: int) -> tuple[str, str]:
    """Whether compiling is repaid, from the time of an eager gradient."""
    kind = step.device.type
    batch = step.batches.look(chains.theta.shape[0])
    each, saved = math.inf, math.inf
    with unchanged(step.device):
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


def _dials(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros((), device=device), torch.zeros((), device=device)


def _assign(old: Chains, new: Chains) -> None:
    """Write new states into the old tensors."""
    pairs = [(old.theta, new.theta)]
    pairs += [(old.sampler[k], v) for k, v in new.sampler.items()] + [
        (old.history[k], v) for k, v in new.history.items()
    ]
    pairs = [(a, b) for a, b in pairs if a is not b]
    torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
