"""The sections of a report, each a list of blocks made of what `look` measured."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.answers import look, plots
from partita.answers.canvas import Theme
from partita.answers.cite import version
from partita.answers.diagnostics import MIN_DRAWS
from partita.answers.look import Values
from partita.answers.page import Block, Code, Gallery, Items, Missing, Picture, Table, Text, picture
from partita.answers.predictive import Prediction
from partita.answers.summary import RHAT_MIXED, Mixing, Summary

ESS_GOOD = 400  # Vehtari et al. 2021: 100 a chain, of four
ROWS = 12  # of a table of groups
INPUTS = 12  # least certain ones
GOOD = {
    "accuracy": ("accuracy of the average", "higher is better"),
    "individual_accuracy": ("accuracy of one draw", "the average should beat it"),
    "nll": ("log-loss (nll), nats", "lower is better"),
    "brier": ("Brier score, 0 to 2", "lower is better"),
    "ece": ("expected calibration error", "0 is calibrated"),
    "ece_mass": ("the same, bins of equal counts", "0 is calibrated"),
    "rmse": ("root mean squared error", "lower is better"),
    "crps": ("CRPS, in the unit of y", "lower is better"),
    "coverage95": ("targets inside the 95 % interval", "95 % is right"),
}


def scores(prediction: Prediction, y: Any, said: str, ignore: int | None = None) -> Sequence[Block]:
    found = prediction.scores(y)
    rows = [(*GOOD.get(k, (k, "")), score(k, v)) for k, v in found.items()]
    table = Table(("score", "value", ""), [(name, value, good) for name, good, value in rows])
    return [
        Text(f"{said} {len(y):,} test inputs."),
        Gallery([table, calibration(prediction, torch.as_tensor(y), ignore)]),
    ]


def calibration(prediction: Prediction, y: Tensor, ignore: int | None) -> Picture:
    if "probs" not in prediction.draws:
        mean, sd = prediction.draws["mean"].double(), prediction.draws["sd"].double()
        pit = torch.special.ndtr((y.to(mean) - mean) / sd).mean(0).flatten().numpy()
        caption = "Share of test targets inside the central interval of each mass; above the line: intervals too wide, "
        caption += "below: too narrow. The band is two standard errors."
        return picture("calibration", caption, lambda theme: plots.coverage(pit, theme))
    p = prediction.probs
    p = p.flatten(0, -2) if prediction.classes else torch.stack((1 - p, p), -1).flatten(0, -2)
    kept = y.flatten() != ignore if ignore is not None else slice(None)  # padding
    confidence, guess = p[kept].max(1)
    right = (guess == y.flatten()[kept]).double().numpy()
    caption = "How often the most probable class was right, by how sure the prediction was; below the line: too sure. "
    caption += "Bars through the points are two standard errors of a calibrated forecast."
    return picture("calibration", caption, lambda theme: plots.reliability(confidence.double().numpy(), right, theme))


def agreement(values: Sequence[Values], run: Any) -> Sequence[Block]:
    unit = "chain" if run.ensembles == run.samples.shape[0] else "ensemble mean"
    chosen = "The largest R-hat, the one a quarter from there, the middle one."
    pictures: list[Picture] = []
    for v in values:
        watched, what = v.watched(), v.what
        steps = list(run.steps) if len(run.steps) == v.x.shape[1] else list(range(v.x.shape[1]))
        caption = f"Draws of {what}. {chosen if v.x.shape[2] > 3 else ''}".strip()
        draw: Callable[[Theme], Any] = lambda theme, w=watched, s=steps: plots.trace(w, s, theme, unit)  # type: ignore[misc]
        pictures.append(picture(f"trace-{what}", caption, draw))
        if v.x.shape[1] >= 2 * MIN_DRAWS:
            caption = f"The same {what}: where each {unit}'s draws stand among all. A slope or a hump is "
            caption += "disagreement; the band is chance (two standard deviations, drawn where draws suffice)."
            draw = lambda theme, w=watched: plots.ranks(w, theme, unit)  # type: ignore[misc]
            pictures.append(picture(f"ranks-{what}", caption, draw))
    draws = run.samples.shape[1]
    few = [Missing(f"Ranks: not shown, {draws} draws a chain are too few.")] if draws < 2 * MIN_DRAWS else []
    return [Gallery(pictures), *few]


def mixing_table(mixing: Sequence[Mixing]) -> Table:
    head = ("", "number", "R-hat, median", "max", "ESS, median", "min", "tails, min", "IAC in steps, median", "max")
    rows = [
        (m.what, f"{m.variables:,}", f"{m.rhat_median:.3f}", f"{m.rhat_max:.3f}", f"{m.ess_median:,.0f}",
         f"{m.ess_min:,.0f}", f"{m.tail_min:,.0f}", f"{m.iac_median:,.1f}", f"{m.iac_max:,.1f}")
        for m in mixing
    ]  # fmt: skip
    return Table(head, rows)


def mixing(values: Mapping[str, Values], thin: int, summary: Summary) -> Sequence[Block]:
    """`values` by series name: predictions and parameters of one run, or those of several runs."""
    if not summary.mixing:
        return [
            Missing(f"Mixing: not shown, {summary.draws} draws a chain are too few: expected at least {MIN_DRAWS}.")
        ]
    return [mixing_table(summary.mixing), *mixing_figures(values, dict.fromkeys(values, thin))]


def mixing_figures(values: Mapping[str, Values], thin: Mapping[str, int]) -> Sequence[Block]:
    pick: Callable[[Callable[[Values, str], np.ndarray]], dict[str, np.ndarray]] = lambda f: {
        k: a[np.isfinite(a)] for k, v in values.items() if np.isfinite(a := f(v, k)).any()
    }
    rhat, ess, iac = pick(lambda v, _: v.rhat), pick(lambda v, _: v.ess), pick(lambda v, k: v.iac * thin[k])
    top = max((float(a.max()) for a in rhat.values()), default=0.0)
    clipped = {k: a.clip(max=plots.CEILING) for k, a in rhat.items()}
    over = (
        f" Values above {plots.CEILING:g} (up to {top:.3g}) stand at {plots.CEILING:g}." if top > plots.CEILING else ""
    )
    share = "Share of the variables."
    drawn: list[tuple[str, dict[str, np.ndarray], str, Callable[[Theme], Any]]] = [
        ("rhat", rhat, f"{share} R-hat compares the chains with one another.{over}",
         lambda theme: plots.histogram(clipped, theme, f"R-hat: all left of {RHAT_MIXED} = mixed", "R-hat", RHAT_MIXED)),
        ("ess", ess, f"{share} ESS: how many independent draws the average is worth.",
         lambda theme: plots.histogram(ess, theme, f"ESS: right of {ESS_GOOD} = stable averages", "effective draws",
                                       ESS_GOOD, log=True)),
        ("iac", iac, f"{share} IAC: how many steps a chain takes to forget.",
         lambda theme: plots.histogram(iac, theme, "IAC: small against the run = enough steps", "steps", log=True)),
    ]  # fmt: skip
    pictures = [picture(name, caption, draw) for name, found, caption, draw in drawn if found]
    stuck = sum(int((~np.isfinite(v.rhat)).sum()) for v in values.values())
    said = [Missing(f"{stuck:,} variables have no finite R-hat: they did not move.")] if stuck else []
    return [Gallery(pictures), *said]


def over_time(panels: Mapping[str, Sequence[plots.Line]], burned: float | None) -> Sequence[Block]:
    if not panels:
        return [Missing("Scores over time: not shown, no monitor recorded any (monitor={'test': (x, y)}).")]
    caption = (
        "What the monitors recorded against the wall clock: the average so far, and (dashed) present states alone."
    )
    return [Gallery([picture("clock", caption, lambda theme: plots.clock(panels, theme, burned))])]


def temperature(run: Any, summary: Summary) -> Sequence[Block]:
    T, blocks = summary.target_temperature, list[Block]()
    if summary.composition_gap is None:
        blocks.append(Missing("Composition gap: none, nothing is composed of past draws."))
    else:
        unit = " a datum" if summary.data else ""
        blocks.append(
            Text(f"Composition gap: {summary.composition_gap:.3g} nats{unit}. It is what compositions cost more than "
                 "present states; above 1 a datum the partition tears the network apart.")
        )  # fmt: skip
    t = run.temperature.double()
    if not bool(t.isfinite().any()):
        return [*blocks, Missing("Temperature: not known, fewer than two states were kept.")]
    units = t.view(run.ensembles, -1, t.shape[1]).mean(1)
    mean, n = units.mean(0), len(units)
    error = units.std(0) / n**0.5 if n > 1 else torch.full_like(mean, math.nan)
    blocks.append(
        Text(f"E[(θ-θ̄)·g] must be T = {T:g} once the chains have mixed. Over all parameters it is {summary.overall:.3f}"
             + (f" ± {summary.overall_error:.2g}" if math.isfinite(summary.overall_error) else "")
             + f"; the step's own heat is {summary.heat:.3g} on average, {summary.hottest:.3g} in the hottest parameter.")
    )  # fmt: skip
    order = mean.nan_to_num(-math.inf).argsort(descending=True).tolist()
    half, M, sizes = ROWS // 2, len(order), run.groups.sizes
    shown = order if M <= ROWS else [*order[:half], *order[-half:]]
    row = lambda i: (
        run.groups.name(i), f"{sizes[i]:,}", number(mean[i]), number(error[i]), f"{mean[i] / T:.2f}" if n else ""
    )  # fmt: skip
    rows = [row(i) for i in shown]
    if M > ROWS:
        rows.insert(half, (f"… {M - ROWS:,} more", "", "", "", ""))
    return [*blocks, Table(("group, hottest first", "parameters", "E[(θ-θ̄)·g]", "standard error", "times T"), rows)]


def uncertain(run: Any, prediction: Prediction, x: Any, y: Any) -> Sequence[Block]:
    """The test inputs with the largest entropy, or standard deviation."""
    y, classes = torch.as_tensor(y), "probs" in prediction.draws
    whole = (prediction.entropy() if classes else prediction.sd).reshape(len(y), -1).mean(1)
    caused = prediction.mutual_information().reshape(len(y), -1).mean(1) if classes else None
    order = whole.argsort(descending=True)[:INPUTS].tolist()
    single = classes and y.dim() == 1
    guess = None
    if single:
        p = prediction.probs
        guess = p.argmax(-1) if prediction.classes else (p > 0.5).long()
    told = [label(prediction, guess, y, i) for i in order]
    wrong = [guess is not None and int(guess[i]) != int(y[i]) for i in order]
    if (tiles := look.as_images(x, classes)) is not None:
        caption = "Guess (true class) and entropy in nats; a cross marks a wrong guess."
        captions = [f"{t}  {whole[i]:.2f}" for t, i in zip(told, order)]
        drawn = picture("uncertain", caption, lambda theme: plots.images(list(tiles[order]), captions, wrong, theme))
        return [Gallery([drawn])]
    value = lambda i: [f"{v:.4g}" for v in x[i].flatten()[:4].tolist()] if isinstance(x, Tensor) else []
    head = [
        "row",
        "guess (true)",
        "entropy, nats" if classes else "sd",
        *(["caused by the parameters"] if classes else []),
    ]
    wide = len(value(0))
    rows = [
        (str(i), t, number(whole[i]), *([number(caused[i])] if caused is not None else []), *value(i))
        for i, t in zip(order, told)
    ]
    return [Table((*head, *(f"x{k}" for k in range(wide))), rows)]


def label(prediction: Prediction, guess: Tensor | None, y: Tensor, i: int) -> str:
    if guess is not None:
        return f"{int(guess[i])} ({int(y[i])})"
    if "probs" in prediction.draws or y[i].numel() != 1:
        return "several"
    return f"{prediction.mean[i].item():.3g} ({y[i].item():.3g})"


def settings(run: Any) -> Sequence[Block]:
    told = {k: v for k, v in run.settings.items() if k not in ("notes", "versions")}
    rows = [(k.replace("_", " "), setting(v)) for k, v in told.items()]
    notes = [n[:1].upper() + n[1:] for n in run.settings.get("notes", ())]
    return [Table((), rows, words=True), *([Items(notes)] if notes else [])]


def versions(run: Any) -> Sequence[Block]:
    rows = [(f"{k}, when sampled", str(v)) for k, v in dict(run.settings.get("versions", {})).items()]
    return [Table((), [*rows, *here().items()], words=True)]


def here() -> dict[str, str]:
    system = f"{platform.system()} {platform.machine()}"
    return {"partita": version(), "python": platform.python_version(), "torch": torch.__version__, "platform": system}


def again(folder: Path) -> Sequence[Block]:
    """How to have the samples back."""
    if not (folder / "run.json").exists():
        return [Text("This run was in memory; the report holds no samples. To keep them:"),
                Code('run = pt.sample(..., out="runs/name")')]  # fmt: skip
    name = repr(folder.as_posix())
    load = f"run = pt.load({name}, posterior)"
    return [Code(f"{load}\nrun = pt.resume({name}, posterior, data=(x, y), steps=...)  # the new total")]


def score(name: str, value: float) -> str:
    return f"{100 * value:.2f}\N{NO-BREAK SPACE}%" if "accuracy" in name or "coverage" in name else f"{value:.4f}"


def number(value: Any) -> str:
    v = float(value)
    return "unknown" if math.isnan(v) else f"{v:.3g}" if v and abs(v) < 0.1 else f"{v:.3f}"


def setting(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)
