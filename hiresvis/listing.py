"""The samples that a recipe names, from folders and tables alone: no pixel is read, and no torch imported."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from hiresvis.data.sources import Datasets, load_datasets
from hiresvis.errors import DataError
from hiresvis.profiles import cache_folder
from hiresvis.recipe import LoadedRecipe, Resolution


def read_datasets(
    loaded: LoadedRecipe, resolution: Resolution, *, held_out: Collection[str] | None = None, look_for_files: bool = True
) -> Datasets:
    """The splits of the recipe, classes settled.

    Args:
        held_out: names that an earlier start of the run drew for validation.
        look_for_files: False: manifests are read without asking whether their images are there.

    Raises:
        DataError: with everything found.
    """
    data = loaded.recipe.data
    found = load_datasets(
        loaded.resolve_path(data.train),
        loaded.resolve_path(data.val) if isinstance(data.val, str) else data.val,
        None if data.test is None else loaded.resolve_path(data.test),
        task=loaded.recipe.task,
        image_column=data.image,
        label_column=data.label,
        split_column=data.split,
        group_column=data.group,
        region_columns=data.region,
        root=None if data.root is None else loaded.resolve_path(data.root),
        classes=None if data.classes == "auto" else data.classes,
        seed=loaded.recipe.train.seed,
        unseen=data.unseen,
        held_out=held_out,
        look_for_files=look_for_files,
        read_mask_values=lambda masks: _values_held(loaded, masks),
    )
    if data.classes == "auto" and loaded.recipe.task == "regress":
        resolution.set("data.classes", "auto", "a regression has none; its outputs are the columns of data.label")
    elif data.classes == "auto":
        why = "the columns of data.label" if isinstance(data.label, tuple) else "the classes of train, by name"
        if loaded.recipe.task == "segment":
            why = "classes.txt, or the values that the masks of train hold"
        resolution.set("data.classes", found.classes, why)
    return found


def _values_held(loaded: LoadedRecipe, masks: Sequence[Path]) -> set[int]:
    """The values in masks but for the ignored one. What decodes them comes with torch."""
    from hiresvis.data.mask_census import values_held

    data = loaded.recipe.data
    return values_held(masks, ignore=data.ignore_index, max_pixels=data.max_pixels, cache_folder=cache_folder())


@dataclass(frozen=True, slots=True)
class Listing:
    """What a plan needs to know of the data.

    Attributes:
        classes: the outputs' names, in order.
        channels: of the model's input.
        num_train: training images; None where the data is not there.
    """

    classes: tuple[str, ...]
    channels: int
    num_train: int | None


def look_at_data(loaded: LoadedRecipe, resolution: Resolution) -> Listing:
    """From tables, folders and headers, as far as they are there; else what the recipe says, two classes and three channels.

    The images of a manifest need not be there: a plan is often made elsewhere.
    """
    data = loaded.recipe.data
    given = None if isinstance(data.channels, str) else data.channels
    try:
        datasets = read_datasets(loaded, resolution, look_for_files=False)
    except DataError:
        return Listing(outputs_without_data(loaded), given or 3, None)
    from hiresvis.data.survey import resolve_channels  # with it come the decoders: 0.2 s

    try:
        channels, _ = resolve_channels(datasets.train.samples, given, max_pixels=data.max_pixels)
    except DataError:
        channels = 3
    return Listing(datasets.classes, channels, len(datasets.train))


def outputs_without_data(loaded: LoadedRecipe) -> tuple[str, ...]:
    """Names of the outputs where the data cannot be read; their number hardly counts in a plan."""
    task, data = loaded.recipe.task, loaded.recipe.data
    if not isinstance(data.classes, str):
        return data.classes
    if task != "classify" and isinstance(data.label, tuple):
        return data.label
    return (data.label,) if task == "regress" and isinstance(data.label, str) else ("a", "b")
