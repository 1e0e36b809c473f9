"""One preprocessing everywhere: fit, evaluate, predict and an exported graph give the same digits for the same files.

The files are of every kind that tools disagree on: turned by EXIF, transparent, 16 bit, grey, large JPEG decoded at a fraction. What
stands in contract.json, read as the README explains it, is enough to make the pixels again with other libraries.
"""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnxruntime
import pytest
import tifffile
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from hiresvis.data.contract import Contract, load_image, load_window
from hiresvis.data.decode import open_image
from hiresvis.train.metrics import compute_metrics

KINDS = ("turned.jpg", "alpha.png", "deep.tif", "grey.png", "large.jpg", "turned.png", "palette.png", "deep.png")
CLASSES = ("bright", "dark")


def draw(path: Path, label: int, rng: np.random.Generator) -> None:
    """A noisy image of the kind that its name says; how bright it is tells the class, more often than not."""
    kind = path.name.partition("-")[2]
    height, width = (256, 384) if kind == "large.jpg" else (int(rng.integers(50, 90)), int(rng.integers(50, 90)))
    pixels = rng.integers(0, 140, (height, width, 3)) + int(rng.integers(0, 60)) + (0 if label else 50)
    image = Image.fromarray(pixels.astype(np.uint8))
    if kind.startswith("turned"):
        exif = Image.Exif()
        exif[0x0112] = 6  # shown after a quarter turn clockwise, so stored turned the other way
        image.rotate(90, expand=True).save(path, exif=exif, quality=95)
    elif kind == "alpha.png":
        image.putalpha(Image.fromarray(rng.integers(0, 256, (height, width), dtype=np.uint8)))
        image.save(path)
    elif kind == "deep.tif":
        tifffile.imwrite(path, (pixels[..., 0] * 250 + 77).astype(np.uint16))
    elif kind == "deep.png":
        Image.fromarray((pixels[..., 0] * 250 + 77).astype(np.uint16)).save(path)
    elif kind in ("grey.png", "palette.png"):
        image.convert("L" if kind == "grey.png" else "P").save(path)
    else:
        image.save(path, quality=95)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, make_workshop):
    """A run of two epochs on such files, through the command line, and its ONNX export."""
    folder = tmp_path_factory.mktemp("digits")
    rng = np.random.default_rng(11)
    for split, rounds in (("train", 2), ("val", 2)):
        for label, name in enumerate(CLASSES):
            (folder / "data" / split / name).mkdir(parents=True)
            for number in range(rounds * len(KINDS)):
                draw(folder / "data" / split / name / f"{number:02d}-{KINDS[number % len(KINDS)]}", label, rng)
    work = make_workshop(folder / "work", folder / "data")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    work.fit("data.test=null", "train.batch=8", "train.eval_batch=5", "optim.lr=0.01", "optim.warmup=0", "model.norm=frozen")
    done = work("export", work.path(""), "--to", "onnx", "--out", folder / "exported", "--json")
    torch.set_num_threads(threads)
    assert done.code == 0, done.err
    work.exported, work.told = folder / "exported", done.json
    return work


def metrics_of(scores: np.ndarray, labels: list[str]) -> dict[str, float]:
    return compute_metrics("classify", torch.from_numpy(scores), torch.tensor([CLASSES.index(label) for label in labels]))


def predicted(work, folder: Path | None = None) -> tuple[list[Path], np.ndarray, list[str]]:
    """Paths, scores (n, classes) float32 and labels that predict gives for the validation images, in its order."""
    done = work("predict", folder or work.path(""), work.data / "val")
    assert done.code == 0, done.err
    rows = list(csv.DictReader(done.out.splitlines()))
    scores = np.array([[float(row[f"score_{name}"]) for name in CLASSES] for row in rows], np.float32)
    return [Path(row["path"]) for row in rows], scores, [row["label"] for row in rows]


def test_fit_evaluate_predict_and_the_graph_give_the_same_metrics(run):
    """To the last digit, from events, metrics.csv, evaluate, predict's table, and onnxruntime over the contract beside the graph."""
    best = run.events("run_finished")[0]["best_epoch"]
    (told,) = [row for row in run.events("evaluated") if row["epoch"] == best]
    with run.path("metrics.csv").open() as file:
        (logged,) = [row for row in csv.DictReader(file) if row["epoch"] == str(best)]
    assert {name: float(logged[f"val_{name}"]) for name in told["metrics"]} == told["metrics"]
    result = run("evaluate", run.path(""), "--json").json["val"]
    assert result.items() >= run.events("run_finished")[0]["results"]["val"].items()
    assert {name: result[name] for name in ("images", "loss", *told["metrics"])} == {"images": 32, "loss": told["loss"], **told["metrics"]}
    assert result["calibration"]["temperature"] != 1, "the digits below would not show that it is applied"

    paths, scores, labels = predicted(run)
    truth = [path.parent.name for path in paths]
    assert metrics_of(scores, truth) == told["metrics"]
    assert 0.5 < told["metrics"]["accuracy"] < 1, "such a figure would not show much"

    contract = Contract.read(run.exported / "contract.json")
    session = onnxruntime.InferenceSession(str(run.exported / "model.onnx"))
    given = np.concatenate([session.run(["scores"], {"pixels": as_input(path, contract)})[0] for path in paths])
    assert metrics_of(given, truth) == told["metrics"]
    assert [CLASSES[index] for index in given.argmax(axis=1)] == labels
    assert np.abs(given - scores).max() < 1e-6


def as_input(path: Path, contract: Contract) -> np.ndarray:
    pixels = load_image(path, contract.preprocess(), max_pixels=contract.max_pixels)[None]
    return pixels.astype(np.float32) / np.float32(255) if pixels.dtype == np.uint8 else pixels


def test_the_graph_tells_what_it_takes_and_gives(run):
    """0 to 1, since some of the images have 16 bits; classes and contract are in the file as beside it."""
    session = onnxruntime.InferenceSession(str(run.exported / "model.onnx"))
    meta = session.get_modelmeta().custom_metadata_map
    (taken,) = session.get_inputs()
    assert (taken.name, taken.shape, taken.type) == ("pixels", ["batch", 64, 64, 3], "tensor(float)")
    assert [(output.name, output.shape) for output in session.get_outputs()] == [("logits", ["batch", 2]), ("scores", ["batch", 2])]
    assert json.loads(meta["classes"]) == list(CLASSES)
    assert json.loads(meta["contract"]) == json.loads((run.exported / "contract.json").read_text()) == run.read("contract.json")
    assert json.loads(meta["input"]) == run.told["input"]
    assert run.told["input"]["why"] == "8 of 32 images of val have more than 8 bits; bytes are divided by 255"


def test_one_image_at_a_time_gives_the_same_classes(run, tmp_path):
    """Another batch reassociates sums inside libraries: the last bits of a score may move, no prediction does."""
    alone = shutil.copytree(run.path(""), tmp_path / "run")
    plan = json.loads((alone / "plan.json").read_text())
    assert plan["eval_batch"] == 5
    (alone / "plan.json").write_text(json.dumps({**plan, "eval_batch": 1}))
    (paths, together, labels), (same_paths, single, same_labels) = predicted(run), predicted(run, alone)
    assert (paths, labels) == (same_paths, same_labels)
    assert np.abs(together - single).max() < 1e-6


# --- the contract alone ------------------------------------------------------------------------------------------------------------


def pixels_by_the_readme(path: Path, contract: dict[str, Any]) -> list[np.ndarray]:
    """What the README's description of contract.json makes, written without hiresvis; with fit "tile" an array a window."""
    array = by_other_decoders(path, contract["background"])
    limits, fit = contract["image_size"], contract["fit"]
    sizes = [min(side, limit) for side, limit in zip(array.shape, limits, strict=False)]
    if fit == "crop":
        top, left = ((side - size) // 2 for side, size in zip(array.shape, sizes, strict=False))
        parts = [array[top : top + sizes[0], left : left + sizes[1]]]
    elif fit == "tile":
        rows, columns = (window_starts(side, limit, contract["overlap"]) for side, limit in zip(array.shape, limits, strict=False))
        parts = [array[top : top + sizes[0], left : left + sizes[1]] for top in rows for left in columns]
    else:
        ratio = min(limits[0] / array.shape[0], limits[1] / array.shape[1])
        wanted = limits if fit == "resize" else [round(side * ratio) for side in array.shape[:2]]
        wanted = [max(1, min(limit, side)) for side, limit in zip(wanted, limits, strict=True)]
        smaller = [min(side, limit) for side, limit in zip(array.shape, wanted, strict=False)]
        enlarging = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}[contract["interpolation"]]
        array = cv2.resize(array, smaller[::-1], interpolation=cv2.INTER_AREA)
        parts = [cv2.resize(array, wanted[::-1], interpolation=enlarging)]
    return [padded(scaled(part, contract["scale"]), contract) for part in parts]


def window_starts(length: int, window: int, overlap: float) -> list[int]:
    """Every so many pixels; the last one moved inside."""
    step = max(1, int(window * (1 - overlap) + 1e-6))
    starts = [0]
    while starts[-1] + window < length:
        starts.append(min(starts[-1] + step, length - window))
    return starts


def scaled(array: np.ndarray, scale: dict[str, Any]) -> np.ndarray:
    if scale["kind"] == "range":
        low, factor = np.float32(scale["low"]), np.float32(1 / (scale["high"] - scale["low"]))
        return np.clip((array.astype(np.float32) - low) * factor, 0, 1)
    return array.astype(np.float32) * np.float32(1 / 65535) if array.dtype == np.uint16 else array


def padded(array: np.ndarray, contract: dict[str, Any]) -> np.ndarray:
    array = array.reshape(*array.shape[:2], -1)
    if array.shape[2] < contract["channels"]:
        array = np.repeat(array, contract["channels"], axis=2)
    colour = np.array(contract["background"] if contract["channels"] == 3 else [np.mean(contract["background"])], np.float32)
    whole = np.empty((*contract["image_size"], contract["channels"]), array.dtype)
    whole[:] = np.rint(colour) if array.dtype == np.uint8 else colour / 255
    top, left = ((limit - side) // 2 for limit, side in zip(contract["image_size"], array.shape, strict=False))
    whole[top : top + array.shape[0], left : left + array.shape[1]] = array
    return whole


def by_other_decoders(path: Path, background: list[int]) -> np.ndarray:
    """(height, width) or (height, width, 3), upright, transparency laid on the background, by Pillow and opencv."""
    if path.suffix == ".tif":
        return cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode == "P":
        image = image.convert("RGB")
    array = np.array(image)
    if image.mode != "RGBA":
        return array
    share = array[..., 3:].astype(np.float32) / np.float32(255)
    return np.rint(array[..., :3] * share + np.array(background, np.float32) * (1 - share)).astype(np.uint8)


contracts = st.fixed_dictionaries(
    {
        "image_size": st.tuples(st.integers(20, 120), st.integers(20, 120)),
        "fit": st.sampled_from(["resize", "letterbox", "crop", "tile"]),
        "overlap": st.sampled_from([0.0, 0.25, 0.9]),
        "background": st.tuples(*[st.integers(0, 255)] * 3),
        "interpolation": st.sampled_from(["bilinear", "bicubic"]),
        "scale": st.sampled_from([{"kind": "dtype", "low": 0.0, "high": 1.0}, {"kind": "range", "low": 20.5, "high": 180.25}]),
    }
)


@given(values=contracts, kind=st.sampled_from([kind for kind in KINDS if not kind.endswith("jpg")]))
def test_contract_json_alone_makes_the_same_pixels(tmp_path_factory, values, kind):
    """Bit for bit, for every way to fit, enlarge and scale, and for every kind of file whose decoding is exact."""
    folder = tmp_path_factory.mktemp("alone")
    path = folder / f"0-{kind}"
    draw(path, 0, np.random.default_rng(values["image_size"][0]))
    rest = {"classes": ["a", "b"], "channels": 3, "mean": [0.5] * 3, "std": [0.5] * 3, "max_pixels": 10**6, "version": 1}
    text = json.dumps({**rest, **values})
    contract = Contract.from_json(json.loads(text))
    ours, theirs = pixels_of(path, contract), pixels_by_the_readme(path, json.loads(text))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


def pixels_of(path: Path, contract: Contract) -> list[np.ndarray]:
    preprocess = contract.preprocess()
    if preprocess.fit != "tile":
        return [load_image(path, preprocess, max_pixels=contract.max_pixels)]
    with open_image(path, max_pixels=contract.max_pixels, background=preprocess.background) as image:
        return [load_window(image, preprocess, number, path) for number in range(preprocess.num_windows(*image.size))]
