"""`hiresvis predict`: what the best weights of a run say of other images. Preprocessing is the run's own contract."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from hiresvis.data.contract import Contract
from hiresvis.data.inputs import STANDARD_INPUT, Columns, Inputs, find_inputs, waves
from hiresvis.data.regions import Size
from hiresvis.data.sources import Sample
from hiresvis.device import capacity, in_use, pick_device
from hiresvis.drift import Watch
from hiresvis.errors import DataError, RecipeError, RunFolderError
from hiresvis.evidence import Look, new_heat_folder, with_heat
from hiresvis.predicted_masks import MaskWriter, open_folder
from hiresvis.predictions import mask_row, predicted_row, table_columns
from hiresvis.run import RunDirectory
from hiresvis.train.batches import fetch
from hiresvis.train.features import Forward, num_features
from hiresvis.train.joining import WindowJoin
from hiresvis.train.mapping import MapJoin
from hiresvis.train.step import TrainStep
from hiresvis.trained import Trained, allowed_root, make_loader, make_step, open_run, scores
from hiresvis.training_statistics import Describer, TrainingStatistics, size_of
from hiresvis.units import format_size

_NOT_FINITE = "the run's weights give outputs that are not finite: training had diverged"
_EARLY_NAMED = 3  # bad headers that are told before the first row, each of which has its row anyway
_BATCHES_AT_ONCE = 64  # of paths on standard input
_SHARE_OF_FREE = 0.9
_SAME_SCALE = 1.1  # images of train that are as large as the model's, but for so much


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions under way.

    Attributes:
        columns: of the rows as a table (see `predictions.table_row`).
        num_images: rows that there will be; None: paths come on standard input.
        notes: lines for people: what was passed over or given twice, and files that cannot be read by their headers.
        rows: one for each image, in the order of the paths (folders sorted), as they are computed: path, what `predicted_row` gives for
            the task, drift (see `drift`; None where the run has no statistics), error. A file that cannot be read has its row, with the
            reason as error and None for the rest.
        ending: lines for people when all rows were taken.
    """

    columns: tuple[str, ...]
    num_images: int | None
    notes: tuple[str, ...]
    rows: Iterator[dict[str, Any]]
    ending: Callable[[], Iterator[str]]


def predict(
    run: Path,
    paths: Sequence[str | Path],
    *,
    flips: bool = False,
    masks: Path | None = None,
    beside: Path | None = None,
    heat: Path | None = None,
    top: int = 0,
    tile: bool = False,
    overlap: float | None = None,
    root: Path | None = None,
    stdin: BinaryIO | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Predictions:
    """What the best weights say of files, folders, patterns (`a/**/*.png`) and the rows of manifests; each file once, at its first place.

    Args:
        paths: a manifest (.csv, .tsv, .parquet) has the run's columns of paths and regions. `-` alone: paths come on `stdin`.
        flips: as in `evaluate`.
        masks: of a run of segment: the new folder that a mask of each image is written to.
        beside: the file that the rows will be in; without `masks` the folder is beside it.
        heat: a new folder for pictures of where the evidence for what is predicted lies, see `evidence.with_heat`.
        top: of a run of classify: the best classes of each image, so many.
        tile, overlap: windows over all of each image, and the share that neighbours have in common; None: the run's.
        root: as in `evaluate`.
        say: told what comes up on the way, such as memory that ran out.

    Raises:
        RunFolderError, DataError: the run cannot be used, a path does not exist, or there is no image at all.
        RecipeError: what is wanted does not go with the run.
    """
    trained = open_run(run)
    folder = RunDirectory.open(run)
    statistics = _statistics(trained, folder, say)
    watch = None if statistics is None else Watch(statistics, trained.contract)
    trained = replace(trained, contract=_tiled(trained.contract, statistics, tile=tile, overlap=overlap))
    asked = [os.fspath(path) for path in paths]
    _refuse(trained.contract, asked, top)
    recipe = trained.loaded.recipe.data
    read_by, streamed = Columns(recipe.image, recipe.region, allowed_root(trained, root)), asked == [STANDARD_INPUT]
    inputs = Inputs(read_by) if streamed else find_inputs(asked, read_by)
    job = _Job(trained, _mask_writer(trained.contract, masks, beside), watch, flips=flips, top=top, say=say)
    look_at = None if heat is None else new_heat_folder(heat, trained.contract)
    made = _streamed(job, inputs, stdin or sys.stdin.buffer) if streamed else _known(job, inputs)
    if look_at is not None:
        look = Look(trained.backbone.model, trained.contract, trained.plan["precision"], pick_device())
        made = replace(made, columns=(*made.columns, "heat"), rows=with_heat(made.rows, inputs.samples, look, look_at))
    again = shlex.join(["hiresvis", "evaluate", str(run), "--data", "LABELLED"])

    def ending() -> Iterator[str]:
        yield from made.ending()
        yield from () if watch is None else watch.lines(again)

    return replace(made, ending=ending)


def _refuse(contract: Contract, asked: Sequence[str], top: int) -> None:
    """What the run cannot tell, and paths that do not go together.

    Raises:
        RecipeError: says which.
    """
    if top and contract.task != "classify":
        raise RecipeError(f"--top-k {top}: the best classes are what a run of task classify tells, and this one's task is {contract.task}")
    if top > len(contract.classes):
        raise RecipeError(f"--top-k {top} is above the {len(contract.classes)} classes of this run; give at most so many")
    if STANDARD_INPUT in asked and len(asked) > 1:
        raise RecipeError(f"{STANDARD_INPUT} stands for paths on standard input and goes alone; put the other {len(asked) - 1} there too")


def _streamed(job: _Job, inputs: Inputs, stdin: BinaryIO) -> Predictions:
    """Of paths as they come; what was passed over is known at the end."""
    taken = map(inputs.take, waves(stdin, _BATCHES_AT_ONCE * job.trained.eval_batch))
    rows = (row for samples in taken if samples for row in _rows(job, samples, _look(samples, job.contract)))
    return Predictions(job.columns, None, (), rows, lambda: _passed_over(inputs))


def _known(job: _Job, inputs: Inputs) -> Predictions:
    """Of paths that are all there, whose headers are read first."""
    samples = tuple(inputs.samples)
    looked = _look(samples, job.contract)
    notes = [*_passed_over(inputs), *(f"{samples[index].title}  {reason}" for index, reason in list(looked.bad.items())[:_EARLY_NAMED])]
    if len(looked.bad) > _EARLY_NAMED:
        notes.append(f"... and {len(looked.bad) - _EARLY_NAMED} more of {len(samples)} images that cannot be read")
    return Predictions(job.columns, len(samples), tuple(notes), _rows(job, samples, looked), lambda: iter(()))


def _passed_over(inputs: Inputs) -> Iterator[str]:
    if inputs.skipped:
        counts = ", ".join(f"{count} {extension}" for extension, count in sorted(inputs.skipped.items()))
        yield f"files passed over by extension: {counts}; name them one by one to have them read all the same"
    if inputs.num_again:
        yield f"{inputs.num_again} paths were given more than once; each file has one row"


def _statistics(trained: Trained, folder: RunDirectory, say: Callable[[str], None]) -> TrainingStatistics | None:
    """What the run keeps of its training images; without it, whether it has none or they cannot be used, drift alone is missing."""
    try:
        return TrainingStatistics.read(folder, trained.contract, num_features(trained.backbone.model))
    except RunFolderError as error:
        say(f"{error}. Until then predictions have no drift")
        return None


def _tiled(contract: Contract, statistics: TrainingStatistics | None, *, tile: bool, overlap: float | None) -> Contract:
    """The contract with windows over the whole image, where the model has been trained on images at that resolution.

    Raises:
        RecipeError: it has not, so that all things would be larger than it has ever seen them; or an overlap of no tiles.
    """
    if not tile and contract.fit != "tile":
        if overlap is not None:
            raise RecipeError(
                f"--overlap {overlap:g} is of tiles, and this run sees an image at once (data.fit: {contract.fit}); add --tile"
            )
        return contract
    if contract.fit in ("resize", "letterbox"):
        sizes = {} if statistics is None else statistics.sizes
        ends = [(sizes.get(side) or [0.0, 0.0], size) for side, size in zip(("height", "width"), contract.image_size, strict=True)]
        if not all(size / _SAME_SCALE <= found[0] <= found[-1] <= size * _SAME_SCALE for found, size in ends):
            height, width = contract.image_size
            shown = "" if statistics is None else " of " + " x ".join(f"{found[0]:g} to {found[-1]:g}" for found, _ in ends) + " px"
            raise RecipeError(
                f"--tile: this run was trained on whole images{shown}, brought to {height} x {width} px (data.fit: {contract.fit}). A tile "
                "at full resolution shows everything in another size than it has ever seen, and no metric of the run would speak of that. "
                "Train a run with data.fit: tile, or crop"
            )
    return replace(contract, fit="tile", overlap=contract.overlap if overlap is None else overlap)


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


@dataclass(frozen=True, slots=True)
class _Looked:
    """What headers say: sizes (height, width) by position, and of those that cannot be used the reason."""

    sizes: Mapping[int, Size]
    bad: Mapping[int, str]


def _look(samples: Sequence[Sample], contract: Contract) -> _Looked:
    """Reads headers, so that most of what cannot be used is known before minutes are spent."""
    sizes, bad = dict[int, Size](), dict[int, str]()
    for index, sample in enumerate(samples):
        try:
            sizes[index] = size_of(sample, contract)
        except DataError as error:
            bad[index] = error.reason
    return _Looked(sizes, bad)


class _Job:
    """What all rows of a prediction are made with."""

    def __init__(
        self, trained: Trained, writer: MaskWriter | None, watch: Watch | None, *, flips: bool, top: int, say: Callable[[str], None]
    ) -> None:
        self.trained, self.contract, self.writer, self.watch, self.top = trained, trained.contract, writer, watch, top
        self.columns = table_columns(self.contract.task, self.contract.classes, top=top)
        step = make_step(trained)
        self.forward = Forward(step, flips=flips, most=_images_at_once(trained, step, say), say=say)


def _images_at_once(trained: Trained, step: TrainStep, say: Callable[[str], None]) -> int:
    """The run's evaluation batch, or where less memory is free now than that was predicted to take, as many images as fit."""
    needed, batch = trained.eval_bytes, trained.eval_batch
    capacity_bytes, others_bytes = capacity(step.device)
    free = int(_SHARE_OF_FREE * (capacity_bytes - others_bytes - in_use(step.device)))
    if needed <= free:
        return batch
    most = max(1, batch * free // needed)
    if most < batch:
        say(f"{most} images at once, not the run's {batch}: those take {format_size(needed)}, and {format_size(max(0, free))} are free")
    return most


def _rows(job: _Job, samples: Sequence[Sample], looked: _Looked) -> Iterator[dict[str, Any]]:
    """A row for each sample as soon as it and all before it are done: predicted, bad by its header, or bad as only decoding shows."""
    contract = job.contract
    good = [index for index in range(len(samples)) if index not in looked.bad]
    usable = [samples[index] for index in good]
    loader = make_loader(job.trained, usable, bad_images="skip", with_truth=False)
    said_of = _scores_said(contract, job.top) if job.writer is None else _masks_said(contract, job.writer, usable)
    place_of = {samples[index].title: index for index in good}
    rows = {index: _row(samples[index], job, error=reason) for index, reason in looked.bad.items()}
    done, known, describer = 0, 0, Describer()
    drifts: dict[int, float | None] = {}
    try:
        for item in fetch(loader):
            if item.indices:
                outputs, features = job.forward(item.images)
                for index, image in describer.add(item, features) if job.watch is not None else ():
                    drifts[index] = job.watch.add(usable[index].title, looked.sizes.get(good[index]), image)  # type: ignore[union-attr]
                for index, said, error in said_of(item, outputs):
                    rows[good[index]] = _row(usable[index], job, said, drifts.pop(index, None), error)
            rows |= {place_of[path]: _row(samples[place_of[path]], job, error=reason) for path, reason in loader.skipped[known:]}
            known = len(loader.skipped)
            while done in rows:
                yield rows.pop(done)
                done += 1
        yield from (rows[index] for index in range(done, len(samples)))  # where every header is bad there is no batch
    finally:
        loader.close()


def _row(
    sample: Sample, job: _Job, said: Mapping[str, Any] | None = None, drift: float | None = None, error: str | None = None
) -> dict[str, Any]:
    nothing = predicted_row(job.contract.task, None, job.contract.classes, top=job.top)
    return {"path": sample.title, **(said or nothing), "drift": None if drift is None else round(drift, 3), "error": error}


_Said = Iterator[tuple[int, dict[str, Any] | None, str | None]]  # index of the sample, what is said of it, or why nothing is


def _scores_said(contract: Contract, top: int) -> Callable[[Any, Tensor], _Said]:
    """Reads rows of logits, of images in windows joined."""
    join = WindowJoin()

    def read(item: Any, outputs: Tensor) -> _Said:
        indices, logits, _ = join.add(item, outputs)
        for index, row in zip(indices, scores(logits, contract).tolist(), strict=True):
            if all(map(math.isfinite, row)):
                yield index, predicted_row(contract.task, row, contract.classes, contract.thresholds, top=top), None
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
