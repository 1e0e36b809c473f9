"""The folders that a manifest's paths stay in.

A manifest may come from someone else, and each of its paths is opened with the rights of whoever trains: images that were meant for nobody
would be trained on, and shown in reports and contact sheets. So paths stay in the manifest's own folder, or in one that the recipe names.
What links in these folders lead to is theirs; a manifest cannot make any.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hiresvis.errors import Problem


class Bounds:
    """Holds the paths of one manifest, and counts those that leave.

    Args:
        folders: that paths may name files below.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [os.path.abspath(folder) for folder in folders]
        self._starts = tuple(os.path.join(os.path.realpath(folder), "") for folder in folders)
        self._known: dict[str, bool] = {}  # whether a folder is inside
        self._left: dict[str, int] = {}  # rows by folder
        self._first = ("", "")

    def hold(self, place: str, written: str, file: str) -> bool:
        """Whether a row's file is inside; one that is not is noted.

        Args:
            place: of the row.
            written: the path in it.
            file: where that leads, from the manifest's folder.
        """
        if ".." not in written and not os.path.isabs(written):
            return True
        folder = os.path.dirname(file)
        if folder not in self._known:
            self._known[folder] = self._is_inside(folder)
        if not self._known[folder]:
            self._first = self._first if self._left else (place, file)
            self._left[folder] = self._left.get(folder, 0) + 1
        return self._known[folder]

    def _is_inside(self, folder: str) -> bool:
        """Whether the way to it comes by one of the folders allowed, whatever links it takes, and does not lead out again."""
        inside, real = False, os.getcwd()
        for part in Path(os.path.join(real, folder)).parts:
            real = os.path.dirname(real) if part == ".." else os.path.join(real, part)
            if os.path.islink(real):
                real = os.path.realpath(real)
            inside = (inside and part != "..") or os.path.join(real, "").startswith(self._starts)
        return inside

    @property
    def outside(self) -> str | None:
        """The folder that would hold all files that leave; None: none does."""
        return os.path.commonpath([*map(os.path.realpath, self._left)]) if self._left else None

    def problems(self) -> Iterator[Problem]:
        """One for all rows that leave, with the folder that would hold them."""
        if (least := self.outside) is not None:
            place, file = self._first
            number = sum(self._left.values())
            yield Problem(
                f"{number} {'path leaves' if number == 1 else 'paths leave'} {' and '.join(self._folders)}, the first: {file}. "
                f"If this table may name files there, say so: data.root: {least} (--root {least} for the table of evaluate --data)",
                place,
                "data.root",
            )
