"""What evaluate found, as text for people: figures, tables, and which class is taken for which."""

from __future__ import annotations

import tracemalloc

from hiresvis.ui.evaluation_text import MOST_ROWS, evaluation_lines
from hiresvis.ui.text import ASCII, UNICODE

RESULT = {
    "val": {
        "images": 7,
        "loss": 0.25,
        "accuracy": 0.7142857142857143,
        "intervals": {"accuracy": [0.5, 0.9]},
        "calibration": {"temperature": 1.0},
        "classes": {
            "café": {"images": 4, "predicted": 5, "precision": 0.8, "recall": 1.0, "f1": 0.8888888},
            "ok": {"images": 3, "predicted": 2, "precision": 0.5, "recall": 0.33333, "f1": 0.4},
            "rare": {"images": 0, "predicted": 0, "precision": None, "recall": None, "f1": None},
        },
        "confusion": [
            {"label": "café", "predicted": "café", "images": 4},
            {"label": "ok", "predicted": "ok", "images": 2},
            {"label": "ok", "predicted": "café", "images": 1},
        ],
        "absent": ["rare"],
    }
}


def test_figures_come_first_and_exact_then_tables():
    """A line a figure with its interval, a row a class, a row a label."""
    assert list(evaluation_lines(RESULT, 80, UNICODE)) == [
        "val.images 7",
        "val.loss 0.25",
        "val.accuracy 0.7142857142857143 (0.500-0.900)",
        "val.calibration.temperature 1.0",
        "",
        "val, by class",
        "class  images  predicted  precision  recall     f1",
        "café        4          5      0.800   1.000  0.889",
        "ok          3          2      0.500   0.333  0.400",
        "rare        0          0          -       -      -",
        "",
        "val, images of each label by what they are predicted as",
        "label, predicted as  café  ok  rare",
        "café                    4   0     0",
        "ok                      1   2     0",
        "rare                    0   0     0",
    ]


def test_a_matrix_too_wide_becomes_the_most_frequent_mistakes():
    """No line is wider than the terminal; ASCII where that is all it has."""
    lines = list(evaluation_lines(RESULT, 30, ASCII))
    start = lines.index("val, most frequent mistakes")
    assert lines[start + 1 :] == ["label  predicted as  images", "ok     caf\\xe9            1"]


def test_of_many_classes_the_worst_are_shown():
    """By F1, those without one first; how many there are is said."""
    classes = {f"c{place:03d}": {"images": 1, "predicted": 1, "precision": 1.0, "recall": 1.0, "f1": place / 100} for place in range(100)}
    classes["none"] = dict.fromkeys(("images", "predicted", "precision", "recall", "f1"))
    pairs = [{"label": f"c{place:03d}", "predicted": "c000", "images": 100 - place} for place in range(1, 30)]
    lines = list(evaluation_lines({"test": {"classes": classes, "confusion": pairs}}, 80, UNICODE))
    assert f"test, by class (the {MOST_ROWS} worst of 101; --json has all)" in lines
    assert lines[3].startswith("none ")
    assert lines[4].startswith("c000 ")
    assert sum(line.startswith("c0") for line in lines[: MOST_ROWS + 3]) == MOST_ROWS - 1
    assert "test, most frequent mistakes (10 of 29 kinds)" in lines


def test_a_matrix_that_is_not_shown_is_not_made():
    """What thousands of classes cost grows with their number, and not with its square."""
    peaks = []
    for count in (500, 2000):
        classes = {f"c{place}": dict.fromkeys(("images", "predicted", "precision", "recall", "f1"), 1) for place in range(count)}
        pairs = [{"label": "c1", "predicted": "c0", "images": 3}]
        tracemalloc.start()
        lines = list(evaluation_lines({"test": {"classes": classes, "confusion": pairs}}, 80, UNICODE))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert lines[-1].split() == ["c1", "c0", "3"]
    assert peaks[1] < 6 * peaks[0]


def test_targets_and_masks_have_tables_of_their_own():
    """To regress each target in its own units, to segment each class's overlap."""
    lines = list(evaluation_lines({"val": {"mae": 2.5, "targets": {"lux": {"mae": 2.5, "rmse": 3.0, "r2": 0.5}}}}, 80, UNICODE))
    assert lines == ["val.mae 2.5", "", "val, by target", "target    mae   rmse     r2", "lux     2.500  3.000  0.500"]
    lines = list(evaluation_lines({"val": {"miou": 0.5, "classes": {"a": {"iou": 0.5, "share": None}}, "absent": []}}, 80, UNICODE))
    assert lines[2:] == ["val, by class", "class    iou  share", "a      0.500      -"]
