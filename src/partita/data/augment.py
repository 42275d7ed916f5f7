"""Random crops and flips, on the device, for the batches of all chains at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CropFlip:
    """x [..., channels, H, W] -> the same shape: every image shifted by up to `pad` pixels each way (zeros come in) and,
    with probability 1/2 if `flip`, mirrored left to right. Tensor work alone, so that it goes into a graph.

    An augmented likelihood is not that of the data: its posterior is usually narrower than stated (a cold one).
    """

    pad: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.pad, int) or isinstance(self.pad, bool) or self.pad < 0:
            raise ValueError(f"CropFlip got pad={self.pad!r}, expected a whole number of at least 0")

    def __call__(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or x.dim() < 4:
            came = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ValueError(f"CropFlip got {came}, expected images [..., channels, H, W]")
        *lead, channels, H, W = x.shape
        images = x.reshape(-1, channels, H, W)
        n, device = images.shape[0], x.device
        shift = torch.randint(-self.pad, self.pad + 1, (2, n, 1), device=device)
        row, column = (
            torch.arange(H, device=device) + shift[0],
            torch.arange(W, device=device) + shift[1],
        )  # [n, H], [n, W]
        inside = ((row >= 0) & (row < H))[:, :, None] & ((column >= 0) & (column < W))[:, None, :]
        if self.flip:
            mirrored = torch.rand(n, 1, device=device) < 0.5
            column = torch.where(mirrored, column.flip(1), column)
            inside = torch.where(mirrored[:, :, None], inside.flip(2), inside)
        which = torch.arange(n, device=device)[:, None, None]
        taken = images.permute(0, 2, 3, 1)[which, row.clamp(0, H - 1)[:, :, None], column.clamp(0, W - 1)[:, None, :]]
        return (taken * inside[..., None]).permute(0, 3, 1, 2).reshape(*lead, channels, H, W)
