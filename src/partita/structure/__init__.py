"""WHAT STAYS TOGETHER: partitions, masks, histories, and the one gradient made of them."""

from partita.structure import masks, partitions
from partita.structure.gradient import Bound, Gradient, Joint, Structure, Structured
from partita.structure.history import Ensemble, History, Reservoir, Window

__all__ = [
    "Bound",
    "Ensemble",
    "Gradient",
    "History",
    "Joint",
    "Reservoir",
    "Structure",
    "Structured",
    "Window",
    "masks",
    "partitions",
]
