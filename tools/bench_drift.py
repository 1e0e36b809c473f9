"""What drift tells of images that are unlike those of training, and how often it cries wolf: a table in Markdown.

    python tools/bench_drift.py RUN FOLDER [--images 112]

RUN is a finished run of hiresvis, FOLDER holds images of its kind that it was not trained on. They are judged as they are and altered, with
drawn boards and clouds of colour beside them: the share whose drift is above 1, the median drift, and what is told of the batch. False
alarms are counted on draws from FOLDER alone, whose parts are alike: half of it stands for training, a quarter for validation, and the last
quarter is judged.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import torch

from hiresvis.data.contract import Contract
from hiresvis.data.decode import decode
from hiresvis.data.folders import scan_unlabelled
from hiresvis.data.samples import draw_boards
from hiresvis.drift import ALPHA, LEAST_GAP, Watch
from hiresvis.run import RunDirectory
from hiresvis.train.features import Forward
from hiresvis.trained import make_step, open_run
from hiresvis.training_statistics import Described, Describer, TrainingStatistics, summarise

DRAWS = 200
Alter = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def turned(image: np.ndarray, degrees: float) -> np.ndarray:
    height, width = image.shape[:2]
    return cv2.warpAffine(
        image, cv2.getRotationMatrix2D((width / 2, height / 2), degrees, 1), (width, height), borderMode=cv2.BORDER_REFLECT
    ).reshape(image.shape)


ALTERED: dict[str, Alter] = {
    "as they are": lambda image, _: image,
    "inverted": lambda image, _: 255 - image,
    "blurred, sigma 4 px": lambda image, _: cv2.GaussianBlur(image, (0, 0), 4).reshape(image.shape),
    "blurred, sigma 8 px": lambda image, _: cv2.GaussianBlur(image, (0, 0), 8).reshape(image.shape),
    "darkened to 0.8": lambda image, _: (image * 0.8).astype(np.uint8),
    "darkened to 0.5": lambda image, _: (image * 0.5).astype(np.uint8),
    "noise, sigma 40": lambda image, rng: np.clip(image + rng.normal(0, 40, image.shape), 0, 255).astype(np.uint8),
    "noise, sigma 80": lambda image, rng: np.clip(image + rng.normal(0, 80, image.shape), 0, 255).astype(np.uint8),
    "turned by 90": lambda image, _: np.ascontiguousarray(np.rot90(image)),
    "turned by 15": lambda image, _: turned(image, 15),
    "a quarter, enlarged": lambda image, _: image[: image.shape[0] // 2, : image.shape[1] // 2],
}


def altered(images: Sequence[np.ndarray], alter: Alter, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Each of the images, altered."""
    return (alter(image, rng) for image in images)


def clouds(count: int) -> Iterator[np.ndarray]:
    """Smooth fields of colour, 640 px."""
    rng = np.random.default_rng(1)
    for _ in range(count):
        field = cv2.GaussianBlur(rng.normal(0, 1, (640, 640, 3)).astype(np.float32), (0, 0), 30)
        yield np.clip(127 + 60 * field / field.std(), 0, 255).astype(np.uint8)


class Describing:
    """Describes arrays as `predict` describes files."""

    def __init__(self, run: Path) -> None:
        trained = open_run(run)
        self.contract: Contract = trained.contract
        assert not self.contract.preprocess().in_windows, "whole images only"
        self._forward, self._batch = Forward(make_step(trained), most=trained.eval_batch), trained.eval_batch

    def __call__(self, images: Iterator[np.ndarray]) -> list[Described]:
        describer, found = Describer(), list[Described]()
        preprocess = self.contract.preprocess()
        arrays = [preprocess(image) for image in images]
        for start in range(0, len(arrays), self._batch):
            part = torch.from_numpy(np.stack(arrays[start : start + self._batch]))
            item = SimpleNamespace(images=part, indices=tuple(range(len(part))), targets=torch.zeros(len(part)), num_windows=())
            found += [image for _, image in describer.add(item, self._forward(part)[1])]
        return found


def judged(kept: TrainingStatistics, contract: Contract, images: Sequence[Described]) -> tuple[list[float], list[str]]:
    """Each image's drift, and the kinds in which the batch differs."""
    watch = Watch(kept, contract)
    drifts = [watch.add("", None, image) or 0.0 for image in images]
    compared = watch.differences()
    return drifts, [one.kind for one in compared if one.p_value * len(compared) < ALPHA and one.gap >= LEAST_GAP]


def false_alarms(images: Sequence[Described], contract: Contract) -> tuple[float, float]:
    """Share of images, and of batches, that are told to be far or different though nothing is."""
    rng, far, told = np.random.default_rng(0), list[float](), 0
    half, quarter = len(images) // 2, len(images) // 4
    for _ in range(DRAWS):
        drawn = [images[int(index)] for index in rng.permutation(len(images))]
        kept = summarise(drawn[:half], drawn[half : half + quarter], [], contract)
        drifts, different = judged(kept, contract, drawn[half + quarter :])
        far += drifts
        told += bool(different)
    return float(np.mean(np.array(far) > 1)), told / DRAWS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=112)
    given = parser.parse_args()
    torch.set_num_threads(1)
    describe, kept = Describing(given.run), TrainingStatistics.read(RunDirectory.open(given.run))
    assert kept is not None, "the run has no statistics.json"
    contract = describe.contract
    files = [Path(entry.file) for entry in scan_unlabelled([given.folder]).entries]
    files = [files[int(index)] for index in np.random.default_rng(0).permutation(len(files))[: given.images]]
    originals = [decode(path, max_pixels=contract.max_pixels) for path in files]
    print("| images | drift above 1 | median drift | as a whole |")
    print("|---|---|---|---|")
    plain: list[Described] = []
    with tempfile.TemporaryDirectory() as folder:
        draw_boards(Path(folder) / "boards", num_train=32, num_val=2, num_test=2, size_px=640, workers=1)
        boards = sorted((Path(folder) / "boards" / "train").glob("*/*"))
        rng = np.random.default_rng(0)
        sources: dict[str, Iterator[np.ndarray]] = {name: altered(originals, alter, rng) for name, alter in ALTERED.items()}
        sources["drawn boards"] = (decode(path, max_pixels=contract.max_pixels) for path in boards)
        sources["clouds of colour"] = clouds(32)
        for name, images in sources.items():
            described = describe(images)
            plain = plain or described
            drifts, different = judged(kept, contract, described)
            share = sum(drift > 1 for drift in drifts) / len(drifts)
            print(f"| {name} | {share:.0%} | {statistics.median(drifts):.2f} | {', '.join(different) or 'no difference'} |", flush=True)
    images_far, batches = false_alarms(plain, contract)
    print(f"\nFalse alarms over {DRAWS} draws of like images: {images_far:.1%} of images, {batches:.1%} of batches.")


if __name__ == "__main__":
    main()
