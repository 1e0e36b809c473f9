"""Scalars and form of the YAML that recipes are written in."""

from __future__ import annotations

import pytest

from hiresvis.recipe import yamltext
from hiresvis.recipe.yamltext import Place


def parse(text):
    return yamltext.parse(text, lambda line, column: Place(f"{line}:{column}", (0, line, column)))


def said(text):
    return [(found.place.text, found.key, found.message) for found in parse(text).findings]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E3", 1000.0),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("-7", -7),
        ("+7", 7),
        (".5", 0.5),
        ("1.", 1.0),
        ("12:30", "12:30"),
        ("1_000", "1_000"),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("tRue", "tRue"),
        ("~", None),
        ("null", None),
        ("2026-01-02", "2026-01-02"),
        ("0b11", "0b11"),
        ("-.inf", float("-inf")),
        ("22GiB", "22GiB"),
        ("5%", "5%"),
        ("=", "="),
    ],
)
def test_plain_scalar_means_what_yaml_1_2_says(text, value):
    """A plain scalar follows the core schema of YAML 1.2, not the older rules of PyYAML."""
    (found,) = parse(f"key: {text}").root.plain().values()
    assert found == value
    assert type(found) is type(value)


def test_quoted_scalar_is_text():
    """Quotes make text of whatever is inside."""
    assert parse("a: \"1\"\nb: 'true'\nc: |\n  3\n").root.plain() == {"a": "1", "b": "true", "c": "3\n"}


def test_nodes_know_line_and_column():
    """Keys and values carry their own line and column, counted from 1."""
    root = parse("a: 1\nb:\n  c: [x, y]\n").root
    inner = root.value["b"].node.value["c"]
    assert (inner.place.text, inner.node.place.text, inner.node.value[1].place.text) == ("3:3", "3:6", "3:10")


def test_every_key_given_twice_is_named():
    """All duplicates are found, at the top and inside, each with the first one's line."""
    assert said("a: 1\nb: {c: 1, c: 2}\na: 2\n") == [
        ("2:11", "b.c", "given twice, first on line 2; keep one"),
        ("3:1", "a", "given twice, first on line 1; keep one"),
    ]


def test_the_first_of_two_keys_counts_until_the_recipe_is_refused():
    """What follows is checked against the first value, and a section given twice is read as one."""
    assert parse("a: {x: 1}\na: {y: 2, x: 3}\n").root.plain() == {"a": {"x": 1, "y": 2}}


@pytest.mark.parametrize(
    ("text", "place", "key", "part"),
    [
        ("a: &x 1\n", "1:4", "a", "an anchor (&x)"),
        ("a: &x 1\nb: *x\n", "2:4", "b", "an alias (*x)"),
        ("b: {<<: {c: 1}}\n", "1:5", "b.<<", "a merge key"),
        ("a: !!str 1\n", "1:4", "a", "a tag (!!str)"),
        ("a: !!python/object/apply:os.system [ls]\n", "1:4", "a", "a tag (!!python"),
        ("[a, b]: 1\n", "1:1", "", "a key that is not a word"),
        ("{a: 1}: 1\n", "1:1", "", "a key that is not a word"),
        ("a: 1\n---\nb: 2\n", "2:1", "", "a second document"),
        ("a: " + "[" * 40 + "]" * 40, "1:19", "a" + "[0]" * 15, "nested deeper than 16"),
    ],
)
def test_forms_that_no_recipe_needs_are_refused_by_name(text, place, key, part):
    """Anchors, aliases, merge keys, tags, odd keys, documents and depth are each named at their place."""
    assert any((where, name) == (place, key) and part in message for where, name, message in said(text)), said(text)


def test_quoted_merge_sign_is_an_ordinary_key():
    """Only the plain `<<` is a merge key."""
    assert not said('"<<": 1\n')


@pytest.mark.parametrize(
    ("text", "place", "part"),
    [
        ("a: 1\n b: 2\n", "2:3", "indentation"),
        ("a: [1, 2\nb: 3\n", "2:2", "bracket"),
        ("a: 'x\n", "2:1", "quote"),
        ("a: b: c\n", "1:5", "two keys on one line"),
        ("a: @x\n", "1:4", "put the value in quotes"),
        ("a: 1\nb\nc: 2\n", "3:1", "a key without ': '"),
        ("a: x\x00y\n", "1:5", "a character that no text file holds"),
    ],
)
def test_broken_yaml_is_located_and_explained(text, place, part):
    """A text that is not YAML gives one message with line, column and a likely cause."""
    ((where, _, message),) = said(text)
    assert (where, part in message) == (place, True), (where, message)


def test_tabs_are_named_and_the_rest_is_read_all_the_same():
    """Every line with a tab is told, and reading goes on, with the columns of the file as it is."""
    document = parse("a:\n\tb: 1\n\tb: 2\nc:\t3\n")
    assert [(found.place.text, found.key) for found in document.findings] == [("2:1", ""), ("3:1", ""), ("4:3", ""), ("3:2", "a.b")]
    assert "replace it with two spaces" in document.findings[0].message
    assert document.root.plain() == {"a": {"b": 1}, "c": 3}


def test_tabs_inside_quotes_and_comments_are_fine():
    """A tab that stands for itself is no finding."""
    assert not said('a: "x\ty" #\tz\n')


def test_empty_text_has_no_root():
    """Nothing, white space and comments alone hold no document."""
    assert [parse(text).root for text in ("", "\n\n", "# only a comment\n")] == [None] * 3


def test_windows_line_ends_keep_lines_and_columns():
    """CR LF counts as one line end."""
    assert parse("a: 1\r\nb: 2\r\n").root.value["b"].node.place.text == "2:4"
