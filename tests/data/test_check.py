"""The check decodes everything once and says every finding."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pillow_heif
import pytest
import tifffile
from PIL import Image

from hiresvis.data import check as check_module
from hiresvis.data import decode, heif, photos
from hiresvis.data import threads as threads_module
from hiresvis.data.check import DataReport, check_steps, finished, partly_decoded
from hiresvis.data.findings import CACHE_NAME
from hiresvis.data.folders import IMAGE_EXTENSIONS
from hiresvis.data.sources import Datasets, load_datasets
from hiresvis.data.transforms import Preprocess
from hiresvis.errors import Problem

LIMIT = 10**7


def check_datasets(datasets: Datasets, *, progress: Callable[[int, int], None] | None = None, **options: Any) -> DataReport:
    return finished(check_steps(datasets, **options), progress)


def scene(seed: int, size: tuple[int, int]) -> np.ndarray:
    """Smooth shapes of random colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(colours).resize(size[::-1], Image.Resampling.BICUBIC)).copy()


def messages(problems: Iterable[Problem]) -> str:
    return "\n".join(map(str, problems))


@pytest.fixture
def folders(make_folders: Callable[..., Path]) -> tuple[Path, Path]:
    return make_folders("train", {"a": 3, "b": 3}), make_folders("val", {"a": 2, "b": 1})


def cut(path: Path) -> bytes:
    """Halves a file; its header stays readable."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path.read_bytes()


def test_sound_data_gives_counts_and_no_error(folders: tuple[Path, Path]) -> None:
    """Images, classes, modes, bits and sizes, as JSON too."""
    report = check_datasets(load_datasets(*folders), max_pixels=LIMIT, preprocess=Preprocess((24, 32)))
    assert not report.errors
    assert not report.warnings
    train = report.splits["train"]
    assert (train["images"], train["unreadable"], train["classes"]) == (6, 0, {"a": 3, "b": 3})
    assert (train["modes"], train["bits"], train["channels"], train["formats"]) == ({"RGB": 6}, {"8": 6}, {"3": 6}, {"PNG": 6})
    assert (train["height"], train["width"], train["share_kept"], train["shrink"]) == ([24, 24, 24], [32, 32, 32], [1, 1, 1], [1, 1, 1])
    assert json.loads(json.dumps(report.to_json()))["splits"]["val"]["images"] == 3


def test_every_extension_is_listed_and_decoded_whatever_its_case(tmp_path: Path, save_image: Callable[..., Path]) -> None:
    """Files of each extension in small and capital letters, as encoders write them: none is passed over, and all are sound."""
    pillow_heif.register_heif_opener()
    for number, suffix in enumerate(sorted(IMAGE_EXTENSIONS)):
        for form in (suffix, suffix.upper()):
            kind = {".heic": "HEIF", ".heif": "HEIF", ".svs": "TIFF"}.get(suffix) or Image.registered_extensions()[suffix]
            save_image(tmp_path / "train" / "ab"[number % 2] / f"image{form}", seed=number, format=kind)
    save_image(tmp_path / "train" / "a" / "film.gif")
    report = check_datasets(load_datasets(tmp_path / "train", 0.3), max_pixels=LIMIT)
    assert not report.errors
    assert sum(counts["images"] for counts in report.splits.values()) == 2 * len(IMAGE_EXTENSIONS)
    assert report.splits["train"]["skipped_extensions"] == {".gif": 1}


def test_cut_file_is_found_by_the_full_check_alone(folders: tuple[Path, Path]) -> None:
    """Headers pass; the full decode names the file, which is left as it was."""
    path = folders[0] / "a" / "001.png"
    content = cut(path)
    datasets = load_datasets(*folders)
    assert not check_datasets(datasets, max_pixels=LIMIT, fast=True).errors
    (problem,) = check_datasets(datasets, max_pixels=LIMIT).errors
    assert problem.place == str(path)
    assert "damaged PNG" in problem.message
    assert path.read_bytes() == content


def test_every_bad_file_is_reported_with_its_row(tmp_path: Path, save_image: Callable[..., Path]) -> None:
    """Empty, text, a folder, a broken link, too large: one check, five rows."""
    save_image(tmp_path / "good.png")
    save_image(tmp_path / "large.png", size=(400, 500))
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.jpg").write_text("not found")
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "link.jpg").symlink_to("gone.jpg")
    names = ["good.png", "large.png", "empty.png", "text.jpg", "folder.jpg", "link.jpg"]
    for split in ("train", "val"):
        (tmp_path / f"{split}.csv").write_text(
            "path,label\n" + "".join(f"{name},{'xy'[name == 'large.png']}\n" for name in (names if split == "train" else names[:1]))
        )
    report = check_datasets(load_datasets(tmp_path / "train.csv", tmp_path / "val.csv"), max_pixels=100_000)
    assert [problem.place for problem in report.errors] == [f"train.csv:{line}" for line in range(3, 8)]
    for problem, word in zip(report.errors, ("max_pixels", "is empty", "holds text", "is a folder", "broken link"), strict=True):
        assert word in problem.message


def test_skip_turns_bad_files_of_train_into_warnings_but_not_of_val(folders: tuple[Path, Path]) -> None:
    """`bad_images: skip` is for train alone."""
    cut(folders[0] / "a" / "001.png")
    cut(folders[1] / "a" / "001.png")
    report = check_datasets(load_datasets(*folders), max_pixels=LIMIT, bad_images="skip")
    assert [problem.place for problem in report.errors] == [str(folders[1] / "a" / "001.png")]
    assert any(problem.place == str(folders[0] / "a" / "001.png") for problem in report.warnings)


@pytest.mark.parametrize("fast", [False, True])
def test_same_bytes_in_two_splits_are_a_warning_with_the_pair(folders: tuple[Path, Path], fast: bool) -> None:
    """By content, whatever the name; a file of the same size and other bytes is no copy."""
    shutil.copy(folders[0] / "b" / "000.png", folders[1] / "b" / "other name.png")
    twin = bytearray((folders[0] / "b" / "001.png").read_bytes())
    (folders[1] / "b" / "twin.bmp").write_bytes(twin[:-1] + bytes([twin[-1] ^ 1]))
    report = check_datasets(load_datasets(*folders), max_pixels=LIMIT, fast=fast)
    (copies,) = report.same_bytes
    assert copies.across
    assert [(split, sample.path.name) for split, sample in copies.members] == [("train", "000.png"), ("val", "other name.png")]
    pair = f"{folders[0] / 'b' / '000.png'} and {folders[1] / 'b' / 'other name.png'}"
    assert f"2 files in 1 group with the same bytes in two splits, so that what is trained on is tested on: {pair}" in messages(
        report.warnings
    )
    assert report.to_json()["same_bytes"][0][1]["split"] == "val"
    alike = [{sample.path.name for _, sample in copies.members} for copies in report.look_alikes]
    assert alike == ([] if fast else [{"001.png", "twin.bmp"}])  # not the pair of the same bytes again


def test_copies_within_a_split_are_a_warning_of_their_own(folders: tuple[Path, Path]) -> None:
    """Twelve copies are one group, in which no pair is listed twice, and what looks alike is not said of the same bytes again."""
    for number in range(11):
        shutil.copy(folders[0] / "b" / "000.png", folders[0] / "b" / f"copy{number}.png")
    report = check_datasets(load_datasets(*folders), max_pixels=LIMIT)
    assert [len(copies.members) for copies in report.same_bytes] == [12]
    assert "12 files in 1 group with the same bytes in one split" in messages(report.warnings)
    assert "(and 10 more)" in messages(report.warnings)
    assert report.look_alikes == ()


def test_same_bytes_under_two_labels_are_a_warning(folders: tuple[Path, Path]) -> None:
    """One of the labels is wrong, in one split as across two."""
    shutil.copy(folders[0] / "b" / "000.png", folders[0] / "a" / "copy.png")
    shutil.copy(folders[0] / "b" / "001.png", folders[1] / "a" / "copy.png")
    report = check_datasets(load_datasets(*folders), max_pixels=LIMIT)
    assert messages(report.warnings).count("another label (a and b)") == 1
    assert messages(report.warnings).count("another label (b and a)") == 1


def test_images_saved_anew_are_noted_and_never_errors(folders: tuple[Path, Path], save_image: Callable[..., Path]) -> None:
    """At another quality in the same split, smaller in the other: two notes with the files, by looks; nothing to warn of."""
    for number in range(3):
        save_image(folders[0] / "a" / f"photo{number}.png", seed=50 + number, size=(240, 320))
    photo = Image.open(folders[0] / "a" / "photo1.png")
    photo.save(folders[0] / "b" / "again.jpg", quality=60)
    Image.open(folders[0] / "a" / "photo2.png").resize((256, 192)).save(folders[1] / "a" / "small.jpg", quality=80)
    report = check_datasets(load_datasets(*folders), max_pixels=LIMIT)
    found = {frozenset(sample.path.name for _, sample in copies.members): copies.across for copies in report.look_alikes}
    assert found == {frozenset(["photo1.png", "again.jpg"]): False, frozenset(["photo2.png", "small.jpg"]): True}
    assert "2 files in 1 group that look alike in two splits" in messages(report.notes)
    assert "2 files in 1 group that look alike in one split" in messages(report.notes)
    assert not report.warnings
    assert not report.errors


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_blank_images_are_a_warning_and_are_not_alike(folders: tuple[Path, Path], dtype: Any) -> None:
    """One colour, and one colour with a speck and a little noise; a page with writing is none."""
    rng, white = np.random.default_rng(0), int(np.iinfo(dtype).max)
    page = np.full((200, 160, 3), white, dtype)
    plain, dusty, written = page.copy(), page.copy(), page.copy()
    dusty[50:53, 60:63] = 0
    dusty -= rng.integers(0, max(1, white // 100), dusty.shape).astype(dtype)
    written[40:160:8, 20:140] = 0
    for name, array in (("plain", plain), ("dusty", dusty), ("written", written), ("plain2", page // 2)):
        tifffile.imwrite(folders[0] / "a" / f"{name}.tif", array, photometric="rgb")
    report = check_datasets(load_datasets(*folders), max_pixels=LIMIT, preprocess=Preprocess((24, 32), "letterbox"))
    assert [Path(place["path"]).stem for place in report.splits["train"]["blank"]] == ["dusty", "plain", "plain2"]
    assert "3 images are of one colour or nearly blank: " in messages(report.warnings)
    assert report.look_alikes == ()


def test_extremes_name_their_files(folders: tuple[Path, Path], save_image: Callable[..., Path]) -> None:
    """Smallest, largest, most stretched and most shrunk, each with its path, row and numbers."""
    small = save_image(folders[0] / "a" / "small.png", size=(10, 14), seed=7)
    wide = save_image(folders[0] / "b" / "wide.png", size=(40, 480), seed=8)
    large = save_image(folders[0] / "b" / "large.png", size=(300, 400), seed=9)
    found = check_datasets(load_datasets(*folders), max_pixels=LIMIT, preprocess=Preprocess((24, 32))).splits["train"]["extremes"]
    assert found["smallest"] == {"path": str(small), "row": str(small), "height": 10, "width": 14, "value": 140}
    assert found["largest"]["path"] == str(large)
    assert (found["most_stretched"]["path"], found["most_stretched"]["value"]) == (str(wide), 9)
    assert (found["most_shrunk"]["path"], found["most_shrunk"]["value"]) == (str(wide), 15)


def test_classes_and_groups_are_weighed(tmp_path: Path, save_image: Callable[..., Path]) -> None:
    """Small classes, classes that val lacks, sizes far apart; groups with the largest. Notes, since the user may know."""
    rows = [("a", f"p{number // 4}") for number in range(24)] + [("b", "q"), ("c", "r")]
    lines = []
    for number, (label, group) in enumerate(rows):
        save_image(tmp_path / f"{number}.png", seed=number)
        lines.append(f"{number}.png,{label},{group},train\n")
    for number, label in enumerate("ab"):
        save_image(tmp_path / f"v{number}.png", seed=100 + number)
        lines.append(f"v{number}.png,{label},v{number},val\n")
    (tmp_path / "all.csv").write_text("path,label,patient,part\n" + "".join(lines))
    datasets = load_datasets(tmp_path / "all.csv", 0.5, group_column="patient", split_column="part")
    report = check_datasets(datasets, max_pixels=LIMIT)
    train = report.splits["train"]
    assert train["balance"] == {"largest": "a", "smallest": "b", "ratio": 24.0}
    assert train["groups"] == {"number": 8, "largest": "p0", "images_of_largest": 4}
    said = messages(report.notes)
    for text in ("fewer than 5 images in train: b (1), c (1)", "without an image in val: c", "a has 24 times the images of b"):
        assert text in said
    assert not report.warnings or all("split column" in str(problem) for problem in report.warnings)


def test_rotations_modes_and_passed_over_files_are_counted(folders: tuple[Path, Path], save_image: Callable[..., Path]) -> None:
    """What the user should know of and what nothing is wrong with."""
    exif = Image.Exif()
    exif[274] = 6
    save_image(folders[0] / "a" / "turned.JPG", exif=exif)
    tifffile.imwrite(folders[0] / "a" / "deep.tif", np.zeros((24, 32), np.uint16))
    (folders[0] / "a" / "notes.txt").touch()
    (folders[0] / "Thumbs.db").touch()
    train = check_datasets(load_datasets(*folders), max_pixels=LIMIT).splits["train"]
    assert train["exif_rotated"] == 1
    assert train["bits"] == {"8": 7, "16": 1}
    assert train["channels"] == {"1": 1, "3": 7}
    assert train["skipped_extensions"] == {".txt": 1}
    assert train["ignored"] == ["Thumbs.db"]
    assert train["height"] == [24, 24, 32]


def test_what_the_model_cannot_take_is_an_error(folders: tuple[Path, Path]) -> None:
    """Five channels (seen in the header), and floats beyond 1 under the type's range."""
    tifffile.imwrite(folders[0] / "a" / "five.tif", np.zeros((24, 32, 5), np.uint8), photometric="minisblack", planarconfig="contig")
    tifffile.imwrite(folders[0] / "a" / "heights.tif", np.full((24, 32), 900, np.float32))
    datasets = load_datasets(*folders)
    assert not check_datasets(datasets, max_pixels=LIMIT).errors
    report = check_datasets(datasets, max_pixels=LIMIT, preprocess=Preprocess((24, 32)))
    assert ["5 channels" in problem.message or "float values" in problem.message for problem in report.errors] == [True, True]


def test_stretching_is_told_with_the_ways_out(folders: tuple[Path, Path]) -> None:
    """24 x 32 to a square changes the shape by a third; letterbox does not."""
    datasets = load_datasets(*folders)
    report = check_datasets(datasets, max_pixels=LIMIT, preprocess=Preprocess((16, 16)))
    assert any("6 of 6 images change their shape" in problem.message for problem in report.warnings)
    assert report.splits["train"]["shrink"] == [2, 2, 2]
    assert not check_datasets(datasets, max_pixels=LIMIT, preprocess=Preprocess((16, 16), "letterbox")).warnings


def test_crop_that_drops_most_of_the_images_is_told_with_the_ways_out(folders: tuple[Path, Path]) -> None:
    """24 x 32 at 8 x 8 keeps a twelfth; a larger window, and tile, warn of nothing; the share kept is stated."""
    datasets = load_datasets(*folders)
    report = check_datasets(datasets, max_pixels=LIMIT, preprocess=Preprocess((8, 8), "crop"))
    assert any("6 of 6 images lose more than half" in problem.message and "keeps 8%" in problem.message for problem in report.warnings)
    assert report.splits["train"]["share_kept"] == pytest.approx([1 / 12] * 3)
    assert report.splits["train"]["shrink"] == [1, 1, 1]
    assert not check_datasets(datasets, max_pixels=LIMIT, preprocess=Preprocess((20, 32), "crop")).warnings
    tiled = check_datasets(datasets, max_pixels=LIMIT, preprocess=Preprocess((8, 8), "tile", overlap=0.5))
    assert not tiled.warnings
    assert (tiled.splits["train"]["share_kept"], tiled.splits["train"]["windows"]) == ([1, 1, 1], [35, 35, 35])


class TestRegions:
    def table(self, folder: Path, rows: list[str], name: str = "t.csv") -> Path:
        (folder / name).write_text("path,label,x,y,w,h\n" + "".join(f"{row}\n" for row in rows))
        return folder / name

    def test_each_region_is_held_to_the_image_and_told_by_its_row(self, tmp_path: Path, save_image: Callable[..., Path]) -> None:
        """One outside of the picture, of a plain file and of a tiled one; sizes are the regions'."""
        save_image(tmp_path / "p.png")
        tifffile.imwrite(tmp_path / "t.tif", np.zeros((64, 64, 3), np.uint8), photometric="rgb", tile=(16, 16))
        rows = ["p.png,a,0,0,32,24", "p.png,b,20,0,13,24", "t.tif,a,0,0,10,12", "t.tif,b,0,60,10,5", "p.png,a,8,8,4,6"]
        train = self.table(tmp_path, rows)
        val = self.table(tmp_path, ["t.tif,a,32,32,9,9", "t.tif,b,5,5,4,4"], "v.csv")
        datasets = load_datasets(train, val, region_columns=("x", "y", "w", "h"))
        report = check_datasets(datasets, max_pixels=LIMIT)
        assert [problem.place for problem in report.errors] == ["t.csv:3", "t.csv:5"]
        assert "has 32 x 24 px, and the region x 20, y 0, 13 x 24 px is not inside of that" in report.errors[0].message
        assert report.splits["val"]["height"] == [4, 6.5, 9]
        assert any("1 files have regions in more than one split; the first: " in problem.message for problem in report.warnings)

    def test_a_file_is_decoded_once_and_remembered_for_all_its_regions(
        self, tmp_path: Path, save_image: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Forty regions of a PNG cost one decode, and none the second time; another region is looked at."""
        save_image(tmp_path / "p.png", size=(64, 64))
        calls: list[str] = []
        whole = photos.decode_pixels
        monkeypatch.setattr(photos, "decode_pixels", lambda *given, **named: (calls.append(given[1].name), whole(*given, **named))[1])
        rows = [f"p.png,{'ab'[number % 2]},{number},0,20,20" for number in range(40)]

        def check(some: list[str]) -> int:
            datasets = load_datasets(self.table(tmp_path, some), 0.2, region_columns=("x", "y", "w", "h"))
            assert not check_datasets(datasets, max_pixels=LIMIT, cache_folder=tmp_path / "cache", threads=1).errors
            return len(calls)

        assert [check(rows), check(rows), check([*rows, "p.png,a,44,44,20,20"])] == [1, 1, 2]

    def test_regions_are_compared_as_the_images_that_they_are(self, tmp_path: Path) -> None:
        """With one of another file, saved anew there, in whatever way the file is read; not with those of the same file. Blank ones are
        told."""
        array = scene(5, (600, 800))
        array[440:, 640:] = 255
        Image.fromarray(array).save(tmp_path / "p.png")
        tifffile.imwrite(tmp_path / "t.tif", array, photometric="rgb", tile=(64, 64))
        Image.fromarray(array[100:300, 200:500]).save(tmp_path / "part.jpg", quality=70)
        train = self.table(
            tmp_path, ["p.png,a,200,100,300,200", "p.png,b,203,100,300,200", "p.png,b,640,440,160,160", "p.png,a,0,300,300,200"]
        )
        val = self.table(tmp_path, ["part.jpg,a,0,0,300,200", "t.tif,b,0,300,300,200"], "v.csv")
        datasets = load_datasets(train, val, region_columns=("x", "y", "w", "h"))
        for preprocess in (None, Preprocess((96, 96)), Preprocess((96, 96), "crop")):
            report = check_datasets(datasets, max_pixels=LIMIT, preprocess=preprocess)
            assert not report.errors
            found = [[sample.row for _, sample in copies.members] for copies in report.look_alikes]
            assert sorted(map(sorted, found)) == [["t.csv:2", "t.csv:3", "v.csv:2"], ["t.csv:5", "v.csv:3"]]
            assert [place["row"] for place in report.splits["train"]["blank"]] == ["t.csv:4"]

    def test_damage_in_a_tile_is_an_error_of_the_regions_that_touch_it(self, tmp_path: Path) -> None:
        """The other regions of the file are sound, and stay so."""
        rng = np.random.default_rng(0)
        path = tmp_path / "t.tif"
        tifffile.imwrite(path, rng.integers(0, 255, (64, 64, 3), np.uint8), photometric="rgb", tile=(32, 32), compression="zlib")
        with tifffile.TiffFile(path) as tiff:
            start = tiff.pages[0].dataoffsets[3]
        data = bytearray(path.read_bytes())
        data[start + 100 : start + 140] = bytes(40)
        path.write_bytes(data)
        train = self.table(tmp_path, ["t.tif,a,0,0,32,32", "t.tif,b,30,30,9,9", "t.tif,b,32,0,32,32"])
        val = self.table(tmp_path, ["t.tif,a,40,40,20,20"], "v.csv")
        datasets = load_datasets(train, val, region_columns=("x", "y", "w", "h"))
        report = check_datasets(datasets, max_pixels=LIMIT)
        assert [problem.place for problem in report.errors] == ["t.csv:3", "v.csv:2"]


def test_a_tiled_image_of_which_windows_are_read_is_compared_as_well(tmp_path: Path, save_image: Callable[..., Path]) -> None:
    """With a smaller copy in another format, though no part of it is ever the whole."""
    for split, label in (("train", "a"), ("train", "b"), ("val", "a"), ("val", "b")):
        save_image(tmp_path / split / label / "other.png", seed=len(label + split) + ord(label), size=(60, 80))
    array = scene(3, (2100, 2800))
    tifffile.imwrite(tmp_path / "train" / "a" / "slide.tif", array, photometric="rgb", tile=(256, 256), compression="zlib")
    Image.fromarray(array).resize((800, 600)).save(tmp_path / "val" / "b" / "small.jpg")
    datasets = load_datasets(tmp_path / "train", tmp_path / "val")
    for fit in ("crop", "tile"):
        report = check_datasets(datasets, max_pixels=LIMIT, preprocess=Preprocess((64, 64), fit))
        (alike,) = report.look_alikes
        assert {sample.path.name for _, sample in alike.members} == {"slide.tif", "small.jpg"}


class TestCache:
    def test_a_folder_that_cannot_be_used_is_told_once(self, folders: tuple[Path, Path], tmp_path: Path) -> None:
        """With the reason, as a note, for it is no fault of the data; everything is checked all the same. A usable one is silent."""
        datasets = load_datasets(*folders)
        (tmp_path / "file").touch()
        (tmp_path / "other").mkdir()
        with closing(sqlite3.connect(tmp_path / "other" / CACHE_NAME)) as database, database:
            database.execute("CREATE TABLE findings (something TEXT)")
        sound = check_datasets(datasets, max_pixels=LIMIT, cache_folder=tmp_path / "sound")
        for folder, why in (("file", "file exists"), ("file/below", "not a directory"), ("other", "has 1 columns")):
            report = check_datasets(datasets, max_pixels=LIMIT, cache_folder=tmp_path / folder)
            (told,) = (note for note in report.notes if note not in sound.notes)
            assert told.place == str(tmp_path / folder / CACHE_NAME)
            assert why in told.message
            assert "HIRESVIS_CACHE" in told.message
            assert (report.errors, report.warnings, report.num_decoded) == (sound.errors, sound.warnings, sound.num_decoded)

    def check(self, datasets: Datasets, folder: Path, max_pixels: int = LIMIT, fast: bool = False) -> int:
        return len(check_datasets(datasets, max_pixels=max_pixels, cache_folder=folder, fast=fast).errors)

    def test_unchanged_files_are_not_opened_again(
        self, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Sound ones and damaged ones; one that changed is, even with its size and time of modification kept."""
        datasets, path = load_datasets(*folders), folders[0] / "a" / "001.png"
        cut(folders[0] / "b" / "001.png")
        assert self.check(datasets, tmp_path / "cache") == 1
        opened: list[str] = []
        monkeypatch.setattr(
            check_module, "open_image", lambda path, **named: (opened.append(path.name), decode.open_image(path, **named))[1]
        )
        assert self.check(datasets, tmp_path / "cache") == 1
        assert not opened
        before = path.stat()
        path.write_bytes(bytes(before.st_size))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert self.check(datasets, tmp_path / "cache") == 2
        assert opened == ["001.png"]

    def test_what_the_machine_lacked_is_asked_again(
        self, folders: tuple[Path, Path], tmp_path: Path, save_image: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """HEIC before its package is there, a disk that answers for a moment with an error: neither says anything of the file."""
        path = folders[0] / "a" / "001.png"
        with Image.open(path) as image:
            pillow_heif.from_pillow(image).save(folders[0] / "a" / "new.heic")
        datasets = load_datasets(*folders)
        open_ = Path.open

        def fail(file: Path, *given: Any, **named: Any) -> Any:
            if file == path:
                raise OSError(errno.EIO, "Input/output error")
            return open_(file, *given, **named)

        with monkeypatch.context() as patch:
            patch.setattr(heif, "pillow_heif", None)
            patch.setattr(Path, "open", fail)
            assert self.check(datasets, tmp_path / "cache") == 2
        assert self.check(datasets, tmp_path / "cache") == 0

    def test_other_decoders_are_asked_again(self, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A release that reads more, or less, judges anew what the one before judged; so do sources of this package."""
        datasets = load_datasets(*folders)
        cut(folders[0] / "a" / "001.png")
        assert self.check(datasets, tmp_path / "cache") == 1
        for changed in ({"imagecodecs": "99"}, {"sources": "other"}):
            opened: list[Path] = []
            monkeypatch.setattr(threads_module, "surroundings", lambda changed=changed: changed)
            monkeypatch.setattr(
                check_module, "open_image", lambda path, opened=opened, **named: (opened.append(path), decode.open_image(path, **named))[1]
            )
            assert self.check(datasets, tmp_path / "cache") == 1
            assert len(opened) == 9

    def test_another_limit_and_a_fast_check_do_not_pass_for_a_full_one(self, folders: tuple[Path, Path], tmp_path: Path) -> None:
        """What headers said is not remembered as sound, and a limit is part of the question."""
        datasets = load_datasets(*folders)
        cut(folders[0] / "a" / "001.png")
        assert self.check(datasets, tmp_path / "cache", fast=True) == 0
        assert self.check(datasets, tmp_path / "cache") == 1
        assert self.check(datasets, tmp_path / "cache", max_pixels=100) == 9

    def test_damaged_cache_is_done_without(self, folders: tuple[Path, Path], tmp_path: Path) -> None:
        """A torn file is rebuilt; a folder that cannot be made costs nothing but time."""
        datasets = load_datasets(*folders)
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / CACHE_NAME).write_text('{"x": {"key"')
        assert self.check(datasets, tmp_path / "cache") == 0
        with closing(sqlite3.connect(tmp_path / "cache" / CACHE_NAME)) as database:
            assert database.execute("SELECT count(*) FROM findings").fetchone() == (9,)
        (tmp_path / "file").touch()
        assert self.check(datasets, tmp_path / "file" / "cache") == 0
        assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [CACHE_NAME]


def test_progress_counts_every_file(folders: tuple[Path, Path]) -> None:
    """Up to the total, in order."""
    seen: list[tuple[int, int]] = []
    check_datasets(load_datasets(*folders), max_pixels=LIMIT, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(number, 9) for number in range(10)]


class TestTimeLimit:
    """Where the time is up, headers have to do, and the next check goes on."""

    def test_files_beyond_the_limit_are_looked_at_by_their_headers_and_decoded_next_time(
        self, folders: tuple[Path, Path], tmp_path: Path
    ) -> None:
        """A clock that moves a second a look: a part is decoded; every further check decodes a part of the rest, until all are."""
        datasets, cache = load_datasets(*folders), tmp_path / "cache"
        decoded = []
        for _ in range(4):
            ticks = count()
            steps = check_steps(
                datasets, max_pixels=LIMIT, seconds=3.5, cache_folder=cache, threads=1, clock=lambda ticks=ticks: float(next(ticks))
            )
            report = finished(steps)
            assert report.num_images == 9
            assert not report.errors
            decoded.append(report.num_decoded)
            assert bool(partly_decoded(report, 3.5)) == (report.num_decoded < 9)
        assert decoded == [3, 6, 9, 9]

    def test_what_headers_show_is_found_beyond_the_limit_too(self, folders: tuple[Path, Path]) -> None:
        """An empty file is no matter of luck; a cut one is found when its turn comes."""
        (folders[0] / "a" / "000.png").write_bytes(b"")
        cut(folders[0] / "a" / "001.png")
        steps = check_steps(load_datasets(*folders), max_pixels=LIMIT, seconds=0)
        (problem,) = finished(steps).errors
        assert "is empty" in problem.message


def test_a_check_that_is_left_keeps_what_it_found(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Closed in the middle, as by Ctrl-C: the next one decodes the rest alone."""
    datasets = load_datasets(*folders)
    steps = check_steps(datasets, max_pixels=LIMIT, cache_folder=tmp_path, threads=1)
    while next(steps)[0] < 4:
        pass
    steps.close()
    assert next(check_steps(datasets, max_pixels=LIMIT, cache_folder=tmp_path)) == (4, 9)


def test_warnings_of_the_sources_are_in_the_report(folders: tuple[Path, Path]) -> None:
    """One place for everything."""
    datasets = load_datasets(*folders)
    empty = replace(datasets, train=replace(datasets.train, samples=()))
    assert check_datasets(empty, max_pixels=LIMIT).splits["train"]["height"] == []
    (folders[0] / "c").mkdir()
    assert any("'c' has no images" in problem.message for problem in check_datasets(load_datasets(*folders), max_pixels=LIMIT).warnings)
