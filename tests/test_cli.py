"""The commands: what goes where, and how they end."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from hiresvis import cli, errors
from hiresvis.run import RunDirectory
from hiresvis.run.events import Notice

ROOT = Path(__file__).resolve().parent.parent


def hiresvis(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "hiresvis", *map(str, arguments)]
    return subprocess.run(call, cwd=cwd, capture_output=True, text=True, check=False)


def ending(error: BaseException, capsys) -> tuple[int, str]:
    """(exit code, what was said) of a command that raises."""
    with pytest.raises(typer.Exit) as caught, cli._ending():
        raise error
    captured = capsys.readouterr()
    assert captured.out == ""
    return caught.value.exit_code, captured.err


def test_help_lists_the_commands_that_exist_and_no_others():
    """Commands of later releases are not offered."""
    done = hiresvis("--help")
    commands = re.findall(r"^  (\w+)  ", done.stdout.partition("Commands:")[2], flags=re.MULTILINE)
    assert commands == ["fit", "plan", "check", "evaluate", "predict", "report", "schema"]
    assert done.returncode == 0


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
    assert "memory.budget  22 has no unit; write 22GiB" in done.stderr


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


def test_predictions_are_a_table_with_a_column_for_each_class():
    """Path, best label, its score, then every class's score."""
    stream = io.StringIO()
    rows = [{"path": "a, b.jpg", "label": "bad", "score": 0.75, "scores": {"good": 0.25, "bad": 0.75}}]
    assert cli._write_predictions(iter(rows), stream) == 1
    assert stream.getvalue() == 'path,label,score,score_good,score_bad\n"a, b.jpg",bad,0.75,0.25,0.75\n'


def test_a_table_takes_its_name_when_it_is_whole(tmp_path):
    """A command that stops leaves the earlier file as it was, and its own rows beside it."""
    out = tmp_path / "out.csv"
    out.write_text("old")

    def stop_half_way() -> None:
        with cli._whole_file(out) as stream:
            stream.write("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        stop_half_way()
    assert (out.read_text(), (tmp_path / "out.csv.partial").read_text()) == ("old", "half")
    with cli._whole_file(out) as stream:
        stream.write("whole")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out.csv", "whole")]
    with pytest.raises(errors.EnvironmentFailed, match="give another file to --out"), cli._whole_file(tmp_path / "no" / "x.csv"):
        pass
