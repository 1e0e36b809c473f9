"""A plan stage by stage: what is done with each, and what that keeps for backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import way_of
from hiresvis.memory.plan import Segment, store_all

TREATMENTS = {
    "store": "everything saved for backward stays",
    "keep": "what matrix products, convolutions and attention made stays, the rest runs again",
    "recompute": "the first input stays, everything runs again; spacing: units run again together",
    "nested": "recompute on two levels: inputs first, then unit after unit",
    "offload": "recompute or keep, with what stays in host memory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """A stage of the network under the plan, at the plan's micro-batch.

    Attributes:
        stored_bytes: what it saves for backward when everything is stored; a storage that stages share counts with the first.
        kept_bytes: what the plan keeps of it on the device.
        treatment: what is done, by the words of TREATMENTS ("3 store, 24 recompute (spacing 2)").
    """

    stage: str
    num_units: int
    stored_bytes: int
    kept_bytes: int
    treatment: str


def stage_rows(profile: MemoryProfile, segments: Sequence[Segment], micro_batch: int) -> tuple[StageRow, ...]:
    """The plan stage by stage, in the order of the chain."""
    stored = _kept_by_stage(profile, store_all(profile), micro_batch)
    kept = _kept_by_stage(profile, segments, micro_batch)
    rows = []
    for stage in dict.fromkeys(unit.stage for unit in profile.units):
        count = sum(unit.stage == stage for unit in profile.units)
        treatment = _treatment(profile, segments, stage) if stored[stage] else "saves nothing"
        row = StageRow(stage=stage, num_units=count, stored_bytes=stored[stage], kept_bytes=kept[stage], treatment=treatment)
        rows.append(row)
    return tuple(rows)


def _kept_by_stage(profile: MemoryProfile, segments: Sequence[Segment], batch: int) -> dict[str, int]:
    """Bytes that wait on the device for backward when the forward ends; a boundary counts where it is first kept, the images nowhere."""
    kept = dict.fromkeys((unit.stage for unit in profile.units), 0)
    seen = {profile.units[0].input_id}  # the images, which are there whatever is planned
    for segment in segments:
        unit = profile.units[segment.start]
        if segment.tier == "offload":
            continue
        if segment.tier == "store":
            inside, numbers = unit.interior.at(batch), set(unit.saves)
        else:
            way = way_of(profile, segment)
            inside, numbers = way.kept.at(batch) if way else 0, {unit.input_id}
        kept[unit.stage] += inside + profile.boundary_bytes(numbers - seen, batch)
        seen |= numbers
    return kept


def _treatment(profile: MemoryProfile, segments: Sequence[Segment], stage: str) -> str:
    """What is done with a stage's units, by kind, in one phrase."""
    counts: dict[str, int] = {}
    lengths: dict[str, set[int]] = {}
    others: dict[str, dict[str, None]] = {}
    for segment in segments:
        stages = [unit.stage for unit in profile.units[segment.start : segment.end]]
        if stage not in stages:
            continue
        word = word_of(segment)
        counts[word] = counts.get(word, 0) + stages.count(stage)
        if stages[0] == stages[-1]:
            lengths.setdefault(word, set()).add(len(stages))
        else:
            others.setdefault(word, {}).update(dict.fromkeys(other for other in stages if other != stage))
    phrases = []
    for word, count in counts.items():
        notes = []
        if word in lengths and word not in ("store", "keep"):
            shortest, longest = min(lengths[word]), max(lengths[word])
            notes.append(f"spacing {shortest}" if shortest == longest else f"spacing {shortest}-{longest}")
        if word in others:
            notes.append(f"with {', '.join(others[word])}")
        number = f"{count} " if len(counts) > 1 else ""
        note = f" ({'; '.join(notes)})" if notes else ""
        phrases.append(f"{number}{word}{note}")
    return ", ".join(phrases)


def word_of(segment: Segment) -> str:
    """The segment's treatment, as TREATMENTS names it."""
    return "nested" if segment.tier == "recompute" and segment.nested else segment.tier
