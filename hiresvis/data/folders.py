"""Walks folders of images. Hidden and system files are ignored by name and listed; other extensions are counted."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hiresvis.data.regions import Region
from hiresvis.errors import DataError, Problem

IMAGE_EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".svs", ".bmp", ".jp2", ".j2k", ".heic", ".heif", ".avif"}
)
SYSTEM_NAMES = frozenset({"__macosx", "thumbs.db", "desktop.ini", "@eadir", "$recycle.bin", "lost+found"})
PAIR_FOLDERS = ("images", "masks")
CLASS_FILE = "classes.txt"
MAX_PROBLEMS = 20
SPLIT_WORDS: Mapping[str, str] = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validation": "val", "dev": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
"""How folders and tables call the splits, in lower case."""


# A class, the classes that apply, or numbers, as the source names them; None: not known.
Label = str | tuple[str, ...] | tuple[float, ...] | None


class Entry(NamedTuple):
    """One image as its source names it, before labels become numbers. A tuple of texts: a table makes one for each of its rows."""

    file: str | Path
    name: str  # relative, forward slashes
    row: str
    label: Label
    group: str | None = None
    split: str | None = None
    region: Region | None = None
    mask: Path | None = None  # segment; None: every pixel is of the first class


@dataclass(frozen=True, slots=True)
class Scan:
    """What one source holds. `folders` are all class folders, empty ones included; of a table, the columns that name outputs."""

    entries: tuple[Entry, ...]
    folders: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def is_ignored(name: str) -> bool:
    """Whether a file or folder name is hidden (`.ipynb_checkpoints`, `._x.jpg`) or a system's own (`__MACOSX`, `Thumbs.db`)."""
    return name.startswith(".") or name.lower() in SYSTEM_NAMES


def is_image_name(name: str) -> bool:
    """Whether the extension, in whatever case, is one that the decoder reads."""
    return os.path.splitext(name)[1].lower() in IMAGE_EXTENSIONS


def list_folder(folder: Path) -> list[tuple[str, bool]]:
    """(name, is a folder) of everything in a folder, sorted, ignored names included.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with os.scandir(folder) as found:
            return sorted((entry.name, entry.is_dir()) for entry in found)
    except OSError as error:
        raise DataError([Problem(f"cannot be listed: {error.strerror}", str(folder))]) from error


def first_image(folder: Path) -> str | None:
    """The relative name of an image at any depth; None: there is none.

    Raises:
        DataError: a folder cannot be read.
    """
    return next(_Walk(folder).images(folder, ""), None)


def count_files(folder: Path) -> tuple[int, Counter[str]]:
    """(images, other files by extension) at any depth.

    Raises:
        DataError: a folder cannot be read.
    """
    walk = _Walk(folder)
    return sum(1 for _ in walk.images(folder, "")), walk.skipped


def scan_class_folders(root: Path) -> Scan:
    """Every image below `root/<class>/`, at any depth, sorted by relative path.

    Raises:
        DataError: there is no class folder, or the folders are splits rather than classes.
    """
    walk = _Walk(root)
    top = walk.list_folder(root, "")
    folders = tuple(name for name, is_folder in top if is_folder)
    loose = [name for name, is_folder in top if not is_folder and is_image_name(name)]
    if not folders:
        found = f"{len(loose)} images and no folder" if loose else "nothing to read"
        raise DataError([Problem(f"no class folders: found {found}; expected {root.name}/<class>/<image>, or a csv manifest", str(root))])
    if len(folders) > 1 and {name.lower() for name in folders} <= SPLIT_WORDS.keys():
        raise DataError(
            [Problem(f"its folders are splits, not classes: {', '.join(folders)}; name one of them, as in {root / folders[0]}", str(root))]
        )
    entries = [Entry(path := str(root / name), name, path, label) for label in folders for name in walk.images(root / label, f"{label}/")]
    walk.count(name for name, is_folder in top if not is_folder and not is_image_name(name))
    warnings = [f"{root}: {len(loose)} images outside any class folder are left out, the first is {loose[0]}"] if loose else []
    entries.sort(key=lambda entry: entry.name)
    return Scan(tuple(entries), folders, tuple(sorted(walk.ignored)), walk.skipped, tuple(warnings))


def scan_pairs(root: Path) -> Scan:
    """Every image of `root/images` with the mask of its name in `root/masks`, extensions aside, sorted by relative path.

    Raises:
        DataError: a folder is missing, an image has no mask or several, or two images share one.
    """
    lacking = [name for name in PAIR_FOLDERS if not (root / name).is_dir()]
    if lacking:
        text = f"no folder {' and no folder '.join(lacking)}: expected {root.name}/images and {root.name}/masks, or a manifest"
        raise DataError([Problem(text, str(root))])
    walk = _Walk(root)
    images, masks = dict[str, list[str]](), dict[str, list[str]]()
    for folder, found in zip(PAIR_FOLDERS, (images, masks), strict=True):
        for name in walk.images(root / folder, f"{folder}/"):
            found.setdefault(os.path.splitext(name.partition("/")[2])[0], []).append(name)
    problems = []
    for stem, names in sorted(images.items()):
        if len(names) > 1:
            problems.append(Problem(f"{' and '.join(names)} would share a mask; name images apart from their extensions", str(root)))
        elif len(of_it := masks.get(stem, [])) != 1:
            what = f"has {len(of_it)} masks, {' and '.join(of_it)}; keep one" if of_it else f"has no mask; expected masks/{stem}.png"
            problems.append(Problem(what, str(root / names[0])))
    if problems:
        raise DataError(limited(problems))
    alone = sorted(names[0] for stem, names in masks.items() if stem not in images)
    warnings = [f"{root}: {len(alone)} masks without an image are left out, the first is {alone[0]}"] if alone else []
    pairs = sorted((names[0], masks[stem][0]) for stem, names in images.items())
    entries = [Entry(root / name, name, str(root / name), None, mask=root / mask) for name, mask in pairs]
    return Scan(tuple(entries), (), tuple(sorted(walk.ignored)), walk.skipped, tuple(warnings))


def listed_classes(folder: Path) -> tuple[str, ...]:
    """The lines of `classes.txt` in a folder, names in the order of the masks' values; nothing where there is no such file.

    Raises:
        DataError: it cannot be read, or names a class twice.
    """
    path = folder / CLASS_FILE
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError([Problem(f"cannot be read: {error}", str(path))]) from error
    names = tuple(line.strip() for line in lines if line.strip())
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise DataError([Problem(f"names {', '.join(twice)} twice; one line a class", str(path))])
    return names


def limited(problems: Sequence[Problem], limit: int = MAX_PROBLEMS) -> list[Problem]:
    """The first problems, and one that counts the rest."""
    rest = len(problems) - limit
    return [*problems] if rest <= 0 else [*problems[:limit], Problem(f"... and {rest} more of these")]


def scan_unlabelled(paths: Sequence[Path]) -> Scan:
    """Files as given (whatever they are called) and every image below the folders, in the order given."""
    entries: list[Entry] = []
    ignored: list[str] = []
    skipped: Counter[str] = Counter()
    for path in paths:
        if path.is_dir():
            walk = _Walk(path)
            entries += [Entry(file := str(path / name), name, file, None) for name in sorted(walk.images(path, ""))]
            ignored += walk.ignored
            skipped += walk.skipped
        else:
            entries.append(Entry(str(path), path.name, str(path), None))
    return Scan(tuple(entries), (), tuple(sorted(ignored)), skipped)


class _Walk:
    """One walk with its record of what was passed over. Links to folders are followed, circles are not."""

    def __init__(self, root: Path) -> None:
        self.ignored: list[str] = []
        self.skipped: Counter[str] = Counter()
        self._seen = {os.path.realpath(root)}

    def list_folder(self, folder: Path, prefix: str) -> list[tuple[str, bool]]:
        """(name, is a folder) of everything that is not ignored, sorted.

        Raises:
            DataError: the folder cannot be read.
        """
        listing = list_folder(folder)
        self.ignored += [f"{prefix}{name}{'/' if is_folder else ''}" for name, is_folder in listing if is_ignored(name)]
        return [(name, is_folder) for name, is_folder in listing if not is_ignored(name)]

    def images(self, folder: Path, prefix: str) -> Iterator[str]:
        """Relative names of the images at any depth.

        A folder that is called like an image counts as one, so that the decoder can say what is wrong with it.
        """
        real = os.path.realpath(folder)
        if real in self._seen and prefix:
            return
        self._seen.add(real)
        for name, is_folder in self.list_folder(folder, prefix):
            if is_image_name(name):
                yield prefix + name
            elif is_folder:
                yield from self.images(folder / name, f"{prefix}{name}/")
            else:
                self.count([name])

    def count(self, names: Iterable[str]) -> None:
        """Counts files that are no images by name."""
        self.skipped.update(os.path.splitext(name)[1].lower() or "(no extension)" for name in names)
