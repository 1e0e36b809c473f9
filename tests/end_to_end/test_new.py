"""`new` looks at whatever lies there and writes a recipe that `check` accepts and `fit` runs; what it cannot use it names with the mend."""

from __future__ import annotations

import csv
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hiresvis import new as new_module
from hiresvis.new.model import Candidate
from hiresvis.recipe import load_recipe
from hiresvis.recipe.draft import Line

SMALL = ("model.name=test_resnet", "model.pretrained=false")  # the choice of a model has tests of its own


def save(path: Path, seed: int, size: tuple[int, int] = (72, 96)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, format="JPEG" if path.suffix.lower() == ".jpg" else None)
    return path


def folders(root: Path, counts: dict[str, int], suffix: str = ".png") -> None:
    """`{"train/cat": 6}` as folders of images."""
    for number, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            save(root / name / f"{index:02d}{suffix}", 100 * number + index)


def table(path: Path, rows: list[dict[str, object]], **options: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding=options.pop("encoding", "utf-8")) as stream:
        writer = csv.DictWriter(stream, list(rows[0]), **options)
        writer.writeheader()
        writer.writerows(rows)


def rows_of(root: Path, count: int = 12, folder: str = "images") -> list[dict[str, object]]:
    return [
        {"path": f"{folder}/{save(root / folder / f'{index:02d}.png', index).name}", "label": ("a", "b")[index % 2]}
        for index in range(count)
    ]


def only_train(root: Path) -> Path:
    folders(root, {"cat": 8, "dog": 8})
    return root


def classes_of_train_alone(root: Path) -> Path:
    folders(root, {"train/a": 6, "train/b": 6, "train/c": 6, "val/b": 3, "val/c": 3})
    return root


def other_words_for_the_splits(root: Path) -> Path:
    folders(root, {"Training/a": 6, "Training/b": 6, "valid/a": 3, "valid/b": 3, "testing/a": 3, "testing/b": 3})
    return root


def rubbish_beside(root: Path) -> Path:
    folders(root, {"a": 8, "b": 8, ".ipynb_checkpoints": 2, "__MACOSX/a": 2})
    (root / "Thumbs.db").write_bytes(b"x")
    (root / "a" / "._x.jpg").write_bytes(b"x")
    (root / "a" / "notes.txt").write_text("x")
    return root


def empty_class(root: Path) -> Path:
    folders(root, {"a": 8, "b": 8, "none": 0})
    return root


def endings_in_capitals(root: Path) -> Path:
    folders(root, {"a": 8}, ".JPG")
    folders(root, {"b": 8}, ".TIF")
    return root


def zipped_once_more(root: Path) -> Path:
    folders(root / "Pet Images", {"a": 8, "b": 8})
    return root


def windows_table(root: Path) -> Path:
    """A byte-order mark, Windows line ends, semicolons, spaces in names, backslashes."""
    rows = rows_of(root, folder="my images")
    for row in rows:
        row["path"] = str(row["path"]).replace("/", "\\")
    table(root / "my labels.csv", rows, encoding="utf-8-sig", delimiter=";")
    assert b"\r\n" in (root / "my labels.csv").read_bytes()
    return root


def flat_folder_with_a_table(root: Path) -> Path:
    rows = rows_of(root, folder=".")
    table(root / "labels.csv", [{"file_name": str(row["path"])[2:], "y": row["label"]} for row in rows])
    return root


def table_a_split(root: Path) -> Path:
    for split, count in (("train", 12), ("val", 4)):
        rows = rows_of(root, count, folder=split)
        table(root / f"{split}.csv", rows)
    table(root / "test.csv", [{"path": row["path"]} for row in rows_of(root, 4, folder="test")])
    return root


def pairs(root: Path) -> Path:
    for index in range(12):
        save(root / "images" / f"{index}.png", index, (64, 64))
        mask = np.zeros((64, 64), np.uint8)
        mask[index : index + 20, 10:40] = 1
        (root / "masks").mkdir(exist_ok=True)
        Image.fromarray(mask).save(root / "masks" / f"{index}.png")
    return root


def flags(root: Path) -> Path:
    table(root / "t.csv", [{"path": row["path"], "wet": n % 2, "cold": n % 3 // 2} for n, row in enumerate(rows_of(root))])
    return root / "t.csv"


def joined(root: Path) -> Path:
    names = ("wet|cold", "cold", "", "wet")
    table(root / "t.csv", [{"path": row["path"], "kinds": names[n % 4]} for n, row in enumerate(rows_of(root))])
    return root / "t.csv"


def numbers(root: Path) -> Path:
    table(root / "t.csv", [{"path": row["path"], "weight": 1.5 * n} for n, row in enumerate(rows_of(root, 24))])
    return root / "t.csv"


def splits_and_patients(root: Path) -> Path:
    rows = [
        {"image": row["path"], "set": ("train", "train", "Test")[n // 8], "patient": f"p{n // 2}", "grade": n // 2 % 3}
        for n, row in enumerate(rows_of(root, 24))
    ]
    table(root / "t.csv", rows)
    return root / "t.csv"


def files_elsewhere(root: Path) -> Path:
    rows = rows_of(root / "store")
    table(root / "tables" / "t.csv", [{**row, "path": root / "store" / str(row["path"])} for row in rows])
    return root / "tables"


LAYOUTS: dict[Callable[[Path], Path], dict[str, object]] = {
    only_train: {"task": "classify", "data.val": 0.15},
    classes_of_train_alone: {"data.val": "a b/val", "data.test": None},
    other_words_for_the_splits: {"data.train": "a b/Training", "data.val": "a b/valid", "data.test": "a b/testing"},
    rubbish_beside: {"data.train": "a b"},
    empty_class: {"task": "classify"},
    endings_in_capitals: {"data.fit": "resize"},
    zipped_once_more: {"data.train": "a b/Pet Images"},
    windows_table: {"data.train": "a b/my labels.csv", "data.image": "path", "data.label": "label"},
    flat_folder_with_a_table: {"data.image": "file_name", "data.label": "y"},
    table_a_split: {"data.train": "a b/train.csv", "data.val": "a b/val.csv", "data.test": None},
    pairs: {"task": "segment", "data.train": "a b", "model.image_size": (64, 64)},
    flags: {"task": "multilabel", "data.label": ("wet", "cold")},
    joined: {"task": "multilabel", "data.label": "kinds"},
    numbers: {"task": "regress", "data.label": "weight"},
    splits_and_patients: {"task": "classify", "data.split": "set", "data.group": "patient", "data.label": "grade"},
    files_elsewhere: {"data.root": "a b/store/images"},
}


SLOW = (pairs, flags, joined, numbers)  # another task is another model to trace, in seconds; test_layout has their readings


@pytest.mark.parametrize(
    "make", [pytest.param(make, marks=[pytest.mark.slow] if make in SLOW else []) for make in LAYOUTS], ids=lambda make: make.__name__
)
def test_a_recipe_for_whatever_lies_there_passes_check(workshop, tmp_path, monkeypatch, make):
    """Layouts that broke other tools: the recipe says what they are, each line why, and every file is decoded by it without an error."""
    source = make(tmp_path / "a b")
    before = sorted(tmp_path.rglob("*"))
    out = tmp_path / "recipes" / "r.yaml"
    out.parent.mkdir()
    monkeypatch.chdir(out.parent)
    done = workshop("new", source, "--yes", "--out", "r.yaml", *SMALL)
    assert done.code == 0, done.err
    assert sorted(path for path in tmp_path.rglob("*") if path not in before and path.is_file()) == [out]
    recipe = load_recipe(out).recipe
    for key, wanted in LAYOUTS[make].items():
        value = recipe
        for part in key.split("."):
            value = getattr(value, part)
        assert value == (f"../{wanted}" if isinstance(wanted, str) and wanted.startswith("a b") else wanted), key
    values = [line for line in out.read_text().splitlines() if re.match(r" *\w+: \S", line)]
    assert all("  # " in line or line.startswith(("  train", "  val", "  test", "  root")) for line in values), values
    checked = workshop("check", out, "--json")
    assert checked.code == 0, checked.out
    assert checked.json["checked"]["decoded"] == checked.json["checked"]["images"] > 10


def one_class(root: Path) -> Path:
    folders(root, {"cat": 4})
    return root


def one_class_of_train(root: Path) -> Path:
    folders(root, {"train/cat": 4, "val/cat": 2})
    return root


def unknown_in_val(root: Path) -> Path:
    folders(root, {"train/a": 4, "train/b": 4, "val/a": 2, "val/z": 3})
    return root


def empty(root: Path) -> Path:
    root.mkdir()
    return root


def no_images(root: Path) -> Path:
    (root / "cat").mkdir(parents=True)
    (root / "cat" / "1.txt").write_text("x")
    return root


def nothing_said(root: Path) -> Path:
    folders(root, {".": 4})
    return root


def an_image(root: Path) -> Path:
    return save(root / "x.png", 0)


def not_there(root: Path) -> Path:
    only_train(root)
    return root.with_name("ab")


def two_sets(root: Path) -> Path:
    folders(root, {"first/train/a": 2, "first/train/b": 2, "first/val/a": 2, "second/train/a": 2, "second/test/a": 2})
    return root


def two_tables(root: Path) -> Path:
    for name in ("one", "two"):
        table(root / f"{name}.csv", rows_of(root))
    return root


def several_faults(root: Path) -> Path:
    rows = rows_of(root)
    rows[2]["label"] = "NaN"
    rows[5]["path"] = "images/lost.png"
    table(root / "t.csv", rows)
    return root


def paths_from_another_folder(root: Path) -> Path:
    table(root / "t.csv", [{**row, "path": str(row["path"]).removeprefix("images/")} for row in rows_of(root)])
    return root


def not_text(root: Path) -> Path:
    rows_of(root)
    (root / "t.csv").write_bytes(b"path,label\nimages/00.png,caf\xe9\n")
    return root


def two_folders_of_val(root: Path) -> Path:
    folders(root, {"train/a": 2, "train/b": 2, "val/a": 1, "valid/a": 1})
    return root


def no_train(root: Path) -> Path:
    folders(root, {"val/a": 2, "test/a": 2})
    return root


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (one_class, ["'cat' is the only class, of 4 images; a classifier needs two: add a folder of another"]),
        (one_class_of_train, ["'cat' is the only class; a classifier needs two"]),
        (unknown_in_val, ["labels that train lacks: 'z' (3 images)", "data.unseen: drop"]),
        (empty, ["holds no images; give class folders (cat/1.jpg, dog/2.jpg), images/ and masks/, or a manifest"]),
        (no_images, ["holds no images (files of other kinds: 1 .txt)"]),
        (nothing_said, ["holds 4 images, and nothing says what they show"]),
        (an_image, ["is an image; give the folder that holds it, or a manifest (.csv, .tsv, .parquet)"]),
        (not_there, ["does not exist; did you mean"]),
        (two_sets, ["holds data sets of its own: first, second; give one of them"]),
        (two_tables, ["holds the tables one.csv, two.csv, and which of them is meant is not clear"]),
        (several_faults, ["t.csv:4  no label in column 'label' (NaN)", "t.csv:7  no such file"]),
        (
            paths_from_another_folder,
            ["names 00.png, which is in images/; write images/ before each path", "names 12 files that are not there"],
        ),
        (not_text, ["t.csv:2  byte 0xe9 is not UTF-8; save the file as UTF-8"]),
        (two_folders_of_val, ["val/ and valid/ are both folders of val; keep one"]),
        (no_train, ["holds test and val, and no train"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_is_no_data_set_is_named_with_the_mend(workshop, tmp_path, make, said):
    """Exit 3, everything that was found at once, and no recipe."""
    source = make(tmp_path / "a b")
    done = workshop("new", source, "--yes", "--out", tmp_path / "r.yaml", *SMALL)
    assert (done.code, done.out) == (3, "")
    for text in said:
        assert text in done.err
    assert not (tmp_path / "r.yaml").exists()


def test_what_was_asked_for_stands_in_the_recipe_as_it_was_given(workshop, tmp_path, monkeypatch):
    """Overrides decide the reading of a table too; a path in one starts at the current folder."""
    source = splits_and_patients(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    given = ("data.label=grade", "data.group=null", "data.split=null", "train.epochs=3", "optim.lr=1e-4", "log.dir=somewhere")
    done = workshop("new", source, "--yes", "--out", "recipes/r.yaml", *SMALL, *given)
    assert done.code == 0, done.err
    loaded = load_recipe(tmp_path / "recipes" / "r.yaml")
    assert (loaded.recipe.task, loaded.recipe.data.label, loaded.recipe.data.group) == ("classify", "grade", None)
    assert (loaded.recipe.train.epochs, loaded.recipe.optim.lr, loaded.run_dir) == (3, 1e-4, tmp_path / "somewhere")
    wrong = workshop("new", source, "--yes", "--out", "other.yaml", "optim.wieght_decay=1", "train.epochs=0", "no")
    assert wrong.code == 2
    assert len(wrong.err.splitlines()) == 3


def test_a_recipe_that_is_there_is_replaced_by_force_alone(workshop, tmp_path):
    """Exit 2 with both ways on, before anything is looked at."""
    source, out = only_train(tmp_path / "data"), tmp_path / "r.yaml"
    out.write_text("mine")
    done = workshop("new", source, "--yes", "--out", out, *SMALL)
    assert done.code == 2
    assert "is there already; give another name to --out, or --force to replace it" in done.err
    assert out.read_text() == "mine"
    assert workshop("new", source, "--yes", "--out", out, "--force", *SMALL).code == 0
    assert load_recipe(out).recipe.task == "classify"


def test_the_data_folder_is_written_into_only_when_that_is_asked(workshop, tmp_path, monkeypatch):
    """Where one stands in it, the place that would be taken by itself is refused; --out takes it."""
    source = only_train(tmp_path / "data")
    monkeypatch.chdir(source)
    done = workshop("new", ".", "--yes", *SMALL)
    assert done.code == 2
    assert "would lie in the data" in done.err
    assert sorted(os.listdir(source)) == ["cat", "dog"]
    assert workshop("new", ".", "--yes", "--out", "recipe.yaml", *SMALL).code == 0
    assert workshop("check", source / "recipe.yaml").code == 0


def test_the_command_without_a_terminal_says_that_it_takes_what_it_proposes(workshop, tmp_path):
    """Nothing waits for an answer that cannot come."""
    done = workshop("new", only_train(tmp_path / "data"), "--out", tmp_path / "r.yaml", *SMALL)
    assert done.code == 0
    assert "not a terminal: every proposal is taken, as with --yes" in done.err


@pytest.mark.parametrize("candidates", ["small", pytest.param("own", marks=pytest.mark.slow)])
def test_a_proposed_model_trains(workshop, tmp_path, monkeypatch, candidates):
    """Nothing given but the length: model, weights, size and batch are `new`'s, the plan's figures stand in the recipe, and fit runs it."""
    source = tmp_path / "data"
    if candidates == "small":  # in place of the list's models, whose first steps take seconds
        monkeypatch.setattr(new_module, "ON_CPU", (Candidate("test_resnet", 0, "small"),))
        monkeypatch.setattr(new_module, "weights_of", lambda name: Line(False, "random"))
    folders(source, {"a": 4, "b": 20})
    out = tmp_path / "r.yaml"
    done = workshop("new", source, "--yes", "--out", out, "train.epochs=1")
    assert done.code == 0, done.err
    recipe, text = load_recipe(out).recipe, out.read_text()
    assert (recipe.data.balance, recipe.train.metric, recipe.data.val) == ("weights", "balanced_accuracy", 0.15)
    assert re.search(r"budget: auto .*micro-batch \d+ x 1, predicted peak .* of .*B", " ".join(text.replace("#", " ").split()))
    assert recipe.model.image_size == (64, 96)
    trained = workshop("fit", out, "--ui", "off")
    assert trained.code == 0, trained.err
    assert (tmp_path / "runs" / "r" / "weights" / "best.safetensors").is_file()


def test_answers_are_taken_and_questions_have_their_proposals(tmp_path, monkeypatch):
    """What is to be learnt, the size, the model: an answer stands in the recipe, and a wrong one is asked again."""
    monkeypatch.setattr(new_module, "ON_CPU", (Candidate("test_resnet", 0, "small"),))
    source = tmp_path / "data"
    table(source / "t.csv", [{"path": row["path"], "label": row["label"], "weight": n + 0.5} for n, row in enumerate(rows_of(source, 24))])
    asked: list[tuple[str, str]] = []
    answers = iter(["7", "2", "50.5", "96", "test_resnet"])

    def ask(question: str, proposed: str) -> str:
        asked.append((question.partition("\n")[0], proposed))
        return next(answers)

    written = new_module.new(source / "t.csv", tmp_path / "r.yaml", ["model.pretrained=false"], ask=ask)
    recipe = load_recipe(written.path).recipe
    assert (recipe.task, recipe.data.label, recipe.model.image_size, recipe.model.name) == ("regress", "weight", (96, 96), "test_resnet")
    assert [question for question, _ in asked[:3]] == ["What is to be learnt?", "a number from 1 to 2", "image_size"]
    assert "50.5" in asked[3][0]
    assert asked[4][0] == "model"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["", "labels.csv", "task=segment", "task=multilabel", "data.label=count"])
def test_every_reading_of_the_drawn_boards_trains(workshop, boards, tmp_path, way):
    """The folders, and the table beside them by each of its columns: new, check, fit."""
    source = shutil.copytree(boards, tmp_path / "boards")
    given = [way] if "=" in way else []
    if way in ("task=segment",):
        given.append("data.classes=[board, defect]")
    out = tmp_path / "r.yaml"
    done = workshop("new", source / "labels.csv" if way else source, "--yes", "--out", out, "train.epochs=1", "model.image_size=96", *given)
    assert done.code == 0, done.err
    checked = workshop("check", out)
    assert checked.code == 0, checked.out
    trained = workshop("fit", out, "--ui", "off")
    assert trained.code == 0, trained.err
