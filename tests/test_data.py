"""The bundled digits."""

import numpy as np
import pytest
import torch

from partita.data import digits


def rows(x: torch.Tensor) -> set[tuple[int, ...]]:
    """Images as tuples of their ranks, 0..16: the normalisation is monotone, and no two of the 1,797 are equal."""
    levels = torch.cat([part[0] for part in digits()]).unique()
    return {tuple(row) for row in torch.bucketize(x, (levels[1:] + levels[:-1]) / 2).tolist()}


def test_these_are_sklearns_digits():
    sklearn = pytest.importorskip("sklearn.datasets").load_digits()
    (x, y), (x_test, y_test) = digits()
    assert x.shape == (1437, 64)
    assert x_test.shape == (360, 64)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert torch.equal(torch.cat([y, y_test]).bincount(), torch.from_numpy(np.bincount(sklearn.target)))
    assert rows(torch.cat([x, x_test])) == {tuple(row) for row in sklearn.data.astype(int).tolist()}


def test_parts_are_disjoint_and_stratified():
    (x, y), (x_test, y_test) = digits()
    assert not rows(x) & rows(x_test)
    assert len(rows(x)) + len(rows(x_test)) == 1797
    share = 360 / 1797 * torch.cat([y, y_test]).bincount()
    assert ((y_test.bincount() - share).abs() < 1).all()


def test_labels_stay_with_their_images():
    sklearn = pytest.importorskip("sklearn.datasets").load_digits()
    truth = dict(zip(map(tuple, sklearn.data.astype(int).tolist()), sklearn.target.tolist()))
    (x, y), _ = digits(test=1)
    scale = x.max() - x.min()
    pixels = ((x - x.min()) / scale * 16).round().int().tolist()
    assert [truth[tuple(row)] for row in pixels] == y.tolist()


def test_seed_decides_the_split_and_nothing_global_moves():
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    a, b, other = digits(seed=3), digits(seed=3), digits(seed=4)
    for one, two in zip((*a[0], *a[1]), (*b[0], *b[1])):
        assert torch.equal(one, two)
    assert rows(a[1][0]) != rows(other[1][0])
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


def test_normalised_by_the_training_part_only():
    (x, _), (x_test, _) = digits(test=900, seed=1)
    assert x.mean().abs() < 1e-5
    assert (x.std(correction=0) - 1).abs() < 1e-5
    assert x_test.mean().abs() > 1e-4
    assert torch.equal(x.unique(), x_test.unique())  # the same shift and scale for both


@pytest.mark.parametrize("test", [0, -1, 1797])
def test_impossible_sizes_are_refused(test):
    with pytest.raises(ValueError, match="between 1 and 1796"):
        digits(test=test)
