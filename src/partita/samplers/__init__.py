"""HOW IT MOVES: one file a sampler."""

from partita.samplers.base import Sampler
from partita.samplers.psgld import PSGLD
from partita.samplers.schedules import Constant, Cosine, Cyclical, Polynomial, Schedule
from partita.samplers.sghmc import SGHMC
from partita.samplers.sgld import SGLD

__all__ = ["PSGLD", "SGHMC", "SGLD", "Constant", "Cosine", "Cyclical", "Polynomial", "Sampler", "Schedule"]
