"""What must also hold on a GPU (skipped without one)."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import partita as pt
from partita.laws.table import Cell, run_cell
from partita.runs.choose import choose_engine
from partita.runs.setup import prepare, seeded
from partita.runs.torchstate import rng_state, set_rng_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

STRUCTURES = {
    "joint": pt.Joint(),
    "S": pt.Structured(pt.partitions.by_layer(), history=pt.Window(16)),
    "S_d": pt.Structured(pt.partitions.each(), pt.masks.Bernoulli(0.5, count=2, nonzero=True), pt.Reservoir(16)),
    "S_d beta": pt.Structured(pt.partitions.by_neuron(), pt.masks.Beta(), pt.Window(16, dtype="bfloat16")),
}


def digits_run(structure, device="cuda", seed=0, steps=60, **settings):
    data, _ = pt.data.digits()
    posterior = pt.Posterior(pt.models.mlp(64, (16,), 10), pt.Categorical(), prior=pt.Normal(0.3))
    return pt.sample(
        posterior, data, sampler=pt.PSGLD(1e-3), structure=structure, steps=steps, device=device, seed=seed, **settings
    )


def conv_posterior():
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        return pt.Posterior(pt.models.convnet(1, 10, width=8, norm="group"), pt.Categorical(), prior=pt.Normal(0.3))


def ready(target, data, structure, sampler, chains, mode, **settings):
    """A step, its states and its engine on the GPU; call inside `seeded`."""
    plan = prepare(
        target,
        data,
        structure,
        sampler,
        chains=chains,
        init="module",
        device=torch.device("cuda"),
        spread=0.01,
        burn_in=10,
        **{"batch_size": 64, **settings},
    )
    states = plan.step.init(plan.theta)
    choice = choose_engine(mode, plan.step, states, 100)
    assert choice.engine.name == mode, choice.why
    return plan.step, states, choice.engine


def advance(engine, states, step, steps, first=1):
    history = step.structure.history
    for t in range(first, first + steps):
        engine.advance(states, 1e-4, 1.0, history is not None and t % history.every == 0)
    return states.theta.clone()


@pytest.mark.parametrize("name", STRUCTURES)
def test_same_seed_same_numbers(name):
    a, b = digits_run(STRUCTURES[name]), digits_run(STRUCTURES[name])
    assert a.samples.device.type == "cpu"
    assert torch.equal(a.samples, b.samples)
    assert not torch.equal(a.samples, digits_run(STRUCTURES[name], seed=1).samples)


def test_the_generators_of_the_caller_stay_as_they_were():
    data, _ = pt.data.digits()
    posterior = pt.Posterior(pt.models.mlp(64, (16,), 10), pt.Categorical(), prior=pt.Normal(0.3))
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state()
    pt.sample(posterior, data, sampler=pt.SGLD(1e-5), steps=20, device="cuda")
    assert torch.equal(cpu, torch.get_rng_state())
    assert torch.equal(cuda, torch.cuda.get_rng_state())


def test_batchnorm_network_samples_and_predicts():
    (x, y), (x_test, y_test) = pt.data.digits()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = pt.Posterior(
            pt.models.convnet(1, 10, width=8, norm="batch", image=(8, 8)), pt.Categorical(), prior=pt.Normal(0.3)
        )
    run = pt.sample(posterior, (x, y), sampler=pt.SGLD(1e-5), steps=20, chains=2, device="cuda")
    assert run.predict(x_test).scores(y_test)["nll"] > 0
    assert "chains" in str(run.summary())


def test_a_gaussian_has_its_law():
    """S on a 2-D Gaussian: variances 1/L_jj (finite step, ensemble of 256, to 5 standard errors)."""
    from partita.laws import exact

    L = torch.tensor([[1.5, 0.8], [0.8, 1.0]])
    target = pt.Density(lambda th: -0.5 * th @ (L.to(th) @ th), dim=2)
    run = pt.sample(
        target,
        sampler=pt.SGLD(0.4),
        structure=pt.Structured(pt.partitions.each(), history=pt.Ensemble(16)),
        steps=600,
        burn_in=100,
        thin=1,
        chains=2048,
        init=torch.zeros(2),
        spread=1.0,
        device="cuda",
    )
    cov = torch.tensor(
        exact.stationary_cov(L.numpy(), [0, 1], exact.one_hot(2), exact.Overdamped(0.4), ensemble=16).cov
    )
    x = run.samples.double().reshape(128, 16, -1, 2)
    second = torch.einsum("ecsi,ecsj->eij", x, x) / (16 * x.shape[2])
    z = (second.mean(0) - cov) / (second.std(0) / 128**0.5)
    assert z.abs().max() < 5


@pytest.mark.parametrize("name", STRUCTURES)
def test_runs_of_graphs_repeat_up_to_rounding(name):
    """To the bit they repeat on one engine (the random state's test): another may have chosen other kernels."""
    a, b, other = (digits_run(STRUCTURES[name], engine="graph", steps=24, thin=1, seed=s) for s in (0, 0, 1))
    assert a.settings["engine"] == "graph", a.settings["engine_why"]
    assert (a.samples - b.samples).abs().max() < 1e-3
    assert (a.samples - other.samples).abs().max() > 1e-2


def test_a_joint_graph_equals_compiled_and_eager_code():
    """Two kinds of draws in a fixed order, so that all three draw the same numbers."""
    runs = [digits_run(pt.Joint(), engine=e, steps=24, thin=1) for e in ("graph", "compile", "eager")]
    assert [r.settings["engine"] for r in runs] == ["graph", "compile", "eager"], runs[0].settings["engine_why"]
    assert (runs[0].samples - runs[1].samples).abs().max() < 1e-3
    assert (runs[0].samples - runs[2].samples).abs().max() < 1e-3


@pytest.mark.parametrize(
    "cell",
    [Cell("pSGLD", "S", "by_layer", "Window"), Cell("SGHMC", "Bernoulli .5", "each", "Ensemble 4")],
    ids=str,
)
def test_graphs_have_the_law_of_the_table(cell):
    result = run_cell(cell, engine="graph", device="cuda")
    assert result.passed, result


@pytest.mark.parametrize("mode", ["eager", "compile", "graph"])
def test_random_state_goes_round(mode):
    target = pt.Posterior(pt.models.mlp(64, (16,), 10), pt.Categorical(), prior=pt.Normal(0.3))
    data, _ = pt.data.digits()
    with seeded(0, "cuda", target):
        step, states, engine = ready(target, data, STRUCTURES["S_d"], pt.PSGLD(1e-4), 4, mode)
        advance(engine, states, step, 6)
        rng, kept = rng_state(step.device), states.aside()
        history = {k: v.clone() for k, v in states.history.items()}
        once = advance(engine, states, step, 6, first=7)
        set_rng_state(rng)
        states.become(kept.theta, kept.sampler)
        for k, v in history.items():
            states.history[k].copy_(v)
        assert torch.equal(advance(engine, states, step, 6, first=7), once)


def test_streams_give_the_gradients_of_the_loop():
    data, _ = pt.data.digits()
    x = (data[0].reshape(-1, 1, 8, 8), data[1])
    target = conv_posterior()
    gradients = {}
    for how in ("loop", "streams"):
        with seeded(0, "cuda", target):
            step, states, _ = ready(target, x, pt.Joint(), pt.SGLD(1e-4), 5, "eager", how=how)
            assert step.energies.how == how
            gradients[how] = step.gradient(states, step.batches.draw(5)).g
    assert torch.allclose(gradients["loop"], gradients["streams"], rtol=1e-4, atol=1e-3)


def test_streams_in_a_graph_repeat_and_stay_near_the_eager_loop():
    """From one state with one batch of all data and no noise, eight steps of a graph are eight steps of the loop."""
    data, _ = pt.data.digits()
    x = (data[0].reshape(-1, 1, 8, 8)[:256], data[1][:256])
    target = conv_posterior()
    ends = []
    for mode, how in (("graph", "streams"), ("graph", "streams"), ("eager", "loop")):
        with seeded(0, "cuda", target):
            step, states, engine = ready(target, x, pt.Joint(), pt.SGHMC(1e-3), 4, mode, how=how, batch_size=256)
            quiet = replace(step, temperature=0.0)
            engine = choose_engine(mode, quiet, states, 100).engine
            for _ in range(8):
                engine.advance(states, 1e-3, 0.0, False)
            ends.append(states.theta.clone())
    assert torch.allclose(ends[0], ends[1], rtol=1e-4, atol=1e-5)
    assert torch.allclose(ends[0], ends[2], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_in_host_memory_are_the_rows_on_the_gpu(dtype):
    runs = [
        digits_run(
            pt.Structured(pt.partitions.by_neuron(), pt.masks.Bernoulli(0.5), pt.Window(16, dtype=dtype, host=host)),
            engine="graph",
            steps=40,
            thin=1,
        )
        for host in (False, True)
    ]
    assert all(run.settings["engine"] == "graph" for run in runs), runs[1].settings["engine_why"]
    assert torch.equal(runs[0].samples, runs[1].samples)


def test_a_loader_feeds_a_graph_through_its_buffer():
    data, _ = pt.data.digits()
    target = pt.Posterior(pt.models.mlp(64, (16,), 10), pt.Categorical(), prior=pt.Normal(0.3))

    def loader():
        order = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(*data), batch_size=64, shuffle=True, generator=order)

    ends = []
    for mode in ("graph", "eager"):
        with seeded(0, "cuda", target):
            step, states, engine = ready(target, loader(), pt.Joint(), pt.SGLD(1e-4), 2, mode, batch_size=None)
            engine = choose_engine(mode, replace(step, temperature=0.0), states, 100).engine
            for _ in range(8):
                engine.advance(states, 1e-5, 0.0, False)
            ends.append(states.theta.clone())
    assert torch.allclose(*ends, rtol=1e-3, atol=1e-4)


def test_augmentation_runs_in_the_graph_and_differs_from_step_to_step():
    data, _ = pt.data.digits()
    x = (data[0].reshape(-1, 1, 8, 8)[:64], data[1][:64])
    go = {
        "sampler": pt.SGLD(1e-5),
        "steps": 8,
        "chains": 1,
        "batch_size": 64,
        "thin": 1,
        "device": "cuda",
        "engine": "graph",
    }
    seen = pt.sample(conv_posterior(), x, augment=pt.data.CropFlip(pad=2), **go)
    plain = pt.sample(conv_posterior(), x, **go)
    assert seen.settings["engine"] == plain.settings["engine"] == "graph", seen.settings["engine_why"]
    assert not torch.equal(seen.samples, plain.samples)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_precisions_sample_and_keep_states_in_float32(precision):
    run = digits_run(STRUCTURES["S_d"], engine="graph", steps=40, precision=precision)
    assert run.samples.dtype == torch.float32
    assert run.settings["engine"] == "graph", run.settings["engine_why"]


def test_auto_on_the_gpu_takes_a_graph_for_a_long_run():
    run = digits_run(STRUCTURES["S_d"], steps=60)
    assert run.settings["engine_why"].startswith("engine eager: 60 steps of ")
    target = conv_posterior()
    data, _ = pt.data.digits()
    with seeded(0, "cuda", target):
        step, states, _ = ready(target, (data[0].reshape(-1, 1, 8, 8), data[1]), pt.Joint(), pt.SGLD(1e-4), 2, "eager")
        choice = choose_engine("auto", step, states, 10_000_000)
    assert choice.engine.name == "graph"
    assert choice.why.startswith("engine graph: 10,000,000 steps of ")
