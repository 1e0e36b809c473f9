"""How an epoch that broke off goes on: with more room after memory ran out, or from an earlier point after training went wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from hiresvis.errors import TrainingFailed
from hiresvis.run.events import Event, Notice
from hiresvis.train.keeper import Keeper
from hiresvis.train.progress import Progress
from hiresvis.train.relief import Relief
from hiresvis.train.saver import Saver
from hiresvis.train.snapshot import Snapshot

ROLLBACK_LR = 0.3  # of the learning rate, after each rollback


@dataclass(frozen=True, slots=True, kw_only=True)
class Setback:
    """Why the steps of an epoch broke off.

    Attributes:
        out_of_memory: what the error said; empty: training has diverged.
        diverged: why, and what to do about it.
        intact: weights and optimizer are as before the batch.
    """

    out_of_memory: str = ""
    diverged: str = ""
    intact: bool = True


class Recovery:
    """Goes on after a setback.

    Args:
        keeper, saver: of the run.
        relief: makes room when memory runs out; None where such errors end the run.
        rollbacks: how often a run that diverges may go back.
        wall_clock: seconds since 1970, the events' time.
    """

    def __init__(
        self, keeper: Keeper, saver: Saver, relief: Relief | None, *, rollbacks: int, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._keeper, self._saver, self._relief = keeper, saver, relief
        self._rollbacks, self._wall_clock = rollbacks, wall_clock

    def recover(self, progress: Progress, setback: Setback) -> Generator[Event, None, Progress]:
        """Makes room, or goes back.

        Returns:
            where the run goes on.

        Raises:
            DoesNotFit: there is no more room to make.
            TrainingFailed: training has diverged, and going back is not allowed any more.
        """
        if setback.out_of_memory:
            assert self._relief is not None
            where = f"epoch {progress.epoch}, step {progress.step + 1}"
            yield from self._relief.training(where, setback.out_of_memory)
            if setback.intact:
                return progress
            yield self._warning("the optimizer broke off half way: going back to the last snapshot")
            return self._back(progress, self._keeper.load_newest())
        snapshot = self._keeper.load_sound()
        if snapshot is None:
            raise TrainingFailed(setback.diverged)
        after = self._back(progress, snapshot)
        if progress.num_rollbacks >= self._rollbacks:
            # Whoever resumes does so with another learning rate; what a schedule has lowered stays so.
            after.lr_scale, after.num_rollbacks = progress.lr_scale / ROLLBACK_LR**progress.num_rollbacks, 0
            yield from self._saver.snapshot(after)
            raise TrainingFailed(setback.diverged)
        after.lr_scale, after.num_rollbacks = progress.lr_scale * ROLLBACK_LR, progress.num_rollbacks + 1
        text = f"{setback.diverged} Going back to epoch {after.epoch}, step {after.step}, with {after.lr_scale:.2g} of the learning rate "
        yield self._warning(f"{text}(rollback {after.num_rollbacks} of {self._rollbacks} at most)")
        yield from self._saver.snapshot(after)  # killed now, the run goes on with the lower rate
        return after

    def _back(self, now: Progress, snapshot: Snapshot | None) -> Progress:
        """The run as the snapshot has it; time and memory go on.

        Raises:
            TrainingFailed: there is none.
        """
        if snapshot is None:
            raise TrainingFailed("There is no snapshot to go back to: none could be written (the errors above say why).")
        before = self._keeper.restore(snapshot, metric=now.metric, num_steps=now.num_steps)
        before.total_seconds = now.total_seconds
        self._keeper.restore_rng(snapshot)
        self._saver.saved_at = (before.epoch, before.step)
        return before

    def _warning(self, text: str) -> Notice:
        return Notice(time=self._wall_clock(), level="warning", text=text)
