"""The paper's IAC and ESS by hand, by loops, and on chains whose answers are known."""

import math

import numpy as np
import pytest
import torch
from scipy.signal import lfilter
from torch import Tensor

from partita.answers import paper
from partita.answers.paper import paper_ess, paper_iac


def ar1(a: float, chains: int, draws: int, seed: int = 0) -> Tensor:
    noise = np.random.default_rng(seed).standard_normal((chains, draws))
    noise[:, 0] /= math.sqrt(1 - a * a)
    return torch.from_numpy(lfilter([1.0], [1.0, -a], noise, axis=1))


def by_loops(x: Tensor) -> tuple[float, float]:
    """The docstrings of both as loops over one chain [N]."""
    y = (x.double() - x.double().mean()).tolist()
    N = len(y)
    c = [sum(y[n] * y[n + k] for n in range(N - k)) / (N - k) for k in range(N)]
    R = [v / c[0] for v in c]
    total = 1.0
    for k in range(1, N):
        if R[k] < 0:
            break
        total += 2 * (1 - k / N) * R[k]
    return R[0] + 2 * sum(R[1:]), N / total


def test_four_draws_by_hand() -> None:
    """0, 0, 1, 1: centred -½, -½, ½, ½; c(0) = ¼, c(1) = (¼ - ¼ + ¼)/3, c(2) = -½/2, c(3) = -¼."""
    x = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    assert paper_iac(x).tolist() == pytest.approx([1 + 2 * (1 / 3 - 1 - 1)])
    assert paper_ess(x).tolist() == pytest.approx([4 / (1 + 2 * 3 / 4 * 1 / 3)])  # lags 2 and 3 are dropped


def test_alternating_draws_by_hand() -> None:
    x = torch.tensor([[1.0, -1.0] * 3])  # R_k = (-1)^k: the first lag is negative, the sum -1 + 1 - 1 + 1 - 1
    assert paper_iac(x).tolist() == pytest.approx([-1.0])
    assert paper_ess(x).tolist() == pytest.approx([6.0])


@pytest.mark.parametrize("draws", [4, 5, 37, 200])
def test_every_chain_of_every_variable_by_loops(draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.stack([ar1(a, 3, draws, seed) for seed, a in enumerate((-0.5, 0.0, 0.8, 0.99))], dim=-1).reshape(
        3, draws, 2, 2
    )
    for block in (2**26, 1):
        monkeypatch.setattr(paper, "BLOCK_BYTES", block)
        iac, ess = paper_iac(x), paper_ess(x)
        assert iac.shape == ess.shape == (3, 2, 2)
        for at in np.ndindex(3, 2, 2):
            expected = by_loops(x[at[0], :, at[1], at[2]])
            assert (iac[at].item(), ess[at].item()) == pytest.approx(expected, rel=1e-8, abs=1e-8)


def test_the_ess_of_ar1_is_near_and_its_iac_is_noise() -> None:
    """ESS of 100 chains of 5,000 at a = 0.9: N (1-a)/(1+a) = 263; cut at the first negative lag it is some 15 % high or
    low in one chain. The IAC of the same chains, 19, comes out as -20 ± 81, negative more often than not."""
    x = ar1(0.9, 100, 5000)
    assert paper_ess(x).mean().item() == pytest.approx(263, rel=0.15)
    iac = paper_iac(x)
    assert iac.std() > 60
    assert (iac < 0).double().mean() > 0.4


def test_the_biased_sum_is_zero_whatever_the_draws() -> None:
    """Why the sum over all lags is unusable: sum_k (1 - |k|/N) c(k) = (sum of centred draws)² / N."""
    y = ar1(0.9, 1, 300)[0]
    y = y - y.mean()
    c = torch.tensor([(y[: 300 - k] @ y[k:]).item() / 300 for k in range(300)], dtype=torch.float64)
    assert (c[0] + 2 * c[1:].sum()).item() == pytest.approx(0, abs=1e-10)


def test_a_random_walk_has_an_ess_of_about_five_at_any_length() -> None:
    walk = ar1(0.0, 200, 5000).cumsum(1)
    for n in (500, 5000):
        assert 4 < paper_ess(walk[:, :n]).median().item() < 7


def test_what_does_not_move_and_what_does_not_fit() -> None:
    assert paper_iac(torch.ones(2, 10)).isnan().all()
    assert paper_ess(torch.ones(2, 10)).isnan().all()
    for f in (paper_iac, paper_ess):
        with pytest.raises(ValueError, match=r"paper_\w+: x is \[10\]; expected \[chains, draws >= 4, \.\.\.\]"):
            f(torch.zeros(10))
