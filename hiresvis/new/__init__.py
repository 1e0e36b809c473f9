"""`hiresvis new`: looks at a folder or a manifest and at the machine, asks little, and writes a recipe with a reason on every line.

What it reads it reads as `fit` will: the recipe is made first, as a text that is not written yet, and the splits, the headers and the
plan are those of that recipe. So what it writes is a recipe that `check` accepts, or it says why there is none.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hiresvis.data.layout import VAL_SHARE, Layout, look
from hiresvis.data.sources import Datasets
from hiresvis.data.survey import look_at
from hiresvis.errors import DataError, RecipeError
from hiresvis.listing import read_datasets
from hiresvis.new.given import Ask, answer, read_given, settled
from hiresvis.new.images import balanced, counted, described, fitted, named_groups, sized_batch
from hiresvis.new.model import ON_CPU, ON_GPU, Candidate, Choice, choose, has_gpu, px_text, weights_of
from hiresvis.recipe import LoadedRecipe, Resolution, parse_recipe
from hiresvis.recipe.draft import Line, draft
from hiresvis.recipe.load import PATH_KEYS
from hiresvis.recipe.schema import kind_of
from hiresvis.recipe.values import shown
from hiresvis.run.files import write_text

DEFAULT = Path("recipe.yaml")
GIVEN = "as given"
_MOST_PX = {True: 2048, False: 1024}  # of a proposed image's long side, with a GPU and without
_EPOCHS = {True: 20, False: 10}
_BATCH = {True: 16, False: 8}
_SHARE = Line(VAL_SHARE, "held out of train: stratified, whole groups alone, the same images for the same seed")


@dataclass(frozen=True, slots=True)
class Written:
    """What `hiresvis new` prints.

    Attributes:
        path: of the recipe; text: of it.
        facts: in words, by name.
    """

    path: Path
    text: str
    facts: Mapping[str, str]

    def lines(self) -> list[str]:
        """Text for a terminal, the next commands last."""
        width = max(map(len, self.facts))
        name = shlex.quote(str(self.path))
        commands = {
            f"hiresvis check {name}": "every file decoded once, every finding at once",
            f"hiresvis plan {name}": "what fits and what it costs, in full",
            f"hiresvis fit {name}": "check, plan, probe, train, report",
        }
        space = max(map(len, commands))
        told = [f"{key:{width}}  {text}" for key, text in self.facts.items()]
        return [*told, "", *(f"  {command:{space}}   {what}" for command, what in commands.items())]


def new(
    source: Path,
    chosen: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    gpu: str | None = None,
    force: bool = False,
    ask: Ask | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Written:
    """Writes a recipe for the data in `source`.

    Args:
        source: a folder, or a manifest.
        chosen: the recipe to write; None: recipe.yaml in the current folder, unless that is in the data.
        overrides: `key=value` as in other commands: they stand in the recipe, and nothing is asked or proposed in their place.
        gpu: the card to plan for; None: this machine.
        force: replace a recipe that is there.
        ask: puts questions to whoever sits there; None: every proposal is taken.
        say: told what takes time, and what is noticed.

    Raises:
        RecipeError: an override is none, the recipe is there already or would lie in the data unasked, or the card is not known.
        DataError: the source is no data set, or not a sound one; everything that was found.
        DoesNotFit: no model fits.
        EnvironmentFailed: the recipe cannot be written.
    """
    given = read_given(overrides)
    out = DEFAULT if chosen is None else chosen
    _refuse_place(out, source, force=force, chosen=chosen is not None)
    on_gpu = has_gpu(gpu)
    layout = _pick(look(source, settled(given)), ask)
    lines = _of_layout(layout, out, given)
    loaded, datasets, lines = _read(lines, layout, out, ask)
    look_found = look_at(datasets.train.samples, loaded.recipe.data.max_pixels)
    facts = {"data": _described(layout, datasets), "images": described(look_found)}
    for name, text in facts.items():
        say(f"{name}: {text}")
    lines = _told(lines, datasets)
    lines |= {key: line for key, line in balanced(datasets.train).items() if key not in given}
    lines |= _sized(given, fitted(look_found, _MOST_PX[on_gpu]), ask)
    choice = _chosen(lines, given, datasets, out, on_gpu=on_gpu, gpu=gpu, ask=ask, say=say)
    facts |= {"model": f"{choice.name} at {px_text(choice.image_size)}", "plan": choice.figures}
    lines = _with_choice(lines, given, choice, datasets, on_gpu=on_gpu)
    asides = {
        "data": [*layout.notes, *named_groups(datasets, is_table=source.is_file())] if "data.group" not in lines else list(layout.notes)
    }
    asides["model"] = [
        f"also planned: {text}" for text in choice.tried if not text.startswith(f"{choice.name} at {px_text(choice.image_size)}")
    ]
    text = draft(lines, head=_head(source, out, facts, choice), asides=asides)
    parse_recipe(text, out)  # what is written is read once more as it stands
    for note in layout.notes:
        say(f"note: {note}")
    write_text(out, text)
    return Written(out, text, facts)


def _refuse_place(out: Path, source: Path, *, force: bool, chosen: bool) -> None:
    if out.is_dir():
        raise RecipeError(f"{out} is a folder; give the recipe a name: --out {out / 'recipe.yaml'}")
    if os.path.lexists(out) and not force:
        raise RecipeError(f"{out} is there already; give another name to --out, or --force to replace it")
    folder = source if source.is_dir() else source.parent
    if not chosen and out.resolve().is_relative_to(folder.resolve()) and (source.is_dir() or folder.resolve() != Path.cwd()):
        raise RecipeError(f"{out} would lie in the data, {folder}; start from another folder, or say where: --out FILE")
    if out.suffix.lower() not in (".yaml", ".yml"):
        raise RecipeError(f"{out} does not end in .yaml, as a recipe does; give such a name to --out")


def _pick(layouts: Sequence[Layout], ask: Ask | None) -> Layout:
    """The reading that is meant: asked for where there are several; else the likeliest, the others in notes."""
    named = {_named(layout): layout for layout in layouts}
    if len(layouts) == 1 or ask is None:
        others = [f"the table can be read otherwise: {name}" for name in list(named)[1:]]
        return replace(layouts[0], notes=(*layouts[0].notes, *others))
    question = "What is to be learnt?\n" + "\n".join(f"  {number}  {name}" for number, name in enumerate(named, start=1)) + "\nnumber"
    while not (answer := ask(question, "1")).isdecimal() or not 1 <= int(answer) <= len(named):
        question = f"a number from 1 to {len(named)}"
    return list(named.values())[int(answer) - 1]


def _named(layout: Layout) -> str:
    """A reading as overrides ask for it."""
    label = layout.data.get("label")
    return f"task={layout.task}" if label is None else f"task={layout.task} data.label={shown(label)}".replace(", ", ",")


def _of_layout(layout: Layout, out: Path, given: Mapping[str, Any]) -> dict[str, Line]:
    """task and data as the layout has them, what was given in its place."""
    lines = {"task": Line(layout.task, layout.reasons["task"])}
    for key, value in layout.data.items():
        written = _relative(value, out) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
        lines[f"data.{key}"] = Line(written, layout.reasons.get(key, ""))
    if "val" not in layout.data and "split" not in layout.data:
        lines["data.val"] = _SHARE
    for key, value in given.items():
        path = key in PATH_KEYS and isinstance(kind_of(key).parse(value), str) and not str(value).startswith("package:")
        lines[key] = Line(_relative(Path(value), out) if path else value, GIVEN)
    return lines


def _relative(path: Path, out: Path) -> str:
    """A path from the recipe's folder, with forward slashes."""
    try:
        written = os.path.relpath(path.expanduser().absolute(), out.absolute().parent).replace(os.sep, "/")
    except ValueError:  # another drive
        return str(path.absolute())
    return written if isinstance(kind_of("data.val").parse(written), str) else f"./{written}"  # a folder called 0.15


def _read(lines: Mapping[str, Line], layout: Layout, out: Path, ask: Ask | None) -> tuple[LoadedRecipe, Datasets, dict[str, Line]]:
    """The splits of the recipe as far as it is. Groups that were only guessed at give way where they cannot be kept.

    Raises:
        DataError: they are not sound.
    """
    model = {"model.name": Line("any", "")} if "model.name" not in lines else {}
    loaded = parse_recipe(draft({**lines, **model}), out)
    try:
        return loaded, read_datasets(loaded, Resolution(loaded)), dict(lines)
    except DataError as error:
        guessed = lines.get("data.group")
        if guessed is not None and guessed.why != GIVEN:
            without = {key: line for key, line in lines.items() if key != "data.group"}
            try:
                found = _read(without, layout, out, ask)
            except DataError:
                pass
            else:
                if all("group" in str(problem).lower() for problem in error.problems):
                    return found
        raise DataError([*layout.hints, *error.problems]) from error


def _described(layout: Layout, datasets: Datasets) -> str:
    word = ("target", "targets") if layout.task == "regress" else ("class", "classes")
    classes = f"{len(datasets.classes)} {word[len(datasets.classes) != 1]}"
    splits = ", ".join(f"{name} {len(dataset)}" for name, dataset in datasets.splits().items())
    return f"{layout.task}, {classes}; {splits}"


def _told(lines: Mapping[str, Line], datasets: Datasets) -> dict[str, Line]:
    """The splits' lines with what is in them."""
    found = dict(lines)
    if datasets.is_drawn and "data.val" not in found:
        found["data.val"] = _SHARE
    told = {name: counted(dataset) for name, dataset in datasets.splits().items()}
    in_column = [name for name in told if ("data.split" in found and f"data.{name}" not in found) or name == "train"]
    if "data.split" in found:
        found["data.split"] = Line(found["data.split"].value, "; ".join(f"{name}: {told.pop(name)}" for name in in_column))
    for name, text in told.items():
        line = found[f"data.{name}"]
        found[f"data.{name}"] = Line(line.value, "; ".join(filter(None, (text, line.why))))
    return found


def _sized(given: Mapping[str, Any], proposed: Mapping[str, Line], ask: Ask | None) -> dict[str, Line]:
    """data.fit and model.image_size, the latter asked for."""
    lines = {key: line for key, line in proposed.items() if key not in given}
    size = lines.get("model.image_size")
    if ask is None or size is None:
        return lines
    value, answered = answer("image_size", "model.image_size", size.value, ask)
    return {**lines, "model.image_size": Line(value, GIVEN)} if answered else lines


def _chosen(
    lines: Mapping[str, Line],
    given: Mapping[str, Any],
    datasets: Datasets,
    out: Path,
    *,
    on_gpu: bool,
    gpu: str | None,
    ask: Ask | None,
    say: Callable[[str], None],
) -> Choice:
    """The model, by plans of the recipe with each candidate; the one that is given, or answered, where that is so."""

    def make(name: str, size: tuple[int, int]) -> LoadedRecipe:
        tried = {**lines, "model.name": Line(name, ""), "model.image_size": Line(list(size), "")}
        return parse_recipe(draft(tried | _course(given, len(datasets.train), on_gpu=on_gpu)), out)

    size = kind_of("model.image_size").parse(lines["model.image_size"].value)
    wanted = given.get("model.name")
    candidates = [Candidate(wanted, 0, GIVEN)] if wanted else ON_GPU if on_gpu else ON_CPU
    may_shrink = lines["model.image_size"].why != GIVEN and not (wanted and lines["data.fit"].value == "tile")
    found = choose(make, candidates, size, len(datasets.train), may_shrink=may_shrink, gpu=gpu, say=say)
    if ask is None or wanted:
        return found
    say("\n".join(found.tried))
    name, answered = answer("model", "model.name", found.name, ask)
    return choose(make, [Candidate(name, 0, GIVEN)], found.image_size, 0, may_shrink=False, gpu=gpu, say=say) if answered else found


def _course(given: Mapping[str, Any], num_train: int, *, on_gpu: bool) -> dict[str, Line]:
    """train.epochs and train.batch."""
    batch = sized_batch(num_train, _BATCH[on_gpu])
    device = "a GPU" if on_gpu else "no GPU"
    lines = {
        "train.epochs": Line(_EPOCHS[on_gpu], f"for {device}; training stops earlier where validation no longer gains (train.early_stop)"),
        "train.batch": Line(batch, f"images a step of the optimizer sees, of {num_train}; kept by accumulation whatever fits at once"),
    }
    return {key: line for key, line in lines.items() if key not in given}


def _with_choice(
    lines: Mapping[str, Line], given: Mapping[str, Any], choice: Choice, datasets: Datasets, *, on_gpu: bool
) -> dict[str, Line]:
    """The recipe with its model, how long it trains and what it may use."""
    parameters = choice.report.profile.weights / 4e6
    why = choice.why if choice.why == GIVEN else f"{choice.why}; {parameters:.1f} million parameters"
    size = lines["model.image_size"]
    if kind_of("model.image_size").parse(size.value) != choice.image_size:
        smaller = choice.image_size[0] if choice.image_size[0] == choice.image_size[1] else list(choice.image_size)
        size = Line(smaller, f"{size.why}; smaller than {px_text(kind_of('model.image_size').parse(size.value))} to fit the time")
    found = {**lines, "model.name": Line(choice.name, why), "model.image_size": size}
    if "model.pretrained" not in given:
        found["model.pretrained"] = weights_of(choice.name)
    if "memory.budget" not in given:
        found["memory.budget"] = Line("auto", f"{choice.report.device}: {choice.figures}")
    return {**found, **_course(given, len(datasets.train), on_gpu=on_gpu)}


def _head(source: Path, out: Path, facts: Mapping[str, str], choice: Choice) -> list[str]:
    """The comment at the recipe's top: what it is of, and the commands."""
    name = shlex.quote(out.name)
    run = choice.report.run
    return [
        f"{facts['data']} ({source.name}).",
        f"{facts['images'][:1].upper()}{facts['images'][1:]}.",
        "",
        f"  hiresvis check {name}     every file decoded once, every finding at once",
        f"  hiresvis fit {name}",
        "",
        f"Time: {run.basis}." if run.seconds is None else f"Expect {choice.figures}; {run.basis}.",
        "Written by hiresvis new; every line is a proposal with its reason. hiresvis schema lists all keys.",
    ]
