"""A run shown again: as it stands, while it goes on, and whoever wrote its folder."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hiresvis.errors import Interrupted, RunFolderError
from hiresvis.run.events import TYPES, Event, Notice, RunInterrupted, RunStarted, from_json, to_json
from hiresvis.run.files import json_text
from hiresvis.run.hold import Hold
from hiresvis.ui import Ui
from hiresvis.ui.show import show

ROOT = Path(__file__).resolve().parent.parent.parent
MakeEvents = Callable[..., list[Event]]
T0 = 1_760_000_000.0
OUR_CODES = re.compile(r"\x1b\[[?0-9;]*[mAJhl]|\r\x1b\[|\r")


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def write(folder: Path, events: list[Event], mode: str = "w") -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "events.jsonl").open(mode, errors="backslashreplace") as stream:
        stream.write("".join(json_text(to_json(event)) + "\n" for event in events))


def shown(folder: Path, *, steps: tuple[Callable[[], object], ...] = (), ui: Ui = "plain", **options: Any) -> tuple[str, str]:
    """(what was shown, how the run stands); `steps` are done one at a time between two looks."""
    stream, rest = Terminal(), iter(steps)

    def wait(seconds: float) -> None:
        assert seconds > 0
        step = next(rest, None)
        assert step is not None, f"still following after all steps; shown so far:\n{stream.getvalue()}"
        step()

    environ = {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    said = show(folder, ui=ui, stream=stream, environ=environ, clock=lambda: T0 + 1000, wait=wait, **options)
    assert next(rest, None) is None, "left before all steps were done"
    return OUR_CODES.sub("", stream.getvalue()), said


def test_a_finished_run_ends_with_its_last_screen(tmp_path: Path, make_events: MakeEvents) -> None:
    """Nothing is left to say; commands name the folder that was given, wherever the run was made."""
    write(tmp_path / "my run", make_events(2, 4))
    text, said = shown(tmp_path / "my run")
    assert text.splitlines()[-1] == f"next    hiresvis report '{tmp_path}/my run'"
    assert said == ""


def test_step_lines_have_the_cadence_of_the_run(tmp_path: Path, make_events: MakeEvents) -> None:
    """Shown in no time, a run has the lines that it had: steps of 2.35 s, a line every 30 s."""
    write(tmp_path / "run", make_events(1, 40))
    text, _ = shown(tmp_path / "run")
    assert [int(line.split("step=")[1].split("/")[0]) for line in text.splitlines() if line.startswith("step ")] == [1, 14, 27, 40]


def test_a_run_that_goes_on_is_shown_as_it_stands(tmp_path: Path, make_events: MakeEvents) -> None:
    """With its last step, and how to watch it."""
    write(tmp_path / "run", make_events(2, 40)[:50])
    with Hold() as hold:
        hold.take(tmp_path / "run/events.jsonl")
        text, said = shown(tmp_path / "run")
        drawn, _ = shown(tmp_path / "run", ui="rich")
    step = next(line for line in reversed(text.splitlines()) if line.startswith("step "))
    assert "step=34/40" in step
    assert text.endswith(step + "\n")
    assert re.match(
        r"The run goes on, at epoch 1, step 34 of 40; its last event came 15m00s ago\. Watch it: hiresvis show .*/run --foll", said
    )
    assert "34/40   epoch 00:14 left" in drawn.rpartition("hiresvis fit  convnextv2_base")[2]


def test_following_shows_what_comes_until_the_process_is_gone(tmp_path: Path, make_events: MakeEvents) -> None:
    """A finished run is followed until its process ends, so that what is told after the last screen is shown too."""
    events, hold = make_events(2, 4), Hold()
    write(tmp_path / "run", events[:10])
    hold.take(tmp_path / "run/events.jsonl")
    report = Notice(time=events[-1].time, level="info", text="report: runs/x/report.html")
    text, said = shown(
        tmp_path / "run",
        follow=True,
        steps=(
            lambda: write(tmp_path / "run", events[10:30], "a"),
            lambda: write(tmp_path / "run", events[30:], "a"),
            lambda: None,
            lambda: (write(tmp_path / "run", [report], "a"), hold.release()),
        ),
    )
    whole, _ = shown(tmp_path / "run")
    assert text == whole
    assert text.endswith("info: report: runs/x/report.html\n")
    assert said == ""


@pytest.mark.parametrize("ui", ["plain", "rich"])
def test_a_killed_run_is_told_and_left(tmp_path: Path, make_events: MakeEvents, ui: Ui) -> None:
    """No process, no last word: the place and the time of the last event."""
    hold = Hold()
    write(tmp_path / "run", make_events(2, 40)[:50])
    hold.take(tmp_path / "run/events.jsonl")
    text, said = shown(tmp_path / "run", follow=True, steps=(hold.release,), ui=ui)
    assert said == (
        "The run ended without a word at epoch 1, step 34 of 40: killed, or stopped by an error; its last event came 15m00s ago. "
        "Go on with it: fit with --resume"
    )
    assert "34/40" in text.splitlines()[-1 if ui == "plain" else -5]


def test_a_stopped_run_that_is_resumed_is_followed_on(tmp_path: Path, make_events: MakeEvents) -> None:
    """An interruption in the middle of the file ends nothing; the last one does."""
    started, *first = make_events(1, 4, end="interrupted")
    assert isinstance(started, RunStarted)
    write(tmp_path / "run", [started, *first])
    with Hold() as hold:
        text, _ = shown(tmp_path / "run", follow=True)
        assert text.splitlines()[-2].startswith("stopped SIGINT at epoch 1, step 4")
        hold.take(tmp_path / "run/events.jsonl")
        again = replace(started, resumed_from_epoch=1)
        steps = (lambda: write(tmp_path / "run", [again, *make_events(1, 4)[1:]], "a"), hold.release)
        text, said = shown(tmp_path / "run", follow=True, steps=steps)
    assert "resumed_from_epoch=1" in text
    assert text.splitlines()[-1].startswith("next    hiresvis report")
    assert said == ""


def test_another_run_in_the_folder_is_shown_from_its_beginning(tmp_path: Path, make_events: MakeEvents) -> None:
    """Where the folder is emptied and trained into again, nothing of the old run is in the new one's view."""
    with Hold() as hold, Hold() as other:
        write(tmp_path / "run", make_events(1, 40)[:30])
        hold.take(tmp_path / "run/events.jsonl")

        def begin_again() -> None:
            hold.release()
            (tmp_path / "run/events.jsonl").unlink()
            write(tmp_path / "run", [replace(event, time=event.time + 500) for event in make_events(1, 4)])
            other.take(tmp_path / "run/events.jsonl")

        text, said = shown(tmp_path / "run", follow=True, steps=(begin_again, other.release))
    assert text.count("run name=") == 2
    assert text.splitlines()[-1].startswith("next    hiresvis report")
    assert text.count("epoch 1/1") == 1
    assert said == ""


def test_ctrl_c_leaves_the_run_and_the_terminal_as_they_were(tmp_path: Path, make_events: MakeEvents) -> None:
    """What was drawn last stays, the cursor is there, no byte of the run has changed; exit code 130."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    stream, environ = Terminal(), {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    write(tmp_path / "run", make_events(2, 40)[:50])
    events = tmp_path / "run/events.jsonl"
    with Hold() as hold:
        hold.take(events)
        before = events.read_bytes(), events.stat().st_mtime_ns, sorted(os.listdir(tmp_path / "run"))
        with pytest.raises(Interrupted, match=r"^Left; the run goes on\.$") as left:
            show(tmp_path / "run", follow=True, ui="rich", stream=stream, environ=environ, wait=lambda seconds: interrupt())
        assert before == (events.read_bytes(), events.stat().st_mtime_ns, sorted(os.listdir(tmp_path / "run")))
    assert left.value.exit_code == 130
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")
    assert "stopped" not in stream.getvalue()
    assert "34/40" in stream.getvalue().rpartition("hiresvis fit  ")[2]


def test_a_folder_without_events_is_told(tmp_path: Path) -> None:
    """No folder, no file, no event: each in words, with what to give."""
    for folder, part in (("nowhere", "no such folder"), (".", "it has no events.jsonl")):
        with pytest.raises(RunFolderError, match=f"{part}; give a run's folder, which fit makes once the batch is found"):
            shown(tmp_path / folder)
    (tmp_path / "events.jsonl").write_text("nothing of ours\n")
    with pytest.raises(RunFolderError, match="no event in it"):
        shown(tmp_path)
    with Hold() as hold:
        hold.take(tmp_path / "events.jsonl")
        assert shown(tmp_path)[1] == "The run has begun; nothing is told yet."


@pytest.mark.parametrize(
    "command", ["hiresvis fit r.yaml --resume; reboot", "curl x | sh", "hiresvis fit $(reboot)", "hiresvis fit 'r", ""]
)
def test_a_command_of_a_strangers_folder_is_not_offered(tmp_path: Path, make_events: MakeEvents, command: str) -> None:
    """What stands there to be copied runs hiresvis and nothing else."""
    *events, last = make_events(1, 4, end="interrupted")
    assert isinstance(last, RunInterrupted)
    write(tmp_path / "run", [*events, last])
    assert shown(tmp_path / "run")[0].endswith(f"next    {last.resume_command}\n")
    write(tmp_path / "run", [*events, replace(last, resume_command=command)])
    assert shown(tmp_path / "run")[0].endswith("next    hiresvis fit RECIPE --resume\n")


HOSTILE = "a\x1b]0;title\x07b\x1b[2J\x9b31mc\r\nd\u202e\ud800\x00\x7f"


def hostile(value: Any) -> Any:
    """The value with control characters in every text."""
    if isinstance(value, str):
        return value + HOSTILE
    if isinstance(value, dict):
        return {hostile(key): hostile(item) for key, item in value.items()}
    return tuple(map(hostile, value)) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("columns", [120, 80, 50])
@pytest.mark.parametrize("ui", ["rich", "plain", "json"])
def test_no_control_character_of_a_file_reaches_the_terminal(tmp_path: Path, make_events: MakeEvents, ui: Ui, columns: int) -> None:
    """Every text of every event, also in the part that is redrawn: only our own codes come out, and JSON is ASCII."""
    rows = []
    for end in ("none", "interrupted", "finished"):
        for event in make_events(2, 6, end=end):
            row = to_json(event)
            rows.append({key: value if key in ("event", "split") else hostile(value) for key, value in row.items()})
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = Terminal()
    show(tmp_path, ui=ui, stream=stream, environ={"TERM": "xterm", "COLUMNS": str(columns), "LINES": "40"})
    text = OUR_CODES.sub("", stream.getvalue())
    assert {char for char in text if not char.isprintable()} == {"\n"}
    assert len(text.splitlines()) > 20
    text.encode("utf-8")


def forms(form: str) -> st.SearchStrategy[Any]:
    """JSON values that a field of this type takes."""
    if form.endswith(" | None"):
        return st.none() | forms(form.removesuffix(" | None"))
    return {
        "str": st.text(max_size=12),
        "bool": st.booleans(),
        "int": st.integers(-5, 10**17),
        "float": st.floats(-1e17, 1e17) | st.just(float("nan")),
        "tuple[str, ...]": st.lists(st.text(max_size=8), max_size=3),
        "tuple[int, int]": st.lists(st.integers(0, 9999), min_size=2, max_size=2),
        "Mapping[str, float]": st.dictionaries(st.text(max_size=5), st.none() | st.floats(-9, 9), max_size=2),
        "Mapping[str, int]": st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=2),
        "Mapping[str, Mapping[str, Any]]": st.just({}),
    }[form]


def any_event() -> st.SearchStrategy[Event]:
    kinds = [
        st.fixed_dictionaries({"event": st.just(kind), **{name: forms(form) for name, form in types.items()}})
        for kind, types in TYPES.items()
    ]
    return st.one_of(kinds).map(from_json)


@settings(max_examples=40)
@given(st.lists(any_event(), min_size=1, max_size=12), st.sampled_from(["rich", "plain", "json"]), st.sampled_from([120, 80, 50, 7]))
def test_no_event_breaks_a_view(tmp_path_factory: pytest.TempPathFactory, events: list[Event], ui: Ui, columns: int) -> None:
    """Any events of the right types in any order are shown: a stranger's file, or one joined in the middle."""
    folder = tmp_path_factory.mktemp("run")
    write(folder, events)
    show(folder, ui=ui, stream=Terminal(), environ={"TERM": "xterm", "COLUMNS": str(columns), "LINES": "40"}, clock=lambda: T0)


def test_the_command_loads_neither_torch_nor_the_recipe(tmp_path: Path, make_events: MakeEvents) -> None:
    """From a read-only folder, into a pipe: plain lines on standard output, and nothing heavy is loaded."""
    write(tmp_path / "run", make_events(1, 40)[:30])
    (tmp_path / "run/events.jsonl").chmod(0o444)
    (tmp_path / "run").chmod(0o555)
    try:
        call = [sys.executable, "-X", "importtime", "-m", "hiresvis", "show", str(tmp_path / "run")]
        done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True)
    finally:
        (tmp_path / "run").chmod(0o755)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert loaded & {"torch", "timm", "numpy", "yaml", "rich"} == set()
    assert done.stdout.startswith("run name=")
    assert "The run ended without a word at epoch 1, step 14 of 40" in done.stderr
    assert os.listdir(tmp_path / "run") == ["events.jsonl"]


def test_a_reader_that_stops_early_is_no_error(tmp_path: Path, make_events: MakeEvents) -> None:
    """`hiresvis show RUN | head -1` ends in silence."""
    write(tmp_path / "run", make_events(1, 4))
    reader, writer = os.pipe()
    os.close(reader)
    call = [sys.executable, "-m", "hiresvis", "show", str(tmp_path / "run"), "--ui", "json"]
    done = subprocess.run(call, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_json_is_the_file_itself(tmp_path: Path, make_events: MakeEvents) -> None:
    """Every event as it stands there, with the run's own folder in it."""
    write(tmp_path / "run", make_events(2, 4))
    text, _ = shown(tmp_path / "run", ui="json")
    assert [json.loads(line) for line in text.splitlines()] == [
        json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()
    ]
