"""What resolution is worth: one recipe at several image sizes, everything else the same.

    python tools/bench_resolution.py --train PANELS/train --test PANELS/test [--sizes 224 512 1024] [key=value ...]

Each size is a run of its own through the command line, so the batch, the plan and the number of processes are found for it. Printed is a
Markdown table of the test result, the seconds an epoch and the plan. Runs that are there already in --out are not trained again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run(recipe: Path, folder: Path, overrides: list[str]) -> list[dict[str, Any]]:
    """The events of a finished run; it is trained, or gone on with, where it is not finished."""
    events = folder / "events.jsonl"
    if "run_finished" not in (events.read_text(encoding="utf-8") if events.is_file() else ""):
        again = ["--resume"] if folder.is_dir() else []
        call = [sys.executable, "-m", "hiresvis", "fit", str(recipe), *overrides, f"log.dir={folder}", "--ui", "plain", *again]
        subprocess.run(call, check=True)
    return [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]


def row(px: int, events: list[dict[str, Any]]) -> str:
    """One line of the table."""
    last = {event["kind"]: event for event in events}
    finished, plan = last["run_finished"], last["plan_chosen"]
    epochs = sorted(event["seconds"] for event in events if event["kind"] == "epoch_done")
    metric, test = finished["metric"], finished["test_metrics"]
    cells = [f"{px} px", f"{finished['best_value']:.3f}", f"{test[metric]:.3f}", f"{epochs[len(epochs) // 2]:.0f}"]
    cells += [f"{plan['micro_batch']} x {plan['accumulation']}", f"{plan['recompute_fraction']:.0%}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "pcb.yaml")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 512, 1024])
    parser.add_argument("--out", type=Path, default=Path("runs/resolution"))
    options, overrides = parser.parse_known_args()
    paths = [f"data.train={options.train.resolve()}", f"data.test={options.test.resolve()}"]
    rows = []
    for px in options.sizes:
        events = run(options.recipe, options.out.resolve() / str(px), [*paths, f"model.image_size={px}", *overrides])
        rows.append(row(px, events))
    print("| size | validation | test | seconds an epoch | micro-batch | recomputed |\n|---|---|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
