"""The multilayer perceptron."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from numbers import Integral

from torch import nn


def mlp(
    inputs: int,
    hidden: Sequence[int],
    outputs: int,
    *,
    activation: Callable[[], nn.Module] = nn.ReLU,
    bias: bool = True,
) -> nn.Sequential:
    """x [B, inputs] → [B, outputs]: linear layers of the `hidden` widths with an activation between each two.

    Parameters are named by position, "0.weight", "0.bias", "2.weight", ...; `hidden=()` is one linear layer.
    """
    if not isinstance(hidden, Sequence) or isinstance(hidden, str):
        raise ValueError(f"mlp: hidden={hidden!r}, expected a sequence of layer widths such as (50, 50)")
    sizes = [inputs, *hidden, outputs]
    if any(not isinstance(n, Integral) or isinstance(n, bool) or n < 1 for n in sizes):
        raise ValueError(f"mlp: layer sizes {sizes}, expected whole numbers of at least 1")
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after, bias=bias), _make(activation)]
    return nn.Sequential(*layers[:-1])


def _make(activation: Callable[[], nn.Module]) -> nn.Module:
    """A new activation: what came must make one, so that no two layers share it."""
    try:
        made = activation()
    except TypeError:
        made = None
    if not isinstance(made, nn.Module):
        raise ValueError(f"mlp: activation={activation!r}, expected a class or function that makes a module: nn.ReLU")
    return made
