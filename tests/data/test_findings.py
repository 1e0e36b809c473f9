"""What the check found is remembered, whoever else writes and however it ends."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
from pathlib import Path

import pytest

from hiresvis.data.findings import CACHE_NAME, IMAGES, Finding, FindingStore
from hiresvis.data.header import Header
from hiresvis.data.likeness import Look

HEADER = Header(640, 480, "RGB", 8, 6, "JPEG", 3)
SOUND = Finding("12 34 rule", HEADER, None, b"\x00\xff" * 8, Look(bytes(range(256)) + b"abc", 0.75))


def keep(folder: Path, findings: dict[str, Finding]) -> None:
    store = FindingStore(folder, IMAGES)
    for path, finding in findings.items():
        store.add(path, finding)
    store.close()


def known(folder: Path, keys: dict[str, str]) -> dict[str, Finding]:
    store = FindingStore(folder, IMAGES)
    found = store.read(keys)
    store.close()
    return found


def test_findings_come_back_as_they_were(tmp_path: Path) -> None:
    """Sound ones and damaged ones, names in no encoding, and messages that quote them."""
    odd = os.fsdecode(b"/data/\xff\xfe.png")
    findings = {
        "/data/a.png": SOUND,
        "/data/b 'quoted'.png": Finding("k", None, "is a broken link to \u00e9"),
        odd: Finding("k", HEADER, "x"),
    }
    keep(tmp_path, findings)
    assert known(tmp_path, {path: finding.key for path, finding in findings.items()}) == findings
    keep(tmp_path, {"/data/c.png": Finding("k", None, f"is a link to {odd}")})
    assert known(tmp_path, {"/data/c.png": "k"})["/data/c.png"].error == "is a link to /data/\\udcff\\udcfe.png"


def test_a_file_that_changed_is_unknown(tmp_path: Path) -> None:
    """Another size, time or question is another key; a new finding takes the place of the old one."""
    keep(tmp_path, {"/a.png": SOUND})
    assert known(tmp_path, {"/a.png": "12 35 rule", "/b.png": SOUND.key}) == {}
    keep(tmp_path, {"/a.png": Finding("12 35 rule", HEADER)})
    assert list(known(tmp_path, {"/a.png": "12 35 rule"})) == ["/a.png"]
    assert known(tmp_path, {"/a.png": SOUND.key}) == {}


def test_more_paths_than_one_question_takes_are_read(tmp_path: Path) -> None:
    """Databases bound the variables of a question."""
    findings = {f"/{number}.png": SOUND for number in range(2500)}
    keep(tmp_path, findings)
    assert len(known(tmp_path, dict.fromkeys(findings, SOUND.key))) == 2500


def write_some(folder: Path, name: str, number: int) -> None:
    for part in range(number):
        keep(folder, {f"/{name}{part}.png": SOUND})


def test_two_processes_lose_nothing_of_each_other(tmp_path: Path) -> None:
    """Both write at once, dozens of times, from a file that neither has made before."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=write_some, args=(tmp_path, name, 40)) for name in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    keys = {f"/{name}{part}.png": SOUND.key for name in "ab" for part in range(40)}
    assert known(tmp_path, keys).keys() == keys.keys()


@pytest.mark.parametrize("content", [b"no database", b"SQLite format 3\0" + bytes(5000), b""])
def test_damaged_database_is_begun_anew(tmp_path: Path, content: bytes) -> None:
    """Text, zeros behind the right beginning, nothing at all."""
    (tmp_path / CACHE_NAME).write_bytes(content)
    keep(tmp_path, {"/a.png": SOUND})
    assert known(tmp_path, {"/a.png": SOUND.key}) == {"/a.png": SOUND}


def test_database_damaged_in_the_middle_costs_time_alone(tmp_path: Path) -> None:
    """Pages overwritten behind a sound header: what can be read is, nothing is raised."""
    keep(tmp_path, {f"/{number}.png": SOUND for number in range(500)})
    path = tmp_path / CACHE_NAME
    content = bytearray(path.read_bytes())
    content[8192:-4096] = bytes(len(content) - 4096 - 8192)
    path.write_bytes(content)
    keys = {f"/{number}.png": SOUND.key for number in range(500)}
    assert set(known(tmp_path, keys).values()) <= {SOUND}
    keep(tmp_path, {"/new.png": SOUND})


def test_folder_that_cannot_be_used_is_done_without(tmp_path: Path) -> None:
    """A file where the folder should be, and a database of other tables."""
    (tmp_path / "file").touch()
    keep(tmp_path / "file" / "cache", {"/a.png": SOUND})
    assert known(tmp_path / "file" / "cache", {"/a.png": SOUND.key}) == {}
    with sqlite3.connect(tmp_path / CACHE_NAME) as database:
        database.execute("CREATE TABLE findings (something TEXT)")
    database.close()
    keep(tmp_path, {"/a.png": SOUND})
    assert known(tmp_path, {"/a.png": SOUND.key}) == {}


def test_without_a_folder_nothing_is_kept() -> None:
    """And nothing is asked."""
    store = FindingStore(None, IMAGES)
    store.add("/a.png", SOUND)
    store.write()
    assert store.read({"/a.png": SOUND.key}) == {}
    store.close()
