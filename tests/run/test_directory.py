"""The run folder: made once, written whole, read after any crash."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hiresvis.errors import EnvironmentFailed, RunFolderError
from hiresvis.run import RunDirectory, read_events
from hiresvis.run.events import EVENTS, from_json, to_json


def rows(run):
    with run.metrics.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_a_new_folder_holds_the_recipe_as_given(tmp_path):
    """The folder and its parents are made, and the recipe's text is kept byte for byte."""
    run = RunDirectory.create(tmp_path / "runs" / "a", "task: classify\r\n# ü\n")
    assert run.recipe.read_bytes() == "task: classify\r\n# ü\n".encode()
    assert [path.name for path in run.root.iterdir()] == ["recipe.yaml"]


def test_an_existing_run_is_refused_with_the_two_ways_on(tmp_path):
    """Neither way is taken by itself: going on and beginning another are both named."""
    run = RunDirectory.create(tmp_path / "a", "")
    with pytest.raises(RunFolderError, match=r"holds a run already; go on with it: --resume, or begin another: log\.dir=NEW_FOLDER"):
        RunDirectory.create(run.root, "")


def test_an_empty_folder_may_be_used_and_a_full_one_not(tmp_path):
    """An empty folder is as good as none; somebody's files are left alone."""
    (tmp_path / "empty").mkdir()
    RunDirectory.create(tmp_path / "empty", "")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "photo.jpg").touch()
    with pytest.raises(RunFolderError, match=r"full: not empty, and no run .*begin elsewhere: log\.dir=NEW_FOLDER"):
        RunDirectory.create(tmp_path / "full", "")


def test_a_file_in_the_way_is_named(tmp_path):
    """A file in the place of the folder, or of one of its parents, gives its path and the remedy."""
    (tmp_path / "runs").touch()
    with pytest.raises(RunFolderError, match=r"runs: a file is in the place"):
        RunDirectory.create(tmp_path / "runs", "")
    with pytest.raises(RunFolderError, match=r"runs/a: the run folder cannot be made \(.*\); choose another log\.dir"):
        RunDirectory.create(tmp_path / "runs" / "a", "")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a place that nobody can write")
def test_a_place_that_cannot_be_written_is_an_environment_error():
    """A read-only place is found before training, with exit code 6."""
    with pytest.raises(RunFolderError, match="cannot be made") as caught:
        RunDirectory.create(Path("/proc/self/run"), "")
    assert caught.value.exit_code == 6


def test_too_little_room_is_found_before_training(tmp_path):
    """What the run needs is held against what is free."""
    with pytest.raises(RunFolderError, match=r"1\.0 MiB free, and the run needs 3\.0 GiB; free some space, or choose another log\.dir"):
        RunDirectory.create(tmp_path / "a", "", need_bytes=3 * 2**30, free=lambda path: 2**20)


def test_a_refusal_leaves_the_disk_as_it_was(tmp_path):
    """Folders that were made for the run are gone again, and those that were there before are not."""

    def refused(path):
        with pytest.raises(RunFolderError, match="free some space"):
            RunDirectory.create(path, "", need_bytes=2, free=lambda path: 1)

    refused(tmp_path / "runs" / "deep" / "a")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    refused(tmp_path / "mine")
    refused(tmp_path / "mine" / "a")
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_only_a_run_folder_opens(tmp_path):
    """A missing folder and a folder of something else are told apart."""
    with pytest.raises(RunFolderError, match="no such folder"):
        RunDirectory.open(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match=r"it has no recipe\.yaml"):
        RunDirectory.open(tmp_path)


def test_every_event_can_be_read_back(tmp_path, started, notice, finished, epoch_events):
    """events.jsonl gives the very events that were recorded."""
    run = RunDirectory.create(tmp_path / "a", "")
    stream = [started, notice, *epoch_events(1), *epoch_events(2), finished]
    for event in stream:
        run.record(event)
    assert list(read_events(run.events)) == stream


def test_numbers_that_json_lacks_survive_as_nan(tmp_path, epoch_events):
    """A non-finite loss is written as null, so every reader takes the file, and comes back as nan."""
    run = RunDirectory.create(tmp_path / "a", "")
    run.record(epoch_events(1, loss=math.inf)[1])
    assert json.loads(run.events.read_text(), parse_constant=pytest.fail)["loss"] is None
    (event,) = read_events(run.events)
    assert math.isnan(event.loss)


def test_a_torn_last_line_is_passed_over_and_closed_on_resume(tmp_path, notice):
    """A line that a kill cut short is no event; what comes after it is."""
    run = RunDirectory.create(tmp_path / "a", "")
    run.record(notice)
    run.events.write_bytes(run.events.read_bytes() + b'{"event": "notice", "le')
    assert list(read_events(run.events)) == [notice]
    RunDirectory.open(run.root).record(notice)
    assert list(read_events(run.events)) == [notice, notice]


def test_reading_events_of_no_run_is_an_error(tmp_path):
    """A missing events file is told with its path."""
    with pytest.raises(RunFolderError, match=r"events\.jsonl: cannot be read"):
        list(read_events(tmp_path / "events.jsonl"))


def test_an_unknown_event_of_another_version_is_passed_over(tmp_path, notice):
    """Lines that this version cannot read do not hide the others."""
    run = RunDirectory.create(tmp_path / "a", "")
    run.events.write_text('{"event": "of_tomorrow"}\n[1]\n\n')
    run.record(notice)
    assert list(read_events(run.events)) == [notice]


def test_metrics_have_one_row_an_epoch(tmp_path, epoch_events):
    """Training loss, learning rate, times and every validation metric stand in one row."""
    run = RunDirectory.create(tmp_path / "a", "")
    for event in (*epoch_events(1), *epoch_events(2, loss=0.25)):
        run.record(event)
    first, second = rows(run)
    assert first == {
        "epoch": "1",
        "train_loss": "0.5",
        "lr": "0.0001",
        "seconds": "2.5",
        "images_per_second": "3.2",
        "val_loss": "0.6",
        "val_accuracy": "0.9",
        "val_macro_f1": "0.8",
    }
    assert (second["epoch"], second["train_loss"]) == ("2", "0.25")


def test_metrics_are_right_whichever_event_of_an_epoch_comes_first(tmp_path, epoch_events):
    """An evaluation told after the end of its epoch fills the same row."""
    run = RunDirectory.create(tmp_path / "a", "")
    *_, evaluated, done = epoch_events(1)
    run.record(done)
    assert rows(run)[0]["val_loss"] == ""
    run.record(evaluated)
    assert [row["val_loss"] for row in rows(run)] == ["0.6"]


def test_a_resumed_epoch_replaces_its_row(tmp_path, epoch_events):
    """After a crash the epoch trained again has one row, and earlier rows stay."""
    run = RunDirectory.create(tmp_path / "a", "")
    for event in (*epoch_events(1), *epoch_events(2)):
        run.record(event)
    again = RunDirectory.open(run.root)
    for event in epoch_events(2, loss=0.125):
        again.record(event)
    assert [(row["epoch"], row["train_loss"]) for row in rows(again)] == [("1", "0.5"), ("2", "0.125")]


def test_the_log_is_for_people(tmp_path, started, notice, finished, epoch_events):
    """Every line has its time; steps are left to events.jsonl."""
    run = RunDirectory.create(tmp_path / "a", "")
    for event in (started, notice, *epoch_events(1), finished):
        run.record(event)
    lines = run.log.read_text().splitlines()
    assert lines[0].startswith("1970-01-01T00:16:40Z  run boards: resnet18 at 1280x720 px, 80 training and 20 validation images")
    assert lines[1] == "1970-01-01T00:16:40Z  warning: skipped a.jpg: truncated"
    assert lines[-1].endswith("best accuracy 0.9000 at epoch 2; test accuracy 0.8800; peak 1.0 GiB predicted, 1.0 GiB measured")
    assert len(lines) == 6


def test_json_is_strict_and_comes_back(tmp_path):
    """write_json gives JSON that any reader takes."""
    run = RunDirectory.create(tmp_path / "a", "")
    run.write_json("plan.json", {"peak": float("nan"), "size": (720, 1280), "name": "ü", "path": tmp_path})
    assert json.loads(run.plan.read_text(), parse_constant=pytest.fail) == run.read_json("plan.json")
    assert run.read_json("plan.json") == {"peak": None, "size": [720, 1280], "name": "ü", "path": str(tmp_path)}


def test_a_file_that_is_not_there_yet_is_told(tmp_path):
    """A missing or torn JSON file is a run-folder error with its path."""
    run = RunDirectory.create(tmp_path / "a", "")
    with pytest.raises(RunFolderError, match=r"plan\.json: cannot be read"):
        run.read_json("plan.json")
    run.plan.write_text("{")
    with pytest.raises(RunFolderError, match=r"plan\.json: no whole JSON"):
        run.read_json("plan.json")


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path):
    """Where the new content cannot be put in place, the old one stays, and nothing lies about."""
    run = RunDirectory.create(tmp_path / "a", "")
    run.write_text("notes/a.txt", "old")
    with pytest.raises(EnvironmentFailed, match=r"notes: not written .*log\.dir"):
        run.write_text("notes", "a folder is in the way")
    assert run.path("notes/a.txt").read_text() == "old"
    assert not list(run.root.glob(".*"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_told_with_the_remedy(tmp_path, notice):
    """A write that finds no room ends in a message that says so."""
    run = RunDirectory.create(tmp_path / "a", "")
    run.events.symlink_to("/dev/full")
    with pytest.raises(EnvironmentFailed, match=r"events\.jsonl: not written \(no space left on device\); free some space"):
        run.record(notice)


def test_a_killed_writer_never_leaves_a_torn_file(tmp_path):
    """A process killed while it rewrites a file leaves one of the whole contents."""
    run = RunDirectory.create(tmp_path / "a", "")
    code = (
        "import sys; from pathlib import Path; from hiresvis.run import RunDirectory\n"
        "run = RunDirectory.open(Path(sys.argv[1]))\n"
        "for turn in range(10**9):\n"
        "    run.write_text('plan.json', str(turn % 10) * 200_000)\n"
        "    print(turn, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(run.root)], stdout=subprocess.PIPE)
    for _ in range(20):
        process.stdout.readline()
    process.kill()
    process.communicate()
    text = run.plan.read_text()
    assert len(text) == 200_000
    assert len(set(text)) == 1


def test_events_and_json_are_inverse(started, notice, finished, epoch_events):
    """to_json and from_json undo each other for every kind recorded here, and unknown keys are refused."""
    for event in (started, notice, finished, *epoch_events(1)):
        assert from_json(json.loads(json.dumps(to_json(event)))) == event
    assert len(EVENTS) == len({cls.kind for cls in EVENTS.values()})
    with pytest.raises(ValueError, match="unknown keys"):
        from_json({"event": "notice", "level": "info", "text": "", "color": 1})
