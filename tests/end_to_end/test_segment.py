"""Segmentation from folders of images and masks to a finished run, to a stated mIoU, and what later commands make of it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

SHAPES = ("ground", "green", "blue")
RECIPE = """\
task: segment
data:
  train: {data}/train
  val: {data}/val
  test: {data}/test
  augment: light
  workers: 0
model:
  name: test_convnext
  pretrained: false
  image_size: 96
memory:
  budget: 4GiB
optim:
  lr: 4e-3
train:
  epochs: 6
  batch: 8
"""


def draw(folder: Path, counts: dict[str, int], sides: tuple[int, int], seed: int = 0) -> Path:
    """Noise with a green and a blue square, the masks of them, a strip of no class, and images of many sizes."""
    rng = np.random.default_rng(seed)
    for split, count in counts.items():
        for kind in ("images", "masks"):
            (folder / split / kind).mkdir(parents=True)
        for number in range(count):
            height, width = rng.integers(*sides, 2)
            pixels, mask = rng.integers(0, 120, (height, width, 3), dtype=np.uint8), np.zeros((height, width), np.uint8)
            for label in (1, 2):
                side = int(rng.integers(24, 44))
                top, left = int(rng.integers(height - side)), int(rng.integers(width - side))
                pixels[top : top + side, left : left + side, label] = 220
                mask[top : top + side, left : left + side] = label
            mask[:2] = 255
            Image.fromarray(pixels).save(folder / split / "images" / f"s{number:02d}.png")
            Image.fromarray(mask).save(folder / split / "masks" / f"s{number:02d}.png")
    (folder / "train" / "classes.txt").write_text("\n".join(SHAPES), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def squares(tmp_path_factory) -> Path:
    """No test changes it."""
    return draw(tmp_path_factory.mktemp("squares"), {"train": 24, "val": 6, "test": 5}, (90, 130))


@pytest.fixture(scope="module")
def run(squares, make_workshop, tmp_path_factory):
    """A finished run; no test changes it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    work = make_workshop(tmp_path_factory.mktemp("segment"), squares, RECIPE)
    work.done = work.fit("--ui", "plain")
    torch.set_num_threads(threads)
    return work


def mean_iou(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Of (true, predicted) masks, counted anew."""
    counts = np.zeros((3, 3))
    for true, predicted in pairs:
        for label in range(3):
            for found in range(3):
                counts[label, found] += ((true == label) & (predicted == found)).sum()
    hits = np.diag(counts)
    return float((hits / (counts.sum(0) + counts.sum(1) - hits)).mean())


def test_a_run_reaches_its_mean_iou_and_says_why_it_decides(run):
    """0.8 or more on images of other sizes than the model's; loss, metric and classes are settled with their reasons."""
    (finished,) = run.events("run_finished")
    assert finished["metric"] == "miou"
    assert finished["best_value"] > 0.8
    assert finished["test_metrics"]["miou"] > 0.8
    reasons = {row["key"]: row["reason"] for row in run.events("auto_resolved")}
    assert reasons["optim.loss"] == "the task is segment"
    assert "however few its pixels" in reasons["train.metric"]
    assert "classes.txt" in reasons["data.classes"]
    contract = run.read("contract.json")
    assert (contract["task"], tuple(contract["classes"]), contract["ignore_index"]) == ("segment", SHAPES, 255)
    assert "export" not in run.done.out
    assert finished["counted_peak_bytes"] == pytest.approx(finished["predicted_counted_bytes"], rel=0.01)


def test_evaluate_repeats_the_digits_and_gives_each_class(run):
    """Of both splits; by other data; the classes' mean is the metric."""
    done = run("evaluate", run.path(""), "--json").json
    best = {row["split"]: row for row in run.events("evaluated") if row["split"] == "test" or row["is_best"]}
    for split in ("val", "test"):
        classes, absent = done[split].pop("classes"), done[split].pop("absent")
        assert absent == [name for name, row in classes.items() if not row["share"]]
        assert done[split] == {"images": 6 if split == "val" else 5, "loss": best[split]["loss"], **best[split]["metrics"]}
        assert list(classes) == list(SHAPES)
        assert np.mean([row["iou"] for row in classes.values()]) == pytest.approx(done[split]["miou"])
        assert sum(row["share"] for row in classes.values()) == pytest.approx(1)
    other = run("evaluate", run.path(""), "--data", run.data / "test", "--json").json["data"]
    assert other["miou"] == done["test"]["miou"]
    mirrored = run("evaluate", run.path(""), "--flips", "--json").json["test"]
    assert mirrored["miou"] != done["test"]["miou"]
    assert mirrored["miou"] > 0.8


def test_what_is_evaluated_in_training_is_what_is_kept(squares, make_workshop, tmp_path):
    """With an average of the weights, and another loss than the task's own: the last digits of fit are those of evaluate."""
    work = make_workshop(tmp_path, squares, RECIPE)
    work.fit("train.ema=true", "optim.loss=cross_entropy", "train.epochs=1")
    done = work("evaluate", work.path(""), "--json").json
    assert {row["split"]: row["loss"] for row in work.events("evaluated")} == {name: done[name]["loss"] for name in ("val", "test")}


def test_predict_writes_masks_of_the_images_size_that_the_metric_is_of(run, tmp_path):
    """Palette PNGs with the masks' own values, one an image; their mIoU is evaluate's; a file that is no image has its row."""
    bad = tmp_path / "bad.png"
    bad.write_text("no image")
    done = run("predict", run.path(""), run.data / "test" / "images", bad, "--out", tmp_path / "said.csv")
    assert done.code == 3
    with (tmp_path / "said.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [bool(row["error"]) for row in rows] == [False] * 5 + [True]
    assert rows[-1]["mask"] == ""
    pairs = []
    for row in rows[:-1]:
        written = Image.open(row["mask"])
        assert Path(row["mask"]).parent == tmp_path / "said_masks"
        assert written.mode == "P"
        found, true = np.asarray(written), np.asarray(Image.open(run.data / "test" / "masks" / Path(row["path"]).name))
        assert found.shape == true.shape
        for label, name in enumerate(SHAPES):
            assert float(row[f"share_{name}"]) == pytest.approx((found == label).mean(), abs=1e-6)
        pairs.append((true, np.where(true == 255, 255, found)))
    assert mean_iou(pairs) == pytest.approx(run("evaluate", run.path(""), "--json").json["test"]["miou"], abs=1e-9)
    masks = tmp_path / "again"
    one = run("predict", run.path(""), run.data / "test" / "images" / "s00.png", "--masks", masks, "--json").json
    assert one["mask"] == str(masks / "s00.png")
    assert (np.asarray(Image.open(one["mask"])) == np.asarray(Image.open(rows[0]["mask"]))).all()


def test_predict_asks_for_a_folder_and_writes_over_nothing(run, tmp_path):
    """Without a place for masks, with a folder that holds something, or on a run of another task, it says so at once."""
    image = run.data / "test" / "images" / "s00.png"
    none = run("predict", run.path(""), image)
    assert (none.code, "--masks DIR" in none.err) == (2, True)
    (tmp_path / "s00.png").write_bytes(image.read_bytes())
    full = run("predict", run.path(""), image, "--masks", tmp_path)
    assert "holds something already" in full.err
    assert (tmp_path / "s00.png").read_bytes() == image.read_bytes()


def test_the_report_and_the_runs_table_give_each_class(run):
    """predictions.csv counts pixels by class, and the page shows IoU of each."""
    with run.path("predictions.csv").open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["split"] == "test"]
    assert len(rows) == 5
    ious = []
    for name in SHAPES:
        true, found, right = (sum(int(row[f"{kind}_{name}"]) for row in rows) for kind in ("true", "predicted", "right"))
        ious.append(right / (true + found - right))
    (finished,) = run.events("run_finished")
    assert np.mean(ious) == pytest.approx(finished["test_metrics"]["miou"])
    assert not run.path("worst").exists(), "masks are such pictures already"
    page = run.path("report.html").read_text(encoding="utf-8")
    assert "<th>IoU</th>" in page
    assert f"mean IoU {np.mean(ious):.4f}" in page


@pytest.mark.parametrize("to", ["onnx", "safetensors"])
def test_export_refuses_by_name(run, to):
    """Before anything is written, with where the weights are."""
    done = run("export", run.path(""), "--to", to)
    assert done.code == 2
    assert "a run of task segment is not exported" in done.err
    assert not run.path("export").exists()


def test_check_counts_pixels_and_images_by_class(run, tmp_path):
    """As text and as JSON; the contact sheet shows images under their masks."""
    done = run("check", run.recipe, "--json")
    assert done.code == 0
    train = done.json["splits"]["train"]
    masks = [np.asarray(Image.open(path)) for path in sorted((run.data / "train" / "masks").iterdir())]
    assert train["classes"] == {name: sum((mask == label).any() for mask in masks) for label, name in enumerate(SHAPES)}
    assert train["pixels"] == {name: int(sum((mask == label).sum() for mask in masks)) for label, name in enumerate(SHAPES)}
    assert "pixels of" in run("check", run.recipe, "--sheet", tmp_path / "sheet.html").out
    assert (tmp_path / "sheet.html").read_text(encoding="utf-8").count("data:image/jpeg") == 12 * 5


def test_a_bad_mask_stops_fit_before_training(run, squares, tmp_path, open_workshop):
    """With the file, both sizes and the strange value, all at once."""
    work = open_workshop(draw(tmp_path / "data", {"train": 6, "val": 2, "test": 2}, (90, 100)), RECIPE)
    Image.fromarray(np.zeros((40, 50), np.uint8)).save(work.data / "train" / "masks" / "s01.png")
    mask = np.asarray(Image.open(work.data / "val" / "masks" / "s01.png")).copy()
    mask[5, 5] = 9
    Image.fromarray(mask).save(work.data / "val" / "masks" / "s01.png")
    done = work.fit(ok=False)
    assert done.code == 3
    assert "that is 50 x 40 px where the image is shown with" in done.err
    assert "that holds the value 9, and the classes are 0, 1, 2, and 255 is ignored" in done.err
    assert not work.path("").exists()


def test_a_resumed_run_ends_with_the_same_bits(run):
    """An epoch and then another are the run in one: weights, metrics and all."""
    how = ("optim.schedule=constant", "optim.warmup=0", "data.test=null")
    run.fit("train.epochs=1", *how, name="halves")
    run.fit("train.epochs=2", *how, "--resume", name="halves")
    run.fit("train.epochs=2", *how, name="whole")
    one, two = (load_file(run.path("weights/best.safetensors", name)) for name in ("halves", "whole"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    ends = [[row["metrics"] for row in run.events("evaluated", name)] for name in ("halves", "whole")]
    assert ends[0] == ends[1]


def test_a_tight_budget_trains_to_the_same_bits(run):
    """A plan that recomputes, at the same micro-batch, ends with the weights of one that stores everything."""
    whole = ("train.epochs=1", "data.test=null", "memory.micro_batch=4", "memory.exact=bitwise", "train.eval_batch=1")
    run.fit(*whole, "memory.spacing=off", name="stored")
    run.fit(*whole, "memory.spacing=1", name="spaced")
    assert run.read("plan.json", "spaced")["recompute_fraction"] > 0.1
    one, two = (load_file(run.path("weights/best.safetensors", name)) for name in ("stored", "spaced"))
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_tiles_see_large_images_at_full_resolution(tmp_path, open_workshop):
    """Windows in training, in evaluation all of them joined: whatever the batch and the workers, the same digits and masks."""
    data = draw(tmp_path / "data", {"train": 16, "val": 2, "test": 3}, (130, 190), seed=3)
    work = open_workshop(data, RECIPE.replace("epochs: 6", "epochs: 9"))
    work.fit("data.fit=tile", "model.image_size=64")
    (finished,) = work.events("run_finished")
    assert finished["best_value"] > 0.75
    done = work("evaluate", work.path(""), "--json").json
    assert done["test"]["miou"] == finished["test_metrics"]["miou"]
    work("predict", work.path(""), data / "test" / "images", "--out", tmp_path / "said.csv")
    masks = sorted((data / "test" / "masks").iterdir())
    pairs = [(np.asarray(Image.open(path)), np.asarray(Image.open(tmp_path / "said_masks" / path.name))) for path in masks]
    assert mean_iou([(true, np.where(true == 255, 255, found)) for true, found in pairs]) == pytest.approx(done["test"]["miou"], abs=1e-9)


def test_a_table_with_masks_and_a_share_held_out(squares, tmp_path, open_workshop):
    """A manifest's mask column, empty for nothing but the first class; val is drawn, kept, and evaluate takes the same."""
    rows = [["path", "truth"]]
    for number, image in enumerate(sorted((squares / "train" / "images").iterdir())):
        rows.append([str(image), "" if number == 0 else str(squares / "train" / "masks" / image.name)])
    with (tmp_path / "t.csv").open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows(rows)
    recipe = RECIPE.replace("  val: {data}/val\n  test: {data}/test\n", f"  val: 0.25\n  label: truth\n  root: {squares}\n").replace(
        "{data}/train", "{data}/t.csv"
    )
    work = open_workshop(tmp_path, recipe)
    work.fit("train.epochs=1")
    held = work.read("split.json")["val"]
    assert len(held) == 6
    (evaluated,) = work.events("evaluated")
    done = work("evaluate", work.path(""), "--json").json["val"]
    assert (done["images"], done["miou"]) == (6, evaluated["metrics"]["miou"])
    assert json.loads(work("check", work.recipe, "--json").out)["splits"]["train"]["without_mask"] in (0, 1)
