"""Runs side by side: figures of each, what differs, and what speaks against holding them against each other."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hiresvis.errors import RunFolderError
from hiresvis.run.events import EpochDone, Event, RunFinished, RunStarted, StepDone, to_json
from hiresvis.ui.compare import MOST_RUNS, write_comparison
from hiresvis.ui.times import Times, cost_of, step_shares, times_of

MakeEvents = Callable[..., list[Event]]
MakeRun = Callable[..., Path]
RECIPE = """\
task: classify  # given
data: {{train: data, val: 0.2}}
model: {{name: resnet18, image_size: 64}}
memory:
  budget: {budget}  # given
optim:
  lr: {lr}  # auto: the rule
train: {{epochs: 3, batch: 4}}
log: {{dir: {name}}}
"""


class Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_data(self, data: str) -> None:
        self.found.append(data)


def words(page: Path) -> str:
    text = Text()
    text.feed(page.read_text(encoding="utf-8"))
    return re.sub(r"\s+", " ", " ".join(text.found))


@pytest.fixture
def pair(make_events: MakeEvents, make_run: MakeRun, tmp_path: Path) -> tuple[Path, Path]:
    """Two runs: the second has another recipe, is better, and took half as long again."""
    events = make_events(3, 8)
    first = make_run(events)
    (first / "recipe.resolved.yaml").write_text(RECIPE.format(budget="1GiB", lr=0.001, name="a"), encoding="utf-8")
    second = Path(shutil.copytree(first, tmp_path / "second"))
    (second / "recipe.resolved.yaml").write_text(RECIPE.format(budget="2GiB", lr=0.002, name="b"), encoding="utf-8")
    better = []
    for event in events:
        if isinstance(event, RunFinished):
            event = replace(event, results={"test": {"loss": 0.2, "macro_f1": 0.95, "intervals": {"macro_f1": [0.9, 0.98]}}})
        if isinstance(event, RunStarted):
            event = replace(event, run_name="<i>second</i>")
        better.append(replace(event, step_ms=3525.0) if isinstance(event, StepDone) else event)
    (second / "events.jsonl").write_text("".join(json.dumps(to_json(event)) + "\n" for event in better), encoding="utf-8")
    return first, second


def test_the_page_has_the_figures_of_each_and_marks_the_best(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Metrics with intervals, the lower loss and the higher F1 as best; what differs of the recipes and nothing else; times and money."""
    page = write_comparison(pair, tmp_path / "out.html", price_per_hour=3600.0)
    text = words(page)
    assert "loss 0.5000 0.2000 ▸" in text
    assert "macro_f1 0.8810 (0.833-0.918) 0.9500 (0.900-0.980) ▸" in text
    recipes = text[text.index("What the recipes differ in") : text.index("Memory plans")]
    assert "memory.budget 1GiB 2GiB" in recipes
    assert "optim.lr 0.001 auto 0.002 auto" in recipes
    assert "log.dir" not in recipes
    assert "model.name" not in recipes
    assert "spent on steps 56s 1m25s" in text
    assert re.search(r"price, spent \d+\.\d\d \d+\.\d\d", text)
    assert "<i>second</i>" in text
    assert "<i>second" not in page.read_text(encoding="utf-8")


def test_what_speaks_against_a_comparison_is_said(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Other images, other classes, a run that has not finished: each is a line, and a pair without them has none."""
    assert "Cautions" not in words(write_comparison(pair, tmp_path / "out.html"))
    plan = json.loads((pair[1] / "plan.json").read_text(encoding="utf-8"))
    plan["data"] = {"val": {"sha256": "other"}}
    (pair[1] / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    (pair[1] / "contract.json").write_text(json.dumps({"classes": ["a"]}), encoding="utf-8")
    lines = (pair[1] / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (pair[1] / "events.jsonl").write_text("".join(line for line in lines if "run_finished" not in line), encoding="utf-8")
    (pair[1] / "recipe.resolved.yaml").unlink()
    text = words(write_comparison(pair, tmp_path / "out.html"))
    for said in ("validated on different images", "know different classes", "has not finished", "Not read: the recipe of second"):
        assert said in text
    assert "trained on different images" not in text


def test_runs_with_one_name_are_told_apart_by_their_folders(make_events: MakeEvents, make_run: MakeRun, tmp_path: Path) -> None:
    """Two seeds of one recipe have one name."""
    first = make_run(make_events(1, 3))
    second = shutil.copytree(first, tmp_path / "seed-2" / "run")
    text = words(write_comparison([first, second], tmp_path / "out.html"))
    assert f"{tmp_path.name}/run" in text
    assert "seed-2/run" in text


def test_a_run_against_itself_and_too_many_are_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Each names what to do; no page is left."""
    with pytest.raises(RunFolderError, match="given twice"):
        write_comparison([pair[0], pair[1], pair[0] / ".." / pair[0].name], tmp_path / "out.html")
    with pytest.raises(RunFolderError, match=f"up to {MOST_RUNS}"):
        write_comparison([pair[0]] * (MOST_RUNS + 1), tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_times_add_up_to_the_time_that_passed(make_events: MakeEvents) -> None:
    """Every second between first and last event is somewhere, once; waiting is that of the steps."""
    events = make_events(3, 10)
    found = times_of(events)
    assert found.total == pytest.approx(events[-1].time - events[0].time)
    assert found.wait == pytest.approx(30 * 0.094)
    assert found.compute == pytest.approx(30 * (2.35 - 0.094))
    assert found.prepare == pytest.approx(20)
    assert found.evaluate == pytest.approx(3 * 16)
    assert found.images == sum(event.num_images for event in events if isinstance(event, StepDone))


def test_hours_between_two_sessions_are_nobodys_time(make_events: MakeEvents) -> None:
    """A run that was stopped for a day and went on has the time of its two sessions, the second's preparation included."""
    events = make_events(2, 6, end="interrupted")
    later = [replace(event, time=event.time + 86_400) for event in make_events(2, 6)]
    later.insert(0, later.pop(next(at for at, event in enumerate(later) if type(event).__name__ == "Notice")))  # told before RunStarted
    later[0] = replace(later[0], time=later[0].time - 5)
    once, both = times_of(events), times_of([*events, *later])
    assert both.total < 3 * once.total
    assert both.wait == pytest.approx(2 * once.wait)
    assert times_of([]) == Times()
    assert times_of([event for event in events if isinstance(event, EpochDone)]).wait == 0


def test_a_plan_that_does_not_tell_has_no_shares() -> None:
    """Older plans have no runs of units; of others the shares add up to a step."""
    assert step_shares({"units": [{"flops": 3}]}) == []
    assert step_shares({}) == []
    shares = dict(step_shares({"units": [{"flops": 2, "runs": 3}, {"flops": 1, "runs": 2}], "recompute_fraction": 0.25}))
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["forward"] == pytest.approx(3 / 8 / 1.25)
    assert shares["recompute"] == pytest.approx(0.2)


def test_a_run_without_a_measured_speed_has_no_planned_hours(make_events: MakeEvents) -> None:
    """Money follows hours; unknown hours have no price."""
    from hiresvis.ui.state import replay

    state = replay(make_events(1, 3))
    assert cost_of(state, Times(wait=1800, compute=1800), 2.0).money(1.0) == 2.0
    bare = replace(state, ladder=())
    assert cost_of(bare, Times(), 2.0).planned_hours is None
    assert cost_of(bare, Times(), 2.0).money(None) is None
    assert cost_of(state, Times()).money(1.0) is None
