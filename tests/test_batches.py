"""Minibatches: every kind of data gives the same rows, chains draw their own, and what does not fit is refused."""

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from partita.engine.batches import Resident
from partita.runs import inputs as module
from partita.runs.inputs import NoData, make_batches
from partita.runs.loader import Loader

CPU = torch.device("cpu")
N = 40
X = torch.arange(N * 3.0).reshape(N, 3)
Y = torch.arange(N)


class Rows(Dataset):
    """A map-style data set whose row i is (X[i], i)."""

    def __init__(self, n=N):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i >= self.n:
            raise IndexError(i)
        return X[i], i


class Other(Rows):
    """One whose rows are something else."""

    def __init__(self, row):
        super().__init__()
        self.row = row

    def __getitem__(self, i):
        return self.row


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y))


def matched(x, y):
    """Rows of x belong to their y."""
    return torch.equal(x, X[y.long()])


KINDS = {
    "tensors": (X, Y),
    "arrays": (X.numpy(), Y.numpy()),
    "list": [X, Y],
    "TensorDataset": TensorDataset(X, Y),
    "Dataset": Rows(),
}


@pytest.mark.parametrize("data", KINDS.values(), ids=KINDS)
def test_all_kinds_of_data_hold_the_same_rows(data):
    batches = make_batches(data, 8, CPU)
    assert isinstance(batches, Resident)
    assert (batches.N, batches.B) == (N, 8)
    assert torch.equal(batches.x, X)
    assert torch.equal(batches.y, Y)
    assert torch.equal(batches.targets(), Y)
    x, y = batches.draw(5)
    assert x.shape == (5, 8, 3)
    assert y.shape == (5, 8)
    assert matched(x, y)
    x, y = batches.head(7)  # spread over the data, which may be sorted
    spread = torch.linspace(0, N - 1, 7).long()
    assert torch.equal(x, X[spread])
    assert torch.equal(y, Y[spread])


@pytest.mark.parametrize("rows", [N, 8])
def test_a_batch_that_masks_split_is_in_an_order_of_each_chains_own(rows):
    batches = make_batches((X, Y), rows, CPU)
    batches.shuffles = True
    x, y = batches.draw(3)
    assert matched(x, y)
    if rows == N:
        assert all(torch.equal(c.sort().values, Y.sort().values) for c in y)
        assert not torch.equal(y[0], y[1])
        assert not torch.equal(y[0], batches.draw(3)[1][0])


def test_batch_samplers_say_what_they_sample():
    data = TensorDataset(X, Y)
    ten = SubsetRandomSampler(range(10))
    assert make_batches(DataLoader(data, sampler=BatchSampler(ten, 5, False), batch_size=None), None, CPU).N == 10
    assert make_batches(DataLoader(data, batch_sampler=BatchSampler(ten, 5, False)), None, CPU).N == 10
    weighted = BatchSampler(WeightedRandomSampler(torch.ones(N), N), 5, False)
    with pytest.raises(ValueError, match="draws rows with weights"):
        make_batches(DataLoader(data, sampler=weighted, batch_size=None), None, CPU)
    with pytest.warns(UserWarning, match="does not say what it samples: N is taken as all 40 rows"):
        make_batches(DataLoader(data, batch_sampler=[[0, 1], [2, 3]]), None, CPU)


def test_nested_inputs_keep_their_nesting_and_their_rows_together():
    for x in ((X, {"a": X + 1, "b": [X.numpy() + 2]}), {"ids": X, "mask": X > 3}):
        got, y = make_batches((x, Y), 6, CPU).draw(3)
        for g, w in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(x), strict=True):
            assert torch.equal(g, torch.as_tensor(w)[y])
        assert isinstance(got, type(x))


def test_default_batch_size_is_128_or_all():
    assert make_batches((X, Y), None, CPU).B == N
    assert make_batches((X.repeat(10, 1), Y.repeat(10)), None, CPU).B == 128


def test_full_batch_is_the_data_itself_without_copy_or_noise():
    before = torch.get_rng_state()
    batches = make_batches((X, Y), N, CPU)
    x, y = batches.draw(1000)
    assert torch.equal(before, torch.get_rng_state())
    assert x.shape == (1000, N, 3)
    assert x.data_ptr() == X.data_ptr()
    assert x.stride(0) == 0
    assert torch.equal(x[17], X)
    assert torch.equal(y[999], Y)


def test_minibatches_are_drawn_with_replacement_uniformly_and_apart_for_each_chain():
    torch.manual_seed(0)
    B, C = 30, 4000
    _, y = make_batches((X, Y), B, CPU).draw(C)
    counts = torch.bincount(y.flatten(), minlength=N).double()
    expected = B * C / N
    chi2 = ((counts - expected) ** 2 / expected).sum()  # N - 1 = 39 degrees: mean 39, sd 8.8
    assert 39 - 4 * 8.8 < chi2 < 39 + 5 * 8.8
    assert len({tuple(row) for row in y.tolist()}) == C  # no two chains share a batch
    distinct = torch.tensor([len(set(row)) for row in y.tolist()]).double()
    exact = N * (1 - (1 - 1 / N) ** B)  # without replacement it would be B
    assert abs(distinct.mean() - exact) < 5 * distinct.std() / C**0.5
    estimate = X[:, 0][y].mean(1)  # unbiased: B/N times the sum estimates it
    assert abs(estimate.mean() - X[:, 0].mean()) < 4 * estimate.std() / C**0.5


def test_inputs_are_the_same_rows_every_time_in_batches_of_one_size():
    batches, first = make_batches((X, Y), 8, CPU), None
    for _ in range(2):
        pieces = list(batches.inputs(20))
        assert [len(p) for p in pieces] == [8, 8]
        rows = torch.cat(pieces)[:, 0] / 3
        assert len(set(rows.tolist())) == 16
        assert rows.max() > 16  # at random: data sorted by class would give the statistics of a few classes
        first = rows if first is None else first
        assert torch.equal(rows, first)
    assert [len(p) for p in batches.inputs(3)] == [8]


def test_a_density_has_no_batches():
    batches = make_batches(None, None, CPU, needs_data=False)
    assert isinstance(batches, NoData)
    assert batches.draw(3) is None
    assert batches.head(3) is None
    assert batches.N == 1
    assert list(batches.inputs(5)) == []


# -- DataLoaders -----------------------------------------------------------------------------------------------------
def shuffled(batch_size=16, seed=0, **settings):
    return DataLoader(
        TensorDataset(X, Y), batch_size, shuffle=True, generator=torch.Generator().manual_seed(seed), **settings
    )


def test_a_loader_gives_each_chain_its_own_batch_and_leaves_short_ones_out():
    batches = make_batches(shuffled(), None, CPU)  # 16 + 16 + 8 rows: two full batches a pass
    assert isinstance(batches, Loader)
    assert (batches.N, batches.B) == (N, 16)
    for _ in range(5):
        x, y = batches.draw(2)
        assert y.shape == (2, 16)
        assert matched(x, y)
        assert len(y.unique()) == 32  # one pass: no row twice
    x, y = batches.draw(7)  # across passes
    assert y.shape == (7, 16)
    assert matched(x, y)


def test_a_loader_is_gone_through_from_its_first_batch_on():
    reference = [y for _, y in shuffled(10)]
    batches = make_batches(shuffled(10), None, CPU)
    assert torch.equal(batches.head(4)[1], reference[0][:4])
    assert torch.equal(torch.cat([batches.draw(2)[1], batches.draw(2)[1]]), torch.stack(reference))


def test_looking_at_batches_or_inputs_does_not_move_a_loader_on():
    looked, plain = make_batches(shuffled(), None, CPU), make_batches(shuffled(), None, CPU)
    assert torch.equal(looked.look(3)[1][0], looked.head(16)[1])  # before the first draw
    for _ in range(4):
        again = list(looked.inputs(32))
        assert [len(x) for x in again] == [16] * 2
        assert all(torch.equal(a, b) for a, b in zip(again, looked.inputs(32)))
        drawn = looked.draw(3)
        assert torch.equal(drawn[1], plain.draw(3)[1])
        assert torch.equal(drawn[1], looked.look(3)[1])


def test_an_unshuffled_loader_warns_and_a_shuffled_one_does_not(recwarn):
    with pytest.warns(UserWarning, match="does not shuffle"):
        make_batches(DataLoader(TensorDataset(X, Y), 8), None, CPU)
    recwarn.clear()
    make_batches(shuffled(), None, CPU)
    own = BatchSampler(RandomSampler(range(N)), 8, drop_last=True)
    make_batches(DataLoader(TensorDataset(X, Y), batch_sampler=own), None, CPU)
    assert not recwarn.list


def test_a_batch_sampler_that_indexes_whole_batches_is_fine():
    sampler = BatchSampler(RandomSampler(range(N)), 10, drop_last=False)
    batches = make_batches(DataLoader(TensorDataset(X, Y), sampler=sampler, batch_size=None), None, CPU)
    assert (batches.N, batches.B) == (N, 10)
    assert matched(*batches.draw(3))


def bad(x=X, y=Y, at=11, value=float("nan")):
    x = x.clone()
    x[at, 1] = value
    return x, y


REFUSED = {
    "unequal rows": ((X, Y[:-1]), 4, r"\{'x': 40, 'y': 39\}, expected one N"),
    "unequal nested rows": (({"a": X, "b": X[1:]}, Y), 4, r"x\['b'\]\W+39"),
    "no rows": ((X[:0], Y[:0]), 4, r"unequal or no rows"),
    "0-dim": ((X, torch.tensor(1)), 4, r"'y': 0\}, expected one N"),
    "N < B": ((X, Y), 41, r"batch_size is 41 with N = 40 data, expected at most N"),
    "B < 1": ((X, Y), 0, r"batch_size is 0, expected a whole number of at least 1"),
    "B not whole": ((X, Y), 2.0, r"batch_size is 2.0, expected a whole number"),
    "B a bool": ((X, Y), True, r"batch_size is True, expected a whole number"),
    "NaN in x": (bad(), 4, r"x holds NaN or inf in 1 of 40 rows \(first: 11\)"),
    "inf in x": (bad(value=float("inf")), 4, r"first: 11\)"),
    "NaN deep in x": (((X, bad()[0]), Y), 4, r"x\[1\] holds NaN or inf in 1 of 40 rows \(first: 11\)"),
    "NaN in y": ((X, bad()[0]), 4, r"y holds NaN or inf in 1 of 40 rows \(first: 11\)"),
    "a tensor": (X, 4, r"data is a Tensor, expected a pair \(x, y\)"),
    "three": ((X, Y, Y), 4, r"data is a tuple of 3, expected a pair"),
    "a dict": ({"x": X, "y": Y}, 4, r"data is a dict, expected a pair"),
    "None": (None, 4, r"data is None, expected \(x, y\)"),
    "two targets": ((X, (Y, Y)), 4, r"y is a tuple of 2, expected one tensor"),
    "x a string": (("abc", Y), 4, r"x is a str, expected a tensor"),
    "TensorDataset of 3": (TensorDataset(X, Y, Y), 4, r"tuple of 3, expected a pair"),
    "Dataset without length": (Stream(), 4, r"the Dataset has no length, expected a map-style one"),
    "empty Dataset": (Rows(0), 4, r"the Dataset has 0 rows, expected at least 1"),
    "Dataset of triples": (Other((X[0], 1, 2)), 4, r"the Dataset gives a tuple of 3, expected pairs"),
    "Dataset of tensors": (Other(X[0]), 4, r"the Dataset gives a Tensor, expected pairs"),
    "Dataset of images": (Other((object(), 1)), 4, r"pairs of \(object, int\), expected tensors, arrays or numbers"),
    "mixed devices": ((X.to("meta"), Y), 4, r"mixed devices: \{'x': 'meta', 'y': 'cpu'\}, expected one"),
    "loader and batch size": (shuffled(), 4, r"batch_size=4 beside a DataLoader.*expected None"),
    "loader without length": (DataLoader(Stream(), 4), None, r"dataset has no length, expected one"),
    "loader of triples": (DataLoader(TensorDataset(X, Y, Y), 4, shuffle=True), None, r"a list of 3, expected pairs"),
    "loader of no batch": (shuffled(64, drop_last=True), None, r"no full batch in a pass over its N = 40 data"),
    "loader without batches": (shuffled(None), None, r"batch_size=None, expected one that makes batches"),
    "NaN in a loader": (DataLoader(TensorDataset(*bad(at=slice(None))), 4, shuffle=True), None, r"x holds NaN"),
}


@pytest.mark.parametrize("data, batch_size, match", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(data, batch_size, match):
    with pytest.raises(ValueError, match=match) as e:
        make_batches(data, batch_size, CPU)
    assert "expected" in str(e.value)
    assert "\n" not in str(e.value)


def test_a_density_with_data_is_refused():
    with pytest.raises(ValueError, match=r"data is a tuple of 2, expected none: a Density takes no data"):
        make_batches((X, Y), None, CPU, needs_data=False)


def test_a_dataset_too_large_for_memory_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(module, "DATASET_LIMIT", N * (3 * 4 + 8) - 1)
    with pytest.raises(ValueError, match=r"\(40 rows\), expected at most 0: pass a DataLoader"):
        make_batches(Rows(), 4, CPU)
    monkeypatch.setattr(module, "DATASET_LIMIT", N * (3 * 4 + 8))
    assert make_batches(Rows(), 4, CPU).N == N


def test_a_loader_whose_full_batches_end_says_so():
    class Shrinking:
        """Batches of 8, and after the first pass of 4 only."""

        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter([list(range(8 if self.passes == 1 else 4))])

        def __len__(self):
            return 1

    batches = make_batches(DataLoader(TensorDataset(X, Y), batch_sampler=Shrinking()), None, CPU)
    with pytest.raises(ValueError, match="no full batch"):
        batches.draw(3)


def test_arrays_of_any_order_and_kind_are_taken():
    x = np.asfortranarray(X.numpy()).astype(np.float64)
    batches = make_batches((x, Y.numpy().astype(np.int32)), 5, CPU)
    assert batches.x.dtype == torch.float64
    got, y = batches.draw(2)
    assert torch.equal(got.float(), X[y.long()])


# -- N of a loader ---------------------------------------------------------------------------------------------------
def loader_with(sampler, **settings):
    return DataLoader(TensorDataset(X, Y), batch_size=4, sampler=sampler, **settings)


def test_n_is_what_the_sampler_goes_over():
    """A train/validation split by sampler: N of the whole data set would weigh the likelihood too much."""
    assert make_batches(loader_with(SubsetRandomSampler(range(12))), None, CPU).N == 12
    assert make_batches(loader_with(RandomSampler(TensorDataset(X, Y))), None, CPU).N == N
    batches = BatchSampler(SubsetRandomSampler(range(8)), 4, False)
    assert make_batches(DataLoader(TensorDataset(X, Y), batch_sampler=batches), None, CPU).N == 8


def test_samplers_that_leave_n_open_are_refused():
    with pytest.raises(ValueError, match=r"draws rows with weights, expected every row equally often"):
        make_batches(loader_with(WeightedRandomSampler(torch.ones(N), N)), None, CPU)

    class Ten(list):
        pass

    with pytest.raises(ValueError, match=r"sampler draws 10 of the data set's 40 rows, .* expected a DataLoader of a"):
        make_batches(loader_with(Ten(range(10))), None, CPU)


def test_a_data_set_with_a_random_transform_is_refused():
    class Noisy(Rows):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + torch.randn(3), y

    with pytest.raises(ValueError, match=r"another row 0 each time .* expected fixed rows: pass a DataLoader"):
        make_batches(Noisy(), 4, CPU)


def test_floating_arrays_become_what_the_target_is_made_of():
    x = X.numpy().astype(np.float64)
    batches = make_batches((x, Y.numpy()), 4, CPU, dtype=torch.float32)
    assert batches.x.dtype == torch.float32
    assert batches.y.dtype == torch.int64
    assert make_batches((X.double(), Y), 4, CPU, dtype=torch.float32).x.dtype == torch.float64  # its owner's wish
