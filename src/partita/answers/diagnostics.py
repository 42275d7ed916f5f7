"""Convergence diagnostics of Markov chains: R-hat, effective sample size, autocorrelation time, MCSE.

Every function takes draws ``x`` [C, S, ...] (C chains, S draws each, any trailing shape) and returns float64 of the
trailing shape. The letters below: V variables (the trailing shape, flattened), N = C·S draws of one variable.

Common rules, those of ArviZ unless said:

* A variable with a NaN or an infinity anywhere gets NaN (as Stan's posterior package; ArviZ ranks infinities).
* A variable that never moves (all N draws equal) gets R-hat NaN (0/0), ESS = the number of draws used, MCSE 0. "Equal"
  is exact, so that a variable on the scale 1e-20 is still a variable. Chains stuck at different values: R-hat infinite.
* An odd number of draws loses its middle draw wherever chains are split in halves.

References: Vehtari, Gelman, Simpson, Carpenter, Bürkner (2021), "Rank-normalization, folding, and localization: an
improved R-hat", Bayesian Analysis 16(2); Geyer (1992), "Practical Markov chain Monte Carlo", Statistical Science 7(4).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK_BYTES = 2**27  # working memory of one block of variables
COPIES = 16  # 8-byte arrays of the block's size alive at the worst moment: the ranks and the padded transform, measured
MIN_DRAWS = 4  # two draws in each half: the fewest with a variance

TAILS = (0.05, 0.95)


def rhat(x: Tensor) -> Tensor:
    """Rank-normalised split R-hat: the larger of the bulk and the folded one (Vehtari et al. 2021, sec. 3-4).

    With y [2C, n = S//2] the half chains and z the normal scores of y (bulk) or of |y - median y| (folded),

        R = sqrt( ((n-1)/n · W + B/n) / W ),    W = mean_c var(z_c),    B = n · var_c(mean z_c).

    x: [C, S, ...] -> [...]. One chain is compared with itself: first half against second. Where the folded draws are
    constant (two values, equally often) the bulk R-hat stands alone.
    """

    def of(block: Tensor) -> Tensor:
        y = _halves(block)
        folded = (y - _median(y)[:, None, None]).abs()
        return torch.fmax(_variance_ratio(_normal_scores(y)), _variance_ratio(_normal_scores(folded)))

    return _per_variable("rhat", x, of)


def ess(x: Tensor, kind: str = "bulk") -> Tensor:
    """Effective sample size N/tau over half chains (Vehtari et al. 2021, sec. 3-4).

    kind "bulk": of the normal scores of the draws, "mean": of the draws themselves, "tail": the smaller of those of the
    indicators 1[x <= q] with q the 5 % and the 95 % quantile. tau is Geyer's sum (`_geyer_sum`) of

        rho_t = 1 - (W - mean_c gamma_c(t)) / var+,    var+ = (n-1)/n · W + var_c(mean y_c),

    gamma_c(t) the lag-t autocovariance of half chain c (divisor n), W = n/(n-1) · mean_c gamma_c(0), and is kept above
    1/log10 N: a claim of more than N log10 N is noise. x: [C, S, ...] -> [...].
    """
    if kind not in _ESS_KINDS:
        raise ValueError(f"ess: kind is {kind!r}; expected one of {', '.join(map(repr, _ESS_KINDS))}")
    return _per_variable("ess", x, _ESS_KINDS[kind])


def iac(x: Tensor) -> Tensor:
    """Integrated autocorrelation time 1 + 2 sum_{t>=1} rho_t, in draws (Geyer 1992, sec. 3.3).

    Chains are not split, and each is centred on its own mean; the autocorrelation is the pooled within-chain one,

        rho_t = sum_c gamma_c(t) / sum_c gamma_c(0),    gamma_c(t) = 1/S sum_s (x_cs - mean x_c)(x_c,s+t - mean x_c),

    summed by `_geyer_sum` and kept above 1/log10 N. So it says how fast chains forget, N/iac is the ESS of chains that
    agree, and chains that disagree do not lengthen it: that is R-hat's to see (and `ess` counts it). AR(1) with
    coefficient a has (1+a)/(1-a). NaN (0/0) where no chain moves. x: [C, S, ...] -> [...].
    """

    def of(block: Tensor) -> Tensor:
        gamma = _autocovariance(block)
        return _geyer_sum(gamma / gamma[:, :1]).clamp(min=_least_tau(block))

    return _per_variable("iac", x, of)


def mcse(x: Tensor) -> Tensor:
    """Monte Carlo standard error of the posterior mean: sd(x) / sqrt(ess(x, "mean")).

    sd is that of all N draws pooled (divisor N-1). x: [C, S, ...] -> [...].
    """
    return _per_variable("mcse", x, lambda block: (_variance(block.flatten(1)) / _ess(_halves(block))).sqrt())


def _per_variable(name: str, x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `of`: [V', C, S] float64 -> [V'] to blocks of variables, so that memory stays near BLOCK_BYTES."""
    if x.ndim < 2 or x.shape[0] < 1 or x.shape[1] < MIN_DRAWS:
        raise ValueError(f"{name}: x is {list(x.shape)}; expected [chains, draws >= {MIN_DRAWS}, ...]")
    chains, draws, *shape = x.shape
    columns = x.detach().reshape(chains, draws, math.prod(shape))
    out = torch.empty(columns.shape[2], dtype=torch.float64, device=x.device)
    width = max(1, BLOCK_BYTES // (8 * COPIES * chains * draws))
    for start in range(0, len(out), width):
        block = columns[:, :, start : start + width].permute(2, 0, 1).to(torch.float64).contiguous()
        out[start : start + width] = of(block).where(block.isfinite().all(-1).all(-1), math.nan)
    return out.reshape(shape)


def _from_first(y: Tensor) -> Tensor:
    """y less its first draw: exactly zero where nothing moves, which y less its rounded mean need not be."""
    return y - y[..., :1]


def _variance(y: Tensor) -> Tensor:
    """Over the last dimension, divisor n-1."""
    return _from_first(y).var(-1)


def _halves(x: Tensor) -> Tensor:
    """[V, C, S] -> [V, 2C, S//2]: first and last half of every chain."""
    half = x.shape[-1] // 2
    return torch.cat((x[..., :half], x[..., -half:]), dim=1)


def _median(y: Tensor) -> Tensor:
    """[V, C, n] -> [V], the mean of the two middle draws when their number is even (torch.median takes the lower)."""
    pooled = y.flatten(1)
    n = pooled.shape[-1]
    return (pooled.kthvalue((n + 1) // 2).values + pooled.kthvalue(n // 2 + 1).values) / 2


def _normal_scores(y: Tensor) -> Tensor:
    """Phi^-1((r - 3/8) / (N + 1/4)), r the rank among all N draws of a variable, ties at their average: [V, C, n]."""
    pooled = y.flatten(1)
    count = pooled.shape[-1]
    ordered, order = pooled.sort(-1)
    tied = ordered[:, 1:] == ordered[:, :-1]
    place = torch.arange(1, count + 1, dtype=y.dtype, device=y.device).expand_as(ordered)
    first = place.masked_fill(pad(tied, (1, 0)), 0).cummax(-1).values  # first and last place of every run of equals
    last = place.masked_fill(pad(tied, (0, 1)), count).flip(-1).cummin(-1).values.flip(-1)
    rank = torch.empty_like(pooled).scatter_(-1, order, (first + last) / 2)
    return torch.special.ndtri((rank - 0.375) / (count + 0.25)).view_as(y)


def _variance_ratio(z: Tensor) -> Tensor:
    """R-hat of chains z [V, C, n] as they are: -> [V]."""
    n = z.shape[-1]
    within, between = _variance(z).mean(-1), n * z.mean(-1).var(-1)
    return ((between / within + n - 1) / n).sqrt()


def _autocovariance(y: Tensor) -> Tensor:
    """mean_c gamma_c(t), t = 0 ... n-1: [V, C, n] -> [V, n].

    The mean is taken of the power spectra, so that one inverse transform serves all chains; padding to twice the length
    keeps the circular correlation from wrapping round.
    """
    n = y.shape[-1]
    y = _from_first(y)
    y = y - y.mean(-1, keepdim=True)
    size = _fast_length(2 * n)
    power = torch.view_as_real(torch.fft.rfft(y, n=size)).square().sum(-1).mean(1)
    return torch.fft.irfft(power, n=size)[:, :n] / n


def _fast_length(n: int) -> int:
    """The least of 2^k, 3·2^k, 5·2^k that is >= n: lengths every FFT library is fast at."""
    return min(odd << (-(-n // odd) - 1).bit_length() for odd in (1, 3, 5))


def _geyer_sum(rho: Tensor) -> Tensor:
    """1 + 2 sum_t rho_t, truncated by Geyer's initial monotone positive sequence: [V, n], rho_0 = 1 -> [V].

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
    return -1 + 2 * (least * before).sum(-1) + even[:, 0]


def _least_tau(y: Tensor) -> float:
    return 1 / math.log10(y.shape[1] * y.shape[2])


def _ess(y: Tensor) -> Tensor:
    """ESS of chains y [V, C >= 2, n] as they are: -> [V]."""
    count, n = y.shape[1] * y.shape[2], y.shape[2]
    gamma = _autocovariance(y)
    within = gamma[:, :1] * n / (n - 1)
    total = gamma[:, :1] + y.mean(-1).var(-1, keepdim=True)
    rho = 1 - (within - gamma) / total
    rho[:, 0] = 1
    tau = _geyer_sum(rho).clamp(min=_least_tau(y))
    return (count / tau).where(y.amax((1, 2)) > y.amin((1, 2)), count)


def _tail_ess(x: Tensor) -> Tensor:
    """min over the two tails: [V, C, S] -> [V].

    x <= q_p holds just where x <= the order statistic 1 + floor((N-1) p), the draw at or next below the interpolated
    quantile q_p; so none is interpolated.
    """
    pooled = x.flatten(1)
    marks = [pooled.kthvalue(1 + math.floor((pooled.shape[-1] - 1) * p)).values for p in TAILS]
    low, high = (_ess(_halves((x <= mark[:, None, None]).to(x.dtype))) for mark in marks)
    return torch.minimum(low, high)


_ESS_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "bulk": lambda x: _ess(_normal_scores(_halves(x))),
    "tail": _tail_ess,
    "mean": lambda x: _ess(_halves(x)),
}
