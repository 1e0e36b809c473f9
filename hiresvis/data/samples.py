"""Draws the sample set `boards`: class folders of large inspection images, with labels for every task and exact masks.

Every image has its own random stream, derived from the seed, the split and its number: the set is the same, byte for byte, whatever the
number of workers. It is drawn beside its place and moved there whole, so a folder of that name is a finished one.
"""

from __future__ import annotations

import csv
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from hiresvis.data.boards import draw_board, draw_style
from hiresvis.errors import DataError, EnvironmentFailed, Problem
from hiresvis.memory.budget import num_cores
from hiresvis.units import format_size

CLASSES = ("defect", "ok")
COLUMNS = ("path", "split", "label", "kinds", "count", "mask", "group")
JPEG_QUALITY = 95
_LOT = 10  # images of one production lot: same colours, fineness and camera; a lot never straddles a split
_DEFECTS = (200, 360)  # per defective board of 2048 px, fewer or more by area
_BYTES_PER_PIXEL = 0.7  # of the files, generously


@dataclass(frozen=True, slots=True)
class _Job:
    folder: Path
    split: str
    split_index: int
    index: int
    size_px: int
    seed: int


def draw_boards(
    folder: Path,
    *,
    num_train: int = 120,
    num_val: int = 40,
    num_test: int = 40,
    size_px: int = 2048,
    seed: int = 0,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Draw a set of boards, half of them with defects: `{train,val,test}/{ok,defect}/*.jpg`, `masks/*.png`, `labels.csv`.

    Args:
        folder: must not exist yet, or be empty.
        num_train: images of the split, both classes together; num_val and num_test alike.
        size_px: side of the square images; larger ones show more board, not larger defects.
        seed: decides every byte.
        workers: threads (opencv works outside Python's lock); None for one per core.
        progress: called with (images drawn, images in all) from the calling thread.

    Returns:
        The path of labels.csv: path, split, label, kinds (`|` between them), count, mask (empty without defects), group.

    Raises:
        DataError: the folder holds something already, or a number is out of range.
        EnvironmentFailed: the disk has too little room.
    """
    counts = {"train": num_train, "val": num_val, "test": num_test}
    _check(folder, counts, size_px)
    folder.parent.mkdir(parents=True, exist_ok=True)
    drawing = Path(tempfile.mkdtemp(prefix=f".{folder.name}-drawing-", dir=folder.parent))
    try:
        jobs = [_Job(drawing, split, place, i, size_px, seed) for place, split in enumerate(counts) for i in range(counts[split])]
        rows = _draw_all(jobs, workers or num_cores(), progress)
        with (drawing / "labels.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        drawing.chmod(0o755)  # mkdtemp's folders are closed to others
        _move(drawing, folder)
    finally:
        shutil.rmtree(drawing, ignore_errors=True)
    return folder / "labels.csv"


def _check(folder: Path, counts: dict[str, int], size_px: int) -> None:
    problems = [f"{count} images for {split}; give 0 or more" for split, count in counts.items() if count < 0]
    problems += [f"{size_px} px is below the smallest board, 256 px"] if size_px < 256 else []
    problems += [f"{folder} holds something already; remove it, or draw into another folder"] if _is_taken(folder) else []
    if problems:
        raise DataError([Problem(message, place="boards") for message in problems])
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    need, free = int(sum(counts.values()) * size_px * size_px * _BYTES_PER_PIXEL), shutil.disk_usage(existing).free
    if need > free:
        raise EnvironmentFailed(
            f"{folder}: {sum(counts.values())} boards of {size_px} px take up to {format_size(need)}; {format_size(free)} free"
        )


def _is_taken(folder: Path) -> bool:
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


def _move(drawing: Path, folder: Path) -> None:
    """Put the finished set in its place, in one step."""
    if folder.is_dir() and os.name == "nt":
        folder.rmdir()  # a rename onto an empty folder works elsewhere
    try:
        drawing.rename(folder)
    except OSError as error:
        raise DataError([Problem(f"{folder} appeared while the boards were drawn; that one was kept", place="boards")]) from error


def _draw_all(jobs: list[_Job], workers: int, progress: Callable[[int, int], None] | None) -> list[dict[str, str | int]]:
    """Rows of labels.csv in the jobs' order."""
    for job in jobs:
        for label in CLASSES:
            (job.folder / job.split / label).mkdir(parents=True, exist_ok=True)
    (jobs[0].folder / "masks").mkdir() if jobs else None
    threads = cv2.getNumThreads()
    cv2.setNumThreads(1)  # one board per core is faster than one board on all of them
    try:
        with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
            futures = [pool.submit(_draw, job) for job in jobs]
            try:
                for done, future in enumerate(as_completed(futures), start=1):
                    future.result()
                    if progress is not None:
                        progress(done, len(futures))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        cv2.setNumThreads(threads)
    return [future.result() for future in futures]


def _draw(job: _Job) -> dict[str, str | int]:
    """Draw and write one board, with its mask where it has defects."""
    lot = job.index // _LOT
    style = draw_style(np.random.default_rng([job.seed, job.split_index, lot, 1]))
    rng = np.random.default_rng([job.seed, job.split_index, job.index, 2])
    defective = job.index % 2 == 1
    share = (job.size_px / 2048) ** 2
    num_defects = max(1, round(int(rng.integers(_DEFECTS[0], _DEFECTS[1] + 1)) * share)) if defective else 0
    board = draw_board(job.size_px, style, num_defects, rng)
    label = "defect" if defective else "ok"
    path = f"{job.split}/{label}/board_{job.index:05d}.jpg"
    mask = f"masks/{job.split}_board_{job.index:05d}.png" if defective else ""
    _write(job.folder / path, board.image, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    if mask:
        _write(job.folder / mask, board.mask, [cv2.IMWRITE_PNG_BILEVEL, 1])
    return {
        "path": path,
        "split": job.split,
        "label": label,
        "kinds": "|".join(sorted(set(board.kinds))),
        "count": len(board.kinds),
        "mask": mask,
        "group": f"{job.split}-lot-{lot:03d}",
    }


def _write(path: Path, image: np.ndarray, options: list[int]) -> None:
    # opencv's own writer knows no non-ASCII paths on Windows and tells of failure by False.
    whole, data = cv2.imencode(path.suffix, image, options)
    assert whole, path
    path.write_bytes(data.tobytes())
