"""Everything that happens before the first step: checks, starting points, the step itself, the memory it will take."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from partita.engine.batches import HEAD, RECALIBRATE, Batches, Resident
from partita.engine.step import Step
from partita.runs.checks import check_target, gib, number, whole
from partita.runs.choose import bytes_per_pass, choose_chains
from partita.runs.inputs import NoData, make_batches
from partita.runs.loader import Loader
from partita.samplers import SGLD, Sampler
from partita.structure import Bound, Structure
from partita.structure.history import History
from partita.target import Posterior, Target
from partita.target.trees import map_tree

MAP_STEPS = 1_000
STARTS = ("fresh", "module", "prior", "map")
_STARTS = "'fresh', 'module', 'prior', 'map' or a tensor [D] or [C, D]"


@dataclass(frozen=True)
class Plan:
    """A step, the states it starts from, and what there is to say about them."""

    step: Step
    theta: Tensor
    device: torch.device
    probe: Any
    ensembles: int
    notes: tuple[str, ...]
    forget_at: int | None = None  # the step after which a history starts anew


@contextlib.contextmanager
def seeded(seed: int, device: str | torch.device, target: Target) -> Iterator[torch.device]:
    """torch's random state seeded inside, and as it was outside."""
    check_target(target)
    if not whole(seed, 0) or seed >= 2**32:
        raise ValueError(f"seed is {seed!r}, expected a whole number in [0, 2^32) (generators use 32 bits of it)")
    dev = device_of(device, target.space.values.device)
    cuda = list(range(torch.cuda.device_count())) if dev.type == "cuda" else []
    if torch.is_inference_mode_enabled():
        raise ValueError("torch.inference_mode() is on, expected off: sampling takes gradients")
    where = torch.cuda.device(dev) if cuda else contextlib.nullcontext()
    with torch.random.fork_rng(devices=cuda), where, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # vmap runs some operations one by one
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach the generators of unused devices
        if cuda:
            torch.cuda.manual_seed_all(seed)
        yield dev


def device_of(device: str | torch.device, preferred: torch.device) -> torch.device:
    """ "auto": where the target lies if that is an accelerator, else CUDA when there is one."""
    if device != "auto":
        try:
            chosen = torch.device(device)
        except (RuntimeError, TypeError):
            raise ValueError(f"device is {device!r}, expected 'auto', 'cpu' or 'cuda'") from None
        if chosen.type not in ("cpu", "cuda"):
            raise ValueError(f"device is {device!r}, expected 'auto', 'cpu' or 'cuda'")
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {device!r} and this machine has no CUDA device, expected 'auto' or 'cpu'")
        return chosen
    if preferred.type != "cpu":
        return preferred
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def prepare(
    target: Target,
    data: Any,
    structure: Structure,
    sampler: Sampler | None,
    *,
    chains: int,
    batch_size: int | None,
    init: Any,
    device: torch.device,
    spread: float | None = None,
    memory: int | None = None,
    burn_in: int | None = None,
    how: str = "auto",
    precision: str = "float32",
    augment: Callable[[Any], Any] | None = None,
    start: Tensor | None = None,
) -> Plan:
    """Check everything, then build the step. Must run inside `seeded`. `start` [C, D]: go on from there, not from init."""
    if not whole(chains, 1):
        raise ValueError(f"chains is {chains!r}, expected a whole number of at least 1")
    if memory is not None and not whole(memory, 1):
        raise ValueError(f"memory is {memory!r}, expected a whole number of bytes")
    if isinstance(structure, type) or not hasattr(structure, "bind"):
        raise ValueError(f"structure is {structure!r}, expected pt.Joint() or pt.Structured(...)")
    given = None if start is not None else _check_start(target, init, chains, spread)
    bound = structure.bind(target.space, device)
    ensembles = bound.history.ensembles(chains) if bound.history is not None else chains
    if start is None:
        _check_coupled(init, given, coupled=ensembles < chains)
    _check_spread(target, spread, coupled=ensembles < chains)
    forget_at = _forget_at(bound.history, burn_in)
    batches = make_batches(data, batch_size, device, target.needs_data, target.space.values.dtype)
    target = target.to(device)
    if target.needs_data:
        _check_fit(target, batches)
    pieces = _pieces(bound, batches)
    few = batches.head(min(batches.B, HEAD))
    energies, reason = choose_chains(target, batches.N, _copies(few, max(2, chains)), how, bound.passes, precision)
    notes = [] if reason is None else [f"chains run one after another: vmap cannot follow this module ({reason})"]
    budget = memory or (available_memory(device) // 4 if device.type == "cuda" else 2**30)
    chunk, width = chunk_size(bound.passes, chains, _bytes_per_pass(target, batches), budget)
    energies = replace(energies, width=width, pieces=pieces)
    if bound.history is not None:
        where = torch.device("cpu") if bound.history.host else device
        notes += _check_memory(bound.history, chains, target.space.dim, where)
    if isinstance(target, Posterior) and target.network.batchnorm == "recalibrate":
        batches.inputs(RECALIBRATE)  # a loader looks them up now, so that when it does changes nothing
    step = Step(sampler or SGLD(1.0), bound, batches, energies, target.temperature, chunk, augment)
    if start is not None:
        return Plan(step, start.to(device), device, batches.head(32), ensembles, tuple(notes), forget_at)
    theta = starting_points(target, step, init if given is None else given, chains, spread, ensembles)
    if given is None and init == "map":
        notes.append(f"every chain starts at a MAP of its own, {MAP_STEPS:,} steps of Adam")
    elif given is None and init == "fresh" and isinstance(target, Posterior) and (names := target.unreached()):
        notes.append(f"init='fresh' draws from the prior what no reset_parameters() reaches: {', '.join(names)}")
    return Plan(step, theta, device, batches.head(32), ensembles, tuple(notes), forget_at)


def starting_points(
    target: Target, step: Step, init: str | Tensor, chains: int, spread: float | None, ensembles: int
) -> Tensor:
    """[C, D] from `init`. The coupled chains of an Ensemble must start in one mode: from one point, a little spread."""
    space, dev = target.space, target.space.values.device
    coupled = ensembles < chains
    if isinstance(init, Tensor):
        theta = init.to(space.values).expand(chains, space.dim).clone()
    elif init == "map":
        from partita.runs.optimize import descend

        fresh = target.start("fresh", ensembles).to(dev)
        best, _ = descend(replace(step.energies, pieces=1), step.batches, fresh, MAP_STEPS, 1e-2)
        if not bool(best.isfinite().all()):
            raise ValueError("init='map' diverged (NaN or inf), expected a finite energy around the fresh starts")
        theta = best.repeat_interleave(chains // ensembles, 0)
    else:
        theta = target.start(init, chains).to(dev)
    amount = (1e-3 if coupled else 0.0) if spread is None else spread
    return theta + amount * torch.randn_like(theta) if amount else theta


def _check_start(target: Target, init: Any, chains: int, spread: float | None) -> Tensor | None:
    """init as a tensor, if it is one."""
    if spread is not None and not (number(spread) and spread >= 0):
        raise ValueError(f"spread is {spread!r}, expected a number of at least 0")
    if isinstance(init, str):
        if init not in STARTS:
            raise ValueError(f"init is {init!r}, expected {_STARTS}")
        return None
    try:
        given = torch.as_tensor(init)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"init is a {type(init).__name__}, expected {_STARTS}") from None
    dim = target.space.dim
    if tuple(given.shape) not in ((dim,), (chains, dim)):
        raise ValueError(f"init has shape {list(given.shape)}, expected [{dim}] or [{chains}, {dim}]")
    if given.is_complex() or given.dtype == torch.bool:
        raise ValueError(f"init holds {given.dtype} numbers, expected real ones")
    if not bool(given.isfinite().all()):
        raise ValueError("init holds NaN or inf, expected finite numbers")
    return given


def _check_coupled(init: Any, given: Tensor | None, coupled: bool) -> None:
    if coupled and not (given.dim() == 1 if given is not None else init in ("module", "map")):
        raise ValueError(
            f"init is {init if given is None else list(given.shape)} with an Ensemble history, expected 'module', 'map' "
            "or one point [D]: chains of an ensemble exchange their groups, and from spread starts they would mix "
            "differently permuted networks"
        )


def _check_spread(target: Target, spread: float | None, coupled: bool) -> None:
    if coupled and spread is not None and isinstance(target, Posterior):
        most = 0.1 * float(target.prior_scale().median())
        if spread > most:
            raise ValueError(
                f"spread is {spread:g} with an Ensemble history, expected at most {most:.3g}, a tenth of the prior's "
                "scale: its chains exchange their groups, so they must start in one mode"
            )


def _forget_at(history: History | None, burn_in: int | None) -> int | None:
    """A history that drops burn-in drops the first half of it: the rest fills it again before the first kept draw."""
    if history is None or burn_in is None:
        return None
    if history.warm_up and history.warm_up >= burn_in:
        raise ValueError(
            f"the history's warm_up is {history.warm_up:,} with burn_in={burn_in:,}, expected fewer steps: they follow the "
            "joint law, which must not be kept"
        )
    return burn_in // 2 if history.drops_burn_in and burn_in > 1 else None


def available_memory(device: torch.device) -> int:
    """Bytes free on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_memory(history: History, C: int, D: int, device: torch.device) -> list[str]:
    """What the history's rows take, said before a run; refused when it does not fit."""
    need, free = history.nbytes(C, D), available_memory(device)
    if not need:
        return []
    arithmetic = f"{C} chains x {D:,} parameters x {need // (C * D):,} bytes of rows = {gib(need)}"
    if need > 0.9 * free:
        raise ValueError(f"the history would take {arithmetic} on {device}, expected at most 0.9 x {gib(free)} free")
    return [f"the history takes {arithmetic} on {device}"] if need > 2**20 else []


def _check_fit(target: Target, batches: Batches) -> None:
    if isinstance(target, Posterior):
        later = target.check(batches.head(min(batches.N, HEAD)), batches.targets())
        if isinstance(batches, Loader):
            batches.check = later


def _bytes_per_pass(target: Target, batches: Batches) -> int:
    """Memory of a pass over B rows: measured up to HEAD of them, beyond that on the line through two measurements."""
    rows = min(batches.B, HEAD)
    need = bytes_per_pass(target, batches.N, batches.head(rows))
    if batches.B <= HEAD:
        return need
    half = bytes_per_pass(target, batches.N, batches.head(rows // 2))
    return need + (need - half) * (batches.B - rows) // (rows - rows // 2)


def _copies(batch: Any, C: int) -> Any:
    return None if batch is None else map_tree(lambda t: t.expand(C, *t.shape), batch)


def _pieces(structure: Bound, batches: Batches) -> int:
    """Into how many parts a step's compositions split its minibatch."""
    if not structure.split or isinstance(batches, NoData):
        return 1
    if batches.B % structure.passes:
        raise ValueError(
            f"share='split' got batch_size={batches.B} for {structure.passes} compositions a step, expected a multiple"
        )
    if isinstance(batches, Loader) and not batches.shuffled:
        raise ValueError("share='split' got a DataLoader that does not shuffle, expected one that does (shuffle=True)")
    if isinstance(batches, Resident):
        batches.shuffles = True
    return structure.passes


def chunk_size(passes: int, chains: int, bytes_per_pass: int, budget: int) -> tuple[int, int | None]:
    """How many of a step's compositions go at once, and how many chains (None: all), within a memory budget."""
    chunk = max(1, min(passes, budget // max(chains * bytes_per_pass, 1)))
    width = max(1, budget // max(bytes_per_pass, 1))
    return chunk, None if width >= chains else width
