"""Training that has gone wrong, and the way back."""

from __future__ import annotations

import math

import pytest
import torch

from hiresvis.errors import TrainingFailed
from hiresvis.run.events import Notice, StepDone
from hiresvis.train.divergence import LossTrend, why_diverged
from hiresvis.train.progress import RunLimits
from hiresvis.train.snapshot import load_snapshot


def _trend(losses) -> LossTrend:
    trend = LossTrend()
    for loss in losses:
        trend.add(loss)
    return trend


@pytest.mark.parametrize(
    ("losses", "runs_away"),
    [
        ([2.3] * 200, False),
        ([2.3 * 0.97**step for step in range(300)], False),
        ([2.3, *[0.01] * 200, *[0.2] * 200], False),  # wavers near zero: twenty times its lowest, far below its first
        ([0.7] * 50 + [1.4] * 300, False),  # twice as high, as a change of augmentation may make it
        ([2.3 * 0.98**step for step in range(200)] + [12.0] * 100, True),
        ([2.3] * 30 + [2.3 * 1.05**step for step in range(60)], True),
        ([0.7 * 3**step for step in range(8)], True),
        ([0.7, 2.0, 5.0, 6.0, 5.0, 4.0, 3.0], False),  # a new head, before it has settled
        ([1e-4, 0.4, 0.6, 1.5, 2.0, 1.0], False),  # weights that are trained already
        ([0.5, 60.0, 0.5, 0.5, 0.5, 0.5], False),  # one strange sample
    ],
    ids=["flat", "falls", "near zero", "doubled", "jumps", "climbs", "explodes at once", "rises first", "trained", "strange sample"],
)
def test_a_loss_runs_away_when_it_is_far_above_its_lowest_and_its_first(losses, runs_away):
    """Falling, flat and wavering losses go on; one that jumps or climbs to several times its level does not."""
    assert _trend(losses).runs_away is runs_away


def test_a_point_on_the_way_up_is_no_longer_sound_before_it_has_run_away():
    """A snapshot is not gone back to once half of the way is done."""
    trend, sound = _trend([2.0] * 100), []
    while not trend.runs_away:
        trend.add(12.0)
        sound.append(trend.is_sound)
    assert sound[0]
    assert not sound[-1]
    assert sound.index(False) < len(sound) - 5


def test_no_snapshot_of_the_first_steps_is_sound_once_the_loss_is_ten_times_what_it_was():
    """An explosion in the first epoch goes back to the weights that training began with."""
    trend, sound = LossTrend(), []
    for step in range(12):
        trend.add(0.7 * 2**step)
        sound.append(trend.is_sound)
    assert sound[5]
    assert not sound[-1]


def test_average_of_the_first_steps_is_theirs_alone():
    """No bias towards zero at the start."""
    assert _trend([3.0]).average == pytest.approx(3.0)
    assert _trend([1.0, 3.0]).average == pytest.approx(2.0, rel=0.02)


def test_reason_has_the_numbers_and_what_to_try():
    """Both kinds: the learning rate to try, and the precision where it is not full."""
    text = why_diverged(LossTrend(), 5, place="epoch 1, step 9", lr=0.02, precision="fp16")
    assert "5 optimizer steps in a row were not finite" in text
    assert "optim.lr=0.002, memory.precision=fp32 (it is fp16)" in text
    away = why_diverged(_trend([1.0] * 50 + [9.0] * 99), 0, place="epoch 2, step 7", lr=0.02, precision="fp32")
    assert away.startswith("The loss runs away:")
    assert "epoch 2, step 7" in away
    assert why_diverged(_trend([1.0] * 50), 4, place="", lr=0.02, precision="fp32") == ""


def _poison(trainer, *, from_step: int, until_lr_below: float):
    """From a step on images are not finite, while the learning rate is high: as an unstable network is."""
    step = trainer._step
    accumulate = step.accumulate

    def poisoned(images, targets, *, batch_images):
        progress = trainer.progress
        if progress.global_step >= from_step and progress.lr_scale >= until_lr_below:
            images = torch.full_like(images, math.inf, dtype=torch.float32)
        return accumulate(images, targets, batch_images=batch_images)

    step.accumulate = poisoned


def test_snapshots_of_bad_steps_do_not_take_the_place_of_the_sound_one(small, tmp_path):
    """Saved after every step, the five bad ones included: there still is a point to go back to."""
    trainer = small.make_trainer(tmp_path, limits=RunLimits(epochs=4, rollbacks=2, save_every=0.0))
    _poison(trainer, from_step=4, until_lr_below=0.2)
    events = list(trainer.fit())
    told = [event.text for event in events if isinstance(event, Notice) and "Going back" in event.text]
    assert [text[text.index("Going back") :][:29] for text in told] == ["Going back to epoch 2, step 1"] * 2
    assert events[-1].reason == "completed"


def test_run_that_diverges_goes_back_with_a_lower_rate_and_ends(small, tmp_path):
    """Five bad steps in a row: back to the last sound snapshot, three tenths of the rate from there on; that is saved, and told."""
    trainer = small.make_trainer(tmp_path, limits=RunLimits(epochs=4, rollbacks=2))
    _poison(trainer, from_step=4, until_lr_below=0.2)
    events = list(trainer.fit())
    steps = [event for event in events if isinstance(event, StepDone)]
    epochs = [1, 2, 3, 2, 3]  # steps are bad from the second of epoch 2 on; the fifth is in epoch 3
    assert [(event.epoch, event.step) for event in steps[:15]] == [(epoch, step) for epoch in epochs for step in (1, 2, 3)]
    told = [event.text for event in events if isinstance(event, Notice) and "Going back" in event.text]
    assert [text[text.index("Going back") :] for text in told] == [
        "Going back to epoch 2, step 0, with 0.3 of the learning rate (rollback 1 of 2 at most)",
        "Going back to epoch 2, step 0, with 0.09 of the learning rate (rollback 2 of 2 at most)",
    ]
    assert steps[-1].lr == pytest.approx(0.09 * trainer._schedule.at(11))
    assert events[-1].reason == "completed"
    assert load_snapshot(tmp_path / "snapshot").state["progress"]["lr_scale"] == pytest.approx(0.09)


def test_run_that_diverges_once_too_often_ends_with_advice(small, tmp_path):
    """After the last rollback the error comes; what is resumed is the sound point, with its rollbacks before it again."""
    trainer = small.make_trainer(tmp_path, limits=RunLimits(epochs=4, rollbacks=1))
    _poison(trainer, from_step=4, until_lr_below=0.0)
    with pytest.raises(TrainingFailed, match="5 optimizer steps in a row were not finite"):
        list(trainer.fit())
    state = load_snapshot(tmp_path / "snapshot").state
    progress = state["progress"]
    assert (progress["num_rollbacks"], progress["lr_scale"], state["sound"]) == (0, 1.0, True)
    assert (progress["epoch"], progress["step"]) == (2, 0)


def test_weights_whose_validation_is_not_finite_are_never_the_best(small, tmp_path):
    """Whatever the metric says of them (a NaN for every class is half right on two): back to the last sound snapshot instead."""
    trainer = small.make_trainer(tmp_path, limits=RunLimits(epochs=2, rollbacks=1))
    predict = trainer._step.predict
    trainer._step.predict = lambda images: predict(images) * (math.nan if trainer.progress.lr_scale == 1.0 else 1.0)
    events = list(trainer.fit())
    scored = [(event.epoch, event.is_best) for event in events if event.kind == "evaluated"]
    assert scored[:2] == [(1, False), (1, True)]
    (text,) = [event.text for event in events if isinstance(event, Notice) and "Going back" in event.text]
    assert text.startswith("The validation loss after epoch 1 is not finite: the weights are of no use. Try optim.lr=")
    assert events[-1].reason == "completed"
