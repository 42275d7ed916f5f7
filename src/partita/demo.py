"""`partita demo`: a regression whose posterior is known exactly, then a network on handwritten digits."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

import partita as pt
from partita.laws import exact
from partita.laws.extra import PANELS, panel_structure, regression_posterior

NAMES = ("w1", "w2", "w3", "b")
CHAINS, STEPS, BURN_IN, STEP = 256, 1600, 400, 0.0015


def run_demo(out: Path, seed: int, console: Console) -> None:
    """Both parts; pictures go to `out`."""
    with one_thread():
        both_parts(out, seed, console)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """These networks are small, and where something else runs two threads wait for each other most of the time."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


def finished(run: pt.Run) -> pt.Run:
    """The run, unless it was interrupted: then the demo is, too."""
    if run.stopped is not None:
        raise KeyboardInterrupt
    return run


def both_parts(out: Path, seed: int, console: Console) -> None:
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    console.print("[bold]1. Linear regression, 4 parameters: sampled against exact[/bold]")
    draws = {panel: sample_panel(panel, seed) for panel in PANELS}
    laws = {panel: exact_law(panel) for panel in PANELS}
    console.print(regression_table(draws, laws))
    console.print(f"   picture: {draw_panels(draws, laws, out / 'regression.png')}\n")

    console.print("[bold]2. The posterior of a 64-32-10 network on 1,437 handwritten digits[/bold]")
    (x, y), (x_test, y_test) = pt.data.digits(seed=0)
    run = finished(sample_digits(x, y, seed))
    prediction = run.predict(x_test)
    console.print(score_line(prediction.scores(y_test)))
    console.print(f"\n{run.summary()}\n")
    console.print(f"   picture: {draw_digits(x_test, y_test, prediction, out / 'digits.png')}")
    console.print(f"\n{time.perf_counter() - began:.0f} s in all")


def sample_panel(panel: str, seed: int) -> Tensor:
    """Draws [n, 4] of one structure; past draws come from the other chains (one ensemble of all)."""
    posterior, data = regression_posterior()
    run = pt.sample(
        posterior,
        data,
        sampler=pt.SGLD(STEP),
        structure=panel_structure(panel, pt.Ensemble()),
        steps=STEPS,
        burn_in=BURN_IN,
        thin=10,
        chains=CHAINS,
        batch_size=100,
        init="map",
        spread=0.1,
        seed=seed,
    )
    return finished(run).samples.flatten(0, 1)


def exact_law(panel: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean [4] and covariance [4, 4] of the panel's law, at this step size."""
    _, _, L, mu = exact.regression()
    groups, rho = PANELS[panel]
    prior = np.eye(4)
    law = None
    if groups is not None:
        M = len(set(groups))
        law = exact.one_hot(M) if rho is None else exact.bernoulli(M, rho, 4)
    cov = exact.stationary_cov(
        L - prior,
        groups or [0] * 4,
        law,
        exact.Overdamped(STEP),
        prior=prior,
        ensemble=CHAINS if groups else None,
        force=-prior @ mu,
    ).cov
    return mu, cov


def regression_table(draws: dict[str, Tensor], laws: dict[str, tuple[np.ndarray, np.ndarray]]) -> str:
    """Exact → sampled: standard deviations and the correlation of w1 and w2; last, the largest error of a mean."""
    head = "".join(f"{'sd ' + n:>12}" for n in NAMES[:3])
    lines = [f"   {'exact → sampled':<22}{head}{'corr w1,w2':>14}"]
    worst = 0.0
    for panel, theta in draws.items():
        mean, cov = laws[panel]
        x = theta.double().numpy()
        got = np.cov(x.T)
        pairs = "".join(f"{f'{np.sqrt(cov[i, i]):.3f}→{np.sqrt(got[i, i]):.3f}':>12}" for i in range(3))
        r, s = (c[0, 1] / np.sqrt(c[0, 0] * c[1, 1]) for c in (cov, got))
        worst = max(worst, float(np.abs((x.mean(0) - mean) / np.sqrt(np.diag(cov))).max()))
        lines.append(f"   {panel:<22}{pairs}{f'{r:+.2f}→{s:+.2f}':>14}")
    return "\n".join([*lines, f"   means: at most {worst:.2f} sd from exact"])


def draw_panels(draws: dict[str, Tensor], laws: dict[str, tuple[np.ndarray, np.ndarray]], path: Path) -> Path:
    """Five panels of (w1, w2): draws, the exact ellipse of that structure's law, the joint posterior's dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 3.6), layout="constrained")
    axes = figure.subplots(1, len(draws), sharex=True, sharey=True)
    joint = laws["joint"]
    pick = np.random.default_rng(0)
    for ax, (panel, theta) in zip(axes, draws.items()):
        some = theta[pick.choice(len(theta), 1500, replace=False)].numpy()
        ax.scatter(some[:, 0], some[:, 1], s=3, alpha=0.25, color="#4477aa", linewidths=0, rasterized=True)
        for sds in (1, 2):
            ax.plot(*ellipse(*joint, sds), color="0.45", lw=1, ls="--", label="joint posterior" if sds == 1 else None)
            ax.plot(*ellipse(*laws[panel], sds), color="#bb3311", lw=1.6, label="exact law" if sds == 1 else None)
        ax.set_title(panel.replace("S_d", "$S_d$"), fontsize=11)
        ax.set_xlabel("$w_1$")
    axes[0].set_ylabel("$w_2$")
    axes[0].legend(loc="upper right", fontsize=8, frameon=False)
    figure.suptitle("Linear regression: draws against exact 1 and 2 sd ellipses", fontsize=12)
    figure.savefig(path, dpi=110)
    return path


def ellipse(mean: np.ndarray, cov: np.ndarray, sds: float) -> tuple[np.ndarray, np.ndarray]:
    """The contour of the first two coordinates' marginal at `sds` standard deviations."""
    angle = np.linspace(0, 2 * np.pi, 200)
    points = mean[:2, None] + sds * np.linalg.cholesky(cov[:2, :2]) @ np.stack([np.cos(angle), np.sin(angle)])
    return points[0], points[1]


def sample_digits(x: Tensor, y: Tensor, seed: int) -> pt.Run:
    """SGHMC on the whole network at once, every step on all the data: small enough to mix while you watch."""
    posterior = pt.Posterior(pt.models.mlp(64, (32,), 10), pt.Categorical(), prior=pt.Normal(0.3))
    return pt.sample(
        posterior,
        (x, y),
        sampler=pt.SGHMC(time_step=0.01, friction=5.0),
        steps=7_000,
        burn_in=1_000,
        thin=10,
        chains=4,
        batch_size=len(y),
        seed=seed,
    )


def score_line(scores: dict[str, float]) -> str:
    shown = (
        f"{k.replace('_', ' ')} {f'{100 * v:.1f} %' if 'accuracy' in k else f'{v:.3f}'}" for k, v in scores.items()
    )
    return f"   360 held-out digits: {', '.join(shown)}".replace(", nll", ",\n   nll")


def draw_digits(x: Tensor, y: Tensor, prediction: pt.Prediction, path: Path, n: int = 12) -> Path:
    """The most and the least certain test digits, by the entropy of the averaged prediction."""
    from matplotlib.figure import Figure

    entropy, probs = prediction.entropy(), prediction.probs
    information = prediction.mutual_information()
    order = entropy.argsort()
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    rows = np.asarray(figure.subfigures(2, 1, hspace=0.06)).tolist()
    for row, picks, title in zip(rows, (order[:n], order[-n:].flip(0)), ("most certain", "least certain")):
        row.suptitle(f"{title}: predicted (true), entropy, of which caused by the parameters", fontsize=11)
        for ax, i in zip(row.subplots(1, n), picks.tolist()):
            guess, right = int(probs[i].argmax()), int(y[i])
            ax.imshow(x[i].reshape(8, 8), cmap="gray_r", interpolation="nearest")
            ax.set_xticks([])
            ax.set_yticks([])
            ax.set_title(f"{guess} ({right})", fontsize=12, color="black" if guess == right else "#bb3311")
            ax.set_xlabel(f"{entropy[i]:.2f}, {information[i]:.2f}", fontsize=9)
    figure.savefig(path, dpi=110)
    return path
