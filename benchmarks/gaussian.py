"""512 chains x 6,000 steps of S-SGLD on a 5-dimensional Gaussian, one thread: seconds for each history.

    OMP_NUM_THREADS=1 python benchmarks/gaussian.py

The bound is 10 s. Each history is timed three times, in turn; median and range are printed.
"""

from __future__ import annotations

import statistics
import time

import torch

import partita as pt


def main() -> None:
    torch.set_num_threads(1)
    A = torch.randn(5, 5, generator=torch.Generator().manual_seed(7))
    L = A @ A.T / 5 + 0.6 * torch.eye(5)
    target = pt.Density(lambda theta: -0.5 * theta @ (L @ theta), dim=5)
    groups = pt.partitions.from_labels([0, 0, 1, 2, 2])
    histories = {
        "Ensemble()": pt.Ensemble(),
        "Window(500)": pt.Window(500),
        "Reservoir(256, every=10)": pt.Reservoir(256, every=10),
    }
    seconds: dict[str, list[float]] = {name: [] for name in histories}
    for _ in range(3):
        for name, history in histories.items():
            began = time.perf_counter()
            pt.sample(
                target,
                sampler=pt.SGLD(0.05),
                structure=pt.Structured(groups, history=history),
                steps=6_000,
                burn_in=1_000,
                thin=10,
                chains=512,
                init=torch.zeros(5),
            )
            seconds[name].append(time.perf_counter() - began)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread")
    for name, took in seconds.items():
        print(f"{name:<26} {statistics.median(took):5.2f} s   ({min(took):.2f} to {max(took):.2f})")


if __name__ == "__main__":
    main()
