"""A run folder, read for the report. Whatever is missing or torn is left out and named: an interrupted run is worth a page too."""

from __future__ import annotations

import base64
import csv
import errno
import io
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hiresvis.errors import RunFolderError
from hiresvis.run.directory import read_events
from hiresvis.run.events import Event
from hiresvis.run.files import read_bytes
from hiresvis.ui.run_json import CONTRACT, INDEX, PLAN, Form, parse
from hiresvis.ui.state import EpochSummary, RunState, replay
from hiresvis.ui.times import Times, times_of
from hiresvis.units import format_size

EVIDENCE = "worst/index.json"  # pictures of where the evidence for the worst errors lies
NUM_WORST = 12
MOST_PICTURE_BYTES = 2_700_000  # a third more as text, in a page of less than 5 MB
MOST_TEXT_BYTES = 64 * 2**20
MOST_TABLE_BYTES = 2**30
NO_CLASS = "none"  # an image of none of the classes, in words
_SUMMARY_COLUMNS = {"epoch", "train_loss", "lr", "seconds", "images_per_second", "val_loss"}


@dataclass(frozen=True, slots=True)
class Prediction:
    """One sample under the best weights, as `predictions.csv` has it.

    Attributes:
        label, predicted: class names; multilabel: `a|b`, or none; regress: each target's name and value; segment: the share of pixels that
            are right, twice.
        score: of the predicted class; nan where there is more than one.
        values: multilabel: scores by class; regress: predicted values by target; segment: pixels that are predicted, by class.
        true: regress: values by target; segment: pixels by class.
        hits: segment: pixels of each class that are right.
    """

    split: str
    path: str
    label: str
    predicted: str
    score: float
    loss: float
    values: tuple[float, ...] = ()
    true: tuple[float, ...] = ()
    hits: tuple[float, ...] = ()

    @property
    def right(self) -> bool:
        return self.label == self.predicted


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of where the evidence lies, for one of the worst errors.

    Attributes:
        uri: a JPEG as data for the page.
        what: seen | detail | predicted | label | missed | value.
        name: the class or target.
        empty: nothing speaks for it.
        size: of `seen`: (height, width) as the model was given it.
    """

    uri: str
    what: str
    name: str = ""
    empty: bool = False
    size: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunFiles:
    """What a run folder holds; `gaps` says in words what it lacks.

    Attributes:
        resolved, recipe: recipe.resolved.yaml and recipe.yaml as they are.
        pictures: by (split, path), where `fit` has made some.
        reliability: by split, see `results.reliability_of`.
        labels: how often each label is in the data, by split.
        times: where the run's time went.
    """

    folder: Path
    state: RunState
    plan: Mapping[str, Any]
    contract: Mapping[str, Any]
    resolved: str
    predictions: tuple[Prediction, ...]
    gaps: tuple[str, ...]
    pictures: Mapping[tuple[str, str], tuple[Picture, ...]] = field(default_factory=dict)
    recipe: str = ""
    reliability: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    times: Times = field(default_factory=Times)

    @property
    def task(self) -> str:
        """What was learnt: classify | multilabel | regress | segment."""
        return str(self.contract.get("task") or (self.state.started.task if self.state.started else "classify"))

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in order, from the contract, the start of the run, or else the predictions."""
        named = self.contract.get("classes") or (self.state.started.classes if self.state.started else ())
        if not named:
            named = sorted({row.label for row in self.predictions} | {row.predicted for row in self.predictions})
        return tuple(str(name) for name in named)


def worst(predictions: Sequence[Prediction]) -> list[Prediction]:
    """The labelled samples of the highest loss, wrong ones first."""
    labelled = [row for row in predictions if row.label]
    labelled.sort(key=lambda row: (row.right, -row.loss if math.isfinite(row.loss) else 0.0))
    return labelled[:NUM_WORST]


def read_run(folder: Path) -> RunFiles:
    """Everything the report needs from a run folder.

    Raises:
        RunFolderError: the folder holds none of a run's files.
    """
    gaps: list[str] = []
    events = _events(folder / "events.jsonl", gaps)
    state = replay(events)
    plan = _json(folder / "plan.json", gaps, PLAN)
    contract = _json(folder / "contract.json", gaps, CONTRACT)
    resolved = _text(folder / "recipe.resolved.yaml", gaps)
    summaries = _summaries(folder / "metrics.csv", gaps)
    if not state.epochs:
        state = replace(state, epochs=summaries)
    classes = tuple(contract.get("classes") or (state.started.classes if state.started else ()))
    predictions = tuple(_predictions(folder / "predictions.csv", classes, gaps))
    if not (events or plan or contract or resolved or summaries or predictions):
        raise RunFolderError(
            f"{folder}: nothing to report (no events.jsonl, metrics.csv or plan.json); give a folder that hiresvis fit made"
        )
    later: dict[str, Any] = {  # what earlier releases did not write is no gap
        "pictures": _pictures(folder / EVIDENCE, gaps) if os.path.lexists(folder / EVIDENCE) else {},
        "recipe": _text(folder / "recipe.yaml", gaps) if os.path.lexists(folder / "recipe.yaml") else "",
        "reliability": _json(folder / "reliability.json", gaps) if os.path.lexists(folder / "reliability.json") else {},
        "labels": _labels(folder / "samples.csv", gaps) if os.path.lexists(folder / "samples.csv") else {},
        "times": times_of(events),
    }
    return RunFiles(folder, state, plan, contract, resolved, predictions, tuple(gaps), **later)


def _text(path: Path, gaps: list[str], most_bytes: int = MOST_TEXT_BYTES) -> str:
    try:
        return read_bytes(path, most_bytes).decode("utf-8-sig", errors="replace")
    except OSError as error:
        gaps.append(f"{path.name}: {error.strerror or error}")
        return ""


def _json(path: Path, gaps: list[str], form: Form | None = None) -> dict[str, Any]:
    text = _text(path, gaps)
    found, unusable = parse(text, form) if text else ({}, "")
    if unusable:
        gaps.append(f"{path.name}: {unusable}")
    return found


def _events(path: Path, gaps: list[str]) -> list[Event]:
    """The events of each line that is whole; a run that was killed may end in the middle of one."""
    try:
        return list(read_events(path))
    except RunFolderError:
        _text(path, gaps)  # tells why
        return []


def _rows(path: Path, gaps: list[str]) -> Iterator[dict[str, str]]:
    text = _text(path, gaps, MOST_TABLE_BYTES)
    try:
        for row in csv.DictReader(io.StringIO(text, newline="")):
            yield {key: value for key, value in row.items() if isinstance(key, str) and isinstance(value, str)}
    except csv.Error as error:
        gaps.append(f"{path.name}: {error}")


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _summaries(path: Path, gaps: list[str]) -> tuple[EpochSummary, ...]:
    """One summary per epoch; columns besides the known ones are metrics. The later row of an epoch counts."""
    found: dict[int, EpochSummary] = {}
    for row in _rows(path, gaps):
        epoch = _number(row.get("epoch"))
        if epoch is None or not math.isfinite(epoch):
            continue
        values = {key: value for key in row if (value := _number(row[key])) is not None}
        metrics = {key.removeprefix("val_"): value for key, value in values.items() if key not in _SUMMARY_COLUMNS}
        known = {key: values.get(key) for key in _SUMMARY_COLUMNS - {"epoch"}}
        found[int(epoch)] = EpochSummary(epoch=int(epoch), metrics=metrics, **known)  # type: ignore[arg-type]
    return tuple(found[epoch] for epoch in sorted(found))


def _predictions(path: Path, classes: tuple[str, ...], gaps: list[str]) -> Iterator[Prediction]:
    rows = list(_rows(path, gaps))
    names = {row.get("label", "") for row in rows} | {row.get("predicted", "") for row in rows}
    by_index = {str(index): name for index, name in enumerate(classes)} if not names & set(classes) else {}
    for row in rows:
        label, predicted = row.get("label"), row.get("predicted")
        said: dict[str, Any] = {
            "split": row.get("split", ""),
            "path": row.get("path", ""),
            "loss": _or_nan(row.get("loss")),
            "score": math.nan,
        }
        values = {key: _or_nan(cell) for key, cell in row.items() if key.startswith(("score_", "true_", "predicted_", "right_"))}
        if any(key.startswith("right_") for key in values):
            kinds = (tuple(values.get(f"{kind}_{name}", math.nan) for name in classes) for kind in ("true", "predicted", "right"))
            true, found, hits = kinds
            if classes and not any(map(math.isnan, (*true, *found, *hits))):
                share = f"{sum(hits) / sum(true):.2%} of pixels" if sum(true) else "no labelled pixel"
                yield Prediction(**said, label=share, predicted=share, values=found, true=true, hits=hits)
        elif predicted is None:
            true, found = (tuple(values.get(f"{kind}_{name}", math.nan) for name in classes) for kind in ("true", "predicted"))
            if classes and not any(map(math.isnan, (*true, *found))):
                yield Prediction(**said, label=_named(classes, true), predicted=_named(classes, found), values=found, true=true)
        elif "score" in row and predicted:
            said["score"] = _or_nan(row["score"])
            yield Prediction(**said, label=by_index.get(label or "", label or ""), predicted=by_index.get(predicted, predicted))
        elif label is not None and values and classes:
            scores = tuple(values.get(f"score_{name}", math.nan) for name in classes)
            yield Prediction(**said, label=label or NO_CLASS, predicted=predicted or NO_CLASS, values=scores)


def _labels(path: Path, gaps: list[str]) -> dict[str, Counter[str]]:
    """How often each label occurs, by split; a sample of several labels counts for each."""
    found: dict[str, Counter[str]] = {}
    for row in _rows(path, gaps):
        if row.get("split"):
            found.setdefault(row["split"], Counter()).update(row["label"].split("|") if row.get("label") else [NO_CLASS])
    return found


def _pictures(path: Path, gaps: list[str]) -> dict[tuple[str, str], tuple[Picture, ...]]:
    """Those that the index names and that are there, as long as they are small enough for a page."""
    found, left = dict[tuple[str, str], tuple[Picture, ...]](), MOST_PICTURE_BYTES
    if path.parent.is_symlink():
        gaps.append(f"{path.parent.name}: a link, which is not followed")
        return found
    for sample in _json(path, gaps, INDEX).get("samples", ()):
        pictures = []
        try:
            for entry in sample["pictures"]:
                data = read_bytes(path.parent / Path(entry["file"]).name, left)
                left -= len(data)
                pictures.append(_picture(entry, data))
            found[sample["split"], sample["path"]] = tuple(pictures)
        except OSError as error:
            if error.errno == errno.EFBIG:
                gaps.append(f"{EVIDENCE}: more pictures than {format_size(MOST_PICTURE_BYTES)}")
                break
            gaps.append(f"{EVIDENCE}: {error.strerror}: {entry['file']!a}")
        except KeyError as error:
            gaps.append(f"{EVIDENCE}: a sample without {error}")
    return found


def _picture(entry: Mapping[str, Any], data: bytes) -> Picture:
    uri = "data:image/jpeg;base64," + base64.b64encode(data).decode("ascii")
    return Picture(uri, entry["what"], entry.get("name", ""), entry.get("empty", False), entry.get("size", ()))


def _named(names: Sequence[str], values: Sequence[float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in zip(names, values, strict=True))


def _or_nan(text: str | None) -> float:
    value = _number(text)
    return math.nan if value is None else value
