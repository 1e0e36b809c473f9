"""A recipe as `new` writes it: whatever names of files and classes stand in its comments, they are comments."""

from __future__ import annotations

from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from hiresvis.recipe import parse_recipe
from hiresvis.recipe.draft import Line, draft

VALUES = {"task": "classify", "data.train": "data", "data.val": 0.15, "model.name": "resnet18", "model.image_size": 64}
HIDDEN = "{0}log: {{dir: evil}} #"
LINE_ENDS = ("\n", "\r\n", "\r", "\x85", "\u2028", "\u2029")
NAMES = st.one_of(
    st.text(max_size=200),
    st.builds(
        lambda name, end, more: name + HIDDEN.format(end) + more, st.text(max_size=5), st.sampled_from(LINE_ENDS), st.text(max_size=5)
    ),
)


@settings(max_examples=50)
@given(NAMES)
@example("z\nlog: {dir: evil} #")
@example("\u2028")
@example("\udcff")  # a name that is no UTF-8
def test_no_name_in_a_comment_adds_a_key(name):
    """In the head, beside a value, above a long one and at a section's end: the recipe is the same as without comments."""
    plain = parse_recipe(draft({key: Line(value, "") for key, value in VALUES.items()}), Path("recipe.yaml"))
    lines = {key: Line(value, f"{name} ({name})") for key, value in VALUES.items()}
    text = draft(lines, head=[f"of {name}", name], asides={"data": [name], "model": [f"also planned: {name}"]})
    assert parse_recipe(text, Path("recipe.yaml")).recipe == plain.recipe
    assert text.encode()
