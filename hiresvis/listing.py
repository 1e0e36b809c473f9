"""The samples that a recipe names, from folders and tables alone: no pixel is read, and no torch imported."""

from __future__ import annotations

from dataclasses import dataclass

from hiresvis.data.sources import Datasets, load_datasets
from hiresvis.data.survey import resolve_channels
from hiresvis.errors import DataError
from hiresvis.recipe import LoadedRecipe, Resolution


def read_datasets(loaded: LoadedRecipe, resolution: Resolution) -> Datasets:
    """The splits of the recipe, classes settled.

    Raises:
        DataError: with everything found.
    """
    data = loaded.recipe.data
    found = load_datasets(
        loaded.resolve_path(data.train),
        loaded.resolve_path(data.val) if isinstance(data.val, str) else data.val,
        None if data.test is None else loaded.resolve_path(data.test),
        image_column=data.image,
        label_column=data.label,
        split_column=data.split,
        group_column=data.group,
        region_columns=data.region,
        classes=None if data.classes == "auto" else data.classes,
        seed=loaded.recipe.train.seed,
        unseen=data.unseen,
    )
    if data.classes == "auto":
        resolution.set("data.classes", found.classes, "the classes of train, by name")
    return found


@dataclass(frozen=True, slots=True)
class Listing:
    """What a plan needs to know of the data.

    Attributes:
        classes: names, in order.
        channels: of the model's input.
        num_train: training images; None where the data is not there.
    """

    classes: tuple[str, ...]
    channels: int
    num_train: int | None


def look_at_data(loaded: LoadedRecipe, resolution: Resolution) -> Listing:
    """From the data where it is there (headers alone are read); else two classes and three channels, for the head hardly counts."""
    data = loaded.recipe.data
    given = None if isinstance(data.channels, str) else data.channels
    try:
        datasets = read_datasets(loaded, resolution)
        channels, _ = resolve_channels(datasets.train.samples, given, max_pixels=data.max_pixels)
    except DataError:
        return Listing(("a", "b") if isinstance(data.classes, str) else data.classes, given or 3, None)
    return Listing(datasets.classes, channels, len(datasets.train))
