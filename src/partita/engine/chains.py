"""Energies of many chains at once: vmap where the module allows it, else a loop, which always works.

Shapes: C chains, k compositions, D coordinates; φ [C, k, D] -> U [C, k] and ∇U [C, k, D]; batch leaves [C, B, ...].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from partita.target import Batch, Target
from partita.target.trees import map_tree

AGREE = 0.05  # relative difference of gradients under vmap and in the loop that rounding may explain, bfloat16 included


@dataclass(frozen=True)
class Energies:
    """U and ∇U of a target on the scale of n data. `how` is "vmap" or "loop"; `width` chains go at a time."""

    target: Target
    n: int
    how: str = "vmap"
    width: int | None = None

    def likelihood(self, phi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """φ [C, k, D] -> U_lik [C, k], ∇U_lik [C, k, D]."""
        if self.how == "loop":
            return self._loop(phi, batch)
        width = self.width or phi.shape[0]
        pieces = [self._piece(phi[a : a + width], _slice(batch, a, width)) for a in range(0, phi.shape[0], width)]
        return pieces[0] if len(pieces) == 1 else (torch.cat([u for u, _ in pieces]), torch.cat([g for _, g in pieces]))

    def prior(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """θ [C, D] -> U_prior [C], ∇U_prior [C, D]."""
        if not self.target.has_prior:
            return torch.zeros_like(theta[:, 0]), torch.zeros_like(theta)
        with torch.enable_grad():
            here = theta.detach().requires_grad_()
            u = vmap(self.target.prior_energy)(here)
            return u.detach(), _gradient(u, here)

    def energy(self, theta: Tensor, batch: Batch) -> Tensor:
        """θ [C, D] -> U_lik [C], without a gradient."""
        with torch.no_grad():
            if self.how == "loop":
                one = [self.target.likelihood_energy(theta[c], _pick(batch, c), self.n) for c in range(len(theta))]
                return torch.stack(one)
            f = lambda theta, b: self.target.likelihood_energy(theta, b, self.n)
            return vmap(f, in_dims=(0, 0 if batch is not None else None), chunk_size=self.width)(theta, batch)

    def _piece(self, phi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """All of φ at once. Row energies depend on their own row alone, so the gradient of their sum is every row's."""
        C, k, D = phi.shape
        f = lambda theta, b: self.target.likelihood_energy(theta, b, self.n)
        with torch.enable_grad():
            here = phi.detach().requires_grad_()
            if batch is None:
                u = vmap(f, in_dims=(0, None))(here.reshape(C * k, D), None).view(C, k)
            elif k == 1:
                u = vmap(f)(here.squeeze(1), batch).unsqueeze(1)
            else:
                u = vmap(vmap(f, in_dims=(0, None)))(here, batch)
            return u.detach(), _gradient(u, here)

    def _loop(self, phi: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        u = torch.empty(phi.shape[:2], dtype=phi.dtype, device=phi.device)
        du = torch.empty_like(phi)
        for c in range(phi.shape[0]):
            mine = _pick(batch, c)
            for k in range(phi.shape[1]):
                theta = phi[c, k].detach().clone().requires_grad_()
                with torch.enable_grad():
                    # modules that write into their parameters (max_norm) write into this copy
                    energy = self.target.likelihood_energy(theta * 1, mine, self.n)
                    du[c, k] = _gradient(energy, theta)
                u[c, k] = energy.detach()
        return u, du


def choose(target: Target, n: int, batch: Batch, chains: str = "auto", passes: int = 1) -> tuple[Energies, str | None]:
    """Probe gradient and forward with two copies, nested if a step has several passes; the reason when only the loop
    works. `batch` has a chain axis of 2."""
    loop = Energies(target, n, "loop")
    theta = target.space.values.expand(2, -1).contiguous()
    theta = theta + 1e-3 * torch.linspace(-1, 1, theta.shape[1]).to(theta)
    try:
        u, du = loop.likelihood(theta[:1].unsqueeze(1), _slice(batch, 0, 1))
    except Exception as e:
        raise ValueError(f"the gradient of the likelihood failed, expected one: {_first_line(e)}") from e
    if target.needs_data and not bool(du.any()) and bool(u.isfinite().all()):
        raise ValueError(
            "the likelihood does not depend on theta (its gradient is zero everywhere), expected it to: forward must "
            "call the module it is given, not another one"
        )
    if chains == "loop":
        return loop, None
    try:
        fast = Energies(target, n, "vmap")
        _, same = fast.likelihood(theta.unsqueeze(1).repeat(1, min(passes, 2), 1), batch)
        fast.energy(theta, batch)
        apart = float((same[:1, :1] - du).norm() / du.norm())
        if apart > AGREE:  # NaN, when the start has no finite gradient, is for the run to report
            raise RuntimeError(f"its gradient is {apart:.0%} off under vmap")
    except Exception as e:  # whatever vmap cannot follow, the loop can
        if chains == "vmap":
            raise ValueError(f"chains='vmap' does not work for this module: {_first_line(e)}") from e
        return loop, _first_line(e)
    return fast, None


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


def _gradient(u: Tensor, theta: Tensor) -> Tensor:
    """∂(Σ u)/∂θ; zero where u does not depend on θ."""
    if not u.requires_grad:
        return torch.zeros_like(theta)
    (du,) = torch.autograd.grad(u.sum(), theta, allow_unused=True)  # of a scalar: other forms import sympy, 1 s
    return torch.zeros_like(theta) if du is None else du


def _slice(batch: Batch, start: int, count: int) -> Batch:
    return None if batch is None else map_tree(lambda t: t[start : start + count], batch)


def _pick(batch: Batch, c: int) -> Batch:
    return None if batch is None else map_tree(lambda t: t[c], batch)


def _first_line(e: Exception) -> str:
    text = str(e).strip()
    return f"{type(e).__name__}: {text.splitlines()[0] if text else ''}"[:160]
