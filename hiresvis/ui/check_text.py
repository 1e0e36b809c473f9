"""What `hiresvis check` found, as text: errors, warnings and notes first, then tables of the splits, their classes and their extremes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hiresvis.ui.text import Glyphs, cell_width, pad, shorten

CLASSES_SHOWN = 24
NAMES_SHOWN = 3
_LABEL = 9  # columns of "warning" and a gap
_EXTREMES = {
    "smallest": ("smallest", "{width} x {height} px"),
    "largest": ("largest", "{width} x {height} px"),
    "most_stretched": ("most stretched", "{value:g}, {width} x {height} px"),
    "most_shrunk": ("most shrunk", "{value:g}, {width} x {height} px"),
    "least_kept": ("least kept", "{value:.0%}, {width} x {height} px"),
}


def check_lines(found: Mapping[str, Any], columns: int | None, glyphs: Glyphs) -> list[str]:
    """The findings as lines.

    Args:
        found: what `check --json` prints.
        columns: width to break long findings at; None: each is one line, for files and for grep.
        glyphs: what this stream can show.
    """
    lines = [
        line
        for label, kind in (("error", "errors"), ("warning", "warnings"), ("note", "notes"))
        for problem in found.get(kind, ())
        for line in _finding(label, problem, columns)
    ]
    splits: Mapping[str, Mapping[str, Any]] = found.get("splits", {})
    if splits:
        width = columns or 100
        tables = [
            _split_table(splits),
            _class_table(splits, glyphs),
            _pixel_table(splits),
            _target_table(splits),
            _extreme_table(splits, width, glyphs),
        ]
        lines += [line for table in tables if table for line in ("", *table)]
        lines = lines[not lines[0] :]
    facts = [f"{label:{_LABEL}}{text}" for label, text in (found.get("facts") or {}).items()]
    lines += ["", *facts] if facts else []
    counts = ", ".join(_counted(len(found.get(kind, ())), kind.removesuffix("s")) for kind in ("errors", "warnings", "notes"))
    return [glyphs.clean(line).rstrip() for line in [*lines, *([""] if lines else []), counts]]


def _counted(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _finding(label: str, problem: Mapping[str, str], columns: int | None) -> list[str]:
    text = "  ".join(part for part in (problem["place"], problem["key"], problem["message"]) if part)
    if columns is None:
        return [f"{label:{_LABEL}}{text}"]
    room = max(20, columns - _LABEL)
    broken = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False)
    return [f"{label if number == 0 else '':{_LABEL}}{line}" for number, line in enumerate(broken)]


def _split_table(splits: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A column for each split, a row for each count that any of them has."""
    rows = [("", *splits)]
    for label, key, show in _SHOWN:
        cells = [show(counts[key]) if counts.get(key) else "" for counts in splits.values()]
        if any(cells):
            rows.append((label, *cells))
    return _aligned(rows)


def _numbers(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {number}" for name, number in counts.items())


def _between(values: Sequence[float]) -> str:
    low, middle, high = (f"{value:g}" for value in values)
    return low if low == high else f"{low} / {middle} / {high}"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _groups(groups: Mapping[str, Any]) -> str:
    return f"{groups['number']}, most in {groups['largest']}: {groups['images_of_largest']}"


_SHOWN = (
    ("images", "images", str),
    ("unreadable", "unreadable", str),
    ("nearly blank", "blank", lambda places: str(len(places))),
    ("classes", "classes", lambda classes: str(len(classes))),
    ("largest / smallest", "balance", lambda balance: f"{balance['ratio']:g}"),
    ("without a mask", "without_mask", str),
    ("ignored pixels", "ignored_pixels", str),
    ("groups", "groups", _groups),
    ("formats", "formats", _numbers),
    ("modes", "modes", _numbers),
    ("bits", "bits", _numbers),
    ("channels", "channels", _numbers),
    ("turned by EXIF", "exif_rotated", str),
    ("height min/mid/max", "height", _between),
    ("width min/mid/max", "width", _between),
    ("share kept", "share_kept", _between),
    ("shrunk by", "shrink", _between),
    ("passed over", "skipped_extensions", _numbers),
    ("ignored", "ignored", _named),
)


def _pixel_table(splits: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Of masks: the share that each class has of the pixels that count, by split."""
    names = list(dict.fromkeys(name for counts in splits.values() for name in counts.get("pixels", ())))
    totals = [sum(counts.get("pixels", {}).values()) or 1 for counts in splits.values()]
    rows = [
        (name, *(f"{counts['pixels'].get(name, 0) / total:.3%}" for counts, total in zip(splits.values(), totals, strict=True)))
        for name in names
    ]
    return _aligned([("pixels of", *splits), *rows], right=True) if names else []


def _class_table(splits: Mapping[str, Mapping[str, Any]], glyphs: Glyphs) -> list[str]:
    """Images of each class by split; of many classes the largest and the smallest."""
    names = list(dict.fromkeys(name for counts in splits.values() for name in counts["classes"]))
    rows = [(name, *(str(counts["classes"].get(name, 0)) for counts in splits.values())) for name in names]
    if len(rows) > CLASSES_SHOWN:
        rows.sort(key=lambda row: -int(row[1]))
        half = CLASSES_SHOWN // 2
        rows = [*rows[:half], (f"{glyphs.ellipsis} {len(rows) - 2 * half} more", *("" for _ in splits)), *rows[-half:]]
    rows = [(shorten(name, 40, glyphs.ellipsis), *numbers) for name, *numbers in rows]
    return _aligned([("class", *splits), *rows], right=True) if names else []


def _target_table(splits: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Range and median of each target of a regression, by split."""
    names = list(dict.fromkeys(name for counts in splits.values() for name in counts.get("targets", ())))
    rows = [
        (name, *(_between(counts["targets"][name]) if counts["targets"].get(name) else "" for counts in splits.values())) for name in names
    ]
    return _aligned([("target min/mid/max", *splits), *rows]) if names else []


def _extreme_table(splits: Mapping[str, Mapping[str, Any]], width: int, glyphs: Glyphs) -> list[str]:
    """The image at the end of each scale, of all splits; an end that is no end (nothing cut off, nothing stretched) is left out."""
    sizes = {counts["extremes"][key]["value"] for counts in splits.values() for key in ("smallest", "largest") if counts["extremes"]}
    same_size = sizes.pop() if len(sizes) == 1 else None
    rows = []
    for key, (label, shape) in _EXTREMES.items():
        ends = [counts["extremes"][key] for counts in splits.values() if key in counts.get("extremes", {})]
        if not ends:
            continue
        end = (min if key in ("smallest", "least_kept") else max)(ends, key=lambda end: end["value"])
        if end["value"] != (same_size if key in ("smallest", "largest") else 1):
            rows.append((label, shape.format_map(end), end["path"]))
    room = width - sum(max((cell_width(row[place]) for row in rows), default=0) + 2 for place in (0, 1))
    return _aligned([(label, numbers, _tail(path, room, glyphs)) for label, numbers, path in rows])


def _tail(path: str, room: int, glyphs: Glyphs) -> str:
    """A path cut at its beginning, since its end tells files apart."""
    return path if cell_width(path) <= room else glyphs.ellipsis + shorten(path[::-1], max(8, room) - len(glyphs.ellipsis), "")[::-1]


def _aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Rows in columns; with `right`, all but the first to the right."""
    widths = [max(cell_width(cell) for cell in column) for column in zip(*rows, strict=True)]
    return list(_joined(rows, widths, right))


def _joined(rows: Sequence[Sequence[str]], widths: Sequence[int], right: bool) -> Iterator[str]:
    for row in rows:
        yield "  ".join(pad(cell, width, right and place > 0) for place, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
