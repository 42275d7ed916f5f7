"""What a report looks at: everything of a run that costs time is measured here, once."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from partita.answers.diagnostics import MIN_DRAWS
from partita.answers.page import Banner
from partita.answers.plots import Line, Watched
from partita.answers.predictive import Prediction
from partita.answers.summary import Summary, measure
from partita.target.likelihoods import Categorical
from partita.target.trees import as_tensors, map_tree, rows

COLUMNS = 300  # parameters read, evenly spread: samples may lie on disk
PREDICTED = 2_000_000  # draws x test inputs predicted for a report
PANELS = ("accuracy", "rmse", "nll")  # of scores over time; then what else was recorded, three in all
MOST_PANELS = 3


@dataclass(frozen=True)
class Values:
    """Some variables of a run: x [C, S, V] (of coupled chains the ensembles' means), their names, and what was measured."""

    what: str
    x: Tensor
    names: Sequence[str]
    rhat: np.ndarray
    ess: np.ndarray
    iac: np.ndarray

    def watched(self) -> list[Watched]:
        """Three of them at most: the one with the largest R-hat, the one a quarter from there, the middle one."""
        order = np.argsort(np.nan_to_num(self.rhat, nan=-1.0), kind="stable")[::-1]
        V = len(order)
        picks = order[list(dict.fromkeys((0, V // 4, V // 2)))] if V > 3 else order
        x = self.x.double().numpy()
        return [Watched(self.names[i], x[:, :, i], float(self.rhat[i]), float(self.iac[i])) for i in picks]


def look(what: str, x: Tensor, names: Sequence[str], ensembles: int) -> Values:
    x = x.detach().float().cpu()
    C, S, V = x.shape
    unknown = torch.full((V,), math.nan)
    rhat, ess, iac, _ = measure(x, ensembles) if S >= MIN_DRAWS else (unknown,) * 4
    units = x if ensembles == C else x.reshape(ensembles, C // ensembles, S, V).mean(1)
    return Values(what, units, names, rhat.numpy(), ess.numpy(), iac.numpy())


def look_at_predictions(run: Any) -> Values:
    """Function values at the probe inputs: what they are is known by the likelihood."""
    x = run._functions()
    one = run.predict(map_tree(lambda t: t[:1], run.probe[0]), draws=1)
    name = next(n for n in ("probs", "mean", *one.draws) if n in one.draws)
    K = one.draws[name][0].numel()
    classes = isinstance(run.target.likelihood, Categorical)
    label = ("log p(class {k})" if classes else "log p") if name == "probs" else f"{name}{' {k}' if K > 1 else ''}"
    names = [label.format(k=v % K) + f" at probe input {v // K}" for v in range(x.shape[2])]
    return look("predictions", x, names, run.ensembles)


def look_at_parameters(run: Any) -> Values:
    D = run.samples.shape[2]
    step = max(1, -(-D // COLUMNS))
    x = torch.as_tensor(run.samples[:, :, ::step])
    blocks, names, b = run.space.blocks, [], 0
    for i in range(0, D, step):
        while blocks[b].stop <= i:
            b += 1
        at = np.unravel_index(i - blocks[b].start, blocks[b].shape) if blocks[b].shape else ()
        names.append(blocks[b].name + (f"[{', '.join(str(int(a)) for a in at)}]" if at else ""))
    return look("parameters", x, names, run.ensembles)


def predicted(run: Any, x: Any) -> tuple[Prediction, str]:
    """The prediction at test inputs, and how many draws it averages."""
    C, S, _ = run.samples.shape
    total = C * S
    most = max(50, PREDICTED // max(1, rows(as_tensors(x))))
    with warnings.catch_warnings(record=True) as caught:  # "predicting with one draw in 3 …" belongs into the page
        warnings.simplefilter("always")
        prediction = run.predict(x, draws=most if most < total else None)
    used = next(iter(prediction.draws.values())).shape[0]
    said = f"Averaged over {'all ' if used == total else ''}{used:,}{'' if used == total else f' of {total:,}'} draws."
    return prediction, " ".join(
        [said, *dict.fromkeys(str(w.message) for w in caught if "predicting" in str(w.message))]
    )


def pair(test: Any) -> tuple[Any, Any] | None:
    if test is None:
        return None
    if not isinstance(test, (tuple, list)) or len(test) != 2:
        raise ValueError(f"test is a {type(test).__name__}, expected a pair (x, y)")
    return as_tensors(test[0], "test[0]"), as_tensors(test[1], "test[1]")


def as_images(x: Any, classes: bool) -> np.ndarray | None:
    """[n, h, w] or [n, h, w, 3] in 0 … 1 when the inputs look like images: by shape, and flat ones by whether
    neighbours resemble each other, both ways."""
    if not isinstance(x, Tensor) or (not x.is_floating_point() and x.dtype != torch.uint8):
        return None
    x = x.detach().float().cpu()
    if x.dim() == 2 and classes:
        side = math.isqrt(x.shape[1])
        if side < 6 or side * side != x.shape[1] or not _smooth(x.reshape(-1, side, side)):
            return None
        x = x.reshape(-1, side, side)
    elif x.dim() == 4 and x.shape[1] in (1, 3):
        x = x[:, 0] if x.shape[1] == 1 else x.permute(0, 2, 3, 1)
    if x.dim() not in (3, 4) or min(x.shape[1:3]) < 6 or (x.dim() == 4 and x.shape[3] != 3):
        return None
    low, high = x.min(), x.max()
    return ((x - low) / (high - low).clamp(min=1e-12)).numpy()


def _smooth(x: Tensor, least: float = 0.25) -> bool:
    x = x - x.mean()
    spread = x.square().mean().clamp(min=1e-12)
    return all(bool((a * b).mean() / spread > least) for a, b in ((x[:, 1:], x[:, :-1]), (x[..., 1:], x[..., :-1])))


def score_lines(metrics: Sequence[Mapping[str, Any]], colour: int = 0, run: str = "") -> dict[str, list[Line]]:
    """{score: its lines} of what monitors recorded under "name/score" (averages) and "name/now/score" (present states)."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for record in metrics:
        for key, value in record.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if number and key not in ("step", "seconds", "composition_gap"):
                series, _, score = key.rpartition("/")
                found.setdefault(score, {}).setdefault(series, []).append((record["seconds"], value))
    order = sorted(found, key=lambda s: (PANELS.index(s) if s in PANELS else len(PANELS), s))
    panels: dict[str, list[Line]] = {}
    for score in order[:MOST_PANELS]:
        monitors = list(dict.fromkeys(series.removesuffix("/now") for series in found[score]))
        panels[score] = []
        for series, points in found[score].items():
            monitor, now = series.removesuffix("/now"), series.endswith("/now")
            kind = "one draw a chain" if now else "average so far" if f"{series}/now" in found[score] else ""
            label = ", ".join(word for word in (run, monitor, kind) if word)
            which = colour if run else colour + monitors.index(monitor)
            seconds, values = zip(*points)
            panels[score].append(Line(label, seconds, values, which, now))
    return panels


def seconds_of(step: int, metrics: Sequence[Mapping[str, Any]]) -> float | None:
    """When a step was reached, read off between the monitor's records."""
    if not metrics:
        return None
    steps, seconds = [0, *(r["step"] for r in metrics)], [0.0, *(r["seconds"] for r in metrics)]
    return float(np.interp(step, steps, seconds))


def banner_of(run: Any, summary: Summary, name: str = "") -> Banner:
    """The verdict. Lines that are unknown here are a reason for care, never for calm."""
    said = [v[:1].upper() + v[1:] + ("" if v.endswith(".") else ".") for v in summary.verdict]
    unmixed = [m for m in summary.mixing if m.unmixed != 0]  # NaN, undefined, is no agreement
    hot = any("runs hot" in v or "runs cold" in v or "runs at temperature" in v or "do not trust" in v for v in said)
    if run.stopped:
        return Banner("bad", "The run ended early", said, name)
    if not summary.mixing:
        return Banner("bad", "Too few draws to judge", said, name)
    if hot:
        return Banner("bad", "Sampled at the wrong temperature", said, name)
    if summary.mixing[0] in unmixed:
        return Banner("bad", "The chains have not mixed yet", said, name)
    if unmixed or len(said) > len(summary.mixing):
        return Banner("care", "Usable, with care", said, name)
    return Banner("good", "The chains agree", said, name)
