"""The planner's answer: what is kept for each unit, at which micro-batch, and what that is predicted to need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .costs import MemoryProfile, Tier

PLAN_VERSION = 2
_TIERS = ("store", "keep", "recompute", "offload", "chunk")


@dataclass(frozen=True, slots=True)
class Segment:
    """Units `start` to `end - 1` of the chain under one tier.

    Attributes:
        tier: `store` (one unit), or what is kept for backward: the input (`recompute`), costly outputs besides (`keep`), both
            in host memory (`offload`), or the input while token-wise modules run in slices (`chunk`).
        passes: how the segment is run again. Empty: all at once, as far as its last saved tensor. Else one entry per unit,
            the saved tensors at which that unit's second run begins another pass (see `costs.Recompute`): the segment is
            *nested*, units are run again one by one from the last to the first, each from an input held since the first rerun.
        keep: of a single unit, the costly operators whose outputs are kept.
        slices: names of the modules that run in slices.
    """

    start: int
    end: int
    tier: Tier = "store"
    passes: tuple[tuple[int, ...], ...] = ()
    keep: tuple[int, ...] = ()
    slices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.end, (self.start, self.end)
        assert self.tier != "store" or self.end == self.start + 1
        assert not self.passes or len(self.passes) == self.end - self.start
        assert not self.keep or (self.end == self.start + 1 and self.passes)

    @property
    def nested(self) -> bool:
        """Whether more than one second run happens."""
        return len(self.passes) > 1 or any(self.passes)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Segment:
        """What `asdict` made of it."""
        passes = tuple(tuple(unit) for unit in row["passes"])
        return cls(row["start"], row["end"], row["tier"], passes, tuple(row["keep"]), tuple(row["slices"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """A plan is frozen and refers to units by module name, so it can be stored and applied to the model later.

    Attributes:
        segments: the whole chain, in order, without gaps.
        unit_modules: for each unit the dotted names of its modules.
        micro_batch: images in one forward; batch: images the optimizer sees; accumulation: forwards per step.
        predicted_peak_bytes: by simulation, baseline included; predicted_counted_bytes: live storages alone.
        host_bytes: host memory that offloaded segments take.
        versions: torch and timm releases that the costs were traced with.
        recompute_fraction: recomputed FLOPs over the FLOPs of a step without recompute.
        stages: one readable line per stage.
        parts: the predicted peak, taken apart.
    """

    model: str
    image_size: tuple[int, int]
    precision: str
    segments: tuple[Segment, ...]
    unit_modules: tuple[tuple[str, ...], ...]
    micro_batch: int
    batch: int
    accumulation: int
    eval_batch: int
    budget_bytes: int
    predicted_peak_bytes: int
    predicted_counted_bytes: int
    recompute_fraction: float
    stages: tuple[str, ...]
    parts: Mapping[str, int]
    why: str
    host_bytes: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return {"version": PLAN_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> CheckpointPlan:
        """The plan that `to_json` wrote.

        Raises:
            ValueError: the row is of another format version, or no plan: what is wrong is named.
        """
        values = dict(row)
        if values.pop("version", None) != PLAN_VERSION:
            raise ValueError(f"plan of version {row.get('version')!r}, expected {PLAN_VERSION}; plan again")
        try:
            values["segments"] = tuple(Segment.from_json(segment) for segment in row["segments"])
            values["unit_modules"] = tuple(tuple(names) for names in row["unit_modules"])
            values["image_size"] = tuple(row["image_size"])
            values["stages"] = tuple(row["stages"])
            found = cls(**values)
        except (AssertionError, KeyError, TypeError) as error:
            raise ValueError(f"no plan: {type(error).__name__}: {error}; plan again") from error
        found._check()
        return found

    def _check(self) -> None:
        """That it is a plan: counts from 1 on, and segments that are the whole chain.

        Raises:
            ValueError: the first thing that is not so.
        """
        for name in ("micro_batch", "batch", "accumulation", "eval_batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"no plan: {name} is {value!r}, and at least 1 is needed; plan again")
        position = 0
        for segment in self.segments:
            if segment.start != position:
                raise ValueError(f"no plan: a segment begins at unit {segment.start}, and the one before ends at {position}; plan again")
            if segment.tier not in _TIERS:
                raise ValueError(f"no plan: tier {segment.tier!r} is none of {', '.join(_TIERS)}; plan again")
            position = segment.end
        if position != len(self.unit_modules):
            raise ValueError(f"no plan: its segments end at unit {position} of {len(self.unit_modules)}; plan again")

    @property
    def largest_part(self) -> tuple[str, int]:
        """Name and bytes of the part of the predicted peak that takes the most."""
        return max(self.parts.items(), key=lambda part: part[1])

    @property
    def recomputed(self) -> tuple[Segment, ...]:
        """The segments that are run again in backward."""
        return tuple(segment for segment in self.segments if segment.tier != "store")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlan:
    """Nothing that is allowed fits; carries the numbers of the tightest plan at the smallest micro-batch.

    Attributes:
        where: in a step the peak is.
        most_images: more at once and a tensor has too many elements, whatever the memory; 0: that is not what speaks against it.
    """

    micro_batch: int
    need_bytes: int
    budget_bytes: int
    largest_part: tuple[str, int]
    parts: Mapping[str, int]
    where: str = ""
    most_images: int = 0


def store_all(profile: MemoryProfile) -> tuple[Segment, ...]:
    """The plan without recompute."""
    return tuple(Segment(index, index + 1) for index in range(len(profile.units)))


def uniform(profile: MemoryProfile, spacing: int | Mapping[str, int | None]) -> tuple[Segment, ...]:
    """Recompute everything that can be, in segments of `spacing` blocks that never cross a stage.

    Args:
        profile: the traced chain.
        spacing: units per segment, alike everywhere or by stage (None or a missing stage: stored).
    """
    segments: list[Segment] = []
    units = profile.units
    index = 0
    while index < len(units):
        unit = units[index]
        length = spacing if isinstance(spacing, int) else spacing.get(unit.stage)
        if length is None or not unit.recomputable or not unit.opens_segment:
            segments.append(Segment(index, index + 1))
            index += 1
            continue
        end = index + 1
        while end < len(units) and end - index < length and units[end].recomputable and units[end].stage == unit.stage:
            end += 1
        segments.append(Segment(index, end, "recompute"))
        index = end
    return tuple(segments)


def describe_stages(profile: MemoryProfile, segments: tuple[Segment, ...]) -> tuple[str, ...]:
    """One phrase per stage that recomputes, then "rest stored": ("stage0 spacing 1", "stage2 spacing 2 on 9 of 27", ...).

    Segments of several lengths in one stage give a range ("spacing 1-3"); one that crosses stages stands by itself
    ("stem to stage1 as one segment of 4"). What is done besides follows ("stage2 spacing 1, keeping outputs, 3 in passes").
    """
    totals: dict[str, int] = {}
    for unit in profile.units:
        if unit.recomputable:
            totals[unit.stage] = totals.get(unit.stage, 0) + 1
    lengths: dict[str, list[int]] = {}
    recomputed = dict.fromkeys(totals, 0)
    lines: dict[str, str] = {}
    finer: dict[str, Counter[str]] = {}
    for segment in segments:
        if segment.tier == "store":
            continue
        inside = [profile.units[index].stage for index in range(segment.start, segment.end)]
        for stage in inside:
            recomputed[stage] += 1
        if inside[0] == inside[-1]:
            lengths.setdefault(inside[0], []).append(len(inside))
            lines.setdefault(inside[0], "")
            finer.setdefault(inside[0], Counter()).update(_finer(segment))
        else:
            besides = "".join(f", {word}" for word in _finer(segment))
            lines[f"{inside[0]} to {inside[-1]}"] = f"{inside[0]} to {inside[-1]} as one segment of {len(inside)}{besides}"
    for stage, found in lengths.items():
        spacing = f"{min(found)}-{max(found)}" if min(found) != max(found) else f"{found[0]}"
        share = "" if sum(found) == totals[stage] else f" on {sum(found)} of {totals[stage]}"
        besides = "".join(f", {word}" if count == len(found) else f", {count} {word}" for word, count in finer[stage].items())
        lines[stage] = f"{stage} spacing {spacing}{share}{besides}"
    if not lines:
        return ("all stored",)
    rest = ("rest stored",) if any(recomputed[stage] < total for stage, total in totals.items()) else ()
    return (*lines.values(), *rest)


def _finer(segment: Segment) -> list[str]:
    """What a segment does besides recomputing from its input, in words."""
    words = []
    if segment.keep:
        words.append("keeping outputs")
    if segment.end - segment.start > 1 and segment.passes:
        words.append("nested")
    if any(segment.passes):
        words.append("in passes")
    if segment.slices:
        words.append("in slices")
    if segment.tier == "offload":
        words.append("on the host")
    return words
