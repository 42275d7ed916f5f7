"""References for what a run used, by class name."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

# One row a class; a new sampler, structure or rival is one row more.
REFERENCES: dict[str, str] = {
    "Structured": "Alexos, A., Boyd, A. J. and Mandt, S. (2022). Structured stochastic gradient MCMC. International "
    "Conference on Machine Learning, PMLR 162, 414-434.",
    "SGLD": "Welling, M. and Teh, Y. W. (2011). Bayesian learning via stochastic gradient Langevin dynamics. International "
    "Conference on Machine Learning, 681-688.",
    "PSGLD": "Li, C., Chen, C., Carlson, D. and Carin, L. (2016). Preconditioned stochastic gradient Langevin dynamics for "
    "deep neural networks. AAAI Conference on Artificial Intelligence, 1788-1794.",
    "SGHMC": "Chen, T., Fox, E. B. and Guestrin, C. (2014). Stochastic gradient Hamiltonian Monte Carlo. International "
    "Conference on Machine Learning, PMLR 32, 1683-1691.",
    "Cyclical": "Zhang, R., Li, C., Zhang, J., Chen, C. and Wilson, A. G. (2020). Cyclical stochastic gradient MCMC for "
    "Bayesian deep learning. International Conference on Learning Representations.",
    "Reservoir": "Vitter, J. S. (1985). Random sampling with a reservoir. ACM Transactions on Mathematical Software 11(1), "
    "37-57.",
}

# Those behind the diagnostics of every run.
ALWAYS = (
    "Vehtari, A., Gelman, A., Simpson, D., Carpenter, B. and Bürkner, P.-C. (2021). Rank-normalization, folding, and "
    "localization: an improved R-hat for assessing convergence of MCMC. Bayesian Analysis 16(2), 667-718.",
    "Geyer, C. J. (1992). Practical Markov chain Monte Carlo. Statistical Science 7(4), 473-483.",
)


def citation(run: Any) -> list[str]:
    """References of the methods of a run, as plain text; a method that has none on file is named."""
    used: list[str] = []
    for what in ("structure", "sampler", "method"):
        said = str(run.settings.get(what, ""))
        used += [name for name in re.findall(r"\b([A-Za-z_]\w*)\(", said) if name not in used]
    methods = [re.match(r"\w*", str(run.settings.get(what, "")))[0] for what in ("sampler", "method")]  # type: ignore[index]
    unknown = [m for m in dict.fromkeys(methods) if m and m not in REFERENCES]
    found = [REFERENCES[name] for name in used if name in REFERENCES]
    return [
        *dict.fromkeys(found),
        *(f"{name}: no reference on file; cite where it comes from." for name in unknown),
        *ALWAYS,
    ]


def version() -> str:
    """Of partita, as `partita.__version__` has it, which is not for this room to import."""
    try:
        return metadata.version("partita")
    except metadata.PackageNotFoundError:
        return "0+source"
