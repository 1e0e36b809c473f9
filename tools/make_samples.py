"""Draw the sample set `boards`: large inspection images with defects a few pixels wide.

python tools/make_samples.py data/boards
python tools/make_samples.py /tmp/large --train 20 --val 10 --test 0 --size 4096 --seed 7
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also from a checkout that is not installed

from hiresvis.data.samples import draw_boards
from hiresvis.errors import HiresvisError


def main() -> int:
    """Read the command line, draw, say what was drawn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the set goes; must not exist yet, or be empty")
    for split, count in (("train", 120), ("val", 40), ("test", 40)):
        parser.add_argument(f"--{split}", type=int, default=count, metavar="N", help=f"images for {split} (default {count})")
    parser.add_argument("--size", type=int, default=2048, metavar="PX", help="side of the images in pixels (default 2048)")
    parser.add_argument("--seed", type=int, default=0, help="decides every byte (default 0)")
    parser.add_argument("--workers", type=int, default=None, metavar="N", help="threads (default: one per core)")
    args = parser.parse_args()

    def progress(done: int, total: int) -> None:
        if done == total or done % max(1, total // 10) == 0:
            print(f"{done}/{total}", file=sys.stderr, flush=True)

    try:
        labels = draw_boards(
            args.folder,
            num_train=args.train,
            num_val=args.val,
            num_test=args.test,
            size_px=args.size,
            seed=args.seed,
            workers=args.workers,
            progress=progress,
        )
    except HiresvisError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(labels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
