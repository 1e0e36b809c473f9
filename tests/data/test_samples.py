"""The drawn sample set: reproducible, whole or absent, and labelled exactly."""

from __future__ import annotations

import csv
import hashlib
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

from hiresvis.data.boards import KINDS, draw_board, draw_style
from hiresvis.data.samples import COLUMNS, draw_boards
from hiresvis.errors import DataError, EnvironmentFailed

COUNTS = {"num_train": 6, "num_val": 4, "num_test": 2, "size_px": 512}


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small set, drawn once."""
    folder = tmp_path_factory.mktemp("samples") / "boards"
    draw_boards(folder, **COUNTS, seed=3, workers=1)
    return folder


def _digests(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "labels.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_set_depends_on_the_seed_alone(boards: Path, tmp_path: Path) -> None:
    """Three workers draw the same bytes as one, and another seed draws others."""
    draw_boards(tmp_path / "again", **COUNTS, seed=3, workers=3)
    assert _digests(tmp_path / "again") == _digests(boards)
    draw_boards(tmp_path / "other", **COUNTS, seed=4)
    assert not set(_digests(tmp_path / "other").values()) & set(_digests(boards).values())


def test_a_longer_set_begins_with_the_shorter_one(boards: Path, tmp_path: Path) -> None:
    """Each image has its own random stream, so asking for more changes none of the first ones."""
    draw_boards(tmp_path / "more", **COUNTS | {"num_train": 8, "num_test": 0}, seed=3)
    first, more = _digests(boards), _digests(tmp_path / "more")
    images = [name for name in first if name.startswith(("train/", "val/"))]
    assert all(first[name] == more[name] for name in images)


def test_every_image_is_listed_and_sits_in_its_class_folder(boards: Path) -> None:
    """labels.csv names exactly the images there are; half of each split has defects; lots do not straddle splits."""
    rows = _rows(boards)
    assert tuple(rows[0]) == COLUMNS
    assert {row["path"] for row in rows} == {str(path.relative_to(boards)) for path in boards.rglob("*.jpg")}
    for row in rows:
        assert row["path"].startswith(f"{row['split']}/{row['label']}/")
    for split, count in (("train", 6), ("val", 4), ("test", 2)):
        assert sum(row["split"] == split and row["label"] == "defect" for row in rows) == count / 2
    lots = [{row["group"] for row in rows if row["split"] == split} for split in ("train", "val", "test")]
    assert not lots[0] & lots[1] | lots[0] & lots[2] | lots[1] & lots[2]


def test_masks_show_small_defects_of_the_listed_kinds(boards: Path) -> None:
    """Defective boards have a count, kinds and a 1-bit mask of specks; sound ones have none of it."""
    for row in _rows(boards):
        if row["label"] == "ok":
            assert (row["kinds"], row["count"], row["mask"]) == ("", "0", "")
            continue
        assert set(row["kinds"].split("|")) <= set(KINDS)
        mask = cv2.imread(str(boards / row["mask"]), cv2.IMREAD_UNCHANGED)
        assert mask.shape == (512, 512)
        assert set(np.unique(mask)) == {0, 255}
        assert (boards / row["mask"]).read_bytes()[24] == 1  # bit depth in the PNG header
        num, _, stats, _ = cv2.connectedComponentsWithStats(cv2.dilate(mask, np.ones((3, 3), np.uint8)))
        assert int(row["count"]) >= 1
        assert 0.8 * int(row["count"]) <= num - 1  # neighbours may touch
        assert stats[1:, [cv2.CC_STAT_WIDTH, cv2.CC_STAT_HEIGHT]].max() < 45


def test_a_defect_is_the_only_difference() -> None:
    """The same board without defects is the same image but for the specks in the mask, and what the lens smears around them."""
    style = draw_style(np.random.default_rng(0))
    board, sound = (draw_board(512, style, num, np.random.default_rng(1)) for num in (6, 0))
    assert len(board.kinds) == 6
    assert 2 <= len(set(board.kinds)) <= 5
    assert 0 < (board.mask > 0).mean() < 0.01
    assert sound.kinds == ()
    assert not sound.mask.any()
    smeared = cv2.dilate(board.mask, np.ones((5, 5), np.uint8)) > 0
    differs = (board.image != sound.image).any(axis=2)
    assert not differs[~smeared].any()
    assert differs[board.mask > 0].mean() > 0.95


def test_an_interrupted_drawing_leaves_nothing(tmp_path: Path) -> None:
    """A set that was not drawn to its end is never found under its name, and its half is removed."""

    def stop(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        draw_boards(tmp_path / "boards", **COUNTS, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    """Files of the user are never mixed with drawn ones; an empty folder is taken."""
    (tmp_path / "boards").mkdir()
    draw_boards(tmp_path / "boards", num_train=1, num_val=0, num_test=0, size_px=256)
    before = _digests(tmp_path / "boards")
    with pytest.raises(DataError, match="holds something already"):
        draw_boards(tmp_path / "boards", **COUNTS)
    assert _digests(tmp_path / "boards") == before


def test_progress_counts_up_to_all_images(tmp_path: Path) -> None:
    """The callback hears of every image, in the caller's thread."""
    heard: list[tuple[int, int]] = []
    draw_boards(tmp_path / "boards", num_train=2, num_val=1, num_test=0, size_px=256, progress=lambda *pair: heard.append(pair))
    assert heard == [(1, 3), (2, 3), (3, 3)]


def test_what_cannot_be_drawn_is_refused_before_drawing(tmp_path: Path) -> None:
    """Numbers out of range and a disk without room are errors with numbers, and nothing is written."""
    with pytest.raises(DataError, match=r"-1 images for val(.|\n)*255 px is below the smallest board"):
        draw_boards(tmp_path / "boards", num_train=1, num_val=-1, num_test=0, size_px=255)
    too_many = 1 + shutil.disk_usage(tmp_path).free // (2048 * 2048 // 2)
    with pytest.raises(EnvironmentFailed, match="free"):
        draw_boards(tmp_path / "boards", num_train=too_many)
    assert list(tmp_path.iterdir()) == []
