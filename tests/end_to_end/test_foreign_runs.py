"""A run folder that somebody else made: read as data, whatever is in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent.parent
# Says on stderr what the command opens, imports and starts besides what it is made of; an audit hook cannot be taken out again.
WATCHED = """\
import sys
mine, *arguments = sys.argv[1:]
def watch(event, given):
    if event == "open" and isinstance(given[0], str) and given[0].startswith(mine):
        sys.stderr.write(f"opened {given[0]}\\n")
    elif event in ("pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect"):
        sys.stderr.write(f"did {event} {given}\\n")
    elif event == "import" and given[1] and str(given[1]).startswith(mine):
        sys.stderr.write(f"imported {given}\\n")
import hiresvis.evaluating
from hiresvis.cli import main
sys.addaudithook(watch)
main(arguments)
"""


@pytest.fixture
def run(trained, tmp_path: Path) -> Path:
    """A copy of a finished run."""
    return Path(shutil.copytree(trained.path(""), tmp_path / "foreign" / "run"))


def test_evaluating_it_runs_no_code_and_reads_nothing_that_it_names(trained, run, tmp_path):
    """With data of one's own, neither the weights nor the data that its recipe names are opened; scripts that lie in it are no modules."""
    secret = tmp_path / "foreign" / "secret"  # is not there: who asks for it fails
    for name in ("conftest.py", "sitecustomize.py", "timm.py", "torch.py", "hiresvis.py"):
        (run / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    resolved = run / "recipe.resolved.yaml"
    text = re.sub(r"(\n  (train|val|test|dir|pretrained|root): )[^ \n]+(?=  #)", rf"\g<1>{secret}/other.safetensors", resolved.read_text())
    assert text.count("secret") >= 5
    resolved.write_text(text.replace(f"train: {secret}/other.safetensors", f"train: {secret}/other.csv"))
    own = trained("evaluate", trained.path(""), "--data", trained.data / "test", "--json")
    call = [sys.executable, "-c", WATCHED, str(tmp_path / "foreign"), "evaluate", str(run), "--data", str(trained.data / "test"), "--json"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(call, capture_output=True, text=True, env=environ, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == own.json
    assert not (tmp_path / "ran").exists()
    seen = [line for line in done.stderr.splitlines() if line.split(" ")[0] in ("opened", "did", "imported")]
    files = ("contract.json", "metrics.csv", "plan.json", "recipe.resolved.yaml")  # and the weights, by safetensors' own code
    assert sorted(set(seen)) == [f"opened {run / name}" for name in files]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def other_shape(path: Path) -> None:
    save_file({name: torch.zeros(3) for name in load_file(path)}, path)


def pickled(path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, path)


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("weights/best.safetensors", cut, "not the weights of this run's model"),
        ("weights/best.safetensors", other_shape, "not the weights of this run's model"),
        ("weights/best.safetensors", pickled, "not the weights of this run's model"),
        ("plan.json", lambda path: path.write_text("[]"), "no eval_batch, precision, norm in it"),
        ("plan.json", lambda path: path.write_text('{"eval_batch": "4", "precision": "fp32"}'), "no eval_batch, norm in it"),
        ("contract.json", lambda path: path.write_text("{}"), "cannot be read"),
        ("contract.json", cut, "cannot be read"),
        ("recipe.resolved.yaml", lambda path: path.write_text("task: !!python/object/apply:os.system ['true']\n"), "tag"),
    ],
)
def test_a_file_of_it_that_is_none_of_a_run_is_named(trained, run, name: str, spoil: Callable[[Path], None], said: str):
    """As the run's fault, not as ours."""
    spoil(run / name)
    done = trained("evaluate", run, "--data", trained.data / "test")
    assert done.code in (2, 6)
    assert str(run / name) in done.err
    assert said in done.err
    assert "A fault in hiresvis" not in done.err
