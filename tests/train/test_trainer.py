"""The training loop."""

from __future__ import annotations

import errno
import itertools
import math
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hiresvis.errors import Interrupted, RunFolderError, TrainingFailed
from hiresvis.run import directory
from hiresvis.run.events import Evaluated, Event, Notice, RunFinished, RunInterrupted, StepDone
from hiresvis.train.evaluate import Evaluation, evaluate
from hiresvis.train.optim import build_schedule
from hiresvis.train.progress import RunLimits
from hiresvis.train.snapshot import load_snapshot, read_weights_metadata, save_weights
from hiresvis.train.stop import StopRequest

SCRIPT = Path(__file__).with_name("small_run.py")


def _kinds(events: list[Event]) -> list[str]:
    return [kind for kind, _ in itertools.groupby(event.kind for event in events)]


def _everything(folder: Path) -> dict[str, object]:
    """All that a snapshot holds, but for the time that things took."""
    snapshot = load_snapshot(folder / "snapshot")
    assert snapshot is not None
    timeless = {key: value for key, value in snapshot.state["progress"].items() if "seconds" not in key}
    return {**snapshot.tensors, "progress": timeless, **{key: snapshot.state[key] for key in ("optimizer", "scaler", "rng")}}


def _assert_same(folder: Path, other: Path) -> None:
    expected, got = _everything(folder), _everything(other)
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        same = torch.equal(value, got[name]) if isinstance(value, torch.Tensor) else value == got[name]
        assert same, name


class _Child:
    """The small run of two epochs in its own interpreter, slow enough for signals to hit. (A fork of this one could not run backward.)"""

    def __init__(self, folder: Path, model: str) -> None:
        reading, writing = os.pipe()
        environ = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])}
        self.pid = os.posix_spawn(
            sys.executable,
            [sys.executable, str(SCRIPT), str(folder), model, "2", "--slow"],
            environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, writing, 1)],
        )
        os.close(writing)
        self.lines = os.fdopen(reading)

    def signal_at(self, where: str, signum: int) -> tuple[int, list[str]]:
        """Sends the signal when the line comes; returns the exit code (negative: died of a signal) and the lines after that."""
        with self.lines:
            for line in self.lines:
                if line.strip() == where:
                    os.kill(self.pid, signum)
                    break
            rest = self.lines.read().split("\n")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), rest


def _interrupted_after(trainer, num_steps: int) -> list[Event]:
    """Runs until the given number of steps is done, then asks for a stop."""
    events = []
    with pytest.raises(Interrupted):  # noqa: PT012 - the loop is the statement
        for event in trainer.fit():
            events.append(event)
            if sum(isinstance(e, StepDone) for e in events) == num_steps:
                trainer._stop.request(signal.SIGINT)
    return events


def test_events_come_in_order_with_the_right_numbers(small, tmp_path):
    """Each epoch: start, steps, evaluation, result, end, snapshot; then the end of the run. Images, shares and steps add up."""
    ticks = itertools.count()
    trainer = small.make_trainer(tmp_path, memory_bytes=lambda: 7, clock=lambda: float(next(ticks)), wall_clock=lambda: 5.0)
    events = list(trainer.fit())
    epoch = ["epoch_started", "step_done", "evaluation_step", "evaluated", "epoch_done", "snapshot_saved"]
    assert _kinds(events) == ["snapshot_saved", *epoch, *epoch, "run_finished"]
    steps = [event for event in events if isinstance(event, StepDone)]
    assert [(step.epoch, step.step, step.num_images) for step in steps] == [
        (1, 1, 8),
        (1, 2, 8),
        (1, 3, 6),
        (2, 1, 8),
        (2, 2, 8),
        (2, 3, 6),
    ]
    assert {step.memory_bytes for step in steps} == {7}
    assert {event.time for event in events} == {5.0}
    for step in steps:
        num_micro_batches = 2 if step.num_images == 6 else 3
        assert step.data_wait_ms == 1000 * num_micro_batches  # each look at the clock is a second
        assert step.step_ms > step.data_wait_ms
        assert step.grad_norm > 0
    assert [step.lr for step in steps] == [trainer._schedule.at(step) for step in range(6)]
    done = next(event for event in events if event.kind == "epoch_done")
    assert done.train_loss == pytest.approx(sum(step.loss * step.num_images for step in steps[:3]) / 22)
    assert done.images_per_second == pytest.approx(22 / (sum(step.step_ms for step in steps[:3]) / 1000))
    finished = events[-1]
    assert isinstance(finished, RunFinished)
    assert (finished.reason, finished.epochs, finished.measured_peak_bytes) == ("completed", 2, 7)


@pytest.mark.parametrize("model", ["test_vit", "test_resnet"])
@pytest.mark.parametrize("num_steps", [2, 3, 4], ids=["in mid-epoch", "before the evaluation", "in the second epoch"])
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(small, tmp_path, model, num_steps):
    """6 steps equal k steps, a stop, a new process's objects, and 6 - k steps: weights, statistics, optimizer, random state;
    with dropout, drop-path and uneven accumulation, and although the loaders draw from the global generator at each start."""
    list(small.make_trainer(tmp_path / "straight", model).fit())
    _interrupted_after(small.make_trainer(tmp_path / "resumed", model), num_steps)
    torch.manual_seed(99)
    again = small.make_trainer(tmp_path / "resumed", model)
    again.restore(load_snapshot(tmp_path / "resumed" / "snapshot"))
    torch.rand(5)  # other work before fit, such as a probe
    events = list(again.fit())
    assert sum(isinstance(event, StepDone) for event in events) == 6 - num_steps
    _assert_same(tmp_path / "straight", tmp_path / "resumed")
    for name in ("best", "last"):
        straight, resumed = (load_file(tmp_path / run / "weights" / f"{name}.safetensors") for run in ("straight", "resumed"))
        assert all(torch.equal(straight[key], resumed[key]) for key in straight)


@pytest.mark.parametrize("optimizer", ["sgd", "lion", "muon"])
def test_a_resumed_run_has_its_optimizers_state_bit_for_bit(small, tmp_path, optimizer):
    """Whatever an optimizer keeps comes back, flags and counts as well."""
    list(small.make_trainer(tmp_path / "straight", step=small.make_step(optimizer=optimizer)).fit())
    _interrupted_after(small.make_trainer(tmp_path / "resumed", step=small.make_step(optimizer=optimizer)), 4)
    again = small.make_trainer(tmp_path / "resumed", step=small.make_step(optimizer=optimizer))
    again.restore(load_snapshot(tmp_path / "resumed" / "snapshot"))
    list(again.fit())
    _assert_same(tmp_path / "straight", tmp_path / "resumed")


def test_the_plateau_schedule_lowers_the_rate_of_the_steps_that_follow(small, tmp_path):
    """Epochs that are never better: every second one lowers the rate to 0.3 of what it was, it is told, and a resumed run keeps it."""

    def run(epochs: int, snapshot=None):
        schedule = build_schedule(lr=1e-3, schedule="plateau", warmup=0, steps=21)
        trainer = small.make_trainer(tmp_path, limits=RunLimits(epochs=epochs), schedule=schedule)
        trainer._keeper.save_best = lambda progress, value, loss: None
        if snapshot is not None:
            trainer.restore(snapshot)
        trainer.progress.best_value = 2.0  # above any accuracy
        trainer.progress.lowest_loss = 0.0
        return list(trainer.fit())

    events = [*run(5), *run(7, load_snapshot(tmp_path / "snapshot"))]
    rates = {event.epoch: event.lr for event in events if isinstance(event, StepDone)}
    assert [round(rates[epoch] / 1e-3, 6) for epoch in range(1, 8)] == [1, 1, 0.3, 0.3, 0.09, 0.09, 0.027]
    told = [event.text for event in events if isinstance(event, Notice)]
    assert told[0] == "neither accuracy nor the loss is better for 2 epochs: 0.3 of the learning rate from here on"
    assert len(told) == 3


def test_run_extended_at_an_epoch_border_equals_the_longer_one(small, tmp_path):
    """One epoch, then one more from its snapshot, equals two."""
    list(small.make_trainer(tmp_path / "straight").fit())
    list(small.make_trainer(tmp_path / "resumed", limits=RunLimits(epochs=1)).fit())
    again = small.make_trainer(tmp_path / "resumed")
    again.restore(load_snapshot(tmp_path / "resumed" / "snapshot"))
    events = list(again.fit())
    assert events[0].epoch == 2
    _assert_same(tmp_path / "straight", tmp_path / "resumed")


def test_best_weights_are_those_of_the_best_epoch(small, tmp_path):
    """The file notes epoch, value and loss, its weights give the value again to the last digit; of equal values the lower loss is kept."""
    trainer = small.make_trainer(tmp_path, limits=RunLimits(epochs=4))
    results = [event for event in trainer.fit() if isinstance(event, Evaluated)]
    values = [event.value for event in results]
    order = [(event.value, -event.loss) for event in results]
    best_epoch = order.index(max(order)) + 1
    assert results[-1].best_epoch == best_epoch
    assert [event.is_best for event in results] == [all(one > before for before in order[:n]) for n, one in enumerate(order)]
    path = tmp_path / "weights" / "best.safetensors"
    assert read_weights_metadata(path) == {
        **{"epoch": str(best_epoch), "metric": "accuracy"},
        **{"value": repr(max(values)), "loss": repr(results[best_epoch - 1].loss)},
    }
    trainer._step.model.load_state_dict(load_file(path))
    again = evaluate(trainer._step, small.Images(9, batch=3, shuffle=False))
    assert again.metrics["accuracy"] == max(values)
    assert again.loss == results[best_epoch - 1].loss
    assert torch.equal(trainer.best_evaluation.scores, again.scores)


def test_new_best_weights_leave_nothing_that_was_told_of_the_former(small, tmp_path):
    """Predictions, reliability, statistics and pictures of an earlier end are gone with the weights that they are of, and only then."""
    (tmp_path / "worst").mkdir()
    told = [tmp_path / name for name in ("predictions.csv", "reliability.json", "statistics.json", "worst/index.json")]
    for path in (*told, tmp_path / "contract.json"):
        path.write_text("{}")
    seen = []
    for event in small.make_trainer(tmp_path, limits=RunLimits(epochs=2)).fit():
        if isinstance(event, Evaluated):
            seen.append((event.is_best, [path.exists() for path in told]))
            for path in told:
                path.parent.mkdir(exist_ok=True)
                path.write_text("{}")
    assert seen[0][0]
    assert all(there == [not is_best] * 4 for is_best, there in seen)
    assert (tmp_path / "contract.json").exists()


def test_where_what_was_told_cannot_be_removed_the_former_weights_stay(small, tmp_path, monkeypatch):
    """No file is taken for one of weights that it is not of; the error is told, and training goes on."""

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(directory.shutil, "rmtree", refuse)
    (tmp_path / "worst").mkdir()
    events = list(small.make_trainer(tmp_path, limits=RunLimits(epochs=1)).fit())
    assert not any(event.is_best for event in events if isinstance(event, Evaluated))
    assert any("worst: of earlier weights, and cannot be removed (permission denied)" in e.text for e in events if isinstance(e, Notice))
    assert not (tmp_path / "weights" / "best.safetensors").exists()


def test_run_without_progress_stops_early(small, tmp_path):
    """With nothing learned (a zero rate) the second and third epoch bring no better metric: patience 2 ends the run after them."""
    step = small.make_step("test_vit")
    trainer = small.make_trainer(tmp_path, step=step, limits=RunLimits(epochs=9, early_stop=2))
    trainer._schedule = small.build_schedule(lr=0.0, schedule="constant", warmup=0, steps=27)
    finished = list(trainer.fit())[-1]
    assert (finished.reason, finished.epochs, finished.best_epoch) == ("early_stop", 3, 1)


@pytest.mark.parametrize(
    ("metrics", "losses", "best", "epochs"),
    [
        ([0.5, 0.5, 0.5, 0.5], [0.9, 0.7, 0.8, 0.8], 2, 4),  # of equal ones the lower loss; two worse ones end the run
        ([0.8, 0.6, 0.6, 0.6], [0.9, 0.8, 0.7, 0.6], 1, 4),  # the loss falls: there is something to come
        ([0.8, 0.6, 0.7, 0.7], [0.5, 0.6, 0.6, 0.6], 1, 3),
        ([0.5, 0.5, 0.6, 0.6], [0.5, 0.5, 0.9, 0.9], 3, 4),
    ],
    ids=["ties", "loss falls", "neither", "metric rises"],
)
def test_best_is_by_the_metric_then_the_loss_and_patience_waits_for_both(small, tmp_path, monkeypatch, metrics, losses, best, epochs):
    """Few images of validation give equal metrics often, and a loss that still falls is no reason to stop."""
    none = torch.empty(0)
    results = iter(
        Evaluation("classify", loss, {"accuracy": value}, (), none, none, none, none) for value, loss in zip(metrics, losses, strict=True)
    )

    def evaluated(*_, **__):
        yield 1, 1
        return next(results)

    monkeypatch.setattr("hiresvis.train.trainer.evaluation_in_room", evaluated)
    trainer = small.make_trainer(tmp_path, limits=RunLimits(epochs=4, early_stop=2))
    finished = list(trainer.fit())[-1]
    assert (finished.best_epoch, finished.epochs) == (best, epochs)
    assert read_weights_metadata(tmp_path / "weights" / "best.safetensors")["loss"] == repr(losses[best - 1])


def test_time_limit_ends_the_run_after_a_step_and_keeps_its_place(small, tmp_path):
    """max_time in mid-epoch: the weights are evaluated and saved, the epoch is not called done, and resuming goes on exactly."""
    list(small.make_trainer(tmp_path / "straight").fit())
    now = [0.0]
    trainer = small.make_trainer(tmp_path / "limited", limits=RunLimits(epochs=2, max_time=10.0), clock=lambda: now[0])
    events = []
    for event in trainer.fit():
        events.append(event)
        now[0] += 6.0 * isinstance(event, StepDone)
    saved = "snapshot_saved"
    assert _kinds(events) == [saved, "epoch_started", "step_done", "evaluation_step", "evaluated", saved, "run_finished"]
    assert (events[-1].reason, events[-1].epochs, trainer.progress.step) == ("max_time", 0, 2)
    again = small.make_trainer(tmp_path / "limited")
    again.restore(load_snapshot(tmp_path / "limited" / "snapshot"))
    list(again.fit())
    straight, limited = _everything(tmp_path / "straight"), _everything(tmp_path / "limited")
    assert all(torch.equal(straight[key], limited[key]) for key in straight if key.startswith(("model", "optimizer/", "rng/")))


def test_snapshots_are_taken_at_the_interval(small, tmp_path):
    """With one second a step and save_every of two, a snapshot follows each second step and each epoch."""
    now = [0.0]
    trainer = small.make_trainer(tmp_path, limits=RunLimits(epochs=1, save_every=2.0), clock=lambda: now[0])
    saved = []
    for event in trainer.fit():
        now[0] += isinstance(event, StepDone)
        if event.kind == "snapshot_saved":
            saved.append((event.epoch, event.step))
    assert saved == [(1, 0), (1, 2), (2, 0)]


def test_stop_in_evaluation_saves_and_evaluates_again_on_resume(small, tmp_path):
    """A stop during evaluation ends after the present batch; the resumed run takes no step twice."""
    trainer = small.make_trainer(tmp_path, limits=RunLimits(epochs=1), resume_command="hiresvis fit r.yaml --resume")
    events = []
    with pytest.raises(Interrupted, match=r"SIGTERM in epoch 1, step 3 of 3; the state was saved; go on with: hiresvis fit") as raised:  # noqa: PT012
        for event in trainer.fit():
            events.append(event)
            if event.kind == "evaluation_step":
                trainer._stop.request(signal.SIGTERM)
    assert raised.value.exit_code == 143
    assert sum(event.kind == "evaluation_step" for event in events) == 1
    last = events[-1]
    assert isinstance(last, RunInterrupted)
    assert (last.signal, last.epoch, last.step, last.resume_command) == ("SIGTERM", 1, 3, "hiresvis fit r.yaml --resume")
    again = small.make_trainer(tmp_path, limits=RunLimits(epochs=1))
    again.restore(load_snapshot(tmp_path / "snapshot"))
    assert _kinds(list(again.fit())) == ["epoch_started", "evaluation_step", "evaluated", "epoch_done", "snapshot_saved", "run_finished"]


def test_handlers_are_as_before_when_the_run_is_over(small, tmp_path):
    """Signals meet the caller's handlers again after the end, and after a consumer that stops reading."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    list(small.make_trainer(tmp_path / "a", limits=RunLimits(epochs=1)).fit())
    events = small.make_trainer(tmp_path / "b").fit()
    next(events)
    events.close()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize(
    ("signum", "where", "code"),
    [
        (signal.SIGINT, "step_done 1 2", 130),
        (signal.SIGINT, "evaluation_step 1 1", 130),
        (signal.SIGTERM, "step_done 2 1", 143),
    ],
)
def test_signal_saves_exits_with_its_code_and_the_run_goes_on_exactly(small, tmp_path, signum, where, code):
    """A process that gets SIGINT or SIGTERM in training or evaluation ends with 130 or 143; resumed, it equals one left in peace."""
    folder = tmp_path / "stopped"
    exit_code, rest = _Child(folder, "test_resnet").signal_at(where, signum)
    assert exit_code == code
    assert rest[-2] == "interrupted"
    assert sum(line.startswith(("step_done", "evaluation_step")) for line in rest) <= 1
    resumed = small.make_trainer(folder, "test_resnet")
    resumed.restore(load_snapshot(folder / "snapshot"))
    list(resumed.fit())
    list(small.make_trainer(tmp_path / "straight", "test_resnet").fit())
    _assert_same(tmp_path / "straight", folder)


def test_killed_run_resumes_from_its_last_snapshot_and_ends_the_same(small, tmp_path):
    """kill -9 after the first epoch: the run resumes there and ends with the bits of an undisturbed one."""
    folder = tmp_path / "killed"
    assert _Child(folder, "test_vit").signal_at("step_done 2 1", signal.SIGKILL)[0] == -signal.SIGKILL
    resumed = small.make_trainer(folder)
    resumed.restore(load_snapshot(folder / "snapshot"))
    assert resumed.progress.epoch == 2
    list(resumed.fit())
    list(small.make_trainer(tmp_path / "straight").fit())
    _assert_same(tmp_path / "straight", folder)


def test_epoch_done_again_ties_with_itself_and_counts_as_it_did(small, tmp_path):
    """Killed between the best weights of epoch 1 and its snapshot: done again from mid-epoch, the epoch is the best one still."""
    limits = RunLimits(epochs=1, save_every=0.0)
    for event in small.make_trainer(tmp_path / "run", limits=limits).fit():
        if event.kind == "snapshot_saved" and event.step == 2:
            shutil.copytree(tmp_path / "run" / "snapshot", tmp_path / "earlier")
    again = small.make_trainer(tmp_path / "run", limits=limits)
    again.restore(load_snapshot(tmp_path / "earlier"))
    expected = load_snapshot(tmp_path / "run" / "snapshot").state["progress"]
    result = next(event for event in again.fit() if isinstance(event, Evaluated))
    assert result.is_best
    assert (again.progress.best_epoch, again.progress.epochs_since_best) == (1, expected["epochs_since_best"]) == (1, 0)


def test_best_weights_on_disk_are_the_truth_on_resume(small, tmp_path):
    """A newer best.safetensors than the snapshot knows sets the value to beat; a missing one is written again at the next evaluation."""
    list(small.make_trainer(tmp_path, limits=RunLimits(epochs=1)).fit())
    path, snapshot = tmp_path / "weights" / "best.safetensors", load_snapshot(tmp_path / "snapshot")
    save_weights(path, load_file(path), metadata={"epoch": "2", "metric": "accuracy", "value": "2.0"})
    trainer = small.make_trainer(tmp_path)
    trainer.restore(snapshot)
    assert (trainer.progress.best_value, trainer.progress.best_epoch) == (2.0, 2)
    assert list(trainer.fit())[-1].best_value == 2.0
    path.unlink()
    trainer = small.make_trainer(tmp_path)
    trainer.restore(snapshot)
    finished = list(trainer.fit())[-1]
    assert finished.best_epoch == 2
    assert read_weights_metadata(path)["value"] == repr(finished.best_value)


def test_non_finite_step_is_skipped_and_its_samples_named(small, tmp_path):
    """One bad image: its step is skipped with a notice that names it, the other steps train, and the run ends well."""
    images = small.Images(22, batch=8, micro_batch=3, dtype=torch.float32)
    images.images[5] = float("nan")
    trainer = small.make_trainer(tmp_path, train_loader=images)
    events = list(trainer.fit())
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert len(notices) == 2
    assert all(text.endswith("loss nan; the step was skipped. Samples: image5.png") for text in notices)
    skipped = [event for event in events if isinstance(event, StepDone) and not math.isfinite(event.loss)]
    assert [event.num_non_finite for event in skipped] == [1, 2]
    assert all(math.isfinite(event.train_loss) for event in events if event.kind == "epoch_done")
    assert all(torch.isfinite(value).all() for value in trainer._step.model.state_dict().values())
    assert events[-1].reason == "completed"


def test_five_non_finite_steps_in_a_row_end_the_run_with_advice(small, tmp_path):
    """Nothing finite: the fifth step ends it, with numbers and what to try."""
    images = small.Images(22, batch=8, micro_batch=3, dtype=torch.float32)
    images.images[:] = float("inf")
    trainer = small.make_trainer(tmp_path, train_loader=images)
    events = []
    with pytest.raises(TrainingFailed, match=r"5 optimizer steps in a row were not finite, the last in epoch 2, step 2.*Try optim.lr="):
        events.extend(iter(trainer.fit()))
    assert sum(isinstance(event, StepDone) for event in events) == 5


@pytest.fixture
def disk():
    """A switch: once called, no file may grow beyond 200 kB, so that writing weights or a snapshot fails half-way."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


def test_best_weights_that_could_not_be_written_are_not_called_best(small, tmp_path, disk):
    """With no room from the start, the run ends without best weights and says so: no value is claimed that no file holds."""
    disk()
    events = list(small.make_trainer(tmp_path, limits=RunLimits(epochs=2, early_stop=5)).fit())
    assert not any(event.is_best for event in events if isinstance(event, Evaluated))
    assert (events[-1].reason, events[-1].best_epoch, math.isnan(events[-1].best_value)) == ("completed", 0, True)
    assert (
        sum(event.level == "error" for event in events if isinstance(event, Notice)) == 7
    )  # the first snapshot; best, last, snapshot, twice


def test_failing_disk_is_told_and_training_goes_on(small, tmp_path, disk):
    """No file may grow beyond 200 kB from the second epoch on: notices say so, the run ends, and the first epoch's files are whole."""
    events = []
    for event in small.make_trainer(tmp_path).fit():
        events.append(event)
        if event.kind == "snapshot_saved" and event.epoch == 2:
            disk()
    notices = [event for event in events if isinstance(event, Notice)]
    assert any("the previous snapshot is kept" in notice.text and notice.level == "error" for notice in notices)
    assert events[-1].reason == "completed"
    assert load_snapshot(tmp_path / "snapshot").state["progress"]["epoch"] == 2
    assert read_weights_metadata(tmp_path / "weights" / "best.safetensors")["epoch"] == str(events[-1].best_epoch)
    assert read_weights_metadata(tmp_path / "weights" / "last.safetensors")["epoch"] == "1"


def test_skipped_files_are_told_once_and_an_empty_batch_is_no_step(small, tmp_path):
    """A loader that skips files: each has one notice with its reason; a batch with nothing left changes no weight."""
    images = small.Images(8, batch=8)
    images.skipped.append(("a.jpg", "truncated"))
    empty = small.Item(torch.empty(0, 64, 64, 3), torch.empty(0, dtype=torch.int64), (), 0, True)
    images._item = lambda part: empty
    trainer = small.make_trainer(tmp_path, train_loader=images)
    before = {name: value.clone() for name, value in trainer._step.model.state_dict().items()}
    events = list(trainer.fit())
    assert [event.text for event in events if isinstance(event, Notice)] == ["skipped a.jpg: truncated"]
    assert [(event.num_images, event.num_skipped) for event in events if isinstance(event, StepDone)] == [(0, 1), (0, 1)]
    assert all(torch.equal(value, before[name]) for name, value in trainer._step.model.state_dict().items())


def test_snapshot_of_another_run_is_refused(small, tmp_path):
    """Other steps an epoch, or another model: the message has the difference and the way on."""
    list(small.make_trainer(tmp_path, limits=RunLimits(epochs=1)).fit())
    snapshot = load_snapshot(tmp_path / "snapshot")
    with pytest.raises(RunFolderError, match="made with 3 optimizer steps an epoch, this run has 2"):
        small.make_trainer(tmp_path, train_loader=small.Images(16, batch=8)).restore(snapshot)
    with pytest.raises(RunFolderError, match="snapshot is of another model"):
        small.make_trainer(tmp_path, "test_resnet").restore(snapshot)


def test_shared_stop_request_is_honoured_before_the_first_step(small, tmp_path):
    """A stop asked for while probing ends the run before it trains, saved at its start."""
    stop = StopRequest()
    stop.request(signal.SIGINT)
    with pytest.raises(Interrupted):
        list(small.make_trainer(tmp_path, stop=stop).fit())
    assert load_snapshot(tmp_path / "snapshot").state["progress"]["step"] == 0
