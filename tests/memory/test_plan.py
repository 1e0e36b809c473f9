"""Plans and costs as values: JSON, spacing, and how a plan is put in words."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import StepSetting, predict_peak
from hiresvis.memory.plan import CheckpointPlan, Segment, describe_stages, store_all, uniform
from hiresvis.memory.search import Limits, Planner


@pytest.fixture
def stages(hand):
    """Stem, glue that cannot be recomputed, two blocks and a transition of stage0, three blocks of stage1, head."""
    rows = [
        ("stem", "stem", True),
        ("glue.1", "stem", False),
        ("b0", "stage0", True),
        ("b1", "stage0", True),
        ("down", "stage1", True),
        ("b2", "stage1", True),
        ("b3", "stage1", True),
        ("head", "head", True),
    ]
    units = [
        hand.unit(index, name=name, modules=(name,), stage=stage, recomputable=can, opens_segment=can)
        for index, (name, stage, can) in enumerate(rows)
    ]
    return hand.profile(*units)


def _shape(segments: tuple[Segment, ...]) -> str:
    return " ".join(f"{s.start}" if s.tier == "store" else f"[{s.start}-{s.end - 1}]" for s in segments)


@pytest.mark.parametrize(
    ("spacing", "shape"),
    [
        (1, "[0-0] 1 [2-2] [3-3] [4-4] [5-5] [6-6] [7-7]"),
        (2, "[0-0] 1 [2-3] [4-5] [6-6] [7-7]"),
        (9, "[0-0] 1 [2-3] [4-6] [7-7]"),
        ({"stage1": 2}, "0 1 2 3 [4-5] [6-6] 7"),
        ({"stage0": 1, "stage1": None}, "0 1 [2-2] [3-3] 4 5 6 7"),
        ({}, "0 1 2 3 4 5 6 7"),
    ],
)
def test_uniform_segments_stay_within_a_stage(stages, spacing, shape: str) -> None:
    """Segments of at most `spacing` units, never across a border between stages, and nothing that cannot be recomputed."""
    assert _shape(uniform(stages, spacing)) == shape


def test_a_unit_that_cannot_open_a_segment_joins_the_one_before(stages) -> None:
    """Its input changes before backward, so it is stored unless a segment reaches it."""
    units = list(stages.units)
    units[5] = replace(units[5], opens_segment=False)
    changed = replace(stages, units=tuple(units))
    assert _shape(uniform(changed, 1)) == "[0-0] 1 [2-2] [3-3] [4-4] 5 [6-6] [7-7]"
    assert _shape(uniform(changed, 2)) == "[0-0] 1 [2-3] [4-5] [6-6] [7-7]"


@pytest.mark.parametrize(
    ("segments", "lines"),
    [
        ("0 1 2 3 4 5 6 7", ("all stored",)),
        ("[0-0] 1 [2-2] [3-3] [4-6] [7-7]", ("stem spacing 1", "stage0 spacing 1", "stage1 spacing 3", "head spacing 1")),
        ("0 1 [2-3] 4 [5-5] 6 7", ("stage0 spacing 2", "stage1 spacing 1 on 1 of 3", "rest stored")),
        ("0 1 2 3 [4-5] [6-6] 7", ("stage1 spacing 1-2", "rest stored")),
        ("0 1 [2-5] 6 7", ("stage0 to stage1 as one segment of 4", "rest stored")),
        ("0 1 [2-2] [3-4] 5 6 7", ("stage0 spacing 1 on 1 of 2", "stage0 to stage1 as one segment of 2", "rest stored")),
    ],
)
def test_stages_are_described_in_words(stages, segments: str, lines: tuple[str, ...]) -> None:
    """Spacing per stage with the share that is recomputed, segments across stages by themselves, and whether anything is stored."""
    parts = []
    for text in segments.split():
        first, _, last = text.strip("[]").partition("-")
        parts.append(Segment(int(first), int(last or first) + 1, "recompute" if text.startswith("[") else "store"))
    assert describe_stages(stages, tuple(parts)) == lines


def _plan(profile) -> CheckpointPlan:
    planner = Planner(profile, 10**6, StepSetting(accumulates=False, eval_batch=2, baseline_bytes=9), Limits(batch=6, spacing=2))
    return planner.plan(planner.choose(), "because")


def test_a_plan_survives_json(stages) -> None:
    """Written and read back it is equal, with tuples and segments again."""
    plan = _plan(stages)
    again = CheckpointPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.recomputed == plan.recomputed != ()
    assert hash(again.segments) == hash(plan.segments)


def test_a_profile_survives_json(stages) -> None:
    """Written and read back it is equal and predicts the same."""
    again = MemoryProfile.from_json(json.loads(json.dumps(stages.to_json())))
    assert again == stages
    setting = StepSetting(accumulates=True, eval_batch=3)
    assert predict_peak(again, store_all(again), 5, setting) == predict_peak(stages, store_all(stages), 5, setting)


@pytest.mark.parametrize("version", [None, 0, 99])
def test_other_format_versions_are_refused(stages, version) -> None:
    """Plan and profile of another version: a ValueError that says what to do."""
    with pytest.raises(ValueError, match="plan again"):
        CheckpointPlan.from_json({**_plan(stages).to_json(), "version": version})
    with pytest.raises(ValueError, match="trace it again"):
        MemoryProfile.from_json({**stages.to_json(), "version": version})


def test_a_plan_counts_forwards_per_step(stages) -> None:
    """Batch 6 in micro-batches of 4 takes two."""
    planner = Planner(stages, 10**6, StepSetting(accumulates=False, eval_batch=1), Limits(batch=6, micro_batch=4))
    assert planner.plan(planner.choose(), "").accumulation == 2
