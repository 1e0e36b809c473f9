"""What is done with a finished run: evaluate its best weights, predict with them. Preprocessing is the run's own contract."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hiresvis import assemble
from hiresvis.data.cache import ImageCache
from hiresvis.data.contract import Contract, examine
from hiresvis.data.decode import open_image
from hiresvis.data.loader import EvalLoader
from hiresvis.data.sources import Sample, load_dataset, load_unlabelled
from hiresvis.device import pick_device
from hiresvis.errors import DataError, RecipeError
from hiresvis.evidence import Look, new_heat_folder, with_heat
from hiresvis.own_data import own_datasets
from hiresvis.predicted_masks import MaskWriter, open_folder
from hiresvis.predictions import mask_row, predicted_row, table_columns
from hiresvis.recipe import Resolution
from hiresvis.results import split_result
from hiresvis.supply import open_cache
from hiresvis.train.batches import fetch
from hiresvis.train.evaluate import evaluate as evaluate_split
from hiresvis.train.joining import WindowJoin
from hiresvis.train.mapping import MapJoin
from hiresvis.train.step import TrainStep
from hiresvis.trained import Trained, open_run, scores

_NOT_FINITE = "the run's weights give outputs that are not finite: training had diverged"
_EARLY_NAMED = 3  # bad headers that are told before the first row; each has its row anyway


def evaluate(run: Path, *, data: Path | None = None, root: Path | None = None, flips: bool = False) -> dict[str, Any]:
    """Metrics of the best weights: of val and test, or of other labelled data.

    Args:
        data: class folders, or a manifest with the run's columns.
        root: a folder that the manifest may name files below, besides its own; None: the run's data.root.
        flips: each image is also seen mirrored, see `TrainStep.predict_with_flips`.

    Returns:
        by split, see `split_result`.

    Raises:
        RunFolderError, DataError: the run or the data cannot be used.
    """
    trained = open_run(run)
    contract, step = trained.contract, _make_step(trained)
    if data is not None:
        columns = trained.loaded.recipe.data
        found = load_dataset(
            data,
            classes=contract.classes,
            task=contract.task,
            image_column=columns.image,
            label_column=columns.label,
            region_columns=None if data.is_dir() else columns.region,
            root=trained.loaded.resolve_path(columns.root) if root is None and columns.root is not None else root,
            unseen=columns.unseen,
        )
        splits = {"data": found}
    else:
        splits = {name: split for name, split in own_datasets(run, trained.loaded).splits().items() if name != "train"}
    results: dict[str, Any] = {}
    for name, split in splits.items():
        loader = _make_loader(trained, split.samples, bad_images="error", cache=open_cache(trained.loaded))
        found_split = evaluate_split(step, loader, name_of=[sample.title for sample in split.samples].__getitem__, flips=flips)
        results[name] = split_result(found_split, contract, split.samples, metric=trained.metric)
    return results


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions under way.

    Attributes:
        columns: of the rows as a table (see `predictions.table_row`).
        num_images: rows that there will be.
        notes: lines for people: what was passed over or given twice, and files that cannot be read by their headers.
        rows: one for each image, in the order of the paths (folders sorted), as they are computed: path, what `predicted_row` gives for
            the task, error. A file that cannot be read has its row, with the reason as error and None for the rest.
    """

    columns: tuple[str, ...]
    num_images: int
    notes: tuple[str, ...]
    rows: Iterator[dict[str, Any]]


def predict(
    run: Path,
    paths: Sequence[Path],
    *,
    flips: bool = False,
    masks: Path | None = None,
    beside: Path | None = None,
    heat: Path | None = None,
) -> Predictions:
    """What the best weights say of files and folders; each file once, at its first place.

    Args:
        flips: as in `evaluate`.
        masks: of a run of segment: the new folder that a mask of each image is written to.
        beside: the file that the rows will be in; without `masks` the folder is beside it.
        heat: a new folder for pictures of where the evidence for what is predicted lies, see `evidence.with_heat`.

    Raises:
        RunFolderError, DataError: the run cannot be used, a path does not exist, or there is no image at all.
        RecipeError: masks or heat maps are wanted of a task that has none, or no folder is given for masks.
    """
    trained = open_run(run)
    writer = _mask_writer(trained.contract, masks, beside)
    found = load_unlabelled(paths)
    samples = _each_once(found.samples)
    bad = _bad_headers(samples, trained.contract)
    notes = []
    if found.skipped_extensions:
        counts = ", ".join(f"{count} {extension}" for extension, count in sorted(found.skipped_extensions.items()))
        notes.append(f"files passed over by extension: {counts}; name them one by one to have them read all the same")
    if again := len(found.samples) - len(samples):
        notes.append(f"{again} paths were given more than once; each file has one row")
    notes += [f"{samples[index].title}  {reason}" for index, reason in list(bad.items())[:_EARLY_NAMED]]
    if len(bad) > _EARLY_NAMED:
        notes.append(f"... and {len(bad) - _EARLY_NAMED} more of {len(samples)} images that cannot be read")
    columns, rows = table_columns(trained.contract.task, trained.contract.classes), _rows(trained, samples, bad, writer, flips=flips)
    if heat is not None:
        look = Look(trained.backbone.model, trained.contract, trained.plan["precision"], pick_device())
        columns, rows = (*columns, "heat"), with_heat(rows, samples, look, new_heat_folder(heat, trained.contract))
    return Predictions(columns, len(samples), tuple(notes), rows)


def _mask_writer(contract: Contract, folder: Path | None, beside: Path | None) -> MaskWriter | None:
    if contract.task != "segment":
        if folder is not None:
            raise RecipeError(f"--masks {folder}: masks are what a run of task segment predicts, and this one's task is {contract.task}")
        return None
    if folder is None and beside is not None:
        folder = beside.with_name(f"{beside.stem}_masks")
    if folder is None:
        raise RecipeError("this run's task is segment, which writes a mask of each image: give --out FILE.csv, or a folder as --masks DIR")
    return MaskWriter(open_folder(folder), contract.classes, contract.ignore_index)


def _make_step(trained: Trained) -> TrainStep:
    loaded = trained.loaded
    trainable = assemble.freeze_parts(loaded, Resolution(loaded), trained.backbone, norm=trained.plan["norm"])
    step = assemble.make_step(loaded, trainable, trained.contract, trained.plan["precision"], pick_device())
    step.model.eval()
    return step


def _make_loader(
    trained: Trained, samples: Sequence[Sample], *, bad_images: str, cache: ImageCache | None = None, with_truth: bool = True
) -> EvalLoader:
    """With the run's own batch, and as many of its workers as have a batch to load while another is computed."""
    wanted = trained.loaded.recipe.data.workers
    return EvalLoader.by(
        trained.contract,
        samples,
        batch=trained.eval_batch,
        workers=0 if isinstance(wanted, str) else min(wanted, max(0, -(-len(samples) // trained.eval_batch) - 1)),
        bad_images=bad_images,
        cache=cache,
        with_truth=with_truth,
    )


def _each_once(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Without those that name a file again, however they write its path; links count as files of their own."""
    once: dict[str, Sample] = {}
    for sample in samples:
        once.setdefault(os.path.abspath(sample.path), sample)
    return tuple(once.values())


def _bad_headers(samples: Sequence[Sample], contract: Contract) -> dict[int, str]:
    """Position and reason of the images that show in their headers that they cannot be used: known before minutes are spent."""
    preprocess, bad = contract.preprocess(), {}
    for index, sample in enumerate(samples):
        try:
            with open_image(sample.path, max_pixels=contract.max_pixels, region=sample.region) as image:
                examine(image, preprocess, sample.path)
        except DataError as error:
            bad[index] = error.reason
    return bad


def _rows(
    trained: Trained, samples: Sequence[Sample], bad: Mapping[int, str], writer: MaskWriter | None, *, flips: bool
) -> Iterator[dict[str, Any]]:
    """A row for each sample as soon as it and all before it are done: predicted, bad by its header, or bad as only decoding shows."""
    contract, step = trained.contract, _make_step(trained)
    good = [index for index in range(len(samples)) if index not in bad]
    usable = [samples[index] for index in good]
    loader = _make_loader(trained, usable, bad_images="skip", with_truth=False)
    said_of = _scores_said(contract) if writer is None else _masks_said(contract, writer, usable)
    place_of = {samples[index].title: index for index in good}
    rows = {index: _row(samples[index], contract, error=reason) for index, reason in bad.items()}
    done, known = 0, 0
    outputs_of = step.predict_with_flips if flips else step.predict
    try:
        for item in fetch(loader):
            if item.indices:
                for index, said, error in said_of(item, outputs_of(item.images).cpu()):
                    rows[good[index]] = _row(usable[index], contract, said, error)
            rows |= {place_of[path]: _row(samples[place_of[path]], contract, error=reason) for path, reason in loader.skipped[known:]}
            known = len(loader.skipped)
            while done in rows:
                yield rows.pop(done)
                done += 1
        yield from (rows[index] for index in range(done, len(samples)))  # where every header is bad there is no batch
    finally:
        loader.close()


def _row(sample: Sample, contract: Contract, said: Mapping[str, Any] | None = None, error: str | None = None) -> dict[str, Any]:
    return {"path": sample.title, **(said or predicted_row(contract.task, None, contract.classes)), "error": error}


_Said = Iterator[tuple[int, dict[str, Any] | None, str | None]]  # index of the sample, what is said of it, or why nothing is


def _scores_said(contract: Contract) -> Callable[[Any, Tensor], _Said]:
    """Reads rows of logits, of images in windows joined."""
    join = WindowJoin()

    def read(item: Any, outputs: Tensor) -> _Said:
        indices, logits, _ = join.add(item, outputs)
        for index, row in zip(indices, scores(logits, contract).tolist(), strict=True):
            if all(map(math.isfinite, row)):
                yield index, predicted_row(contract.task, row, contract.classes, contract.thresholds), None
            else:
                yield index, None, _NOT_FINITE

    return read


def _masks_said(contract: Contract, writer: MaskWriter, samples: Sequence[Sample]) -> Callable[[Any, Tensor], _Said]:
    """Reads maps of logits, and writes the masks of images that are complete."""
    join = MapJoin()

    def read(item: Any, outputs: Tensor) -> _Said:
        for strip in join.add(item, outputs):
            try:
                written = writer.add(strip, samples[strip.index])
            except ValueError:
                yield strip.index, None, _NOT_FINITE
                continue
            if written is not None:
                yield strip.index, mask_row(str(written.path), written.shares), None

    return read
