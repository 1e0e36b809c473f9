"""Whole commands on small real files: what the tests here share.

Commands run in this process, by the same entry point as the installed program, since importing torch costs more than most
of them; where a process matters (signals, memory seen from outside) a test starts one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hiresvis import cli
from hiresvis.data.samples import draw_boards

RECIPE = """\
task: classify
data:
  train: {data}/train
  val: {data}/val
  test: {data}/test
  augment: light
  workers: 0
model:
  name: test_resnet
  pretrained: false
  image_size: 64
  norm: batch
memory:
  budget: 4GiB
train:
  epochs: 2
  batch: 6
"""
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Workshop:
    """A folder with a recipe, and commands run on it."""

    def __init__(self, folder: Path, data: Path, recipe: str = RECIPE) -> None:
        self.folder, self.data = folder, data
        folder.mkdir(parents=True, exist_ok=True)
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(recipe.format(data=data), encoding="utf-8")
        self.overrides: tuple[str, ...] = ()
        self.done: Done | None = None

    def __call__(self, command: str, *arguments: str | Path) -> Done:
        """Any command line."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            cli.main([command, *map(str, arguments)])
        return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())

    def fit(self, *arguments: str, name: str = "recipe", ok: bool = True) -> Done:
        """`fit` into runs/<name>; with `ok` it has to succeed."""
        done = self("fit", self.recipe, f"log.dir={self.folder / 'runs' / name}", *arguments)
        assert not ok or done.code == 0, done.err
        return done

    def plan(self, *arguments: str) -> Done:
        return self("plan", self.recipe, *arguments, "--json")

    def path(self, name: str, run: str = "recipe") -> Path:
        return self.folder / "runs" / run / name

    def read(self, name: str, run: str = "recipe") -> Any:
        return json.loads(self.path(name, run).read_text(encoding="utf-8"))

    def events(self, kind: str, run: str = "recipe") -> list[dict[str, Any]]:
        rows = map(json.loads, self.path("events.jsonl", run).read_text(encoding="utf-8").splitlines())
        return [row for row in rows if row["event"] == kind]


class Process:
    """`hiresvis` as its own process, its events read as they come."""

    def __init__(self, *arguments: str | Path) -> None:
        call = [sys.executable, "-m", "hiresvis", *map(str, arguments), "--ui", "json"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            call, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.seen: list[str] = []
        self.watch = threading.Timer(PATIENCE_S, self.process.kill)  # a test that waits for what never comes ends all the same
        self.watch.start()

    def wait_for(self, kind: str, **values: Any) -> dict[str, Any]:
        """The next event of a kind, with these values."""
        assert self.process.stderr
        for line in self.process.stderr:
            self.seen.append(line)
            row = json.loads(line) if line.startswith("{") else {}
            if row.get("event") == kind and all(row[key] == value for key, value in values.items()):
                return row
        pytest.fail(f"no {kind} came:\n{''.join(self.seen[-5:])}")

    def send(self, signum: signal.Signals, *, to_all: bool = False) -> None:
        """A signal to the process, or, as a terminal sends Ctrl-C, to its loader's workers as well."""
        (os.killpg if to_all else os.kill)(self.process.pid, signum)

    def finish(self) -> Done:
        out, err = self.process.communicate()
        self.watch.cancel()
        return Done(self.process.returncode, out, "".join(self.seen) + err)


def draw_folders(folder: Path, counts: dict[str, dict[str, int]], *, size_px: int = 80, seed: int = 0) -> Path:
    """`{split: {class: images}}` as folders of noisy PNGs, the class in the hue and in the texture."""
    rng = np.random.default_rng(seed)
    for split, classes in counts.items():
        for position, (name, count) in enumerate(classes.items()):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 180, (size_px, size_px + 8 * position, 3), dtype=np.uint8)
                pixels[..., sum(map(ord, name)) % 3] += 60
                Image.fromarray(pixels).save(folder / split / name / f"{number:03d}.png")
    return folder


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    """Sums are reassociated by the number of threads, and the tests here compare bits, of runs that fixtures make as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    """What the check remembers goes into a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIRESVIS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small set of two classes; no test changes it."""
    counts = {"train": {"blue": 8, "red": 8}, "val": {"blue": 4, "red": 5}, "test": {"blue": 3, "red": 4}}
    return draw_folders(tmp_path_factory.mktemp("folders"), counts)


@pytest.fixture(scope="session")
def boards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Drawn boards of 256 px."""
    folder = tmp_path_factory.mktemp("boards") / "set"
    draw_boards(folder, num_train=16, num_val=8, num_test=6, size_px=256, workers=1)
    return folder


@pytest.fixture(scope="session")
def workshop_type() -> type[Workshop]:
    """For fixtures that need a workshop of their own."""
    return Workshop


@pytest.fixture
def workshop(tmp_path: Path, folders: Path) -> Workshop:
    """The small set's recipe, in the test's own folder."""
    return Workshop(tmp_path / "work", folders)


@pytest.fixture
def open_workshop(tmp_path: Path) -> Callable[..., Workshop]:
    """Workshops on other data."""

    def open_(data: Path, recipe: str = RECIPE, name: str = "other") -> Workshop:
        return Workshop(tmp_path / name, data, recipe)

    return open_


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Starts `Process`es; none outlives its test."""
    begun: list[Process] = []

    def start_(*arguments: str | Path) -> Process:
        begun.append(Process(*arguments))
        return begun[-1]

    yield start_
    for process in begun:
        process.watch.cancel()
        process.process.kill()
        process.process.communicate()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, boards: Path) -> Workshop:
    """A finished run on boards; no test changes it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    work = Workshop(tmp_path_factory.mktemp("trained"), boards)
    work.overrides = ("model.image_size=96", "train.epochs=3", "train.metric=accuracy")
    work.done = work.fit(*work.overrides)
    torch.set_num_threads(threads)
    return work


@pytest.fixture(scope="session")
def draw() -> Callable[..., Path]:
    """`draw_folders`."""
    return draw_folders


@pytest.fixture(scope="session")
def make_workshop() -> Callable[..., Workshop]:
    """`Workshop`."""
    return Workshop
