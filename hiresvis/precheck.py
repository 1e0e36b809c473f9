"""The look at the images that `fit` takes before it trains, as far as `data.check` says."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hiresvis import assemble
from hiresvis.data.cache import ImageCache
from hiresvis.data.check import DataReport, partly_decoded
from hiresvis.data.contract import Contract
from hiresvis.data.folders import MAX_PROBLEMS, limited
from hiresvis.data.sources import Datasets
from hiresvis.errors import DataError, Problem
from hiresvis.recipe import LoadedRecipe, Resolution
from hiresvis.run.events import Event, Notice
from hiresvis.train.stop import StopRequest
from hiresvis.units import format_duration

CHECK_SECONDS = 600.0  # that data.check: auto decodes before training
_TOLD_EVERY_S = 30.0


def check_before_training(
    loaded: LoadedRecipe,
    resolution: Resolution,
    datasets: Datasets,
    contract: Contract,
    *,
    copies: ImageCache | None,
    stop: StopRequest,
) -> Iterator[Event]:
    """Looks at the images and tells what was found.

    Args:
        copies: keeps what was decoded for the training that follows.

    Raises:
        DataError: some cannot be trained on.
        Interrupted: a stop was requested; what was found is remembered.
    """
    how, told = loaded.recipe.data.check, time.monotonic()
    seconds = CHECK_SECONDS if how == "auto" else None
    steps = assemble.check_data(loaded, datasets, contract.preprocess(), fast=how == "headers", seconds=seconds, copies=copies)
    yield Notice(level="info", text=f"checking {sum(len(split) for split in datasets.splits().values())} images")
    while True:
        try:
            done, total = next(steps)
        except StopIteration as end:
            report: DataReport = end.value
            break
        if stop.requested:
            steps.close()
            stop.raise_if_requested("stopped while checking the data; nothing was trained")
        if time.monotonic() - told > _TOLD_EVERY_S:
            told = time.monotonic()
            yield Notice(level="info", text=f"checked {done} of {total} images")
    for level, problems in (("warning", report.warnings), ("info", report.notes)):
        for problem in problems:
            yield Notice(level=level, text=str(problem))
    if report.errors:
        more = [Problem("hiresvis check lists them all")] if len(report.errors) > MAX_PROBLEMS else []
        raise DataError([*limited(report.errors), *more])
    if seconds is not None:
        unread = partly_decoded(report, seconds)
        if unread:
            yield Notice(level="warning", text=unread)
        share = f"{report.num_decoded} of {report.num_images} images decoded"
        resolution.set("data.check", "auto" if unread else "full", f"{share}, in {format_duration(seconds)} at most")
