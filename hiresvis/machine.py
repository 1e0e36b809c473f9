"""What a machine has and lacks: packages, device, driver, formats, room, the hub; each a line, with what to do about it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from io import BytesIO
from pathlib import Path

import imagecodecs
import numpy as np
import tifffile
import torch

from hiresvis import __version__, profiles
from hiresvis.backbone import weights
from hiresvis.costing import card_of
from hiresvis.data.decode import decode
from hiresvis.data.workers import shared_memory_free_bytes
from hiresvis.device import capacity, pick_device, system
from hiresvis.errors import first_line
from hiresvis.memory.budget import num_cores
from hiresvis.units import GIB, format_size

_WAIT_S = 10  # for a tool of the driver
_LEAST_DISK, _LEAST_SHARED = 5 * GIB, GIB
_REQUIREMENT = re.compile(r"^([A-Za-z0-9_.-]+)[^;]*(?:;.*extra\s*==\s*['\"]([\w-]+)['\"])?")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and what to do where it is not well."""

    subject: str
    text: str
    mend: str = ""
    failed: bool = False


def findings() -> Iterator[Finding]:
    """Every line, in the order that people read them."""
    yield software()
    yield from packages()
    yield device()
    yield from driver()
    yield from formats()
    yield from folders()
    yield hub()


def software() -> Finding:
    """The program and what it runs on."""
    return Finding("hiresvis", f"{__version__}, Python {platform.python_version()}, {system()}")


def packages() -> Iterator[Finding]:
    """What the installation asks for and has, and the extras that are not there."""
    extras: dict[str, list[str]] = {}
    own: list[str] = []
    missing: list[str] = []
    for requirement in metadata.requires("hiresvis") or ():
        match = _REQUIREMENT.match(requirement)
        assert match is not None
        name, extra = match[1], match[2]
        version = _version(name)
        if extra is None:
            (own if version else missing).append(f"{name} {version}" if version else name)
        elif version is None:
            extras.setdefault(extra, []).append(name)
    yield Finding("packages", ", ".join(own))
    if missing:
        yield Finding("packages", f"missing: {', '.join(missing)}", "pip install hiresvis brings them", failed=True)
    for extra, names in sorted(extras.items()):
        if extra not in ("dev", "bench"):
            yield Finding(f"extra {extra}", f"not there: {', '.join(names)}", f"pip install 'hiresvis[{extra}]'")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def device() -> Finding:
    """What training would run on, and its memory."""
    here = pick_device()
    total, others = capacity(here)
    memory = f"{format_size(total - others)} free of {format_size(total)}"
    if here.type == "cpu":
        built = "" if torch.version.cuda is None else f"; torch was built for CUDA {torch.version.cuda} and finds no GPU"
        return Finding("device", f"CPU, {num_cores()} cores, {memory}{built}")
    card = card_of(here)
    known = "rates known" if card else "no rates known: images/s are measured, not estimated"
    half = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return Finding("device", f"{torch.cuda.get_device_name(here)}, {memory}, {half}; {known}")


def driver() -> Iterator[Finding]:
    """Where there is an NVIDIA card: whether torch can use it, and its driver what torch was built for."""
    card, known = _nvidia()
    if card is None:
        return
    built = torch.version.cuda
    if built is None:
        mend = "pip install torch torchvision --index-url https://download.pytorch.org/whl/cu126, or the build that pytorch.org names"
        yield Finding("driver", f"{card}, and this torch ({torch.__version__}) was built without CUDA", mend, failed=True)
    elif not torch.cuda.is_available():
        text = f"{card}, whose driver knows CUDA up to {known}; torch was built for {built} and finds no GPU"
        mend = "install a newer driver, or a torch built for an older CUDA (pytorch.org lists them); in a container, give it the GPU"
        yield Finding("driver", text, mend, failed=True)
    else:
        yield Finding("driver", f"{card}: CUDA up to {known}; torch was built for {built}")


def _nvidia() -> tuple[str | None, str]:
    """(the first NVIDIA card, the CUDA release that its driver knows) by the driver's own tool; None: there is none, or no tool."""
    try:
        asked = [["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], ["nvidia-smi"]]
        names, table = (subprocess.run(call, capture_output=True, text=True, timeout=_WAIT_S, check=True).stdout for call in asked)
    except (OSError, subprocess.SubprocessError):
        return None, ""
    known = re.search(r"CUDA[^:|]*Version:\s*([\d.]+)", table)
    return next(iter(names.strip().splitlines()), None), known[1] if known else "an unknown release"


def formats() -> Iterator[Finding]:
    """A picture of each kind written and read by the product's own decoders."""
    pixels = np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8)
    good, bad = [], []
    with tempfile.TemporaryDirectory(prefix="hiresvis-doctor-") as folder:
        for name, (write, get) in _WRITERS.items():
            path = Path(folder) / f"x.{name.lower()}"
            try:
                path.write_bytes(write(pixels))
                decode(path, max_pixels=10**6)
            except Exception as error:  # codecs raise what they like; a kind that cannot be read is what is looked for
                bad.append((name, first_line(error).replace(f"{path}  ", ""), get))
            else:
                good.append(name)
    yield Finding("formats", f"read and checked: {', '.join(good)}")
    for name, why, get in bad:
        yield Finding("formats", f"{name} cannot be read here: {why}", get, failed=get == _REINSTALL)


def _heic(pixels: np.ndarray) -> bytes:
    import pillow_heif

    stream = BytesIO()
    pillow_heif.from_bytes(mode="RGB", size=pixels.shape[1::-1], data=pixels.tobytes()).save(stream, quality=90)
    return stream.getvalue()


_REINSTALL = "pip install --force-reinstall imagecodecs simplejpeg tifffile pillow"
_EXTRA = "pip install 'hiresvis[heic]'"
_WRITERS: Mapping[str, tuple[Callable[[np.ndarray], bytes], str]] = {
    "JPEG": (lambda pixels: bytes(imagecodecs.jpeg_encode(pixels)), _REINSTALL),
    "PNG": (lambda pixels: bytes(imagecodecs.png_encode(pixels)), _REINSTALL),
    "WEBP": (lambda pixels: bytes(imagecodecs.webp_encode(pixels, lossless=True)), _REINSTALL),
    "TIFF": (lambda pixels: _tiff(pixels), _REINSTALL),
    "JP2": (lambda pixels: bytes(imagecodecs.jpeg2k_encode(pixels)), _REINSTALL),
    "AVIF": (lambda pixels: bytes(imagecodecs.avif_encode(pixels)), _EXTRA),
    "HEIC": (_heic, _EXTRA),
}


def _tiff(pixels: np.ndarray) -> bytes:
    stream = BytesIO()
    tifffile.imwrite(stream, pixels.astype(np.uint16) * 257, photometric="rgb", compression="zlib")
    return stream.getvalue()


def hub() -> Finding:
    """Whether timm's weights can be fetched from here."""
    why = weights.why_no_hub()
    if why is None:
        return Finding("hub", "timm's weights can be fetched (model.pretrained: true)")
    ways = "model.pretrained: a file of weights, package:NAME, or false; or copy a cache that has them (HF_HOME) and set HF_HUB_OFFLINE=1"
    return Finding("hub", f"timm's weights cannot be fetched: {why}", ways)


def folders() -> Iterator[Finding]:
    """Room on disk, and in the memory that the loader's workers share."""
    folder = profiles.cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".doctor-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        yield Finding(
            "cache", f"{folder} cannot be written ({error.strerror}): costs are traced at every plan", f"set {profiles.CACHE_FOLDER}"
        )
    else:
        files = [path for path in folder.rglob("*") if path.is_file()]
        yield Finding("cache", f"{folder}, {len(files)} files, {format_size(sum(path.stat().st_size for path in files))}")
    places = {"here": Path.cwd(), "temporary files": Path(tempfile.gettempdir()), "cache": next(p for p in folder.parents if p.exists())}
    room = {name: shutil.disk_usage(path).free for name, path in places.items()}
    small = [name for name, free in room.items() if free < _LEAST_DISK]
    mend = f"little room for {' and '.join(small)}: a run writes snapshots of some GiB (hiresvis plan says how many)" if small else ""
    yield Finding("disk", "free: " + ", ".join(f"{name} {format_size(free)}" for name, free in room.items()), mend)
    free = shared_memory_free_bytes()
    if free is not None:
        small_memory = f"below {format_size(_LEAST_SHARED)}: workers will be fewer; in a container, docker run --shm-size=8g"
        yield Finding("shared memory", f"{format_size(free)} free, for the loader's workers", small_memory if free < _LEAST_SHARED else "")
