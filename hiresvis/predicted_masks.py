"""Masks that `predict` writes: PNG files of the images' own size, whose values are those of the masks that training read.

Up to 256 values they have a palette, so that viewers show classes apart; the stored number is the class all the same. Above, 16 bits of
grey.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path, PurePath

import numpy as np
import torch
from PIL import Image

from hiresvis.data.masks import PALETTE, values_of
from hiresvis.data.sources import Sample
from hiresvis.errors import EnvironmentFailed, RunFolderError
from hiresvis.run.files import reason
from hiresvis.train.mapping import Strip


@dataclass(frozen=True, slots=True)
class WrittenMask:
    """A mask as it was written: its file, and the share of the image that each class has."""

    path: Path
    shares: dict[str, float]


@dataclass(slots=True)
class MaskWriter:
    """Takes strips of images, one image after another, and writes each when it is complete.

    Args:
        folder: new, or empty.
        classes, ignore: of the run.
    """

    folder: Path
    classes: tuple[str, ...]
    ignore: int | None
    _taken: set[str] = field(default_factory=set)
    _index: int = -1
    _mask: np.ndarray | None = None
    _is_finite: bool = True

    def add(self, strip: Strip, sample: Sample) -> WrittenMask | None:
        """Counts the strip in; None while the image is not complete, then its mask.

        Raises:
            ValueError: the image is complete, and not all of its logits are finite; nothing is written.
            EnvironmentFailed: the disk.
        """
        values = np.asarray(values_of(self.classes, self.ignore), np.uint8 if self._fits_bytes else np.uint16)
        if self._mask is None or self._index != strip.index:
            self._index, self._is_finite = strip.index, True
            self._mask = np.empty(strip.size, np.uint8)
        self._is_finite = self._is_finite and bool(torch.isfinite(strip.logits).all())
        self._mask[strip.top : strip.top + strip.logits.shape[1]] = strip.logits.argmax(dim=0).to(torch.uint8).numpy()
        if not strip.is_last:
            return None
        numbers, self._mask = self._mask, None
        if not self._is_finite:
            raise ValueError("outputs that are not finite")
        counts = np.bincount(numbers.reshape(-1), minlength=len(self.classes))
        path = png_path(self.folder, sample, self._taken)
        self._write(path, values[numbers])
        return WrittenMask(path, {name: int(count) / numbers.size for name, count in zip(self.classes, counts, strict=True)})

    @property
    def _fits_bytes(self) -> bool:
        return max(values_of(self.classes, self.ignore)) < 256

    def _write(self, path: Path, mask: np.ndarray) -> None:
        image = Image.fromarray(mask)
        if self._fits_bytes:
            image.putpalette(PALETTE.reshape(-1).tolist())  # the numbers stay
        write_png(image, path, "--masks")


def png_path(folder: Path, sample: Sample, taken: set[str]) -> Path:
    """The image's name as PNG, below the folder; where two images would share one, with its extension, or a number.

    Tables name images by absolute paths and by `..` as well. Joined to the folder as they are, those are the images themselves, so what
    leads out of it is left out of the name.

    Args:
        taken: names in the folder, in small letters; the new one is added.
    """
    written = PurePath(sample.name)
    inside = "/".join(part for part in written.relative_to(written.anchor).parts if part != os.pardir) or "image"
    stem = os.path.splitext(inside)[0]
    names = chain((f"{stem}.png", f"{inside}.png"), (f"{stem}-{number}.png" for number in count(2)))
    name = next(one for one in names if one.lower() not in taken)
    taken.add(name.lower())
    path = folder / name
    assert Path(os.path.abspath(path)).is_relative_to(os.path.abspath(folder)), f"{path} is not below {folder}"
    return path


def write_png(image: Image.Image, path: Path, option: str) -> None:
    """Writes a picture whole or not at all; its folder is made.

    Raises:
        EnvironmentFailed: it cannot be written; names the option that gave the folder.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        spare = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        image.save(spare, format="PNG")
        spare.replace(path)
    except OSError as error:
        raise EnvironmentFailed(f"{path}: not written ({reason(error)}); give another folder to {option}") from error


def open_folder(folder: Path, option: str = "--masks") -> Path:
    """The folder for pictures, which nothing is in yet: an image with the name of one must not be written over.

    Raises:
        RunFolderError: something is there.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise RunFolderError(f"{folder} holds something already; give a new folder to {option}")
    return folder
