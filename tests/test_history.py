"""Histories: which states they hold, which rows they give, and that each group's row is its own uniform draw."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from scipy import stats
from torch import Tensor

from partita.structure.history import Ensemble, History, Reservoir, State, Window

FAST = settings(max_examples=60, deadline=None)
SMALL = 1e-4  # p-values; seeds are fixed, so a test that passes once always does
rows_kinds = pytest.mark.parametrize("kind", [Window, Reservoir])


def state_at(t: int, C: int, D: int) -> Tensor:
    """θ^(t) = t + 1000 c everywhere: says when it was written, and by which chain."""
    return (t + 1000.0 * torch.arange(C))[:, None].expand(C, D).contiguous()


def filled(history: Window | Reservoir, states: int, C: int = 2, D: int = 3, start: int = 0) -> State:
    """After `states` states t = 0, 1, …; what no state was written to is NaN."""
    state = history.init(state_at(start, C, D))
    state["rows"][:, 1:] = math.nan
    for t in range(start + 1, start + states):
        history.write(state, state_at(t, C, D))
    return state


def uniform(counts: Tensor) -> float:
    return float(stats.chisquare(counts.double().numpy()).pvalue)


# ------------------------------------------------------------------------------------------------------ what they hold
@FAST
@given(R=st.integers(1, 12), states=st.integers(1, 40))
def test_a_window_holds_the_last_states_in_aligned_rows(R: int, states: int) -> None:
    state = filled(Window(R), states)
    rows = state["rows"][:, : min(R, states)]
    assert (rows == rows[:, :, :1]).all()  # a row is one θ
    for c in range(2):
        held = sorted((rows[c, :, 0] - 1000 * c).int().tolist())
        assert held == list(range(max(0, states - R), states))
    assert [int(rows[0, t % R, 0]) for t in range(max(0, states - R), states)] == list(
        range(max(0, states - R), states)
    )
    assert state["rows"][:, min(R, states) :].isnan().all()
    assert int(state["seen"]) == states


@FAST
@given(R=st.integers(1, 12), states=st.integers(1, 40), seed=st.integers(0, 9))
def test_a_reservoir_holds_distinct_states_in_aligned_rows(R: int, states: int, seed: int) -> None:
    torch.manual_seed(seed)
    state = filled(Reservoir(R), states, C=3)
    rows = state["rows"][:, : min(R, states)]
    assert (rows == rows[:, :, :1]).all()
    for c in range(3):
        held = (rows[c, :, 0] - 1000 * c).int().tolist()
        assert len(set(held)) == len(held)  # no state twice, none of another chain
        assert set(held) <= set(range(states))
        assert states > R or held == list(range(states))  # while filling: all of them
    assert state["rows"][:, min(R, states) :].isnan().all()
    assert int(state["seen"]) == states


@pytest.mark.parametrize("R, states", [(1, 6), (3, 4), (4, 12)])
def test_a_reservoir_is_uniform_over_all_states_seen(R: int, states: int) -> None:
    torch.manual_seed(0)
    C = 12_000
    history = Reservoir(R)
    state = history.init(torch.zeros(C, 2))
    for t in range(1, states):
        history.write(state, torch.full((C, 2), float(t)))
    held = state["rows"][:, :, 0].long()
    present = torch.zeros(C, states).scatter_(1, held, 1.0)  # every chain decides for itself: C independent reservoirs
    assert (present.sum(1) == R).all()
    which, how_many = present.unique(dim=0, return_counts=True)  # every set of R states alike
    assert len(which) == math.comb(states, R)
    assert uniform(how_many) > SMALL


def test_a_reservoirs_chains_decide_independently() -> None:
    torch.manual_seed(1)
    history = Reservoir(1)
    state = history.init(torch.zeros(20_000, 1))
    for t in range(1, 3):
        history.write(state, torch.full((20_000, 1), float(t)))
    last = state["rows"][:, 0, 0].long()
    pairs = torch.bincount(last[0::2] * 3 + last[1::2], minlength=9)
    assert uniform(pairs) > SMALL


# ------------------------------------------------------------------------------------------------------ what they give
def read_rows(history: History, state: State, theta: Tensor, M: int, k: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return history.read(state, theta, torch.arange(M), M, k)


@rows_kinds
@pytest.mark.parametrize("states", [1, 2, 3, 5, 7])
def test_reads_are_uniform_over_the_filled_rows_and_nothing_else(kind: type, states: int) -> None:
    """Not randint(R) mod n: with R = 5 and n = 3 that gives rows 0 and 1 twice the weight of row 2."""
    history, C, M = kind(5), 300, 6
    state = filled(history, states, C, M)
    past = read_rows(history, state, torch.zeros(C, M), M, 10)
    assert past.shape == (C, 10, M)
    assert not past.isnan().any()  # never an unfilled row
    row = (
        past[..., None] == state["rows"][:, : min(states, 5), 0][:, None, None]
    ).int()  # [C, k, M, n], its own chain's
    assert (row.sum(-1) == 1).all()
    counts = row.sum((0, 1, 2))
    assert states == 1 or uniform(counts) > SMALL


@rows_kinds
def test_each_chain_composition_and_group_draws_its_own_row(kind: type) -> None:
    R, C, k, M = 3, 12_000, 2, 3
    history = kind(R)
    state = history.init(torch.zeros(C, M))
    state["rows"].copy_(torch.arange(R, dtype=torch.float32)[None, :, None].expand(C, R, M))
    state["seen"].fill_(R)
    row = read_rows(history, state, torch.zeros(C, M), M, k).long()
    flat = row.flatten(1)  # [C, k M]: six draws, pairwise uniform over 9 pairs
    for a, b in itertools.combinations(range(k * M), 2):
        assert uniform(torch.bincount(flat[:, a] * R + flat[:, b], minlength=R * R)) > SMALL
    for m in range(M):  # neighbouring chains
        assert uniform(torch.bincount(row[0::2, 0, m] * R + row[1::2, 0, m], minlength=R * R)) > SMALL
    triples = (row[:, 0] * torch.tensor([1, R, R * R])).sum(1)  # all groups of a composition together
    assert uniform(torch.bincount(triples, minlength=R**3)) > SMALL


@rows_kinds
def test_a_group_is_read_whole(kind: type) -> None:
    labels = torch.tensor([2, 0, 1, 0, 2, 2, 1, 0])
    history, C = kind(50), 40
    state = filled(history, 50, C, 8)
    torch.manual_seed(0)
    past = history.read(state, torch.zeros(C, 8), labels, 3, 5)
    groups = [past[..., labels == m] for m in range(3)]
    assert all((g == g[..., :1]).all() for g in groups)  # one row for all its coordinates
    assert (groups[0][..., 0] != groups[1][..., 0]).float().mean() > 0.9  # another for another group
    assert ((past // 1000).long() == torch.arange(C)[:, None, None]).all()  # of its own chain


@rows_kinds
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64"])
def test_rows_keep_their_dtype_and_reads_have_thetas(kind: type, name: str) -> None:
    dtype = getattr(torch, name)
    history = kind(4, dtype=name)
    for theta_dtype in (torch.float32, torch.float64):
        theta = torch.full((2, 3), 1 / 3, dtype=theta_dtype)
        state = history.init(theta)
        history.write(state, theta * 2)
        assert state["rows"].dtype == dtype
        past = history.read(state, theta, torch.zeros(3, dtype=torch.long), 1, 5)
        assert past.dtype == theta_dtype
        expected = {(v * theta[0, 0]).to(dtype).to(theta_dtype).item() for v in (1, 2)}
        assert set(past.unique().tolist()) <= expected
    assert history.nbytes(3, 7) == 3 * 4 * 7 * dtype.itemsize
    assert history.nbytes(2, 3) == state["rows"].nbytes


@rows_kinds
def test_reads_leave_the_state_alone_and_writes_take_copies(kind: type) -> None:
    history = kind(3)
    theta = torch.zeros(1, 2)
    state = history.init(theta)
    theta += 1
    history.write(state, theta)
    theta += 1
    before = {k: v.clone() for k, v in state.items()}
    history.read(state, theta, torch.tensor([0, 1]), 2, 4)
    assert all(torch.equal(state[k], before[k]) for k in state)
    assert state["rows"][0, :, 0].tolist() == [0, 1, 0]


@rows_kinds
def test_a_saved_state_goes_on_as_if_it_had_never_stopped(kind: type) -> None:
    history = kind(4)
    whole = filled(history, 7)
    resumed = load(save(whole))
    for state in (whole, resumed):
        torch.manual_seed(5)
        for t in range(7, 20):
            history.write(state, state_at(t, 2, 3))
    assert torch.equal(whole["rows"], resumed["rows"])
    assert int(whole["seen"]) == int(resumed["seen"]) == 20
    a, b = (read_rows(history, s, torch.zeros(2, 3), 3, 4) for s in (whole, resumed))
    assert torch.equal(a, b)


def test_what_is_unread_changes_nothing_that_is_read() -> None:
    history = Window(5)
    state = history.init(torch.zeros(2, 40))
    for s in range(1, 5):
        history.write(state, torch.full((2, 40), float(s)))
    unread = torch.rand(2, 3, 40) < 0.5
    torch.manual_seed(0)
    every = history.read(state, torch.zeros(2, 40), torch.arange(40), 40, 3)
    torch.manual_seed(0)
    some = history.read(state, torch.zeros(2, 40), torch.arange(40), 40, 3, unread)
    assert torch.equal(some[~unread], every[~unread])
    assert every[unread].any()
    assert not some[unread].any()  # all from one row


# ----------------------------------------------------------------------------------------------------------- ensembles
@pytest.mark.parametrize("size, C, k", [(None, 6, 2), (2, 6, 3), (3, 6, 1), (6, 6, 2)])
def test_an_ensemble_reads_its_own_present_states_uniformly_itself_included(size: int | None, C: int, k: int) -> None:
    n = 3000
    history, s = Ensemble(size), size or C
    theta = torch.arange(float(C))[:, None].expand(C, n)  # n groups, so n draws for each chain and composition
    torch.manual_seed(0)
    past = history.read(history.init(theta), theta, torch.arange(n), n, k)
    assert past.shape == (C, k, n)
    for c, j in itertools.product(range(C), range(k)):
        counts = torch.bincount(past[c, j].long(), minlength=C)
        mine = torch.arange(C) // s == c // s
        assert (counts[~mine] == 0).all()  # never from another ensemble
        assert uniform(counts[mine]) > SMALL  # itself as often as any other
    row = past.long() % s  # chains (of one ensemble or of two), compositions and groups draw independently
    assert uniform(torch.bincount(row[0, 0, :-1] * s + row[0, 0, 1:], minlength=s * s)) > SMALL
    for a, b in itertools.combinations(row.flatten(0, 1), 2):
        assert uniform(torch.bincount(a * s + b, minlength=s * s)) > SMALL


def test_an_ensembles_groups_are_read_whole_and_follow_theta() -> None:
    labels = torch.tensor([1, 0, 1, 0, 2])
    theta = torch.randn(4, 5, dtype=torch.float64)
    history = Ensemble()
    state = history.init(theta)
    assert state == {}
    history.write(state, theta)
    assert state == {}
    torch.manual_seed(0)
    past = history.read(state, theta * 2, labels, 3, 50)  # what counts is the present θ
    assert past.dtype == torch.float64
    source = (past[:, :, None] == 2 * theta[None, None]).int()  # [C, k, chain, D]
    assert (source.sum(2) == 1).all()
    source = source.argmax(2)
    assert torch.equal(source[..., 0], source[..., 2])
    assert torch.equal(source[..., 1], source[..., 3])
    assert (source[..., 0] != source[..., 1]).any()
    assert history.nbytes(4, 5) == 0


def test_ensembles_count_independent_units() -> None:
    assert Ensemble().ensembles(6) == 1
    assert Ensemble(2).ensembles(6) == 3
    assert Ensemble(6).ensembles(6) == 1
    assert Window(3).ensembles(6) == Reservoir(3).ensembles(6) == 6
    for history, C, words in (
        (Ensemble(), 1, ["chains=1", "at least 2"]),
        (Ensemble(4), 6, ["chains=6", "multiple of its size, 4"]),
        (Ensemble(4), 2, ["chains=2", "multiple of its size, 4"]),
    ):
        with pytest.raises(ValueError) as e:
            history.ensembles(C)
        assert all(w in str(e.value) for w in words)
        with pytest.raises(ValueError, match=f"chains={C}"):
            history.read({}, torch.zeros(C, 2), torch.tensor([0, 1]), 2, 1)


# ----------------------------------------------------------------------------------------------------------- refusals
@rows_kinds
@pytest.mark.parametrize(
    "arguments, words",
    [
        *[({"R": v}, [f"R={v!r}", "at least 1"]) for v in (0, -1, 2.0, "3", None, True)],
        *[({"every": v}, [f"every={v!r}", "at least 1"]) for v in (0, 1.5)],
        *[({"warm_up": v}, [f"warm_up={v!r}", "at least 0"]) for v in (-1, 0.5)],
        ({"burn_in": "forget"}, ["burn_in='forget'", "'keep' or 'drop'"]),
        ({"dtype": "float16"}, ["dtype='float16'", "['bfloat16', 'float32', 'float64']"]),
    ],
    ids=str,
)
def test_a_history_that_cannot_be_is_refused(kind: type, arguments: dict, words: list[str]) -> None:
    refused(kind, arguments, words)


@pytest.mark.parametrize("arguments", [{"size": 1}, {"size": 2.0}, {"size": True}, {"warm_up": -1}], ids=str)
def test_an_ensemble_that_cannot_be_is_refused(arguments: dict) -> None:
    (name, value), *_ = arguments.items()
    refused(Ensemble, arguments, [f"{name}={value!r}", "at least"])


def refused(kind: type, arguments: dict, words: list[str]) -> None:
    with pytest.raises(ValueError) as e:
        kind(**arguments)
    said = str(e.value)
    assert said.startswith(kind.__name__)
    assert "\n" not in said
    assert all(w in said for w in words), said


def test_what_the_engine_asks_of_a_history() -> None:
    for history in (Window(2, every=3, burn_in="drop", warm_up=4), Reservoir(2, every=3, burn_in="drop", warm_up=4)):
        assert (history.every, history.warm_up, history.drops_burn_in) == (3, 4, True)
        assert not dataclasses.replace(history, burn_in="keep").drops_burn_in
    assert (Ensemble().every, Ensemble().warm_up, Ensemble().drops_burn_in) == (1, 0, False)


@pytest.mark.parametrize("history", [Window, Reservoir])
def test_host_is_true_or_false_and_changes_nothing_on_the_cpu(history):
    with pytest.raises(ValueError, match="host=1, expected True or False"):
        history(4, host=1)
    theta = torch.randn(2, 3)
    a, b = history(4).init(theta), history(4, host=True).init(theta)
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not Ensemble().host


@pytest.mark.parametrize("history", [Window(4), Reservoir(4)], ids=str)
def test_restarting_forgets_in_place(history):
    """Without a second set of rows, which could be as large as the memory that is left."""
    state = history.init(torch.zeros(2, 3))
    for t in range(9):
        history.write(state, torch.full((2, 3), float(t + 1)))
    places = {k: v.data_ptr() for k, v in state.items()}
    history.restart(state, torch.full((2, 3), -1.0))
    assert {k: v.data_ptr() for k, v in state.items()} == places
    assert int(state["seen"]) == 1
    past = history.read(state, torch.zeros(2, 3), torch.arange(3), 3, 50)
    assert torch.equal(past, torch.full_like(past, -1.0))
