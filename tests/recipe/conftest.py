"""Recipes as text, loaded from a temporary folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hiresvis.errors import Problem, RecipeError
from hiresvis.recipe import LoadedRecipe, load_recipe

SIX_LINES = """\
task: classify
data: {train: data/train, val: data/val}
model: {name: convnextv2_base, image_size: 2048}
memory: {budget: auto}
train: {epochs: 20, batch: 16}
log: {dir: runs/lesions}
"""


@pytest.fixture
def six_lines() -> str:
    return SIX_LINES


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LoadedRecipe]:
    """Writes a text to recipe.yaml in the current (temporary) folder and loads it from there."""
    monkeypatch.chdir(tmp_path)

    def load(text: str | bytes = SIX_LINES, overrides: Sequence[str] = ()) -> LoadedRecipe:
        Path("recipe.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
        return load_recipe("recipe.yaml", overrides)

    return load


@pytest.fixture
def problems(load: Callable[..., LoadedRecipe]) -> Callable[..., tuple[Problem, ...]]:
    """All problems of a text that must be refused."""

    def problems(text: str | bytes = SIX_LINES, overrides: Sequence[str] = ()) -> tuple[Problem, ...]:
        with pytest.raises(RecipeError) as caught:
            load(text, overrides)
        return caught.value.problems

    return problems
