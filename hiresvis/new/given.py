"""What is settled before anything is proposed: `key=value` of the command line, and answers to questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hiresvis.errors import Problem, RecipeError
from hiresvis.recipe.schema import keys_of, kind_of
from hiresvis.recipe.values import shown
from hiresvis.recipe.yamltext import Place, parse

_COLUMNS = ("image", "label", "split", "group", "region")

Ask = Callable[[str, str], str]
"""A question and the proposed answer, to the answer."""


def read_given(overrides: Sequence[str]) -> dict[str, Any]:
    """Overrides as values by key, in a recipe's words.

    Raises:
        RecipeError: one is none; all of them that are not.
    """
    found: dict[str, Any] = {}
    problems = []
    for number, override in enumerate(overrides, start=1):
        key, equals, text = (part.strip() for part in override.partition("="))
        place = f"override {number} ({override})"
        document = parse(text, lambda line, column, place=place: Place(place))  # type: ignore[misc]
        if not equals or document.root is None or document.findings:
            problems.append(Problem("not key=value; write train.epochs=5", place))
            continue
        value = document.root.plain()
        try:
            if key not in keys_of():
                raise ValueError("is no key that holds a value; hiresvis schema lists them")
            kind_of(key).parse(value)
        except ValueError as error:
            problems.append(Problem(str(error), place, key))
        found[key] = value
    if problems:
        raise RecipeError(problems)
    return found


def settled(given: Mapping[str, Any]) -> dict[str, str | tuple[str, ...]]:
    """What is settled of the task and the columns."""
    found = {name: given[f"data.{name}"] for name in _COLUMNS if given.get(f"data.{name}") is not None}
    wanted = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return wanted if "task" not in given else {**wanted, "task": given["task"]}


def answer(question: str, key: str, proposed: Any, ask: Ask) -> tuple[Any, bool]:
    """(an answer that the key can hold, whether it is another than the proposal)."""
    while True:
        text = ask(question, shown(proposed))
        if text == shown(proposed):
            return proposed, False
        try:
            return read_given([f"{key}={text}"])[key], True
        except RecipeError as error:
            question = f"{error.problems[0].message}. {key}"
