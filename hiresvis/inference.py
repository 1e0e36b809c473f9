"""What is done with a finished run: evaluate its best weights, predict with them. Preprocessing is the run's own contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from hiresvis import assemble
from hiresvis.data.contract import Contract, examine, read_through
from hiresvis.data.decode import open_image
from hiresvis.data.loader import EvalLoader
from hiresvis.data.sources import Sample, load_dataset, load_unlabelled
from hiresvis.device import pick_device
from hiresvis.errors import DataError, Problem, RunFolderError
from hiresvis.recipe import LoadedRecipe, Resolution, load_recipe
from hiresvis.run import RunDirectory
from hiresvis.train.evaluate import evaluate as evaluate_split
from hiresvis.train.joining import WindowJoin
from hiresvis.train.step import TrainStep


@dataclass(frozen=True, slots=True)
class _Trained:
    """A finished run, ready to predict."""

    loaded: LoadedRecipe
    contract: Contract
    step: TrainStep
    eval_batch: int


def _open_run(folder: Path) -> _Trained:
    """The best weights of a run in its own model, with its own preprocessing.

    Raises:
        RunFolderError: no run, or one without weights.
    """
    run = RunDirectory.open(folder)
    contract = Contract.read(run.contract)
    loaded = load_recipe(run.resolved)
    stored = run.read_json("plan.json")
    if not run.best_weights.is_file():
        raise RunFolderError(f"{folder}: no best weights yet; let fit finish its first epoch (hiresvis fit ... --resume)")
    device = pick_device()
    backbone = assemble.build_model(loaded, num_classes=len(contract.classes), channels=contract.channels, with_weights=False)
    backbone.model.load_state_dict(load_file(run.best_weights))
    trainable = assemble.freeze_parts(loaded, Resolution(loaded), backbone, norm=stored["norm"])
    step = assemble.make_step(loaded, trainable, contract, stored["precision"], device)
    return _Trained(loaded, contract, step, int(stored["eval_batch"]))


def evaluate(run: Path, *, data: Path | None = None) -> dict[str, Any]:
    """Metrics of the best weights: of val and test, or of other labelled data.

    Raises:
        RunFolderError, DataError: the run or the data cannot be used.
    """
    trained = _open_run(run)
    contract = trained.contract
    if data is not None:
        columns = trained.loaded.recipe.data
        found = load_dataset(
            data,
            classes=contract.classes,
            image_column=columns.image,
            label_column=columns.label,
            region_columns=None if data.is_dir() else columns.region,
            unseen=columns.unseen,
        )
        splits = {"data": found}
    else:
        own = assemble.read_datasets(trained.loaded, Resolution(trained.loaded))
        splits = {name: split for name, split in own.splits().items() if name != "train"}
    results: dict[str, Any] = {}
    for name, split in splits.items():
        loader = EvalLoader(split.samples, contract.preprocess(), max_pixels=contract.max_pixels, batch=trained.eval_batch)
        found_split = evaluate_split(trained.step, loader, name_of=[sample.title for sample in split.samples].__getitem__)
        results[name] = {"images": len(split), "loss": found_split.loss, **found_split.metrics}
    return results


def predict(run: Path, paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Class names and scores of files and folders.

    Returns:
        path, label, score, and scores by class name, as they are computed.

    Raises:
        RunFolderError, DataError: at once, when the run, the paths or the headers of some images cannot be used, every one named; the
            latter also on the way, for an image that only decoding shows to be bad: after the rows of all images before it.
    """
    trained = _open_run(run)
    samples = load_unlabelled(paths).samples
    _look_at_headers(samples, trained.contract)
    return _predictions(trained, samples)


def _look_at_headers(samples: Sequence[Sample], contract: Contract) -> None:
    """Every image's header, before minutes are spent on the first ones.

    Raises:
        DataError: all that is wrong with them.
    """
    preprocess, problems = contract.preprocess(), list[Problem]()
    for sample in samples:
        try:
            with open_image(sample.path, max_pixels=contract.max_pixels, region=sample.region) as image:
                examine(image, preprocess, sample.path)
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)


def _predictions(trained: _Trained, samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    done = 0
    try:
        for row in _rows(trained, samples):
            done += 1
            yield row
    except DataError:
        # A batch comes whole or not at all: the images before the bad one are predicted by themselves.
        yield from _rows(trained, samples[done : done + _num_readable(samples[done:], trained.contract)])
        raise


def _num_readable(samples: Sequence[Sample], contract: Contract) -> int:
    """How many images can be decoded before the first that cannot."""
    for position, sample in enumerate(samples):
        try:
            with open_image(sample.path, max_pixels=contract.max_pixels, region=sample.region) as image:
                read_through(image, contract.preprocess(), sample.path)
        except DataError:
            return position
    return len(samples)


def _rows(trained: _Trained, samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    contract = trained.contract
    loader = EvalLoader(samples, contract.preprocess(), max_pixels=contract.max_pixels, batch=trained.eval_batch)
    trained.step.model.eval()
    join = WindowJoin()
    for item in loader:
        indices, logits, _ = join.add(item, trained.step.predict(item.images).cpu())
        for index, row in zip(indices, logits.softmax(dim=1).tolist(), strict=True):
            best = max(range(len(row)), key=row.__getitem__)
            yield {
                "path": samples[index].title,
                "label": contract.classes[best],
                "score": row[best],
                "scores": dict(zip(contract.classes, row, strict=True)),
            }
