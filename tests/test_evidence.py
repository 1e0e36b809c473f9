"""Pictures of evidence: laid where the evidence is, whatever way the image came to the model, and chosen by what went wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from hiresvis.backbone.attribution import output
from hiresvis.data.contract import Contract, load_window
from hiresvis.data.sources import Sample
from hiresvis.data.transforms import Scale
from hiresvis.errors import DoesNotFit, RecipeError
from hiresvis.evidence import DETAIL_PX, Look, Seen, _asked_of, new_heat_folder, overlay, with_heat, write_worst
from hiresvis.run import RunDirectory
from hiresvis.ui.run_files import Prediction, read_run


class Bright(nn.Module):
    """Each output is how bright the image is: maps of 8 px, and a linear head."""

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.head = nn.Linear(3, outputs, bias=False)
        nn.init.constant_(self.head.weight, 1.0)
        with torch.no_grad():
            self.head.weight[1:] *= -1

    def forward_features(self, pixels: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(pixels, 8)

    def forward_head(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.head(features.mean(dim=(2, 3)))
        return outputs

    def forward(self, pixels: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(pixels))


def contract(**values: Any) -> Contract:
    given: dict[str, Any] = {
        "classes": ("bright", "dark"), "image_size": (64, 64), "fit": "resize", "background": (0, 0, 0), "channels": 3,
        "scale": Scale(), "mean": (0.0,) * 3, "std": (1.0,) * 3, "interpolation": "bilinear", "max_pixels": 10**8,
    }  # fmt: skip
    return Contract(**{**given, **values})


def look(**values: Any) -> Look:
    return Look(Bright(len(values.get("classes", "ab"))).eval(), contract(**values), "fp32", torch.device("cpu"))


def spotted(path: Path, size: tuple[int, int], spot: tuple[int, int], side: int = 12) -> Sample:
    """A black image of (height, width) with a white square around a place (row, column)."""
    pixels = np.zeros((*size, 3), np.uint8)
    pixels[spot[0] - side // 2 : spot[0] + side // 2, spot[1] - side // 2 : spot[1] + side // 2] = 255
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return Sample(file=path, label=0, row=str(path), name=path.name)


@pytest.mark.parametrize("fit", ["resize", "letterbox", "crop", "tile"])
def test_the_map_lies_on_what_was_seen(tmp_path: Path, fit: str) -> None:
    """Whatever fits an image to the model, map and picture have one size, and the spot of both is at one place."""
    sample = spotted(tmp_path / "a.png", (150, 220), (80, 100))
    seen = look(fit=fit).at(sample, [output(0)])
    assert seen.maps[0].shape == seen.pixels.shape[:2] == {
        "resize": (64, 64), "letterbox": (44, 64), "crop": (64, 64), "tile": (150, 220),
    }[fit]  # fmt: skip
    strongest = np.unravel_index(seen.maps[0].argmax(), seen.maps[0].shape)
    rows, columns = np.nonzero(seen.pixels[..., 0] > 128)
    assert abs(strongest[0] - rows.mean()) <= 8
    assert abs(strongest[1] - columns.mean()) <= 8
    assert seen.maps[0].max() == 1


def test_a_long_image_in_windows_is_joined_at_a_smaller_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held does not grow with the image; every part of it is there."""
    monkeypatch.setattr("hiresvis.evidence.MOST_PX", 100)
    sample = spotted(tmp_path / "a.png", (130, 400), (30, 370), side=40)
    seen = look(fit="tile").at(sample, [output(0)])
    assert seen.pixels.shape == (32, 100, 3)
    assert np.isfinite(seen.maps[0]).all()
    row, column = np.unravel_index(seen.maps[0].argmax(), seen.maps[0].shape)
    assert abs(row - 7.5) <= 5
    assert abs(column - 92.5) <= 5
    with pytest.raises(ValueError, match=r"a.png has \d+ windows, and at most 3"):
        look(fit="tile").at(sample, [output(0)], most_windows=3)


def test_windows_leave_no_seams(tmp_path: Path) -> None:
    """Of an image that is the same everywhere the map is too: where windows overlap it is their mean, and no place is left out."""
    Image.new("RGB", (150, 170), "white").save(tmp_path / "a.png")
    seen = look(fit="tile", overlap=0.4).at(Sample(file=tmp_path / "a.png", label=0, row=""), [output(0)])
    np.testing.assert_allclose(seen.maps[0], 1.0, atol=1e-5)
    assert (seen.pixels == 255).all()


def test_values_count_whichever_way_they_are_moved(tmp_path: Path) -> None:
    """To regress, what lowers a value is evidence as well as what raises it."""
    sample, values = spotted(tmp_path / "a.png", (64, 64), (20, 40)), {"target_mean": (0.0, 0.0), "target_std": (1.0, 1.0)}
    for position in (0, 1):
        assert look(task="regress", **values).at(sample, [output(position)]).maps[0].max() == 1
    assert look().at(sample, [output(1)]).maps[0].max() == 0, "to classify, it speaks against this one"


def row(label: str, predicted: str, **values: Any) -> Prediction:
    return Prediction(**{"split": "val", "path": "a.png", "label": label, "predicted": predicted, "score": 0.9, "loss": 1.0, **values})


def test_what_is_asked_follows_from_what_went_wrong() -> None:
    """Both classes of a confusion; of labels the surest false one and the surest missed one; the target that is furthest off in its
    own spread."""
    names = ("a", "b", "c", "d")
    classes = contract(classes=names)
    assert _asked_of(classes, row("b", "c")) == [("predicted", 2), ("label", 1)]
    assert _asked_of(classes, row("b", "b")) == [("predicted", 1)]
    labels = replace(classes, task="multilabel")
    assert _asked_of(labels, row("a|b", "a|c|d", values=(0.9, 0.2, 0.6, 0.8))) == [("predicted", 3), ("missed", 1)]
    assert _asked_of(labels, row("none", "none", values=(0.1, 0.2, 0.3, 0.4))) == []
    targets = contract(classes=("m", "kg"), task="regress", target_mean=(0.0, 0.0), target_std=(1.0, 100.0))
    assert _asked_of(targets, row("", "", values=(1.0, 50.0), true=(2.0, 100.0))) == [("value", 0)]


def make_run(folder: Path, rows: list[tuple[str, str, str, float]]) -> RunDirectory:
    run = RunDirectory.create(folder, "task: classify\n")
    lines = [f"val,{path},{label},{predicted},0.9,{loss}" for path, label, predicted, loss in rows]
    run.write_text("predictions.csv", "\n".join(["split,path,label,predicted,score,loss", *lines]) + "\n")
    run.write_json("contract.json", contract().to_json())
    return run


def test_worst_errors_are_pictured_first_to_last_and_again(tmp_path: Path) -> None:
    """Wrong ones come first; an image that is gone is told and the others are there; an earlier run's pictures do not stay; the report
    reads them back."""
    samples = [spotted(tmp_path / "images" / f"{n}.png", (400, 500), (100 + 10 * n, 300)) for n in range(3)]
    names = [sample.title for sample in samples]
    run = make_run(
        tmp_path / "run", [(names[0], "dark", "dark", 9.0), (names[1], "dark", "bright", 1.0), (names[2], "bright", "dark", 2.0)]
    )
    (tmp_path / "run" / "worst").mkdir()
    (tmp_path / "run" / "worst" / "old.jpg").write_bytes(b"old")
    samples[0].path.unlink()
    left_out = write_worst(run, look(image_size=(320, 320)), {"val": samples})
    assert "0.png" in left_out
    assert not (run.root / "worst" / "old.jpg").exists()
    pictures = read_run(run.root).pictures
    assert [path for _, path in pictures] == [names[2], names[1]]
    assert [(one.what, one.name, one.empty) for one in pictures["val", names[2]]] == [
        ("seen", "", False), ("predicted", "dark", True), ("label", "bright", False), ("detail", "bright", False),
    ]  # fmt: skip
    detail = cv2.imread(str(run.root / "worst" / "01_detail.jpg"))
    assert detail.shape == (DETAIL_PX, DETAIL_PX, 3)
    assert detail[80:100, 80:100].max() > 200, "the spot is in the middle of the detail"


def test_a_stop_or_lost_time_leaves_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked to stop after one image, one is pictured, and the line says how many are not."""
    samples = [spotted(tmp_path / f"{n}.png", (64, 64), (20, 20)) for n in range(3)]
    run = make_run(tmp_path / "run", [(sample.title, "dark", "bright", 1.0) for sample in samples])
    answers = iter([False, True])
    assert write_worst(run, look(), {"val": samples}, stop=lambda: next(answers)) == "2 of 3 images, for want of time"
    assert len(read_run(run.root).pictures) == 1
    monkeypatch.setattr("hiresvis.evidence.SECONDS", -1.0)
    assert write_worst(run, look(), {"val": samples}) == "3 of 3 images, for want of time"


def failing(first: BaseException) -> Callable[..., Seen | None]:
    """`Look.at`, which fails for the image a.png or 0.png."""
    real = Look.at

    def at(self: Look, sample: Sample, *rest: Any, **more: Any) -> Seen | None:
        if sample.name in ("a.png", "0.png"):
            raise first
        return real(self, sample, *rest, **more)

    return at


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("no kernel"), ValueError("odd")]
)
def test_one_image_that_fails_costs_no_other_its_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Memory that runs out for the first, or an operator that does not take it: the others are there, and the line says which is not."""
    samples = [spotted(tmp_path / f"{n}.png", (64, 64), (20, 20)) for n in range(3)]
    run = make_run(tmp_path / "run", [(sample.title, "dark", "bright", 3.0 - n) for n, sample in enumerate(samples)])
    monkeypatch.setattr(Look, "at", failing(error))
    left_out = write_worst(run, look(), {"val": samples})
    assert ("memory ran out" in left_out) == (not isinstance(error, ValueError) and "kernel" not in str(error))
    assert left_out
    assert [path for _, path in read_run(run.root).pictures] == [sample.title for sample in samples[1:]]


def test_a_stop_is_heeded_between_windows_and_what_is_done_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image of many windows does not hold up the end of a run; an interrupt in the middle loses no picture."""
    samples = [spotted(tmp_path / f"{n}.png", (64, 64) if n == 0 else (400, 400), (20, 20)) for n in range(2)]
    run = make_run(tmp_path / "run", [(sample.title, "dark", "bright", 3.0 - n) for n, sample in enumerate(samples)])
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 4

    assert write_worst(run, look(fit="tile"), {"val": samples}, stop=stop) == "1 of 2 images, for want of time"
    assert len(asked) == 5
    assert [path for _, path in read_run(run.root).pictures] == [samples[0].title]
    monkeypatch.setattr("hiresvis.evidence.load_window", interrupted_at(2))
    with pytest.raises(KeyboardInterrupt):
        write_worst(run, look(fit="tile"), {"val": samples})
    assert [path for _, path in read_run(run.root).pictures] == [samples[0].title]


def interrupted_at(count: int) -> Callable[..., np.ndarray]:
    """`load_window`, which Ctrl-C falls into."""
    left = iter(range(count))

    def load(*arguments: Any) -> np.ndarray:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return load_window(*arguments)

    return load


def test_heat_that_has_no_room_is_refused_as_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 4 with the system's words; what is no lack of memory stays a fault."""
    sample = spotted(tmp_path / "a.png", (64, 64), (20, 20))
    for error, expected in ((torch.OutOfMemoryError("CUDA out of memory"), DoesNotFit), (RuntimeError("no kernel"), RuntimeError)):
        monkeypatch.setattr(Look, "at", failing(error))
        rows = iter([{"scores": {"bright": 0.9, "dark": 0.1}, "error": None}])
        with pytest.raises(expected, match=str(error)):
            list(with_heat(rows, [sample], look(), tmp_path / "heat"))
        monkeypatch.undo()
    assert DoesNotFit.exit_code == 4


def test_an_index_that_names_a_file_elsewhere_gets_none(tmp_path: Path) -> None:
    """A run folder from a stranger cannot have a file from outside of `worst` shown."""
    run = make_run(tmp_path / "run", [])
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    entry = {"split": "val", "path": "a", "pictures": [{"file": "../../secret.jpg", "what": "seen"}]}
    run.write_json("worst/index.json", {"version": 1, "samples": [entry]})
    found = read_run(run.root)
    assert found.pictures == {}
    assert any("worst/index.json" in gap for gap in found.gaps)


def test_heat_beside_predictions(tmp_path: Path) -> None:
    """One PNG for each image that was predicted, of the predicted class, named as masks are; an image that cannot be read has none."""
    samples = [spotted(tmp_path / "in" / one, (80, 90), (30, 40)) for one in ("a.png", "a.bmp")]
    rows = iter(
        [{"path": "a.png", "scores": {"bright": 0.9, "dark": 0.1}, "error": None}, {"path": "a.bmp", "scores": None, "error": "torn"}]
    )
    found = list(with_heat(rows, samples, look(), tmp_path / "heat"))
    assert [one["heat"] for one in found] == [str(tmp_path / "heat" / "a.png"), None]
    drawn = np.asarray(Image.open(tmp_path / "heat" / "a.png"))
    assert drawn.shape == (64, 64, 3)
    row, column = np.unravel_index(drawn.max(axis=2).argmax(), (64, 64))
    assert abs(row - 24) <= 8
    assert abs(column - 28) <= 8


def test_heat_never_writes_over_the_images(tmp_path: Path) -> None:
    """Of rows that a table names by absolute paths and by `..`, pictures lie below the folder, and the images are as they were."""
    samples = [
        replace(spotted(tmp_path / "in" / name, (64, 64), (20, 20)), name=written)
        for name, written in (("a.png", f"{tmp_path}/in/a.png"), ("b.png", "../in/b.png"))
    ]
    before = [sample.path.read_bytes() for sample in samples]
    rows = iter([{"scores": {"bright": 0.9, "dark": 0.1}, "error": None}] * 2)
    found = [Path(row["heat"]) for row in with_heat(rows, samples, look(), tmp_path / "heat")]
    assert found == [tmp_path / "heat" / f"{tmp_path}/in/a.png".lstrip("/"), tmp_path / "heat" / "in" / "b.png"]
    assert [sample.path.read_bytes() for sample in samples] == before


def test_heat_that_a_task_has_not_is_refused(tmp_path: Path) -> None:
    """Masks and several targets are told, with what to do."""
    with pytest.raises(RecipeError, match="--masks"):
        new_heat_folder(tmp_path / "heat", contract(task="segment"))
    with pytest.raises(RecipeError, match="2 targets"):
        new_heat_folder(tmp_path / "heat", contract(task="regress", target_mean=(0.0, 0.0), target_std=(1.0, 1.0)))


def test_an_overlay_is_grey_where_nothing_speaks() -> None:
    """Colour means evidence: without any the picture has none, with some it has there alone."""
    pixels = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    heat = np.zeros((40, 40), np.float32)
    heat[10:20, 10:20] = 1
    drawn = overlay(pixels, heat).astype(int)
    spread = drawn.max(axis=2) - drawn.min(axis=2)
    assert (spread[heat == 0] == 0).all()
    assert (spread[heat == 1] > 60).all()
