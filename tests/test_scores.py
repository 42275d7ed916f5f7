"""Scores against scikit-learn, torchmetrics and scipy, and against answers worked out by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, roc_auc_score, root_mean_squared_error
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

from partita.answers import scores
from partita.answers.scores import (
    accuracy,
    auroc,
    brier,
    class_scores,
    coverage,
    coverages,
    crps,
    ece,
    gaussian_mixture_nll,
    individual_accuracy,
    nll,
    reliability,
    rmse,
)


def predictions(n: int, k: int, seed: int = 0, sharp: float = 2.0) -> tuple[Tensor, Tensor]:
    """Probabilities [n, k], too sure of themselves, and labels [n] that they know something about."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, k, generator=g, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(-1), 1, generator=g)[:, 0]
    return (sharp * logits).softmax(-1), y


@pytest.mark.parametrize("n, k", [(1, 2), (37, 3), (1000, 10)])
def test_class_scores_agree_with_sklearn(n: int, k: int) -> None:
    p, y = predictions(n, k)
    labels = list(range(k))
    assert accuracy(p, y) == pytest.approx(accuracy_score(y, p.argmax(-1)), rel=1e-12)
    assert nll(p, y) == pytest.approx(log_loss(y, p.numpy(), labels=labels), rel=1e-9)
    expected = brier_score_loss(y, p.numpy(), labels=labels, scale_by_half=False)
    assert brier(p, y) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bins", [1, 7, 15])
@pytest.mark.parametrize("n, k", [(5, 2), (400, 3), (3000, 10)])
def test_ece_agrees_with_torchmetrics(n: int, k: int, bins: int) -> None:
    p, y = predictions(n, k)
    p[:2] = torch.nn.functional.one_hot(y[:2], k)  # sure and right
    p[2] = torch.nn.functional.one_hot((y[2] + 1) % k, k)  # sure and wrong
    expected = multiclass_calibration_error(p, y, num_classes=k, n_bins=bins, norm="l1").item()
    assert ece(p, y, bins) == pytest.approx(expected, abs=2e-6)  # torchmetrics sums in float32


@pytest.mark.parametrize("n, bins", [(600, 15), (601, 15), (614, 15), (10, 15), (40, 1)])
def test_equal_mass_ece_agrees_with_loops(n: int, bins: int) -> None:
    p, y = (t.numpy() for t in predictions(n, 4))
    confidence, hit = p.max(-1), p.argmax(-1) == y
    order = np.argsort(confidence, kind="stable")
    ends = [math.ceil(b * n / bins) for b in range(bins + 1)]
    parts = [order[lo:hi] for lo, hi in itertools.pairwise(ends)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    expected = sum(len(i) / n * abs(hit[i].mean() - confidence[i].mean()) for i in parts if len(i))
    assert ece(torch.from_numpy(p), torch.from_numpy(y), bins, mass="equal") == pytest.approx(expected, rel=1e-12)


def test_ece_by_hand() -> None:
    p = torch.tensor([[0.6, 0.4], [0.7, 0.3], [0.2, 0.8], [0.1, 0.9]])
    y = torch.tensor([0, 1, 1, 1])  # hits 1, 0, 1, 1 at confidences 0.6, 0.7, 0.8, 0.9
    assert ece(p, y, bins=1) == pytest.approx(abs(0.75 - 0.75), abs=1e-6)
    assert ece(p, y, bins=2, mass="equal") == pytest.approx((abs(0.5 - 0.65) + abs(1 - 0.85)) / 2, abs=1e-6)
    assert ece(p, y, bins=4) == pytest.approx((abs(1 - 1.3) + abs(2 - 1.7)) / 4, abs=1e-6)


def test_ece_at_the_edges_of_bins_agrees_with_torchmetrics() -> None:
    p, y = predictions(300, 3)
    p = (16 * p).round() / 16  # confidences on the edges of 8 bins, exactly, and between them
    p[:, 0] = 1 - p[:, 1:].sum(-1)
    p, y = p[p[:, 0] >= 0], y[p[:, 0] >= 0]
    expected = multiclass_calibration_error(p, y, num_classes=3, n_bins=8, norm="l1").item()
    assert ece(p, y, 8) == pytest.approx(expected, abs=2e-6)


def test_ece_tells_calibrated_from_sharp() -> None:
    """Calibrated, each of 15 bins misses by some sqrt(0.25/(n/15)), so ECE is near 0.005 at n = 20000."""
    for mass in ("width", "equal"):
        assert ece(*predictions(20000, 3, sharp=1.0), mass=mass) < 0.012
        assert ece(*predictions(20000, 3, sharp=2.0), mass=mass) > 0.1


def test_binary_is_two_classes() -> None:
    p, y = predictions(500, 2)
    one = p[:, 1]
    for score in (accuracy, nll, brier, ece, lambda p, y: ece(p, y, mass="equal")):
        assert score(one, y) == pytest.approx(score(p, y), rel=1e-12)
    assert accuracy(one, y) == accuracy_score(y, one > 0.5)
    assert brier(one, y) == pytest.approx(2 * brier_score_loss(y, one.numpy()), rel=1e-12)
    assert accuracy(one, y.double()) == accuracy(one, y)
    draws = torch.stack((one, 1 - one, one))
    both = torch.stack((1 - draws, draws), -1)
    assert individual_accuracy(draws, y) == individual_accuracy(both, y)


def test_individual_accuracy_is_the_mean_over_draws() -> None:
    draws = torch.stack([predictions(200, 5, seed)[0] for seed in range(6)])
    y = predictions(200, 5, 0)[1]
    each = [accuracy(p, y) for p in draws]
    assert individual_accuracy(draws, y) == pytest.approx(sum(each) / 6, rel=1e-12)
    assert each[0] > individual_accuracy(draws, y) > min(each)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_nll_of_the_impossible_is_finite(dtype: torch.dtype) -> None:
    p, y = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=dtype), torch.tensor([1, 1])
    assert nll(p, y) == pytest.approx((-math.log(torch.finfo(dtype).tiny) + math.log(2)) / 2, rel=1e-12)


@pytest.mark.parametrize("shape", [(7,), (50, 3), ()])
def test_gaussian_mixture_agrees_with_scipy(shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(1)
    mean = torch.randn(9, 4, *shape, generator=g)
    sd = torch.rand(9, 4, *shape, generator=g) + 0.1
    y = torch.randn(4, *shape, generator=g)
    density = norm.pdf(y.double(), mean.double(), sd.double()).mean(0)
    assert gaussian_mixture_nll(mean, sd, y) == pytest.approx(-np.log(density).mean(), rel=1e-9)


def test_gaussian_mixture_survives_far_data() -> None:
    mean, sd, y = torch.zeros(5, 1), torch.ones(5, 1), torch.full((1,), 100.0)  # each density underflows
    assert gaussian_mixture_nll(mean, sd, y) == pytest.approx(5000 + math.log(2 * math.pi) / 2, rel=1e-12)


def test_rmse_and_coverage() -> None:
    g = torch.Generator().manual_seed(2)
    mean, y = torch.randn(2, 300, generator=g)
    assert rmse(mean, y) == pytest.approx(root_mean_squared_error(y.double(), mean.double()), rel=1e-12)
    y = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    assert coverage(torch.ones(5), torch.full((5,), 3.0), y) == 0.6  # both ends count
    assert coverage(torch.full((5,), -math.inf), torch.full((5,), math.inf), y) == 1


def test_answers_are_plain_floats() -> None:
    p, y = predictions(20, 3)
    x = p[:, 0]
    answers = [accuracy(p, y), individual_accuracy(p[None], y), nll(p, y), brier(p, y), ece(p, y)]
    answers += [ece(p, y, mass="equal"), gaussian_mixture_nll(p[None], p[None], p), rmse(x, x), coverage(x, x, x)]
    assert all(type(a) is float for a in answers)


def test_nan_predictions_give_nan() -> None:
    p, y = predictions(20, 3)
    p[4, 1] = math.nan
    for score in (accuracy, nll, brier, ece, lambda p, y: ece(p, y, mass="equal")):
        assert all(math.isnan(score(p, y.where(torch.arange(20) != 4, label))) for label in range(3))
    assert math.isnan(individual_accuracy(p[None], y))
    x = p[:, 1]
    assert math.isnan(rmse(x, torch.zeros(20)))
    assert math.isnan(coverage(x, torch.ones(20), torch.zeros(20)))
    assert math.isnan(gaussian_mixture_nll(x[None].double(), torch.ones(1, 20), torch.zeros(20)))


# ------------------------------------------------------------------------------------- calibration, CRPS, coverage, AUROC
@pytest.mark.parametrize("mass", ["width", "equal"])
@pytest.mark.parametrize("n, bins", [(5, 15), (600, 15), (601, 7), (30, 1)])
def test_the_reliability_curve_sums_to_the_ece(n: int, bins: int, mass: str) -> None:
    p, y = predictions(n, 4)
    p[0] = torch.nn.functional.one_hot(y[0], 4)
    confidence, hit, count = reliability(p, y, bins, mass)
    assert len(confidence) == len(hit) == len(count) == bins + (mass == "width")
    assert int(count.sum()) == n
    assert torch.equal(confidence.isnan(), count == 0)
    gap = (count * (hit - confidence)).nan_to_num().abs().sum().item() / n
    assert gap == pytest.approx(ece(p, y, bins, mass), abs=1e-12)


def test_the_reliability_curve_by_hand() -> None:
    p = torch.tensor([[0.6, 0.4], [0.7, 0.3], [0.2, 0.8], [1.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 0])
    confidence, hit, count = reliability(p, y, bins=4)
    assert count.tolist() == [0, 0, 2, 1, 1]  # below .75 two, then .8, and what is sure
    assert confidence[2:].tolist() == pytest.approx([0.65, 0.8, 1.0])
    assert hit[2:].tolist() == [0.5, 1.0, 1.0]


def test_class_scores_are_the_scores() -> None:
    p, y = predictions(100, 3)
    expected = {"accuracy": accuracy(p, y), "nll": nll(p, y), "brier": brier(p, y), "ece": ece(p, y)}
    assert class_scores(p, y) == {**expected, "ece_mass": ece(p, y, mass="equal")}


def mixture(S: int, n: int, wide: float = 1.0, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    mean = wide * torch.randn(S, n, generator=g, dtype=torch.float64)
    return mean, torch.rand(S, n, generator=g, dtype=torch.float64) + 0.2, torch.randn(n, generator=g).double()


@pytest.mark.parametrize("S, wide", [(1, 1.0), (3, 4.0), (200, 1.0)])  # over pairs; and, of many draws, by quadrature
def test_crps_is_the_integral_of_the_squared_distance_of_distribution_functions(S: int, wide: float) -> None:
    mean, sd, y = mixture(S, 4, wide)
    total = 0.0
    for m, s, v in zip(mean.T.numpy(), sd.T.numpy(), y.tolist()):
        F = lambda t, m=m, s=s: norm.cdf(t, m, s).mean()
        low, high = min(v, (m - 9 * s).min()), max(v, (m + 9 * s).max())
        total += quad(lambda t, F=F: F(t) ** 2, low, v, limit=500)[0]
        total += quad(lambda t, F=F: (1 - F(t)) ** 2, v, high, limit=500)[0]
    assert crps(mean, sd, y) == pytest.approx(total / 4, rel=1e-8)


def test_both_ways_of_the_crps_agree_in_blocks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    mean, sd, y = mixture(150, 30)
    quadrature = crps(mean, sd, y)
    monkeypatch.setattr(scores, "BLOCK", 150 * 7)
    assert crps(mean, sd, y) == pytest.approx(quadrature, rel=1e-9)
    monkeypatch.setattr(scores, "REACH", 1e9)  # so many steps that pairs are fewer
    assert crps(mean, sd, y) == pytest.approx(quadrature, rel=1e-9)
    assert crps(mean.view(150, 5, 6), sd.view(150, 5, 6), y.view(5, 6)) == pytest.approx(quadrature, rel=1e-9)


def test_crps_of_one_normal_and_of_draws_without_width() -> None:
    """σ (z (2Φ(z) - 1) + 2φ(z) - 1/√π); and, for spikes, E|X - y| - ½ E|X - X'| by hand."""
    z = 0.7
    expected = 2 * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))
    assert crps(torch.tensor([[1.0]]), torch.tensor([[2.0]]), torch.tensor([1 + 2 * z])) == pytest.approx(
        expected, rel=1e-6
    )
    spikes = torch.tensor([[0.0], [1.0], [4.0]]).double()
    by_hand = (3 + 2 + 1) / 3 - 0.5 * 2 * (1 + 4 + 3) / 9
    assert crps(spikes, torch.full_like(spikes, 1e-9), torch.tensor([3.0])) == pytest.approx(by_hand, rel=1e-6)


def test_crps_is_proper() -> None:
    """Of 4,000 draws of N(0, 1), the right width scores best: 1/√π · (√2 - 1)... = 0.5642 on average (σ/√π)."""
    y = torch.randn(4000, generator=torch.Generator().manual_seed(0)).double()
    of = lambda m, s: crps(torch.full((1, 4000), m), torch.full((1, 4000), s), y)
    assert of(0.0, 1.0) == pytest.approx(1 / math.sqrt(math.pi), rel=0.03)
    assert of(0.0, 1.0) < min(of(0.0, 0.7), of(0.0, 1.4), of(0.3, 1.0))


def test_coverages_are_those_of_intervals() -> None:
    mean, sd, y = mixture(20, 400, 0.5)
    found = coverages(mean, sd, y, (0.3, 0.5, 0.95))
    at = [
        np.mean(
            [abs(norm.cdf(v, m, s).mean() - 0.5) <= h / 2 for m, s, v in zip(mean.T.numpy(), sd.T.numpy(), y.numpy())]
        )
        for h in (0.3, 0.5, 0.95)
    ]
    assert found == pytest.approx(at)
    g = torch.Generator().manual_seed(1)
    y = torch.randn(20000, generator=g)
    right = coverages(torch.zeros(1, 20000), torch.ones(1, 20000), y)
    assert right == pytest.approx([0.5, 0.8, 0.9, 0.95, 0.99], abs=0.015)  # 4 sd
    for levels in ((), (0.5, 1.0), (95,)):
        with pytest.raises(ValueError, match=r"levels is .*expected numbers in \(0, 1\)"):
            coverages(mean, sd, y[:400], levels)


@pytest.mark.parametrize("n, m, decimals", [(1, 1, 9), (30, 50, 9), (200, 31, 1), (50, 50, 0)])
def test_auroc_agrees_with_sklearn(n: int, m: int, decimals: int) -> None:
    g = torch.Generator().manual_seed(n)
    inside, outside = torch.randn(n, generator=g), torch.randn(m, generator=g) + 0.7
    inside, outside = inside.round(decimals=decimals), outside.round(decimals=decimals)  # with ties
    expected = roc_auc_score([0] * n + [1] * m, torch.cat((inside, outside)))
    assert auroc(inside, outside) == pytest.approx(expected, rel=1e-12)
    assert auroc(outside, inside) == pytest.approx(1 - expected, rel=1e-12)


def test_auroc_by_hand_and_of_nothing() -> None:
    assert auroc(torch.tensor([1.0, 2.0]), torch.tensor([[2.0, 3.0], [0.0, 2.0]])) == (0.75 + 1 + 0 + 0.75) / 4
    assert auroc(torch.zeros(3), torch.zeros(2)) == 0.5
    assert math.isnan(auroc(torch.tensor([1.0, math.nan]), torch.zeros(2)))
    with pytest.raises(ValueError, match=r"auroc: inside is \[0\], outside is \[2\]; expected not empty"):
        auroc(torch.zeros(0), torch.zeros(2))


def z(*shape: int) -> Tensor:
    return torch.zeros(shape)


HALF = torch.full((4, 2), 0.5)
WRONG = [
    (
        lambda: accuracy(HALF, z(3)),
        r"accuracy: probs is float32 [4, 2], y is [3]; expected floating probs [n, k] or [n]",
    ),
    (lambda: nll(HALF, z(4, 1)), "y is [4, 1]"),
    (lambda: brier(HALF[None], z(4)), "probs is float32 [1, 4, 2]"),
    (lambda: brier(z(0, 2), z(0)), "not empty"),
    (lambda: accuracy(torch.ones(4, dtype=torch.int64), z(4)), "probs is int64 [4]"),
    (lambda: individual_accuracy(HALF[:, 0], z(4)), "expected floating probs [S, n, k] or [S, n]"),
    (lambda: individual_accuracy(HALF[None, None], z(4)), "probs is float32 [1, 1, 4, 2]"),
    (lambda: nll(HALF, z(4) + 2), "nll: y holds 2 ... 2; expected whole labels in 0 ... 1"),
    (lambda: nll(HALF, z(4) - 1), "y holds -1 ... -1"),
    (lambda: nll(HALF, z(4) + 0.5), "y holds 0.5 ... 0.5"),
    (lambda: nll(4 * HALF, z(4)), "not logits"),
    (lambda: accuracy(torch.tensor([-1.0, 2.0]), z(2)), "not logits"),
    (lambda: ece(HALF, z(4), bins=0), "bins is 0"),
    (lambda: ece(HALF, z(4), mass="adaptive"), "mass is 'adaptive'"),
    (lambda: rmse(z(4, 1), z(4)), "rmse: mean is [4, 1], y is [4]; expected the same shape, not empty"),
    (lambda: rmse(z(0), z(0)), "not empty"),
    (lambda: coverage(z(4), z(4, 1), z(4)), "coverage: upper is [4, 1], y is [4]"),
    (lambda: coverage(z(1), z(4), z(4)), "coverage: lower is [1], y is [4]"),
    (lambda: gaussian_mixture_nll(z(4), z(4), z(4)), "mean[0] is [], y is [4]"),
    (lambda: gaussian_mixture_nll(z(2, 4), z(1, 4), z(4)), "sd is [1, 4], mean is [2, 4]"),
    (lambda: gaussian_mixture_nll(z(2, 4), z(2, 4), z(4)), "the least sd is 0; expected sd > 0"),
    (lambda: gaussian_mixture_nll(z(0, 4), z(0, 4), z(4)), "expected"),
    (lambda: crps(z(2, 4), z(2, 4), z(4)), "crps: the least sd is 0; expected sd > 0"),
    (lambda: crps(z(2, 4), z(2, 4), z(4, 1)), "mean[0] is [4], y is [4, 1]"),
    (lambda: coverages(z(2, 4), z(1, 4), z(4)), "coverages: sd is [1, 4], mean is [2, 4]"),
    (lambda: reliability(HALF, z(4), bins=0), "reliability: bins is 0"),
]


@pytest.mark.parametrize("call, says", WRONG, ids=[says for _, says in WRONG])
def test_wrong_input_is_one_clear_line(call: object, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()  # type: ignore[operator]
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "expected" in str(caught.value)
