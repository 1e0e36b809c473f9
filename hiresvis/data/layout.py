"""What a folder or a table holds, in the words of a recipe: the task, where the splits are, which columns mean what.

A guess by names, which costs no pixel; whoever reads the data by it (sources.py) says whether it holds. In a folder are looked for, in
this order: folders of the splits (train, val, test under their usual names) with class folders or images/ and masks/ in them; images/ and
masks/; class folders; manifests; one folder that holds any of these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hiresvis.data.bounds import Bounds
from hiresvis.data.columns import MOST_ROWS, Reading, readings
from hiresvis.data.folders import PAIR_FOLDERS, SPLIT_WORDS, count_files, first_image, is_ignored, is_image_name, list_folder
from hiresvis.data.manifest import MANIFEST_SUFFIXES
from hiresvis.data.sources import refuse_missing
from hiresvis.data.tables import read_head
from hiresvis.errors import DataError, Problem

VAL_SHARE = 0.15
_NO_CLASSES = {"images", "image", "imgs", "img", "masks", "mask", "labels", "annotations", "thumbnails", "data", "dataset", "jpg", "png"}
_SHOWN = 8

Value = str | float | Path | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """One reading of a source.

    Attributes:
        data: of the recipe's data section, by key; paths as they were found.
        reasons: for task and for the keys of `data`.
        notes: what was passed over, and other ways to read it.
        hints: what else may be wrong where it cannot be read.
    """

    task: str
    data: Mapping[str, Value]
    reasons: Mapping[str, str]
    notes: tuple[str, ...] = ()
    hints: tuple[Problem, ...] = ()


def look(source: Path, given: Mapping[str, str | tuple[str, ...]]) -> tuple[Layout, ...]:
    """Every way to read a source, the likeliest first; at least one.

    Args:
        source: a folder or a manifest.
        given: what of task, and of the columns by their keys in data, is settled.

    Raises:
        DataError: there is none; says what was found and what would do.
    """
    refuse_missing(source)
    if not source.is_dir():
        return _tables({"train": source}, given)
    return _folder(source, given)


def _folder(root: Path, given: Mapping[str, str | tuple[str, ...]]) -> tuple[Layout, ...]:
    listing = [(name, is_folder) for name, is_folder in list_folder(root) if not is_ignored(name)]
    folders = [name for name, is_folder in listing if is_folder and not is_image_name(name)]
    tables = [root / name for name, is_folder in listing if not is_folder and Path(name).suffix.lower() in MANIFEST_SUFFIXES]
    splits = _by_split(folders, root)
    way = _of_splits(root, splits) if "train" in splits else "sets" if splits and len(splits) == len(folders) else _kind(root, folders)
    if isinstance(way, Layout) and given.get("task", way.task) == way.task:
        return (replace(way, notes=(*way.notes, *_beside(tables))),)
    if tables:
        return _tables(_one_table_a_split(tables, root), given)
    if isinstance(way, Layout):
        raise DataError([Problem(f"folders of {_words(way.task)}, and the task is {given['task']}; give a manifest", str(root), "task")])
    if len(folders) == 1 and not any(is_image_name(name) for name, is_folder in listing if not is_folder):
        inner = root / folders[0]
        if any(
            is_folder or Path(name).suffix.lower() in MANIFEST_SUFFIXES for name, is_folder in list_folder(inner) if not is_ignored(name)
        ):
            return _folder(inner, given)
    raise DataError([_nothing(root, folders, splits)])


def _words(task: str) -> str:
    return "images and masks" if task == "segment" else "classes"


def _beside(tables: Sequence[Path]) -> list[str]:
    return [f"{table.name} lies beside the folders: hiresvis new {table} reads that instead" for table in tables]


def _by_split(folders: Sequence[str], root: Path) -> dict[str, str]:
    """Folder names by the split that they are called after.

    Raises:
        DataError: two of them are of one split.
    """
    found: dict[str, str] = {}
    for name in folders:
        split = SPLIT_WORDS.get(name.casefold())
        if split in found:
            text = f"{found[split]}/ and {name}/ are both folders of {split}; keep one, or write data.{split} into a recipe by hand"
            raise DataError([Problem(text, str(root))])
        if split is not None:
            found[split] = name
    return found


def _kind(root: Path, folders: Sequence[str]) -> Layout | str:
    """The layout of one split, or in a word why it is none: flat, sets, empty."""
    if set(PAIR_FOLDERS) <= set(folders):
        reasons = {"task": "images/ and masks/", "train": "its images/, each with the mask of its name in masks/"}
        return Layout("segment", {"train": root}, reasons)
    filled = [name for name in folders if first_image(root / name) is not None]
    inner = {name: {child for child, is_folder in list_folder(root / name) if is_folder} for name in filled}
    if any(
        len({word.casefold() for word in children} & SPLIT_WORDS.keys()) > 1 or set(PAIR_FOLDERS) <= children for children in inner.values()
    ):
        return "sets"
    if not filled or (len(filled) == 1 and len(folders) == 1) or any(name.casefold() in _NO_CLASSES for name in filled):
        return "flat" if filled or first_image(root) is not None else "empty"
    return Layout("classify", {"train": root}, {"task": "class folders", "train": "a folder for each class"})


def _of_splits(root: Path, splits: Mapping[str, str]) -> Layout | str:
    """The layout of folders called after the splits; those of another kind than train's are left out, with a note."""
    ways: dict[str, Layout | str] = {}
    for split, name in splits.items():
        inner = [child for child, is_folder in list_folder(root / name) if is_folder and not is_ignored(child) and not is_image_name(child)]
        ways[split] = _kind(root / name, inner)
        if len(inner) == 1 and ways[split] == "flat" and first_image(root / name / inner[0]) and inner[0].casefold() not in _NO_CLASSES:
            ways[split] = Layout("classify", {}, {"task": "class folders"})  # of one class alone
    train = ways["train"]
    if not isinstance(train, Layout):
        return train
    data: dict[str, Value] = {"train": root / splits["train"]}
    reasons = {"task": f"{train.reasons.get('task', 'class folders')} in {splits['train']}/"}
    notes = []
    for split in ("val", "test"):
        way = ways.get(split)
        if isinstance(way, Layout) and way.task == train.task:
            data[split] = root / splits[split]
        elif way is not None:
            what = "holds no images" if way == "empty" else "has other folders than train's"
            notes.append(f"{splits[split]}/ {what}, and is left out; hiresvis predict takes images without labels")
    return Layout(train.task, data, reasons, tuple(notes))


def _one_table_a_split(tables: Sequence[Path], root: Path) -> dict[str, Path]:
    """Manifests by split: the only one is train's.

    Raises:
        DataError: there are several, and their names do not say which is which.
    """
    if len(tables) == 1:
        return {"train": tables[0]}
    found: dict[str, Path] = {}
    for table in tables:
        words = [SPLIT_WORDS[word] for word in re.split(r"[\W_]+", table.stem.casefold()) if word in SPLIT_WORDS]
        if words and words[0] in found:
            found.clear()
            break
        if words:
            found[words[0]] = table
    if "train" in found:
        return found
    able = []
    for table in tables:
        try:
            readings(read_head(table, MOST_ROWS), table, {})
        except DataError:
            continue
        able.append(table)
    if len(able) == 1:
        return {"train": able[0]}
    names = ", ".join(table.name for table in able or tables)
    why = "which of them is meant is not clear" if able else "none of them names images and what they show"
    raise DataError([Problem(f"holds the tables {names}, and {why}; give one: hiresvis new {(able or list(tables))[0]}", str(root))])


def _tables(tables: Mapping[str, Path], given: Mapping[str, str | tuple[str, ...]]) -> tuple[Layout, ...]:
    """The ways to read the manifest of train, with those of val and test where they have its columns."""
    train = tables["train"]
    if train.suffix.lower() not in MANIFEST_SUFFIXES:
        what = "is an image; give the folder that holds it" if is_image_name(train.name) else "is no data set; give a folder of images"
        raise DataError([Problem(f"{what}, or a manifest ({', '.join(MANIFEST_SUFFIXES)})", str(train))])
    head = read_head(train, MOST_ROWS)
    return tuple(_of_table(reading, tables) for reading in readings(head, train, given))


def _of_table(reading: Reading, tables: Mapping[str, Path]) -> Layout:
    train = tables["train"]
    data: dict[str, Value] = {"train": train, **reading.columns}
    reasons = {"train": "the manifest", **reading.reasons}
    notes = list(reading.notes)
    if reading.task == "segment":
        data.pop("region", None)
    written = _written(train, reading)
    label = reading.columns["label"]
    needed = {str(reading.columns["image"]), *((label,) if isinstance(label, str) else label)}
    for split in ("val", "test"):
        if split not in tables or "split" in reading.columns:
            continue
        lacking = sorted(needed - set(read_head(tables[split], 1).columns))
        if lacking:
            notes.append(f"{tables[split].name} has no column {lacking[0]}, and is left out; hiresvis predict takes images without labels")
        else:
            data[split] = tables[split]
    bounds = Bounds([train.parent])
    for name in written:
        bounds.hold("", name, str(train.parent / name))
    if bounds.outside is not None:
        data["root"], reasons["root"] = Path(bounds.outside), "the table names files below it; paths that leave it are refused"
    return Layout(reading.task, data, reasons, tuple(notes), tuple(_elsewhere(train, written)))


def _written(table: Path, reading: Reading) -> list[str]:
    head = read_head(table, MOST_ROWS)
    place = head.columns.index(str(reading.columns["image"])) if reading.columns["image"] in head.columns else None
    return [] if place is None else [name for row in head.rows if (name := row[place]) and "\0" not in name]


def _elsewhere(table: Path, written: Sequence[str]) -> list[Problem]:
    """Where the images are that a table names from another folder than its own."""
    lost = [name for name in written if not (table.parent / name.replace("\\", "/")).exists()]
    if not lost or len(lost) < len(written):
        return []
    for folder, is_folder in list_folder(table.parent):
        if is_folder and not is_ignored(folder) and (table.parent / folder / lost[0]).exists():
            text = f"names {lost[0]}, which is in {folder}/; write {folder}/ before each path, or move the table there"
            return [Problem(text, str(table), "data.image")]
    return []


def _nothing(root: Path, folders: Sequence[str], splits: Mapping[str, str]) -> Problem:
    """Why a folder is no data set, and what would be one."""
    layouts = "class folders (cat/1.jpg, dog/2.jpg), images/ and masks/, or a manifest with a path and a label column"
    if splits and "train" not in splits and set(splits.values()) == set(folders):
        return Problem(f"holds {' and '.join(sorted(splits.values()))}, and no train; give the folder that holds train too", str(root))
    number, others = count_files(root)
    if not number:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common(_SHOWN))
        return Problem(f"holds no images{f' (files of other kinds: {kinds})' if kinds else ''}; give {layouts}", str(root))
    if any(_kind(root / name, [child for child, is_folder in list_folder(root / name) if is_folder]) != "flat" for name in folders):
        return Problem(f"holds data sets of its own: {', '.join(folders[:_SHOWN])}; give one of them", str(root))
    if len(folders) == 1 and folders[0].casefold() not in _NO_CLASSES:
        return Problem(f"{folders[0]!r} is the only class, of {number} images; a classifier needs two: add a folder of another", str(root))
    return Problem(f"holds {number} images, and nothing says what they show; give {layouts}", str(root))
