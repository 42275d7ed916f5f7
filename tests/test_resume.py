"""A run on disk is the run in memory; a run that was stopped and gone on with is the run that was not."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import partita as pt

X = torch.randn(96, 5, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long() + (X[:, 0] > 1).long()


def posterior(norm=False, seed=0, width=6):
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        middle = [nn.BatchNorm1d(width)] if norm else []
        net = nn.Sequential(nn.Linear(5, width), *middle, nn.Tanh(), nn.Linear(width, 3))
        return pt.Posterior(net, pt.Categorical(), prior=pt.Normal(0.5))


S = pt.Structured(pt.partitions.by_layer(), history=pt.Reservoir(8, every=2))
S_D = pt.Structured(pt.partitions.each(), pt.masks.Bernoulli(0.5, count=2), pt.Window(8, dtype="bfloat16"))
CASES = {
    "SGLD": {"sampler": pt.SGLD(1e-4)},
    "pSGLD S": {"sampler": pt.PSGLD(1e-3), "structure": S},
    "SGHMC S_d": {"sampler": pt.SGHMC(1e-3, friction=5.0), "structure": S_D},
    "ensemble": {
        "sampler": pt.SGLD(1e-4),
        "structure": pt.Structured(pt.partitions.each(), history=pt.Ensemble()),
        "init": "module",
    },
    "cosine": {
        "sampler": pt.SGLD(pt.schedules.Cosine(1e-4, 1e-5)) if hasattr(pt.schedules, "Cosine") else pt.SGLD(1e-4)
    },
    "compiled": {"sampler": pt.PSGLD(1e-3), "structure": S_D, "engine": "compile"},
}
LONG = {
    "steps": 200_000,
    "burn_in": 50,
    "thin": 50,
    "chains": 3,
    "batch_size": 16,
    "monitor_every": 10,
    "engine": "eager",
}
HOW = {"steps": 60, "burn_in": 21, "thin": 3, "chains": 3, "batch_size": 16, "monitor_every": 10}


def stop_at(t):
    return lambda moment: "enough for today" if moment.t == t else None


def same(a, b):
    assert list(a.samples.shape) == list(b.samples.shape)
    assert torch.equal(a.samples[:], b.samples[:])
    assert a.steps == b.steps
    assert torch.equal(a.temperature, b.temperature)
    assert torch.equal(a.heat, b.heat)
    strip = lambda metrics: [{k: v for k, v in m.items() if k != "seconds"} for m in metrics]
    assert strip(a.metrics) == strip(b.metrics)
    assert a.statistics.keys() == b.statistics.keys()
    assert all(torch.equal(a.statistics[k], b.statistics[k]) for k in a.statistics)


@pytest.mark.parametrize("name", CASES)
def test_stopped_and_gone_on_with_equals_in_memory_equals_on_disk(name, tmp_path):
    case = {"sampler": pt.SGLD(1e-4), **HOW, **CASES[name]}
    test = {"test": (X[:32], Y[:32])}
    whole = pt.sample(posterior(), (X, Y), monitor=test, **case)
    disk = pt.sample(posterior(), (X, Y), monitor=test, out=tmp_path / "whole", **case)
    same(whole, disk)
    for t in (10, 20, 30, 50):  # in burn-in, at its end, between draws
        path = tmp_path / str(t)
        part = pt.sample(posterior(), (X, Y), monitor={**test, "halt": stop_at(t)}, out=path, **case)
        assert "enough for today" in part.stopped
        assert part.settings["done"] == t
        gone_on = pt.resume(path, posterior(), (X, Y), monitor=test)
        assert gone_on.stopped is None
        same(whole, gone_on)


def test_batchnorm_statistics_and_loaders_go_on_as_well(tmp_path):
    def loader():
        return DataLoader(
            TensorDataset(X, Y),
            batch_size=10,
            shuffle=True,
            generator=torch.Generator().manual_seed(3),
            drop_last=False,
        )

    case = {**HOW, "batch_size": None, "sampler": pt.SGLD(1e-4)}
    for norm in (False, True):
        whole = pt.sample(posterior(norm), loader(), **case)
        part = pt.sample(posterior(norm), loader(), monitor=stop_at(30), out=tmp_path / str(norm), **case)
        assert len(part.steps) == 3
        same(whole, pt.resume(tmp_path / str(norm), posterior(norm), loader()))
        assert bool(whole.statistics) == norm


def test_a_run_can_be_made_longer(tmp_path):
    case = {**HOW, "sampler": pt.SGLD(1e-4)}
    whole = pt.sample(posterior(), (X, Y), **{**case, "steps": 90})
    pt.sample(posterior(), (X, Y), out=tmp_path / "run", **case)
    longer = pt.resume(tmp_path / "run", posterior(), (X, Y), steps=90)
    assert longer.settings["horizon"] == 60
    assert torch.equal(longer.samples[:], whole.samples)
    assert pt.resume(tmp_path / "run", posterior(), (X, Y)).steps == longer.steps  # nothing left to do
    with pytest.raises(ValueError, match="steps is 70, expected at least the 90"):
        pt.resume(tmp_path / "run", posterior(), (X, Y), steps=70)


def test_a_loaded_run_answers_as_the_run_did(tmp_path):
    model = posterior()
    run = pt.sample(model, (X, Y), sampler=pt.PSGLD(1e-3), structure=S, out=tmp_path / "run", **HOW)
    again = pt.load(tmp_path / "run", posterior(seed=1))
    same(run, again)
    assert torch.equal(run.predict(X).probs, again.predict(X).probs)
    assert str(run.summary()) == str(again.summary())
    assert again.groups.name(0) == run.groups.name(0)
    assert torch.equal(again.samples[1, 2], run.samples[1, 2])


def test_what_is_not_random_comes_from_the_folder(tmp_path):
    """A frozen layer with other values predicts as the run's did."""

    def frozen(seed):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
        return pt.Posterior(net, pt.Categorical(), random="2.*")

    run = pt.sample(frozen(0), (X, Y), sampler=pt.SGLD(1e-4), out=tmp_path / "run", **HOW)
    assert not torch.equal(frozen(0).fixed()["0.weight"], frozen(1).fixed()["0.weight"])
    assert torch.equal(pt.load(tmp_path / "run", frozen(1)).predict(X).probs, run.predict(X).probs)


def test_densities_go_on_too(tmp_path):
    target = pt.Density(lambda t: -0.5 * (t**2).sum(), dim=2)
    case = {"sampler": pt.SGLD(0.1), "steps": 40, "burn_in": 10, "thin": 1, "chains": 2, "monitor_every": 5}
    whole = pt.sample(target, **case)
    pt.sample(target, monitor=stop_at(20), out=tmp_path / "run", **case)
    same(whole, pt.resume(tmp_path / "run", target))
    assert pt.load(tmp_path / "run", target).samples.shape == (2, 30, 2)


SCRIPT = """
    import sys, torch, partita as pt
    sys.path.insert(0, {here!r})
    from test_resume import LONG, X, Y, posterior
    torch.set_num_threads(1)
    print("started", flush=True)
    pt.sample(posterior(), (X, Y), sampler=pt.SGLD(1e-4), out={out!r}, **LONG)
"""


@pytest.mark.parametrize("sent", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_signals_save_and_say_how_to_go_on(sent, tmp_path):
    out = tmp_path / "run"
    code = textwrap.dedent(SCRIPT.format(here=os.path.dirname(__file__), out=str(out)))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "started\n"
    while not list(out.glob("group-000/ckpt-*")):
        time.sleep(0.05)
        assert child.poll() is None, child.stderr.read()
    time.sleep(0.1)
    child.send_signal(getattr(signal, sent))
    _, said = child.communicate(timeout=60)
    assert child.returncode == 0, said
    assert f"stopped by {sent} at step" in said.replace("\n", " ")
    assert "go on with pt.resume(" in said
    run = pt.load(out, posterior())
    assert run.stopped.startswith(f"stopped by {sent}")
    t = run.settings["done"]
    more = -(-(t + 1) // 50) * 50 + 50
    gone_on = pt.resume(out, posterior(), (X, Y), steps=more)
    settings = {**LONG, "monitor_every": more}
    enough = pt.sample(posterior(), (X, Y), sampler=pt.SGLD(1e-4), monitor=stop_at(more), **settings)
    assert torch.equal(gone_on.samples[:], enough.samples)


def test_killed_outright_loses_nothing_that_was_saved(tmp_path):
    out = tmp_path / "run"
    code = textwrap.dedent(SCRIPT.format(here=os.path.dirname(__file__), out=str(out)))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child.stdout.readline()
    while not list(out.glob("group-000/ckpt-*")):
        time.sleep(0.05)
        assert child.poll() is None, child.stderr.read()
    child.kill()
    child.communicate()
    gone_on = pt.resume(out, posterior(), (X, Y), steps=400)
    settings = {**LONG, "monitor_every": 400}
    whole = pt.sample(posterior(), (X, Y), sampler=pt.SGLD(1e-4), monitor=stop_at(400), **settings)
    assert torch.equal(gone_on.samples[:], whole.samples)


def test_wrong_ways_to_go_on(tmp_path):
    out = tmp_path / "run"
    go = {"sampler": pt.SGLD(1e-4), "structure": S, **HOW}
    pt.sample(posterior(), (X, Y), monitor=stop_at(30), out=out, **go)
    with pytest.raises(ValueError, match=r"which holds a run, expected a new folder: pt.resume"):
        pt.sample(posterior(), (X, Y), out=out, **go)
    with pytest.raises(ValueError, match=r"0.weight \[7, 5\] float32.*expected the run's.*0.weight \[6, 5\]"):
        pt.load(out, posterior(width=7))
    with pytest.raises(ValueError, match="not those the run began with"):
        pt.resume(out, posterior(), (X + 1, Y))
    with pytest.raises(ValueError, match="N = 50 rows, expected the run's 96"):
        pt.resume(out, posterior(), (X[:50], Y[:50]))
    with pytest.raises(ValueError, match="holds no recipe, expected the posterior"):
        pt.load(out)
    with pytest.raises(ValueError, match="no run"):
        pt.load(tmp_path / "nothing", posterior())
    with pytest.raises(ValueError, match=r"the structure is .*R=16.*, expected the run's: .*R=8"):
        pt.resume(out, posterior(), (X, Y), structure=replace(S, history=pt.Reservoir(16, every=2)))
    assert pt.resume(out, posterior(), (X, Y)).stopped is None  # none of them did any harm


def test_a_structure_that_cannot_be_written_is_asked_for(tmp_path):
    odd = pt.Structured(pt.partitions.from_labels(torch.arange(posterior().space.dim) % 2), history=pt.Window(4))
    go = {"sampler": pt.SGLD(1e-4), **HOW}
    whole = pt.sample(posterior(), (X, Y), structure=odd, **go)
    pt.sample(posterior(), (X, Y), structure=odd, monitor=stop_at(30), out=tmp_path / "run", **go)
    same(whole, pt.resume(tmp_path / "run", posterior(), (X, Y), structure=odd))


def test_a_diverged_run_keeps_its_draws_and_is_not_gone_on_with(tmp_path):
    target = pt.Density(lambda t: -0.5 * (t**2).sum() * torch.where(t[0].abs() > 3, torch.nan, 1.0), dim=2)
    go = {"sampler": pt.SGLD(0.5), "burn_in": 1, "thin": 1, "chains": 2, "steps": 4000}
    with pytest.raises(pt.DivergenceError) as caught:
        pt.sample(target, out=tmp_path / "run", init=torch.zeros(2), **go)
    kept = pt.load(tmp_path / "run", target)
    assert kept.stopped.startswith("diverged at step")
    assert kept.samples.shape[1] == len(caught.value.run.steps) > 10
    assert kept.samples[:].isfinite().all()
    with pytest.raises(ValueError, match=r"diverged at step .*expected a run that can go on"):
        pt.resume(tmp_path / "run", target)


def test_bfloat16_rows_are_the_rows_rounded_and_refused_where_they_blur(tmp_path):
    wide = pt.Density(lambda t: -0.5 * (t**2).sum(), dim=2)
    go = {"sampler": pt.SGLD(0.5), "steps": 90, "burn_in": 10, "thin": 1, "chains": 2, "init": torch.zeros(2)}
    exact = pt.sample(wide, **go)
    half = pt.sample(wide, out=tmp_path / "half", rows="bfloat16", **go)
    assert torch.equal(half.samples[:], exact.samples.bfloat16().float())
    assert half.samples[:].dtype == torch.float32
    assert half.settings["rows"] == "bfloat16"
    narrow = pt.Density(lambda t: -0.5 * ((t - 100) ** 2).sum(), dim=2)  # sd 1 % of a hundred, less a little
    go["init"] = torch.full((2,), 100.0)
    whole = pt.sample(narrow, **go)
    for stop, why in ((90, r"in 100.0% of the parameters .* \(least: 0.\d+%\)"), (30, "20 draws a chain are too few")):
        path = tmp_path / f"narrow{stop}"
        with pytest.warns(UserWarning, match=f"rows='bfloat16' refused, float32 kept: {why}"):
            run = pt.sample(narrow, out=path, rows="bfloat16", monitor=stop_at(stop), monitor_every=10, **go)
        assert torch.equal(run.samples[:], whole.samples[:, : stop - 10])
        assert pt.load(path, narrow).settings["rows"] == "float32"
        if stop < 90:
            gone_on = pt.resume(path, narrow)
            assert torch.equal(gone_on.samples[:], whole.samples)
            assert gone_on.steps == whole.steps


def test_a_run_without_draws_yet_can_be_looked_at(tmp_path):
    pt.sample(posterior(), (X, Y), sampler=pt.SGLD(1e-4), monitor=stop_at(10), out=tmp_path / "run", **HOW)
    run = pt.load(tmp_path / "run", posterior())
    assert run.steps == []
    assert "too few to judge" in str(run.summary())
    with pytest.raises(ValueError, match="the run kept no draws"):
        run.predict(X)
    assert len(pt.resume(tmp_path / "run", posterior(), (X, Y)).steps) == 13


def contents(path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != "lock"}


class Mirror:
    def __call__(self, x):
        return -x

    def __repr__(self):
        return "Mirror()"


def test_a_refused_resume_changes_nothing(tmp_path):
    """Not the finished run, and not the one that is half done."""
    go = {"sampler": pt.SGLD(1e-4), "structure": S, "augment": Mirror(), **HOW}
    other = pt.Posterior(posterior().model, pt.Categorical(), prior=pt.Normal(3.0))
    for name, monitor in (("done", None), ("half", stop_at(30))):
        path = tmp_path / name
        pt.sample(posterior(), (X, Y), out=path, monitor=monitor, **go)
        before = contents(path)
        for target, more, match in (
            (other, {}, r"the posterior is .*scale=3.*, expected the run's: .*scale=0.5"),
            (posterior(), {"augment": None}, "does not say what its augment was|names code of yours"),
            (posterior(), {"augment": pt.data.CropFlip()}, r"the augment is .*, expected the run's: Mirror\(\)"),
            (posterior(), {"sampler": pt.SGLD(1e-2)}, r"the sampler is .*, expected the run's: SGLD\(step_size=0.0001"),
            (posterior(), {"structure": pt.Joint()}, r"the structure is Joint\(\), expected the run's"),
        ):
            with pytest.raises(ValueError, match=match):
                pt.resume(path, target, (X, Y), steps=100, **{"augment": Mirror(), **more})
            assert contents(path) == before
        with pytest.raises(ValueError, match="scale=3"):
            pt.load(path, other)
    assert pt.resume(tmp_path / "half", posterior(), (X, Y), augment=Mirror()).stopped is None


def test_what_a_folder_names_is_not_run_when_it_is_looked_at(tmp_path):
    from partita.runs import store

    path = tmp_path / "run"
    pt.sample(posterior(), (X, Y), sampler=pt.SGLD(1e-4), structure=S, out=path, monitor=stop_at(30), **HOW)
    evil = {"kind": "os:makedirs", "name": str(tmp_path / "made")}
    store.update(path, structure=evil, sampler=evil)
    pt.load(path, posterior()).summary()
    with pytest.raises(ValueError, match="names code of yours, expected it to be passed"):
        pt.resume(path, posterior(), (X, Y))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("where", ["draw", "step", "keep", "watch"])
def test_an_error_in_the_middle_of_anything_leaves_a_run_that_goes_on_whole(where, tmp_path, monkeypatch):
    from partita.engine.batches import Resident
    from partita.runs.loop import Loop
    from partita.samplers import SGLD

    case = {**HOW, "sampler": pt.SGLD(1e-4), "structure": S}
    whole = pt.sample(posterior(), (X, Y), **case)
    owner, name = {
        "draw": (Resident, "draw"),
        "step": (SGLD, "step"),
        "keep": (Loop, "_keep"),
        "watch": (Loop, "_watch"),
    }[where]
    right, calls = getattr(owner, name), []

    def fails_once(*args, **more):
        calls.append(0)
        result = right(*args, **more)  # the harm is done before the error comes
        if len(calls) == {"draw": 40, "step": 40, "keep": 6, "watch": 4}[where]:
            raise OSError("once")
        return result

    monkeypatch.setattr(owner, name, fails_once)
    with pytest.raises(OSError, match="once"):
        pt.sample(posterior(), (X, Y), out=tmp_path / "run", **case)
    gone_on = pt.resume(tmp_path / "run", posterior(), (X, Y))
    assert torch.equal(gone_on.samples[:], whole.samples)
    assert gone_on.steps == whole.steps
    assert torch.equal(gone_on.temperature, whole.temperature)


def test_killed_while_the_engine_is_chosen_the_run_goes_on_from_its_start(tmp_path, monkeypatch):
    from partita.runs import loop

    case = {**HOW, "sampler": pt.SGLD(1e-4)}
    whole = pt.sample(posterior(), (X, Y), **case)
    with monkeypatch.context() as m:
        m.setattr(loop, "choose_engine", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pt.sample(posterior(), (X, Y), out=tmp_path / "run", **case)
    same(whole, pt.resume(tmp_path / "run", posterior(), (X, Y)))


def test_stopped_between_its_last_step_and_its_end_a_run_is_finished_by_resume(tmp_path, monkeypatch):
    from partita.runs.keeping import OnDisk

    case = {**HOW, "sampler": pt.SGLD(1e-4)}
    with monkeypatch.context() as m:
        m.setattr(OnDisk, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pt.sample(posterior(), (X, Y), out=tmp_path / "run", **case)
    assert "has not finished" in pt.load(tmp_path / "run", posterior()).stopped
    assert pt.resume(tmp_path / "run", posterior(), (X, Y)).stopped is None
    assert pt.load(tmp_path / "run", posterior()).stopped is None


def test_loaders_whose_sampler_has_a_generator_of_its_own(tmp_path):
    from torch.utils.data import RandomSampler

    def loader():
        data = TensorDataset(X, Y)
        own = RandomSampler(data, generator=torch.Generator().manual_seed(5))
        return DataLoader(data, batch_size=10, sampler=own)

    case = {**HOW, "batch_size": None, "sampler": pt.SGLD(1e-4)}
    whole = pt.sample(posterior(), loader(), **case)
    pt.sample(posterior(), loader(), monitor=stop_at(30), out=tmp_path / "run", **case)
    same(whole, pt.resume(tmp_path / "run", posterior(), loader()))


def test_numbers_of_numpy_and_torch_from_monitors_are_recorded(tmp_path):
    import numpy as np

    seen = {"a": lambda m: np.float32(1.5), "b": lambda m: {"c": torch.tensor(2.5), "d": np.int64(3)}}
    run = pt.sample(posterior(), (X, Y), sampler=pt.SGLD(1e-4), monitor=seen, out=tmp_path / "run", **HOW)
    last = pt.load(tmp_path / "run", posterior()).metrics[-1]
    assert (last["a"], last["b/c"], last["b/d"]) == (1.5, 2.5, 3)
    assert run.metrics[-1]["a"] == 1.5


def test_a_second_signal_does_not_break_the_saving_that_the_first_one_asked_for():
    from partita.runs.halt import Halt

    with Halt(catch=True) as halt:
        os.kill(os.getpid(), signal.SIGTERM)
        assert halt.asked == "stopped by SIGTERM"
        with halt.waits():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
        assert halt.asked == "stopped by SIGTERM"
        with pytest.raises(KeyboardInterrupt):  # while it does not save, a second one is as without us
            os.kill(os.getpid(), signal.SIGINT)


def test_a_lost_checkpoint_costs_no_draws_until_the_run_really_goes_on(tmp_path):
    case = {**HOW, "sampler": pt.SGLD(1e-4), "structure": S}
    whole = pt.sample(posterior(), (X, Y), **case)
    path = tmp_path / "run"
    pt.sample(posterior(), (X, Y), monitor=stop_at(30), out=path, **case)
    pt.resume(path, posterior(), (X, Y), monitor=stop_at(50))
    max((path / "group-000").glob("ckpt-*")).unlink()
    before = contents(path)
    with pytest.raises(ValueError, match="not those the run began with"):
        pt.resume(path, posterior(), (X + 1, Y))
    assert contents(path) == before
    same(whole, pt.resume(path, posterior(), (X, Y)))
