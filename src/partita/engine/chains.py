"""Energies of many chains at once: vmap where the module allows it, else a loop, which always works.

Shapes: C chains, k compositions, D coordinates; φ [C, k, D] -> U [C, k] and ∇U [C, k, D]; batch leaves [C, B, ...].
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from partita.target import Batch, Target
from partita.target.packing import Packing
from partita.target.trees import map_tree

STREAMS = 16  # passes side by side

Over = Callable[[Callable[..., Any]], Callable[..., Any]]  # maps a function of one row over rows


@dataclass(frozen=True)
class Energies:
    """U and ∇U of a target on the scale of n data.

    how        "vmap"; "loop", one pass after another; "streams", the loop with its passes side by side on the GPU
    width      so many chains go at a time under vmap (None: all)
    pieces     the K compositions of a step share the minibatch out, B/K rows each (1: each sees all of it)
    precision  "bf16" runs the network in bfloat16; θ, energies and gradients stay float32
    packed     the target in an order that suits its kernels, used where passes go one by one
    """

    target: Target
    n: int
    how: str = "vmap"
    width: int | None = None
    pieces: int = 1
    precision: str = "float32"
    packed: tuple[Target, Packing] | None = None

    def likelihood(self, phi: Tensor, batch: Batch, first: int = 0) -> tuple[Tensor, Tensor]:
        """φ [C, k, D], of which the step's composition number `first` is the first -> U_lik [C, k], ∇U_lik [C, k, D]."""
        if self.pieces > 1:
            mine = slice(first, first + phi.shape[1])  # [C, B, ...] -> [C, k, B/pieces, ...]
            batch = map_tree(lambda t: t.unflatten(1, (self.pieces, -1))[:, mine], batch)
        if phi.shape[:2] == (1, 1):  # plain matrix products are faster than batches of one
            u, du = self.value_and_gradient(phi[0, 0], pick(pick(batch, 0), 0) if self.pieces > 1 else pick(batch, 0))
            return u.view(1, 1), du.view(1, 1, -1)
        if self.how != "vmap":
            return self._loop(phi, batch)
        width = self.width or phi.shape[0]
        cuts = [slice(a, a + width) for a in range(0, phi.shape[0], width)]
        parts = [self._vmap(phi[s], pick(batch, s)) for s in cuts]
        return parts[0] if len(parts) == 1 else (torch.cat([u for u, _ in parts]), torch.cat([g for _, g in parts]))

    def prior(self, theta: Tensor) -> Tensor:
        """θ [C, D] -> ∇U_prior [C, D]."""
        f = self.target.prior_energy
        return _gradients(vmap, f, theta)[1] if self.target.has_prior else torch.zeros_like(theta)

    def prior_energy(self, theta: Tensor) -> Tensor:
        """θ [C, D] -> U_prior [C], apart from the step, which needs its gradient alone."""
        return vmap(self.target.prior_energy)(theta)

    def energy(self, theta: Tensor, batch: Batch) -> Tensor:
        """θ [C, D] -> U_lik [C] on the whole batch, without a gradient."""
        with torch.no_grad():
            if self.how != "vmap":
                return torch.stack([self._u(theta[c], pick(batch, c)) for c in range(len(theta))])
            return vmap(self._u, in_dims=(0, 0 if batch is not None else None), chunk_size=self.width)(theta, batch)

    def _u(self, theta: Tensor, batch: Batch, target: Target | None = None) -> Tensor:
        """θ [D] -> U_lik."""
        target = target or self.target
        if self.precision == "float32":
            return target.likelihood_energy(theta, batch, self.n)
        with torch.autocast(theta.device.type, torch.bfloat16, cache_enabled=False):
            return target.likelihood_energy(theta, batch, self.n).to(theta.dtype)

    def _vmap(self, phi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        C, k, D = phi.shape
        if batch is None:
            u, du = _gradients(lambda f: vmap(f, in_dims=(0, None)), self._u, phi.reshape(C * k, D), None)
            return u.view(C, k), du.view(C, k, D)
        if k == 1:
            mine = map_tree(lambda t: t.squeeze(1), batch) if self.pieces > 1 else batch
            u, du = _gradients(vmap, self._u, phi.squeeze(1), mine)
            return u.unsqueeze(1), du.unsqueeze(1)
        inner = None if self.pieces == 1 else 0
        return _gradients(lambda f: vmap(vmap(f, in_dims=(0, inner))), self._u, phi, batch)

    def _loop(self, phi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        u = torch.empty(phi.shape[:2], dtype=phi.dtype, device=phi.device)
        du = torch.empty_like(phi)
        places = [(c, k) for c in range(phi.shape[0]) for k in range(phi.shape[1])]
        with _side_by_side(phi.device, len(places) if self.how == "streams" else 0) as on:
            for i, (c, k) in enumerate(places):
                mine = pick(batch, c)
                with on(i):
                    u[c, k], du[c, k] = self.value_and_gradient(phi[c, k], pick(mine, k) if self.pieces > 1 else mine)
        return u, du

    def value_and_gradient(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """θ [D] -> U_lik, ∇U_lik [D]. Modules that write into their parameters (max_norm) write into a copy."""
        if self.packed is None:
            return _gradients(lambda f: f, lambda t, b: self._u(t * 1, b), theta, batch)
        twin, packing = self.packed
        u, dpsi = _gradients(lambda f: f, lambda t, b: self._u(t * 1, b, twin), theta[packing.order], batch)
        return u, dpsi[packing.back]


def _gradients(over: Over, f: Callable[..., Tensor], theta: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """f for every row of θ, as `over` maps it, and its gradients. Rows depend on themselves alone, so in the eager form
    the gradient of their sum is every row's; a compiler follows the functional form."""
    if torch.compiler.is_compiling():
        du, u = over(grad_and_value(f))(theta, *rest)
        return u, du
    with torch.enable_grad():
        here = theta.detach().requires_grad_()
        u = over(f)(here, *rest)
        if not u.requires_grad:  # it does not depend on θ
            return u, torch.zeros_like(theta)
        (du,) = torch.autograd.grad(u.sum(), here, allow_unused=True)  # of a scalar: other forms import sympy, 1 s
    return u.detach(), torch.zeros_like(theta) if du is None else du


@contextlib.contextmanager
def _side_by_side(device: torch.device, passes: int) -> Iterator[Callable[[int], Any]]:
    """on(i): the context of pass i. With passes > 1 on CUDA each of up to STREAMS passes runs on a stream of its own."""
    if passes < 2 or device.type != "cuda":
        yield lambda i: contextlib.nullcontext()
        return
    here = torch.cuda.current_stream(device)
    streams = [torch.cuda.Stream(device) for _ in range(min(passes, STREAMS))]
    for s in streams:
        s.wait_stream(here)
    yield lambda i: torch.cuda.stream(streams[i % len(streams)])
    for s in streams:
        here.wait_stream(s)


def pick(batch: Batch, c: int | slice) -> Batch:
    return None if batch is None else map_tree(lambda t: t[c], batch)
