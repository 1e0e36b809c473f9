"""What the command line says of recipes that are wrong, or look so, kept as text files to look at: `golden/*.txt`.

Each file is a recipe and what `hiresvis check recipe.yaml` says to it. After a change that is meant:

    python tests/recipe/test_golden.py

writes the files again; look at their difference before it is committed.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from pathlib import Path

import pytest

from hiresvis import cli

HERE = Path(__file__).resolve().parent / "golden"
MINIMAL = "task: classify\ndata: {train: data/train}\nmodel: {name: resnet18}\n"
# A number that is read as it should be is shown by what is said of one that is out of bounds.
CASES: dict[str, str | None] = {
    "exponent": MINIMAL + "optim:\n  lr: 1e-4              # a number: no finding\n  weight_decay: -1e-4\n  layer_decay: '1e-4'\n",
    "leading_zero": MINIMAL + "train:\n  epochs: 010           # ten: no finding\n  batch: -010\n",
    "on": MINIMAL.replace("resnet18", "resnet18, pretrained: yes") + "train:\n  deterministic: on\nlog: {ui: off}\n",
    "twice": MINIMAL + "optim:\n  lr: 1e-4\n  weight_decay: 0.1\n  lr: 1e-3\ntask: regress\n",
    "tab": MINIMAL + "train:\n\tepochs: 3\n\tbatch: 0\n",
    "unknown_key": MINIMAL + "optim: {wieght_decay: 0.1}\nepoch: 3\nmemory: {lr: 1e-4}\n",
    "list_for_mapping": "task: classify\ndata: [data/train, data/val]\nmodel: {name: resnet18}\n",
    "list_for_recipe": "- task: classify\n- data: {train: data/train}\n",
    "empty": "",
    "missing": None,
    "no_yaml": MINIMAL + "memory: {budget: 22GiB\ntrain: {epochs: 3}\n",
    "five_at_once": "task: classfy\ndata: {train: data/train, val: 1.5}\nmodel:\n  name: resnet18\n  image_size: 1024.5\n"
    "optim: {lr: -1}\ntrain: {batch: 16, epoch: 20}\n",
}


def said(name: str, folder: Path) -> str:
    """The recipe, the command, what it says, and how it ends."""
    text, recipe = CASES[name], folder / ("recipe.yaml" if name != "missing" else "recipes.yaml")
    recipe.write_text(MINIMAL if text is None else text, encoding="utf-8")
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            cli.main(["check", "recipe.yaml"])
    finally:
        os.chdir(before)
    assert out.getvalue() == ""
    shown = "(no such file; recipes.yaml is there)\n" if text is None else text.replace("\t", "<TAB>")
    return f"{shown}\n$ hiresvis check recipe.yaml\n{err.getvalue()}exit code {ended.value.code}\n"


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_of_a_recipe_is_as_it_was(tmp_path: Path, name: str) -> None:
    """Every mistake at once, each with its line and column, to the letter."""
    assert said(name, tmp_path) == (HERE / f"{name}.txt").read_text(encoding="utf-8")


def test_five_errors_are_five_lines_each_at_its_place() -> None:
    """None hides another, also where two are on one line."""
    lines = (HERE / "five_at_once.txt").read_text(encoding="utf-8").partition("$ ")[2].splitlines()[1:-1]
    assert [line.split()[0] for line in lines] == [
        "recipe.yaml:1:7", "recipe.yaml:2:32", "recipe.yaml:5:15", "recipe.yaml:6:13", "recipe.yaml:7:20",
    ]  # fmt: skip


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    for case in CASES:
        with tempfile.TemporaryDirectory() as place:
            (HERE / f"{case}.txt").write_text(said(case, Path(place)), encoding="utf-8")
