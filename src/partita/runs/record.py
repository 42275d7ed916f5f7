"""What a run folder says of its run: all that `load` and `resume` need beside draws and checkpoints."""

from __future__ import annotations

import datetime
import hashlib
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from partita.engine.batches import Batches
from partita.runs.describe import describe
from partita.runs.setup import Plan
from partita.structure.partitions import Groups
from partita.target import ParameterSpace, Posterior, Target
from partita.target.trees import leaves

NAMES = 4096  # more group names than this are numbers when a run is loaded
FOREVER = 2**62
HASHED = 2**28  # bytes of data looked at for the digest; of more, rows evenly spread


def about(
    target: Target, plan: Plan, sampler: Any, structure: Any, augment: Any, settings: dict[str, Any]
) -> dict[str, Any]:
    """The content of run.json."""
    groups = plan.step.structure.groups
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": settings,
        "sampler": _described(sampler),
        "structure": _described(structure),
        "augment": None if augment is None else _described(augment),
        "past": Past.of(plan.step.structure.history).most if plan.step.structure.history is not None else None,
        "space": layout(target.space),
        "ensembles": plan.ensembles,
        "forget_at": plan.forget_at,
        "groups": [groups.name(i) for i in range(groups.count)] if groups.count <= NAMES else groups.count,
        "probe": skeleton(plan.probe),
        "data": digest(plan.step.batches),
        "machine": machine(plan.device),
        "finished": False,
        "stopped": None,
    }


@dataclass(frozen=True)
class Past:
    """What a summary asks of a history: how far back it reaches, in steps (None: it has no past)."""

    most: int | None

    @classmethod
    def of(cls, history: Any) -> Past:
        return cls(history.span(FOREVER))

    def span(self, steps: int) -> int | None:
        return None if self.most is None else min(steps, self.most)


def without_addresses(said: str) -> str:
    """A repr without what differs from process to process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", said)


def fixed(target: Target, plan: Plan) -> dict[str, Tensor]:
    """The content of fixed.safetensors: what of the model is not random, the groups, the probe inputs."""
    held = target.fixed() if isinstance(target, Posterior) else {}
    probe = {} if plan.probe is None else {f"probe/{i}": t for i, (_, t) in enumerate(leaves(plan.probe))}
    kept = {**{f"model/{k}": v for k, v in held.items()}, **probe, "labels": plan.step.structure.groups.labels}
    return {k: v.detach().cpu().contiguous() for k, v in kept.items()}


def machine(device: torch.device) -> dict[str, Any]:
    """What the last bits of a run depend on."""
    return {
        "partita": _version("partita"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
    }


def layout(space: ParameterSpace) -> list[list[Any]]:
    """[name, shape, dtype] of every random tensor, in the order of θ."""
    return [[b.name, list(b.shape), str(b.dtype).removeprefix("torch.")] for b in space.blocks]


def check_layout(saved: list[list[Any]], space: ParameterSpace) -> None:
    here = layout(space)
    if here == saved:
        return
    said = lambda rows: (
        "; ".join(f"{n} {s} {d}" for n, s, d in rows[:4]) + ("; …" if len(rows) > 4 else "") or "nothing"
    )
    other = lambda mine, theirs: said([r for r in mine if r not in theirs] or mine)
    raise ValueError(f"the posterior's parameters are {other(here, saved)}, expected the run's: {other(saved, here)}")


def digest(batches: Batches) -> dict[str, Any]:
    """N, and of data in memory a hash of their content: a run goes on with the same data."""
    found: dict[str, Any] = {"N": batches.N}
    if not hasattr(batches, "x"):
        return found
    h = hashlib.sha256()
    for path, t in leaves((batches.x, batches.targets()), "data"):
        every = max(1, -(-t.numel() * t.element_size() // HASHED))
        h.update(f"{path} {t.dtype} {list(t.shape)}".encode())
        rows = t[::every].detach().cpu().contiguous()
        h.update(rows.view(-1).view(torch.uint8).numpy().data if rows.numel() else b"")
    return {**found, "sha256": h.hexdigest()}


def skeleton(tree: Any) -> Any:
    """The nesting of a tree of tensors as plain values; null stands for a tensor."""
    if isinstance(tree, Mapping):
        return {str(k): skeleton(v) for k, v in tree.items()}
    return [skeleton(v) for v in tree] if isinstance(tree, (tuple, list)) else None


def rebuilt(bones: Any, tensors: Iterator[Tensor]) -> Any:
    """The tree again, its tensors in the order of `leaves`."""
    if isinstance(bones, dict):
        return {k: rebuilt(v, tensors) for k, v in bones.items()}
    return tuple(rebuilt(v, tensors) for v in bones) if isinstance(bones, list) else next(tensors)


def groups_of(info: dict[str, Any], labels: Tensor) -> Groups:
    names = info["groups"]
    if isinstance(names, int):
        return Groups(labels.long(), names, lambda i: f"group {i:,}")
    return Groups(labels.long(), len(names), lambda i: names[i])


def _described(obj: Any) -> Any:
    """As plain values; null where it cannot be written, so that `resume` asks for it."""
    try:
        return describe(obj)
    except ValueError:
        return None


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "source"
