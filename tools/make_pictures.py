"""Makes the README's pictures: the live view from a recorded run, the report from a run folder.

Use: python tools/make_pictures.py live                  the live view, as SVG, from tests/ui/recorded.jsonl
     python tools/make_pictures.py report RUN            the top of RUN/report.html, as WebP; needs Chromium

The live view is drawn by the view itself: the events of a real run (recipes/quickstart.yaml) up to a step of its second epoch.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from hiresvis.run import read_events
from hiresvis.run.events import AutoResolved, Event, Notice, RunInterrupted, StepDone
from hiresvis.ui.console import ConsoleView

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "tools" / "pictures"
RECORDED = ROOT / "tests" / "ui" / "recorded.jsonl"
COLUMNS = 116
EPOCH, STEP = 2, 4  # where the live view's picture is taken
MOST_BYTES = 200_000
REPORT_PX, REPORT_SHOWN_PX = (1100, 1500), 900  # the browser's window; the picture's width
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
DARK = TerminalTheme(
    (24, 26, 31),
    (214, 217, 223),
    [(36, 39, 46), (224, 108, 117), (126, 190, 106), (219, 178, 92), (97, 160, 224), (191, 127, 214), (80, 178, 190), (190, 195, 204)],
    [
        (110, 117, 130),
        (240, 130, 138),
        (146, 210, 126),
        (235, 200, 120),
        (120, 180, 240),
        (210, 150, 230),
        (100, 198, 210),
        (240, 242, 246),
    ],
)


def events_to_show() -> list[Event]:
    """The run's start, its ladder, its plan, its first epoch and the step; lines about single settings are left out, for room."""
    shown: list[Event] = []
    for event in read_events(RECORDED):
        if isinstance(event, RunInterrupted):
            break
        if not isinstance(event, AutoResolved | Notice):
            shown.append(event)
        if isinstance(event, StepDone) and (event.epoch, event.step) == (EPOCH, STEP):
            return shown
    sys.exit(f"{RECORDED}: no step {STEP} of epoch {EPOCH} before the run was stopped; set EPOCH and STEP to one that it has")


def live_view(folder: Path) -> Path:
    """The live view as SVG, with the fonts of whoever looks at it: nothing is fetched."""
    console = Console(
        record=True, file=io.StringIO(), width=COLUMNS, height=40, force_terminal=False, color_system="truecolor", legacy_windows=False,
        highlight=False, markup=False, emoji=False, _environ={},
    )  # fmt: skip
    events = events_to_show()
    with ConsoleView(console, lambda: 0.0, refresh_seconds=None) as view:
        for event in events:
            view.handle(event)
        view.stay()
    if view.failure is not None:
        raise view.failure
    svg = console.export_svg(title="hiresvis fit recipes/quickstart.yaml", theme=DARK, unique_id="hiresvis")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code", "ui-monospace, DejaVu Sans Mono, Menlo, Consolas")
    path = folder / "live_view.svg"
    path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")
    return path


def report(run: Path, into: Path) -> Path:
    """The top of a run's report as WebP."""
    page = (run / "report.html").resolve()
    if not page.is_file():
        sys.exit(f"{page}: no such file; make it: hiresvis report {run}")
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"none of {', '.join(BROWSERS)} is installed; install Chromium")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "report.png"
        width, height = REPORT_PX
        options = [f"--window-size={width},{height}", f"--screenshot={shot}", f"--user-data-dir={folder}/profile", "--hide-scrollbars"]
        call = [browser, "--headless", "--no-sandbox", "--disable-gpu", *options, page.as_uri()]
        subprocess.run(call, check=True, capture_output=True, timeout=120)
        path = into / "report.webp"
        with Image.open(shot) as image:
            shown = image.convert("RGB").resize((REPORT_SHOWN_PX, round(height * REPORT_SHOWN_PX / width)), Image.Resampling.LANCZOS)
        shown.save(path, quality=80, method=6)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parts = parser.add_subparsers(dest="picture", required=True)
    parts.add_parser("live", help="the live view from the recorded run")
    parts.add_parser("report", help="the report of a run").add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, metavar="DIR", default=PICTURES, help="where to; the README's pictures when not given")
    arguments = parser.parse_args()
    arguments.out.mkdir(exist_ok=True)
    path = live_view(arguments.out) if arguments.picture == "live" else report(arguments.run, arguments.out)
    num_bytes = path.stat().st_size
    print(f"{path}: {num_bytes / 1000:.0f} kB")
    if num_bytes > MOST_BYTES:
        sys.exit(f"{path}: above {MOST_BYTES / 1000:.0f} kB; show less")


if __name__ == "__main__":
    main()
