"""Data: what comes with Partita, augmentation, and, later, readers of the official formats."""

from .augment import CropFlip
from .digits import digits

__all__ = ["CropFlip", "digits"]
