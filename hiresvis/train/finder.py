"""Finds the micro-batch and the plan on the real device: predict, run full steps, correct, run again.

The predicted plan is tried with real steps: a first one that brings the optimizer's state into being, a second one with
it, over two micro-batches where the batch is accumulated, and an evaluation step. Only a size that ran within the budget
is returned. One that did not, or that ran out of memory, corrects the prediction by what was measured above it, and the
search runs again; at most `MAX_PROBES` sizes run. One that used less than was left for it lessens the reserve, and where
a larger one has room then, that is tried; the last that ran within the budget is returned. Where training fits and
evaluation does not, the evaluation batch is halved and the plan stays. Afterwards weights, buffers, optimizer, gradients,
module modes and random state are as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from hiresvis.backbone.segments import apply_plan
from hiresvis.device import PeakMeter, StorageCounter, is_out_of_memory, release
from hiresvis.errors import DoesNotFit
from hiresvis.ladder import explain, ladder_rows, plan_chosen, refusal, segments_of, with_eval_batch
from hiresvis.memory.budget import Budget
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import StepSetting
from hiresvis.memory.plan import CheckpointPlan, NoPlan
from hiresvis.memory.search import Candidate, Limits, Planner
from hiresvis.memory.timing import measured_rates, priced_by
from hiresvis.run.events import Event, LadderRow, Notice
from hiresvis.train.batches import running_statistics
from hiresvis.train.evaluate import eval_mode
from hiresvis.train.pace import time_units
from hiresvis.train.step import TrainStep
from hiresvis.train.stop import StopRequest
from hiresvis.units import format_size

MAX_PROBES = 3
MOST_IMAGES = 1024  # a micro-batch above this gains nothing
_SAFETY = 1.02  # what a probe measured above the prediction is expected again, and a little more
_RESERVE_STEPS = 128  # of the budget


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPeak:
    """What a probe measured.

    Attributes:
        peak_bytes: highest use of the device, or resident size of the process on the CPU, everything included.
        base_bytes: in use before the first step.
        counted_bytes: highest sum of live storages in training steps (CPU only, else 0).
        images_per_second: of the second training step.
        out_of_memory: the size did not run to its end.
        num_retries: how often the allocator had to give its cache back to go on (GPU only): what fits only so is too large.
        trained: the training steps ran within the budget, so that what does not fit then is the evaluation step.
    """

    peak_bytes: int
    base_bytes: int
    counted_bytes: int = 0
    images_per_second: float = 0.0
    out_of_memory: bool = False
    num_retries: int = 0
    trained: bool = False

    def fits(self, most_bytes: int) -> bool:
        """Whether it ran, and within `most_bytes`."""
        return not self.out_of_memory and not self.num_retries and self.peak_bytes <= most_bytes

    def what_happened(self) -> str:
        """Why it was too large, in words."""
        if self.out_of_memory:
            return "ran out of memory"
        if self.num_retries:
            return f"ran only because the allocator gave its cache back {self.num_retries} times"
        return f"used {format_size(self.peak_bytes)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The plan that ran, what it measured, and the ladder as it was shown."""

    plan: CheckpointPlan
    measured: MeasuredPeak
    ladder: tuple[LadderRow, ...]


class Finder:
    """Finds a plan that runs within the budget.

    Args:
        step: the training step, over the model as it will be trained.
        train_mode: puts the model in its training mode.
        profile: the traced costs of that model.
        budget: what may be used.
        limits: what the user asked for.
        raw_image: shape (height, width, channels) and dtype of one image as the loader gives it.
        eval_batch: images of an evaluation batch, or None to choose.
        remedies: given the need and the budget, what would help when nothing fits.
        check: raises what speaks against a plan, before it runs.
        stop: asked for a stop.
        unit_seconds: what one image's forward takes by unit, where that is known; else it is measured, and found here afterwards.
    """

    def __init__(
        self,
        *,
        step: TrainStep,
        train_mode: Callable[[], None],
        profile: MemoryProfile,
        budget: Budget,
        limits: Limits,
        raw_image: tuple[tuple[int, int, int], torch.dtype],
        eval_batch: int | None = None,
        remedies: Callable[[NoPlan], tuple[str, ...]] = lambda _: (),
        check: Callable[[CheckpointPlan], None] = lambda _: None,
        stop: StopRequest | None = None,
        unit_seconds: Mapping[int, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.step, self.train_mode, self.profile, self.budget, self.limits = step, train_mode, profile, budget, limits
        self.raw_image, self.eval_batch, self.remedies, self.check = raw_image, eval_batch, remedies, check
        self.stop = StopRequest() if stop is None else stop
        self.unit_seconds = unit_seconds
        self.clock = clock
        self.most_bytes = budget.total_bytes - budget.reserve_bytes // 4  # training decodes images beside what a probe does
        self.found: Found | None = None

    def find(self) -> Iterator[Event]:
        """Search, probe and correct; `found` holds the result afterwards.

        Raises:
            DoesNotFit: no allowed plan fits, by prediction or after `MAX_PROBES` sizes that ran, or evaluation of one image runs out.
            Interrupted: a stop was requested.
        """
        reserve = self.budget.reserve_bytes
        measured: MeasuredPeak | None = None
        yield from self._fit_evaluation(reserve)
        self._weigh_by_time(self._chosen(self.planner(self.limits, reserve)))
        for attempt in range(1, MAX_PROBES + 1):
            planner = self.planner(self.limits, reserve)
            candidate = self._chosen(planner)
            planner = self._with_eval_batch(planner, candidate)
            plan = planner.plan(planner.score(candidate.segments, candidate.micro_batch), explain(planner, candidate))
            rows = ladder_rows(planner, planner.ladder(), candidate)
            yield from rows
            self.check(plan)
            plan, measured = yield from self._probed(reserve, candidate, plan)
            if measured.fits(self.most_bytes):
                rows = measured_rows(rows, planner, candidate, measured)
                yield from rows
                self.found = Found(plan=plan, measured=measured, ladder=rows)
                less = self._lessened(plan, measured, reserve)
                if attempt == MAX_PROBES or not (larger := self._larger(plan, less)):
                    break
                reserve, saved = less, format_size(plan.predicted_peak_bytes - measured.peak_bytes)
                text = f"micro-batch {plan.micro_batch} used {saved} less than was left for it: {larger} may fit, and is tried"
                yield Notice(level="info", text=text)
                continue
            reserve = self._corrected(plan, measured, reserve)
            if self.found is not None:
                between = self._larger(self.found.plan, reserve) if attempt < MAX_PROBES else 0
                goes_on = self.found.plan.micro_batch < between < plan.micro_batch
                then = f"{between} is tried" if goes_on else f"{self.found.plan.micro_batch} it is"
                yield Notice(level="info", text=f"micro-batch {plan.micro_batch} {measured.what_happened()}: {then}")
                if goes_on:
                    continue
                yield from self.found.ladder
                break
            yield Notice(
                level="warning",
                text=f"micro-batch {plan.micro_batch} {measured.what_happened()}; {format_size(plan.predicted_peak_bytes)} were predicted, "
                f"the budget is {format_size(self.budget.total_bytes)}. Planning again with {format_size(reserve)} in reserve "
                f"(size {attempt} of {MAX_PROBES} at most).",
            )
        if self.found is not None:
            yield plan_chosen(self.found.plan, self.found.measured.peak_bytes)
            return
        assert measured is not None
        raise DoesNotFit(
            f"No plan ran within the budget of {format_size(self.budget.total_bytes)}: {MAX_PROBES} sizes were tried, the last one, "
            f"micro-batch {plan.micro_batch}, used {format_size(measured.peak_bytes)}. Raise memory.budget, or lower model.image_size.",
            need_bytes=measured.peak_bytes,
            budget_bytes=self.budget.total_bytes,
            largest_part=plan.largest_part,
        )

    def _probed(
        self, reserve: int, candidate: Candidate, plan: CheckpointPlan
    ) -> Generator[Event, None, tuple[CheckpointPlan, MeasuredPeak]]:
        """Runs the plan; where training fits and evaluation does not, with half as many images in evaluation, and again."""
        while True:
            self.stop.raise_if_requested("stopped while looking for the batch; nothing was trained")
            measured = self.probe(plan)
            self.stop.raise_if_requested("stopped while looking for the batch; nothing was trained")
            if not measured.trained or measured.fits(self.most_bytes):
                return plan, measured
            budget = format_size(self.budget.total_bytes)
            if plan.eval_batch == 1:
                if not measured.out_of_memory:  # one image beside what training left in the allocator's cache: training has to leave less
                    return plan, measured
                raise DoesNotFit(
                    f"Evaluation does not fit: with a single image it {measured.what_happened()}, and the budget is {budget}; training at "
                    f"micro-batch {plan.micro_batch} fits. Raise memory.budget, or lower model.image_size.",
                    need_bytes=measured.peak_bytes,
                    budget_bytes=self.budget.total_bytes,
                    largest_part=plan.largest_part,
                )
            self.eval_batch = plan.eval_batch // 2
            text = f"evaluation of {plan.eval_batch} images {measured.what_happened()}, and the budget is {budget}: {self.eval_batch} at "
            yield Notice(level="warning", text=f"{text}once from here on; micro-batch {plan.micro_batch} of training fits and stays")
            planner = self.planner(self.limits, reserve)
            plan = planner.plan(planner.score(candidate.segments, candidate.micro_batch), plan.why)

    def _chosen(self, planner: Planner) -> Candidate:
        """The plan by prediction.

        Raises:
            DoesNotFit: there is none.
        """
        candidate = planner.choose()
        if isinstance(candidate, NoPlan):
            raise refusal(self.profile, candidate, self.limits, self.remedies(candidate))
        return candidate

    def _fit_evaluation(self, reserve: int) -> Iterator[Event]:
        """A given evaluation batch that alone is what does not fit is halved until it does."""
        while self.eval_batch is not None and self.eval_batch > 1:
            answer = self.planner(self.limits, reserve).choose()
            if not isinstance(answer, NoPlan) or answer.where != "evaluation":
                return
            text = f"evaluation of {self.eval_batch} images at once would need {format_size(answer.need_bytes)}, and the budget is "
            self.eval_batch //= 2
            yield Notice(level="warning", text=f"{text}{format_size(answer.budget_bytes)}: {self.eval_batch} at once from here on")

    def _weigh_by_time(self, candidate: Candidate) -> None:
        """Recompute is weighed by what units take here; by FLOPs where nothing is to be chosen, or an image's forward does not fit.

        Args:
            candidate: the plan so far. A GPU is timed on as many images as that runs: on one or two, launches are what takes time.
        """
        if self.limits.spacing != "auto" or not candidate.cost:
            return
        if self.unit_seconds is None:
            profile, most = self.profile, max(2, candidate.micro_batch) if self.step.device.type == "cuda" else 2
            room = self.budget.total_bytes - self.budget.baseline_bytes - self.budget.reserve_bytes - profile.weights - profile.buffers
            count = next((count for count in range(most, 0, -1) if profile.evaluation.at(count) + profile.raw_image.at(count) <= room), 0)
            if not count:
                return
            with self._no_trace():
                self.train_mode()
                try:
                    self.unit_seconds = time_units(self.step, [unit.modules for unit in self.profile.units], self._images(count))
                except (RuntimeError, MemoryError, ValueError) as error:
                    # Batch statistics of a single image, or memory that others took: the probe says what is wrong.
                    if not isinstance(error, ValueError) and not is_out_of_memory(error):
                        raise
            release()
        if self.unit_seconds:
            rates = measured_rates(self.profile, self.unit_seconds)
            self.limits = replace(self.limits, prices=priced_by(self.limits.prices, rates))

    def planner(self, limits: Limits, reserve: int) -> Planner:
        """The search with what is known so far.

        Args:
            reserve: below zero, so much less of the process's own size than the budget says stays beside training: what earlier work had
                freed without giving it back is used again.
        """
        setting = StepSetting(
            accumulates=False,
            eval_batch=self.eval_batch or 1,
            baseline_bytes=self.budget.baseline_bytes + min(0, reserve),
            reserve_bytes=max(0, reserve),
        )
        return Planner(self.profile, self.budget.total_bytes, setting, replace(limits, most=min(limits.most, MOST_IMAGES)))

    def _with_eval_batch(self, planner: Planner, candidate: Candidate) -> Planner:
        if self.eval_batch is not None:
            return planner
        return with_eval_batch(planner, candidate)

    def _corrected(self, plan: CheckpointPlan, measured: MeasuredPeak, reserve: int) -> int:
        need = plan.predicted_peak_bytes - reserve
        found = reserve
        if measured.out_of_memory or measured.num_retries:
            # How much was missing is not known: go a tenth below what this plan was to need above the baseline, which no plan changes.
            base = self.budget.baseline_bytes
            found = max(found, self.budget.total_bytes - base - (need - base) * 9 // 10)
        if not measured.out_of_memory:
            found = max(found, int((measured.peak_bytes - need) * _SAFETY) + self.budget.reserve_bytes // 4)
        return found

    def _lessened(self, plan: CheckpointPlan, measured: MeasuredPeak, reserve: int) -> int:
        """The reserve by what the probe measured, where that is less; in steps, so that the same machine finds the same batch again."""
        step = self.budget.total_bytes // _RESERVE_STEPS
        beyond = measured.peak_bytes - (plan.predicted_peak_bytes - reserve)
        found = int(beyond * _SAFETY if beyond > 0 else beyond / _SAFETY) + self.budget.reserve_bytes // 4
        return min(reserve, -(-found // step) * step)

    def _larger(self, plan: CheckpointPlan, reserve: int) -> int:
        """The micro-batch that this reserve leaves room for; 0: none above the plan's, or none is wanted."""
        wanted = self.limits.batch or MOST_IMAGES
        if self.limits.micro_batch is not None or self.limits.goal != "largest" or plan.micro_batch >= wanted:
            return 0
        planner = self.planner(self.limits, reserve)
        candidate = planner.choose()
        if isinstance(candidate, NoPlan) or candidate.micro_batch <= plan.micro_batch:
            return 0
        try:
            self.check(planner.plan(candidate, ""))
        except DoesNotFit:
            return 0
        return candidate.micro_batch

    def probe(self, plan: CheckpointPlan) -> MeasuredPeak:
        """Run the plan for a few training steps and, where they fit, one evaluation step; leaves no trace.

        A size that runs out of memory is an answer, not an error: the exception is left before memory is given back, since its
        traceback holds tensors.
        """
        meter = PeakMeter(self.step.device)
        counter = StorageCounter() if self.step.device.type == "cpu" else None
        failure: str | None = None
        seconds, trained = 0.0, False
        with self._no_trace() as copies:
            meter.start()
            try:
                handle = apply_plan(self.step.model, plan)
                try:
                    seconds = self._train(plan, counter)
                    trained = meter.peak_bytes() - copies <= self.most_bytes and not meter.num_retries()
                    if trained:
                        with eval_mode(self.step.model):
                            self.step.predict(self._images(plan.eval_batch))
                finally:
                    handle.remove()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = str(error)
            peak, retries = meter.peak_bytes() - copies, meter.num_retries()
        release()
        return MeasuredPeak(
            peak_bytes=peak,
            base_bytes=meter.base_bytes - copies,
            counted_bytes=counter.peak_bytes if counter else 0,
            images_per_second=0.0 if failure else plan.micro_batch / max(seconds, 1e-9),
            out_of_memory=failure is not None,
            num_retries=retries,
            trained=trained,
        )

    def _train(self, plan: CheckpointPlan, counter: StorageCounter | None) -> float:
        """Two steps, the second with the optimizer's state there and gradients accumulated; seconds of its last whole micro-batch.

        Batches are not all cut alike: a micro-batch of one image less runs too, for kernels hold memory by shape, and allocators by size.
        """
        whole = plan.micro_batch
        smaller = [whole - 1] if whole > (2 if running_statistics(self.step.model) else 1) else []  # of one image there may be none
        if counter is not None:
            averaged = () if self.step.average is None else self.step.average.tensors
            counter.track([*self.step.model.parameters(), *self.step.model.buffers(), *averaged])
            counter.__enter__()
        try:
            self.train_mode()
            self._train_step(plan, [whole])
            if plan.accumulation > 1:
                _, seconds, *_ = self._train_step(plan, [whole, whole, *smaller])
            else:
                (seconds,) = self._train_step(plan, [whole])
                self._train_step(plan, smaller)
        finally:
            if counter is not None:
                counter.__exit__(None, None, None)
        return seconds

    def _train_step(self, plan: CheckpointPlan, parts: Sequence[int]) -> list[float]:
        """Seconds of each part."""
        seconds = []
        for count in parts:
            images, targets = self._images(count), self.step.loss_fn.blank_targets(count)
            self._synchronize()
            started = self.clock()
            self.step.accumulate(images, targets, batch_images=plan.batch)
            self._synchronize()
            seconds.append(self.clock() - started)
        if parts:
            self.step.apply()
        return seconds

    def _synchronize(self) -> None:
        if self.step.device.type == "cuda":
            torch.cuda.synchronize(self.step.device)

    def _images(self, count: int) -> torch.Tensor:
        (height, width, channels), dtype = self.raw_image
        shape = (count, height, width, channels)
        generator = torch.Generator().manual_seed(0)
        if dtype == torch.uint8:
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return torch.rand(shape, dtype=dtype, generator=generator)

    @contextmanager
    def _no_trace(self) -> Iterator[int]:
        """Everything that steps change is put back; gives the bytes that the copies take on the device."""
        model, optimizer = self.step.model, self.step.optimizer
        training = {module: module.training for module in model.modules()}
        average = self.step.average
        averaged, num_updates = ((), 0) if average is None else (average.tensors, average.num_updates)
        copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in (*model.parameters(), *model.buffers(), *averaged)]
        cpu_state = torch.get_rng_state()
        cuda_state = torch.cuda.get_rng_state(self.step.device) if self.step.device.type == "cuda" else None
        scaler = self.step.scaler
        # Its own scale: at the first one a step may overflow, be skipped, and leave the optimizer's state out of the measure.
        self.step.scaler = torch.amp.GradScaler(self.step.device.type, init_scale=1.0, enabled=scaler.is_enabled())
        assert not optimizer.state, "the batch is found before training starts"
        try:
            yield sum(copy.nbytes for _, copy in copies) if self.step.device.type == "cpu" else 0
        finally:
            self.step.discard()
            optimizer.state.clear()
            self.step.scaler = scaler
            with torch.no_grad():
                for tensor, copy in copies:
                    tensor.copy_(copy)
            if average is not None:
                average.num_updates = num_updates
            for module, mode in training.items():
                module.training = mode
            torch.set_rng_state(cpu_state)
            if cuda_state is not None:
                torch.cuda.set_rng_state(cuda_state, self.step.device)


def measured_rows(rows: tuple[LadderRow, ...], planner: Planner, chosen: Candidate, measured: MeasuredPeak) -> tuple[LadderRow, ...]:
    """The rows with the measured peak at the chosen one, and images per second: measured there, elsewhere in proportion to the work."""
    profile, prices = planner.profile, planner.limits.prices
    stored = prices.of_step(profile)
    done = []
    for row in rows:
        segments = segments_of(planner, row, chosen)
        rate = None
        if row.micro_batch and segments is not None:
            rate = measured.images_per_second * (stored + chosen.cost) / (stored + prices.of(profile, segments))
        peak = measured.peak_bytes if row is rows[-1] else None
        done.append(replace(row, images_per_second=rate, measured_peak_bytes=peak))
    return tuple(done)
