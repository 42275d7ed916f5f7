"""A small convolutional network for images of any size."""

import math
from collections import OrderedDict
from numbers import Integral
from typing import Literal

from torch import nn


def convnet(
    channels: int,
    classes: int,
    *,
    width: int = 16,
    norm: Literal["batch", "group"] | None = "batch",
    image: tuple[int, int] | None = None,
) -> nn.Sequential:
    """x [B, channels, H, W] → logits [B, classes]: three 3x3 convolutions of `width`, 2 and 4 times `width` channels,
    the last two with stride 2, each followed by its normalisation and ReLU; then the mean over the pixels that are
    left, so that every H and W will do, and one linear layer.

    `image=(H, W)` is for images that come as flat rows, x [B, channels·H·W]. Parameters are named "conv1.weight",
    "norm1.weight", ..., "head.bias" with it and without; a convolution has a bias when no normalisation follows it.
    """
    sizes = {"channels": channels, "classes": classes, "width": width}
    if image is not None:
        if not isinstance(image, tuple | list) or len(image) != 2:
            raise ValueError(f"convnet: image={image!r}, expected (height, width) or None")
        sizes |= {"image height": image[0], "image width": image[1]}
    for name, n in sizes.items():
        if not isinstance(n, Integral) or isinstance(n, bool) or n < 1:
            raise ValueError(f"convnet: {name}={n!r}, expected a whole number of at least 1")
    if norm not in ("batch", "group", None):
        raise ValueError(f"convnet: norm={norm!r}, expected 'batch', 'group' or None")

    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if image is not None:
        layers["unflatten"] = nn.Unflatten(1, (channels, *image))
    before = channels
    for i, stride in enumerate((1, 2, 2)):
        after = width * 2**i
        layers[f"conv{i + 1}"] = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=norm is None)
        if norm == "batch":
            layers[f"norm{i + 1}"] = nn.BatchNorm2d(after)
        elif norm == "group":
            layers[f"norm{i + 1}"] = nn.GroupNorm(math.gcd(4, width), after)
        layers[f"relu{i + 1}"] = nn.ReLU()
        before = after
    layers["mean"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["head"] = nn.Linear(before, classes)
    return nn.Sequential(layers)
