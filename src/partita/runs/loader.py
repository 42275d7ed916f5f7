"""A DataLoader as the engine's batches: C of them a step, one for each chain."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sized
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from partita.target import Batch
from partita.target.pairs import as_pair, check_lengths, check_values, what
from partita.target.trees import leaves, map_tree, zip_trees


class Loader:
    """A DataLoader of (x, y) pairs, gone through again and again; short last batches are left out. Batches go to a GPU
    from pinned memory on a stream of their own, beside the step before."""

    inside = False

    def __init__(self, loader: DataLoader, device: torch.device):
        if loader.batch_sampler is None and not isinstance(loader.sampler, BatchSampler):
            raise ValueError("the DataLoader has batch_size=None, expected one that makes batches of single rows")
        self.N = _count(loader)
        self.shuffled = not isinstance(_sampler(loader), SequentialSampler)
        if not self.shuffled:
            warnings.warn("the DataLoader does not shuffle: batches come in the data's own order", stacklevel=4)
        self.loader, self.device, self.B = loader, device, 0
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.check: Callable[[Tensor], None] | None = None  # of the targets of every batch to come
        self._source = self._forever()
        self._first = next(self._source)
        self._ahead = deque([self._first])  # looked up, not yet drawn
        self._last = [self._first]
        self._inputs: list[Any] = []

    def draw(self, C: int) -> Batch:
        self._last = [self._ahead.popleft() if self._ahead else next(self._source) for _ in range(C)]
        return self._send(zip_trees(torch.stack, self._last))

    def look(self, C: int) -> Batch:
        """The last batches drawn, once more."""
        return self._send(zip_trees(torch.stack, list(islice(cycle(self._last), C))))

    def head(self, rows: int) -> Batch:
        return self._send(map_tree(lambda t: t[:rows], self._first))

    def targets(self) -> Tensor:
        return self._first[1]

    def inputs(self, rows: int) -> Iterator[Any]:
        """Looked up once and put back: a second pass beside the first would move the loader's random state."""
        if not self._inputs:
            few = max(
                min(rows // self.B, self.N // self.B, len(self.loader)), 1
            )  # of one pass: `restore` goes through one
            self._ahead.extend(islice(self._source, max(few - len(self._ahead), 0)))
            self._inputs = [self._send(x) for x, _ in islice(self._ahead, few)]
        return iter(self._inputs)

    def state(self) -> dict[str, Tensor]:
        """The place in the present pass, and the random numbers the pass began with."""
        place = torch.tensor([self._seen, len(self._ahead)])
        return {"place": place, **{f"began.{k}": v for k, v in self._began.items()}}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Go through the present pass again, up to that place. Moves torch's random state, as the pass did."""
        seen, ahead = state["place"].tolist()
        torch.set_rng_state(state["began.cpu"])
        for i, own in enumerate(self._generators()):
            if f"began.{i}" in state:
                own.set_state(state[f"began.{i}"])
        self._source, self._ahead = self._forever(), deque(maxlen=ahead)
        self._seen = 0
        while self._seen < seen:
            self._ahead.append(next(self._source))
        self._ahead = deque(self._ahead)

    def _pair(self, batch: Any, number: int) -> tuple[Any, Tensor]:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise ValueError(f"the DataLoader gives {what(batch)}, expected pairs (x, y)")
        x, y = as_pair(batch)
        check_lengths(x, y)
        try:
            check_values(x, y)
            if self.check is not None:
                self.check(y)
        except ValueError as e:
            raise ValueError(f"batch {number:,} of the DataLoader: {e}") from None
        return x, y

    def _generators(self) -> list[torch.Generator]:
        """Those a pass draws its order from."""
        inner = self.loader.batch_sampler
        found = [
            getattr(o, "generator", None) for o in (self.loader, self.loader.sampler, getattr(inner, "sampler", None))
        ]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def _send(self, batch: Any) -> Any:
        """A batch on the device."""
        if self._side is None:
            return map_tree(lambda t: t.to(self.device), batch)
        here = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._side):
            pinned = map_tree(lambda t: t if t.is_cuda else t.pin_memory(), batch)
            batch = map_tree(lambda t: t.to(self.device, non_blocking=True), pinned)
        here.wait_stream(self._side)
        for _, t in leaves(batch):
            t.record_stream(here)
        return batch

    def _forever(self) -> Iterator[tuple[Any, Tensor]]:
        while True:
            full, self._seen = 0, 0
            owns = {str(i): own.get_state() for i, own in enumerate(self._generators())}
            self._began = {"cpu": torch.get_rng_state(), **owns}
            for number, batch in enumerate(self.loader):
                self._seen = number + 1
                x, y = self._pair(batch, number)
                self.B = self.B or int(y.shape[0])
                if y.shape[0] == self.B:
                    full += 1
                    yield x, y
            if not full:
                raise ValueError(
                    f"the DataLoader gives no full batch in a pass over its N = {self.N:,} data, expected at least one"
                )


def _sampler(loader: DataLoader) -> Any:
    """What draws the loader's rows."""
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    return getattr(batches, "sampler", None)


def _count(loader: DataLoader) -> int:
    """N: the rows a loader's passes go over. A sampler of a subset knows better than the data set."""
    try:
        n = len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError("the DataLoader's dataset has no length, expected one: N scales the likelihood") from None
    sampler = _sampler(loader)
    if sampler is None:
        warnings.warn(
            f"the DataLoader's batch_sampler does not say what it samples: N is taken as all {n:,} rows of the data set",
            stacklevel=5,
        )
    if isinstance(sampler, SubsetRandomSampler):
        return len(sampler)
    if isinstance(sampler, WeightedRandomSampler):
        raise ValueError(
            "the DataLoader draws rows with weights, expected every row equally often: N scales them alike"
        )
    drawn = len(sampler) if isinstance(sampler, Sized) else n
    if drawn != n and not isinstance(sampler, (RandomSampler, DistributedSampler)):
        raise ValueError(
            f"the DataLoader's sampler draws {drawn:,} of the data set's {n:,} rows, so N is not known: expected a "
            "DataLoader of a torch.utils.data.Subset"
        )
    return n
