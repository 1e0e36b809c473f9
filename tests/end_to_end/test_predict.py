"""predict on what people give it: thousands of files of which some are bad, names twice, folders with other things in them."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import struct
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from hiresvis.inference import predict
from hiresvis.train.step import TrainStep

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


BROKEN = ("empty", "text", "folder", "link", "cut", "bomb")  # every way of being no image that people's folders have


def break_(path: Path, how: str) -> None:
    """Puts something broken in a file's place."""
    whole = path.read_bytes()
    if how in ("empty", "text", "cut"):
        spoil(path, how)
        return
    path.unlink()
    if how == "folder":
        path.mkdir()
        (path / "inside.txt").touch()
    elif how == "link":
        path.symlink_to(path.with_name("gone.jpg"))
    else:  # a few bytes that claim 60000 x 60000 px
        header = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
        path.write_bytes(whole[:8] + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header)) + whole[33:])


def many_images(folder: Path, count: int, num_broken: int) -> dict[str, str]:
    """So many images of four formats in two folders, of which some are broken; by path in order how, empty for sound ones."""
    rng = np.random.default_rng(3)
    order = [int(place) for place in rng.permutation(count)]
    broken = {place: BROKEN[number % len(BROKEN)] for number, place in enumerate(order[:num_broken])}
    kinds = {}
    for place in range(count):
        path = folder / f"{place % 2}" / f"{place:04d}{('.png', '.jpg', '.webp', '.tif')[place % 4]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (6, 8, 3), dtype=np.uint8).repeat(10, axis=0).repeat(12, axis=1)
        how = broken.get(place, "")
        # what is cut has to be larger than its header, and a bomb is a PNG whatever it is called
        Image.fromarray(pixels).save(path, **({"format": "PNG"} if how == "bomb" else {}))
        if how:
            break_(path, how)
        kinds[str(path)] = how
    return dict(sorted(kinds.items()))


def assert_rows_for_all(done, rows: list[dict[str, str]], kinds: dict[str, str]) -> None:
    said = {"empty": "is empty", "text": "is not a", "folder": "is a folder", "link": "is a broken link", "bomb": "60000 x 60000"}
    num_broken = sum(map(bool, kinds.values()))
    assert done.code == 3
    assert f"{num_broken} of {len(kinds)} images cannot be read" in done.err
    assert [row["path"] for row in rows] == list(kinds)
    for row, how in zip(rows, kinds.values(), strict=True):
        assert bool(row["error"]) == bool(how), row
        assert said.get(how, "") in row["error"], row
        assert (row["label"] == "") == (row["drift"] == "") == bool(how)


def test_of_many_files_those_that_are_broken_in_whatever_way_have_rows_in_order(trained, tmp_path):
    """Sixty files in four formats and six of them broken, each in its own way: sixty rows, six with the reason."""
    kinds = many_images(tmp_path / "in", 60, 6)
    done = trained("predict", trained.path(""), tmp_path / "in", "--out", tmp_path / "out.csv")
    assert_rows_for_all(done, list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines())), kinds)
    assert "60 images: " in done.err


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_files_of_which_thirty_are_broken_are_a_thousand_rows(trained, tmp_path):
    """In order, thirty with the reason, by folder and by pattern alike."""
    kinds = many_images(tmp_path / "in", 1000, 30)
    for given in (tmp_path / "in", tmp_path / "in" / "*" / "*.*"):
        done = trained("predict", trained.path(""), given)
        assert_rows_for_all(done, table(done), kinds)


def from_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))


def test_the_same_images_have_the_same_rows_however_they_are_named(trained, images, tmp_path, monkeypatch):
    """A folder, a pattern, a table in the run's column, lines and NUL-separated paths on standard input."""
    spoil(images / "2.png", "cut")
    names = [str(images / f"{number}.png") for number in range(7)]
    (images / "t.csv").write_text("path\n" + "".join(f"{number}.png\n" for number in range(7)))
    expected = table(trained("predict", trained.path(""), images))
    assert [row["path"] for row in expected] == names
    for given in (images / "*.png", images / "t.csv"):
        assert table(trained("predict", trained.path(""), given)) == expected
    for separator in ("\n", "\0"):
        from_stdin(monkeypatch, separator.join([*names, names[0], ""]).encode())
        done = trained("predict", trained.path(""), "-")
        assert table(done) == expected
        assert "1 paths were given more than once" in done.err
        assert "1 of 7 images cannot be read" in done.err


def test_rows_come_while_paths_are_still_coming(trained, images):
    """Each path has its row before the next is named."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as stream:
        found = predict(trained.path(""), ["-"], stdin=stream)
        for name in (str(images / "3.png"), str(images / "gone.png"), str(images / "1.png")):
            os.write(writing, f"{name}\n".encode())
            row = next(found.rows)
            assert (row["path"], row["error"]) == (name, "does not exist" if "gone" in name else None)
        os.close(writing)
        assert list(found.rows) == []


def test_standard_input_goes_alone_and_nothing_on_it_is_an_empty_table(trained, images, monkeypatch):
    """Otherwise the order of rows would be nobody's."""
    done = trained("predict", trained.path(""), "-", images)
    assert (done.code, "goes alone" in done.err) == (2, True)
    from_stdin(monkeypatch, b"\n")
    done = trained("predict", trained.path(""), "-")
    assert (done.code, done.out) == (0, "path,label,score,score_defect,score_ok,drift,error\n")


def test_the_file_says_what_rows_are_and_the_best_classes_stand_beside(trained, images, tmp_path):
    """.jsonl holds what --json prints; a suffix that contradicts is refused before anything is computed; so are more classes than there
    are."""
    done = trained("predict", trained.path(""), images, "--out", tmp_path / "out.jsonl", "--top-k", "2")
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [json.loads(line) for line in trained("predict", trained.path(""), images, "--json", "--top-k", "2").out.splitlines()] == lines
    rows = table(trained("predict", trained.path(""), images, "--top-k", "2"))
    for row, line in zip(rows, lines, strict=True):
        assert [best["label"] for best in line["top"]] == [row["top1"], row["top2"]] == sorted(line["scores"], key=line["scores"].get)[::-1]
        assert (float(row["top1_score"]), row["top1"]) == (line["score"], line["label"])
    for out, options in (("x.json", ()), ("x.csv", ("--json",))):
        assert trained("predict", trained.path(""), images, "--out", tmp_path / out, *options).code == 2
    done = trained("predict", trained.path(""), images, "--top-k", "3")
    assert (done.code, "--top-k 3 is above the 2 classes of this run" in done.err) == (2, True)


@pytest.mark.parametrize("most", [3, 1])
def test_memory_that_runs_out_halves_the_batch_and_loses_no_row(trained, images, monkeypatch, most):
    """The same classes and scores but for rounding, and it is said."""
    expected = table(trained("predict", trained.path(""), images))
    real = TrainStep.predict

    def predicted(step, batch):
        if len(batch) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(step, batch)

    monkeypatch.setattr(TrainStep, "predict", predicted)
    done = trained("predict", trained.path(""), images)
    assert done.code == 0, done.err
    assert "memory ran out (CUDA out of memory. Tried to allocate 2.00 GiB); from here on 3 images at once" in done.err
    for row, before in zip(table(done), expected, strict=True):
        assert (row["path"], row["label"]) == (before["path"], before["label"])
        assert float(row["score"]) == pytest.approx(float(before["score"]), abs=1e-5)
        assert float(row["drift"]) == pytest.approx(float(before["drift"]), abs=0.01)


def test_a_batch_that_is_predicted_too_large_is_not_tried(trained, images, tmp_path):
    """A run from a larger machine: plan.json's own figure against what is free."""
    run = shutil.copytree(trained.path(""), tmp_path / "run")
    plan = json.loads((run / "plan.json").read_text())
    assert plan["eval_bytes"] > 0
    (run / "plan.json").write_text(json.dumps({**plan, "eval_bytes": 1 << 50}))
    done = trained("predict", run, images)
    assert done.code == 0, done.err
    assert f"1 images at once, not the run's {plan['eval_batch']}: those take 1024.0 TiB, and" in done.err


def test_images_unlike_those_of_training_are_told(trained, images, tmp_path):
    """Boards as in training are not far, noise is, each by its own figure and in all; a run without statistics predicts all the same."""
    done = trained("predict", trained.path(""), trained.data / "test")
    like = [float(row["drift"]) for row in table(done)]
    assert np.median(like) < 1
    done = trained("predict", trained.path(""), images)
    unlike = [float(row["drift"]) for row in table(done)]
    assert min(unlike) > max(1, *like)
    assert "drift: 7 of 7 images (100%) lie farther from the training images than 99% of images like those of training" in done.err
    assert f"label some, and run hiresvis evaluate {trained.path('')} --data LABELLED" in done.err
    run = shutil.copytree(trained.path(""), tmp_path / "run")
    (run / "statistics.json").unlink()
    done = trained("predict", run, images)
    assert (done.code, "drift:" in done.err) == (0, False)
    assert {row["drift"] for row in table(done)} == {""}
    for damaged in ("{}", "{"):
        (run / "statistics.json").write_text(damaged)
        done = trained("predict", run, images)
        assert done.code == 0
        assert "statistics.json" in done.err
        assert "Until then predictions have no drift" in done.err
        assert {row["drift"] for row in table(done)} == {""}


def test_tiles_are_for_runs_that_were_trained_at_that_scale(trained, tmp_path):
    """Of a run on whole images that were reduced they are refused, and why; of one trained on windows (crop), or on images as large as the
    model's input, an image's scores are the mean of its tiles; so a file of one tile has the scores that it has without."""
    rng = np.random.default_rng(4)
    (tmp_path / "in").mkdir()
    small, large = tmp_path / "in" / "a.png", tmp_path / "in" / "b.png"
    Image.fromarray(rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)).save(small)
    Image.fromarray(rng.integers(0, 256, (96, 230, 3), dtype=np.uint8)).save(large)
    refused = trained("predict", trained.path(""), small, "--tile")
    assert refused.code == 2
    assert "trained on whole images of 256 to 256 x 256 to 256 px, brought to 96 x 96 px (data.fit: resize)" in refused.err
    assert trained("predict", trained.path(""), small, "--overlap", "0.5").code == 2
    run = shutil.copytree(trained.path(""), tmp_path / "run")
    contract = json.loads((run / "contract.json").read_text())
    (run / "contract.json").write_text(json.dumps({**contract, "fit": "crop"}))
    whole = table(trained("predict", run, tmp_path / "in"))
    tiled = {share: table(trained("predict", run, tmp_path / "in", "--tile", "--overlap", share)) for share in ("0", "0.5")}
    for rows in tiled.values():
        assert {**rows[0]} == {**whole[0]}
    assert len({row["score_ok"] for row in (whole[1], tiled["0"][1], tiled["0.5"][1])}) == 3
    (run / "contract.json").write_text(json.dumps({**contract, "fit": "resize", "image_size": [256, 256]}))
    assert trained("predict", run, small, "--tile").code == 0
