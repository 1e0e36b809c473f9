"""Sizes, durations and shares as people write them, and back."""

from __future__ import annotations

import math
import re

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_SIZE_FACTORS = {
    "": 1, "b": 1,
    "k": KIB, "kb": KIB, "kib": KIB, "m": MIB, "mb": MIB, "mib": MIB,
    "g": GIB, "gb": GIB, "gib": GIB, "t": TIB, "tb": TIB, "tib": TIB,
}  # fmt: skip
_COUNT_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_NUMBER_AND_UNIT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_DURATION = re.compile(r"\s*(?:(\d+(?:\.\d+)?)\s*h)?\s*(?:(\d+(?:\.\d+)?)\s*(?:min|m))?\s*(?:(\d+(?:\.\d+)?)\s*s)?\s*")


def parse_size(text: str) -> int:
    """Bytes of a memory size. GB and GiB are both read as 2**30, as GPU makers mean it.

    >>> parse_size("22GiB") == 22 * 2**30, parse_size("1.5 g") == 3 * 2**29
    (True, True)

    Raises:
        ValueError: text is not a number with an optional B, KiB, MiB, GiB or TiB.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if not match or match[2].lower() not in _SIZE_FACTORS:
        raise ValueError(f"{text!r} is not a size; write 22GiB or 800MiB")
    return int(float(match[1]) * _SIZE_FACTORS[match[2].lower()])


def parse_count(text: str) -> int:
    """A count with an optional k, M or G (powers of ten).

    >>> parse_count("500M")
    500000000

    Raises:
        ValueError: text is not a number with an optional k, M or G.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if not match or match[2].lower() not in _COUNT_FACTORS:
        raise ValueError(f"{text!r} is not a count; write 500M or 250000000")
    return int(float(match[1]) * _COUNT_FACTORS[match[2].lower()])


def parse_duration(text: str) -> float:
    """Seconds of a duration.

    >>> parse_duration("3h45m"), parse_duration("10min"), parse_duration("90s")
    (13500.0, 600.0, 90.0)

    Raises:
        ValueError: text is not hours, minutes and seconds in this order.
    """
    match = _DURATION.fullmatch(text)
    if not match or not any(match.groups()):
        raise ValueError(f"{text!r} is not a duration; write 3h45m, 10min or 90s")
    hours, minutes, seconds = (float(group or 0) for group in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def format_size(num_bytes: float) -> str:
    """A size for display.

    >>> format_size(22.5 * 2**30), format_size(3 * 2**20), format_size(100)
    ('22.5 GiB', '3.0 MiB', '100 B')
    """
    for factor, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:.1f} {name}"
    return f"{int(num_bytes)} B"


def format_duration(seconds: float) -> str:
    """A duration for display, two leading parts at most.

    >>> format_duration(6725), format_duration(250), format_duration(9.4), format_duration(math.nan)
    ('1h52m', '4m10s', '9s', '-')
    """
    if not math.isfinite(seconds):
        return "-"
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    if whole >= 60:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole}s"
