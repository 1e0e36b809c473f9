"""`hiresvis check` as a whole command, and what fit does of it: tables as people write them, copies, cut files, rectangles, stops."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from hiresvis.errors import DataError
from hiresvis.fit import fit
from hiresvis.recipe import load_recipe
from hiresvis.run.events import StepDone

ROOT = Path(__file__).resolve().parents[2]
TABLE = """\
task: classify
data: {{train: {data}/train.csv, val: {data}/val.csv, augment: light, workers: 0}}
model: {{name: test_resnet, pretrained: false, image_size: 64}}
memory: {{budget: 4GiB}}
train: {{epochs: 1, batch: 4}}
"""
FOLDERS = ("data.test=null",)


def photo(path: Path, seed: int, size: tuple[int, int] = (200, 150), **options: object) -> Path:
    """A smooth picture of a few colours, as (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colours = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC).save(path, **options)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes, eight and four photos."""
    for split, number in (("train", 8), ("val", 4)):
        for position in range(number):
            photo(tmp_path / "data" / split / "ab"[position % 2] / f"{position}.jpg", 100 * number + position, quality=92)
    return tmp_path / "data"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Manifests with spaces in names and paths from their own folder."""
    folder = tmp_path / "tables"
    for split in ("train", "val"):
        names = [f"images/{split} {number}.png" for number in range(6)]
        for number, name in enumerate(names):
            photo(folder / name, sum(split.encode()) + number)
        rows = "".join(f"{name},{'xy'[number % 2]},p{split}{number // 2}\r\n" for number, name in enumerate(names))
        (folder / f"{split}.csv").write_bytes(b"\xef\xbb\xbf" + f"path,label,patient\r\n{rows}".encode())
    return folder


def test_tables_of_spreadsheets_are_read(open_workshop, table):
    """A byte order mark, Windows line ends, spaces in names, paths relative to the table: nothing is wrong with them."""
    work = open_workshop(table, TABLE)
    done = work("check", work.recipe, "--json")
    assert done.code == 0, done.err + done.out
    assert done.json["splits"]["train"]["classes"] == {"x": 3, "y": 3}
    assert done.json["checked"] == {"images": 12, "decoded": 12}


def test_a_missing_file_and_an_empty_label_are_told_by_row(open_workshop, table):
    """All at once, by the line of the table, for check and fit alike: exit 3."""
    (table / "images" / "train 1.png").unlink()
    text = (table / "train.csv").read_bytes().replace(b"train 3.png,y", b"train 3.png,NaN").replace(b"train 4.png,x", b"train 4.png,")
    (table / "train.csv").write_bytes(text)
    work = open_workshop(table, TABLE)
    for command in ("check", "fit"):
        done = work(command, work.recipe)
        assert done.code == 3
        said = done.out + done.err
        assert re.search(r"train\.csv:3 .*no such file: .*train 1\.png", said)
        assert re.search(r"train\.csv:5 .*no label in column 'label' \(NaN\)", said)
        assert re.search(r"train\.csv:6 .*no label in column 'label'", said)


def test_a_cut_file_of_a_table_is_told_by_path_and_row(open_workshop, table):
    """Only the full decode sees it: --fast passes, check ends with 3, and once it is whole again with 0; the file is left as it is."""
    victim = photo(table / "images" / "train 2.png", 7, (900, 700))
    whole = victim.read_bytes()
    victim.write_bytes(whole[: len(whole) // 2])
    work = open_workshop(table, TABLE)
    assert work("check", work.recipe, "--fast").code == 0
    for _ in range(2):  # the second time from memory
        done = work("check", work.recipe)
        assert done.code == 3
        assert f"error    train.csv:4  {victim} is a damaged PNG" in done.out
    assert victim.read_bytes() == whole[: len(whole) // 2]
    victim.write_bytes(whole)
    assert work("check", work.recipe).code == 0


def test_fit_tells_the_first_of_many_files_and_check_all_of_them(workshop):
    """What is wrong with a whole set would fill a terminal for hours; the count says so."""
    done = workshop.fit("data.max_pixels=1000", ok=False)
    assert done.code == 3
    assert done.err.startswith("none of 16 images looked at can be read; hiresvis check gives all reasons. The first: ")
    assert done.err.count("above data.max_pixels 1000") == 1
    assert workshop("check", workshop.recipe, "data.max_pixels=1000").out.count("above data.max_pixels 1000") == 32
    setting = ("data.channels=1", "data.scale=dtype")
    done = workshop.fit(*setting, ok=False)
    assert done.err.count(" has 3 channels and the model takes 1") == 20
    assert done.err.endswith("\n... and 12 more of these\nhiresvis check lists them all\n")


def test_a_group_in_two_splits_is_an_error(open_workshop, table):
    """With the rows on both sides; a share keeps groups whole by itself."""
    text = (table / "val.csv").read_text().replace("pval0", "ptrain1")
    (table / "val.csv").write_text(text)
    work = open_workshop(table, TABLE)
    done = work("check", work.recipe, "data.group=patient")
    assert done.code == 3
    assert re.search(r"group 'ptrain1' is in train \(2 rows, train\.csv:4\) and val \(2 rows, val\.csv:2\)", done.out)
    shared = work("check", work.recipe, "data.group=patient", "data.val=0.34", "--json").json["splits"]
    assert [shared[split]["groups"]["number"] for split in ("train", "val")] == [2, 1]


def test_copies_by_bytes_fail_under_strict_and_by_looks_never(open_workshop, photos):
    """The same bytes across two splits: a warning, and exit 3 with --strict. The same photo at another size: a note, and exit 0."""
    original = Image.open(photos / "train" / "a" / "0.jpg")
    small = photos / "val" / "a" / "small.jpg"
    original.resize((140, 105)).save(small, quality=70)
    work = open_workshop(photos)
    setting = (*FOLDERS, "data.fit=letterbox")  # nothing else to warn of
    done = work("check", work.recipe, *setting, "--strict")
    assert done.code == 0, done.out
    alike = r"^note +data  2 files in 1 group that look alike in two splits, .*train/a/0\.jpg and .*val/a/small\.jpg"
    assert re.search(alike, done.out, flags=re.MULTILINE)
    shutil.copy(photos / "train" / "b" / "1.jpg", photos / "val" / "b" / "copy.jpg")
    assert work("check", work.recipe, *setting).code == 0
    strict = work("check", work.recipe, *setting, "--strict", "--json")
    assert strict.code == 3
    (group,) = strict.json["same_bytes"]
    assert [(member["split"], Path(member["path"]).name) for member in group] == [("train", "1.jpg"), ("val", "copy.jpg")]
    assert [len(group) for group in strict.json["look_alikes"]] == [2]


@pytest.mark.parametrize("fit_to", ["resize", "letterbox"])
def test_rectangles_stay_rectangles_and_the_share_kept_is_told(open_workshop, photos, fit_to):
    """image_size [40, 80] reaches the model as 40 rows of 80, all of the image in it; a stretched shape is told, a letterbox is none."""
    work = open_workshop(photos)
    setting = (*FOLDERS, "model.image_size=[40, 80]", f"data.fit={fit_to}")
    found = work("check", work.recipe, *setting, "--json").json
    assert found["splits"]["train"]["share_kept"] == [1.0, 1.0, 1.0]
    assert any("change their shape" in problem["message"] for problem in found["warnings"]) == (fit_to == "resize")
    assert found["facts"]["input"].startswith(f"80 x 40 px, 3 channels, data.fit {fit_to}")
    work.fit(*setting, "train.epochs=1")
    assert work.read("contract.json")["image_size"] == [40, 80]


def test_sheet_is_one_page_beside_the_findings(open_workshop, photos, tmp_path):
    """Written where it was asked for, also where files are damaged; a name that is no page is refused before anything is done."""
    (photos / "train" / "a" / "2.jpg").write_bytes((photos / "train" / "a" / "2.jpg").read_bytes()[:3000])
    work = open_workshop(photos)
    page = tmp_path / "sheet.html"
    done = work("check", work.recipe, *FOLDERS, "--sheet", page)
    assert done.code == 3
    assert f"sheet: {page}" in done.err
    text = page.read_text()
    assert text.count("data:image/jpeg") >= 5 * 5
    assert "not shown: is a damaged JPEG" in text
    assert work("check", work.recipe, *FOLDERS, "--sheet", tmp_path / "sheet.png").code == 2


def test_stop_ends_the_check_at_once_and_keeps_what_was_found(photos, open_workshop, tmp_path, monkeypatch):
    """Ctrl-C in the middle of many large images: 130 within seconds, no traceback, and the next check decodes the rest alone."""
    large = photo(photos / "train" / "a" / "large.jpg", 1, (2000, 1500), quality=95)
    for number in range(300):
        os.link(large, large.with_name(f"large{number}.jpg"))
    work = open_workshop(photos)
    call = [sys.executable, "-m", "hiresvis", "check", str(work.recipe), *FOLDERS]
    cache = tmp_path / "cache"
    environ = {**os.environ, "HIRESVIS_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(call, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not list(cache.glob("check*.sqlite")) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    sent = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - sent < 10
    assert process.returncode == 130
    assert (out, err.splitlines()[-1]) == ("", "Interrupted.")
    assert "Traceback" not in err
    monkeypatch.setenv("HIRESVIS_CACHE", str(cache))
    assert work("check", work.recipe, *FOLDERS, "--json").json["checked"] == {"images": 313, "decoded": 313}


class TestFit:
    def test_a_check_without_time_goes_on_by_headers_and_says_so(self, open_workshop, photos, monkeypatch):
        """The run begins, with a warning that tells numbers and ways, and the resolved recipe tells them too; full decodes all."""
        monkeypatch.setattr("hiresvis.precheck.CHECK_SECONDS", 0.0)
        work = open_workshop(photos)
        setting = (*FOLDERS, "train.epochs=1")
        done = work.fit(*setting)
        assert "0 of 12 images were decoded in the 0s that data.check: auto takes" in done.err
        assert re.search(r"check: auto  # auto: 0 of 12 images decoded", work.path("recipe.resolved.yaml").read_text())
        done = work.fit(*setting, "data.check=full", name="full")
        assert "were decoded" not in done.err
        assert "check: full  # given" in work.path("recipe.resolved.yaml", "full").read_text()
        work.fit(*setting, name="again")  # what is remembered takes no time
        assert re.search(r"check: full  # auto: 12 of 12 images decoded", work.path("recipe.resolved.yaml", "again").read_text())

    @pytest.mark.parametrize(("micro_batch", "position"), [(2, 4), (1, 5)])
    def test_a_file_that_turns_bad_in_training_leaves_a_run_to_go_on_with(self, open_workshop, photos, micro_batch, position):
        """Its path, that the last step is saved, and the command, also where a part of the next batch was accumulated already (the second
        image, one at a time). Mended, the run ends with the weights of an undisturbed one."""
        work = open_workshop(photos)
        setting = [*FOLDERS, "train.batch=2", "train.epochs=2", "data.bad_images=error", f"memory.micro_batch={micro_batch}"]
        work.fit(*setting, name="straight")
        loaded = load_recipe(work.recipe, [*setting, f"log.dir={work.folder / 'runs' / 'recipe'}"])
        files = sorted((photos / "train").rglob("*.jpg"))
        victim = files[np.random.default_rng(np.random.SeedSequence([0, 2])).permutation(len(files))[position]]  # of the third batch
        content = victim.read_bytes()
        with pytest.raises(DataError) as caught:  # noqa: PT012 - the loop is the statement
            for event in fit(loaded):
                if isinstance(event, StepDone) and (event.epoch, event.step) == (2, 2):
                    victim.write_bytes(content[:500])
        bad, told = caught.value.problems[0], caught.value.problems[-1]
        assert bad.place == str(victim)
        assert "damaged" in bad.message
        assert "training ended there, in epoch 2 after step 2 of 4; saved is epoch 2, step 2;" in told.message
        assert "or set data.bad_images: skip, then go on with: hiresvis fit" in told.message
        victim.write_bytes(content)
        work.fit(*setting, "--resume")
        for name in ("weights/best.safetensors", "weights/last.safetensors"):
            weights, straight = load_file(work.path(name)), load_file(work.path(name, "straight"))
            assert all(torch.equal(weights[key], straight[key]) for key in straight)

    def test_a_validation_file_that_turns_bad_loses_no_epoch(self, open_workshop, photos):
        """The epoch is saved as it was trained, and a resumed run evaluates it."""
        work = open_workshop(photos)
        setting = [*FOLDERS, "train.batch=2", "train.epochs=1"]
        loaded = load_recipe(work.recipe, [*setting, f"log.dir={work.folder / 'runs' / 'recipe'}"])
        victim = photos / "val" / "a" / "0.jpg"
        content = victim.read_bytes()
        with pytest.raises(DataError, match=r"0\.jpg.*\n.*after step 4 of 4; saved is epoch 1, step 4; mend or replace the file, then"):  # noqa: PT012
            for event in fit(loaded):
                if isinstance(event, StepDone) and event.step == 3:
                    victim.write_bytes(content[:500])
        victim.write_bytes(content)
        work.fit(*setting, "--resume")
        assert [row["step"] for row in work.events("step_done")] == [1, 2, 3, 4]
