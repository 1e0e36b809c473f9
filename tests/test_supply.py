"""Whether training waited for images is told once, with what to do about it."""

from __future__ import annotations

import pytest

from hiresvis import supply
from hiresvis.run.events import EpochDone, Event, Notice, StepDone


class Loader:
    notes: tuple[str, ...] = ()


def step(wait_ms: float, step_ms: float, epoch: int = 1) -> StepDone:
    same = {"epoch": epoch, "step": 1, "num_steps": 9, "loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "num_images": 1, "memory_bytes": 1}
    return StepDone(**same, step_ms=step_ms, data_wait_ms=wait_ms)


def done(epoch: int = 1) -> EpochDone:
    return EpochDone(epoch=epoch, train_loss=1.0, lr=0.1, seconds=1.0, images_per_second=1.0)


def notices(*events: Event, workers: int = 2, cached: bool = False) -> list[str]:
    return [event.text for event in supply.tell_supply(iter(events), Loader(), workers=workers, cached=cached) if isinstance(event, Notice)]


@pytest.mark.parametrize(
    ("wait_ms", "step_ms", "told"),
    [(500, 1000, True), (210, 1000, True), (190, 1000, False), (0, 1000, False), (90, 100, False)],
)
def test_waiting_above_a_fifth_of_the_first_epoch_is_told(wait_ms, step_ms, told):
    """Below it, or in all below a second, nothing is said; the step in which the workers start does not count."""
    found = notices(step(30_000, 31_000), *[step(wait_ms, step_ms)] * 6, done())
    assert len(found) == told
    if told:
        assert f"waited for images for {wait_ms / step_ms:.0%} of the first epoch" in found[0]


def test_waiting_is_told_once(monkeypatch):
    """Later epochs have nothing new to say, and read copies, if any."""
    monkeypatch.setattr(supply, "num_cores", lambda: 8)
    late = [step(900, 1000, epoch=2)] * 9
    (text,) = notices(*[step(900, 1000)] * 9, done(), *late, done(2))
    assert "raise data.workers above 2 (there are 8 cores), or set data.cache to a size" in text
    assert notices(*[step(0, 1000)] * 9, done(), *late, done(2)) == []


@pytest.mark.parametrize(("workers", "cached"), [(7, False), (2, True), (7, True)])
def test_what_is_done_already_is_not_advised(monkeypatch, workers, cached):
    """All cores at work, copies kept: the advice is what is left."""
    monkeypatch.setattr(supply, "num_cores", lambda: 8)
    (text,) = notices(*[step(900, 1000)] * 9, done(), workers=workers, cached=cached)
    assert ("data.workers" in text) == (workers < 7)
    assert ("data.cache" in text) != cached
    assert ("data.augment" in text) == cached


def test_all_events_pass_and_notes_come_before_the_next():
    """What a loader says is told once, as a warning."""
    loader = Loader()
    loader.notes = ("fewer workers",)
    events = [step(0, 1), done()]
    found = list(supply.tell_supply(iter(events), loader, loader, workers=0, cached=False))
    assert found == [Notice(level="warning", text="fewer workers"), *events]
