"""Streamed predictions against the Prediction of the same draws, whatever the blocks; and products of marginals."""

import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import partita as pt
from partita.answers import predictive
from partita.answers import stream as streaming
from partita.answers.predictive import Prediction, predict
from partita.answers.stream import Streamed, marginal_rows, stream

S, N = 23, 41


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def refused(match: str, f: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with pytest.raises(ValueError, match=match) as e:
        f(*args, **kwargs)
    assert "\n" not in str(e.value)
    assert "expected" in str(e.value)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).view(-1, 3, 4)


KINDS: dict[str, tuple[nn.Module, Any, Callable[[], Tensor]]] = {
    "classes": (nn.Linear(3, 5), pt.Categorical(), lambda: torch.randint(5, (N,))),
    "tokens": (Tokens(), pt.Categorical(ignore=-1), lambda: torch.randint(-1, 4, (N, 3))),
    "labels": (nn.Linear(3, 2), pt.Bernoulli(), lambda: torch.randint(2, (N, 2))),
    "numbers": (nn.Linear(3, 2), pt.Gaussian("learn"), lambda: 2 * torch.randn(N, 2)),
    "known noise": (nn.Linear(3, 1), pt.Gaussian(0.3), lambda: 2 * torch.randn(N, 1)),
}


def case(kind: str) -> tuple[pt.Posterior, Tensor, Tensor, Tensor, Prediction]:
    model, likelihood, y = KINDS[kind]
    posterior = pt.Posterior(model, likelihood)
    theta, x = torch.randn(S, posterior.space.dim), torch.randn(N, 3)
    return posterior, theta, x, y(), predict(posterior, theta, x)


def blocks(theta: Tensor, size: int) -> Callable[[], Iterator[Tensor]]:
    return lambda: iter(theta.split(size))


def check(found: Streamed, expected: Prediction, y: Tensor) -> None:
    close = lambda a, b: torch.testing.assert_close(a.float(), b, rtol=1e-5, atol=1e-6)
    assert found.draws == S
    close(found.mean, expected.mean)
    if "probs" in expected.draws:
        close(found.probs, expected.probs)
        close(found.entropy(), expected.entropy())
        close(found.mutual_information(), expected.mutual_information())
    else:
        close(found.sd, expected.sd)
    told = expected.scores(y)
    got = found.scores()
    assert set(told) - set(got) == ({"crps"} if "crps" in told else set())
    assert got == pytest.approx({k: told[k] for k in got}, rel=1e-6, abs=1e-6)
    later = found.scores(y)
    assert set(got) - set(later) == ({"individual_accuracy"} if "probs" in expected.draws else {"nll", "coverage95"})
    assert later == pytest.approx({k: told[k] for k in later}, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("sizes", [(1, 1, 5), (7, 3, 16), (23, 16, 1024), (10, 100, 41)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_says_what_a_prediction_says(kind: str, sizes: tuple[int, int, int]) -> None:
    posterior, theta, x, y, expected = case(kind)
    at, draws, rows = sizes
    check(stream(posterior, blocks(theta, at), x, y, draws_at_once=draws, rows_at_once=rows), expected, y)


@pytest.mark.parametrize("how", ["vmap", "loop"])
@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_inputs_of_every_sort(kind: str, how: str) -> None:
    """Read anew for each block of draws, or, where they cannot be, the draws anew for each batch."""
    posterior, theta, x, y, expected = case(kind)
    pairs = TensorDataset(x, y)
    reads = []

    def draws() -> Iterator[Tensor]:
        reads.append(1)
        return iter(theta.split(9))

    loaded = {
        "array": (x.numpy(), y.numpy(), 1),
        "loader of pairs": (DataLoader(pairs, batch_size=12), None, 1),
        "loader of inputs": (DataLoader(x.tolist(), batch_size=12, collate_fn=torch.tensor), y, 1),
        "iterator": (((a, b) for a, b in zip(x.split(12), y.split(12))), None, 4),
        "iterator of inputs": (iter(x.split(12)), y, 4),
    }
    for name, (inputs, targets, passes) in loaded.items():
        reads.clear()
        check(stream(posterior, draws, inputs, targets, how, rows_at_once=12), expected, y)
        assert len(reads) == passes, name
    check(stream(posterior, theta, x, y, how), expected, y)  # a tensor is one block


def test_a_shuffling_loader_keeps_inputs_and_targets_together() -> None:
    posterior, theta, x, y, expected = case("classes")
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    found = stream(posterior, blocks(theta, 5), loader)
    assert found.y is not None
    assert sorted(found.y.tolist()) == sorted(y.tolist())
    assert found.scores() == pytest.approx(expected.scores(y), rel=1e-5, abs=1e-6)


def test_trees_of_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(a + b)

    posterior = pt.Posterior(Two(), pt.Categorical())
    theta, x = torch.randn(S, 8), {"a": torch.randn(N, 3), "b": torch.randn(N, 3)}
    expected = predict(posterior, theta, x).probs
    torch.testing.assert_close(stream(posterior, blocks(theta, 4), x, rows_at_once=7).probs.float(), expected)
    batches = DataLoader(
        TensorDataset(x["a"], x["b"]), batch_size=9, collate_fn=lambda b: dict(zip("ab", map(torch.stack, zip(*b))))
    )
    torch.testing.assert_close(stream(posterior, blocks(theta, 4), batches).probs.float(), expected)


def test_batch_norm_statistics_travel_with_their_draws() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "BatchNorm couples")
        posterior = pt.Posterior(model, pt.Categorical())
    theta, x = torch.randn(S, posterior.space.dim), torch.randn(N, 3)
    each = [posterior.recalibrate(t, [x]) for t in theta]
    statistics = {k: torch.stack([e[k] for e in each]) for k in each[0]}
    pairs = lambda: ((theta[a : a + 6], {k: v[a : a + 6] for k, v in statistics.items()}) for a in range(0, S, 6))
    found = stream(posterior, pairs, x, draws_at_once=4, rows_at_once=10)
    torch.testing.assert_close(
        found.probs.float(), predict(posterior, theta, x, statistics).probs, rtol=1e-5, atol=1e-6
    )


def test_no_more_than_a_block_is_alive_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions of draws_at_once x rows_at_once, and one block of draws, which the next one replaces."""
    posterior, theta, x, y, _ = case("classes")
    alive: list[weakref.ref[Tensor]] = []
    sizes: list[int] = []

    def draws() -> Iterator[Tensor]:
        for a in range(0, S, 6):
            assert sum(r() is not None for r in alive) <= 1
            block = theta[a : a + 6].clone()
            alive.append(weakref.ref(block))
            yield block
            del block

    def recorded(*args: Any) -> dict[str, Tensor]:
        found = predictive.outputs(*args)
        sizes.append(found["probs"].numel())
        return found

    monkeypatch.setattr(streaming, "outputs", recorded)
    stream(posterior, draws, x, y, draws_at_once=3, rows_at_once=8)
    assert max(sizes) == 3 * 8 * 5
    assert len(sizes) == 4 * 2 * 6  # blocks of 6, 6, 6, 5 in two pieces each, by ceil(41 / 8) inputs
    assert sum(sizes) == S * N * 5


def test_the_spread_of_means_far_from_zero_is_kept() -> None:
    """μ = 1e4 ± 1e-2: squares of float32 numbers would leave nothing of the difference."""
    posterior = pt.Posterior(nn.Linear(1, 1), pt.Gaussian(1e-3))
    theta = torch.tensor([[0.0, 1e4]]) + torch.tensor([[0.0, 1e-2]]) * torch.randn(400, 1)
    found = stream(posterior, blocks(theta, 30), torch.zeros(3, 1))
    expected = (theta[:, 1].double().var(unbiased=False) + 1e-6).sqrt().item()
    assert found.sd.flatten().tolist() == pytest.approx([expected] * 3, rel=1e-6)


def test_uncertainty_of_streams_and_predictions_is_compared() -> None:
    posterior, theta, x, _, inside = case("classes")
    far = 5 + torch.randn(N, 3)
    expected = inside.ood(predict(posterior, theta, far))
    a, b = (stream(posterior, blocks(theta, 5), t) for t in (x, far))
    for found in (a.ood(b), inside.ood(b), a.ood(predict(posterior, theta, far))):
        assert found == pytest.approx(expected, abs=2e-3)  # near ties may fall the other way: 1 of 41² pairs


def test_what_a_stream_cannot_say_is_said() -> None:
    posterior, theta, x, y, _ = case("classes")
    found = stream(posterior, theta, x)
    refused("interval needs every draw .* and a stream keeps means", found.interval)
    refused("scores got no y, nor did the stream", found.scores)
    refused("no 'noise', expected one of what it holds: entropy, probs", lambda: found.sd)
    refused(r"y has shape \(40,\), expected \(41,\)", found.scores, y[:40])
    assert repr(found) == "Streamed(23 draws; entropy [41], probs [41, 5])"
    plain = pt.Posterior(nn.Linear(3, 1), lambda output, y: -((output - y) ** 2).sum(-1))
    refused("the draws predict output, expected 'probs', or 'mean' and 'sd'", stream, plain, torch.randn(4, 4), x)


def test_blocks_and_inputs_that_do_not_fit() -> None:
    posterior, theta, x, y, _ = case("classes")
    refused(r"a block of draws is \[23, 3\], expected a tensor \[s, 20\]", stream, posterior, theta[:, :3], x)
    refused(r"a block of draws is list, expected", stream, posterior, lambda: [([1.0], None)], x)
    once = iter(theta.split(5))
    refused(
        r"the inputs met \[0, 23\] draws, expected the same blocks", stream, posterior, lambda: once, iter(x.split(9))
    )
    refused(r"the inputs met no draws", stream, posterior, lambda: [], x)
    refused(r"y has 40 rows where x has 41", stream, posterior, theta, x, y[:40])
    refused(r"y has 41 rows where x has 40", stream, posterior, theta, DataLoader(x[:40], batch_size=7), y)
    refused(r"x is a float, expected tensors", stream, posterior, theta, 0.5)
    refused(r"forward pass failed.*got x \[2, 4\]", stream, posterior, theta, torch.zeros(9, 4))
    refused(r"x holds NaN or inf in 1 of 41 rows", stream, posterior, theta, x.index_fill(0, torch.tensor(3), math.nan))
    regression = pt.Posterior(nn.Linear(3, 1), pt.Gaussian(1.0))
    refused(r"y has shape \(41,\), expected \(41, 1\)", stream, regression, torch.randn(4, 4), x, torch.zeros(N))

    class Changing:
        n = 5

        def __iter__(self) -> Iterator[Tensor]:
            self.n += 1
            return iter([x[: self.n]])

    refused("a batch of x has 7 rows, which had 6 before", stream, posterior, blocks(theta, 12), Changing())


# -------------------------------------------------------------------------------------------------- product of marginals
def test_each_group_of_a_marginal_row_is_a_whole_draw_of_one_chain() -> None:
    C, draws, labels = 3, 50, torch.tensor([0, 1, 0, 2, 1, 2, 2])
    mark = torch.arange(C * draws).view(C, draws, 1) * 10.0 + torch.arange(7)  # tells chain, draw and coordinate
    rows = marginal_rows(mark, labels, 4000, torch.Generator().manual_seed(0))
    assert rows.shape == (4000, 7)
    assert torch.equal(rows % 10, torch.arange(7.0).expand(4000, 7))
    source = rows.div(10, rounding_mode="floor").long()
    for m in range(3):
        group = source[:, labels == m]
        assert (group == group[:, :1]).all()
    chain, draw = source // draws, source % draws
    assert (chain == chain[:, :1]).all()
    assert chain[:, 0].bincount().tolist() == pytest.approx([4000 / 3] * 3, rel=0.1)  # 3.6 sd
    first = [int((labels == m).nonzero()[0]) for m in range(3)]
    for a, b in ((0, 1), (0, 2), (1, 2)):  # 100 cells of 40: chi² of 99 degrees is 99 ± 14
        cells = (draw[:, first[a]] // 5 * 10 + draw[:, first[b]] // 5).bincount(minlength=100).double()
        assert ((cells - 40).square() / 40).sum().item() == pytest.approx(99, abs=56)


def test_marginals_keep_correlations_inside_groups_and_none_between() -> None:
    z = torch.randn(1, 5000, 1)
    theta = (z + 0.1 * torch.randn(1, 5000, 4)).expand(1, 5000, 4)
    rows = marginal_rows(theta, torch.tensor([0, 0, 1, 1]), 20000, torch.Generator().manual_seed(1))
    r = np.corrcoef(rows.numpy().T)
    assert min(r[0, 1], r[2, 3]) > 0.98
    assert np.abs(r[:2, 2:]).max() < 0.03  # 4 sd
    again = marginal_rows(theta, torch.tensor([0, 0, 1, 1]), 20000, torch.Generator().manual_seed(1))
    assert torch.equal(rows, again)


def test_marginals_that_do_not_fit() -> None:
    refused(r"theta is \[5, 4\], labels \[4\]", marginal_rows, torch.zeros(5, 4), torch.zeros(4).long(), 3)
    refused(r"labels \[3\]", marginal_rows, torch.zeros(1, 5, 4), torch.zeros(3).long(), 3)
    refused("n = 0", marginal_rows, torch.zeros(1, 5, 4), torch.zeros(4).long(), 0)
