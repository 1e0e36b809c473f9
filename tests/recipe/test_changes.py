"""What a changed recipe means for a run that goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hiresvis.errors import RunFolderError
from hiresvis.recipe import Entry, LoadedRecipe, Resolution
from hiresvis.recipe.changes import adopt, changes, read_resolved, refuse_changes

Load = Callable[..., LoadedRecipe]


@pytest.fixture
def own(load: Load, six_lines: str, tmp_path: Path) -> dict[str, Entry]:
    """The run's own recipe as its folder keeps it: some values given, some found."""
    resolution = Resolution(load(six_lines, ["optim.lr=0.001", "memory.micro_batch=4"]))
    resolution.set("memory.budget", 2**31, 'half of "4 GiB": why  not')
    resolution.set("train.metric", "accuracy", "the classes are balanced")
    resolution.set("model.norm", "frozen", "micro-batch 4 is below 8: noise")
    resolution.set("data.scale", (0.0, 4095.0), "percentiles")
    (tmp_path / "recipe.resolved.yaml").write_text(resolution.text())
    return read_resolved(tmp_path / "recipe.resolved.yaml")


def test_origins_and_reasons_are_read_back(own: dict[str, Entry], load: Load) -> None:
    """The file that is written for people is read to the same entries."""
    assert own["memory.budget"] == Entry("memory.budget", "2GiB", "auto", 'half of "4 GiB": why not')
    assert own["optim.lr"] == Entry("optim.lr", 0.001, "given")
    assert own["train.early_stop.patience"] == Entry("train.early_stop.patience", 5, "default")
    assert own["version"].origin == "default"


def test_the_same_recipe_has_no_changes(own: dict[str, Entry], load: Load, six_lines: str) -> None:
    """auto stands for what was found; relative paths are those of the run."""
    assert changes(own, load(six_lines, ["optim.lr=0.001", "memory.micro_batch=4"])) == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.lr=auto", [("optim.lr", "taken")]),
        ("memory.micro_batch=auto", []),  # the plan's own
        ("memory.micro_batch=8", [("memory.micro_batch", "none")]),
        ("memory.budget=2GiB", []),  # what was found
        ("model.norm=batch", [("model.norm", "refused")]),
        ("data.scale=[0, 255]", [("data.scale", "refused")]),
        ("data.val=0.2", [("data.val", "refused")]),
        ("data.val=elsewhere", [("data.val", "taken")]),
        ("train.early_stop=null", [("train.early_stop.patience", "taken")]),
        ("log.ui=plain", [("log.ui", "taken")]),
    ],
)
def test_each_kind_of_change(own: dict[str, Entry], load: Load, six_lines: str, override: str, said: list[tuple[str, str]]) -> None:
    """Refused, without effect, or taken."""
    overrides = [text for text in ("optim.lr=0.001", "memory.micro_batch=4") if text.partition("=")[0] != override.partition("=")[0]]
    assert [(change.key, change.effect) for change in changes(own, load(six_lines, [*overrides, override]))] == said


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.adapt=lp_ft"], []),  # what was found
        (["model.adapt=lp_ft", "train.epochs=100"], [("train.epochs", "taken")]),  # its phase stays as it was settled
        (["model.adapt=lp_ft", "model.lp_ft.head_epochs=5"], [("model.lp_ft.head_epochs", "refused")]),
        (["model.adapt=lp_ft", "model.lp_ft.head_lr=0.5"], [("model.lp_ft.head_lr", "taken")]),
        (["model.adapt=lora"], [("model.adapt", "refused")]),
        ([], [("model.adapt", "refused")]),
    ],
)
def test_a_way_to_adapt_stays(load: Load, six_lines: str, tmp_path: Path, overrides: list[str], said: list[tuple[str, str]]) -> None:
    """So do the epochs of its first phase; another way is told once, not key by key."""
    resolution = Resolution(load(six_lines, ["model.adapt=lp_ft"]))
    resolution.set("model.lp_ft.head_epochs", 4, "20% of 20 epochs")
    resolution.set("model.lp_ft.head_lr", 0.01, "a rule")
    (tmp_path / "recipe.resolved.yaml").write_text(resolution.text())
    own = read_resolved(tmp_path / "recipe.resolved.yaml")
    assert own["model.lp_ft.head_epochs"] == Entry("model.lp_ft.head_epochs", 4, "auto", "20% of 20 epochs")
    assert [(change.key, change.effect) for change in changes(own, load(six_lines, overrides))] == said


def test_refused_changes_name_place_values_and_mend(own: dict[str, Entry], load: Load, six_lines: str) -> None:
    """One line each; none where nothing is refused."""
    now = load(six_lines.replace("batch: 16", "batch: 8"), ["model.name=resnet18", "optim.lr=1"])
    with pytest.raises(RunFolderError) as caught:
        refuse_changes(changes(own, now), now, Path("runs/lesions"))
    assert str(caught.value).splitlines() == [
        "runs/lesions: a run cannot change this on its way; or begin another: log.dir=NEW_FOLDER",
        "override 1 (model.name=resnet18)  model.name  the run was begun with convnextv2_base, and this is resnet18; "
        "set it back: model.name=convnextv2_base",
        "recipe.yaml:5:28  train.batch  the run was begun with 16, and this is 8; set it back: train.batch=16",
    ]
    same = load(six_lines, ["optim.lr=1"])
    refuse_changes(changes(own, same), same, Path("runs/lesions"))


def test_the_folder_goes_on_telling_what_the_run_settled(own: dict[str, Entry], load: Load, six_lines: str) -> None:
    """What a resumed start does not find anew keeps value and reason; what has no effect keeps the run's value."""
    now = load(six_lines, ["optim.lr=0.5", "memory.micro_batch=8"])
    resolution = Resolution(now)
    resolution.set("train.metric", "macro_f1", "found anew")
    resolution.set("memory.budget", 2**30, "half of another machine")
    adopt(own, changes(own, now), now, resolution)
    text = resolution.text()
    for line in (
        '  budget: 2GiB  # auto: half of "4 GiB": why not',
        "  micro_batch: 4  # auto: as the run was begun",
        "  norm: frozen  # auto: micro-batch 4 is below 8: noise",
        "  scale: [0.0, 4095.0]  # auto: percentiles",
        "  metric: macro_f1  # auto: found anew",
        "  lr: 0.5  # given",
    ):
        assert f"{line}\n" in text, text


def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path) -> None:
    """With its path."""
    with pytest.raises(RunFolderError, match=r"recipe\.resolved\.yaml: not the recipe of a run any more"):
        read_resolved(tmp_path / "recipe.resolved.yaml")
