"""The check's findings as text: findings first, tables that line up, nothing wider than the terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest

from hiresvis.ui.check_text import check_lines
from hiresvis.ui.counter import counting
from hiresvis.ui.text import ASCII, UNICODE


def end(path: str, value: float, height: int = 100, width: int = 200) -> dict[str, Any]:
    return {"path": path, "row": path, "height": height, "width": width, "value": value}


def split(images: int, **classes: int) -> dict[str, Any]:
    extremes = {"smallest": end("/data/s.png", 20_000), "largest": end("/data/l.png", 40_000), "most_stretched": end("/data/w.png", 2.5)}
    return {
        "images": images, "unreadable": 0, "classes": classes, "balance": {"largest": "a", "smallest": "b", "ratio": 3.0}, "groups": {},
        "formats": {"PNG": images}, "modes": {"RGB": images}, "bits": {"8": images}, "channels": {"3": images}, "exif_rotated": 2,
        "height": [80, 80, 90], "width": [80, 80, 80], "blank": [], "skipped_extensions": {".txt": 1}, "ignored": ["x", "y", "z", "w"],
        "share_kept": [1.0, 1.0, 1.0], "shrink": [1.25, 1.5, 2], "extremes": extremes,
    }  # fmt: skip


def problem(message: str, place: str = "", key: str = "") -> dict[str, str]:
    return {"message": message, "place": place, "key": key}


FOUND = {
    "errors": [problem("is empty", "train.csv:7")],
    "warnings": [problem("many words " * 30, key="data.train")],
    "notes": [problem("a note")],
    "splits": {"train": split(40, a=30, b=10), "val": split(9, a=5, b=4)},
    "facts": {"augment": "light, by albumentations"},
}


def test_findings_come_first_and_tables_line_up() -> None:
    """Errors, warnings, notes; then columns by split; the count of findings last, in words."""
    lines = check_lines(FOUND, None, UNICODE)
    assert lines[0] == "error    train.csv:7  is empty"
    assert lines[1].startswith("warning  data.train  many words many words")
    assert lines[2:4] == ["note     a note", ""]
    header = lines[4]
    assert header.split() == ["train", "val"]
    for line in lines[5 : lines.index("", 4)]:
        assert line[header.index("train") - 1] == " "
        assert line[header.index("train")] != " "
    assert f"{'turned by EXIF':18}  2" in "\n".join(lines)
    assert "x, y, z and 1 more" in "\n".join(lines)
    assert "80 / 80 / 90" in "\n".join(lines)
    assert lines[-1] == "1 error, 1 warning, 1 note"


def test_extremes_are_those_of_all_splits_and_only_where_there_is_one() -> None:
    """An image that is not stretched is no extreme; nor are sizes that are all the same."""
    text = "\n".join(check_lines(FOUND, None, UNICODE))
    assert "most stretched  2.5, 200 x 100 px  /data/w.png" in text
    assert "most shrunk" not in text
    same = split(3, a=3)
    same["extremes"] = {"smallest": end("/s.png", 5), "largest": end("/s.png", 5), "most_stretched": end("/s.png", 1)}
    assert "/s.png" not in "\n".join(check_lines({"splits": {"train": same}}, None, UNICODE))


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_findings_are_broken_at_the_terminals_width_with_their_label_once(columns: int) -> None:
    """Going on under their own beginning."""
    lines = check_lines(FOUND, columns, UNICODE)
    assert max(map(len, lines)) <= columns
    start = next(number for number, line in enumerate(lines) if line.startswith("warning"))
    assert lines[start + 1].startswith(" " * 9 + "many") or lines[start + 1].startswith(" " * 9 + "words")


def test_many_classes_show_the_largest_and_the_smallest() -> None:
    """A hundred classes are no hundred lines."""
    found = {"splits": {"train": split(5050, **{f"c{number}": number for number in range(1, 101)})}}
    lines = check_lines(found, None, ASCII)
    start = lines.index(next(line for line in lines if line.startswith("class ")))
    table = lines[start + 1 : lines.index("", start)]
    assert [line.split()[0] for line in (table[0], table[-1])] == ["c100", "c1"]
    assert len(table) == 25
    assert "... 76 more" in table[12]


def test_nothing_of_a_name_can_move_the_cursor() -> None:
    """Control characters in names, and a terminal without Unicode."""
    found = {"errors": [problem("bad", "a\x1b[2Jb\u00e9")], "splits": {}}
    assert check_lines(found, None, ASCII)[0] == "error    a [2Jb\\xe9  bad"


class TestCounting:
    def test_lines_come_now_and_then_where_nobody_watches(self) -> None:
        """Nothing in the first five seconds; then one line every thirty, with the time that is left; no carriage return."""
        now, stream = [0.0], io.StringIO()
        with counting("checked", stream, lambda: now[0]) as show:
            show(100, 1100)  # known before
            for done in range(1, 101):
                now[0] += 1
                show(100 + 10 * done, 1100)
        assert stream.getvalue().splitlines() == [
            "checked: 150 of 1100, 1m35s left", "checked: 450 of 1100, 1m05s left",
            "checked: 750 of 1100, 35s left", "checked: 1050 of 1100, 5s left",
        ]  # fmt: skip

    def test_a_terminal_gets_a_bar_that_goes_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the first file, not before; what is printed later stands on a clean line."""

        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        for name in ("CI", "TERM", "NO_COLOR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm")
        stream = Terminal()
        with counting("checked", stream) as show:
            assert stream.getvalue() == ""
            show(3, 7)
            show(7, 7)
        assert "7/7" in stream.getvalue()
        assert stream.getvalue().rstrip().endswith("\x1b[2K")
