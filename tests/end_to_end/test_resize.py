"""`train.resize` through the command line: smaller images first, each size with its plan."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from hiresvis.errors import Interrupted
from hiresvis.fit import fit
from hiresvis.recipe import load_recipe

STEPS = "train.resize=[[0, 32], [50%, 64]]"
SHORT = ("train.epochs=4", "model.drop_path=auto", "optim.warmup=0", "train.eval_batch=4", "memory.micro_batch=3")
MODELS = {"test_resnet": (), "test_vit": ("model.norm=auto",)}
on_convnet = pytest.mark.parametrize("resized", ["test_resnet"], indirect=True)
on_both = pytest.mark.parametrize("resized", sorted(MODELS), indirect=True)


@pytest.fixture(scope="module")
def resized(request, tmp_path_factory, folders, make_workshop):
    """A finished run in two sizes; no test changes it."""
    work = make_workshop(tmp_path_factory.mktemp("resized"), folders)
    work.overrides = (f"model.name={request.param}", *MODELS[request.param], *SHORT)
    work.done = work.fit(*work.overrides, STEPS)
    return work


def losses(work, run: str, epochs: range) -> list[tuple[int, int, float]]:
    return [(row["epoch"], row["step"], row["loss"]) for row in work.events("step_done", run) if row["epoch"] in epochs]


@on_convnet
def test_the_first_epochs_are_those_of_a_run_at_their_size(resized):
    """Steps at 32 px are bit for bit those of a run that has this size throughout; later ones are not."""
    resized.fit(*resized.overrides, "model.image_size=32", name="small")
    assert losses(resized, "recipe", range(1, 3)) == losses(resized, "small", range(1, 3))
    assert losses(resized, "recipe", range(3, 5)) != losses(resized, "small", range(3, 5))


@on_both
def test_each_size_is_told_planned_and_kept(resized):
    """A line at each change, a plan of its own for each size at one micro-batch, and evaluation at the last size throughout."""
    told = [row["text"] for row in resized.events("notice") if row["text"].startswith("epoch ") and "images of" in row["text"]]
    assert [line.partition(" px")[0] for line in told] == ["epoch 1: images of 32x32", "epoch 3: images of 64x64"]
    plan = resized.read("plan.json")
    small, last = plan["sizes"]
    assert (small["first_epoch"], small["image_size"], last["first_epoch"], last["plan"]) == (1, [32, 32], 3, None)
    assert small["plan"]["micro_batch"] == plan["micro_batch"] == 3
    assert small["plan"]["predicted_peak_bytes"] < plan["predicted_peak_bytes"]
    assert resized.read("contract.json")["image_size"] == [64, 64]
    again, best = resized("evaluate", resized.path(""), "--json").json["val"], resized.events("run_finished")[0]["best_epoch"]
    (told,) = [row for row in resized.events("evaluated") if row["split"] == "val" and row["epoch"] == best]
    assert again.items() >= {"loss": told["loss"], **told["metrics"]}.items()


@pytest.mark.parametrize(("resized", "epoch", "step"), [("test_resnet", 1, 1), ("test_vit", 2, 2)], indirect=["resized"])
def test_a_run_stopped_at_any_size_goes_on_to_the_same_bits(resized, epoch, step):
    """Stopped within the small images, and at the change: weights and metrics are those of the run that was not stopped."""
    name = f"stopped{epoch}{step}"
    recipe = load_recipe(resized.recipe, [*resized.overrides, STEPS, f"log.dir={resized.folder / 'runs' / name}"])
    with pytest.raises(Interrupted):  # noqa: PT012 - the loop is the statement
        for event in fit(recipe):
            if event.kind == "step_done" and (event.epoch, event.step) == (epoch, step):
                os.kill(os.getpid(), signal.SIGINT)
    resized.fit(*resized.overrides, STEPS, "--resume", name=name)
    one, other = (load_file(resized.path("weights/last.safetensors", run)) for run in ("recipe", name))
    assert not [key for key in one if not torch.equal(one[key], other[key])]
    assert losses(resized, "recipe", range(1, 5)) == losses(resized, name, range(1, 5))


@on_convnet
def test_more_epochs_at_a_resume_move_no_size(resized):
    """What began in epoch 3 of 4 does so when the run is made longer: no image gets smaller again."""
    resized.fit(*resized.overrides, STEPS, name="longer")
    longer = [value for value in resized.overrides if not value.startswith("train.epochs")]
    resized.fit(*longer, "train.epochs=8", STEPS, "--resume", name="longer")
    told = [
        row["text"].partition(" px")[0]
        for row in resized.events("notice", "longer")
        if row["text"].startswith("epoch ") and "images of" in row["text"]
    ]
    assert told == ["epoch 1: images of 32x32", "epoch 3: images of 64x64"]


def test_small_images_that_cannot_stand_alone_are_refused_before_training(workshop):
    """A map of a single pixel has no batch statistics of one image, also where only the first size comes to that."""
    done = workshop.fit("memory.micro_batch=1", STEPS, ok=False)
    assert done.code == 4
    assert "test_resnet at 32x32 px takes batch statistics of a map of a single pixel" in done.err
    assert not workshop.path("").exists()


def test_a_model_for_one_size_is_refused_by_name(workshop):
    """What a model cannot do is said at the recipe's key, before anything is built."""
    sizes = ("model.image_size=384", "train.resize=[[0, 224], [50%, 384]]")
    done = workshop.fit("model.name=beit_base_patch16_224", *sizes, ok=False)
    assert done.code == 2
    assert "train.resize" in done.err
    assert "does not take 224 beside its own size (Input height (224) doesn't match model (384).)" in done.err
