"""The run folder: one place for everything a run leaves, whole at any moment the process may die.

recipe.yaml             as it was given             events.jsonl    every event, one line each
recipe.resolved.yaml    every value and its origin  metrics.csv     one row an epoch
plan.json               the memory plan             train.log       lines for people
contract.json           how pixels become input     predictions.csv the best weights, sample by sample
weights/best.safetensors                            report.html
snapshot/               what --resume needs         export/         weights and graphs for use elsewhere
samples.csv             what was trained on         split.json      the names held out, where a share was drawn
statistics.json         what training images are like, for predict to tell drift by
reliability.json        how far scores are right    worst/          pictures of the evidence for the worst errors
"""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hiresvis.errors import EnvironmentFailed, RunFolderError
from hiresvis.run import files
from hiresvis.run.events import TYPES, EpochDone, Evaluated, Event, from_json, to_json
from hiresvis.run.lines import describe
from hiresvis.units import format_size

_MIN_FREE_BYTES = 64 * 2**20
_MOST_EVENTS_BYTES = 2**30  # some four million steps
_OF_BEST_WEIGHTS = ("predictions.csv", "reliability.json", "statistics.json", "worst")
_EPOCH_COLUMNS = ("epoch", "train_loss", "lr", "seconds", "images_per_second", "val_loss")


def free_bytes(path: Path) -> int:
    """Bytes that may still be written where `path` is."""
    return shutil.disk_usage(path).free


class RunDirectory:
    """One run's folder. Made by `create` or `open`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._evaluated: Evaluated | None = None
        self._epochs: dict[int, dict[str, Any]] = {}

    @classmethod
    def create(
        cls,
        path: Path,
        recipe_text: str,
        *,
        need_bytes: int = _MIN_FREE_BYTES,
        free: Callable[[Path], int] = free_bytes,
    ) -> RunDirectory:
        """A new run folder with the recipe in it.

        Args:
            path: must not exist, or be an empty folder.
            recipe_text: the recipe as it was given.
            need_bytes: what the run will write: weights and two snapshots.
            free: tells the free bytes at a path.

        Raises:
            RunFolderError: something is there already, or the place cannot be written, or is too full; nothing is left behind.
        """
        refuse_existing(path)
        with _made_or_removed(path):
            there = free(path)
            if there < need_bytes:
                message = f"{path}: {format_size(there)} free, and the run needs {format_size(need_bytes)}"
                raise RunFolderError(f"{message}; free some space, or choose another log.dir")
            run = cls(path)
            try:
                run.write_text("recipe.yaml", recipe_text)
            except EnvironmentFailed as error:
                raise RunFolderError(str(error)) from error
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """The folder of a run that was started before.

        Raises:
            RunFolderError: there is no run.
        """
        if not (path / "recipe.yaml").is_file():
            what = "no such folder" if not path.exists() else "not a run folder: it has no recipe.yaml"
            raise RunFolderError(f"{path}: {what}; give a folder that hiresvis fit made")
        run = cls(path)
        run._epochs = _read_metrics(run.metrics)
        return run

    def path(self, name: str) -> Path:
        """A file of the run, by its name relative to the folder."""
        assert not Path(name).is_absolute(), name
        return self.root / name

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yaml"

    @property
    def resolved(self) -> Path:
        return self.root / "recipe.resolved.yaml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def contract(self) -> Path:
        return self.root / "contract.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.csv"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def log(self) -> Path:
        return self.root / "train.log"

    @property
    def predictions(self) -> Path:
        return self.root / "predictions.csv"

    @property
    def weights(self) -> Path:
        """The folder of the kept weights."""
        return self.root / "weights"

    @property
    def best_weights(self) -> Path:
        return self.weights / "best.safetensors"

    @property
    def snapshot(self) -> Path:
        """The folder that resuming reads."""
        return self.root / "snapshot"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def write_text(self, name: str, text: str) -> Path:
        """Writes a file whole or not at all, and returns its path.

        Raises:
            EnvironmentFailed: the disk is full or not writable; the file's former content is intact.
        """
        return self.write_bytes(name, text.encode("utf-8"))

    def write_bytes(self, name: str, content: bytes) -> Path:
        """As `write_text`."""
        files.write_bytes(self.path(name), content)
        return self.path(name)

    def write_json(self, name: str, value: Any) -> Path:
        """Writes strict JSON whole or not at all; nan and inf become null."""
        return self.write_text(name, files.json_text(value, indent=2) + "\n")

    def read_json(self, name: str) -> Any:
        """What `write_json` wrote.

        Raises:
            RunFolderError: the file is missing or no JSON.
        """
        try:
            return json.loads(self.path(name).read_text(encoding="utf-8"))
        except OSError as error:
            raise RunFolderError(
                f"{self.path(name)}: cannot be read ({files.reason(error)}); the run may not have come that far"
            ) from error
        except ValueError as error:
            raise RunFolderError(f"{self.path(name)}: no whole JSON ({error}); run fit again") from error

    def record(self, event: Event) -> None:
        """Writes one event: a line of events.jsonl, a row of metrics.csv when an epoch ends, a line for people in train.log.

        Raises:
            EnvironmentFailed: the disk is full or not writable.
        """
        files.append_line(self.events, files.json_text(to_json(event)))
        for line in describe(event).splitlines():
            stamp = datetime.fromtimestamp(event.time, tz=timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            files.append_line(self.log, f"{stamp}  {line}")
        if isinstance(event, Evaluated) and event.split == "val":
            self._evaluated = event
            if event.epoch in self._epochs:
                self._write_epoch(event.epoch, {})
        if isinstance(event, EpochDone):
            self._write_epoch(event.epoch, {name: getattr(event, name) for name in _EPOCH_COLUMNS[1:-1]})

    def _write_epoch(self, epoch: int, values: dict[str, Any]) -> None:
        row = self._epochs.setdefault(epoch, {"epoch": epoch})
        row.update(values)
        if self._evaluated is not None and self._evaluated.epoch == epoch:
            row["val_loss"] = self._evaluated.loss
            row.update({f"val_{name}": value for name, value in self._evaluated.metrics.items()})
        columns = [*_EPOCH_COLUMNS, *dict.fromkeys(name for row in self._epochs.values() for name in row if name not in _EPOCH_COLUMNS)]
        table = io.StringIO()
        writer = csv.DictWriter(table, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._epochs[number] for number in sorted(self._epochs))
        files.write_text(self.metrics, table.getvalue())


@contextmanager
def _made_or_removed(path: Path) -> Iterator[None]:
    """The folder with its parents; those that were not there before are gone again when the work inside fails.

    Raises:
        RunFolderError: it cannot be made.
    """
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"{path}: the run folder cannot be made ({files.reason(error)}); choose another log.dir"
            raise RunFolderError(message) from error
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):  # not made, or somebody else has put something there
                folder.rmdir()
        raise


def refuse_existing(path: Path) -> None:
    """A run folder is never written over.

    Raises:
        RunFolderError: something is at the path; names the two ways on.
    """
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_dir():
        raise RunFolderError(f"{path}: a file is in the place of the run folder; choose another log.dir")
    if (path / "recipe.yaml").exists():
        raise RunFolderError(f"{path}: holds a run already; go on with it: --resume, or begin another: log.dir=NEW_FOLDER")
    if any(path.iterdir()):
        message = "not empty, and no run to go on with (--resume needs its recipe.yaml)"
        raise RunFolderError(f"{path}: {message}; begin elsewhere: log.dir=NEW_FOLDER")


def forget_results(root: Path) -> None:
    """Removes what the end of a run has left of its best weights, before others take their place: it would be taken for theirs.

    Raises:
        EnvironmentFailed: something of it cannot be removed.
    """
    for path in (root / name for name in _OF_BEST_WEIGHTS):
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            message = f"{path}: of earlier weights, and cannot be removed ({files.reason(error)}); check that the folder can be written"
            raise EnvironmentFailed(message) from error


def _read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """Rows by epoch, as text; rows that are not whole are left out."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if None not in row and None not in row.values()]
    return {int(row["epoch"]): {key: value for key, value in row.items() if value != ""} for row in rows if row.get("epoch", "").isdigit()}


def read_events(path: Path) -> Iterator[Event]:
    """The events of an events.jsonl. A torn line, as a killed process leaves, is passed over.

    Raises:
        RunFolderError: the file cannot be read, or is none of a run: no regular file, or one of more than a GiB.
    """
    try:
        text = files.read_bytes(path, _MOST_EVENTS_BYTES).decode("utf-8", errors="replace")
    except OSError as error:
        raise RunFolderError(f"{path}: cannot be read ({files.reason(error)}); give a folder that hiresvis fit made") from error
    for line in text.split("\n"):
        if (event := parse_event(line)) is not None:
            yield event


def parse_event(line: str) -> Event | None:
    """The event of one line; None where it is torn, no event, or one that this version does not know."""
    try:
        row = json.loads(line, parse_constant=_refuse)
        return from_json(_with_nan(row))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _with_nan(row: dict[str, Any]) -> dict[str, Any]:
    """null back to nan where the event holds a number."""
    types = TYPES.get(row.get("event", ""), {})
    return {key: math.nan if value is None and types.get(key) == "float" else value for key, value in row.items()}
