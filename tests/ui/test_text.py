"""Words, numbers and drawn characters."""

from __future__ import annotations

import doctest

import pytest

from hiresvis.run.events import LadderRow
from hiresvis.ui import charts, svg, text
from hiresvis.ui.text import ASCII, UNICODE, cell_width, glyphs_for, ladder_table, memory_bar, next_commands, progress_bar, sparkline

GIB = 2**30


@pytest.mark.parametrize("module", [text, svg, charts])
def test_examples_in_docstrings_hold(module: object) -> None:
    """Every doctest of the modules without a terminal passes."""
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "no-such-encoding"])
def test_other_encodings_are_drawn_in_ascii_and_can_carry_every_name(encoding: str) -> None:
    """Bars and curves are ASCII, and any cleaned text encodes."""
    glyphs = glyphs_for(encoding)
    drawn = "".join(progress_bar(0.4, 9, glyphs)) + memory_bar(0.4, 9, glyphs) + sparkline([1, 2, 3], 3, glyphs)
    assert drawn.isascii()
    assert glyphs.clean("stage0 1 · 画像 é")[:10] == "stage0 1 |"
    glyphs.clean("画像 é \udc80").encode(glyphs.encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "UTF-8", "utf8", "UTF_8", None])
def test_utf8_streams_are_drawn_in_unicode(encoding: str | None) -> None:
    """However the encoding is written; a string in memory counts as UTF-8."""
    assert glyphs_for(encoding) is UNICODE


def test_control_characters_never_reach_the_terminal() -> None:
    """A file name with an escape sequence cannot move the cursor."""
    assert UNICODE.clean("a\x1b[2Jb\rc\nd\x07") == "a [2Jb c d "


@pytest.mark.parametrize("glyphs", [ASCII, UNICODE])
@pytest.mark.parametrize("share", [-1.0, 0.0, 0.001, 0.5, 0.999, 1.0, 7.0])
def test_bars_keep_their_width(share: float, glyphs: text.Glyphs) -> None:
    """A share outside 0 to 1 is drawn at the end of the bar."""
    assert len("".join(progress_bar(share, 20, glyphs))) == 20
    assert len(memory_bar(share, 20, glyphs)) == 21


def test_memory_over_budget_has_a_mark_of_its_own() -> None:
    """Colour aside, the bar's end tells whether the budget was passed."""
    assert memory_bar(1.0, 5, UNICODE)[-1] == "│"
    assert memory_bar(1.01, 5, UNICODE)[-1] == "▶"


def row(rung: int, spacing: str, verdict: str, micro: int = 2) -> LadderRow:
    return LadderRow(
        rung=rung, spacing=spacing, micro_batch=micro, predicted_peak_bytes=20 * GIB, recompute_fraction=0.1,
        measured_peak_bytes=19 * GIB, images_per_second=6.8, verdict=verdict,
    )  # fmt: skip


@pytest.mark.parametrize("width", range(1, 140, 3))
def test_ladder_fits_every_width(width: int) -> None:
    """No line of the table is wider than the terminal."""
    rows = [row(0, "off", "too large: one image needs 25.3 GiB", 0), row(1, "stage0 1 · 段階 2 · rest stored", "chosen: least recompute")]
    assert all(cell_width(line) <= width for line in ladder_table(rows, UNICODE, width))


def test_ladder_keeps_numbers_longer_than_long_words() -> None:
    """At 80 columns, words are cut and both peaks still stand."""
    lines = ladder_table([row(0, "stage0 1 · stage1 2 · stage2 2 on 9 of 27 · rest stored", "chosen: " + "because " * 9)], UNICODE, 79)
    assert "20.0 GiB" in lines[1]
    assert "19.0 GiB" in lines[1]
    assert "chosen" in lines[1]


def test_chosen_row_is_marked_by_a_sign() -> None:
    """The choice is told without colour."""
    lines = ladder_table([row(0, "2", ""), row(1, "1", "chosen")], ASCII)
    assert not lines[1].startswith(">")
    assert lines[2].startswith(">")


def test_commands_are_quoted_for_the_shell() -> None:
    """A folder with a space or a bracket can be pasted."""
    assert next_commands("runs/my run[1]", "classify")[0] == "hiresvis evaluate 'runs/my run[1]'"
