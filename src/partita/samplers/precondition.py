"""The diagonal preconditioner that pSGLD and adaptive SGHMC share.

    V ← βV + (1-β) g²  while adapting,   V̂ = V / (1 - β^n),   G = 1 / (1/scale + √V̂)

(Li et al. 2016, with Adam's bias correction.) g is on the full-data scale, so √V̂ has the unit 1/θ, and the damping
1/scale keeps every entry of G below the prior's own scale. V, G [C, D]; scale [D]; n counts adaptations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from partita.samplers.base import Rate, State


def init(theta: Tensor, scale: Tensor) -> State:
    n = torch.zeros((), dtype=theta.dtype, device=theta.device)
    return {"V": torch.zeros_like(theta), "n": n, "scale": scale.to(theta)}


def update(state: State, g: Tensor, beta: float, adapt: Rate) -> State:
    return {**state, "V": state["V"] + adapt * (1 - beta) * (g * g - state["V"]), "n": state["n"] + adapt}


def matrix(state: State, beta: float) -> Tensor:
    """G [C, D]."""
    V = state["V"] / (1 - beta ** state["n"].clamp(min=1))
    return 1 / (1 / state["scale"] + V.sqrt())
