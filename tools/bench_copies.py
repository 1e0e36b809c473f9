"""What keeping a decoded image losslessly takes: size, time to write, time to read, by coding.

    python tools/bench_copies.py [FOLDER ...] [--px 1024] [--num 6]

Of drawn photographs (see bench_data.py) and of the images of each folder, as `load_image` gives them at --px (a file below that size is
taken as it is). Sizes are shares of the plain numbers; times are the CPU time of one thread for an image of 3 MiB, with its checksum.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import imagecodecs as codecs
import numpy as np
from bench_data import MAX_PIXELS, draw_photo

from hiresvis.data.cache import from_entry, to_entry
from hiresvis.data.contract import load_image
from hiresvis.data.decode import decode
from hiresvis.data.transforms import Preprocess, resize

REPEATS = 5
MIB_3 = 3 * 2**20
Coding = tuple[Callable[[np.ndarray], Any], Callable[[Any, tuple[int, ...]], Any]]


def of_bytes(pack: Callable[[bytes], Any], unpack: Callable[[Any], Any], *, delta: bool) -> Coding:
    """A coding of bytes, with differences to the pixel on the left or without."""

    def write(array: np.ndarray) -> Any:
        return pack((codecs.delta_encode(array, axis=1) if delta else array).tobytes())

    def read(data: Any, shape: tuple[int, ...]) -> np.ndarray:
        array = np.frombuffer(unpack(data), np.uint8).reshape(shape)
        return codecs.delta_decode(array, axis=1) if delta else array.copy()

    return write, read


def entry(packed: bool) -> Coding:
    return (
        lambda array: b"".join(to_entry(array, "", packed=packed)),
        lambda data, _: from_entry(np.frombuffer(data, np.uint8).copy(), ""),
    )


CODINGS: dict[str, Coding] = {
    "plain (kept)": entry(packed=False),
    "LZ4": of_bytes(codecs.lz4_encode, lambda data: codecs.lz4_decode(data, out=2**27), delta=False),
    "LZ4, delta": of_bytes(codecs.lz4_encode, lambda data: codecs.lz4_decode(data, out=2**27), delta=True),
    "Zstandard 1": of_bytes(lambda data: codecs.zstd_encode(data, level=1), codecs.zstd_decode, delta=False),
    "Zstandard 1, delta (kept)": entry(packed=True),
    "Zstandard 3, delta": of_bytes(lambda data: codecs.zstd_encode(data, level=3), codecs.zstd_decode, delta=True),
    "QOI": (codecs.qoi_encode, lambda data, _: codecs.qoi_decode(data)),
    "PNG 1": (lambda array: codecs.png_encode(array, level=1), lambda data, _: codecs.png_decode(data)),
    "JPEG-LS": (codecs.jpegls_encode, lambda data, _: codecs.jpegls_decode(data)),
    "JPEG XL, effort 1": (
        lambda array: codecs.jpegxl_encode(array, lossless=True, effort=1, numthreads=1),
        lambda data, _: codecs.jpegxl_decode(data, numthreads=1),
    ),
    "WebP, lossless 0": (
        lambda array: codecs.webp_encode(array, lossless=True, level=0, method=0),
        lambda data, _: codecs.webp_decode(data),
    ),
}


def pictures(folder: Path | None, px: int, num: int) -> list[np.ndarray]:
    if folder is None:
        return [resize(draw_photo(seed), px, px) for seed in range(num)]
    found = []
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".tif"))
    for path in paths[:: max(1, len(paths) // num)][:num]:
        array = decode(path, max_pixels=MAX_PIXELS)
        small = max(array.shape[:2]) < px
        found.append(array if small and array.shape[2] == 3 else load_image(path, Preprocess((px, px)), max_pixels=MAX_PIXELS))
    return found


def measure(coding: Coding, images: list[np.ndarray]) -> tuple[float, float, float]:
    """(share of the plain size, milliseconds to write 3 MiB, to read them)."""
    write, read = coding
    sizes, writes, reads = [], [], []
    for image in images:
        for _ in range(REPEATS):
            began = time.thread_time()
            data = write(image)
            wrote = time.thread_time()
            found = read(data, image.shape)
            writes.append((wrote - began) * 1e3 * MIB_3 / image.nbytes)
            reads.append((time.thread_time() - wrote) * 1e3 * MIB_3 / image.nbytes)
        assert np.array_equal(found, image)
        sizes.append(len(data))
    return sum(sizes) / sum(image.nbytes for image in images), statistics.median(writes), statistics.median(reads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*")
    parser.add_argument("--px", type=int, default=1024)
    parser.add_argument("--num", type=int, default=6)
    options = parser.parse_args()
    cv2.setNumThreads(0)
    for folder in (None, *options.folders):
        images = pictures(folder, options.px, options.num)
        print(f"\n{folder or 'drawn photographs'}, {len(images)} images\n| | size | write ms | read ms |\n|---|---|---|---|")
        for name, coding in CODINGS.items():
            size, write, read = measure(coding, images)
            print(f"| {name} | {size:.0%} | {write:.1f} | {read:.1f} |", flush=True)


if __name__ == "__main__":
    main()
