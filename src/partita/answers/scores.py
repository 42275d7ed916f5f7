"""Scores of predictions: accuracy, likelihood, Brier score and calibration of classes; NLL, CRPS, RMSE and coverage of
numbers; how well a score tells other data apart.

Letters: S draws, n data, k classes. Class probabilities are [n, k], or [n] for two classes (the probability of class 1);
labels y are [n], whole numbers 0 ... k-1. Sums run in float64 and the answer is a Python float. Wrong shapes, labels or
probabilities are a ValueError; a NaN anywhere in the predictions makes the score NaN.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 2**22  # numbers of one temporary array of `crps`
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
REACH = 8.5  # standard deviations beyond which a normal distribution has nothing left in double precision


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
    confidence, hit, index = _binned("ece", probs, y, bins, mass)
    # n_b |accuracy_b - confidence_b| is the size of the summed gap, which needs no division by an empty bin's count
    gaps = confidence.new_zeros(bins + 1).index_add(0, index, hit - confidence)
    return (gaps.abs().sum() / len(hit)).item()


def reliability(probs: Tensor, y: Tensor, bins: int = 15, mass: str = "width") -> tuple[Tensor, Tensor, Tensor]:
    """The reliability curve: mean confidence, accuracy and count of each bin of `ece`, [B + 1] or ("equal") [B].

    sum_b count_b/n · |accuracy_b - confidence_b| is the ece. Of an empty bin confidence and accuracy are NaN; the last of
    the B + 1 holds confidences of exactly 1. probs: [n, k] or [n], y: [n].
    """
    confidence, hit, index = _binned("reliability", probs, y, bins, mass)
    sums = torch.stack((confidence, hit, torch.ones_like(hit)), 1)
    total = sums.new_zeros(bins + (mass == "width"), 3).index_add(0, index, sums)
    return total[:, 0] / total[:, 2], total[:, 1] / total[:, 2], total[:, 2].long()


def class_scores(probs: Tensor, y: Tensor) -> dict[str, float]:
    """accuracy, nll, brier, ece and ece_mass (bins of equal counts) of averaged probabilities. As `accuracy` takes them."""
    scores = {"accuracy": accuracy(probs, y), "nll": nll(probs, y), "brier": brier(probs, y)}
    return {**scores, "ece": ece(probs, y), "ece_mass": ece(probs, y, mass="equal")}


def auroc(inside: Tensor, outside: Tensor) -> float:
    """P(s_out > s_in) + ½ P(s_out = s_in), s_in and s_out a random element of each: the area under the ROC curve of a
    score that is to be larger outside. By ranks (Mann-Whitney), O((n + m) log n). inside: [n], outside: [m], or any shape.
    """
    a, b = inside.detach().flatten().double(), outside.detach().flatten().double()
    if not len(a) or not len(b):
        raise ValueError(f"auroc: inside is {list(inside.shape)}, outside is {list(outside.shape)}; expected not empty")
    if bool(a.isnan().any() | b.isnan().any()):
        return math.nan
    a = a.sort().values
    below = torch.searchsorted(a, b).double().mean() + torch.searchsorted(a, b, right=True).double().mean()
    return (below / 2 / len(a)).item()


def gaussian_mixture_nll(mean: Tensor, sd: Tensor, y: Tensor) -> float:
    """-mean_i log( 1/S sum_s N(y_i; mean_si, sd_si) ), by logsumexp. mean, sd: [S, n, ...], y: [n, ...].

    i runs over every element of y: outputs of one datum are scored each on its own, not by their joint density.
    """
    mean, sd, y = _mixture("gaussian_mixture_nll", mean, sd, y)
    return -(log_density(mean, sd, y).logsumexp(0) - math.log(len(mean))).mean().item()


def log_density(mean: Tensor, sd: Tensor, y: Tensor) -> Tensor:
    """log N(y; mean, sd), elementwise."""
    return -((y - mean) / sd).square() / 2 - sd.log() - math.log(2 * math.pi) / 2


def crps(mean: Tensor, sd: Tensor, y: Tensor) -> float:
    """mean_i E|X - y_i| - ½ E|X - X'|, X and X' independent from the mixture 1/S sum_s N(mean_si, sd_si) (Gneiting &
    Raftery 2007, eq. 21); in the unit of y, and |mean - y| for one draw of no width. mean, sd: [S, n, ...], y: [n, ...].

    With A(m, s) = E|N(m, s²)| = m (2 Phi(m/s) - 1) + 2 s phi(m/s), E|X - y| is the mean over s of A(y - mean_s, sd_s). The
    second term is F(1 - F) integrated, F the mixture's distribution function, whose smoothness makes the trapezoid rule
    exact to rounding at steps of sd/1.5 (error exp(-π² 1.5²)); or, where that takes more steps than there are draws, the
    mean over all pairs of A(mean_s - mean_r, √(sd_s² + sd_r²))/2. Memory is a few arrays of BLOCK numbers.
    """
    mean, sd, y = (t.flatten(-y.ndim) if y.ndim else t[..., None] for t in _mixture("crps", mean, sd, y))
    total, each = 0.0, max(1, BLOCK // len(mean))
    for a in range(0, len(y), each):
        m, s = mean[:, a : a + each], sd[:, a : a + each]
        total += (_absolute(y[a : a + each] - m, s).mean(0) - _half_difference(m, s)).sum().item()
    return total / len(y)


def _absolute(m: Tensor, s: Tensor) -> Tensor:
    """E|N(m, s²)|."""
    z = m / s
    return m * torch.erf(z / math.sqrt(2)) + 2 * s * torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)


def _half_difference(mean: Tensor, sd: Tensor) -> Tensor:
    """½ E|X - X'| of every mixture: [S, n] -> [n]."""
    S = len(mean)
    low, high = (mean - REACH * sd).amin(0), (mean + REACH * sd).amax(0)
    steps = ((high - low) / sd.amin(0) * 1.5).ceil().amax().item()
    area = torch.zeros_like(low)
    if not steps < S:  # nor where it is NaN
        for s in range(S):
            pairs = _absolute(mean[s:] - mean[s], (sd[s:].square() + sd[s].square()).sqrt())
            area += pairs.sum(0) - pairs[0] / 2  # each (s, r) stands for (r, s) too, (s, s) for itself
        return area / S**2
    h = (high - low) / steps
    for q in range(1, int(steps)):
        F = torch.special.ndtr((low + q * h - mean) / sd).mean(0)
        area += F * (1 - F)
    return h * area


def coverages(mean: Tensor, sd: Tensor, y: Tensor, levels: Sequence[float] = LEVELS) -> list[float]:
    """For each level the share of y inside the mixture's central interval of that mass, which needs no quantile:
    mean_i 1[|F_i(y_i) - ½| <= level/2]. mean, sd: [S, n, ...], y: [n, ...]."""
    mean, sd, y = _mixture("coverages", mean, sd, y)
    return central(torch.special.ndtr((y - mean) / sd).mean(0), levels)


def central(below: Tensor, levels: Sequence[float] = LEVELS) -> list[float]:
    """The share of F_i(y_i) = `below` within level/2 of ½, for each level."""
    if not levels or not all(0 < level < 1 for level in levels):
        raise ValueError(f"coverages: levels is {levels}; expected numbers in (0, 1)")
    off = (below.double() - 0.5).abs()
    return [(off <= m / 2).double().masked_fill(off.isnan(), math.nan).mean().item() for m in levels]


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


def _binned(name: str, probs: Tensor, y: Tensor, bins: int, mass: str) -> tuple[Tensor, Tensor, Tensor]:
    """Confidences, hits and bins of the n data, in the order of the bins if these are of equal mass."""
    if bins < 1 or mass not in ("width", "equal"):
        raise ValueError(f"{name}: bins is {bins}, mass is {mass!r}; expected bins >= 1 and mass 'width' or 'equal'")
    p, y = _classes(name, probs, y)
    confidence, hit = p.amax(-1), _hits(p, y)
    if mass == "width":
        edges = torch.linspace(0, 1, bins + 1, dtype=p.dtype, device=p.device)
        return confidence, hit, torch.bucketize(confidence, edges[1:], right=True)
    order = confidence.argsort(stable=True)
    return confidence[order], hit[order], torch.arange(len(p), device=p.device) * bins // len(p)


def _mixture(name: str, mean: Tensor, sd: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Checked mean, sd [S, n, ...] and y [n, ...], in float64."""
    _same(name, "mean[0]", mean.shape[1:], "y", y.shape)
    _same(name, "sd", sd.shape, "mean", mean.shape)
    if (sd <= 0).any():
        raise ValueError(f"{name}: the least sd is {sd.min().item():g}; expected sd > 0")
    return mean.double(), sd.double(), y.double()


def _hits(p: Tensor, y: Tensor) -> Tensor:
    """1[argmax_j p_ij = y_i]: [..., n, k], [n] -> [..., n]; NaN where p is NaN, which has an argmax too."""
    return (p.argmax(-1) == y).double().masked_fill(p[..., 0].isnan(), math.nan)


def _same(name: str, a_name: str, a: torch.Size, b_name: str, b: torch.Size) -> None:
    """Equal shapes, and not empty: [n] against [n, 1] would broadcast to [n, n] and give a wrong number silently."""
    if a != b or a.numel() == 0:
        got = f"{a_name} is {list(a)}, {b_name} is {list(b)}"
        raise ValueError(f"{name}: {got}; expected the same shape, not empty")
