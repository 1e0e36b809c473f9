"""The report: numbers from the files, nothing from outside, whatever is missing."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from hiresvis.errors import RunFolderError
from hiresvis.run.directory import RunDirectory
from hiresvis.run.events import Event, Notice, RunStarted
from hiresvis.ui.report import write_report
from hiresvis.ui.run_files import Prediction, read_run
from hiresvis.ui.scores import class_rankings, split_scores
from hiresvis.ui.svg import element
from hiresvis.ui.thumbnails import MAX_PIXELS, thumbnail

MakeEvents = Callable[..., list[Event]]
MakeRun = Callable[..., Path]
VOID = {"meta", "br", "img", "link", "input", "hr"}


def test_drawn_text_and_attributes_are_escaped() -> None:
    """An SVG element cannot be left by its content or by a value."""
    assert element("text", "<b>&", title='"><script>') == '<text title="&#34;&gt;&lt;script&gt;">&lt;b&gt;&amp;</text>'


class Checker(HTMLParser):
    """Tags are closed in order; collects text and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page_of(run: Path) -> tuple[str, Checker]:
    """The page's source, and what it shows."""
    source = write_report(run).read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(source)
    assert checker.open == []
    return source, checker


def parsed(path: Path) -> Checker:
    """A page as it stands."""
    checker = Checker()
    checker.feed(path.read_text(encoding="utf-8"))
    return checker


def words(checker: Checker) -> str:
    return re.sub(r"\s+", " ", " ".join(checker.text))


def test_page_holds_the_numbers_of_the_files(make_events: MakeEvents, make_run: MakeRun) -> None:
    """Model, metric, peaks, plan, ladder, settings and commands are those of the run."""
    text = words(page_of(make_run(make_events(3, 8)))[1])
    for part in (
        "lesions[03]", "convnextv2_base at 2048x2048 px", "0.7643 (0.841-0.907)", "0.8810 (0.833-0.918)", "epoch 3 of 3", "completed",
        "predicted 2.5% above measured", "predicted 0.5% above measured", "93% of 22.0 GiB budget",
        "micro-batch 2 x accumulation 8 = batch 16", "stage0 spacing 1 · stage1 spacing 2 · rest stored",
        "too large: one image needs 25.3 GiB", "chosen: least recompute", "saved for backward 15.8 GiB",
        "optim.lr", "AdamW fine-tuning from pretrained weights", "3 files are rotated by EXIF",
        "hiresvis evaluate 'runs/lesions[03]'", "stages.0.blocks.0 (block): recompute", "# auto: 8 CPU cores, two left to the rest",
    ):  # fmt: skip
        assert part in text, part


def test_page_needs_nothing_from_outside(make_events: MakeEvents, make_run: MakeRun) -> None:
    """No link, no address but inline data, no script but the inline one that sorts tables."""
    source, checker = page_of(make_run(make_events(2, 4)))
    assert not {"link", "iframe", "object"} & checker.tags
    assert source.count("<script") == source.count("<script>\nfor (const table of") == 1
    assert not re.search(r"fetch|XMLHttp|import|eval|document\.(write|cookie)|innerHTML", source[source.index("<script") :])
    assert checker.addresses
    assert all(address.startswith("data:image/jpeg;base64,") for address in checker.addresses)
    assert "@import" not in source
    assert not re.search(r"url\((?!#)", source)
    assert set(re.findall(r"https?://[^\"' ]+", source)) == {"http://www.w3.org/2000/svg"}


def test_names_are_escaped_everywhere(make_events: MakeEvents, make_run: MakeRun) -> None:
    """A class called <b>pinhole</b> is shown as written, in tables, captions and drawings."""
    run = make_run([replace(e, run_name='x"><script>alert(1)</script>') if isinstance(e, RunStarted) else e for e in make_events(2, 4)])
    source, checker = page_of(run)
    assert "<b>pinhole" not in source
    assert source.count("<script") == 1
    assert "<b>given" not in source
    assert words(checker).count("<b>pinhole</b>") >= 4


def test_confusion_and_class_scores_are_counted_from_the_predictions(make_events: MakeEvents, make_run: MakeRun) -> None:
    """Accuracy on the page is the share of right rows in the csv."""
    run = make_run(make_events(2, 4))
    with (run / "predictions.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    accuracy = sum(row["label"] == row["predicted"] for row in rows) / len(rows)
    assert f"accuracy {accuracy:.4f}" in words(page_of(run)[1])


def prediction(label: str, predicted: str) -> Prediction:
    return Prediction(split="val", path="x.png", label=label, predicted=predicted, score=0.9, loss=1.0)


def test_scores_match_a_count_by_hand() -> None:
    """3 of a (2 hit), 1 of b (hit, and one a taken for it), none of c."""
    rows = [prediction("a", "a"), prediction("a", "a"), prediction("a", "b"), prediction("b", "b")]
    found = split_scores("val", rows, ("a", "b", "c"))
    assert found is not None
    assert found.counts == ((2, 1, 0), (0, 1, 0), (0, 0, 0))
    assert [(s.precision, s.recall, s.f1) for s in found.scores] == [(1.0, 2 / 3, 0.8), (0.5, 1.0, 2 / 3), (None, None, None)]
    assert found.accuracy == 0.75
    assert found.macro_f1 == pytest.approx((0.8 + 2 / 3) / 2)
    assert found.confused == (("a", "b", 1),)
    assert split_scores("test", rows, ("a", "b")) is None
    only_predicted = split_scores("val", [*rows, prediction("a", "c")], ("a", "b", "c"))
    assert only_predicted is not None
    assert only_predicted.scores[2].f1 == 0.0
    assert only_predicted.macro_f1 == pytest.approx((2 * 2 / 6 + 2 / 3 + 0.0) / 3), "as torchmetrics has it"


def test_worst_errors_are_wrong_ones_by_loss_with_previews(make_events: MakeEvents, make_run: MakeRun) -> None:
    """The first sample is the wrong one of the highest loss; readable images have a preview, others a word."""
    run = make_run(make_events(2, 4))
    with (run / "predictions.csv").open(encoding="utf-8") as file:
        wrong = [row for row in csv.DictReader(file) if row["label"] != row["predicted"]]
    worst = max(wrong, key=lambda row: float(row["loss"]))
    source, checker = page_of(run)
    first = source.index('<figure class="sample">')
    assert worst["path"] in source[first : source.index("</figure>", first)]
    assert "no preview" in words(checker)
    assert source.count("data:image/jpeg") == source.count("<img")


def test_class_numbers_in_predictions_are_named(make_events: MakeEvents, make_run: MakeRun) -> None:
    """A csv with class numbers is read with the contract's names."""
    run = make_run(make_events(1, 3))
    (run / "predictions.csv").write_text("split,path,label,predicted,score,loss\nval,a.png,1,2,0.9,3.0\n", encoding="utf-8")
    (row,) = read_run(run).predictions
    assert (row.label, row.predicted) == ("short", "open circuit")


def test_time_and_cost_are_told_as_measured_or_predicted(make_events: MakeEvents, make_run: MakeRun) -> None:
    """Waiting and work are those of the steps; what of a step is recompute is said to be predicted; money where a price is given."""
    run = make_run(make_events(2, 10))
    text = words(page_of(run)[1])
    assert re.search(r"steps: waiting for data 2s \d+% measured", text)
    assert re.search(r"steps: at work 45s \d+% measured", text)
    for part, share in (("forward", 1 / 3), ("recompute", 0.11), ("backward", 2 / 3)):
        seconds = 20 * 2.256 * share / 1.11
        assert re.search(rf"of which {part} {seconds:.0f}s \d+% predicted, by FLOPs", text), part
    assert "hours of the device (NVIDIA RTX 4090)" in text
    assert "at 2.5 an hour" not in text
    write_report(run, price_per_hour=2.5)
    priced = words(parsed(run / "report.html"))
    planned = 2 * 155 / 6.8 / 3600
    assert f"steps alone {planned:.3f} h {2.5 * planned:.2f} spent on steps" in priced


def test_calibration_thresholds_data_and_machine_are_those_of_the_files(make_events: MakeEvents, make_run: MakeRun) -> None:
    """The error of the diagram's bins, with temperature and without; labels by split; releases; the recipe as it was given."""
    run = make_run(make_events(2, 4))
    source, checker = page_of(run)
    text = words(checker)
    assert f"calibration error {(20 * 0.2 + 100 * 0.095) / 120:.4f} without, {(40 * 0.02 + 80 * 0.01) / 120:.4f} with it" in text
    assert "80 of 120 predictions: mean score 0.910, 0.900 right" in text
    assert 'id="thresholds"' not in source, "of six classes predictions.csv does not tell the scores"
    with (run / "samples.csv").open(encoding="utf-8") as file:
        shorts = sum(row["label"] == "short" for row in csv.DictReader(file))
    assert re.search(rf"short {shorts} ", text[text.index("Data label") :])
    assert "torch 2.9.0" in text
    assert "24.0 GiB" in text
    assert "task: classify # <b>given</b>" in text


def test_thresholds_are_drawn_for_two_classes(make_events: MakeEvents, make_run: MakeRun) -> None:
    """Of two classes the score of each is known from the one that was predicted; the mark is where a class is predicted."""
    run = make_run(make_events(1, 3))
    (run / "contract.json").write_text(json.dumps({"classes": ["a", "b"]}), encoding="utf-8")
    rows = [f"val,{n}.png,{'ab'[n % 2]},{'ab'[n % 2 ^ (n % 5 == 0)]},0.{60 + n},1.0" for n in range(30)]
    (run / "predictions.csv").write_text("\n".join(["split,path,label,predicted,score,loss", *rows]), encoding="utf-8")
    source = write_report(run).read_text(encoding="utf-8")
    assert "a: precision and recall by threshold" in source
    assert "b: precision and recall by threshold" in source
    rankings = class_rankings("val", read_run(run).predictions, ("a", "b"), "classify")
    assert all(one[0] == pytest.approx(1 - other[0]) for one, other in zip(rankings["a"], rankings["b"], strict=True))
    at_half = [sum(label for score, label in ranked if score > 0.5) / sum(label for _, label in ranked) for ranked in rankings.values()]
    scores = split_scores("val", read_run(run).predictions, ("a", "b"))
    assert scores is not None
    assert at_half == [score.recall for score in scores.scores]


@pytest.mark.parametrize("text", ["[]", "3", '{"val": 3}', '{"val": {"after": [[1, 2], null, ["x", 1, 2]]}}', '{"val": {"after": 3}}'])
def test_a_changed_diagram_is_no_reason_for_no_page(make_events: MakeEvents, make_run: MakeRun, text: str) -> None:
    """Whatever stands in reliability.json and the index of pictures, there is a page."""
    run = make_run(make_events(1, 3))
    (run / "worst").mkdir()
    for name in ("reliability.json", "worst/index.json"):
        (run / name).write_text(text.replace("val", "samples") if "index" in name else text, encoding="utf-8")
    assert "Calibration" not in words(page_of(run)[1])


FILES = ("events.jsonl", "plan.json", "contract.json", "recipe.resolved.yaml", "predictions.csv")


@pytest.mark.parametrize("missing", FILES)
def test_page_survives_a_missing_file_and_names_it(make_events: MakeEvents, make_run: MakeRun, missing: str) -> None:
    """What is there is shown; what is not is said."""
    run = make_run(make_events(2, 4))
    (run / missing).unlink()
    text = words(page_of(run)[1])
    assert f"{missing}: No such file" in text
    assert "hiresvis evaluate" in text


@pytest.mark.parametrize("only", FILES[:4])
def test_page_can_be_written_from_one_file(make_events: MakeEvents, make_run: MakeRun, only: str) -> None:
    """Any single file makes a page."""
    run = make_run(make_events(2, 4))
    for name in FILES:
        if name != only:
            (run / name).unlink()
    page_of(run)


@pytest.mark.parametrize("name", FILES)
def test_page_survives_a_torn_file(make_events: MakeEvents, make_run: MakeRun, name: str) -> None:
    """A run killed while it wrote leaves half a line or half a document."""
    run = make_run(make_events(2, 4, end="none"))
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[: len(content) * 2 // 3])
    page_of(run)


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    """The message names the folder and what it lacks."""
    with pytest.raises(RunFolderError, match=r"nothing to report .*events\.jsonl"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("end", "status"), [("interrupted", "interrupted by SIGINT in epoch 2"), ("none", "not finished: last seen in epoch 2")]
)
def test_unfinished_run_says_so(make_events: MakeEvents, make_run: MakeRun, end: str, status: str) -> None:
    """A page of half a run is not taken for a whole one."""
    text = words(page_of(make_run(make_events(2, 4, end=end)))[1])
    assert status in text
    assert ("hiresvis fit recipe.yaml --resume" in text) == (end == "interrupted")


def test_run_folder_as_it_is_recorded_gives_the_same_page(make_events: MakeEvents, make_run: MakeRun, tmp_path: Path) -> None:
    """Events through RunDirectory, with a loss that is no number, read back whole; metrics.csv alone gives the same epochs."""
    events = make_events(3, 8)
    directory = RunDirectory.create(tmp_path / "recorded", "task: classify\n")
    for event in events:
        directory.record(event)
    recorded = read_run(directory.root)
    direct = read_run(make_run(events))
    assert recorded.state == direct.state
    directory.events.unlink()
    from_metrics = read_run(directory.root).state.epochs
    for one, other in zip(from_metrics, direct.state.epochs, strict=True):
        assert replace(one, metric="", value=None) == replace(other, metric="", value=None)
    page_of(directory.root)


def test_many_warnings_are_cut_and_counted(make_events: MakeEvents, make_run: MakeRun) -> None:
    """A thousand skipped files do not bury the page; errors stay."""
    notices: list[Event] = [Notice(level="warning", text=f"skipped {n}.jpg") for n in range(1000)]
    run = make_run([*make_events(1, 3), *notices, Notice(level="error", text="disk full")])
    text = words(page_of(run)[1])
    assert "disk full" in text
    assert "skipped 37.jpg" in text
    assert "skipped 999.jpg" not in text
    assert "And 962 more in train.log" in text


@pytest.mark.parametrize("num_classes", [21, 121])
def test_many_classes_have_a_grid_or_a_list_of_pairs(make_events: MakeEvents, make_run: MakeRun, num_classes: int) -> None:
    """Above 20 classes no table of numbers; above 120 no grid either; the most frequent confusions are named."""
    run = make_run(make_events(1, 3))
    names = [f"class {n}" for n in range(num_classes)]
    (run / "contract.json").write_text(json.dumps({"classes": names}), encoding="utf-8")
    rows = [f"val,{n}.png,class {n},class {(n + (n % 3 == 0)) % num_classes},0.5,1.0" for n in range(num_classes)]
    (run / "predictions.csv").write_text("\n".join(["split,path,label,predicted,score,loss", *rows]), encoding="utf-8")
    source, checker = page_of(run)
    assert 'class="confusion"' not in source
    assert ("class 0 taken for class 1: 1 of 1" in words(checker)) == (num_classes == 21)
    assert "class 0 taken for class 1 (1)" in words(checker)


def test_page_is_replaced_whole(make_events: MakeEvents, make_run: MakeRun) -> None:
    """Writing again leaves one page and no draft."""
    run = make_run(make_events(1, 3))
    assert write_report(run) == write_report(run) == run / "report.html"
    assert [path.name for path in run.iterdir() if "report" in path.name] == ["report.html"]


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA", "P", "1", "I;16", "I", "F", "CMYK"])
def test_every_mode_has_a_preview(tmp_path: Path, mode: str) -> None:
    """Deep, transparent and palette images are shown too."""
    path = tmp_path / ("image.jpg" if mode == "CMYK" else "image.tif" if mode in ("F", "I") else "image.png")
    Image.new(mode, (600, 300)).save(path)
    assert (thumbnail(path) or "").startswith("data:image/jpeg;base64,")


def test_deep_images_are_stretched_to_be_seen(tmp_path: Path) -> None:
    """A 16-bit image that uses a sixtieth of its range is neither black nor white."""
    deep = Image.new("I;16", (200, 100), 300)
    deep.paste(1300, (100, 0, 200, 100))
    deep.save(tmp_path / "deep.png")
    uri = thumbnail(tmp_path / "deep.png")
    assert uri is not None
    shown = Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))).convert("L")
    assert shown.getpixel((20, 50)) < 20
    assert shown.getpixel((180, 50)) > 235


def test_unreadable_and_enormous_images_have_no_preview(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken file, a text and a file that claims too many pixels are no error."""
    whole = tmp_path / "whole.png"
    Image.effect_noise((300, 300), 50).save(whole)
    torn = tmp_path / "torn.png"
    torn.write_bytes(whole.read_bytes()[:2000])
    second = whole.read_bytes().rindex(b"IDAT")
    garbled = tmp_path / "garbled.png"
    garbled.write_bytes(whole.read_bytes()[:second] + b"\1\2\3\4" + whole.read_bytes()[second + 4 :])
    assert thumbnail(garbled) is None
    text = tmp_path / "text.jpg"
    text.write_text("no image")
    assert thumbnail(torn) is None
    assert thumbnail(text) is None
    assert thumbnail(tmp_path / "missing.png") is None
    monkeypatch.setattr("hiresvis.ui.thumbnails.MAX_PIXELS", 300 * 300 - 1)
    assert MAX_PIXELS > 300 * 300
    assert thumbnail(whole) is None
