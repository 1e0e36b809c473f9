"""Traced costs on disk: found again when nothing changed, traced again when anything did, and never in the way."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hiresvis import costing, profiles
from hiresvis.errors import RecipeError
from hiresvis.fit import fit
from hiresvis.planning import plan
from hiresvis.profiles import Entry, Facts, ProfileKey
from hiresvis.recipe import load_recipe
from hiresvis.train.finder import Finder

ROOT = Path(__file__).resolve().parent.parent
KEY = ProfileKey(
    model="test_resnet",
    image_size=(64, 96),
    in_chans=3,
    num_classes=2,
    precision="bf16",
    channels_last=True,
    block=512,
    raw_image_bytes=64 * 96 * 3,
    optimizer="adamw",
    clip_grad=1.0,
    freeze="none",
    adapt="full",
    norm="batch",
    drop_path="auto",
    rules="cuda",
)
OTHER = {
    "model": "test_vit",
    "image_size": (96, 64),
    "in_chans": 1,
    "num_classes": 3,
    "precision": "fp32",
    "channels_last": False,
    "block": 64,
    "raw_image_bytes": 1,
    "optimizer": "sgd",
    "clip_grad": None,
    "freeze": 1,
    "adapt": "head",
    "norm": "frozen",
    "drop_path": 0.1,
    "rules": "cpu",
    "lora_rank": 8,
    "ema": True,
    "groups": "0.75 True True",
    "resize": "64x64 96x96",
    "mask_loss": "dice",
    "label_smoothing": 0.1,
}
RECIPE = """\
task: classify
data: {train: images, workers: 0}
model: {name: test_resnet, pretrained: true, image_size: 64}
memory: {budget: 4GiB}
train: {epochs: 1, batch: 8}
"""


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    """Entries go into a folder of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIRESVIS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache folder for one test."""
    monkeypatch.setenv("HIRESVIS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """Twelve images of two classes, and a recipe for them."""
    folder = tmp_path_factory.mktemp("recipe")
    for name in ("a", "b"):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(6):
            Image.fromarray(np.full((70, 80, 3), 40 * number, dtype=np.uint8)).save(folder / "images" / name / f"{number}.png")
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def entry(recipe) -> Entry:
    """A real entry."""
    report = plan(load_recipe(recipe), gpu="A100-40GB")
    return Entry(report.profile, Facts(stride=32, batch_norm=True, parameters=5, process_bytes=7))


@pytest.fixture
def traces(monkeypatch) -> list[str]:
    """The batch statistics of each trace that is run from now on."""
    seen: list[str] = []
    real = costing._trace

    def trace(loaded, trainable, key):
        seen.append(key.norm)
        return real(loaded, trainable, key)

    monkeypatch.setattr(costing, "_trace", trace)
    return seen


@pytest.mark.parametrize("field", [field.name for field in fields(ProfileKey)])
def test_every_setting_of_the_key_decides(field):
    """Another value of any setting is another entry."""
    assert replace(KEY, **{field: OTHER[field]}).digest() != KEY.digest()
    assert replace(KEY).digest() == KEY.digest()


def test_releases_sources_and_switches_decide(monkeypatch, tmp_path):
    """Another torch or timm, a changed source, or timm's switch for attention gives another entry."""
    found = {KEY.digest()}

    def changed() -> str:
        profiles._surroundings.cache_clear()
        return KEY.digest()

    for library in ("torch", "timm"):
        real = profiles.metadata.version
        with monkeypatch.context() as patch:
            patch.setattr(profiles.metadata, "version", lambda name, real=real, library=library: "0" if name == library else real(name))
            found.add(changed())
    with monkeypatch.context() as patch:
        patch.setenv("TIMM_FUSED_ATTN", "0")
        found.add(changed())
    folder = tmp_path / "package"
    for name in profiles.SOURCES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / "hiresvis" / name).read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr(profiles, "__file__", str(folder / "profiles.py"))
        found.add(changed())  # copies with the same bytes: the same entry
        assert len(found) == 4
        for name in profiles.SOURCES:
            with (folder / name).open("a") as stream:
                stream.write("# changed\n")
            found.add(changed())
    assert len(found) == 4 + len(profiles.SOURCES)
    changed()


def test_the_sources_are_there():
    """Every file that is to be hashed exists, and the tracing ones are among them."""
    assert all((ROOT / "hiresvis" / name).is_file() for name in profiles.SOURCES)
    tree = {}
    for path in (ROOT / "hiresvis").rglob("*.py"):
        found = re.findall(r"^from hiresvis\.([\w.]+) import", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        tree[path.relative_to(ROOT / "hiresvis").as_posix()] = [name.replace(".", "/") + ".py" for name in found]
    reached, new = set(), ["backbone/trace.py", "backbone/build.py", "train/freezing.py", "train/optim.py"]
    while new:
        name = new.pop()
        if name not in reached and name in tree:
            reached.add(name)
            new += tree[name]
    # Errors, units of display, weights as they are loaded, and constants that are part of the key decide no cost.
    assert reached - set(profiles.SOURCES) <= {"errors.py", "units.py", "memory/budget.py", "backbone/weights.py"}


def test_an_entry_is_read_as_it_was_written(cache, entry):
    """Profile and facts come back equal; nothing else lies in the folder."""
    key = replace(KEY, image_size=entry.profile.image_size)
    assert profiles.read(key) is None
    profiles.write(key, entry)
    assert profiles.read(key) == entry
    assert [path.name for path in (cache / "profiles").iterdir()] == [f"{key.digest()}.json"]


def _cut(text: str) -> bytes:
    return text[: len(text) // 2].encode()


def _renamed(text: str) -> bytes:
    return text.replace('"test_resnet"', '"other_model"').encode()


@pytest.mark.parametrize(
    "spoil",
    [
        _cut,
        _renamed,
        lambda text: b"",
        lambda text: b"\x00\xff\x00",
        lambda text: b"[1, 2]",
        lambda text: json.dumps({**json.loads(text), "facts": {"stride": 1}}).encode(),
        lambda text: json.dumps({**json.loads(text), "profile": {**json.loads(text)["profile"], "version": -1}}).encode(),
        lambda text: json.dumps({**json.loads(text), "profile": {**json.loads(text)["profile"], "units": 3}}).encode(),
    ],
    ids=["cut", "another model", "empty", "no text", "a list", "facts missing", "another version", "no units"],
)
def test_a_spoilt_entry_is_traced_again_without_a_word(cache, entry, spoil):
    """What cannot be read is no entry: it is made again and replaces the file."""
    key = replace(KEY, image_size=entry.profile.image_size)
    profiles.write(key, entry)
    path = profiles.path_of(key)
    path.write_bytes(spoil(path.read_text()))
    assert profiles.read(key) is None
    assert profiles.read_or_trace(key, lambda: entry) == entry
    assert profiles.read(key) == entry


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, entry):
    """The entry is made and used, and not kept."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HIRESVIS_CACHE", str(tmp_path / "file"))
    assert profiles.read_or_trace(KEY, lambda: entry) == entry
    assert profiles.read(KEY) is None


def test_the_oldest_entries_go(cache, entry, monkeypatch):
    """Beyond the limit the folder does not grow."""
    monkeypatch.setattr(profiles, "MAX_ENTRIES", 2)
    keys = [replace(KEY, image_size=entry.profile.image_size, num_classes=number) for number in range(4)]
    for age, key in enumerate(keys):
        profiles.write(key, entry)
        if profiles.path_of(key).exists():
            os_time = 1_000_000 + age
            os.utime(profiles.path_of(key), (os_time, os_time))
    assert [profiles.read(key) is not None for key in keys] == [False, False, True, True]


def _plan_apart(recipe: Path, *options: str) -> tuple[dict, set[str]]:
    """`hiresvis plan --json` by a fresh interpreter: its answer, and which large libraries it loaded."""
    code = (
        "import sys; from hiresvis import planning; from hiresvis.recipe import load_recipe; import json\n"
        f"options = dict(option.split('=') for option in {list(options)!r})\n"
        f"report = planning.plan(load_recipe({str(recipe)!r}), **options)\n"
        "print(json.dumps([report.to_json(), sorted({'torch', 'timm', 'albumentations'} & set(sys.modules))]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, loaded = json.loads(done.stdout)
    return found, set(loaded)


@pytest.mark.parametrize("option", ["gpu=RTX 4090", "budget=3GiB"])
def test_a_second_plan_needs_no_torch_and_says_the_same(cache, recipe, option):
    """With costs on disk and a card or a budget named, neither torch nor timm is imported, and no figure changes."""
    first, loaded = _plan_apart(recipe, option)
    assert loaded >= {"torch", "timm"}
    again, loaded = _plan_apart(recipe, option)
    assert loaded == set()
    assert again == first


def test_a_card_has_its_own_budget_precision_and_rules(recipe):
    """95% of the card's memory whatever the recipe says, a context in it, bf16 where the card has it, and --budget goes first."""
    large = plan(load_recipe(recipe), gpu="A100-40GB").plan
    assert (large.precision, large.parts["baseline"]) == ("bf16", 600 * 2**20)
    assert 0.94 * 40 * 2**30 * 0.98 < large.budget_bytes < 0.95 * 40 * 2**30
    assert plan(load_recipe(recipe), gpu="T4").plan.precision == "fp16"
    assert plan(load_recipe(recipe), gpu="A100-40GB", budget="5GiB").plan.budget_bytes == 5 * 2**30
    assert plan(load_recipe(recipe), gpu="A100-40GB", budget="50%").plan.budget_bytes == pytest.approx(
        large.budget_bytes * 50 / 95, rel=1e-6
    )


def test_what_the_card_lacks_or_is_not_is_refused(recipe):
    """An unknown card, a precision that a card has not, and a budget that is none end with the recipe's exit code."""
    with pytest.raises(RecipeError, match="A101"):
        plan(load_recipe(recipe), gpu="A101")
    with pytest.raises(RecipeError, match="T4 has no bf16"):
        plan(load_recipe(recipe, ["memory.precision=bf16"]), gpu="T4")
    with pytest.raises(RecipeError, match=r"--budget .*24 has no unit"):
        plan(load_recipe(recipe), gpu="T4", budget="24")


def test_small_micro_batches_freeze_statistics_from_disk_too(cache, recipe, traces):
    """norm auto costs two traces where few images fit, none the second time; with room for all it costs one."""
    first = plan(load_recipe(recipe, ["train.batch=4"]), gpu="RTX 3060").to_json()
    assert traces == ["batch", "frozen"]
    assert plan(load_recipe(recipe, ["train.batch=4"]), gpu="RTX 3060").to_json() == first
    assert traces == ["batch", "frozen"]
    plan(load_recipe(recipe), gpu="RTX 3060")
    assert traces == ["batch", "frozen"]


def test_missing_data_is_planned_for_two_classes(tmp_path, recipe):
    """A recipe without its images gives a plan all the same; what follows from their number is not told."""
    alone = tmp_path / "alone.yaml"
    alone.write_text(RECIPE)
    report = plan(load_recipe(alone), gpu="T4")
    assert report.run.num_train is None
    assert plan(load_recipe(recipe), gpu="T4").run.num_train == 10  # two of twelve are held out


def test_fit_traces_once_and_shares_with_plan(cache, recipe, traces):
    """A second fit of the same recipe, and one after a plan on this machine, traces nothing."""
    from hiresvis.fit import fit

    loaded = load_recipe(recipe, ["model.pretrained=false"])
    plan(loaded)
    assert traces == ["batch"]
    for _ in range(2):
        assert any(event.kind == "plan_chosen" for event in fit(loaded, dry_run=True))
    assert traces == ["batch"]
    assert any(
        event.kind == "plan_chosen" for event in fit(load_recipe(recipe, ["model.pretrained=false", "optim.name=sgd"]), dry_run=True)
    )
    assert traces == ["batch", "batch"]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_decay_and_rates_change_no_costs(cache, recipe, traces, optimizer):
    """The key leaves out what the optimizer's memory does not depend on: with other rates and decays the trace gives the same profile."""
    found = []
    for changes in (["optim.lr=1e-4", "optim.weight_decay=0"], ["optim.layer_decay=0.5"]):
        shutil.rmtree(cache, ignore_errors=True)
        loaded = load_recipe(recipe, [*changes, f"optim.name={optimizer}", "model.norm=batch"])
        found.append(plan(loaded, gpu="T4").profile)
    assert len(traces) == 2
    assert found[0] == found[1]


def test_times_are_kept_by_device_and_settings(cache):
    """What was measured is read back for the same costs on the same device alone; what is no such file is no times."""
    profiles.write_seconds(KEY, "one", {0: 0.25, 3: 1e-7})
    assert profiles.read_seconds(KEY, "one") == {0: 0.25, 3: 1e-7}
    assert profiles.read_seconds(KEY, "other") is None
    assert profiles.read_seconds(replace(KEY, norm="frozen"), "one") is None
    (file,) = (cache / "seconds").iterdir()
    for text in ("", "[]", '{"seconds": {"0": "x"}}', '{"seconds": [1]}'):
        file.write_text(text)
        assert profiles.read_seconds(KEY, "one") is None


def test_a_plan_for_this_machine_uses_what_units_took_here(cache, recipe, monkeypatch):
    """Once a run has timed the units, plan says images per second, by them; a card by name does not take them."""
    without = plan(load_recipe(recipe))
    assert without.run.images_per_second is None
    # Everything fits here, so the finder has nothing to weigh: it is made to have timed two units.
    monkeypatch.setattr(Finder, "_weigh_by_time", lambda finder, _: setattr(finder, "unit_seconds", {1: 1e-3, 3: 2e-3}))
    list(fit(load_recipe(recipe, overrides=["model.pretrained=false"]), dry_run=True))
    assert list((cache / "seconds").iterdir())
    report = plan(load_recipe(recipe))
    assert report.run.images_per_second > 0
    assert "took here" in report.run.basis
    assert "data-sheet" in plan(load_recipe(recipe), gpu="T4").run.basis
