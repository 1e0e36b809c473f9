"""What a run does when memory runs out in mid-training: it makes room, and the same batch is done again.

A plan that the probe has proved can still meet less memory than there was: another process takes some, a fragmented allocator, a larger
image in the loader's hands. The plan is then tightened to nine tenths of what it was to need: spacing and tiers first, with the
micro-batch as it is, so that the run's bits stay; only where nothing is left to tighten, half the micro-batch. The batch that the
optimizer sees stays in any case. Evaluation halves its own batch and begins anew. Whoever runs out `MOST_PER_HOUR` times within an hour is
told the numbers instead: then something else is wrong.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any, Protocol

from hiresvis.backbone.segments import apply_plan
from hiresvis.device import is_out_of_memory, release
from hiresvis.errors import DoesNotFit, EnvironmentFailed, first_line
from hiresvis.ladder import other_micro_batch, plan_chosen
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import StepSetting
from hiresvis.memory.plan import CheckpointPlan, NoPlan
from hiresvis.memory.search import Candidate, Limits, Planner
from hiresvis.run.events import Event, Notice
from hiresvis.train.evaluate import Evaluation, evaluation_steps
from hiresvis.train.step import TrainStep
from hiresvis.units import format_size

MOST_PER_HOUR = 4
_HOUR_S = 3600.0


class Relief:
    """Holds a run's plan applied, and makes room when memory runs out.

    Args:
        step: whose model the plan is for.
        plan: that training begins with; applied here.
        profile, limits: of the search that found it.
        train_loader: whose micro-batch follows the plan's.
        changed: told of each new plan, to write it down; its EnvironmentFailed is a notice.
        check: raises what speaks against a plan, before it is applied.
        replan: False: the first time is the last.
        resume_command: for messages.
        clock: seconds that only go forward.

    Attributes:
        plan: the one in use.
    """

    def __init__(
        self,
        *,
        step: TrainStep,
        plan: CheckpointPlan,
        profile: MemoryProfile,
        limits: Limits,
        train_loader: Any,
        changed: Callable[[CheckpointPlan], object] = lambda _: None,
        check: Callable[[CheckpointPlan], None] = lambda _: None,
        replan: bool = True,
        resume_command: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self._step, self._profile, self._limits = step, profile, limits
        self._train_loader, self._changed, self._check = train_loader, changed, check
        self._replan, self._resume_command, self._clock = replan, resume_command, clock
        self._times: deque[float] = deque()
        self._handle = apply_plan(step.model, plan)

    def remove(self) -> None:
        """Takes the plan off the model."""
        self._handle.remove()

    def change(self, plan: CheckpointPlan, profile: MemoryProfile) -> None:
        """Puts another plan in place, of the same model at another image size; what evaluation has room for stays."""
        self._handle.remove()
        self.plan, self._profile = replace(plan, eval_batch=self.plan.eval_batch), profile
        self._handle = apply_plan(self._step.model, plan)
        self._train_loader.set_micro_batch(plan.micro_batch)

    def training(self, where: str, what: str) -> Iterator[Event]:
        """Tightens the plan. What held memory has to be gone by now, the exception with its traceback too.

        Args:
            where: the place for people. what: the error's first line.

        Raises:
            DoesNotFit: this was one time too many.
        """
        self._count(where, what)
        self._handle.remove()
        release()
        before, plan = self.plan, self._tighter(what)
        self._check(plan)
        self._handle = apply_plan(self._step.model, plan)
        self._train_loader.set_micro_batch(plan.micro_batch)
        does = "there is no tighter plan" if plan is before else "the plan is tightened"
        yield Notice(level="warning", text=f"{where}: memory ran out ({what}); {does}, and the batch is done again")
        if plan.micro_batch < before.micro_batch:
            yield Notice(level="warning", text=other_micro_batch(before.micro_batch, plan))
        yield from self._adopt(plan)
        yield plan_chosen(plan, None)

    def evaluation(self, loader: Any, what: str) -> Iterator[Event]:
        """Halves the loader's evaluation batch, for good.

        Raises:
            DoesNotFit: it is one image already, or this was one time too many.
        """
        self._count("evaluation", what)
        release()
        if loader.batch == 1:
            raise self.refusal("Evaluation of a single image ran out of memory")
        loader.set_batch(loader.batch // 2)
        text = f"evaluation ran out of memory ({what}); it begins again with {loader.batch} images at once"
        yield Notice(level="warning", text=text)
        yield from self._adopt(replace(self.plan, eval_batch=loader.batch))

    def _adopt(self, plan: CheckpointPlan) -> Iterator[Notice]:
        self.plan = plan
        try:
            self._changed(plan)
        except EnvironmentFailed as error:
            yield Notice(level="error", text=f"{error}; a resumed run would begin with the plan before")

    def _tighter(self, what: str) -> CheckpointPlan:
        """A plan that needs a tenth less at the same micro-batch; else the tightest there is; else the same with half as many images.

        Where nothing of the kind is left, the same plan once more: whoever took the memory may have given it back.
        """
        base, need, micro_batch = self.plan.parts["baseline"], self.plan.predicted_peak_bytes, self.plan.micro_batch
        # Evaluation makes room for itself, so it does not stand in training's way here.
        # Baseline and reserve are the plan's own: the finder may have corrected them, and others would make the same plan look tighter.
        setting = StepSetting(accumulates=False, eval_batch=1, baseline_bytes=base, reserve_bytes=self.plan.parts["reserve"])
        less = base + (need - base) * 9 // 10
        while micro_batch:
            limits = replace(self._limits, batch=self.plan.batch, micro_batch=micro_batch)
            planner = Planner(self._profile, less, setting, limits)
            found = planner.choose()
            if isinstance(found, NoPlan):
                found = planner.tightest(micro_batch)
            if found.peak.total_bytes < need:
                return self._named(planner, found, what)
            micro_batch //= 2
        return self.plan

    def _named(self, planner: Planner, found: Candidate, what: str) -> CheckpointPlan:
        why = f"memory ran out ({what}) with a plan of {format_size(self.plan.predicted_peak_bytes)}"
        plan = planner.plan(found, why)
        return replace(plan, eval_batch=self.plan.eval_batch, budget_bytes=self.plan.budget_bytes, versions=self.plan.versions)

    def _count(self, where: str, what: str) -> None:
        now = self._clock()
        while self._times and now - self._times[0] > _HOUR_S:
            self._times.popleft()
        self._times.append(now)
        if not self._replan:
            raise self.refusal(f"Memory ran out at {where} ({what}), and memory.on_oom is stop")
        if len(self._times) > MOST_PER_HOUR:
            raise self.refusal(f"Memory ran out {len(self._times)} times within an hour, the last at {where} ({what})")

    def refusal(self, text: str) -> DoesNotFit:
        """The error that ends a run, with the plan's numbers and the way on."""
        plan = self.plan
        way = f"Free memory (another process may have taken some), then go on with: {self._resume_command}"
        return DoesNotFit(
            f"{text}. The plan of micro-batch {plan.micro_batch} was predicted {format_size(plan.predicted_peak_bytes)} of "
            f"{format_size(plan.budget_bytes)}. What was saved is whole. {way if self._resume_command else 'Lower memory.budget.'}",
            need_bytes=plan.predicted_peak_bytes,
            budget_bytes=plan.budget_bytes,
            largest_part=plan.largest_part,
        )


class Room(Protocol):
    """Whoever makes room for an evaluation."""

    def evaluation(self, loader: Any, what: str) -> Iterator[Event]:
        """Lowers the loader's batch, for good, or raises DoesNotFit.

        Args:
            what: the first line of the error, which is gone by now with all that its traceback held.
        """
        ...


def evaluation_in_room(
    step: TrainStep, loader: Any, room: Room | None, *, name_of: Callable[[int], str], flips: bool = False
) -> Generator[tuple[int, int] | Event, None, Evaluation]:
    """`evaluation_steps`, begun again with a smaller batch where memory runs out; yields their progress and what the room's maker tells."""
    while True:
        try:
            return (yield from evaluation_steps(step, loader, name_of=name_of, flips=flips))
        except (RuntimeError, MemoryError) as error:
            if room is None or not is_out_of_memory(error, step.device):
                raise
            what = first_line(error)
        yield from room.evaluation(loader, what)
