"""The commands about runs: run, resume, report, compare, predict.

Exit codes: 0 all went well; 1 the run failed or a chain diverged; 2 wrong input; 75 saved and stopped by a signal
(schedulers take it as "again, please").
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from partita import Run
    from partita.runs.recipe import Recipe

FAILED, WRONG, AGAIN = 1, 2, 75
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. run.steps=8000.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def register(app: typer.Typer, console: Console) -> None:
    """Adds the commands to the application."""

    @app.command()
    def run(
        recipe: Annotated[str, typer.Argument(help="A TOML file, or the name of a bundled recipe: digits.")],
        out: Annotated[Path | None, typer.Option(help="The run's folder (default: runs/NAME of the recipe).")] = None,
        sets: Sets = None,
        no_report: Annotated[bool, typer.Option("--no-report", help="Do not write report.html.")] = False,
        as_json: AsJson = False,
    ) -> None:
        """Sample what a recipe says, save it, report on it. On a folder that holds part of that run it goes on, on a
        finished one it says so; it never overwrites. Try: partita run digits"""
        from partita.runs.recipe import load

        with _refusals("run", as_json):
            wanted = load(recipe, sets or [])
            folder = out or Path("runs") / Path(recipe).stem
            found, fresh = _go(wanted, folder, quiet=as_json)
            if not fresh and not as_json:
                done = f"{found.settings['done']:,} steps, {len(found.steps):,} draws a chain"
                console.print(f"{folder} is finished: {done}", markup=False, soft_wrap=True)
            _tell(found, folder, wanted, console, as_json, report=not no_report)

    @app.command()
    def resume(
        folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
        steps: Annotated[int | None, typer.Option(min=1, help="The new total of steps.")] = None,
        no_report: Annotated[bool, typer.Option("--no-report", help="Do not write report.html.")] = False,
        as_json: AsJson = False,
    ) -> None:
        """Go on with a run that was stopped, killed or preempted, or make a finished one longer."""
        from partita.runs.resume import resume as go_on

        with _refusals("resume", as_json):
            recipe = _recipe(folder)
            found = go_on(folder, steps=steps, progress=False if as_json else None)
            _tell(found, folder, recipe, console, as_json, report=not no_report)

    @app.command()
    def report(
        folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs.")],
    ) -> None:
        """Write report.html and its pictures into each run's folder."""
        for folder in folders:
            with _refusals("report"):
                page = _report(_loaded(folder), folder, _recipe(folder))
                console.print(str(page), markup=False, soft_wrap=True)

    @app.command()
    def compare(
        folders: Annotated[list[Path], typer.Argument(metavar="RUN RUN…", help="Folders of runs.")],
        out: Annotated[Path, typer.Option(help="Where compare.html goes.")] = Path("."),
    ) -> None:
        """Put runs side by side: verdicts, scores, diagnostics, what differs in their settings."""
        from partita.answers.report import compare as side_by_side

        with _refusals("compare"):
            if len(folders) < 2:
                raise ValueError(f"got {len(folders)} run, expected at least two")
            runs = {str(f): _loaded(f) for f in folders}
            recipes = [_recipe(f) for f in folders]
            alike = all(r.tables["data"] == recipes[0].tables["data"] for r in recipes)
            if not alike:
                console.print("the runs' recipes name different data: no scores, which no test set is common to")
            page = side_by_side(runs, out, recipes[0].data()[1] if alike else None)
            console.print(str(page), markup=False, soft_wrap=True)

    @app.command()
    def predict(
        folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
        inputs: Annotated[
            Path, typer.Argument(help="A CSV file of numbers (one input a row), or an NPZ with an array x.")
        ],
        out: Annotated[Path, typer.Option(help="A .csv or .npz file for the predictions.")] = Path("predictions.csv"),
    ) -> None:
        """Predict at new inputs: probabilities with entropy and mutual information, or means with standard deviations."""
        from partita import tables

        with _refusals("predict"):
            tables.check_out(out)
            x = tables.inputs(inputs)
            rows = tables.answers(_loaded(folder).predict(x))
            tables.write(out, rows)
            said = f"{len(next(iter(rows.values()))):,} predictions in {out}: {', '.join(rows)}"
            console.print(said, markup=False, soft_wrap=True)


def _go(recipe: Recipe, folder: Path, quiet: bool) -> tuple[Run, bool]:
    """The run of this recipe in this folder, and whether anything was left to do."""
    from partita.runs import store
    from partita.runs.resume import load, resume

    progress = False if quiet else None
    if not (folder / "run.json").exists():
        return recipe.sample(out=folder, progress=progress), True
    other = _differences(_recipe(folder).tables, recipe.tables)
    steps = recipe.tables["run"]["steps"]
    if set(other) - {"run.steps"}:
        said = "; ".join(f"{k} {a!r} -> {b!r}" for k, (a, b) in list(other.items())[:4])
        raise ValueError(f"{folder} holds a run of another recipe ({said}), expected the same, or another --out")
    if store.about(folder)["finished"]:
        found = load(folder)
        if found.settings["done"] >= steps:  # less where draws were lost: they come again
            return found, False
    return resume(folder, steps=steps, progress=progress), True


def _differences(a: Any, b: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return {} if a == b else {path: (a, b)}
    inner = lambda k: _differences(a.get(k), b.get(k), f"{path}.{k}" if path else k)
    return {name: pair for k in {**a, **b} for name, pair in inner(k).items()}


def _tell(found: Run, folder: Path, recipe: Recipe, console: Console, as_json: bool, report: bool) -> None:
    """Scores and verdict, the report, and the exit code."""
    _, test = recipe.data()
    scores = found.predict(test[0]).scores(test[1]) if test is not None and len(found.steps) else {}
    summary = found.summary()
    page = _report(found, folder, recipe, test) if report and len(found.steps) else None
    if as_json:
        said = {
            "run": str(folder),
            "finished": found.stopped is None,
            "stopped": found.stopped,
            "steps": found.settings["done"],
            "draws": len(found.steps),
            "scores": scores,
            "verdict": summary.verdict,
            "report": str(page) if page else None,
        }
        typer.echo(json.dumps(said))
    else:
        console.print(escape(str(summary)), soft_wrap=True)
        if scores:
            console.print("test  " + "  ".join(f"{k} {v:.4g}" for k, v in scores.items()), soft_wrap=True)
        console.print(f"samples in {folder}" + (f", report in {page}" if page else ""), markup=False, soft_wrap=True)
    if found.stopped is not None:
        raise typer.Exit(AGAIN if found.stopped.startswith("stopped by SIG") else FAILED)


def _report(found: Run, folder: Path, recipe: Recipe, test: Any = None) -> Path:
    from partita.answers.report import report

    test = recipe.data()[1] if test is None else test
    return report(found, folder, test=test, recipe=recipe.text, title=folder.name)


def _loaded(folder: Path) -> Run:
    from partita.runs.resume import load

    return load(folder)


def _recipe(folder: Path) -> Recipe:
    from partita.runs import store
    from partita.runs.recipe import parse

    text = store.recipe(folder)
    if text is None:
        raise ValueError(f"{folder} holds no recipe (it came from pt.sample), expected one: use pt.load and run.report")
    return parse(text, name=str(folder / "recipe.toml"))


@contextlib.contextmanager
def _refusals(command: str, as_json: bool = False) -> Iterator[None]:
    """What goes wrong as one line on stderr (and with --json as an object): exit code 2 for a user's input, 1 for a run."""
    sys.path.insert(0, "")  # where a recipe's own modules are looked for, as `python -m` does
    try:
        yield
    except typer.Exit:
        raise
    except (ValueError, OSError, ImportError, RuntimeError) as e:
        said = " ".join(str(e).split()) or type(e).__name__
        Console(stderr=True).print(f"partita {command}: {said}", markup=False, highlight=False, soft_wrap=True)
        if as_json:
            typer.echo(json.dumps({"error": said}))
        failed = isinstance(e, RuntimeError) or hasattr(e, "run")  # while the run went
        raise typer.Exit(FAILED if failed else WRONG) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        raise typer.Exit(130) from None
