"""Convergence diagnostics of Markov chains: R-hat, effective sample size, autocorrelation time, MCSE.

Every function takes draws ``x`` [C, S, ...] (C chains, S draws each, any trailing shape) and returns float64 of the
trailing shape. The letters below: V variables (the trailing shape, flattened), N = C·S draws of one variable.

Common rules, those of ArviZ unless said:

* A variable with a NaN or an infinity anywhere gets NaN (as Stan's posterior package; ArviZ ranks infinities).
* A variable that never moves (all N draws equal) gets R-hat NaN (0/0), ESS = the number of draws used, MCSE 0. "Equal"
  is exact, so that a variable on the scale 1e-20 is still a variable. Chains stuck at different values: R-hat infinite.
* An odd number of draws loses its middle draw wherever chains are split in halves.

Draws are float64 wherever they are added up. Normal scores and indicators, numbers of order 1 by construction, are
float32 in chains of more than 2·SHORT draws: that moves answers by some 1e-7, and takes a third off the time. The rest
of the speed comes from doing less: one sort serves ranks, folded ranks and quantiles; scores are looked up; and
autocovariances are computed up to a lag of n/10, and further only for those variables whose sum goes on beyond.

References: Vehtari, Gelman, Simpson, Carpenter, Bürkner (2021), "Rank-normalization, folding, and localization: an
improved R-hat", Bayesian Analysis 16(2); Geyer (1992), "Practical Markov chain Monte Carlo", Statistical Science 7(4);
Sokal (1997), "Monte Carlo methods in statistical mechanics: foundations and new algorithms".
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK_BYTES = 2**26  # working memory of one block of variables
COPIES = 16  # 8-byte arrays of the block's size alive at the worst moment: the ranks and the padded transform, measured
MIN_DRAWS = 4  # two draws in each half: the fewest with a variance
SHORT = 2**9  # draws up to which all lags are computed at once
RADIX = 2**15  # numbers beyond which torch sorts a row of whole numbers by their digits, on a CPU

TAILS = (0.05, 0.95)
WINDOW = 5.0  # Sokal's c; too small cuts off what is there, too large adds noise; he takes 4 to 10
ALL = ("rhat", "ess_bulk", "ess_tail", "mcse", "iac")

Rule = Callable[[Tensor], tuple[Tensor, Tensor]]  # rho [V, L] -> the sum [V], whether it ended within these L lags [V]


def diagnose(x: Tensor, what: Sequence[str] = ALL) -> dict[str, Tensor]:
    """All of `what` ("rhat", "ess_bulk", "ess_tail", "ess_mean", "mcse", "iac") in one pass, which sorts each variable
    once: {name: [...]}, each as the function of that name gives it. x: [C, S, ...]."""
    if not what or set(what) - set(_KNOWN):
        raise ValueError(f"diagnose: what is {what!r}; expected some of {', '.join(map(repr, _KNOWN))}")
    return _per_variable("diagnose", x, tuple(what))


def rhat(x: Tensor) -> Tensor:
    """Rank-normalised split R-hat: the larger of the bulk and the folded one (Vehtari et al. 2021, sec. 3-4).

    With y [2C, n = S//2] the half chains and z the normal scores of y (bulk) or of |y - median y| (folded),

        R = sqrt( ((n-1)/n · W + B/n) / W ),    W = mean_c var(z_c),    B = n · var_c(mean z_c).

    x: [C, S, ...] -> [...]. One chain is compared with itself: first half against second. Where the folded draws are
    constant (two values, equally often) the bulk R-hat stands alone.
    """
    return _per_variable("rhat", x, ("rhat",))["rhat"]


def ess(x: Tensor, kind: str = "bulk") -> Tensor:
    """Effective sample size N/tau over half chains (Vehtari et al. 2021, sec. 3-4).

    kind "bulk": of the normal scores of the draws, "mean": of the draws themselves, "tail": the smaller of those of the
    indicators 1[x <= q] with q the 5 % and the 95 % quantile. tau is Geyer's sum (`_geyer_sum`) of

        rho_t = 1 - (W - mean_c gamma_c(t)) / var+,    var+ = (n-1)/n · W + var_c(mean y_c),

    gamma_c(t) the lag-t autocovariance of half chain c (divisor n), W = n/(n-1) · mean_c gamma_c(0), and is kept above
    1/log10 N: a claim of more than N log10 N is noise. x: [C, S, ...] -> [...].
    """
    if kind not in ("bulk", "tail", "mean"):
        raise ValueError(f"ess: kind is {kind!r}; expected one of 'bulk', 'tail', 'mean'")
    return _per_variable("ess", x, (f"ess_{kind}",))[f"ess_{kind}"]


def iac(x: Tensor, method: str = "geyer", window: float = WINDOW) -> Tensor:
    """Integrated autocorrelation time 1 + 2 sum_{t>=1} rho_t, in draws.

    Chains are not split, and each is centred on its own mean; the autocorrelation is the pooled within-chain one,

        rho_t = sum_c gamma_c(t) / sum_c gamma_c(0),    gamma_c(t) = 1/S sum_s (x_cs - mean x_c)(x_c,s+t - mean x_c),

    summed, as the `method` says, by `_geyer_sum` (Geyer 1992, sec. 3.3: for reversible chains) or up to Sokal's
    self-consistent window (1997, sec. 3: chains need not be reversible, but antithetic ones end it too early), the least M
    with M >= window · tau(M), by default 5 times the answer; and kept above 1/log10 N. So it says how fast chains forget,
    N/iac is the ESS of chains that agree, and chains that disagree do not lengthen it: that is R-hat's to see (and `ess`
    counts it). AR(1) with coefficient a has (1+a)/(1-a). NaN (0/0) where no chain moves. x: [C, S, ...] -> [...].
    """
    if method not in ("geyer", "sokal") or not 0 < window < math.inf:
        raise ValueError(
            f"iac: method is {method!r}, window {window}; expected 'geyer' or 'sokal' and a window above 0"
        )
    if method == "geyer":
        return _per_variable("iac", x, ("iac",))["iac"]
    rule = functools.partial(_sokal_sum, window=window)
    return _per_variable("iac", x, ("iac",), rule)["iac"]


def mcse(x: Tensor) -> Tensor:
    """Monte Carlo standard error of the posterior mean: sd(x) / sqrt(ess(x, "mean")).

    sd is that of all N draws pooled (divisor N-1). x: [C, S, ...] -> [...].
    """
    return _per_variable("mcse", x, ("mcse",))["mcse"]


def _per_variable(name: str, x: Tensor, what: tuple[str, ...], rule: Rule | None = None) -> dict[str, Tensor]:
    """{what: [...]}, by blocks of variables [V', C, S] in float64, so that memory stays near BLOCK_BYTES."""
    if x.ndim < 2 or x.shape[0] < 1 or x.shape[1] < MIN_DRAWS:
        raise ValueError(f"{name}: x is {list(x.shape)}; expected [chains, draws >= {MIN_DRAWS}, ...]")
    chains, draws, *shape = x.shape
    columns = x.detach().reshape(chains, draws, math.prod(shape))
    kind = torch.float64 if x.dtype == torch.float64 or not x.is_floating_point() else torch.float32
    out = torch.empty(len(what), columns.shape[2], dtype=torch.float64, device=x.device)
    table = _score_table(2 * chains * (draws // 2), x.device, torch.float32 if draws > 2 * SHORT else torch.float64)
    width = max(1, BLOCK_BYTES // (8 * COPIES * chains * draws))
    _keep_pages(x.device)
    for start in range(0, out.shape[1], width):
        block = columns[:, :, start : start + width].permute(2, 0, 1).contiguous().to(kind)
        found, known = _measure(block, what, table, rule or _geyer_sum)
        out[:, start : start + width] = torch.stack([found[w] for w in what]).where(known, math.nan)
    return {w: o.reshape(shape) for w, o in zip(what, out)}


def _keep_pages(device: torch.device) -> None:
    """glibc hands a freed array back to the system, and a third of the time goes into getting its pages again, until it
    has seen one of just under 32 MiB freed: then it keeps what it has. Nothing is touched here, so it costs nothing."""
    if device.type == "cpu":
        torch.empty(2**25 - 2**14, dtype=torch.uint8)


def _measure(x: Tensor, what: tuple[str, ...], table: Tensor, rule: Rule) -> tuple[dict[str, Tensor], Tensor]:
    """{what: [V]} of one block [V, C, S], and which of its variables are finite, [V]."""
    found, asked = {}, set(what)
    if asked & {"rhat", "ess_bulk", "ess_tail"}:
        ordered, order = _sort(x.flatten(1))
        low, high = ordered[:, 0], ordered[:, -1]  # where the sort puts what is not finite
        if "ess_tail" in asked:
            found["ess_tail"] = _tail_ess(x, ordered, table.dtype)
        if asked & {"rhat", "ess_bulk"}:
            if x.shape[2] % 2:  # every variable loses as many: the middle draw of each chain
                keep = order % x.shape[2] != x.shape[2] // 2
                ordered, order = (t[keep].view(len(x), -1) for t in (ordered, order))
            z = _normal_scores(x, ordered, order, table)
            if "ess_bulk" in asked:
                found["ess_bulk"] = _ess(z)
            if "rhat" in asked:
                folded = _normal_scores(x, *_fold(ordered, order), table)
                found["rhat"] = torch.fmax(_variance_ratio(z), _variance_ratio(folded))
    else:
        low, high = x.flatten(1).aminmax(dim=-1)  # NaN if any is
    if asked & {"ess_mean", "mcse"}:
        found["ess_mean"] = _ess(_halves(x.double()))
        found["mcse"] = (_variance(x.double().flatten(1)) / found["ess_mean"]).sqrt()
    if "iac" in asked:
        found["iac"] = _tau(x.double(), rule)
    return found, low.isfinite() & high.isfinite()


def _centred(y: Tensor) -> tuple[Tensor, Tensor]:
    """y less its mean over the last dimension, and that mean less the first chain's first draw: [V, C, n], [V, C].

    Both go by way of y less its first draw: exactly zero where nothing moves, which y less its rounded mean need not be.
    """
    first = y[..., :1]
    y = y - first
    mean = y.mean(-1, keepdim=True)
    return y.sub_(mean), (mean + (first - first[..., :1, :]))[..., 0]


def _variance(y: Tensor) -> Tensor:
    """Over the last dimension, divisor n-1."""
    return _centred(y)[0].square_().sum(-1) / (y.shape[-1] - 1)


def _halves(x: Tensor) -> Tensor:
    """[V, C, S] -> [V, 2C, S//2]: first and last half of every chain."""
    half = x.shape[-1] // 2
    if x.shape[-1] % 2 == 0:
        return x.reshape(len(x), -1, half)
    return torch.cat((x[..., :half], x[..., -half:]), dim=1)


def _sort(pooled: Tensor) -> tuple[Tensor, Tensor]:
    """[V, N] in ascending order, and where each number stood; equal numbers in any order.

    On a CPU NumPy is twice as fast as torch; and long rows are faster still as whole numbers in the order of the floating
    ones (IEEE 754: the bits, and for negative numbers all but the sign inverted), which torch sorts digit by digit.
    """
    if pooled.device.type != "cpu":
        ordered, order = pooled.sort(-1)
        return ordered, order
    if pooled.shape[-1] <= RADIX:
        order = torch.from_numpy(pooled.numpy().argsort(-1))
        return pooled.gather(-1, order), order
    whole, top = (torch.int32, 31) if pooled.dtype == torch.float32 else (torch.int64, 63)
    turned = lambda bits: bits ^ ((bits >> top) & torch.iinfo(whole).max)  # twice is back again
    keys = turned((pooled + 0.0).view(whole))  # -0 + 0 is 0
    order = torch.empty_like(keys, dtype=torch.int64)
    for row, place in zip(keys, order):
        torch.sort(row, out=(row, place))
    return turned(keys).view(pooled.dtype), order


def _fold(ordered: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """|y - median y| in ascending order, and where each stood, from y in order: a falling and a rising run, merged."""
    half = ordered.shape[-1] // 2  # the number of draws is even, so the median is the mean of the two in the middle
    ordered = ordered.double()
    away = (ordered - (ordered[:, half - 1 : half] + ordered[:, half : half + 1]) / 2).abs_()
    if away.device.type == "cpu":  # NumPy's stable sort finds runs and merges them: six times as fast as sorting
        merged = torch.from_numpy(away.numpy().argsort(-1, kind="stable"))
    else:
        merged = away.argsort(-1)
    return away.gather(-1, merged), order.gather(-1, merged)


def _score_table(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Phi^-1((r - 3/8) / (N + 1/4)) for r = 1, 1.5, 2, ... N: all the scores there are, [2N - 1]."""
    rank = torch.arange(2, 2 * count + 1, dtype=torch.float64, device=device) / 2
    return torch.special.ndtri((rank - 0.375) / (count + 0.25)).to(dtype)


def _normal_scores(x: Tensor, ordered: Tensor, order: Tensor, table: Tensor) -> Tensor:
    """Phi^-1((r - 3/8) / (N + 1/4)), r the rank among all N draws of a variable, ties at their average: [V, 2C, n]."""
    count = ordered.shape[-1]
    score = table[::2].contiguous().expand(len(ordered), -1).clone(memory_format=torch.contiguous_format)
    tied = ordered[:, 1:] == ordered[:, :-1]
    second = pad(tied, (1, 0)).view(-1).nonzero()[:, 0]  # flat places of the numbers that equal the one before
    begins = pad(second.diff() != 1, (1, 0), value=True)[: len(second)]  # a run of equals: consecutive ones of these
    run = begins.cumsum(0) - 1
    first = second[begins] - 1
    last = second[pad(begins[1:], (0, 1), value=True)[: len(second)]]
    shared = table.index_select(0, first % count + last % count)
    score.view(-1)[first] = shared
    score.view(-1)[second] = shared[run]
    return _halves(score.new_empty(len(x), x[0].numel()).scatter_(-1, order, score).view_as(x))


def _variance_ratio(z: Tensor) -> Tensor:
    """R-hat of chains z [V, C, n] as they are: -> [V]."""
    n = z.shape[-1]
    centred, mean = _centred(z)
    within, between = centred.square_().sum(-1).double().mean(-1) / (n - 1), n * mean.double().var(-1)
    return ((between / within + n - 1) / n).sqrt()


def _autocovariance(y: Tensor, lags: int | None = None) -> tuple[Tensor, Tensor]:
    """mean_c gamma_c(t), t = 0 ... lags-1 (default: n), and the means of the chains: [V, C, n] -> [V, lags], [V, C].

    The mean is taken of the power spectra, so that one inverse transform serves all chains; padding with as many zeros
    as there are lags keeps the circular correlation from wrapping round into them.
    """
    n = y.shape[-1]
    lags = lags or n
    size = _fast_length(n + lags)
    centred, mean = _centred(y)
    spectrum = torch.fft.rfft(centred, n=size)
    power = (spectrum.real.square() + spectrum.imag.square()).mean(1)
    return torch.fft.irfft(power, n=size)[:, :lags].double() / n, mean.double()


def _fast_length(n: int) -> int:
    """The least even 2^a·3^b·5^c that is >= n: lengths every FFT library is fast at (a power of two can be slow)."""
    odd = [3**b * 5**c for b in range(n.bit_length()) for c in range(n.bit_length()) if 3**b * 5**c <= n]
    return min(o << max(1, (-(-n // o) - 1).bit_length()) for o in odd)


def _tau(y: Tensor, rule: Rule, across: bool = False) -> Tensor:
    """The sum by `rule` of the autocorrelations of [V, C, n], kept above 1/log10 N: -> [V].

    across: those of `ess`, which count how far chains are apart; and NaN where all draws are equal. Lags up to n/10 take
    half the time of all of them, and are enough where the rule ends the sum before: the answer is the same.
    """
    n = y.shape[2]

    def summed(gamma: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        if not across:
            return rule(gamma / gamma[:, :1])
        within, total = gamma[:, :1] * n / (n - 1), gamma[:, :1] + means.var(-1, keepdim=True)
        rho = 1 - (within - gamma) / total
        rho[:, :1] = total / total
        return rule(rho)

    tau, ended = summed(*(_autocovariance(y) if n <= SHORT else _autocovariance(y, n // 10)))
    if n > SHORT and not bool(ended.all()):
        more = (~ended).nonzero()[:, 0]
        tau[more] = summed(*_autocovariance(y[more]))[0]
    return tau.clamp(min=1 / math.log10(y.shape[1] * n))


def _geyer_sum(rho: Tensor) -> tuple[Tensor, Tensor]:
    """1 + 2 sum_t rho_t, truncated by Geyer's initial monotone positive sequence: [V, n], rho_0 = 1 -> [V], ended [V].

    The pairs P_k = rho_2k + rho_2k+1 of a reversible chain are positive and decrease. With K the first pair that is
    not positive, or (n-3)//2 if that comes first, the sum is

        -1 + 2 sum_{k<K} min(P_0 ... P_k) + rho_2K,

    where rho_2K, half of the pair cut off, counts only if it is positive or its pair is not negative (as in Stan, for a
    less noisy sum in antithetic chains).
    """
    last = max(0, (rho.shape[-1] - 3) // 2)
    pairs = rho[:, : 2 * last + 2].unflatten(-1, (last + 1, 2))
    sums = pairs.sum(-1)
    least = sums.cummin(-1).values
    cut = (least > 0).sum(-1, keepdim=True).clamp(max=last)  # K: `least` stays positive exactly as long as `sums` does
    before = torch.arange(last + 1, device=rho.device) < cut
    even = pairs[..., 0].gather(-1, cut)
    even = even.where(sums.gather(-1, cut) >= 0, even.clamp(min=0))
    return -1 + 2 * (least * before).sum(-1) + even[:, 0], cut[:, 0] < last


def _sokal_sum(rho: Tensor, window: float = WINDOW) -> tuple[Tensor, Tensor]:
    """tau(M) = 1 + 2 sum_{t=1}^M rho_t at the least M >= window · tau(M): [V, n], rho_0 = 1 -> [V], ended [V].

    With all n lags there always is one: over all of them tau is 0, as rho is made of centred draws.
    """
    tau = 2 * rho.cumsum(-1) - 1
    wide = torch.arange(rho.shape[-1], device=rho.device) >= window * tau
    M = wide.to(torch.uint8).argmax(-1, keepdim=True)  # the first
    ended = wide.gather(-1, M)
    M = torch.where(ended, M, rho.shape[-1] - 1)
    return tau.gather(-1, M)[:, 0], ended[:, 0] | rho[:, 0].isnan()


def _ess(y: Tensor) -> Tensor:
    """ESS of chains y [V, C >= 2, n] as they are: -> [V]; all draws where none differs."""
    count = y.shape[1] * y.shape[2]
    return (count / _tau(y, _geyer_sum, across=True)).nan_to_num(nan=count)


def _tail_ess(x: Tensor, ordered: Tensor, dtype: torch.dtype) -> Tensor:
    """min over the two tails: [V, C, S], its draws in order [V, N] -> [V].

    x <= q_p holds just where x <= the order statistic 1 + floor((N-1) p), the draw at or next below the interpolated
    quantile q_p; so none is interpolated.
    """
    marks = [ordered[:, math.floor((ordered.shape[-1] - 1) * p)] for p in TAILS]
    below = lambda mark: torch.le(x, mark[:, None, None], out=torch.empty_like(x, dtype=dtype))  # 10 times <= and to()
    low, high = (_ess(_halves(below(mark))) for mark in marks)
    return torch.minimum(low, high)


_KNOWN = (*ALL, "ess_mean")
