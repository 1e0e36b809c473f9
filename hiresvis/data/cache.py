"""Decoded copies on disk: what `load_image` gave for a file is read back instead of decoded again, the same bit for bit.

    objects/ab/CONTENT-SETTINGS   one image: a header, then its pixels as they are, or packed (differences along rows, Zstandard)
    refs/cd/FILE                  a symbolic link whose target is CONTENT, the hash of the file's bytes (of a large file: FILE itself)
    used                          a count of what `objects` takes, in its length

CONTENT makes a moved or copied folder hit; FILE (a hash of path, size and times) spares reading the source to know it. SETTINGS
hashes all that decides pixels besides: preprocessing, the region, the largest size allowed, the sources that decode, the libraries.
An entry says its own name and checksum, so one that is torn, cut, flipped or under another's name is a miss, and replaced.

Processes need no lock: entries are written beside their place and renamed, links come whole or not at all (and take no block), and
`used` grows by appending. Nothing is synced: what a crash loses or tears is decoded again. A disk that is full or cannot be written
turns keeping off (`off` says why); what is there is still read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import cv2
import imagecodecs
import numpy as np

from hiresvis import __version__
from hiresvis.data.contract import load_image
from hiresvis.data.regions import Region
from hiresvis.data.sources import Sample
from hiresvis.data.transforms import Preprocess
from hiresvis.profiles import hash_sources
from hiresvis.run.files import reason
from hiresvis.units import GIB, KIB, MIB, format_size

KEPT_FREE_BYTES = 2 * GIB  # of the disk, for snapshots and for others: below it nothing more is kept
_SOURCES = tuple(  # what they say decides the pixels
    f"data/{name}.py"
    for name in ("colours", "contract", "decode", "header", "heif", "jpeg2000", "masks", "photos", "regions", "tiff", "transforms")
)
_LIBRARIES = ("imagecodecs", "numpy", "pillow", "pillow-heif", "simplejpeg", "tifffile")
_MAGIC = b"hvimage1"
# magic; kind of numbers, packed or not, channels that one stands for; height, width, channels; name; then a checksum of this and the pixels
_HEADER = struct.Struct("<8s3Bx3I16s20x")
_CHECKSUM = struct.Struct("<I")
_START_BYTES = _HEADER.size + _CHECKSUM.size  # 64: pixels stand where numbers of any kind may stand
FileState = tuple[int, int, int]  # of a file: size, times of modification and of change
_KINDS = (np.dtype(np.uint8), np.dtype(np.float32))
_UNIT_BYTES = 64 * KIB  # one byte of `used`
_HASH_BLOCK = 2**20
_HASHED_BYTES = 64 * MIB  # larger files (slides, of which parts are read) are known by path, size and times alone
_STALE_SECONDS = 3600.0  # no write takes so long: its process is gone


@dataclass(slots=True)
class ImageCache:
    """The copies in one folder. Travels to worker processes; threads may share one.

    Attributes:
        folder: made when something is kept.
        cap_bytes: the most that entries take together.
        packed: whether new entries are packed; both kinds are read.
        off: why nothing is kept any more, once that is so.
        full: whether a copy found no room under the cap: no other is made, and those that are there are read.
    """

    folder: Path
    cap_bytes: int
    packed: bool = False
    off: str = ""
    full: bool = False

    def load(self, path: Path, preprocess: Preprocess, *, max_pixels: int, region: Region | None = None) -> np.ndarray:
        """As `load_image`, whose random windows are not for here: read back where it was kept, else made and kept.

        Raises:
            DataError: with the path and the reason.
        """
        state = file_state(path)
        known = self._known(path, state)
        digest = None if known or self.off or state is None else digest_of(path)
        content = known or (digest.hex() if digest else "")
        if not content:
            return load_image(path, preprocess, max_pixels=max_pixels, region=region)
        entry = self._entry(content, preprocess, max_pixels, region)
        found = _read(entry)
        if found is None:
            array = load_image(path, preprocess, max_pixels=max_pixels, region=region)
            self._keep(path, state, entry, array)
            return array
        if known is None:
            self._refer(path, state, content)
        return found

    def fill(
        self,
        path: Path,
        preprocess: Preprocess,
        array: np.ndarray,
        state: FileState | None,
        digest: bytes | None,
        *,
        max_pixels: int,
        region: Region | None = None,
    ) -> None:
        """Keeps what `load_image` makes of an array that was read for another purpose (see `contract.reads_the_same`).

        Args:
            state, digest: of the file, as they were before it was read.
        """
        content = self._known(path, state) or (digest.hex() if digest else "")
        if content and not self.off and not self.full:
            entry = self._entry(content, preprocess, max_pixels, region)
            if not entry.exists():
                self._keep(path, state, entry, preprocess(array))

    def prepare(self, samples: Sequence[Sample], preprocess: Preprocess, *, max_pixels: int, entry_bytes: int) -> int:
        """Readies the folder for a run over these images: how many have their copy already.

        What crashed writes left goes; and, where the copies that are missing (`entry_bytes` each) would pass the cap, so do those of
        other files, the longest unused first. Another run may be at them: an open file stays whole, and one that is gone is decoded.
        """
        self.full = False
        own, present = set(), 0
        for sample in samples:
            content = self._known(sample.path, file_state(sample.path))
            if content is not None:
                with suppress(OSError):
                    os.utime(entry := self._entry(content, preprocess, max_pixels, sample.region))  # used now
                    own.add(entry)
                    present += 1
        self._make_room((len(samples) - present) * entry_bytes, own)
        return present

    def _make_room(self, need_bytes: int, own: set[Path]) -> None:
        now = time.time()
        entries: list[tuple[float, int, Path]] = []
        for path in self.folder.glob("objects/*/*"):
            with suppress(OSError):
                status = path.stat()
                if path.suffix != ".tmp":
                    entries.append((status.st_mtime, status.st_size, path))
                elif now - status.st_mtime > _STALE_SECONDS:
                    path.unlink()
        used, gone = sum(size for _, size, _ in entries), set()
        for _, size, path in sorted(entries):
            if used + need_bytes > self.cap_bytes and path not in own:
                with suppress(OSError):
                    path.unlink()
                    gone.add(path)
                    used -= size
        if gone:
            self._forget({path.name.partition("-")[0] for _, _, path in entries if path not in gone})
        if entries:
            with suppress(OSError):  # what cannot be written now is said at the first copy
                spare = self._spare(self.folder / "used")
                spare.write_bytes(b"." * -(-used // _UNIT_BYTES))
                spare.replace(self.folder / "used")

    def used_bytes(self) -> int:
        """What entries take, as counted."""
        try:
            return (self.folder / "used").stat().st_size * _UNIT_BYTES
        except OSError:
            return 0

    def _entry(self, content: str, preprocess: Preprocess, max_pixels: int, region: Region | None) -> Path:
        return self.folder / "objects" / content[:2] / f"{content}-{_settings(preprocess, max_pixels, region)}"

    def _ref(self, path: Path, state: FileState) -> Path:
        text = f"{os.path.abspath(path)}\0{state}"
        name = hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
        return self.folder / "refs" / name[:2] / name

    def _known(self, path: Path, state: FileState | None) -> str | None:
        """What the file is known to hold, without reading it."""
        if state is None:
            return None
        ref = self._ref(path, state)
        if state[0] > _HASHED_BYTES:
            return ref.name
        try:
            return os.readlink(ref)
        except OSError:
            return None

    def _refer(self, path: Path, state: FileState | None, content: str) -> None:
        ref = None if state is None else self._ref(path, state)
        if ref is not None and ref.name != content:
            with suppress(OSError):  # there already; or a system without links, where the file is read to be known
                ref.parent.mkdir(parents=True, exist_ok=True)
                ref.symlink_to(content)

    def _forget(self, left: set[str]) -> None:
        """Takes away links to contents of which nothing is kept."""
        for ref in self.folder.glob("refs/*/*"):
            with suppress(OSError):
                if os.readlink(ref) not in left:
                    ref.unlink()

    def _keep(self, path: Path, state: FileState | None, entry: Path, array: np.ndarray) -> None:
        """Writes one copy where the cap allows it, of a file that is still what it was. The first failure turns keeping off."""
        if self.off or self.full or state != file_state(path):
            return
        parts = to_entry(array, entry.name, packed=self.packed)
        size = sum(len(part) for part in parts)
        if self.used_bytes() + size > self.cap_bytes:
            self.full = True
            return
        spare = self._spare(entry)
        try:
            entry.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(entry.parent).free < KEPT_FREE_BYTES + size:
                self._turn_off(f"the disk has less than {format_size(KEPT_FREE_BYTES)} left")
                return
            with spare.open("xb", buffering=0) as file:
                for part in parts:
                    if file.write(part) != len(part):  # as a disk that has just filled up does
                        raise OSError("no space left on device")
            spare.replace(entry)
            with (self.folder / "used").open("ab", buffering=0) as count:
                count.write(b"." * -(-size // _UNIT_BYTES))
        except OSError as error:
            with suppress(OSError):
                spare.unlink()
            self._turn_off(reason(error))
            return
        self._refer(path, state, entry.name.partition("-")[0])  # a link to what was not kept would lead nowhere

    def _turn_off(self, why: str) -> None:
        self.off = f"data.cache: nothing more is kept in {self.folder} ({why}); images are decoded each time, which changes no result"

    @staticmethod
    def _spare(path: Path) -> Path:
        return path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")


def to_entry(array: np.ndarray, name: str, *, packed: bool) -> tuple[Any, ...]:
    """An entry's bytes in parts: the header, then the pixels of (h, w, c) uint8 or float32. Of equal channels one is kept."""
    repeats = array.shape[2] if _is_grey(array[::32, ::32]) and _is_grey(array) else 1  # most that are not show it at once
    stored = np.ascontiguousarray(array[..., :1] if repeats > 1 else array)
    height, width, depth = stored.shape
    values: Any = stored.view(np.uint8).reshape(height, width, depth * stored.itemsize)
    pixels: Any = values.reshape(-1).data
    if packed:
        pixels = imagecodecs.zstd_encode(imagecodecs.delta_encode(values, axis=1), level=1)
    kind, digest = _KINDS.index(array.dtype), _digest(name)
    header = _HEADER.pack(_MAGIC, kind, int(packed), repeats, height, width, depth, digest)
    return header + _CHECKSUM.pack(zlib.crc32(pixels, zlib.crc32(header))), pixels


def _is_grey(array: np.ndarray) -> bool:
    """Whether there are several channels, with the same bits."""
    bits = array.view(np.uint8 if array.dtype == np.uint8 else np.uint32)
    channels = array.shape[2]
    return channels > 1 and all(np.array_equal(bits[..., 0], bits[..., other]) for other in range(1, channels))


def from_entry(data: np.ndarray, name: str) -> np.ndarray | None:
    """The pixels of an entry's bytes (n,) uint8, or None where these are not the whole, untouched entry of that name."""
    if len(data) < _START_BYTES:
        return None
    header, pixels = data[: _HEADER.size].tobytes(), cast("Any", data[_START_BYTES:])
    magic, kind, packed, repeats, height, width, depth, digest = _HEADER.unpack(header)
    if magic != _MAGIC or digest != _digest(name):
        return None
    (checksum,) = _CHECKSUM.unpack(data[_HEADER.size : _START_BYTES].tobytes())
    if zlib.crc32(pixels, zlib.crc32(header)) != checksum:
        return None
    dtype = _KINDS[kind]
    if packed:
        shape = (height, width, depth * dtype.itemsize)
        pixels = np.frombuffer(imagecodecs.zstd_decode(pixels, out=bytearray(int(np.prod(shape)))), np.uint8)
        pixels = imagecodecs.delta_decode(pixels.reshape(shape), axis=1).reshape(-1)
    array = pixels.view(dtype).reshape(height, width, depth)
    return cv2.merge([array] * repeats) if repeats > 1 else array


def _read(entry: Path) -> np.ndarray | None:
    """What is kept under this name; None where there is nothing whole."""
    try:
        with entry.open("rb", buffering=0) as file:
            data = np.empty(os.fstat(file.fileno()).st_size, np.uint8)
            return from_entry(data, entry.name) if file.readinto(data) == len(data) else None  # type: ignore[arg-type]
    except OSError:
        return None


def digest_of(path: Path) -> bytes | None:
    """Of all bytes of a file; None for what cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while block := file.read(_HASH_BLOCK):
                digest.update(block)
    except OSError:
        return None
    return digest.digest()


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def file_state(path: Path) -> FileState | None:
    """What tells that a file is another than before. The time of change sees what a kept time of modification hides."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


@lru_cache(maxsize=1024)
def _settings(preprocess: Preprocess, max_pixels: int, region: Region | None) -> str:
    """Of everything besides the file that decides what `load_image` gives."""
    text = json.dumps(
        [asdict(preprocess), max_pixels, None if region is None else asdict(region), surroundings()], sort_keys=True, default=str
    )
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@cache
def surroundings() -> dict[str, str]:
    """Releases and sources that decide what is read of a file and what is refused: what others found of it is not known to hold."""
    found = {}
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):  # simplejpeg may be missing, and opencv has several packages
            found[name] = metadata.version(name)
    return {**found, "cv2": cv2.__version__, "sources": hash_sources(_SOURCES), "hiresvis": __version__}
