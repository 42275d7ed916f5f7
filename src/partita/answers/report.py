"""Reports: one run, or several side by side, as one HTML file with its figures beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partita.answers import look, plots, sections
from partita.answers.cite import citation
from partita.answers.look import Values
from partita.answers.page import Banner, Block, Code, Items, Missing, Page, Section, Table, attempt
from partita.answers.summary import Summary
from partita.target import Posterior

if TYPE_CHECKING:
    from partita.runs import Run

FIGURES = (
    "calibration", "trace-predictions", "ranks-predictions", "trace-parameters", "ranks-parameters", "rhat", "ess", "iac",
    "clock", "uncertain",
)  # fmt: skip


def report(
    run: Run,
    out: str | Path,
    test: tuple[Any, Any] | None = None,
    recipe: str | None = None,
    title: str | None = None,
) -> Path:
    """Write report.html into the folder `out` (or to `out` itself, when that ends in .html), and its figures beside it.

    With test=(x, y) it has scores, calibration and the least certain inputs; `recipe` is shown as it is. A part that
    cannot be shown is one line that says why. The file loads nothing from anywhere, and appears whole or not at all.
    """
    checked = look.pair(test)
    _check_run("run", run)
    seen = _Seen(run, checked)
    folder = Path(out).parent if Path(out).suffix == ".html" else Path(out)
    C, S, D = run.samples.shape
    parts: list[tuple[str, Callable[[], Sequence[Block]]]] = [
        ("Scores", seen.scores),
        ("Do the chains agree?", lambda: sections.agreement(seen.values, run)),
        ("Mixing", lambda: sections.mixing({v.what: v for v in seen.values}, run.settings["thin"], seen.summary)),
        ("Scores over time", lambda: sections.over_time(look.score_lines(run.metrics), seen.burned)),
        ("Temperature and composition", lambda: sections.temperature(run, seen.summary)),
        ("Least certain inputs", seen.uncertain),
        ("Settings", lambda: sections.settings(run)),
        ("Recipe", lambda: [Code(recipe) if recipe else Missing("Recipe: none was given, the run came from code.")]),
        ("Versions", lambda: sections.versions(run)),
        ("Load and resume", lambda: sections.again(folder)),
        ("References", lambda: [Items(citation(run))]),
    ]
    page = Page(
        title or _name(run),
        "Partita report",
        [seen.banner()],
        [f"{_many(C, 'chain')} × {_many(S, 'draw')} × {_many(D, 'parameter')}", *_facts(run)],
        [Section(name, [*seen.notes(name), *attempt(name, build)]) for name, build in parts],
        f"Written {_now()}.",
    )
    return page.write(out, "report.html", FIGURES)


def compare(runs: Mapping[str, Run], out: str | Path, test: tuple[Any, Any] | None = None) -> Path:
    """Write compare.html into the folder `out`: the runs side by side, and the settings in which they differ."""
    if not isinstance(runs, Mapping) or not runs:
        raise ValueError(f"runs is {'empty' if runs == {} else f'a {type(runs).__name__}'}, expected {{name: run}}")
    checked = look.pair(test)
    for name, run in runs.items():
        _check_run(f"runs[{name!r}]", run)
    seen = {str(name): _Seen(run, checked) for name, run in runs.items()}
    parts: list[tuple[str, Callable[[], Sequence[Block]]]] = [
        ("Scores", lambda: _scores_of(seen)),
        ("Mixing", lambda: _mixing_of(seen)),
        ("Scores over time", lambda: sections.over_time(_lines_of(seen), None)),
        ("Settings that differ", lambda: _differences(seen)),
        ("References", lambda: [Items(list(dict.fromkeys(c for s in seen.values() for c in citation(s.run))))]),
    ]
    page = Page(
        " against ".join(seen) if len(seen) <= 3 else f"{len(seen)} runs",
        "Partita comparison",
        [s.banner(name) for name, s in seen.items()],
        [],
        [Section(name, attempt(name, build)) for name, build in parts],
        f"Written {_now()}.",
    )
    return page.write(out, "compare.html", FIGURES)


class _Seen:
    """One run, measured once; what could not be measured has its reason in `failed`."""

    def __init__(self, run: Any, test: tuple[Any, Any] | None):
        self.run, self.test = run, test
        self.failed: dict[str, str] = {}
        self.network = isinstance(run.target, Posterior)
        self._summary: Summary | None = self._try("summary", run.summary)
        looks = [look.look_at_predictions] * self.network + [look.look_at_parameters]
        found = [self._try(f.__name__.removeprefix("look_at_"), lambda f=f: f(run)) for f in looks]  # type: ignore[misc]
        self.values: list[Values] = [v for v in found if v is not None]
        self.prediction, self.said = None, ""
        if test is not None and self.network:
            done = self._try("test", lambda: look.predicted(run, test[0]))
            self.prediction, self.said = done or (None, "")
        self.burned = look.seconds_of(int(run.settings["burn_in"]), run.metrics)

    def _try(self, what: str, of: Callable[[], Any]) -> Any:
        if self.run.samples.shape[1] == 0 and what != "summary":
            self.failed[what] = "the run kept no draws"
            return None
        try:
            return of()
        except Exception as e:  # a report of a run that went wrong must still come out, and say so
            self.failed[what] = " ".join(str(e).split())[:300] or type(e).__name__
            return None

    @property
    def summary(self) -> Summary:
        if self._summary is None:
            raise ValueError(self.failed["summary"])
        return self._summary

    def banner(self, name: str = "") -> Banner:
        if self._summary is None:
            return Banner("bad", "This run could not be judged", [self.failed["summary"]], name)
        return look.banner_of(self.run, self._summary, name)

    def notes(self, section: str) -> list[Block]:
        if section != "Do the chains agree?":
            return []
        lost = [Missing(f"{k.capitalize()}: not shown, {v}.") for k, v in self.failed.items() if k in FUNCTIONS]
        if not self.network:
            lost.append(Missing("Predictions: none, a density has no inputs to predict at."))
        return list(lost)

    def scores(self) -> Sequence[Block]:
        if (why := self._no_prediction()) is not None:
            return [Missing(f"Scores and calibration: not shown, {why}.")]
        assert self.test is not None
        assert self.prediction is not None
        padding = getattr(self.run.target.likelihood, "ignore", None)
        return sections.scores(self.prediction, self.test[1], self.said, padding)

    def uncertain(self) -> Sequence[Block]:
        if (why := self._no_prediction()) is not None:
            return [Missing(f"Least certain inputs: not shown, {why}.")]
        assert self.test is not None
        assert self.prediction is not None
        return sections.uncertain(self.run, self.prediction, *self.test)

    def _no_prediction(self) -> str | None:
        if not self.network:
            return "a density makes no predictions"
        if self.test is None:
            return "no test data was given (test=(x, y))"
        return None if self.prediction is not None else self.failed["test"]


FUNCTIONS = ("predictions", "parameters")


def _scores_of(seen: Mapping[str, _Seen]) -> Sequence[Block]:
    found: dict[str, dict[str, float]] = {}
    lost: list[Block] = []
    for name, s in seen.items():
        if s.prediction is None or s.test is None:
            lost.append(Missing(f"{name}: no scores, {s._no_prediction()}."))
            continue
        try:
            found[name] = s.prediction.scores(s.test[1])
        except ValueError as e:
            lost.append(Missing(f"{name}: no scores, {e}."))
    keys = dict.fromkeys(k for scores in found.values() for k in scores)
    cell = lambda name, k: sections.score(k, found[name][k]) if k in found[name] else ""
    rows = [
        (sections.GOOD.get(k, (k,))[0], *(cell(n, k) for n in found), sections.GOOD.get(k, ("", ""))[1]) for k in keys
    ]
    return [*([Table(("score", *found, ""), rows)] if rows else []), *lost]


def _mixing_of(seen: Mapping[str, _Seen]) -> Sequence[Block]:
    """A row a measure, a column a run; histograms over predictions, or parameters where there are none."""
    rows: dict[str, list[str]] = {}
    for i, s in enumerate(seen.values()):
        for measure, value in _measures(s).items():
            rows.setdefault(measure, [""] * len(seen))[i] = value
    which = {name: s.values[0] for name, s in seen.items() if s.values}
    thin = {name: int(s.run.settings["thin"]) for name, s in seen.items()}
    lost = [Missing(f"{name}: {s.failed['summary']}.") for name, s in seen.items() if s._summary is None]
    return [Table(("", *seen), [(k, *v) for k, v in rows.items()]), *sections.mixing_figures(which, thin), *lost]


def _measures(s: _Seen) -> dict[str, str]:
    C, S, D = s.run.samples.shape
    found = {"chains × draws": f"{C:,} × {S:,}", "parameters": f"{D:,}"}
    if s._summary is None:
        return found
    seconds = s.summary.seconds
    found["seconds"] = f"{seconds:,.1f}"
    for m in s.summary.mixing:
        found[f"R-hat of {m.what}, median"] = f"{m.rhat_median:.3f}"
        found[f"R-hat of {m.what}, max"] = f"{m.rhat_max:.3f}"
        found[f"ESS of {m.what}, median"] = f"{m.ess_median:,.0f}"
        found[f"ESS of {m.what}, min"] = f"{m.ess_min:,.0f}"
        if seconds > 0:
            found[f"ESS of {m.what} a second, median"] = f"{m.ess_median / seconds:,.1f}"
        found[f"IAC of {m.what} in steps, median"] = f"{m.iac_median:,.1f}"
    found["E[(θ-θ̄)·g], to be T"] = f"{sections.number(s.summary.overall)} (T = {s.summary.target_temperature:g})"
    gap = s.summary.composition_gap
    return found | {"composition gap, nats": "none" if gap is None else sections.number(gap)}


def _lines_of(seen: Mapping[str, _Seen]) -> dict[str, list[plots.Line]]:
    """The averages of all runs, each in a colour of its own; present states would crowd them."""
    panels: dict[str, list[plots.Line]] = {}
    for i, (name, s) in enumerate(seen.items()):
        for score, lines in look.score_lines(s.run.metrics, i, name).items():
            panels.setdefault(score, []).extend(line for line in lines if not line.dashed)
    return {k: v for k, v in panels.items() if v}


def _differences(seen: Mapping[str, _Seen]) -> Sequence[Block]:
    quiet = ("notes", "seconds", "engine_why", "versions")
    keys = dict.fromkeys(k for s in seen.values() for k in s.run.settings if k not in quiet)
    told = {k: [sections.setting(s.run.settings.get(k)) for s in seen.values()] for k in keys}
    rows = [(k.replace("_", " "), *v) for k, v in told.items() if len(set(v)) > 1]
    return [Table(("", *seen), rows, words=True) if rows else Missing("Settings: the runs have the same.")]


def _check_run(name: str, run: Any) -> None:
    if not all(hasattr(run, what) for what in ("samples", "settings", "summary", "target")):
        raise ValueError(f"{name} is a {type(run).__name__}, expected the run that pt.sample returned")


def _name(run: Any) -> str:
    """Such as "PSGLD, Structured, 2,410 parameters"."""
    method = str(run.settings.get("sampler", run.settings.get("method", "Run"))).split("(")[0]
    structure = str(run.settings.get("structure", "Joint")).split("(")[0]
    return f"{method}, {structure.lower()}, {_many(run.samples.shape[2], 'parameter')}"


def _facts(run: Any) -> list[str]:
    s = run.settings
    found = [f"{s['done']:,} of {s['steps']:,} steps"] if "done" in s else []
    return [*found, *([f"{s['seconds']:,.1f} s"] if "seconds" in s else []), f"{s['device']}, {s['engine']}"]


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
