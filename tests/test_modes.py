"""The engine's modes: compiled equals eager, what cannot be compiled runs eagerly and says so, random state.

Compiling takes seconds a network on two cores, so few are compiled here, each for several checks.
"""

import math

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor

import partita as pt
from partita.engine.modes import Compiled, Eager
from partita.laws.table import Cell, run_cell
from partita.runs import choose
from partita.runs.choose import choose_engine
from partita.runs.setup import prepare, seeded
from partita.runs.torchstate import rng_state, set_rng_state, switched, unchanged

N, EPS = 64, 1e-4
X = torch.linspace(-2, 2, N * 6).reshape(N, 6).sin()
Y = torch.arange(N) % 3
S_D = pt.Structured(pt.partitions.by_neuron(), pt.masks.Bernoulli(0.5, count=2), pt.Reservoir(8, every=3))
SPLIT = pt.Structured(pt.partitions.by_layer(), pt.masks.Beta(), pt.Window(4, dtype="bfloat16"), past=2, share="split")
# relative to the largest entry: eager and compiled code add up in another order, and rounding of 2^-24 an operation grows
# with the steps at most linearly while these steps are far below the stability limit
TOLERANCE = 20 * 2**-24 * 50


def posterior(net: nn.Module | None = None) -> pt.Posterior:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        return pt.Posterior(net or pt.models.mlp(6, (5,), 3), pt.Categorical(), prior=pt.Normal(0.7))


def ready(structure=None, sampler=None, chains=3, data=(X, Y), batch_size=16, target=None, **settings):
    """A plan and its states; call inside `seeded`."""
    target = target or posterior()
    plan = prepare(
        target,
        data,
        structure or pt.Joint(),
        sampler or pt.PSGLD(EPS),
        chains=chains,
        batch_size=batch_size,
        init="module",
        device=torch.device("cpu"),
        spread=0.1,
        burn_in=10,
        **settings,
    )
    return plan.step, plan.step.init(plan.theta)


def advance(engine, states, step, steps, first=1, rate=EPS):
    history = step.structure.history
    for t in range(first, first + steps):
        grad = engine.advance(states, rate, 1.0 if t <= 10 else 0.0, history is not None and t % history.every == 0)
    return grad


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return float((a - b).abs().max()) <= TOLERANCE * max(1.0, float(b.abs().max()))


FLIPPED = (X.reshape(N, 1, 2, 3), Y)
CASES = {
    "joint, one chain": {"sampler": pt.SGLD(EPS), "chains": 1},
    "S_d": {"structure": S_D},
    "split": {"structure": SPLIT, "sampler": pt.SGHMC(0.01, adapt="burn_in"), "rate": 0.02},
    "loop": {"structure": S_D, "how": "loop"},
    "flips": {
        "data": FLIPPED,
        "augment": pt.data.CropFlip(pad=1),
        "target": posterior(nn.Sequential(nn.Flatten(), pt.models.mlp(6, (5,), 3))),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_compiled_equals_eager_with_the_same_random_numbers(name):
    target = posterior()
    states = {}
    for mode in ("eager", "compile"):
        with seeded(3, "cpu", target):
            case = {**CASES[name]}
            rate = case.pop("rate", EPS)
            step, chains = ready(**case)
            before, states["start"] = rng_state(step.device), chains.theta.clone()
            choice = choose_engine(mode, step, chains, 50)
            assert choice.engine.name == mode, choice.why
            assert not choice.fell_back
            assert all(torch.equal(a, b) for a, b in zip(before.values(), rng_state(step.device).values()))
            grad = advance(choice.engine, chains, step, 50, rate=rate)
            states[mode] = (chains, grad, torch.get_rng_state())
    (a, grad_a, rng_a), (b, grad_b, rng_b) = states["eager"], states["compile"]
    assert torch.equal(rng_a, rng_b)
    assert close(b.theta, a.theta)
    moved = a.theta - states["start"]
    assert float((b.theta - a.theta).abs().max()) < 1e-2 * float(moved.abs().max())  # and not because nothing moved
    for name in a.sampler:
        assert close(b.sampler[name], a.sampler[name]), name
    for name in a.history:
        gap = (b.history[name].double() - a.history[name].double()).abs()
        step_of = 2**-7 if a.history[name].dtype == torch.bfloat16 else 0.0  # a bfloat16 row may round to its neighbour
        assert bool((gap <= TOLERANCE + step_of * a.history[name].double().abs()).all()), name
        assert float((gap > TOLERANCE).double().mean()) < 0.05, name  # now and then
    for x, y in zip(grad_a, grad_b):
        assert float((x - y).abs().max()) <= TOLERANCE * float(x.abs().max())


@pytest.mark.parametrize("how", ["vmap", "loop"])
def test_a_compiled_step_that_writes_is_a_step_and_a_write(how):
    """As graphs run them: in turn with steps that do not write, and the write inside the compiled code."""
    target, ends = posterior(), []
    for inside in (False, True):
        with seeded(3, "cpu", target):
            step, chains = ready(pt.Structured(pt.partitions.by_layer(), history=pt.Window(8, every=3)), how=how)
            engine = choose_engine("compile", step, chains, 50).engine
            engine.dial(EPS, 0.0)
            for t in range(1, 25):
                write = t % 3 == 0
                engine.runs[inside and write](chains, engine.rate, engine.adapt, step.batches.draw(3))
                if write and not inside:
                    step.remember(chains)
            ends.append(chains)
    a, b = ends
    assert int(a.history["seen"]) == int(b.history["seen"]) == 9
    assert close(b.history["rows"], a.history["rows"])
    assert close(b.theta, a.theta)
    assert float((a.history["rows"][:, 1] - a.history["rows"][:, 2]).abs().max()) > 1e-4  # rows that did move


def test_random_state_goes_round_in_compiled_and_eager_mode():
    target = posterior()
    with seeded(0, "cpu", target):
        step, chains = ready(S_D)
        for mode in ("eager", "compile"):
            engine = choose_engine(mode, step, chains, 50).engine
            advance(engine, chains, step, 3)
            kept = rng_state(step.device), chains.aside(), {k: v.clone() for k, v in chains.history.items()}
            advance(engine, chains, step, 5, first=4)
            once = chains.theta.clone()
            set_rng_state(kept[0])
            chains.become(kept[1].theta, kept[1].sampler)
            for k, v in kept[2].items():
                chains.history[k].copy_(v)
            advance(engine, chains, step, 5, first=4)
            assert torch.equal(chains.theta, once), mode


def test_chains_from_one_point_part_and_are_uncorrelated():
    """Noise, minibatches and masks are each chain's own: with the same start their moves are uncorrelated."""
    target = posterior()
    with seeded(0, "cpu", target):
        step, chains = ready(S_D, pt.SGLD(EPS), chains=4)
        chains.theta.copy_(chains.theta[:1].expand_as(chains.theta).clone())
        moves = []
        for _ in range(200):
            before = chains.theta.clone()
            step(chains, EPS, 0.0)
            moves.append(chains.theta - before)
    moves = torch.stack(moves, 1).flatten(1)  # [C, steps · D]
    moves = (moves - moves.mean(0)).double()  # the drift that they share
    correlation = torch.corrcoef(moves)[~torch.eye(4, dtype=bool)] + 1 / 3  # of centred rows it is -1/(C - 1)
    assert correlation.abs().max() < 5 / math.sqrt(moves.shape[1])


@pytest.mark.parametrize(
    "cell",
    [
        Cell("SGLD", "Joint"),
        Cell("pSGLD", "S", "by_layer", "Window"),
        Cell("SGHMC", "Bernoulli .5", "each", "Ensemble 4"),
        Cell("SGLD", "Beta(.5, .5)", "random 3", "Reservoir J=2", temperature=0.5),
    ],
    ids=str,
)
def test_laws_hold_compiled(cell):
    result = run_cell(cell, engine="compile")
    assert result.passed, result


@torch.compiler.disable
def hidden(x: torch.Tensor) -> torch.Tensor:
    """What a library may do that the compiler cannot follow."""
    return 2 * x


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)

    def forward(self, x):
        return hidden(self.net(x))


def test_what_cannot_be_compiled_runs_eagerly_and_says_so():
    run = pt.sample(posterior(Odd()), (X, Y), sampler=pt.SGLD(EPS), steps=4, chains=2, engine="compile", thin=1)
    assert run.settings["engine"] == "eager"
    assert run.settings["engine_why"].startswith("engine='compile' falls back to eager: ")
    assert "\n" not in run.settings["engine_why"]
    assert run.settings["engine_why"] in run.settings["notes"]


def test_without_a_compiler_the_run_is_eager_and_says_so(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    net = pt.models.mlp(6, (7, 4), 3)
    with inductor.patch({"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}):
        run = pt.sample(posterior(net), (X, Y), sampler=pt.SGLD(EPS), steps=4, engine="compile", thin=1)
    assert run.settings["engine"] == "eager"
    assert "falls back to eager" in run.settings["engine_why"]
    assert "compiler" in run.settings["engine_why"].lower(), run.settings["engine_why"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA, where a graph is a graph")
def test_a_graph_without_cuda_is_compiled_code_and_says_so():
    run = pt.sample(
        posterior(),
        (X, Y),
        sampler=pt.SGLD(EPS),
        steps=4,
        chains=1,
        batch_size=16,
        engine="graph",
        thin=1,
        device="cpu",
    )
    assert run.settings["engine"] == "compile"
    assert run.settings["engine_why"] == "engine='graph' needs CUDA: compiled instead"


def test_auto_weighs_the_length_of_the_run_and_records_why(monkeypatch):
    target = posterior()
    with seeded(0, "cpu", target):
        step, chains = ready()
        theta, before = chains.theta.clone(), torch.get_rng_state()
        short = choose_engine("auto", step, chains, 100)
        assert isinstance(short.engine, Eager)
        assert short.why.startswith("engine eager: 100 steps of ")
        assert not short.fell_back
        monkeypatch.setattr(choose, "Compiled", lambda step, *_: Eager(step))
        monkeypatch.setattr(Eager, "probe", lambda self, chains: step(chains.aside(), 0.0, 0.0), raising=False)
        long = choose_engine("auto", step, chains, 10**9)
        assert long.why.startswith("engine compile: 1,000,000,000 steps of ")
        assert torch.equal(chains.theta, theta)
        assert torch.equal(torch.get_rng_state(), before)
    run = pt.sample(target, (X, Y), sampler=pt.SGLD(EPS), steps=4, thin=1)
    assert run.settings["engine"] == "eager"
    assert run.settings["engine_why"].startswith("engine eager: 4 steps of ")


def test_a_wrong_compiled_gradient_is_not_used(monkeypatch):
    monkeypatch.setattr(Compiled, "__init__", lambda self, step, *_: Eager.__init__(self, step))
    monkeypatch.setattr(Compiled, "probe", lambda self, chains: _scaled(self.step(chains.aside(), 0.0, 0.0), 1.2))
    target = posterior()
    with seeded(0, "cpu", target):
        step, chains = ready()
        choice = choose_engine("compile", step, chains, 10)
    assert isinstance(choice.engine, Eager)
    assert "its gradient is 20% off the eager one" in choice.why


def _scaled(grad, factor):
    return grad._replace(g=grad.g * factor)


def test_dials_turn_without_compiling_again():
    """Rate and adaptation are inputs of the compiled step: SGLD moves by rate/2 times the gradient at temperature → 0."""
    target = pt.Posterior(posterior().model, pt.Categorical(), prior=pt.Normal(0.7), temperature=1e-30)
    with seeded(0, "cpu", target):
        step, chains = ready(sampler=pt.SGLD(EPS), chains=1, target=target)
        engine = choose_engine("compile", step, chains, 10).engine
        for rate in (1e-4, 3e-4, 1e-5):
            before = chains.theta.clone()
            grad = engine.advance(chains, rate, 0.0, False)
            torch.testing.assert_close(chains.theta, before - rate / 2 * grad.g, rtol=1e-5, atol=1e-7)


def test_unchanged_puts_the_random_state_back():
    torch.default_generator.manual_seed(1)
    before = torch.get_rng_state()
    with unchanged(torch.device("cpu")):
        torch.rand(3)
        assert not torch.equal(before, torch.get_rng_state())
    assert torch.equal(before, torch.get_rng_state())


def test_switches_are_put_back():
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    with switched("tf32"):
        assert (cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32) == (True, True, True)
    assert before == (cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32)
    with switched("bf16"):
        assert matmul.allow_tf32 == before[2]


def test_the_engine_reads_in_one_sitting():
    from pathlib import Path

    import partita.engine

    files = sorted(Path(partita.engine.__file__).parent.glob("*.py"))
    assert sum(len(f.read_text("utf-8").splitlines()) for f in files) < 500


class Lengths(torch.utils.data.Dataset):
    """Rows of differing lengths, as text has them."""

    def __len__(self):
        return 48

    def __getitem__(self, i):
        return X[i, : 3 + i % 4], Y[i]


def padded(rows):
    x = torch.nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True)
    return x, torch.stack([y for _, y in rows])


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = pt.models.mlp(2, (4,), 3)

    def forward(self, x):
        return self.net(torch.stack([x.sum(1), x.square().sum(1)], 1))


def test_batches_of_other_shapes_than_the_compiled_one_run_eagerly():
    """A loader that pads each batch to its longest row: compiled code, which checks nothing, must not see the others."""
    target, ends = posterior(Pooled()), {}
    for mode in ("eager", "compile"):
        order = torch.Generator().manual_seed(1)
        loader = torch.utils.data.DataLoader(Lengths(), 4, shuffle=True, generator=order, collate_fn=padded)
        with seeded(0, "cpu", target):
            step, chains = ready(data=loader, batch_size=None, target=target, chains=1, sampler=pt.SGLD(EPS))
            engine = choose_engine(mode, step, chains, 50).engine
            assert engine.name == mode
            lengths = set()
            for _ in range(30):
                engine.advance(chains, EPS, 0.0, False)
                lengths.add(step.batches.look(1)[0].shape[-1])
            ends[mode] = chains.theta.clone()
    assert len(lengths) > 1
    assert close(ends["compile"], ends["eager"])


def test_a_nan_gradient_of_compiled_code_is_not_used(monkeypatch):
    monkeypatch.setattr(Compiled, "__init__", lambda self, step, *_: Eager.__init__(self, step))
    monkeypatch.setattr(Compiled, "probe", lambda self, chains: _scaled(self.step(chains.aside(), 0.0, 0.0), math.nan))
    target = posterior()
    with seeded(0, "cpu", target):
        step, chains = ready()
        assert choose_engine("compile", step, chains, 10).fell_back


def test_a_sampler_may_hand_back_what_it_was_given():
    """Old tensors under other names: kept before anything is written over."""
    from partita.engine.step import Chains

    chains = Chains(torch.tensor([[1.0]]), {"last": torch.tensor([[0.0]]), "g": torch.tensor([[5.0]])}, {})
    chains.become(torch.tensor([[2.0]]), {"last": chains.theta, "g": chains.sampler["last"]})
    assert (chains.theta.item(), chains.sampler["last"].item(), chains.sampler["g"].item()) == (2.0, 1.0, 0.0)
