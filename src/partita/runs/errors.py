"""What can go wrong while a run goes."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class DivergenceError(RuntimeError):
    """A chain turned NaN or inf. `chains` are the diverged ones, `step` the step at which it was seen, `last_good` every
    chain's θ [C, D] at `last_good_step`, and `run` what had been kept until then."""

    def __init__(self, chains: list[int], step: int, settings: str, last_good: Tensor, last_good_step: int, run: Any):
        self.chains, self.step = chains, step
        self.last_good, self.last_good_step, self.run = last_good, last_good_step, run
        more = ", …" if len(chains) > 8 else ""
        which = f"chain {chains[0]}" if len(chains) == 1 else f"chains {', '.join(map(str, chains[:8]))}{more}"
        cure = "take a smaller step" if step > 1 else "start elsewhere (init) or take a smaller step"
        super().__init__(
            f"{which} diverged (NaN or inf) between steps {last_good_step:,} and {step:,} with {settings}: {cure}; "
            "this error's .last_good holds every chain's last finite state, .run the draws kept before"
        )
