"""What a sampler is: hyper-parameters, `init` and `step`. It sees θ and g, never masks, batches or chains' bookkeeping.

State holds only what the next step needs. `rate` is the scheduled step size at this step, a number or [C, 1]; T the
temperature; `adapt` 1 while the run burns in, then 0. Noise comes from torch's current random state.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from partita.samplers.schedules import Schedule

State = dict[str, Tensor]
Rate = float | Tensor


class Sampler(Protocol):
    @property
    def schedule(self) -> Schedule:
        """The schedule of its step size."""

    def check(self, temperature: float, burn_in: int) -> None:
        """Refuse settings that cannot sample at this temperature with this burn-in."""

    def init(self, theta: Tensor, scale: Tensor) -> State:
        """The state at θ [C, D]; scale [D] is the prior's."""

    def step(self, theta: Tensor, g: Tensor, state: State, rate: Rate, T: float, adapt: Rate) -> tuple[Tensor, State]:
        """θ [C, D], g(θ) [C, D] -> the next θ and state, in new tensors (or old ones as they are, never views of them)."""

    def heat(self, g: Tensor, state: State, rate: Rate, T: float) -> Tensor:
        """[C, D]: the temperature this step size leaves each coordinate at, estimated at one state (T when ε → 0)."""

    def warmth(self, rate: Rate, t: int) -> Rate:
        """The share of that heat it shows t steps after `init`: 1 unless it starts at rest."""
