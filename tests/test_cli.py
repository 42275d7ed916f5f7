"""The command: what it says when it is interrupted or asked for what cannot be."""

import pytest
from typer.testing import CliRunner

import partita as pt
from partita import cli, demo
from partita.laws import report


def ask(*words):
    return CliRunner().invoke(cli.app, words)


def interrupted(*_, **__):
    raise KeyboardInterrupt
    yield


def test_ctrl_c_ends_the_demo_and_the_table(monkeypatch):
    monkeypatch.setattr(demo, "both_parts", lambda *_: next(interrupted()))
    monkeypatch.setattr(report, "run_rows", interrupted)
    said = ask("demo", "--out", "demo")
    assert (said.exit_code, said.output.strip()) == (130, "interrupted")
    said = ask("laws", "--only", "window/S")
    assert said.exit_code == 130
    assert "interrupted after 0 of" in said.output


def test_an_interrupted_run_is_not_shown_as_a_finished_one():
    stop = lambda moment: "enough"
    target = pt.Density(lambda t: -0.5 * (t * t).sum(), dim=2)
    run = pt.sample(target, sampler=pt.SGLD(0.1), steps=20, thin=1, monitor=[stop], monitor_every=5)
    assert run.stopped is not None
    with pytest.raises(KeyboardInterrupt):
        demo.finished(run)


def test_the_demo_leaves_the_threads_as_they_were():
    import torch

    before = torch.get_num_threads()
    with demo.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_wrong_words_are_refused_in_a_line():
    assert "expected a folder that can be written to" in ask("demo", "--out", "/proc/none").output
    assert ask("demo", "--seed", "-1").exit_code == 2
    assert "expected a file in a folder that exists" in ask("bench", "--out", "/none/such.json").output
    assert "[bench]" in ask("bench", "--help").output
