"""Data: what comes with Partita and, later, readers of the official formats."""

from .digits import digits

__all__ = ["digits"]
