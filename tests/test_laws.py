"""The law table: a pairwise cover against exact laws, and planted bugs that it must catch."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from partita.engine.step import Step
from partita.laws import extra, report, table
from partita.laws.table import HISTORIES, MASKS, PARTITIONS, SAMPLERS, Cell, SamplerRow, Z, pairwise_cells, run_cell
from partita.samplers import PSGLD, SGHMC, SGLD
from partita.structure import Ensemble, Window, masks
from partita.structure.gradient import BoundStructured

CELLS = pairwise_cells()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(cell):
    result = run_cell(cell)
    assert result.passed, f"{result.where} is {result.z:.1f} standard errors off (tolerance {Z})"


@pytest.mark.parametrize("name", extra.EXTRA)
def test_extra(name):
    result = extra.EXTRA[name](0)
    assert result.passed, f"{result.where} is {result.z:.1f} standard errors off (tolerance {Z})"


def test_the_cover_is_one():
    """Every pair of entries of two columns stands together in some cell."""
    cells = [c for c in CELLS if c.mask != "Joint"]
    columns = {
        "sampler": list(SAMPLERS),
        "mask": list(MASKS),
        "partition": list(PARTITIONS),
        "history": list(HISTORIES),
        "temperature": list(table.TEMPERATURES),
    }
    for (p, a), (q, b) in itertools.combinations(columns.items(), 2):
        seen = {(getattr(c, p), getattr(c, q)) for c in cells}
        assert set(itertools.product(a, b)) - seen <= {("S 2 of M", "joint")}


def test_every_sampler_mask_partition_and_history_has_a_row():
    """A public name without a row in the table is not proven."""
    from partita import samplers, structure

    def kinds(things):
        return {type(t).__name__ for t in things}

    assert kinds(r.sampler for r in SAMPLERS.values()) == {n for n in samplers.__all__ if n.isupper() and len(n) > 3}
    laws = {n for n, c in vars(masks).items() if isinstance(c, type) and c.__module__ == masks.__name__}
    assert kinds(m for m, _ in MASKS.values()) == {n for n in laws if not n.startswith("_")} - {"Mask"}
    assert kinds(h for h, *_ in HISTORIES.values()) == {"Window", "Reservoir", "Ensemble"}
    rules = {
        n
        for n, f in vars(structure.partitions).items()
        if getattr(f, "__annotations__", {}).get("return") == "Partition"
    }
    assert {p.name.split("(")[0] for p in PARTITIONS.values()} == rules


# -- planted bugs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HalfNoise(SGLD):
    def step(self, theta, g, state, rate, T, adapt):
        return theta - 0.5 * rate * g + (0.5 * rate * T) ** 0.5 * torch.randn_like(theta), state


@dataclass(frozen=True)
class NoTemperature(SGLD):
    def step(self, theta, g, state, rate, T, adapt):
        return super().step(theta, g, state, rate, 1.0, adapt)


@dataclass(frozen=True)
class TemperatureOutsideTheBracket(SGHMC):
    """Noise h(2γ - hV̂)T instead of h(2γT - hV̂)."""

    def step(self, theta, g, state, rate, T, adapt):
        noise = (rate * (2 * self.friction - rate * self.noise) * T) ** 0.5 * torch.randn_like(theta)
        v = state["v"] - rate * g - rate * self.friction * state["v"] + noise
        return theta + rate * v, {"v": v}


@dataclass(frozen=True)
class OldVelocity(SGHMC):
    """θ moves with the velocity before the kick."""

    def step(self, theta, g, state, rate, T, adapt):
        _, new = super().step(theta, g, state, rate, T, adapt)
        return theta + rate * state["v"], new


@dataclass(frozen=True)
class NoWeight(masks.Bernoulli):
    def weight(self, M):
        return 1.0


@dataclass(frozen=True)
class Swapped(masks.Bernoulli):
    def sample(self, C, M, device):
        return ~super().sample(C, M, device)


@dataclass(frozen=True)
class BernoulliRateForTheConditional(masks.Bernoulli):
    """The conditional law scaled as if it were not conditioned."""

    def weight(self, M):
        return 1.0 / (self.count * self.rho)


@dataclass(frozen=True)
class NotItself(Ensemble):
    """The ensemble without the chain itself."""

    def read(self, state, theta, labels, M, k, unread=None):
        C, D = theta.shape
        size = C // self.ensembles(C)
        own = torch.arange(C)[:, None, None] % size
        other = (own + 1 + (torch.rand(C, k, M) * (size - 1)).long()) % size
        base = torch.arange(C)[:, None, None] // size * size
        return theta[(base + other)[:, :, labels], torch.arange(D)]


def sampler_row(sampler):
    kind = "SGHMC" if isinstance(sampler, SGHMC) else "SGLD"
    return SamplerRow(sampler, SAMPLERS[kind].dynamics)


PLANTED = {
    "noise halved": (SAMPLERS, "SGLD", sampler_row(HalfNoise(0.4)), Cell("SGLD", "Joint")),
    "temperature missing": (SAMPLERS, "SGLD", sampler_row(NoTemperature(0.4)), Cell("SGLD", "Joint", temperature=0.5)),
    "temperature misplaced": (
        SAMPLERS,
        "SGHMC",
        sampler_row(TemperatureOutsideTheBracket(0.4, 1.0, noise=0.3)),
        Cell("SGHMC", "Joint", temperature=0.5),
    ),
    "old velocity": (SAMPLERS, "SGHMC", sampler_row(OldVelocity(0.4, 1.0, noise=0.3)), Cell("SGHMC", "Joint")),
    "weight missing": (
        MASKS,
        "Bernoulli .5",
        (NoWeight(0.5), MASKS["Bernoulli .5"][1]),
        Cell("SGLD", "Bernoulli .5", "each", "Window"),
    ),
    "r swapped": (
        MASKS,
        "Bernoulli .3 K=2",
        (Swapped(0.3, 2), MASKS["Bernoulli .3 K=2"][1]),
        Cell("SGLD", "Bernoulli .3 K=2", "by_neuron out", "Window"),
    ),
    "conditional mask with the free weight": (
        MASKS,
        "Bernoulli .3 nonzero",
        (BernoulliRateForTheConditional(0.3, 2, True), MASKS["Bernoulli .3 nonzero"][1]),
        Cell("SGLD", "Bernoulli .3 nonzero", "by_layer", "Window"),
    ),
    "ensemble without itself": (
        HISTORIES,
        "Ensemble 4",
        (NotItself(4), 1, 4),
        Cell("SGLD", "S", "each", "Ensemble 4"),
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_caught(bug, monkeypatch):
    rows, key, planted, cell = PLANTED[bug]
    assert run_cell(cell, seed=1).passed
    monkeypatch.setitem(rows, key, planted)
    result = run_cell(cell, seed=1)
    print(f"{bug}: {result.z:.0f} standard errors")
    assert result.z > 2 * Z


def test_planted_prior_mask_is_caught(monkeypatch):
    """The prior composed and weighed with the likelihood."""
    right = BoundStructured.gradient

    def wrong(self, theta, state, likelihood, prior, chunk):
        return right(self, theta, state, likelihood, lambda t: 2 * prior(t), chunk)

    monkeypatch.setattr(BoundStructured, "gradient", wrong)
    assert run_cell(Cell("SGLD", "Bernoulli .5", "each", "Window")).z > 2 * Z


def test_planted_batch_factor_is_caught(monkeypatch):
    """N/B on a likelihood that was averaged already: B times too little."""
    from partita.target import Posterior

    right = Posterior.likelihood_energy
    monkeypatch.setattr(Posterior, "likelihood_energy", lambda self, th, b, n: right(self, th, b, n) / b[1].shape[0])
    assert extra.EXTRA["minibatch/SGLD"](0).z > 2 * Z


def test_planted_frozen_window_is_caught(monkeypatch):
    """A window whose writes are lost still holds θ⁰."""
    monkeypatch.setattr(Window, "write", lambda self, state, theta: None)
    assert extra.EXTRA["window/S"](0).z > 2 * Z


def test_planted_ever_adapting_preconditioner_is_caught(monkeypatch):
    """pSGLD that goes on adapting without Γ samples another law (the faster it forgets, the more so)."""
    row = SamplerRow(PSGLD(0.8, beta=0.8), SAMPLERS["pSGLD"].dynamics)
    monkeypatch.setitem(SAMPLERS, "pSGLD", row)
    assert run_cell(Cell("pSGLD", "Joint")).passed
    right = Step.__call__
    monkeypatch.setattr(
        Step, "__call__", lambda self, chains, rate, adapt, *rest: right(self, chains, rate, 1.0, *rest)
    )
    assert run_cell(Cell("pSGLD", "Joint")).z > 2 * Z


def test_report_counts_failures_and_writes_them_down():
    good = report.run_row("window/S", 0)
    bad = report.Outcome("broken", 0, None, "ValueError: no", 0.0)
    text = report.markdown([good, bad], "T", "here")
    assert "2 rows" in text
    assert "1 outside" in text
    assert "| broken | 0 | ValueError: no" in text
    assert "1 with a row beyond" in report.false_alarms([good, bad])


# ------------------------------------------------------------------------------------------- samplers of the user's own
OWN = """
from dataclasses import dataclass
import torch
from partita import SGHMC, SGLD
from partita.laws import exact

right, momentum = SGLD(0.2), SGHMC(0.2, 1.0)

@dataclass(frozen=True)
class Hot(SGLD):
    step_size: float = 0.2
    def step(self, theta, g, state, rate, T, adapt):
        return theta - 0.5 * rate * g + (1.1 * rate * T) ** 0.5 * torch.randn_like(theta), state

@dataclass(frozen=True)
class Told(SGLD):
    step_size: float = 0.4
    def dynamics(self, G):
        return exact.Overdamped(0.4)

@dataclass(frozen=True)
class ToldWrong(Told):
    def dynamics(self, G):
        return exact.Overdamped(0.5)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_samplers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    "name, fine", [("right", True), ("momentum", True), ("Hot", False), ("Told", True), ("ToldWrong", False)]
)
def test_a_sampler_of_ones_own_is_held_to_its_law(own, name, fine):
    cell = Cell(f"own_samplers:{name}", "Bernoulli .5", "by_layer", "Window")
    result = run_cell(cell)
    assert result.passed == fine, result


def test_what_is_no_sampler_is_refused_in_a_line(own):
    from partita.laws import own as mine

    for name, match in (
        ("own_samplers", "expected package.module:name"),
        ("own_samplers:nothing", "a name that can be imported"),
        ("nowhere:at_all", "a name that can be imported"),
        ("own_samplers:OWN; import os", "expected package.module:name"),
        ("pathlib:Path", "expected for example pt.SGLD"),
        ("partita:SGLD", "needs no arguments"),
    ):
        with pytest.raises(ValueError, match=match):
            mine.load(name)
    assert len(mine.cells("own_samplers:right")) > 20
