"""A run's own answers: the same from memory and from disk, streamed and at once, of whole states and of marginals."""

import pytest
import torch

import partita as pt

(X, Y), (X_TEST, Y_TEST) = pt.data.digits()
SETTINGS = {"steps": 60, "burn_in": 20, "thin": 2, "chains": 3, "batch_size": 64}


def posterior():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return pt.Posterior(pt.models.mlp(64, (8,), 10), pt.Categorical(), prior=pt.Normal(0.3))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "digits"
    how = {
        "sampler": pt.PSGLD(1e-2),
        "structure": pt.Structured(pt.partitions.by_layer(), history=pt.Reservoir(8)),
        **SETTINGS,
    }
    return pt.sample(posterior(), (X, Y), **how), pt.sample(posterior(), (X, Y), out=out, **how)


def test_memory_and_disk_answer_alike(runs):
    memory, disk = runs
    assert isinstance(memory.samples, torch.Tensor)
    assert not isinstance(disk.samples, torch.Tensor)
    seconds = lambda run: str(run.summary()).replace(f"{run.settings['seconds']:.1f} s", "")
    assert seconds(memory) == seconds(disk)
    for draws in (None, 7):
        assert torch.equal(memory.predict(X_TEST, draws).probs, disk.predict(X_TEST, draws).probs)
    assert torch.equal(memory.module(1, -1)[0].weight, disk.module(1, -1)[0].weight)
    assert repr(memory) == repr(disk)


def test_streamed_predictions_are_the_predictions(runs):
    for run in runs:
        whole, streamed = run.predict(X_TEST), run.stream(X_TEST, Y_TEST)
        assert streamed.draws == 60
        torch.testing.assert_close(streamed.probs.float(), whole.probs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            streamed.mutual_information().float(), whole.mutual_information(), rtol=1e-3, atol=1e-5
        )
        exact = whole.scores(Y_TEST)
        for name, value in streamed.scores().items():
            assert value == pytest.approx(exact[name], rel=1e-4), name


def test_marginals_mix_the_groups_of_one_chain(runs):
    memory, _ = runs
    p = memory.predict(X_TEST[:5], draws=40, rows="marginals")
    assert p.draws["probs"].shape == (40, 5, 10)
    assert torch.equal(p.probs, memory.predict(X_TEST[:5], draws=40, rows="marginals").probs)
    assert not torch.equal(p.probs, memory.predict(X_TEST[:5], draws=40, rows="marginals", seed=1).probs)
    mixed = memory._marginals(500, 0)
    flat, labels = memory.samples.flatten(0, 1), memory.groups.labels
    source = []
    for m in (0, 1):  # each group is a whole state of some chain, the groups of different states
        same = (mixed[:, None, labels == m] == flat[None, :, labels == m]).all(-1)
        assert (same.sum(1) == 1).all()
        source.append(same.int().argmax(1))
    assert (source[0] // 20 == source[1] // 20).all()  # of one chain
    assert (source[0] != source[1]).float().mean() > 0.8


def test_wrong_questions(runs):
    memory, _ = runs
    with pytest.raises(ValueError, match="draws=61, expected a whole number from 1 to 60"):
        memory.predict(X_TEST, draws=61)
    with pytest.raises(ValueError, match="rows='product', expected 'joint' or 'marginals'"):
        memory.predict(X_TEST, rows="product")
    density = pt.sample(pt.Density(lambda t: -0.5 * (t**2).sum(), dim=2), sampler=pt.SGLD(0.1), steps=20)
    with pytest.raises(ValueError, match=r"stream\(\) needs a pt.Posterior"):
        density.stream(X_TEST)


def test_report_and_export_of_a_run_on_disk(runs, tmp_path):
    pytest.importorskip("arviz_base")
    _, disk = runs
    page = disk.report(tmp_path, test=(X_TEST, Y_TEST))
    assert page == tmp_path / "report.html"
    tree = disk.to_arviz(["0.bias"])
    assert tree["posterior"]["0.bias"].shape == (3, 20, 8)


def test_the_bar_says_when_no_step_comes(monkeypatch):
    from types import SimpleNamespace

    from partita.runs import progress

    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    column = progress.Stalled()
    now += 29
    assert column.render(SimpleNamespace(finished=False)).plain == ""
    now += 13
    assert column.render(SimpleNamespace(finished=False)).plain == "no step for 42 s"
    assert column.render(SimpleNamespace(finished=True)).plain == ""
    column.beat = now
    assert column.render(SimpleNamespace(finished=False)).plain == ""
