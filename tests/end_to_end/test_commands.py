"""How commands meet faulty recipes and awkward data: exit codes, places in messages, and what goes to which stream."""

from __future__ import annotations

import csv
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from hiresvis.run.events import EVENTS

CHECKED = ("data.test=null",)


def test_dry_run_trains_nothing_and_makes_no_folder(workshop):
    """It checks, plans and probes; standard output stays empty."""
    done = workshop.fit("--dry-run")
    assert done.out == ""
    assert "dry run: nothing is trained" in done.err
    assert re.search(r"plan: micro \d+ x accum \d+ = 6", done.err)
    assert "epoch=" not in done.err
    assert not (workshop.folder / "runs").exists()


def test_json_lines_are_events(workshop):
    """--ui json gives one known event a line, from the start of the run to its end, the same that the run folder keeps."""
    done = workshop.fit("train.epochs=1", "--ui", "json")
    rows = [json.loads(line) for line in done.err.splitlines()]
    assert {row["event"] for row in rows} <= EVENTS.keys()
    assert [row["event"] for row in rows[-2:]] == ["run_finished", "notice"]  # which names the report
    kept = [json.loads(line) for line in workshop.path("events.jsonl").read_text().splitlines()]
    assert rows == kept
    assert all(row["time"] > 0 for row in rows)


def test_ui_off_says_nothing(workshop):
    """Without a view both streams stay silent."""
    done = workshop.fit("--dry-run", "--ui", "off")
    assert (done.out, done.err) == ("", "")


def test_an_existing_run_is_refused_with_both_ways_on(trained):
    """Exit 6 at once, with --resume and another log.dir named, and not a byte is changed."""
    before = {path: path.stat().st_mtime_ns for path in trained.path("").rglob("*")}
    done = trained.fit(ok=False)
    assert done.code == 6
    assert str(trained.path("")) in done.err
    assert "--resume" in done.err
    assert "log.dir=" in done.err
    assert done.err.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in trained.path("").rglob("*")} == before


def test_every_recipe_error_is_told_at_once_with_file_line_and_column(workshop):
    """Unknown key, key given twice, wrong type, impossible value: all placed, exit 2, nothing else done."""
    lines = [
        "task: classify",
        "data: {train: d}",
        "model:",
        "  name: test_resnet",
        "  name: test_vit",
        "  image_size: [64]",
        "memory: [1, 2]",
        "optim:",
        "  wieght_decay: 0.1",
        "  lr: on",
        "train:",
        "  epochs: ten",
        "  batch: -4",
    ]
    workshop.recipe.write_text("\n".join(lines) + "\n")
    for command in ("fit", "check", "plan"):
        done = workshop(command, workshop.recipe)
        assert (done.code, done.out) == (2, "")
        places = re.findall(rf"^{re.escape(str(workshop.recipe))}:(\d+):(\d+) ", done.err, flags=re.MULTILINE)
        assert [int(line) for line, _ in places] == [5, 6, 7, 9, 10, 12, 13]
        assert re.search(r":9:3 +optim\.wieght_decay +unknown key; did you mean weight_decay\?", done.err)
    assert not (workshop.folder / "runs").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty; a recipe needs at least task"),
        ("task: classify\n\tdata: x\n", ":2:1"),
        ("- task\n", ":1:1"),
        (None, "no such file"),
    ],
)
def test_a_recipe_that_is_no_recipe_is_told_in_a_line(workshop, text, said):
    """Empty, with a tab, a list, or not there: exit 2 with the path."""
    workshop.recipe.unlink()
    if text is not None:
        workshop.recipe.write_text(text)
    done = workshop("fit", workshop.recipe)
    assert (done.code, done.out) == (2, "")
    assert str(workshop.recipe) in done.err
    assert said in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.name=test_resent", r"model\.name +timm has no model 'test_resent'; did you mean .*test_resnet"),
        ("model.freeze=99", r"model\.freeze +99 stages to freeze, but the model has \d"),
        ("data.augment=[{name: Nonsense}]", r"data\.augment\[0\] +.*Nonsense"),
        ("optim.warmup=500", r"optim\.warmup +.*500"),
        ("model.pretrained=no/such/file.safetensors", r"no/such/file\.safetensors"),
    ],
)
def test_what_only_the_parts_can_refuse_is_placed_in_the_recipe_too(workshop, override, said):
    """A value that meets its limit late still ends with 2, with its key, and before a run folder stands in the way of the next try."""
    done = workshop.fit(override, ok=False)
    assert done.code == 2, done.err
    assert re.search(rf"^override 2 \({re.escape(override[:20])}.*{said}", done.err, flags=re.MULTILINE), done.err
    assert not workshop.path("").exists()


def test_check_says_that_all_is_well(workshop):
    """Exit 0, counts by split, and as JSON the same."""
    done = workshop("check", workshop.recipe)
    assert done.code == 0
    assert re.match(r" +train +val +test\n", done.out)
    assert re.search(r"^images +16 +9 +7$", done.out, flags=re.MULTILINE)
    assert re.search(r"^blue +8 +4 +3$", done.out, flags=re.MULTILINE)
    assert re.search(r"^augment +light, by albumentations 2", done.out, flags=re.MULTILINE)
    assert done.out.endswith("0 errors, 0 warnings, 0 notes\n")
    found = workshop("check", workshop.recipe, "--json").json
    assert (found["errors"], found["splits"]["val"]["classes"]) == ([], {"blue": 4, "red": 5})


def test_check_finds_independent_errors_at_once(workshop):
    """The model, its freezing, the augmentation, the warm-up, the budget and a path: six lines, and the recipe's exit code."""
    wrong = ("model.name=test_resent", "data.augment=[{name: Nonsense}]", "memory.budget=999TiB", "data.test=nowhere")
    done = workshop("check", workshop.recipe, *wrong)
    assert done.code == 2
    for said in ("model.name  timm has no model", "data.augment[0]  ", "memory.budget  999.0 TiB is above the ", "nowhere  does not exist"):
        assert said in done.out, done.out
    assert done.out.endswith("4 errors, 0 warnings, 0 notes\n")
    done = workshop("check", workshop.recipe, "model.freeze=99", "optim.warmup=500", "model.pretrained=no/such.pth")
    assert done.code == 2
    for said in ("model.freeze  99 stages to freeze", "optim.warmup  warmup 500 is 500 steps", "no/such.pth"):
        assert said in done.out, done.out
    assert done.out.endswith("3 errors, 0 warnings, 0 notes\n")


def test_check_refuses_a_spacing_for_a_stage_that_the_model_lacks(workshop):
    """As fit does."""
    done = workshop("check", workshop.recipe, "memory.spacing={foo: 1}")
    assert done.code == 2
    assert "memory.spacing  test_resnet has no stage foo; it has " in done.out
    assert workshop("check", workshop.recipe, "memory.spacing={stage0: 1}").code == 0


def test_weights_that_cannot_be_had_hide_no_finding_of_the_data(open_workshop, draw, tmp_path):
    """A missing package ends check with 6 where it is alone, and with 3 beside a file that cannot be read; both are told."""
    data = draw(tmp_path / "data", {"train": {"a": 3, "b": 3}, "val": {"a": 2, "b": 2}})
    work = open_workshop(data)
    missing = "model.pretrained=package:no_such_package"
    done = work("check", work.recipe, *CHECKED, missing)
    assert done.code == 6
    assert "package no_such_package is not installed" in done.out
    (data / "train" / "a" / "000.png").write_bytes(b"")
    done = work("check", work.recipe, *CHECKED, missing)
    assert done.code == 3
    assert "package no_such_package is not installed" in done.out
    assert "000.png  is empty" in done.out


@pytest.mark.parametrize("command", ["fit", "check"])
def test_a_single_class_ends_with_3_before_training(open_workshop, draw, tmp_path, command):
    """A classifier needs two."""
    work = open_workshop(draw(tmp_path / "data", {"train": {"a": 3}, "val": {"a": 2}}))
    done = work(command, work.recipe, *CHECKED)
    assert done.code == 3
    assert "'a' is the only class; a classifier needs two" in done.out + done.err


def test_a_budget_above_the_machine_is_the_recipes_error_and_told_first(workshop):
    """Exit 2, placed, before the data is looked at; a plan for such a machine is made all the same."""
    done = workshop.fit("memory.budget=999TiB", "data.train=nowhere", ok=False)
    assert done.code == 2
    assert re.match(r"override 2 \(memory\.budget=999TiB\) +memory\.budget  999\.0 TiB is above the .* that the cpu device has", done.err)
    assert workshop("plan", workshop.recipe, "memory.budget=999TiB").code == 0


def test_a_warmup_longer_than_the_run_is_told_before_anything_is_built(workshop):
    """The batch is given, so the number of steps is known."""
    done = workshop.fit("optim.warmup=500", "model.name=no_such_model", ok=False)
    assert done.code == 2
    assert "warmup 500 is 500 steps, not between 0 and the run's 6 steps" in done.err


def test_classes_come_from_train_alone(open_workshop, draw, tmp_path):
    """val lacks the first class: its labels keep their numbers, and evaluation counts them right."""
    data = draw(tmp_path / "data", {"train": {"a": 3, "b": 3, "c": 3}, "val": {"b": 2, "c": 2}})
    work = open_workshop(data)
    work.fit(*CHECKED, "train.epochs=1")
    assert work.read("contract.json")["classes"] == ["a", "b", "c"]
    rows = work.path("predictions.csv").read_text().splitlines()[1:]
    assert [row.split(",")[2] for row in rows] == ["b", "b", "c", "c"]
    assert [row.split(",")[1].split("/")[-2] for row in rows] == ["b", "b", "c", "c"]


@pytest.mark.parametrize("command", ["fit", "check"])
def test_a_class_that_train_lacks_is_an_error_with_counts(open_workshop, draw, tmp_path, command):
    """Exit 3 before training, with the number of images and the way on; data.unseen=drop leaves them out."""
    data = draw(tmp_path / "data", {"train": {"a": 3, "b": 3}, "val": {"a": 2, "b": 2, "z": 4}})
    work = open_workshop(data)
    done = work(command, work.recipe, *CHECKED)
    assert done.code == 3
    said = done.out + done.err
    assert "labels that train lacks: 'z' (4 images" in said
    assert "data.unseen: drop" in said
    dropped = work(command, work.recipe, *CHECKED, "data.unseen=drop", *(["--dry-run"] if command == "fit" else []))
    assert dropped.code == 0, dropped.err
    assert "4 images dropped" in dropped.out + dropped.err


def test_system_files_are_ignored_and_listed_and_other_extensions_counted(open_workshop, draw, tmp_path):
    """Hidden folders and what systems leave are named in the check; capital extensions are images; texts are counted."""
    data = draw(tmp_path / "data", {"train": {"a": 3, "b": 3}, "val": {"a": 2, "b": 2}})
    some = next((data / "train" / "a").iterdir())
    for name in (".ipynb_checkpoints", "__MACOSX"):
        (data / "train" / name).mkdir()
        shutil.copy(some, data / "train" / name / "x.png")
    (data / "train" / "a" / "Thumbs.db").write_bytes(b"x")
    shutil.copy(some, data / "train" / "a" / "._000.png")
    Image.open(some).save(data / "train" / "a" / "LOUD.JPG")
    (data / "train" / "b" / "notes.txt").write_text("x")
    found = open_workshop(data)("check", tmp_path / "other" / "recipe.yaml", *CHECKED, "--json").json["splits"]["train"]
    assert found["classes"] == {"a": 4, "b": 3}
    assert sorted(found["ignored"]) == [".ipynb_checkpoints/", "__MACOSX/", "a/._000.png", "a/Thumbs.db"]
    assert found["skipped_extensions"] == {".txt": 1}


def test_an_empty_class_folder_stays_a_class(open_workshop, draw, tmp_path):
    """A warning, not an error; with no image at all in train it is one."""
    data = draw(tmp_path / "data", {"train": {"a": 3, "b": 3}, "val": {"a": 2, "b": 2}})
    (data / "train" / "c").mkdir()
    work = open_workshop(data)
    done = work("check", work.recipe, *CHECKED)
    assert done.code == 0
    assert "class 'c' has no images" in done.out
    assert work("check", work.recipe, *CHECKED, "--strict").code == 3
    for name in "ab":
        shutil.rmtree(data / "train" / name)
        (data / "train" / name).mkdir()
    empty = work("check", work.recipe, *CHECKED)
    assert empty.code == 3
    assert "holds no images" in empty.out


def test_the_same_bytes_in_two_splits_are_listed(open_workshop, draw, tmp_path):
    """A warning that names the pair; an error with --strict."""
    data = draw(tmp_path / "data", {"train": {"a": 3, "b": 3}, "val": {"a": 2, "b": 2}})
    shutil.copy(data / "train" / "a" / "000.png", data / "val" / "a" / "again.png")
    work = open_workshop(data)
    done = work("check", work.recipe, *CHECKED)
    assert done.code == 0
    assert f"{data}/train/a/000.png and {data}/val/a/again.png" in done.out
    assert work("check", work.recipe, *CHECKED, "--strict").code == 3


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_cut_file_ends_fit_and_check_with_3_and_its_path(open_workshop, draw, tmp_path, split):
    """Its header is whole, so only a full decode tells; nothing is trained, and the file is left as it is."""
    data = draw(tmp_path / "data", {"train": {"a": 3, "b": 3}, "val": {"a": 2, "b": 2}})
    victim = data / split / "b" / "cut.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8)).save(victim, quality=95)
    cut = victim.read_bytes()[: victim.stat().st_size * 2 // 3]
    victim.write_bytes(cut)
    work = open_workshop(data)
    for command in ("check", "fit"):
        done = work(command, work.recipe, *CHECKED)
        assert done.code == 3
        assert str(victim) in done.out + done.err
    assert not (work.folder / "runs").exists()
    skipping = work("check", work.recipe, *CHECKED, "data.bad_images=skip")
    assert skipping.code == (0 if split == "train" else 3)
    assert victim.read_bytes() == cut


def test_skipped_files_are_counted_and_named(open_workshop, draw, tmp_path):
    """With bad_images: skip a run goes on without the file, says so, and counts it at the end."""
    data = draw(tmp_path / "data", {"train": {"a": 5, "b": 5}, "val": {"a": 2, "b": 2}})
    victim = data / "train" / "b" / "001.png"
    victim.write_bytes(victim.read_bytes()[:2000])
    work = open_workshop(data)
    work.fit(*CHECKED, "data.bad_images=skip", "train.epochs=2")
    (finished,) = work.events("run_finished")
    assert finished["num_skipped"] >= 1
    assert [row for row in work.events("notice") if row["level"] == "warning" and f"skipped {victim}" in row["text"]]
    assert sum(row["num_images"] for row in work.events("step_done")) == 2 * 9


def test_rotated_files_are_counted(open_workshop, draw, tmp_path):
    """check says how many images EXIF turns."""
    data = draw(tmp_path / "data", {"train": {"a": 3, "b": 3}, "val": {"a": 2, "b": 2}})
    exif = Image.Exif()
    exif[0x0112] = 8
    Image.new("RGB", (60, 90), "red").save(data / "train" / "a" / "turned.jpg", exif=exif)
    work = open_workshop(data)
    found = work("check", work.recipe, *CHECKED, "--json").json["splits"]
    assert [found[split]["exif_rotated"] for split in ("train", "val")] == [1, 0]


@pytest.mark.parametrize("kind", ["12 bits in 16", "float"])
def test_the_range_of_deep_images_is_recorded_and_used_again(open_workshop, tmp_path, kind):
    """Neither is cut to white: fit finds the range, and predict takes it from the run, whatever it is given alone."""
    rng = np.random.default_rng(3)
    suffix = ".png" if kind.startswith("12") else ".tif"
    for split, count in (("train", 3), ("val", 2)):
        for label, level in (("dark", 600), ("light", 2400)):
            (tmp_path / "data" / split / label).mkdir(parents=True)
            for number in range(count):
                array = (level + rng.random((80, 80)) * 1500).astype(np.uint16 if suffix == ".png" else np.float32)
                Image.fromarray(array).save(tmp_path / "data" / split / label / f"{number}{suffix}")
    work = open_workshop(tmp_path / "data")
    done = work.fit("data.test=null", "train.epochs=1")
    assert "percentiles" in done.err
    scale = work.read("contract.json")["scale"]
    assert scale["kind"] == "range"
    assert 590 < scale["low"] < 650
    assert 3800 < scale["high"] < 3910
    table = work.path("predictions.csv").read_text().splitlines()
    told = {row["path"]: row for row in csv.DictReader(table)}
    alone = tmp_path / "data" / "val" / "light" / f"0{suffix}"
    darker = tmp_path / f"darker{suffix}"
    Image.fromarray((np.asarray(Image.open(alone)) / 2).astype(np.uint16 if suffix == ".png" else np.float32)).save(darker)
    first, second = csv.DictReader(work("predict", work.path(""), alone, darker).out.splitlines())
    assert first["label"] == told[str(alone)]["predicted"]
    assert float(first["score"]) == pytest.approx(float(told[str(alone)]["score"]), abs=2e-6)
    assert second["score_dark"] != first["score_dark"]


def test_plan_needs_no_pixels(workshop):
    """Without any data a plan is made for two classes; with --budget it is made for that one."""
    done = workshop("plan", workshop.recipe, "data.train=nowhere", "data.val=0.2", "data.test=null", "--budget", "3GiB", "--json")
    assert done.code == 0, done.err
    assert done.json["budget_bytes"] == 3 * 2**30
    assert done.err == ""


def test_plan_tells_the_ladder_and_the_parts(workshop):
    """The table for people has a row for each rung, one of them chosen, and the parts of the predicted peak."""
    done = workshop("plan", workshop.recipe)
    assert done.code == 0
    rungs = re.findall(r"^\W*(\w+) +(\d+|-) +[\d.]+ [KMG]iB +\+?[\d.]+% +(?:\S+ +)?([a-z].*)$", done.out, flags=re.MULTILINE)
    assert [micro for _, micro, verdict in rungs if verdict.startswith("chosen")] == ["6"]
    assert re.search(r"^peak +[\d.]+ [MG]iB predicted of 4\.0 GiB", done.out, flags=re.MULTILINE)
    assert re.search(r"^ +weights +[\d.]+ MiB", done.out, flags=re.MULTILINE)
