"""How a step is run: eagerly, compiled, or compiled and captured in CUDA graphs.

    advance(chains, rate, adapt, write) -> gradient           (the chains have moved)

All three run the same `Step`. Compiled: where all passes go at once the whole step is one compiled function, else its
parts are (the passes of the loop share one), and Python calls them in turn. A graph is that work captured and replayed.

Compiled code draws torch's own random numbers, so that the state of torch's generators is the whole random state, and that
on the CPU it equals eager code up to rounding (on CUDA it may draw masks, rows and noise in another order).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from partita.engine.step import Chains, Step
from partita.structure.gradient import Gradient
from partita.target import Batch
from partita.target.trees import leaves, map_tree, zip_trees

WHOLE = 4  # so many chunks are unrolled into one compiled step
# Inductor's own random numbers are slow on the CPU; shapes never change; reductions in two orders fail on ResNet-20.
OFF = "size_asserts", "alignment_asserts", "triton.mix_order_reduction"
SAFE: dict[str, Any] = {"fallback_random": True, **dict.fromkeys(OFF, False)}
SILENT = {"autotune_num_choices_displayed": 0, "max_autotune_report_choices_stats": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {**SAFE, "cpp_wrapper": True},
    "cuda": {**SAFE, "combo_kernels": True, "max_autotune_gemm": True, **SILENT},
}


class Eager:
    name = "eager"

    def __init__(self, step: Step):
        self.step = step

    def advance(self, chains: Chains, rate: float, adapt: float, write: bool) -> Gradient:
        return self.step(chains, rate, adapt, None, write)


class Compiled:
    name = "compile"

    def __init__(self, step: Step, chains: int, plain: bool = False):
        self.runs = compiled(step, chains, SAFE if plain else OPTIONS[step.device.type])
        self.step, self.batches = step, step.batches
        self.like: list[Any] = []  # what the leaves of a batch are, shapes and dtypes
        # tensors, so that nothing is compiled or captured anew when they change
        self.rate, self.adapt = torch.zeros((), device=step.device), torch.zeros((), device=step.device)
        self.set = (0.0, 0.0)

    def advance(self, chains: Chains, rate: float, adapt: float, write: bool) -> Gradient:
        batch = None if self.batches.inside else self.batches.draw(chains.theta.shape[0])
        go = self.run if self.fits(batch) else self.step
        return go(chains, rate, adapt, batch, write)

    def run(self, chains: Chains, rate: float, adapt: float, batch: Batch, write: bool) -> Gradient:
        self.dial(rate, adapt)
        grad = self.runs[False](chains, self.rate, self.adapt, batch)
        if write:  # eagerly: runs[True] would be a second compilation, for a microsecond
            self.step.remember(chains)
        return grad

    def fits(self, batch: Batch) -> bool:
        """Whether a batch is like the first, for which the code was compiled; others (of a loader that pads) go eagerly."""
        now = [] if batch is None else [(t.shape, t.dtype) for _, t in leaves(batch)]
        self.like = self.like or now
        return now == self.like

    def dial(self, rate: float, adapt: float) -> None:
        if (rate, adapt) != self.set:
            self.rate.fill_(rate)
            self.adapt.fill_(adapt)
            self.set = (rate, adapt)

    def probe(self, chains: Chains) -> Gradient:
        """A step of rate 0 from here that leaves the chains and the batches' order as they are."""
        batch = None if self.batches.inside else self.batches.look(chains.theta.shape[0])
        self.fits(batch)
        return self.runs[False](chains.aside(), torch.zeros_like(self.rate), torch.zeros_like(self.adapt), batch)


class Graph(Compiled):
    """Steps that write a history and steps that do not are a graph each. Of each kind the first step runs plainly, so
    that libraries load and choose their kernels, the second is captured, and from then on it is replayed."""

    name = "graph"

    def __init__(self, step: Step, chains: int, plain: bool = False):
        super().__init__(step, chains, plain)
        self.chains: Chains | None = None
        self.held: Batch = None
        self.warm: set[bool] = set()
        self.graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Gradient]] = {}

    def run(self, chains: Chains, rate: float, adapt: float, batch: Batch, write: bool) -> Gradient:
        self.dial(rate, adapt)
        if chains is not self.chains:  # graphs write into the tensors they were captured with
            self.chains, self.graphs = chains, {}
        if batch is not None:
            self._fill(batch)
        if write not in self.graphs:
            step = lambda: self.runs[write](chains, self.rate, self.adapt, self.held)
            if write not in self.warm:
                self.warm.add(write)
                return step()
            self.graphs[write] = captured(step)
        graph, grad = self.graphs[write]
        graph.replay()
        return grad

    def _fill(self, batch: Batch) -> None:
        if self.held is None:
            self.held = map_tree(torch.clone, batch)
        else:
            zip_trees(lambda pair: pair[0].copy_(pair[1], non_blocking=True), [self.held, batch])


def compiled(step: Step, chains: int, options: dict[str, Any]) -> dict[bool, Callable[..., Gradient]]:
    """The step as compiled code (compiled when first called), by whether it writes the history."""
    passes = chains * step.structure.passes
    run = lambda step, write: lambda chains, rate, adapt, batch: step(chains, rate, adapt, batch, write)
    if passes == 1 or (step.energies.how == "vmap" and step.structure.passes <= WHOLE * step.chunk):
        # one pass makes its gradient of many small tensors: one launch for all of them
        options = {k: v for k, v in options.items() if passes == 1 or k != "combo_kernels"}
        # inputs never change but in value, and checks of that are a tenth of a small network's step
        options["guard_filter_fn"] = torch.compiler.skip_all_guards_unsafe
        return {write: _compile(run(step, write), options) for write in (False, True)}
    parts = lambda whole, *names: _with(whole, **{n: _compile(getattr(whole, n), SAFE) for n in names})
    twin = replace(
        step,
        batches=parts(step.batches, "draw") if step.batches.inside else step.batches,
        structure=parts(step.structure, "masks", "compose", "masked"),
        energies=parts(step.energies, "value_and_gradient", "prior"),
    )
    return {write: run(parts(twin, "move"), write) for write in (False, True)}


def _compile(f: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    from torch._inductor import config  # a second to import

    def own(*args: Any) -> Any:
        return f(*args)

    # a code object of its own: torch looks up what it compiled by that, and a step must not find another step's
    code = types.FunctionType(own.__code__.replace(), own.__globals__, f.__name__, None, own.__closure__)
    known = {k: v for k, v in options.items() if k == "guard_filter_fn" or k in config.get_config_copy()}
    return torch.compile(code, fullgraph=True, dynamic=False, options=known)


def _with(whole: Any, **methods: Any) -> Any:
    """The same object with some of its methods replaced."""
    twin = object.__new__(type(whole))
    twin.__dict__.update(whole.__dict__ | methods)
    return twin


def captured(f: Callable[[], Any], warm: int = 0) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The work f launches as one graph, not yet run, and where its results will be; before that f is called `warm` times,
    on a stream of its own as in a capture, until libraries have loaded and chosen their kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm):
            f()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = f()
    return graph, out
