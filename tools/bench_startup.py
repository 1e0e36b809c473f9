"""How long and with how much memory `fit` starts on a large table, up to the check of the data: nothing is decoded but a sample.

    python tools/bench_startup.py                     # 200,000 rows
    python tools/bench_startup.py --rows 20000 --val column

The rows are hard links to a few drawn photos of three megapixels in a temporary folder, so that reading the table, asking the file
system for every name, splitting, and building the loaders are the real work, and the disk holds next to nothing. Each phase is timed in
a fresh process, whose peak resident size is the kernel's own count; the CPU's time beside the clock's tells how busy the machine was.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CLASSES = 40
PATIENTS = 5000
PHOTOS = 4
RECIPE = """\
task: classify
data: {{train: {train}, val: {val}, group: {group}, split: {split}, augment: light}}
model: {{name: test_resnet, pretrained: false, image_size: 512}}
train: {{batch: 16}}
"""


def make_table(folder: Path, rows: int, val: str) -> Path:
    """A recipe with its table of hard links. The split is a share of rows, a share of groups, or a column."""
    rng = np.random.default_rng(0)
    originals = []
    for number in range(PHOTOS):
        path = folder / f"photo{number}.jpg"
        low = rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(low).resize((2048, 1536), Image.Resampling.BICUBIC).save(path, quality=90)
        originals.append(path)
    for shard in range(0, rows, 1000):
        (folder / "images" / f"{shard // 1000:03d}").mkdir(parents=True)
    with (folder / "table.csv").open("w", encoding="utf-8", newline="") as table:
        table.write("path,label,patient,part\n")
        for row in range(rows):
            name = f"images/{row // 1000:03d}/{row:06d}.jpg"
            os.link(originals[row % PHOTOS], folder / name)
            patient = row % PATIENTS
            table.write(f"{name},class{patient % CLASSES:02d},p{patient},{'val' if patient % 7 == 0 else 'train'}\n")
    recipe = folder / "recipe.yaml"
    group, split = ("patient" if val == "groups" else "null"), ("part" if val == "column" else "null")
    recipe.write_text(RECIPE.format(train=folder / "table.csv", val=0.15, group=group, split=split), encoding="utf-8")
    return recipe


def start(recipe: Path) -> dict[str, Any]:
    """Runs each phase once; seconds by phase (the clock's, and of CPU time), and the process's peak in MiB."""
    spent: dict[str, list[float]] = {}
    last = _clocks()

    def done(phase: str) -> None:
        nonlocal last
        now = _clocks()
        spent[phase], last = [after - before for after, before in zip(now, last, strict=True)], now

    import hiresvis.fit  # noqa: F401  all that the command imports
    from hiresvis import assemble
    from hiresvis.data.augment import make_augment
    from hiresvis.data.loader import EvalLoader, TrainLoader
    from hiresvis.data.transforms import Pipeline, Preprocess
    from hiresvis.own_data import fingerprints
    from hiresvis.recipe import Resolution, load_recipe

    done("imports")
    peak_of_imports = _peak_mib()
    loaded = load_recipe(recipe)
    resolution = Resolution(loaded)
    datasets = assemble.read_datasets(loaded, resolution)
    done("table and split")
    fingerprints(datasets)
    done("fingerprints")
    channels, scale = assemble.settle_pixels(loaded, resolution, datasets)
    done("sampled pixels")
    preprocess = Preprocess(loaded.recipe.model.image_size, in_chans=channels, scale=scale)
    pipeline = Pipeline(preprocess, make_augment(loaded.recipe.data.augment, image_size=preprocess.image_size))
    options = {"max_pixels": loaded.recipe.data.max_pixels}
    train = TrainLoader(datasets.train.samples, pipeline, batch=16, micro_batch=4, seed=0, **options)
    train.set_epoch(1)
    EvalLoader(datasets.val.samples, preprocess, batch=4, **options)
    done("loaders")
    next(iter(train))
    done("first micro-batch")
    images = {"train": len(datasets.train), "val": len(datasets.val)}
    return {"phases": spent, "cpu_s": time.process_time(), "imports_mib": peak_of_imports, "peak_mib": _peak_mib(), **images}


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--val", choices=["share", "groups", "column"], nargs="*", default=["share", "groups", "column"])
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)  # what the fresh process runs
    given = parser.parse_args()
    if given.start is not None:
        print(json.dumps(start(given.start)))
        return
    for val in given.val:
        with tempfile.TemporaryDirectory(prefix="hiresvis-startup-") as folder:
            recipe = make_table(Path(folder), given.rows, val)
            begun = time.perf_counter()
            call = [sys.executable, __file__, "--start", str(recipe)]
            found = json.loads(subprocess.run(call, capture_output=True, text=True, check=True).stdout)
            total = time.perf_counter() - begun
        phases = ", ".join(f"{name} {wall:.2f} s ({cpu:.2f})" for name, (wall, cpu) in found["phases"].items())
        print(f"{given.rows} rows, validation by {val} ({found['train']} train, {found['val']} val): {phases}")
        print(f"    {total:.1f} s in all, {found['cpu_s']:.1f} s of CPU time (beside each phase in brackets)")
        print(f"    peak {found['peak_mib']:.0f} MiB, of which {found['imports_mib']:.0f} are imports", flush=True)


if __name__ == "__main__":
    main()
