"""What recompute costs on the machine at hand: a plan that keeps attention against timm's flag against none, in real steps.

    python tools/bench_overhead.py [--model vit_tiny_patch16_224] [--px 1024] [--repeats 7]

The three alternate, so that a machine that slows down slows them all; medians are compared. The plan recomputes every block and keeps the
output of its attention, so it needs about the memory of the flag.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import make_model, trace
from torch import nn

from hiresvis.backbone.segments import apply_segments
from hiresvis.memory.plan import Segment

CLASSES = 10


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def attention_kept(model: nn.Module, px: int) -> tuple[list[Segment], list[tuple[str, ...]]]:
    """Every unit that can be is recomputed; those with attention keep its output (the way that keeps one product and runs once)."""
    profile = trace(model, "model", px, CLASSES, precision="fp32", block=64, channels_last=False, make_optimizer=sgd)
    segments = []
    for index, unit in enumerate(profile.units):
        kept = [way for way in unit.ways if len(way.keep) == 1 and not way.passes and not way.sliced]
        segments.append(
            Segment(index, index + 1, "keep", ((),), kept[0].keep) if kept and unit.kind == "block" else Segment(index, index + 1)
        )
    return segments, [unit.modules for unit in profile.units]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--px", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    model = make_model(options.model, options.px, CLASSES)
    segments, modules = attention_kept(model, options.px)
    images = torch.rand(options.batch, 3, options.px, options.px)

    def step() -> float:
        started = time.perf_counter()
        model(images).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None
        return time.perf_counter() - started

    def with_plan() -> float:
        handle = apply_segments(model, segments, modules)
        try:
            return step()
        finally:
            handle.remove()

    def with_flag() -> float:
        model.set_grad_checkpointing(True)
        try:
            return step()
        finally:
            model.set_grad_checkpointing(False)

    ways = {"none": step, "plan": with_plan, "flag": with_flag}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(options.repeats + 1):
        for name, run in ways.items():
            taken = run()
            if repeat:  # the first round warms up
                seconds[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    for name, taken in seconds.items():
        print(f"{name}: median {medians[name]:.2f} s, {min(taken):.2f} to {max(taken):.2f}, {medians[name] / medians['none'] - 1:+.1%}")
    print(f"overhead of the plan over the flag's: {(medians['plan'] - medians['none']) / (medians['flag'] - medians['none']):.2f}")


if __name__ == "__main__":
    main()
