"""Phases of image sizes: what is in place in which epoch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from hiresvis.train.sizes import SizePhase, Sizes


@dataclass(frozen=True)
class Plan:
    """As much of a plan as is looked at here."""

    px: int
    tight: bool = False
    micro_batch: int = 4
    recompute_fraction: float = 0.0
    recomputed: tuple[()] = ()

    @property
    def image_size(self) -> tuple[int, int]:
        return (self.px, self.px)


@dataclass
class Held:
    """Stands for both, the plan applied and the loader."""

    plan: Plan
    seen: list[Any] = field(default_factory=list)

    def change(self, plan: Plan, profile: Any) -> None:
        self.plan = plan

    def set_pipeline(self, pipeline: Any) -> None:
        self.seen.append(pipeline)


def sizes() -> tuple[Sizes, Held]:
    phases = [SizePhase(first, Plan(px), None, f"{px} px") for first, px in ((1, 32), (3, 48), (4, 64))]
    held = Held(phases[-1].plan)
    return Sizes(phases, held, held), held


def test_each_epoch_has_its_size_and_a_change_is_told_once():
    """Plan and pipeline change together, at the first epoch of a phase; an epoch in the middle is entered without a word."""
    under_way, held = sizes()
    told = [under_way.enter(epoch).partition(", micro")[0] for epoch in range(1, 7)]
    assert told == [
        "epoch 1: images of 32x32 px up to epoch 2",
        "",
        "epoch 3: images of 48x48 px up to epoch 3",
        "epoch 4: images of 64x64 px from here on",
        "",
        "",
    ]
    assert held.seen == ["32 px", "48 px", "64 px"]
    assert [under_way.begins(epoch) for epoch in range(1, 6)] == [False, False, True, True, False]
    assert under_way.last_epoch == 3


def test_going_back_finds_the_plan_as_it_was_left():
    """A plan that was tightened for want of memory is not loosened when a rollback returns to its size."""
    under_way, held = sizes()
    under_way.enter(2)
    held.plan = replace(held.plan, tight=True)
    under_way.enter(4)
    assert held.plan == Plan(64)
    assert under_way.enter(1)
    assert held.plan == Plan(32, tight=True)
