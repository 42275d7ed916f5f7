"""The command `partita`."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from partita.commands import register

if TYPE_CHECKING:
    from partita.laws.report import Outcome

MOST_ROWS = 400  # rows printed one by one; of a longer table only those that fail

app = typer.Typer(
    help="Posterior sampling for neural networks, in parts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
console = Console(highlight=False)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
) -> None:
    """Sample two posteriors and draw them: a regression with a known answer, and a network on handwritten digits."""
    from partita.demo import run_demo

    try:
        run_demo(out, seed, console)
    except KeyboardInterrupt:
        console.print("interrupted")
        raise typer.Exit(130) from None
    except OSError as e:
        console.print(f"partita demo: --out is {out}, expected a folder that can be written to ({escape(str(e))})")
        raise typer.Exit(2) from None


@app.command()
def laws(
    full: Annotated[bool, typer.Option("--full", help="The whole product instead of a pairwise cover.")] = False,
    only: Annotated[str, typer.Option(help="Only rows whose name holds this text, for example 'SGHMC · S'.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Repeat the table with this many seeds.")] = 1,
    jobs: Annotated[int, typer.Option(min=0, help="Processes at once (0: one a core).")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the table to this Markdown file.")] = None,
    sampler: Annotated[
        str, typer.Option(metavar="MODULE:NAME", help="Test a sampler of your own instead of Partita's.")
    ] = "",
) -> None:
    """Test every sampler, structure, mask and history against its exact law. Exit code 1 when a row fails."""
    from partita.laws import report

    try:
        sys.path.insert(0, "")  # where a sampler of the user's own may lie
        chosen = report.own_rows(sampler, only) if sampler else report.rows(full, only)
    except ValueError as e:
        console.print(f"partita laws: {escape(str(e))}")
        raise typer.Exit(2) from None
    if not chosen:
        console.print(f"no row of the table holds {only!r}: try 'SGLD', 'Bernoulli', 'Ensemble' or 'regression'")
        raise typer.Exit(2)
    outcomes = []
    try:
        with console.status("") as status:
            for o in report.run_rows(chosen, seeds, jobs or None):
                outcomes.append(o)
                status.update(f"{len(outcomes):,} of {len(chosen) * seeds:,} rows")
    except KeyboardInterrupt:
        console.print(f"interrupted after {len(outcomes):,} of {len(chosen) * seeds:,} rows")
        raise typer.Exit(130) from None
    place = {str(r): i for i, r in enumerate(chosen)}
    outcomes.sort(key=lambda o: (place[o.name], o.seed))
    for o in outcomes:
        if len(outcomes) <= MOST_ROWS or not o.passed:
            console.print(_line(o))
    console.print()
    for name, group in _by_sampler(outcomes).items():
        worst = max((o.result.z for o in group if o.result), default=float("nan"))
        failed = sum(not o.passed for o in group)
        state = "[green]exact[/green]" if not failed else f"[red]{failed} fail[/red]"
        console.print(f"  {name:<16} {len(group):>5,} rows   worst {worst:5.2f} standard errors   {state}")
    console.print(f"\n{report.false_alarms(outcomes)}")
    if out is not None:
        machine = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()} CPU."
        out.write_text(report.markdown(outcomes, "The law table" + (", whole" if full else ""), machine))
        console.print(f"written to {out}")
    if any(not o.passed for o in outcomes):
        raise typer.Exit(1)


@app.command()
def bench(
    device: Annotated[str, typer.Option(help="'auto', 'cpu' or 'cuda'.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of torch (0: all cores).")] = 0,
    only: Annotated[str, typer.Option(help="Only rows that match this: 'MLP .* SGLD', '8 .* graph', …")] = "",
    blocks: Annotated[int, typer.Option(min=3, help="Blocks of steps each row is timed for.")] = 5,
    long: Annotated[bool, typer.Option("--long", help="Also the rows that take minutes on a CPU.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the rows to this JSON file.")] = None,
    turns: Annotated[
        Path | None, typer.Option(help="A file: processes that share it compile together, time in turn.")
    ] = None,
) -> None:
    """Time the engine beside other libraries on the same jobs (they come with pip install -e '.\\[bench]')."""
    from partita.bench.table import HEAD, bench
    from partita.runs.setup import device_of

    try:
        where = device_of(device, torch.device("cpu"))
        re.compile(only)
        if out is not None and not out.parent.is_dir():
            raise ValueError(f"--out is {out}, expected a file in a folder that exists")
    except re.error as e:
        console.print(f"partita bench: --only is {only!r}, expected a regular expression ({escape(str(e))})")
        raise typer.Exit(2) from None
    except ValueError as e:
        console.print(f"partita bench: {escape(str(e))}")
        raise typer.Exit(2) from None
    began, seen = time.perf_counter(), 0
    with console.status("") as status:
        for job, rows in bench(where.type, threads or os.cpu_count() or 1, only, long, blocks, out, turns):
            seen += len(rows)
            table = Table(*HEAD, box=None, pad_edge=False, title=f"[bold]{job}[/bold]", title_justify="left")
            for r in rows:
                table.add_row(*map(escape, r))
            console.print(table, "")
            status.update(f"{seen} rows, {time.perf_counter() - began:.0f} s")
    if not seen:
        console.print(f"no row matches {only!r}: try 'MLP', 'ResNet-20 B=128', 'S_d' or 'BlackJAX'")
        raise typer.Exit(2)
    console.print(f"{seen} rows in {time.perf_counter() - began:.0f} s" + (f", written to {out}" if out else ""))


def _line(o: Outcome) -> str:
    r = o.result
    what = f"{r.z:5.2f} {r.where:<9}" if r else f"    – {escape(o.error)}"
    return f"{'[green]ok  [/green]' if o.passed else '[red]FAIL[/red]'} {what} {escape(r.name if r else o.name)}"


def _by_sampler(outcomes: list[Outcome]) -> dict[str, list[Outcome]]:
    groups: dict[str, list[Outcome]] = {}
    for o in outcomes:
        groups.setdefault(o.name.split(" · ")[0].split("/")[0], []).append(o)
    return groups


register(app, console)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        import partita

        console.print(f"partita {partita.__version__}")
        raise typer.Exit()


if __name__ == "__main__":
    app()
