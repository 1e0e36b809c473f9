"""The training loop: epochs of steps, evaluation, best weights, snapshots and a clean stop, told as a stream of events.

A run of N steps equals k steps, a snapshot, and N - k steps after resuming, bit for bit on the CPU, also in the middle of an epoch: the
data order follows from (seed, epoch), the learning rate from the step number, and the snapshot holds all the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hiresvis.device import is_out_of_memory
from hiresvis.errors import DataError, Interrupted, Problem, first_line
from hiresvis.run.events import (
    EpochDone,
    EpochStarted,
    Evaluated,
    EvaluationStep,
    Event,
    Notice,
    RunFinished,
    RunInterrupted,
    StepDone,
)
from hiresvis.train.batches import fetch
from hiresvis.train.divergence import why_diverged
from hiresvis.train.evaluate import Evaluation
from hiresvis.train.keeper import Keeper
from hiresvis.train.metrics import is_better
from hiresvis.train.optim import Schedule
from hiresvis.train.phases import HeadFirst
from hiresvis.train.progress import Progress, RunLimits
from hiresvis.train.recovery import Recovery, Setback
from hiresvis.train.relief import Relief, evaluation_in_room
from hiresvis.train.saver import Saver
from hiresvis.train.sizes import Sizes
from hiresvis.train.snapshot import Snapshot
from hiresvis.train.step import StepOutcome, TrainStep
from hiresvis.train.stop import StopRequest

_NAMES_SHOWN = 8


@dataclass(slots=True)
class _Batch:
    """One batch whose gradient is accumulated."""

    started: float
    waited: float = 0.0
    indices: list[int] = field(default_factory=list)


class Trainer:
    """Trains to the limits and yields what happens.

    Args:
        step: model, optimizer, loss and precision.
        train_loader: `set_epoch(epoch, first_batch)`, `len()` in optimizer steps an epoch, items with images, targets, indices,
            batch_images, closes_batch; `skipped`, a list of (path, reason), where it has one.
        val_loader: `len()` and items likewise.
        schedule: learning rate of each optimizer step, counted from 0 over the whole run.
        train_mode: puts the model in train mode, frozen parts left in eval (`TrainMode`).
        head_first: trains the head alone for the first epochs; None: everything that is trained is so from the first on.
        sizes: makes the images of the first epochs smaller; None: all have one size.
        limits: when to stop and to save.
        metric: the one of `metrics.METRICS` that decides which epoch is best.
        run_dir: `weights/` and `snapshot/` are written there.
        stop: asked for a stop, by signals or by hand.
        relief: makes room when memory runs out; None: the error ends the run.
        memory_bytes: peak memory in use so far.
        name_of: a training sample's index to its path, for messages. val_name_of: likewise for validation rows.
        predicted_peak_bytes: passed through to RunFinished.
        resume_command: passed through to RunInterrupted.
        clock: seconds that only go forward. wall_clock: seconds since 1970, the events' time.

    Attributes:
        progress: where the run is.
        best_evaluation: of the best weights, where this process made it.
    """

    def __init__(
        self,
        *,
        step: TrainStep,
        train_loader: Any,
        val_loader: Any,
        schedule: Schedule,
        train_mode: Callable[[], None],
        head_first: HeadFirst | None = None,
        sizes: Sizes | None = None,
        limits: RunLimits,
        metric: str,
        run_dir: Path,
        stop: StopRequest | None = None,
        relief: Relief | None = None,
        memory_bytes: Callable[[], int] = lambda: 0,
        name_of: Callable[[int], str] = str,
        val_name_of: Callable[[int], str] = str,
        predicted_peak_bytes: int = 0,
        resume_command: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.progress = Progress(metric=metric, num_steps=len(train_loader))
        self.best_evaluation: Evaluation | None = None
        self._step, self._train_loader, self._val_loader = step, train_loader, val_loader
        self._schedule, self._train_mode, self._limits = schedule, train_mode, limits
        self._head_first, self._head_epochs = head_first, head_first.epochs if head_first else 0
        self._sizes, self._small_epochs = sizes, sizes.last_epoch if sizes else 0
        self._stop = StopRequest() if stop is None else stop
        self._relief = relief
        self._keeper = Keeper(step, run_dir)
        self._saver = Saver(self._keeper, clock=clock, wall_clock=wall_clock)
        self._recovery = Recovery(self._keeper, self._saver, relief, rollbacks=limits.rollbacks, wall_clock=wall_clock)
        self._memory_bytes, self._name_of, self._val_name_of = memory_bytes, name_of, val_name_of
        self._predicted_peak_bytes, self._resume_command = predicted_peak_bytes, resume_command
        self._clock, self._wall_clock = clock, wall_clock
        self._snapshot: Snapshot | None = None  # whose random state fit has to put back
        self._started = 0.0
        self._peak_bytes = self._num_skipped_told = 0

    def restore(self, snapshot: Snapshot) -> None:
        """Takes up a run where its snapshot left it. The random state is put back when `fit` begins: building loaders may draw from it.

        Raises:
            RunFolderError: the snapshot is of another model, optimizer or number of steps an epoch.
        """
        self.progress = self._keeper.restore(snapshot, metric=self.progress.metric, num_steps=self.progress.num_steps)
        self._snapshot = snapshot
        self._saver.saved_at = (self.progress.epoch, self.progress.step)

    def fit(self) -> Iterator[Event]:
        """Trains from where the run is to a limit.

        Yields:
            EpochStarted, StepDone, EvaluationStep, Evaluated, EpochDone, SnapshotSaved and Notice as they happen, then RunFinished;
            or RunInterrupted after the state was saved.

        Raises:
            Interrupted: a stop was requested.
            DataError: a file cannot be read; the run is saved as it was after the last step.
            TrainingFailed: several steps in a row were not finite, or the loss runs away, and the run has gone back often enough.
            DoesNotFit: memory ran out, and no more room can be made.
        """
        with self._stop:
            self._started = self._clock()
            self._saver.start()
            if self._snapshot is not None:
                self._keeper.restore_rng(self._snapshot)
                self._snapshot = None
            else:
                yield from self._saver.snapshot(self.progress)  # to go back to, from the first step on
            yield from self._epochs()

    def _epochs(self) -> Iterator[Event]:
        limits, reason = self._limits, "completed"
        while self.progress.epoch <= limits.epochs:
            waits = self.progress.epoch <= max(self._head_epochs, self._small_epochs)
            if limits.early_stop is not None and self.progress.epochs_since_best >= limits.early_stop and not waits:
                reason = "early_stop"
                break
            if self._stop.requested:
                yield from self._interrupt()
            setback = yield from self._train_epoch()
            if setback is not None:
                self.progress = yield from self._recovery.recover(self.progress, setback)
                continue
            progress = self.progress
            complete = progress.step >= progress.num_steps
            usable = yield from self._evaluate(complete)
            if not usable:
                place, lr = f"epoch {progress.epoch}", self._schedule.at(progress.global_step - 1) * progress.lr_scale
                text = f"The validation loss after {place} is not finite: the weights are of no use. Try optim.lr={lr / 10:.1g}"
                setback = Setback(diverged=f"{text}, or a longer optim.warmup.")
                self.progress = yield from self._recovery.recover(progress, setback)
                continue
            yield from self._saver.tried(self._keeper.save_last, progress)
            if complete:
                yield self._close_epoch()
                yield from self._lower_rate()
            yield from self._saver.snapshot(self.progress)
            if not complete or (self._out_of_time() and progress.epoch <= limits.epochs):
                reason = "max_time"
                break
        yield self._finished(reason)

    def _train_epoch(self) -> Generator[Event, None, Setback | None]:
        """Steps until the epoch or the time is over, or until a setback."""
        progress = self.progress
        yield EpochStarted(time=self._wall_clock(), epoch=progress.epoch, num_steps=progress.num_steps, first_step=progress.step + 1)
        if progress.step >= progress.num_steps:  # it was interrupted in evaluation
            return None
        if self._sizes is not None and (text := self._sizes.enter(progress.epoch)):
            yield self._notice("info", text)
        self._train_loader.set_epoch(progress.epoch, first_batch=progress.step)
        if self._head_first is None:
            self._train_mode()
        else:
            self._head_first.train_mode(progress.epoch)
            if progress.step == 0 and (text := self._head_first.begins(progress.epoch)):
                yield self._notice("info", text)
        with closing(self._accumulated_batches()) as batches:  # workers end with the loop, however it ends
            setback = yield from self._steps(batches)
        complete = progress.step == progress.num_steps
        assert setback or complete or self._out_of_time(), (
            f"the loader gave {progress.step} batches, where its length is {progress.num_steps}"
        )
        return setback

    def _steps(self, batches: Iterator[_Batch]) -> Generator[Event, None, Setback | None]:
        progress = self.progress
        while True:
            mark = self._step.mark()
            try:
                batch = next(batches)
                lr = self._schedule.apply(self._step.optimizer, progress.global_step, progress.lr_scale)
                outcome = self._step.apply() if batch.indices else None  # all files of the batch were skipped
            except StopIteration:
                return None
            except DataError as error:
                self._step.take_back(mark)  # a part of the batch may be accumulated
                yield from self._unreadable(error, "data.train")
            except (RuntimeError, MemoryError) as error:
                if self._relief is None or not is_out_of_memory(error, self._step.device):
                    raise
                ran_out = first_line(error)
            else:
                ran_out = ""
            if ran_out:  # the error is gone with its traceback, which held tensors
                return Setback(out_of_memory=ran_out, intact=self._step.take_back(mark))
            progress.step += 1
            yield self._step_done(batch, outcome, lr)
            yield from self._skipped_files()
            if outcome is not None and not outcome.applied:
                yield from self._skipped_step(batch, outcome)
            diverged = why_diverged(
                progress.trend,
                progress.non_finite_in_a_row,
                place=f"epoch {progress.epoch}, step {progress.step}",
                lr=lr,
                precision=self._step.precision,
            )
            if diverged:
                return Setback(diverged=diverged)
            if self._stop.requested:
                yield from self._interrupt()
            if progress.step < progress.num_steps and self._out_of_time():
                return None
            if self._saver.is_due(self._limits.save_every):
                yield from self._saver.snapshot(self.progress)

    def _accumulated_batches(self) -> Generator[_Batch, None, None]:
        batch = _Batch(started=self._clock())
        items = fetch(self._train_loader)
        while True:
            before = self._clock()
            item = next(items, None)
            if item is None:
                return
            batch.waited += self._clock() - before
            if len(item.indices):  # a micro-batch is empty where all its files were skipped
                self._step.accumulate(item.images, item.targets, batch_images=item.batch_images)
                batch.indices.extend(int(index) for index in item.indices)
            closes = item.closes_batch
            del item  # the images are not held while the optimizer steps
            if closes:
                yield batch
                batch = _Batch(started=self._clock())

    def _step_done(self, batch: _Batch, outcome: StepOutcome | None, lr: float) -> StepDone:
        progress, num_images = self.progress, len(batch.indices)
        seconds = self._clock() - batch.started
        progress.seconds += seconds
        progress.num_images += num_images
        if outcome is not None and outcome.applied:
            progress.loss_sum += outcome.loss * num_images
            progress.loss_images += num_images
            progress.non_finite_in_a_row = 0
            progress.trend.add(outcome.loss)
        elif outcome is not None and not outcome.scale_lowered:
            progress.num_non_finite += 1
            progress.non_finite_in_a_row += 1
        return StepDone(
            time=self._wall_clock(),
            epoch=progress.epoch,
            step=progress.step,
            num_steps=progress.num_steps,
            loss=outcome.loss if outcome else math.nan,
            lr=lr,
            grad_norm=outcome.grad_norm if outcome else math.nan,
            num_images=num_images,
            step_ms=seconds * 1e3,
            data_wait_ms=batch.waited * 1e3,
            memory_bytes=self._memory(),
            num_skipped=len(getattr(self._train_loader, "skipped", ())),
            num_non_finite=progress.num_non_finite,
        )

    def _skipped_files(self) -> Iterator[Notice]:
        for path, reason in list(getattr(self._train_loader, "skipped", ()))[self._num_skipped_told :]:
            self._num_skipped_told += 1
            yield self._notice("warning", f"skipped {path}: {reason}")

    def _skipped_step(self, batch: _Batch, outcome: StepOutcome) -> Iterator[Notice]:
        """Names the samples of a step that was not taken."""
        place = f"epoch {self.progress.epoch}, step {self.progress.step}"
        if outcome.scale_lowered:
            yield self._notice("info", f"{place}: fp16 gradients overflowed; the step was skipped and the loss scale lowered")
            return
        if outcome.non_finite:
            what, indices = f"loss {outcome.loss}", [batch.indices[position] for position in outcome.non_finite]
        else:
            what, indices = f"gradient norm {outcome.grad_norm} from a finite loss", batch.indices
        names = [self._name_of(index) for index in indices[:_NAMES_SHOWN]]
        more = f" and {len(indices) - _NAMES_SHOWN} more" if len(indices) > _NAMES_SHOWN else ""
        yield self._notice("warning", f"{place}: {what}; the step was skipped. Samples: {', '.join(names)}{more}")

    def _evaluate(self, complete: bool) -> Generator[Event, None, bool]:
        """Evaluates, keeps the weights when they are the best. An epoch cut short does not count against early stopping.

        Returns:
            whether the loss is finite; where it is not, a metric may look as good as it likes.
        """
        progress = self.progress
        steps = evaluation_in_room(self._step, self._val_loader, self._relief, name_of=self._val_name_of)
        evaluation: Evaluation | None = None
        while evaluation is None:
            try:
                told = next(steps)
            except StopIteration as stopped:
                evaluation = stopped.value
                break
            except DataError as error:
                yield from self._unreadable(error, "data.val")
                raise
            if isinstance(told, Event):
                yield told
                continue
            done, num_steps = told
            yield EvaluationStep(time=self._wall_clock(), epoch=progress.epoch, step=done, num_steps=num_steps)
            if self._stop.requested:
                steps.close()
                yield from self._interrupt()
        value = evaluation.metrics[progress.metric]
        loss, usable = evaluation.loss, math.isfinite(evaluation.loss)
        better = usable and self._is_better(value, loss)
        failures = list(self._saver.tried(self._keeper.save_best, progress, value, loss)) if better else []
        yield from failures
        kept = better and not failures  # else the file still holds the earlier best
        if kept:
            progress.best_value, progress.best_epoch, progress.best_loss = value, progress.epoch, loss
            self.best_evaluation = evaluation
        if complete and usable:
            lower = progress.lowest_loss is None or loss < progress.lowest_loss
            progress.epochs_since_best = 0 if better or lower else progress.epochs_since_best + 1
            progress.lowest_loss = loss if lower else progress.lowest_loss
        yield Evaluated(
            time=self._wall_clock(),
            epoch=progress.epoch,
            split="val",
            loss=evaluation.loss,
            metrics=dict(evaluation.metrics),
            metric=progress.metric,
            value=value,
            is_best=kept,
            best_value=math.nan if progress.best_value is None else progress.best_value,
            best_epoch=progress.best_epoch,
        )
        return usable

    def _is_better(self, value: float, loss: float) -> bool:
        """Whether the epoch's weights are to be kept: by the metric and, of equal ones, which few images give often, by the loss."""
        progress = self.progress
        if value == progress.best_value:
            # An epoch done again after a crash between best weights and snapshot ties with itself, and must count as it did.
            again = progress.epoch == progress.best_epoch
            return again or (progress.best_loss is not None and loss < progress.best_loss)
        return is_better(progress.metric, value, progress.best_value)

    def _lower_rate(self) -> Iterator[Notice]:
        """What the schedule makes of an epoch's result; nothing while the head alone is trained."""
        progress = self.progress
        if progress.epoch <= self._head_epochs:
            return
        if (scale := self._schedule.scale_after(progress.epochs_since_best)) != 1.0:
            progress.lr_scale *= scale
            text = f"neither {progress.metric} nor the loss is better for {progress.epochs_since_best} epochs"
            text += f": {progress.lr_scale:.2g} of the learning rate"
            yield self._notice("info", f"{text} from here on")

    def _close_epoch(self) -> EpochDone:
        progress = self.progress
        lr = self._schedule.at(progress.global_step - 1) * progress.lr_scale
        done = EpochDone(
            time=self._wall_clock(),
            epoch=progress.epoch,
            train_loss=progress.train_loss,
            lr=lr,
            seconds=progress.seconds,
            images_per_second=progress.num_images / progress.seconds if progress.seconds else 0.0,
        )
        if progress.epoch == self._head_epochs:
            progress.next_phase()
        progress.next_epoch()
        if self._sizes is not None and self._sizes.begins(progress.epoch):
            progress.next_size()
        return done

    def _unreadable(self, error: DataError, key: str) -> Iterator[Event]:
        """Saves the run as it is after its last step, and leaves at a file that cannot be read.

        Raises:
            DataError: the file, and how to go on.
        """
        progress = self.progress
        here = (progress.epoch, progress.step)
        if not self._saver.is_saved(progress):
            yield from self._saver.snapshot(self.progress)
        saved = "nothing is saved yet, a resumed run begins anew with its own plan"
        if (at := self._saver.saved_at) is not None:
            saved = f"saved is epoch {at[0]}, step {at[1]}"
        mend = "mend or replace the file" + (", or set data.bad_images: skip" if key == "data.train" else "")
        command = f", then go on with: {self._resume_command}" if self._resume_command else ""
        where = f"training ended there, in epoch {here[0]} after step {here[1]} of {progress.num_steps}; {saved}"
        raise DataError([*error.problems, Problem(f"{where}; {mend}{command}", key=key)]) from error

    def _interrupt(self) -> Iterator[Event]:
        """Saves and leaves.

        Raises:
            Interrupted: always.
        """
        progress = self.progress
        if not self._saver.is_saved(progress):
            yield from self._saver.snapshot(self.progress)
        saved = self._saver.is_saved(progress)
        name = self._stop.signal_name
        yield RunInterrupted(
            time=self._wall_clock(), signal=name, epoch=progress.epoch, step=progress.step, resume_command=self._resume_command
        )
        state = "the state was saved" if saved else "the state could not be saved, an earlier snapshot may remain"
        way_on = f"; go on with: {self._resume_command}" if self._resume_command else ""
        where = f"epoch {progress.epoch}, step {progress.step} of {progress.num_steps}"
        raise Interrupted(f"stopped by {name} in {where}; {state}{way_on}", exit_code=self._stop.exit_code)

    def _finished(self, reason: str) -> RunFinished:
        progress = self.progress
        return RunFinished(
            time=self._wall_clock(),
            reason=reason,
            epochs=progress.epoch - 1,
            metric=progress.metric,
            best_value=math.nan if progress.best_value is None else progress.best_value,
            best_epoch=progress.best_epoch,
            predicted_peak_bytes=self._predicted_peak_bytes,
            measured_peak_bytes=self._memory(),
            num_skipped=len(getattr(self._train_loader, "skipped", ())),
            seconds=self._saver.seconds(progress),
        )

    def _memory(self) -> int:
        self._peak_bytes = max(self._peak_bytes, self._memory_bytes())
        return self._peak_bytes

    def _out_of_time(self) -> bool:
        return self._limits.max_time is not None and self._clock() - self._started >= self._limits.max_time

    def _notice(self, level: str, text: str) -> Notice:
        return Notice(time=self._wall_clock(), level=level, text=text)
