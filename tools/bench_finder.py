"""The finder on many random configurations: what it accepts never dies later, and little is left on the table.

    python tools/bench_finder.py [--count 200] [--exhaustive 20] [--seed 0]

Each configuration (a small timm model, an image size, an optimizer, a precision, batch statistics or not, a budget) has a process of its
own, for resident size is measured. The finder looks for the batch; then steps are trained with it as a run does (a whole batch of several
micro-batches, the last one smaller; the optimizer; evaluation), and the highest resident size is held against the budget. For the first
`--exhaustive` of them, larger micro-batches are then really run at the tightest plan there is, by bisection, up to half as large again:
the largest that the finder's own measure accepts is what the finder's answer is a share of.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hiresvis.backbone.segments import apply_plan
from hiresvis.backbone.trace import trace_costs
from hiresvis.device import PeakMeter, budget, release, return_memory_to_system
from hiresvis.errors import DoesNotFit
from hiresvis.memory.peak import StepSetting
from hiresvis.memory.search import Limits, Planner
from hiresvis.run.events import Notice
from hiresvis.train.evaluate import eval_mode
from hiresvis.train.finder import Finder
from hiresvis.train.freezing import TrainMode
from hiresvis.train.losses import CrossEntropy
from hiresvis.train.optim import build_optimizer
from hiresvis.train.step import TrainStep
from hiresvis.units import MIB

MODELS = (
    "test_resnet",
    "test_vit",
    "test_convnext",
    "test_efficientnet",
    "test_mambaout",
    "resnet18",
    "vit_tiny_patch16_224",
    "convnext_atto",
)
CLASSES = 7


@dataclass(frozen=True)
class Config:
    """One case. room_bytes: the budget above what the process uses before its first step."""

    model: str
    px: int
    optimizer: str
    precision: str
    room_bytes: int
    exact: str
    batch: int | None


def draw(rng: random.Random) -> Config:
    """A configuration at random."""
    return Config(
        model=rng.choice(MODELS),
        px=32 * rng.randint(2, 7),
        optimizer=rng.choice(("adamw", "sgd")),
        precision=rng.choice(("fp32",) * 5 + ("bf16",)),
        room_bytes=int(MIB * 2 ** rng.uniform(7.0, 8.5)),
        exact=rng.choice(("bitwise", "close")),
        batch=rng.choice((None, 16, 48, 120)),
    )


def make_step(config: Config) -> TrainStep:
    torch.manual_seed(0)
    try:
        model = timm.create_model(config.model, num_classes=CLASSES, img_size=config.px, drop_path_rate=0.1)
    except TypeError:
        model = timm.create_model(config.model, num_classes=CLASSES, drop_path_rate=0.1)
    model.train().to(memory_format=torch.channels_last)
    optimizer = build_optimizer(model, name=config.optimizer, lr=1e-4)  # type: ignore[arg-type]
    return TrainStep(
        model,
        optimizer,
        CrossEntropy(),
        prepare=lambda images: images.permute(0, 3, 1, 2).float().div_(255),
        device=torch.device("cpu"),
        precision=config.precision,  # type: ignore[arg-type]
        clip_grad=1.0,
    )


def run(config: Config, exhaustive: bool) -> dict[str, Any]:
    """What came of one configuration."""
    return_memory_to_system()
    step = make_step(config)
    _, profile = trace_costs(
        step.model,
        name=config.model,
        image_size=(config.px, config.px),
        in_chans=3,
        num_classes=CLASSES,
        precision=config.precision,
        channels_last=True,
        block=64,
        raw_image_bytes=config.px**2 * 3,
        make_optimizer=lambda model: build_optimizer(model, name=config.optimizer, lr=1e-4),  # type: ignore[arg-type]
        optimizer_name=config.optimizer,
        clip_grad=1.0,
    )
    release()
    device, weights = torch.device("cpu"), profile.weights + profile.buffers
    own = budget(device, 2**31, weights)
    own = budget(device, own.baseline_bytes + weights + config.room_bytes, weights)
    finder = Finder(
        step=step,
        train_mode=TrainMode(step.model),
        profile=profile,
        budget=own,
        limits=Limits(batch=config.batch, exact=config.exact),
        raw_image=((config.px, config.px, 3), torch.uint8),
    )
    sizes = 0
    probe = finder.probe

    def counted(plan: Any) -> Any:
        nonlocal sizes
        sizes += 1
        return probe(plan)

    finder.probe = counted  # type: ignore[method-assign]
    try:
        corrected = sum(isinstance(event, Notice) for event in finder.find())
    except DoesNotFit as error:
        return {"refused": str(error)[:120], "sizes": sizes}
    assert finder.found is not None
    plan, measured = finder.found.plan, finder.found.measured
    answer: dict[str, Any] = {
        "micro_batch": plan.micro_batch,
        "batch": plan.batch,
        "sizes": sizes,
        "corrected": corrected,
        "budget": own.total_bytes,
        "predicted": plan.predicted_peak_bytes,
        "probed": measured.peak_bytes,
        "trained": train(finder, plan),
    }
    if exhaustive and (config.batch is None or plan.micro_batch < config.batch):
        answer["largest"] = largest(finder, plan.micro_batch, config.batch)
    return answer


def train(finder: Finder, plan: Any) -> int:
    """The highest resident size of two batches, the last micro-batch of each a smaller one, and an evaluation."""
    step, handle = finder.step, apply_plan(finder.step.model, plan)
    meter = PeakMeter(step.device)
    meter.start()
    for _ in range(2):
        finder.train_mode()
        whole, smaller = plan.micro_batch, max(1, plan.micro_batch - 1)
        for parts in [[whole, whole, smaller]] if plan.accumulation > 1 else [[whole], [smaller]]:
            for count in parts:
                targets = torch.arange(count) % CLASSES
                step.accumulate(finder._images(count), targets, batch_images=plan.batch)
            step.apply()
        with eval_mode(step.model):
            step.predict(finder._images(plan.eval_batch))
    handle.remove()
    peak = meter.peak_bytes()
    step.optimizer.state.clear()
    return peak


def largest(finder: Finder, found: int, batch: int | None) -> int:
    """The largest micro-batch that is accepted at its tightest plan."""
    own = finder.budget
    setting = StepSetting(accumulates=False, eval_batch=1, baseline_bytes=own.baseline_bytes, reserve_bytes=0)

    def runs(count: int) -> bool:
        planner = Planner(finder.profile, 1 << 60, setting, replace(finder.limits, batch=batch or count, micro_batch=count, most=1024))
        plan = planner.plan(planner.tightest(count), "")
        return finder.probe(plan).fits(finder.most_bytes)

    low, high = found, min(finder.profile.max_batch, found + found // 2 + 2, batch or 1024)
    while low < high:
        middle = (low + high + 1) // 2
        if runs(middle):
            low = middle
        else:
            high = middle - 1
    return low


def isolated(config: Config, exhaustive: bool) -> dict[str, Any]:
    """`run` in a process of its own, forked before anything but imports was done here."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            answer = run(config, exhaustive)
        except BaseException:
            answer = {"failed": traceback.format_exc()[-1500:]}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(text) if text else {"failed": f"exit code {code}"}


def _even(largest: int, batch: int | None) -> int:
    """The micro-batch that a batch is cut into where so many fit: of 120 images 84 at once make two parts as 60 do."""
    return largest if batch is None else -(-batch // -(-batch // largest))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; exit code 1 where a run died, or more than three sizes ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--exhaustive", type=int, default=20, help="of those whose micro-batch the budget limits")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="This process .* is multi-threaded, use of fork", category=DeprecationWarning)
    rng, started = random.Random(options.seed), time.monotonic()
    answers, shares, died = [], [], 0
    for number in range(options.count):
        config = draw(rng)
        answer = isolated(config, len(shares) < options.exhaustive)
        dead = "failed" in answer or answer.get("trained", 0) > answer.get("budget", 0) or answer.get("sizes", 0) > 3
        died += dead
        answers.append(answer)
        if "largest" in answer:
            shares.append(answer["micro_batch"] / _even(answer["largest"], config.batch))
        note = " DIED" if dead else ""
        print(f"{number:3d} {json.dumps(asdict(config))} {json.dumps(answer)}{note}", flush=True)
    ran = [answer for answer in answers if "micro_batch" in answer]
    sizes = [answer["sizes"] for answer in ran]
    margins = [answer["trained"] / answer["budget"] for answer in ran]
    seconds, refused = time.monotonic() - started, len(answers) - len(ran) - died
    print(f"{len(answers)} configurations in {seconds:.0f} s: {len(ran)} accepted, {refused} refused, {died} died")
    print(f"sizes run: median {statistics.median(sizes)}, most {max(sizes)}")
    print(f"highest use of the budget in training: median {statistics.median(margins):.1%}, most {max(margins):.1%}")
    if shares:
        print(f"{len(shares)} against the exhaustive search: median {statistics.median(shares):.1%}, least {min(shares):.1%}")
    return 1 if died else 0


if __name__ == "__main__":
    sys.exit(main())
