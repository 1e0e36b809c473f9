"""multilabel and regress from a table to a finished run, to a stated metric, and what later commands make of it."""

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

from hiresvis.recipe import load_recipe

COLOURS = ("red", "green", "blue")
NUM_IMAGES, SIZE_PX = 64, 64
RECIPE = """\
task: {task}
data:
  train: {{data}}/{task}.csv
  val: 0.25
  label: {label}
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
  epochs: 7
  batch: 8
"""
RECIPES = {"multilabel": RECIPE.format(task="multilabel", label="tags"), "regress": RECIPE.format(task="regress", label="[lux, warmth]")}


def write_rows(path: Path, rows: list[list[str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream).writerows(rows)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise with a square of each colour or without it (the tags), and noise brighter and redder or not (two numbers of unlike size)."""
    folder, rng = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    tags, shades = [["path", "tags"]], [["path", "lux", "warmth"]]
    (folder / "images").mkdir()
    for number in range(NUM_IMAGES):
        pixels = rng.integers(0, 90, (SIZE_PX, SIZE_PX, 3), dtype=np.uint8)
        there = [name for name in COLOURS if rng.random() < 0.4]
        for name in there:
            side = int(rng.integers(10, 22))
            top, left = rng.integers(0, SIZE_PX - side, 2)
            pixels[top : top + side, left : left + side, COLOURS.index(name)] = 230
        Image.fromarray(pixels).save(folder / "images" / f"t{number:02d}.png")
        tags.append([f"images/t{number:02d}.png", "|".join(there)])
        light, warm = rng.random(2)
        values = rng.integers(0, 60, (SIZE_PX, SIZE_PX, 3)) + np.array([100 * light + 80 * warm, 100 * light, 100 * light])
        Image.fromarray(values.astype(np.uint8)).save(folder / "images" / f"s{number:02d}.png")
        shades.append([f"images/s{number:02d}.png", f"{5000 + 300 * light:.3f}", f"{0.001 * warm:.7f}"])
    write_rows(folder / "multilabel.csv", tags)
    write_rows(folder / "regress.csv", shades)
    return folder


@pytest.fixture(scope="module", params=["multilabel", "regress"])
def run(request: pytest.FixtureRequest, tables: Path, tmp_path_factory: pytest.TempPathFactory, workshop_type):
    """A finished run of each task; no test changes it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    work = workshop_type(tmp_path_factory.mktemp(request.param), tables, RECIPES[request.param])
    work.done = work.fit("--ui", "plain")
    torch.set_num_threads(threads)
    return work


def task_of(run) -> str:
    return run.read("contract.json")["task"]


def test_a_run_reaches_its_metric_and_says_which_decided(run):
    """Mean average precision of the three squares above 0.9; a quarter of the brightness's own spread as the error."""
    (finished,) = run.events("run_finished")
    values = [row["metrics"][finished["metric"]] for row in run.events("evaluated")]
    reasons = {row["key"]: row["reason"] for row in run.events("auto_resolved")}
    if task_of(run) == "multilabel":
        assert (finished["metric"], finished["best_value"]) == ("map", max(values))
        assert finished["best_value"] > 0.9
        assert "rare classes count as much" in reasons["train.metric"]
    else:
        assert (finished["metric"], finished["best_value"]) == ("mae", min(values))
        assert finished["best_value"] < 300 / 4 / 4
        assert max(row["metrics"]["r2"] for row in run.events("evaluated")) > 0.5
        assert "lower is better" in reasons["train.metric"]
    assert values[finished["best_epoch"] - 1] == finished["best_value"]
    assert [row["is_best"] for row in run.events("evaluated")].count(True) >= 1
    assert reasons["optim.loss"] == f"the task is {task_of(run)}"


def test_evaluate_repeats_the_digits(run):
    """Of the held-out images, and of the whole table as other data."""
    (finished,) = run.events("run_finished")
    best = next(row for row in run.events("evaluated") if row["epoch"] == finished["best_epoch"])
    done = run("evaluate", run.path(""), "--json")
    assert done.json.keys() == finished["results"].keys()
    assert all(done.json[split].items() >= result.items() for split, result in finished["results"].items())
    told = {"images": len(run.read("split.json")["val"]), "loss": best["loss"], **best["metrics"]}
    assert {name: done.json["val"][name] for name in told} == told
    other = run("evaluate", run.path(""), "--data", run.data / f"{task_of(run)}.csv", "--json").json["data"]
    assert other["images"] == NUM_IMAGES


def test_predict_says_what_the_runs_own_table_says(run):
    """Labels above the threshold and every score, or every target's value in its own units."""
    told = {row["path"]: row for row in rows_of(run.path("predictions.csv"))}
    done = run("predict", run.path(""), *told)
    rows = list(csv.DictReader(done.out.splitlines()))
    assert [row["path"] for row in rows] == list(told)
    for row in rows:
        own = told[row["path"]]
        if task_of(run) == "multilabel":
            scores = {name: float(row[f"score_{name}"]) for name in COLOURS}
            least = dict(zip(sorted(scores), run.read("contract.json")["thresholds"], strict=True))
            assert row["labels"] == own["predicted"] == "|".join(name for name in sorted(scores) if scores[name] >= least[name])
            assert {name: float(own[f"score_{name}"]) for name in COLOURS} == pytest.approx(scores, abs=1e-6)
        else:
            assert [float(row[f"predicted_{name}"]) for name in ("lux", "warmth")] == pytest.approx(
                [float(own[f"predicted_{name}"]) for name in ("lux", "warmth")], rel=1e-6
            )
            assert 4500 < float(row["predicted_lux"]) < 5800


def test_labels_have_thresholds_of_their_own(tables, workshop_type, tmp_path):
    """Chosen on 32 images of validation, after a loss whose probabilities are low: predict and the run's table follow them, the report
    counts them, evaluate tells F1 at them beside that at 0.5, and the graph agrees on every image's labels."""
    work = workshop_type(tmp_path, tables, RECIPES["multilabel"])
    work.fit("optim.loss=asl", "data.val=0.5", "data.balance=weights", "train.epochs=3")
    least = dict(zip(sorted(COLOURS), work.read("contract.json")["thresholds"], strict=True))
    assert any(value != 0.5 for value in least.values())
    assert any(row["text"].startswith("thresholds of the highest F1") for row in work.events("notice"))
    told = {row["path"]: row for row in rows_of(work.path("predictions.csv"))}
    for row in csv.DictReader(work("predict", work.path(""), *told).out.splitlines()):
        labels = "|".join(name for name in sorted(COLOURS) if float(row[f"score_{name}"]) >= least[name])
        assert row["labels"] == told[row["path"]]["predicted"] == labels
    result = work("evaluate", work.path(""), "--json").json["val"]
    assert result["at_thresholds"]["macro_f1"] > result["macro_f1"]
    page = work.path("report.html").read_text(encoding="utf-8")
    assert f"macro F1 {result['at_thresholds']['macro_f1']:.4f}" in page
    assert "thresholds of <code>contract.json</code>" in page
    done = work("export", work.path(""), "--to", "onnx", "--json")
    assert done.code == 0, done.err
    assert done.json["compared"]["same_class"] == done.json["compared"]["images"]


def test_a_test_splits_loss_is_the_runs_own(tables, workshop_type, tmp_path):
    """Of numbers the plain loss is the one that trained, in fit's last evaluation as in evaluate."""
    work = workshop_type(tmp_path, tables, RECIPES["regress"])
    held = shutil.copy(tables / "regress.csv", tables / "held.csv")
    work.fit("optim.loss=mse", f"data.test={held}", "train.epochs=1")
    (told,) = [row for row in work.events("evaluated") if row["split"] == "test"]
    assert told["loss"] == work("evaluate", work.path(""), "--json").json["test"]["loss"]


def test_the_runs_table_holds_the_labels_as_they_were_given(run):
    """Row by row those of the manifest; the mean of the losses is the evaluation's."""
    given = {str(run.data / row["path"]): row for row in rows_of(run.data / f"{task_of(run)}.csv")}
    rows = rows_of(run.path("predictions.csv"))
    for row in rows:
        if task_of(run) == "multilabel":
            assert set(row["label"].split("|")) == set(given[row["path"]]["tags"].split("|"))
        else:
            assert {name: float(row[f"true_{name}"]) for name in ("lux", "warmth")} == {
                name: float(given[row["path"]][name]) for name in ("lux", "warmth")
            }
    assert np.mean([float(row["loss"]) for row in rows]) == pytest.approx(
        run("evaluate", run.path(""), "--json").json["val"]["loss"], abs=1e-6
    )


def test_a_stopped_run_goes_on_to_the_same_bits(run, workshop_type, tmp_path):
    """With the split and the targets' scale of its first start."""
    work = workshop_type(tmp_path, run.data, RECIPES[task_of(run)])
    setting = ("train.epochs=1", "train.batch=20")
    work.fit(*setting, name="through")
    work.fit(*setting, "train.max_time=0.001s", name="parts")
    work.fit(*setting, "--resume", name="parts")
    losses = [[row["loss"] for row in work.events("step_done", name)] for name in ("through", "parts")]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
    through, parts = (load_file(work.path("weights/last.safetensors", name)) for name in ("through", "parts"))
    assert all(torch.equal(tensor, parts[name]) for name, tensor in through.items())


def test_the_run_keeps_the_names_that_it_held_out(run, tmp_path, workshop_type):
    """More rows later would draw others: evaluate takes the run's own, resume says that the data is another."""
    held = run.read("split.json")["val"]
    assert sorted(str(run.data / name) for name in held) == sorted(row["path"] for row in rows_of(run.path("predictions.csv")))
    before = run("evaluate", run.path(""), "--json").json
    grown = tmp_path / "grown"
    shutil.copytree(run.data, grown)
    table = grown / f"{task_of(run)}.csv"
    rows = rows_of(table)
    for number, row in enumerate(rows[:40]):
        shutil.copy(grown / row["path"], grown / "images" / f"new{number}.png")
        rows.append({**row, "path": f"images/new{number}.png"})
    write_rows(table, [list(rows[0]), *(list(row.values()) for row in rows)])
    folder = tmp_path / "run"
    shutil.copytree(run.path(""), folder)
    resolved = folder / "recipe.resolved.yaml"
    resolved.write_text(resolved.read_text().replace(str(run.data), str(grown)))
    assert run("evaluate", folder, "--json").json == before
    work = workshop_type(tmp_path / "work", grown, RECIPES[task_of(run)])
    done = work("fit", work.recipe, f"log.dir={folder}", "--resume")
    assert done.code == 6
    num_train = NUM_IMAGES - len(held)
    said = f"data.train: {num_train} files when the run was begun, {num_train + 40} now: 40 new (images/new0.png; images/new1.png; "
    assert said in done.err
    (grown / "images" / Path(held[0]).name).unlink()
    write_rows(table, [list(rows[0]), *(list(row.values()) for row in rows if row["path"] != held[0])])
    done = run("evaluate", folder)
    assert done.code == 3
    assert f"1 of the {len(held)} images that the run holds out for validation are not there any more, the first: {held[0]}" in done.err


def test_check_tells_the_balance(run):
    """Images of each label, or the spread of each target, by split."""
    done = run("check", run.recipe, "--json")
    assert done.code == 0, done.err
    train = done.json["splits"]["train"]
    if task_of(run) == "multilabel":
        given = rows_of(run.data / "multilabel.csv")
        for name in COLOURS:
            total = sum(name in row["tags"] for row in given)
            assert train["classes"][name] == pytest.approx(0.75 * total, abs=1)
    else:
        low, middle, high = train["targets"]["lux"]
        assert 5000 <= low < 5030 < middle < 5270 < high <= 5300
        assert "target min/mid/max  train" in run("check", run.recipe).out


def test_the_contact_sheet_names_labels_and_values(run, tmp_path):
    """Each combination of labels, or images over the range of the first target."""
    page = tmp_path / "sheet.html"
    done = run("check", run.recipe, "--sheet", page)
    assert done.code == 0, done.err
    text = page.read_text(encoding="utf-8")
    if task_of(run) == "multilabel":
        assert "blue|green" in text
        assert ">none<" in text
    else:
        shown = [float(value) for value in re.findall(r">(5\d\d\d\.\d+)\|[^<]+<", text)]
        assert len(shown) == 12
        assert shown == sorted(shown)


def test_plan_counts_the_outputs_without_an_image(run, tmp_path, workshop_type):
    """The table alone, on a machine that has none of its files: three classes or two targets, and the number of training images."""
    shutil.copy(run.data / f"{task_of(run)}.csv", tmp_path)
    work = workshop_type(tmp_path / "work", tmp_path, RECIPES[task_of(run)])
    done = work.plan("--budget", "3GiB")
    assert done.code == 0, done.err
    assert done.json["run"]["num_train"] == NUM_IMAGES - len(run.read("split.json")["val"])
    from hiresvis.listing import look_at_data
    from hiresvis.recipe import Resolution

    loaded = load_recipe(work.recipe)
    assert look_at_data(loaded, Resolution(loaded)).classes == tuple(run.read("contract.json")["classes"])


def test_the_report_has_the_figures_of_the_task(run):
    """A table by class, or predicted against true values; no confusion of classes that exclude each other."""
    page = run.path("report.html").read_text(encoding="utf-8")
    assert "what is taken for what" not in page
    if task_of(run) == "multilabel":
        assert "Validation: class by class" in page
        assert "3 classes" in page
    else:
        assert "Validation: predicted against true" in page
        assert "2 targets" in page
        assert page.count("predicted values against true ones") == 2
        assert "R²" in page


def test_the_worst_errors_have_evidence(run):
    """Of labels for what was predicted wrongly or missed, of values for the target that is furthest off."""
    index = run.read("worst/index.json")["samples"]
    assert index
    kinds = {picture["what"] for one in index for picture in one["pictures"]}
    assert kinds <= ({"seen", "predicted", "missed"} if task_of(run) == "multilabel" else {"seen", "value"})
    names = {picture["name"] for one in index for picture in one["pictures"] if picture["what"] != "seen"}
    assert names <= set(run.read("contract.json")["classes"])
    assert run.path("report.html").read_text(encoding="utf-8").count('<div class="pictures">') == len(index)
    if task_of(run) == "regress":
        assert run("predict", run.path(""), run.data / "images", "--heat", run.path("heat")).code == 2


def test_the_exported_graph_gives_what_predict_says(run, tmp_path):
    """Probabilities of each label, or values in the targets' own units, out of onnxruntime."""
    onnxruntime = pytest.importorskip("onnxruntime")
    done = run("export", run.path(""), "--to", "onnx", "--out", tmp_path / "graph")
    assert done.code == 0, done.err
    told = rows_of(run.path("predictions.csv"))[:4]
    pixels = np.stack([np.asarray(Image.open(row["path"])) for row in told])
    (scores,) = onnxruntime.InferenceSession(str(tmp_path / "graph" / "model.onnx")).run(["scores"], {"pixels": pixels})
    names = run.read("contract.json")["classes"]
    prefix = "score" if task_of(run) == "multilabel" else "predicted"
    own = np.array([[float(row[f"{prefix}_{name}"]) for name in names] for row in told])
    assert np.allclose(scores, own, rtol=1e-4, atol=1e-5)


def test_the_live_view_names_the_deciding_metric(run):
    """As text for logs: the metric of the task, in words and digits."""
    metric = "map" if task_of(run) == "multilabel" else "mae"
    assert f"val {metric} " in run.done.err
    assert f"best    {metric} " in run.done.err
    assert ("targets=2" if metric == "mae" else "classes=3") in run.done.err


def test_columns_of_flags_train_like_lists_of_names(tables, workshop_type, tmp_path):
    """The same tags as three columns in parquet: the same split, the same steps, the same bits of loss."""
    import pyarrow
    import pyarrow.parquet

    rows = rows_of(tables / "multilabel.csv")
    columns = {"path": [str(tables / row["path"]) for row in rows]}
    columns |= {name: [int(name in row["tags"].split("|")) for row in rows] for name in COLOURS}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "flags.parquet")
    write_rows(tmp_path / "list.csv", [["path", "tags"], *([str(tables / row["path"]), row["tags"]] for row in rows)])
    work = workshop_type(tmp_path / "work", tmp_path, RECIPES["multilabel"])
    setting = ("train.epochs=1", "train.batch=24", "data.classes=[red, green, blue]", f"data.root={tables}")
    work.fit(*setting, f"data.train={tmp_path / 'list.csv'}", name="list")
    work.fit(*setting, f"data.train={tmp_path / 'flags.parquet'}", "data.label=[red, green, blue]", name="flags")
    first, second = (work.events("evaluated", name) for name in ("list", "flags"))
    assert [(row["loss"], row["metrics"]) for row in first] == [(row["loss"], row["metrics"]) for row in second]
    assert work.read("split.json", "list") == work.read("split.json", "flags")
    assert json.loads(work.path("contract.json", "flags").read_text())["classes"] == ["red", "green", "blue"]


@pytest.mark.parametrize(
    ("task", "override", "code", "said"),
    [
        ("multilabel", "train.metric=mae", 2, "mae belongs to task regress, and the task is multilabel; write auto, map, auroc, macro_f1"),
        ("regress", "optim.loss=bce", 2, "write auto, huber, mse or l1"),
        ("regress", "data.label=tags", 3, "column 'tags' is missing (columns: path, lux, warmth)"),
        ("regress", "data.train={data}/multilabel.csv", 3, "column 'lux' is missing"),
        ("multilabel", "data.train={data}/images", 2, "class folders give one class an image"),
    ],
)
def test_what_does_not_fit_the_task_is_refused_before_anything_is_built(tables, workshop_type, tmp_path, task, override, code, said):
    """With its place, and with what would fit."""
    work = workshop_type(tmp_path, tables, RECIPES[task])
    done = work.fit(override.format(data=tables), ok=False)
    assert done.code == code
    assert said in done.err
    assert not work.path("").exists()
