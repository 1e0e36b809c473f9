"""Values with a unit: sizes, shares, times and counts; each is read to one number and written back without loss."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from hiresvis.recipe.values import Kind, any_of, finite, shown, text, what, whole
from hiresvis.units import GIB, KIB, MIB, parse_count, parse_duration, parse_size

# What an editor underlines. Bytes and KiB have the digits that a MiB needs, at least.
_SIZE = r"\s*(\d+(\.\d+)?\s*[MGTmgt]i?[Bb]?|\d{4,}(\.\d+)?\s*[Kk]i?[Bb]?|\d{7,}(\.\d+)?\s*[Bb])\s*"
_BELOW_WHOLE = r"^\s*\d{1,2}(\.\d+)?\s*%\s*$"


def _percent(value: str) -> float | None:
    """The share of `5%`; None where the text is no percentage."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value)
    return float(Decimal(match[1]) / 100) if match else None


def dump_share(share: float) -> str:
    """A share as per cent, exactly.

    >>> dump_share(0.05), dump_share(1 / 3)
    ('5%', '33.33333333333333%')
    """
    return f"{(Decimal(repr(float(share))) * 100).normalize():f}%"


def dump_size(num_bytes: int) -> str:
    """Bytes in the largest unit that keeps them exact.

    >>> dump_size(22 * 2**30), dump_size(2**30 + 1)
    ('22GiB', '1073741825B')
    """
    for factor, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes % factor == 0:
            return f"{num_bytes // factor}{name}"
    return f"{num_bytes}B"


def dump_duration(seconds: float) -> str:
    """Seconds as a recipe writes them, exactly.

    >>> dump_duration(13500.0), dump_duration(600.0), dump_duration(0.25)
    ('3h45m', '10min', '0.25s')
    """
    if seconds != int(seconds) or seconds % 60:
        return f"{Decimal(repr(float(seconds))):f}s".replace(".0s", "s")
    hours, minutes = divmod(int(seconds) // 60, 60)
    return f"{minutes}min" if not hours else f"{hours}h{minutes}m" if minutes else f"{hours}h"


def budget() -> Kind:
    """auto, a size (int bytes) or a share of what there is (float in (0, 1])."""
    expected = "auto, a size such as 22GiB, or a share such as 90%"

    def parse(value: Any) -> str | int | float:
        if value == "auto":
            return "auto"
        if isinstance(value, int | float) and not isinstance(value, bool):
            unit = f"{value:g}GiB" if value >= 1 else f"{value * 100:g}%"
            raise ValueError(f"{shown(value)} has no unit; write {unit}")
        if not isinstance(value, str):
            raise ValueError(f"{shown(value)} is {what(value)}; give {expected}")
        share = _percent(value)
        if share is not None:
            if not 0 < share <= 1:
                raise ValueError(f"{value} is not above 0% and at most 100%; give {expected}")
            return share
        return _size(value, expected)

    def dump(value: str | int | float) -> str:
        if isinstance(value, str):
            return value
        return dump_size(value) if isinstance(value, int) else dump_share(value)

    return Kind(
        parse,
        {
            "type": "string",
            "pattern": rf"^(auto|{_SIZE}|(?=.*[1-9])\s*(\d{{1,2}}(\.\d+)?|100(\.0+)?)\s*%\s*)$",
            "examples": ["auto", "22GiB", "90%"],
        },
        dump,
    )


def cache() -> Kind:
    """auto, off, or a size (int bytes)."""
    expected = "auto, off, or a size such as 20GiB"

    def parse(value: Any) -> str | int:
        if isinstance(value, str) and value in ("auto", "off"):
            return value
        if isinstance(value, str) and re.match(r"\s*\d", value):
            return _size(value, expected)
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError(f"{shown(value)} has no unit; write {shown(value)}GiB")
        words = {True: "auto", "on": "auto", False: "off"}
        hint = words.get(value) if isinstance(value, bool | str) else None
        raise ValueError(f"{shown(value)} is no size of a cache; give {expected}" if hint is None else f"{shown(value)}: write {hint}")

    schema = {
        "type": "string",
        "pattern": rf"^(auto|off|{_SIZE})$",
        "examples": ["auto", "off", "20GiB"],
    }
    return Kind(parse, schema, lambda value: dump_size(value) if isinstance(value, int) else value)


def _size(value: str, expected: str) -> int:
    """Bytes of a size in text, 1 MiB at least."""
    if re.fullmatch(r"[\s\d.]*", value):
        raise ValueError(f"{shown(value)} has no unit; write {value.strip() or 22}GiB")
    try:
        num_bytes = parse_size(value)
    except ValueError:
        raise ValueError(f"{shown(value)} is no size; give {expected}") from None
    if num_bytes < MIB:
        raise ValueError(f"{value} is below 1MiB; give {expected}")
    return num_bytes


def duration(*, nullable: bool = False) -> Kind:
    """Seconds above 0, from hours, minutes and seconds."""
    expected = "a time such as 3h45m, 10min or 90s" + (", or null" if nullable else "")

    def parse(value: Any) -> float | None:
        if value is None and nullable:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            raise ValueError(f"{shown(value)} has no unit; write {shown(value)}min or {shown(value)}s")
        if not isinstance(value, str):
            raise ValueError(f"{shown(value)} is {what(value)}; give {expected}")
        try:
            seconds = parse_duration(value)
        except ValueError:
            raise ValueError(f"{shown(value)} is no time; give {expected}") from None
        if seconds <= 0:
            raise ValueError(f"{value} is not above 0; give {expected}")
        return seconds

    parts = r"(\d+(\.\d+)?\s*h)?\s*(\d+(\.\d+)?\s*(min|m))?\s*(\d+(\.\d+)?\s*s)?"
    schema = {"type": "string", "pattern": rf"^(?=.*[1-9])\s*{parts}\s*$"}
    return Kind(parse, any_of((), nullable, schema), lambda value: None if value is None else dump_duration(value))


def pixels() -> Kind:
    """A count of pixels: 500M or 500000000."""

    def parse(value: Any) -> int:
        if isinstance(value, str):
            try:
                value = parse_count(value)
            except ValueError:
                raise ValueError(f"{shown(value)} is no count; write 500M or 500000000") from None
        number: int = whole(low=1).parse(value)
        return number

    schema = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*[kKmMgG]?\s*$"}]}
    return Kind(parse, schema, lambda value: f"{value // 10**6}M" if value % 10**6 == 0 else value)


def warmup() -> Kind:
    """A share of all steps (float in [0, 1): `5%`, 0.05), or a number of steps (int)."""
    expected = "a share such as 5%, or a number of steps such as 500"

    def parse(value: Any) -> float | int:
        share = _percent(value) if isinstance(value, str) else None
        found = share if share is not None else finite(value, expected)
        if isinstance(found, int) and found >= 0:
            return found
        if not 0 <= found < 1:
            raise ValueError(f"{shown(value)} is not below 100% and at least 0%; give {expected}")
        return float(found)

    schema = {
        "anyOf": [
            {"type": "integer", "minimum": 0},
            {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
            {"type": "string", "pattern": _BELOW_WHOLE},
        ]
    }
    return Kind(parse, schema, lambda value: value if isinstance(value, int) else dump_share(value))


def share(*, below: float) -> Kind:
    """A share from 0 to below `below`: `25%`, 0.25."""
    expected = f"a share such as 25% or 0.25, from 0 to below {dump_share(below)}"

    def parse(value: Any) -> float:
        percent = _percent(value) if isinstance(value, str) else None
        found = percent if percent is not None else finite(value, expected)
        if not 0 <= found < below:
            raise ValueError(f"{shown(value)} is not below {dump_share(below)} and at least 0%; give {expected}")
        return float(found)

    number = {"type": "number", "minimum": 0, "exclusiveMaximum": below}
    return Kind(parse, {"anyOf": [number, {"type": "string", "pattern": _BELOW_WHOLE}]}, dump_share)


def path_or_share() -> Kind:
    """A path, or a share in (0, 1) of the training images."""
    expected = "a path, or a share such as 0.15"

    def parse(value: Any) -> str | float:
        share = _percent(value) if isinstance(value, str) else None
        if isinstance(value, str) and share is None:
            path: str = text(empty_is=f"give {expected}").parse(value)
            return path
        found = share if share is not None else finite(value, expected)
        if not 0 < found < 1:
            raise ValueError(f"{shown(value)} is not above 0 and below 1; give {expected}")
        return float(found)

    return Kind(parse, {"anyOf": [{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, {"type": "string", "minLength": 1}]})
