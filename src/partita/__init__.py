"""Partita: posterior sampling for neural networks, in parts."""

from importlib.metadata import PackageNotFoundError as _NotFound
from importlib.metadata import version as _version

from partita import data, models
from partita.answers import diagnostics, scores
from partita.answers.predictive import Prediction
from partita.runs import DivergenceError, Moment, Run, find_step, load, optimize, resume, sample
from partita.samplers import PSGLD, SGHMC, SGLD
from partita.samplers import schedules as schedules
from partita.structure import Ensemble, Joint, Reservoir, Structured, Window, masks, partitions
from partita.target import (
    Bernoulli,
    Categorical,
    Density,
    FanIn,
    Gaussian,
    Laplace,
    Normal,
    ParameterSpace,
    Posterior,
    StudentT,
)

try:
    __version__ = _version("partita")
except _NotFound:  # run from a source tree that is not installed
    __version__ = "0+source"

__all__ = [
    "PSGLD",
    "SGHMC",
    "SGLD",
    "Bernoulli",
    "Categorical",
    "Density",
    "DivergenceError",
    "Ensemble",
    "FanIn",
    "Gaussian",
    "Joint",
    "Laplace",
    "Moment",
    "Normal",
    "ParameterSpace",
    "Posterior",
    "Prediction",
    "Reservoir",
    "Run",
    "Structured",
    "StudentT",
    "Window",
    "data",
    "diagnostics",
    "find_step",
    "load",
    "masks",
    "models",
    "optimize",
    "partitions",
    "resume",
    "sample",
    "schedules",
    "scores",
]
