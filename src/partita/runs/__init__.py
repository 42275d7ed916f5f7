"""THE LOOP AND THE DISK."""

from partita.runs.errors import DivergenceError
from partita.runs.monitors import Moment
from partita.runs.optimize import Optimum, StepSearch, find_step, optimize
from partita.runs.resume import load, resume
from partita.runs.run import Run
from partita.runs.sampling import sample

__all__ = [
    "DivergenceError",
    "Moment",
    "Optimum",
    "Run",
    "StepSearch",
    "find_step",
    "load",
    "optimize",
    "resume",
    "sample",
]
