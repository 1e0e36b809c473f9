"""`fit` from a recipe to a finished run: what it leaves, that plans change no bit, and what later commands make of it."""

from __future__ import annotations

import csv
import errno
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hiresvis.backbone.build import build_backbone
from hiresvis.errors import RunFolderError
from hiresvis.recipe import Resolution, load_recipe
from hiresvis.train.finder import Finder
from hiresvis.train.snapshot import load_snapshot
from hiresvis.train.step import TrainStep

FILES = {
    "recipe.yaml",
    "recipe.resolved.yaml",
    "plan.json",
    "contract.json",
    "metrics.csv",
    "events.jsonl",
    "train.log",
    "predictions.csv",
    "reliability.json",
    "report.html",
    "samples.csv",
    "statistics.json",
    "weights/best.safetensors",
    "weights/last.safetensors",
    "worst/index.json",
}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def assert_same_weights(first: Path, second: Path) -> None:
    """Every tensor, parameters and buffers, has the same bits."""
    one, other = load_file(first), load_file(second)
    assert list(one) == list(other)
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


def test_a_run_leaves_every_file_and_nothing_else(trained):
    """The run folder holds what it promises, each file with something in it, and no half-written one."""
    root = trained.path("")
    found = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    snapshot = {name for name in found if name.startswith("snapshot/")}
    pictures = {name for name in found if re.fullmatch(r"worst/\d\d_(seen|predicted|label|detail)\.jpg", name)}
    assert pictures
    assert found - snapshot - pictures == FILES
    assert {re.sub(r"\d+", "N", name) for name in snapshot} == {
        "snapshot/state.json",
        "snapshot/previous.json",
        "snapshot/tensors-N.safetensors",
    }
    assert all((root / name).stat().st_size for name in found)


def test_every_file_of_a_run_is_text_json_or_safetensors(trained):
    """No file carries code: tensors are safetensors, pictures JPEG, everything else decodes as text, and no pickle is among them."""
    for path in trained.path("").rglob("*"):
        if path.is_dir():
            continue
        raw = path.read_bytes()
        if path.suffix == ".safetensors":
            header_bytes = int.from_bytes(raw[:8], "little")
            assert isinstance(json.loads(raw[8 : 8 + header_bytes]), dict), path
            continue
        if path.suffix == ".jpg":
            assert raw.startswith(b"\xff\xd8\xff"), path
            continue
        assert b"\0" not in raw, path
        raw.decode("utf-8")
        if path.suffix == ".json":
            json.loads(raw)
    assert {path.suffix for path in trained.path("").rglob("*") if path.is_file()} == {
        ".yaml",
        ".json",
        ".csv",
        ".jsonl",
        ".log",
        ".html",
        ".jpg",
        ".safetensors",
    }


def test_results_alone_go_to_standard_output(trained):
    """fit shows its progress on standard error and prints no result of its own."""
    assert trained.done.out == ""
    assert "best" in trained.done.err


def test_plan_json_has_predicted_and_measured_bytes(trained):
    """The parts add up to the predicted peak, and what was measured stands beside it, counted storages within 5%."""
    plan = trained.read("plan.json")
    assert sum(plan["parts"].values()) == plan["predicted_peak_bytes"]
    measured = plan["measured"]
    assert plan["predicted_peak_bytes"] <= plan["budget_bytes"] <= plan["capacity_bytes"]
    assert 0 < measured["baseline_bytes"] < measured["resident_peak_bytes"] <= plan["budget_bytes"]
    assert measured["counted_peak_bytes"] == pytest.approx(measured["predicted_counted_bytes"], rel=0.05)
    assert plan["micro_batch"] * plan["accumulation"] >= plan["batch"] == 6
    (finished,) = trained.events("run_finished")
    assert finished["counted_peak_bytes"] == measured["counted_peak_bytes"]
    assert finished["predicted_peak_bytes"] == plan["predicted_peak_bytes"]
    assert re.search(r"peak +predicted [\d.]+ [MG]iB, measured [\d.]+ [MG]iB", trained.done.err)
    assert "counted storages" in trained.done.err


def test_the_resolved_recipe_loads_again_with_nothing_left_to_find(trained):
    """It gives the same values, no auto is left but for what one number cannot say, and each line says where its value came from."""
    path = trained.path("recipe.resolved.yaml")
    again = load_recipe(path)
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"^ *(\w+): auto\b", text, flags=re.MULTILINE) == ["drop_path", "spacing", "ui"]
    unresolved = [entry.key for entry in Resolution(again).entries if entry.value == "auto" and entry.origin != "auto"]
    assert unresolved == ["model.drop_path", "memory.spacing", "log.ui"]
    keyed = [line for line in text.splitlines() if re.match(r" *\w+: \S", line)]
    assert all(re.search(r"  # (given|default|auto: \S.*)$", line) for line in keyed)
    assert again.recipe.data.classes == ("defect", "ok")
    assert Path(again.recipe.data.train).is_absolute()


def test_the_resolved_recipe_run_again_is_the_same_run(trained, tmp_path):
    """What was found is given the second time: weights, predictions and the learning rate of every step are bit for bit those."""
    done = trained("fit", trained.path("recipe.resolved.yaml"), f"log.dir={tmp_path / 'again'}")
    assert done.code == 0, done.err
    for name in ("best", "last"):
        assert_same_weights(trained.path(f"weights/{name}.safetensors"), tmp_path / "again" / "weights" / f"{name}.safetensors")
    assert (tmp_path / "again" / "predictions.csv").read_text() == trained.path("predictions.csv").read_text()
    rows = [json.loads(line) for line in (tmp_path / "again" / "events.jsonl").read_text().splitlines()]
    steps = [(row["loss"], row["lr"]) for row in rows if row["event"] == "step_done"]
    assert steps == [(row["loss"], row["lr"]) for row in trained.events("step_done")]


@pytest.mark.parametrize("error", [RuntimeError("DataLoader worker (pid 1) is killed"), MemoryError()], ids=["worker", "memory"])
def test_a_run_whose_images_cannot_be_described_is_finished_all_the_same(workshop, monkeypatch, error):
    """What is made beside the result never takes it along: a warning, and the run ends as ever."""

    def fail(*_):
        raise error

    monkeypatch.setattr("hiresvis.finish.summarise", fail)
    done = workshop.fit("train.epochs=1")
    assert "no statistics of the training images" in done.err
    assert workshop.events("run_finished")
    assert not workshop.path("statistics.json").exists()


def test_the_recipe_is_kept_as_it_was_given(trained):
    """Byte for byte, overrides aside, which are in the resolved one."""
    assert trained.path("recipe.yaml").read_text() == trained.recipe.read_text()
    assert "epochs: 3  # given" in trained.path("recipe.resolved.yaml").read_text()


def test_every_auto_is_printed_once_with_its_reason(trained):
    """Whatever the resolved recipe marks as found automatically was told, with the same reason, exactly once."""
    told = [(row["key"], row["reason"]) for row in trained.events("auto_resolved")]
    assert len(told) == len(set(told)) == len({key for key, _ in told})
    text = trained.path("recipe.resolved.yaml").read_text()
    assert sorted(reason for _, reason in told) == sorted(re.findall(r"  # auto: (.*)$", text, flags=re.MULTILINE))


def test_metrics_have_a_row_for_each_epoch(trained):
    """Loss, learning rate and the validation metrics of every epoch; the best of them is what the run ends with."""
    rows = rows_of(trained.path("metrics.csv"))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    best = max(float(row["val_accuracy"]) for row in rows)
    assert trained.events("run_finished")[0]["best_value"] == best
    assert all(float(row["train_loss"]) > 0 and float(row["lr"]) > 0 for row in rows)


def test_the_report_needs_nothing_but_itself(trained):
    """One page: no address is loaded, no file beside it, and it shows curves, plan and confusion matrix."""
    page = trained.path("report.html").read_text(encoding="utf-8")
    loaded = re.findall(r"""(?:\bsrc|\bhref|url\()\s*=?\s*["']?([^"')\s>]+)""", page)
    assert [target for target in loaded if not target.startswith(("data:", "#"))] == []
    assert "<link" not in page
    assert "<svg" in page
    assert "onfusion" in page


def test_predictions_hold_each_sample_of_val_and_test(trained):
    """One row per image, of the best weights; their share that is right is the accuracy that was told."""
    rows = rows_of(trained.path("predictions.csv"))
    assert [sum(row["split"] == split for row in rows) for split in ("val", "test")] == [8, 6]
    (test,) = [row for row in trained.events("evaluated") if row["split"] == "test"]
    right = [row["label"] == row["predicted"] for row in rows if row["split"] == "test"]
    assert test["metrics"]["accuracy"] == pytest.approx(sum(right) / len(right))
    assert {Path(row["path"]).is_file() for row in rows} == {True}


def test_evaluate_repeats_the_best_epoch_to_the_last_digit(trained):
    """Loss and every metric of validation and test are those that fit told."""
    done = trained("evaluate", trained.path(""), "--json")
    assert (done.code, done.err) == (0, "")
    best = trained.events("run_finished")[0]["best_epoch"]
    told = {row["split"]: row for row in trained.events("evaluated") if row["split"] == "test" or row["epoch"] == best}
    for split, images in (("val", 8), ("test", 6)):
        wanted = {"images": images, "loss": told[split]["loss"], **told[split]["metrics"]}
        assert done.json[split].items() >= wanted.items()


def test_evaluate_of_other_data_gives_the_same_digits_for_the_same_images(trained):
    """A folder by --data goes through the run's own preprocessing."""
    done = trained("evaluate", trained.path(""), "--data", trained.data / "test", "--json")
    assert done.json["data"] == trained("evaluate", trained.path(""), "--json").json["test"]
    plain = trained("evaluate", trained.path(""), "--data", trained.data / "test")
    assert f"data.loss {done.json['data']['loss']}\n" in plain.out


def test_evaluate_repeats_a_held_out_share_and_reads_tables_by_the_run_s_column_names(workshop):
    """The share is drawn again from the run's seed; a manifest by --data has the columns that the recipe named, and may name files where
    the recipe said, or where --root says."""
    rows = [(path, path.parent.name) for path in sorted(workshop.data.glob("train/*/*.png"))]
    table, other = workshop.folder / "train.csv", workshop.folder / "other.csv"
    for target in (table, other):
        target.write_text("file,kind\n" + "".join(f"{path},{kind}\n" for path, kind in rows))
    columns = ("data.image=file", "data.label=kind")
    setting = (f"data.train={table}", "data.val=0.25", "data.test=null", *columns, "train.epochs=1", "train.seed=3")
    assert f"data.root: {workshop.data}/train " in workshop.fit(*setting, ok=False).err
    workshop.fit(*setting, f"data.root={workshop.data}")
    (told,) = workshop.events("evaluated")
    wanted = {"images": 4, "loss": told["loss"], **told["metrics"]}
    assert workshop("evaluate", workshop.path(""), "--json").json["val"].items() >= wanted.items()
    done = workshop("evaluate", workshop.path(""), "--data", other, "--json")
    assert done.code == 0, done.err
    assert done.json["data"]["images"] == 16
    resolved = workshop.path("recipe.resolved.yaml")
    resolved.write_text(resolved.read_text().replace(f"root: {workshop.data}", "root: null"))
    refused = workshop("evaluate", workshop.path(""), "--data", other)
    assert refused.code == 3
    assert "16 paths leave " in refused.err
    assert workshop("evaluate", workshop.path(""), "--data", other, "--root", workshop.data, "--json").json == done.json


def test_predict_names_classes_of_files_it_never_saw(trained, tmp_path):
    """Files and folders, and odd ones among them: rotated by EXIF, 16 bit, with alpha, grey, palette."""
    rng = np.random.default_rng(5)
    pixels = rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    (tmp_path / "in" / "deep").mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "in" / "rotated.jpg", exif=exif, quality=95)
    Image.fromarray(rng.integers(0, 65536, (64, 64), dtype=np.uint16)).save(tmp_path / "in" / "deep" / "sixteen.png")
    image.convert("RGBA").save(tmp_path / "in" / "alpha.png")
    image.convert("L").save(tmp_path / "in" / "grey.PNG")
    image.convert("P").save(tmp_path / "in" / "palette.png")
    (tmp_path / "in" / "notes.txt").write_text("no image")
    image.save(tmp_path / "alone.webp")
    done = trained("predict", trained.path(""), tmp_path / "in", tmp_path / "alone.webp")
    assert done.code == 0, done.err
    rows = list(csv.DictReader(done.out.splitlines()))
    names = ["alpha.png", "deep/sixteen.png", "grey.PNG", "palette.png", "rotated.jpg"]
    assert [row["path"] for row in rows] == [*(str(tmp_path / "in" / name) for name in names), str(tmp_path / "alone.webp")]
    for row in rows:
        scores = {name: float(row[f"score_{name}"]) for name in ("defect", "ok")}
        assert row["label"] == max(scores, key=scores.get)
        assert float(row["score"]) == scores[row["label"]]
        assert sum(scores.values()) == pytest.approx(1, abs=1e-5)


def test_predict_turns_images_as_training_did(trained, tmp_path):
    """A photo stored on its side with an EXIF note scores as the same photo stored upright."""
    pixels = np.random.default_rng(6).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise by a quarter to show it
    Image.fromarray(pixels).save(tmp_path / "side.png", exif=exif)
    Image.fromarray(np.rot90(pixels, -1).copy()).save(tmp_path / "upright.png")
    rows = list(csv.DictReader(trained("predict", trained.path(""), tmp_path).out.splitlines()))
    assert [Path(row.pop("path")).name for row in rows] == ["side.png", "upright.png"]
    assert rows[0] == rows[1]


def test_predict_scores_what_predictions_csv_says(trained):
    """The same image gives the same class and score as in the run's own table."""
    done = trained("predict", trained.path(""), trained.data / "test")
    told = {row["path"]: row for row in rows_of(trained.path("predictions.csv")) if row["split"] == "test"}
    for row in csv.DictReader(done.out.splitlines()):
        assert row["label"] == told[row["path"]]["predicted"]
        assert float(row["score"]) == pytest.approx(float(told[row["path"]]["score"]), abs=2e-6)


def test_predict_of_nothing_ends_with_3(trained, tmp_path):
    """A missing path is named, as is a folder without images."""
    missing = trained("predict", trained.path(""), tmp_path / "nothing.png")
    assert (missing.code, missing.out) == (3, "")
    assert str(tmp_path / "nothing.png") in missing.err
    assert trained("predict", trained.path(""), tmp_path).code == 3


@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("test_resnet", ("model.drop_path=0.3",)),
        ("test_efficientnet", ("optim.name=sgd", "optim.lr=0.01")),
        ("test_vit", ("model.drop_path=0.3",)),
    ],
)
def test_recompute_changes_no_bit(workshop, model, more):
    """Everything stored or every block recomputed: best and last weights, batch statistics included, and metrics are the same bits."""
    common = (f"model.name={model}", "memory.micro_batch=3", "train.eval_batch=4", *more)
    workshop.fit("memory.spacing=off", *common, name="off")
    workshop.fit("memory.spacing=1", *common, name="one")
    assert workshop.read("plan.json", "off")["recompute_fraction"] == 0
    assert workshop.read("plan.json", "one")["recompute_fraction"] > 0.15
    for name in ("best", "last"):
        assert_same_weights(workshop.path(f"weights/{name}.safetensors", "off"), workshop.path(f"weights/{name}.safetensors", "one"))
    if model != "test_vit":
        weights = load_file(workshop.path("weights/last.safetensors", "one"))
        variances = [value for name, value in weights.items() if name.endswith("running_var")]
        assert variances
        assert all((value != 1).any() for value in variances)
    told = [[(row["split"], row["loss"], row["metrics"]) for row in workshop.events("evaluated", run)] for run in ("off", "one")]
    assert told[0] == told[1]


def test_looking_for_the_batch_leaves_no_trace(workshop, monkeypatch):
    """Weights, buffers, modes, gradients, optimizer and random state are as before, and nothing holds a tensor of the probe."""
    seen = []

    def fingerprint(finder):
        step = finder.step
        assert not step.optimizer.state
        return (
            {name: value.clone() for name, value in step.model.state_dict().items()},
            [module.training for module in step.model.modules()],
            [parameter.grad for parameter in step.model.parameters()],
            torch.get_rng_state(),
        )

    real = Finder.find

    def watched(finder):
        before = fingerprint(finder)
        yield from real(finder)
        seen.append((before, fingerprint(finder)))

    monkeypatch.setattr(Finder, "find", watched)
    workshop.fit("model.drop_path=0.3", "memory.spacing=1", "train.epochs=1")
    ((before, after),) = seen
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert before[1] == after[1]
    assert after[2] == [None] * len(after[2])
    assert torch.equal(before[3], after[3])


def test_the_probe_runs_all_that_training_will_run(workshop, monkeypatch):
    """Two optimizer steps at the largest shapes, the second with its state there, with accumulation, and with a part of one image less, as
    an uneven batch has; and an evaluation step."""
    calls = []
    for name in ("accumulate", "apply", "predict"):
        real = getattr(TrainStep, name)

        def spied(step, *args, real=real, name=name, **kwargs):
            calls.append((name, len(args[0]) if args else len(step.optimizer.state)))
            return real(step, *args, **kwargs)

        monkeypatch.setattr(TrainStep, name, spied)
    done = workshop("fit", workshop.recipe, "memory.micro_batch=4", "train.batch=8", "train.eval_batch=5", "--dry-run")
    assert done.code == 0, done.err
    assert [name for name, _ in calls] == ["accumulate", "apply", "accumulate", "accumulate", "accumulate", "apply", "predict"]
    assert [size for name, size in calls if name == "accumulate"] == [4, 4, 4, 3]
    first, second = (size for name, size in calls if name == "apply")
    assert first == 0 < second
    assert calls[-1] == ("predict", 5)


def test_a_resumed_run_averages_as_it_began_whatever_the_schedule_is_now(workshop):
    """auto was settled by the schedule then; it is neither dropped nor begun anew by another."""
    workshop.fit("optim.schedule=constant", "train.epochs=1", name="averaged")
    workshop.fit("optim.schedule=cosine", "train.epochs=2", "--resume", name="averaged")
    workshop.fit("optim.schedule=cosine", "train.epochs=1", name="plain")
    workshop.fit("optim.schedule=constant", "train.epochs=2", "--resume", name="plain")
    for name, averaged in (("averaged", True), ("plain", False)):
        snapshot = load_snapshot(workshop.path("snapshot", name))
        assert any(key.startswith("average/") for key in snapshot.tensors) is averaged
        assert f"ema: {str(averaged).lower()}" in workshop.path("recipe.resolved.yaml", name).read_text()


SINGLE_PIXEL = ("model.image_size=32", "train.batch=5", "train.epochs=1")  # of 16 images one is left, and the last BatchNorm sees 1x1


def test_an_image_left_over_is_not_trained_alone(workshop):
    """Where batch statistics are taken, the last two batches share their images; a run stopped between them resumes to the same bits."""
    workshop.fit(*SINGLE_PIXEL, name="through")
    assert [row["num_images"] for row in workshop.events("step_done", "through")] == [5, 5, 3, 3]
    workshop.fit(*SINGLE_PIXEL, "train.max_time=0.001s", name="parts")
    for _ in range(3):
        workshop.fit(*SINGLE_PIXEL, "train.max_time=0.001s", "--resume", name="parts")
    steps = workshop.events("step_done", "parts")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert [row["loss"] for row in steps] == [row["loss"] for row in workshop.events("step_done", "through")]
    last = "weights/last.safetensors"
    assert_same_weights(workshop.path(last, "through"), workshop.path(last, "parts"))


def test_frozen_statistics_leave_the_batches_as_they_are(workshop):
    """Then a single image can be trained, and is."""
    workshop.fit(*SINGLE_PIXEL, "model.norm=frozen")
    assert [row["num_images"] for row in workshop.events("step_done")] == [5, 5, 5, 1]


@pytest.mark.parametrize("setting", [("memory.micro_batch=1",), ("memory.micro_batch=2",), ("train.batch=1",)])
def test_micro_batches_of_one_image_are_refused_where_they_cannot_be_trained(workshop, setting):
    """Batch statistics of one value: exit 4 before a step runs, with the ways out, and the same plan is taken with frozen ones."""
    size = ("model.image_size=32", *(() if "train.batch=1" in setting else ("train.batch=5",)), *setting)
    done = workshop.fit(*size, ok=False)
    assert done.code == 4, done.err
    assert "takes batch statistics of a map of a single pixel" in done.err
    assert "model.norm frozen" in done.err
    assert not workshop.path("").exists()
    assert workshop("fit", workshop.recipe, *size, "model.norm=frozen", "--dry-run").code == 0


def test_a_larger_map_is_trained_one_image_at_a_time(workshop):
    """There are values enough for statistics then; that they are noise is said, not refused."""
    done = workshop("fit", workshop.recipe, "memory.micro_batch=1", "--dry-run")
    assert done.code == 0, done.err
    assert "BatchNorm takes its statistics from micro-batches of 1; below 8 they are noise: raise memory.micro_batch\n" in done.err


def test_a_resume_for_fewer_epochs_than_are_trained_is_refused(workshop):
    """The run's record stays; as many as there are is no mistake."""
    workshop.fit("train.epochs=2")
    before = workshop.path("recipe.resolved.yaml").read_text()
    done = workshop.fit("train.epochs=1", "--resume", ok=False)
    assert done.code == 6, done.err
    assert "2 epochs are trained, and train.epochs is 1; give at least 2, or begin another run" in done.err
    assert workshop.path("recipe.resolved.yaml").read_text() == before
    workshop.fit("train.epochs=2", "--resume")


def test_a_given_evaluation_batch_that_does_not_fit_is_lowered_and_said(workshop, monkeypatch):
    """The training plan stays; plan.json, the resolved recipe and a line have the number that ran."""
    real = TrainStep.predict

    def predict(step, images):
        if len(images) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(step, images)

    monkeypatch.setattr(TrainStep, "predict", predict)
    workshop.fit("train.eval_batch=9", "train.epochs=1")
    plan = workshop.read("plan.json")
    assert (plan["eval_batch"], plan["micro_batch"], plan["recompute_fraction"]) == (4, 6, 0)
    assert "  eval_batch: 4  # auto: 9 were given, and so many did not fit\n" in workshop.path("recipe.resolved.yaml").read_text()
    (told,) = [row["text"] for row in workshop.events("notice") if "evaluation of" in row["text"]]
    assert told.startswith("evaluation of 9 images ran out of memory")


def test_batch_auto_is_told_once_it_is_known(workshop):
    """The start of the run says auto, the plan the number."""
    done = workshop.fit("train.batch=auto", "memory.micro_batch=8", "train.epochs=1", "--ui", "plain")
    (started,) = workshop.events("run_started")
    (chosen,) = workshop.events("plan_chosen")
    assert (started["batch"], chosen["batch"]) == (None, 8)
    assert re.search(r"^run .* batch=auto ", done.err, flags=re.MULTILINE)
    assert "1 epochs, batch auto, on" in workshop.path("train.log").read_text()


@pytest.mark.parametrize(("setting", "trained_part"), [("model.freeze=stem", None), ("model.adapt=head", {"fc.weight", "fc.bias"})])
def test_frozen_parts_keep_their_bits(workshop, setting, trained_part):
    """With freeze: stem the first layers, with adapt: head everything but the classifier, batch statistics included."""
    workshop.fit(setting, "train.epochs=1")
    start = build_backbone("test_resnet", num_classes=2, image_size=64, pretrained=False, seed=0).model.state_dict()
    end = load_file(workshop.path("weights/last.safetensors"))
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    assert moved
    if trained_part is None:
        assert not {name for name in moved if name.startswith(("conv1", "bn1"))}
        assert any(name.startswith("layer1") for name in moved)
    else:
        assert moved == trained_part


def test_a_run_that_could_save_nothing_ends_with_6(workshop, monkeypatch):
    """The disk filled after the start: no result is claimed, no command is offered that cannot work, and the way on works."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hiresvis.train.snapshot._write_tensors", full)
        done = workshop.fit("train.epochs=1", ok=False)
    assert done.code == 6
    assert "No space left on device" in done.err
    assert "is kept" not in done.err
    assert "nothing else of it was saved either" in done.err
    assert not re.search(r"^(best|next) ", done.err, flags=re.MULTILINE)
    assert workshop.fit("train.epochs=1", "--resume").code == 0
    workshop.path("weights/best.safetensors").unlink()
    done = workshop.fit("train.epochs=1", "--resume", ok=False)
    assert done.code == 6
    command = shlex.split(done.err.splitlines()[-1].partition("train an epoch more from it: ")[2])
    assert command[-2:] == ["train.epochs=2", "--resume"]
    assert workshop(*command[1:]).code == 0


def test_files_passed_over_by_extension_are_told(open_workshop, draw, tmp_path):
    """A warning with the counts before training, and a line on the last screen."""
    data = draw(tmp_path / "data", {"train": {"a": 4, "b": 4}, "val": {"a": 2, "b": 2}})
    for name in ("train/a/1.gif", "train/b/2.GIF", "val/a/notes.txt"):
        (data / name).write_bytes(b"x")
    work = open_workshop(data)
    done = work.fit("data.test=null", "train.epochs=1")
    assert "warning: data.train: files passed over by extension: 2 .gif; read are .avif .bmp" in done.err
    assert "warning: data.val: files passed over by extension: 1 .txt" in done.err
    assert "passed over by extension: 2 .gif, 1 .txt\n" in done.err
    (finished,) = work.events("run_finished")
    assert finished["passed_over"] == {".gif": 2, ".txt": 1}


def test_workers_that_shared_memory_cannot_hold_are_lowered_and_told(workshop, monkeypatch):
    """Once, as a warning with the reason; the run goes through."""
    monkeypatch.setattr("hiresvis.data.workers.shared_memory_free_bytes", lambda: 0)
    done = workshop.fit("data.workers=2", "train.epochs=2")
    said = [line for line in done.err.splitlines() if "data.workers lowered from 2 to 0" in line]
    assert 1 <= len(said) <= 2  # training and evaluation each say their own


def test_a_damaged_plan_is_named_on_resume(workshop):
    """A hand-edited plan.json ends with the run folder's exit code, the file and what is wrong in it."""
    workshop.fit("train.epochs=1")
    run = workshop.path("")
    path = run / "plan.json"
    stored = json.loads(path.read_text())
    for change, said in (
        ({"segments": []}, "segments end at unit 0"),
        ({"micro_batch": 0}, "micro_batch is 0"),
        ({"segments": [{**stored["checkpoint_plan"]["segments"][0], "tier": "bogus"}]}, "bogus"),
        ({"versions": {"torch": "2.9.0"}}, "torch 2.9.0"),
    ):
        path.write_text(json.dumps({**stored, "checkpoint_plan": {**stored["checkpoint_plan"], **change}}))
        done = workshop.fit("train.epochs=2", "--resume", ok=False)
        assert done.code == RunFolderError.exit_code, done.err
        assert said in done.err
        assert str(run) in done.err
