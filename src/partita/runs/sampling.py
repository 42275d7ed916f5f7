"""`sample`: everything that is settled before the loop, then the loop."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from partita.runs import record, store
from partita.runs.checks import check_choices, check_sampler, check_target, gib, lengths
from partita.runs.halt import Halt
from partita.runs.keeping import InMemory, OnDisk
from partita.runs.loop import Loop
from partita.runs.monitors import ScoreMonitor, as_monitors
from partita.runs.progress import Progress
from partita.runs.resume import told
from partita.runs.run import Run
from partita.runs.setup import Plan, available_memory, prepare, seeded
from partita.runs.torchstate import switched
from partita.samplers import Sampler
from partita.structure import Joint, Structure
from partita.target import Target
from partita.target.trees import short

KEEP = 2 * 2**30  # bytes of draws that keep="auto" allows


def sample(
    target: Target,
    data: Any = None,
    *,
    sampler: Sampler,
    structure: Structure | None = None,
    steps: int,
    burn_in: int | None = None,
    thin: int | None = None,
    chains: int = 4,
    batch_size: int | None = None,
    init: Any = "fresh",
    spread: float | None = None,
    seed: int = 0,
    monitor: Any = None,
    monitor_every: int | None = None,
    device: str | torch.device = "auto",
    engine: str = "auto",
    precision: str = "float32",
    augment: Callable[[Any], Any] | None = None,
    keep: str = "auto",
    memory: int | None = None,
    progress: bool | None = None,
    out: str | Path | None = None,
    rows: str | None = None,
    recipe: str | None = None,
) -> Run:
    """Sample a target with C chains at once, each with its own minibatches, masks and past draws.

    data            (x, y) tensors or arrays, a Dataset or a DataLoader; none for a Density
    steps, burn_in  all steps, and how many of them come first and are not kept (default: a quarter)
    thin            keep every thin-th state after burn-in (default: at most 1,000 draws a chain)
    batch_size      rows a chain sees a step (default: 128, or all when there are fewer)
    init, spread    "fresh" | "module" | "prior" | "map" | tensor [D] or [C, D]; plus spread · N(0, 1)
    monitor         {name: (x, y)} is scored, functions of a `Moment` are called, every monitor_every steps; a function
                    that returns a string stops the run, and the run records why
    engine          "eager"; "compile"; "graph", a CUDA graph of the compiled step; "auto" compiles when the run repays it
    precision       "bf16" or "tf32": the network's; θ, noise and the sampler's state stay float32 ("float32" leaves
                    torch's own tf32 switches as they are)
    augment         x -> x for the batches of all chains at once, leaves [C, B, ...], drawn anew for every row
    keep            "auto" thins further so that the draws take at most 2 GiB; "all" keeps what was asked or refuses
    out             a new folder for the run: draws, checkpoints and records are saved as they come, `pt.load(out)` reads
                    them, `pt.resume(out)` goes on; Ctrl-C, SIGTERM and SIGUSR1 save and stop (`recipe`: its text)
    rows            "bfloat16" halves the draws on disk; refused where it would blur the posterior (default: θ's own dtype)
    memory          bytes the compositions of one step may take at once (default: 1 GiB, on a GPU a quarter of what is free)
    """
    check_target(target)
    check_sampler(sampler)
    steps, burn_in, thin = lengths(steps, burn_in, thin)
    check_choices(monitor_every, engine, precision, augment, keep, progress)
    sampler.check(target.temperature, burn_in)
    monitors = as_monitors(monitor, target)
    folder = None if out is None else _new_folder(out)
    if rows not in (None, "float32", "bfloat16") or (rows is not None and folder is None):
        raise ValueError(f"rows is {rows!r}, expected 'float32' or 'bfloat16', of a run with a folder (out=...)")
    if not isinstance(recipe, str | None):
        raise ValueError(f"recipe is {short(recipe)}, expected the text of a recipe")
    with seeded(seed, device, target) as dev, switched(precision):
        whole: Structure = Joint() if structure is None else structure
        plan = prepare(
            target,
            data,
            whole,
            sampler,
            chains=chains,
            batch_size=batch_size,
            init=init,
            device=dev,
            spread=spread,
            memory=memory,
            burn_in=burn_in,
            precision="bf16" if precision == "bf16" else "float32",
            augment=augment,
        )
        thin, notes = _fit_draws(plan, steps - burn_in, thin, keep, folder, 2 if rows == "bfloat16" else None)
        settings: dict[str, Any] = {
            "target": repr(target),
            "sampler": repr(sampler),
            "structure": repr(whole),
            "groups": plan.step.structure.groups.count,
            "passes": plan.step.structure.passes,
            "steps": steps,
            "burn_in": burn_in,
            "thin": thin,
            "chains": chains,
            "batch_size": plan.step.batches.B,
            "N": plan.step.batches.N,
            "init": init if isinstance(init, str) else "tensor",
            "seed": seed,
            "device": str(dev),
            "engine": engine,
            "precision": precision,
            "chains_run": plan.step.energies.how,
            "notes": [*plan.notes, *notes],
            "augment": None if augment is None else repr(augment),
            "monitors": [m.name for m in monitors if isinstance(m, ScoreMonitor)],
            "horizon": steps,
            "monitor_every": monitor_every or max(1, steps // 10),
            "keep": keep,
            "memory": memory,
            "loader": batch_size is None and hasattr(plan.step.batches, "loader"),
            "rows": rows or str(plan.theta.dtype).removeprefix("torch."),
            "done": 0,
        }
        if folder is not None:
            store.create(
                folder,
                record.about(target, plan, sampler, whole, augment, settings),
                record.fixed(target, plan),
                recipe,
            )
        C, D = plan.theta.shape
        kept = (
            InMemory(C, (steps - burn_in) // thin, D, plan.theta.dtype)
            if folder is None
            else OnDisk(folder, settings["rows"])
        )
        with kept, Halt(catch=kept.durable) as halt:
            loop = Loop(plan, sampler, target, settings, kept)
            for m in monitors:
                if isinstance(m, ScoreMonitor):
                    m.attach(plan.step, dev)
            loop.begin(monitors)
            with Progress(steps, settings, show=progress) as bar:
                run = loop.go(monitors, bar, halt)
        return run if folder is None else told(run, folder)


def _new_folder(out: Any) -> Path:
    """The folder of a run to come."""
    if not isinstance(out, (str, Path)):
        raise ValueError(f"out is {out!r}, expected a folder, for example 'runs/first'")
    folder = Path(out)
    if (folder / "run.json").exists():
        raise ValueError(
            f"out is {str(folder)!r}, which holds a run, expected a new folder: pt.resume() goes on with that"
        )
    return folder


def _fit_draws(
    plan: Plan, after: int, thin: int | None, keep: str, folder: Path | None = None, itemsize: int | None = None
) -> tuple[int, list[str]]:
    """The thinning that keeps the draws within memory or disk, and a line where it is more than was asked for."""
    C, D = plan.theta.shape
    row = C * D * (itemsize or plan.theta.element_size())
    chosen = thin or max(1, math.ceil(after / 1000))
    need = after // chosen * row
    if folder is None:
        free = int(0.9 * available_memory(torch.device("cpu")))
    else:
        free = int(0.9 * _free_disk(folder)) - 3 * _checkpoint(plan)  # two are kept while a third is written
        if free < row:
            raise ValueError(
                f"out: {folder} has {gib(_free_disk(folder))} free, expected at least {gib(3 * _checkpoint(plan) + row)}: "
                f"three checkpoints of {gib(_checkpoint(plan))} and a draw"
            )
    most = min(KEEP, free) if keep == "auto" else free
    if need <= most:
        takes = (
            f"the draws take {gib(need)} on disk, each of two checkpoints {gib(_checkpoint(plan))}" if folder else ""
        )
        return chosen, [takes] if need + _checkpoint(plan) > 2**20 and folder else []
    arithmetic = f"{C} chains x {after // chosen:,} draws x {D:,} parameters = {gib(need)}"
    why = "90 % of what is free" if most == free else "keep='all' allows what is free"
    if keep == "all" or row > most:
        raise ValueError(f"the draws would take {arithmetic}, expected at most {gib(most)} ({why})")
    chosen = after // (most // row + 1) + 1  # the least with after // chosen <= most // row
    return chosen, [f"thin raised to {chosen}: {arithmetic}, more than {gib(most)} ({why})"]


def _checkpoint(plan: Plan) -> int:
    """Bytes of a checkpoint, about: θ, the sampler's state, the heat's and the temperature's moments, the history."""
    C, D = plan.theta.shape
    history = plan.step.structure.history
    return C * D * (3 * plan.theta.element_size() + 4 * 8) + (history.nbytes(C, D) if history is not None else 0)


def _free_disk(folder: Path) -> int:
    """Bytes free where the folder is to be."""
    there = next((p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir()), Path("."))
    return shutil.disk_usage(there).free
