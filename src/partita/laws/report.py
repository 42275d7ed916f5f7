"""Running the law table: in parallel, printed, written down."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import torch

from partita.laws.extra import EXTRA
from partita.laws.table import Cell, Result, Z, all_cells, pairwise_cells, run_cell

WORST = 50  # rows written down of a table with several seeds

Row = Cell | str  # a cell of the product, or a name in EXTRA


@dataclass(frozen=True)
class Outcome:
    """One row run with one seed: its result, or what went wrong."""

    name: str
    seed: int
    result: Result | None
    error: str
    seconds: float

    @property
    def passed(self) -> bool:
        return self.result is not None and self.result.passed


def rows(full: bool, only: str = "") -> list[Row]:
    """The pairwise cover (or the whole product) and the extra rows, those whose name holds `only`."""
    chosen: list[Row] = [*(all_cells() if full else pairwise_cells()), *EXTRA]
    return [r for r in chosen if only.lower() in str(r).lower()]


def own_rows(sampler: str, only: str = "") -> list[Row]:
    """The rows of a sampler that is not ours, "package.module:name"."""
    from partita.laws import own

    own.load(sampler)  # refused here, once, rather than in every row
    return [c for c in own.cells(sampler) if only.lower() in str(c).lower()]


def run_row(row: Row, seed: int = 0) -> Outcome:
    torch.set_num_threads(1)  # a worker process of its own
    began = time.perf_counter()
    try:
        result, error = run_cell(row, seed) if isinstance(row, Cell) else EXTRA[row](seed), ""
    except Exception as e:
        result, error = None, f"{type(e).__name__}: {e}"
    return Outcome(str(row), seed, result, error, time.perf_counter() - began)


def run_rows(chosen: list[Row], seeds: int = 1, jobs: int | None = None) -> Iterator[Outcome]:
    """Every row with every seed, as they finish."""
    jobs = jobs or os.cpu_count() or 1
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(run_row, r, s) for s in range(seeds) for r in chosen]
        try:
            for f in as_completed(futures):
                yield f.result()
        except BaseException:  # Ctrl-C: those that wait are not begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def markdown(
    outcomes: list[Outcome], title: str, machine: str, number: Callable[[float], str] = "{:.2f}".format
) -> str:
    """A table a row, worst first (of several seeds the WORST only), with the distribution of all deviations above it."""
    good = [o.result for o in outcomes if o.result is not None]
    comparisons = sum(r.comparisons for r in good)
    failed = [o for o in outcomes if not o.passed]
    by_chance = comparisons * math.erfc(Z / math.sqrt(2))
    lines = [
        f"# {title}",
        "",
        f"{len(outcomes):,} rows, {comparisons:,} comparisons, {len(failed)} outside {Z:g} standard errors "
        f"(expected by chance: {by_chance:.2g}). {machine}",
        "",
        false_alarms(outcomes) + ".",
        "",
        "Deviations are the largest of a row, in standard errors over independent chains or ensembles; `rel` is the "
        "largest error relative to the standard deviations concerned.",
        "",
        "| row | seed | worst | z | rel |",
        "|---|---|---|---|---|",
    ]
    several = len({o.seed for o in outcomes}) > 1
    for o in sorted(outcomes, key=lambda o: -(o.result.z if o.result else math.inf))[: WORST if several else None]:
        r = o.result
        cells = [r.where, number(r.z), f"{r.relative:.4f}"] if r else [o.error, "–", "–"]
        lines.append(f"| {' | '.join([o.name, str(o.seed), *cells])} |")
    return "\n".join(lines) + "\n"


def false_alarms(outcomes: list[Outcome]) -> str:
    """How often correct code would fail: over tables (seeds), and over single comparisons."""
    seeds = sorted({o.seed for o in outcomes})
    bad = {o.seed for o in outcomes if not o.passed}
    z = sorted((o.result.z for o in outcomes if o.result), reverse=True)
    n = sum(o.result.comparisons for o in outcomes if o.result)
    if not z:
        return "no row could be run: " + next((o.error for o in outcomes if o.error), "there is none")
    beyond = sum(1 for v in z if v > 4)
    return (
        f"{len(seeds)} tables of {len(outcomes) // len(seeds)} rows: {len(bad)} with a row beyond {Z:g} standard errors; "
        f"{n:,} comparisons, largest {z[0]:.2f}; rows beyond 4: {beyond}, expected of normal deviations: "
        f"{n * math.erfc(4 / math.sqrt(2)):.1f}"
    )
