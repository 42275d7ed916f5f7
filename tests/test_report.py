"""The report: what is on the page, what a broken run leaves of it, and that it is whole or not there."""

import math
import os
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import scipy.stats
import torch

import partita as pt
from partita.answers import canvas, look, page, plots, sections
from partita.answers.cite import REFERENCES, citation
from partita.answers.report import FIGURES, compare, report

SECTIONS = [
    "Scores", "Do the chains agree?", "Mixing", "Scores over time", "Temperature and composition",
    "Least certain inputs", "Settings", "Recipe", "Versions", "Load and resume", "References",
]  # fmt: skip
VOID = {"meta", "img", "source", "br"}


@pytest.fixture(autouse=True)
def coarse(monkeypatch):
    """Figures as small as they may be: what is tested is the page."""
    monkeypatch.setattr(canvas, "DPI", 30)


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures of nothing, for tests that look elsewhere."""
    blank = plots.coverage(np.ones(1), canvas.LIGHT)
    one = page.picture("", "", lambda theme: blank)
    monkeypatch.setattr(sections, "picture", lambda name, caption, draw: replace(one, name=name, caption=caption))


class Parsed(HTMLParser):
    """What the tests ask of a page; it fails on tags that do not close."""

    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.text, self.headings, self.missing, self.loads = [], [], "", [], [], []
        self.feed(path.read_text("utf-8"))
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.loads += [v for k, v in attrs.items() if k in ("src", "srcset", "href", "data", "action", "poster")]
        if tag not in VOID:
            self.open.append((tag, attrs.get("class", "")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        inside = [t for t, _ in self.open]
        if "style" in inside:
            assert "url(" not in data
            assert "@import" not in data
            return
        self.text += data
        if inside[-2:] == ["section", "h2"]:
            self.headings.append(data)
        if self.open and self.open[-1][1] == "missing":
            self.missing.append(data)


@pytest.fixture(scope="module")
def digits():
    """A run with monitors, and its test data."""
    (x, y), (x_test, y_test) = pt.data.digits()
    run = pt.sample(
        pt.Posterior(pt.models.mlp(64, (6,), 10), pt.Categorical(), prior=pt.Normal(0.3)),
        (x, y),
        sampler=pt.PSGLD(1e-3),
        structure=pt.Structured(pt.partitions.each(), pt.masks.Bernoulli(0.5)),
        steps=150,
        burn_in=50,
        thin=2,
        chains=2,
        monitor={"test": (x_test, y_test)},
        engine="eager",
        progress=False,
    )
    return run, (x_test, y_test)


@pytest.fixture(scope="module")
def density():
    return pt.sample(
        pt.Density(lambda t: -0.5 * (t * t).sum(), dim=3),
        sampler=pt.SGLD(0.5),
        steps=400,
        engine="eager",
        progress=False,
    )


def test_the_whole_page(digits, tmp_path):
    run, test = digits
    path = report(
        run, tmp_path, test=test, recipe='steps = 150\nname = "<script>alert(1)</script>"', title="A & <b>B</b>"
    )
    assert path == tmp_path / "report.html"
    seen = Parsed(path)
    assert seen.headings == SECTIONS
    assert seen.missing == []
    assert "script" not in seen.tags
    assert "b" not in seen.tags
    assert '<script>alert(1)</script>"' in seen.text
    assert "A & <b>B</b>" in seen.text
    for v in run.summary().verdict:
        assert v[1:] in seen.text
    for told in ("accuracy of the average", "Alexos", "Li, C.", "Vehtari", torch.__version__, "PSGLD(step_size=0.001"):
        assert told in seen.text
    assert seen.loads
    assert all(re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/]+=*", v) for v in seen.loads)
    assert {p.name for p in tmp_path.iterdir()} == {"report.html", *(f"report-{f}.png" for f in FIGURES)}
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in tmp_path.glob("*.png"))
    assert run.target.space.dim > 400  # so: every coordinate a group, and only some rows of it
    assert "more" in seen.text


def test_the_verdict_comes_first_and_not_by_colour_alone(digits, density, undrawn, tmp_path):
    run, _ = digits
    text = Parsed(report(run, tmp_path / "a.html")).text
    assert "have not mixed" in text[: text.index("Scores")]
    assert "✕" in text[: text.index("Scores")]
    text = Parsed(report(density, tmp_path / "b.html")).text
    assert "✓" in text[: text.index("Scores")]
    assert "The chains agree" in text[: text.index("Scores")]


def test_a_density_has_parameters_only(density, tmp_path):
    seen = Parsed(report(density, tmp_path, test=(torch.zeros(2, 3), torch.zeros(2))))
    assert seen.headings == SECTIONS
    assert [m.split(":")[0] for m in seen.missing] == [
        "Scores and calibration", "Predictions", "Scores over time", "Composition gap", "Least certain inputs", "Recipe",
    ]  # fmt: skip
    assert look.look_at_parameters(density).names == ["theta[0]", "theta[1]", "theta[2]"]
    assert len(list(tmp_path.glob("*.png"))) == 5


def regression(**how):
    x = torch.linspace(-2, 2, 40)[:, None]
    posterior = pt.Posterior(pt.models.mlp(1, (4,), 1), pt.Gaussian(0.3), prior=pt.Normal(1.0))
    run = pt.sample(posterior, (x, x.sin()), sampler=pt.SGLD(1e-3), engine="eager", progress=False, **how)
    return run, (x, x.sin())


def test_regression_with_one_chain(tmp_path):
    run, test = regression(steps=120, chains=1)
    seen = Parsed(report(run, tmp_path, test=test))
    assert [m.split(":")[0] for m in seen.missing] == ["Scores over time", "Composition gap", "Recipe"]
    for told in ("root mean squared error", "targets inside the 95 % interval", "guess (true)", "1 chain ×"):
        assert told in seen.text


@pytest.mark.parametrize("steps, draws", [(1, 0), (2, 1), (4, 3)])
def test_few_draws_stopped_early(steps, draws, tmp_path):
    stop = lambda m: "enough" if m.t == steps else None
    run, test = regression(steps=60, burn_in=1, thin=1, monitor=stop, monitor_every=1)
    assert run.samples.shape[1] == draws
    seen = Parsed(report(run, tmp_path, test=test))
    assert seen.headings == SECTIONS
    assert "The run ended early" in seen.text
    assert "enough" in seen.text
    assert any(m.startswith("Mixing: not shown") for m in seen.missing)
    assert not any("Traceback" in m or "Error" in m for m in seen.missing)


def test_numbers_that_are_not(density, undrawn, tmp_path):
    nan = torch.full_like(density.temperature, math.nan)
    run = replace(
        density, temperature=nan, heat=nan[:, 0], hottest=math.nan, metrics=[{"step": 1, "seconds": 0.1, "a": math.nan}]
    )
    seen = Parsed(report(run, tmp_path))
    assert any(m.startswith("Temperature: not known") for m in seen.missing)
    stuck = replace(density, samples=torch.ones(4, 100, 3))
    assert "undefined" in Parsed(report(stuck, tmp_path)).text


def test_a_part_that_fails_is_one_line(digits, undrawn, tmp_path):
    run, (x, y) = digits
    seen = Parsed(report(run, tmp_path, test=(x[:, :5], y)))
    assert seen.headings == SECTIONS
    (line,) = (m for m in seen.missing if m.startswith("Scores"))
    assert "\n" not in line
    seen = Parsed(report(run, tmp_path, test=(x, y[:7])))
    assert sum(m.startswith("Scores") for m in seen.missing) == 1


def test_bad_arguments_are_refused_before_any_work(digits, tmp_path):
    run, _ = digits
    with pytest.raises(ValueError, match="test is a Tensor, expected a pair"):
        report(run, tmp_path, test=torch.zeros(3))
    with pytest.raises(ValueError, match="run is a str, expected the run"):
        report("runs/a", tmp_path)
    with pytest.raises(ValueError, match="runs is empty, expected"):
        compare({}, tmp_path)
    with pytest.raises(ValueError, match=r"runs\['a'\] is a int"):
        compare({"a": 1}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_middle_leaves_the_old_report(density, undrawn, tmp_path, monkeypatch):
    report(density, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    calls, sync = [], os.fsync

    def full(fd):
        calls.append(fd)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        sync(fd)

    monkeypatch.setattr(page.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        report(density, tmp_path, title="Another")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_pictures_of_an_older_report_go_and_others_stay(digits, undrawn, tmp_path):
    run, test = digits
    report(run, tmp_path, test=test)
    (tmp_path / "report-mine.png").write_bytes(b"mine")
    report(run, tmp_path)
    left = {p.name for p in tmp_path.iterdir()}
    assert "report-calibration.png" not in left
    assert {"report-mine.png", "report-rhat.png"} <= left


def test_two_runs_side_by_side(digits, tmp_path):
    run, test = digits
    other = replace(run, settings={**run.settings, "thin": 3}, samples=run.samples[:, :25], steps=run.steps[:25])
    path = compare({"one": run, "<i>two</i>": other}, tmp_path, test=test)
    assert path.name == "compare.html"
    seen = Parsed(path)
    assert seen.headings == ["Scores", "Mixing", "Scores over time", "Settings that differ", "References"]
    assert seen.missing == []
    assert "i" not in seen.tags
    assert seen.text.count("<i>two</i>") >= 5
    differ = seen.text[seen.text.index("Settings that differ") : seen.text.index("References")]
    assert "thin" in differ
    assert "burn in" not in differ


def test_a_density_beside_a_network(digits, density, undrawn, tmp_path):
    run, test = digits
    seen = Parsed(compare({"net": run, "bell": density}, tmp_path, test=test))
    assert seen.missing == ["bell: no scores, a density makes no predictions."]


def test_every_public_sampler_has_a_reference(density):
    samplers = [n for n in pt.__all__ if hasattr(getattr(pt, n), "step") and hasattr(getattr(pt, n), "heat")]
    assert {"SGLD", "PSGLD", "SGHMC"} <= set(samplers)
    for name in samplers:
        said = citation(replace(density, settings={"sampler": f"{name}(step_size=0.1)", "structure": "Joint()"}))
        assert said[0] == REFERENCES[name]
    both = {
        "sampler": "SGLD(step_size=Cyclical(high=1))",
        "structure": "Structured(partition=each(), history=Reservoir(R=1))",
    }
    assert [c.split(",")[0] for c in citation(replace(density, settings=both))] == [
        "Alexos", "Vitter", "Welling", "Zhang", "Vehtari", "Geyer",
    ]  # fmt: skip
    said = citation(replace(density, settings={"sampler": "Mine(a=1)"}))
    assert said[0].startswith("Mine: no reference")


def test_the_tone_is_never_calmer_than_the_verdict(density):
    summary = density.summary()
    tone = lambda s, run=density: look.banner_of(run, s).tone
    assert tone(summary) == "good"
    assert tone(replace(summary, data=True, composition_gap=5.0)) == "care"  # a line that the banner does not know
    assert tone(replace(summary, heat=3.0)) == "bad"
    assert tone(replace(summary, mixing=())) == "bad"
    assert tone(replace(summary, stopped="x"), replace(density, stopped="x")) == "bad"
    (m,) = summary.mixing
    assert tone(replace(summary, mixing=(replace(m, unmixed=math.nan, rhat_max=math.nan),))) == "bad"
    assert tone(replace(summary, mixing=(replace(m, unmixed=0.1, rhat_max=1.2),))) == "bad"
    fine = replace(m, what="predictions")
    assert tone(replace(summary, mixing=(fine, replace(m, unmixed=0.1, rhat_max=1.2)))) == "care"


class Lazy:
    """Samples on disk: a shape, and reading by index."""

    def __init__(self, x):
        self.x, self.shape, self.read = x, x.shape, 0

    def __getitem__(self, at):
        self.read += self.x[at].numel()
        return self.x[at]


def test_few_columns_of_lazy_samples_are_read_and_named(digits):
    run, _ = digits
    target = pt.Density(lambda t: -(t * t).sum(), shapes={"a": (20, 30), "b": (), "c.weight": (7, 11, 13)})
    x = torch.randn(2, 8, target.space.dim)
    lazy = Lazy(x)
    values = look.look_at_parameters(replace(run, target=target, samples=lazy))
    assert lazy.read <= 2 * 8 * look.COLUMNS
    assert len(values.names) > 200
    tree = target.space.tree(x)
    for name, column in zip(values.names, values.x.unbind(2)):
        block, _, at = name.partition("[")
        at = tuple(int(i) for i in at.rstrip("]").split(",")) if at else ()
        torch.testing.assert_close(tree[block][(..., *at)], column)


def test_coupled_chains_are_looked_at_by_ensemble():
    x = torch.randn(6, 40, 2)
    values = look.look("parameters", x, ["a", "b"], 2)
    torch.testing.assert_close(values.x, x.reshape(2, 3, 40, 2).mean(1))


def test_what_looks_like_an_image():
    (x, _), _ = pt.data.digits()
    assert look.as_images(x[:50], True).shape == (50, 8, 8)
    assert look.as_images(x[:50], False) is None  # 64 numbers of a regression are a table
    assert look.as_images(x[:50, torch.randperm(64)], True) is None
    assert look.as_images(torch.randn(50, 64), True) is None
    assert look.as_images(torch.randn(50, 65), True) is None
    assert look.as_images(torch.rand(5, 3, 8, 9), True).shape == (5, 8, 9, 3)
    assert look.as_images(torch.rand(5, 1, 28, 28), True).shape == (5, 28, 28)
    assert look.as_images({"ids": torch.zeros(5, 64)}, True) is None


def test_lines_of_scores_over_time():
    metrics = [
        {"step": 10, "seconds": 1.0, "test/now/accuracy": 0.5, "mine": 3.0, "composition_gap": 1.0, "word": "a"},
        {
            "step": 20,
            "seconds": 3.0,
            "test/now/accuracy": 0.6,
            "test/accuracy": 0.7,
            "test/brier": math.inf,
            "mine": 2.0,
        },
    ]
    panels = look.score_lines(metrics)
    assert list(panels) == ["accuracy", "mine"]
    assert {line.label: (list(line.seconds), list(line.values), line.dashed) for line in panels["accuracy"]} == {
        "test, one draw a chain": ([1.0, 3.0], [0.5, 0.6], True),
        "test, average so far": ([3.0], [0.7], False),
    }
    assert look.seconds_of(15, metrics) == 2.0
    assert look.seconds_of(5, []) is None


def test_ranks_and_what_chance_does_to_them():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 9, (3, 50)).astype(float)
    np.testing.assert_allclose(plots._ranks(x), scipy.stats.rankdata(x).reshape(x.shape) - 0.5)
    C, S, bins = 4, 200, 10
    counts = []
    for _ in range(2_000):
        place = plots._ranks(rng.standard_normal((C, S))) / (C * S)
        counts.append(((place[0] >= 0.3) & (place[0] < 0.4)).sum() / (S / bins))
    assert np.std(counts) == pytest.approx(plots.chance(bins, C, S), rel=0.05)  # 2,000 give 1.6 %


def test_calibration_curves_of_known_forecasts():
    line = plots.coverage(np.linspace(0.0005, 0.9995, 1000), canvas.LIGHT).axes[0].get_lines()[-1]
    np.testing.assert_allclose(line.get_ydata(), line.get_xdata(), atol=2e-3)
    confidence, hit = np.repeat([0.25, 0.95, 1.0], 100), np.tile([1.0, 0.0, 0.0, 0.0], 75)
    points = plots.reliability(confidence, hit, canvas.LIGHT).axes[0].containers[0].lines[0]
    np.testing.assert_allclose(points.get_xydata(), [[0.25, 0.25], [0.975, 0.25]])


def test_padding_and_labels_in_the_reliability_figure(monkeypatch):
    seen = []
    monkeypatch.setattr(plots, "reliability", lambda confidence, right, theme: seen.append((confidence, right)))
    monkeypatch.setattr(sections, "picture", lambda name, caption, draw: draw(canvas.LIGHT))
    tokens = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]]).expand(2, 1, 3, 2)  # [S, n, T, K]
    sections.calibration(pt.Prediction({"probs": tokens}, True), torch.tensor([[0, -100, 0]]), -100)
    labels = torch.tensor([[0.9, 0.2]]).expand(2, 1, 2)  # [S, n, L]
    sections.calibration(pt.Prediction({"probs": labels}, False), torch.tensor([[1.0, 1.0]]), None)
    for (confidence, right), (sure, hit) in zip(seen, (([0.9, 0.6], [1, 0]), ([0.9, 0.8], [1, 0]))):
        np.testing.assert_allclose(confidence, sure, rtol=1e-6)
        np.testing.assert_array_equal(right, hit)


def test_the_histogram_shows_shares():
    ax = plots.histogram({"a": np.array([1.0, 1.0, 2.0, 4.0])}, canvas.DARK, "t", "x", good=3.0, log=True).axes[0]
    values = ax.patches[-1].get_data().values
    assert values.sum() == pytest.approx(1)
    assert values.max() == pytest.approx(0.5)


def test_importing_partita_imports_no_matplotlib():
    import subprocess
    import sys

    code = (
        "import sys, partita, partita.answers.report; print([m for m in ('matplotlib', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
