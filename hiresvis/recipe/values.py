"""The kinds of value a recipe key may hold: how each is read, what the editor schema says of it, how it is written again.

One kind is one annotation of a schema field, so that a refused value gets one message of ours (value, constraint, mend)
instead of one message for each member of a union. Here are words, numbers and text; `quantities` holds what has units,
`structures` what is a list or a mapping.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

_SHOWN_LENGTH = 60


@dataclass(frozen=True, slots=True)
class Kind:
    """Reads one value. `parse` raises ValueError with the whole message; `dump` is its inverse, in the words of a recipe."""

    parse: Callable[[Any], Any]
    json: Mapping[str, Any]
    dump: Callable[[Any], Any] = lambda value: value

    def write(self, value: Any) -> Any:
        """The value as a recipe would hold it; text is in those words already."""
        return value if isinstance(value, str) else self.dump(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.parse, serialization=core_schema.plain_serializer_function_ser_schema(self.write)
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return dict(self.json)


def shown(value: object) -> str:
    """A value as it would stand in a recipe, cut to one short line.

    >>> shown(None), shown(True), shown([1, "a b"]), shown(1e-05)
    ('null', 'true', '[1, "a b"]', '1e-05')
    """
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, str):
        text = value if re.fullmatch(r"[^\s\"',\[\]{}#]+", value) else f'"{value}"'
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    elif isinstance(value, Sequence):
        text = "[" + ", ".join(shown(item) for item in value) + "]"
    else:
        text = str(value)
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= _SHOWN_LENGTH else text[: _SHOWN_LENGTH - 3] + "..."


def what(value: object) -> str:
    """The sort of value, in words.

    >>> what([]), what("a"), what(False)
    ('a list', 'text', 'true/false')
    """
    if value is None:
        return "nothing"
    for kind, name in ((bool, "true/false"), (int, "a whole number"), (float, "a number"), (str, "text"), (Mapping, "a mapping")):
        if isinstance(value, kind):
            return name
    return "a list"


def nearest(word: str, candidates: Sequence[str]) -> str | None:
    """The candidate a misspelt word most likely means.

    >>> nearest("wieght_decay", ["weight_decay", "warmup"])
    'weight_decay'
    """
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    found = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def refuse_word(value: object, words: Sequence[str], later: Sequence[str], also: str) -> ValueError:
    """The refusal of anything that is none of `words`; `also` is what may stand there besides."""
    allowed = [*words, also] if also else list(words)
    if shown(value) in later:
        return ValueError(f"{shown(value)} is not there yet; today: {either(allowed)}")
    guess = nearest(value if isinstance(value, str) else shown(value), words)
    hint = f"; did you mean {guess}?" if guess else ""
    if len(allowed) == 1:
        return ValueError(f"{shown(value)} is not {allowed[0]}{hint or f'; write {allowed[0]}'}")
    return ValueError(f"{shown(value)} is none of {', '.join(allowed)}{hint or f'; write {either(allowed)}'}")


def choice(*words: str, later: Sequence[str] = (), also: str = "") -> Kind:
    """One of a few words. `later`: words of features that do not exist yet, refused by name; `also`: what else is offered."""

    def parse(value: Any) -> str:
        if isinstance(value, str) and value in words:
            return value
        raise refuse_word(value, words, later, also)

    return Kind(parse, {"type": "string", "enum": list(words)})


def flag(*words: str, only: bool | None = None, later: Sequence[str] = ()) -> Kind:
    """true or false, or one of `words`. `only`: the one of the two that exists today."""
    flags = (True, False) if only is None else (only,)

    def parse(value: Any) -> bool | str:
        if isinstance(value, bool) and value in flags:
            return value
        if isinstance(value, str) and value in words:
            return value
        if isinstance(value, str) and value.lower() in {"on", "off", "yes", "no", "true", "false", "y", "n"}:
            raise ValueError(f"{value} is text in YAML 1.2; write true or false")
        raise refuse_word(value, [*words, *(shown(item) for item in flags)], later, "")

    return Kind(parse, {"enum": [*words, *flags]})


def only(known: int | str | None, *, also: str = "", refusal: str) -> Kind:
    """The one value `known` (or the word `also`); anything else is refused with `refusal`, the mend."""

    def parse(value: Any) -> int | str | None:
        if type(value) is type(known) and value == known:
            return known
        if also and value == also:
            return also
        raise ValueError(f"{shown(value)} {refusal}")

    return Kind(parse, any_of((also,) if also else (), known is None, *([] if known is None else [{"const": known}])))


def text(*, empty_is: str = "", nullable: bool = False) -> Kind:
    """Text of at least one character."""

    def parse(value: Any) -> str | None:
        if value is None and nullable:
            return None
        if isinstance(value, bool | int | float):
            raise ValueError(f'{shown(value)} is {what(value)}; put it in quotes: "{shown(value)}"')
        if not isinstance(value, str):
            raise ValueError(f"{shown(value)} is {what(value)}; give text{' or null' if nullable else ''}")
        if not value.strip():
            raise ValueError(f"an empty text; {empty_is or 'give a name'}")
        return value

    return Kind(parse, {"type": ["string", "null"] if nullable else "string", "minLength": 1})


def finite(value: Any, expected: str) -> int | float:
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"{shown(value)} is text, not a number; give {expected}") from None
        if not math.isfinite(number):  # nan and inf are words in YAML, with quotes or without
            raise ValueError(f"{value} is not finite; give {expected}")
        if "_" in value:
            raise ValueError(f"{value} is text, not a number; write it without _")
        raise ValueError(f'"{value}" is text, not a number; take the quotes away')
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{shown(value)} is {what(value)}; give {expected}")
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite; give {expected}")
    return value


def whole(*words: str, low: int, high: int | None = None, nullable: bool = False, later: Sequence[str] = ()) -> Kind:
    """A whole number in [low, high], or one of `words`."""
    number = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    allowed = [*words, *(["null"] if nullable else []), number]

    def parse(value: Any) -> int | str | None:
        if (isinstance(value, str) and value in words) or (value is None and nullable):
            return value
        if words and isinstance(value, str) and (value in later or nearest(value, words) or not value[:1].isdigit()):
            raise refuse_word(value, words, later, number)
        found = finite(value, either(allowed))
        if isinstance(found, float):
            if found.is_integer():
                raise ValueError(f"{shown(value)} is not a whole number; write {int(found)}")
            raise ValueError(f"{shown(value)} is not a whole number; give {either(allowed)}")
        if found < low or (high is not None and found > high):
            side = f"below {low}" if found < low else f"above {high}"
            raise ValueError(f"{shown(value)} is {side}; give {either(allowed)}")
        return found

    integer: dict[str, Any] = {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high})
    return Kind(parse, any_of(words, nullable, integer))


def any_of(words: Sequence[str], nullable: bool, *rest: Mapping[str, Any]) -> dict[str, Any]:
    options: list[Mapping[str, Any]] = [*([{"enum": list(words)}] if words else []), *rest, *([{"type": "null"}] if nullable else [])]
    return dict(options[0]) if len(options) == 1 else {"anyOf": options}


def real(
    *words: str,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    nullable: bool = False,
    only: float | None = None,
) -> Kind:
    """A finite number between bounds (`low`, `high` included; `above`, `below` excluded), or one of `words`.

    `only`: the one value that exists today.
    """
    bounds = [(low, "of at least"), (above, "above"), (high, "at most"), (below, "below")]
    number = "a number " + " and ".join(f"{name} {bound:g}" for bound, name in bounds if bound is not None)
    allowed = [*words, *(["null"] if nullable else []), number]

    def parse(value: Any) -> float | str | None:
        if (isinstance(value, str) and value in words) or (value is None and nullable):
            return value
        if words and isinstance(value, str) and nearest(value, words):
            raise refuse_word(value, words, (), number)
        found = float(finite(value, either(allowed)))
        for bound, wrong, name in (
            (low, low is not None and found < low, "below"),
            (above, above is not None and found <= above, "not above"),
            (high, high is not None and found > high, "above"),
            (below, below is not None and found >= below, "not below"),
        ):
            if wrong:
                raise ValueError(f"{shown(value)} is {name} {bound:g}; give {either(allowed)}")
        if only is not None and found != only:
            raise ValueError(f"{shown(value)} is not there yet; today: {only:g}")
        return found

    names = (("minimum", low), ("exclusiveMinimum", above), ("maximum", high), ("exclusiveMaximum", below))
    schema: dict[str, Any] = {"type": "number"} | {name: bound for name, bound in names if bound is not None}
    if only is not None:
        schema = {"const": only}
    return Kind(parse, any_of(words, nullable, schema))


def at(place: Sequence[int | str], message: str) -> PydanticCustomError:
    """A refusal that points inside the value: item 2 of a list, key p of a mapping."""
    return PydanticCustomError("recipe", "{message}", {"message": message, "at": tuple(place)})


def pretrained() -> Kind:
    """true, false, a path, or package:NAME."""
    flags = ("on", "off", "yes", "no")

    def parse(value: Any) -> bool | str:
        if isinstance(value, str) and value.lower() not in flags:
            if not value.removeprefix("package:").strip():
                raise ValueError(f"{shown(value)} names nothing; give true, false, a path, or package:NAME")
            return value
        found: bool = flag().parse(value)
        return found

    named = {"type": "string", "minLength": 1, "not": {"enum": [*flags, "package:"]}}
    return Kind(parse, {"anyOf": [{"type": "boolean"}, named]})


def run_folder() -> Kind:
    """A path in which {name}, and nothing else, is filled in."""

    def parse(value: Any) -> str:
        path: str = text(empty_is="give a folder such as runs/{name}").parse(value)
        for found in re.findall(r"\{[^{}]*\}?|\}", path.replace("{name}", "")):
            raise ValueError(f"{found} is not filled in; only {{name}} is, by the recipe's file name")
        return path

    return Kind(parse, {"type": "string", "pattern": r"^([^{}]|\{name\})+$"})
