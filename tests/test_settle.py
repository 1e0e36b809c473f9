"""What a recipe's `auto` becomes before any model is built, and what a budget makes of the average of the weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from hiresvis.memory.budget import Budget
from hiresvis.memory.cards import find_card
from hiresvis.profiles import Facts
from hiresvis.recipe import LoadedRecipe, Resolution, load_recipe
from hiresvis.settle import limits_of, settle_costs, settle_ema, snapshot_bytes

GIB = 2**30
BY_HAND = Path(__file__).parent / "memory" / "by_hand.py"


@pytest.fixture(scope="module")
def by_hand() -> ModuleType:
    """Profiles made by hand."""
    spec = importlib.util.spec_from_file_location("settle_by_hand", BY_HAND)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def load(tmp_path: Path):
    """load(*overrides) -> the recipe of six lines."""

    def load_(*overrides: str) -> LoadedRecipe:
        path = tmp_path / "r.yaml"
        path.write_text("task: classify\ndata: {train: d}\nmodel: {name: m, norm: batch}\n", encoding="utf-8")
        return load_recipe(path, overrides)

    return load_


@pytest.mark.parametrize(
    ("overrides", "averaged", "why"),
    [
        ((), False, "the cosine schedule brings the weights to rest"),
        (("optim.schedule=constant",), True, "a learning rate that never falls"),
        (("train.ema=true",), True, "given"),
        (("optim.schedule=constant", "train.ema=false"), False, "given"),
    ],
)
def test_weights_are_averaged_where_the_learning_rate_does_not_fall(load, overrides, averaged, why):
    """Beside the cosine an average is not worth its memory; what is given counts."""
    found, reason = settle_ema(load(*overrides))
    assert found is averaged
    assert why in reason


@pytest.mark.parametrize(("card", "ema", "on_host"), [("H100", GIB, True), ("H100", GIB // 2, False), (None, 8 * GIB, False)])
def test_an_average_that_takes_more_than_a_twentieth_of_a_cards_budget_is_kept_by_the_host(load, by_hand, card, ema, on_host):
    """Then the plan has its room; on the CPU there is no other memory to put it in. A snapshot holds it in either case."""
    loaded = load("train.ema=true")
    profile = by_hand.profile(ema=ema, gradients=ema, buffers=0)
    limits = limits_of(loaded, find_card(card) if card else None, "bf16")
    budget = Budget(16 * GIB, 0, 80 * GIB, 0, 0, "given")
    facts = Facts(stride=32, batch_norm=True, parameters=1)
    costs = settle_costs(loaded, Resolution(loaded), "batch", lambda _: (profile, facts), lambda *_: budget, limits)
    assert costs.average_on_host is on_host
    assert costs.profile.ema == (0 if on_host else ema)
    assert snapshot_bytes(costs.profile, average_on_host=on_host) == profile.weights + profile.optimizer_state + ema
