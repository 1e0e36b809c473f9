"""An events file read as it grows."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from hiresvis.errors import RunFolderError
from hiresvis.run import RunDirectory, read_events
from hiresvis.run.directory import parse_event
from hiresvis.run.events import TYPES, Notice, StepDone, is_of, to_json
from hiresvis.run.tail import Tail


def notice(number: int) -> Notice:
    return Notice(time=float(number), level="info", text=f"number {number} " + "x" * 300)


def line_of(number: int) -> str:
    return json.dumps(to_json(notice(number))) + "\n"


def test_news_are_what_came_since(tmp_path):
    """Each event comes once, in order, and a look without news is empty."""
    run = RunDirectory.create(tmp_path / "a", "")
    run.record(notice(1))
    tail = Tail(run.events)
    assert list(tail.news()) == [notice(1)]
    assert list(tail.news()) == []
    run.record(notice(2))
    run.record(notice(3))
    assert list(tail.news()) == [notice(2), notice(3)]


def test_a_file_written_byte_by_byte_gives_the_same_events(tmp_path):
    """A line is told when its end is there, also where a letter was cut in two."""
    path, whole = tmp_path / "events.jsonl", (line_of(1) + '{"event": "notice", "level": "info", "text": "grün 画像"}\n').encode()
    path.write_bytes(b"")
    tail, found = Tail(path), []
    with path.open("ab", buffering=0) as stream:
        for at in range(len(whole)):
            assert len(found) == whole[:at].count(b"\n")
            stream.write(whole[at : at + 1])
            found += tail.news()
    assert found == list(read_events(path))
    assert found[1].text == "grün 画像"


def test_a_torn_line_waits_and_is_passed_over_when_the_next_run_closes_it(tmp_path):
    """What a killed process left in the middle of a line is no event, and hides none."""
    run = RunDirectory.create(tmp_path / "a", "")
    run.record(notice(1))
    with run.events.open("a") as stream:
        stream.write(line_of(2)[:40])
    tail = Tail(run.events)
    assert list(tail.news()) == [notice(1)]
    run.record(notice(3))
    assert list(tail.news()) == [notice(3)]


@pytest.mark.parametrize("as_long", [False, True])
def test_another_run_in_its_place_is_noticed(tmp_path, as_long):
    """A new file is not read on from the old one's end, also where it is longer or has the old one's number on disk."""
    path = tmp_path / "events.jsonl"
    path.write_text(line_of(1) + line_of(2))
    tail = Tail(path)
    assert len(list(tail.news())) == 2
    path.write_text("".join(line_of(number) for number in range(5, 9 if as_long else 6)))
    assert list(tail.news()) == []
    assert tail.replaced


def test_a_copy_that_grows_by_copying_is_followed(tmp_path):
    """As rsync brings a run from elsewhere: each time another file with the same beginning."""
    run = RunDirectory.create(tmp_path / "a", "")
    run.record(notice(1))
    copy = tmp_path / "copy.jsonl"
    shutil.copy(run.events, copy)
    tail = Tail(copy)
    assert list(tail.news()) == [notice(1)]
    run.record(notice(2))
    shutil.copy(run.events, tmp_path / "next")
    os.replace(tmp_path / "next", copy)
    assert list(tail.news()) == [notice(2)]
    assert not tail.replaced


def test_what_is_no_events_file_is_refused(tmp_path):
    """A missing file, a folder, and a pipe that would block for ever."""
    for name, make in (("missing", None), ("folder", os.mkdir), ("pipe", os.mkfifo)):
        if make is not None:
            make(tmp_path / name)
        with pytest.raises(RunFolderError, match="give a folder that hiresvis fit made"):
            list(Tail(tmp_path / name).news())


GOOD = {"event": "step_done", "epoch": 1, "step": 1, "num_steps": 2, "loss": None, "lr": 1e-4, "grad_norm": 1.0, "num_images": 4,
        "step_ms": 1, "data_wait_ms": 0, "memory_bytes": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loss", "0.5"), ("loss", [1]), ("loss", True), ("epoch", None), ("epoch", "1"), ("epoch", 10**40), ("lr", {}), ("step", False),
        ("time", 1e300), ("color", 1), ("event", "step_undone"), ("event", None), ("event", []),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_no_event(key, value):
    """Views can count on what an event holds, whoever wrote the file."""
    assert isinstance(parse_event(json.dumps(GOOD)), StepDone)
    assert parse_event(json.dumps({**GOOD, key: value})) is None


@pytest.mark.parametrize("line", ["", "{", "[]", "7", "null", '"event"', "[" * 100_000, '{"event": "notice", "time": Infinity}', "\x00"])
def test_what_is_no_object_is_no_event(line):
    """Any line is read without an error."""
    assert parse_event(line) is None


def test_every_type_of_a_field_is_known_to_the_reader():
    """A new kind of field has to say which JSON values it takes."""
    for types in TYPES.values():
        for form in types.values():
            is_of(None, form)
