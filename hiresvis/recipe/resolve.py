"""Every value of a run with where it came from: given, default, or found for `auto` with the reason.

`recipe.resolved.yaml` is a recipe itself: loaded again it gives the same values, with paths made absolute so that it means
the same from the run folder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from hiresvis.recipe.load import PATH_KEYS, LoadedRecipe
from hiresvis.recipe.schema import Recipe, keys_of, kind_of
from hiresvis.recipe.yamltext import read_scalar

Origin = Literal["given", "default", "auto"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the resolved recipe. `why` is empty for given and default values."""

    key: str
    value: Any
    origin: Origin
    why: str = ""


class Resolution:
    """Collects what each `auto` became."""

    def __init__(self, loaded: LoadedRecipe) -> None:
        self._loaded = loaded
        self._found: dict[str, tuple[Any, str]] = {}

    def set(self, key: str, value: Any, why: str) -> None:
        """Records the value (as the program holds it, or as a recipe writes it) that `key` stands for, and why.

        Raises:
            ValueError: no such key, or the recipe could not hold this value: a fault of ours.
        """
        written = kind_of(key).write(value)
        assert why, "a value found automatically has its reason"
        self._found[key] = (written, " ".join(why.split()))
        try:
            self._build()
        except ValidationError as error:
            del self._found[key]
            raise ValueError(f"{key} cannot hold {value!r}: {error.errors()[0]['msg']}") from None

    @property
    def recipe(self) -> Recipe:
        """The recipe with every value recorded so far, and absolute paths."""
        return self._build()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All keys in the schema's order."""
        values = _flat(self._build().model_dump())
        return tuple(self._entry(key, value) for key, value in values.items())

    @property
    def autos(self) -> tuple[Entry, ...]:
        """What each `auto` became, in the order of being found."""
        values = _flat(self._build().model_dump())
        return tuple(self._entry(key, values[key]) for key in self._found)

    def text(self) -> str:
        """The resolved recipe as YAML, each value with its origin."""
        lines = ["# Every value of this run and where it came from: given, default, or auto with the reason."]
        open_sections: list[str] = []
        for entry in self.entries:
            *sections, name = entry.key.split(".")
            for depth, section in enumerate(sections):
                if open_sections[depth : depth + 1] != [section]:
                    lines.append(f"{'  ' * depth}{section}:")
                    open_sections = [*open_sections[:depth], section]
            open_sections = open_sections[: len(sections)]
            why = f": {entry.why}" if entry.why else ""
            lines.append(f"{'  ' * len(sections)}{name}: {flow_text(entry.value)}  # {entry.origin}{why}")
        return "\n".join(lines) + "\n"

    def _entry(self, key: str, value: Any) -> Entry:
        if key in self._found:
            return Entry(key, value, "auto", self._found[key][1])
        return Entry(key, value, "given" if key in self._loaded.given else "default")

    def _build(self) -> Recipe:
        raw = self._loaded.recipe.model_dump()
        for key in PATH_KEYS:
            text = _get(raw, key)
            if isinstance(text, str) and not text.startswith("package:"):
                _put(raw, key, str(self._loaded.resolve_path(text)))
        for key, (value, _) in self._found.items():
            _put(raw, key, value)
        return Recipe.model_validate(raw)


def _get(raw: Mapping[str, Any], key: str) -> Any:
    value: Any = raw
    for part in key.split("."):
        value = value[part]
    return value


def _put(raw: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    inner: Any = raw
    for section in sections:
        inner = inner[section]
    inner[last] = value


def _flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys of the schema to values; a section that is null keeps its own name."""
    keys = keys_of()
    flat: dict[str, Any] = {}
    for key in keys:
        value: Any = raw
        parts = key.split(".")
        for depth, part in enumerate(parts, start=1):
            value = value[part]
            if value is None:
                flat[".".join(parts[:depth])] = None
                break
        else:
            flat[key] = value
    return flat


def flow_text(value: Any) -> str:
    """A value in flow style that reads back as the same value.

    >>> flow_text([1e-05, "on", "a: b", None, True, "010"])
    '[1e-05, on, "a: b", null, true, "010"]'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow_text(str(key))}: {flow_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(flow_text(item) for item in value) + "]"
    if isinstance(value, str):
        return _quoted(value)
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}".replace("inf", ".inf").replace("nan", ".nan")
    return repr(value)


def _quoted(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_./][A-Za-z0-9_./%+~-]*( [A-Za-z0-9_./%+~-]+)*", text) and read_scalar(text) == text:
        return text
    escaped = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    return '"' + "".join(escaped.get(char) or (char if char.isprintable() else f"\\U{ord(char):08x}") for char in text) + '"'
