"""Finds the micro-batch and the plan on the real device: predict, run full steps, correct, run again.

The predicted plan is tried with real steps: a first one that brings the optimizer's state into being, a second one with
it, over two micro-batches where the batch is accumulated, and an evaluation step. Only a size that ran within the budget
is returned. One that did not, or that ran out of memory, corrects the prediction by what was measured above it, and the
search runs again; at most `MAX_PROBES` sizes run. Afterwards weights, buffers, optimizer, gradients, module modes and
random state are as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from hiresvis.backbone.segments import apply_plan
from hiresvis.device import Budget, PeakMeter, StorageCounter, is_out_of_memory, release
from hiresvis.errors import DoesNotFit
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import StepSetting
from hiresvis.memory.plan import CheckpointPlan, NoPlan, store_all
from hiresvis.memory.search import Candidate, Limits, Planner, Rung
from hiresvis.run.events import Event, LadderRow, Notice, PlanChosen
from hiresvis.train.evaluate import eval_mode
from hiresvis.train.step import TrainStep
from hiresvis.train.stop import StopRequest
from hiresvis.units import format_size

MAX_PROBES = 3
MOST_IMAGES = 1024  # a micro-batch above this gains nothing
EVAL_IMAGES = 16  # nor does an evaluation batch above this
_SAFETY = 1.02  # what a probe measured above the prediction is expected again, and a little more


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPeak:
    """What a probe measured.

    Attributes:
        peak_bytes: highest use of the device, or resident size of the process on the CPU, everything included.
        base_bytes: in use before the first step.
        counted_bytes: highest sum of live storages in training steps (CPU only, else 0).
        images_per_second: of the second training step.
        out_of_memory: the size did not run to its end.
    """

    peak_bytes: int
    base_bytes: int
    counted_bytes: int = 0
    images_per_second: float = 0.0
    out_of_memory: bool = False


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
        stop: asked for a stop.
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
        stop: StopRequest | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.step, self.train_mode, self.profile, self.budget, self.limits = step, train_mode, profile, budget, limits
        self.raw_image, self.eval_batch, self.remedies = raw_image, eval_batch, remedies
        self.stop = StopRequest() if stop is None else stop
        self.clock = clock
        self.found: Found | None = None

    def find(self) -> Iterator[Event]:
        """Search, probe and correct; `found` holds the result afterwards.

        Raises:
            DoesNotFit: no allowed plan fits, by prediction or after `MAX_PROBES` sizes that ran.
            Interrupted: a stop was requested.
        """
        reserve = self.budget.reserve_bytes
        most_bytes = self.budget.total_bytes - reserve // 4  # training decodes images beside what a probe does
        measured: MeasuredPeak | None = None
        for attempt in range(1, MAX_PROBES + 1):
            planner = self.planner(self.limits, reserve)
            candidate = planner.choose()
            if isinstance(candidate, NoPlan):
                raise refusal(self.profile, candidate, self.limits, self.remedies(candidate))
            planner = self._with_eval_batch(planner, candidate)
            plan = planner.plan(planner.score(candidate.segments, candidate.micro_batch), explain(planner, candidate))
            rows = ladder_rows(planner, planner.ladder(), candidate)
            yield from rows
            self.stop.raise_if_requested("stopped while looking for the batch; nothing was trained")
            measured = self.probe(plan)
            self.stop.raise_if_requested("stopped while looking for the batch; nothing was trained")
            if not measured.out_of_memory and measured.peak_bytes <= most_bytes:
                rows = measured_rows(rows, planner, measured)
                yield from rows
                self.found = Found(plan=plan, measured=measured, ladder=rows)
                yield plan_chosen(plan, measured.peak_bytes)
                return
            reserve = self._corrected(plan, measured, reserve)
            what = "ran out of memory" if measured.out_of_memory else f"used {format_size(measured.peak_bytes)}"
            yield Notice(
                level="warning",
                text=f"micro-batch {plan.micro_batch} {what}; {format_size(plan.predicted_peak_bytes)} were predicted, the budget is "
                f"{format_size(self.budget.total_bytes)}. Planning again with {format_size(reserve)} in reserve (size {attempt} of "
                f"{MAX_PROBES} at most).",
            )
        assert measured is not None
        raise DoesNotFit(
            f"No plan ran within the budget of {format_size(self.budget.total_bytes)}: {MAX_PROBES} sizes were tried, the last one, "
            f"micro-batch {plan.micro_batch}, used {format_size(measured.peak_bytes)}. Raise memory.budget, or lower model.image_size.",
            need_bytes=measured.peak_bytes,
            budget_bytes=self.budget.total_bytes,
            largest_part=max(plan.parts.items(), key=lambda part: part[1]),
        )

    def planner(self, limits: Limits, reserve: int) -> Planner:
        """The search with what is known so far."""
        setting = StepSetting(
            accumulates=False,
            eval_batch=self.eval_batch or 1,
            baseline_bytes=self.budget.baseline_bytes,
            reserve_bytes=reserve,
        )
        return Planner(self.profile, self.budget.total_bytes, setting, replace(limits, most=min(limits.most, MOST_IMAGES)))

    def _with_eval_batch(self, planner: Planner, candidate: Candidate) -> Planner:
        if self.eval_batch is not None:
            return planner
        return with_eval_batch(planner, candidate)

    def _corrected(self, plan: CheckpointPlan, measured: MeasuredPeak, reserve: int) -> int:
        if measured.out_of_memory:  # how much was missing is not known: go a tenth below what this plan was to need
            free = self.budget.total_bytes - (plan.predicted_peak_bytes - reserve) * 9 // 10
            return max(reserve, free)
        above = measured.peak_bytes - (plan.predicted_peak_bytes - reserve)
        return max(reserve, int(above * _SAFETY) + self.budget.reserve_bytes // 4)

    def probe(self, plan: CheckpointPlan) -> MeasuredPeak:
        """Run the plan for two training steps and one evaluation step; leaves no trace.

        A size that runs out of memory is an answer, not an error: the exception is left before memory is given back, since its
        traceback holds tensors.
        """
        meter = PeakMeter(self.step.device)
        counter = StorageCounter() if self.step.device.type == "cpu" else None
        failure: str | None = None
        seconds = 0.0
        with self._no_trace() as copies:
            meter.start()
            try:
                handle = apply_plan(self.step.model, plan)
                try:
                    seconds = self._run(plan, counter)
                finally:
                    handle.remove()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = str(error)
            peak = meter.peak_bytes() - copies
        release()
        return MeasuredPeak(
            peak_bytes=peak,
            base_bytes=meter.base_bytes - copies,
            counted_bytes=counter.peak_bytes if counter else 0,
            images_per_second=0.0 if failure else plan.micro_batch / max(seconds, 1e-9),
            out_of_memory=failure is not None,
        )

    def _run(self, plan: CheckpointPlan, counter: StorageCounter | None) -> float:
        """Seconds of the second step's last micro-batch."""
        passes = min(2, plan.accumulation)
        if counter is not None:
            counter.track([*self.step.model.parameters(), *self.step.model.buffers()])
            counter.__enter__()
        try:
            self.train_mode()
            self._train_step(plan, passes=1)
            seconds = self._train_step(plan, passes)
        finally:
            if counter is not None:
                counter.__exit__(None, None, None)
        with eval_mode(self.step.model):
            self.step.predict(self._images(plan.eval_batch))
        return seconds

    def _train_step(self, plan: CheckpointPlan, passes: int) -> float:
        targets = torch.zeros(plan.micro_batch, dtype=torch.int64)
        started = self.clock()
        for _ in range(passes):
            images = self._images(plan.micro_batch)
            if self.step.device.type == "cuda":
                torch.cuda.synchronize(self.step.device)
            started = self.clock()
            self.step.accumulate(images, targets, batch_images=plan.batch)
        if self.step.device.type == "cuda":
            torch.cuda.synchronize(self.step.device)
        seconds = self.clock() - started
        self.step.apply()
        return seconds

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
        copies = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in (*model.parameters(), *model.buffers())]
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
            for module, mode in training.items():
                module.training = mode
            torch.set_rng_state(cpu_state)
            if cuda_state is not None:
                torch.cuda.set_rng_state(cuda_state, self.step.device)


def plan_chosen(plan: CheckpointPlan, measured_peak_bytes: int | None) -> PlanChosen:
    """The event that tells of a plan."""
    return PlanChosen(
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        batch=plan.batch,
        precision=plan.precision,
        stages=plan.stages,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        measured_peak_bytes=measured_peak_bytes,
        budget_bytes=plan.budget_bytes,
        recompute_fraction=plan.recompute_fraction,
        why=plan.why,
    )


def with_eval_batch(planner: Planner, candidate: Candidate) -> Planner:
    """The planner with the largest evaluation batch, up to EVAL_IMAGES, that does not raise the candidate's peak."""
    best = 1
    for count in range(2, EVAL_IMAGES + 1):
        trial = Planner(planner.profile, planner.budget_bytes, replace(planner.setting, eval_batch=count), planner.limits)
        if trial.score(candidate.segments, candidate.micro_batch).peak.total_bytes > candidate.peak.total_bytes:
            break
        best = count
    return Planner(planner.profile, planner.budget_bytes, replace(planner.setting, eval_batch=best), planner.limits)


def explain(planner: Planner, candidate: Candidate) -> str:
    """Why this plan, in one sentence with numbers."""
    limits, largest = planner.limits, planner.largest() if planner.limits.micro_batch is None else candidate.micro_batch
    share = candidate.recompute_fraction(planner.profile)
    if candidate.recomputed_flops:
        stored = planner.largest_of(store_all(planner.profile))
        cost = f"{share:.1%} of a step's FLOPs are done twice, since with everything stored {stored or 'not one'} would fit"
    else:
        cost = "nothing is recomputed"
    if limits.micro_batch is not None:
        return f"memory.micro_batch {limits.micro_batch} was given; {cost}"
    if limits.batch is None:
        return f"micro-batch {candidate.micro_batch} is the largest that fits; {cost}"
    if largest >= limits.batch:
        return f"the whole batch of {limits.batch} fits at once; {cost}"
    passes = -(-limits.batch // candidate.micro_batch)
    even = "" if candidate.micro_batch == largest else f", or {candidate.micro_batch} at a time"
    return f"of {limits.batch} images {largest} fit at once; that takes {passes} passes{even}; {cost}"


def ladder_rows(planner: Planner, rungs: tuple[Rung, ...], chosen: Candidate) -> tuple[LadderRow, ...]:
    """The ladder as events: spacing off, smaller and smaller, the best mix, and the chosen plan last.

    A spacing that gives the same numbers as the one before it (stages shorter than it) is left out.
    """
    wanted = planner.limits.micro_batch or planner.limits.batch
    rows: list[LadderRow] = []
    others = [rung for rung in rungs if rung.candidate != chosen]
    for rung in others:
        fits = rung.candidate.micro_batch if rung.fits else 0
        if not rung.fits:
            verdict = "too large"
        elif wanted is not None and fits < wanted:
            verdict = f"fits {fits} of {wanted}"
        else:
            verdict = "fits"
        row = _row(planner, len(rows), rung.spacing, rung.candidate, fits, verdict)
        if not rows or replace(row, rung=0, spacing="") != replace(rows[-1], rung=0, spacing=""):
            rows.append(row)
    name = next((rung.spacing for rung in rungs if rung.candidate == chosen), "mixed")
    rows.append(_row(planner, len(rows), name, chosen, chosen.micro_batch, "chosen"))
    return tuple(rows)


def _row(planner: Planner, number: int, spacing: str, candidate: Candidate, fits: int, verdict: str) -> LadderRow:
    return LadderRow(
        rung=number,
        spacing=spacing,
        micro_batch=fits,
        predicted_peak_bytes=candidate.peak.total_bytes,
        recompute_fraction=round(candidate.recompute_fraction(planner.profile), 4),
        verdict=verdict,
    )


def measured_rows(rows: tuple[LadderRow, ...], planner: Planner, measured: MeasuredPeak) -> tuple[LadderRow, ...]:
    """The rows with the measured peak at the chosen one, and images per second: measured there, by FLOPs elsewhere."""
    work = 1 + rows[-1].recompute_fraction
    done = []
    for row in rows:
        rate = measured.images_per_second * work / (1 + row.recompute_fraction)
        peak = measured.peak_bytes if row is rows[-1] else None
        done.append(replace(row, images_per_second=rate if row.micro_batch else None, measured_peak_bytes=peak))
    return tuple(done)


def refusal(profile: MemoryProfile, answer: NoPlan, limits: Limits, remedies: tuple[str, ...]) -> DoesNotFit:
    """The error that nothing fits, with the need, the largest part and the ways out."""
    part, part_bytes = answer.largest_part
    pinned = "" if limits.spacing == "auto" else f" with memory.spacing {limits.spacing}"
    advice = "; ".join(remedies) or "raise memory.budget"
    return DoesNotFit(
        f"Micro-batch {answer.micro_batch} of {profile.model} at {profile.image_size[0]}x{profile.image_size[1]} px does not fit{pinned}: "
        f"predicted peak {format_size(answer.need_bytes)}, budget {format_size(answer.budget_bytes)}, at the tightest plan. "
        f"Largest part: {part}, {format_size(part_bytes)}. Ways out: {advice}.",
        need_bytes=answer.need_bytes,
        budget_bytes=answer.budget_bytes,
        largest_part=answer.largest_part,
        remedies=remedies,
    )
