"""The commands: what goes where, and how they end."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from hiresvis import cli, command, errors
from hiresvis.predictions import table_columns
from hiresvis.run import RunDirectory
from hiresvis.run.events import Notice

ROOT = Path(__file__).resolve().parent.parent


def hiresvis(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "hiresvis", *map(str, arguments)]
    return subprocess.run(call, cwd=cwd, capture_output=True, text=True, check=False)


def ending(error: BaseException, capsys) -> tuple[int, str]:
    """(exit code, what was said) of a command that raises."""
    with pytest.raises(typer.Exit) as caught, command.ending():
        raise error
    captured = capsys.readouterr()
    assert captured.out == ""
    return caught.value.exit_code, captured.err


def test_help_lists_the_commands_that_exist_and_no_others():
    """Commands of later releases are not offered."""
    done = hiresvis("--help")
    commands = re.findall(r"^  (\w+)  ", done.stdout.partition("Commands:")[2], flags=re.MULTILINE)
    assert commands == ["fit", "plan", "check", "evaluate", "predict", "export", "report", "show", "new", "schema", "models", "doctor"]
    assert done.returncode == 0


COMMANDS = typer.main.get_command(cli.app).commands


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_it_takes(name, capsys):
    """The example stands whole on one line of the help, and the command's own parser takes its options and arguments."""
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    (example,) = re.findall(r"^ *Example: hiresvis (.+)$", capsys.readouterr().out, flags=re.MULTILINE)
    words = shlex.split(example.partition(" > ")[0])
    assert words[0] == name
    COMMANDS[name].make_context(name, words[1:])  # raises for an option or a value that does not exist
    for path in (word for word in words if word.startswith("recipes/")):
        assert (ROOT / path).is_file()


def test_version_is_printed():
    """--version gives the name and the version alone."""
    done = hiresvis("--version")
    assert re.fullmatch(r"hiresvis \S+\n", done.stdout)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["fit", "plan", "check"])
def test_a_faulty_recipe_ends_with_2_and_every_problem_on_stderr(tmp_path, command):
    """All problems, of the file and of overrides, are told before anything else is done."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("task: classify\ndata: {train: d}\nmodel: {name: m}\noptim:\n  wieght_decay: 0.1\n")
    done = hiresvis(command, recipe, "train.epochs=0")
    assert (done.returncode, done.stdout) == (2, "")
    first, second = done.stderr.splitlines()
    assert re.fullmatch(rf"{re.escape(str(recipe))}:5:3 +optim\.wieght_decay  unknown key; did you mean weight_decay\?", first)
    assert re.fullmatch(r"override 1 \(train\.epochs=0\) +train\.epochs +0 is below 1; give a whole number of at least 1", second)


def test_a_budget_option_is_checked_like_an_override(tmp_path):
    """--budget takes what memory.budget takes."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("task: classify\ndata: {train: d}\nmodel: {name: m}\n")
    done = hiresvis("plan", recipe, "--budget", "22")
    assert done.returncode == 2
    assert "--budget  22 has no unit; write 22GiB" in done.stderr


@pytest.mark.parametrize("arguments", [("fit",), ("fit", "a.yaml", "--nope"), ("nothing",), ("fit", "a.yaml", "--ui", "loud")])
def test_a_wrong_command_line_ends_with_2(arguments):
    """Usage errors go to stderr."""
    done = hiresvis(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: hiresvis" in done.stderr


def test_schema_is_json_on_stdout():
    """The schema can be redirected into a file as it is."""
    done = hiresvis("schema")
    assert json.loads(done.stdout)["title"] == "hiresvis recipe"
    assert done.stderr == ""


def test_a_reader_that_stops_early_is_no_error(tmp_path):
    """`hiresvis schema | head -1` ends in silence, as does a command whose output is still in the buffer at its end."""
    run = RunDirectory.create(tmp_path / "run", "task: classify\n")
    run.record(Notice(time=1.0, level="info", text="hello"))
    for arguments in (["schema"], ["report", str(run.root)]):
        reader, writer = os.pipe()
        os.close(reader)
        call = [sys.executable, "-m", "hiresvis", *arguments]
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(call, cwd=ROOT, env=buffered, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, "")


def test_report_of_no_run_ends_with_6(tmp_path):
    """A folder that is no run is told with its path."""
    done = hiresvis("report", tmp_path)
    assert (done.returncode, done.stdout) == (6, "")
    assert "not a run folder" in done.stderr


def test_report_prints_the_page_it_wrote(tmp_path):
    """The report is made from the files alone, and its path is the result."""
    run = RunDirectory.create(tmp_path / "run", "task: classify\n")
    run.record(Notice(time=1.0, level="info", text="hello"))
    done = hiresvis("report", run.root)
    assert (done.returncode, done.stdout) == (0, f"{run.report}\n"), done.stderr
    assert run.report.is_file()


def test_report_compares_when_it_is_asked_to(tmp_path):
    """With --compare the page of all runs is in the first one's folder, or where --out says; what does not fit together is told."""
    runs = [RunDirectory.create(tmp_path / name, "task: classify\n").root for name in ("a", "b")]
    for root in runs:
        RunDirectory(root).record(Notice(time=1.0, level="info", text="hello"))
    done = hiresvis("report", runs[0], "--compare", runs[1], "--price", "2.5")
    assert (done.returncode, done.stdout) == (0, f"{runs[0] / 'compare.html'}\n"), done.stderr
    assert not (runs[0] / "report.html").exists()
    for wrong in ([*runs], [runs[0], "--compare"], [runs[0], "--out", "a.html"], [*runs, "--compare", "--out", "a.pdf"]):
        assert hiresvis("report", *wrong).returncode == 2, wrong


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.RecipeError("a"), 2),
        (errors.DataError("a"), 3),
        (errors.DoesNotFit("a", need_bytes=2, budget_bytes=1, largest_part=("x", 1)), 4),
        (errors.TrainingFailed("a"), 5),
        (errors.HubUnreachable("a"), 6),
        (errors.RunFolderError("a"), 6),
        (errors.Interrupted("a"), 130),
        (errors.Interrupted("a", exit_code=143), 143),
        (errors.HiresvisError("a"), 1),
    ],
)
def test_each_error_has_its_exit_code(capsys, error, code):
    """An error of the tree prints its message and ends with its code."""
    assert ending(error, capsys) == (code, "a\n")


def test_ctrl_c_outside_training_ends_with_130(capsys):
    """An interrupt prints no traceback."""
    assert ending(KeyboardInterrupt(), capsys) == (130, "Interrupted.\n")


def test_ctrl_c_after_a_run_was_stopped_keeps_what_was_said_of_it(capsys):
    """A second one that falls between the saving and the message hides neither the message nor its code."""
    late = KeyboardInterrupt()
    late.__context__ = errors.Interrupted("the state was saved", exit_code=143)
    assert ending(late, capsys) == (143, "the state was saved\n")


INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(
    ("prepare", "code", "said"),
    [
        # while the command line is being imported
        (f"sys.meta_path.insert(0, type('Now', (), {{'find_spec': lambda *_: {INTERRUPT}}})())", 130, ""),
        # while a library executes text, as dataclasses do: the interpreter remembers that until its end
        (f"import hiresvis.recipe; hiresvis.recipe.recipe_json_schema = lambda: exec({INTERRUPT!r}, globals())", 130, "Interrupted.\n"),
        # when the command is done and the process is on its way out
        (f"import atexit; atexit.register(lambda: {INTERRUPT})", 0, ""),
    ],
    ids=["importing", "working", "leaving"],
)
def test_ctrl_c_at_any_time_leaves_no_traceback(prepare, code, said):
    """From the start of the program to the last thing it does: an exit code, never death by the signal."""
    text = f"import os, signal, sys; sys.argv = ['hiresvis', 'schema']; from hiresvis.__main__ import main; {prepare}; main()"
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_full_disk_is_the_machines_fault(capsys):
    """The system's own errors about room and rights end with 6."""
    code, said = ending(OSError(errno.ENOSPC, "No space left on device", "x.csv"), capsys)
    assert code == 6
    assert "No space left on device: 'x.csv'; free some space" in said


def test_an_unforeseen_error_is_one_line_and_a_file(capsys, tmp_path, monkeypatch):
    """The line says what happened and where the traceback is; the file has it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, said = ending(ZeroDivisionError("division by zero"), capsys)
    assert code == 1
    assert said.startswith("A fault in hiresvis: ZeroDivisionError: division by zero")
    assert said.count("\n") == 1
    (saved,) = tmp_path.iterdir()
    assert str(saved) in said
    assert "ZeroDivisionError: division by zero" in saved.read_text()


COLUMNS = table_columns("classify", ("good", "bad"))


SOUND = {"path": "a, b.jpg", "label": "bad", "score": 0.75, "scores": {"good": 0.25, "bad": 0.75}, "drift": 0.5, "error": None}
UNREAD = {"path": "c.jpg", "label": None, "score": None, "scores": None, "drift": None, "error": "is empty (0 bytes)"}


def test_predictions_are_a_table_with_a_column_for_each_class():
    """Path, best label, its score, every class's score, and why a file could not be read; those are counted."""
    stream = io.StringIO()
    assert command.write_predictions(COLUMNS, [UNREAD, SOUND], stream, as_json=False) == (2, 1)
    assert stream.getvalue() == (
        'path,label,score,score_good,score_bad,drift,error\nc.jpg,,,,,,is empty (0 bytes)\n"a, b.jpg",bad,0.75,0.25,0.75,0.5,\n'
    )


def test_predictions_as_json_are_an_object_a_line():
    """The same values under the same names, null where there are none."""
    stream = io.StringIO()
    assert command.write_predictions(COLUMNS, [SOUND, UNREAD], stream, as_json=True) == (2, 1)
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == [SOUND, UNREAD]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_path_that_is_no_text_is_written_all_the_same(tmp_path, as_json):
    """Bytes of a name that are no UTF-8 come back from the table as they were, and from JSON by its escapes."""
    name = os.fsdecode(b"caf\xe9.jpg")
    with command.whole_file(tmp_path / "out", command.path_errors(as_json)) as stream:
        command.write_predictions(COLUMNS, [{**SOUND, "path": name}], stream, as_json)
    written = (tmp_path / "out").read_bytes()
    if as_json:
        assert json.loads(written)["path"] == name
    else:
        assert b"\ncaf\xe9.jpg,bad," in written


def test_a_table_takes_its_name_when_it_is_whole(tmp_path):
    """A command that stops leaves the earlier file as it was, and its own rows beside it."""
    out = tmp_path / "out.csv"
    out.write_text("old")

    def stop_half_way() -> None:
        with command.whole_file(out) as stream:
            stream.write("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        stop_half_way()
    assert (out.read_text(), (tmp_path / "out.csv.partial").read_text()) == ("old", "half")
    with command.whole_file(out) as stream:
        stream.write("whole")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out.csv", "whole")]
    with pytest.raises(errors.EnvironmentFailed, match="give another file to --out"), command.whole_file(tmp_path / "no" / "x.csv"):
        pass


def test_only_the_files_own_errors_are_blamed_on_out(tmp_path):
    """What goes wrong while a table is computed passes as it is; an empty .partial is not left behind."""
    out = tmp_path / "out.csv"

    def fails_within(error: OSError) -> None:
        with command.whole_file(out):
            raise error

    with pytest.raises(OSError, match="too many open files") as caught:
        fails_within(OSError(errno.EMFILE, "too many open files", "image.png"))
    assert not isinstance(caught.value, errors.EnvironmentFailed)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a file that cannot be written")
def test_a_full_disk_is_blamed_on_out(tmp_path):
    """Where writing itself fails, the message names the file that was asked for."""
    (tmp_path / "out.csv.partial").symlink_to("/dev/full")
    said = r"out\.csv: not written \(No space left on device\); give another file to --out"
    with pytest.raises(errors.EnvironmentFailed, match=said), command.whole_file(tmp_path / "out.csv") as stream:
        command.write_predictions(COLUMNS, [SOUND], stream, as_json=False)
    (tmp_path / "out.csv.partial").symlink_to("/dev/full")
    with pytest.raises(errors.EnvironmentFailed, match=said), command.whole_file(tmp_path / "out.csv") as stream:
        stream.write("what is written when the file is closed")
    assert not (tmp_path / "out.csv").exists()


def test_predict_on_what_is_no_run_leaves_nothing(tmp_path):
    """Exit 6 with the folder's name, and no file at --out or beside it."""
    done = hiresvis("predict", tmp_path / "nowhere", tmp_path, "--out", tmp_path / "out.csv")
    assert done.returncode == 6
    assert f"{tmp_path / 'nowhere'}: no such folder" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["table.csv", "image.png", "notes.txt", "folder"])
def test_rows_take_no_place_that_something_else_has(tmp_path, name):
    """What is asked about, a folder, and a file of another kind are refused before anything is done, and stay as they are."""
    table, folder = tmp_path / "table.csv", tmp_path / "folder"
    folder.mkdir()
    table.write_text("path\nimage.png\n")
    (tmp_path / "link.csv").symlink_to(table)
    for out in (tmp_path / name, tmp_path / "link.csv"):
        with pytest.raises(typer.BadParameter):
            command.rows_as_json(out, False, [str(tmp_path / "nowhere"), str(table)])
    assert command.rows_as_json(tmp_path / "new.jsonl", False, [str(table)])
    assert not command.rows_as_json(tmp_path / "new.csv", False, [str(table)])
