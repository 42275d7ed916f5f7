"""Energies of many chains at once: vmap where the module allows it, else a loop, which always works.

Shapes: C chains, k compositions, D coordinates; φ [C, k, D] -> U [C, k] and ∇U [C, k, D]; batch leaves [C, B, ...].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from partita.target import Batch, Target
from partita.target.trees import map_tree


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
        f = grad_and_value(lambda theta, b: self.target.likelihood_energy(theta, b, self.n))
        chain = 0 if batch is not None else None
        du, u = vmap(vmap(f, in_dims=(0, None)), in_dims=(0, chain), chunk_size=self.width)(phi, batch)
        return u, du

    def prior(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """θ [C, D] -> U_prior [C], ∇U_prior [C, D]."""
        if not self.target.has_prior:
            return torch.zeros_like(theta[:, 0]), torch.zeros_like(theta)
        du, u = vmap(grad_and_value(self.target.prior_energy))(theta)
        return u, du

    def energy(self, theta: Tensor, batch: Batch) -> Tensor:
        """θ [C, D] -> U_lik [C], without a gradient."""
        with torch.no_grad():
            if self.how == "loop":
                one = [self.target.likelihood_energy(theta[c], _pick(batch, c), self.n) for c in range(len(theta))]
                return torch.stack(one)
            f = lambda theta, b: self.target.likelihood_energy(theta, b, self.n)
            return vmap(f, in_dims=(0, 0 if batch is not None else None), chunk_size=self.width)(theta, batch)

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
                    (du[c, k],) = torch.autograd.grad(energy, theta)
                u[c, k] = energy.detach()
        return u, du


def choose(target: Target, n: int, batch: Batch, chains: str = "auto") -> tuple[Energies, str | None]:
    """Probe gradient and forward with two copies; the reason when only the loop works. `batch` has a chain axis of 2."""
    loop = Energies(target, n, "loop")
    theta = target.space.values.expand(2, -1).contiguous()
    theta = theta + 1e-3 * torch.linspace(-1, 1, theta.shape[1]).to(theta)
    u, du = loop.likelihood(theta[:1].unsqueeze(1), map_tree(lambda t: t[:1], batch) if batch is not None else None)
    if target.needs_data and not bool(du.any()) and bool(u.isfinite().all()):
        raise ValueError(
            "the likelihood does not depend on theta (its gradient is zero everywhere): forward must call the module "
            "it is given, not another one"
        )
    if chains == "loop":
        return loop, None
    try:
        fast = Energies(target, n, "vmap")
        fast.likelihood(theta.unsqueeze(1), batch)
        fast.energy(theta, batch)
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


def _pick(batch: Batch, c: int) -> Batch:
    return None if batch is None else map_tree(lambda t: t[c], batch)


def _first_line(e: Exception) -> str:
    text = str(e).strip()
    return f"{type(e).__name__}: {text.splitlines()[0] if text else ''}"[:160]
