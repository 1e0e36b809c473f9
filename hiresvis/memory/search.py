"""Chooses the plan: the largest micro-batch that fits, and for it the least recompute.

The largest micro-batch is found by bisection over the question whether anything fits: every figure is affine in the batch, and
the peak of a plan rises with it. For the chosen one the dynamic program of `memory.program` gives the cheapest plan, and
the walk of `memory.peak` its exact peak; where the walk sees more than the program, the program is asked again for less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil

from .costs import MemoryProfile
from .peak import HOST_SLAB_BYTES, PredictedPeak, StepSetting, offloaded_bytes, predict_peak, resident_bytes
from .plan import CheckpointPlan, NoPlan, Segment, describe_stages, store_all, uniform
from .prices import Prices, segment_flops
from .program import Freedom, Program

UNIFORM_SPACINGS = (4, 2, 1)
# What plans may use, by rung of the ladder: each adds a finer tier. The last two need leave: `exact: close`, and a host.
FREEDOMS: tuple[tuple[str, frozenset[Freedom]], ...] = (
    ("mixed", frozenset({"recompute"})),
    ("keep", frozenset({"recompute", "keep"})),
    ("nested", frozenset({"recompute", "keep", "nested"})),
    ("chunk", frozenset({"recompute", "keep", "nested", "chunk"})),
    ("offload", frozenset({"recompute", "keep", "nested", "chunk", "offload"})),
)
_LESS = 4096  # the least part of the room by which the program is asked for less at first
_MOST_TRIES = 24  # amounts of room that the program is asked for at most
_UNPLANNED = ("evaluation", "optimizer step")  # peaks that no plan changes
_HOST_PRICES = (0.0, 1.0, 8.0, 64.0, 512.0, 4096.0)  # FLOPs per offloaded byte, until the host's memory is enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the user asked for.

    Attributes:
        batch: images the optimizer sees, the most that a micro-batch may have; None: the largest that fits.
        micro_batch: pinned, or None.
        spacing: "auto", "off", blocks per segment everywhere, or by stage.
        goal: largest (micro-batch first) or fastest (least work for the batch first).
        most: a micro-batch never tried above this.
        exact: "bitwise" or "close"; with "close" tiers are allowed that reassociate sums.
        prices: how work is weighed: of a named GPU by the ratio of its rates, of the device at hand by what its units took. The
            default counts FLOPs, and traffic only to settle ties. With a host, plans may offload to its memory (not on a CPU, whose
            own memory is the device's).
    """

    batch: int | None
    micro_batch: int | None = None
    spacing: str | int | Mapping[str, int] = "auto"
    goal: str = "largest"
    most: int = 4096
    exact: str = "close"
    prices: Prices = field(default_factory=Prices)

    @property
    def allowed(self) -> frozenset[Freedom]:
        """All that plans may use."""
        forbidden = {*(() if self.exact == "close" else ("chunk",)), *(() if self.prices.host is not None else ("offload",))}
        return FREEDOMS[-1][1] - forbidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan with its numbers at one micro-batch; `cost` is what it adds to a step per image, in FLOPs, memory traffic included."""

    segments: tuple[Segment, ...]
    micro_batch: int
    peak: PredictedPeak
    recomputed_flops: int
    cost: int
    host_bytes: int = 0

    def recompute_fraction(self, profile: MemoryProfile) -> float:
        """Recomputed FLOPs over those of a step without recompute."""
        return self.recomputed_flops / max(1, profile.step_flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One row of the ladder: a way to space checkpoints, and the largest micro-batch that fits with it (0: none)."""

    spacing: str
    candidate: Candidate
    fits: bool


def recomputed_flops(profile: MemoryProfile, segments: Sequence[Segment]) -> int:
    """FLOPs per image that the plan runs a second (or third) time."""
    return sum(segment_flops(profile, segment) for segment in segments)


def host_bytes(profile: MemoryProfile, segments: Sequence[Segment], micro_batch: int) -> int:
    """Host memory that the plan's offloaded segments take: whole slabs each."""
    moved = (offloaded_bytes(profile, segment, micro_batch) for segment in segments if segment.tier == "offload")
    return sum(-(-nbytes // HOST_SLAB_BYTES) * HOST_SLAB_BYTES for nbytes in moved)


class Planner:
    """Searches plans of one profile within one budget.

    Args:
        profile: the traced chain.
        budget_bytes: the limit, baseline and reserve included.
        setting: baseline, reserve, evaluation batch; `accumulates` is decided per micro-batch.
        limits: what the user asked for.
    """

    def __init__(self, profile: MemoryProfile, budget_bytes: int, setting: StepSetting, limits: Limits) -> None:
        self.profile, self.budget_bytes, self.setting, self.limits = profile, budget_bytes, setting, limits
        # Where units are given more than their input, the program counts some of it twice, and finds less than there is.
        self._shares = any(unit.needs or unit.gradients_beside for unit in profile.units)
        self.tightest = lru_cache(maxsize=None)(self._tightest)
        self.best = lru_cache(maxsize=None)(self._best)
        self.anything = lru_cache(maxsize=None)(self._anything)
        self._simple_ones = lru_cache(maxsize=None)(self._score_simple_ones)
        self._program = lru_cache(maxsize=64)(self._make_program)

    def with_eval_batch(self, count: int) -> Planner:
        """The same search with another evaluation batch. What took time to set up is shared, for it knows nothing of evaluation."""
        found = Planner(self.profile, self.budget_bytes, replace(self.setting, eval_batch=count), self.limits)
        found._program = self._program
        return found

    def _setting(self, micro_batch: int) -> StepSetting:
        batch = self.limits.batch
        return replace(self.setting, accumulates=batch is not None and micro_batch < batch)

    def _make_program(self, micro_batch: int, allow: frozenset[Freedom], host_price: float, thorough: bool) -> Program:
        room = self._room(micro_batch)
        limits = self.limits
        setting = self._setting(micro_batch)
        return Program(self.profile, micro_batch, room, setting, allow, limits.prices, host_price, thorough=thorough)

    def _room(self, micro_batch: int) -> int:
        setting = self._setting(micro_batch)
        constant = resident_bytes(self.profile, setting, micro_batch) + setting.baseline_bytes + setting.reserve_bytes
        return self.budget_bytes - constant

    def score(self, segments: tuple[Segment, ...], micro_batch: int) -> Candidate:
        """The candidate with these segments."""
        peak = predict_peak(self.profile, segments, micro_batch, self._setting(micro_batch))
        return Candidate(
            segments=segments,
            micro_batch=micro_batch,
            peak=peak,
            recomputed_flops=recomputed_flops(self.profile, segments),
            cost=self.limits.prices.of(self.profile, segments),
            host_bytes=host_bytes(self.profile, segments, micro_batch),
        )

    def fits(self, candidate: Candidate) -> bool:
        """Whether the predicted peak is within the budget, and what is offloaded within the host's memory."""
        return candidate.peak.total_bytes <= self.budget_bytes and self._host_holds(candidate)

    def _host_holds(self, candidate: Candidate) -> bool:
        host = self.limits.prices.host
        return not candidate.host_bytes or (host is not None and candidate.host_bytes <= host.total_bytes)

    def _anything(self, micro_batch: int, allow: frozenset[Freedom] | None = None) -> Candidate | None:
        """Some plan that fits at this micro-batch, pins respected; not the cheapest."""
        found = [candidate for candidate in self._simple_ones(micro_batch) if self.fits(candidate)]
        if self._pinned() is None:
            freedom = allow or self.limits.allowed
            found = found or self._searched(micro_batch, freedom, Program.least_kept)
            if "offload" in freedom and not any(self.fits(candidate) for candidate in found):
                found = self._searched(micro_batch, freedom - {"offload"}, Program.least_kept)
            if self._shares and not any(self.fits(candidate) for candidate in found):
                found = [self.tightest(micro_batch, freedom)]
        return next((candidate for candidate in found if self.fits(candidate)), None)

    def _best(self, micro_batch: int, allow: frozenset[Freedom] | None = None) -> Candidate | None:
        """The cheapest plan that fits at this micro-batch, pins respected."""
        found = list(self._simple_ones(micro_batch))
        if self._pinned() is None:
            freedom = allow or self.limits.allowed
            found.extend(self._searched(micro_batch, freedom, Program.cheapest))
            if "offload" in freedom and not any(self.fits(candidate) and not candidate.cost for candidate in found):
                # The program sees transfers only roughly, and no limit of the host: what does without them is tried by itself.
                found.extend(self._searched(micro_batch, freedom - {"offload"}, Program.cheapest))
            if not any(self.fits(candidate) for candidate in found):  # what the grid's rounding leaves out
                found.extend(self._searched(micro_batch, freedom, Program.least_kept))
            if self._shares and not any(self.fits(candidate) for candidate in found):
                found.append(self.tightest(micro_batch, freedom))
        fitting = [candidate for candidate in found if self.fits(candidate)]
        return min(fitting, key=lambda candidate: (candidate.cost, candidate.peak.total_bytes), default=None)

    def _searched(
        self, micro_batch: int, allow: frozenset[Freedom], search: Callable[[Program, int], tuple[Segment, ...] | None]
    ) -> list[Candidate]:
        """What the program finds; asked for less where the walk sees more, and for less in host memory where that is too small."""
        found: list[Candidate] = []
        for price in _HOST_PRICES if "offload" in allow else (0.0,):
            room = self._room(micro_batch)
            if room <= 0:
                break
            program = self._program(micro_batch, allow, price, search is Program.cheapest)
            less, before = max(1, room // _LESS), room
            for _ in range(_MOST_TRIES):
                segments = search(program, room)
                if segments is None:  # too little asked for: between this and what was too much
                    if before - room <= max(1, before // _LESS):
                        break
                    room = (room + before) // 2
                    continue
                found.append(self.score(segments, micro_batch))
                if found[-1].peak.total_bytes <= self.budget_bytes or found[-1].peak.where in _UNPLANNED:
                    break
                before, room = room, room - max(less, found[-1].peak.total_bytes - self.budget_bytes)
                less *= 2
            if not found or self.fits(found[-1]) or found[-1].peak.total_bytes > self.budget_bytes:
                break
        return found

    def _score_simple_ones(self, micro_batch: int) -> tuple[Candidate, ...]:
        pinned = self._pinned()
        return tuple(self.score(segments, micro_batch) for segments in ([pinned] if pinned is not None else self._simple()))

    def _pinned(self) -> tuple[Segment, ...] | None:
        spacing = self.limits.spacing
        if spacing == "auto":
            return None
        if spacing == "off":
            return store_all(self.profile)
        assert not isinstance(spacing, str)
        return uniform(self.profile, spacing)

    def _simple(self) -> list[tuple[Segment, ...]]:
        return [store_all(self.profile), *(uniform(self.profile, spacing) for spacing in UNIFORM_SPACINGS)]

    def most(self) -> int:
        """The largest micro-batch worth trying: the batch, a tensor's element limit, the caller's own limit."""
        asked = self.limits.micro_batch or self.limits.batch or self.limits.most
        return max(1, min(asked, self.profile.max_batch, self.limits.most))

    def largest(self, allow: frozenset[Freedom] | None = None, *, least: int = 1, most: int | None = None) -> int:
        """The largest micro-batch with a plan that fits; 0 when one image does not fit.

        Args:
            allow: what plans may use; None: all that the limits allow.
            least, most: where it is known to lie.
        """
        return _bisect(lambda micro: self.anything(micro, allow) is not None, self.most() if most is None else most, least)

    def largest_of(self, segments: tuple[Segment, ...]) -> int:
        """The largest micro-batch that fits with these segments; 0 when one image does not fit."""
        return _bisect(lambda micro: self.fits(self.score(segments, micro)), self.most())

    def choose(self) -> Candidate | NoPlan:
        """The plan for the goal, or the numbers of why there is none."""
        smallest = self.limits.micro_batch or 1
        if smallest > self.profile.max_batch:
            return replace(self.refusal(smallest), most_images=self.profile.max_batch)
        if self.limits.micro_batch is not None:
            return self.best(smallest) or self._last_resort(smallest)
        largest = self.largest()
        if largest == 0:
            return self._last_resort(1)
        if self.limits.batch is None:
            micro = largest
        elif self.limits.goal == "fastest":
            micro = self._fastest(largest)
        else:
            micro = balanced(self.limits.batch, largest)
        # Persisting gradients, or the grid, can refuse a smaller micro-batch where a larger one fits.
        return self.best(micro) or self.best(largest) or self._last_resort(micro)

    def _last_resort(self, micro_batch: int) -> Candidate | NoPlan:
        """The tightest plan where that fits after all, so that no refusal names a need within the budget."""
        tightest = self.tightest(micro_batch)
        return tightest if self.fits(tightest) else self.refusal(micro_batch)

    def _fastest(self, largest: int) -> int:
        """The micro-batch with the least recompute; among equals the largest."""
        assert self.limits.batch is not None
        options = sorted({balanced(self.limits.batch, micro) for micro in range(1, largest + 1)}, reverse=True)
        candidates = [candidate for micro in options if (candidate := self.best(micro)) is not None]
        return min(candidates, key=lambda candidate: (candidate.cost, -candidate.micro_batch)).micro_batch

    def refusal(self, micro_batch: int) -> NoPlan:
        """The tightest plan that is allowed at this micro-batch, and its parts."""
        tightest = self.tightest(micro_batch)
        return NoPlan(
            micro_batch=micro_batch,
            need_bytes=tightest.peak.total_bytes,
            budget_bytes=self.budget_bytes,
            largest_part=max(tightest.peak.parts.items(), key=lambda part: part[1]),
            parts=tightest.peak.parts,
            where=tightest.peak.where,
        )

    def _tightest(self, micro_batch: int, allow: frozenset[Freedom] | None = None) -> Candidate:
        """The plan of the least need, whatever the budget; what would not fit the host's memory is left out."""
        pinned = self._pinned()
        choices = [pinned] if pinned is not None else self._simple()
        for freedom in [] if pinned is not None else [allow or self.limits.allowed, (allow or self.limits.allowed) - {"offload"}]:
            choices += self._least_room(micro_batch, freedom)
        found = [self.score(segments, micro_batch) for segments in choices]
        return min((candidate for candidate in found if self._host_holds(candidate)), key=lambda candidate: candidate.peak.total_bytes)

    def _least_room(self, micro_batch: int, allow: frozenset[Freedom]) -> list[tuple[Segment, ...]]:
        """The plan that the program finds in the least room, by bisection."""
        roomy = Planner(self.profile, 1 << 60, self.setting, self.limits)
        program = roomy._program(micro_batch, allow, 0.0, False)
        found, low, high = [], 0, roomy.score(store_all(self.profile), micro_batch).peak.total_bytes
        while high - low > max(1, high // 200):
            middle = (low + high) // 2
            segments = program.least_kept(middle)
            if segments is None:
                low = middle
            else:
                high = middle
                found = [segments]
        return found

    def ladder(self) -> tuple[Rung, ...]:
        """For spacing off, then smaller and smaller spacing, the best mix, and each finer tier: the largest micro-batch that fits.

        A uniform spacing that gives the same segments as a larger one is left out.
        """
        rungs: list[Rung] = []
        seen: set[tuple[Segment, ...]] = set()
        named = [("off", store_all(self.profile)), *((str(n), uniform(self.profile, n)) for n in UNIFORM_SPACINGS)]
        for name, segments in named:
            if segments in seen:
                continue
            seen.add(segments)
            largest = self.largest_of(segments)
            rungs.append(Rung(spacing=name, candidate=self.score(segments, max(1, largest)), fits=largest > 0))
        if self._pinned() is None:
            before, largest, most = None, 0, self.largest()
            for name, freedom in FREEDOMS if most else ():
                allow = freedom & self.limits.allowed
                if name != "mixed" and name not in allow:
                    continue
                largest = self.largest(allow, least=max(1, largest), most=most)  # each tier fits what the one before does
                candidate = self.best(largest, allow) if largest else None
                if candidate is not None and candidate.segments != before:
                    rungs.append(Rung(spacing=name, candidate=candidate, fits=True))
                    before = candidate.segments
        return tuple(rungs)

    def plan(self, candidate: Candidate, why: str) -> CheckpointPlan:
        """The frozen plan of a candidate."""
        batch = self.limits.batch or candidate.micro_batch
        return CheckpointPlan(
            model=self.profile.model,
            image_size=self.profile.image_size,
            precision=self.profile.precision,
            segments=candidate.segments,
            unit_modules=tuple(unit.modules for unit in self.profile.units),
            micro_batch=candidate.micro_batch,
            batch=batch,
            accumulation=ceil(batch / candidate.micro_batch),
            eval_batch=self.setting.eval_batch,
            budget_bytes=self.budget_bytes,
            predicted_peak_bytes=candidate.peak.total_bytes,
            predicted_counted_bytes=candidate.peak.counted_bytes,
            recompute_fraction=candidate.recompute_fraction(self.profile),
            stages=describe_stages(self.profile, candidate.segments),
            parts=candidate.peak.parts,
            host_bytes=candidate.host_bytes,
            versions=self.profile.versions,
            why=why,
        )


def balanced(batch: int, largest: int) -> int:
    """The smallest micro-batch that needs no more forwards than `largest` does: 16 in thirds is 6, not 7.

    >>> balanced(16, 7), balanced(16, 16), balanced(16, 5)
    (6, 16, 4)
    """
    return ceil(batch / ceil(batch / largest))


def _bisect(fits: Callable[[int], bool], most: int, least: int = 1) -> int:
    """The largest n in least..most that fits, 0 when `least` does not.

    `most` is tried by itself: it may be the whole batch, which needs no gradients to persist and can fit where less does not.
    """
    if fits(most):
        return most
    if most <= least or not fits(least):
        return 0
    low, high = least, most - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
