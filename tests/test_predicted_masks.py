"""Pictures that `predict` writes: each below the folder that was asked for, whatever a table calls its image."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hiresvis.data.inputs import Columns, find_inputs
from hiresvis.data.sources import Sample
from hiresvis.predicted_masks import MaskWriter, png_path
from hiresvis.train.mapping import Strip

SIZE = (24, 32)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A manifest in work/table/ that names images of work/images/ in every way: absolute, by `..`, twice by region, and beside itself."""
    for name in ("images/a.png", "images/b.png", "images/sub/c.png", "images/d.png", "table/a.png"):
        path = tmp_path / "work" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((*SIZE, 3), 200, np.uint8)).save(path)
    monkeypatch.chdir(tmp_path / "work" / "table")
    images = tmp_path / "work" / "images"
    rows = [f"{images}/a.png,0,0,32,24", "../images/b.png,0,0,8,8", "../images/b.png,8,8,8,8", "../images/sub/../sub/c.png,0,0,32,24"]
    rows += [f"{images}/../images/d.png,0,0,9,9", "a.png,0,0,32,24"]
    Path("t.csv").write_text("\n".join(["path,x,y,w,h", *rows]) + "\n")
    return Path("t.csv")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def samples_of(table: Path) -> list[Sample]:
    return find_inputs([str(table)], Columns(region=("x", "y", "w", "h"), root=Path(".."))).samples


@pytest.mark.parametrize("out", ["out", "../out"])
def test_masks_never_write_over_the_images(table: Path, out: str) -> None:
    """Whatever the rows' paths are, each has a mask of its own below the folder, and no file outside of it is touched."""
    before, samples = contents(Path("..")), samples_of(table)
    writer = MaskWriter(Path(out), ("none", "spot"), None)
    written = [writer.add(Strip(number, (4, 5), 0, torch.zeros(2, 4, 5), None), sample) for number, sample in enumerate(samples)]
    paths = [mask.path for mask in written if mask is not None]
    assert len({*paths}) == len(paths) == len(samples) == 6
    after = contents(Path(".."))
    assert {path: after.get(path) for path in before} == before
    assert len(contents(Path(out))) == len(samples)


PARTS = st.sampled_from(["..", ".", "", "a", "A", "a.png", "b.jpg", "a-2.png", "..a", "..."])


@given(st.lists(st.lists(PARTS, min_size=1, max_size=5).map("/".join), max_size=12))
def test_every_name_gets_one_file_below_the_folder(names: list[str]) -> None:
    """Absolute, with any number of `..`, the same twice: no two share a file, in small letters either, and none leaves the folder."""
    taken, folder = set[str](), Path("some/../folder")
    paths = [png_path(folder, Sample(name, None, name, name=name), taken) for name in names]
    assert len({str(path).lower() for path in paths}) == len(names)
    for path, name in zip(paths, names, strict=True):
        assert Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder))
        assert path.suffix == ".png"
        kept = [part for part in PurePath(name).parts if part not in ("..", "/", "//")]
        assert list(path.parts[len(folder.parts) : -1]) == kept[:-1], "folders stay, so that a mask is found by its image"
