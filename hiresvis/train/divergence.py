"""Tells when training has gone wrong: steps that are not finite, several in a row, or a loss that runs away."""

from __future__ import annotations

from dataclasses import dataclass

NON_FINITE_IN_A_ROW = 5  # skipped steps in a row after which going on only wastes time
_MEMORY = 0.98  # of the moving average: some fifty steps
_SETTLED = 20  # steps before which the average says little
_FEWEST = 5  # steps before which it says nothing: one batch may hold a strange sample
_FAR_ABOVE_LOWEST, _FAR_ABOVE_FIRST = 3.0, 1.5
_FAR_ABOVE_START = 20.0  # a new head's loss may rise several times over before it falls
_LEAST_START = 1.0  # of the first loss, for that: all losses are of this order, and weights that are trained already begin near 0


@dataclass(slots=True)
class LossTrend:
    """A moving average of the loss, and whether it runs away.

    It does when the average is three times its lowest value and one and a half times the highest of its first steps: a loss that merely
    wavers near zero, or has not fallen yet, does neither. Within those first steps it does at twenty times the first loss. Unsound is
    half of that, so that no snapshot of a run on its way up is gone back to.

    Attributes:
        num_steps: applied steps so far.
        total: weighted sum of their losses, later ones weighing more.
        start: the first loss.
        first: the highest average of the first steps. lowest: since they were done.
    """

    num_steps: int = 0
    total: float = 0.0
    first: float = 0.0
    lowest: float = 0.0
    start: float = 0.0

    def add(self, loss: float) -> None:
        """Takes in one applied step's loss."""
        self.num_steps += 1
        if self.num_steps == 1:
            self.start = loss
        self.total = _MEMORY * self.total + (1 - _MEMORY) * loss
        if self.num_steps <= _SETTLED:
            self.first, self.lowest = max(self.first, self.average), self.average
        else:
            self.lowest = min(self.lowest, self.average)

    @property
    def average(self) -> float:
        """Of the last steps, some fifty; 0 before the first."""
        return self.total / (1 - _MEMORY**self.num_steps) if self.num_steps else 0.0

    @property
    def runs_away(self) -> bool:
        """Whether training has diverged."""
        return self._above(1.0)

    @property
    def is_sound(self) -> bool:
        """Whether this is a point to go back to."""
        return not self._above(0.5)

    def _above(self, share: float) -> bool:
        """Whether the average has gone so much of the way to where it runs away."""

        def far(times: float) -> float:
            return 1 + (times - 1) * share

        if self.num_steps <= _SETTLED:
            return self.num_steps >= _FEWEST and self.average > far(_FAR_ABOVE_START) * max(self.start, _LEAST_START)
        return self.average > far(_FAR_ABOVE_LOWEST) * self.lowest and self.average > far(_FAR_ABOVE_FIRST) * self.first


def why_diverged(trend: LossTrend, non_finite_in_a_row: int, *, place: str, lr: float, precision: str) -> str:
    """Why going on makes no sense, and what to do; empty while it does.

    Args:
        place: epoch and step, for people.
        lr: of the last step.
        precision: fp32, bf16 or fp16.
    """
    other = "" if precision == "fp32" else f", memory.precision=fp32 (it is {precision})"
    if non_finite_in_a_row >= NON_FINITE_IN_A_ROW:
        return (
            f"{non_finite_in_a_row} optimizer steps in a row were not finite, the last in {place}, at learning rate {lr:.3g}. "
            f"Try optim.lr={lr / 10:.1g}{other}, or look at the samples named above. "
            "None of them was applied: the last snapshot, where there is one, can be resumed."
        )
    if trend.runs_away:
        return (
            f"The loss runs away: {trend.average:.3g} on average at {place}, and it had been {min(trend.lowest, trend.start):.3g}, "
            f"at learning rate {lr:.3g}. Try optim.lr={lr / 10:.1g}{other}, or a longer optim.warmup."
        )
    return ""
