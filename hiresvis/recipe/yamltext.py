"""YAML text to a tree of nodes that know where they stand, with the scalars of YAML 1.2's core schema.

PyYAML scans and parses; the meaning of scalars is decided here, since PyYAML's own follows YAML 1.1 (`010` is 8, `12:30`
is 750, `on` is true, `1e-4` is text, and of a key given twice the last wins). A recipe is one small document, so anchors,
aliases, merge keys and tags are refused: with them a value stands at one place and acts at another, and messages about it
could only name one of the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import yaml

Scalar = str | int | float | bool | None
_INTEGER = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"([-+]?)\.(?:inf|Inf|INF)")
_WORDS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
_MAX_DEPTH = 16
_TAB = "a tab; YAML is indented with spaces: replace it with two spaces"


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands: the text for people, and its rank among other places."""

    text: str
    rank: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Found:
    """One finding in the text."""

    place: Place
    key: str
    message: str


@dataclass(slots=True)
class Entry:
    """One key of a mapping with its value."""

    place: Place
    node: Node


@dataclass(slots=True)
class Node:
    """A scalar, a list or a mapping. `broken`: refused already, so nothing more is said about its value."""

    place: Place
    value: Scalar | list[Node] | dict[str, Entry]
    broken: bool = False

    def plain(self) -> object:
        """The value without places; broken parts are left out."""
        if isinstance(self.value, dict):
            return {key: entry.node.plain() for key, entry in self.value.items() if not entry.node.broken}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value if not node.broken]
        return self.value


@dataclass(slots=True)
class Document:
    """What a text holds: its root (None where there is none) and every finding about its form."""

    root: Node | None
    findings: list[Found] = field(default_factory=list)


def read_scalar(text: str) -> Scalar:
    """A plain (unquoted) scalar by the core schema of YAML 1.2.

    >>> [read_scalar(text) for text in ("1e-4", "010", "0o10", "12:30", "on", "true", "~", "1_000")]
    [0.0001, 10, 8, '12:30', 'on', True, None, '1_000']
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text) and len(text) <= 400:  # Python refuses to read much longer ones
        return int(text)
    if _OCTAL.fullmatch(text):
        return int(text[2:], 8)
    if _HEX.fullmatch(text):
        return int(text[2:], 16)
    if _FLOAT.fullmatch(text):
        return float(text)
    if infinite := _INFINITE.fullmatch(text):
        return float(f"{infinite[1]}inf")
    return text


def parse(text: str, locate: Callable[[int, int], Place]) -> Document:
    """The tree of a YAML text. `locate` turns a line and a column, both from 1, into a place."""
    try:
        return _Builder(locate).build(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = locate(mark.line + 1, mark.column + 1) if mark else locate(1, 1)
        if "'\\t'" in str(error.problem):
            return _parse_without_tabs(text, place, locate)
        return Document(None, [Found(place, "", _explain(error))])
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = locate(before.count("\n") + 1, error.position - before.rfind("\n"))
        return Document(None, [Found(place, "", f"a character that no text file holds (code {ord(text[error.position]):#06x}); delete it")])


def _parse_without_tabs(text: str, first: Place, locate: Callable[[int, int], Place]) -> Document:
    """Names every tab between keys and values, then reads on as if they were spaces, to find what else is wrong."""
    findings = []
    lines = text.split("\n")
    shift = {}
    for number, line in enumerate(lines, start=1):
        match = re.match(r"[^\"'#\t]*\t", line)
        if match and not line[match.end() :].lstrip().startswith("#") and line.strip():
            findings.append(Found(locate(number, match.end()), "", _TAB))
        indent = line[: len(line) - len(line.lstrip())]
        shift[number] = indent.count("\t")
        lines[number - 1] = indent.replace("\t", "  ") + line[len(indent) :].replace("\t", " ")

    def locate_before(line: int, column: int) -> Place:
        return locate(line, max(1, column - shift.get(line, 0)))

    try:
        document = _Builder(locate_before).build("\n".join(lines))
    except yaml.YAMLError:
        document = Document(None)
    document.findings[:0] = findings or [Found(first, "", _TAB)]
    return document


def _explain(error: yaml.MarkedYAMLError) -> str:
    problem = " ".join(part for part in (error.problem, f"({error.context})" if error.context else "") if part)
    hints = {
        "mapping values are not allowed here": "two keys on one line, or an indentation that does not match the line above",
        "could not find expected ':'": "a key without ': ' after it",
        "expected <block end>": "an indentation that does not match the lines above, or a missing quote or bracket",
        "cannot start any token": "put the value in quotes",
        "expected ',' or": "a bracket that is not closed, or a value to put in quotes",
        "found unexpected end of stream": "a quote that is not closed",
        "did not find expected": "check the line above as well",
    }
    hint = next((hint for part, hint in hints.items() if part in problem), "")
    return f"not YAML: {problem}" + (f"; {hint}" if hint else "")


class _Builder:
    """Builds the tree from PyYAML's events, so that every finding is collected and not only the first."""

    def __init__(self, locate: Callable[[int, int], Place]) -> None:
        self._locate = locate
        self._findings: list[Found] = []

    def build(self, text: str) -> Document:
        events: Iterator[yaml.Event] = yaml.parse(text, Loader=yaml.SafeLoader)
        root: Node | None = None
        num_documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    self._say(event, "", "a second document; a recipe is one: delete from --- on")
                    break
                root = self._node(next(events), events, "", 0)
        return Document(root, self._findings)

    def _place(self, event: yaml.Event) -> Place:
        assert event.start_mark is not None, "the parser marks every event"
        return self._locate(event.start_mark.line + 1, event.start_mark.column + 1)

    def _say(self, event: yaml.Event, key: str, message: str) -> None:
        self._findings.append(Found(self._place(event), key, message))

    def _node(self, event: yaml.Event, events: Iterator[yaml.Event], key: str, depth: int) -> Node:
        assert isinstance(event, yaml.NodeEvent), "a value starts here"
        place = self._place(event)
        if isinstance(event, yaml.AliasEvent):
            self._say(event, key, f"an alias (*{event.anchor}) is not allowed in a recipe; write the value out")
            return Node(place, None, broken=True)
        node = Node(place, None)
        if event.anchor is not None:
            self._say(event, key, f"an anchor (&{event.anchor}) is not allowed in a recipe; write the value out wherever it is used")
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._say(event, key, f"a tag ({tag}) is not allowed in a recipe; write the value alone")
            node.broken = True
        if isinstance(event, yaml.ScalarEvent):
            node.value = read_scalar(event.value) if event.style is None else event.value
            return node
        too_deep = depth >= _MAX_DEPTH
        if too_deep:
            self._say(event, key, f"nested deeper than {_MAX_DEPTH} levels; no recipe key needs that")
            node.broken = True
            _skip(events)
        elif isinstance(event, yaml.SequenceStartEvent):
            node.value = self._items(events, key, depth)
        else:
            node.value = self._entries(events, key, depth)
        return node

    def _items(self, events: Iterator[yaml.Event], key: str, depth: int) -> list[Node]:
        items: list[Node] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(self._node(event, events, f"{key}[{len(items)}]", depth + 1))
        return items

    def _entries(self, events: Iterator[yaml.Event], prefix: str, depth: int) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            place = self._place(event)
            if not isinstance(event, yaml.ScalarEvent):
                self._say(event, prefix, "a key that is not a word; write key: value")
                if not isinstance(event, yaml.AliasEvent):
                    _skip(events)
                self._node(next(events), events, prefix, depth + 1)
                continue
            name = event.value
            key = f"{prefix}.{name}" if prefix else name
            node = self._node(next(events), events, key, depth + 1)
            if name == "<<" and event.style is None:
                self._say(event, key, "a merge key is not allowed in a recipe; write the keys out")
            elif name not in entries:
                entries[name] = Entry(place, node)
            else:
                first = entries[name]
                self._findings.append(Found(place, key, f"given twice, first on line {first.place.rank[1]}; keep one"))
                if isinstance(first.node.value, dict) and isinstance(node.value, dict):
                    # Not the meaning of the recipe (it is refused), but what is wrong inside is found in the same go.
                    first.node.value.update({inner: entry for inner, entry in node.value.items() if inner not in first.node.value})
        return entries


def _skip(events: Iterator[yaml.Event]) -> None:
    """Passes over the rest of a list or mapping whose start was just read."""
    depth = 1
    while depth:
        event = next(events)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
