"""The commands about runs, typed as a newcomer types them, the wrong ways included."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from typer.testing import CliRunner

import partita as pt
from partita.cli import app

TINY = """
[model]
kind = "mlp"
inputs = 64
hidden = [4]
outputs = 10
[likelihood]
kind = "Categorical"
[data]
kind = "digits"
[sampler]
kind = "SGLD"
step_size = 1e-5
[run]
steps = 40
burn_in = 20
thin = 2
chains = 2
monitor = true
monitor_every = 20
"""


def ask(*words):
    return CliRunner().invoke(app, [str(w) for w in words])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a recipe and a finished run of it."""
    here = tmp_path_factory.mktemp("runs")
    (here / "tiny.toml").write_text(TINY)
    said = ask("run", here / "tiny.toml", "--out", here / "one")
    assert said.exit_code == 0, said.output
    assert "verdict" not in said.output
    assert "accuracy" in said.output
    assert "2 chains x 10 draws" in said.output
    assert (here / "one" / "report.html").stat().st_size > 10_000
    return here


def test_a_finished_run_is_not_run_again(place):
    before = sorted(p.name for p in (place / "one" / "group-000").iterdir())
    said = ask("run", place / "tiny.toml", "--out", place / "one")
    assert said.exit_code == 0
    assert "is finished: 40 steps, 10 draws a chain" in " ".join(said.output.split())
    assert sorted(p.name for p in (place / "one" / "group-000").iterdir()) == before


def test_another_recipe_does_not_overwrite(place):
    said = ask("run", place / "tiny.toml", "--out", place / "one", "--set", "sampler.step_size=1e-6")
    assert said.exit_code == 2
    assert "holds a run of another recipe (sampler.step_size 1e-05 -> 1e-06), expected the same" in said.output


def test_more_steps_make_it_longer_and_json_is_one_object(place):
    first = ask("run", place / "tiny.toml", "--out", place / "two", "--json", "--no-report")
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout)["draws"] == 10
    more = ask("run", place / "tiny.toml", "--out", place / "two", "--set", "run.steps=60", "--json")
    told = json.loads(more.stdout)
    assert (told["steps"], told["draws"], told["finished"]) == (60, 20, True)
    assert set(told["scores"]) >= {"accuracy", "nll"}
    longer = ask("resume", place / "two", "--steps", "80", "--json", "--no-report")
    assert json.loads(longer.stdout)["draws"] == 30
    fewer = ask("resume", place / "two", "--steps", "50")
    assert fewer.exit_code == 2, fewer.output
    assert "expected at least the 80" in fewer.output


def test_report_and_compare(place):
    (place / "one" / "report.html").unlink()
    assert ask("report", place / "one").exit_code == 0
    assert "<html" in (place / "one" / "report.html").read_text("utf-8").lower()
    ask("run", place / "tiny.toml", "--out", place / "three", "--set", "run.seed=1", "--no-report")
    said = ask("compare", place / "one", place / "three", "--out", place)
    assert said.exit_code == 0, said.output
    assert "seed" in (place / "compare.html").read_text("utf-8")
    assert ask("compare", place / "one").exit_code == 2


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_predict(place, kind):
    x = pt.data.digits()[1][0][:7].numpy()
    inputs, out = place / f"x.{kind}", place / f"p.{kind}"
    if kind == "npz":
        np.savez(inputs, x=x)
    else:
        header = ",".join(f"pixel{i}" for i in range(64))
        np.savetxt(inputs, x, delimiter=",", header=header, comments="", fmt="%.9g")
    said = ask("predict", place / "one", inputs, "--out", out)
    assert said.exit_code == 0, said.output
    expected = pt.load(place / "one", *posterior()).predict(pt.data.digits()[1][0][:7])
    if kind == "npz":
        found = dict(np.load(out))
    else:
        with out.open() as f:
            names = f.readline().strip().split(",")
        found = dict(zip(names, np.loadtxt(out, delimiter=",", skiprows=1).T))
    probs = np.stack([found[f"p{k}"] for k in range(10)], 1)
    np.testing.assert_allclose(probs, expected.probs.numpy(), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found["entropy"], expected.entropy().numpy(), rtol=1e-4)


def posterior():
    from partita.runs.recipe import parse

    return (parse(TINY).posterior(),)


@pytest.mark.parametrize(
    "words, said",
    [
        (("run", "nowhere.toml"), "there is no recipe 'nowhere.toml', expected a file or a bundled recipe: 'digits'"),
        (("run", "digits", "--set", "run.stepz=3"), "run.stepz"),
        (("run", "digits", "--set", "nonsense"), "is no key=value"),
        (("resume", "nowhere"), "nowhere"),
        (("report", "nowhere"), "nowhere"),
        (("predict", "nowhere", "x.csv"), "there is no file x.csv, expected a .csv or .npz file"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = ask(*words)
    assert found.exit_code == 2, found.output
    assert said in found.output
    assert len(found.output.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_bad_tables_of_inputs(place):
    for name, text, match in (
        ("words.csv", "a,b\n1,x\n", "row 2 of .* is '1,x', expected 2 numbers"),
        ("first.csv", "1,dog\n1,2\n", "row 1 of .* is '1,dog'"),
        ("gap.csv", "1,\n1,2\n", "row 1 of"),
        ("ragged.csv", "1,2\n3\n", "row 2 of .* expected 2 numbers"),
        ("empty.csv", "a,b\n", "has no rows"),
        ("other.txt", "1,2\n", "is a .txt file, expected .csv or .npz"),
    ):
        (place / name).write_text(text)
        found = ask("predict", place / "one", place / name)
        assert found.exit_code == 2
        import re

        assert re.search(match, found.output), found.output


def test_a_preempted_run_exits_with_75_and_the_same_command_goes_on(place):
    command = [sys.executable, "-m", "partita", "run", place / "tiny.toml", "--out", place / "long", "--no-report"]
    for one in ("steps=200000", "burn_in=5", "thin=1", "monitor_every=10", "engine=eager"):
        command += ["--set", f"run.{one}"]
    command = [str(c) for c in command]
    own = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own)
    while not list((place / "long").glob("group-000/ckpt-*")):
        time.sleep(0.05)
        assert child.poll() is None, child.stderr.read()
    while not (place / "long" / "metrics.jsonl").exists():  # ten steps
        time.sleep(0.05)
        assert child.poll() is None, child.stderr.read()
    child.send_signal(signal.SIGTERM)
    _, error = child.communicate(timeout=60)
    assert child.returncode == 75, error
    assert "stopped by SIGTERM" in error
    assert f"go on with partita resume {place / 'long'}" in error
    done = pt.load(place / "long").settings["done"]
    assert done >= 10
    fewer = ask(*[f"run.steps={max(done - 1, 11)}" if w == "run.steps=200000" else w for w in command[3:]])
    assert fewer.exit_code == 2, fewer.output
    assert "expected at least the" in fewer.output
    said = ask("resume", place / "long", "--steps", done + 20, "--no-report", "--json")
    assert json.loads(said.stdout)["steps"] == done + 20
