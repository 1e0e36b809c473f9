"""What feeds a run: copies of decoded images, the number of processes that read, and whether training waited for them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hiresvis.data.augment import Augment
from hiresvis.data.cache import ImageCache
from hiresvis.data.contract import Contract
from hiresvis.data.loader import EvalLoader, TrainLoader
from hiresvis.data.pace import Pace, augment_seconds, auto_cache, auto_workers, choose_packed, measure
from hiresvis.data.sources import Datasets
from hiresvis.data.workers import shared_memory_free_bytes
from hiresvis.memory.budget import num_cores
from hiresvis.profiles import cache_folder
from hiresvis.recipe import LoadedRecipe, Resolution
from hiresvis.run.events import EpochDone, Event, Notice, StepDone

WAIT_NOTED = 0.2  # share of an epoch that training waited for images
_LEAST_WAIT_MS = 1000.0  # in all: below it nothing is worth changing


@dataclass(frozen=True, slots=True)
class Supply:
    """How images come.

    Attributes:
        pace: of a few of them; None where nothing had to be decided, or none can be read.
        cache: keeps them decoded; None: off.
        all_kept: every one of them has its copy already.
    """

    pace: Pace | None = None
    cache: ImageCache | None = None
    all_kept: bool = False


def open_cache(loaded: LoadedRecipe) -> ImageCache | None:
    """The cache of a run whose recipe is resolved; what is new is packed."""
    size = loaded.recipe.data.cache
    return ImageCache(_folder(), size, packed=True) if isinstance(size, int) else None


def settle_cache(loaded: LoadedRecipe, resolution: Resolution, datasets: Datasets, contract: Contract) -> Supply:
    """Times a few images, decides on copies and their form, and takes away old ones where room is needed."""
    data = loaded.recipe.data
    if data.cache == "off" and data.workers != "auto":
        return Supply()
    preprocess = contract.preprocess()
    pace = measure(datasets.train.samples, preprocess, max_pixels=contract.max_pixels)
    samples = [sample for split in datasets.splits().values() for sample in split.samples]
    cap = data.cache
    if cap == "auto" and preprocess.in_windows:
        cap = 0
        resolution.set("data.cache", "off", f"off: with data.fit: {preprocess.fit} training sees another window each time")
    elif cap == "auto":
        cap, why = auto_cache(pace, len(samples), _free_bytes(_folder()) + ImageCache(_folder(), 0).used_bytes())
        resolution.set("data.cache", cap or "off", why)
    if pace is None or not isinstance(cap, int) or not cap:
        return Supply(pace)
    cache = ImageCache(_folder(), cap, packed=choose_packed(pace, len(samples), cap))
    entry_bytes = (pace.packed if cache.packed else pace.plain).num_bytes
    present = cache.prepare(samples, preprocess, max_pixels=contract.max_pixels, entry_bytes=entry_bytes)
    return Supply(pace, cache, present == len(samples))


def settle_workers(
    loaded: LoadedRecipe,
    resolution: Resolution,
    supply: Supply,
    *,
    augment: Augment | None,
    on_gpu: bool,
    micro_batch_bytes: int,
    images_per_second: float | None,
    reads: float = 1.0,
) -> int:
    """Loader processes: as given, or by what an image takes to come and to train on.

    Args:
        images_per_second: of the plan's probe; None: not known.
        reads: images read for each that is trained on; above 1 where micro-batches are mixed with what came before them.
    """
    workers = loaded.recipe.data.workers
    if workers != "auto":
        return workers
    pace, seconds = supply.pace, None
    if pace is not None:
        copy = pace.packed if supply.cache and supply.cache.packed else pace.plain
        seconds = reads * ((copy.seconds if supply.all_kept else pace.load_seconds) + augment_seconds(augment, pace.image))
    workers, why = auto_workers(
        num_cores(),
        on_gpu=on_gpu,
        micro_batch_bytes=micro_batch_bytes,
        sample_seconds=seconds,
        step_seconds=1 / images_per_second if images_per_second else None,
        shm_free_bytes=shared_memory_free_bytes(),
    )
    resolution.set("data.workers", workers, why)
    return workers


def tell_supply(events: Iterator[Event], *loaders: TrainLoader | EvalLoader, workers: int, cached: bool) -> Iterator[Event]:
    """The events; what the loaders have to say, as soon as they say it; and, after the first epoch, whether training waited for them."""
    said: set[str] = set()
    steps: list[StepDone] | None = []
    for event in events:
        for note in (note for loader in loaders for note in loader.notes if note not in said):
            said.add(note)
            yield Notice(level="warning", text=note)
        yield event
        if steps is not None and isinstance(event, StepDone):
            steps.append(event)
        elif steps is not None and isinstance(event, EpochDone):
            if (text := _waited(steps, workers, cached)) is not None:
                yield Notice(level="warning", text=text)
            steps = None


def _waited(steps: list[StepDone], workers: int, cached: bool) -> str | None:
    """What to say where training waited for a good part of an epoch. Its first step is left out: it waits for the workers to start."""
    waited, spent = sum(step.data_wait_ms for step in steps[1:]), sum(step.step_ms for step in steps[1:])
    if waited < _LEAST_WAIT_MS or waited <= WAIT_NOTED * spent:
        return None
    cores = num_cores()
    mends = []
    if workers < cores - 1:
        mends.append(f"raise data.workers above {workers} (there are {cores} cores)")
    if not cached:
        mends.append("set data.cache to a size such as 20GiB, and later epochs read decoded copies")
    mends.append("choose a lighter data.augment" if cached else "store the images at about model.image_size")
    return f"training waited for images for {waited / spent:.0%} of the first epoch; {', or '.join(mends)}"


def _folder() -> Path:
    return cache_folder() / "images"


def _free_bytes(folder: Path) -> int:
    """Of the disk that the folder is on, or will be."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(there).free
