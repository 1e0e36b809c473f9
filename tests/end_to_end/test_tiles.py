"""Evidence in one place of a large image: tile sees it, and fit, evaluate and predict agree to the last digit."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

RECIPE = """\
task: classify
data:
  train: {data}/train.csv
  split: split
  fit: tile
  augment: none
  workers: 0
  bad_images: error
model:
  name: test_resnet
  pretrained: false
  image_size: 64
  norm: batch
memory:
  budget: 4GiB
optim:
  lr: 3e-3
  schedule: constant
train:
  epochs: 1
  batch: 6
  eval_batch: 7
"""


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grey noise; the class is the colour of a single patch somewhere. PNGs, tiled pyramids and regions of one slide."""
    folder = tmp_path_factory.mktemp("slides")
    rng = np.random.default_rng(0)

    def draw(height: int, width: int, label: str) -> np.ndarray:
        array = rng.integers(90, 160, (height, width, 1), np.uint8).repeat(3, axis=2)
        top, left = (int(rng.integers(0, side - 24)) for side in (height, width))
        array[top : top + 24, left : left + 24, "rb".index(label)] = 255
        return array

    rows = ["path,label,split,x,y,w,h"]
    for number in range(18):
        label, split = "rb"[number % 2], ("train", "val", "test")[number % 3]
        array = draw(150 + 10 * (number % 4), 130 + 16 * (number % 3), label)
        name = f"{number}.{'tif' if number % 4 == 1 else 'png'}"
        if name.endswith("tif"):
            with tifffile.TiffWriter(folder / name) as writer:
                writer.write(array, photometric="rgb", tile=(64, 64), compression="zlib", subifds=1, metadata=None)
                writer.write(array[::2, ::2].copy(), photometric="rgb", tile=(64, 64), compression="zlib", subfiletype=1, metadata=None)
        else:
            Image.fromarray(array).save(folder / name)
        rows.append(f"{name},{label},{split},0,0,{array.shape[1]},{array.shape[0]}")
    slide = np.concatenate([draw(140, 140, label) for label in "rbrb"], axis=1)
    tifffile.imwrite(folder / "slide.tif", slide, photometric="rgb", tile=(64, 64), compression="jpeg")
    rows += [f"slide.tif,{label},{('train', 'train', 'val', 'test')[k]},{140 * k},0,140,140" for k, label in enumerate("rbrb")]
    (folder / "train.csv").write_text("\n".join(rows) + "\n")
    return folder


REGIONS = "data.region=[x, y, w, h]"


@pytest.fixture(scope="module")
def tiled(slides, make_workshop, tmp_path_factory):
    """A finished run in tiles; no test changes it."""
    work = make_workshop(tmp_path_factory.mktemp("tiled"), slides, RECIPE)
    work.fit(REGIONS, "data.overlap=30%")
    return work


def table(text: str) -> dict[str, dict[str, str]]:
    return {row["path"]: row for row in csv.DictReader(io.StringIO(text))}


def test_tiles_in_fit_evaluate_and_predict_give_the_same_digits(slides, tiled):
    """Joined in the loop, by evaluate, and by predict; samples are named by file and region; contract.json holds fit and overlap."""
    work, contract = tiled, tiled.read("contract.json")
    assert (contract["fit"], contract["overlap"]) == ("tile", 0.3)
    told = work("evaluate", work.path(""), "--json").json
    scored = work.events("evaluated")[-1]
    assert told["test"]["images"] == 7
    assert told["test"]["loss"] == scored["loss"]
    assert {name: told["test"][name] for name in scored["metrics"]} == scored["metrics"]
    written = {path: row for path, row in table(work.path("predictions.csv").read_text()).items() if row["split"] == "test"}
    assert f"{slides / 'slide.tif'}[420,0,140,140]" in written
    whole = [path.partition("[")[0] for path in written if "slide.tif" not in path]
    predicted = table(work("predict", work.path(""), *whole).out)
    for path, row in written.items():
        if "slide.tif" not in path:
            found = predicted[path.partition("[")[0]]
            assert (found["label"], f"{float(found['score']):.6f}") == (row["predicted"], row["score"])


def test_evidence_of_an_image_in_windows_is_of_the_whole_image(tiled):
    """Each picture has the image's own size (a region's its own), whatever the model's."""
    index = tiled.read("worst/index.json")["samples"]
    assert index
    for one in index:
        seen = next(picture for picture in one["pictures"] if picture["what"] == "seen")
        path, region = one["path"].partition("[")[::2]
        with Image.open(path) as image, Image.open(tiled.path(f"worst/{seen['file']}")) as picture:
            width, height = map(int, region.rstrip("]").split(",")[2:]) if region else image.size
            assert picture.size == (width, height)
        assert seen["size"] == [height, width]


def test_windows_are_the_same_with_workers(slides, tiled):
    """Places follow from the seed, and batches from the order: losses and scores of two processes are those of none."""
    tiled.fit(REGIONS, "data.overlap=30%", "data.workers=2", name="two")
    assert [row["loss"] for row in tiled.events("step_done", "two")] == [row["loss"] for row in tiled.events("step_done")]
    assert tiled.path("predictions.csv", "two").read_text() == tiled.path("predictions.csv").read_text()


def test_tiles_find_what_a_reduced_image_and_its_middle_do_not_hold(slides, open_workshop):
    """check says what crop drops and that tile drops nothing; a plan needs no pixels."""
    work = open_workshop(slides, RECIPE)
    tiled, cropped = (work("check", work.recipe, REGIONS, f"data.fit={fit}", "--json").json for fit in ("tile", "crop"))
    assert tiled["splits"]["train"]["share_kept"] == [1, 1, 1]
    assert tiled["splits"]["train"]["windows"] == [9, 9, 12]
    assert max(cropped["splits"]["train"]["share_kept"]) < 0.25
    assert any("lose more than half of their area to data.fit: crop" in problem["message"] for problem in cropped["warnings"])
    assert not any("lose more" in problem["message"] for problem in tiled["warnings"])


def test_a_run_cannot_change_its_windows_on_its_way(tiled):
    """fit and overlap are what the weights and scores so far were made with."""
    done = tiled.fit(REGIONS, "data.overlap=50%", "--resume", ok=False)
    assert done.code == 6
    assert "data.overlap  the run was begun with 30%, and this is 50%" in done.err


def test_predict_gives_a_bad_image_a_row_that_says_so(slides, tiled, tmp_path):
    """A tile that only decoding shows to be damaged: that image has no scores, and the others, in windows too, have theirs."""
    data = bytearray((slides / "1.tif").read_bytes())
    with tifffile.TiffFile(slides / "1.tif") as tiff:
        start = tiff.pages[0].dataoffsets[4]
    data[start + 50 : start + 90] = bytes(40)
    (tmp_path / "b.tif").write_bytes(data)
    done = tiled("predict", tiled.path(""), slides / "0.png", slides / "2.png", tmp_path / "b.tif", slides / "4.png")
    assert done.code == 3
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert [Path(row["path"]).name for row in rows] == ["0.png", "2.png", "b.tif", "4.png"]
    assert [bool(row["error"]) for row in rows] == [False, False, True, False]
    assert [bool(row["label"]) for row in rows] == [True, True, False, True]
