"""A tree of nodes to a recipe, or to every finding about its keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from hiresvis.recipe.rules import broken_rules
from hiresvis.recipe.schema import Recipe, Section, keys_of, section_of
from hiresvis.recipe.values import nearest, shown, what
from hiresvis.recipe.yamltext import Found, Node, Place

ALL_KEYS = keys_of()
REQUIRED = {"task": "classify", "data.train": "data/train", "model.name": "convnextv2_base"}  # with examples


def places_of(node: Node, key: str = "") -> Iterator[tuple[str, Place]]:
    if isinstance(node.value, dict):
        for name, entry in node.value.items():
            full = f"{key}.{name}" if key else name
            yield full, entry.node.place
            yield from places_of(entry.node, full)


def validate(root: Node, *, only_given: bool) -> tuple[Recipe | None, list[Found]]:
    """The recipe, or all that is wrong with it. `only_given`: what is missing is not worth a word (nothing was read)."""
    raw = root.plain()
    assert isinstance(raw, dict), "the root is a mapping"
    for name, info in Recipe.model_fields.items():
        if section_of(info.annotation) and raw.get(name) is None and (name in raw or info.is_required()):
            raw[name] = {}  # a section whose keys are all commented out, or left out
    findings: list[Found] = []
    refused: list[tuple[str, ...]] = []
    try:
        recipe: Recipe | None = Recipe.model_validate(raw)
    except ValidationError as error:
        recipe = None
        for detail in error.errors(include_url=False):
            parts = tuple(str(part) for part in detail["loc"])
            refused.append(parts)
            if detail["type"] == "missing" and (only_given or _broken(root, parts)):
                continue
            findings.append(_explain(root, parts, detail))
    partial = recipe or _without(raw, refused)
    if partial is not None:
        given = frozenset(key for key, _ in places_of(root))
        rules = [rule for rule in broken_rules(partial, given) if not {rule.key, *rule.others}.intersection(map(".".join, refused))]
        findings += [Found(_find(root, rule.key.split("."))[1], rule.key, rule.message) for rule in rules]
    return recipe, findings


def _without(raw: dict[str, Any], refused: Sequence[Sequence[str]]) -> Recipe | None:
    """The recipe with every refused key at its default, for the rules between keys; None where that is not enough."""
    for *sections, last in refused:
        inner: Any = raw
        for section in sections:
            inner = inner.get(section) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner.pop(last, None)
    for key, value in REQUIRED.items():
        section, _, last = key.rpartition(".")
        holder = raw.setdefault(section, {}) if section else raw
        holder.setdefault(last, value)
    try:
        return Recipe.model_validate(raw)
    except ValidationError:
        return None


def _find(root: Node, parts: Sequence[str]) -> tuple[Place, Place, object]:
    """(place of the key, place of its value, the value); for a key that is not there, its section's place."""
    node, key_place, value_place = root, root.place, root.place
    for part in parts:
        if not isinstance(node.value, dict) or part not in node.value:
            return key_place, key_place, None
        entry = node.value[part]
        node, key_place, value_place = entry.node, entry.place, entry.node.place
    return key_place, value_place, node.plain()


def _broken(root: Node, parts: Sequence[str]) -> bool:
    node = root
    for part in parts:
        if not isinstance(node.value, dict) or part not in node.value:
            return False
        node = node.value[part].node
        if node.broken:
            return True
    return False


def _explain(root: Node, parts: Sequence[str], detail: Any) -> Found:
    key = ".".join(parts)
    key_place, value_place, value = _find(root, parts)
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return Found(key_place, key, f"unknown key; {_unknown(parts)}")
    if kind == "missing":
        return Found(key_place, key, f"missing; {_mend_missing(key)}")
    if kind in {"model_type", "model_attributes_type", "dict_type"}:
        first = next(name for name in ALL_KEYS if name.startswith(f"{key}."))
        return Found(
            value_place, key, f"{shown(value)} is {what(value)}, not a mapping; write {key}: {{{first.removeprefix(f'{key}.')}: ...}}"
        )
    if kind == "recipe":
        place, inside = _inside(root, parts, context["at"])
        return Found(place, f"{key}{inside}", context["message"])
    message = str(context["error"]) if "error" in context else detail["msg"]
    return Found(value_place, key, message)


def _inside(root: Node, parts: Sequence[str], at: Sequence[int | str]) -> tuple[Place, str]:
    node = root
    for part in parts:
        if isinstance(node.value, dict) and part in node.value:
            node = node.value[part].node
    name = ""
    for step in at:
        name += f"[{step}]" if isinstance(step, int) else f".{step}"
        if isinstance(node.value, list) and isinstance(step, int):
            node = node.value[step]
        elif isinstance(node.value, dict) and str(step) in node.value:
            node = node.value[str(step)].node
    return node.place, name


def _mend_missing(key: str) -> str:
    example = f"{key.rpartition('.')[2]}: {REQUIRED[key]}"
    section = key.rpartition(".")[0]
    return f"write {section}: {{{example}}}" if section else f"write {example}"


def _unknown(parts: Sequence[str]) -> str:
    """What an unknown key was likely meant to be."""
    *sections, name = parts
    siblings = _names_in(sections)
    if "." in name and name.partition(".")[0] in Recipe.model_fields:
        return "dotted keys are for the command line; nest the key in its section"
    elsewhere = [other for other in ALL_KEYS if other.rpartition(".")[2] == name]
    if not elsewhere and (guess := nearest(name, siblings)):
        return f"did you mean {guess}?"
    if not elsewhere and (guess := nearest(name, [other.rpartition(".")[2] for other in ALL_KEYS])):
        elsewhere = [other for other in ALL_KEYS if other.rpartition(".")[2] == guess]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    return f"{'.'.join(sections) or 'a recipe'} has {', '.join(siblings)}"


def _names_in(sections: Sequence[str]) -> list[str]:
    inner: type[Section] = Recipe
    for part in sections:
        found = section_of(inner.model_fields[part].annotation) if part in inner.model_fields else None
        if found is None:
            return []
        inner = found
    return list(inner.model_fields)
