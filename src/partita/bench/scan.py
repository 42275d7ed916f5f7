"""S_d-pSGLD as a JAX scan: what another compiler makes of our step, on the networks of the benchmark."""

from __future__ import annotations

import logging
from typing import Any

import torch

from partita.bench.ours import EPS, Setting
from partita.bench.timing import Advance
from partita.models.resnet import Block, ResNet


def jax_scan(
    at: Setting, chains: int = 1, precision: str = "float32", K: int = 1, R: int = 64, unroll: int = 100
) -> Advance:
    """`unroll` steps a compiled scan; ρ = ½, each parameter its own group, a window of R states, every tenth written."""
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
    import jax
    import jax.numpy as jnp
    from jax.flatten_util import ravel_pytree

    half = jnp.bfloat16 if precision == "bf16" else jnp.float32
    forward, params = _resnet(at.network, half) if isinstance(at.network, ResNet) else _mlp(at.network, half)
    x, y = at.data
    X, Y = jnp.asarray(_last(x).cpu().numpy()), jnp.asarray(y.cpu().numpy())
    start, unravel = ravel_pytree(params)
    N, D = len(y), start.size

    def energy(flat: Any, xb: Any, yb: Any) -> Any:
        logits = forward(unravel(flat), xb).astype(jnp.float32)
        return -N * jnp.take_along_axis(jax.nn.log_softmax(logits), yb[:, None], 1).mean()

    def one(carry: tuple, key: Any) -> tuple:
        theta, V, rows, t = carry
        k = jax.random.split(key, 4)
        which = jax.random.randint(k[0], (at.B,), 0, N)
        xb, yb = X[which], Y[which]
        r = jax.random.bernoulli(k[1], 0.5, (K, D))
        past = rows[jax.random.randint(k[2], (K, D), 0, R), jnp.arange(D)]
        phi = jnp.where(r, theta, past)
        g = (
            theta + 2 / K * (r * jax.vmap(jax.grad(energy), (0, None, None))(phi, xb, yb)).sum(0)
            if K > 1
            else (theta + 2 * r[0] * jax.grad(energy)(phi[0], xb, yb))
        )
        V = 0.99 * V + 0.01 * g * g
        G = 1 / (1 + jnp.sqrt(V))
        theta = theta - EPS / 2 * G * g + jnp.sqrt(EPS * G) * jax.random.normal(k[3], (D,))
        row = jnp.where(t % 10 == 0, theta, rows[t // 10 % R])
        return theta, V, jax.lax.dynamic_update_index_in_dim(rows, row, t // 10 % R, 0), t + 1

    def step(carry: tuple, key: Any) -> tuple:
        return (one(carry, key) if chains == 1 else jax.vmap(one)(carry, jax.random.split(key, chains))), None

    scan = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys)[0], donate_argnums=0)
    carry: Any = (start, jnp.zeros(D), jnp.repeat(start[None], R, 0), jnp.zeros((), int))
    carry = carry if chains == 1 else jax.tree.map(lambda a: jnp.repeat(a[None], chains, 0), carry)
    seed = 0

    def advance(steps: int) -> None:
        nonlocal carry, seed
        for _ in range(steps // unroll):
            seed += 1
            carry = scan(carry, jax.random.split(jax.random.key(seed), unroll))
        jax.block_until_ready(carry)

    return advance


def _last(x: torch.Tensor) -> torch.Tensor:
    """Channels last, as XLA wants images."""
    return x.permute(0, 2, 3, 1).contiguous() if x.dim() == 4 else x


def _array(t: torch.Tensor) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(t.detach().cpu().numpy())


def _mlp(net: torch.nn.Module, half: Any) -> tuple[Any, Any]:
    import jax

    def forward(params: Any, x: Any) -> Any:
        x = x.astype(half)
        for i, (w, b) in enumerate(params):
            x = (jax.nn.relu(x) if i else x) @ w.astype(half) + b.astype(half)
        return x

    return forward, [(_array(m.weight.T), _array(m.bias)) for m in net.modules() if isinstance(m, torch.nn.Linear)]


def _resnet(net: ResNet, half: Any) -> tuple[Any, Any]:
    """models.resnet with shortcut A, and norm "batch" or "frn"."""
    import jax
    import jax.numpy as jnp

    def normed(norm: torch.nn.Module, act: torch.nn.Module) -> list[Any]:
        return [_array(norm.weight), _array(norm.bias), *(_array(p) for p in act.parameters())]  # type: ignore[arg-type]

    kernel = lambda conv: _array(conv.weight.permute(2, 3, 1, 0))
    batch_norm = isinstance(net.norm, torch.nn.BatchNorm2d)
    blocks = [b for b in net.blocks if isinstance(b, Block)]
    strides = [b.conv1.stride[0] for b in blocks]
    params = [
        (kernel(net.conv), normed(net.norm, net.act)),
        [(kernel(b.conv1), normed(b.norm1, b.act1), kernel(b.conv2), normed(b.norm2, b.act2)) for b in blocks],
        (_array(net.head.weight.T), _array(net.head.bias)),
    ]

    def conv(x: Any, w: Any, stride: int) -> Any:
        return jax.lax.conv_general_dilated(
            x, w.astype(half), (stride, stride), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def norm(x: Any, p: list[Any]) -> Any:
        z = x.astype(jnp.float32)
        if batch_norm:
            z = (z - z.mean((0, 1, 2))) * jax.lax.rsqrt(z.var((0, 1, 2)) + 1e-5)
        else:
            z = z * jax.lax.rsqrt((z * z).mean((1, 2), keepdims=True) + 1e-6)
        return (z * p[0] + p[1]).astype(half)

    act = lambda x, p: jax.nn.relu(x) if batch_norm else jnp.maximum(x, p[2].astype(half))

    def forward(params: Any, x: Any) -> Any:
        (w, p), rest, (head, bias) = params
        x = act(norm(conv(x.astype(half), w, 1), p), p)
        for (w1, p1, w2, p2), stride in zip(rest, strides):
            z = norm(conv(act(norm(conv(x, w1, stride), p1), p1), w2, 1), p2)
            new = z.shape[-1] - x.shape[-1]
            if new:
                x = jnp.pad(x[:, ::2, ::2], ((0, 0), (0, 0), (0, 0), (new // 2, new - new // 2)))
            x = act(z + x, p2)
        return x.mean((1, 2)).astype(jnp.float32) @ head + bias

    return forward, params
