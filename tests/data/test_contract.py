"""The contract read back gives the same bits as the one that was written."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import torch
from PIL import Image

from hiresvis.data.contract import Contract, load_image, make_prepare, statistics_for
from hiresvis.data.decode import decode
from hiresvis.data.transforms import Preprocess, Scale
from hiresvis.errors import DataError, RunFolderError

CONTRACT = Contract(
    classes=("ill", "healthy", "ärger 'so'"),
    image_size=(40, 56),
    fit="letterbox",
    background=(12, 34, 56),
    channels=3,
    scale=Scale("range", 0.1, 4095.3),
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    interpolation="bicubic",
    max_pixels=10**6,
)


def test_contract_read_back_is_equal_and_gives_identical_bits(tmp_path: Path) -> None:
    """Through the file: same values, same pixels, same normalised tensor."""
    (tmp_path / "contract.json").write_text(json.dumps(CONTRACT.to_json()), encoding="utf-8")
    again = Contract.read(tmp_path / "contract.json")
    assert again == CONTRACT
    (tmp_path / "x.png").write_bytes(imagecodecs.png_encode(np.random.default_rng(0).integers(0, 4096, (70, 90, 3), dtype=np.uint16)))
    outs = [
        make_prepare(contract, torch.device("cpu"), True)(
            torch.from_numpy(load_image(tmp_path / "x.png", contract.preprocess(), max_pixels=10**6))[None]
        )
        for contract in (CONTRACT, again)
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2 and this release reads 1"),
        ({"flip": True}, r"unknown \['flip'\]"),
        ({"mean": [0.5]}, "cannot be read"),
    ],
)
def test_contract_of_another_version_or_shape_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    """Nothing is guessed from a contract that this release does not know."""
    path = tmp_path / "contract.json"
    path.write_text(json.dumps({**CONTRACT.to_json(), **change}), encoding="utf-8")
    with pytest.raises(RunFolderError, match=message):
        Contract.read(path)


def test_contract_of_a_run_before_there_were_windows_is_read(tmp_path: Path) -> None:
    """What came later has a default, and means what such runs did."""
    values = CONTRACT.to_json()
    del values["overlap"]
    (tmp_path / "contract.json").write_text(json.dumps(values), encoding="utf-8")
    assert Contract.read(tmp_path / "contract.json") == CONTRACT
    del values["fit"]
    (tmp_path / "contract.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"missing \['fit'\]"):
        Contract.read(tmp_path / "contract.json")


def test_a_regressions_scale_is_part_of_the_contract(tmp_path: Path) -> None:
    """Mean and deviation come back bit for bit; a contract that lacks one of a target's is refused."""
    contract = replace(CONTRACT, task="regress", classes=("age", "size"), target_mean=(0.1, 1e9 / 3), target_std=(2.0, 1e-7))
    path = tmp_path / "contract.json"
    path.write_text(json.dumps(contract.to_json()), encoding="utf-8")
    assert Contract.read(path) == contract
    path.write_text(json.dumps({**contract.to_json(), "target_std": [2.0]}), encoding="utf-8")
    with pytest.raises(RunFolderError, match="cannot be read"):
        Contract.read(path)


@pytest.mark.parametrize(
    ("fitted", "other"),
    [
        ({"temperature": 1.2345678901234567}, {"temperature": 0.0}),
        ({"task": "multilabel", "thresholds": (0.1, 1 / 3, 0.9)}, {"thresholds": (0.1, 0.2)}),
        ({"task": "multilabel"}, {"temperature": 2.0}),
    ],
)
def test_what_the_end_of_a_run_fits_is_part_of_the_contract(tmp_path: Path, fitted: dict[str, object], other: dict[str, object]) -> None:
    """Bit for bit; without it two contracts of the same preprocessing are equal; what no task can mean is refused."""
    contract = replace(CONTRACT, **fitted)  # type: ignore[arg-type]
    path = tmp_path / "contract.json"
    path.write_text(json.dumps(contract.to_json()), encoding="utf-8")
    assert Contract.read(path) == contract
    assert contract.unfitted == replace(CONTRACT, task=contract.task)
    path.write_text(json.dumps({**contract.to_json(), **other}), encoding="utf-8")
    with pytest.raises(RunFolderError, match="cannot be read"):
        Contract.read(path)


def test_missing_and_torn_contracts_are_refused(tmp_path: Path) -> None:
    """The message says what kind of folder was expected."""
    with pytest.raises(RunFolderError, match="is not the folder of a finished run"):
        Contract.read(tmp_path / "contract.json")
    (tmp_path / "contract.json").write_text('{"version": 1, "cla')
    with pytest.raises(RunFolderError, match="cannot be read"):
        Contract.read(tmp_path / "contract.json")


@pytest.mark.parametrize("channels_last", [True, False])
def test_prepare_normalises_bytes_and_floats_alike(channels_last: bool) -> None:
    """(x / 255 - mean) / std as (b, c, h, w), in the memory layout asked for; the input is left as it was."""
    images = torch.randint(0, 256, (2, 8, 6, 3), dtype=torch.uint8)
    before = images.clone()
    prepare = make_prepare(CONTRACT, torch.device("cpu"), channels_last)
    out = prepare(images)
    expected = (images.permute(0, 3, 1, 2) / 255 - torch.tensor(CONTRACT.mean).view(1, 3, 1, 1)) / torch.tensor(CONTRACT.std).view(
        1, 3, 1, 1
    )
    assert out.shape == (2, 3, 8, 6)
    assert out.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    torch.testing.assert_close(out, expected, check_stride=False)
    floats = images / 255
    kept = floats.clone()
    torch.testing.assert_close(prepare(floats), expected, check_stride=False)
    assert torch.equal(images, before)
    assert torch.equal(floats, kept)


def test_load_image_names_the_file_that_does_not_match(tmp_path: Path, save_image: Callable[..., Path]) -> None:
    """A colour image for a grey model: path, both numbers, the setting."""
    path = save_image(tmp_path / "x.png")
    grey = replace(CONTRACT, channels=1, mean=(0.5,), std=(0.5,)).preprocess()
    with pytest.raises(DataError, match=r"x\.png.*has 3 channels and the model takes 1"):
        load_image(path, grey, max_pixels=10**6)


@pytest.mark.parametrize("size", [(160, 224), (80, 112), (170, 230)])
def test_draft_decoding_gives_the_pixels_of_the_full_decode(tmp_path: Path, size: tuple[int, int]) -> None:
    """Waves of under four model pixels keep their height through the fast path, whatever the photo's size."""
    rows, columns = np.mgrid[0 : size[0], 0 : size[1]]
    waves = 128 + 100 * np.sin(rows / size[0] * 68)[..., None] * np.ones(3) + columns[..., None] * 0.05
    Image.fromarray(waves.astype(np.uint8)).save(tmp_path / "x.jpg", quality=95)
    preprocess = replace(CONTRACT, fit="resize", scale=Scale()).preprocess()
    out = load_image(tmp_path / "x.jpg", preprocess, max_pixels=10**6)
    full = preprocess(decode(tmp_path / "x.jpg", max_pixels=10**6))
    assert out.shape == (40, 56, 3)
    assert np.abs(out.astype(int) - full).max() <= 3
    assert int(full.max()) - int(full.min()) > 120


def test_statistics_follow_the_number_of_channels() -> None:
    """Weights made with three channels: one or five get their average."""
    assert statistics_for((0.4, 0.5, 0.6), (0.1, 0.2, 0.3), 3) == ((0.4, 0.5, 0.6), (0.1, 0.2, 0.3))
    mean, std = statistics_for((0.4, 0.5, 0.6), (0.1, 0.2, 0.3), 5)
    assert mean == pytest.approx((0.5,) * 5)
    assert std == pytest.approx((0.2,) * 5)


@pytest.mark.parametrize("size", [(24, 32), (48, 64), (12, 16), (64, 48)])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_images_do_not_share_the_memory_they_are_decoded_into(
    tmp_path: Path, picture: Callable[..., np.ndarray], size: tuple[int, int], mode: str
) -> None:
    """One after another and in threads, larger, smaller and of the model's own size: each keeps its pixels."""
    paths = [tmp_path / f"{seed}.jpg" for seed in range(6)]
    for seed, path in enumerate(paths):
        Image.fromarray(picture(*size, seed=seed)).convert(mode).save(path, quality=90)
    preprocess = Preprocess((24, 32), in_chans=3)
    expected = [preprocess(decode(path, max_pixels=10**6, draft_px=preprocess.draft_px)).copy() for path in paths]

    def load(path: Path) -> np.ndarray:
        return load_image(path, preprocess, max_pixels=10**6)

    with ThreadPoolExecutor(3) as pool:
        found = [*map(load, paths), *pool.map(load, paths)]
    assert all(np.array_equal(one, other) for one, other in zip(found, expected * 2, strict=True))
    assert not any(np.may_share_memory(one, other) for one, other in itertools.combinations(found, 2))
