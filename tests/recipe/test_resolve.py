"""The resolved recipe: every value, its origin, and back again."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hiresvis.recipe import Recipe, Resolution, load_recipe, yamltext
from hiresvis.recipe.quantities import dump_duration, dump_share, dump_size
from hiresvis.recipe.resolve import flow_text
from hiresvis.recipe.schema import kind_of
from hiresvis.units import parse_duration, parse_size


def reload(resolution, tmp_path, name="recipe.resolved.yaml"):
    (tmp_path / name).write_text(resolution.text(), encoding="utf-8")
    return load_recipe(tmp_path / name).recipe


def test_resolved_file_gives_the_same_recipe(load, tmp_path):
    """What was written loads again to equal values, `auto` ones as they were found."""
    resolution = Resolution(load(overrides=["model.image_size=[720, 1280]", "data.augment=[{name: Blur, p: 0.5}]", "train.max_time=90s"]))
    resolution.set("memory.budget", 22 * 2**30 + 1, "80% of what is free")
    resolution.set("memory.spacing", {"stage0": 2}, "the plan")
    resolution.set("optim.lr", 1.25e-05, "rule: 5e-5 for batch 16")
    resolution.set("data.classes", ("010", "on", "a: b", "ü # x"), "folders of train")
    resolution.set("optim.layer_decay", None, "no pretrained weights")
    again = reload(resolution, tmp_path)
    assert again == resolution.recipe
    assert again.data.classes == ("010", "on", "a: b", "ü # x")
    assert again.memory.budget == 22 * 2**30 + 1


def test_resolved_file_means_the_same_from_another_folder(load, tmp_path):
    """Paths are absolute, so that the run folder's copy finds the data."""
    resolution = Resolution(load())
    (tmp_path / "elsewhere").mkdir()
    assert reload(resolution, tmp_path / "elsewhere").data.train == str(tmp_path / "data/train")


def test_every_line_says_where_its_value_came_from(load):
    """Each value carries given, default, or auto with the reason."""
    resolution = Resolution(load(overrides=["train.early_stop=null", "train.seed=3"]))
    resolution.set("train.metric", "balanced_accuracy", "the largest class\nis 4.2 times the smallest")
    text = resolution.text()
    values = [line for line in text.splitlines() if not re.fullmatch(r" *\w+:|#.*", line)]
    assert all(re.search(r"  # (given|default|auto: .+)$", line) for line in values)
    assert "  metric: balanced_accuracy  # auto: the largest class is 4.2 times the smallest\n" in text
    assert "  early_stop: null  # given\n" in text
    assert "  seed: 3  # given\n" in text
    assert "  lr: auto  # default\n" in text
    assert "  epochs: 20  # given\n" in text


def test_entries_follow_the_schema(load):
    """Entries hold key, value, origin and reason, in the schema's order."""
    resolution = Resolution(load())
    resolution.set("optim.lr", 1e-4, "why not")
    entry = next(entry for entry in resolution.entries if entry.key == "optim.lr")
    assert (entry.value, entry.origin, entry.why) == (1e-4, "auto", "why not")
    assert [entry.key for entry in resolution.entries][:3] == ["version", "task", "data.train"]


def test_autos_come_in_the_order_they_were_found(load):
    """What was settled last is told last, wherever its key stands in the schema."""
    resolution = Resolution(load())
    resolution.set("optim.lr", 1e-4, "why not")
    resolution.set("data.workers", 2, "four cores")
    assert [(entry.key, entry.value, entry.why) for entry in resolution.autos] == [
        ("optim.lr", 1e-4, "why not"),
        ("data.workers", 2, "four cores"),
    ]
    assert {entry.origin for entry in resolution.autos} == {"auto"}


def test_setting_what_a_recipe_cannot_hold_is_a_fault_of_ours(load):
    """An unknown key or an impossible value is refused at once and leaves no trace."""
    resolution = Resolution(load())
    with pytest.raises(ValueError, match=r"no key 'optim\.x'"):
        resolution.set("optim.x", 1, "because")
    with pytest.raises(ValueError, match=r"optim\.lr cannot hold -1"):
        resolution.set("optim.lr", -1, "because")
    assert resolution.recipe.optim.lr == "auto"


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text()


@given(st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6))
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_value_reads_back_as_itself(value):
    """Whatever is written in flow style, odd characters included, is read back equal and of the same kind."""
    document = yamltext.parse(f"- {flow_text(value)}  # why\n", lambda line, column: yamltext.Place(""))
    assert document.findings == []
    assert document.root.plain() == [value]


@given(st.integers(2**20, 2**50))
def test_sizes_are_written_exactly(num_bytes):
    """Any number of bytes survives."""
    assert parse_size(dump_size(num_bytes)) == num_bytes


@given(st.floats(1e-6, 1e8, allow_nan=False))
def test_times_are_written_exactly(seconds):
    """Any time survives."""
    assert parse_duration(dump_duration(seconds)) == seconds


@given(st.floats(0, 1, exclude_max=True, allow_nan=False, allow_subnormal=False))
def test_shares_are_written_exactly(share):
    """Any share survives as per cent."""
    assert kind_of("optim.warmup").parse(dump_share(share)) == share


@given(st.floats(0.001, 1, allow_nan=False) | st.integers(2**20, 2**44))
def test_budgets_are_written_exactly(budget):
    """Any budget, as bytes or as a share, survives."""
    kind = kind_of("memory.budget")
    assert kind.parse(kind.write(budget)) == budget


def test_a_recipe_made_in_python_dumps_to_its_own_words():
    """model_dump gives what a recipe would say, not what the program works with."""
    recipe = Recipe.model_validate({"task": "classify", "data": {"train": "d"}, "model": {"name": "m"}})
    dumped = recipe.model_dump()
    assert (dumped["data"]["max_pixels"], dumped["train"]["save_every"], dumped["optim"]["warmup"]) == ("500M", "10min", "5%")
    assert Recipe.model_validate(dumped) == recipe
