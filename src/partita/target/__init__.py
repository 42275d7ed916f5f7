"""WHAT is sampled: parameter spaces, likelihoods, priors, posteriors. Knows no other room."""

from partita.target.likelihoods import Bernoulli, Categorical, FromFunction, Gaussian, Likelihood
from partita.target.posterior import Batch, Density, Posterior, Target
from partita.target.priors import FanIn, Laplace, Normal, Prior, StudentT
from partita.target.space import ParameterSpace

__all__ = [
    "Batch",
    "Bernoulli",
    "Categorical",
    "Density",
    "FanIn",
    "FromFunction",
    "Gaussian",
    "Laplace",
    "Likelihood",
    "Normal",
    "ParameterSpace",
    "Posterior",
    "Prior",
    "StudentT",
    "Target",
]
