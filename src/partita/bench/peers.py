"""The same jobs as their users would write them: a plain PyTorch loop, posteriors, BlackJAX."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from partita.bench.ours import EPS, Setting
from partita.bench.timing import Advance


def pytorch(at: Setting, method: str, precision: str = "float32", layout: str = "plain", R: int = 64) -> Advance:
    """One chain by hand: SGLD, pSGLD or S_d-pSGLD (each parameter its own group, ρ = ½, a window of R states)."""
    device, (x, y) = at.device, (t.to(at.device) for t in at.data)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    net = copy.deepcopy(at.network).to(device)
    params = {k: p.detach().clone() for k, p in net.named_parameters()}
    buffers = {k: b.clone() for k, b in net.named_buffers()}
    theta = torch.cat([p.flatten() for p in params.values()])
    shapes, sizes = [p.shape for p in params.values()], [p.numel() for p in params.values()]
    N, D = len(y), theta.numel()
    V, rows, place = torch.zeros_like(theta), theta.expand(R, D).clone(), torch.arange(D, device=device)

    def energy(flat: Tensor) -> Tensor:
        batch = torch.randint(N, (at.B,), device=device)
        tree = {k: v.view(s) for k, v, s in zip(params, flat.split(sizes), shapes)}
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            logits = functional_call(net, {**tree, **buffers}, (x[batch],))
        return N * F.cross_entropy(logits.float(), y[batch]) + 0.5 * flat.square().sum()

    def step(t: int) -> None:
        nonlocal theta, V
        phi = theta
        if method == "S_d-pSGLD":
            r = torch.rand(D, device=device) < 0.5
            phi = torch.where(r, theta, rows[torch.randint(R, (D,), device=device), place])
        phi = phi.detach().requires_grad_()
        (g,) = torch.autograd.grad(energy(phi), phi)
        if method == "S_d-pSGLD":
            g = 2 * r * g
        if method == "SGLD":
            theta = theta - EPS / 2 * g + math.sqrt(EPS) * torch.randn_like(theta)
        else:
            V = 0.99 * V + 0.01 * g * g
            G = 1 / (1 + V.sqrt())
            theta = theta - EPS / 2 * G * g + (EPS * G).sqrt() * torch.randn_like(theta)
        if method == "S_d-pSGLD" and t % 10 == 0:
            rows[t // 10 % R] = theta

    def advance(steps: int) -> None:
        for t in range(steps):
            step(t)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return advance


def posteriors(at: Setting) -> Advance:
    """One chain of SGLD with posteriors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import posteriors as library
    net, (x, y), N = copy.deepcopy(at.network).to(at.device), (t.to(at.device) for t in at.data), len(at.data[1])

    def log_posterior(params: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = functional_call(net, params, (batch[0],))
        prior = sum(-0.5 * p.square().sum() for p in params.values())
        return prior / N - F.cross_entropy(logits, batch[1]), torch.empty(0)

    transform = library.sgmcmc.sgld.build(log_posterior, lr=EPS / 2 * N, temperature=1 / N)
    state = transform.init({k: p.detach().clone() for k, p in net.named_parameters()})

    def advance(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            batch = torch.randint(N, (at.B,), device=at.device)
            state, _ = transform.update(state, (x[batch], y[batch]))
        if at.device.type == "cuda":
            torch.cuda.synchronize()

    return advance


def blackjax(at: Setting, chains: int = 1, how: str = "scan", unroll: int = 100) -> Advance:
    """SGLD with BlackJAX for a network of linear layers: `unroll` steps a compiled scan, or a compiled step in a loop."""
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
    import blackjax as library
    import jax
    import jax.numpy as jnp

    x, y = (jnp.asarray(t.cpu().numpy()) for t in at.data)
    N = len(y)
    weights = [
        (jnp.asarray(m.weight.detach().cpu().numpy().T), jnp.asarray(m.bias.detach().cpu().numpy()))
        for m in at.network.modules()
        if isinstance(m, torch.nn.Linear)
    ]

    def network(params: Any, x: Any) -> Any:
        for w, b in params[:-1]:
            x = jax.nn.relu(x @ w + b)
        return x @ params[-1][0] + params[-1][1]

    def log_prior(params: Any) -> Any:
        return -0.5 * sum(jnp.sum(p**2) for p in jax.tree.leaves(params))

    def log_likelihood(params: Any, batch: Any) -> Any:
        return jax.nn.log_softmax(network(params, batch[0][None])[0])[batch[1]]

    gradient = library.sgmcmc.gradients.grad_estimator(log_prior, log_likelihood, N)
    sgld = library.sgld(gradient)

    def step(key: Any, params: Any) -> Any:
        which, noise = jax.random.split(key)
        batch = jax.random.randint(which, (at.B,), 0, N)
        return sgld.step(noise, params, (x[batch], y[batch]), EPS / 2)

    many = step if chains == 1 else jax.vmap(step)
    keys = (lambda k, n: jax.random.split(k, n)) if chains == 1 else (lambda k, n: jax.random.split(k, (n, chains)))
    params = weights if chains == 1 else jax.tree.map(lambda p: jnp.repeat(p[None], chains, 0), weights)
    scan = jax.jit(lambda params, ks: jax.lax.scan(lambda p, k: (many(k, p), None), params, ks)[0])
    one = jax.jit(many)
    seed = 0

    def advance(steps: int) -> None:
        nonlocal params, seed
        seed += 1
        if how == "scan":
            for i in range(max(1, steps // unroll)):
                params = scan(params, keys(jax.random.fold_in(jax.random.key(seed), i), unroll))
        else:
            for k in keys(jax.random.key(seed), steps):
                params = one(k, params)
        jax.block_until_ready(params)

    advance(unroll)
    return advance
