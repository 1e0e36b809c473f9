"""What a resumed run makes of a recipe that was changed: what cannot change is refused, what can is told, what has no effect is said.

A run's own recipe is its `recipe.resolved.yaml`: overrides and found values are in it, with absolute paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hiresvis.errors import RecipeError, RunFolderError
from hiresvis.recipe.load import LoadedRecipe, load_recipe, parse_recipe
from hiresvis.recipe.resolve import Entry, Resolution
from hiresvis.recipe.values import shown

Effect = Literal["refused", "none", "taken"]

# What weights, optimizer state and data order so far were made with. Paths may change, since data may move: the files are compared.
_REFUSED = frozenset(
    {
        "task",
        *(
            f"data.{name}"
            for name in ("classes", "ignore_index", "channels", "scale", "fit", "overlap", "background", "max_pixels", "balance", "augment")
        ),
        *(f"model.{name}" for name in ("name", "pretrained", "init_from", "image_size", "adapt", "freeze", "norm", "drop_path")),
        *("model.lp_ft.head_epochs", "model.lora.rank", "model.lora.alpha"),
        *(f"memory.{name}" for name in ("precision", "channels_last", "compile")),
        *(f"optim.{name}" for name in ("name", "weight_decay", "layer_decay", "loss", "mixup", "cutmix")),
        *(f"train.{name}" for name in ("batch", "seed", "ema", "resize")),
    }
)
# What the stored plan has decided.
_PLANNED = frozenset({*(f"memory.{name}" for name in ("budget", "micro_batch", "spacing", "goal", "exact")), "train.eval_batch"})


@dataclass(frozen=True, slots=True)
class Change:
    """One key whose value is another than the run's own."""

    key: str
    old: Any
    new: Any
    effect: Effect

    def __str__(self) -> str:
        text = f"{self.key}: {_written(self.old)} -> {_written(self.new)}"
        return f"{text}: without effect, the run keeps its own plan" if self.effect == "none" else f"{text}, changed since the run began"


def _written(value: Any) -> str:
    """A value as a recipe would hold it; a path is not cut."""
    return value if isinstance(value, str) else shown(value)


def read_resolved(path: Path) -> dict[str, Entry]:
    """The entries of a `recipe.resolved.yaml`, by key.

    Raises:
        RunFolderError: the file is missing or no recipe.
    """
    with _blamed_on(path):
        return _entries(load_recipe(path))


def parse_resolved(text: str, path: Path) -> dict[str, Entry]:
    """As `read_resolved`, of a text that was read already."""
    with _blamed_on(path):
        return _entries(parse_recipe(text, path))


@contextmanager
def _blamed_on(path: Path) -> Iterator[None]:
    try:
        yield
    except RecipeError as error:
        raise RunFolderError(f"{path}: not the recipe of a run any more; start a new run: log.dir=NEW_FOLDER\n{error}") from error


def _entries(own: LoadedRecipe) -> dict[str, Entry]:
    origins = dict(_origins(own.text))
    entries = {entry.key: entry for entry in Resolution(own).entries}
    return {key: Entry(key, entry.value, *origins.get(key, ("given", ""))) for key, entry in entries.items()}


def _origins(text: str) -> Iterator[tuple[str, tuple[Any, str]]]:
    """(key, (origin, why)) of each line that `Resolution.text` wrote."""
    sections: list[str] = []
    for line in text.splitlines():
        match = re.match(r"( *)(\w+):(.*)$", line)
        if match is None:
            continue
        del sections[len(match[1]) // 2 :]
        _, mark, comment = match[3].rpartition("  # ")
        if not mark:
            sections.append(match[2])
            continue
        origin, _, why = comment.partition(": ")
        if origin in ("given", "default", "auto"):
            yield ".".join([*sections, match[2]]), (origin, why)


def changes(own: Mapping[str, Entry], loaded: LoadedRecipe) -> list[Change]:
    """How a recipe differs from the run's own, in the order of the schema.

    `auto` stands for whatever the run has settled, but for values that are found anew at each start (learning rate, metric, workers):
    there it is a change where the run had a given one.
    """
    now = {entry.key: entry.value for entry in Resolution(loaded).entries}
    found = []
    for key in dict.fromkeys([*now, *own]):
        old, new = own[key].value if key in own else None, now.get(key)
        if old == new or (new == "auto" and (own[key].origin == "auto" or _effect(key, old, new) != "taken")):
            continue
        if key == "train.early_stop" and (f"{key}.patience" in now or f"{key}.patience" in own):
            continue  # null on one side: told by its only key
        if re.match(r"model\.(lp_ft|lora)\b", key) and own["model.adapt"].value != now["model.adapt"]:
            continue  # a way's keys come and go with it: told by adapt
        found.append(Change(key, old, new, _effect(key, old, new)))
    return found


def _effect(key: str, old: Any, new: Any) -> Effect:
    if key in _REFUSED or (key == "data.val" and isinstance(old, float) | isinstance(new, float)):
        return "refused"
    return "none" if key in _PLANNED else "taken"


def refuse_changes(found: list[Change], loaded: LoadedRecipe, run_dir: Path) -> None:
    """Changes that a run cannot take.

    Raises:
        RunFolderError: there are some; each with its place, both values and the mend.
    """
    refused = [change for change in found if change.effect == "refused"]
    if not refused:
        return
    lines = [
        f"{loaded.place(change.key)}  {change.key}  the run was begun with {_written(change.old)}, and this is {_written(change.new)}; "
        f"set it back: {change.key}={_written(change.old)}"
        for change in refused
    ]
    raise RunFolderError("\n".join([f"{run_dir}: a run cannot change this on its way; or begin another: log.dir=NEW_FOLDER", *lines]))


def adopt(own: Mapping[str, Entry], found: list[Change], loaded: LoadedRecipe, resolution: Resolution) -> None:
    """Puts into the resolution what the run has settled and this start does not find anew, so that the folder goes on telling it."""
    settled = {entry.key for entry in resolution.autos}
    kept = {change.key for change in found if change.effect == "none"}
    for entry in Resolution(loaded).entries:
        before, anew = own.get(entry.key), entry.key in settled and entry.key not in _PLANNED
        if before is not None and (entry.key in kept or (entry.value == "auto" and not anew)):
            resolution.set(entry.key, before.value, before.why or "as the run was begun")
