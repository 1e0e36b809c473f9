"""What `evaluate` found, as text: a line a figure, then classes or targets as a table, and which class is taken for which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hiresvis.ui.text import Glyphs, cell_width, interval_text, number, pad, shorten

MOST_ROWS = 40  # of a table; above it the worst
MOST_MATRIX = 12  # classes whose confusion is a matrix; above it, or where the terminal is too narrow, the most frequent pairs
MOST_PAIRS = 10
_TABLES = ("classes", "targets", "confusion", "absent", "intervals")
_NAME = 24  # columns of a name


def evaluation_lines(found: Mapping[str, Any], columns: int, glyphs: Glyphs) -> Iterator[str]:
    """Text of what `evaluate` gives, split by split; figures are as exact as they are, tables are for people."""
    for split, result in found.items():
        yield from _figures({key: value for key, value in result.items() if key != "absent"}, f"{split}.")
    for split, result in found.items():
        for kind in ("classes", "targets"):
            if kind in result:
                yield ""
                yield from _table(split, kind, result[kind], glyphs)
        if "confusion" in result:
            yield ""
            yield from _confusion(split, [*result["classes"]], result["confusion"], columns, glyphs)


def _figures(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """A line a value, `val.accuracy 0.875 (0.725-0.950)`; the interval where there is one beside it."""
    ends = values.get("intervals", {})
    for name, value in values.items():
        if name in _TABLES:
            continue
        if isinstance(value, Mapping):
            yield from _figures(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} {value}{interval_text(ends.get(name))}"


def _table(split: str, kind: str, rows: Mapping[str, Mapping[str, Any]], glyphs: Glyphs) -> Iterator[str]:
    keys = list(next(iter(rows.values())))
    shown, left = list(rows.items()), len(rows) - MOST_ROWS
    if left > 0:
        by = next(key for key in ("f1", "iou", "r2") if key in keys)
        worst = sorted(shown, key=lambda item: -1.0 if item[1][by] is None else item[1][by])[:MOST_ROWS]
        shown = worst
    header = ["class" if kind == "classes" else "target", *(key.replace("_", " ") for key in keys)]
    lines = [header, *([shorten(glyphs.clean(name), _NAME, glyphs.ellipsis), *(_cell(row[key]) for key in keys)] for name, row in shown)]
    yield f"{split}, by {header[0]}" + (f" (the {MOST_ROWS} worst of {len(rows)}; --json has all)" if left > 0 else "")
    yield from _aligned(lines)


def _cell(value: Any) -> str:
    return str(value) if isinstance(value, int) else number(value)


def _confusion(split: str, classes: Sequence[str], pairs: Sequence[Mapping[str, Any]], columns: int, glyphs: Glyphs) -> Iterator[str]:
    """A matrix, label by row and prediction by column; or the most frequent mistakes."""
    lines = list(_matrix(classes, pairs, glyphs)) if len(classes) <= MOST_MATRIX else []
    if lines and max(map(cell_width, lines)) <= columns:
        yield f"{split}, images of each label by what they are predicted as"
        yield from lines
        return
    wrong = [pair for pair in pairs if pair["label"] != pair["predicted"]]
    yield f"{split}, most frequent mistakes" + (f" ({MOST_PAIRS} of {len(wrong)} kinds)" if len(wrong) > MOST_PAIRS else "")
    rows = [["label", "predicted as", "images"], *([pair["label"], pair["predicted"], str(pair["images"])] for pair in wrong[:MOST_PAIRS])]
    yield from _aligned([[*(shorten(glyphs.clean(cell), _NAME, glyphs.ellipsis) for cell in row)] for row in rows], words=2)


def _matrix(classes: Sequence[str], pairs: Sequence[Mapping[str, Any]], glyphs: Glyphs) -> Iterator[str]:
    names = [shorten(glyphs.clean(name), _NAME, glyphs.ellipsis) for name in classes]
    place = {name: index for index, name in enumerate(classes)}
    counts = [[0] * len(classes) for _ in classes]
    for pair in pairs:
        counts[place[pair["label"]]][place[pair["predicted"]]] = pair["images"]
    return _aligned([["label, predicted as", *names], *([name, *map(str, row)] for name, row in zip(names, counts, strict=True))])


def _aligned(rows: Sequence[Sequence[str]], words: int = 1) -> Iterator[str]:
    """Columns of equal width, numbers to the right of theirs."""
    widths = [max(map(cell_width, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(pad(cell, width, place >= words) for place, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
