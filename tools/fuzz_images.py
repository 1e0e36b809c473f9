"""Damage image files in many ways and count what the package makes of them; a fault ends with exit code 1.

python tools/fuzz_images.py --count 2000
python tools/fuzz_images.py --count 300 --only avif,heic,jp2     # originals with one of these in their names
python tools/fuzz_images.py --case 117 --keep /tmp/damaged    # one file again, kept for a look

Real encoders make the originals in every format that is read. Case N of a seed damages one of them (see `damage`), and a child process
does what training does: header, then pixels (all, reduced, or a region), under a limit of memory and of time. Counted are:

    right      the pixels of the undamaged file
    refused    a DataError with the path
    other      other pixels of the stated size, none of them suspicious: damage that nothing in the file shows
    unseen     an image that is blank or ends blank because pixels without a checksum were overwritten in place (BMP, JPEG, WebP, TIFF,
               JPEG 2000, AVIF, HEIC), or because fax codes were damaged, which every decoder at hand forgives

and the faults: crash, hang, memory (above what max_pixels allows, or MemoryError), exception (any but DataError, or one without the
path), noise (output past Python, or a warning), untrue (probe and decode disagree), blank (an image that is one colour, or whose upper or
lower part is, where the original's is not; or any image but the right one of a file that was only cut).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import selectors
import struct
import subprocess
import sys
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pillow_heif
import tifffile
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hiresvis.data.decode import decode, probe
from hiresvis.data.folders import IMAGE_EXTENSIONS
from hiresvis.data.regions import Region
from hiresvis.errors import DataError

FAULTS = ("crash", "hang", "memory", "exception", "noise", "untrue", "blank")
HEIGHT, WIDTH = 120, 152
MAX_PIXELS = 1_000_000
MEMORY_BYTES = 48 * MAX_PIXELS  # what an image within MAX_PIXELS may take: four 16-bit samples, stored, blended, turned, and room
ADDRESS_BYTES = 2**29  # beyond it an allocation fails, so that a lie about a size costs the machine nothing
SECONDS = 10.0
DRAFT = (HEIGHT // 4, WIDTH // 4)
REGION = Region(17, 30, 70, 75)  # within the picture, turned or not, across the borders of tiles
BLANK_SHARE = 0.1  # of the rows
FAX = "group4.tif"


@dataclass(frozen=True)
class Case:
    """One damaged file."""

    original: str
    damage: tuple[str, ...]
    suffix: str
    data: bytes
    draft: tuple[int, int] | None
    region: Region | None


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    number: int
    kind: str
    detail: str
    case: str


# --- originals


@cache
def originals() -> dict[str, bytes]:
    """Name with its extension -> file, all of the same picture or its grey form."""
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    noise = np.random.default_rng(0).integers(-9, 10, (HEIGHT, WIDTH, 3))
    waves = np.stack([128 + 100 * np.sin(rows / (7 + k) + columns / (11 - k)) for k in range(3)], axis=2)
    rgb = np.clip(waves + noise, 0, 255).astype(np.uint8)
    grey, deep = rgb[..., 0].copy(), rgb.astype(np.uint16) * 257 + np.uint16(3)
    alpha = np.clip(columns * 2, 0, 255).astype(np.uint8)
    image, rgba = Image.fromarray(rgb), Image.fromarray(np.dstack([rgb, alpha]))
    exif = Image.Exif()
    exif[274] = 6
    palette = image.quantize(64)
    made = {
        "base.jpg": _saved(image, "JPEG", quality=90),
        "444.jpeg": _saved(image, "JPEG", quality=95, subsampling=0, exif=exif),
        "progressive.jpe": _saved(image, "JPEG", progressive=True),
        "progressive-444.jfif": _saved(image, "JPEG", progressive=True, subsampling=0),
        "grey.jpg": _saved(Image.fromarray(grey), "JPEG"),
        "grey-progressive.jpg": _saved(Image.fromarray(grey), "JPEG", progressive=True),
        "restart.jpg": _saved(image, "JPEG", restart_marker_rows=1),
        "cmyk.jpg": _saved(image.convert("CMYK"), "JPEG"),
        "rgb.png": _saved(image, "PNG", exif=exif),
        "grey.png": _saved(Image.fromarray(grey), "PNG"),
        "rgba.png": _saved(rgba, "PNG"),
        "la.png": _saved(rgba.convert("LA"), "PNG"),
        "palette.png": _saved(palette, "PNG", transparency=3),
        "one-bit.png": _saved(image.convert("1"), "PNG"),
        "rgb16.png": imagecodecs.png_encode(deep),
        "grey16.png": imagecodecs.png_encode(deep[..., 0].copy()),
        "interlaced.png": interlaced_png(rgb),
        "lossy.webp": _saved(image, "WEBP", quality=80, exif=exif),
        "lossless.webp": _saved(image, "WEBP", lossless=True),
        "alpha.webp": _saved(rgba, "WEBP", quality=80),
        "rgb.bmp": _saved(image, "BMP"),
        "palette.bmp": _saved(palette, "BMP"),
        "grey.bmp": _saved(Image.fromarray(grey), "BMP"),
        "one-bit.bmp": _saved(image.convert("1"), "BMP"),
        "rgb.tif": _tiff(rgb),
        "grey16.tif": _tiff(deep[..., 0]),
        "rgb16-lzw.tiff": _tiff(deep, compression="lzw", predictor=True),
        "float-zlib.tif": _tiff(waves[..., 0].astype(np.float32), compression="zlib", predictor=True),
        "big-endian.tif": _tiff(deep, byteorder=">"),
        "zlib.tif": _tiff(rgb, compression="zlib", rowsperstrip=16),
        "tiled-zlib.tif": _tiff(rgb, tile=(64, 64), compression="zlib"),
        "tiled-jpeg.tif": _tiff(rgb, tile=(64, 64), compression="jpeg", photometric="rgb"),
        "planar.tif": _tiff(rgb.transpose(2, 0, 1).copy(), planarconfig="separate"),
        "rgba.tif": _tiff(np.dstack([rgb, alpha]), extrasamples=["unassalpha"], compression="packbits"),
        "pages.tif": _tiff(rgb, rgb[::2, ::2].copy(), compression="lzw"),
        "bigtiff.tif": _tiff(rgb, bigtiff=True),
        "cmyk.tif": _saved(image.convert("CMYK"), "TIFF"),
        "palette.tif": _saved(palette, "TIFF"),
        "tiled-lzw.svs": _svs(rgb, compression="lzw"),
        "tiled-jpeg.svs": _svs(rgb, compression="jpeg"),
        "rgb.jp2": _saved(image, "JPEG2000"),
        "lossy.jp2": _saved(rgba, "JPEG2000", quality_mode="rates", quality_layers=[12], irreversible=True),
        "grey16.j2k": imagecodecs.jpeg2k_encode(deep[..., 0].copy(), codecformat="j2k", reversible=True),
        "rgb.avif": _saved(image, "AVIF", quality=80, exif=exif),
        "rgb10.avif": imagecodecs.avif_encode(deep >> 6, bitspersample=10, level=80),
        "rgb.heic": _heic("RGB", rgb, exif.tobytes()),
        "rgb10.heif": _heic("RGB;16", deep),
        FAX: _saved(image.convert("1"), "TIFF", compression="group4"),
    }
    assert {Path(name).suffix for name in made} == IMAGE_EXTENSIONS, "an extension that is read has no original"
    return made


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _heic(mode: str, array: np.ndarray, exif: bytes | None = None) -> bytes:
    file = io.BytesIO()
    picture = pillow_heif.from_bytes(mode=mode, size=(WIDTH, HEIGHT), data=array.tobytes())
    picture.save(file, quality=80, **({} if exif is None else {"exif": exif}))
    return file.getvalue()


def _svs(rgb: np.ndarray, **options: Any) -> bytes:
    """As Aperio's scanners write them: the slide, a thumbnail, a lower level."""
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as writer:
        writer.write(rgb, tile=(64, 64), photometric="rgb", description="Aperio Image Library v11", metadata=None, **options)
        writer.write(rgb[::8, ::8].copy(), photometric="rgb", metadata=None)
        small = rgb.reshape(HEIGHT // 2, 2, WIDTH // 2, 2, 3).mean(axis=(1, 3)).astype(np.uint8)
        writer.write(small, tile=(64, 64), photometric="rgb", metadata=None, **options)
    return file.getvalue()


def _tiff(*pages: np.ndarray, byteorder: Any = "<", bigtiff: bool = False, **options: Any) -> bytes:
    file = io.BytesIO()
    with tifffile.TiffWriter(file, byteorder=byteorder, bigtiff=bigtiff) as writer:
        for array in pages:
            options.setdefault("photometric", "rgb" if array.ndim == 3 else "minisblack")
            writer.write(array, **options)
    return file.getvalue()


def png_chunk(kind: bytes, body: bytes) -> bytes:
    """Length, kind, body and checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def interlaced_png(rgb: np.ndarray) -> bytes:
    """Adam7, which no encoder at hand writes: seven small pictures, unfiltered."""
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
    lines = [b"\0" + row.tobytes() for top, left, down, right in passes for row in rgb[top::down, left::right]]
    head = struct.pack(">IIBBBBB", rgb.shape[1], rgb.shape[0], 8, 2, 0, 0, 1)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", zlib.compress(b"".join(lines))) + png_chunk(b"IEND", b"")


# --- damage


@dataclass(frozen=True)
class Field:
    """A number in a file's headers."""

    name: str
    offset: int
    format: str  # of struct


def header_fields(data: bytes) -> list[Field]:
    """Sizes, depths, lengths and counts that the file states about itself."""
    if data.startswith(b"\x89PNG"):
        return list(_png_fields(data))
    if data.startswith(b"\xff\xd8"):
        return list(_jpeg_fields(data))
    if data.startswith(b"RIFF"):
        return list(_webp_fields(data))
    if data[4:8] in (b"ftyp", b"jP  "):
        return list(_box_fields(data, 0, len(data)))
    if data.startswith(_STREAM):
        return list(_stream_fields(0))
    if data.startswith(b"BM"):
        names = {2: "file", 10: "offset", 14: "header", 18: "width", 22: "height", 30: "compression", 34: "bytes", 46: "colours"}
        return [Field(name, offset, "<I") for offset, name in names.items()] + [Field("planes", 26, "<H"), Field("bits", 28, "<H")]
    return list(_tiff_fields(data))


def _png_fields(data: bytes) -> Iterator[Field]:
    yield from (Field("width", 16, ">I"), Field("height", 20, ">I"))
    yield from (Field(name, 24 + k, ">B") for k, name in enumerate(("bits", "colour", "deflate", "filter", "interlace")))
    position = 8
    while position + 8 <= len(data):
        yield Field("length of " + data[position + 4 : position + 8].decode(), position, ">I")
        position += 12 + int.from_bytes(data[position : position + 4], "big")


def _jpeg_fields(data: bytes) -> Iterator[Field]:
    position = 2
    while data[position] == 0xFF:
        marker = data[position + 1]
        yield Field(f"length of {marker:02x}", position + 2, ">H")
        if marker in (0xC0, 0xC2):
            yield from (Field("height", position + 5, ">H"), Field("width", position + 7, ">H"), Field("bits", position + 4, ">B"))
            yield from (Field("components", position + 9, ">B"), Field("sampling", position + 11, ">B"))
        if marker == 0xDD:
            yield Field("restart interval", position + 4, ">H")
        if marker == 0xDA:
            return
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")


def _webp_fields(data: bytes) -> Iterator[Field]:
    yield Field("file", 4, "<I")
    position = 12
    while position + 8 <= len(data):
        kind, size = data[position : position + 4], int.from_bytes(data[position + 4 : position + 8], "little")
        yield Field(f"length of {kind.decode()}", position + 4, "<I")
        if kind == b"VP8X":
            yield from (
                Field("flags", position + 8, "<B"),
                Field("canvas width", position + 12, "<H"),
                Field("canvas height", position + 15, "<H"),
            )
        elif kind == b"VP8 ":
            yield from (Field("width", position + 14, "<H"), Field("height", position + 16, "<H"))
        elif kind == b"VP8L":
            yield Field("width, height", position + 9, "<I")
        position += 8 + size + size % 2


_STREAM = b"\xff\x4f\xff\x51"
_HOLDERS = {b"meta": 4, b"iprp": 0, b"ipco": 0, b"jp2h": 0}  # boxes of boxes, and what stands before those


def _box_fields(data: bytes, position: int, end: int) -> Iterator[Field]:
    while position + 8 <= end:
        size, kind = int.from_bytes(data[position : position + 4], "big"), data[position + 4 : position + 8]
        name = kind.decode()
        yield Field(f"length of {name}", position, ">I")
        if kind in _HOLDERS:
            yield from _box_fields(data, position + 8 + _HOLDERS[kind], position + size)
        elif kind in (b"ispe", b"ihdr"):
            start = position + (12 if kind == b"ispe" else 8)
            yield from [Field(f"first size of {name}", start, ">I"), Field(f"second size of {name}", start + 4, ">I")] * 4
        elif kind == b"jp2c":
            yield from _stream_fields(position + 8)
        elif kind in (b"av1C", b"hvcC", b"iloc", b"pixi", b"colr", b"irot"):
            yield from (Field(f"byte {k} of {name}", position + 8 + k, ">B") for k in range(min(24, size - 8)))
        position += size or len(data)


def _stream_fields(start: int) -> Iterator[Field]:
    names = ("width", "height", "left", "top", "tile width", "tile height", "tile left", "tile top")
    yield from (Field(name, start + 8 + 4 * k, ">I") for k, name in enumerate(names))
    yield from (Field("components", start + 40, ">H"), Field("bits", start + 42, ">B"), Field("step", start + 43, ">B"))


def _tiff_fields(data: bytes) -> Iterator[Field]:
    order = "<" if data[:2] == b"II" else ">"
    big = data[2:4] in (b"+\0", b"\0+")
    word, count_format, entry, first = ("Q", "Q", 20, 8) if big else ("I", "H", 12, 4)
    yield Field("first directory", first, order + word)
    (position,) = struct.unpack_from(order + word, data, first)
    while position:
        (entries,) = struct.unpack_from(order + count_format, data, position)
        yield Field("count of entries", position, order + count_format)
        position += struct.calcsize(order + count_format)
        for _ in range(entries):
            tag, kind = struct.unpack_from(order + "HH", data, position)
            value = order + ("H" if kind == 3 else word)
            yield from (Field(f"type of {tag}", position + 2, order + "H"), Field(f"count of {tag}", position + 4, order + word))
            yield from [Field(f"value of {tag}", position + (12 if big else 8), value)] * 4  # where the lies are that matter
            position += entry
        yield Field("next directory", position, order + word)
        (position,) = struct.unpack_from(order + word, data, position)


def _flip(data: bytes, rng: np.random.Generator) -> tuple[bytes, str]:
    out, bits = bytearray(data), int(rng.integers(1, 17))
    reach = len(data) if rng.random() < 0.7 else min(len(data), 256)
    for position in rng.integers(0, reach, bits):
        out[position] ^= 1 << int(rng.integers(8))
    return bytes(out), f"{bits} bits flipped in the first {reach} bytes"


def _cut(data: bytes, rng: np.random.Generator) -> tuple[bytes, str]:
    left = int(rng.integers(1, len(data))) if rng.random() < 0.7 else max(1, len(data) - int(rng.integers(1, 64)))
    return data[:left], f"cut to {left} of {len(data)} bytes"


def _zeros(data: bytes, rng: np.random.Generator) -> tuple[bytes, str]:
    start = int(rng.integers(len(data)))
    end = len(data) if rng.random() < 0.4 else min(len(data), start + int(2 ** rng.uniform(2, 14)))
    return data[:start] + bytes(end - start) + data[end:], f"zeros from {start} to {end} of {len(data)}"


def _lie(data: bytes, rng: np.random.Generator) -> tuple[bytes, str]:
    try:
        fields = header_fields(data)
    except (struct.error, IndexError, UnicodeDecodeError):  # damaged before
        fields = []
    if not fields:
        return _flip(data, rng)
    field = fields[rng.integers(len(fields))]
    top = 256 ** struct.calcsize(field.format) - 1
    (true,) = struct.unpack_from(field.format, data, field.offset)
    values = (0, 1, 2, 3, true + 1, true - 1, true * 2, true // 2, true + 8, true * 100, 30_000, 65_535, 10**6, top // 2 + 1, top - 1, top)
    value = int(values[rng.integers(len(values))] if rng.random() < 0.9 else rng.integers(top, endpoint=True, dtype=np.uint64)) & top
    out = bytearray(data)
    struct.pack_into(field.format, out, field.offset, value)
    if data.startswith(b"\x89PNG") and field.offset in range(16, 29) and rng.random() < 0.8:  # a liar knows how to add up
        out[29:33] = struct.pack(">I", zlib.crc32(out[12:29]))
    return bytes(out), f"{field.name}: {value} for {true}"


def _join(data: bytes, rng: np.random.Generator) -> tuple[bytes, str]:
    names = sorted(originals())
    name = names[rng.integers(len(names))]
    other = originals()[name]
    if rng.random() < 0.4:
        return data + other, f"{name} behind it"
    share = rng.random()
    return data[: int(share * len(data))] + other[int(share * len(other)) :], f"from {share:.0%} on the bytes of {name}"


def _keep(data: bytes, rng: np.random.Generator) -> tuple[bytes, str]:
    return data, "nothing"


DAMAGES: tuple[tuple[float, Callable[[bytes, np.random.Generator], tuple[bytes, str]]], ...] = (
    (0.2, _flip), (0.2, _cut), (0.15, _zeros), (0.32, _lie), (0.1, _join), (0.03, _keep),
)  # fmt: skip


def make_case(seed: int, number: int, only: str = "") -> Case:
    """The same file for the same two numbers (and the same choice of originals), whatever other cases are made."""
    rng = np.random.default_rng([seed, number])
    names = [name for name in sorted(originals()) if any(part in name for part in only.split(","))]
    name = names[number % len(names)]
    data, said = originals()[name], []
    for _ in range(1 + (rng.random() < 0.2)):
        change = DAMAGES[rng.choice(len(DAMAGES), p=[share for share, _ in DAMAGES])][1]
        data, what = change(data, rng)
        said.append(what)
    suffixes = sorted(IMAGE_EXTENSIONS)
    suffix = Path(name).suffix if rng.random() < 0.8 else suffixes[rng.integers(len(suffixes))]
    draft = DRAFT if rng.random() < 0.3 else None
    region = REGION if draft is None and rng.random() < 0.3 else None
    return Case(name, tuple(said), suffix, data, draft, region)


# --- the child: one decode under limits


@cache
def _reference(name: str, draft: tuple[int, int] | None, region: Region | None) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(originals()[name])
        return decode(path, max_pixels=MAX_PIXELS, draft_px=draft, region=region)


def blank_rows(array: np.ndarray) -> int:
    """How many rows from the top or from the bottom are of one colour together."""
    longest = 0
    for rows in (array, array[::-1]):
        differs = (rows != rows[0, 0]).any(axis=(1, 2))
        longest = max(longest, int(differs.argmax()) if differs.any() else len(rows))
    return longest


def judge(case: Case, path: Path) -> tuple[str, str]:
    """Kind and detail of what the package makes of the file, in this process."""
    reference = _reference(case.original, case.draft, case.region)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            header = probe(path, MAX_PIXELS)
            array = decode(path, max_pixels=MAX_PIXELS, draft_px=case.draft, region=case.region)
        except DataError as error:
            (problem, *more) = error.problems
            named = problem.place == str(path) and len(problem.message) > 5 and not more
            return ("refused", problem.message) if named else ("exception", f"a DataError without the path: {error}")
        except MemoryError as error:
            return "memory", f"MemoryError {error}"
        except Warning as error:
            return "noise", f"{type(error).__name__}: {error}"
        except Exception as error:
            return "exception", f"{type(error).__name__}: {error}"
    stated = header.shown_size if case.region is None else case.region.size
    sizes = array.shape[:2] if case.draft is None else stated
    if array.ndim != 3 or (*stated, header.channels) != (*sizes, array.shape[2]):
        return "untrue", f"the header says {header}, the pixels are {array.shape}"
    if array.shape == reference.shape and array.dtype == reference.dtype and np.array_equal(array, reference):
        return "right", ""
    rows = blank_rows(array)
    if rows >= max(8, BLANK_SHARE * len(array)):
        in_place = any("flipped" in what or "zeros" in what for what in case.damage)
        checked = case.original.endswith(".png") or "zlib" in case.original
        forgiven = case.original == FAX or (in_place and not checked)
        return ("unseen" if forgiven else "blank"), f"{rows} of {len(array)} rows are one colour"
    if all(what.startswith("cut") for what in case.damage):
        return "blank", f"an image of shape {array.shape} from a cut file"
    return "other", f"{array.shape} {array.dtype}"


def _memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def serve(seed: int, only: str, folder: Path) -> None:
    """Reads numbers of cases, answers with kind and detail; what is written past Python goes to a file that is looked at."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with (folder / f"{os.getpid()}.noise").open("wb") as spill:
        os.dup2(spill.fileno(), 1)
        os.dup2(spill.fileno(), 2)
        for name in originals():
            for draft, region in ((None, None), (DRAFT, None), (None, REGION)):
                _reference(name, draft, region)
        heard = spill.seek(0, io.SEEK_END)
        limit = _memory("VmSize") + ADDRESS_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        answers.write("ready\n")
        for line in sys.stdin:
            case = make_case(seed, int(line), only)
            path = folder / f"{int(line)}{case.suffix}"
            path.write_bytes(case.data)
            Path("/proc/self/clear_refs").write_text("5")
            before = _memory("VmRSS")
            kind, detail = judge(case, path)
            taken = _memory("VmHWM") - before
            path.unlink()
            if taken > MEMORY_BYTES:
                kind, detail = "memory", f"{taken >> 20} MiB taken, then {kind}: {detail}"
            sys.stdout.flush()
            if (size := spill.seek(0, io.SEEK_END)) > heard:
                heard = size
                kind, detail = ("noise", f"{kind}: {detail}") if kind not in FAULTS else (kind, detail)
            answers.write(json.dumps([kind, detail]) + "\n")


# --- the parent


class _Child:
    """A process that serves; a new one takes its place when it dies or hangs."""

    def __init__(self, seed: int, only: str, folder: Path) -> None:
        command = [sys.executable, __file__, "--serve", str(folder), "--seed", str(seed), "--only", only]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert self.process.stdout is not None
        self._ready = selectors.DefaultSelector()
        self._ready.register(self.process.stdout, selectors.EVENT_READ)
        if self._line(60) != b"ready\n":
            raise RuntimeError("the decoding process did not start")

    def _line(self, seconds: float) -> bytes | None:
        assert self.process.stdout is not None
        return self.process.stdout.readline() if self._ready.select(seconds) else None

    def ask(self, number: int) -> tuple[str, str]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n".encode())
        self.process.stdin.flush()
        line = self._line(SECONDS)
        if line is None:
            return "hang", f"no answer in {SECONDS:.0f} s"
        if not line:
            return "crash", f"ended with {self.process.wait()}"
        kind, detail = json.loads(line)
        return kind, detail

    def close(self) -> None:
        self.process.kill()
        with self.process:
            self._ready.close()


def fuzz(seed: int, numbers: range, only: str = "") -> Iterator[Outcome]:
    """What became of the cases with these numbers, one after another."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        child = _Child(seed, only, Path(name))
        try:
            for number in numbers:
                kind, detail = child.ask(number)
                if kind in ("crash", "hang"):
                    child.close()
                    child = _Child(seed, only, Path(name))
                case = make_case(seed, number, only)
                read = " (draft)" if case.draft else " (region)" if case.region else ""
                text = f"{case.original} as {case.suffix}{read}: {'; '.join(case.damage)}"
                yield Outcome(number, kind, detail, text)
        finally:
            child.close()


def main() -> int:
    """Read the command line, decode, count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, metavar="N", help="damaged files (default 2000)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first case (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="with the case's number, decides every byte (default 0)")
    parser.add_argument("--case", type=int, default=None, metavar="N", help="this case alone")
    parser.add_argument("--keep", type=Path, default=None, metavar="FOLDER", help="with --case: write the damaged file there")
    parser.add_argument("--only", default="", metavar="NAMES", help="originals whose names hold one of these, as in jp2,avif")
    parser.add_argument("--list", default="", metavar="KINDS", help="also list the cases of these kinds, as in other,unseen")
    parser.add_argument("--serve", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.seed, args.only, args.serve)
        return 0
    numbers = range(args.first, args.first + args.count) if args.case is None else range(args.case, args.case + 1)
    if args.keep is not None and args.case is not None:
        case = make_case(args.seed, args.case, args.only)
        args.keep.mkdir(parents=True, exist_ok=True)
        (args.keep / f"{args.case}{case.suffix}").write_bytes(case.data)
    listed = {*FAULTS, *args.list.split(",")}
    counts: Counter[str] = Counter()
    for outcome in fuzz(args.seed, numbers, args.only):
        counts[outcome.kind] += 1
        if outcome.kind in listed or args.case is not None:
            print(f"{outcome.kind}  --seed {args.seed} --case {outcome.number}  {outcome.case}  -> {outcome.detail}", flush=True)
        if counts.total() % 500 == 0:
            print(f"{counts.total()}/{len(numbers)}", file=sys.stderr, flush=True)
    print(", ".join(f"{counts[kind]} {kind}" for kind in ("right", "refused", "other", "unseen", *FAULTS)))
    return 1 if any(counts[kind] for kind in FAULTS) else 0


if __name__ == "__main__":
    sys.exit(main())
