"""Stopping and going on: signals at every stage, resuming to the same bits, and what resuming refuses."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys

import pytest
import torch
from safetensors.torch import load_file

from hiresvis.data.augment import usable_library
from hiresvis.errors import Interrupted
from hiresvis.fit import fit
from hiresvis.recipe import load_recipe

# Ten steps an epoch, so that a signal sent at one of them arrives in the middle.
MODEL = ("model.drop_path=0.2", "train.eval_batch=4")
SETTING = (*MODEL, "data.test=null", "train.batch=2", "train.epochs=2")
ONE_EPOCH = (*SETTING[:-1], "train.epochs=1")
TIMES = ("seconds", "images_per_second")


@pytest.fixture(scope="module")
def many(tmp_path_factory, draw):
    """Twenty training images."""
    return draw(tmp_path_factory.mktemp("many"), {"train": {"blue": 10, "red": 10}, "val": {"blue": 6, "red": 6}})


def loaded(work, *overrides: str, name: str = "recipe"):
    return load_recipe(work.recipe, [*overrides, f"log.dir={work.folder / 'runs' / name}"])


def stop_at(recipe, kind: str, signum: signal.Signals = signal.SIGINT, *, resume: bool = False, **values: object) -> Interrupted:
    """Runs fit here and sends this process the signal at an event; returns how it ended."""
    sent = []

    def run() -> None:
        for event in fit(recipe, resume=resume):
            if not sent and event.kind == kind and all(getattr(event, key) == value for key, value in values.items()):
                sent.append(event)
                os.kill(os.getpid(), signum)

    with pytest.raises(Interrupted) as stopped:
        run()
    assert sent
    return stopped.value


def outcome(work, name: str) -> tuple[object, ...]:
    """Everything of a finished run that does not say how long it took."""
    losses = [row["loss"] for row in work.events("step_done", name)]
    scores = [(row["epoch"], row["split"], row["loss"], row["metrics"]) for row in work.events("evaluated", name)]
    head, *rows = work.path("metrics.csv", name).read_text().splitlines()
    timed = [head.split(",").index(key) for key in TIMES]
    table = [[cell for place, cell in enumerate(row.split(",")) if place not in timed] for row in rows]
    return losses, scores, table, work.path("predictions.csv", name).read_text()


def assert_same_end(work, first: str, second: str) -> None:
    for file in ("best", "last"):
        one, other = (load_file(work.path(f"weights/{file}.safetensors", name)) for name in (first, second))
        assert not [name for name in one if not torch.equal(one[name], other[name])]
    assert outcome(work, first) == outcome(work, second)


def test_ctrl_c_in_an_epoch_ends_with_130_and_resumes_to_the_same_bits(open_workshop, many, start, through):
    """As a terminal sends it, to the loader's workers too: the step is finished and saved, and the rest gives the uninterrupted run."""
    work = open_workshop(many)
    folder = work.folder / "runs" / "stopped"
    process = start("fit", work.recipe, *SETTING, "data.workers=2", f"log.dir={folder}")
    process.wait_for("step_done", epoch=2, step=2)
    process.send(signal.SIGINT, to_all=True)
    done = process.finish()
    assert done.code == 130, done.err
    assert done.out == ""
    assert "Traceback" not in done.err
    (stopped,) = work.events("run_interrupted", "stopped")
    assert (stopped["signal"], stopped["epoch"]) == ("SIGINT", 2)
    assert 2 <= stopped["step"] < 10
    assert f"epoch 2, step {stopped['step']} of 10; the state was saved; go on with: hiresvis fit" in done.err
    assert not work.path("report.html", "stopped").exists()
    resumed = work.fit(*SETTING, "--resume", name="stopped")
    assert "resumed" in resumed.err.lower()
    shutil.copytree(through, work.path("", "through"))
    assert_same_end(work, "stopped", "through")
    assert [row["resumed_from_epoch"] for row in work.events("run_started", "stopped")] == [None, 1]


def test_the_resume_command_that_is_told_works(open_workshop, many):
    """The line can be pasted as it is, also where a path or an override holds a space."""
    work = open_workshop(many, name="a folder")
    stopped = stop_at(loaded(work, *ONE_EPOCH), "step_done", step=3)
    assert stopped.exit_code == 130
    command = shlex.split(str(stopped).partition("go on with: ")[2])
    assert command[:2] == ["hiresvis", "fit"]
    done = work(*command[1:])
    assert done.code == 0, done.err
    assert len(work.events("step_done")) == 10


@pytest.mark.parametrize("kind", ["evaluation_step", "epoch_done"])
def test_sigterm_between_steps_ends_with_143_and_resumes_to_the_same_bits(open_workshop, many, kind, through):
    """In evaluation and at the end of an epoch."""
    work = open_workshop(many)
    stopped = stop_at(loaded(work, *SETTING), kind, signal.SIGTERM, epoch=1)
    assert stopped.exit_code == 143
    assert "stopped by SIGTERM" in str(stopped)
    for _ in fit(loaded(work, *SETTING), resume=True):
        pass
    shutil.copytree(through, work.path("", "through"))
    assert_same_end(work, "recipe", "through")


@pytest.fixture(scope="module")
def through(tmp_path_factory, many, make_workshop):
    """An uninterrupted run to compare with."""
    work = make_workshop(tmp_path_factory.mktemp("through"), many)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    work.fit(*SETTING, name="through")
    torch.set_num_threads(threads)
    return work.path("", "through")


def test_ctrl_c_while_testing_at_the_end_is_heard(open_workshop, many):
    """The last pass over the test images stops as well; resuming does only what is left."""
    work = open_workshop(many)
    setting = (*MODEL, f"data.test={many}/val", "train.batch=2", "train.epochs=1")
    stopped = stop_at(loaded(work, *setting), "epoch_done", epoch=1)
    assert stopped.exit_code == 130
    (told,) = work.events("run_interrupted")
    assert (told["epoch"], told["step"]) == (1, 10)
    for _ in fit(loaded(work, *setting), resume=True):
        pass
    assert len(work.events("step_done")) == 10
    assert work.path("predictions.csv").is_file()


def test_a_stop_after_a_run_that_ended_early_names_its_last_step(open_workshop, many):
    """Not the recipe's last epoch, which was never reached."""
    work = open_workshop(many)
    stop_at(loaded(work, *MODEL, f"data.test={many}/val", "train.batch=2", "train.epochs=7", "train.max_time=0.001s"), "evaluated")
    (told,) = work.events("run_interrupted")
    assert (told["epoch"], told["step"]) == (1, 1)


def test_a_stop_while_the_batch_is_sought_leaves_nothing_behind(open_workshop, many):
    """Nothing was trained, so no run folder stands in the way of the next start."""
    work = open_workshop(many)
    stopped = stop_at(loaded(work, *SETTING), "ladder_row")
    assert stopped.exit_code == 130
    assert "nothing was trained" in str(stopped)
    assert not work.path("").exists()


def test_sigterm_to_a_probing_process_ends_with_143(open_workshop, many, start):
    """The whole command, from outside."""
    work = open_workshop(many)
    folder = work.folder / "runs" / "probing"
    process = start("fit", work.recipe, *SETTING, f"log.dir={folder}")
    process.wait_for("ladder_row")
    process.send(signal.SIGTERM)
    done = process.finish()
    assert (done.code, done.out) == (143, "")
    assert "stopped while looking for the batch; nothing was trained" in done.err
    assert not folder.exists()


def test_resume_keeps_the_stored_plan(open_workshop, many):
    """Micro-batch and budget are the run's own, whatever the recipe names now; that is said, and the folder goes on telling the truth."""
    work = open_workshop(many)
    setting = (*MODEL, "data.test=null", "train.epochs=1", "train.batch=4")
    stop_at(loaded(work, *setting, "memory.micro_batch=2"), "step_done", step=2)
    before = work.read("plan.json")
    said = [
        event.text
        for event in fit(loaded(work, *setting, "memory.budget=3GiB", "memory.micro_batch=3"), resume=True)
        if event.kind == "notice" and "without effect" in event.text
    ]
    assert said == [
        "memory.budget: 4GiB -> 3GiB: without effect, the run keeps its own plan",
        "memory.micro_batch: 2 -> 3: without effect, the run keeps its own plan",
    ]
    assert work.read("plan.json") == before
    text = work.path("recipe.resolved.yaml").read_text()
    assert "  budget: 4GiB  # auto: as the run was begun\n  micro_batch: 2  # auto: as the run was begun\n" in text
    assert {row["num_images"] for row in work.events("step_done")} == {4}
    assert [row["num_steps"] for row in work.events("step_done")] == [5] * 5


def test_resume_tells_what_was_changed_and_writes_it_down(open_workshop, many):
    """Epochs, learning rate and patience may change: one notice a key, and recipe.resolved.yaml describes the run as it goes on."""
    work = open_workshop(many)
    setting = (*MODEL, "data.test=null", "train.batch=4")
    stop_at(loaded(work, *setting, "train.epochs=1"), "step_done", step=2)
    first = work.path("recipe.resolved.yaml").read_text()
    changed = ("train.epochs=2", "optim.lr=0.002", "train.early_stop=null", "data.workers=1")
    done = work.fit(*setting, *changed, "--resume")
    said = re.findall(r"^info: (\S+): (.*), changed since the run began$", done.err, flags=re.MULTILINE)
    assert dict(said) == {
        "data.workers": "0 -> 1",
        "optim.lr": f"{re.search('lr: (.*?)  # auto', first)[1]} -> 0.002",
        "train.epochs": "1 -> 2",
        "train.early_stop.patience": "5 -> null",
    }
    resolved = load_recipe(work.path("recipe.resolved.yaml"))
    assert (resolved.recipe.train.epochs, resolved.recipe.optim.lr, resolved.recipe.train.early_stop) == (2, 0.002, None)
    assert "  channels: 3  # auto: colour images\n" in resolved.text
    again = work.fit(*setting, *changed, "--resume")
    assert "changed since" not in again.err
    assert work.path("recipe.resolved.yaml").read_text() == resolved.text
    assert len(work.events("step_done")) == 10


def test_resume_refuses_what_a_run_cannot_change(open_workshop, many):
    """Each key with its place, both values and the mend, all at once; the folder stays as it is."""
    work = open_workshop(many)
    setting = (*MODEL, "data.test=null", "train.epochs=1")
    stop_at(loaded(work, *setting, "train.batch=4"), "step_done", step=2)
    listing = sorted((path, path.stat().st_mtime_ns) for path in work.path("").rglob("*"))
    wrong = ("train.batch=2", "optim.name=sgd", "train.seed=3", "data.augment=none", "optim.weight_decay=0.1")
    done = work.fit(*setting, *wrong, "--resume", ok=False)
    assert done.code == 6
    assert done.err.startswith(f"{work.path('')}: a run cannot change this on its way; or begin another: log.dir=NEW_FOLDER\n")
    lines = done.err.splitlines()[1:]
    assert [line.split("  ")[1] for line in lines] == [
        "data.augment", "optim.name", "optim.weight_decay", "train.batch", "train.seed"
    ]  # fmt: skip
    assert lines[3] == ("override 6 (train.batch=2)  train.batch  the run was begun with 4, and this is 2; set it back: train.batch=4")
    assert sorted((path, path.stat().st_mtime_ns) for path in work.path("").rglob("*")) == listing
    work.fit(*setting, "train.batch=4", "--resume")


def test_resume_with_other_images_of_the_same_classes_is_refused(open_workshop, draw, tmp_path):
    """As many files with other names, which no number of steps would show; moved as a whole they are the same set."""
    data = draw(tmp_path / "data", {"train": {"blue": 4, "red": 4}, "val": {"blue": 2, "red": 2}})
    work = open_workshop(data)
    setting = ("data.test=null", "train.batch=2", "train.epochs=1")
    stop_at(loaded(work, *setting), "step_done", step=2)
    one = data / "train" / "red" / "000.png"
    one.rename(one.with_name("other.png"))
    done = work.fit(*setting, "--resume", ok=False)
    assert done.code == 6
    said = "data.train: 8 files when the run was begun, as many, with other names or classes: 1 new (red/other.png), 1 gone (red/000.png)."
    assert said in done.err
    one.with_name("other.png").rename(one)
    moved = data.rename(tmp_path / "elsewhere")
    done = work.fit(*setting, f"data.train={moved}/train", f"data.val={moved}/val", "--resume")
    assert f"info: data.train: {data}/train -> {moved}/train, changed since the run began" in done.err
    assert len(work.events("step_done")) == 4


def test_resume_with_other_classes_is_refused_with_the_difference(open_workshop, draw, tmp_path):
    """Exit 6, naming what is missing and what is new; the run folder stays as it is."""
    data = draw(tmp_path / "data", {"train": {"blue": 4, "red": 4}, "val": {"blue": 2, "red": 2}})
    work = open_workshop(data)
    setting = ("data.test=null", "train.batch=2", "train.epochs=1")
    stop_at(loaded(work, *setting), "step_done", step=2)
    listing = sorted((path, path.stat().st_mtime_ns) for path in work.path("").rglob("*"))
    for split in ("train", "val"):
        (data / split / "red").rename(data / split / "green")
    done = work.fit(*setting, "--resume", ok=False)
    assert done.code == 6
    assert "the run knows the classes blue, red, and the data now has blue, green (missing: red; new: green)" in done.err
    assert sorted((path, path.stat().st_mtime_ns) for path in work.path("").rglob("*")) == listing


def test_resume_by_another_library_of_augmentation_is_refused(open_workshop, many, monkeypatch):
    """The same seeds would give other images: exit 6 with both libraries and the reason. A run begun without albumentations goes on."""
    work = open_workshop(many)
    setting = (*MODEL, "data.test=null", "train.epochs=1", "train.batch=4", "data.augment=standard")
    stop_at(loaded(work, *setting), "step_done", step=2)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "albumentations", None)
        patch.delitem(sys.modules, "hiresvis.data.albumentations_steps", raising=False)
        usable_library.cache_clear()
        done = work.fit(*setting, "--resume", ok=False)
        assert done.code == 6
        assert re.search(
            r"augmented by albumentations 2\S+ when .* by torchvision \S+ now, since albumentations cannot be imported", done.err
        )
        begun = open_workshop(many, name="without")
        stop_at(loaded(begun, *setting), "step_done", step=2)
        assert "augmentation by torchvision" in begun.fit(*setting, "--resume").err
    usable_library.cache_clear()
    assert begun.read("plan.json")["augmented_by"].startswith("torchvision ")
    work.fit(*setting, "--resume")
    assert work.read("plan.json")["augmented_by"].startswith("albumentations ")


def test_resume_of_a_finished_run_changes_no_weights(trained, make_workshop, tmp_path):
    """There is nothing left to do, and the end is told again."""
    work = make_workshop(tmp_path / "again", trained.data)
    shutil.copytree(trained.path(""), work.path(""))
    before = {path.name: path.read_bytes() for path in work.path("weights").iterdir()}
    done = work.fit(*trained.overrides, "--resume")
    assert {path.name: path.read_bytes() for path in work.path("weights").iterdir()} == before
    assert work.path("predictions.csv").read_text() == trained.path("predictions.csv").read_text()
    assert len(work.events("run_finished")) == 2
    assert re.search(r"best +accuracy", done.err)


def test_resume_of_nothing_says_so(workshop):
    """No run folder: exit 6, with its path."""
    done = workshop.fit("--resume", ok=False)
    assert done.code == 6
    assert str(workshop.path("")) in done.err
    assert not workshop.path("").exists()


def test_resume_where_the_snapshot_is_gone_keeps_what_was_trained(open_workshop, draw, tmp_path):
    """Weights show that epochs were trained: nothing begins again over them; the message names the two ways on."""
    data = draw(tmp_path / "data", {"train": {"blue": 4, "red": 4}, "val": {"blue": 2, "red": 2}})
    work = open_workshop(data)
    setting = ("data.test=null", "train.batch=2", "train.epochs=2")
    stop_at(loaded(work, *setting), "step_done", epoch=2, step=2)
    shutil.rmtree(work.path("snapshot"))
    before = work.path("weights/best.safetensors").read_bytes()
    done = work.fit(*setting, "--resume", ok=False)
    assert done.code == 6
    assert "snapshot: gone, and weights show that epochs were trained. Put it back; or begin a new run" in done.err
    assert work.path("weights/best.safetensors").read_bytes() == before
