"""Scores of predictions: accuracy, likelihood, Brier score and calibration of classes; NLL, RMSE, coverage of numbers.

Letters: S draws, n data, k classes. Class probabilities are [n, k], or [n] for two classes (the probability of class 1);
labels y are [n], whole numbers 0 ... k-1. Sums run in float64 and the answer is a Python float. Wrong shapes, labels or
probabilities are a ValueError; a NaN anywhere in the predictions makes the score NaN.
"""

import math

import torch
from torch import Tensor


def accuracy(probs: Tensor, y: Tensor) -> float:
    """mean_i 1[argmax_j p_ij = y_i], the first class winning ties. probs: [n, k] or [n], y: [n]."""
    return _hits(*_classes("accuracy", probs, y)).mean().item()


def individual_accuracy(per_draw: Tensor, y: Tensor) -> float:
    """mean_s accuracy(p_s, y): what one draw alone achieves on average. per_draw: [S, n, k] or [S, n], y: [n]."""
    return _hits(*_classes("individual_accuracy", per_draw, y, lead="S")).mean().item()


def nll(probs: Tensor, y: Tensor) -> float:
    """-mean_i log p_i,y_i, of the probabilities averaged over draws (Good 1952). probs: [n, k] or [n], y: [n].

    A probability is taken as at least the smallest normal number of its own dtype, so that an underflow costs 87 nats
    (float32), not infinity.
    """
    p, y = _classes("nll", probs, y)
    chosen = p.gather(-1, y[:, None])[:, 0]
    return -chosen.clamp(min=torch.finfo(probs.dtype).tiny).log().mean().item()


def brier(probs: Tensor, y: Tensor) -> float:
    """mean_i sum_j (p_ij - 1[y_i = j])^2, in 0 ... 2 (Brier 1950, as he wrote it). probs: [n, k] or [n], y: [n]."""
    p, y = _classes("brier", probs, y)
    target = torch.nn.functional.one_hot(y, p.shape[-1])
    return (p - target).square().sum(-1).mean().item()


def ece(probs: Tensor, y: Tensor, bins: int = 15, mass: str = "width") -> float:
    """Expected calibration error of the top class, sum_b n_b/n · |accuracy_b - mean confidence_b|.

    probs: [n, k] or [n], y: [n]; the confidence of datum i is max_j p_ij. mass "width": bins [b/B, (b+1)/B), and, as
    torchmetrics has it, one more for confidences of exactly 1 (Naeini et al. 2015; Guo et al. 2017). mass "equal": the
    data sorted by confidence and cut into B bins whose counts differ by at most one, ties in the order given (Nguyen &
    O'Connor 2015).
    """
    if bins < 1 or mass not in ("width", "equal"):
        raise ValueError(f"ece: bins is {bins}, mass is {mass!r}; expected bins >= 1 and mass 'width' or 'equal'")
    p, y = _classes("ece", probs, y)
    n, confidence = len(p), p.amax(-1)
    gap = _hits(p, y) - confidence
    if mass == "width":
        edges = torch.linspace(0, 1, bins + 1, dtype=p.dtype, device=p.device)
        index = torch.bucketize(confidence, edges[1:], right=True)
    else:
        gap = gap[confidence.argsort(stable=True)]
        index = torch.arange(n, device=p.device) * bins // n
    # n_b |accuracy_b - confidence_b| is the size of the summed gap, which needs no division by an empty bin's count
    return (gap.new_zeros(bins + 1).index_add(0, index, gap).abs().sum() / n).item()


def gaussian_mixture_nll(mean: Tensor, sd: Tensor, y: Tensor) -> float:
    """-mean_i log( 1/S sum_s N(y_i; mean_si, sd_si) ), by logsumexp. mean, sd: [S, n, ...], y: [n, ...].

    i runs over every element of y: outputs of one datum are scored each on its own, not by their joint density.
    """
    _same("gaussian_mixture_nll", "mean[0]", mean.shape[1:], "y", y.shape)
    _same("gaussian_mixture_nll", "sd", sd.shape, "mean", mean.shape)
    if (sd <= 0).any():
        raise ValueError(f"gaussian_mixture_nll: the least sd is {sd.min().item():g}; expected sd > 0")
    mean, sd, y = mean.double(), sd.double(), y.double()
    log_density = -((y - mean) / sd).square() / 2 - sd.log() - math.log(2 * math.pi) / 2
    return -(log_density.logsumexp(0) - math.log(len(mean))).mean().item()


def rmse(mean: Tensor, y: Tensor) -> float:
    """sqrt( mean_i (mean_i - y_i)^2 ). mean, y: [n, ...], alike."""
    _same("rmse", "mean", mean.shape, "y", y.shape)
    return (mean.double() - y.double()).square().mean().sqrt().item()


def coverage(lower: Tensor, upper: Tensor, y: Tensor) -> float:
    """mean_i 1[lower_i <= y_i <= upper_i], the ends included. lower, upper, y: [n, ...], alike."""
    _same("coverage", "lower", lower.shape, "y", y.shape)
    _same("coverage", "upper", upper.shape, "y", y.shape)
    inside = ((lower <= y) & (y <= upper)).double()
    return inside.masked_fill(lower.isnan() | upper.isnan() | y.isnan(), math.nan).mean().item()


def _classes(name: str, probs: Tensor, y: Tensor, lead: str = "") -> tuple[Tensor, Tensor]:
    """Checked probabilities [..., n, k] in float64 and labels [n] as int64; [..., n] becomes [..., n, 2]."""
    before = 1 if lead else 0
    data_shape, fits = probs.shape[: before + 1], before + 1 <= probs.ndim <= before + 2
    if not fits or y.ndim != 1 or data_shape[-1] != len(y) or data_shape.numel() == 0 or not probs.is_floating_point():
        wanted = f"[{lead}{', ' if lead else ''}n, k] or [{lead}{', ' if lead else ''}n]"
        got = f"probs is {str(probs.dtype)[6:]} {list(probs.shape)}, y is {list(y.shape)}"
        raise ValueError(f"{name}: {got}; expected floating probs {wanted} and y [n], not empty")
    p, labels = probs.double(), y.long()
    if probs.ndim == before + 1:
        p = torch.stack((1 - p, p), dim=-1)
    if (p < -0.01).any() or ((p.sum(-1) - 1).abs() > 0.01).any():  # half precision sums to 1 within 0.4 %
        raise ValueError(f"{name}: probs are not probabilities; expected numbers in 0 ... 1 with sum 1 (not logits)")
    if (labels != y).any() or labels.min() < 0 or labels.max() >= p.shape[-1]:
        got = f"{y.min().item():g} ... {y.max().item():g}"
        raise ValueError(f"{name}: y holds {got}; expected whole labels in 0 ... {p.shape[-1] - 1}")
    return p.masked_fill(p.isnan().any(-1, keepdim=True), math.nan), labels  # one NaN spoils its datum in every score


def _hits(p: Tensor, y: Tensor) -> Tensor:
    """1[argmax_j p_ij = y_i]: [..., n, k], [n] -> [..., n]; NaN where p is NaN, which has an argmax too."""
    return (p.argmax(-1) == y).double().masked_fill(p[..., 0].isnan(), math.nan)


def _same(name: str, a_name: str, a: torch.Size, b_name: str, b: torch.Size) -> None:
    """Equal shapes, and not empty: [n] against [n, 1] would broadcast to [n, n] and give a wrong number silently."""
    if a != b or a.numel() == 0:
        got = f"{a_name} is {list(a)}, {b_name} is {list(b)}"
        raise ValueError(f"{name}: {got}; expected the same shape, not empty")
