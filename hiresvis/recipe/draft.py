"""A new recipe as text: each value with the reason for it beside it, in the schema's order."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hiresvis.recipe.resolve import flow_text
from hiresvis.recipe.schema import keys_of

_WIDTH = 120
_COLUMN = 36  # where reasons begin, unless a value is longer
_MOST_BESIDE = 60  # letters of a line that has its reason beside it


@dataclass(frozen=True, slots=True)
class Line:
    """A value in the words of a recipe, and why it stands there."""

    value: Any
    why: str


def draft(lines: Mapping[str, Line], *, head: Sequence[str] = (), asides: Mapping[str, Sequence[str]] | None = None) -> str:
    r"""The recipe's text.

    Args:
        lines: by dotted key.
        head: of the comment at its top, a line each.
        asides: by section, comments at its end: what else could stand there.

    >>> print(draft({"task": Line("classify", "class folders"), "data.train": Line("a: b", "")}, head=["New."]), end="")
    # New.
    task: classify                      # class folders
    data:
      train: "a: b"
    """
    text = [f"# {_flat(line)}".rstrip() for line in head]
    ordered = [key for key in keys_of() if key in lines]
    assert len(ordered) == len(lines), lines.keys() - set(ordered)
    section = ""
    for key in ordered:
        first, _, name = key.rpartition(".")
        if first != section:
            text += _asides(section, asides)
            text += [
                f"{'  ' * depth}{part}:" for depth, part in enumerate(first.split(".")) if first and not _is_open(first, depth, section)
            ]
            section = first
        indent = "  " * key.count(".")
        text += _commented(f"{indent}{name}: {flow_text(lines[key].value)}", lines[key].why)
    return "\n".join([*text, *_asides(section, asides)]) + "\n"


def _is_open(section: str, depth: int, before: str) -> bool:
    return section.split(".")[: depth + 1] == before.split(".")[: depth + 1]


def _asides(section: str, asides: Mapping[str, Sequence[str]] | None) -> list[str]:
    indent = "  " * (section.count(".") + 1)
    found = (asides or {}).get(section, ()) if section else ()
    return [f"{indent}# {line}" for text in found for line in textwrap.wrap(_flat(text), _WIDTH - len(indent) - 2, break_on_hyphens=False)]


def _commented(line: str, why: str) -> list[str]:
    """A line with its comment beside it, which goes on below itself; above it where a long value leaves too little room."""
    why = _flat(why).strip()
    if not why:
        return [line]
    if len(line) > _MOST_BESIDE:
        indent = line[: len(line) - len(line.lstrip())]
        return [*(f"{indent}# {part}" for part in textwrap.wrap(why, _WIDTH - len(indent) - 2, break_on_hyphens=False)), line]
    column = max(_COLUMN, len(line) + 2)
    first, *more = textwrap.wrap(why, _WIDTH - column - 2, break_on_hyphens=False)
    return [f"{line:{column}}# {first}", *(f"{'':{column}}# {part}" for part in more)]


def _flat(text: str) -> str:
    r"""A comment in one line, whatever is in it: names of files and classes may have line ends (YAML knows five) and control characters.

    >>> _flat("z\r\nlog: {dir: evil}\u2028  x")
    'z log: {dir: evil}   x'
    """
    return re.sub("\n+", " ", "".join(char if char.isprintable() else "\n" for char in text))
