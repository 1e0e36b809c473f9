"""`hiresvis check`: the recipe, the whole data set and the model looked at, every finding at once; and the contact sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from hiresvis import assemble, profiles
from hiresvis.assemble import Trainable
from hiresvis.backbone.build import Backbone
from hiresvis.costing import entry_of
from hiresvis.data.augment import Augment, usable_library
from hiresvis.data.check import DataReport, finished
from hiresvis.data.sheet import show_images
from hiresvis.data.transforms import Pipeline, Preprocess, Scale
from hiresvis.device import block_bytes, pick_device
from hiresvis.errors import DataError, EnvironmentFailed, HiresvisError, Problem, RecipeError
from hiresvis.listing import outputs_without_data
from hiresvis.memory.costs import MemoryProfile
from hiresvis.recipe import LoadedRecipe, Resolution
from hiresvis.settle import check_stages, complete, key_of
from hiresvis.ui.check_text import check_lines
from hiresvis.ui.sheet import render_sheet
from hiresvis.ui.text import UNICODE, Glyphs

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `hiresvis check` prints.

    Attributes:
        errors: what keeps `fit` from starting. warnings: errors under --strict. notes: never.
        details: of the data, see `DataReport.to_json`; `facts` are lines for people.
        exit_code: where there are errors.
        sheet: the page, where it was asked for and the images can be read.
    """

    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    notes: tuple[Problem, ...]
    details: Mapping[str, Any]
    exit_code: int = DataError.exit_code
    sheet: str | None = None

    def failed(self, *, strict: bool) -> bool:
        """Whether the command ends with its exit code."""
        return bool(self.errors or (strict and self.warnings))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        kinds = {"errors": self.errors, "warnings": self.warnings, "notes": self.notes}
        return {**self.details, **{name: [asdict(problem) for problem in problems] for name, problems in kinds.items()}}

    def lines(self, columns: int | None = None, glyphs: Glyphs = UNICODE) -> list[str]:
        """Text for people, findings first; broken at so many columns, or not at all."""
        return check_lines(self.to_json(), columns, glyphs)


def check(
    loaded: LoadedRecipe, *, fast: bool = False, sheet: bool = False, progress: Callable[[int, int], None] | None = None
) -> CheckReport:
    """Recipe, whole data set decoded once, model built: every finding at once, for what one part refuses hides no other.

    Args:
        fast: headers alone.
        sheet: make the contact sheet.
        progress: called with (files done, files in all).
    """
    resolution, data, found = Resolution(loaded), loaded.recipe.data, _Found()
    device = pick_device()
    drawn = tuple(Problem(event.text) for event in assemble.draw_sample(loaded))
    datasets = found.by(lambda: assemble.read_datasets(loaded, resolution))
    unmeasured = _Found()
    pixels = None if datasets is None else unmeasured.by(lambda: assemble.settle_pixels(loaded, resolution, datasets))
    found.by(lambda: assemble.refuse_budget(loaded, device))
    batch = loaded.recipe.train.batch
    if datasets is not None and isinstance(batch, int):
        found.by(lambda: assemble.refuse_warmup(loaded, len(datasets.train), batch, assemble.head_epochs(loaded)[0]))
    channels, scale = pixels or (3 if isinstance(data.channels, str) else data.channels, Scale())
    augment = found.by(lambda: assemble.make_augmentation(loaded, channels))
    classes = outputs_without_data(loaded) if datasets is None else datasets.classes
    _check_model(loaded, resolution, device, num_classes=len(classes), channels=channels, found=found)
    if datasets is None:
        return CheckReport(found.problems, drawn, (), {}, found.exit_code)
    # Of the pixels alone: any interpolation will do.
    size = loaded.recipe.model.image_size
    preprocess = Preprocess(size, data.fit, data.background, channels, scale, overlap=data.overlap) if pixels else None
    report = finished(assemble.check_data(loaded, datasets, preprocess, fast=fast), progress)
    # That nothing could be read is said by the files' own errors, where there are any.
    found.add(DataError, [problem for problem in unmeasured.problems if problem.key or not report.errors])
    found.add(DataError, report.errors)
    details = {key: value for key, value in report.to_json().items() if key not in ("errors", "warnings", "notes")}
    details["facts"] = facts = _facts(loaded, report, preprocess, augment)
    page = None
    if sheet and preprocess is not None:
        images = show_images(
            datasets.train,
            Pipeline(preprocess, augment, assemble.make_masks(loaded, datasets)),
            max_pixels=data.max_pixels,
            seed=loaded.recipe.train.seed,
        )
        page = render_sheet(loaded.path.name, facts, list(images), len(classes) if datasets.train.task == "classify" else 0)
    return CheckReport(found.problems, (*drawn, *report.warnings), report.notes, details, found.exit_code, page)


def _facts(loaded: LoadedRecipe, report: DataReport, preprocess: Preprocess | None, augment: Augment | None) -> dict[str, str]:
    """What is done to the images, in words."""
    number, decoded = report.num_images, report.num_decoded
    facts = {"images": f"{number} decoded" if decoded == number else f"{decoded} of {number} decoded, the others by their headers"}
    if preprocess is not None:
        height, width = preprocess.image_size
        scale = "by type" if preprocess.scale.kind == "dtype" else f"{preprocess.scale.low:g} to {preprocess.scale.high:g}"
        facts["input"] = f"{width} x {height} px, {preprocess.in_chans} channels, data.fit {preprocess.fit}, values {scale}"
    if augment is not None:
        name, why = loaded.recipe.data.augment, usable_library()[1]
        what = name if isinstance(name, str) else ", ".join(str(step["name"]) for step in name)
        facts["augment"] = f"{what}, by {augment.made_by}" + (f", since {why}" if why else "")
    return facts


def _check_model(
    loaded: LoadedRecipe, resolution: Resolution, device: torch.device, *, num_classes: int, channels: int, found: _Found
) -> None:
    """Builds the model, freezes its parts, and holds the recipe's spacing against its stages."""

    def build(with_weights: bool) -> Backbone:
        return assemble.build_model(loaded, num_classes=num_classes, channels=channels, with_weights=with_weights)

    # The weights are one thing, the model is another.
    backbone = found.by(lambda: build(True)) or (found.by(lambda: build(False)) if loaded.recipe.model.pretrained is not False else None)
    if backbone is None:
        return
    norm = "frozen" if loaded.recipe.model.norm == "frozen" else "batch"
    trainable = found.by(lambda: assemble.freeze_parts(loaded, resolution, backbone, norm=norm))
    if trainable is not None and isinstance(loaded.recipe.memory.spacing, Mapping):
        found.by(lambda: check_stages(loaded, _profile(loaded, trainable, device, num_classes=num_classes, channels=channels)))


def _profile(loaded: LoadedRecipe, trainable: Trainable, device: torch.device, *, num_classes: int, channels: int) -> MemoryProfile:
    """The model's traced costs, under the key that `plan` asks for.

    Raises:
        RecipeError: the model is no chain.
    """
    key = key_of(
        loaded,
        in_chans=channels,
        num_classes=num_classes,
        precision=assemble.settle_precision(loaded, Resolution(loaded), device),
        block=block_bytes(device),
        raw_image_bytes=math.prod(loaded.recipe.model.image_size) * channels,
        rules="cuda" if device.type == "cuda" else "cpu",
        norm=trainable.norm,
    )
    profile, _ = complete(loaded, profiles.read_or_trace(key, lambda: entry_of(loaded, trainable, key)))
    return profile


@dataclass(slots=True)
class _Found:
    """Errors of all kinds, those of the recipe first."""

    by_kind: dict[type[HiresvisError], list[Problem]] = field(
        default_factory=lambda: {RecipeError: [], DataError: [], EnvironmentFailed: []}
    )

    def by(self, look: Callable[[], _Result]) -> _Result | None:
        """What looking gives; None where it raises, which is kept."""
        try:
            return look()
        except (RecipeError, DataError) as error:
            self.add(type(error), error.problems)
        except EnvironmentFailed as error:
            self.add(EnvironmentFailed, (Problem(str(error)),))
        return None

    def add(self, kind: type[HiresvisError], problems: Sequence[Problem]) -> None:
        """Adds those that are not there yet."""
        self.by_kind[kind] += [problem for problem in problems if problem not in self.by_kind[kind]]

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(problem for problems in self.by_kind.values() for problem in problems)

    @property
    def exit_code(self) -> int:
        """Of the first kind that there is: what has to be mended first."""
        return next((kind.exit_code for kind, problems in self.by_kind.items() if problems), DataError.exit_code)
