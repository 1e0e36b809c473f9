"""Recipes: YAML to validated values with located errors, and back to YAML with every value resolved."""

from __future__ import annotations

from hiresvis.recipe.load import LoadedRecipe, load_recipe, parse_recipe
from hiresvis.recipe.resolve import Entry, Resolution
from hiresvis.recipe.schema import Recipe, recipe_json_schema

__all__ = ["Entry", "LoadedRecipe", "Recipe", "Resolution", "load_recipe", "parse_recipe", "recipe_json_schema"]
