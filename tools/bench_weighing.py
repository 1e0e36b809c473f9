"""Whether timing units pays: plans within the same bytes, weighed by FLOPs and weighed by what units take here, in real steps.

    python tools/bench_weighing.py [MODEL ...] [--px 768] [--share 0.5] [--repeats 7]

For each model the least-cost plan within a share of the stored peak is made twice, and both run in turn with the unplanned step, so that a
machine that slows down slows them all; medians are compared, with what either planner expects of its plan.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch
from common import make_model, trace
from torch import nn

from hiresvis.backbone.segments import apply_segments
from hiresvis.memory.costs import MemoryProfile
from hiresvis.memory.peak import StepSetting, predict_peak
from hiresvis.memory.plan import Segment, store_all
from hiresvis.memory.prices import Prices
from hiresvis.memory.search import Limits, Planner
from hiresvis.memory.timing import measured_rates, priced_by
from hiresvis.train.losses import CrossEntropy
from hiresvis.train.pace import time_units
from hiresvis.train.step import TrainStep

MODELS = ("tf_efficientnet_lite0", "convnext_atto", "resnet18", "efficientnet_b0")
CLASSES = 10


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def unit_prices(model: nn.Module, profile: MemoryProfile, px: int) -> Prices:
    """Work as units take it on this machine."""
    prepare = lambda images: images.permute(0, 3, 1, 2)  # noqa: E731 - channels last, as the loader gives them
    step = TrainStep(model, sgd(model), CrossEntropy(), prepare=prepare, device=torch.device("cpu"))
    seconds = time_units(step, [unit.modules for unit in profile.units], torch.rand(1, px, px, 3))
    return priced_by(Prices(), measured_rates(profile, seconds))


def compare(name: str, px: int, batch: int, share: float, repeats: int) -> None:
    model = make_model(name, px, CLASSES).to(memory_format=torch.channels_last)
    profile = trace(model, name, px, CLASSES, precision="fp32", block=64, channels_last=True, make_optimizer=sgd)
    setting = StepSetting(accumulates=False, eval_batch=0)
    budget = int(share * predict_peak(profile, store_all(profile), batch, setting).total_bytes)
    limits = Limits(batch=batch, micro_batch=batch, exact="bitwise")
    prices = unit_prices(model, profile, px)
    stored = prices.of_step(profile)
    plans: dict[str, tuple[Segment, ...]] = {"none": store_all(profile)}
    expected = {"none": 0.0}
    for label, weighed in (("by FLOPs", limits), ("by time", replace(limits, prices=prices))):
        candidate = Planner(profile, budget, setting, weighed).best(batch)
        assert candidate is not None, f"{name}: {share} of the stored peak is too little"
        plans[label], expected[label] = candidate.segments, prices.of(profile, candidate.segments) / stored
    images = torch.rand(batch, 3, px, px).to(memory_format=torch.channels_last)
    modules = [unit.modules for unit in profile.units]
    seconds: dict[str, list[float]] = {label: [] for label in plans}
    for repeat in range(repeats + 1):
        for label, segments in plans.items():
            handle = apply_segments(model, segments, modules)
            started = time.perf_counter()
            model(images).sum().backward()
            if repeat:  # the first round warms up
                seconds[label].append(time.perf_counter() - started)
            handle.remove()
            for parameter in model.parameters():
                parameter.grad = None
    medians = {label: statistics.median(taken) for label, taken in seconds.items()}
    for label, taken in seconds.items():
        more = medians[label] / medians["none"] - 1
        print(
            f"{name} {label:9s} {medians[label]:.2f} s, {min(taken):.2f} to {max(taken):.2f}  {more:+.1%}, expected {expected[label]:+.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--px", type=int, default=768)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    for name in options.models:
        compare(name, options.px, options.batch, options.share, options.repeats)


if __name__ == "__main__":
    main()
