"""The paths of a manifest stay in its folder, or below one that the recipe names."""

from __future__ import annotations

from pathlib import Path

import pytest

from hiresvis.data.sources import load_dataset, load_datasets
from hiresvis.errors import DataError


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A set in data/set with a link to pool/images; and, beside all that, private."""
    for name in (
        "data/set/a.png",
        "data/set/deep/b..png",
        "data/c.png",
        "pool/images/d.png",
        "pool/e.png",
        "private/f.png",
        "database/g.png",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "data/set/linked").symlink_to(tmp_path / "pool/images")
    (tmp_path / "alias").symlink_to(tmp_path / "data/set")
    return tmp_path


def load(home: Path, *paths: str, root: str | None = None, table: str = "data/set/t.csv") -> list[str]:
    """The files that rows with these paths lead to."""
    text = "".join(f"{path.format(home=home)},x\n" for path in paths)
    (home / table).write_text(f"path,label\n{text}")
    found = load_dataset(home / table, classes=("x",), root=None if root is None else home / root)
    return [str(sample.path.resolve().relative_to(home)) for sample in found.samples]


def test_paths_inside_pass_however_they_are_written(home: Path) -> None:
    """Relative, absolute, with needless dots, through links of the folder, and from an alias of the folder or to it."""
    inside = ["a.png", "./deep/b..png", "deep/../linked/d.png"]
    files = ["data/set/a.png", "data/set/deep/b..png", "pool/images/d.png"]
    assert load(home, *inside) == load(home, *inside, table="alias/t.csv") == files
    for written in ("{home}/data/set", "{home}/alias", "{home}/data/../alias"):
        assert load(home, f"{written}/a.png", f"{written}/linked/d.png") == [files[0], files[2]]
        assert load(home, f"{written}/a.png", table="alias/t.csv") == files[:1]


@pytest.mark.parametrize(
    ("written", "root"),
    [
        ("../c.png", "data"),
        ("{home}/private/f.png", "private"),
        ("linked/../e.png", "pool"),  # `..` leads on from where the link leads, not from where it is
        ("deep/../../../private/f.png", "private"),
        ("..\\c.png", "data"),
        ("{home}/data/set/../c.png", "data"),
        ("{home}/database/g.png", "database"),
    ],
)
def test_a_path_that_leaves_is_refused_unless_its_folder_is_allowed(home: Path, written: str, root: str) -> None:
    """With the folder that would hold it; a folder that begins with the same letters is another."""
    with pytest.raises(DataError) as caught:
        load(home, "a.png", written)
    (problem,) = caught.value.problems
    assert (problem.place, problem.key) == ("t.csv:3", "data.root")
    assert problem.message.startswith(f"1 path leaves {home}/data/set, the first: ")
    assert f"say so: data.root: {home}/{root} (" in problem.message
    assert len(load(home, "a.png", written, root=root)) == 2
    with pytest.raises(DataError, match=f"1 path leaves {home}/data/set and {home}/pool/images, "):
        load(home, "a.png", written, root="pool/images")


def test_rows_that_leave_are_one_problem_and_tell_nothing_of_the_files(home: Path) -> None:
    """Whether they are there is not said; other problems of the rows are, at once."""
    (home / "data/set/t.csv").write_text("path,label\na.png,x\n../../private/f.png,x\n/nowhere/h.png,\nmissing.png,y\n")
    with pytest.raises(DataError) as caught:
        load_datasets(home / "data/set/t.csv", 0.5)
    bounds, *others = caught.value.problems
    assert bounds.message.startswith("2 paths leave ")
    assert "data.root: / (" in bounds.message
    assert [problem.message.split(" ")[:3] for problem in others] == [["no", "label", "in"], ["no", "such", "file:"]]
    assert "nowhere" not in str(caught.value).replace(bounds.message, "")


@pytest.mark.parametrize("look", [True, False])
def test_paths_that_no_file_can_have_are_refused_as_others(home: Path, look: bool) -> None:
    """Of thousands of folders, of one name of thousands of letters, with NUL: refused by row, or passed where nothing is looked for."""
    deep, long = "x/" * 3000, "x" * 5000
    rows = [f"{start}{path}/a.png,x" for start in ("", "../", "/", "../set/") for path in (deep, long, "nul\0")]
    (home / "data/set/t.csv").write_text("\n".join(["path,label", *rows, "a.png,x", "linked/d.png,y"]))
    with pytest.raises(DataError) as caught:
        load_datasets(home / "data/set/t.csv", 0.5, look_for_files=look)
    assert [problem.key for problem in caught.value.problems].count("data.root") == 1
    assert "4 paths leave" in str(caught.value)
    assert str(caught.value).count("no such file") == (10 - 2 if look else 4)
