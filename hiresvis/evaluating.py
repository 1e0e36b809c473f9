"""`hiresvis evaluate`: metrics of a run's best weights, of its own splits or of other labelled images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hiresvis.data.sources import Sample, load_dataset
from hiresvis.device import release
from hiresvis.own_data import own_datasets
from hiresvis.results import class_result, split_result
from hiresvis.run.events import Event, Notice
from hiresvis.supply import open_cache
from hiresvis.train.evaluate import Evaluation
from hiresvis.train.features import no_room_for_one
from hiresvis.train.relief import evaluation_in_room
from hiresvis.train.step import TrainStep
from hiresvis.trained import Trained, allowed_root, make_loader, make_step, open_run

_SHOWN = 3  # names of classes in a line


def evaluate(
    run: Path,
    *,
    data: Path | None = None,
    root: Path | None = None,
    unseen: str | None = None,
    flips: bool = False,
    say: Callable[[str], None] = lambda _: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Metrics of the best weights: of val and test, or of other labelled data, which may have some of the run's classes alone.

    Args:
        data: class folders, or a manifest with the run's columns.
        root: a folder that the manifest may name files below, besides its own; None: the run's data.root.
        unseen: "error" or "drop", what is done with images of `data` whose class the run does not know; None: the run's data.unseen.
        flips: each image is also seen mirrored, see `TrainStep.predict_with_flips`.
        say: told what was left out, which classes have no images, and memory that ran out.
        progress: called with (batches done, batches in all) of each split.

    Returns:
        by split, see `split_result` and `class_result`.

    Raises:
        RunFolderError, DataError: the run or the data cannot be used.
        DoesNotFit: memory ran out for one image.
    """
    trained = open_run(run)
    contract, step = trained.contract, make_step(trained)
    if data is not None:
        columns = trained.loaded.recipe.data
        found = load_dataset(
            data,
            classes=contract.classes,
            task=contract.task,
            image_column=columns.image,
            label_column=columns.label,
            region_columns=None if data.is_dir() else columns.region,
            root=allowed_root(trained, root),
            unseen=unseen or columns.unseen,
        )
        for warning in found.warnings:
            say(warning)
        splits = {"data": found}
    else:
        splits = {name: split for name, split in own_datasets(run, trained.loaded).splits().items() if name != "train"}
    results: dict[str, Any] = {}
    for name, split in splits.items():
        found_split = _evaluation(trained, step, split.samples, flips=flips, say=say, progress=progress)
        by_class = class_result(found_split, contract)
        if absent := by_class.get("absent"):
            say(f"{name}: no image of {len(absent)} of {len(contract.classes)} classes ({_listed(absent)}); means are over the others")
        results[name] = {**split_result(found_split, contract, split.samples, metric=trained.metric), **by_class}
    return results


def _evaluation(
    trained: Trained,
    step: TrainStep,
    samples: Sequence[Sample],
    *,
    flips: bool,
    say: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> Evaluation:
    """A split by the run's own batch; where memory runs out, once more with half of it."""
    loader = make_loader(trained, samples, bad_images="error", cache=open_cache(trained.loaded))
    name_of = [sample.title for sample in samples].__getitem__
    steps = evaluation_in_room(step, loader, _HalfBatch(step.device), name_of=name_of, flips=flips)
    while True:
        try:
            found = next(steps)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        if isinstance(found, Notice):
            say(found.text)
        elif isinstance(found, tuple):
            progress(*found)


@dataclass(frozen=True, slots=True)
class _HalfBatch:
    """Makes room where there is no plan to tighten."""

    device: torch.device

    def evaluation(self, loader: Any, what: str) -> Iterator[Event]:
        """Halves the batch.

        Raises:
            DoesNotFit: it is one image already.
        """
        release()
        if loader.batch == 1:
            raise no_room_for_one(self.device, what)
        loader.set_batch(loader.batch // 2)
        text = f"memory ran out ({what}); the split begins again with {loader.batch} images at once"
        yield Notice(level="warning", text=text)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
