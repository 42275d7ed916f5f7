"""`partita bench`: turns, failures, tables; and that the peers do the job they are timed for."""

import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from partita import cli, models
from partita.bench import jobs, peers, table, timing
from partita.bench.ours import EPS, Setting, engine
from partita.bench.timing import Row, Runner, measure
from partita.samplers import PSGLD, SGLD
from partita.structure import Joint

ROOT = Path(__file__).parents[1]


def small(network=None, shape=(6,), B=8) -> Setting:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        network = network or models.mlp(6, (5,), 3)
        return Setting(network, (torch.randn(40, *shape), torch.arange(40) % 3), B, torch.device("cpu"))


def runner(who: str, diary: list, cost: float = 1e-4, unit: int = 1, fail: str = "") -> Runner:
    def make():
        if fail:
            raise RuntimeError(fail)

        def advance(steps: int) -> None:
            diary.append((who, steps))
            time.sleep(cost * steps)

        return advance

    return Runner("job", "method", 2, who, make, unit)


def test_runners_take_turns_in_whole_units():
    diary: list = []
    rows = measure([runner("a", diary), runner("b", diary, unit=10)], blocks=4, block_s=0.01)
    assert [who for who, _ in diary[-8:]] == ["a", "b"] * 4
    assert all(steps % 10 == 0 for who, steps in diary if who == "b")
    assert [len(r.ms) for r in rows] == [4, 4]
    assert all(0.1 <= r.median < 5 for r in rows)
    assert rows[0].rate == pytest.approx(2e3 / rows[0].median)


def test_one_that_fails_is_a_row_that_says_so():
    a, b = measure([runner("a", [], fail="no such\nthing"), runner("b", [])], blocks=3, block_s=0.005)
    assert a.failed == "RuntimeError: no such"
    assert a.ms == []
    assert len(b.ms) == 3
    assert "no such" in " ".join(table.cells([a, b])[0])
    assert table.cells([a, b])[1][6] == ""  # no ratio to what did not run


def test_a_slow_job_is_timed_for_fewer_blocks():
    (row,) = measure([runner("a", [], cost=0.02)], blocks=9, block_s=0.02, limit_s=0.05)
    assert len(row.ms) == 3


@pytest.mark.skipif(sys.platform == "win32", reason="file locks")
def test_a_turn_waits_for_those_that_compile(tmp_path, monkeypatch):
    import fcntl

    monkeypatch.setattr(timing, "STARTED", time.perf_counter())
    monkeypatch.setattr(timing, "PATIENCE", 0.3)
    turns = tmp_path / "turns"
    began = time.perf_counter()
    with timing._turn(turns):
        assert time.perf_counter() - began < 0.2
    with turns.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        with timing._turn(turns, alone=False):
            pass
        with timing._turn(turns):
            assert time.perf_counter() - began >= 0.3


def test_ratios_are_of_chain_steps_to_the_first_of_the_group():
    rows = [Row("j", "m", 1, "a", 0, 0.0, 1, [2.0, 1.0, 3.0]), Row("j", "m", 8, "b", 0, 0.0, 1, [4.0])]
    assert [c[6] for c in table.cells(rows)] == ["1.00", "4.00"]
    assert table.cells(rows)[0][3:5] == ["2", "1–3"]
    found = timing.as_json(timing.machine(1), rows)
    text = table.markdown(json.loads(json.dumps(found)))
    assert text.count("| m | ") == 2
    assert f"torch {found['machine']['versions']['torch']}" in text


def test_the_page_holds_the_tables_of_its_files():
    page = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    for name, block in re.findall(r"<!-- (\S+\.json) -->\n\n(.*?)\n<!-- end -->", page, flags=re.DOTALL):
        assert block == table.markdown(json.loads((ROOT / "benchmarks" / name).read_text("utf-8"))), name
    assert page.count("<!-- end -->") == 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_jobs_name_what_the_table_is_to_hold(device):
    names = [table.name(r) for group in jobs.groups(device) for r in group]
    assert len(names) >= 30
    for wanted in (
        "SGLD | 128",
        "K=16",
        "M=32 ",
        "K=4 split",
        "window 1,024",
        "ResNet-20 B=128",
        "ResNet-20 B=500",
        "pt.sample",
    ):
        assert any(wanted in n for n in names), wanted
    assert any("posteriors" in n for n in names)
    assert any("| JAX scan" in n for n in names) == (device == "cuda")


@pytest.mark.parametrize("method", ["SGLD", "pSGLD", "S_d-pSGLD"])
def test_the_loop_by_hand_runs(method):
    peers.pytorch(small(), method)(12)


def ours(at):
    return engine(at, SGLD(1.0), Joint(), 1, "eager")


def blackjax(at):
    pytest.importorskip("blackjax")
    return peers.blackjax(at, 1, "loop", 1)


def by_posteriors(at):
    pytest.importorskip("posteriors")
    return peers.posteriors(at)


@pytest.mark.parametrize("make", [lambda at: peers.pytorch(at, "SGLD"), by_posteriors, blackjax])
def test_peers_move_as_the_engine_does(make, monkeypatch):
    """From the same weights with all data in the batch: noise of sd √(ε t), and about the same drift, well above it."""
    size, steps = 1e-5, 200
    monkeypatch.setattr("partita.bench.peers.EPS", size)
    monkeypatch.setattr("partita.bench.ours.EPS", size)
    x = torch.linspace(-2, 2, 2000 * 6).reshape(2000, 6).sin()
    at = Setting(small().network, (x, x[:, :3].argmax(1)), 2000, torch.device("cpu"))
    start = torch.cat([p.detach().flatten() for p in at.network.parameters()])
    moved = []
    for build in (ours, make):
        advance = build(at)
        advance(steps)
        moved.append(_theta(advance, at) - start)
    a, b = moved
    assert float(a.norm()) > 2 * (size * steps * len(a)) ** 0.5  # more than noise
    assert float(torch.corrcoef(torch.stack([a, b]))[0, 1]) > 0.7
    assert 0.8 < float(a.norm() / b.norm()) < 1.25


def _theta(advance, at) -> torch.Tensor:
    """Where a runner's chain is, from what its function holds."""
    held = _inner(advance)
    if "states" in held:
        return held["states"].theta[0]
    if "step" in held and "theta" in _inner(held["step"]):
        return _inner(held["step"])["theta"]
    if "state" in held:
        return torch.cat([p.flatten() for p in held["state"].params.values()]).detach()
    layers = [torch.cat([torch.tensor(w.tolist()).T.flatten(), torch.tensor(b.tolist())]) for w, b in held["params"]]
    return torch.cat(layers)


def _inner(function) -> dict:
    return dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__)))


def test_an_engine_that_falls_back_is_not_timed():
    with pytest.raises(RuntimeError, match="needs CUDA"):
        engine(small(), PSGLD(EPS), Joint(), 1, "graph")


@pytest.mark.parametrize("norm", ["frn", "batch", None])
def test_the_jax_networks_are_ours(norm):
    pytest.importorskip("jax")
    import jax.numpy as jnp

    from partita.bench import scan

    if norm is None:
        at, x = small(), torch.randn(4, 6)
        forward, params = scan._mlp(at.network, jnp.float32)
    else:
        at = small(models.resnet(3, 4, depth=8, width=8, norm=norm), (3, 8, 8))
        x = torch.randn(4, 3, 8, 8)
        forward, params = scan._resnet(at.network, jnp.float32)
    theirs = forward(params, jnp.asarray(scan._last(x).numpy()))
    torch.testing.assert_close(torch.tensor(theirs.tolist()), at.network(x), rtol=1e-3, atol=1e-3)


def test_the_command_says_what_it_did_not_find():
    ask = lambda *words: CliRunner().invoke(cli.app, ["bench", *words])
    assert ask("--only", "nothing like it").exit_code == 2
    assert "no row matches" in ask("--only", "nothing like it").output
    assert "expected 'auto', 'cpu' or 'cuda'" in ask("--device", "tpu").output
    assert ask("--only", "(").exit_code == 2
    if not torch.cuda.is_available():
        assert "no CUDA device" in ask("--device", "cuda").output
