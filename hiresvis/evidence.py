"""Pictures of where in an image the evidence lies: for the report of a run, its worst errors; for `predict --heat`, every image.

A map is laid over what the model was given: preprocessed, padding cut away, windows joined (the mean where they overlap). One image is
looked at at a time, and of one in windows one window.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from hiresvis.backbone.attribution import Asked, contributions, grown, log_odds, output, shares
from hiresvis.data.contract import Contract, load_image, load_window, make_prepare
from hiresvis.data.decode import open_image
from hiresvis.data.regions import Region, Size
from hiresvis.data.sources import Sample
from hiresvis.data.transforms import resize
from hiresvis.device import AUTOCAST_DTYPES, is_out_of_memory, release
from hiresvis.errors import DataError, RecipeError, first_line
from hiresvis.predicted_masks import open_folder, png_path, write_png
from hiresvis.run import RunDirectory
from hiresvis.train.evaluate import eval_mode
from hiresvis.train.features import no_room_for_one
from hiresvis.ui.run_files import EVIDENCE, Prediction, read_run, worst

SECONDS = 120.0  # for the worst errors of a run, all together
MOST_PX = 2048  # of an image in windows: longer ones are put together at a smaller scale
MOST_WINDOWS = 64  # of one of the worst errors
PICTURE_PX, DETAIL_PX = 360, 180
_QUALITY = 82
_OPAQUE = 0.75  # a colour, where the evidence is largest


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """An image as the model was given it: (h, w, 3) uint8, and maps (h, w) of 0 to 1, one for each question."""

    pixels: np.ndarray
    maps: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Looks at images with a trained model.

    Args:
        model: with the weights to ask, on its device.
        contract: how images are read.
        precision: of its forward passes.
    """

    model: nn.Module
    contract: Contract
    precision: str
    device: torch.device

    def at(
        self, sample: Sample, asked: Sequence[Asked], *, most_windows: int | None = None, stop: Callable[[], bool] = lambda: False
    ) -> Seen | None:
        """The image, and where the evidence for each question lies; None where it was stopped.

        Args:
            stop: asked before each window.

        Raises:
            ValueError: the model has none, or the image has more windows than `most_windows`.
            DataError: it cannot be read.
        """
        contract, preprocess = self.contract, self.contract.preprocess()
        with open_image(sample.path, max_pixels=contract.max_pixels, background=contract.background, region=sample.region) as image:
            size, count = image.size, preprocess.num_windows(*image.size)
            if most_windows is not None and count > most_windows:
                raise ValueError(f"{sample.title} has {count} windows, and at most {most_windows} of an image are looked at")
            if count == 1:
                place = preprocess.place(*size)
                if preprocess.in_windows:
                    array = load_window(image, preprocess, 0, sample.path)
                else:
                    array = load_image(sample.path, preprocess, max_pixels=contract.max_pixels, region=sample.region)
                pixels, found = self._seen(array, place.content, asked)
            else:
                joined = _Joined(size, len(asked))
                for number in range(count):
                    if stop():
                        return None
                    place = preprocess.place(*size, number)
                    array = load_window(image, preprocess, number, sample.path)
                    joined.add(place.part, *self._seen(array, place.content, asked))
                pixels, found = joined.pixels, joined.sums / joined.seen
        signed = contract.task == "regress"
        return Seen(pixels, tuple(shares(one, signed=signed).numpy() for one in found))

    def _seen(self, array: np.ndarray, content: Region, asked: Sequence[Asked]) -> tuple[np.ndarray, Tensor]:
        """One input without its padding: (h, w, 3) uint8, and (questions, h, w) of contributions."""
        images = make_prepare(self.contract, self.device, True)(torch.from_numpy(array)[None])
        dtype = AUTOCAST_DTYPES[self.precision]
        with eval_mode(self.model), torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            cells = contributions(self.model, images, asked)[:, 0].cpu()
        maps = torch.stack([grown(one, (array.shape[0], array.shape[1])) for one in cells])
        rows, columns = content.slices
        return _to_be_seen(array[rows, columns]), maps[:, rows, columns]


class _Joined:
    """An image in windows, at a scale at which it is no longer than MOST_PX."""

    def __init__(self, size: Size, num_asked: int) -> None:
        self._scale = min(1.0, MOST_PX / max(size))
        tall, wide = (max(1, round(side * self._scale)) for side in size)
        self.pixels = np.zeros((tall, wide, 3), np.uint8)
        self.sums, self.seen = torch.zeros(num_asked, tall, wide), torch.zeros(tall, wide)

    def add(self, part: Region, pixels: np.ndarray, maps: Tensor) -> None:
        """Takes a window, which lies at `part` of the image."""
        top, left = (min(round(start * self._scale), side - 1) for start, side in zip((part.y, part.x), self.seen.shape, strict=True))
        bottom, right = max(top + 1, round((part.y + part.height) * self._scale)), max(left + 1, round((part.x + part.width) * self._scale))
        rows, columns = slice(top, bottom), slice(left, right)
        size = self.seen[rows, columns].shape
        self.pixels[rows, columns] = resize(pixels, *size)
        self.sums[:, rows, columns] += torch.stack([torch.from_numpy(resize(one.numpy()[..., None], *size)[..., 0]) for one in maps])
        self.seen[rows, columns] += 1


def _to_be_seen(array: np.ndarray) -> np.ndarray:
    """uint8, or float32 in 0 to 1, of any number of channels, as three of bytes."""
    pixels = array if array.dtype == np.uint8 else np.rint(array * 255).astype(np.uint8)
    return np.ascontiguousarray(np.repeat(pixels[..., :1], 3, axis=2) if pixels.shape[2] < 3 else pixels[..., :3])


def overlay(pixels: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """The image in grey under the map's colours, stronger where there is more; (h, w, 3) uint8."""
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)[..., None].astype(np.float32) * 0.8 + 25
    colours = cv2.applyColorMap(np.rint(80 + 150 * heat).astype(np.uint8), cv2.COLORMAP_INFERNO)[..., ::-1]
    strength = _OPAQUE * np.sqrt(heat)[..., None]
    drawn: np.ndarray = np.rint(grey * (1 - strength) + colours * strength).astype(np.uint8)
    return drawn


def _question(contract: Contract, position: int) -> Asked:
    return log_odds(position) if contract.task == "classify" else output(position)


def _asked_of(contract: Contract, row: Prediction) -> list[tuple[str, int]]:
    """(role, class or target) that the evidence is wanted for: what was predicted and what it should have been; of labels those that were
    predicted wrongly, the surest, and those that were missed, the surest likewise; of targets the one that is furthest off."""
    names = contract.classes
    if contract.task == "regress":
        scaled = zip(row.true, row.values, contract.target_std, strict=True)
        off = [abs(true - value) / (std or 1.0) for true, value, std in scaled]
        return [("value", off.index(max(off)))]
    if contract.task == "classify":
        wanted = {"predicted": row.predicted, "label": row.label}
        found = [(role, names.index(name)) for role, name in wanted.items() if name in names]
        return found[:1] if row.right else found
    label, predicted = (set(text.split("|")) for text in (row.label, row.predicted))
    kinds = {"predicted": predicted - label, "missed": label - predicted} if not row.right else {"predicted": predicted}
    chosen = {role: [at for at, name in enumerate(names) if name in group] for role, group in kinds.items()}
    return [(role, max(group, key=row.values.__getitem__)) for role, group in chosen.items() if group]


def write_worst(run: RunDirectory, look: Look, samples: Mapping[str, Sequence[Sample]], *, stop: Callable[[], bool] = lambda: False) -> str:
    """Pictures of a run's worst errors into its folder `worst`, with an index; what was there before is gone.

    Args:
        samples: by split, as the run's predictions.csv has them.
        stop: asked before each image and each of its windows; True ends it with those that are done.

    Returns:
        What was left out and why, in a line; empty: nothing was.

    Raises:
        EnvironmentFailed: the disk is full or not writable.
    """
    folder, begun = run.path(EVIDENCE).parent, time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    rows = worst(read_run(run.root).predictions)
    by_title = {split: {sample.title: sample for sample in own} for split, own in samples.items()}
    index, left_out = list[dict[str, Any]](), list[str]()

    def is_over() -> bool:
        return stop() or time.monotonic() - begun > SECONDS

    try:
        for number, row in enumerate(rows, start=1):
            sample, asked = by_title.get(row.split, {}).get(row.path), _asked_of(look.contract, row)
            if sample is None or not asked:
                continue
            seen, reason = (None, "") if is_over() else _seen_or_why(look, sample, asked, is_over)
            if reason:
                left_out.append(reason)
                continue
            if seen is None:
                left_out.append(f"{len(rows) - number + 1} of {len(rows)} images, for want of time")
                break
            named = [(role, look.contract.classes[position]) for role, position in asked]
            pictures = [{"file": name, **said} for name, said in _write_pictures(run, f"{folder.name}/{number:02d}", seen, named)]
            index.append({"split": row.split, "path": row.path, "pictures": pictures})
    finally:  # whatever ended it, pictures that are there are shown
        run.write_json(EVIDENCE, {"version": 1, "samples": index})
    return "; ".join(dict.fromkeys(left_out))


def _seen_or_why(look: Look, sample: Sample, asked: Sequence[tuple[str, int]], stop: Callable[[], bool]) -> tuple[Seen | None, str]:
    """The image seen, or why it cannot be; None and nothing where it was stopped. What one image does must not cost the others."""
    questions = [_question(look.contract, position) for _, position in asked]
    try:
        return look.at(sample, questions, most_windows=MOST_WINDOWS, stop=stop), ""
    except DataError as error:
        return None, f"{sample.title}: {error.reason}"
    except ValueError as error:
        return None, str(error)
    except (RuntimeError, MemoryError) as error:
        why = f"memory ran out ({first_line(error)})" if is_out_of_memory(error) else first_line(error)
    release()  # out here, where the error with its traceback is gone
    return None, f"{sample.title}: {why}"


def _write_pictures(run: RunDirectory, stem: str, seen: Seen, asked: Sequence[tuple[str, str]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file, what it shows): all that was seen, each map over it, and pixel for pixel where the last one is strongest."""
    small = resize(seen.pixels, *_within(seen.pixels.shape[:2], PICTURE_PX))
    yield _write_picture(run, f"{stem}_seen.jpg", small), {"what": "seen", "size": list(seen.pixels.shape[:2])}
    for (role, name), heat in zip(asked, seen.maps, strict=True):
        drawn = overlay(small, resize(heat[..., None], *small.shape[:2])[..., 0].clip(0, 1))
        yield _write_picture(run, f"{stem}_{role}.jpg", drawn), {"what": role, "name": name, "empty": not heat.any()}
    strongest = seen.maps[-1]
    if max(strongest.shape) >= 1.5 * DETAIL_PX and strongest.any():
        middle = np.unravel_index(int(strongest.argmax()), strongest.shape)
        sides = [min(DETAIL_PX, side) for side in strongest.shape]
        top, left = (
            int(min(max(0, at - length // 2), side - length)) for at, length, side in zip(middle, sides, strongest.shape, strict=True)
        )
        part = seen.pixels[top : top + sides[0], left : left + sides[1]]
        yield _write_picture(run, f"{stem}_detail.jpg", part), {"what": "detail", "name": asked[-1][1], "place": [left, top]}


def _write_picture(run: RunDirectory, name: str, pixels: np.ndarray) -> str:
    _, data = cv2.imencode(".jpg", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
    run.write_bytes(name, data.tobytes())
    return Path(name).name


def _within(size: Size, most_px: int) -> Size:
    factor = min(1.0, most_px / max(size))
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


def new_heat_folder(folder: Path, contract: Contract) -> Path:
    """The folder for heat maps, which nothing is in yet.

    Raises:
        RecipeError: the run's task has no such maps.
        RunFolderError: something is there.
    """
    if contract.task == "segment":
        raise RecipeError(f"--heat {folder}: this run's task is segment, whose masks tell each pixel's class; use --masks")
    if contract.task == "regress" and len(contract.classes) > 1:
        raise RecipeError(f"--heat {folder}: this run has {len(contract.classes)} targets, and a map is of one")
    return open_folder(folder, "--heat")


def with_heat(rows: Iterator[dict[str, Any]], samples: Sequence[Sample], look: Look, folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of `predict`, each with the PNG of its image under the evidence for what is predicted as `heat`; None where there is none.

    An image is read and run a second time for it.

    Raises:
        RecipeError: the model has no such map.
        DoesNotFit: memory ran out.
        EnvironmentFailed: a file cannot be written.
    """
    names, taken = look.contract.classes, set[str]()
    for row, sample in zip(rows, samples, strict=True):  # in this order: samples may be known with their rows
        said = row.get("scores") or row.get("values")
        if said is None:
            yield {**row, "heat": None}
            continue
        best = max(range(len(names)), key=lambda position: said[names[position]])
        seen = _seen_for_heat(look, sample, best, folder)
        path = png_path(folder, sample, taken)
        write_png(Image.fromarray(overlay(seen.pixels, seen.maps[0])), path, "--heat")
        yield {**row, "heat": str(path)}


def _seen_for_heat(look: Look, sample: Sample, position: int, folder: Path) -> Seen:
    try:
        seen = look.at(sample, [_question(look.contract, position)])
    except ValueError as error:
        raise RecipeError(f"--heat {folder}: this run's model gives no map of evidence: {error}") from error
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error, look.device):
            raise
        what = first_line(error)
    else:
        assert seen is not None, "nobody stops it"
        return seen
    release()
    raise no_room_for_one(look.device, f"--heat {folder}, {sample.title}: {what}")
