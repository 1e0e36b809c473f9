"""A recipe file, and overrides of it, to a validated recipe; everything wrong with it is told at once.

Each finding has its place (`recipe.yaml:14:3`, or `override 2 (optim.lr=-1)`), the key's full name, what is wrong against
what is allowed, and the mend.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hiresvis.errors import Problem, RecipeError
from hiresvis.recipe import yamltext
from hiresvis.recipe.schema import Recipe, kind_of, section_of
from hiresvis.recipe.validate import ALL_KEYS, REQUIRED, places_of, validate
from hiresvis.recipe.values import shown, what
from hiresvis.recipe.yamltext import Entry, Found, Node, Place

# Keys whose text is a path (`package:NAME` and shares are not).
PATH_KEYS = ("data.train", "data.val", "data.test", "data.root", "model.pretrained", "model.init_from", "log.dir")


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe with where it came from.

    Attributes:
        recipe: the validated values, with `{name}` filled in.
        given: dotted keys that the file or an override gave; all others have their defaults.
        path: the file as it was named.
        text: the file's text.
        overrides: as they were given.
    """

    recipe: Recipe
    given: frozenset[str]
    path: Path
    text: str = field(repr=False)
    overrides: tuple[str, ...] = ()
    places: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        """What `{name}` stands for: the file name without its suffix."""
        return self.path.stem

    @property
    def folder(self) -> Path:
        """Where relative paths of the recipe start."""
        return self.path.absolute().parent

    @property
    def run_dir(self) -> Path:
        """The run folder, absolute."""
        return self.resolve_path(self.recipe.log.dir)

    def resolve_path(self, text: str) -> Path:
        """An absolute path; relative ones start at the recipe's folder, and `~` is the home folder."""
        return Path(os.path.normpath(self.folder / Path(text).expanduser()))

    def place(self, key: str) -> str:
        """Where a key's value stands: `recipe.yaml:9:15`; for a default, its section or the file."""
        key = key.partition("[")[0]  # an item of a list stands with the list
        while key and key not in self.places:
            key = key.rpartition(".")[0]
        return self.places.get(key, str(self.path))

    def problem(self, key: str, message: str) -> Problem:
        """A finding about one key, for checks that need more than the recipe."""
        return Problem(message, place=self.place(key), key=key)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Reads and validates a recipe.

    Args:
        path: the YAML file.
        overrides: `optim.lr=1e-4`, values by the same rules as in the file; relative paths in them start at the
            current folder.

    Raises:
        RecipeError: with every problem found, in file order, then by override.
    """
    return parse_recipe(_read(Path(path)), path, overrides)


def parse_recipe(text: str, path: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """As `load_recipe`, of a text that is to stand in the file `path`, which need not be there yet.

    Raises:
        RecipeError: with every problem found.
    """
    path = Path(path)
    document = yamltext.parse(text, lambda line, column: Place(f"{path}:{line}:{column}", (0, line, column)))
    findings = list(document.findings)
    root = document.root
    if root is None or (root.value is None and not root.broken):
        if not findings:
            findings.append(Found(Place(str(path)), "", f"empty; a recipe needs at least {', '.join(REQUIRED)}"))
        root = None
    elif not isinstance(root.value, dict):
        findings.append(Found(root.place, "", f"{what(root.value)} where the recipe's sections belong; write task: classify, data: ..."))
        root = None
    tree = root or Node(Place(str(path)), {})
    findings += [found for number, override in enumerate(overrides, start=1) for found in _override(tree, override, number, overrides)]
    recipe, invalid = validate(tree, only_given=root is None)
    findings += invalid
    if findings or recipe is None:
        raise _all_problems(findings)
    recipe = recipe.model_copy(update={"log": recipe.log.model_copy(update={"dir": recipe.log.dir.replace("{name}", path.stem)})})
    places = {key: place.text for key, place in places_of(tree)}
    given = frozenset(key for key in (*ALL_KEYS, "train.early_stop") if key in places)
    return LoadedRecipe(recipe, given, path, text, tuple(overrides), places)


def _all_problems(findings: Sequence[Found]) -> RecipeError:
    ordered = sorted(dict.fromkeys(findings), key=lambda found: found.place.rank)
    return RecipeError([Problem(found.message, found.place.text, found.key) for found in ordered])


def _read(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        folder = path.parent
        others = sorted(str(other) for pattern in ("*.yaml", "*.yml") for other in folder.glob(pattern)) if folder.is_dir() else []
        guess = difflib.get_close_matches(str(path), others, n=1, cutoff=0.5)
        missing = f"no such file; did you mean {guess[0]}?" if guess else "no such file; give the path of a recipe (.yaml)"
        raise RecipeError([Problem(missing, str(path))]) from None
    except IsADirectoryError:
        raise RecipeError([Problem("a folder; give the path of a recipe (.yaml)", str(path))]) from None
    except OSError as error:
        raise RecipeError([Problem(f"cannot be read: {error.strerror}; check its permissions", str(path))]) from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, line_start = raw.count(b"\n", 0, error.start) + 1, raw.rfind(b"\n", 0, error.start)
        place = f"{path}:{line}:{error.start - line_start}"
        raise RecipeError([Problem(f"byte {raw[error.start]:#04x} is not UTF-8; save the file as UTF-8", place)]) from None


def _override(root: Node, override: str, number: int, overrides: Sequence[str]) -> Iterator[Found]:
    """Puts one override into the tree, or says why not."""
    place = Place(f"override {number} ({override if len(override) <= 60 else override[:57] + '...'})", (number, 0, 0))
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        yield Found(place, "", "not key=value; write optim.lr=1e-4")
        return
    earlier = [other for other in overrides[: number - 1] if other.partition("=")[0].strip() == key]
    if earlier:
        yield Found(place, key, f"given twice, first as {earlier[0]}; keep one")
        return
    if not text.strip():
        yield Found(place, key, f"no value after =; write {key}=null for none")
        return
    document = yamltext.parse(text, lambda line, column: place)
    yield from (Found(found.place, key, found.message) for found in document.findings)
    if document.root is None or document.findings:
        return
    if key in Recipe.model_fields and section_of(Recipe.model_fields[key].annotation):
        first = next(name for name in ALL_KEYS if name.startswith(f"{key}."))
        yield Found(place, key, f"a whole section; override its keys one by one: {first}=...")
        return
    _from_current_folder(document.root, key)
    yield from _insert(root, key, Entry(place, document.root))


def _from_current_folder(node: Node, key: str) -> None:
    """Makes a relative path of an override absolute, since the shell that gave it completes from there."""
    if key not in PATH_KEYS:
        return
    try:
        path = kind_of(key).parse(node.value)
    except ValueError:
        return  # refused for what it is when the whole recipe is checked
    if isinstance(path, str) and not path.startswith("package:"):
        node.value = os.path.abspath(os.path.expanduser(path))


def _insert(node: Node, key: str, entry: Entry) -> Iterator[Found]:
    *sections, last = key.split(".")
    for depth, part in enumerate([*sections, None]):
        if node.value is None and not node.broken:
            node.value = {}
        if not isinstance(node.value, dict):
            holder = ".".join(sections[:depth])
            if holder in ALL_KEYS:
                yield Found(entry.place, key, f"{holder} is {shown(node.plain())}, which has no keys; write {holder}=...")
            return  # otherwise the file has no mapping where a section belongs, which is a finding of its own
        if part is not None:
            node = node.value.setdefault(part, Entry(entry.place, Node(entry.place, {}))).node
    assert isinstance(node.value, dict), "the loop ends at a mapping"
    node.value[last] = entry
