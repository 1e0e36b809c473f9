"""A folder of an export takes its name when it is whole, and takes nobody else's place."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hiresvis import export_folder
from hiresvis.errors import EnvironmentFailed, RunFolderError

OURS = ("contract.json", "model.onnx.data")


def fill(out: Path, text: str, *, force: bool = False) -> None:
    with export_folder.whole_folder(out, ours=OURS, force=force) as stage:
        assert stage.parent == out.parent
        (stage / "contract.json").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_a_folder_appears_with_its_parents_and_nothing_beside_it(tmp_path):
    """An empty folder that is there already is taken."""
    fill(tmp_path / "a" / "b", "1")
    assert names(tmp_path) == ["a", "a/b", "a/b/contract.json"]
    (tmp_path / "empty").mkdir()
    fill(tmp_path / "empty", "2")
    assert (tmp_path / "empty" / "contract.json").read_text() == "2"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (".", "here"),
        ("./", "here"),
        ("../here/", "here"),
        ("new/", "here/new"),
        ("../there/new/..", "there"),
        ("./new/../../there", "there"),
    ],
)
def test_a_folder_can_be_named_in_any_way(tmp_path, monkeypatch, given, meant):
    """The one that one stands in, which it stays; by dots, or with a slash at the end. Nothing is left beside it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with export_folder.whole_folder(Path(given), ours=OURS, force=False) as stage:
        (stage / "contract.json").write_text("1")
    assert (tmp_path / meant / "contract.json").read_text() == "1"
    assert Path("contract.json").exists() is (meant == "here")
    assert names(tmp_path) == sorted({"here", meant, f"{meant}/contract.json"})


@pytest.mark.parametrize("fails_at", [None, 0, 1, 2, 3])
def test_where_one_stands_a_former_export_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch, fails_at):
    """File by file, whichever move fails; then everything is as it was."""
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    for name in OURS:
        Path(name).write_text("old")
    replace, calls = os.replace, []

    def refuse_one(source, target):
        calls.append(target)
        if len(calls) - 1 == fails_at:
            raise OSError(errno.EACCES, "Permission denied")
        replace(source, target)

    def again() -> None:
        with export_folder.whole_folder(Path(), ours=OURS, force=True) as stage:
            for name in (OURS[0], "config.json"):
                (stage / name).write_text("new")

    monkeypatch.setattr(export_folder.os, "replace", refuse_one)
    if fails_at is None:
        again()
    else:
        with pytest.raises(EnvironmentFailed, match="permission denied"):
            again()
    found = {path.name: path.read_text() for path in Path().iterdir()}
    assert found == ({OURS[0]: "new", "config.json": "new"} if fails_at is None else dict.fromkeys(OURS, "old"))
    assert names(tmp_path) == sorted(["out", *(f"out/{name}" for name in found)])


def test_an_export_is_replaced_only_by_force(tmp_path):
    """As a whole: a file of the former one that the new one lacks is gone."""
    fill(tmp_path / "out", "1")
    (tmp_path / "out" / "model.onnx.data").write_text("old")
    with pytest.raises(RunFolderError, match=r"out holds an export already; .* --force to replace it"):
        fill(tmp_path / "out", "2")
    assert (tmp_path / "out" / "contract.json").read_text() == "1"
    fill(tmp_path / "out", "2", force=True)
    assert names(tmp_path) == ["out", "out/contract.json"]
    assert (tmp_path / "out" / "contract.json").read_text() == "2"


@pytest.mark.parametrize("force", [False, True])
def test_what_no_export_made_is_never_replaced(tmp_path, force):
    """A folder with anything else in it, or a file."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "contract.json").write_text("1")
    (tmp_path / "out" / "thesis.tex").write_text("years")
    with pytest.raises(RunFolderError, match=r"holds thesis\.tex, which no export made"):
        fill(tmp_path / "out", "2", force=force)
    with pytest.raises(RunFolderError, match=r"thesis\.tex is a file"):
        fill(tmp_path / "out" / "thesis.tex", "2", force=force)
    assert names(tmp_path) == ["out", "out/contract.json", "out/thesis.tex"]


@pytest.mark.parametrize("there", [False, True])
def test_work_that_fails_leaves_everything_as_it_was(tmp_path, there):
    """No folder, no parent of one, and the former export whole."""
    out = tmp_path / "a" / "b"
    if there:
        fill(out, "1")
    before = names(tmp_path)

    def fail() -> None:
        with export_folder.whole_folder(out, ours=OURS, force=True) as stage:
            (stage / "contract.json").write_text("2")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert names(tmp_path) == before
    assert not there or (out / "contract.json").read_text() == "1"


def test_a_move_that_fails_puts_the_former_export_back(tmp_path, monkeypatch):
    """The disk's error names the folder."""
    fill(tmp_path / "out", "1")
    replace, calls = export_folder.os.replace, []

    def refuse_second(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(errno.EACCES, "Permission denied")
        replace(source, target)

    monkeypatch.setattr(export_folder.os, "replace", refuse_second)
    with pytest.raises(EnvironmentFailed, match=r"out: not written \(permission denied\)"):
        fill(tmp_path / "out", "2", force=True)
    assert names(tmp_path) == ["out", "out/contract.json"]
    assert (tmp_path / "out" / "contract.json").read_text() == "1"


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    """With the way on."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(EnvironmentFailed, match=r"file/out: not written .* give another folder to --out"):
        fill(tmp_path / "file" / "out", "1")
