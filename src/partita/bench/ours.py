"""Partita's side: the engine's own step, without the loop around it, and one whole `sample`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from partita.bench.timing import Advance
from partita.engine.modes import Graph
from partita.runs.choose import choose_engine
from partita.runs.sampling import sample
from partita.runs.setup import prepare
from partita.runs.torchstate import awake, switched
from partita.samplers import Sampler
from partita.structure import Structure
from partita.target import Categorical, Normal, Posterior

EPS = 1e-6


@dataclass(frozen=True)
class Setting:
    """A network and data to sample it on, B rows a step."""

    network: nn.Module
    data: tuple[Tensor, Tensor]
    B: int
    device: torch.device

    @property
    def posterior(self) -> Posterior:
        return Posterior(self.network, Categorical(), Normal(1.0))


def engine(
    at: Setting,
    sampler: Sampler,
    structure: Structure,
    chains: int,
    mode: str,
    precision: str = "float32",
    how: str = "auto",
) -> Advance:
    """advance() of the engine in this mode, which must not fall back."""
    cudnn = torch.backends.cudnn
    with switched(precision):
        plan = prepare(
            at.posterior,
            at.data,
            structure,
            sampler,
            chains=chains,
            batch_size=at.B,
            init="module",
            device=at.device,
            burn_in=100,
            how=how,
            precision="bf16" if precision == "bf16" else "float32",
        )
        states = plan.step.init(plan.theta)
        cudnn.allow_tf32 = not cudnn.allow_tf32  # what cuDNN chooses here, perhaps beside others, is chosen again below
        choice = choose_engine(mode, plan.step, states, 10_000)
        if not choice.fell_back:
            for write in (False, True):  # both kinds of step are compiled
                choice.engine.advance(states, EPS, 0.0, write and plan.step.structure.history is not None)
    if choice.fell_back:
        raise RuntimeError(choice.why)
    history, t = plan.step.structure.history, 0

    def advance(steps: int) -> None:
        nonlocal t
        with switched(precision):
            if t == 0 and isinstance(choice.engine, Graph):  # kernels are chosen and graphs captured
                choice.engine.warm.clear()
                awake(at.device)
                for write in (False, False, history is not None, history is not None):
                    choice.engine.advance(states, EPS, 0.0, write)
            for _ in range(steps):
                t += 1
                choice.engine.advance(states, EPS, 0.0, history is not None and t % history.every == 0)
            if at.device.type == "cuda":
                torch.cuda.synchronize()

    return advance


def whole(at: Setting, steps: int, **settings: Any) -> Advance:
    """The loop of `pt.sample` around the same engine: what is kept, checked and watched included."""

    def advance(_: int) -> float:
        run = sample(
            at.posterior,
            at.data,
            steps=steps,
            burn_in=steps // 2,
            batch_size=at.B,
            init="module",
            device=at.device,
            progress=False,
            **settings,
        )
        return float(run.settings["seconds"])

    return advance
