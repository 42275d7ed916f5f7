"""The loop: seeds, lengths, starts, monitors, stopping, diverging, memory. What it says afterwards is in test_summary."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import partita as pt
from partita.runs import sampling, setup
from partita.runs.setup import prepare, seeded

GAUSSIAN = pt.Density(lambda t: -0.5 * (t * t).sum(), dim=3)
QUARTIC = pt.Density(lambda t: -(t**4).sum(), dim=2)
X = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
CPU = torch.device("cpu")
STILL = pt.SGLD(1e-14)  # stays where it starts, to 1e-7


def classifier():
    return pt.Posterior(pt.models.mlp(4, (5,), 3), pt.Categorical(), prior=pt.Normal(0.5))


def small(target=None, data=None, **settings):
    """A run of a few steps."""
    settings = {"sampler": pt.SGLD(1e-2), "steps": 12, "chains": 3, **settings}
    return pt.sample(GAUSSIAN if target is None else target, data, **settings)


# -- seeds -----------------------------------------------------------------------------------------------------------
STRUCTURED = pt.Structured(pt.partitions.by_layer(), pt.masks.Bernoulli(0.5), pt.Reservoir(4))


def test_the_same_seed_gives_the_same_samples_bit_for_bit():
    go = lambda seed: small(classifier_fixed, (X, Y), structure=STRUCTURED, batch_size=8, seed=seed).samples
    classifier_fixed = classifier()
    first = go(5)
    torch.randn(7)  # the caller's own random state does not matter
    assert torch.equal(first, go(5))
    assert not torch.equal(first, go(6))
    assert not torch.equal(first[0], first[1])


def test_the_callers_random_state_is_untouched():
    target = classifier()
    calls = (
        lambda: small(target, (X, Y), init="map", batch_size=8, monitor={"test": (X, Y)}),
        lambda: small(target, (X, Y), steps=0),
        lambda: small(pt.Density(lambda t: (t**4).sum(), dim=2), sampler=pt.SGLD(10.0), steps=40),
        lambda: pt.optimize(target, (X, Y), steps=3),
        lambda: pt.find_step(target, (X, Y), sampler=pt.SGLD, steps=4, map_steps=2, points=4),
    )
    failed = 0
    for call in calls:
        before = torch.get_rng_state()
        try:
            call()
        except (ValueError, pt.DivergenceError):
            failed += 1
        assert torch.equal(before, torch.get_rng_state())
    assert failed == 2


def test_the_callers_module_is_untouched():
    target = classifier()
    before = {k: v.clone() for k, v in target.model.state_dict().items()}
    run = small(target, (X, Y), sampler=pt.SGLD(1e-2), monitor={"test": (X, Y)})
    assert all(torch.equal(v, before[k]) for k, v in target.model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in target.model.parameters())
    assert run.module() is not target.model


# -- monitors do not change samples ------------------------------------------------------------------------------------
def meddle(moment):
    """A monitor as bad as can be: it draws random numbers and overwrites the state it is shown."""
    torch.randn(11)
    moment.theta.zero_()


def loader():
    return DataLoader(TensorDataset(X, Y), 8, shuffle=True, generator=torch.Generator().manual_seed(3))


def normed():
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    return pt.Posterior(net, pt.Categorical())


@pytest.mark.filterwarnings("ignore:BatchNorm couples")
@pytest.mark.parametrize("source", (lambda: (X, Y), loader), ids=("tensors", "loader"))
@pytest.mark.parametrize("make", (classifier, normed), ids=("plain", "BatchNorm"))
def test_monitors_do_not_change_samples(make, source):
    target, size = make(), 8 if source is not loader else None
    go = lambda **k: small(target, source(), structure=STRUCTURED, batch_size=size, steps=20, thin=5, **k)
    plain = go(monitor_every=20)
    for settings in (
        {"monitor": {"test": (X, Y)}, "monitor_every": 3},
        {"monitor": meddle, "monitor_every": 1},
    ):
        watched = go(**settings)
        assert torch.equal(plain.samples, watched.samples)
        assert all(torch.equal(v, watched.statistics[k]) for k, v in plain.statistics.items())
        assert torch.equal(plain.heat, watched.heat)


@pytest.mark.filterwarnings("ignore:BatchNorm couples")
def test_batchnorm_statistics_are_kept_with_each_draw():
    run = small(normed(), (X, Y), batch_size=20, steps=8, thin=2)
    mean = run.statistics["1.running_mean"]
    assert mean.shape == (3, 3, 5)
    assert not torch.equal(mean[0, 0], mean[0, 1])
    module = run.module(chain=1, draw=2)
    assert torch.equal(module[1].running_mean, mean[1, 2])
    hidden = torch.stack([module[0](X[a : a + 20]).mean(0) for a in (0, 20, 40)]).mean(0)
    torch.testing.assert_close(mean[1, 2], hidden.detach(), rtol=1e-4, atol=1e-5)


# -- everything runs -------------------------------------------------------------------------------------------------
HISTORIES = (
    pt.Window(4),
    pt.Window(3, every=2, dtype="bfloat16"),
    pt.Reservoir(4, every=2),
    pt.Reservoir(4, burn_in="drop", warm_up=1),
    pt.Ensemble(),
    pt.Ensemble(2),
)
MASKS = (pt.masks.OneGroup(), pt.masks.OneGroup(2), pt.masks.Bernoulli(0.3, count=2), pt.masks.Beta(0.5, 0.5))
SAMPLERS = (pt.SGLD(1e-3), pt.PSGLD(1e-3), pt.SGHMC(1e-2), pt.SGHMC(1e-2, adapt="burn_in"))


@pytest.mark.parametrize("history", HISTORIES, ids=str)
def test_every_structure_history_and_sampler_runs(history):
    target = classifier()
    for i, mask in enumerate(MASKS):
        structure = pt.Structured(pt.partitions.each(), mask, history, past=1 + i % 2)
        for sampler in (SAMPLERS[i], SAMPLERS[i - 1]):
            run = pt.sample(
                target, (X, Y), sampler=sampler, structure=structure, steps=8, chains=4, batch_size=10, init="module"
            )
            assert run.samples.shape == (4, 6, target.space.dim)
            assert run.samples.isfinite().all()
            assert run.temperature.shape == (4, target.space.dim)
            assert run.ensembles == {None: 1, 2: 2}.get(getattr(history, "size", 0), 4)
            assert "composition_gap" in run.metrics[-1]


@dataclass(frozen=True)
class Recorder:
    """A sampler that only writes down what it is told."""

    schedule = staticmethod(lambda t, horizon: 0.1 / (t + 1))
    seen: list = field(default_factory=list)

    def check(self, temperature, burn_in):
        self.seen.append(("check", temperature, burn_in))

    def init(self, theta, scale):
        return {}

    def step(self, theta, g, state, rate, T, adapt):
        self.seen.append((rate, T, adapt))
        return theta, state

    def heat(self, g, state, rate, T):
        return torch.full_like(g[:, 0], T)


def test_samplers_are_told_the_rate_the_temperature_and_when_to_adapt():
    recorder = Recorder()
    small(pt.Density(lambda t: -(t * t).sum(), dim=3, temperature=0.5), sampler=recorder, steps=6, burn_in=2)
    assert recorder.seen == [
        ("check", 0.5, 2),
        *[(0.1 / (t + 1), 0.5, 1.0 if t < 2 else 0.0) for t in range(6)],
    ]


# -- lengths ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "steps, burn_in, thin, kept",
    (
        (12, None, None, list(range(4, 13))),
        (12, 0, 1, list(range(1, 13))),
        (12, 5, 3, [8, 11]),
        (12, 2, 10, [12]),
        (12, 11, None, [12]),
        (1, None, None, [1]),
    ),
)
def test_burn_in_and_thinning_keep_the_right_states(steps, burn_in, thin, kept):
    run = small(steps=steps, burn_in=burn_in, thin=thin)
    every = small(steps=steps, burn_in=0, thin=1)
    assert run.steps == kept
    assert torch.equal(run.samples, every.samples[:, [t - 1 for t in kept]])


def plan_for(chains, dim):
    target = pt.Density(lambda t: -(t * t).sum(), dim=dim)
    with seeded(0, "cpu", target) as device:
        return prepare(target, None, pt.Joint(), None, chains=chains, batch_size=None, init="module", device=device)


def test_by_default_a_chain_keeps_at_most_a_thousand_draws():
    plan = plan_for(2, 3)
    for after, thin in ((999, 1), (1000, 1), (1001, 2), (7500, 8)):
        assert sampling._fit_draws(plan, after, None, "auto") == (thin, [])


def test_draws_are_thinned_to_fit_or_refused_with_the_arithmetic(monkeypatch):
    plan = plan_for(4, 250)  # a row of draws: 4,000 bytes
    monkeypatch.setattr(sampling, "KEEP", 100_000)  # 25 rows
    monkeypatch.setattr(sampling, "available_memory", lambda device: 1_000_000)
    for after in (25, 26, 99, 100, 101, 500):
        thin, notes = sampling._fit_draws(plan, after, 1, "auto")
        assert after // thin <= 25
        assert thin == 1 or after // (thin - 1) > 25  # no thinner than needed
        assert bool(notes) == (after > 25)
    assert "4 chains x 500 draws x 250 parameters = 0.00186 GiB" in notes[0]
    assert sampling._fit_draws(plan, 225, 1, "all") == (1, [])  # 900,000 bytes, nine tenths of what is free
    with pytest.raises(ValueError, match=r"4 chains x 226 draws x 250 parameters = .* GiB, expected at most .*90 %"):
        sampling._fit_draws(plan, 226, 1, "all")
    monkeypatch.setattr(sampling, "KEEP", 3_999)
    with pytest.raises(ValueError, match=r"expected at most .* GiB \(keep='all' allows what is free\)"):
        sampling._fit_draws(plan, 10, None, "auto")
    monkeypatch.setattr(sampling, "KEEP", 2**30)
    monkeypatch.setattr(sampling, "available_memory", lambda device: 10_000)  # less is free than KEEP allows
    assert sampling._fit_draws(plan, 10, 1, "auto")[0] == 4


def test_raised_thinning_is_told(monkeypatch):
    monkeypatch.setattr(sampling, "KEEP", 3 * 3 * 4 * 5)
    run = small(steps=24, burn_in=4, thin=1)
    assert run.settings["thin"] == 4
    assert run.steps == [8, 12, 16, 20, 24]
    assert "thin raised to 4" in run.settings["notes"][0]


def test_a_history_beyond_memory_is_refused_with_the_arithmetic(monkeypatch):
    monkeypatch.setattr(setup, "available_memory", lambda device: 3 * 1000 * 3 * 4)
    with pytest.raises(ValueError, match=r"the history would take .* GiB on cpu, expected at most 0.9 x .* GiB free"):
        small(structure=pt.Structured(pt.partitions.each(), history=pt.Window(1000)))


# -- histories -------------------------------------------------------------------------------------------------------
def test_warm_up_steps_are_joint():
    structure = lambda n: pt.Structured(pt.partitions.each(), history=pt.Window(4, warm_up=n))
    target = pt.Density(lambda t: -0.5 * t.sum() ** 2 - 0.1 * (t * t).sum(), dim=3)
    states = {"monitor": lambda m: {"theta": m.theta}, "monitor_every": 1}

    def go(structure):
        run = small(target, structure=structure, steps=12, burn_in=6, sampler=pt.SGLD(0.1), **states)
        return torch.stack([m["theta"] for m in run.metrics], 1)

    joint, warm, cold = go(pt.Joint()), go(structure(5)), go(structure(0))
    assert torch.equal(warm[:, :5], joint[:, :5])
    assert not torch.equal(warm[:, 5], joint[:, 5])
    assert not torch.equal(cold[:, 1], joint[:, 1])
    with pytest.raises(ValueError, match=r"warm_up is 6 with burn_in=6, expected fewer steps"):
        go(structure(6))


def test_warm_up_fills_the_history():
    history = pt.Window(64, warm_up=6)
    run = small(structure=pt.Structured(pt.partitions.each(), history=history), steps=12, burn_in=8, init="module")
    assert run.settings["done"] == 12
    diary = Diary(warm_up=6)
    small(structure=pt.Structured(pt.partitions.each(), history=diary), steps=12, burn_in=8, init="module")
    assert [kind for kind, _ in diary.seen] == ["init", *["write"] * 12]
    states = torch.stack([theta for _, theta in diary.seen])
    assert all(not torch.equal(a, b) for a, b in pairwise(states))


def test_inference_mode_is_refused():
    with torch.inference_mode(), pytest.raises(ValueError, match=r"inference_mode\(\) is on, expected off"):
        small()


@dataclass(frozen=True)
class Diary:
    """A history that writes down what it is shown; past draws are zero."""

    every: int = 1
    warm_up: int = 0
    drops_burn_in: bool = False
    host: bool = False
    seen: list = field(default_factory=list)

    def ensembles(self, C):
        return C

    def nbytes(self, C, D):
        return 0

    def span(self, steps):
        return None

    def init(self, theta):
        self.seen.append(("init", theta.clone()))
        return {"rows": theta.clone()}

    def restart(self, state, theta):
        self.seen.append(("init", theta.clone()))

    def write(self, state, theta):
        self.seen.append(("write", theta.clone()))

    def read(self, state, theta, labels, M, k, unread=None):
        return torch.zeros(theta.shape[0], k, theta.shape[1])


def test_a_history_sees_every_n_th_state():
    diary = Diary(every=3)
    run = small(structure=pt.Structured(pt.partitions.each(), history=diary), steps=12, burn_in=0, init="module")
    assert [kind for kind, _ in diary.seen] == ["init", *["write"] * 4]
    assert not diary.seen[0][1].any()  # θ⁰
    for (_, theta), t in zip(diary.seen[1:], (3, 6, 9, 12), strict=True):
        assert torch.equal(theta, run.samples[:, t - 1])


def test_a_history_that_drops_burn_in_starts_again_in_the_middle_of_it():
    diary = Diary(drops_burn_in=True)
    run = small(structure=pt.Structured(pt.partitions.each(), history=diary), steps=7, burn_in=4)
    full = small(structure=pt.Structured(pt.partitions.each(), history=Diary()), steps=7, burn_in=0)
    assert [kind for kind, _ in diary.seen] == ["init", "write", "init", *["write"] * 5]
    assert torch.equal(diary.seen[2][1], full.samples[:, 1])
    assert run.forgotten == 2


# -- starting points -------------------------------------------------------------------------------------------------
def start(target=None, data=None, **settings):
    """[C, D]: where the chains of a run start."""
    return small(target, data, sampler=STILL, steps=1, **settings).samples[:, 0]


def test_init_fresh_gives_each_chain_what_its_layers_reset_to():
    target = classifier()
    theta = start(target, (X, Y), chains=50)
    assert len({tuple(t.tolist()) for t in theta}) == 50
    first = target.space.tree(theta)["0.weight"]
    assert first.abs().max() <= 0.5  # nn.Linear(4, ...) resets to U(-1/2, 1/2)
    assert first.std().item() == pytest.approx(1 / 12**0.5, rel=0.05)


def test_init_module_prior_and_tensors():
    target = classifier()
    assert torch.allclose(start(target, (X, Y), init="module"), target.space.values, atol=1e-6)
    prior = start(target, (X, Y), init="prior", chains=200)
    assert prior.std().item() == pytest.approx(0.5, rel=0.02)
    D = target.space.dim
    point, points = torch.randn(D), torch.randn(3, D)
    assert torch.allclose(start(target, (X, Y), init=point), point, atol=1e-6)
    assert torch.allclose(start(target, (X, Y), init=points.double().numpy()), points, atol=1e-6)
    assert torch.allclose(start(init=[1, 2, 3]), torch.tensor([1.0, 2.0, 3.0]), atol=1e-6)


def test_init_map_is_a_mode_for_each_chain():
    wells = pt.Density(lambda t: -(((t * t - 4) ** 2).sum()), dim=2)  # four modes, at ±2
    theta = start(wells, init="map", chains=16)
    assert torch.allclose(theta.abs(), torch.full((16, 2), 2.0), atol=0.02)
    assert len({tuple(t.sign().tolist()) for t in theta}) > 1


def test_spread_is_added_to_any_start():
    for init in ("module", torch.zeros(3), "map"):
        theta = start(init=init, spread=0.1, chains=400)
        assert theta.std().item() == pytest.approx(0.1, rel=0.1)
        assert theta.mean().abs() < 0.02


def test_an_ensemble_starts_in_one_mode():
    structure = pt.Structured(pt.partitions.each(), history=pt.Ensemble(4))
    for init in ("module", [1.0, 2.0, 3.0]):
        theta = start(structure=structure, init=init, chains=200)
        assert theta.std(0).mean().item() == pytest.approx(1e-3, rel=0.15)
    wells = pt.Density(lambda t: -(((t * t - 4) ** 2).sum()), dim=2)
    modes = start(wells, structure=structure, init="map", chains=40).view(10, 4, 2)
    assert (modes - modes[:, :1]).abs().max() < 0.05  # one mode for an ensemble,
    assert len({tuple(m.sign().tolist()) for m in modes[:, 0]}) > 1  # not one for all
    for init in ("fresh", "prior", torch.randn(8, 3)):
        with pytest.raises(ValueError, match=r"with an Ensemble history, expected 'module', 'map' or one point \[D\]"):
            small(structure=structure, init=init, chains=8)
    for chains, match in ((1, "at least 2|multiple of its size"), (6, "multiple of its size, 4")):
        with pytest.raises(ValueError, match=match):
            small(structure=structure, init="module", chains=chains)


# -- memory ----------------------------------------------------------------------------------------------------------
def test_a_memory_budget_changes_how_much_goes_at_once_and_nothing_else():
    target = classifier()
    structure = pt.Structured(pt.partitions.each(), history=pt.Window(1))  # one row: chunks cannot draw differently
    gradients, sizes = [], []
    for memory in (2**30, 100_000, 1):
        with seeded(0, "cpu", target) as device:
            plan = prepare(
                target, (X, Y), structure, None, chains=3, batch_size=60, init="module", device=device, memory=memory
            )
            state = plan.step.init(plan.theta)
            state.theta = state.theta + 0.1 * torch.randn(state.theta.shape)
            gradients.append(plan.step.gradient(state, plan.step.batches.draw(3)))
            sizes.append((plan.step.chunk, plan.step.energies.width))
    assert sizes[0] == (target.space.dim, None)
    assert sizes[2] == (1, 1)
    assert 1 < sizes[1][0] < target.space.dim
    for g in gradients[1:]:
        for a, b in zip(g, gradients[0]):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_run_within_little_memory_is_the_same_run():
    target = classifier()
    go = lambda memory: small(target, (X, Y), batch_size=8, steps=10, memory=memory).samples
    torch.testing.assert_close(go(2**30), go(1), rtol=1e-5, atol=1e-6)


def test_the_memory_of_a_large_batch_is_not_that_of_many_small_ones():
    """θ-sized vectors count once, however many rows a batch has."""
    wide = pt.Posterior(nn.Linear(1, 4000), pt.Categorical())
    with seeded(0, "cpu", wide) as device:
        data = (torch.randn(640, 1), torch.randint(4000, (640,)))
        needs = [setup._bytes_per_pass(wide, setup.make_batches(data, rows, device)) for rows in (32, 64, 320, 640)]
    slope = (needs[1] - needs[0]) / 32
    assert needs[2] - needs[1] == pytest.approx(slope * 256, rel=0.01)
    assert needs[3] - needs[2] == pytest.approx(slope * 320, rel=0.01)


# -- one chain, stopping, diverging ----------------------------------------------------------------------------------
def test_one_chain_is_enough():
    run = small(chains=1, steps=40, structure=pt.Structured(pt.partitions.each(), history=pt.Window(4)))
    assert run.samples.shape == (1, 30, 3)
    assert "only one independent chain" in "".join(run.summary().verdict)


def test_a_monitor_that_returns_a_string_stops_the_run():
    run = small(
        steps=20, burn_in=5, monitor=[lambda m: None, lambda m: "enough" if m.t >= 9 else None], monitor_every=3
    )
    assert run.stopped == "stopped at step 9 by a monitor: enough"
    assert run.steps == [6, 7, 8, 9]
    assert run.samples.shape == (3, 4, 3)
    assert [m["step"] for m in run.metrics] == [3, 6, 9]
    assert "stopped: stopped at step 9" in repr(run)


def test_an_interrupt_returns_what_there_is():
    def interrupt(moment):
        if moment.t == 8:
            raise KeyboardInterrupt

    run = small(steps=20, burn_in=5, monitor=interrupt, monitor_every=1)
    assert run.stopped == "interrupted at step 8 of 20"
    assert run.steps == [6, 7, 8]
    assert torch.equal(run.samples, small(steps=20, burn_in=5).samples[:, :3])
    assert run.settings["seconds"] > 0
    early = small(steps=20, burn_in=15, monitor=interrupt, monitor_every=1)
    assert early.samples.shape == (3, 0, 3)
    assert early.summary().verdict[0] == "the run ended early: interrupted at step 8 of 20"
    with pytest.raises(ValueError, match=r"needs a pt\.Posterior"):
        early.predict(X)


def test_a_diverging_run_says_which_chains_when_and_with_what():
    with pytest.raises(pt.DivergenceError) as e:
        small(QUARTIC, sampler=pt.SGLD(5.0), steps=200, burn_in=100)
    error = e.value
    assert error.chains == [0, 1, 2]
    assert 0 <= error.last_good_step < error.step <= 25
    for part in ("chains 0, 1, 2 diverged", f"and {error.step} with SGLD(step_size=5.0)", "take a smaller step"):
        assert part in str(error)
    assert error.last_good.shape == (3, 2)
    assert error.last_good.isfinite().all()
    assert error.run.stopped == f"diverged at step {error.step}"
    assert error.run.samples.shape == (3, 0, 2)


def test_one_diverging_chain_is_named_and_the_others_draws_are_kept():
    init = torch.ones(4, 2)
    init[2] = 60.0
    with pytest.raises(pt.DivergenceError) as e:
        small(QUARTIC, sampler=pt.SGLD(0.01), init=init, chains=4, steps=200, burn_in=0, thin=1)
    error = e.value
    assert error.chains == [2]
    assert "chain 2 diverged" in str(error)
    assert error.last_good.isfinite().all()
    assert error.last_good_step == error.step - 1  # every state is kept, so every state is looked at
    draws = error.run.samples
    assert draws.shape == (4, error.step - 1, 2)
    assert draws.isfinite().all()
    assert torch.equal(error.last_good, draws[:, -1])


def test_infinite_energy_is_a_divergence_even_where_theta_is_finite():
    walled = pt.Density(lambda t: torch.where(t[0] > 5, -torch.inf, 0.0) - 0.5 * (t * t).sum(), dim=2)
    init = torch.zeros(3, 2)
    init[1, 0] = 6.0
    with pytest.raises(pt.DivergenceError, match=r"chain 1 diverged.*between steps 0 and 1 .*start elsewhere") as e:
        small(walled, init=init, steps=100)
    assert e.value.last_good.isfinite().all()
    assert torch.equal(e.value.last_good, init)


# -- monitors and progress -------------------------------------------------------------------------------------------
def test_scores_of_a_monitor_equal_those_by_hand():
    target = classifier()
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    run = small(target, (X, Y), steps=10, burn_in=4, thin=2, batch_size=20, monitor={"test": (x, y)}, monitor_every=2)
    assert [m["step"] for m in run.metrics] == [2, 4, 6, 8, 10]
    assert not any("test/nll" in m for m in run.metrics[:2])  # still burning in: only the present states
    for i, record in enumerate(run.metrics[2:]):
        draws = run.predict(x).draws["probs"].view(3, 3, 30, 3)
        now = pt.Prediction({"probs": draws[:, i]}, True).scores(y)
        so_far = pt.Prediction({"probs": draws[:, : i + 1].flatten(0, 1)}, True).scores(y)
        for name, value in now.items():
            assert record[f"test/now/{name}"] == pytest.approx(value, abs=1e-6)
        for name in ("accuracy", "nll", "brier", "ece"):
            assert record[f"test/{name}"] == pytest.approx(so_far[name], abs=1e-6)
        assert "test/individual_accuracy" not in record


def test_regression_scores_of_a_monitor_equal_those_by_hand():
    target = pt.Posterior(nn.Linear(4, 1), pt.Gaussian(0.5))
    x, y = torch.randn(30, 4), torch.randn(30, 1)
    run = small(target, (X, X[:, :1]), steps=6, burn_in=2, thin=2, monitor={"t": TensorDataset(x, y)}, monitor_every=2)
    whole = run.predict(x)
    assert run.metrics[-1]["t/rmse"] == pytest.approx(whole.scores(y)["rmse"], rel=1e-5)
    now = pt.Prediction({k: v.view(3, 2, 30, 1)[:, 1] for k, v in whole.draws.items()}, False)
    assert run.metrics[-1]["t/now/nll"] == pytest.approx(now.scores(y)["nll"], rel=1e-5)


def test_what_a_function_returns_is_recorded_with_the_moment_it_saw():
    run = small(
        steps=9,
        burn_in=3,
        monitor={"mine": lambda m: {"mean": m.theta.mean().item(), "left": m.steps - m.t, "burning": m.burning_in}},
        monitor_every=4,
    )
    seen = [(m["step"], m["mine/left"], m["mine/burning"]) for m in run.metrics]
    assert seen == [(4, 5, False), (8, 1, False), (9, 0, False)]
    assert run.metrics[1]["mine/mean"] == pytest.approx(run.samples[:, run.steps.index(8)].mean().item(), abs=1e-6)
    assert all(m["seconds"] > 0 for m in run.metrics)


def test_monitors_of_one_name_each_a_number_and_what_is_no_record():
    both = {"a": lambda m: {"v": 1, "step": -1}, "b": lambda m: {"v": 2}, "c": lambda m: 0.5}
    last = small(steps=3, monitor=both).metrics[-1]
    assert (last["a/v"], last["b/v"], last["c"], last["step"]) == (1, 2, 0.5, 3)
    assert small(steps=3, monitor=lambda m: {"step": -1, "x": 1}).metrics[-1]["step"] == 3  # the run's own stays
    for said in (True, 0.5, [1]):
        with pytest.raises(ValueError, match=r"a monitor returned .*, expected a dict to record, a string to stop"):
            small(steps=3, monitor=lambda m, said=said: said)


def test_a_failing_monitor_leaves_the_run_until_then():
    def monitor(m):
        if m.t == 8:
            raise KeyError("gone")

    with pytest.raises(KeyError) as e:
        small(steps=12, burn_in=4, monitor=monitor, monitor_every=4)
    run = e.value.run
    assert run.samples.shape[1] == 4
    assert run.stopped == "failed at step 8: KeyError"
    assert "ended early" in str(run.summary())


def test_a_bad_batch_of_a_loader_is_named_and_leaves_the_run_until_then():
    x, y = X.clone(), Y.clone()
    y[50] = 99
    loader = lambda: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 10)
    with (
        pytest.warns(UserWarning, match="does not shuffle"),
        pytest.raises(ValueError, match="batch 5 of the Data") as e,
    ):
        small(classifier(), loader(), steps=30, burn_in=0, chains=1)
    assert "Categorical got class indices from 0 to 99, expected 0 to 2" in str(e.value)
    assert e.value.run.samples.shape[1] == 5
    y[50], x[55] = 0, torch.nan
    with (
        pytest.warns(UserWarning, match="does not shuffle"),
        pytest.raises(ValueError, match=r"batch 5 .* x holds NaN"),
    ):
        small(classifier(), loader(), steps=30, burn_in=0, chains=1)


def test_progress_is_silent_when_piped_and_complete_when_asked_for(capsys):
    small(steps=30)
    assert capsys.readouterr() == ("", "")
    small(steps=30, progress=False)
    assert capsys.readouterr() == ("", "")
    small(classifier(), (X, Y), steps=30, progress=True, structure=STRUCTURED)
    out, err = capsys.readouterr()
    assert out == ""
    assert "partita SGLD(step_size=0.01) · 2 groups · 3 chains · 1 passes a step · cpu" in err.replace("\n", " ")
    assert "30/30" in err
    assert "sampling" in err
    assert "energy" in err


# -- the run ---------------------------------------------------------------------------------------------------------
def test_a_run_predicts_with_its_draws():
    run = small(classifier(), (X, Y), steps=12, batch_size=20)
    whole = run.predict(X[:7])
    assert whole.draws["probs"].shape == (27, 7, 3)
    for chain, draw in ((0, 0), (2, -1), (1, 4)):
        module = run.module(chain, draw)
        probs = module(X[:7]).softmax(-1).detach()
        torch.testing.assert_close(whole.draws["probs"][chain * 9 + draw % 9], probs, rtol=1e-4, atol=1e-6)
        assert torch.equal(run.space.flatten(dict(module.named_parameters())).detach(), run.samples[chain, draw])
    few = run.predict(X[:7], draws=4)
    torch.testing.assert_close(few.draws["probs"], whole.draws["probs"][[0, 9, 17, 26]])
    for draws in (0, 28, 2.0, True):
        with pytest.raises(ValueError, match="expected a whole number from 1 to 27"):
            run.predict(X, draws=draws)
    for chain, draw in ((3, 0), (0, 9), (-4, 0), (0, 1.5)):
        with pytest.raises(ValueError, match="expected whole numbers, chain < 3, draw < 9"):
            run.module(chain, draw)
    assert repr(run) == "Run(3 chains x 9 draws x 43 parameters, 32 probe inputs)"
    assert run.settings["N"] == 60
    assert run.settings["batch_size"] == 20


def test_a_density_has_no_module_and_no_predictions():
    run = small()
    for call in (run.module, lambda: run.predict(X)):
        with pytest.raises(ValueError, match=r"needs a pt.Posterior, this run sampled a Density"):
            call()
    assert repr(run) == "Run(3 chains x 9 draws x 3 parameters, 0 probe inputs)"
