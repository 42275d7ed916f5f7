"""The run folder when things go wrong. The machinery, and the long form of these tests, is torture_store.py."""

import errno
import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torture_store as torture
from partita.runs import store
from partita.runs.store import disk
from torture_store import C, D, add, fill, make, right, state, theta


def test_killed_at_random_moments():
    """In a process of its own, which may fork: other tests may have threads."""
    script = str(Path(torture.__file__))
    done = subprocess.run(
        [sys.executable, script, "kills", "--times", "10"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "10 kills" in done.stdout
    assert ", 0 lost" in done.stdout
    assert "kills, 0 draws" not in done.stdout


def test_power_lost_at_every_operation(tmp_path):
    assert "all of them right" in torture.power(tmp_path, every=2)


@pytest.mark.parametrize("kind", torture.FAULTS)
def test_every_operation_fails_once(tmp_path, kind):
    assert "0 draws lost" in torture.faults(tmp_path, kind, every=3 if kind != "interrupt" else 7)


def test_damage_is_reported_and_never_returned(tmp_path):
    assert "all reported" in torture.damage(tmp_path / "run", 60, 20)


# the torture itself must find what it looks for ------------------------------------------------------------------------


def skip_folders(real, fd):
    return None if os.path.isdir(f"/dev/fd/{fd}") else real(fd)


def skip_files(real, fd):
    return real(fd) if os.path.isdir(f"/dev/fd/{fd}") else None


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="needs /dev/fd")
@pytest.mark.parametrize("broken", [skip_folders, skip_files])
def test_a_store_that_does_not_fsync_is_found_out(tmp_path, monkeypatch, broken):
    real = torture.Watched.fsync
    monkeypatch.setattr(torture.Watched, "fsync", lambda self, fd: broken(lambda fd: real(self, fd), fd))
    with pytest.raises((AssertionError, store.StoreError)):
        torture.power(tmp_path)


def test_a_store_that_writes_draws_before_their_checkpoint_is_found_out(tmp_path, monkeypatch):
    def commit(self, put, tmp, name, pieces):
        if tmp == "ckpt.tmp" and self._rows:
            self.late = (tmp, name, pieces)
            return None
        path = put(self, tmp, name, pieces)
        if tmp == "draws.tmp":
            put(self, *self.late)
        return path

    put = store.SampleWriter._put
    monkeypatch.setattr(store.SampleWriter, "_put", lambda self, *what: commit(self, put, *what))
    with pytest.raises(AssertionError):
        torture.power(tmp_path)


def test_a_reader_that_does_not_check_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr(store.shards, "_digest", lambda block: b"12345678")
    with pytest.raises(AssertionError, match="damage"):
        torture.damage(tmp_path / "run", 200, 0)


# full disks -----------------------------------------------------------------------------------------------------------


def test_a_full_disk_keeps_what_is_committed_and_what_is_buffered(tmp_path, monkeypatch):
    make(tmp_path / "run")
    room = [10**9]

    def write(fd, data):
        size = memoryview(data).nbytes
        if size > room[0]:
            os.write(fd, bytes(memoryview(data).cast("B")[: room[0]]))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd, data)

    real = disk.write
    monkeypatch.setattr(disk, "write", write)
    with store.SampleWriter(tmp_path / "run") as writer:
        for n in (0, 100, 5_000, 13_000):  # for the lease, the checkpoint, the draws
            fill(writer, 1)
            room[0] = n
            with pytest.raises(store.StoreError, match="No space left on device") as e:
                writer.commit(state(0), {})
            assert "\n" not in str(e.value)
            assert right(tmp_path / "run") == 9
            assert writer.checkpoint_next == 9
        room[0] = 10**9
        assert writer.commit(state(13), {}) == 13
    assert right(tmp_path / "run") == 13


def test_a_file_may_grow_no_further(tmp_path):
    """EFBIG from the system itself, at a limit in the middle of a shard; Python ignores its signal."""
    make(tmp_path / "run")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with store.SampleWriter(tmp_path / "run") as writer:
        fill(writer, 6)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
            with pytest.raises(store.StoreError, match="File too large"):
                writer.commit(state(15), {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert right(tmp_path / "run") == 9
        assert writer.commit(state(15), {}) == 15
    assert right(tmp_path / "run") == 15


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, number):
    make(tmp_path / "run")

    def refuse(*_):
        raise OSError(number, os.strerror(number), str(tmp_path / "run"))

    for name in ("create", "mkdir", "rename", "unlink"):
        monkeypatch.setattr(disk, name, refuse)
    for what in (
        lambda: store.create(tmp_path / "new", {}, {}),
        lambda: store.update(tmp_path / "run", a=1),
        lambda: store.SampleWriter(tmp_path / "run"),
    ):
        with pytest.raises(store.StoreError, match=os.strerror(number)) as e:
            what()
        assert "\n" not in str(e.value)
    right(tmp_path / "run")


# damage that a writer meets ---------------------------------------------------------------------------------------------


def test_gaps_overlaps_and_damage_are_refused_and_named(tmp_path):
    path = tmp_path / "run"
    make(path)
    _, middle, last = sorted((path / "group-000").glob("draws-*"))
    whole = middle.read_bytes()

    def refused(words, *who):
        for what in (*who, lambda: store.SampleReader(path).verify()):
            with pytest.raises(store.StoreError, match=words) as e:
                what()
            assert "\n" not in str(e.value)

    open_both = (lambda: store.SampleReader(path), lambda: store.SampleWriter(path))
    middle.unlink()
    refused(f"{last.name} begins at draw 7 with a gap before it, expected draw 3", *open_both)
    middle.write_bytes(whole)
    again = middle.with_name(middle.name.replace("draws-00000003", "draws-00000004"))
    again.write_bytes(whole)
    refused("with draws of another shard, expected draw 7", *open_both)
    again.unlink()
    middle.write_bytes(whole[:-1])
    refused(f"{middle.name}.*expected", *open_both)
    middle.write_bytes(whole[:9000] + bytes([whole[9000] ^ 4]) + whole[9001:])
    refused(f"{middle.name} is damaged in block 1", lambda: store.SampleWriter(path))
    reader = store.SampleReader(path)
    assert torch.equal(
        reader.read(draws=[0, 1, 2, 7, 8])[0, :, 0], torch.stack([theta(i)[0, 0] for i in (0, 1, 2, 7, 8)])
    )
    middle.write_bytes(whole)
    (path / "group-000" / "draws-1-2-3.safetensors").touch()
    refused("is no name of a shard", *open_both)
    (path / "group-000" / "draws-1-2-3.safetensors").unlink()
    (path / "group-000" / "draws.tmp").write_bytes(b"half")
    (path / "group-000" / "ckpt.tmp").write_bytes(b"half")
    with store.SampleWriter(path) as writer:
        assert add(writer, 1) == 10
    assert not list(path.glob("group-000/*.tmp"))
    right(path)


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    path = tmp_path / "run"
    make(path)
    _, new = sorted((path / "group-000").glob("ckpt-*"))
    whole = new.read_bytes()
    new.write_bytes(whole[:-1] + b"\xff")
    assert torch.equal(store.checkpoint(path)[0]["theta"], theta(7))
    with store.SampleWriter(path) as writer:
        assert writer.checkpoint_next == 7
        assert new.name in writer.skipped[0]
        assert writer.committed == 9  # nothing is dropped unasked
        writer.rewind(writer.checkpoint_next)
        assert add(writer, 2) == 9
        assert writer.checkpoint_next == 9
    right(path)
    for file in path.glob("group-000/ckpt-*"):
        file.unlink()
    with store.SampleWriter(path) as writer:
        assert writer.checkpoint() is None
        assert writer.checkpoint_next is None


def test_checkpoints_past_the_end_are_dropped(tmp_path):
    path = tmp_path / "run"
    make(path)
    sorted((path / "group-000").glob("draws-*"))[-1].unlink()
    with store.SampleWriter(path) as writer:
        assert writer.committed == writer.checkpoint_next == 7
        assert [file.name[:13] for file in path.glob("group-000/ckpt-*")] == ["ckpt-00000007"]


# hostile files ----------------------------------------------------------------------------------------------------------


def shard(path: Path, head, data: bytes = b"", digests: bytes | None = None) -> Path:
    """A shard of one draw whose name has the right hash, whatever its header says."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    if digests is None:
        parts = (data[a : a + 2**14] for a in range(0, len(data), 2**14))
        digests = b"".join(hashlib.sha256(part).digest()[:8] for part in parts)
    head = len(text).to_bytes(8, "little") + text
    root = hashlib.sha256(head + digests).hexdigest()[:16]
    file = path / "group-000" / f"draws-00000000-1-{root}.safetensors"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(head + data + digests)
    return file


def good(**changes):
    """The header of a draw of 2 chains x 3 parameters, or nearly so."""
    tensors = {
        "step": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        "theta": {"dtype": "F32", "shape": [1, 2, 3], "data_offsets": [8, 32]},
        "digests": {"dtype": "U8", "shape": [1, 8], "data_offsets": [32, 40]},
    }
    for name, change in changes.items():
        tensors[name] = {**tensors.get(name, {}), **change}
    return {name: entry for name, entry in tensors.items() if entry.get("shape") != "gone"}


HEADERS = {
    "overlap": good(theta={"data_offsets": [4, 28]}),
    "gap": good(theta={"data_offsets": [16, 40]}),
    "beyond the end": good(theta={"shape": [1, 2, 300], "data_offsets": [8, 2408]}),
    "offsets backwards": good(theta={"data_offsets": [32, 8]}),
    "negative offsets": good(theta={"data_offsets": [-8, 16]}),
    "one offset": good(theta={"data_offsets": [8]}),
    "offsets no numbers": good(theta={"data_offsets": ["8", "32"]}),
    "shape too large": good(theta={"shape": [2**40, 2**40, 2**40]}),
    "shape of another size": good(theta={"shape": [1, 2, 4]}),
    "negative shape": good(theta={"shape": [1, -2, -3]}),
    "true in a shape": good(theta={"shape": [True, 2, 3]}),
    "huge number": good(theta={"shape": [10**4000]}),
    "wrong dtype": good(theta={"dtype": "F33"}),
    "dtype no name": good(theta={"dtype": ["F32"]}),
    "another dtype": good(theta={"dtype": "I32"}),
    "another shape": good(theta={"shape": [2, 3]}),
    "more draws": good(theta={"shape": [2, 1, 3]}),
    "no theta": good(theta={"shape": "gone"}),
    "no step": good(step={"shape": "gone"}, theta={"data_offsets": [0, 24]}, digests={"data_offsets": [24, 32]}),
    "no digests": good(digests={"shape": "gone"}),
    "more digests": good(digests={"shape": [2, 4]}),
    "a stranger": good(odd={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
    "statistics of fewer chains": good(**{"stat.x": {"dtype": "U8", "shape": [1, 0], "data_offsets": [0, 0]}}),
    "more keys": good(theta={"code": "os.system"}),
    "no table": [1, 2],
    "tensors no tables": {"theta": 1},
    "metadata no text": {**good(), "__metadata__": {"a": 1}},
    "a key twice": b'{"theta":' + json.dumps(good()["theta"]).encode() + b"," + json.dumps(good()).encode()[1:],
    "nested deep": b'{"a":' * 100_000,
    "not text": b"\xff\xfe" * 20,
    "nothing": b"",
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers_are_refused_in_one_line(tmp_path, name):
    path = tmp_path / "run"
    store.create(path, {}, {})
    file = shard(path, HEADERS[name], bytes(32))
    for what in (store.SampleReader, store.SampleWriter, store.checkpoint):
        with pytest.raises(store.StoreError) as e:
            what(path)
        assert "\n" not in str(e.value)
        assert file.name in str(e.value)
        assert len(str(e.value)) < 700


def test_the_good_header_is_read(tmp_path):
    """Else the refusals above would mean nothing."""
    path = tmp_path / "run"
    store.create(path, {}, {})
    shard(path, good(), bytes(32))
    assert store.SampleReader(path).read().shape == (2, 1, 3)
    assert store.SampleReader(path).verify() > 0


@pytest.mark.parametrize("which", ["zip", "old", "header too long", "longer than the file", "short", "empty"])
def test_files_that_are_no_shards_are_refused(tmp_path, which):
    path = tmp_path / "run"
    store.create(path, {}, {})
    file = shard(path, good(), bytes(32))
    if which in ("zip", "old"):
        torch.save({"theta": torch.ones(1, 2, 3)}, file, _use_new_zipfile_serialization=which == "zip")
    else:
        long = {"header too long": 2**26 + 1, "longer than the file": 1_000}.get(which, 0)
        size = {"short": 7, "empty": 0}.get(which, 100)
        file.write_bytes((long.to_bytes(8, "little") + bytes(100))[:size])
        if which == "header too long":
            os.truncate(file, 2**27)
    for what in (store.SampleReader, store.SampleWriter):
        with pytest.raises(store.StoreError, match=file.name):
            what(path)
    ckpt = file.with_name("ckpt-00000000-0123456789abcdef.safetensors")
    file.rename(ckpt)
    with store.SampleWriter(path) as writer:
        assert writer.checkpoint() is None
        assert ckpt.name in writer.skipped[0]
    with pytest.raises(store.StoreError, match=ckpt.name):
        store.SampleReader(path).verify()


def test_hostile_run_json(tmp_path):
    store.create(tmp_path / "run", {"a": 1}, {})
    file = tmp_path / "run" / "run.json"
    whole = json.loads(file.read_text())
    for text in (
        "",
        "[]",
        "{",
        "[" * 100_000,
        '{"format": true}',
        '{"format": 1}',
        '{"format": 1, "sha256": {"run.json": 3}}',
    ):
        file.write_text(text)
        with pytest.raises(store.StoreError, match=r"run\.json.*expected") as e:
            store.about(tmp_path / "run")
        assert "\n" not in str(e.value)
    file.write_text(json.dumps({**whole, "a": 2}))
    with pytest.raises(store.StoreError, match="is damaged"):
        store.about(tmp_path / "run")


def test_a_shard_that_goes_while_it_is_read(tmp_path):
    make(tmp_path / "run")
    reader = store.SampleReader(tmp_path / "run")
    file = sorted((tmp_path / "run" / "group-000").glob("draws-*"))[1]
    os.truncate(file, 6_000)
    with pytest.raises(store.StoreError, match="ends at byte"):
        reader.read(draws=4)
    file.unlink()
    with pytest.raises(store.StoreError, match="cannot be opened"):
        reader.read(draws=4)
    assert torch.equal(reader.read(draws=8)[:, 0], theta(8))
    assert reader.shape == (C, 9, D)
