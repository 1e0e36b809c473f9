"""What predict is asked about: every way to name images leads to the same files, each once, and what leads nowhere is said at once."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiresvis.data.inputs import Columns, Inputs, find_inputs, split_paths, waves
from hiresvis.data.regions import Region
from hiresvis.errors import DataError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images at three depths beside other things; the current folder."""
    for name in ("a.png", "b.JPG", "notes.txt", "photo.dat", ".hidden.png", "in/c.png", "in/deep/d.tif", "in/deep/e.csv", "in/x.jpg/f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(found: Inputs) -> list[str]:
    return [str(sample.path) for sample in found.samples]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a.png", "in"], ["a.png", "in/c.png", "in/deep/d.tif", "in/x.jpg"]),
        (["*"], ["a.png", "b.JPG", "in/c.png", "in/deep/d.tif", "in/x.jpg"]),
        (["**"], ["a.png", "b.JPG", "in/c.png", "in/deep/d.tif", "in/x.jpg"]),
        (["**/*.png"], ["a.png", "in/c.png"]),
        (["*.dat"], ["photo.dat"]),
        (["in/*", "a.png"], ["in/c.png", "in/deep/d.tif", "in/x.jpg", "a.png"]),
        (["in/c.png", "./in/../in/c.png", "*/c.png", "in"], ["in/c.png", "in/deep/d.tif", "in/x.jpg"]),
        (["in/x.jpg"], ["in/x.jpg"]),
        (["notes.txt"], ["notes.txt"]),
    ],
)
def test_every_way_of_naming_files_gives_them_in_order_and_once(tree, arguments, expected):
    """Folders and patterns sorted, hidden files left out, an extension that is asked for taken whatever it is; a folder called like an
    image stays, for its row to say so."""
    assert files(find_inputs(arguments)) == expected


def test_a_file_with_signs_of_a_pattern_in_its_name_is_itself(tree):
    """What exists is no pattern."""
    (tree / "a[1].png").touch()
    assert files(find_inputs(["a[1].png"])) == ["a[1].png"]


def test_what_is_passed_over_is_counted(tree):
    """By a pattern as by a folder; what came twice too."""
    found = find_inputs(["*", "a.png"])
    assert (dict(found.skipped), found.num_again) == ({".txt": 1, ".dat": 1, ".csv": 1}, 1)


def test_all_that_leads_nowhere_is_said_at_once(tree):
    """Files, patterns and tables in one message, and nothing is read before."""
    (tree / "t.csv").write_text("file\na.png\n")
    with pytest.raises(DataError) as caught:
        find_inputs(["a.png", "gone.png", "no*.png", "t.csv", "in/deep/*"])
    said = str(caught.value)
    for part in ("gone.png  ", "does not exist", "no*.png", "matches no file", "t.csv:1", "column 'path' is missing"):
        assert part in said, said


def test_a_folder_of_other_things_is_no_images(tree):
    """With what is there."""
    (tree / "other").mkdir()
    (tree / "other" / "a.gif").touch()
    with pytest.raises(DataError, match=r"no images in other \(files passed over, no image by name: 1 \.gif\)"):
        find_inputs(["other"])


def test_a_manifest_names_files_from_its_own_folder(tree):
    """In the order of its rows, each once; no label is needed, a missing file is its row's matter, and one outside is refused."""
    (tree / "in" / "t.tsv").write_text("who\tfile\nx\tdeep/d.tif\ny\tc.png\nz\tdeep/d.tif\nz\tgone.png\n")
    found = find_inputs(["in/t.tsv"], Columns("file"))
    assert files(found) == ["in/deep/d.tif", "in/c.png", "in/gone.png"]
    assert (found.num_again, {sample.label for sample in found.samples}) == (1, {None})
    (tree / "in" / "t.tsv").write_text("file\n../a.png\n")
    with pytest.raises(DataError, match="1 path leaves"):
        find_inputs(["in/t.tsv"], Columns("file"))
    assert [sample.path.resolve() for sample in find_inputs(["in/t.tsv"], Columns("file", root=tree)).samples] == [tree / "a.png"]
    (tree / "in" / "t.tsv").write_text("file\n")
    with pytest.raises(DataError, match="has no rows"):
        find_inputs(["in/t.tsv"], Columns("file"))


def test_a_manifest_of_regions_names_parts_of_files(tree):
    """A file comes once for each of its regions; a region that is none is a problem of the table."""
    table = tree / "t.csv"
    table.write_text("path,x,y,w,h\na.png,0,0,5,5\na.png,5,0,5,5\na.png,0,0,5,5\n")
    columns = Columns(region=("x", "y", "w", "h"))
    found = find_inputs(["t.csv"], columns)
    assert [sample.region for sample in found.samples] == [Region(0, 0, 5, 5), Region(5, 0, 5, 5)]
    assert found.num_again == 1
    table.write_text("path,x,y,w,h\na.png,0,0,0,5\n")
    with pytest.raises(DataError, match=r"t\.csv:2  0 in column 'w' is below 1"):
        find_inputs(["t.csv"], columns)


def test_parquet_is_a_manifest_too(tree):
    """By the same column."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"path": ["in/c.png", "a.png"]}), tree / "t.parquet")
    assert files(find_inputs(["t.parquet"])) == ["in/c.png", "a.png"]


NAMES = st.lists(st.binary(min_size=1, max_size=9).map(lambda name: name.replace(b"\0", b"/")), max_size=9)


@given(NAMES, st.booleans(), st.integers(1, 7))
def test_a_stream_gives_its_paths_wherever_its_blocks_end(names, closed, block):
    """NUL-separated, with line ends and any other byte in them; the last separator may be missing, of one path alone it tells the kind."""
    closed = closed or len(names) == 1
    assert list(split_paths(_Blocks(b"\0".join([*names, b""] if closed else names), block, first=100))) == [
        os.fsdecode(name) for name in names
    ]


@given(NAMES, st.integers(1, 7))
def test_lines_are_paths_whatever_system_wrote_them(names, block):
    """A carriage return before a line end is not part of the path, and empty lines are none."""
    names = [kept for name in names if (kept := name.replace(b"\n", b"").replace(b"\r", b""))]
    for end in (b"\n", b"\r\n", b"\n\n"):
        assert list(split_paths(_Blocks(end.join(names), block))) == [os.fsdecode(name) for name in names]


class _Blocks(io.BytesIO):
    """A stream that gives a few bytes at a time, as a pipe may; the first read is long enough to show the separator."""

    def __init__(self, data: bytes, block: int, first: int = 1) -> None:
        super().__init__(data)
        self._block, self._first = block, first

    def read1(self, size: int | None = -1) -> bytes:
        count, self._first = max(self._block, self._first), 0
        return self.read(count)


def test_paths_of_a_slow_source_come_one_by_one_and_of_a_fast_one_together():
    """A group holds what has come while the one before was worked on, so nothing waits for a group to fill."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as stream:
        found = waves(stream, 3)
        os.write(writing, b"a\n")
        assert next(found) == ["a"]
        os.write(writing, b"b\nc\nd\ne\nf")
        os.close(writing)
        rest = list(found)
    assert [path for group in rest for path in group] == ["b", "c", "d", "e", "f"]
    assert max(map(len, rest)) <= 3


def test_a_stream_that_fails_says_so_after_what_it_gave():
    """An error of the source is not taken for its end."""

    class Broken(io.BytesIO):
        def read1(self, size: int | None = -1) -> bytes:
            if not self.tell():
                return self.read(4)
            raise OSError("the pipe is gone")

    taken: list[str] = []
    with pytest.raises(OSError, match="the pipe is gone"):
        taken.extend(path for group in waves(Broken(b"a\nb\nc"), 10) for path in group)
    assert taken == ["a", "b"]
    assert all(thread.name != "paths" or not thread.is_alive() for thread in threading.enumerate())


def test_paths_that_a_program_gives_are_taken_as_they_are(tree):
    """No pattern, no table, and one that is not there is its row's matter; folders are walked."""
    found = Inputs()
    first = found.take(["*.png", "in/deep/e.csv", "in/deep", "x" * 5000])
    assert [str(sample.path) for sample in first] == ["*.png", "in/deep/e.csv", "in/deep/d.tif", "x" * 5000]
    assert found.take(["in/deep/d.tif", "a.png"]) == found.samples[-1:]
    assert found.num_again == 1


LISTING = """
import signal
import sys
import typer
from hiresvis.command import ending
from hiresvis.data.inputs import waves

signal.signal(signal.SIGINT, signal.default_int_handler)  # where the tests run in a shell's background it is ignored
try:
    with ending():
        for paths in waves(sys.stdin.buffer, 1):
            print(*paths, flush=True)
except typer.Exit as error:
    sys.exit(error.exit_code)
"""


@pytest.fixture
def listing():
    """A process that prints the paths of its standard input, which stays open, and ends as commands do."""
    with subprocess.Popen(
        [sys.executable, "-c", LISTING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b"a\nb\n")
        process.stdin.flush()
        yield process
        process.kill()


def test_a_signal_ends_what_waits_for_paths(listing):
    """The source has not ended, and the thread that reads it cannot be asked to: 130 all the same, and no abort."""
    assert [listing.stdout.readline() for _ in range(2)] == [b"a\n", b"b\n"]
    listing.send_signal(signal.SIGINT)
    assert (listing.wait(60), listing.stderr.read()) == (130, b"Interrupted.\n")


def test_whoever_wants_the_first_rows_alone_gets_them(listing):
    """As `head -1` does: the rows have nowhere to go while the source is still open, which is no fault."""
    assert listing.stdout.readline() == b"a\n"
    listing.stdout.close()
    listing.stdin.write(b"c\nd\n")
    listing.stdin.flush()
    assert (listing.wait(60), listing.stderr.read()) == (0, b"")
