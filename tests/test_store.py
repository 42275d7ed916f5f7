"""The run folder when nothing goes wrong: what is written comes back, and no more than what is asked for is read."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from partita.runs import store
from partita.runs.store import lease as leases
from partita.runs.store.shards import BLOCK
from torture_store import C, D, add, fill, make, right, state, stats, theta


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 9 draws in 3 shards, and its truth [C, S, D]."""
    path = tmp_path_factory.mktemp("store") / "run"
    S = make(path)
    return path, torch.stack([theta(i) for i in range(S)], 1)


@pytest.fixture
def new(tmp_path):
    path = tmp_path / "run"
    store.create(path, {}, {})
    return path


# the folder -----------------------------------------------------------------------------------------------------------


def test_what_a_run_is_comes_back(tmp_path):
    path = tmp_path / "a" / "b" / "run"
    fixed = {
        "z.weight": torch.randn(3, 2),
        "a": torch.tensor(3),
        "half": torch.randn(5).bfloat16(),
        "flags": torch.tensor([True, False]),
        "none": torch.empty(0, 4),
        "same": torch.ones(2, 3).T,
        "complex": torch.randn(2, dtype=torch.complex64),
    }
    about = {"names": ["w", "b"], "lr": 1e-3, "deep": {"x": None, "y": [1, 2.5, "ä"]}, "nan": float("inf")}
    store.create(path, about, fixed, recipe="steps = 3\n")
    assert store.about(path) == {**about, "format": 1}
    back = store.fixed(path)
    assert list(back) == list(fixed)  # in the order given
    assert all(torch.equal(back[k], fixed[k]) and back[k].dtype == fixed[k].dtype for k in fixed)
    assert store.recipe(path) == "steps = 3\n"
    with safe_open(path / "fixed.safetensors", "pt") as file:  # the library reads what we write
        assert all(torch.equal(file.get_tensor(k), fixed[k]) for k in file.keys())  # noqa: SIM118
    store.update(path, engine="eager", lr=2e-3)
    store.update(path, finished=True)
    assert store.about(path) == {**about, "format": 1, "engine": "eager", "lr": 2e-3, "finished": True}
    assert store.recipe(path) == "steps = 3\n"
    assert store.SampleReader(path).shape == (0, 0, 0)
    assert store.SampleReader(path).read().shape == (0, 0, 0)
    assert store.checkpoint(path) is None


def test_refusals_are_one_line(tmp_path, run):
    path = run[0]
    (tmp_path / "file").write_text("x")
    (tmp_path / "left" / "group-000").mkdir(parents=True)
    (tmp_path / "left" / "group-000" / "draws-00000000-1-0123456789abcdef.safetensors").touch()
    for what, words in (
        (lambda: store.create(path, {}, {}), "holds a run already"),
        (lambda: store.create(tmp_path / "left", {}, {}), "no run.json"),
        (lambda: store.create(tmp_path / "file" / "run", {}, {}), "cannot be written"),
        (lambda: store.create(tmp_path / "new", {"a": torch}, {}), "plain values"),
        (lambda: store.create(tmp_path / "new", {"format": 2}, {}), "without the keys format"),
        (lambda: store.create(tmp_path / "new", {}, {"x": torch.ones(2, dtype=torch.complex128)}), "complex128"),
        (lambda: store.about(tmp_path), "is no run"),
        (lambda: store.about(tmp_path / "none"), "is no run"),
        (lambda: store.update(tmp_path, a=1), "is no run"),
        (lambda: store.SampleReader(tmp_path), "is no run"),
        (lambda: store.SampleWriter(tmp_path), "is no run"),
        (lambda: store.SampleWriter(path, dtype="float16"), "expected one of float32"),
        (lambda: store.SampleWriter(path, dtype="bfloat16"), "expected 'float32' as in"),
    ):
        with pytest.raises(store.StoreError, match=words) as e:
            what()
        assert "\n" not in str(e.value)
        assert "expected" in str(e.value)
    assert not (tmp_path / "new" / "run.json").exists()
    right(path)


def test_a_newer_format_is_refused(new):
    whole = json.loads((new / "run.json").read_text())
    (new / "run.json").write_text(json.dumps({**whole, "format": 7}))
    for what in (store.about, store.SampleReader, store.SampleWriter, store.fixed):
        with pytest.raises(store.StoreError, match="has format 7, expected 1"):
            what(new)


def test_notes_survive_a_torn_line(new):
    assert store.notes(new) == []
    store.note(new, {"step": 1, "loss": 0.5})
    with open(new / "metrics.jsonl", "a") as f:
        f.write('{"step": 2, "lo')
    assert store.notes(new) == [{"step": 1, "loss": 0.5}]
    store.note(new, {"step": 3, "text": "a\nb"})
    assert store.notes(new) == [{"step": 1, "loss": 0.5}, {"step": 3, "text": "a\nb"}]
    with pytest.raises(store.StoreError, match="plain values"):
        store.note(new, {"x": torch.ones(2)})


# writing and reading --------------------------------------------------------------------------------------------------


def test_draws_steps_statistics_and_checkpoints_come_back(run):
    path, truth = run
    reader = store.SampleReader(path)
    assert reader.shape == truth.shape
    assert reader.dtype == torch.float32
    assert torch.equal(reader.read(), truth)
    assert reader.steps == [10 * s for s in range(9)]
    there = reader.stats()
    assert list(there) == ["bn.mean", "bn.count"]
    for name, values in there.items():
        assert torch.equal(values, torch.stack([stats(s)[name] for s in range(9)], 1))
        assert values.dtype == stats(0)[name].dtype
    assert torch.equal(reader.stats(slice(2, 7, 2))["bn.count"], torch.tensor([2, 4, 6]).expand(C, 3))
    for n in (1, 4, 100):
        assert torch.equal(torch.cat(list(reader.batches(n)), 1), truth)
    assert [b.shape for b in reader.batches(4, columns=[3, 1])] == [(C, 4, 2), (C, 4, 2), (C, 1, 2)]
    size = sum(f.stat().st_size for f in path.rglob("*") if f.suffix in (".safetensors", ".toml", ".json"))
    assert reader.verify() == size
    found = store.checkpoint(path)
    with store.SampleWriter(path) as writer:
        assert writer.committed == writer.checkpoint_next == 9
        for tensors, values in (found, writer.checkpoint()):
            assert list(tensors) == list(state(9))
            assert all(torch.equal(tensors[k], v) for k, v in state(9).items())
            assert values == {"era": 0}
    assert len(list(path.glob("group-000/ckpt-*"))) == 2
    assert not (path / "group-000" / "lease.json").exists()


def test_shards_are_safetensors(run):
    path, truth = run
    at = 0
    for file in sorted(path.glob("group-000/draws-*")):
        with safe_open(file, "pt") as shard:
            values = shard.get_tensor("theta")
            assert torch.equal(values, truth[:, at : at + len(values)].transpose(0, 1))
            assert shard.get_tensor("step").tolist() == [10 * s for s in range(at, at + len(values))]
            assert torch.equal(
                shard.get_tensor("stat.bn.count"), torch.arange(at, at + len(values))[:, None].expand(-1, C)
            )
            assert shard.get_tensor("digests").dtype == torch.uint8
            at += len(values)
    assert at == 9


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_dtypes(new, dtype):
    kind = getattr(torch, dtype)
    truth = torch.randn(3, 5, 50, dtype=torch.float64).to(kind)
    with store.SampleWriter(new, dtype=dtype) as writer:
        for s in range(5):
            row = truth[:, s].double().clone()
            writer.append(s, row)
            row.zero_()  # the caller may go on with its tensor
            if s % 2:
                writer.commit({"half": truth[:, s]}, {})
        writer.commit({}, {})
    reader = store.SampleReader(new)
    assert reader.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert reader.stored == kind
    assert torch.equal(reader.read(), truth.to(reader.dtype))
    assert torch.equal(reader.read(1, slice(4, None, -2), 7), truth[1:2, [4, 2, 0], 7:8].to(reader.dtype))
    for file in new.glob("group-000/*.safetensors"):
        with safe_open(file, "pt") as shard:
            assert all(shard.get_tensor(k).dtype in (kind, torch.int64, torch.uint8) for k in shard.keys())  # noqa: SIM118


def test_draws_that_do_not_fit_are_refused(new):
    with store.SampleWriter(new) as writer:
        fill(writer, 1)
        for bad, words in (
            (lambda: writer.append(0, torch.ones(C, D + 1), stats(0)), "expected"),
            (lambda: writer.append(0, torch.ones(D), stats(0)), r"floats \[C, D\]"),
            (lambda: writer.append(0, torch.ones(C, D).long(), stats(0)), "int64"),
            (lambda: writer.append(0, theta(0)), "as before"),
            (lambda: writer.append(0, theta(0), {"bn.mean": torch.ones(C, 3)}), "as before"),
            (lambda: writer.commit({}, {"x": torch}), "not plain"),
            (lambda: writer.rewind(1), "expected where a commit ended"),
        ):
            with pytest.raises(store.StoreError, match=words):
                bad()
        assert add(writer, 1) == 2  # what was buffered is still there
        with pytest.raises(store.StoreError, match="as before"):
            writer.append(0, theta(0))
    with pytest.raises(store.StoreError, match="is closed"):
        fill(writer, 1)
    right(new)


def test_a_reader_sees_what_was_committed_and_looks_again(new):
    reader = store.SampleReader(new)
    with store.SampleWriter(new) as writer:
        fill(writer, 2)
        reader.refresh()
        assert reader.shape == (0, 0, 0)
        writer.commit({}, {})
        assert reader.shape == (0, 0, 0)
        reader.refresh()
        assert reader.shape == (C, 2, D)
        draws = store.Draws(reader)
        add(writer, 3)
        reader.refresh()
        assert reader.shape == (C, 5, D)
        assert torch.equal(draws[:, -1], torch.stack([theta(1)[c] for c in range(C)]))  # what it was made for
        assert draws.mean().shape == ()
        assert draws.tensor().shape == (C, 2, D)


def test_due_by_bytes_and_by_seconds_and_a_clock_that_goes_back(new):
    now = [1000.0]
    size = theta(0).numel() * 4 + sum(t.numel() * t.element_size() for t in stats(0).values())
    with store.SampleWriter(new, commit_bytes=2 * size, commit_seconds=60, clock=lambda: now[0]) as writer:
        assert not writer.due
        fill(writer, 1)
        assert not writer.due
        fill(writer, 1)
        assert writer.due
        writer.commit({}, {})
        assert not writer.due
        now[0] += 61
        assert writer.due  # in burn-in, too: the state is worth keeping
        writer.commit({}, {})
        now[0] -= 10_000
        assert not writer.due
        now[0] += 61
        assert writer.due


def test_burn_in_keeps_the_newest_of_checkpoints_without_draws(new):
    for i in range(5):
        with store.SampleWriter(new) as writer:
            for j in range(3):
                writer.commit(state(i), {"at": 10 * i + j})
                assert writer.checkpoint()[1] == {"at": 10 * i + j}
    assert store.checkpoint(new)[1] == {"at": 42}
    assert len(list(new.glob("group-000/ckpt-*"))) == 2


def test_rewind_and_go_on_otherwise(new):
    with store.SampleWriter(new) as writer:
        for n in (2, 3):
            add(writer, n)
        fill(writer, 1)
        writer.rewind(2)
        assert writer.committed == writer.checkpoint_next == 2
        assert add(writer, 2, era=1) == 4
    right(new, [0, 0, 1, 1])
    with store.SampleWriter(new) as writer:
        writer.rewind(0)
        assert writer.checkpoint() is None
    assert store.SampleReader(new).shape == (0, 0, 0)


def test_groups_are_chains_side_by_side(new):
    for group, n in ((0, 5), (1, 4)):
        with store.SampleWriter(new, group=group) as writer:
            for _ in range(n):
                add(writer, 1, era=group)
    reader = store.SampleReader(new)
    assert reader.shape == (2 * C, 4, D)
    truth = torch.cat([torch.stack([theta(s, era) for s in range(4)], 1) for era in (0, 1)])
    assert torch.equal(reader.read(), truth)
    assert torch.equal(reader.read([3, 0, 2, 3], [3, 3, 1], [5, 0]), truth[[3, 0, 2, 3]][:, [3, 3, 1]][:, :, [5, 0]])
    assert reader.stats()["bn.mean"].shape == (2 * C, 4, 3)
    assert reader.steps == [0, 10, 20, 30]
    with store.SampleWriter(new, group=2) as writer:
        writer.append(7, theta(0), stats(0))
        writer.commit({}, {})
    with pytest.raises(store.StoreError, match="differ in steps"):
        _ = store.SampleReader(new).steps
    with store.SampleWriter(new, group=3) as writer:
        writer.append(0, torch.ones(C, 5))
        writer.commit({}, {})
    with pytest.raises(store.StoreError, match="5 parameters"):
        store.SampleReader(new)


def test_a_folder_may_move(tmp_path):
    make(tmp_path / "old")
    (tmp_path / "old").rename(tmp_path / "new")
    right(tmp_path / "new")
    with store.SampleWriter(tmp_path / "new") as writer:
        assert add(writer, 2) == 11
    right(tmp_path / "new")


# indexing -------------------------------------------------------------------------------------------------------------


def index(n: int):
    numbers = st.integers(-n, n - 1)
    end = st.none() | st.integers(-n, n)
    slices = st.builds(slice, end, end, st.none() | st.integers(-3, 3).filter(bool))
    return numbers | slices | st.lists(numbers, max_size=4) | st.just(slice(None))


def chosen(x: torch.Tensor, axis: int, key) -> torch.Tensor:
    numbers = np.arange(x.shape[axis])[key if isinstance(key, slice) else np.array(key, np.int64).reshape(-1)]
    return x.index_select(axis, torch.from_numpy(numbers.copy()))


@settings(max_examples=150, deadline=None)
@given(c=index(C), s=index(9), d=index(D))
def test_reading_is_indexing(run, c, s, d):
    path, truth = run
    read = store.SampleReader(path).read(c, s, d)
    assert torch.equal(read, chosen(chosen(chosen(truth, 0, c), 1, s), 2, d))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_draws_are_indexed_as_a_tensor(run, data):
    path, truth = run
    forward = lambda n: (
        st.builds(slice, *[st.none() | st.integers(-2 * n, 2 * n)] * 2, st.none() | st.integers(1, 4))
        | st.integers(-n, n - 1)
    )
    keys = data.draw(st.tuples(forward(C), forward(9), forward(D)))
    keys = keys[: data.draw(st.integers(0, 3))]
    if data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(keys)))
        keys = (*keys[:place], Ellipsis, *keys[place:])
        if len(keys) == 4:  # ... between the three of them
            keys = keys[:3]
    if data.draw(st.booleans()) and len(keys) and keys[0] is not Ellipsis:
        vector = data.draw(st.lists(st.integers(-C, C - 1), min_size=1, max_size=4))
        keys = (data.draw(st.sampled_from([vector, torch.tensor(vector)])), *keys[1:])
    key = keys[0] if len(keys) == 1 and data.draw(st.booleans()) else keys
    got = store.Draws(store.SampleReader(path))[key]
    assert torch.equal(got, truth[key])


def test_what_lies_beyond_the_end_is_an_index_error(run):
    reader, draws = store.SampleReader(run[0]), store.Draws(store.SampleReader(run[0]))
    for beyond in (
        9,
        -10,
        slice(0, 10),
        slice(-10, None),
        [0, 9],
        torch.tensor([-10]),
        1.0,
        "a",
        True,
        None,
        [[1]],
        [0.5],
    ):
        with pytest.raises(IndexError):
            reader.read(draws=beyond)
    for beyond in ((0, 9), (C,), (0, 0, D), (0, 0, 0, 0), (..., -D - 1), (slice(None), [9])):
        with pytest.raises(IndexError):
            draws[beyond]
    assert reader.read(draws=np.int64(8)).shape == (C, 1, D)
    assert reader.read(draws=torch.arange(9) > 6).shape == (C, 2, D)
    assert reader.read(chains=[]).shape == (0, 9, D)


def test_draws_behave_as_a_tensor(run):
    path, truth = run
    draws = store.Draws(store.SampleReader(path))
    assert draws.shape == truth.shape
    assert draws.shape[1] == draws.size(1) == 9
    assert (draws.ndim, draws.dim(), len(draws), draws.numel()) == (3, 3, C, truth.numel())
    assert draws.dtype == truth.dtype
    assert draws.device == truth.device
    assert draws.is_floating_point()
    assert not draws.is_cuda
    before = draws.reader.touched
    assert draws.element_size() == 4
    assert draws.reader.touched == before  # nothing was read for that
    for f in (
        lambda x: x.mean((0, 1)),
        lambda x: x.var(1),
        lambda x: x.flatten(0, 1),
        lambda x: x.double(),
        lambda x: x.mT,
        lambda x: torch.mean(x, dim=1),
        lambda x: torch.cat([x, x], 1),
        lambda x: torch.einsum("csd,csd->c", x, x),
        lambda x: x - 1,
        lambda x: 1 - x,
        lambda x: -x * 2 + x,
        lambda x: truth @ x.mT,
        lambda x: truth - x,
        lambda x: x > 0,
        lambda x: x == truth,
        lambda x: abs(x),
        lambda x: x[:, None],
        lambda x: x[truth > 0.5],
        lambda x: x[[0, 1], [2, 3]],
        lambda x: x[torch.tensor(1), :, torch.tensor([1, 2])],
        lambda x: x[torch.tensor([True, False])],
        lambda x: torch.stack(list(x)),
        lambda x: torch.as_tensor(x),
        lambda x: torch.from_numpy(np.asarray(x)),
        lambda x: torch.nn.functional.relu(x),
        lambda x: x.to(torch.float16),
    ):
        got, wanted = f(draws), f(truth)
        assert isinstance(got, torch.Tensor)
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
    assert f"{C} chains x 9 draws x {D} parameters" in repr(draws)
    assert "GiB on disk" in repr(draws)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        draws.nonsense  # noqa: B018
    with pytest.raises(TypeError):
        draws[0] = 1


# laziness -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wide, draws", [(100_000, 12), (5, 3_000)])
def test_only_the_blocks_that_hold_what_is_asked_for_are_read(new, wide, draws):
    truth = torch.randn(2, draws, wide)
    with store.SampleWriter(new) as writer:
        for s in range(draws):
            writer.append(s, truth[:, s])
            if s % (draws // 3) == draws // 3 - 1:
                writer.commit({}, {})
    reader = store.SampleReader(new)
    assert reader.touched == 0

    def blocks(**what):
        before = reader.touched
        x = reader.read(**what)
        return (reader.touched - before) / BLOCK, x

    per_shard = 2 * (draws // 3) * wide * 4 / BLOCK
    n, x = blocks(columns=wide // 2)
    assert torch.equal(x[..., 0], truth[..., wide // 2])
    assert n <= 2 * draws if wide > BLOCK else n <= 3 * (per_shard + 2)
    n, x = blocks(draws=draws - 1)
    assert torch.equal(x[:, 0], truth[:, -1])
    assert n <= 2 * wide * 4 / BLOCK + 2
    n, x = blocks(chains=1, draws=0, columns=slice(wide - 1, None))
    assert torch.equal(x[0, 0], truth[1, 0, -1:])
    assert n == 1
    n, x = blocks()
    assert torch.equal(x, truth)
    assert n <= 1.2 * (3 * per_shard + 6)  # pieces meet in a block


# who writes -----------------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused(new):
    with store.SampleWriter(new) as writer:
        with pytest.raises(
            store.StoreError, match=f"written by process {os.getpid()} on .* since 2.*expected no other"
        ):
            store.SampleWriter(new)
        store.SampleWriter(new, group=1).close()
        add(writer, 1)
    store.SampleWriter(new).close()


CHILD = """
import os, sys
sys.path.insert(0, sys.argv[1])
from torture_store import add
from partita.runs import store
try:
    store.SampleWriter(sys.argv[2])
except store.StoreError as e:
    print(e)
add(store.SampleWriter(sys.argv[3]), 2)
os.kill(os.getpid(), 9)
"""


def test_another_process_is_refused_and_a_dead_one_followed(tmp_path):
    for name in "ab":
        store.create(tmp_path / name, {}, {})
    with store.SampleWriter(tmp_path / "a") as writer:
        args = [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(tmp_path / "a"), str(tmp_path / "b")]
        said = subprocess.run(args, capture_output=True, text=True).stdout
        assert f"written by process {os.getpid()}" in said
        assert said.count("\n") == 1
        add(writer, 1)
    assert (tmp_path / "b" / "group-000" / "lease.json").exists()
    with store.SampleWriter(tmp_path / "b") as writer:
        assert writer.committed == 2
        add(writer, 1)
    assert right(tmp_path / "b") == 3


def test_leases_of_other_hosts(new, monkeypatch):
    file = new / "group-000" / "lease.json"

    def leave(age):
        lease = {"host": "elsewhere", "pid": 1, "started": time.time() - 9999, "heartbeat": time.time() - age}
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(lease))

    for age in (5, 590, -3600):  # -3600: its clock is ahead of ours, or ours went back
        leave(age)
        with pytest.raises(store.StoreError, match=r"process 1 on elsewhere since .*600 s"):
            store.SampleWriter(new)
    leave(601)
    with store.SampleWriter(new) as writer:
        assert json.loads(file.read_text())["pid"] == os.getpid()
        add(writer, 1)
        monkeypatch.setattr(leases.time, "time", lambda: 1e9)  # our clock goes back by years
        add(writer, 1)
        monkeypatch.undo()
        leave(0)  # another host took over while this one slept
        fill(writer, 1)
        with pytest.raises(store.StoreError, match="took over"):
            writer.commit({}, {})
    assert json.loads(file.read_text())["host"] == "elsewhere"  # its lease, not ours to remove
    assert right(new) == 2
    for junk in ("", "{", "[]", '{"host": 1}'):
        file.write_text(junk)
        store.SampleWriter(new).close()


def test_a_forked_child_does_not_hold_the_lock(new):
    writer = store.SampleWriter(new)
    (out, into), (ready, said) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # as a DataLoader's worker that outlives its parent
        os.write(said, b"x")
        os.read(out, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        writer.close()
        store.SampleWriter(new).close()
    finally:
        os.write(into, b"x")
        os.waitpid(child, 0)
