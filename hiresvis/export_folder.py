"""The folder of an export: it takes its name when it is whole, and takes nobody else's place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hiresvis.errors import EnvironmentFailed, RunFolderError
from hiresvis.run.files import reason, sync


@contextmanager
def whole_folder(out: Path, *, ours: Collection[str], force: bool) -> Iterator[Path]:
    """A folder beside `out` that takes its name when the work inside is done, and is gone when it fails.

    Args:
        ours: names of files that such a folder may hold; one with others is somebody else's.
        force: replace what is there.

    Raises:
        RunFolderError: something is at `out` that is not to be replaced.
        EnvironmentFailed: it cannot be written.
    """
    out = _named(out)
    _refuse_existing(out, ours, force=force)
    stage, old = (out.with_name(f".{out.name}.{os.getpid()}.{kind}") for kind in ("tmp", "old"))
    made = [folder for folder in out.parents if not folder.exists()]
    stands_in, names = False, set[str]()
    try:
        with _blamed_on(out):
            stage.mkdir(parents=True)
        yield stage
        with _blamed_on(out):
            names = set(os.listdir(stage))
            for path in (*stage.iterdir(), stage):
                sync(path)
            if out.exists() and out.samefile(os.curdir):
                old.mkdir()
                stands_in = True
                _move_files(out, old)
                _move_files(stage, out)
            else:
                if out.exists():
                    os.replace(out, old)
                os.replace(stage, out)
            sync(out.parent)
    except BaseException:
        if stands_in:
            for name in names - set(os.listdir(stage)):
                (out / name).unlink(missing_ok=True)
            _move_files(old, out)
            old.rmdir()
        elif old.exists() and not out.exists():
            os.replace(old, out)
        shutil.rmtree(stage, ignore_errors=True)
        for folder in made:
            with suppress(OSError):  # not empty: somebody else's
                folder.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)
    if stands_in:
        stage.rmdir()


def _move_files(source: Path, target: Path) -> None:
    """File by file, for the folder that one stands in: were it moved itself, one would stand in a folder that is gone."""
    for path in sorted(source.iterdir()):
        os.replace(path, target / path.name)


def _named(out: Path) -> Path:
    """The path with a name at its end, beside which another can be written: `.` and `..` have none."""
    return out.resolve() if ".." in out.parts else out.absolute()


def _refuse_existing(out: Path, ours: Collection[str], *, force: bool) -> None:
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise RunFolderError(f"{out} is a file; give a folder to --out")
    there = {path.name for path in out.iterdir()}
    if strange := sorted(there - set(ours)):
        raise RunFolderError(f"{out} is there already and holds {strange[0]}, which no export made; give another folder to --out")
    if there and not force:
        raise RunFolderError(f"{out} holds an export already; give another folder to --out, or --force to replace it")


@contextmanager
def _blamed_on(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentFailed(f"{out}: not written ({reason(error)}); give another folder to --out") from error
