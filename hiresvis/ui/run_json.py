"""JSON of a run folder that somebody else may have made: values that are not of their key's type are left out, and told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hiresvis.run.events import is_of

Form = Mapping[str, Any]
"""By key the type's name as events have it, a form within, or a list of one form, of objects; `*` is any key. What is not named is left
out."""

_UNIT: Form = {
    **dict.fromkeys(("name", "stage", "kind", "decision"), "str"),
    **dict.fromkeys(("segment", "saved_bytes", "kept_bytes"), "int"),
    **dict.fromkeys(("flops", "runs"), "float"),
}
_RUNG: Form = {
    **dict.fromkeys(("spacing", "verdict"), "str"),
    **dict.fromkeys(("micro_batch", "predicted_peak_bytes", "measured_peak_bytes"), "int"),
    **dict.fromkeys(("recompute_fraction", "images_per_second"), "float"),
}
PLAN: Form = {
    **dict.fromkeys(("model", "precision", "why", "augmented_by"), "str"),
    **dict.fromkeys(("batch", "micro_batch", "accumulation", "budget_bytes", "capacity_bytes", "predicted_peak_bytes"), "int"),
    "image_size": "tuple[int, int]",
    "recompute_fraction": "float",
    "stages": "tuple[str, ...]",
    "parts": {"*": "int"},
    "measured": dict.fromkeys(("resident_peak_bytes", "counted_peak_bytes", "predicted_counted_bytes", "baseline_bytes"), "int"),
    "machine": {
        **dict.fromkeys(("device", "system", "python"), "str"),
        **dict.fromkeys(("memory_bytes", "cores"), "int"),
        "packages": {"*": "str"},
    },
    "data": {"*": {"sha256": "str"}},
    "ladder": [_RUNG],
    "units": [_UNIT],
}
CONTRACT: Form = {
    "task": "str",
    "classes": "tuple[str, ...]",
    "image_size": "tuple[int, int]",
    "thresholds": "tuple[float, ...]",
    "temperature": "float",
}
_PICTURE: Form = {"file": "str", "what": "str", "name": "str", "empty": "bool", "size": "tuple[int, int]"}
INDEX: Form = {"samples": [{"split": "str", "path": "str", "pictures": [_PICTURE]}]}
_MOST_TOLD = 5


def parse(text: str, form: Form | None = None) -> tuple[dict[str, Any], str]:
    """An object of JSON, and what of it cannot be used, in words; empty: nothing.

    Args:
        form: None: any object, as it is.

    >>> parse('{"model": "a", "batch": "8", "why": null, "machine": {"cores": 4, "system": []}, "own": 1}', PLAN)
    ({'model': 'a', 'machine': {'cores': 4}}, 'not of their type: batch, machine.system')
    >>> parse("[" * 100_000)
    ({}, 'nested too deeply')
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        return {}, f"not whole JSON ({error})"
    except RecursionError:
        return {}, "nested too deeply"
    if not isinstance(value, dict):
        return {}, f"{'a list' if isinstance(value, list) else 'a single value'} where an object belongs"
    if form is None:
        return value, ""
    wrong: list[str] = []
    found = _kept(value, form, "", wrong)
    told = list(dict.fromkeys(wrong))
    more = f" and {len(told) - _MOST_TOLD} more" if len(told) > _MOST_TOLD else ""
    return found, f"not of their type: {', '.join(told[:_MOST_TOLD])}{more}" if told else ""


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _kept(value: Mapping[str, Any], form: Form, place: str, wrong: list[str]) -> dict[str, Any]:
    """What of an object is of its form; null is as good as nothing. Places of the rest are added to `wrong`."""
    found: dict[str, Any] = {}
    for key, item in value.items():
        kind = form.get(key, form.get("*"))
        if item is None or kind is None:
            continue
        where = f"{place}{key[:40]}"
        if isinstance(kind, str):
            fits, kept = is_of(item, kind), tuple(item) if isinstance(item, list) else item
        elif isinstance(kind, list):
            fits, kept = isinstance(item, list), list(_objects(item, kind[0], where, wrong)) if isinstance(item, list) else None
        else:
            fits, kept = isinstance(item, dict), _kept(item, kind, f"{where}.", wrong) if isinstance(item, dict) else None
        if fits:
            found[key] = kept
        else:
            wrong.append(where)
    return found


def _objects(items: list[Any], form: Form, place: str, wrong: list[str]) -> Iterator[dict[str, Any]]:
    for item in items:
        if isinstance(item, dict):
            yield _kept(item, form, f"{place}.", wrong)
        else:
            wrong.append(place)
