"""Values that are a list or a mapping: image sizes, colours, names, spacings, augmentations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hiresvis.recipe.quantities import share
from hiresvis.recipe.values import Kind, any_of, at, choice, finite, refuse_word, shown, text, what, whole

NAMED_COLOURS: Mapping[str, tuple[int, int, int]] = {"white": (255, 255, 255), "black": (0, 0, 0), "gray": (128, 128, 128)}


def image_size() -> Kind:
    """(height, width) in pixels, from one number for a square or a list of two."""
    expected = "one whole number of pixels such as 1024, or [height, width]"

    def parse(value: Any) -> tuple[int, int]:
        sides = value if isinstance(value, list | tuple) else (value, value)
        if len(sides) != 2:
            raise ValueError(f"{shown(value)} has {len(sides)} numbers; give {expected}")
        for side in sides:
            if isinstance(side, bool) or not isinstance(side, int):
                raise ValueError(f"{shown(value)}: {shown(side)} is {what(side)}; give {expected}")
            if side < 1:
                raise ValueError(f"{shown(value)}: {side} is below 1; give {expected}")
        return (sides[0], sides[1])

    side = {"type": "integer", "minimum": 1}
    schema = {"anyOf": [side, {"type": "array", "items": side, "minItems": 2, "maxItems": 2}]}
    return Kind(parse, schema, lambda value: value[0] if value[0] == value[1] else list(value))


def size_steps() -> Kind:
    """Null, or what image size begins at what share of training: ((share, (height, width)), ...), from 0 on."""
    side, from_share = image_size(), share(below=1.0)
    expected = "null, or steps such as [[0, 512], [60%, 1024]]: at what share of training which size begins"

    def step(item: Any, index: int) -> tuple[float, tuple[int, int]]:
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise at([index], f"{shown(item)} is not [share, size]; give {expected}")
        found: list[Any] = []
        for place, kind in enumerate((from_share, side)):
            try:
                found.append(kind.parse(item[place]))
            except ValueError as error:
                raise at([index, place], str(error)) from None
        return found[0], found[1]

    def parse(value: Any) -> tuple[tuple[float, tuple[int, int]], ...] | None:
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not value:
            raise ValueError(f"{shown(value)} is {what(value)}; give {expected}")
        steps = tuple(step(item, index) for index, item in enumerate(value))
        if steps[0][0] != 0:
            raise at([0, 0], f"{shown(value[0][0])} is where the first size begins; write 0")
        for index in range(1, len(steps)):
            if steps[index][0] <= steps[index - 1][0]:
                raise at([index, 0], f"{shown(value[index][0])} is not after {shown(value[index - 1][0])}; give shares in their order")
            before, now = steps[index - 1][1], steps[index][1]
            if before == now or any(side < least for side, least in zip(now, before, strict=True)):
                raise at([index, 1], f"{shown(value[index][1])} is not larger than {shown(value[index - 1][1])}; give sizes that grow")
        return steps

    item = {"type": "array", "prefixItems": [dict(from_share.json), dict(side.json)], "minItems": 2, "maxItems": 2}
    schema = any_of((), True, {"type": "array", "items": item, "minItems": 1})
    return Kind(parse, schema, lambda value: None if value is None else [[begin, side.dump(size)] for begin, size in value])


def colour() -> Kind:
    """(red, green, blue), each 0-255, from a name or a list of three."""
    expected = f"{', '.join(NAMED_COLOURS)}, or [red, green, blue] from 0 to 255"

    def parse(value: Any) -> tuple[int, int, int]:
        if isinstance(value, str) and value in NAMED_COLOURS:
            return NAMED_COLOURS[value]
        if not isinstance(value, list | tuple) or len(value) != 3:
            raise ValueError(f"{shown(value)} is no colour; give {expected}")
        if not all(isinstance(part, int) and not isinstance(part, bool) and 0 <= part <= 255 for part in value):
            raise ValueError(f"{shown(value)} is not three whole numbers from 0 to 255; give {expected}")
        return (value[0], value[1], value[2])

    by_colour = {rgb: name for name, rgb in NAMED_COLOURS.items()}
    part = {"type": "integer", "minimum": 0, "maximum": 255}
    schema = {"anyOf": [{"enum": list(NAMED_COLOURS)}, {"type": "array", "items": part, "minItems": 3, "maxItems": 3}]}
    return Kind(parse, schema, lambda value: by_colour.get(value, list(value)))


def scale() -> Kind:
    """auto, dtype, percentile, or (lo, hi): the values that become 0 and 1."""
    words = ("auto", "dtype", "percentile")

    def parse(value: Any) -> str | tuple[float, float]:
        if isinstance(value, str) and value in words:
            return value
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise refuse_word(value, words, (), "[lo, hi]")
        low, high = (float(finite(end, "two numbers [lo, hi]")) for end in value)
        if not low < high:
            raise ValueError(f"{shown(value)}: {low:g} is not below {high:g}; give [lo, hi] with lo below hi")
        return (low, high)

    schema = {"anyOf": [{"enum": list(words)}, {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}]}
    return Kind(parse, schema, lambda value: list(value) if isinstance(value, tuple) else value)


def names(*, word: str | None = None, low: int = 1) -> Kind:
    """A list of different texts, in order (as a tuple), or `word`."""
    also = f"{word}, or " if word else ""

    def parse(value: Any) -> str | tuple[str, ...]:
        if word is not None and value == word:
            return word
        if not isinstance(value, list | tuple):
            raise ValueError(f"{shown(value)} is {what(value)}; give {also}a list of names")
        for index, item in enumerate(value):
            if not isinstance(item, str):
                raise at([index], f'{shown(item)} is {what(item)}; put a name in quotes: "{shown(item)}"')
            if item in value[:index]:
                raise at([index], f"{shown(item)} is there twice; keep one")
        if len(value) < low:
            raise ValueError(f"{shown(value)} has {len(value)} names; give at least {low}")
        return tuple(value)

    array = {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": low}
    return Kind(parse, any_of((word,) if word else (), False, array), lambda value: list(value) if isinstance(value, tuple) else value)


def text_or_names() -> Kind:
    """One text, or a list of different texts (as a tuple)."""
    several, one = names(), text()

    def parse(value: Any) -> str | tuple[str, ...]:
        if isinstance(value, list | tuple):
            found: tuple[str, ...] = several.parse(value)
            return found
        name: str = one.parse(value)
        return name

    return Kind(parse, any_of((), False, one.json, several.json), several.dump)


def columns(*parts: str) -> Kind:
    """Null, or as many different names of columns as there are parts, in their order, as a tuple."""
    expected = f"null, or a list of {len(parts)} names of columns: [{', '.join(parts)}]"
    listed = names(low=len(parts))

    def parse(value: Any) -> tuple[str, ...] | None:
        if value is None:
            return None
        if isinstance(value, list | tuple) and len(value) != len(parts):
            raise ValueError(f"{shown(value)} has {len(value)} names; give {expected}")
        found: tuple[str, ...] = listed.parse(value)
        return found

    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": len(parts), "maxItems": len(parts)}
    return Kind(parse, any_of((), True, schema), lambda value: None if value is None else list(value))


def some_of(*words: str) -> Kind:
    """A list of some of these words, each once at most, as a tuple."""

    def parse(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{shown(value)} is {what(value)}; give a list: {shown(list(words[:2]))}")
        for index, item in enumerate(value):
            if not (isinstance(item, str) and item in words):
                raise at([index], str(refuse_word(item, words, (), "")))
            if item in value[:index]:
                raise at([index], f"{item} is there twice; keep one")
        return tuple(value)

    return Kind(parse, {"type": "array", "items": {"enum": list(words)}, "uniqueItems": True}, list)


def spacing() -> Kind:
    """auto, off, one spacing for all stages, or a mapping from stage to spacing."""
    expected = "auto, off, a whole number of at least 1, or {stage0: 1, stage2: 3}"

    def parse(value: Any) -> str | int | dict[str, int]:
        if not isinstance(value, Mapping):
            one: str | int = whole("auto", "off", low=1).parse(value)
            return one
        if not value:
            raise ValueError(f"an empty mapping; give {expected}")
        for stage, blocks in value.items():
            if isinstance(blocks, bool) or not isinstance(blocks, int) or blocks < 1:
                raise at([stage], f"{shown(blocks)} is not a whole number of at least 1; give the blocks between checkpoints")
        return dict(value)

    one = {"type": "integer", "minimum": 1}
    return Kind(parse, {"anyOf": [{"enum": ["auto", "off"]}, one, {"type": "object", "additionalProperties": one, "minProperties": 1}]})


def augment() -> Kind:
    """A strength, or a list of albumentations as mappings with a name and arguments: `- {name: HorizontalFlip, p: 0.5}`."""
    words = ("none", "light", "standard", "heavy")
    word = choice(*words, also="a list of albumentations")
    expected = f"{', '.join(words)}, or a list such as [{{name: HorizontalFlip, p: 0.5}}]"

    def step(item: Any, index: int) -> dict[str, Any]:
        if isinstance(item, str) and item:
            return {"name": item}
        if not isinstance(item, Mapping):
            raise at([index], f"{shown(item)} is {what(item)}; give {{name: HorizontalFlip, p: 0.5}}")
        if not isinstance(item.get("name"), str) or not item["name"]:
            raise at([index], f"{shown(item)} has no name; give {{name: HorizontalFlip, p: 0.5}}")
        return dict(item)

    def parse(value: Any) -> str | tuple[dict[str, Any], ...]:
        if isinstance(value, str):
            strength: str = word.parse(value)
            return strength
        if not isinstance(value, list | tuple):
            raise ValueError(f"{shown(value)} is {what(value)}; give {expected}")
        return tuple(step(item, index) for index, item in enumerate(value))

    item = {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}]}
    return Kind(parse, {"anyOf": [{"enum": list(words)}, {"type": "array", "items": item}]}, list)
