"""The table that a run writes, and what the report counts again from it: the same figures that training reported."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hiresvis.predictions import predicted_row, predictions_text, table_columns, table_row
from hiresvis.train.evaluate import Evaluation
from hiresvis.train.metrics import compute_metrics
from hiresvis.ui.report import write_report
from hiresvis.ui.run_files import read_run
from hiresvis.ui.scores import label_scores, split_scores, target_scores

NAMES = ("left eye", "ü,x", "c")
NUM_IMAGES = 60


def made(task: str) -> Evaluation:
    """Results better than chance and worse than right, with a class that nothing has."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.rand(NUM_IMAGES, 3, generator=generator, dtype=torch.float64)
    if task == "classify":
        targets = torch.arange(NUM_IMAGES) % 2
        scores = (noise + torch.eye(3)[targets]).softmax(1)
    elif task == "multilabel":
        targets = (noise < torch.tensor([0.2, 0.6, 0.0])).double()
        scores = ((targets + 2 * torch.rand(NUM_IMAGES, 3, generator=generator)) / 3).float()
    else:
        targets = noise * torch.tensor([1.0, 1e7, 1e-5])
        scores = targets + torch.randn(NUM_IMAGES, 3, generator=generator) * torch.tensor([0.1, 1e6, 1e-6])
    names = tuple(f"my images/{index},{task}.png" for index in range(NUM_IMAGES))
    losses = torch.linspace(0, 3, NUM_IMAGES)
    return Evaluation(task, 1.5, compute_metrics(task, scores, targets), names, targets, scores, losses, scores)


@pytest.fixture
def write_table(tmp_path: Path) -> Callable[[Evaluation], Path]:
    def write(found: Evaluation) -> Path:
        (tmp_path / "predictions.csv").write_text(predictions_text({"val": found}, NAMES), encoding="utf-8")
        contract = {"task": found.task, "classes": NAMES, "image_size": [64, 64]}
        (tmp_path / "contract.json").write_text(json.dumps(contract), encoding="utf-8")
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("task", "columns"),
    [
        ("classify", ["label", "predicted", "score", "loss"]),
        ("multilabel", ["label", "predicted", "loss", "score_left eye", "score_ü,x", "score_c"]),
        (
            "regress",
            ["loss", "true_left eye", "predicted_left eye", "true_ü,x", "predicted_ü,x", "true_c", "predicted_c"],
        ),
    ],
)
def test_columns_follow_the_task(task: str, columns: list[str]) -> None:
    """One row a sample, each of the same length; two splits share one header."""
    rows = list(csv.reader(io.StringIO(predictions_text({"val": made(task), "test": made(task)}, NAMES))))
    assert rows[0] == ["split", "path", *columns]
    assert {len(row) for row in rows} == {len(rows[0])}
    assert [row[0] for row in rows[1:]] == ["val"] * NUM_IMAGES + ["test"] * NUM_IMAGES


def test_the_report_counts_labels_as_training_does(write_table: Callable[[Evaluation], Path]) -> None:
    """Mean average precision, macro F1 and exact matches out of the file are the metrics'."""
    found = made("multilabel")
    run = read_run(write_table(found))
    counted = label_scores("val", run.predictions, run.classes)
    assert counted is not None
    assert counted.mean_average_precision == pytest.approx(found.metrics["map"], abs=1e-6)
    assert counted.macro_f1 == pytest.approx(found.metrics["macro_f1"], abs=1e-6)
    assert counted.all_right == pytest.approx(found.metrics["accuracy"])
    assert [row.num_labelled for row in counted.scores] == found.targets.sum(0).tolist()
    assert counted.scores[2].average_precision is counted.scores[2].recall is None


def test_the_report_counts_targets_as_training_does(write_table: Callable[[Evaluation], Path]) -> None:
    """Errors and R² out of the file are the metrics', target by target, whatever their size."""
    found = made("regress")
    run = read_run(write_table(found))
    rows = target_scores("val", run.predictions, run.classes)
    assert [row.name for row in rows] == list(NAMES)
    for column, row in enumerate(rows):
        own = compute_metrics("regress", found.scores[:, [column]], found.targets[:, [column]])
        assert (row.mae, row.rmse, row.r2) == pytest.approx(tuple(own.values()), rel=1e-6)


def test_the_report_counts_classes_as_training_does(write_table: Callable[[Evaluation], Path]) -> None:
    """Accuracy and macro F1."""
    found = made("classify")
    run = read_run(write_table(found))
    counted = split_scores("val", run.predictions, run.classes)
    assert counted is not None
    assert (counted.accuracy, counted.macro_f1) == pytest.approx((found.metrics["accuracy"], found.metrics["macro_f1"]))


@pytest.mark.parametrize("task", ["multilabel", "regress"])
def test_the_worst_come_first_in_the_report(write_table: Callable[[Evaluation], Path], task: str) -> None:
    """By loss; what was said of each stands beside it, and none of the classes is said in words."""
    run = write_table(made(task))
    page = write_report(run).read_text(encoding="utf-8")
    assert f"{NUM_IMAGES - 1},{task}.png" in page
    assert ("taken for" if task == "multilabel" else "predicted left eye") in page
    assert (">none</b>" in page) == (task == "multilabel")


def test_torn_rows_are_left_out(write_table: Callable[[Evaluation], Path]) -> None:
    """A killed process may leave half a line: the page is made of the others."""
    for task in ("multilabel", "regress"):
        run = write_table(made(task))
        table = run / "predictions.csv"
        table.write_text(table.read_text(encoding="utf-8")[:-40], encoding="utf-8")
        assert NUM_IMAGES - 2 <= len(read_run(run).predictions) < NUM_IMAGES + (task == "multilabel")
        write_report(run)


def test_predict_gives_a_row_by_task() -> None:
    """A half is on, below is off; the best class with all scores; values by target; as a table, one column each."""
    assert predicted_row("multilabel", [0.5, 0.49, 1.0], NAMES)["labels"] == ["left eye", "c"]
    assert table_row(predicted_row("multilabel", [0.1, 0.2, 0.3], NAMES)) == {
        "labels": "", "score_left eye": 0.1, "score_ü,x": 0.2, "score_c": 0.3
    }  # fmt: skip
    row = table_row({"path": "x.png", **predicted_row("classify", [0.2, 0.7, 0.1], NAMES)})
    assert list(row) == ["path", "label", "score", "score_left eye", "score_ü,x", "score_c"]
    assert (row["label"], row["score"]) == ("ü,x", 0.7)
    assert table_row(predicted_row("regress", [1.5, 2.0, -3.0], NAMES)) == {
        "predicted_left eye": 1.5, "predicted_ü,x": 2.0, "predicted_c": -3.0
    }  # fmt: skip


@pytest.mark.parametrize("task", ["classify", "multilabel", "regress"])
def test_every_row_of_predict_fits_the_columns(task: str) -> None:
    """Those of a file that cannot be read too: the same keys, and nothing said."""
    columns = table_columns(task, NAMES)
    said = {"path": "x.png", **predicted_row(task, [0.2, 0.7, 0.1], NAMES), "drift": 0.5, "error": None}
    bad = {"path": "y.png", **predicted_row(task, None, NAMES), "drift": None, "error": "cut"}
    assert said.keys() == bad.keys()
    assert [*table_row(said), "error"] == list(columns)
    assert table_row(bad) == {"path": "y.png", "error": "cut"}


def test_the_best_classes_stand_in_columns_of_their_own() -> None:
    """By score, of equal ones the first, as many as asked; a file that cannot be read has the same columns, empty."""
    row = {"path": "x.png", **predicted_row("classify", [0.2, 0.4, 0.4], NAMES, top=2), "drift": None, "error": None}
    assert row["top"] == [{"label": "ü,x", "score": 0.4}, {"label": "c", "score": 0.4}]
    columns = table_columns("classify", NAMES, top=2)
    assert columns[-6:] == ("top1", "top1_score", "top2", "top2_score", "drift", "error")
    assert table_row(row) == {
        "path": "x.png", "label": "ü,x", "score": 0.4, "score_left eye": 0.2, "score_ü,x": 0.4, "score_c": 0.4,
        "top1": "ü,x", "top1_score": 0.4, "top2": "c", "top2_score": 0.4,
    }  # fmt: skip
    bad = {"path": "y.png", **predicted_row("classify", None, NAMES, top=2), "drift": None, "error": "cut"}
    assert bad.keys() == row.keys()
    assert table_row(bad) == {"path": "y.png", "error": "cut"}
