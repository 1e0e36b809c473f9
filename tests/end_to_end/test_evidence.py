"""Evidence for the worst errors at the end of real runs, and beside real predictions."""

from __future__ import annotations

import csv
import io
import shutil

import cv2
import numpy as np
import pytest
from PIL import Image

from hiresvis.ui.run_files import NUM_WORST


def test_a_run_leaves_pictures_of_its_worst_errors(trained):
    """Twelve samples, the wrong ones first, as the report shows them; each picture is one of what the model was given."""
    index = trained.read("worst/index.json")["samples"]
    rows = list(csv.DictReader(io.StringIO(trained.path("predictions.csv").read_text(encoding="utf-8"))))
    assert len(index) == min(NUM_WORST, len(rows))
    by_path = {row["path"]: row for row in rows}
    wrong = [by_path[one["path"]]["label"] != by_path[one["path"]]["predicted"] for one in index]
    assert wrong == sorted(wrong, reverse=True)
    for one, is_wrong in zip(index, wrong, strict=True):
        whats = [picture["what"] for picture in one["pictures"]]
        assert whats[:3] == (["seen", "predicted", "label"] if is_wrong else ["seen", "predicted"])
        for picture in one["pictures"]:
            assert cv2.imread(str(trained.path(f"worst/{picture['file']}"))).shape == (96, 96, 3)
    page = trained.path("report.html").read_text(encoding="utf-8")
    assert page.count('<div class="pictures">') == len(index)
    assert page.count("<img") == sum(len(one["pictures"]) for one in index)
    assert len(page) < 5_000_000


def test_a_run_whose_pictures_fail_ends_well(workshop, monkeypatch):
    """Whatever goes wrong with them is a line, and the report is there without."""

    def out_of_memory(*_: object, **__: object) -> str:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("hiresvis.evidence.write_worst", out_of_memory)
    workshop.fit("train.epochs=1")
    told = [row["text"] for row in workshop.events("notice")]
    assert any("no maps of evidence" in text and "Tried to allocate 2 GiB" in text for text in told)
    page = workshop.path("report.html").read_text(encoding="utf-8")
    assert "Worst errors" in page
    assert '<div class="pictures">' not in page


def test_heat_maps_beside_predictions(trained, tmp_path):
    """A PNG for each image, in a column of the table; predictions are those without; a bad file has its row and no picture."""
    folder = tmp_path / "in"
    shutil.copytree(trained.data / "test", folder)
    images = sorted(path for path in folder.rglob("*") if path.is_file())
    images[0].write_bytes(images[0].read_bytes()[:-400])
    plain = trained("predict", trained.path(""), folder)
    done = trained("predict", trained.path(""), folder, "--heat", tmp_path / "heat")
    assert (plain.code, done.code) == (3, 3)
    rows, without = (list(csv.DictReader(io.StringIO(one.out))) for one in (done, plain))
    assert [{key: value for key, value in row.items() if key != "heat"} for row in rows] == without
    assert [bool(row["heat"]) for row in rows] == [not row["error"] for row in rows]
    drawn = [cv2.imread(row["heat"]) for row in rows if row["heat"]]
    assert len(drawn) == len(images) - 1
    assert all(picture.shape == (96, 96, 3) for picture in drawn)
    again = trained("predict", trained.path(""), folder, "--heat", tmp_path / "heat")
    assert again.code == 6
    assert "--heat" in again.err


@pytest.mark.slow
@pytest.mark.parametrize("model", ["test_vit", "test_vit4", "test_resnet"])
def test_evidence_is_where_the_defect_is(open_workshop, tmp_path, model):
    """Of images whose class is a bright square somewhere, a trained network's evidence is at the square far more often than by chance."""
    from hiresvis.backbone.attribution import log_odds
    from hiresvis.data.sources import load_dataset
    from hiresvis.evidence import Look
    from hiresvis.trained import open_run

    rng, side = np.random.default_rng(0), 14
    places = {}
    for split, count in (("train", 96), ("val", 24), ("test", 24)):
        for label in ("blank", "spot"):
            (tmp_path / "data" / split / label).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 120, (96, 96, 3), dtype=np.uint8)
                top, left = rng.integers(0, 96 - side, 2)
                if label == "spot":
                    pixels[top : top + side, left : left + side] = (230, 200, 40)
                path = tmp_path / "data" / split / label / f"{number}.png"
                Image.fromarray(pixels).save(path)
                places[str(path)] = (top, left)
    work = open_workshop(tmp_path / "data")
    work.fit(f"model.name={model}", "model.image_size=96", "train.epochs=12", "train.batch=8", "optim.lr=2e-3", "data.augment=none")
    (finished,) = work.events("run_finished")
    assert finished["test_metrics"]["accuracy"] > 0.9
    trained = open_run(work.path(""))
    look = Look(trained.backbone.model, trained.contract, "fp32", next(trained.backbone.model.parameters()).device)
    spots = [sample for sample in load_dataset(tmp_path / "data" / "test", classes=trained.contract.classes).samples if sample.label == 1]
    found = 0
    for sample in spots:
        heat = look.at(sample, [log_odds(1)]).maps[0]
        row, column = np.unravel_index(heat.argmax(), heat.shape)
        top, left = places[sample.title]
        found += -16 <= row - top - side / 2 <= 16 and -16 <= column - left - side / 2 <= 16  # within a cell or two
    assert found / len(spots) > 0.5, "by chance one in nine"
