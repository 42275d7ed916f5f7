"""Draws docs/composition.png, the idea of Partita in one picture: `python docs/picture.py`."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from matplotlib.path import Path as Line

COLOURS = ("#4477aa", "#dd7733", "#3a9a68", "#aa5599")  # one a group; told apart by the colour-blind as well
INK, GREY, PAPER = "#222222", "#737983", "#fcfcfa"
HEADING: dict[str, Any] = {"size": 18, "weight": "bold", "va": "baseline"}
NOW, PAST = 1.0, 0.22  # opacity of what is present and of what is past

# One unit is ten pixels of 1600 x 700.
LEFT, LEFT_CELL = 16.0, 8.5
MIDDLE, MIDDLE_CELL = 66.0, 10.0
RIGHT, RIGHT_CELL = 119.0, 9.5
TOP, BAR = 51.5, 5.5  # lower edge and height of the bars θ and φ
PAST_TOP, PAST_BAR, PAST_STEP, PAST_ROWS = 42.0, 3.0, 4.6, 5
CHOSEN = {0: 0, 2: 2, 3: 3}  # group → the row of the history it is drawn from; group 1 is kept


def cell(ax: Axes, x: float, y: float, width: float, height: float, group: int, alpha: float, edge: float = 0) -> None:
    """One group of a bar; `edge` is the width of its outline."""
    ax.add_patch(Rectangle((x, y), width, height, fc=COLOURS[group], ec="white", lw=2, alpha=alpha))
    if edge:
        ax.add_patch(Rectangle((x, y), width, height, fc="none", ec=INK, lw=edge, zorder=3))


def elbow(ax: Axes, points: list[tuple[float, float]], colour: str, radius: float = 1.4, width: float = 2.6) -> None:
    """An arrow along `points`, its corners rounded."""
    path, codes = [points[0]], [Line.MOVETO]
    for (x0, y0), (x, y), (x1, y1) in zip(points, points[1:], points[2:], strict=False):
        into, out = abs(x - x0) + abs(y - y0), abs(x1 - x) + abs(y1 - y)
        r = min(radius, into / 2, out / 2)
        path += [(x - (x - x0) / into * r, y - (y - y0) / into * r), (x, y)]
        path += [(x + (x1 - x) / out * r, y + (y1 - y) / out * r)]
        codes += [Line.LINETO, Line.CURVE3, Line.CURVE3]
    path, codes = [*path, points[-1]], [*codes, Line.LINETO]
    style = "-|>,head_length=7,head_width=4.5"
    arrow = FancyArrowPatch(path=Line(path, codes), arrowstyle=style, color=colour, lw=width, zorder=4)
    arrow.set(joinstyle="miter", capstyle="butt")
    ax.add_patch(arrow)


def text(ax: Axes, x: float, y: float, words: str, size: float = 16, **how: Any) -> None:
    style: dict[str, Any] = {"fontsize": size, "ha": "center", "va": "center", "color": INK}
    ax.text(x, y, words, **(style | how))


def present_and_past(ax: Axes) -> None:
    text(ax, LEFT + 2 * LEFT_CELL, 65.8, "parameters in groups", **HEADING)
    text(ax, LEFT - 1.5, TOP + BAR / 2, "now  $\\theta$", 19, ha="right")
    for group in range(4):
        x = LEFT + group * LEFT_CELL
        cell(ax, x, TOP, LEFT_CELL, BAR, group, NOW, edge=2.6 if group not in CHOSEN else 0)
        text(ax, x + LEFT_CELL / 2, TOP + BAR / 2 - 0.1, f"$\\theta_{group + 1}$", 19, color="white", zorder=5)
        for row in range(PAST_ROWS):
            y = PAST_TOP - row * PAST_STEP
            drawn = CHOSEN.get(group) == row
            cell(ax, x, y, LEFT_CELL, PAST_BAR, group, NOW if drawn else PAST)
    bottom = PAST_TOP - (PAST_ROWS - 1) * PAST_STEP
    text(ax, LEFT - 3.5, 34.3, "history:\npast $\\theta$", ha="right", linespacing=1.5)
    upper, inner, outer = PAST_TOP + PAST_BAR, LEFT - 1.2, LEFT - 2.2
    ax.plot([inner, outer, outer, inner], [upper, upper, bottom, bottom], color=GREY, lw=2)


def composition(ax: Axes) -> None:
    formula = r"$\phi = r\,\theta + (1-r)\,\tilde\theta$"
    text(ax, MIDDLE + 2 * MIDDLE_CELL, 65.8, f"composition  {formula}", **HEADING)
    for group in range(4):
        x = MIDDLE + group * MIDDLE_CELL
        kept = group not in CHOSEN
        cell(ax, x, TOP, MIDDLE_CELL, BAR, group, NOW if kept else 0.5, edge=2.6 if kept else 0)
        name = f"$\\theta_{group + 1}$" if kept else f"$\\tilde\\theta_{group + 1}$"
        text(ax, x + MIDDLE_CELL / 2, TOP + BAR / 2 - 0.1, name, 19, color="white" if kept else INK, zorder=5)
        start, end = LEFT + (group + 0.5) * LEFT_CELL, x + MIDDLE_CELL / 2
        if kept:
            above = TOP + BAR
            points = [(start, above + 0.2), (start, above + 4), (end, above + 4), (end, above + 0.3)]
        else:
            below = PAST_TOP - CHOSEN[group] * PAST_STEP
            lane = below - (PAST_STEP - PAST_BAR) / 2
            points = [(start, below), (start, lane), (end, lane), (end, TOP - 0.2)]
        elbow(ax, points, COLOURS[group])
    text(ax, 59.5, TOP + BAR + 1.9, "kept", 15, color=COLOURS[1])
    text(ax, MIDDLE + 1.5 * MIDDLE_CELL, 41.5, "each drawn\nfrom a row\nof its own", 15, color=GREY, linespacing=1.3)


def gradient(ax: Axes) -> None:
    centre = RIGHT + 2 * RIGHT_CELL
    text(ax, centre, 65.8, "gradient", **HEADING)
    box = FancyBboxPatch((RIGHT, TOP), 4 * RIGHT_CELL, BAR, "round,pad=0,rounding_size=1", fc="white", ec=INK, lw=1.8)
    ax.add_patch(box)
    text(ax, centre, TOP + BAR / 2, "energy $U_{\\mathrm{lik}}(\\phi)$ of a minibatch")
    elbow(ax, [(MIDDLE + 4 * MIDDLE_CELL + 0.7, TOP + BAR / 2), (RIGHT - 0.3, TOP + BAR / 2)], INK)
    y = 36.0
    for group in range(4):
        x = RIGHT + group * RIGHT_CELL
        if group in CHOSEN:
            ax.add_patch(Rectangle((x, y), RIGHT_CELL, BAR, fc="white", ec=GREY, lw=1.4, ls=(0, (4, 3))))
            text(ax, x + RIGHT_CELL / 2, y + BAR / 2, "0", 17, color=GREY)
        else:
            cell(ax, x, y, RIGHT_CELL, BAR, group, NOW, edge=2.6)
            text(ax, x + RIGHT_CELL / 2, y + BAR / 2, f"$\\nabla_{group + 1}$", 19, color="white", zorder=5)
            elbow(ax, [(x + RIGHT_CELL / 2, TOP - 0.2), (x + RIGHT_CELL / 2, y + BAR + 0.3)], COLOURS[group])
    text(ax, centre, y - 5.2, "$\\nabla$ reaches only\nwhat is present", 17, linespacing=1.4)


def masks(ax: Axes) -> None:
    ax.plot([3, 157], [20, 20], color="#d8d8d4", lw=1.5)
    text(ax, 80, 20, "choices of the mask $r$", 15, color=GREY, backgroundcolor=PAPER)
    one_group = [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    at_random = [(1, 0, 1, 0), (0, 1, 1, 1), (0, 0, 0, 1), (1, 1, 0, 0)]
    choices = [
        ("S", "one group kept at a time", one_group, 3.0),
        ("$\\mathbf{S_d}$", "each kept with probability $\\rho$", at_random, 56.0),
        ("Joint", "all kept", [(1, 1, 1, 1)], 115.0),
    ]
    width, height, step = 4.2, 2.0, 2.7
    for name, words, rows, x in choices:
        ax.text(x, 15.2, name, fontsize=18, weight="bold", color=INK, va="baseline")
        indent = {"S": 3.2, "Joint": 8.2}.get(name, 4.6)
        ax.text(x + indent, 15.2, words, fontsize=16, color=INK, va="baseline")
        for k, row in enumerate(rows):
            for group, present in enumerate(row):
                cell(ax, x + group * width, 10.4 - k * step, width, height, group, NOW if present else PAST)
    text(ax, 3 + 4 * width + 2, 7.4, "summed, every group\ngets its gradient", 15, ha="left", color=GREY)
    text(ax, 56 + 4 * width + 2, 7.4, "dropout between\npresent and past", 15, ha="left", color=GREY)
    text(ax, 115 + 4 * width + 2, 11.4, "ordinary SG-MCMC", 15, ha="left", color=GREY)


def main() -> None:
    figure = plt.figure(figsize=(16, 7), dpi=100, facecolor=PAPER)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, 160), ylim=(0, 70))
    ax.axis("off")
    for part in (present_and_past, composition, gradient, masks):
        part(ax)
    figure.savefig(Path(__file__).with_name("composition.png"), metadata={"Software": None})


if __name__ == "__main__":
    main()
