"""What surrounds every command: how it ends, what it says, and the files and rows that it writes."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

import typer

from hiresvis import __version__
from hiresvis.errors import DataError, EnvironmentFailed, HiresvisError, Interrupted

# Of the system's errors, those that say something about the machine and not about this program.
_ENVIRONMENT = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EMFILE, errno.ENFILE)
_JSON_LINES = (".jsonl", ".ndjson")


@contextmanager
def ending() -> Iterator[None]:
    """Turns whatever ends a command into its message and its exit code."""
    try:
        yield
        sys.stdout.flush()
    except HiresvisError as error:
        say(str(error))
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt as error:
        # Where it fell into the end of a run that was stopped before, what was saved is the better message.
        before = error.__context__
        say(str(before) if isinstance(before, Interrupted) else "Interrupted.")
        raise typer.Exit(before.exit_code if isinstance(before, Interrupted) else 130) from None
    except BrokenPipeError:
        # The reader, `head` for one, has what it wanted. What is left in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except typer.Exit:
        raise
    except OSError as error:
        if error.errno not in _ENVIRONMENT:
            raise typer.Exit(_fault(error)) from None
        say(f"{error}; free some space or check permissions, then run it again")
        raise typer.Exit(EnvironmentFailed.exit_code) from None
    except Exception as error:
        raise typer.Exit(_fault(error)) from None


def _fault(error: Exception) -> int:
    """Tells an error that nobody foresaw in one line, and returns its exit code."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(Path(__file__).parent)]
    where = f" ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    say(f"A fault in hiresvis: {type(error).__name__}: {error}{where}. {_save_traceback()}")
    return HiresvisError.exit_code


def _save_traceback() -> str:
    """Writes the traceback of the current exception to a file, and says which."""
    text = f"hiresvis {__version__}, Python {sys.version.split()[0]}, {' '.join(sys.argv)}\n\n{traceback.format_exc()}"
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="hiresvis-fault-", suffix=".txt", delete=False) as stream:
            stream.write(text)
    except OSError:
        return text
    return f"The traceback is in {stream.name}; please report it."


def say(text: str) -> None:
    """A message for people, on standard error."""
    print(text, file=sys.stderr, flush=True)


def ask(question: str, proposed: str) -> str:
    """A question on standard error, and its answer; what is proposed where nothing is typed."""
    return str(typer.prompt(question, default=proposed, err=True))


def print_json(value: Any) -> None:
    from hiresvis.run.files import json_text

    print(json_text(value, indent=2))


def print_report(found: Any, as_json: bool) -> None:
    if not as_json:
        print(*found.lines(), sep="\n")
        return
    value = found.to_json()
    print_json(json.loads(value) if isinstance(value, str) else value)


def path_errors(as_json: bool) -> str:
    """How bytes of a path that are no UTF-8 are written: as they are, or as JSON escapes them."""
    return "backslashreplace" if as_json else "surrogateescape"


def rows_as_json(out: Path | None, asked: bool, inputs: Sequence[str] = ()) -> bool:
    """Whether rows are JSON lines: as asked, or as the file's suffix says. Refuses a file that rows do not belong in.

    Args:
        inputs: what the rows are of; none of them is written over.
    """
    if out is None:
        return asked
    suffix = out.suffix.lower()
    if out.is_dir():
        raise typer.BadParameter(f"{out} is a folder; give a file in it, such as {out / 'rows.csv'}", param_hint="--out")
    if out.exists() and any(os.path.exists(path) and out.samefile(path) for path in inputs):
        raise typer.BadParameter(f"{out} is what is asked about, and would be written over; give another file", param_hint="--out")
    if suffix == ".json":
        raise typer.BadParameter(f"{out}: rows are an object a line, which is called .jsonl", param_hint="--out")
    if asked and suffix == ".csv":
        raise typer.BadParameter(f"{out} is a table and --json asks for objects; give one of the two", param_hint="--out")
    if suffix not in (".csv", *_JSON_LINES):
        raise typer.BadParameter(f"{out}: rows are written as .csv or .jsonl, and any other file there would be lost", param_hint="--out")
    return asked or suffix in _JSON_LINES


def deliver(found: Predictions, out: Path | None, as_json: bool) -> None:
    """Writes the rows of `predict` to a file or to standard output, and tells people the rest.

    Raises:
        DataError: images that cannot be read; every row is written by then.
    """
    from hiresvis.ui.counter import counting

    for note in found.notes:
        say(note)
    if out is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=path_errors(as_json))
    silent = out is None and sys.stdout.isatty()  # the rows themselves show how far it is
    with nullcontext() if silent else counting("predicted", sys.stderr) as progress:
        rows = found.rows if progress is None else _counted(found.rows, found.num_images, progress)
        if out is None:
            num_rows, num_bad = write_predictions(found.columns, rows, sys.stdout, as_json)
        else:
            with whole_file(out, path_errors(as_json)) as stream:
                num_rows, num_bad = write_predictions(found.columns, rows, stream, as_json)
    if out is not None:
        say(f"{num_rows} images: {out}")
    for line in found.ending():
        say(line)
    if num_bad:
        raise DataError(f"{num_bad} of {num_rows} images cannot be read; their rows give the reason as error")


def _counted(
    rows: Iterable[Mapping[str, Any]], total: int | None, progress: Callable[[int, int | None], None]
) -> Iterator[Mapping[str, Any]]:
    for done, row in enumerate(rows, start=1):
        progress(done, total)
        yield row


def write_predictions(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], stream: _Rows, as_json: bool) -> tuple[int, int]:
    """One row an image, each flushed: CSV by the columns of the task, or JSON lines. A table has its header even without a row.

    Returns:
        how many rows there are, and how many images could not be read.
    """
    from hiresvis.predictions import table_row
    from hiresvis.run.files import json_text

    table = csv.DictWriter(stream, columns, lineterminator="\n")
    num_rows, num_bad = 0, 0
    for row in rows:
        num_bad += row["error"] is not None
        if not (num_rows or as_json):  # with the first row, so that a run that fails before it leaves nothing
            table.writeheader()
        num_rows += 1
        if as_json:
            stream.write(json_text(row) + "\n")
        else:
            table.writerow(table_row(row))
        stream.flush()
    if not (num_rows or as_json):
        table.writeheader()
    return num_rows, num_bad


class Predictions(Protocol):
    """What `inference.predict` gives; by its shape, since this is on a lower floor and loads no torch."""

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def num_images(self) -> int | None: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    @property
    def rows(self) -> Iterator[dict[str, Any]]: ...

    @property
    def ending(self) -> Callable[[], Iterator[str]]: ...


class _Rows(Protocol):
    """Where a table goes."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


@dataclass(frozen=True, slots=True)
class _Output:
    """A stream to a file; its own errors name the file, so that those of the work in between can pass as they are."""

    stream: TextIO
    path: Path
    option: str

    def write(self, text: str, /) -> None:
        with _blamed_on(self.path, self.option):
            self.stream.write(text)

    def flush(self) -> None:
        with _blamed_on(self.path, self.option):
            self.stream.flush()


@contextmanager
def _blamed_on(path: Path, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentFailed(f"{path}: not written ({error.strerror or error}); give another file to {option}") from error


@contextmanager
def whole_file(path: Path, errors: str = "strict", option: str = "--out") -> Iterator[_Output]:
    """A file that takes its name when it is complete; what a stopped command wrote stays beside it as .partial, if it wrote anything.

    Raises:
        EnvironmentFailed: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    with _blamed_on(path, option):
        stream = partial.open("w", encoding="utf-8", errors=errors, newline="")
    try:
        yield _Output(stream, path, option)
        with _blamed_on(path, option):
            stream.close()
            os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            stream.close()
        with suppress(OSError):
            if partial.stat().st_size == 0:
                partial.unlink()
            else:
                say(f"{partial} keeps the rows that were done")
        raise
