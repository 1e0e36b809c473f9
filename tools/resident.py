"""One training step's resident size, measured in a fresh process from outside; what `bench_peaks.py --resident` runs for each plan.

The process that is measured makes the model, tells what it uses, waits, and takes two steps. Meanwhile its parent forgets the kernel's
high-water mark, reads the resident size every few milliseconds, and in the end reads the mark.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hiresvis.memory.budget import RESERVE_BYTES, RESERVE_SHARE, reserve_of
from hiresvis.memory.plan import Segment

ROOT = Path(__file__).resolve().parent.parent
SAMPLING_S = 0.005
STEPS = 2


@dataclass(frozen=True)
class Resident:
    """Bytes of one process.

    Attributes:
        baseline_bytes: resident before the first step, less weights and buffers, as a budget counts it.
        high_water_bytes: the kernel's mark over all steps.
        sampled_bytes: the highest of the sizes that were read.
    """

    baseline_bytes: int
    high_water_bytes: int
    sampled_bytes: int


def least_budget(baseline_bytes: int, counted_bytes: int) -> int:
    """The budget that this fits exactly, the reserve included that the planner leaves free of it: what the product predicts."""
    budget = int((baseline_bytes + counted_bytes + RESERVE_BYTES) / (1 - RESERVE_SHARE))
    assert abs(baseline_bytes + counted_bytes + reserve_of(budget) - budget) <= 2
    return budget


def measure_resident(name: str, px: int, batch: int, segments: Sequence[Segment], modules: Sequence[Sequence[str]]) -> Resident:
    """The step under this plan in a process of its own, with the commands' settings of the allocators.

    Raises:
        RuntimeError: the process failed.
    """
    task = {"name": name, "px": px, "batch": batch, "segments": [asdict(segment) for segment in segments], "modules": modules}
    environment = {"THP_MEM_ALLOC_ENABLE": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
    )
    assert child.stdin
    assert child.stdout
    with child, child.stdin, child.stdout:
        child.stdin.write(json.dumps(task) + "\n")
        ready = child.stdout.readline()
        if not ready:
            raise RuntimeError(f"{name}: the measured process ended before its first step")
        Path(f"/proc/{child.pid}/clear_refs").write_text("5")
        stop, sizes = threading.Event(), [0]
        sampler = threading.Thread(target=_sample, args=(child.pid, stop, sizes))
        sampler.start()
        child.stdin.write("go\n")
        done = child.stdout.readline()
        stop.set()
        sampler.join()
        if not done:
            raise RuntimeError(f"{name}: the measured process ended within a step, resident {max(sizes) >> 20} MiB")
        high = _status(child.pid, "VmHWM")
        child.stdin.write("end\n")
    return Resident(int(ready), high, max(sizes))


def _sample(pid: int, stop: threading.Event, sizes: list[int]) -> None:
    while not stop.wait(SAMPLING_S):
        sizes.append(_status(pid, "VmRSS"))


def _status(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> None:
    """The process that is measured."""
    task = json.loads(sys.stdin.readline())
    import torch
    from bench_peaks import CLASSES, sgd, take_step
    from common import make_model

    from hiresvis.backbone.segments import apply_segments
    from hiresvis.device import in_use, release, return_memory_to_system

    return_memory_to_system()
    model = make_model(task["name"], task["px"], CLASSES).to(memory_format=torch.channels_last)
    optimizer = sgd(model)
    apply_segments(model, [Segment.from_json(segment) for segment in task["segments"]], task["modules"])
    release()
    tensors = [*model.parameters(), *model.buffers()]
    print(in_use(torch.device("cpu")) - sum(tensor.nbytes for tensor in tensors), flush=True)
    sys.stdin.readline()
    for _ in range(STEPS):
        take_step(model, optimizer, task["px"], task["batch"])
    print("done", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
