"""The plan as people and programs read it, on a chain made by hand."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from hiresvis import cli, plan_plot, planning
from hiresvis.errors import EnvironmentFailed, MissingExtra
from hiresvis.ladder import explain, ladder_rows
from hiresvis.memory.peak import StepSetting, predict_peak, resident_bytes
from hiresvis.memory.plan import CheckpointPlan, NoPlan, Segment, store_all
from hiresvis.memory.prices import Host, Prices
from hiresvis.memory.search import Limits, Planner
from hiresvis.memory.timing import Rates, images_per_second
from hiresvis.plan_plot import levels
from hiresvis.plan_report import LOG_BYTES, PlanReport, make_report
from hiresvis.plan_stages import StageRow, stage_rows
from hiresvis.ui.text import ASCII
from hiresvis.units import MIB

BY_HAND = Path(__file__).parent / "memory" / "by_hand.py"
RATES = Rates(flops_per_s=1e9, memory_bytes_per_s=1e9, link_bytes_per_s=1e8)


@pytest.fixture(scope="module")
def hand() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_report_by_hand", BY_HAND)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def chain(hand: ModuleType, **changes: object):
    """Eight units of a megabyte each in three stages; nothing else is as large."""
    stages = ["stem", *["stage0"] * 3, *["stage1"] * 3, "head"]
    units = []
    for index, stage in enumerate(stages):
        sizes = {"input": hand.line(MIB), "output": hand.line(MIB), "interior": hand.line(8 * MIB), "traffic": hand.line(10 * MIB)}
        levels = {"forward_stored": hand.peak(9 * MIB), "forward_dropped": hand.peak(2 * MIB), "backward_first": hand.peak(MIB)}
        units.append(hand.unit(index, stage=stage, backward_more=hand.peak(MIB), flops=hand.line(10**8), **sizes, **levels))
    return hand.profile(*units, boundaries=tuple(hand.line(MIB) for _ in range(9)), **changes)


def report_of(profile, budget_bytes: int, *, rates: Rates | None = RATES, host: Host | None = None, **changes: object) -> PlanReport:
    limits = Limits(batch=4, prices=Prices(host=host))
    planner = Planner(profile, budget_bytes, StepSetting(accumulates=False, eval_batch=1, baseline_bytes=3 * MIB), limits)
    candidate = planner.choose()
    assert not isinstance(candidate, NoPlan)
    rows = ladder_rows(planner, planner.ladder(), candidate)
    asked = {"rates": rates, "device": "RTX 4090", "num_train": 100, "epochs": 3, "snapshot_bytes": MIB, **changes}
    return make_report(planner, candidate, planner.plan(candidate, explain(planner, candidate)), rows, **asked)


@pytest.fixture(scope="module")
def report(hand) -> PlanReport:
    """Half of what storing everything needs."""
    return report_of(chain(hand), 170 * MIB, price_per_hour=2.0)


def text_of(report: PlanReport, width: int = 80) -> str:
    return "\n".join(report.lines(width))


def test_the_head_names_model_size_precision_device_and_budget(report):
    """The first line says what the plan is for."""
    assert report.lines()[0] == "hand  8x8 px  fp32  RTX 4090  budget 170.0 MiB"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_line_is_wider_than_the_terminal(report, width):
    """Text wraps below itself; tables and bars keep to the width."""
    treatment = "2 store, 5 recompute (spacing 2-3; with stage1, stage2), 4 keep, 3 nested (spacing 4), 2 offload (spacing 1)"
    row = StageRow(stage="stage3", num_units=16, stored_bytes=MIB, kept_bytes=MIB, treatment=treatment)
    lines = replace(report, stages=(*report.stages, row)).lines(width)
    assert max(map(len, lines)) <= width
    assert treatment in " ".join(" ".join(lines).split())


def test_each_rung_is_a_line_and_the_chosen_one_is_marked(report):
    """Every row with its micro-batch, peak, recompute, rate and verdict; the mark stands at the chosen one alone."""
    lines = report.lines()
    start = next(number for number, line in enumerate(lines) if "spacing" in line)
    rows = lines[start + 1 : start + 1 + len(report.ladder)]
    for line, row in zip(rows, report.ladder, strict=True):
        assert line.removeprefix("▸").split()[:2] == [row.spacing, str(row.micro_batch)]
        assert row.verdict in line
        assert f"{row.recompute_fraction:.1%}" in line or not row.recompute_fraction
    assert [line.startswith("▸") for line in rows] == [row.verdict == "chosen" for row in report.ladder]
    assert lines[start + 1 + len(report.ladder)] == ""


def test_every_rung_that_fits_has_its_own_rate(hand, report):
    """Images per second follow from the row's own segments: those of a spacing, of storing everything, of the chosen plan."""
    profile = report.profile
    stored = next(row for row in report.ladder if row.spacing == "off")
    assert stored.micro_batch
    assert stored.images_per_second == images_per_second(profile, store_all(profile), stored.micro_batch, 4, RATES)
    chosen = report.ladder[-1]
    assert chosen.images_per_second == images_per_second(profile, report.plan.segments, chosen.micro_batch, 4, RATES)
    assert report.run.images_per_second == chosen.images_per_second
    rates = {row.spacing: row.images_per_second for row in report.ladder}
    assert all(rates.values())
    assert rates["off"] > chosen.images_per_second > rates["1"]
    tight = report_of(chain(hand), 60 * MIB)
    assert [row.images_per_second for row in tight.ladder if not row.micro_batch] == [None]


def test_time_and_price_follow_from_the_rate(report):
    """All epochs over all images, and their hours at the price."""
    seconds = 300 / report.run.images_per_second
    assert report.run.seconds == pytest.approx(seconds)
    assert report.run.price == pytest.approx(seconds / 3600 * 2.0)
    assert any(line.startswith("price  0.") and line.endswith(" at 2 an hour") for line in report.lines())
    assert "for 3 epochs of 100 images" in text_of(report)
    assert "estimated from the data-sheet rates of RTX 4090" in text_of(report)


def test_disk_is_two_snapshots_and_two_files_of_weights(report):
    """A snapshot is written beside the one it replaces."""
    assert report.run.disk_bytes == 2 * MIB + 2 * (report.profile.weights + report.profile.buffers) + LOG_BYTES


def test_without_rates_nothing_is_estimated(hand):
    """The reason stands where the number would; a price has no time to follow from."""
    report = report_of(chain(hand), 170 * MIB, rates=None, device="CPU", price_per_hour=1.0)
    assert (report.run.images_per_second, report.run.seconds, report.run.price) == (None, None, None)
    assert {row.images_per_second for row in report.ladder} == {None}
    assert "speed  no rate is known for this CPU: not estimated" in report.lines()
    assert "price  not estimated: it follows from the time" in report.lines()


def test_without_images_there_is_a_rate_but_no_time(hand):
    """The data may not be there yet."""
    report = report_of(chain(hand), 170 * MIB, num_train=None)
    assert report.run.images_per_second
    assert report.run.seconds is None
    assert "time   not estimated: the number of training images is not known" in report.lines()
    assert not any(line.startswith("price") for line in report.lines())


def test_parts_of_the_peak_are_bars_in_proportion(report):
    """Every part that is there, with its bytes; bars are as long as their share of the largest one."""
    lines = report.lines()
    start = next(number for number, line in enumerate(lines) if line.startswith("peak"))
    bars = {name: size for name, size in report.plan.parts.items() if size}
    drawn = [line for line in lines[start + 1 :] if "B  " in line][: len(bars)]
    lengths = {line[7:25].strip(): line.count("█") for line in drawn}
    assert lengths["saved for backward"] == max(lengths.values())
    share = report.plan.parts["baseline"] / report.plan.parts["saved"]
    assert lengths["before training"] == pytest.approx(share * lengths["saved for backward"], abs=1)


def test_a_terminal_without_unicode_gets_ascii(report):
    """Marks and bars are drawn with what the encoding has."""
    text = "\n".join(report.lines(80, ASCII))
    assert text.isascii()
    assert "#####" in text


def test_stages_say_what_is_kept_and_how(hand):
    """Bytes are what waits for backward when the forward ends, the images aside; words are the plan's tiers."""
    way = {"ways": (hand.way(), hand.way(keep=(0,), kept=hand.line(2 * MIB)), hand.way(passes=(1,)))}
    plain = chain(hand)
    profile = replace(plain, units=tuple(replace(unit, **way) for unit in plain.units))
    segments = (
        Segment(0, 1),
        Segment(1, 2, "keep", ((),), (0,)),
        Segment(2, 5, "recompute"),
        Segment(5, 6, "offload"),
        Segment(6, 8, "recompute", ((1,), ())),
    )
    rows = {row.stage: row for row in stage_rows(profile, segments, 2)}
    assert list(rows) == ["stem", "stage0", "stage1", "head"]
    assert [row.num_units for row in rows.values()] == [1, 3, 3, 1]
    # Eight inside and one boundary each and image; the first unit keeps the images, which are there anyway.
    assert [row.stored_bytes // MIB for row in rows.values()] == [16, 54, 54, 18]
    assert [row.kept_bytes // MIB for row in rows.values()] == [16, 2 * (1 + 2) + 2, 2, 0]
    assert [row.treatment for row in rows.values()] == [
        "store",
        "1 keep, 2 recompute (with stage1)",
        "1 recompute (with stage0), 1 offload (spacing 1), 1 nested (with head)",
        "nested (with stage1)",
    ]


def test_a_stage_that_saves_nothing_says_so(hand):
    """A frozen stage keeps nothing, whatever is planned for it."""
    plain = chain(hand)
    frozen = replace(plain.units[0], interior=hand.line(0), saves=())
    profile = replace(plain, units=(frozen, *plain.units[1:]))
    assert stage_rows(profile, store_all(profile), 2)[0].treatment == "saves nothing"


def test_what_stages_keep_adds_up_to_what_the_peak_calls_saved(hand):
    """Where the peak is at the chain's end, the stages' bytes and the images are the saved part."""
    profile = chain(hand)
    setting = StepSetting(accumulates=False, eval_batch=1)
    peak = predict_peak(profile, store_all(profile), 2, setting)
    assert peak.where == "backward of u7"
    kept = sum(row.kept_bytes for row in stage_rows(profile, store_all(profile), 2))
    assert kept + profile.boundaries[0].at(2) == peak.parts["saved"]


def test_a_plan_that_recomputes_is_set_against_storing_everything(hand, report):
    """Text and picture show what the same micro-batch would need; where nothing is recomputed that is the plan itself."""
    plain = report_of(chain(hand), 1 << 30)
    for found, recomputes in ((report, True), (plain, False)):
        assert bool(found.plan.recomputed) is recomputes
        assert (f"needs {found.stored_peak_bytes / MIB:.1f} MiB" in text_of(found)) is recomputes
        (axes,) = plan_plot.figure(found.profile, found.plan, found.setting, "title").axes
        assert any("stored" in str(line.get_label()) for line in axes.get_lines()) is recomputes
    assert plain.stored_peak_bytes == plain.plan.predicted_peak_bytes


def test_tiers_that_are_used_are_explained(report):
    """Below the stages: a line for each word, and none for words that do not occur."""
    text = text_of(report)
    assert "recompute: the first input stays" in text
    assert "offload:" not in text


def test_host_memory_is_told_where_it_is_used(hand):
    """Bytes in host memory, and what waiting for them adds."""
    host = Host(total_bytes=1 << 30, link_bytes_per_s=1e8, flops_per_s=1e9)
    report = report_of(chain(hand), 36 * MIB, host=host)
    assert report.plan.host_bytes
    assert report.waiting_fraction >= 0
    assert f"host   {report.plan.host_bytes / MIB:.1f} MiB of its memory hold what is offloaded" in text_of(report)


def test_json_is_what_it_documents(report):
    """Every key that the docstring names is there and no other; the plan can be read again."""
    value = json.loads(json.dumps(report.to_json()))
    documented = PlanReport.to_json.__doc__
    assert all(f"`{key}`" in documented for key in value)
    assert all(
        f"`{key}`" in documented
        for row in (value["run"], value["ladder"][0], value["stage_rows"][0], value["units"][0])
        for key in row
        if key not in ("event", "time", "measured_peak_bytes")
    )
    assert CheckpointPlan.from_json(value["checkpoint_plan"]) == report.plan
    assert sum(value["parts"].values()) == value["predicted_peak_bytes"]
    assert value["run"]["num_train"] == 100
    assert value["ladder"][-1]["verdict"] == "chosen"


@pytest.mark.parametrize(
    "segments",
    [
        tuple(Segment(index, index + 1) for index in range(8)),
        (Segment(0, 1), Segment(1, 4, "recompute"), Segment(4, 8, "recompute")),
        (Segment(0, 1), Segment(1, 4, "recompute", ((), (1,), ())), Segment(4, 5, "offload"), *(Segment(i, i + 1) for i in range(5, 8))),
    ],
)
def test_the_drawn_levels_are_those_of_the_prediction(hand, segments):
    """Levels follow one another without gaps over forward and backward, and the highest is the predicted peak."""
    way = {"ways": (hand.way(), hand.way(passes=(1,)))}
    plain = chain(hand)
    profile = replace(plain, units=tuple(replace(unit, **way) for unit in plain.units))
    setting = StepSetting(accumulates=True, eval_batch=1, baseline_bytes=500 * MIB, reserve_bytes=7)
    found = levels(profile, segments, 2, setting)
    assert max(level.live for level in found) == predict_peak(profile, segments, 2, setting).total_bytes
    assert found[0].start == 0
    assert found[-1].end == 16
    assert all(after.start == pytest.approx(before.end) and before.end > before.start for before, after in pairwise(found))
    assert [level.end for level in found[:8]] == list(range(1, 9))
    fixed = resident_bytes(profile, setting, 2) + 500 * MIB + 7
    assert all(level.live >= fixed + level.saved for level in found)


def test_a_plot_is_a_picture(report, tmp_path):
    """PNG whatever the name, SVG where it ends so."""
    report.plot(tmp_path / "plan.jpg")
    assert (tmp_path / "plan.jpg").read_bytes().startswith(b"\x89PNG")
    report.plot(tmp_path / "plan.svg")
    assert "<svg" in (tmp_path / "plan.svg").read_text(encoding="utf-8")


def test_a_plot_names_stages_budget_and_unit(report):
    """The axis of units has the stages, forward and mirrored; the legend has the budget in the axis' unit."""
    made = plan_plot.figure(report.profile, report.plan, report.setting, "title")
    (axes,) = made.axes
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names == names[::-1]
    assert {"stage0", "stage1"} <= set(names)
    assert axes.get_ylabel() == "memory, MiB"
    assert "budget 170.0 MiB" in [line.get_label() for line in axes.get_lines()]
    assert axes.get_ylim()[1] > max(170, report.stored_peak_bytes / MIB)


def test_a_plot_without_matplotlib_names_the_extra(report, tmp_path, monkeypatch):
    """The message gives the install command."""
    monkeypatch.setattr(plan_plot, "find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"pip install \"hiresvis\[plot\]\""):
        report.plot(tmp_path / "plan.png")


def test_a_plot_that_cannot_be_written_is_told(report, tmp_path):
    """The place and a way on."""
    with pytest.raises(EnvironmentFailed, match="give another file to --plot"):
        report.plot(tmp_path / "no" / "plan.png")


RECIPE = "task: classify\ndata: {train: d}\nmodel: {name: resnet18}\n"


def command(monkeypatch, tmp_path: Path, report: PlanReport, *arguments: str) -> dict[str, object]:
    """Runs `hiresvis plan` with the planning replaced, and gives what that was asked."""
    asked: dict[str, object] = {}
    monkeypatch.setattr(planning, "plan", lambda loaded, **options: asked.update(loaded=loaded, **options) or report)
    monkeypatch.setenv("COLUMNS", "300")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    with pytest.raises(SystemExit) as caught:
        cli.main(["plan", str(recipe), *arguments])
    asked["code"] = caught.value.code
    return asked


def test_the_command_hands_on_card_budget_and_price(report, tmp_path, monkeypatch, capsys):
    """Options may be combined; the text goes to standard output, in lines that can be read."""
    asked = command(monkeypatch, tmp_path, report, "--gpu", "4090", "--budget", "20GiB", "--price", "1.5")
    assert (asked["gpu"], asked["budget"], asked["price"], asked["code"]) == ("4090", "20GiB", 1.5, 0)
    captured = capsys.readouterr()
    assert captured.out.splitlines() == report.lines(100)
    assert captured.err == ""


def test_the_command_asks_nothing_that_was_not_given(report, tmp_path, monkeypatch, capsys):
    """Without options the recipe and this machine decide; overrides reach the recipe."""
    asked = command(monkeypatch, tmp_path, report, "train.epochs=7", "--json")
    assert (asked["gpu"], asked["budget"], asked["price"]) == (None, None, None)
    assert asked["loaded"].recipe.train.epochs == 7
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(report.to_json()))


def test_the_command_draws_beside_what_it_prints(report, tmp_path, monkeypatch, capsys):
    """The picture's path is a message; the results stay whole on standard output."""
    command(monkeypatch, tmp_path, report, "--plot", str(tmp_path / "plan.png"))
    captured = capsys.readouterr()
    assert captured.out.splitlines() == report.lines(100)
    assert captured.err == f"plot: {tmp_path / 'plan.png'}\n"
    assert (tmp_path / "plan.png").is_file()


def test_the_command_asks_for_matplotlib_before_it_plans(report, tmp_path, monkeypatch, capsys):
    """A missing extra ends with 6 and nothing planned."""
    monkeypatch.setattr(plan_plot, "find_spec", lambda _: None)
    asked = command(monkeypatch, tmp_path, report, "--plot", str(tmp_path / "plan.png"))
    assert asked == {"code": 6}
    assert "hiresvis[plot]" in capsys.readouterr().err
