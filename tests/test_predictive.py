"""Predictions against direct formulas: averages, spreads, entropies, intervals, scores; limits, chunks and wrong shapes."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import entropy, norm
from torch import Tensor, nn

import partita as pt
from partita.answers import predictive, scores
from partita.answers.predictive import Prediction, predict


def refused(match: str, f: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """One line, which says what came and what was expected."""
    with pytest.raises(ValueError, match=match) as e:
        f(*args, **kwargs)
    assert "\n" not in str(e.value)
    assert "expected" in str(e.value)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def classes(S: int = 7, n: int = 5, K: int = 4) -> Prediction:
    return Prediction({"probs": (2 * torch.randn(S, n, K)).softmax(-1)}, classes=True)


def tokens(S: int = 7, n: int = 5, T: int = 3, K: int = 4) -> Prediction:
    return Prediction({"probs": (2 * torch.randn(S, n, T, K)).softmax(-1)}, classes=True, ignore=-100)


def labels(*shape: int) -> Prediction:
    return Prediction({"probs": torch.rand(*shape)}, classes=False)


def numbers(*shape: int) -> Prediction:
    return Prediction({"mean": 3 * torch.randn(*shape), "sd": 0.2 + torch.rand(*shape)}, classes=True)


# ------------------------------------------------------------------------------------------- averages and uncertainty
@pytest.mark.parametrize("make", [classes, tokens])
def test_classes_are_averaged_and_their_entropies_are_scipys(make: Callable[[], Prediction]) -> None:
    prediction = make()
    p = prediction.draws["probs"].double().numpy()
    average = p.mean(0)
    torch.testing.assert_close(prediction.probs, torch.tensor(average).float())
    assert torch.equal(prediction.mean, prediction.probs)
    whole, inside = entropy(average, axis=-1), entropy(p, axis=-1).mean(0)
    np.testing.assert_allclose(prediction.entropy(), whole, rtol=1e-4)
    np.testing.assert_allclose(prediction.mutual_information(), whole - inside, rtol=1e-3, atol=1e-6)
    assert prediction.entropy().shape == prediction.draws["probs"].shape[1:-1]


@pytest.mark.parametrize("shape", [(7, 5), (7, 5, 3)])
def test_labels_have_the_entropy_of_a_coin(shape: tuple[int, ...]) -> None:
    prediction = labels(*shape)
    p = prediction.draws["probs"].double().numpy()
    coin = lambda p: entropy(np.stack([p, 1 - p]), axis=0)
    np.testing.assert_allclose(prediction.entropy(), coin(p.mean(0)), rtol=1e-4)
    np.testing.assert_allclose(prediction.mutual_information(), coin(p.mean(0)) - coin(p).mean(0), rtol=1e-3, atol=1e-6)
    assert prediction.entropy().shape == shape[1:]


def test_draws_that_agree_share_no_information_and_sure_ones_have_no_entropy() -> None:
    one = torch.randn(200, 3).softmax(-1)
    one[1] = torch.tensor([0.0, 1.0, 0.0])
    prediction = Prediction({"probs": one.expand(7, 200, 3)}, classes=True)
    assert prediction.mutual_information().tolist() == pytest.approx([0] * 200, abs=1e-6)
    rounding = prediction.entropy() - torch.special.entr(one).sum(-1).expand(7, 200).mean(0)
    assert float(rounding.min()) < 0 <= float(prediction.mutual_information().min())
    assert prediction.entropy()[1] == 0
    torn = Prediction({"probs": torch.eye(2)[:, None]}, classes=True)  # two draws, each sure, of different classes
    assert float(torn.mutual_information()) == pytest.approx(math.log(2))
    assert float(
        Prediction({"probs": torch.tensor([[0.0], [1.0]])}, classes=False).mutual_information()
    ) == pytest.approx(math.log(2))


@pytest.mark.parametrize("shape", [(7, 5), (7, 5, 3), (1, 4)])
def test_the_mean_and_sd_of_a_mixture(shape: tuple[int, ...]) -> None:
    prediction = numbers(*shape)
    mean, sd = (prediction.draws[k].double() for k in ("mean", "sd"))
    torch.testing.assert_close(prediction.mean, mean.mean(0).float())
    second = (sd**2 + mean**2).mean(0)  # E y²
    torch.testing.assert_close(prediction.sd, (second - mean.mean(0) ** 2).sqrt().float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mass", [0.1, 0.5, 0.95, 0.999])
def test_the_interval_of_a_mixture_is_the_root_of_its_distribution_function(mass: float) -> None:
    prediction = numbers(6, 4)
    prediction.draws["sd"][:, 0] *= 1e-3  # nearly separate spikes
    prediction.draws["mean"][:, 1] *= 1e3
    mean, sd = (prediction.draws[k].double().numpy() for k in ("mean", "sd"))
    for q, got in zip(((1 - mass) / 2, (1 + mass) / 2), prediction.interval(mass)):
        assert got.dtype == torch.float32
        for i in range(4):
            excess = lambda y, i=i, q=q: norm.cdf(y, mean[:, i], sd[:, i]).mean() - q
            edge = np.abs(mean[:, i]).max() + 10 * sd[:, i].max()
            root = brentq(excess, -edge, edge, xtol=1e-12)
            assert float(got[i]) == pytest.approx(root, rel=1e-5, abs=1e-5)


def test_the_interval_of_one_draw_is_the_normals() -> None:
    low, high = Prediction({"mean": torch.tensor([[2.0]]), "sd": torch.tensor([[0.5]])}, classes=True).interval(0.9)
    assert [float(low), float(high)] == pytest.approx(norm(2, 0.5).interval(0.9), rel=1e-6)


@pytest.mark.parametrize("make", [classes, tokens, lambda: labels(9, 5)])
def test_the_interval_of_probabilities_is_their_quantiles_over_draws(make: Callable[[], Prediction]) -> None:
    prediction = make()
    p = prediction.draws["probs"].numpy()
    low, high = prediction.interval(0.8)
    np.testing.assert_allclose(low, np.quantile(p, 0.1, axis=0), rtol=1e-4)
    np.testing.assert_allclose(high, np.quantile(p, 0.9, axis=0), rtol=1e-4)


@pytest.mark.parametrize(
    "make", [classes, tokens, lambda: numbers(7, 5), lambda: numbers(7, 5, 3), lambda: labels(7, 5)]
)
@pytest.mark.parametrize("piece", [1, 30])
def test_intervals_in_pieces_are_those_of_the_whole(
    make: Callable[[], Prediction], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prediction = make()
    whole = prediction.interval()
    monkeypatch.setattr(predictive, "PIECE", piece)
    assert all(torch.equal(a, b) for a, b in zip(whole, prediction.interval()))


def test_quantiles_are_taken_of_at_most_a_piece_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of torch.quantile refuse more than 2^24 numbers."""
    sizes, real = [], Tensor.quantile
    monkeypatch.setattr(Tensor, "quantile", lambda p, *a, **k: sizes.append(p.numel()) or real(p, *a, **k))
    monkeypatch.setattr(predictive, "PIECE", 100)
    classes(S=7, n=50, K=4).interval()
    assert sum(sizes) == 7 * 50 * 4
    assert max(sizes) <= 100


@pytest.mark.parametrize("mass", [0, 1, 95, -0.5, math.nan, None, "95%"])
def test_a_mass_is_between_0_and_1(mass: Any) -> None:
    refused(r"interval got mass=.*, expected a number in \(0, 1\)", classes().interval, mass)


def test_what_a_prediction_does_not_hold_is_said() -> None:
    refused(r"no 'mean', expected one of what it holds: probs", lambda: classes().sd)
    refused(r"no 'probs', expected one of what it holds: mean, sd", lambda: numbers(3, 2).probs)
    refused(r"no 'probs', expected one of what it holds: mean, sd", numbers(3, 2).entropy)
    refused(r"no 'mean', expected .*: output", Prediction({"output": torch.zeros(2, 3)}, True).interval)
    assert repr(numbers(3, 2)) == "Prediction(mean [3, 2], sd [3, 2]; the first axis is the draws)"


# -------------------------------------------------------------------------------------------------------------- scores
def test_scores_of_classes() -> None:
    prediction = classes(n=40)
    y = torch.randint(4, (40,))
    each = prediction.draws["probs"].double()
    p = each.mean(0)
    got = prediction.scores(y)
    assert got["accuracy"] == pytest.approx(float((p.argmax(-1) == y).double().mean()))
    assert got["individual_accuracy"] == pytest.approx(float((each.argmax(-1) == y).double().mean()))
    assert got["nll"] == pytest.approx(float(-p[torch.arange(40), y].log().mean()), rel=1e-5)
    one_hot = nn.functional.one_hot(y, 4)
    assert got["brier"] == pytest.approx(float(((p - one_hot) ** 2).sum(-1).mean()), rel=1e-5)
    assert got["ece"] == pytest.approx(scores.ece(p, y), abs=1e-6)
    for same in (y.numpy(), y.to(torch.uint8), y.double()):
        assert prediction.scores(same) == got


def test_padding_is_left_out_of_token_scores() -> None:
    prediction = tokens(n=6, T=5)
    y = torch.randint(4, (6, 5))
    y[torch.rand(6, 5) < 0.4] = -100
    kept = y != -100
    assert 0 < int(kept.sum()) < 30
    flat = Prediction({"probs": prediction.draws["probs"][:, kept]}, classes=True)
    assert prediction.scores(y) == pytest.approx(flat.scores(y[kept]), rel=1e-6)
    other = Prediction({"probs": prediction.draws["probs"].clone()}, classes=True, ignore=-100)
    other.draws["probs"][:, ~kept] = 0.25
    assert other.scores(y) == prediction.scores(y)
    refused(
        r"labels in 0 \.\.\. 3", Prediction(prediction.draws, classes=True).scores, y
    )  # nobody said -100 is padding
    refused("not empty", prediction.scores, torch.full((6, 5), -100))


def test_labels_are_scored_each_on_its_own() -> None:
    prediction = labels(7, 20, 3)
    y = torch.randint(2, (20, 3))
    flat = Prediction({"probs": prediction.draws["probs"].reshape(7, 60)}, classes=False)
    got = prediction.scores(y)
    assert got == pytest.approx(flat.scores(y.reshape(60)))
    p = prediction.probs.double()
    assert got["nll"] == pytest.approx(float(-torch.where(y == 1, p, 1 - p).log().mean()), rel=1e-5)
    assert got["accuracy"] == pytest.approx(float(((p > 0.5) == y.bool()).double().mean()))
    assert prediction.scores(y.bool()) == prediction.scores(y.float()) == got


def test_scores_of_numbers() -> None:
    prediction = numbers(7, 30)
    y = 3 * torch.randn(30)
    mean, sd = (prediction.draws[k].double().numpy() for k in ("mean", "sd"))
    got = prediction.scores(y.numpy())
    assert got["rmse"] == pytest.approx(float((prediction.mean - y).square().mean().sqrt()), rel=1e-5)
    assert got["nll"] == pytest.approx(-np.log(norm.pdf(y.numpy(), mean, sd).mean(0)).mean(), rel=1e-5)
    low, high = prediction.interval()
    assert got["coverage95"] == pytest.approx(float(((low <= y) & (y <= high)).double().mean()))


def test_the_scores_that_are_told() -> None:
    y = torch.randint(4, (40,))
    prediction = classes(n=40)
    named = ["accuracy", "nll", "brier", "ece", "ece_mass", "individual_accuracy"]
    assert list(prediction.scores(y)) == named
    assert prediction.scores(y)["ece_mass"] == pytest.approx(scores.ece(prediction.probs, y, mass="equal"), abs=1e-6)
    regression, y = numbers(7, 30), torch.randn(30)
    got = regression.scores(y)
    assert list(got) == ["rmse", "nll", "crps", "coverage95"]
    assert got["crps"] == pytest.approx(scores.crps(regression.draws["mean"], regression.draws["sd"], y))


def test_uncertainty_tells_other_inputs_apart() -> None:
    """Outside every draw is sure of another class: the entropy of the average tells all of it, and so does what the
    parameters cause; inside, draws agree."""
    inside = Prediction({"probs": torch.randn(200, 4).softmax(-1).expand(6, 200, 4)}, classes=True)
    sure = torch.eye(4)[torch.arange(6) % 4][:, None].expand(6, 300, 4)
    outside = Prediction({"probs": sure}, classes=True)
    found = inside.ood(outside)
    assert found["mutual_information"] == 1
    assert 0.9 < found["entropy"] <= 1
    assert inside.ood(inside) == {"entropy": 0.5, "mutual_information": 0.5}
    assert outside.ood(inside)["entropy"] == pytest.approx(1 - found["entropy"])
    refused("no 'probs'", numbers(3, 2).ood, inside)


@pytest.mark.parametrize(
    "prediction, y, match",
    [
        (classes(), torch.zeros(4).long(), r"y has shape \(4,\), expected \(5,\)"),
        (classes(), torch.zeros(5, 1).long(), r"y has shape \(5, 1\), expected \(5,\)"),
        (classes(), torch.eye(4).long(), r"y has shape \(4, 4\), expected \(5,\)"),
        (classes(), torch.full((5,), 4), r"y holds .*4; expected whole labels in 0 \.\.\. 3"),
        (classes(), torch.full((5,), 0.7), r"expected whole labels"),
        (tokens(), torch.zeros(5).long(), r"y has shape \(5,\), expected \(5, 3\)"),
        (labels(7, 5), torch.zeros(5, 1), r"y has shape \(5, 1\), expected \(5,\)"),
        (labels(7, 5), torch.full((5,), 0.5), r"expected whole labels in 0 \.\.\. 1"),
        (numbers(7, 5), torch.zeros(5, 1), r"y has shape \(5, 1\), expected \(5,\)"),
        (numbers(7, 5, 1), torch.zeros(5), r"y has shape \(5,\), expected \(5, 1\)"),
        (classes(), [0, 1, 2, 3, 0], r"y\[0\] is a int, expected a tensor, an array"),
        (classes(), (torch.zeros(5), torch.zeros(5)), r"y is a tuple, expected one tensor"),
        (classes(), np.array(list("abcde")), r"y is an array of dtype <U1, expected numbers"),
    ],
)
def test_targets_of_the_wrong_shape_are_refused(prediction: Prediction, y: Any, match: str) -> None:
    refused(match, prediction.scores, y)


# ---------------------------------------------------------------------------------------------------- making predictions
def run_of(likelihood: Any, outputs: int, y: Callable[[int], Tensor], **options: Any) -> pt.Run:
    model = options.pop("model", None) or pt.models.mlp(2, (4,), outputs)
    return pt.sample(
        pt.Posterior(model, likelihood, pt.Normal(1.0)),
        (torch.randn(12, *options.pop("x", (2,))), y(12)),
        sampler=pt.SGLD(1e-3),
        **{"steps": 14, "burn_in": 4, "thin": 1, "chains": 2, "progress": False} | options,
    )


KINDS = {
    "classes": (pt.Categorical(), 3, lambda n: torch.randint(3, (n,)), {}),
    "labels": (pt.Bernoulli(), 2, lambda n: torch.randint(2, (n, 2)), {}),
    "known scale": (pt.Gaussian(0.5), 1, lambda n: torch.randn(n, 1), {}),
    "learned scale": (pt.Gaussian("learn"), 2, lambda n: torch.randn(n, 2), {}),
    "tokens": (pt.Categorical(ignore=0), 3, lambda n: torch.randint(3, (n, 4)), {"x": (4, 2)}),
}


@pytest.mark.parametrize("how", ["vmap", "loop"])
@pytest.mark.parametrize("kind", KINDS)
def test_predictions_are_those_of_each_draws_own_module(kind: str, how: str) -> None:
    likelihood, outputs, y, options = KINDS[kind]
    run = run_of(likelihood, outputs, y, **options)
    run.settings["chains_run"] = how
    x = torch.randn(5, *options.get("x", (2,)))
    prediction = run.predict(x)
    for c, s in ((0, 0), (0, 7), (1, 9)):
        with torch.no_grad():
            output = run.module(c, s)(x)
        draw = {k: v[10 * c + s] for k, v in prediction.draws.items()}
        if kind in ("classes", "tokens"):
            torch.testing.assert_close(draw["probs"], output.softmax(-1))
        elif kind == "labels":
            torch.testing.assert_close(draw["probs"], output.sigmoid())
        else:
            sd = run.samples[c, s, -1].exp() if kind == "learned scale" else torch.tensor(0.5)
            torch.testing.assert_close(draw["mean"], output)
            torch.testing.assert_close(draw["sd"], sd.expand(output.shape))
    assert prediction.classes == (kind != "labels")
    assert all(math.isfinite(v) for v in prediction.scores(y(5).clamp(max=2)).values())


def test_the_padding_of_the_likelihood_is_left_out_of_scores() -> None:
    likelihood, outputs, y, options = KINDS["tokens"]
    run = run_of(likelihood, outputs, y, **options)
    x, labels = torch.randn(6, 4, 2), torch.randint(1, 3, (6, 4))
    labels[:, 2:] = 0  # ignore=0
    got = run.predict(x).scores(labels)
    kept = Prediction({"probs": run.predict(x).draws["probs"][:, :, :2]}, classes=True).scores(labels[:, :2])
    assert got == pytest.approx(kept, rel=1e-6)


@pytest.mark.parametrize("how", ["vmap", "loop"])
@pytest.mark.parametrize("draws_at_once, rows_at_once", [(1, 1), (3, 4), (16, 2), (1000, 1000)])
def test_pieces_are_the_whole(how: str, draws_at_once: int, rows_at_once: int) -> None:
    run = run_of(*KINDS["learned scale"][:3])
    theta, x = run.samples.flatten(0, 1), torch.randn(9, 2)
    whole = predict(run.target, theta, x, how=how, draws_at_once=100, rows_at_once=100).draws
    parts = predict(run.target, theta, x, how=how, draws_at_once=draws_at_once, rows_at_once=rows_at_once).draws
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("how", ["vmap", "loop"])
def test_pieces_with_batch_norm_are_the_whole(how: str) -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "BatchNorm couples")
        run = run_of(*KINDS["classes"][:3], model=model)
    theta, statistics = run.samples.flatten(0, 1), {k: v.flatten(0, 1) for k, v in run.statistics.items()}
    x = torch.randn(9, 2)
    whole = predict(run.target, theta, x, statistics, how=how).draws["probs"]
    parts = predict(run.target, theta, x, statistics, how=how, draws_at_once=3, rows_at_once=2).draws["probs"]
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(run.predict(x).draws["probs"], whole, rtol=1e-5, atol=1e-6)


def test_beyond_the_limit_draws_are_thinned_evenly_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(*KINDS["classes"][:3])
    x = torch.randn(6, 2)
    whole = run.predict(x).draws["probs"]
    per_draw = 6 * 3 * 4  # bytes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(predictive, "LIMIT", 20 * per_draw)
        assert torch.equal(run.predict(x).draws["probs"], whole)
    for most, step in ((19, 2), (10, 2), (9, 3), (5, 4), (1, 20), (0, 20)):
        monkeypatch.setattr(predictive, "LIMIT", most * per_draw)
        with pytest.warns(
            UserWarning, match=rf"with one draw in {step}: 20 draws x 6 inputs would take .* GiB"
        ) as said:
            few = run.predict(x).draws["probs"]
        assert len(said) == 1
        assert said[0].filename == __file__
        torch.testing.assert_close(few, whole[::step])
        assert few.shape[0] <= max(most, 1)


def test_statistics_are_thinned_with_their_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "BatchNorm couples")
        run = run_of(*KINDS["classes"][:3], model=model)
    x = torch.randn(6, 2)
    whole = run.predict(x).draws["probs"]
    monkeypatch.setattr(predictive, "LIMIT", 7 * 72)
    with pytest.warns(UserWarning, match="one draw in 3"):
        torch.testing.assert_close(run.predict(x).draws["probs"], whole[::3])


def test_some_of_the_draws() -> None:
    run = run_of(*KINDS["classes"][:3])
    x = torch.randn(4, 2)
    whole = run.predict(x).draws["probs"]
    torch.testing.assert_close(run.predict(x, draws=3).draws["probs"], whole[[0, 10, 19]])
    torch.testing.assert_close(run.predict(x, draws=20).draws["probs"], whole)
    for draws in (0, 21, 2.0):
        refused(r"predict got draws=.*, expected a whole number from 1 to 20", run.predict, x, draws=draws)


def test_inputs_that_do_not_fit_are_refused_in_one_line() -> None:
    run = run_of(*KINDS["classes"][:3])
    refused(
        r"forward pass failed with RuntimeError: .*got x \[2, 3\] float32 for a module of float32",
        run.predict,
        torch.randn(5, 3),
    )
    refused(
        r"forward pass failed.*got x \[2, 2\] float64 for a module of float32", run.predict, torch.zeros(5, 2).double()
    )
    assert run.predict(np.zeros((5, 2))).probs.shape == (5, 3)  # NumPy makes float64 of everything
    refused(r"unequal or no rows: \{'x': 0\}, expected", run.predict, torch.zeros(0, 2))
    refused(r"unequal or no rows: \{'x': 0\}, expected", run.predict, torch.tensor(1.0))
    refused(
        r"rows: \{\"x\['a'\]\": 3, \"x\['b'\]\": 2\}", run.predict, {"a": torch.zeros(3, 2), "b": torch.zeros(2, 2)}
    )
    refused(r"x\[0\] is a float, expected a tensor", run.predict, [0.1, 0.2])
    refused(r"x is a NoneType, expected a tensor", run.predict, None)
    refused(r"forward pass failed with TypeError.*got x\[0\] \[2, 2\].*, x\[1\]", run.predict, [torch.zeros(3, 2)] * 2)
    refused(r"no rows: \{\}, expected", run.predict, {})


def test_one_input_and_numpy_inputs() -> None:
    run = run_of(*KINDS["learned scale"][:3])
    x = torch.randn(3, 2)
    whole = run.predict(x)
    torch.testing.assert_close(run.predict(x[:1]).mean, whole.mean[:1])
    torch.testing.assert_close(run.predict(x.numpy()).mean, whole.mean)
    assert whole.sd.shape == (3, 2)
    assert all(v.shape == (3, 2) for v in whole.interval())


def test_predictions_carry_no_graph_and_do_not_touch_the_samples() -> None:
    run = run_of(*KINDS["classes"][:3])
    kept = run.samples.clone()
    prediction = run.predict(torch.randn(3, 2, requires_grad=True))
    assert not prediction.draws["probs"].requires_grad
    prediction.draws["probs"].zero_()
    assert torch.equal(run.samples, kept)


def test_a_monitor_scores_as_predict_does() -> None:
    x, y = torch.randn(9, 2), torch.randint(3, (9,))
    run = run_of(*KINDS["classes"][:3], monitor={"test": (x.numpy(), y.numpy())}, monitor_every=7)
    final = run.metrics[-1]
    last = Prediction({"probs": run.predict(x).draws["probs"][[9, 19]]}, classes=True).scores(y)
    assert {k: final[f"test/now/{k}"] for k in last} == pytest.approx(last, rel=1e-5)
