"""Traced costs kept on disk, so that planning again needs no model, no torch and no time.

An entry is found by a hash of everything that decides it: the settings, the releases of the libraries, and the sources that
trace. What cannot be read is no entry, and what cannot be written is not kept; neither is an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from hiresvis import __version__
from hiresvis.errors import EnvironmentFailed
from hiresvis.memory.budget import num_cores
from hiresvis.memory.costs import PROFILE_VERSION, MemoryProfile
from hiresvis.run.files import json_text, write_text

CACHE_FOLDER = "HIRESVIS_CACHE"
MAX_ENTRIES = 2000  # of about 100 KB
# What decides a profile besides its settings: how models are built, frozen, traced, and how storages are counted.
SOURCES = (
    "backbone/build.py",
    "backbone/chain.py",
    "backbone/decoder.py",
    "backbone/flops.py",
    "backbone/input_size.py",
    "backbone/lora.py",
    "backbone/record.py",
    "backbone/segmenter.py",
    "backbone/slices.py",
    "backbone/trace.py",
    "backbone/ways.py",
    "assemble.py",
    "costing.py",
    "device.py",
    "memory/costs.py",
    "train/freezing.py",
    "train/mask_losses.py",
    "train/optim.py",
)
_LIBRARIES = ("torch", "timm")
_ENVIRONMENT = ("TIMM_FUSED_ATTN",)  # variables that change what models run

Rules = Literal["cpu", "cuda"]


def cache_folder() -> Path:
    """Where results that can be made again are kept: HIRESVIS_CACHE, or the user's cache folder."""
    given = os.environ.get(CACHE_FOLDER)
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hiresvis"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """The settings that decide a profile, as the recipe or the default gives them.

    Attributes:
        image_size: (height, width) in px.
        block: granularity of the allocator in bytes.
        raw_image_bytes: bytes of one image as the loader hands it over.
        norm: batch or frozen.
        rules: whose autocast rules are followed.
        lora_rank: of adapters; None: there are none.
        groups: what parameters are grouped by, where an optimizer that steps one by one holds what comes next to each other.
        resize: other image sizes that the model is built to run at.
        mask_loss, label_smoothing: of a model for task segment, whose loss has a part in its costs; empty and 0 for the others.
    """

    model: str
    image_size: tuple[int, int]
    in_chans: int
    num_classes: int
    precision: str
    channels_last: bool
    block: int
    raw_image_bytes: int
    optimizer: str
    clip_grad: float | None
    freeze: str | int
    adapt: str
    norm: str
    drop_path: str | float
    rules: Rules
    lora_rank: int | None = None
    ema: bool = False
    groups: str = ""
    resize: str = ""
    mask_loss: str = ""
    label_smoothing: float = 0.0

    def digest(self) -> str:
        """The entry's name: settings, releases and sources hashed."""
        text = json.dumps([asdict(self), _surroundings()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What planning asks of a model besides its profile.

    Attributes:
        stride: pixels of the image per pixel of the last feature map.
        batch_norm: whether a trained layer keeps batch statistics.
        parameters: numbers in all weights.
        process_bytes: resident size of the process that traced, weights aside; None: not measured (plans for a GPU need none).
    """

    stride: int
    batch_norm: bool
    parameters: int
    process_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A profile with its facts; or, without a profile, why there is none."""

    profile: MemoryProfile | None
    facts: Facts
    refusal: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return {
            "profile": None if self.profile is None else self.profile.to_json(),
            "facts": asdict(self.facts),
            "refusal": self.refusal,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Entry:
        """The entry that `to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: the row is not one.
        """
        profile = None if row["profile"] is None else MemoryProfile.from_json(row["profile"])
        return cls(profile, Facts(**row["facts"]), str(row["refusal"]))


@cache
def _surroundings() -> dict[str, str]:
    """Releases, sources and variables that decide profiles; none of the libraries is imported."""
    found = {name: metadata.version(name) for name in _LIBRARIES}
    variables = {name: os.environ.get(name, "") for name in _ENVIRONMENT}
    return {**found, **variables, "sources": hash_sources(SOURCES), "format": str(PROFILE_VERSION), "hiresvis": __version__}


def hash_sources(names: Sequence[str]) -> str:
    """Of files of this package, so that what older sources made is not taken for what these would make."""
    sources = hashlib.sha256()
    for name in names:
        with suppress(OSError):  # an installation without sources: its own version tells
            sources.update((Path(__file__).parent / name).read_bytes())
    return sources.hexdigest()


def path_of(key: ProfileKey) -> Path:
    """The file of an entry."""
    return cache_folder() / "profiles" / f"{key.digest()}.json"


def read(key: ProfileKey) -> Entry | None:
    """The entry, or None when there is none that can be read."""
    try:
        row = json.loads(path_of(key).read_bytes())
        entry = Entry.from_json(row)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, IndexError):
        return None
    # A hash says which file; whether it is what it should be, the content says.
    profile = entry.profile
    if profile is not None and (profile.model, profile.image_size, profile.precision) != (key.model, key.image_size, key.precision):
        return None
    return entry


def write(key: ProfileKey, entry: Entry) -> None:
    """Keeps the entry: whole under its name, or not at all. Beyond `MAX_ENTRIES` the oldest go."""
    path = path_of(key)
    with suppress(EnvironmentFailed, OSError):
        write_text(path, json_text({"key": asdict(key), **entry.to_json()}))
        _forget_oldest(path.parent)


def cpu_name() -> str:
    """This machine's processor, as times on it are kept: what decides them besides its load."""
    model = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"CPU {platform.machine()} {model}, {num_cores()} cores, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')}"


def _seconds_path(key: ProfileKey, device: str) -> Path:
    timer = hashlib.sha256()
    with suppress(OSError):
        timer.update((Path(__file__).parent / "train" / "pace.py").read_bytes())
    name = hashlib.sha256(f"{key.digest()} {device} {timer.hexdigest()}".encode())
    return cache_folder() / "seconds" / f"{name.hexdigest()[:32]}.json"


def read_seconds(key: ProfileKey, device: str) -> dict[int, float] | None:
    """What each unit's forward took on that device, as it was measured once; None where it was not.

    Times vary from run to run. Those measured first are kept, so that the same recipe finds the same plan again.
    """
    try:
        rows = json.loads(_seconds_path(key, device).read_bytes())["seconds"]
        return {int(index): float(seconds) for index, seconds in rows.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_seconds(key: ProfileKey, device: str, seconds: Mapping[int, float]) -> None:
    """Keeps times for `read_seconds`."""
    path = _seconds_path(key, device)
    with suppress(EnvironmentFailed, OSError):
        write_text(path, json_text({"key": asdict(key), "device": device, "seconds": {str(index): s for index, s in seconds.items()}}))
        _forget_oldest(path.parent)


def _forget_oldest(folder: Path) -> None:
    entries = list(folder.glob("*.json"))
    if len(entries) > MAX_ENTRIES:
        entries.sort(key=lambda path: path.stat().st_mtime)
        for path in entries[: len(entries) - MAX_ENTRIES]:
            path.unlink(missing_ok=True)


def read_or_trace(key: ProfileKey, trace: Callable[[], Entry]) -> Entry:
    """The entry on disk; else what `trace` gives, kept."""
    found = read(key)
    if found is None:
        found = trace()
        write(key, found)
    return found
