"""What a run folder must survive: kills, power loss, full disks, flipped bits, cut files. The functions here are the tests
of test_store_faults.py in their short form; the long form is a script:

    python tests/torture_store.py                  all of it: 200 kills, 300 flips, 100 cuts, every operation
    python tests/torture_store.py speed --gb 10    time of reading one parameter out of so many GB
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import errno
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.runs import store
from partita.runs.store import disk

C, D = 2, 700  # a draw is 5.6 kB: shards of a few draws have several blocks
BASE = torch.arange(C * D, dtype=torch.float64).reshape(C, D)
WHAT = ("kills", "power", "faults", "damage", "speed", "all")


def theta(number: int, era: int = 0) -> Tensor:
    """Draw `number` [C, D]: whoever reads it knows what it must be. After a rewind a new era's draws are others."""
    return torch.sin(BASE + 0.37 * number + 0.11 * era).float()


def stats(number: int, era: int = 0) -> dict[str, Tensor]:
    return {"bn.mean": theta(number, era)[:, :3].double(), "bn.count": torch.full((C,), number)}


def state(number: int, era: int = 0) -> dict[str, Tensor]:
    return {"theta": theta(number, era), "number": torch.tensor(number), "rng": torch.arange(number % 50).byte()}


def make(path: Path, commits: tuple[int, ...] = (3, 4, 2)) -> int:
    """A run of a few shards; how many draws it has."""
    store.create(path, {"name": "torture"}, {"w": theta(0)}, recipe="steps = 10\n")
    with store.SampleWriter(path) as writer:
        for n in commits:
            add(writer, n)
        return writer.committed


def add(writer: store.SampleWriter, n: int, era: int = 0) -> int:
    fill(writer, n, era)
    return writer.commit(state(writer.committed + len(writer._rows), era), {"era": era})


def fill(writer: store.SampleWriter, n: int, era: int = 0) -> None:
    for _ in range(n):
        number = writer.committed + len(writer._rows)
        writer.append(number * 10, theta(number, era), stats(number, era))


def right(path: Path, eras: list[int] | None = None) -> int:
    """Everything that can be read is what was written; how many draws it is."""
    reader = store.SampleReader(path)
    S = reader.shape[1]
    eras = [0] * S if eras is None else eras
    assert len(eras) == S, f"{S} draws, expected {len(eras)}"
    assert reader.steps == [10 * i for i in range(S)]
    if S:
        assert torch.equal(reader.read(), torch.stack([theta(i, e) for i, e in enumerate(eras)], 1))
        numbers = reader.stats()["bn.count"]
        assert torch.equal(numbers, torch.arange(S).expand(C, S))
    assert reader.verify() > 0
    return S


def one_line(e: BaseException) -> str:
    text = str(e)
    assert "\n" not in text
    assert "None" not in text
    return text


# kills ----------------------------------------------------------------------------------------------------------------


def kills(path: Path, times: int, seed: int = 0) -> str:
    """A forked writer is killed at random moments, again and again, in one run folder."""
    store.create(path, {}, {})
    rng, lost, acknowledged, total = random.Random(seed), 0, 0, 0
    for i in range(times):
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                _write_on(path, into, seed + i)
            os._exit(1)  # only a kill ends it well
        os.close(into)
        with open(out, "rb") as pipe:
            heard = pipe.readline() if rng.random() < 0.8 else b""  # or in its first moments
            time.sleep(rng.random() * 0.15)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            heard += pipe.read()
        assert os.WIFSIGNALED(status), "the writer ended by itself"
        before, acknowledged = acknowledged, max([acknowledged, *(int(n) for n in heard.split())])
        total += acknowledged - before
        S = right(path)
        lost += max(0, acknowledged - S)
        with store.SampleWriter(path) as writer:  # adopts what the dead process held
            assert writer.committed == S
            if S:
                assert writer.checkpoint_next == S
                found = writer.checkpoint()
                assert found is not None
                assert torch.equal(found[0]["theta"], theta(S))
            if S > 400:  # small again, or each look takes long
                writer.rewind(0)
                acknowledged = 0
    assert lost == 0
    return f"{times} kills, {total:,} draws acknowledged, {lost} lost"


def _write_on(path: Path, into: int, seed: int) -> None:
    rng = random.Random(seed)
    with store.SampleWriter(path) as writer:
        while True:
            n = rng.randint(1, 4)
            fill(writer, n)
            acknowledged = writer.commit(state(writer.committed + n), {})
            os.write(into, f"{acknowledged}\n".encode())


# power loss -----------------------------------------------------------------------------------------------------------


class File:
    """What a file holds now, and what of it survives a power loss."""

    def __init__(self) -> None:
        self.now, self.safe = b"", b""


class Watched:
    """The disk as the store sees it, and beside it what would be left of it. `tell(operation, path)` is called before
    every operation, and "written" in the middle of every write; it may raise."""

    def __init__(self, root: Path, tell: Callable[[str, Path], None]):
        self.root, self.tell = root, tell
        self.now: dict[Path, dict[str, File | None]] = {root: {}}  # folder -> its names; None is a folder
        self.safe: dict[Path, dict[str, File | None]] = {root: {}}
        self.open: dict[int, tuple[Path, File]] = {}

    def create(self, path: Path) -> int:
        self.tell("create", path)
        fd = self.real["create"](path)
        file = self.now[path.parent].get(path.name) or File()
        file.now = b""
        self.now[path.parent][path.name] = file
        self.open[fd] = (path, file)
        return fd

    def write(self, fd: int, data: Any) -> None:
        path, file = self.open.get(fd, (None, None))
        if path is None or file is None:  # metrics.jsonl is not kept book of
            return self.real["write"](fd, data)
        raw = bytes(memoryview(data).cast("B"))
        self.tell("write", path)
        for part in (raw[: len(raw) // 2], raw[len(raw) // 2 :]):
            self.real["write"](fd, part)
            file.now += part
            if part is not raw:
                self.tell("written", path)

    def fsync(self, fd: int) -> None:
        path, file = self.open.get(fd, (None, None))
        if file is not None and path is not None and path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
            self.tell("fsync", path)
            file.safe = file.now
            return
        for folder in self.now:
            if folder.exists() and os.path.samestat(os.fstat(fd), folder.stat()):
                self.tell("fsync", folder)
                self.safe[folder] = dict(self.now[folder])

    def rename(self, old: Path, new: Path) -> None:
        self.tell("rename", new)
        self.real["rename"](old, new)
        self.now[new.parent][new.name] = self.now[old.parent].pop(old.name)

    def unlink(self, path: Path) -> None:
        self.tell("unlink", path)
        self.real["unlink"](path)
        del self.now[path.parent][path.name]

    def mkdir(self, path: Path) -> None:
        self.tell("mkdir", path)
        self.real["mkdir"](path)
        self.now[path.parent][path.name] = None
        self.now[path], self.safe[path] = {}, {}

    @contextlib.contextmanager
    def put(self) -> Iterator[Watched]:
        """In the place of the real disk; nothing is really fsynced."""
        names = ("create", "write", "fsync", "rename", "unlink", "mkdir")
        self.real = {name: getattr(disk, name) for name in names}
        try:
            for name in names:
                setattr(disk, name, getattr(self, name))
            yield self
        finally:
            for name in names:
                setattr(disk, name, self.real[name])

    def left(self, choose: Callable[[Any, Any], Any]) -> dict[Path, bytes]:
        """The files after a loss; `choose(now, safe)` says what became of each name and each content."""
        files = {}
        for folder in self.now:
            above = [f for f in (folder, *folder.parents) if self.root in f.parents]
            if not all(f.name in self.safe[f.parent] or choose(True, False) for f in above):
                continue
            for name in {**self.now[folder], **self.safe[folder]}:
                file = choose(self.now[folder].get(name), self.safe[folder].get(name))
                if file is not None:
                    files[folder / name] = file.now if file.now == file.safe else choose(file.now, file.safe)
        return files


def choices(rng: random.Random) -> list[Callable[[Any, Any], Any]]:
    """What a power loss may leave: all, only what was fsynced, names without contents, anything between."""

    def between(now: Any, safe: Any) -> Any:
        some = rng.choice((now, safe))
        return some[: rng.randint(0, len(some))] + bytes(rng.randint(0, 9)) if isinstance(now, bytes) else some

    names = lambda now, safe: safe if isinstance(now, bytes) else now
    return [lambda now, safe: now, lambda now, safe: safe, names, between, between]


class Story:
    """A run's life, told in actions. `done`: the eras of the draws that are safe; `aim`: of those an action in progress
    will have left."""

    def __init__(self, path: Path):
        self.path, self.writer = path, None
        self.created = self.updated = False
        self.done: list[int] = []
        self.aim: list[int] | None = None
        self.doing = ""

    def live(self, attempt: Callable[[Callable[[], Any]], Any]) -> None:
        attempt(self._create)
        attempt(self._open)
        attempt(lambda: self._commit(0, 0))
        attempt(lambda: self._commit(0, 0))
        attempt(lambda: self._commit(3, 0))
        attempt(self._update)
        attempt(lambda: self._commit(2, 0))
        attempt(lambda: self._commit(1, 0))
        attempt(lambda: self._rewind(5))  # where the older checkpoint is
        attempt(lambda: self._commit(3, 1))
        attempt(self._close)
        attempt(self._open)
        attempt(lambda: self._commit(1, 1))
        attempt(self._close)

    def _create(self) -> None:
        store.create(self.path, {"name": "story"}, {"w": theta(0)}, recipe="a = 1\n")
        self.created = True

    def _open(self) -> None:
        self.writer = store.SampleWriter(self.path)

    def _update(self) -> None:
        store.update(self.path, engine="eager")
        self.updated = True

    def _commit(self, n: int, era: int) -> None:
        assert self.writer is not None
        self.aim, self.doing = self.done + [era] * n, "commit"
        if self.writer.committed + len(self.writer._rows) < len(self.aim):  # a second attempt finds them still there
            fill(self.writer, n, era)
        self.writer.commit(state(len(self.aim), era), {"era": era})
        self.done, self.aim = self.aim, None

    def _rewind(self, next: int) -> None:
        assert self.writer is not None
        self.aim, self.doing = self.done[:next], "rewind"
        self.writer.rewind(next)
        self.done, self.aim = self.aim, None

    def _close(self) -> None:
        assert self.writer is not None
        self.writer.close()

    def may_be(self, eras: list[int]) -> bool:
        """Whether a crash may leave these draws."""
        if self.aim is None or eras == self.done:
            return eras == self.done
        return eras == self.aim or (
            self.doing == "rewind" and eras == self.done[: len(eras)] and len(eras) > len(self.aim)
        )


def power(folder: Path, rounds: int = 1, seed: int = 0, every: int = 1) -> str:
    """Power is lost before (and in the middle of) every operation of a run's life; what is left must open and go on."""
    moments: list[tuple[Watched, Story]] = []
    story = Story(folder / "live" / "run")
    (folder / "live").mkdir()

    def tell(operation: str, path: Path) -> None:
        told = copy.copy(story)
        told.writer = None
        seen = copy.copy(watched)
        seen.now, seen.safe = copy.deepcopy((watched.now, watched.safe))
        moments.append((seen, told))

    watched = Watched(folder / "live", tell)
    with watched.put():
        story.live(lambda action: action())
    rng, states, worlds = random.Random(seed), 0, set()
    for i, (seen, told) in list(enumerate(moments))[::every]:
        for choose in choices(rng) * rounds:
            files = seen.left(choose)
            world = hash((frozenset(files.items()), tuple(told.done), tuple(told.aim or ())))
            if world in worlds:
                continue
            worlds.add(world)
            states += 1
            here = folder / f"after-{i}-{states}"
            for path, raw in files.items():
                new = here / path.relative_to(folder / "live")
                new.parent.mkdir(parents=True, exist_ok=True)
                new.write_bytes(raw)
            _survived(here / "run", told)
    return f"power lost at {len(moments[::every])} operations, {states} different disks left, all of them right"


def _survived(path: Path, told: Story) -> None:
    if not (path / "run.json").exists():
        assert not told.created, "run.json is lost"
        store.create(path, {"name": "story"}, {"w": theta(0)})
    about = store.about(path)
    assert about["name"] == "story"
    assert about.get("engine") == "eager" or not told.updated
    assert torch.equal(store.fixed(path)["w"], theta(0))
    with store.SampleWriter(path) as writer:
        S = writer.committed
        known = [[0] * S, ([0] * 5 + [1] * S)[:S]]
        eras = next(
            e
            for e in known
            if S == 0 or torch.equal(store.SampleReader(path).read(0, S - 1)[0, 0], theta(S - 1, e[-1])[0])
        )
        assert told.may_be(eras), f"{eras} is left of {told.done}, on the way to {told.aim}"
        if told.done and told.doing == "commit":
            assert writer.checkpoint_next == S
        found = writer.checkpoint_next
        if found is not None and found < S:  # in the middle of a rewind
            assert told.doing == "rewind"
            writer.rewind(found)
            eras = eras[:found]
        right(path, eras)
        fill(writer, 2, 1)
        writer.commit(state(len(eras) + 2, 1), {})
    right(path, [*eras, 1, 1])
    assert not list(path.rglob("group-*/*.tmp"))


# faults ---------------------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[Callable[[], BaseException], tuple[str, ...]]] = {
    "ENOSPC": (lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ("create", "write", "written", "mkdir")),
    "EFBIG": (lambda: OSError(errno.EFBIG, os.strerror(errno.EFBIG)), ("write", "written")),
    "EIO": (lambda: OSError(errno.EIO, os.strerror(errno.EIO)), ("fsync", "rename", "unlink")),
    "EROFS": (lambda: OSError(errno.EROFS, os.strerror(errno.EROFS)), ("create", "mkdir")),
    "interrupt": (KeyboardInterrupt, ("create", "write", "written", "fsync", "rename", "unlink", "mkdir")),
}


def faults(folder: Path, kind: str, lasting: int = 1, every: int = 1) -> str:
    """Each operation fails once, or with those after it; afterwards the same action is tried again, and all is right."""
    error, where = FAULTS[kind]
    at, felt = 0, 0
    while True:
        seen = [0]
        path = folder / f"{kind}-{at}"
        path.mkdir()

        def tell(operation: str, _: Path, seen: list[int] = seen, at: int = at) -> None:
            if operation in where:
                seen[0] += 1
                if at < seen[0] <= at + lasting:
                    raise error()

        story = Story(path / "run")

        def attempt(action: Callable[[], Any], story: Story = story, at: int = at) -> Any:
            nonlocal felt
            for _ in range(lasting + 1):
                try:
                    return action()
                except (store.StoreError, KeyboardInterrupt) as e:
                    felt += 1
                    if isinstance(e, KeyboardInterrupt) and story.doing == "commit" and story.aim is not None:
                        assert story.writer is not None
                        if story.writer.committed == len(story.aim):  # it came after the commit was one
                            story.done, story.aim = story.aim, None
                            return right(story.path, story.done)
                    one_line(e)
                    if story.created:
                        eras = story.done
                        if story.doing == "rewind" and story.aim is not None:
                            eras = story.done[: store.SampleReader(story.path).shape[1]]
                            assert len(eras) >= len(story.aim)
                        right(story.path, eras)
            raise AssertionError(f"{kind} at {at} does not end")

        with Watched(path, tell).put():
            story.live(attempt)
            right(story.path, [0] * 5 + [1] * 4)
            assert len(list(path.glob("run/group-000/ckpt-*"))) in (2, 3)  # the last one's pruning may have failed
        if seen[0] <= at:
            return f"{kind} at each of {at} operations, {felt} errors told in one line, 0 draws lost"
        at += every


# damage ---------------------------------------------------------------------------------------------------------------


def damage(path: Path, flips: int, cuts: int, seed: int = 0) -> str:
    """One bit, or the end, of one file is damaged at a time: reported, and what is still returned is right."""
    S = make(path)
    rng = random.Random(seed)
    names = ("run.json", "recipe.toml", "fixed.safetensors", "group-*/draws-*", "group-*/ckpt-*")
    files = [p for name in names for p in sorted(path.glob(name))]
    truth = torch.stack([theta(i) for i in range(S)], 1)
    returned = refused = 0
    for i in range(flips + cuts):
        file = rng.choice(files)
        whole = file.read_bytes()
        if i < flips:
            bit = rng.randrange(8 * len(whole))
            bad = bytearray(whole)
            bad[bit // 8] ^= 1 << bit % 8
            file.write_bytes(bad)
        else:
            file.write_bytes(whole[: rng.randrange(len(whole))])
        try:
            store.SampleReader(path).verify()
            raise AssertionError(f"the damage of {file} is not seen")
        except store.StoreError as e:
            said = one_line(e)
        assert file.name in said or file.parent == path, f"{said}, and {file} is what was damaged"
        for _ in range(6):
            s, d = rng.randrange(S), rng.randrange(D - 40)
            columns = rng.choice((d, slice(d, d + 40), slice(None)))
            try:
                part = store.SampleReader(path).read(draws=s, columns=columns)
                part_truth = truth[:, s : s + 1, columns if isinstance(columns, slice) else slice(d, d + 1)]
                assert torch.equal(part, part_truth), f"{file} damaged, and a damaged draw returned"
                returned += 1
            except store.StoreError:
                refused += 1
        file.write_bytes(whole)
    right(path)
    return (
        f"{flips} flips and {cuts} cuts all reported; of the reads meanwhile {returned} were right, {refused} refused"
    )


# speed ----------------------------------------------------------------------------------------------------------------


def speed(folder: Path, gb: float, draws: int = 5_000, chains: int = 1) -> str:
    """A run of so many GB, and the time one parameter's draws take to read, with a cold and a warm page cache."""
    width = int(gb * 1e9 / draws / chains / 4)
    path = folder / "speed"
    store.create(path, {}, {})
    base = torch.randn(chains, width)
    began = time.perf_counter()
    with store.SampleWriter(path, commit_bytes=64 * 2**20, commit_seconds=1e9) as writer:
        for s in range(draws):
            base[:, s % width] = s
            writer.append(s, base)
            if writer.due or s == draws - 1:
                writer.commit({}, {})
    wrote = time.perf_counter() - began
    for file in path.rglob("draws-*"):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    began = time.perf_counter()
    reader = store.SampleReader(path)
    opened = time.perf_counter() - began
    lines = [f"{chains} x {draws:,} draws x {width:,}: {gb:g} GB written in {wrote:.1f} s, opened in {opened:.3f} s"]
    for column, how in ((width // 2, "cold"), (width // 2, "warm"), (width // 3, "cold"), (width // 5, "cold")):
        began, before = time.perf_counter(), reader.touched
        values = reader.read(columns=column)
        took = time.perf_counter() - began
        assert values.shape == (chains, draws, 1)
        lines.append(f"one column, {how}: {took:.3f} s, {(reader.touched - before) / 2**20:.1f} MiB read and checked")
    began = time.perf_counter()
    one = reader.read(chains=0, draws=draws // 2)
    lines.append(f"one draw: {time.perf_counter() - began:.4f} s")
    assert one[0, 0, (draws // 2) % width] == draws // 2
    began = time.perf_counter()
    checked = reader.verify()
    lines.append(f"verify: {checked / 1e9 / (time.perf_counter() - began):.2f} GB/s")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=WHAT)
    parser.add_argument("--times", type=int, default=200, help="kills")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--chains", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to work (default: the system's temporary folder)"
    )
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        folder, what = Path(made), given.what
        if what in ("kills", "all"):
            print(kills(folder / "kills", given.times, given.seed), flush=True)
        if what in ("power", "all"):
            print(power(folder, 20, given.seed), flush=True)
        if what in ("faults", "all"):
            for kind in FAULTS:
                for lasting in (1, 3) if kind in ("ENOSPC", "EFBIG", "EROFS") else (1,):
                    (folder / str(lasting)).mkdir(exist_ok=True)
                    print(faults(folder / str(lasting), kind, lasting), flush=True)
        if what in ("damage", "all"):
            print(damage(folder / "damage", 300, 100, given.seed), flush=True)
        if what == "speed":
            print(speed(folder, given.gb, chains=given.chains), flush=True)


if __name__ == "__main__":
    sys.exit(main())
