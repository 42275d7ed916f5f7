"""`partita bench`: the jobs, their table, and the file beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from partita.bench.jobs import groups
from partita.bench.timing import Row, Runner, as_json, machine, measure

HEAD = ("method", "chains", "who", "ms/step", "spread", "chain-steps/s", "× first", "set-up")


def bench(
    device: str,
    threads: int,
    only: str | None = None,
    long: bool = False,
    blocks: int = 5,
    out: Path | None = None,
    turns: Path | None = None,
) -> Iterator[tuple[str, list[list[str]]]]:
    """Each group's job and rows as they come; the file is written anew after every group."""
    torch.set_num_threads(threads)
    where, rows = machine(torch.get_num_threads()), list[Row]()
    for number, group in enumerate(groups(device, long)):
        found = measure(_wanted(group, only), blocks, turns=turns)
        for r in found:
            r.group = number
        rows += found
        if found:
            yield found[0].job, cells(found)
            if out is not None:
                out.write_text(json.dumps(as_json(where, rows), indent=1) + "\n", "utf-8")


def name(r: Runner | Row) -> str:
    return f"{r.job} | {r.method} | {r.chains} | {r.who}"


def _wanted(group: list[Runner], only: str | None) -> list[Runner]:
    return [r for r in group if only is None or re.search(only, name(r))]


def cells(rows: list[Row]) -> list[list[str]]:
    """One job's rows as text. The ratio is of chain-steps a second, this row's to the first row's."""
    return [_cells(r, rows[0]) for r in rows]


def _cells(r: Row, first: Row) -> list[str]:
    said = [r.method, str(r.chains), r.who]
    if not r.ms:
        return [*said, r.failed, "", "", "", ""]
    ratio = f"{r.rate / first.rate:.2f}" if first.ms else ""
    spread = f"{min(r.ms):.3g}–{max(r.ms):.3g}"
    return [*said, f"{r.median:.3g}", spread, f"{r.rate:,.0f}", ratio, f"{r.setup_s:.1f} s"]


def markdown(found: dict[str, Any]) -> str:
    """The file's content as tables, one a job, with its machine."""
    m = found["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in m["versions"].items())
    lines = [f"{m['gpu'] or m['cpu']}, {m['cores']} cores, {m['threads']} threads; {m['date']}; {versions}."]
    job, first = "", None
    for r in (Row(**r) for r in found["rows"]):
        if r.job != job:
            job = r.job
            lines += ["", f"**{job}**", "", "| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
        first = r if first is None or r.group != first.group else first
        lines.append("| " + " | ".join(_cells(r, first)) + " |")
    return "\n".join(lines) + "\n"
