"""predict on what people give it: thousands of files of which some are bad, names twice, folders with other things in them."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image
from safetensors.torch import load_file, save_file

HEADERS, DECODING = ("empty", "text", "many_channels"), ("cut", "flipped")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Seven sound images, 0.png to 6.png."""
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(7):
        Image.fromarray(rng.integers(0, 256, (90, 90, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return folder


def spoil(path: Path, how: str) -> None:
    """Makes a file unreadable in one of the ways that files are."""
    whole = path.read_bytes()
    if how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("no image")
    elif how == "many_channels":
        tifffile.imwrite(path, np.zeros((60, 60, 5), np.uint8), photometric="minisblack", planarconfig="contig", extrasamples=[0] * 4)
    elif how == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    else:
        path.write_bytes(whole[:4000] + bytes([whole[4000] ^ 0xFF]) + whole[4001:])


def table(done) -> list[dict[str, str]]:
    return list(csv.DictReader(done.out.splitlines()))


def run_in_twos(trained, folder: Path, workers: int) -> Path:
    """A copy of the run that predicts two images at a time, with so many loader processes."""
    run = shutil.copytree(trained.path(""), folder / "run")
    plan = json.loads((run / "plan.json").read_text())
    (run / "plan.json").write_text(json.dumps({**plan, "eval_batch": 2}))
    resolved = (run / "recipe.resolved.yaml").read_text()
    assert "workers: 0 " in resolved
    (run / "recipe.resolved.yaml").write_text(resolved.replace("workers: 0 ", f"workers: {workers} "))
    return run


@pytest.mark.parametrize(("how", "workers"), [*((how, 0) for how in (*HEADERS, *DECODING)), ("cut", 2)])
def test_a_bad_file_has_its_row_and_the_others_theirs(trained, images, tmp_path, how, workers):
    """Wherever they stand, first and last included: a row each in order, the reason as error, exit 3, and every score as without them."""
    names = [str(images / f"{number}.png") for number in range(7)]
    run = run_in_twos(trained, tmp_path, workers)
    sound = {row["path"]: row for row in table(trained("predict", run, *names))}
    bad = {names[0], names[3], names[4], names[6]}
    for name in bad:
        spoil(Path(name), how)
    done = trained("predict", run, images)
    assert done.code == 3
    assert "4 of 7 images cannot be read" in done.err
    rows = table(done)
    assert [row["path"] for row in rows] == names
    for row in rows:
        if row["path"] in bad:
            assert row["error"]
            assert {value for key, value in row.items() if key not in ("path", "error")} == {""}
        else:
            assert row["error"] == ""
            assert row["label"] == sound[row["path"]]["label"]
            assert float(row["score"]) == pytest.approx(float(sound[row["path"]]["score"]), abs=1e-6)


def test_bad_headers_are_told_before_the_first_row(trained, images):
    """Three by name and the rest by number; the reader of 10000 files need not wait for the end."""
    for number in range(5):
        spoil(images / f"{number}.png", "text")
    done = trained("predict", trained.path(""), images)
    first, *more = done.err.splitlines()
    assert first.startswith(f"{images / '0.png'}  is not a JPEG, PNG")
    assert more[2] == "... and 2 more of 7 images that cannot be read"
    assert done.code == 3


def test_a_table_with_bad_rows_is_whole(trained, images, tmp_path):
    """--out takes its name, with a row for every image; JSON lines hold the same."""
    spoil(images / "3.png", "cut")
    done = trained("predict", trained.path(""), images, "--out", tmp_path / "out.csv")
    assert (done.code, done.out) == (3, "")
    assert [path.name for path in tmp_path.iterdir() if path != images] == ["out.csv"]
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    told = trained("predict", trained.path(""), images, "--json")
    lines = [json.loads(line) for line in told.out.splitlines()]
    assert told.code == 3
    assert [row["error"] or None for row in rows] == [line["error"] for line in lines]
    for row, line in zip(rows, lines, strict=True):
        assert (row["score_ok"] or None) == (line["scores"] and repr(line["scores"]["ok"]))


def test_nothing_but_bad_files_is_a_table_too(trained, images):
    """Every image has a row, even where the model has none to look at."""
    for path in images.iterdir():
        spoil(path, "cut")
    done = trained("predict", trained.path(""), images)
    assert done.code == 3
    assert [bool(row["error"]) for row in table(done)] == [True] * 7


def test_a_file_given_twice_has_one_row_at_its_first_place(trained, images, monkeypatch):
    """By whatever spelling, or as part of a folder; the order is that of the arguments, folders sorted; links are files of their own."""
    monkeypatch.chdir(images.parent)
    os.symlink(images / "0.png", "link.png")
    given = ("images/5.png", "./images/../images/5.png", "link.png", images, "images/1.png")
    done = trained("predict", trained.path(""), *given)
    assert done.code == 0
    expected = ["images/5.png", "link.png", *(str(images / f"{number}.png") for number in (0, 1, 2, 3, 4, 6))]
    assert [row["path"] for row in table(done)] == expected
    assert "3 paths were given more than once" in done.err


def test_what_a_folder_holds_besides_images_is_counted(trained, images):
    """Passed over, but not in silence; a file that is named itself is read whatever its extension."""
    (images / "notes.txt").write_text("x")
    (images / "more").mkdir()
    shutil.copy(images / "0.png", images / "more" / "photo.dat")
    done = trained("predict", trained.path(""), images, images / "more" / "photo.dat")
    assert done.code == 0
    assert "files passed over by extension: 1 .dat, 1 .txt" in done.err
    assert [Path(row["path"]).name for row in table(done)][-1] == "photo.dat"


def test_a_bad_part_of_an_image_in_windows_makes_that_image_bad_alone(trained, tmp_path):
    """A tile that cannot be read costs the image, whose other windows are in no other's mean; one row each as ever."""
    run = run_in_twos(trained, tmp_path, 0)
    contract = json.loads((run / "contract.json").read_text())
    (run / "contract.json").write_text(json.dumps({**contract, "fit": "tile", "overlap": 0.0}))
    (tmp_path / "in").mkdir()
    rng = np.random.default_rng(1)
    names = [str(tmp_path / "in" / f"{number}.tif") for number in range(4)]
    for name in names:
        tifffile.imwrite(name, rng.integers(0, 256, (200, 288, 3), dtype=np.uint8), tile=(96, 96), compression="zlib")
    sound = table(trained("predict", run, *names))
    with tifffile.TiffFile(names[1]) as tiff:
        start, size = tiff.pages[0].dataoffsets[4], tiff.pages[0].databytecounts[4]
    data = Path(names[1]).read_bytes()
    Path(names[1]).write_bytes(data[:start] + bytes(size) + data[start + size :])
    done = trained("predict", run, *names)
    assert done.code == 3
    assert "1 of 4 images cannot be read" in done.err
    rows = table(done)
    assert [row["path"] for row in rows] == names
    assert [bool(row["error"]) for row in rows] == [False, True, False, False]
    for row, before in zip(rows, sound, strict=True):
        assert row["error"] or float(row["score"]) == pytest.approx(float(before["score"]), abs=1e-6)


def test_outputs_that_are_not_finite_are_no_prediction(trained, images, tmp_path):
    """Weights of a run that had diverged: each row says so, none has a class, and the exit code is not 0."""
    run = shutil.copytree(trained.path(""), tmp_path / "run")
    weights = load_file(run / "weights" / "best.safetensors")
    spoilt = {name: value * float("nan") if value.is_floating_point() else value for name, value in weights.items()}
    save_file(spoilt, run / "weights" / "best.safetensors")
    done = trained("predict", run, images)
    assert done.code == 3
    rows = table(done)
    assert len(rows) == 7
    assert {(row["label"], row["error"].partition(":")[0]) for row in rows} == {("", "the run's weights give outputs that are not finite")}
