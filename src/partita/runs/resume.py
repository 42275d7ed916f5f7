"""A run folder opened again: to look at (`load`), to go on with (`resume`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from partita.runs import record, store
from partita.runs.checks import check_choices, check_target, whole
from partita.runs.describe import build
from partita.runs.halt import Halt
from partita.runs.keeping import OnDisk
from partita.runs.loop import Loop
from partita.runs.monitors import ScoreMonitor, TemperatureCheck, as_monitors
from partita.runs.progress import Progress
from partita.runs.run import Run
from partita.runs.setup import prepare, seeded
from partita.runs.store import checkpoints
from partita.runs.torchstate import switched
from partita.structure import Joint
from partita.target import Posterior, Target


def load(path: str | Path, target: Target | None = None) -> Run:
    """The run in this folder, its draws read from disk when they are looked at. The target may be left out when the run
    came from a recipe."""
    path = Path(path)
    info, fixed = store.about(path), store.fixed(path)
    target = _held(target or _recipe(path).posterior(), info, fixed)
    reader = store.SampleReader(path)
    state, values = checkpoints.newest(path) or ({}, {})
    C, D = info["settings"]["chains"], target.space.dim
    check = TemperatureCheck(torch.zeros(C, D))
    if state:
        check.restore({k.removeprefix("temperature/"): v for k, v in state.items() if k.startswith("temperature/")})
    heat = (state.get("heat", torch.full((C, D), math.nan)) / (check.n or math.nan)).float()
    groups = record.groups_of(info, fixed["labels"])
    settings = {**info["settings"], "done": values.get("t", 0), "device": _device(info["settings"]["device"])}
    kept = reader.steps
    return Run(
        target=target,
        samples=store.Draws(reader),
        steps=kept,
        settings=settings,
        metrics=[m for m in _records(path) if m["step"] <= settings["done"]],
        stopped=info["stopped"] if info["finished"] or info["stopped"] else "it has not finished: resume it",
        statistics=reader.stats(),
        temperature=check.groups(groups.labels, groups.count),
        heat=heat.mean(1),
        hottest=heat.mean(0).max().item(),
        probe=_probe(info, fixed),
        ensembles=info["ensembles"],
        groups=groups,
        history=record.Past(info["past"]) if info["past"] is not None else None,  # nothing in the folder is run
        forgotten=info["forget_at"] or 0,
    )


def resume(
    path: str | Path,
    target: Target | None = None,
    data: Any = None,
    *,
    steps: int | None = None,
    sampler: Any = None,
    structure: Any = None,
    monitor: Any = None,
    augment: Any = None,
    device: str | torch.device = "auto",
    progress: bool | None = None,
) -> Run:
    """Go on with the run in this folder, up to `steps` in TOTAL (default: what it was to take).

    On the same machine and versions the result is, bit for bit, that of a run that was never interrupted (on a GPU where
    its kernels are deterministic); elsewhere it is statistically valid. What a recipe or the folder holds may be left out:
    the target and data of a recipe, a sampler and a structure of Partita's own.
    """
    path = Path(path)
    info = store.about(path)
    settings = dict(info["settings"])
    total = settings["steps"] if steps is None else steps
    if not whole(total, 1):
        raise ValueError(f"steps is {steps!r}, expected a whole number: the new total")
    check_choices(None, settings["engine"], settings["precision"], augment, settings["keep"], progress)
    if target is None:
        recipe = _recipe(path)
        target, (train, test) = recipe.posterior(), recipe.data()
        data = train if data is None else data
        parts = recipe.settings
        augment, sampler = augment or parts.get("augment"), sampler or parts["sampler"]
        structure = structure or parts.get("structure", Joint())
        monitor = {"test": test} if monitor is None and test is not None and recipe.watches else monitor
    check_target(target)
    target = _held(target, info, store.fixed(path))
    sampler = _same(sampler or _built(info["sampler"], "sampler"), settings["sampler"], "sampler")
    structure = _same(structure or _built(info["structure"], "structure"), settings["structure"], "structure")
    if settings["augment"] is not None:
        augment = _same(augment or _built(info["augment"], "augment"), settings["augment"], "augment")
    elif augment is not None:
        raise ValueError(f"augment is {augment!r}, expected None: the run began without")
    monitors = as_monitors(monitor, target)
    with (
        OnDisk(path, settings["rows"]) as kept,
        seeded(settings["seed"], _device(settings["device"]) if device == "auto" else device, target) as dev,
        switched(settings["precision"]),
    ):
        whole_to, state, values = kept.writer.newest() or (0, {}, {})
        if not state:
            raise ValueError(f"{path} holds no checkpoint: expected one, start the run anew elsewhere")
        if bad := values.get("diverged"):
            raise ValueError(
                f"chains {bad} of {path} diverged at step {values['t']:,}, expected a run that can go on: start a new one "
                "with a smaller step"
            )
        if total < values["t"]:
            raise ValueError(f"steps is {total:,}, expected at least the {values['t']:,} that the run has taken")
        if total == values["t"]:
            if not info["finished"]:  # it was stopped between its last step and its end
                kept.finish({**settings, "done": total}, None)
            return load(path, target)
        settings |= {"steps": total, "notes": [], "device": str(dev), "seconds": values["seconds"]}
        plan = prepare(
            target,
            data,
            structure,
            sampler,
            chains=settings["chains"],
            batch_size=None if settings["loader"] else settings["batch_size"] if target.needs_data else None,
            init=settings["init"],
            start=state["theta"],
            device=dev,
            memory=settings["memory"],
            burn_in=settings["burn_in"],
            how=settings["chains_run"],
            precision="bf16" if settings["precision"] == "bf16" else "float32",
            augment=augment,
        )
        _check_data(info["data"], record.digest(plan.step.batches))
        left = sorted(set(settings["monitors"]) - {m.name for m in monitors if isinstance(m, ScoreMonitor)})
        notes = [f"goes on without the monitor {name!r} that it had" for name in left]
        notes += _elsewhere(info["machine"], record.machine(dev))
        settings["notes"] = [*dict.fromkeys([*info["settings"]["notes"], *plan.notes, *notes])]
        loop = Loop(plan, sampler, target, settings, kept)
        for m in monitors:
            if isinstance(m, ScoreMonitor):
                m.attach(plan.step, dev)
        loop.metrics = [m for m in _records(path) if m["step"] <= values["t"]]
        loop.restore(state, values, monitors)
        if whole_to < kept.writer.committed:
            kept.writer.rewind(whole_to)  # a newer checkpoint was lost: those draws come again
        del state  # with a long history it is most of the memory
        store.update(path, settings=settings, machine=record.machine(dev), finished=False, stopped=None)
        with Halt(catch=True) as halt:
            loop.begin(monitors)
            with Progress(total, settings, show=progress, done=loop.done) as bar:
                return told(loop.go(monitors, bar, halt), path)


def told(run: Run, path: Path) -> Run:
    """Says how to go on with a run that has stopped before its end."""
    if run.stopped:
        how = f"pt.resume({str(path)!r}, posterior, data)" if store.recipe(path) is None else f"partita resume {path}"
        line = f"{run.stopped}; {len(run.steps):,} draws a chain are saved, go on with {how}"
        Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)
    return run


def _recipe(path: Path) -> Any:
    from partita.runs.recipe import parse

    text = store.recipe(path)
    if text is None:
        raise ValueError(f"{path} holds no recipe, expected the posterior: pt.load({str(path)!r}, posterior)")
    return parse(text)


def _held(target: Target, info: dict[str, Any], fixed: dict[str, Tensor]) -> Target:
    """The target with the run's own values of all that is not random in it."""
    check_target(target)
    record.check_layout(info["space"], target.space)
    _same(target, info["settings"]["target"], "posterior")
    if not isinstance(target, Posterior):
        return target
    return target.holding({k.removeprefix("model/"): v for k, v in fixed.items() if k.startswith("model/")})


def _built(described: Any, what: str) -> Any:
    if described is None:
        raise ValueError(f"the run does not say what its {what} was, expected it: pt.resume(..., {what}=...)")
    if any(":" in s for s in _strings(described)):
        raise ValueError(f"the run's {what} names code of yours, expected it to be passed: pt.resume(..., {what}=...)")
    return build(described, what)


def _strings(table: Any) -> Iterator[str]:
    """Every string in a description: one that holds a colon would be imported."""
    if isinstance(table, dict):
        for v in table.values():
            yield from _strings(v)
    elif isinstance(table, list):
        for v in table:
            yield from _strings(v)
    elif isinstance(table, str):
        yield table


def _same(part: Any, saved: str, what: str) -> Any:
    """The part, when it is the one that the run began with."""
    if record.without_addresses(repr(part)) != record.without_addresses(saved):
        raise ValueError(f"the {what} is {part!r}, expected the run's: {saved}")
    return part


def _check_data(saved: dict[str, Any], here: dict[str, Any]) -> None:
    if saved["N"] != here["N"]:
        raise ValueError(f"the data have N = {here['N']:,} rows, expected the run's {saved['N']:,}")
    if saved.get("sha256") != here.get("sha256"):
        raise ValueError(
            "the data are not those the run began with (their hash differs), expected the same rows in order"
        )


def _elsewhere(saved: dict[str, Any], here: dict[str, Any]) -> list[str]:
    other = [f"{k} {saved.get(k)} -> {here[k]}" for k in here if saved.get(k) != here[k]]
    return [f"goes on statistically valid, not bit for bit: {', '.join(other)}"] if other else []


def _records(path: Path) -> list[dict[str, Any]]:
    """One record a step: what was noted after the checkpoint that a run went on from has been noted again."""
    return [m for _, m in sorted({m["step"]: m for m in store.notes(path)}.items())]


def _probe(info: dict[str, Any], fixed: dict[str, Tensor]) -> Any:
    count = sum(k.startswith("probe/") for k in fixed)
    return record.rebuilt(info["probe"], (fixed[f"probe/{i}"] for i in range(count))) if count else None


def _device(name: str) -> str:
    return name if not name.startswith("cuda") or torch.cuda.is_available() else "cpu"
