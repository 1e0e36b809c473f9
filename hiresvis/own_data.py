"""What a run keeps of its data, and how it knows its own again.

plan.json has a hash of each split: whether it is the same is known at once. `samples.csv` has a row for each sample (split, name,
label), so that a refusal can name what is new, gone or labelled otherwise, and people see what was trained on. `split.json` has the names
that were held out, where a share was drawn: the same seed draws others from more files.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hiresvis import assemble
from hiresvis.data.sources import Datasets
from hiresvis.errors import RunFolderError
from hiresvis.recipe import LoadedRecipe, Resolution
from hiresvis.run import RunDirectory

SPLIT = "split.json"
SAMPLES = "samples.csv"
_COLUMNS = ["split", "name", "label"]
_SHOWN = 3  # names in a message

Labels = dict[str, str]  # by name, of one split


def fingerprints(datasets: Datasets) -> dict[str, Any]:
    """Of the splits that decide what is trained and which weights are best."""
    return {"train": datasets.train.fingerprint(), "val": datasets.val.fingerprint()}


def keep_data(run: RunDirectory, datasets: Datasets) -> None:
    """Writes samples.csv and, where a share was drawn, split.json.

    Raises:
        EnvironmentFailed: the disk is full or not writable.
    """
    run.write_bytes(SAMPLES, _samples(datasets))
    if datasets.is_drawn:  # escaped, so that a file name in any encoding comes back as it was
        run.write_text(SPLIT, json.dumps({"val": [sample.name for sample in datasets.val.samples]}, indent=1) + "\n")


def _labels(datasets: Datasets) -> dict[str, Labels]:
    """By split."""
    return {split: {sample.name: dataset.label_text(sample) for sample in dataset.samples} for split, dataset in datasets.splits().items()}


def _samples(datasets: Datasets) -> bytes:
    table = io.StringIO(newline="")
    writer = csv.writer(table)  # the line ends of RFC 4180: with others, a name that holds a carriage return is not quoted
    writer.writerow(_COLUMNS)
    for split, labels in _labels(datasets).items():
        writer.writerows([split, name, label] for name, label in labels.items())
    return table.getvalue().encode("utf-8", "surrogateescape")


def _read_samples(run: RunDirectory) -> dict[str, Labels]:
    """What `keep_data` wrote; nothing where it is gone or damaged: then the counts have to do."""
    try:
        text = run.path(SAMPLES).read_bytes().decode("utf-8", "surrogateescape")
        header, *rows = csv.reader(io.StringIO(text, newline=""))
        found: dict[str, Labels] = {}
        for split, name, label in rows:
            found.setdefault(split, {})[name] = label
    except (OSError, ValueError, csv.Error):
        return {}
    return found if header == _COLUMNS else {}


def read_held_out(run: RunDirectory) -> tuple[str, ...] | None:
    """The names that the run drew for validation; None where it did not draw.

    Raises:
        RunFolderError: the file is damaged.
    """
    path = run.path(SPLIT)
    if not path.exists():
        return None
    found = run.read_json(SPLIT)
    names = found.get("val") if isinstance(found, dict) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RunFolderError(f"{path} cannot be used: no list of names under val; put it back as the run wrote it")
    return tuple(names)


def own_datasets(folder: Path, loaded: LoadedRecipe) -> Datasets:
    """The data of a run with its own split: what it held out is held out, and no new draw of a source that has grown.

    Args:
        loaded: the run's resolved recipe.

    Raises:
        RunFolderError: no run, or its list of names is damaged.
        DataError: the data cannot be read, or lacks images that were held out.
    """
    return assemble.read_datasets(loaded, Resolution(loaded), held_out=read_held_out(RunDirectory.open(folder)))


def refuse_other_data(run: RunDirectory, before: Mapping[str, Any], datasets: Datasets) -> None:
    """Other images than those that the run was begun with.

    Args:
        before: `fingerprints` as they were; empty where the run wrote none.

    Raises:
        RunFolderError: a split is another; with what is new, gone or labelled otherwise, and the first names of each.
    """
    differ = {name: now for name, now in fingerprints(datasets).items() if before.get(name, now) != now}
    if not differ:
        return
    known, labels, said = _read_samples(run), _labels(datasets), []
    for name, now in differ.items():
        then = before[name]["files"]
        what = "as many, with other names or classes" if then == now["files"] else f"{now['files']} now"
        text = f"data.{name}: {then} files when the run was begun, {what}"
        said.append(": ".join([text, *([", ".join(_differences(known[name], labels[name]))] if name in known else ())]))
    raise RunFolderError(f"{run.root}: {'; '.join(said)}. Resume with the run's own data, or start a new run: log.dir=NEW_FOLDER")


def _differences(before: Labels, now: Labels) -> Iterator[str]:
    for what, names in (("new", now.keys() - before.keys()), ("gone", before.keys() - now.keys())):
        if names:
            yield _listed(what, sorted(names))
    other = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    if other:
        yield _listed("labelled otherwise", [f"{name}: {before[name] or 'none'}, now {now[name] or 'none'}" for name in other])


def _listed(what: str, names: list[str]) -> str:
    more = f"; {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what} ({'; '.join(names[:_SHOWN])}{more})"
