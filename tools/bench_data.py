"""Images a second from photographs of 12 megapixels to 1024 px: decoders alone, our loader, its copies, and timm's loader.

    python tools/bench_data.py [--photos FOLDER] [--num 6] [--px 1024] [--workers 2] [--repeats 7] [--json FILE]

All ways alternate in one process, so that a machine that slows down slows them all; medians are compared. Without --photos, pictures of
4000 x 3000 px are drawn whose statistics are those of photographs (overlapping shapes of all sizes, textures of all scales, sensor
noise) and written at quality 92, 4:2:0: 3 to 4 MB each. `detail` is the contrast that dark lines two pixels wide keep, in per cent.

Two questions. Decoders, from the file to the small image: one thread each, by its CPU time. Loaders, by the clock: as many worker
processes each, default training augmentation on both sides, batches of bytes as they come out of the workers (normalisation, which
both leave to the device, is on neither side); and by the CPU time that the workers spend, which neighbours on the machine touch less.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cv2
import numpy as np
import psutil
import simplejpeg
import torch
from PIL import Image
from timm.data import create_dataset, create_loader
from torchvision.io import decode_jpeg, read_file
from torchvision.transforms.v2 import functional

from hiresvis.data.augment import make_augment
from hiresvis.data.cache import ImageCache
from hiresvis.data.contract import load_image
from hiresvis.data.loader import TrainLoader
from hiresvis.data.sources import Sample
from hiresvis.data.transforms import Pipeline, Preprocess
from hiresvis.profiles import cpu_name

MAX_PIXELS = 10**9
BATCH = 4
COPIES = 4  # of each file in an epoch of the loaders
AREA, TRIANGLE, BOX, DRAFT = "area average", "triangle, antialiased", "mean of whole pixels", "DCT-scaled, then "
LINE_EVERY_PX, LINE, GROUND = 61, 50, 200


@dataclass(frozen=True)
class Row:
    """One way: what it does to pixels, its median rate, and the detail that it keeps; of a loader, its rate by the workers' CPU time."""

    name: str
    how: str
    images_per_second: float
    detail_percent: float | None = None
    per_cpu_second: float | None = None


def draw_photo(seed: int, height: int = 3000, width: int = 4000) -> np.ndarray:
    """(height, width, 3) uint8: dead leaves (discs whose radii follow a power law), 1/f texture, slight blur, noise."""
    random = np.random.default_rng(seed)
    texture = np.zeros((height, width), np.float32)
    for octave in range(1, 8):
        coarse = random.standard_normal((height >> octave, width >> octave)).astype(np.float32)
        texture += cv2.resize(coarse, (width, height)) * 1.6**octave
    picture = np.full((height, width, 3), 128, np.uint8)
    radii = np.sort(6 / np.sqrt(1 - random.random(9000) * (1 - (6 / 700) ** 2)))[::-1]
    for radius in radii[np.argsort(np.arange(len(radii)) / len(radii) + 0.3 * random.random(len(radii)))]:
        colour = np.clip(random.normal(120, 55, 3) / 2 + random.normal(120, 55) / 2, 0, 255)
        centre, squeeze = (random.random() * width, random.random() * height), random.uniform(0.4, 1)
        box = (centre, (2 * radius, 2 * radius * squeeze), random.random() * 180)
        cv2.ellipse(picture, box, colour.tolist(), -1, cv2.LINE_AA)
    light = picture + (texture * (10 / texture.std()))[..., None]
    noise = cv2.resize(random.standard_normal((height, width, 3)).astype(np.float32), (width, height)) * 5
    return np.clip(cv2.GaussianBlur(light, (0, 0), 0.7) + noise, 0, 255).astype(np.uint8)


def draw_lines(height: int = 3000, width: int = 4000) -> np.ndarray:
    """Dark lines two pixels wide on a light ground, at all phases of the grid."""
    picture = np.full((height, width, 3), GROUND, np.uint8)
    for top in range(LINE_EVERY_PX, height - LINE_EVERY_PX, LINE_EVERY_PX):
        picture[top : top + 2] = LINE
    return picture


def save(path: Path, picture: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(simplejpeg.encode_jpeg(picture, quality=92, colorspace="RGB", colorsubsampling="420"))
    return path


def decoders(px: int, plain: ImageCache, packed: ImageCache) -> dict[str, tuple[str, Callable[[Path], Any]]]:
    """Name -> what it does to pixels, and the way itself: from a path to an image of px x px."""
    size, preprocess = (px, px), Preprocess((px, px))

    def area(array: np.ndarray) -> np.ndarray:
        return cv2.resize(array, size, interpolation=cv2.INTER_AREA)

    def triangle(image: torch.Tensor) -> torch.Tensor:
        return functional.resize(image, list(size), antialias=True)

    def pillow(path: Path, draft: bool) -> Image.Image:
        image = Image.open(path)
        if draft:
            image.draft("RGB", size)
        return image.resize(size, Image.Resampling.BOX)

    def opencv(path: Path, flag: int) -> np.ndarray:
        return area(cv2.imread(str(path), flag))

    def strict(path: Path, **scaling: int) -> np.ndarray:
        return simplejpeg.decode_jpeg(path.read_bytes(), "RGB", strict=True, **scaling)

    return {
        "Pillow": (BOX, lambda path: pillow(path, draft=False)),
        "opencv": (AREA, lambda path: opencv(path, cv2.IMREAD_COLOR)),
        "simplejpeg + opencv": (AREA, lambda path: area(strict(path))),
        "hiresvis": (f"{AREA}; header, EXIF, checks", lambda path: load_image(path, preprocess, max_pixels=MAX_PIXELS)),
        "torchvision": (TRIANGLE, lambda path: triangle(decode_jpeg(read_file(str(path))))),
        "simplejpeg + torchvision": (TRIANGLE, lambda path: triangle(torch.from_numpy(strict(path)).permute(2, 0, 1))),
        "Pillow, draft": (DRAFT + BOX, lambda path: pillow(path, draft=True)),
        "opencv, reduced": (DRAFT + AREA, lambda path: opencv(path, cv2.IMREAD_REDUCED_COLOR_2)),
        "simplejpeg, scaled": (DRAFT + AREA, lambda path: area(strict(path, min_height=px, min_width=px, min_factor=2))),
        "hiresvis, copy": ("read back", lambda path: plain.load(path, preprocess, max_pixels=MAX_PIXELS)),
        "hiresvis, packed copy": ("read back", lambda path: packed.load(path, preprocess, max_pixels=MAX_PIXELS)),
    }


def as_array(image: Any) -> np.ndarray:
    """(h, w, 3) of any library's image."""
    array = np.asarray(image)
    return array.transpose(1, 2, 0) if array.shape[0] == 3 else array


def detail(image: Any) -> float:
    """Mean over the lines of the contrast that is left, in per cent."""
    profile = as_array(image)[..., 1].astype(float).mean(axis=1)
    scale = 3000 / len(profile)
    tops = np.arange(LINE_EVERY_PX, 3000 - LINE_EVERY_PX, LINE_EVERY_PX)
    near = [profile[int(top / scale) - 2 : int(top / scale) + 4].min() for top in tops]
    return 100 * float(GROUND - np.mean(near)) / (GROUND - LINE)


def bench_decoders(photos: list[Path], lines: Path, folder: Path, px: int, repeats: int) -> list[Row]:
    ways = decoders(px, ImageCache(folder / "plain", 2**40), ImageCache(folder / "packed", 2**40, packed=True))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for path in photos:
            for name, (_, run) in ways.items():
                began = time.thread_time()
                run(path)
                if repeat:  # the first round warms up, and fills the cache
                    seconds[name].append(time.thread_time() - began)
    return [Row(name, how, 1 / statistics.median(seconds[name]), detail(run(lines))) for name, (how, run) in ways.items()]


def bench_loaders(photos: list[Path], folder: Path, px: int, workers: int, repeats: int) -> list[Row]:
    for number, path in enumerate(photos * COPIES):
        place, data = folder / "set" / f"class{number % 2}" / f"{number}.jpg", path.read_bytes()
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data[:2] + b"\xff\xfe\x00\x06%04d" % number + data[2:])  # a comment makes each file another one
    samples = [Sample(path, 0, str(path)) for path in sorted((folder / "set").rglob("*.jpg"))]
    pipeline = Pipeline(Preprocess((px, px)), make_augment("standard", image_size=(px, px)))
    cache = ImageCache(folder / "read", 2**40)

    def ours(cache: ImageCache | None) -> TrainLoader:
        return TrainLoader(
            samples, pipeline, max_pixels=MAX_PIXELS, batch=BATCH, micro_batch=BATCH, seed=0, workers=workers, cache=cache
        )  # fmt: skip

    dataset = create_dataset("", root=str(folder / "set"), is_training=True)
    timm = create_loader(
        dataset, (3, px, px), BATCH, is_training=True, num_workers=workers, device=torch.device("cpu"), persistent_workers=True
    ).loader  # what the workers make; its wrapper normalises
    written = folder / "written"
    loaders: dict[str, Any] = {
        "timm": timm,
        "hiresvis": ours(None),
        "hiresvis, copies being written": ours(ImageCache(written, 2**40)),
        "hiresvis, copies read": ours(cache),
    }
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in loaders}
    for repeat in range(repeats + 1):
        shutil.rmtree(written, ignore_errors=True)
        for name, loader in loaders.items():
            if isinstance(loader, TrainLoader):
                loader.set_epoch(repeat)
            began, cpu_began, images = time.perf_counter(), children_seconds(), 0
            for item in loader:
                images += len(item.images if isinstance(loader, TrainLoader) else item[0])
            if repeat:  # the first round starts the workers, and fills the cache
                rates[name].append((images / (time.perf_counter() - began), images / (children_seconds() - cpu_began)))
    for loader in loaders.values():
        if isinstance(loader, TrainLoader):
            loader.close()
    how = {
        "timm": "PIL: random resized crop, flip, colour jitter",
        "hiresvis": "whole image, turns, mild affine map, brightness and contrast",
    }
    medians = {name: [statistics.median(values) for values in zip(*found, strict=True)] for name, found in rates.items()}
    return [Row(name, how.get(name, ""), clock, per_cpu_second=cpu) for name, (clock, cpu) in medians.items()]


def children_seconds() -> float:
    """CPU time of the processes that this one has started and not yet ended."""
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(time.user + time.system for time in times)


def ratios(decoded: Mapping[str, Row], loaded: Mapping[str, Row]) -> dict[str, float]:
    """What the tables are for."""
    rate = {name: row.images_per_second for name, row in decoded.items()}
    best = {
        filter_: max(row.images_per_second for name, row in decoded.items() if row.how == filter_ and not name.startswith("hiresvis"))
        for filter_ in (AREA, TRIANGLE)
    }
    epoch = {name: row.images_per_second for name, row in loaded.items()}
    cpu = {name: row.per_cpu_second or 0.0 for name, row in loaded.items()}
    return {
        "loader over timm's": epoch["hiresvis"] / epoch["timm"],
        "loader over timm's, by CPU time": cpu["hiresvis"] / cpu["timm"],
        "first epoch with copies over one without": epoch["hiresvis, copies being written"] / epoch["hiresvis"],
        "first epoch with copies over one without, by CPU time": cpu["hiresvis, copies being written"] / cpu["hiresvis"],
        "epoch from copies over one that decodes": epoch["hiresvis, copies read"] / epoch["hiresvis"],
        "one image over the best that averages areas": rate["hiresvis"] / best[AREA],
        "one image over the best single library": rate["hiresvis"] / max(rate["Pillow"], rate["opencv"], rate["torchvision"]),
        "one image over the best pair, which antialiases by a triangle": rate["hiresvis"] / best[TRIANGLE],
        "copy over decoding": rate["hiresvis, copy"] / rate["hiresvis"],
        "packed copy over decoding": rate["hiresvis, packed copy"] / rate["hiresvis"],
    }


def table(rows: list[Row]) -> str:
    last = "detail" if rows[0].detail_percent is not None else "images per CPU second"
    lines = [f"| | images/s | {last} | what it does |", "|---|---|---|---|"]
    for row in rows:
        value = f"{row.per_cpu_second:.1f}" if row.detail_percent is None else f"{row.detail_percent:.0f}%"
        lines.append(f"| {row.name} | {row.images_per_second:.1f} | {value} | {row.how} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--photos", type=Path, help="a folder of JPEGs to take instead of drawn ones")
    parser.add_argument("--num", type=int, default=6, help="files")
    parser.add_argument("--px", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench_data") as made:
        folder = Path(made)
        photos = [save(folder / "photos" / f"{seed}.jpg", draw_photo(seed)) for seed in range(0 if options.photos else options.num)]
        if options.photos:
            found = sorted(path for path in options.photos.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))[: options.num]
            photos = [Path(shutil.copy(path, folder / f"{number}.jpg")) for number, path in enumerate(found)]
        size = statistics.mean(path.stat().st_size for path in photos)
        lines = save(folder / "lines" / "lines.jpg", draw_lines())
        decoded = bench_decoders(photos, lines, folder, options.px, options.repeats)
        loaded = bench_loaders(photos, folder, options.px, options.workers, options.repeats)
    print(f"{len(photos)} files of {size / 1e6:.1f} MB to {options.px} px, {cpu_name()}\n\nOne thread:\n{table(decoded)}\n")
    print(f"{options.workers} worker processes, batches of {BATCH}:\n{table(loaded)}\n")
    found_ratios = ratios({row.name: row for row in decoded}, {row.name: row for row in loaded})
    for name, ratio in found_ratios.items():
        print(f"{name}: {ratio:.2f}")
    if options.json:
        rows = {"decoders": [asdict(row) for row in decoded], "loaders": [asdict(row) for row in loaded]}
        options.json.write_text(json.dumps({"cpu": cpu_name(), "file_bytes": size, **rows, "ratios": found_ratios}, indent=1))


if __name__ == "__main__":
    main()
