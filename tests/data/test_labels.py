"""What a row's cells say, by task."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hiresvis.data.labels import LabelReader, label_text, mean_and_std, targets_of

CLASSES = ("a", "b", "c")


@pytest.mark.parametrize(
    ("cell", "label"), [("b|a", ("a", "b")), (" a | b ", ("a", "b")), ("a", ("a",)), ("", ()), ("left eye|a", ("a", "left eye"))]
)
def test_a_list_of_names_is_read_in_any_order(cell, label):
    """`a|b` and `b | a` are one label, and an empty cell is none of the classes."""
    assert LabelReader("multilabel", "tags")((cell,)) == (label, [])


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("a||b", "'a||b' in column 'tags' has an empty name; write a|b"),
        ("|", "'|' in column 'tags' has an empty name"),
        ("a|b|a", "names 'a' twice"),
        ("NaN", r"no labels in column 'tags' (NaN); an image of none of the classes has an empty text there"),
        (None, "no labels in column 'tags' (null)"),
    ],
)
def test_a_list_that_is_none_is_told(cell, message):
    """An empty name, one twice, NaN and null are no labels; an empty cell is."""
    _, problems = LabelReader("multilabel", "tags")((cell,))
    assert len(problems) == 1
    assert message in problems[0]


def test_columns_of_flags_name_the_classes_that_are_on():
    """0, 1, true and false in any case, as tables and their readers write them."""
    reader = LabelReader("multilabel", ["a", "b", "c"])
    assert reader.names == CLASSES
    assert reader(("1", "0", "TRUE")) == (("a", "c"), [])
    assert reader(("0.0", "1.0", "false")) == (("b",), [])
    assert reader(("0", "0", "0")) == ((), [])


@pytest.mark.parametrize(("cell", "shown"), [("2", "'2'"), ("yes", "'yes'"), ("", "an empty cell"), (None, "null"), ("nan", "'nan'")])
def test_every_flag_that_is_none_is_told_with_its_column(cell, shown):
    """A missing answer is not taken for no."""
    _, problems = LabelReader("multilabel", ["a", "b", "c"])((cell, "1", cell))
    assert problems == [f"{shown} in column '{name}' is not 0 or 1" for name in "ac"]


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=4))
def test_numbers_keep_every_digit(values):
    """What a table has written is what training gets."""
    names = [f"t{index}" for index in range(len(values))]
    label, problems = LabelReader("regress", names)(tuple(map(repr, values)))
    assert (label, problems) == (tuple(values), [])
    assert [float(text) for text in label_text(label, "regress", names).split("|")] == values


@pytest.mark.parametrize(
    ("cell", "shown"),
    [*((text, repr(text)) for text in ("nan", "-inf", "1e999", "1,5", "1_000", "old")), ("", "an empty cell"), (None, "null")],
)
def test_every_number_that_is_none_is_told_with_its_column(cell, shown):
    """NaN, infinities, text, a decimal comma, empty and null."""
    _, problems = LabelReader("regress", ["x", "y"])((cell, "2"))
    assert problems == [f"{shown} in column 'x' is not a finite number{'; write 1.5' if cell == '1,5' else ''}"]


def test_a_number_that_stands_for_nothing_is_told():
    """The largest float is what some tools write for a missing value."""
    _, problems = LabelReader("regress", "x")(("-1.797e308",))
    assert problems == ["'-1.797e308' in column 'x' is beyond 1e+30; mark what is missing by leaving its row out"]


def test_equal_labels_are_one_object():
    """A table of many rows holds each combination once, as names and as targets."""
    reader = LabelReader("multilabel", "tags")
    labels = [reader((cell,))[0] for cell in ("a|b", "b|a", "a |b", "c")]
    assert labels[0] is labels[1] is labels[2]
    targets = targets_of(labels, "multilabel", CLASSES)
    assert targets == [(1.0, 1.0, 0.0)] * 3 + [(0.0, 0.0, 1.0)]
    assert targets[0] is targets[2]
    assert [label_text(target, "multilabel", CLASSES) for target in targets] == ["a|b", "a|b", "a|b", "c"]


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.floats(-1e-6, 1e-6)), min_size=2, max_size=30), st.randoms())
def test_the_order_of_rows_changes_no_bit_of_mean_and_deviation(rows, random):
    """So a table sorted anew is the same set to a run that is resumed."""
    shuffled = random.sample(rows, len(rows))
    assert mean_and_std(rows) == mean_and_std(shuffled)
    means, stds = mean_and_std(rows)
    for column, mean, std in zip(zip(*rows, strict=True), means, stds, strict=True):
        assert mean == pytest.approx(sum(column) / len(column), rel=1e-9, abs=1e-6)
        assert std == pytest.approx(math.sqrt(sum((value - mean) ** 2 for value in column) / len(column)), rel=1e-9, abs=1e-12)
