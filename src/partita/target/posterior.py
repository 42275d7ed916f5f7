"""Targets: what is sampled, as an energy U(θ) = -log joint on the scale of the full data.

    U(θ) = U_prior(θ) + U_lik(θ),     U_lik(θ; batch) = -power · (N/B) Σ_b log p(y_b | x_b, θ)

N/B stands in `Posterior.likelihood_energy` and nowhere else. Shapes: θ [D]; a batch is (x, y) with B rows.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from partita.target.functional import Forward, FunctionalModule
from partita.target.likelihoods import FromFunction, as_likelihood, check_per_datum
from partita.target.packing import Packing
from partita.target.priors import BoundPrior, Normal, Prior
from partita.target.space import LIKELIHOOD, ParameterSpace
from partita.target.trees import leaves, short

Batch = tuple[Any, Tensor] | None


class Target(Protocol):
    """What the rest of Partita asks of a target. T = `temperature` of the whole energy."""

    space: ParameterSpace
    temperature: float
    needs_data: bool
    has_prior: bool

    def prior_energy(self, theta: Tensor) -> Tensor:
        """U_prior(θ), a scalar: whole, never masked."""

    def likelihood_energy(self, theta: Tensor, batch: Batch, n: int) -> Tensor:
        """U_lik(θ; batch), a scalar on the scale of all n data."""

    def prior_scale(self) -> Tensor:
        """[D], the scale no preconditioner may exceed."""

    def start(self, how: str, chains: int) -> Tensor:
        """[C, D] starting points, from torch's current random state."""

    def to(self, device: torch.device) -> Target:
        """Everything fixed on that device."""

    def packed(self, half: torch.dtype | None) -> tuple[Target, Packing] | None:
        """A twin whose U_lik takes ψ = θ[order], if there is one (target/packing.py)."""


class Posterior:
    """The posterior of an nn.Module's parameters under a likelihood and a prior.

    `random` picks by name patterns what is sampled (default: all that is trainable); `forward(module, x)` says how the
    module is called; `batchnorm` is "recalibrate" or "frozen"; `temperature` tempers U, `likelihood_power` U_lik alone
    (both 1 is Bayes). The module is copied, and never changed.
    """

    needs_data = True
    has_prior = True

    def __init__(
        self,
        model: nn.Module,
        likelihood: Any,
        prior: Prior | None = None,
        *,
        random: str | Iterable[str] | None = None,
        forward: Forward | None = None,
        batchnorm: str | None = None,
        temperature: float = 1.0,
        likelihood_power: float = 1.0,
    ):
        if not isinstance(model, nn.Module):
            raise ValueError(f"model is a {type(model).__name__}, expected an nn.Module")
        if isinstance(model, torch.jit.ScriptModule):
            raise ValueError(f"model is a {type(model).__name__}, expected the nn.Module that it was made of")
        self.temperature = _positive("temperature", temperature)
        self.likelihood_power = _positive("likelihood_power", likelihood_power)
        self.model, self.likelihood = model, as_likelihood(likelihood)
        self.prior: Prior = Normal(1.0) if prior is None else prior
        if not hasattr(self.prior, "bind") or isinstance(self.prior, type):
            raise ValueError(f"prior is {short(prior)}, expected pt.Normal(...), pt.Laplace(...) or pt.StudentT(...)")
        weights = ParameterSpace.of_module(model, random)
        own = {LIKELIHOOD + k: v for k, v in self.likelihood.parameters().items()}
        self.space, self._own = weights.extend(own), tuple(own)
        self._tree: Callable[[Tensor], dict[str, Tensor]] = self.space.tree
        self._weights_dim = weights.dim
        self._bound: BoundPrior = self.prior.bind(weights)
        self.network = FunctionalModule(model, forward, batchnorm)
        if self.network.batchnorm == "recalibrate":
            warnings.warn(
                "BatchNorm couples the data of a batch, so this is no product likelihood: sampling uses batch "
                "statistics and recomputes them for every kept draw (batchnorm='frozen' keeps the module's)",
                stacklevel=2,
            )

    # -- energy ------------------------------------------------------------------------------------------------------
    def split(self, theta: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """θ [D] -> the module's tensors, the likelihood's own."""
        tree = self._tree(theta)
        own = {k.removeprefix(LIKELIHOOD): tree.pop(k) for k in self._own}
        return tree, own

    def log_likelihood(self, theta: Tensor, batch: Batch) -> Tensor:
        """log p(y_b | x_b, θ), [B]."""
        assert batch is not None
        x, y = batch
        tree, own = self.split(theta)
        return self.likelihood.log_prob(self.network(tree, x), y, own)

    def likelihood_energy(self, theta: Tensor, batch: Batch, n: int) -> Tensor:
        log_p = self.log_likelihood(theta, batch)
        return -self.likelihood_power * (n / log_p.shape[0]) * log_p.sum()

    def prior_energy(self, theta: Tensor) -> Tensor:
        energy = self._bound.energy(theta[: self._weights_dim])
        if self._weights_dim == self.space.dim:
            return energy
        return energy + self.likelihood.prior_energy(self.split(theta)[1])

    def prior_scale(self) -> Tensor:
        own = torch.ones(self.space.dim - self._weights_dim).to(self._bound.scale)
        return torch.cat([self._bound.scale, own])

    # -- predictions -------------------------------------------------------------------------------------------------
    def predict(self, theta: Tensor, x: Any, statistics: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What the draw θ [D] predicts at x: {"probs": [n, ...]} or {"mean": ..., "sd": ...}."""
        tree, own = self.split(theta.clone())  # a module that writes into its weights must not write into draws
        return self.likelihood.predict(self.network(tree, x, statistics), own)

    def recalibrate(self, theta: Tensor, batches: Iterable[Any]) -> dict[str, Tensor]:
        """BatchNorm statistics of the draw θ [D] over input batches; {} when the policy needs none."""
        return self.network.recalibrate(self.split(theta.clone())[0], batches)

    def module(self, theta: Tensor, statistics: Mapping[str, Tensor] | None = None) -> nn.Module:
        """A new module that holds θ [D]."""
        return self.network.module({**self.split(theta)[0], **(statistics or {})})

    # -- starting points and checks ----------------------------------------------------------------------------------
    def start(self, how: str, chains: int) -> Tensor:
        here = self.space.values.expand(chains, -1).clone()
        if how == "module":
            return here
        prior = here.clone()
        prior[:, : self._weights_dim] = self._bound.sample(chains)
        if how == "prior":
            own = {LIKELIHOOD + k: v for k, v in self.likelihood.sample(chains).items()}
            return self.space.flatten({**self.space.tree(prior), **own})
        if how == "fresh":
            return torch.stack([self._fresh(p) for p in prior])
        raise ValueError(f"init is {how!r}, expected 'fresh', 'module', 'prior', 'map' or a tensor [D] or [C, D]")

    def _fresh(self, prior: Tensor) -> Tensor:
        """[D]: what each layer's own reset_parameters() gives; what no reset reaches is drawn from the prior."""
        reset = {k: v for k, v in self.network.fresh().items() if k in self.space.names}
        return self.space.flatten({**self.space.tree(prior), **reset})

    def unreached(self) -> list[str]:
        """The sampled parameters that no layer's reset_parameters() reaches."""
        own = {LIKELIHOOD + k for k in self.likelihood.parameters()}
        return [n for n in self.space.names if n not in own and n not in self.network.fresh()]

    def check(self, batch: Batch, y_all: Tensor) -> Callable[[Tensor], None]:
        """Refuse, before any work, data or a likelihood that do not fit: `batch` a few rows, `y_all` every target there
        is. The check of targets that come later is returned."""
        assert batch is not None
        x, y = batch
        theta = self.space.values
        try:
            with torch.no_grad():
                output, written = self.network.probe(self.split(theta)[0], x)
        except Exception as e:
            raise forward_failed(e, x, self.space.values.dtype) from e
        if isinstance(output, Tensor) and (output.dim() == 0 or output.shape[0] != y.shape[0]):
            raise ValueError(
                f"the network returned {tuple(output.shape)} for {y.shape[0]} rows, expected [{y.shape[0]}, ...]"
            )
        if written:
            warnings.warn(
                f"the module writes into its own weights {written}: they are written into copies, and the gradient is "
                "taken as if they were not",
                stacklevel=5,
            )
        self.likelihood.check(output, y_all)
        with torch.no_grad():
            log_p = self.log_likelihood(theta, batch)
        check_per_datum(log_p, y.shape[0])
        if isinstance(self.likelihood, FromFunction):
            self.likelihood.check_alone(output, y, log_p)
        return lambda y: self.likelihood.check(output, y)

    def to(self, device: torch.device) -> Posterior:
        """The same posterior with everything fixed on that device."""
        twin = copy.copy(self)
        twin.network = self.network.moved(device)
        twin.space = ParameterSpace(self.space.blocks, self.space.values.to(device))
        twin._tree = twin.space.tree
        twin._bound = self._bound.to(device)
        return twin

    def fixed(self) -> dict[str, Tensor]:
        """What of the module is neither random nor recomputed for each draw: {name: tensor}."""
        moving = {*self.space.names, *(self.network.statistics() if self.network.batchnorm == "recalibrate" else ())}
        return {k: v for k, v in self.network.held().items() if k not in moving}

    def holding(self, fixed: Mapping[str, Tensor]) -> Posterior:
        """The same posterior with these values of what is fixed."""
        mine = self.fixed()
        if other := sorted(set(mine) ^ set(fixed)) or [k for k in mine if mine[k].shape != fixed[k].shape]:
            raise ValueError(f"the fixed tensors of the module differ in {other[:4]}, expected those the run has saved")
        twin = self.to(self.space.values.device)
        held = twin.network.held()
        for k, v in fixed.items():
            held[k].copy_(v)
        return twin

    def packed(self, half: torch.dtype | None) -> tuple[Posterior, Packing]:
        twin, packing = copy.copy(self), Packing.of(self.space, half)
        twin._tree = packing.tree
        return twin, packing

    def __repr__(self) -> str:
        return (
            f"Posterior({type(self.model).__name__}, {self.likelihood}, prior={self.prior}, D={self.space.dim:,}, "
            f"temperature={self.temperature:g}, likelihood_power={self.likelihood_power:g})"
        )


class Density:
    """A density over R^D given by its logarithm; no data.

    `log_prob(theta: [D]) -> scalar` is what gets composed and masked; `log_prior`, if given, stays whole. `shapes` names
    the parts of θ, so that partitions by layer and neuron apply: Density(f, shapes={"a.weight": (2, 3)}).
    """

    needs_data = False

    def __init__(
        self,
        log_prob: Callable[[Tensor], Tensor],
        dim: int | None = None,
        *,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        log_prior: Callable[[Tensor], Tensor] | None = None,
        temperature: float = 1.0,
        likelihood_power: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ):
        if not callable(log_prob):
            raise ValueError(f"log_prob is {log_prob!r}, expected a function theta [D] -> scalar")
        if (dim is None) == (shapes is None):
            raise ValueError(f"Density got dim={dim} and shapes={shapes}, expected exactly one of them")
        if dim is not None and (not isinstance(dim, int) or dim < 1):
            raise ValueError(f"Density got dim={dim!r}, expected a whole number of at least 1")
        self.temperature = _positive("temperature", temperature)
        self.likelihood_power = _positive("likelihood_power", likelihood_power)
        self.log_prob, self.log_prior, self.has_prior = log_prob, log_prior, log_prior is not None
        if shapes is not None and not isinstance(shapes, Mapping):
            raise ValueError(f"Density got shapes={shapes!r}, expected {{name: shape}} such as {{'w': (2, 3)}}")
        named = dict(shapes) if shapes is not None else {"theta": (dim or 0,)}
        self.space = ParameterSpace.of_tensors({k: torch.zeros(s, dtype=dtype) for k, s in named.items()})
        for name, f in (("log_prob", log_prob), ("log_prior", log_prior)):
            value = f(self.space.values) if callable(f) else f
            if f is not None and (not isinstance(value, Tensor) or value.dim() != 0):
                came = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"{name} gave {came} for theta [{self.space.dim}], expected a scalar tensor")

    def likelihood_energy(self, theta: Tensor, batch: Batch, n: int) -> Tensor:
        return -self.likelihood_power * self.log_prob(theta)

    def prior_energy(self, theta: Tensor) -> Tensor:
        return -self.log_prior(theta) if self.log_prior is not None else theta.new_zeros(())

    def prior_scale(self) -> Tensor:
        return torch.ones_like(self.space.values)

    def start(self, how: str, chains: int) -> Tensor:
        if how in ("fresh", "prior"):
            return torch.randn(chains, self.space.dim, dtype=self.space.values.dtype)
        if how == "module":
            return self.space.values.expand(chains, -1).clone()
        raise ValueError(f"init is {how!r}, expected 'fresh', 'module', 'map' or a tensor [D] or [C, D]")

    def to(self, device: torch.device) -> Density:
        twin = copy.copy(self)
        twin.space = ParameterSpace(self.space.blocks, self.space.values.to(device))
        return twin

    def packed(self, half: torch.dtype | None) -> None:
        return None

    def __repr__(self) -> str:
        return f"Density(D={self.space.dim}, temperature={self.temperature:g})"


def forward_failed(e: Exception, x: Any, dtype: torch.dtype) -> ValueError:
    """The error of a network that could not be called with these inputs."""
    said = str(e).strip().splitlines()
    got = ", ".join(f"{path} {list(t.shape)} {str(t.dtype)[6:]}" for path, t in leaves(x))
    return ValueError(
        f"the forward pass failed with {type(e).__name__}: {said[0][:200] if said else ''}; got {got} for a module of "
        f"{str(dtype)[6:]}, expected inputs it can be called with (forward=lambda module, x: ... says how)"
    )


def _positive(name: str, value: Any) -> float:
    if not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name} is {value!r}, expected a number above 0")
    return float(value)
