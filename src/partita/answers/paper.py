"""The paper's own IAC and ESS, as it defines them, to compare with its tables; for judging a run use `diagnostics`.

x: [C, S, ...] (C chains, S draws each, letters N = S below); every chain is measured by itself, over all of its draws:
-> [C, ...], float64. A chain that does not move gets NaN (0/0).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from partita.answers.diagnostics import BLOCK_BYTES, MIN_DRAWS, _autocovariance


def paper_iac(x: Tensor) -> Tensor:
    """tau = sum_{k=-(N-1)}^{N-1} c(k)/c(0),   c(k) = 1/(N-k) sum_{n=1}^{N-k} (x_n - mean)(x_n+k - mean),  c(-k) = c(k):

    the sum the paper's appendix writes, by FFT, over all lags. It is unusable, and here to show that. With divisor N in
    place of N-k the sum is 0 whatever the draws, since it is (sum_n (x_n - mean))² / (N c(0)): all sample autocorrelations
    add up to a constant, and what the first lags give the later ones take away. The divisor N-k undoes that balance by
    weighting most what is known least (lag N-1 is one product), so the outcome is noise that no number of draws reduces:
    AR(0.9), whose IAC is 19, gives -20 ± 51 (mean and sd over 100 chains) at N = 500 and -20 ± 81 at N = 5,000. The
    positive values in the paper's tables must come from a cut it does not state; `diagnostics.iac(x, "sokal")` is that of
    the reference it gives.
    """

    def of(gamma: Tensor) -> Tensor:
        N = gamma.shape[-1]
        rho = gamma / gamma[:, :1] * N / torch.arange(N, 0, -1, dtype=gamma.dtype, device=gamma.device)
        return 2 * rho.sum(-1) - 1

    return _per_chain("paper_iac", x, of)


def paper_ess(x: Tensor) -> Tensor:
    """N / (1 + 2 sum_{k=1}^{K-1} (1 - k/N) R_k),   R_k = c(k)/c(0) with the divisor N-k of `paper_iac`:

    TensorFlow Probability's `effective_sample_size` with its defaults, which the paper says it used (its printed formula,
    n/(1 + (n-1) p), is another one, of equally correlated draws). The defaults: filter_threshold=0, so K is the first lag
    with R_k < 0 and that lag and all later ones are dropped; filter_beyond_lag=None, so nothing else ends the sum;
    filter_beyond_positive_pairs=False, so lags count one by one and not in Geyer's pairs; cross_chain_dims=None, so each
    chain stands alone. Chains that never moved far look like a random walk, whose ESS is about 5 at any N.
    """

    def of(gamma: Tensor) -> Tensor:
        N = gamma.shape[-1]
        kept = (gamma >= 0).to(gamma.dtype).cumprod(-1)
        return N / (2 * (kept * gamma / gamma[:, :1]).sum(-1) - 1)  # (1 - k/N) / (N-k) = 1/N, the divisor of gamma

    return _per_chain("paper_ess", x, of)


def _per_chain(name: str, x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    """`of` the autocovariances (divisor N) of every chain of every variable, [V', N] -> [V'], in blocks."""
    if x.ndim < 2 or x.shape[0] < 1 or x.shape[1] < MIN_DRAWS:
        raise ValueError(f"{name}: x is {list(x.shape)}; expected [chains, draws >= {MIN_DRAWS}, ...]")
    chains, draws, *shape = x.shape
    columns = x.detach().movedim(1, -1).reshape(chains * math.prod(shape), draws)
    out = torch.empty(len(columns), dtype=torch.float64, device=x.device)
    width = max(1, BLOCK_BYTES // (8 * 8 * draws))
    for a in range(0, len(out), width):
        out[a : a + width] = of(_autocovariance(columns[a : a + width, None].double())[0])
    return out.reshape(chains, *shape)
