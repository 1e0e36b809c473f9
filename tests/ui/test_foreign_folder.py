"""A run folder that somebody else made: there is a page whatever lies in it, with nothing from outside, and it tells what is unusable."""

from __future__ import annotations

import base64
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hiresvis.ui.compare import write_comparison
from hiresvis.ui.report import render_report
from hiresvis.ui.run_files import read_run
from hiresvis.ui.run_json import CONTRACT, PLAN, parse

Make = Callable[..., Any]
READ = ("events.jsonl", "plan.json", "contract.json", "recipe.resolved.yaml", "recipe.yaml", "predictions.csv", "metrics.csv",
        "samples.csv", "reliability.json", "worst/index.json")  # fmt: skip
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), st.text(max_size=3), st.just([]), st.just({}), st.just([{}]),
    st.just({"a": [1]}), st.just([[1]]), st.just(10**400),
)  # fmt: skip


def pictured(run: Path, file: str, content: bytes | None = None) -> None:
    """One of the worst errors has this picture."""
    (run / "worst").mkdir(exist_ok=True)
    sample = {"split": "val", "path": "a", "pictures": [{"file": file, "what": "seen"}]}
    (run / "worst" / "index.json").write_text(json.dumps({"samples": [sample]}))
    if content is not None:
        (run / "worst" / file).write_bytes(content)


def gap_of(run: Path, name: str) -> str:
    """What the page says of a file that it cannot use."""
    page = render_report(read_run(run))
    (gap,) = [gap for gap in read_run(run).gaps if gap.startswith(name)]
    assert name in page
    return gap


@pytest.mark.parametrize("name", READ)
def test_no_link_is_followed(make_events: Make, make_run: Make, tmp_path: Path, name: str) -> None:
    """Whichever file is one to something outside: its words are not on the page, and the page says so."""
    run = make_run(make_events(1, 3), images=0)
    (run / "worst").mkdir()
    (tmp_path / "secret").write_text("split,path,label,sesame\n{'a': 'sesame'}\n")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "secret")
    assert gap_of(run, Path(name).name).endswith("a link, which is not followed")
    assert "sesame" not in render_report(read_run(run))


def test_no_picture_comes_from_outside(make_events: Make, make_run: Make, tmp_path: Path) -> None:
    """A link in worst/, and worst/ as a link."""
    run = make_run(make_events(1, 3), images=0)
    (tmp_path / "secret").write_bytes(b"open sesame")
    pictured(run, "01.jpg")
    (run / "worst" / "01.jpg").symlink_to(tmp_path / "secret")
    assert "a link, which is not followed" in gap_of(run, "worst/index.json")
    (run / "worst" / "01.jpg").unlink()
    (run / "worst").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "01.jpg").write_bytes(b"open sesame")
    (run / "worst").symlink_to(tmp_path / "elsewhere")
    assert gap_of(run, "worst") == "worst: a link, which is not followed"
    assert base64.b64encode(b"open sesame").decode() not in render_report(read_run(run))
    (run / "worst").unlink()
    pictured(run, "01.jpg", b"own")
    assert read_run(run).pictures["val", "a"][0].uri.endswith(base64.b64encode(b"own").decode())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("name", READ)
def test_a_pipe_is_not_waited_for(make_events: Make, make_run: Make, name: str) -> None:
    """By neither page; nobody will ever write into it."""
    run = make_run(make_events(1, 3), images=0)
    (run / "worst").mkdir()
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert gap_of(run, Path(name).name).endswith("no regular file")
    write_comparison([run], run.parent / "page.html")


@pytest.mark.parametrize("name", [*READ, "worst/01.jpg"])
def test_sizes_are_looked_at_first(make_events: Make, make_run: Make, name: str) -> None:
    """Of a file of four terabytes, which has no byte on disk, none is read."""
    run = make_run(make_events(1, 3), images=0)
    pictured(run, "01.jpg", b"")
    with (run / name).open("wb") as file:
        file.truncate(2**42)
    gap = gap_of(run, "worst/index.json" if name == "worst/01.jpg" else Path(name).name)
    assert gap.endswith("more pictures than 2.6 MiB" if name == "worst/01.jpg" else "that are read")


@pytest.mark.parametrize("file", ["a\0b", "..", "", "x" * 5000, "missing.jpg"])
def test_a_picture_that_has_no_such_name_is_told(make_events: Make, make_run: Make, file: str) -> None:
    """Whatever the system makes of the name."""
    run = make_run(make_events(1, 3), images=0)
    pictured(run, file)
    assert gap_of(run, "worst/index.json")


@pytest.mark.parametrize("name", ["plan.json", "contract.json", "reliability.json", "worst/index.json"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[1]", "NaN", '{"temperature": NaN}'])
def test_json_of_another_form_is_told(make_events: Make, make_run: Make, name: str, text: str) -> None:
    """Nested without an end, no object, or a constant that JSON has not."""
    run = make_run(make_events(1, 3), images=0)
    (run / "worst").mkdir()
    (run / name).write_text(text)
    assert gap_of(run, Path(name).name)


def test_what_is_not_of_its_type_is_named_and_the_rest_is_used(make_events: Make, make_run: Make) -> None:
    """At any depth; each place once."""
    run = make_run(make_events(1, 3), images=0)
    plan = json.loads((run / "plan.json").read_text())
    plan |= {"budget_bytes": "much", "data": {"val": {"sha256": 3}}, "stages": 7, "ladder": [3, {"spacing": "one", "micro_batch": []}]}
    plan["machine"]["cores"] = "eight"
    (run / "plan.json").write_text(json.dumps(plan))
    told = "plan.json: not of their type: budget_bytes, stages, ladder, ladder.micro_batch, machine.cores and 1 more"
    assert gap_of(run, "plan.json") == told
    found = read_run(run).plan
    assert found["ladder"] == [{"spacing": "one"}]
    assert found["machine"]["device"] == "NVIDIA RTX 4090"
    assert "budget_bytes" not in found


def test_what_a_run_writes_is_of_its_type(make_events: Make, make_run: Make) -> None:
    """A plan and a contract as `fit` leaves them have no gap."""
    run = make_run(make_events(1, 3), images=0)
    for name, form in (("plan.json", PLAN), ("contract.json", CONTRACT)):
        text = (run / name).read_text()
        found, told = parse(text, form)
        assert told == ""
        assert set(found) >= {"image_size"}


def changed(value: Any, odd: Any, chance: random.Random) -> Any:
    """The value with one place of it, at any depth, replaced."""
    if isinstance(value, dict | list) and value and chance.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else range(min(len(value), 4))
        key = chance.choice(list(keys))
        inner = changed(value[key], odd, chance)
        return {**value, key: inner} if isinstance(value, dict) else [*value[:key], inner, *value[key + 1 :]]
    return odd


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["plan.json", "contract.json", "reliability.json", "events.jsonl"]), ODD, st.integers(0, 10**6))
def test_there_is_a_page_whatever_stands_in_a_place(make_events: Make, make_run: Make, name: str, odd: Any, seed: int) -> None:
    """Of the plan, the contract, the diagrams, or of any one event; both pages."""
    run = Path(make_run(make_events(1, 2), images=0))
    chance, before = random.Random(seed), (run / name).read_text()
    lines = before.splitlines() if name == "events.jsonl" else [before]
    at = chance.randrange(len(lines))
    lines[at] = json.dumps(changed(json.loads(lines[at]), odd, chance))
    (run / name).write_text("\n".join(lines))
    assert render_report(read_run(run))
    write_comparison([run], run.parent / "page.html")
