"""The law table: sampler × mask × partition × history against exact answers.

A cell samples a Gaussian in R^8 whose energy is a whole prior plus a composed likelihood, centred apart, with C chains of
one real engine step, and compares the chains' mean and covariance with the exact FINITE-step law (laws/exact.py), which
shares no code with the sampler. Deviations are in standard errors, taken over independent chains (ensembles), so the one
tolerance Z is a statement about false alarms, not about sizes of bias: there is no bias to allow for.

A row enters the table by one entry in SAMPLERS, MASKS, PARTITIONS or HISTORIES.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.engine.modes import Eager
from partita.engine.step import Chains, Step
from partita.laws import exact
from partita.runs.choose import Engine, choose_engine
from partita.runs.setup import Plan, prepare, seeded
from partita.samplers import PSGLD, SGHMC, SGLD, precondition
from partita.structure import Ensemble, Joint, Reservoir, Structured, Window, masks, partitions
from partita.target import Density

Z = 5.0  # tolerance in standard errors; about 4,600 comparisons a table, so 0.3 % of tables would alarm by chance
CHAINS, STEPS, SETTLE, ADAPT = 1024, 350, 80, 120
SHAPES = {"first.weight": (2, 2), "first.bias": (2,), "second.weight": (1, 2)}
D = 8

Law = Callable[[int], exact.MaskLaw]


@dataclass(frozen=True)
class SamplerRow:
    """A sampler, and the exact dynamics of it once its preconditioner [D] (None: it has none) is frozen."""

    sampler: Any
    dynamics: Callable[[np.ndarray | None], exact.Overdamped | exact.Underdamped] | None


SAMPLERS: dict[str, SamplerRow] = {
    "SGLD": SamplerRow(SGLD(0.4), lambda G: exact.Overdamped(0.4)),
    "pSGLD": SamplerRow(PSGLD(0.8), lambda G: exact.Overdamped(0.8, G)),
    "SGHMC": SamplerRow(SGHMC(0.4, 1.0, noise=0.3), lambda G: exact.Underdamped(0.4, 1.0, 0.3)),
    "SGHMC adaptive": SamplerRow(SGHMC(0.7, 0.8, adapt="burn_in"), lambda G: exact.Underdamped(0.7, 0.8, 0.0, G)),
}
MASKS: dict[str, tuple[Any, Law]] = {
    "S": (masks.OneGroup(), lambda M: exact.one_hot(M)),
    "S 2 of M": (masks.OneGroup(2), lambda M: exact.one_hot(M, 2)),
    "Bernoulli .5": (masks.Bernoulli(0.5), lambda M: exact.bernoulli(M, 0.5, 1)),
    "Bernoulli .3 K=2": (masks.Bernoulli(0.3, count=2), lambda M: exact.bernoulli(M, 0.3, 2)),
    "Bernoulli .3 nonzero": (
        masks.Bernoulli(0.3, count=2, nonzero=True),
        lambda M: exact.bernoulli_nonzero(M, 0.3, 2),
    ),
    "Bernoulli 1": (masks.Bernoulli(1.0), lambda M: exact.bernoulli(M, 1.0, 1)),
    "Stratified 3": (masks.Stratified(3), lambda M: exact.stratified(M, 3)),
    "Uniform": (masks.Uniform(), lambda M: exact.uniform(M, 1)),
    "Uniform square": (
        masks.Uniform(2, normalise="square"),
        lambda M: exact.uniform(M, 2, normalise="square"),
    ),
    "Beta(.5, .5)": (masks.Beta(0.5, 0.5, 2), lambda M: exact.beta(M, 2, 0.5, 0.5)),
    "N(1, .5²)": (masks.Gaussian(1.0, 0.5), lambda M: exact.gaussian(M, 1, 1.0, 0.5)),
    "N(0, 1) square": (
        masks.Gaussian(0.0, 1.0, 2, normalise="square"),
        lambda M: exact.gaussian(M, 2, 0.0, 1.0, "square"),
    ),
}
PARTITIONS = {
    "joint": partitions.joint(),
    "by_layer": partitions.by_layer(),
    "by_neuron out": partitions.by_neuron(),
    "by_neuron in": partitions.by_neuron("in"),
    "random 3": partitions.random(3, seed=1),
    "cyclic 3": partitions.cyclic(3),
    "each": partitions.each(),
    "by_name": partitions.by_name({"*.weight": "weights", "*.bias": "biases"}),
    "from_labels": partitions.from_labels([0, 1, 1, 0, 2, 2, 0, 1]),
}
# Windows and reservoirs start filled with exact independent draws, so that θ̃ ~ q̂ exactly and κ does not matter
HISTORIES: dict[str, tuple[Any, int, int | None]] = {  # history, past draws J, ensemble size
    "Window": (Window(500, every=10), 1, None),
    "Reservoir J=2": (Reservoir(500, every=10), 2, None),
    "Ensemble 4": (Ensemble(4), 1, 4),
    "Ensemble 8 J=2": (Ensemble(8), 2, 8),
}
TEMPERATURES = (1.0, 0.5, 2.0)


@dataclass(frozen=True)
class Cell:
    sampler: str
    mask: str  # "Joint" for pt.Joint(), and then partition and history are "-"
    partition: str = "-"
    history: str = "-"
    temperature: float = 1.0

    def __str__(self) -> str:
        return " · ".join([self.sampler, self.mask, self.partition, self.history, f"T={self.temperature:g}"])


@dataclass(frozen=True)
class Result:
    """Largest deviation of a row in standard errors, how many it was taken over, and the relative size of the error."""

    name: str
    z: float
    where: str
    comparisons: int
    relative: float

    @property
    def passed(self) -> bool:
        return self.z <= Z


def target_numbers() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """L_lik [D, D], μ_lik [D], Λ₀ [D, D], μ₀ [D]: κ ≥ .5 for every partition, correlations that matter."""
    rng = np.random.default_rng(3)
    A = rng.normal(size=(D, D))
    A = (A + A.T) / 2
    np.fill_diagonal(A, 0)
    scale = np.sqrt(np.linspace(0.7, 1.4, D))
    L = scale[:, None] * (np.eye(D) + 0.45 * A / np.abs(np.linalg.eigvalsh(A)).max()) * scale
    return L, rng.normal(size=D), np.diag(np.linspace(0.2, 0.5, D)), rng.normal(size=D)


def gaussian_target(temperature: float, device: str = "cpu") -> Density:
    numbers = [torch.tensor(a, dtype=torch.float32) for a in target_numbers()]
    on = {kind: [a.to(kind) for a in numbers] for kind in {"cpu", device}}  # a Density is looked at on the CPU

    def log_prob(th: Tensor) -> Tensor:
        L, mu, _, _ = on[th.device.type]
        return -0.5 * (th - mu) @ (L @ (th - mu))

    def log_prior(th: Tensor) -> Tensor:
        _, _, prior, mu0 = on[th.device.type]
        return -0.5 * (th - mu0) @ (prior @ (th - mu0))

    return Density(log_prob, shapes=SHAPES, log_prior=log_prior, temperature=temperature)


def run_cell(
    cell: Cell, seed: int = 0, chains: int = CHAINS, steps: int = STEPS, engine: str = "eager", device: str = "cpu"
) -> Result:
    """Sample the cell, solve it exactly, compare."""
    row = SAMPLERS[cell.sampler] if cell.sampler in SAMPLERS else own_row(cell.sampler)
    if row.dynamics is None:
        from partita.laws.own import small_step

        return small_step(cell, row.sampler, seed)
    target, structure, past, ensemble, law, labels = setting(cell, device)
    L, mu_lik, prior, mu0 = target_numbers()
    mean = exact.stationary_mean(L, mu_lik, labels, law, prior, mu0)
    with seeded(seed, device, target) as dev:
        centre = torch.tensor(mean, dtype=torch.float32, device=dev)
        plan, state = start(target, structure, row.sampler, mean, None, dev, chains)
        G = None
        if "V" in state.sampler:
            state, G = _adapted(plan.step, state)
        cov = exact.stationary_cov(
            L,
            labels,
            law,
            row.dynamics(G),
            prior=prior,
            temperature=cell.temperature,
            ensemble=ensemble,
            past=past,
            force=L @ (mean - mu_lik),
        ).cov
        if "rows" in state.history:
            _fill(state, centre, cov)
        chosen = choose_engine(engine, plan.step, state, steps)
        assert not chosen.fell_back, chosen.why
        first, second = moments(plan.step, state, centre, steps, run=chosen.engine)
    return compare(str(cell), first, second, cov, ensemble or 1)


def own_row(name: str) -> SamplerRow:
    """A sampler that is not ours, "package.module:name"."""
    from partita.laws.own import load

    sampler = load(name)
    return SamplerRow(sampler, getattr(sampler, "dynamics", None))


def setting(cell: Cell, device: str = "cpu") -> tuple[Density, Any, int, int | None, exact.MaskLaw | None, np.ndarray]:
    """Target, structure, past draws J, ensemble size, mask law, labels [D]."""
    target = gaussian_target(cell.temperature, device)
    if cell.mask == "Joint":
        return target, Joint(), 1, None, None, np.zeros(D, int)
    mask, make_law = MASKS[cell.mask]
    history, past, ensemble = HISTORIES[cell.history]
    structure = Structured(PARTITIONS[cell.partition], mask, history, past)
    labels = structure.partition.groups(target.space).labels.numpy()
    return target, structure, past, ensemble, make_law(int(labels.max()) + 1), labels


def start(
    target: Density,
    structure: Any,
    sampler: Any,
    mean: np.ndarray,
    cov: np.ndarray | None,
    device: torch.device,
    chains: int = CHAINS,
) -> tuple[Plan, Chains]:
    """Chains around the mean, and with `cov` a history full of exact draws."""
    centre = torch.tensor(mean, dtype=torch.float32, device=device)
    plan = prepare(
        target, None, structure, sampler, chains=chains, batch_size=None, init=centre, device=device, spread=1.0
    )
    state = plan.step.init(plan.theta)
    if cov is not None and "rows" in state.history:
        _fill(state, centre, cov)
    return plan, state


def _adapted(step: Step, state: Chains) -> tuple[Chains, np.ndarray]:
    """The state after adaptation, with the one preconditioner all chains then share, [D]."""
    for _ in range(ADAPT):
        step(state, step.sampler.schedule(0, 1), 1.0)
    V = state.sampler["V"].mean(0, keepdim=True).expand_as(state.sampler["V"]).clone()
    sampler = {**state.sampler, "V": V}
    G = precondition.matrix(sampler, getattr(step.sampler, "beta", 0.0))[0]
    return Chains(state.theta, sampler, state.history), G.double().cpu().numpy()


def _fill(state: Chains, mean: Tensor, cov: np.ndarray) -> None:
    """Fill every row of the history with independent exact draws."""
    rows = state.history["rows"]
    scale = torch.tensor(np.linalg.cholesky(cov).T, dtype=torch.float32, device=rows.device)
    rows.copy_(mean + torch.randn_like(rows) @ scale)
    state.history["seen"].fill_(rows.shape[1])


def moments(
    step: Step,
    state: Chains,
    mean: Tensor,
    steps: int,
    settle: int = SETTLE,
    run: Engine | None = None,
    rate: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Time averages of θ - m [C, D] and its outer product [C, D, D], after the chains have settled."""
    C, D = state.theta.shape
    first = torch.zeros(C, D, dtype=torch.float64, device=mean.device)
    second = torch.zeros(C, D, D, dtype=torch.float64, device=mean.device)
    rate = step.sampler.schedule(0, 1) if rate is None else rate
    run, history = run or Eager(step), step.structure.history
    for t in range(1, settle + steps + 1):
        run.advance(state, rate, 0.0, write=history is not None and t % history.every == 0)
        if t > settle:
            x = (state.theta - mean).double()
            first += x / steps
            second += x[:, :, None] * x[:, None, :] / steps
    return first.cpu(), second.cpu()


def compare(name: str, first: Tensor, second: Tensor, cov: np.ndarray, size: int) -> Result:
    """z of the mean (exactly 0) and of every entry of the covariance, over chains, or over ensembles of coupled chains."""
    dim = len(cov)
    upper = np.triu_indices(dim)
    units = reading(first, second, cov, size)
    error = units.mean(0)
    z = np.abs(error) / (units.std(0, ddof=1) / math.sqrt(len(units)))
    worst = int(np.argmax(np.where(np.isfinite(z), z, np.inf)))
    names = [f"mean[{i}]" for i in range(dim)] + [f"cov[{i},{j}]" for i, j in zip(*upper)]
    sizes = np.sqrt(np.concatenate([np.diag(cov), np.outer(np.diag(cov), np.diag(cov))[upper]]))
    at = float(z[worst]) if np.isfinite(z[worst]) else math.inf
    return Result(name, at, names[worst], len(z), float(np.abs(error / sizes).max()))


def reading(first: Tensor, second: Tensor, cov: np.ndarray, size: int) -> np.ndarray:
    """Errors of the mean and of the covariance's entries, a row for each independent unit of `size` chains."""
    upper = np.triu_indices(len(cov))
    units = np.concatenate([first.numpy(), second.numpy()[:, upper[0], upper[1]] - cov[upper]], axis=1)
    return units.reshape(-1, size, units.shape[1]).mean(1)


def all_cells() -> list[Cell]:
    """The whole product, temperatures in turn."""
    turn = itertools.cycle(TEMPERATURES)
    cells = [Cell(s, "Joint", temperature=T) for s in SAMPLERS for T in TEMPERATURES]
    for s, m, p, h in itertools.product(SAMPLERS, MASKS, PARTITIONS, HISTORIES):
        cell = Cell(s, m, p, h, next(turn))
        if _possible(cell):
            cells.append(cell)
    return cells


def pairwise_cells(seed: int = 0) -> list[Cell]:
    """A cover: every pair of entries of two columns (temperatures included) stands together in some cell. Greedy."""
    rng = np.random.default_rng(seed)
    columns: list[list[Any]] = [list(SAMPLERS), list(MASKS), list(PARTITIONS), list(HISTORIES), list(TEMPERATURES)]
    todo = {
        (i, a, j, b) for i, j in itertools.combinations(range(5), 2) for a in columns[i] for b in columns[j]
    } - _impossible()
    cells = [Cell(s, "Joint", temperature=T) for s, T in zip(SAMPLERS, itertools.cycle(TEMPERATURES))]
    while todo:
        best: tuple[int, list[Any]] = (0, [])
        seeds = sorted(todo, key=str)
        for _ in range(40):
            i, a, j, b = seeds[rng.integers(len(seeds))]
            pick = [c[rng.integers(len(c))] for c in columns]
            pick[i], pick[j] = a, b
            if _possible(Cell(*pick)):
                best = max(best, (len(todo & _pairs(pick)), pick), key=lambda x: x[0])
        cells += [Cell(*best[1])] if best[0] else []
        todo -= _pairs(best[1]) if best[0] else set()
    return cells


def _pairs(pick: list[Any]) -> set:
    return {(i, pick[i], j, pick[j]) for i, j in itertools.combinations(range(5), 2)}


def _possible(cell: Cell) -> bool:
    """Two masks of M groups need M >= 2."""
    return not (cell.mask == "S 2 of M" and cell.partition == "joint")


def _impossible() -> set:
    return {(1, "S 2 of M", 2, "joint")}
