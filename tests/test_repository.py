"""Rules about the repository as a whole: floors, shipped recipes, the README's commands, and nothing of one machine."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hiresvis"
MODULES = sorted(PACKAGE.rglob("*.py"))

FLOORS = {
    **dict.fromkeys(("__init__", "errors", "units"), 0),
    **dict.fromkeys(("recipe", "memory", "run"), 1),
    **dict.fromkeys(("device", "ladder", "profiles", "plan_plot", "plan_stages"), 2),
    **dict.fromkeys(("backbone", "data", "confusion_plot"), 3),
    **dict.fromkeys(("train", "ui", "listing", "trackers"), 4),
    **dict.fromkeys(("assemble", "predictions", "predicted_masks", "settle", "supply"), 5),
    **dict.fromkeys(("plan_report", "results", "training_statistics"), 5),
    **dict.fromkeys(("costing", "api", "trained", "own_data", "onnx_pixels", "drift", "evidence"), 6),
    **dict.fromkeys(("resume", "verify", "onnx_graph", "precheck", "batch_statistics", "finish", "command", "resizing"), 7),
    **dict.fromkeys(("machine", "card", "export_folder"), 7),
    **dict.fromkeys(("catalog", "planning", "fit", "checking", "inference", "evaluating", "export", "cli", "__main__"), 8),
    **dict.fromkeys(("rehearsal", "new"), 9),  # what is made of other commands
    **dict.fromkeys(("doctor",), 10),
}
COMMANDS = ("catalog", "planning", "doctor", "fit", "checking", "inference", "evaluating", "export", "new")
# Library -> the parts that may import it. Others may import what they like.
ONLY_IN = {
    "rich": {"ui", "cli"},
    "timm": {"backbone", "train"},
    "albumentations": {"data"},
    "yaml": {"recipe"},
    "typer": {"cli", "command"},
    "pydantic": {"recipe"},
    "matplotlib": {"plan_plot", "confusion_plot"},
    "wandb": {"trackers"},
    "mlflow": {"trackers"},
    "onnx": {"onnx_graph"},
    "onnxruntime": {"onnx_graph"},
}
TORCH = {"torch", "torchvision", "torchmetrics", "timm", "albumentations"}
# Parts above floor 1 that load without torch: what they need of it they import when they need it.
LIGHT = {
    "ui",
    "cli",
    "command",
    "ladder",
    "profiles",
    "listing",
    "settle",
    "plan_plot",
    "confusion_plot",
    "plan_stages",
    "plan_report",
    "planning",
    "catalog",
}


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to: its folder, or its own name at the top."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path, *, top_level_only: bool = False) -> list[tuple[int, str]]:
    """(line, dotted module) of every import of a file, those inside functions too; names from packages count as modules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = ".".join([*parents, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def violations(path: Path, source: str) -> list[str]:
    """What the imports of a file break, where `source` is the part it belongs to."""
    said = []
    for line, name in imports_of(path):
        library, *rest = name.split(".")
        where = f"{path}:{line}: {name}"
        if library == "hiresvis":
            target = rest[0] if rest and rest[0] in FLOORS else "__init__"
            if target == source or (target in COMMANDS and source == "cli") or (target == "cli" and source == "__main__"):
                continue
            if FLOORS[target] >= FLOORS[source]:
                said.append(f"{where} is on floor {FLOORS[target]}, not below floor {FLOORS[source]} of {source}")
        elif library in ONLY_IN and source not in ONLY_IN[library]:
            said.append(f"{where}: {library} only in {sorted(ONLY_IN[library])}")
        elif library in TORCH and (FLOORS[source] <= 1 or source == "ui"):
            said.append(f"{where}: no {library} on floors 0 and 1 and in ui")
        elif library == "numpy" and FLOORS[source] <= 1 and path != PACKAGE / "memory" / "program.py":
            said.append(f"{where}: numpy on floors 0 and 1 only in memory/program")
        elif library == "timm" and source == "train" and rest[:1] not in (["optim"], ["scheduler"]):
            said.append(f"{where}: train takes only optimizers and schedulers from timm")
    return said


def test_every_part_has_its_floor():
    """Each file of the package belongs to a part whose floor is written down."""
    assert {part_of(path) for path in MODULES} <= FLOORS.keys()


def test_the_table_of_floors_is_that_of_the_imports():
    """ARCHITECTURE.md names each part once, on the floor that the walk holds it to, from the lowest up."""
    table = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## Floors")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", table, flags=re.MULTILINE)
    told = [(name.strip("/").removesuffix(".py"), int(floor)) for floor, parts in rows for name in re.findall(r"`([^`]+)`", parts)]
    assert sorted(told) == sorted((part, floor) for part, floor in FLOORS.items() if part not in ("__init__", "__main__"))
    assert [int(floor) for floor, _ in rows] == sorted(int(floor) for floor, _ in rows)


def test_imports_come_from_lower_floors():
    """No module imports from its own floor's other parts or from above, and libraries stay where they belong."""
    said = [text for path in MODULES for text in violations(path, part_of(path))]
    assert not said, "\n".join(said)


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("units", "import hiresvis.recipe"),
        ("backbone", "from hiresvis.data import loader"),
        ("data", "from hiresvis import backbone"),
        ("train", "def late():\n    from hiresvis.ui import make_view"),
        ("ui", "import torch"),
        ("run", "import torch.nn as nn"),
        ("memory", "import numpy"),
        ("train", "from rich.console import Console"),
        ("data", "import timm"),
        ("train", "import timm.models"),
        ("backbone", "from albumentations import Blur"),
        ("fit", "import yaml"),
        ("fit", "from hiresvis.cli import main"),
    ],
)
def test_each_floor_rule_bites(tmp_path, source, code):
    """The walk sees an import of every kind, also inside a function."""
    (tmp_path / "module.py").write_text(code)
    assert len(violations(tmp_path / "module.py", source)) == 1


def test_imports_make_no_circles():
    """Modules of the package import each other without circles."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES}
    graph = {name: set() for name in names}
    for name, path in names.items():
        for _, target in imports_of(path, top_level_only=True):
            while target and target not in names:
                target = target.rpartition(".")[0]
            if target and target != name and target != "hiresvis":
                graph[name].add(target)
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_errors_alone_defines_exceptions():
    """The exception tree is drawn in one file; no other module adds to it, private signals within a module aside."""
    said = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and part_of(path) != "errors" and not node.name.startswith("_"):
                bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                if any(re.search(r"(Error|Exception|Failed)$", base) for base in bases):
                    said.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}")
    assert not said, "\n".join(said)


def test_lower_floors_and_views_load_without_torch():
    """Importing every module of floors 0 and 1 and of ui loads neither torch nor timm, not even through others."""
    light = [path for path in MODULES if FLOORS[part_of(path)] <= 1 or part_of(path) in LIGHT]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in light]
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nprint(sorted({TORCH!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "command",
    [
        (),
        ("fit",),
        ("plan",),
        ("check",),
        ("evaluate",),
        ("predict",),
        ("export",),
        ("report",),
        ("show",),
        ("new",),
        ("schema",),
        ("models",),
        ("doctor",),
    ],
)
def test_help_imports_nothing_heavy(command):
    """--help of the program and of each command answers without torch, numpy, yaml or rich."""
    call = [sys.executable, "-X", "importtime", "-m", "hiresvis", *command, "--help"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in loaded
    assert loaded & (TORCH | {"yaml", "numpy", "rich"}) == set()
    assert "Usage: hiresvis" in done.stdout


def test_every_shipped_recipe_loads():
    """Each recipe is valid, and its head names the command that runs it."""
    from hiresvis.recipe import load_recipe

    recipes = sorted((ROOT / "recipes").glob("*.yaml"))
    assert recipes, "no recipes are shipped"
    for path in recipes:
        load_recipe(path)
        head = path.read_text(encoding="utf-8").partition("\ntask:")[0]
        assert f"hiresvis fit recipes/{path.name}" in head, f"{path.name}: the head comment gives its command and the result to expect"


def shipped_files() -> list[Path]:
    """Files under version control, or, in a copy without it, all that are not made by tools."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode == 0 and listed.stdout:
        return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]
    made = re.compile(r"(^|/)(\.venv|\.git|__pycache__|runs|boards|[^/]*\.egg-info|\.[a-z]+_cache|\.hypothesis)(/|$)")
    return [path for path in ROOT.rglob("*") if path.is_file() and not made.search(path.relative_to(ROOT).as_posix())]


def test_nothing_names_the_machine_it_was_made_on():
    """No shipped file holds an absolute path of somebody's machine."""
    of_a_machine = re.compile(r"(?<![\w.~/-])/(work|root|home|Users|mnt|workspace)/\w")
    said = []
    for path in shipped_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        said += [f"{path.relative_to(ROOT)}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if of_a_machine.search(line)]
    assert not said, "\n".join(said)


def test_no_text_waits_to_be_filled_in():
    """No shipped text holds a placeholder."""
    mark = "@" * 2
    found = [path.name for path in shipped_files() if path.suffix in {".md", ".yaml", ".toml"} and mark in path.read_text(encoding="utf-8")]
    assert found == []


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def marked(name: str) -> str:
    call = [sys.executable, "tools/readme_commands.py", name]
    return subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", ["install", "quickstart", "tests"])
def test_ci_runs_the_commands_that_the_readme_gives(name):
    """Each step of the automatic run is a block of the README, taken from there and valid as shell."""
    commands = marked(name)
    assert commands.strip()
    subprocess.run(["bash", "-n"], input=commands, text=True, check=True)
    assert f"step {name}\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_readme_names_what_exists():
    """Commands, options, files and overrides in the README's shell blocks are those of this release."""
    from hiresvis.recipe import load_recipe

    blocks = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", readme(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    calls = [shlex.split(line, comments=True) for line in lines if re.match(r"(\$ )?(python -m )?hiresvis ", line)]
    assert calls
    helps: dict[str, str] = {}
    for words in (call[call.index("hiresvis") + 1 :] for call in calls):
        command, arguments = words[0], words[1:]
        if command not in helps:
            done = subprocess.run(
                [sys.executable, "-m", "hiresvis", command, "--help"], cwd=ROOT, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"hiresvis {command}: no such command"
            helps[command] = done.stdout
        for option in (word.partition("=")[0] for word in arguments if word.startswith("--")):
            assert option in helps[command], f"hiresvis {command} {option}: no such option"
        recipes = [word for word in arguments if word.startswith("recipes/") and word.endswith(".yaml")]
        if recipes:
            load_recipe(ROOT / recipes[0], [word for word in arguments if re.match(r"[a-z]\w*(\.\w+)*=", word)])


def test_readme_shows_pictures_that_are_there_and_small():
    """Each is a file of less than 200 kB, and a drawing fetches nothing when it is looked at."""
    names = re.findall(r"!\[[^\]]*\]\(([^)]+)\)|<img src=\"([^\"]+)\"", readme())
    pictures = [ROOT / (linked or placed) for linked, placed in names]
    assert {path.name for path in pictures} == {"live_view.svg", "report.webp"}
    for path in pictures:
        assert path.stat().st_size < 200_000
        if path.suffix == ".svg":
            assert not re.search(r"@import|(url\(|href=|src=)\s*[\"']?\s*(https?:|//)", path.read_text(encoding="utf-8"))


def test_the_picture_of_the_live_view_is_what_the_view_draws(tmp_path):
    """The tool makes the README's picture again, word for word."""
    call = [sys.executable, "tools/make_pictures.py", "--out", str(tmp_path), "live"]
    subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True)

    def words(path: Path) -> list[str]:
        return re.findall(r">([^<>]+)</text>", path.read_text(encoding="utf-8"))

    drawn = words(tmp_path / "live_view.svg")
    assert any("4/15" in word for word in drawn)
    assert drawn == words(ROOT / "tools" / "pictures" / "live_view.svg")
