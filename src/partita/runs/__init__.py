"""THE LOOP (and, later, the disk)."""

from partita.runs.errors import DivergenceError
from partita.runs.monitors import Moment
from partita.runs.optimize import Optimum, StepSearch, find_step, optimize
from partita.runs.run import Run
from partita.runs.sampling import sample

__all__ = ["DivergenceError", "Moment", "Optimum", "Run", "StepSearch", "find_step", "optimize", "sample"]
