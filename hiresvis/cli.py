"""The commands. Results go to standard output, everything else to standard error.

Exit codes: 0; 1 a fault of ours; 2 recipe or command line; 3 data; 4 does not fit in memory; 5 training failed;
6 environment; 130 interrupted; 143 terminated. Everything heavy is imported by the command that needs it, so that
`--help` answers at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from hiresvis import __version__
from hiresvis.command import ask, deliver, ending, print_json, print_report, rows_as_json, say, whole_file
from hiresvis.errors import EnvironmentFailed

MOST_COLUMNS = 100  # longer lines of text are hard to read


class Ui(str, Enum):
    """Kinds of live view."""

    auto = "auto"
    rich = "rich"
    plain = "plain"
    json = "json"
    off = "off"


class Format(str, Enum):
    """What a run is exported as."""

    safetensors = "safetensors"
    onnx = "onnx"


class Unseen(str, Enum):
    """What is done with images whose class the run does not know."""

    error = "error"
    drop = "drop"


class Pixels(str, Enum):
    """What an ONNX graph takes."""

    auto = "auto"
    uint8 = "uint8"
    float32 = "float32"


app = typer.Typer(
    help="Fine-tune vision models on large images within a memory budget.",
    epilog="Example: hiresvis fit recipes/quickstart.yaml",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: half the time, and readable in any terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values instead of the recipe's: optim.lr=1e-4", show_default=False),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder that fit made.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Root = Annotated[Path | None, typer.Option(metavar="DIR", help="Where a .csv may name images besides its own folder.", show_default=False)]
Flips = Annotated[bool, typer.Option("--flips", help="Each image seen mirrored as well: the mean of both outputs, twice the time.")]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one command and exits with its code."""
    # On the CPU a training step maps and unmaps gigabytes; huge pages save most of the faults. torch reads this when it first allocates.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if argv is not None:
        app(args=list(argv), prog_name="hiresvis")
        return
    try:
        app(prog_name="hiresvis")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        # The process is on its way out: another Ctrl-C would only put a traceback of its last steps on the screen.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # One that fell into an exec of text (dataclasses and others do that on import) stays noted in the interpreter until the next
        # exec, and at the end would make it die by the signal instead of leaving with its exit code.
        exec("")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"hiresvis {__version__}")
        raise typer.Exit


@app.command(epilog="Example: hiresvis fit recipes/quickstart.yaml optim.lr=3e-4")
def fit(
    recipe: RecipePath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that is in the run folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, plan and probe; train nothing.")] = False,
    ui: Annotated[Ui | None, typer.Option(help="The live view; the recipe's log.ui when not given.", show_default=False)] = None,
) -> None:
    """Check, plan, probe, train, report."""
    with ending():
        from hiresvis.recipe import load_recipe

        loaded = load_recipe(recipe, overrides or ())
        from hiresvis.fit import fit as run_fit
        from hiresvis.ui import make_view

        # A view that fails says so once and is silent from then on (see its `handle`); the run goes on.
        with make_view(ui.value if ui else loaded.recipe.log.ui) as view:
            for event in run_fit(loaded, resume=resume, dry_run=dry_run, on_stop=view.stopping):
                view.handle(event)


@app.command(epilog="Example: hiresvis plan recipes/quickstart.yaml --gpu l4 --price 0.8")
def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="Plan for this card: 4090, A100-80GB.", show_default=False)] = None,
    budget: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory instead of the recipe's: 24GiB.", show_default=False)] = None,
    price: Annotated[float | None, typer.Option(metavar="P", min=0, help="Of the card per hour.", show_default=False)] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a step's memory as PNG.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """What fits and what it costs: the ladder, the chosen plan, its peak, time and disk. Needs no GPU."""
    with ending():
        from hiresvis.recipe import load_recipe

        loaded = load_recipe(recipe, overrides or ())
        from hiresvis.planning import plan as run_plan

        if plot is not None:
            from hiresvis.plan_plot import need_matplotlib

            need_matplotlib()
        report = run_plan(loaded, gpu=gpu, budget=budget, price=price)
        if as_json:
            print_json(report.to_json())
        else:
            from hiresvis.ui.text import glyphs_for

            columns = min(MOST_COLUMNS, shutil.get_terminal_size().columns)
            print(*report.lines(columns, glyphs_for(sys.stdout.encoding)), sep="\n")
        if plot is not None:
            report.plot(plot)
            say(f"plot: {plot}")


@app.command(epilog="Example: hiresvis check recipes/quickstart.yaml --sheet page.html")
def check(
    recipe: RecipePath,
    overrides: Overrides = None,
    fast: Annotated[bool, typer.Option("--fast", help="Read headers only; decode nothing.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings are errors; notes never are.")] = False,
    sheet: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page of images as the model gets them.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Recipe, whole data set decoded once, model built: every finding at once.

    Results are remembered by path, size and time of change, so that a second check, and fit, decode nothing again.

    --json: errors, warnings and notes (message, place, key); checked (images, decoded); same_bytes and look_alikes (lists of groups of
    split, path, row); splits (counts, sizes as [min, median, max], balance, groups, blank, extremes); facts.
    """
    if sheet is not None and sheet.suffix.lower() not in (".html", ".htm"):
        raise typer.BadParameter(f"{sheet} is no .html file", param_hint="--sheet")
    with ending():
        from hiresvis.recipe import load_recipe

        loaded = load_recipe(recipe, overrides or ())
        from hiresvis.checking import check as run_check
        from hiresvis.ui.counter import counting

        with counting("checked", sys.stderr) as progress:
            report = run_check(loaded, fast=fast, sheet=sheet is not None, progress=progress)
        if as_json:
            print_json(report.to_json())
        else:
            from hiresvis.ui.text import glyphs_for

            columns = min(MOST_COLUMNS, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
            print(*report.lines(columns, glyphs_for(sys.stdout.encoding)), sep="\n")
        if sheet is not None:
            if report.sheet is None:
                say("no sheet: the images cannot be read, see the errors")
            else:
                with whole_file(sheet, "backslashreplace", "--sheet") as stream:
                    stream.write(report.sheet)
                say(f"sheet: {sheet}")
    if report.failed(strict=strict):
        raise typer.Exit(report.exit_code)


@app.command(epilog="Example: hiresvis evaluate runs/lesions --data other_site.csv --unseen drop")
def evaluate(
    run: RunPath,
    data: Annotated[Path | None, typer.Option(metavar="PATH", help="Other images: class folders or a .csv.", show_default=False)] = None,
    root: Root = None,
    unseen: Annotated[
        Unseen | None, typer.Option(help="Images of --data in classes the run does not know; the run's.", show_default=False)
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the confusion as PNG.", show_default=False)] = None,
    flips: Flips = False,
    as_json: Json = False,
) -> None:
    """Metrics of the best weights, with the run's own preprocessing, and in brackets their 95% intervals over draws of the images; class by
    class, and which class is taken for which. --data may hold some of the run's classes alone.

    --json: by split images, loss, metrics, intervals; classes (images, predicted, precision, recall, f1) and absent; to classify
    calibration and confusion (label, predicted, images), for multilabel at_thresholds, to regress targets, to segment iou and share.
    """
    for given, option in ((root, "--root"), (unseen, "--unseen")):
        if given is not None and data is None:
            raise typer.BadParameter("says how the images that --data names are read; give that too", param_hint=option)
    with ending():
        from hiresvis.evaluating import evaluate as run_evaluate
        from hiresvis.ui.counter import counting
        from hiresvis.ui.evaluation_text import evaluation_lines

        if plot is not None:
            from hiresvis.confusion_plot import refuse_task
            from hiresvis.plan_plot import need_matplotlib
            from hiresvis.run import RunDirectory

            refuse_task(str(RunDirectory.open(run).read_json("contract.json").get("task")))
            need_matplotlib()
        which = unseen.value if unseen else None
        with counting("evaluated, in batches", sys.stderr) as progress:
            found = run_evaluate(run, data=data, root=root, unseen=which, flips=flips, say=say, progress=progress)
        if as_json:
            print_json(found)
        else:
            from hiresvis.ui.text import glyphs_for

            columns = min(MOST_COLUMNS, shutil.get_terminal_size().columns)
            print(*evaluation_lines(found, columns, glyphs_for(sys.stdout.encoding)), sep="\n")
        if plot is not None:
            from hiresvis.confusion_plot import draw

            draw(found, plot)
            say(f"plot: {plot}")


@app.command(epilog="Example: hiresvis predict runs/lesions 'new/**/*.tif' --out rows.csv")
def predict(
    run: RunPath,
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Images, folders, 'a/**/*.png', .csv, or -.", show_default=False)],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the rows here: .csv or .jsonl.", show_default=False)] = None,
    top_k: Annotated[int, typer.Option(metavar="N", min=0, help="Task classify: the best N classes and scores besides.")] = 0,
    flips: Flips = False,
    tile: Annotated[bool, typer.Option("--tile", help="Windows over all of each image; of a run of data.fit: crop, too.")] = False,
    overlap: Annotated[
        float | None, typer.Option(metavar="SHARE", min=0, max=0.9, help="Of neighbouring tiles; the run's.", show_default=False)
    ] = None,
    root: Root = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object a line instead of CSV.")] = False,
    masks: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Task segment: a new folder for the masks; FILE_masks.", show_default=False)
    ] = None,
    heat: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A new folder for a PNG of each image's evidence.", show_default=False)
    ] = None,
) -> None:
    """Classes and scores, values, or masks, of each image as CSV. A file that cannot be read has its row with the reason; exit code 3.

    A .csv, .tsv or .parquet names images in the run's own columns; - reads paths from standard input, one a line or NUL-separated, and
    rows come as they do. drift is an image's distance from the training images: above 1 it is farther than 99% of such images.

    --json: path; label, score, scores and top (classify), labels and scores, values, or mask and shares; drift; error. null: not known.
    """
    as_json = rows_as_json(out, as_json, paths)
    with ending():
        from hiresvis.inference import predict as run_predict

        found = run_predict(
            run, paths, flips=flips, masks=masks, beside=out, heat=heat, top=top_k, tile=tile, overlap=overlap, root=root, say=say
        )
        deliver(found, out, as_json)


@app.command(epilog="Example: hiresvis export runs/lesions --to onnx")
def export(
    run: RunPath,
    to: Annotated[Format, typer.Option("--to", help="Weights for timm, or a graph for onnxruntime.", show_default=False)],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The folder to make; RUN/export/FORMAT.", show_default=False)] = None,
    pixels: Annotated[Pixels, typer.Option(help="What the ONNX graph takes: bytes, or 0 to 1.")] = Pixels.auto,
    with_preprocessing: Annotated[bool, typer.Option("--with-preprocessing", help="The ONNX graph takes any size and resizes.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="A second ONNX graph of 8-bit weights, compared with the first.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an export that is there.")] = False,
    as_json: Json = False,
) -> None:
    """The best weights for use elsewhere, with contract.json beside them, compared with the run's model."""
    with ending():
        from hiresvis.export import export as run_export

        found = run_export(
            run, to=to.value, out=out, pixels=pixels.value, with_preprocessing=with_preprocessing, int8=int8, force=force, say=say
        )
        print_report(found, as_json)


@app.command(epilog="Example: hiresvis report runs/lesions --compare runs/second runs/third --price 2.5")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="A run folder; with --compare several.", show_default=False)],
    compare: Annotated[bool, typer.Option("--compare", help="The runs side by side, in RUN/compare.html of the first.")] = False,
    price: Annotated[float | None, typer.Option(metavar="P", min=0, help="Of the device per hour.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write the comparison here.", show_default=False)] = None,
) -> None:
    """Write report.html from the files of a run, or a page of several side by side, and print its path."""
    if compare != (len(runs) > 1):
        hint = "--compare needs another run to compare with" if compare else "one run has a report; several are compared: --compare"
        raise typer.BadParameter(hint, param_hint="RUN...")
    if out is not None and not (compare and out.suffix.lower() in (".html", ".htm")):
        raise typer.BadParameter("names the .html file of a comparison", param_hint="--out")
    with ending():
        from hiresvis.run import RunDirectory

        roots = [RunDirectory.open(run).root for run in runs]
        if compare:
            from hiresvis.ui.compare import write_comparison

            print(write_comparison(roots, out or roots[0] / "compare.html", price_per_hour=price))
        else:
            from hiresvis.ui.report import write_report

            print(write_report(roots[0], price_per_hour=price))


@app.command(epilog="Example: hiresvis show runs/lesions --follow")
def show(
    run: RunPath,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay until the run ends; Ctrl-C leaves, and the run goes on.")] = False,
    ui: Annotated[Ui, typer.Option(help="The view, as fit has it.")] = Ui.auto,
) -> None:
    """A run's live view again, from its events alone; also from another terminal while it trains."""
    with ending():
        from hiresvis.ui.show import show as show_run

        if standing := show_run(run, follow=follow, ui=ui.value, stream=sys.stdout):
            say(standing)


@app.command(epilog="Example: hiresvis new data/boards train.epochs=5")
def new(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A folder of images, or a manifest.", show_default=False)],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The recipe to write; recipe.yaml here.", show_default=False)] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take every proposal.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a recipe that is there.")] = False,
    gpu: Annotated[str | None, typer.Option(metavar="NAME", help="For training on this card, not here.", show_default=False)] = None,
) -> None:
    """Look at the data and the machine, and write a recipe with the reason for each line.

    In a terminal the image size, the model, and what is to be learnt where that is not clear are asked, each with its proposal. Nothing is
    written into the data folder unless --out says so.
    """
    with ending():
        from hiresvis.new import new as write_new

        can_ask = sys.stdin.isatty() and sys.stderr.isatty()
        if not (yes or can_ask):
            say("not a terminal: every proposal is taken, as with --yes")
        print_report(write_new(data, out, overrides or (), gpu=gpu, force=force, ask=None if yes or not can_ask else ask, say=say), False)


@app.command(epilog="Example: hiresvis schema > hiresvis.schema.json")
def schema() -> None:
    """The recipe's JSON schema, for editors."""
    with ending():
        from hiresvis.recipe import recipe_json_schema

        print_json(recipe_json_schema())


@app.command(epilog="Example: hiresvis models 'convnext*'")
def models(
    pattern: Annotated[str | None, typer.Argument(metavar="PATTERN", help="Part of a name, or convnext*.", show_default=False)] = None,
    everything: Annotated[bool, typer.Option("--all", help="Look into every match, however many: seconds for each.")] = False,
    as_json: Json = False,
) -> None:
    """timm's models: size, stride, parameters, and what the planner can do for each."""
    with ending():
        from hiresvis.catalog import models as list_models

        print_report(list_models(pattern, everything=everything, progress=say), as_json)


@app.command(epilog="Example: hiresvis doctor --verify resnet50")
def doctor(
    verify: Annotated[str | None, typer.Option(metavar="MODEL", help="Prove plans on this model of timm.", show_default=False)] = None,
    px: Annotated[
        int | None, typer.Option(metavar="SIDE", min=1, help="Image side instead of the model's own.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """What this machine has and lacks, steps with and without a plan, bit for bit, and a small run.

    --verify MODEL proves plans on a model of timm, and does nothing else. Exit code 6 where something that every run needs does not work.
    --json: failed, and findings with subject, text, mend and failed.
    """
    with ending():
        from hiresvis.doctor import doctor as run_doctor

        found = run_doctor(verify=verify, image_size=px, progress=say)
        print_report(found, as_json)
    if found.failed:
        raise typer.Exit(EnvironmentFailed.exit_code)
