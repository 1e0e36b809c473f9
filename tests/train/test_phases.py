"""LP-FT: the head alone for the first epochs, then everything."""

from __future__ import annotations

import signal

import pytest
import timm
import torch
from torch import nn

from hiresvis.errors import Interrupted
from hiresvis.run.events import Notice, StepDone
from hiresvis.train.freezing import TrainMode, classifier_parameters, freeze, freeze_norm
from hiresvis.train.optim import build_schedule
from hiresvis.train.phases import HeadFirst, auto_head_epochs
from hiresvis.train.progress import Progress, RunLimits
from hiresvis.train.snapshot import load_snapshot

HEAD = {"test_vit": {"head.weight", "head.bias"}, "test_resnet": {"fc.weight", "fc.bias"}}


def make_trainer(small, folder, model="test_resnet", *, head_epochs=1, **kwargs):
    """Three steps an epoch, drop-path and dropout on; the second phase has a rate and a warm-up of its own."""
    step = small.make_step(model)
    head_first = HeadFirst(step.model, head_epochs, train_mode=TrainMode(step.model))
    trainer = small.make_trainer(folder, step=step, head_first=head_first, **kwargs)
    first = build_schedule(lr=5e-3, schedule="cosine", warmup=1, steps=3 * head_epochs)
    trainer._schedule = build_schedule(lr=1e-3, schedule="cosine", warmup=1, steps=6, before=first)
    return trainer


def run_until(trainer, num_steps):
    done = 0
    with pytest.raises(Interrupted):  # noqa: PT012 - the loop is the statement
        for event in trainer.fit():
            done += isinstance(event, StepDone)
            if done == num_steps and isinstance(event, StepDone):
                trainer._stop.request(signal.SIGINT)


def test_the_head_has_a_fifth_of_the_epochs():
    """At least one, and never all of two or more."""
    for epochs in range(2, 200):
        share, why = auto_head_epochs(epochs)
        assert max(1, epochs // 5 - 1) <= share <= max(1, epochs // 5 + 1)
        assert share < epochs
        assert str(epochs) in why


@pytest.mark.parametrize("model", HEAD)
def test_the_first_phase_moves_the_head_alone(small, tmp_path, model):
    """Its weights change, nothing else does, batch statistics included, and only it has optimizer state; then everything follows."""
    trainer = make_trainer(small, tmp_path, model)
    start = {name: value.clone() for name, value in trainer._step.model.state_dict().items()}
    run_until(trainer, 3)
    snapshot = load_snapshot(tmp_path / "snapshot")
    now = {name.removeprefix("model/"): value for name, value in snapshot.tensors.items() if name.startswith("model/")}
    assert {name for name in start if not torch.equal(start[name], now[name])} == HEAD[model]
    states = {name.split("/")[1] for name in snapshot.tensors if name.startswith("optimizer/")}
    assert len(states) == len(HEAD[model])

    again = make_trainer(small, tmp_path, model)
    again.restore(snapshot)
    list(again.fit())
    end, trained = again._step.model.state_dict(), dict(again._step.model.named_parameters())
    assert not [name for name in trained if torch.equal(start[name], end[name])]
    assert not [name for name in end if "running" in name and torch.equal(start[name], end[name])]
    assert len(again._step.optimizer.state) == len(trained)


@pytest.mark.parametrize("model", HEAD)
@pytest.mark.parametrize("num_steps", [2, 3, 5], ids=["in the first phase", "between the phases", "in the second"])
def test_a_run_resumed_in_either_phase_equals_the_uninterrupted_one(small, tmp_path, model, num_steps):
    """All that a snapshot holds is the same, bit for bit."""
    limits = RunLimits(epochs=3)
    list(make_trainer(small, tmp_path / "straight", model, limits=limits).fit())
    run_until(make_trainer(small, tmp_path / "resumed", model, limits=limits), num_steps)
    torch.manual_seed(99)
    again = make_trainer(small, tmp_path / "resumed", model, limits=limits)
    again.restore(load_snapshot(tmp_path / "resumed" / "snapshot"))
    list(again.fit())
    one, other = (load_snapshot(tmp_path / name / "snapshot") for name in ("straight", "resumed"))
    assert one.tensors.keys() == other.tensors.keys()
    assert not [name for name in one.tensors if not torch.equal(one.tensors[name], other.tensors[name])]
    assert one.state["optimizer"] == other.state["optimizer"]
    timeless = [{key: value for key, value in end.state["progress"].items() if "seconds" not in key} for end in (one, other)]
    assert timeless[0] == timeless[1]


def test_each_phase_is_announced_where_it_begins(small, tmp_path):
    """Once each, with the counts of what is trained."""
    texts = [
        event.text for event in make_trainer(small, tmp_path, head_epochs=2, limits=RunLimits(epochs=3)).fit() if isinstance(event, Notice)
    ]
    assert len(texts) == 2
    assert texts[0].startswith("epochs 1 to 2 train the head alone (")
    assert texts[0].endswith("parameters), then everything is trained")
    assert texts[1] == "epoch 3: everything is trained from here on"


def test_the_first_phase_neither_stops_early_nor_counts(small, tmp_path):
    """A head that learns nothing in four epochs does not end the run at patience 2; the second phase has its own patience."""
    trainer = make_trainer(small, tmp_path, "test_vit", head_epochs=4, limits=RunLimits(epochs=20, early_stop=2))
    nothing = build_schedule(lr=0.0, schedule="constant", warmup=0, steps=12)
    trainer._schedule = build_schedule(lr=0.0, schedule="constant", warmup=0, steps=48, before=nothing)
    finished = list(trainer.fit())[-1]
    assert (finished.reason, finished.epochs, finished.best_epoch) == ("early_stop", 6, 1)


def test_frozen_stages_stay_frozen_in_both_phases():
    """What `freeze` took out of training does not come back with the second phase; modes follow."""
    model = timm.create_model("test_resnet", num_classes=3, drop_path_rate=0.5)
    frozen = set(freeze(model, 2))
    both = TrainMode(model)
    phases = HeadFirst(model, 2, train_mode=both)
    everything = {name for name, _ in model.named_parameters()}
    for epoch, trained in (
        (1, set(classifier_parameters(model))),
        (2, HEAD["test_resnet"]),
        (3, everything - frozen),
        (1, HEAD["test_resnet"]),
    ):
        phases.train_mode(epoch)
        assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained
        assert model.layer4.training == (epoch == 3)
        assert not model.layer2.training
        assert model.fc.training


def test_frozen_statistics_of_a_head_stay_in_both_phases():
    """BatchNorm inside a classifier is not woken while the head alone is trained."""
    model = timm.create_model("levit_128s", num_classes=3)
    names = freeze_norm(model)
    head = [name for name in names if name.startswith("head")]
    phases = HeadFirst(model, 1, train_mode=TrainMode(model, frozen_norm=names), frozen_norm=names)
    for epoch in (1, 2):
        phases.train_mode(epoch)
        assert head
        assert not any(model.get_submodule(name).training for name in names)


def test_the_next_phase_has_its_own_rate_and_rollbacks():
    """What a rollback made of the head's rate is not for the rest of the run."""
    progress = Progress(metric="accuracy", num_steps=3, lr_scale=0.3, num_rollbacks=1, epochs_since_best=2)
    progress.next_phase()
    assert (progress.lr_scale, progress.num_rollbacks, progress.epochs_since_best) == (1.0, 0, 0)


def test_a_phase_begins_its_schedule_anew():
    """Each has its own warm-up, peak and end; steps count over the whole run."""
    first = build_schedule(lr=1.0, schedule="cosine", warmup="20%", steps=10)
    whole = build_schedule(lr=0.1, schedule="cosine", warmup="20%", steps=20, before=first)
    alone = build_schedule(lr=0.1, schedule="cosine", warmup="20%", steps=20)
    assert [whole.at(step) for step in range(10)] == [first.at(step) for step in range(10)]
    assert [whole.at(10 + step) for step in range(30)] == [alone.at(step) for step in range(30)]
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=9.0)
    assert whole.apply(optimizer, 14, 0.5) == optimizer.param_groups[0]["lr"] == alone.at(4) * 0.5
