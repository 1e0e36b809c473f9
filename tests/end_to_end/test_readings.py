"""Classes of unequal size, and results that say how far they can be believed: from a recipe to evaluate, predict and the report."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hiresvis.errors import EnvironmentFailed
from hiresvis.fit import fit
from hiresvis.recipe import load_recipe
from hiresvis.run import RunDirectory

COUNTS = {
    "train": {"red": 24, "green": 6, "blue": 3},
    "val": {"red": 20, "green": 12, "blue": 8},
    "test": {"red": 8, "green": 6, "blue": 4},
}
RECIPE = """\
task: classify
data:
  train: {data}/table.csv
  split: split
  group: lot
  augment: light
  workers: 0
model:
  name: test_resnet
  pretrained: false
  image_size: 64
  norm: batch
memory:
  budget: 4GiB
optim:
  lr: 5e-3
train:
  epochs: 3
  batch: 8
"""


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise with a faint tint and a bright corner by which left and right differ; one class in eleven images is blue; two images a lot."""
    folder, rng = tmp_path_factory.mktemp("uneven"), np.random.default_rng(5)
    rows = [["path", "label", "split", "lot"]]
    for split, classes in COUNTS.items():
        for position, (label, count) in enumerate(classes.items()):
            for number in range(count):
                pixels = rng.integers(0, 200, (64, 64, 3))
                pixels[..., position] += rng.integers(0, 30)
                pixels[:20, :20] += 40
                name = f"{split}-{label}-{number:02d}.png"
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / name)
                rows.append([name, label, split, f"{split}-{label}-{number // 2}"])
    with (folder / "table.csv").open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows(rows)
    return folder


@pytest.fixture(scope="module")
def run(table: Path, tmp_path_factory: pytest.TempPathFactory, make_workshop):
    """A finished run with weights; no test changes it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    work = make_workshop(tmp_path_factory.mktemp("readings"), table, RECIPE)
    work.done = work.fit("data.balance=weights", "train.metric=auroc", "--ui", "plain")
    torch.set_num_threads(threads)
    return work


def notices(work, name: str = "recipe") -> list[str]:
    return [row["text"] for row in work.events("notice", name)]


def test_weights_are_told_with_their_numbers(run, workshop_type, table, tmp_path):
    """33 images of three classes: 33 / (3 * 24) for red, 33 / (3 * 3) for blue. The first step's loss is another than without, of the same
    batch; validation losses are not weighed."""
    said = "data.balance weights: a sample's loss is weighed by its class, 0.458 (red) to 3.67 (blue); the mean over train is 1"
    assert said in notices(run)
    assert f"info: {said}" in run.path("train.log").read_text()
    rows = rows_of(run.path("predictions.csv"))
    val = [float(row["loss"]) for row in rows if row["split"] == "val"]
    (finished,) = run.events("run_finished")
    assert np.mean(val) == pytest.approx(finished["results"]["val"]["loss"], abs=1e-6)
    work = workshop_type(tmp_path, table, RECIPE)
    work.fit("train.epochs=1")
    assert work.events("step_done")[0]["loss"] != pytest.approx(run.events("step_done")[0]["loss"], rel=0.01)


def test_the_end_of_fit_and_evaluate_tell_the_same(run):
    """To the last digit, intervals and calibration included, by group since the recipe names one; the temperature is in the contract."""
    (finished,) = run.events("run_finished")
    told = run("evaluate", run.path(""), "--json").json
    assert {split: {key: result[key] for key in finished["results"][split]} for split, result in told.items()} == finished["results"]
    assert set(told) == {"val", "test"}
    best = next(row for row in run.events("evaluated") if row["epoch"] == finished["best_epoch"] and row["split"] == "val")
    for name, (low, high) in told["val"]["intervals"].items():
        assert low <= told["val"][name] <= high
    assert set(told["val"]["intervals"]) == {"accuracy", "balanced_accuracy", "macro_f1", "auroc", "kappa"}
    assert {result["intervals_by"] for result in told.values()} == {"group"}
    for name in ("accuracy", "balanced_accuracy", "macro_f1", "kappa"):  # a temperature changes ranks between images, no class
        assert told["val"][name] == best["metrics"][name]
    temperature = run.read("contract.json")["temperature"]
    assert told["val"]["calibration"]["temperature"] == told["test"]["calibration"]["temperature"] == temperature
    assert any(text.startswith(f"temperature {temperature:.4g}, ") for text in notices(run))
    assert finished["test_metrics"] == {name: told["test"][name] for name in best["metrics"]}


def with_contract(run, folder: Path, **values: object) -> Path:
    """A copy of the run with other values in its contract."""
    shutil.copytree(run.path(""), folder)
    contract = json.loads((folder / "contract.json").read_text())
    (folder / "contract.json").write_text(json.dumps({**contract, **values}))
    return folder


def scores_of(rows: list[dict[str, str]]) -> np.ndarray:
    return np.array([[float(row[f"score_{name}"]) for name in sorted(COUNTS["train"])] for row in rows])


def test_a_temperature_is_applied_everywhere_and_changes_no_class(run, tmp_path, table):
    """predict's scores are those of logits over 2.5, evaluate counts its errors by them, and so does the graph."""
    onnxruntime = pytest.importorskip("onnxruntime")
    images = sorted(table.glob("test-*.png"))
    plain, warm = (with_contract(run, tmp_path / str(value), temperature=value) for value in (1.0, 2.5))
    rows, warmer = (list(csv.DictReader(run("predict", folder, *images).out.splitlines())) for folder in (plain, warm))
    assert [row["label"] for row in rows] == [row["label"] for row in warmer]
    powers = scores_of(rows) ** (1 / 2.5)
    assert scores_of(warmer) == pytest.approx(powers / powers.sum(axis=1, keepdims=True), abs=1e-5)
    told = [run("evaluate", folder, "--json").json["test"] for folder in (plain, warm)]
    assert told[0]["accuracy"] == told[1]["accuracy"]
    assert told[0]["calibration"]["error"] == told[1]["calibration"]["error_before"] != told[1]["calibration"]["error"]
    done = run("export", warm, "--to", "onnx", "--out", tmp_path / "graph")
    assert done.code == 0, done.err
    session = onnxruntime.InferenceSession(str(tmp_path / "graph" / "model.onnx"))
    (given,) = session.run(["scores"], {"pixels": np.stack([np.asarray(Image.open(path)) for path in images])})
    assert given == pytest.approx(scores_of(warmer), abs=1e-5)


def test_intervals_stand_behind_their_metrics(run):
    """In evaluate's lines, on the last screen, in the report's tiles."""
    (finished,) = run.events("run_finished")
    figures, _, _ = run("evaluate", run.path("")).out.partition("\n\n")  # tables are behind
    lines = dict(line.split(" ", 1) for line in figures.splitlines())
    result = finished["results"]["test"]
    low, high = result["intervals"]["accuracy"]
    assert lines["test.accuracy"] == f"{result['accuracy']} ({low:.3f}-{high:.3f})"
    assert lines["test.intervals_by"] == "group"
    assert float(lines["test.calibration.error"]) == result["calibration"]["error"]
    assert f"accuracy {result['accuracy']:.3f} ({low:.3f}-{high:.3f})" in run.done.err
    low, high = finished["results"]["val"]["intervals"]["auroc"]
    assert f"best    auroc {finished['best_value']:.4f} ({low:.3f}-{high:.3f}) at epoch" in run.done.err
    page = re.sub(r"<[^>]+>", "", run.path("report.html").read_text(encoding="utf-8"))
    assert f"{finished['best_value']:.4f} ({low:.3f}-{high:.3f})" in page


def test_an_image_and_its_mirror_image_are_the_same_with_flips(run, tmp_path, table):
    """Without, the bright corner tells them apart; evaluate takes the flips as well, and leaves the run as it is."""
    names = sorted(table.glob("test-*.png"))[:6]
    for path in names:
        Image.open(path).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / path.name)
    mirrored = [tmp_path / path.name for path in names]
    found = {}
    for flips in ((), ("--flips",)):
        for kind, paths in (("plain", names), ("mirrored", mirrored)):
            found[kind, flips] = scores_of(list(csv.DictReader(run("predict", run.path(""), *paths, *flips).out.splitlines())))
    assert np.abs(found["plain", ()] - found["mirrored", ()]).max() > 1e-4
    assert found["plain", ("--flips",)] == pytest.approx(found["mirrored", ("--flips",)], abs=1e-6)
    before = run("evaluate", run.path(""), "--json").json
    flipped = run("evaluate", run.path(""), "--flips", "--json").json
    assert flipped["test"]["loss"] != before["test"]["loss"]
    assert run("evaluate", run.path(""), "--json").json == before


def test_a_run_that_goes_on_keeps_what_was_fitted_as_long_as_the_weights_it_is_of(run, tmp_path):
    """Until an epoch is better the contract's temperature is that of the best weights; from then on there is none, until the end."""
    folder = with_contract(run, tmp_path / "run", temperature=7.0)
    loaded = load_recipe(run.recipe, [f"log.dir={folder}", "data.balance=weights", "train.metric=auroc", "train.epochs=4"])
    seen, better = {}, False
    for event in fit(loaded, resume=True):
        temperature = json.loads((folder / "contract.json").read_text())["temperature"]
        seen.setdefault(event.kind, temperature)
        if event.kind == "evaluated" and event.split == "val":
            better = better or event.is_best
            assert temperature == (1.0 if better else 7.0)
    assert seen["epoch_started"] == 7.0
    assert seen["run_finished"] != 7.0
    assert run("evaluate", folder, "--json").json["val"]["calibration"]["temperature"] == seen["run_finished"]


def test_a_disk_that_is_full_when_weights_are_better_does_not_end_a_run(run, tmp_path, monkeypatch):
    """What was fitted to earlier weights then stays in the contract, which is told, until the next better epoch or the run's end."""
    folder, real, failures = with_contract(run, tmp_path / "run", temperature=7.0), RunDirectory.write_json, [1]

    def write(self, name, values):
        if name == "contract.json" and failures:
            failures.pop()
            raise EnvironmentFailed("contract.json: not written (No space left on device)")
        real(self, name, values)

    monkeypatch.setattr(RunDirectory, "write_json", write)
    loaded = load_recipe(run.recipe, [f"log.dir={folder}", "data.balance=weights", "train.metric=auroc", "train.epochs=9"])
    events = list(fit(loaded, resume=True))
    assert not failures, "no epoch was better"
    told = [event.text for event in events if event.kind == "notice" and event.level == "error"]
    assert told == [
        "contract.json: not written (No space left on device); it still has what was fitted to earlier weights, until the run's end"
    ]
    assert any(event.kind == "run_finished" for event in events)
    assert json.loads((folder / "contract.json").read_text())["temperature"] != 7.0


def test_a_balanced_order_goes_on_to_the_same_bits(workshop_type, table, tmp_path):
    """Stopped inside an epoch and gone on with, as run through; the epoch has as many steps as without, of other images, and says what
    comes how often."""
    work = workshop_type(tmp_path, table, RECIPE)
    setting = ("data.balance=sampler", "train.epochs=1", "optim.loss=focal")
    work.fit(*setting, name="through")
    work.fit(*setting, "train.max_time=0.001s", name="parts")
    work.fit(*setting, "--resume", name="parts")
    work.fit("train.epochs=1", "optim.loss=focal", name="plain")
    losses = [[row["loss"] for row in work.events("step_done", name)] for name in ("through", "parts", "plain")]
    assert len(losses[0]) == len(losses[2]) == 5
    assert losses[0] == losses[1]
    assert losses[0] != losses[2]
    through, parts = (load_file(work.path("weights/last.safetensors", name)) for name in ("through", "parts"))
    assert all(torch.equal(tensor, parts[name]) for name, tensor in through.items())
    said = "data.balance sampler: an epoch of 33 images has 11 of each class: those of blue come 3.67 times, of red comes 46%"
    assert said in notices(work, "through")


def test_balance_focal_is_the_focal_loss(workshop_type, table, tmp_path):
    """The resolved recipe says so with the reason, and can be gone on with."""
    work = workshop_type(tmp_path, table, RECIPE)
    work.fit("data.balance=focal", "train.epochs=1")
    resolved = work.path("recipe.resolved.yaml").read_text()
    assert re.search(r"loss: focal +# auto: data.balance is focal", resolved)
    work.fit("data.balance=focal", "train.epochs=2", "--resume")
    done = work("fit", work.recipe, f"log.dir={work.path('')}", "--resume")
    assert done.code == 6
    assert "data.balance=focal" in done.err
