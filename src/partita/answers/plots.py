"""The figures of a report. Every function returns a matplotlib Figure of its own and takes a Theme, light or dark.

Shapes: C chains, S draws. Titles say what good looks like. No pyplot and no rcParams: nothing outside is changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from partita.answers import canvas
from partita.answers.canvas import Theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 6  # chains drawn in one panel
POINTS = 600  # of a trace: more than the pixels there are
CEILING = 2.0  # R-hat above this lies in the last bin


@dataclass(frozen=True)
class Watched:
    """One quantity to look at: draws x [C, S], its R-hat, and its IAC in draws (NaN where unknown)."""

    name: str
    x: np.ndarray
    rhat: float = math.nan
    iac: float = math.nan


@dataclass(frozen=True)
class Line:
    """One curve over seconds."""

    label: str
    seconds: Sequence[float]
    values: Sequence[float]
    colour: int = 0
    dashed: bool = False


def trace(watched: Sequence[Watched], steps: Sequence[int], theme: Theme, unit: str = "chain") -> Figure:
    """Draws over steps, one panel a quantity."""
    figure, axes = canvas.panels(
        theme, len(watched), "Traces: one level band, all colours mixed = good", each=1.0, gap=0.3, share=True
    )
    for ax, w in zip(axes, watched):
        S = w.x.shape[1]
        pick = np.unique(np.linspace(0, S - 1, min(S, POINTS)).round().astype(int))
        for c, row in enumerate(w.x[:SHOWN]):
            colour = theme.cycle[c % len(theme.cycle)]
            ax.plot(np.asarray(steps)[pick], row[pick], lw=0.8, color=colour, alpha=0.85, marker="." if S < 4 else None)
        canvas.name(ax, theme, w.name, "" if math.isnan(w.rhat) else f"R-hat {w.rhat:.2f}")
        ax.margins(x=0.01)
    axes[-1].set_xlabel(f"step{_of(len(watched[0].x), unit)}", color=theme.quiet, fontsize=8.5)
    return figure


def ranks(watched: Sequence[Watched], theme: Theme, unit: str = "chain") -> Figure:
    """Where each chain's draws stand among all draws (Vehtari et al. 2021): bars of count/expected - 1 about a line.

    The band is ±2 standard deviations of a count when draws forget each other after one IAC.
    """
    figure, axes = canvas.panels(theme, len(watched), "Ranks: uniform = chains agree", each=1.0, gap=0.3, share=True)
    for ax, w in zip(axes, watched):
        rows, names = (_halves(w.x), ["1st half", "2nd half"]) if len(w.x) == 1 else (w.x, [])
        names = names or [f"{i + 1}" for i in range(len(rows))]
        C, S = rows.shape
        bins = int(np.clip(S // 5, 4, 12))
        place = _ranks(rows) / rows.size
        counts = np.stack([np.histogram(p, bins, (0, 1))[0] for p in place[:SHOWN]])
        excess = counts / (S / bins) - 1
        band = 2 * chance(bins, C, S / max(w.iac, 1)) if w.iac > 0 else math.inf
        scale = 0.46 / max(1.0, float(np.abs(excess).max()))
        edges = np.linspace(0, 1, bins + 1)
        for c, bars in enumerate(excess):
            y, colour = len(excess) - 1 - c, theme.cycle[c % len(theme.cycle)]
            if band <= 1:  # else so few draws are independent that it would hold anything
                ax.axhspan(y - band * scale, y + band * scale, color=theme.band, lw=0, zorder=0)
            ax.stairs(y + bars * scale, edges, baseline=y, fill=True, color=colour, lw=0, zorder=2)
            ax.axhline(y, color=theme.quiet, lw=0.6, zorder=3)
        ax.set(xlim=(0, 1), ylim=(-0.55, len(excess) - 0.45), yticks=range(len(excess)))
        ax.set_yticklabels(names[: len(excess)][::-1])
        ax.grid(False)
        canvas.name(ax, theme, w.name, f"{'halves' if len(w.x) == 1 else unit + 's'}{_of(len(w.x), '')}")
    axes[-1].set_xlabel("rank among all draws, from lowest to highest", color=theme.quiet, fontsize=8.5)
    return figure


def histogram(
    series: Mapping[str, np.ndarray], theme: Theme, title: str, label: str, good: float | None = None, log: bool = False
) -> Figure:
    """Shares of variables, one outline a series; `good` is a dashed line."""
    figure, (ax,) = canvas.panels(theme, 1, title, each=1.9, top=0.44, width=4.2)
    every = np.concatenate(list(series.values()))
    low, high, bins = float(every.min()), float(every.max()), int(np.clip(len(every), 8, 30))
    if good is not None:
        low, high = min(low, good / 1.05), max(high, good * 1.05)
    if log:
        edges = np.geomspace(max(low, 1e-3) * 0.97, max(high, 1e-3) * 1.03, bins + 1)
        ax.set_xscale("log")
    else:
        edges = np.linspace(low, high + 1e-9 * max(1.0, abs(high)) + (high == low) * 0.01, bins + 1)
    for i, (name, values) in enumerate(series.items()):
        share, colour = np.histogram(values, edges)[0] / len(values), theme.cycle[i % len(theme.cycle)]
        ax.stairs(share, edges, fill=True, color=colour, alpha=0.22, lw=0)
        ax.stairs(share, edges, color=colour, lw=1.6, ls=("-", "--")[i % 2], label=name)
    if good is not None:
        ax.axvline(good, color=theme.ink, lw=1, ls=":")
        side = "right" if good > (edges[0] * edges[-1]) ** 0.5 and log else "left"
        ax.text(
            good,
            0.98,
            f" {good:g} ",
            transform=ax.get_xaxis_transform(),
            va="top",
            ha=side,
            color=theme.ink,
            fontsize=8.5,
        )
    ax.yaxis.set_major_formatter(canvas.percent())
    ax.set_xlabel(label, color=theme.quiet, fontsize=8.5)
    if log:
        canvas.plain_log(ax, edges[0], edges[-1])
    canvas.legend(ax, theme)
    return figure


def reliability(confidence: np.ndarray, hit: np.ndarray, theme: Theme, bins: int = 10) -> Figure:
    """Accuracy of the data in a bin of confidence, with ±2 standard errors, over how many there are."""
    figure, (ax, below) = canvas.panels(
        theme, 2, "Reliability: points on the line = believe it", each=1.3, top=0.44, left=0.78, gap=0.14, ratios=(3, 1)
    )
    index = np.minimum((confidence * bins).astype(int), bins - 1)
    n = np.bincount(index, minlength=bins)
    some = n > 0
    mean = np.bincount(index, confidence, bins)[some] / n[some]
    right = np.bincount(index, hit, bins)[some] / n[some]
    error = 2 * np.sqrt(np.clip(mean * (1 - mean), 1e-4, None) / n[some])  # of a calibrated forecast: no bin has 0
    ax.plot((0, 1), (0, 1), color=theme.quiet, lw=1, ls="--")
    ax.errorbar(
        mean,
        right,
        (np.minimum(error, right), np.minimum(error, 1 - right)),
        fmt="o",
        ms=5,
        lw=1.2,
        color=theme.cycle[0],
        capsize=2,
    )
    ax.set(xlim=(0, 1.02), ylim=(-0.03, 1.05), ylabel="how often right")
    below.bar((np.arange(bins) + 0.5) / bins, n, 0.9 / bins, color=theme.cycle[0], alpha=0.6, lw=0)
    below.set(xlim=(0, 1.02), ylabel="inputs")
    below.set_xlabel("how sure", color=theme.quiet, fontsize=8.5)
    ax.tick_params(labelbottom=False)
    for each in (ax, below):
        each.yaxis.label.set(color=theme.quiet, fontsize=8.5)
        each.xaxis.set_major_formatter(canvas.percent())
    ax.yaxis.set_major_formatter(canvas.percent())
    return figure


def coverage(pit: np.ndarray, theme: Theme) -> Figure:
    """Share of targets inside the central interval of each mass; u = F(y) lies in that of mass m when |2u - 1| ≤ m."""
    figure, (ax,) = canvas.panels(
        theme, 1, "Coverage: on the line = intervals hold what they say", each=2.9, top=0.44, left=0.78
    )
    mass = np.linspace(0, 1, 101)
    inside = np.sort(np.abs(2 * pit - 1))
    error = 2 * np.sqrt(mass * (1 - mass) / max(1, len(pit)))
    ax.fill_between(mass, (mass - error).clip(0), (mass + error).clip(max=1), color=theme.band, lw=0)
    ax.plot((0, 1), (0, 1), color=theme.quiet, lw=1, ls="--")
    ax.plot(mass, np.searchsorted(inside, mass, side="right") / len(inside), color=theme.cycle[0], lw=1.8)
    ax.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="share of targets inside")
    ax.yaxis.label.set(color=theme.quiet, fontsize=8.5)
    ax.set_xlabel("mass of the central interval", color=theme.quiet, fontsize=8.5)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(canvas.percent())
    return figure


def clock(panels: Mapping[str, Sequence[Line]], theme: Theme, burned: float | None = None) -> Figure:
    """Scores against seconds, one panel a score; `burned` is when burn-in ended."""
    figure, axes = canvas.panels(
        theme, len(panels), "Scores over time: level at the end = ran long enough", each=1.2, gap=0.32, share=True
    )
    for ax, (name, lines) in zip(axes, panels.items()):
        for line in lines:
            colour = theme.cycle[line.colour % len(theme.cycle)]
            style = {"color": colour, "lw": 1.5, "ls": "--" if line.dashed else "-", "marker": "o", "ms": 2.8}
            ax.plot(line.seconds, line.values, label=line.label, **style)  # type: ignore[arg-type]
        if burned is not None:
            ax.axvspan(0, burned, color=theme.band, lw=0, zorder=0)
        if "accuracy" in name:
            ax.yaxis.set_major_formatter(canvas.percent())
        canvas.name(ax, theme, name, "shaded: burn-in" if burned is not None and ax is axes[0] else "")
        ax.set_xlim(left=0)
    axes[-1].set_xlabel("seconds", color=theme.quiet, fontsize=8.5)
    most = max(axes, key=lambda a: len(a.get_lines()))
    canvas.legend(most, theme, always=True)
    return figure


def images(pictures: Sequence[np.ndarray], captions: Sequence[str], wrong: Sequence[bool], theme: Theme) -> Figure:
    """Inputs in a grid; the caption of a wrong guess is marked with a cross, too."""
    from matplotlib.figure import Figure

    rows = -(-len(pictures) // 4)
    figure = Figure(figsize=(canvas.WIDTH, 0.66 + 1.42 * rows), facecolor=theme.face)
    height, title = figure.get_figheight(), "Least certain inputs: hard for you, too = good"
    figure.text(
        0.14 / canvas.WIDTH, 1 - 0.2 / height, title, va="center", fontsize=10.5, fontweight="bold", color=theme.ink
    )
    figure.subplots_adjust(0.03, 0.1 / height, 0.97, 1 - 0.6 / height, wspace=0.08, hspace=0.22)
    grid = figure.subplots(rows, 4, squeeze=False)
    for ax in grid.flat:
        ax.set_axis_off()
    for ax, picture, caption, bad in zip(grid.flat, pictures, captions, wrong):
        ax.imshow(picture, cmap="gray" if picture.ndim == 2 else None, interpolation="nearest")
        ax.set_title(("✗ " if bad else "") + caption, fontsize=8.5, color=theme.cycle[1] if bad else theme.ink, pad=3)
    return figure


def chance(bins: int, chains: int, draws: float) -> float:
    """Standard deviation of count/expected in one bin, of so many independent draws a chain (hypergeometric)."""
    return math.sqrt((bins - 1) * (1 - 1 / chains) / draws)


def _halves(x: np.ndarray) -> np.ndarray:
    half = x.shape[1] // 2
    return np.concatenate((x[:, :half], x[:, -half:]))


def _ranks(x: np.ndarray) -> np.ndarray:
    """Ranks 0.5 … N - 0.5 among all entries, ties at their average."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - counts / 2)[inverse].reshape(x.shape)


def _of(count: int, unit: str) -> str:
    if count <= SHOWN:
        return f" ({count} {unit}s)" if unit and count > 1 else ""
    return f" (first {SHOWN} of {count:,}{' ' + unit + 's' if unit else ''})"
