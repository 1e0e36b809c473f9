"""Kill, stop and starve a run at random moments, resume it each time, and hold its end against one left in peace.

python tools/torture.py --count 200                  # kill -9
python tools/torture.py --count 50 --how term        # SIGTERM, as a batch system sends it
python tools/torture.py --count 50 --how full        # no file may grow beyond some random size for a while, as on a full disk
python tools/torture.py --count 50 --how memory      # the process may map only so much more for a while: real allocations fail

A real run of the command's own code (drawn images, a small timm network with batch statistics, dropout and drop-path, snapshots as often
as they can be written) is forked off, hit at a random moment of training, writing or evaluating, looked at from outside, and resumed,
until it ends; then another one begins, until there were `--count` hits. Counted are the faults, any of which ends with exit code 1:

    lost      there was a snapshot, and afterwards there is none that loads
    back      the snapshot that loads is older than one that was reported as saved
    failed    a run ended by itself as it should not
    other     a finished run's weights, optimizer or random state are not, bit for bit, those of the run left in peace

With --how full and memory the best weights are not compared: weights that could not be written are never called best, by design. With
--how memory a run that had to take a smaller micro-batch is not compared either, nor one that a library ended (`std::bad_alloc`) a fault:
it is resumed, as after any crash.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
import random
import resource
import select
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import albumentations  # noqa: F401 - before the forks, once
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hiresvis.errors import HiresvisError
from hiresvis.fit import fit
from hiresvis.recipe import load_recipe
from hiresvis.train.snapshot import load_snapshot

FAULTS = ("lost", "back", "failed", "other")
RECIPE = """\
task: classify
data: {train: data/train, val: data/val, augment: light, workers: WORKERS}
model: {name: test_resnet, pretrained: false, image_size: 64, norm: batch, drop_path: 0.2}
optim: {mixup: 0.2, cutmix: 1.0}
memory: {budget: 2GiB, micro_batch: MICRO}
train: {epochs: 3, batch: 4, eval_batch: 2, save_every: 0.01s, metric: accuracy, ema: true}
log: {report: false}
"""
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM}
LONGEST_WAIT_S = 1.5  # after the first step; a run left in peace trains for some seconds
LIMIT_S = 120.0
ENDED_WELL, STOPPED, NO_DISK, NO_MEMORY = 0, 143, 6, 4


def draw(folder: Path, workers: int, micro_batch: str) -> None:
    """Noise of two colours, in class folders, and the recipe."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 4)):
        for channel, name in enumerate(("red", "green")):
            (folder / "data" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 200, (72, 72, 3), dtype=np.uint8)
                pixels[..., channel] += 40
                Image.fromarray(pixels).save(folder / "data" / split / name / f"{number}.png")
    text = RECIPE.replace("WORKERS", str(workers)).replace("MICRO", micro_batch)
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")


@dataclass
class Attempt:
    """One process of a run, forked off so that it need not import anything; its events come through a pipe, one line each."""

    recipe: Path
    run: Path
    pid: int = 0
    lines: int = 0
    last_kind: str = ""
    saved: tuple[int, int] = (0, 0)
    rest: bytes = b""
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        code = 1
        reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.close(reading)
                code = self._train(writing)
            finally:  # never up into the parent's own frames, which would clean up its folder
                os._exit(code)
        os.close(writing)
        self.lines = reading
        os.set_blocking(reading, False)

    def _train(self, writing: int) -> int:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        log = os.open(self.run.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 2)
        try:
            for event in fit(load_recipe(self.recipe, [f"log.dir={self.run}"]), resume=(self.run / "recipe.yaml").is_file()):
                told = {"kind": event.kind, "at": [getattr(event, "epoch", 0), getattr(event, "step", 0)]}
                os.write(writing, json.dumps(told).encode() + b"\n")
        except BaseException as error:
            with suppress(OSError):  # its own log may not grow either
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return error.exit_code if isinstance(error, HiresvisError) else 1
        return ENDED_WELL

    def watch(self, until: float) -> bool:
        """Reads events until then; whether the process still runs."""
        while (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select([self.lines], [], [], left)
            if not ready:
                return True
            if not self._read():
                return False
        return True

    def watch_for(self, kind: str) -> bool:
        """Reads events until one of that kind; whether it came."""
        while self.last_kind != kind and time.monotonic() - self.started < LIMIT_S:
            select.select([self.lines], [], [], LIMIT_S)
            if not self._read(kind):
                return False
        return self.last_kind == kind

    def _read(self, until: str = "") -> bool:
        if b"\n" not in self.rest:
            got = os.read(self.lines, 65536)
            if not got:
                return False
            self.rest += got
        while b"\n" in self.rest:
            line, _, self.rest = self.rest.partition(b"\n")
            told = json.loads(line)
            self.last_kind = told["kind"]
            if self.last_kind == "snapshot_saved":
                self.saved = (told["at"][0], told["at"][1])
            if self.last_kind == until:
                break
        return True

    def end(self) -> int:
        """The exit code, negative for a signal."""
        while self._alive():
            if time.monotonic() - self.started > LIMIT_S:
                os.kill(self.pid, signal.SIGKILL)
            self.watch(time.monotonic() + 0.2)
        os.set_blocking(self.lines, True)
        while self._read():
            pass
        os.close(self.lines)
        return self.code

    def _alive(self) -> bool:
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if done:
            self.code = os.waitstatus_to_exitcode(status)
        return not done


def apart(look_at: Callable[..., int], *args: Any) -> int:
    """What a function of small numbers gives, run in a fork: a process that has computed with tensors itself cannot fork off others that
    train (their pools of threads are invalid)."""
    child, found = os.fork(), 1
    if not child:
        try:
            found = look_at(*args)
        finally:
            os._exit(found)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def torture(folder: Path, count: int, how: str, seed: int, workers: int) -> tuple[Counter[str], Counter[str]]:
    """(faults, what else there was to count)."""
    draw(folder, workers, "auto" if how == "memory" else "2")
    rng = random.Random(seed)
    peace = folder / "peace"
    assert Attempt(folder / "recipe.yaml", peace).end() == ENDED_WELL, peace.with_suffix(".log").read_text()
    faults: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    while counts["hits"] < count and not faults:
        run = folder / f"run{counts['runs']}"
        counts["runs"] += 1
        faults += one_run(folder / "recipe.yaml", run, how, rng, counts, count)
        if not faults and apart(differs, run, peace, how in SIGNALS):
            faults["other"] += 1
            print(f"{run} differs from {peace}", file=sys.stderr)
    return faults, counts


def one_run(recipe: Path, run: Path, how: str, rng: random.Random, counts: Counter[str], count: int) -> Counter[str]:
    """Hits one run until it ends by itself, or the hits are used up."""
    newest = (0, 0)
    while True:
        attempt = Attempt(recipe, run)
        hit = counts["hits"] < count and attempt.watch_for("step_done") and attempt.watch(time.monotonic() + rng.uniform(0, LONGEST_WAIT_S))
        if hit:
            counts["hits"] += 1
            counts[f"after {attempt.last_kind}"] += 1
            if how not in SIGNALS:
                starve(attempt, rng, how)
            else:
                os.kill(attempt.pid, SIGNALS[how])
        code = attempt.end()
        newest = max(newest, attempt.saved)
        fault = ("", *FAULTS)[apart(look, run, newest)]
        if fault:
            there = sorted(path.name for path in (run / "snapshot").glob("*"))
            print(f"{run}: {fault}, after {attempt.last_kind}, exit code {code}; saved was {newest}; {there}", file=sys.stderr)
            return Counter([fault])
        if code == ENDED_WELL and (how in SIGNALS or not hit):
            return Counter()
        expected = (
            {
                "kill": {-signal.SIGKILL},
                "term": {STOPPED, -signal.SIGTERM},
                "full": {ENDED_WELL, NO_DISK},
                "memory": {ENDED_WELL, NO_MEMORY, -signal.SIGABRT},
            }[how]
            if hit
            else set()
        )
        if code not in expected:
            print(f"{run}: exit code {code}: {run.with_suffix('.log').read_text()[-400:]}", file=sys.stderr)
            return Counter(["failed"])


def starve(attempt: Attempt, rng: random.Random, how: str) -> None:
    """For a while no file may grow beyond some size (of a line, of a part of the weights, of a part of a snapshot), or the process may
    map only some MiB more."""
    kind = resource.RLIMIT_FSIZE if how == "full" else resource.RLIMIT_AS
    _, hard = resource.prlimit(attempt.pid, kind)
    try:
        if how == "full":
            limit = int(10 ** rng.uniform(1, 7))
        else:
            pages = int(Path(f"/proc/{attempt.pid}/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + int(2 ** rng.uniform(18, 25))
        resource.prlimit(attempt.pid, kind, (limit, hard))
        attempt.watch(time.monotonic() + rng.uniform(0, LONGEST_WAIT_S))
        resource.prlimit(attempt.pid, kind, (hard, hard))
    except (ProcessLookupError, FileNotFoundError):
        return


def look(run: Path, newest: tuple[int, int]) -> int:
    """What is wrong with the run folder from outside: the number of a fault, from 1; 0 where nothing is."""
    try:
        snapshot = load_snapshot(run / "snapshot")
    except HiresvisError as error:
        print(error, file=sys.stderr)
        return 1
    if snapshot is None:
        return int(newest > (0, 0))
    progress = snapshot.state["progress"]
    return 2 if (progress["epoch"], progress["step"]) < newest else 0


def differs(run: Path, other: Path, best: bool) -> bool:
    """Whether the two ended with other weights, optimizer or random state."""
    ours, theirs = load_snapshot(run / "snapshot"), load_snapshot(other / "snapshot")
    assert ours is not None
    assert theirs is not None
    micro_batches = {json.loads((folder / "plan.json").read_text(encoding="utf-8"))["micro_batch"] for folder in (run, other)}
    if len(micro_batches) > 1:  # memory left no other way
        return False
    if any(ours.state[part] != theirs.state[part] for part in ("optimizer", "scaler", "rng")):
        return True
    names = ("best", "last") if best else ("last",)
    files = [[load_file(folder / "weights" / f"{name}.safetensors") for name in names] for folder in (run, other)]
    pairs = zip([ours.tensors, *files[0]], [theirs.tensors, *files[1]], strict=True)
    return not all(a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items()) for a, b in pairs)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="hits in all")
    parser.add_argument("--how", choices=("kill", "term", "full", "memory"), default="kill")
    parser.add_argument("--workers", type=int, default=0, help="of the loader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a new folder for the runs, which stay there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # bits depend on the number of threads; and this process only forks
    warnings.filterwarnings("ignore", message="This process .* is multi-threaded, use of fork", category=DeprecationWarning)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        os.environ["HIRESVIS_CACHE"] = str(folder / "cache")
        faults, counts = torture(folder, options.count, options.how, options.seed, options.workers)
    where = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()) if kind.startswith("after"))
    seconds = time.monotonic() - started
    print(
        f"{options.how}: {counts['hits']} hits in {counts['runs']} runs, {seconds:.0f} s ({where}); "
        + ", ".join(f"{faults[kind]} {kind}" for kind in FAULTS)
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
