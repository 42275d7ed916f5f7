"""Residual networks for small images (He et al. 2016, section 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Norm = Literal["batch", "group", "frn"]
GROUPS = 8


class FilterResponseNorm(nn.Module):
    """γ x / √(mean_HW x² + ε) + β (Singh & Krishnan 2020): each image and channel by itself, so that the rows of a batch
    stay independent."""

    def __init__(self, channels: int, epsilon: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.epsilon = epsilon

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype == torch.bfloat16 else x
        scale = torch.rsqrt(_mean(wide.square()) + self.epsilon)
        return (self.weight.view(1, -1, 1, 1) * wide * scale + self.bias.view(1, -1, 1, 1)).to(x.dtype)


def _mean(x: Tensor) -> Tensor:
    """x.mean((2, 3), keepdim=True), whose own gradient would lay out everything below it anew: channels first."""
    return x.sum((2, 3), keepdim=True) * (1 / (x.shape[2] * x.shape[3]))


class Threshold(nn.Module):
    """max(x, τ), τ learned for each channel: the activation that goes with FilterResponseNorm."""

    def __init__(self, channels: int):
        super().__init__()
        self.tau = nn.Parameter(torch.zeros(channels))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.tau)

    def forward(self, x: Tensor) -> Tensor:
        tau = self.tau.to(x.dtype).view(1, -1, 1, 1)
        return torch.where(
            x <= tau, tau, x
        )  # NaN stays NaN; `maximum` halves gradients at ties, in three more operations


class Shortcut(nn.Module):
    """Option A: every second pixel, new channels filled with zeros; no parameters."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.stride, self.new = stride, after - before

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.new // 2, self.new - self.new // 2))


class Block(nn.Module):
    """Two 3x3 convolutions around which the input is added."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm, shortcut: str):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1, self.act1 = _norm(norm, after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2, self.act2 = _norm(norm, after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            if shortcut == "A":
                self.shortcut = Shortcut(before, after, stride)
            else:
                self.shortcut = nn.Sequential(
                    nn.Conv2d(before, after, 1, stride=stride, bias=False), _norm(norm, after)[0]
                )

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.norm1(self.conv1(x)))
        return self.act2(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, channels: int, classes: int, blocks: int, width: int, norm: Norm, shortcut: str):
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.norm, self.act = _norm(norm, width)
        widths = [width] * blocks + [2 * width] * blocks + [4 * width] * blocks
        layers, before = [], width
        for i, after in enumerate(widths):
            layers.append(Block(before, after, 2 if i in (blocks, 2 * blocks) else 1, norm, shortcut))
            before = after
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.act(self.norm(self.conv(x))))
        return self.head(_mean(x).flatten(1))


def resnet(
    channels: int = 3,
    classes: int = 10,
    *,
    depth: int = 20,
    width: int = 16,
    norm: Norm = "frn",
    shortcut: Literal["A", "conv"] = "A",
) -> ResNet:
    """x [B, channels, H, W] → logits [B, classes]: ResNet-20 (depth 6n + 2: 20, 32, 44, ...) of He et al. 2016.

    norm      "frn" (filter response normalisation) and "group" keep the rows of a batch independent, as a likelihood
              should; "batch" couples them (269,722 parameters with 3 channels and shortcut "A")
    shortcut  "A": zeros for the new channels, no parameters; "conv": 1x1 convolutions
    """
    for name, n in {"channels": channels, "classes": classes, "depth": depth, "width": width}.items():
        if not isinstance(n, Integral) or isinstance(n, bool) or n < 1:
            raise ValueError(f"resnet: {name}={n!r}, expected a whole number of at least 1")
    if (depth - 2) % 6 or depth < 8:
        raise ValueError(f"resnet: depth={depth}, expected 6n + 2: 8, 14, 20, 32, ...")
    if norm not in ("batch", "group", "frn"):
        raise ValueError(f"resnet: norm={norm!r}, expected 'frn', 'group' or 'batch'")
    if norm == "group" and width % GROUPS:
        raise ValueError(f"resnet: width={width} with norm='group', expected a multiple of {GROUPS}")
    if shortcut not in ("A", "conv"):
        raise ValueError(f"resnet: shortcut={shortcut!r}, expected 'A' or 'conv'")
    return ResNet(channels, classes, (depth - 2) // 6, width, norm, shortcut)


def _norm(norm: Norm, channels: int) -> tuple[nn.Module, nn.Module]:
    """A normalisation and the activation that follows it."""
    make: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
        "batch": lambda: (nn.BatchNorm2d(channels), nn.ReLU()),
        "group": lambda: (nn.GroupNorm(GROUPS, channels), nn.ReLU()),
        "frn": lambda: (FilterResponseNorm(channels), Threshold(channels)),
    }
    return make[norm]()
