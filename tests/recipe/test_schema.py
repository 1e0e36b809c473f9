"""What each key may hold, and the editor schema of it."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from hiresvis.recipe import Recipe, recipe_json_schema, yamltext
from hiresvis.recipe.schema import keys_of, kind_of

VALIDATOR = jsonschema.Draft202012Validator(recipe_json_schema())
RECIPES = Path(__file__).resolve().parents[2] / "recipes"
MINIMAL = {"task": "classify", "data": {"train": "d"}, "model": {"name": "m"}}

GOOD = [
    ("data.val", "15%", 0.15),
    ("data.classes", "[a, b]", ("a", "b")),
    ("data.background", "black", (0, 0, 0)),
    ("data.fit", "tile", "tile"),
    ("data.overlap", "25%", 0.25),
    ("data.region", "null", None),
    ("data.background", "[1, 2, 3]", (1, 2, 3)),
    ("data.scale", "[0, 4095]", (0.0, 4095.0)),
    ("data.max_pixels", "2G", 2_000_000_000),
    ("data.max_pixels", "250000000", 250_000_000),
    ("data.augment", "[HorizontalFlip, {name: Blur, p: 0.5}]", ({"name": "HorizontalFlip"}, {"name": "Blur", "p": 0.5})),
    ("data.cache", "off", "off"),
    ("data.cache", "20GiB", 20 * 2**30),
    ("data.sample", "boards", "boards"),
    ("model.pretrained", "package:efficientnet", "package:efficientnet"),
    ("model.pretrained", "false", False),
    ("model.image_size", "[720, 1280]", (720, 1280)),
    ("model.adapt", "lora", "lora"),
    ("model.freeze", "2", 2),
    ("model.drop_path", "0", 0.0),
    ("memory.budget", "22GiB", 22 * 2**30),
    ("memory.budget", "90%", 0.9),
    ("memory.budget", "800 MB", 800 * 2**20),
    ("memory.spacing", "off", "off"),
    ("memory.spacing", "{stage0: 1, stage2: 3}", {"stage0": 1, "stage2": 3}),
    ("memory.channels_last", "true", True),
    ("optim.lr", "1", 1.0),
    ("optim.layer_decay", "null", None),
    ("optim.warmup", "0.1", 0.1),
    ("optim.warmup", "500", 500),
    ("optim.clip_grad", "null", None),
    ("train.batch", "auto", "auto"),
    ("train.early_stop", "null", None),
    ("train.max_time", "3h45m", 13500.0),
    ("train.ema", "false", False),
    ("log.ui", "off", "off"),
    ("log.to", "[jsonl, csv]", ("jsonl", "csv")),
    ("log.to", "[wandb]", ("wandb",)),
    ("memory.on_oom", "stop", "stop"),
    ("memory.on_oom", "replan", "replan"),
    ("train.on_divergence", "stop", "stop"),
    ("train.on_divergence", "rollback", "rollback"),
    ("train.resize", "[[0, [224, 512]], [60%, 2048]]", ((0.0, (224, 512)), (0.6, (2048, 2048)))),
]

BAD = [
    ("version", "2", "2 is not a version of the recipe format that this release reads; write 1"),
    ("version", "true", "true is not a version"),
    ("task", "segmnt", "segmnt is none of classify, multilabel, regress, segment; did you mean segment?"),
    ("data.ignore_index", "70000", "70000 is above 65535; give null or a whole number from 0 to 65535"),
    ("data.val", "0", "0 is not above 0 and below 1; give a path, or a share such as 0.15"),
    ("data.label", "[]", "[] has 0 names; give at least 1"),
    ("data.label", "[a, a]", "a is there twice; keep one"),
    ("data.label", "null", "null is nothing; give text"),
    ("data.train", "3", '3 is a whole number; put it in quotes: "3"'),
    ("data.train", "''", "an empty text"),
    ("data.classes", "[a, 01]", '1 is a whole number; put a name in quotes: "1"'),
    ("data.classes", "[a, a]", "a is there twice; keep one"),
    ("data.classes", "a", "a is text; give auto, or a list of names"),
    ("data.fit", "letterbx", "letterbx is none of resize, letterbox, crop, tile; did you mean letterbox?"),
    ("data.overlap", "1", "1 is not below 100% and at least 0%; give a share such as 25% or 0.25, from 0 to below 100%"),
    ("data.overlap", "-5%", "-5% is text, not a number"),
    ("data.region", "[x, y]", "[x, y] has 2 names; give null, or a list of 4 names of columns: [x, y, width, height]"),
    ("data.region", "[x, y, w, w]", "w is there twice; keep one"),
    ("data.region", "x", "x is text; give a list of names"),
    ("data.background", "[1, 2]", "[1, 2] is no colour"),
    ("data.background", "[1, 2, 256]", "[1, 2, 256] is not three whole numbers from 0 to 255"),
    ("data.scale", "[5, 5]", "5 is not below 5"),
    ("data.scale", "minmax", "minmax is none of auto, dtype, percentile, [lo, hi]"),
    ("data.bad_images", "quarantine", "quarantine is not there yet; today: error or skip"),
    ("data.balance", "undersample", "undersample is none of none, weights, sampler, focal; did you mean sampler?"),
    ("data.max_pixels", "many", "many is no count; write 500M or 500000000"),
    ("data.augment", "strong", "strong is none of none, light, standard, heavy, a list of albumentations"),
    ("data.augment", "[{p: 1}]", "{p: 1} has no name; give {name: HorizontalFlip, p: 0.5}"),
    ("data.workers", "-1", "-1 is below 0; give auto or a whole number of at least 0"),
    ("data.workers", "aut", "aut is none of auto, a whole number of at least 0; did you mean auto?"),
    ("data.cache", "true", "true: write auto"),
    ("data.cache", "on", "on: write auto"),
    ("data.cache", "20", "20 has no unit; write 20GiB"),
    ("data.cache", "3 kB", "3 kB is below 1MiB; give auto, off, or a size such as 20GiB"),
    ("data.cache", "lots", "lots is no size of a cache; give auto, off, or a size such as 20GiB"),
    ("data.cache", "[1]", "[1] is no size of a cache; give auto, off, or a size such as 20GiB"),
    ("data.sample", "cats", "cats is not a sample set; write boards, or null for none"),
    ("model.image_size", "1024.5", "1024.5 is a number; give one whole number of pixels"),
    ("model.image_size", "0", "0 is below 1"),
    ("model.image_size", "true", "true is true/false"),
    ("model.adapt", "lore", "lore is none of full, head, lp_ft, lora; did you mean lora?"),
    ("model.lora", "8", "8 is a whole number, not a mapping; write model.lora: {rank: ...}"),
    ("model.freeze", "0", "0 is below 1; give none, stem or a whole number of at least 1"),
    ("model.freeze", "null", "null is nothing; give none, stem or a whole number of at least 1"),
    ("model.drop_path", "1", "1 is not below 1"),
    ("model.pretrained", "on", "on is text in YAML 1.2; write true or false"),
    ("model.pretrained", "'package:'", "names nothing"),
    ("memory.budget", "22", "22 has no unit; write 22GiB"),
    ("memory.budget", "0.9", "0.9 has no unit; write 90%"),
    ("memory.budget", "110%", "110% is not above 0% and at most 100%"),
    ("memory.budget", "22B", "22B is below 1MiB"),
    ("memory.budget", "lots", "lots is no size; give auto, a size such as 22GiB, or a share such as 90%"),
    ("memory.micro_batch", "2.0", "2.0 is not a whole number; write 2"),
    ("memory.micro_batch", "2.5", "2.5 is not a whole number; give auto or a whole number"),
    ("memory.spacing", "{stage0: 0}", "0 is not a whole number of at least 1"),
    ("memory.spacing", "[1]", "[1] is a list; give auto, off or a whole number of at least 1"),
    ("memory.compile", "true", "true is not there yet; today: false"),
    ("memory.precision", "fp8", "fp8 is none of auto, bf16, fp16, fp32"),
    ("optim.lr", "'1e-4'", '"1e-4" is text, not a number; take the quotes away'),
    ("optim.lr", "1e-4x", "1e-4x is text, not a number; give auto or a number above 0"),
    ("optim.lr", ".inf", "inf is not finite"),
    ("optim.clip_grad", "nan", "nan is not finite; give null or a number above 0"),
    ("optim.clip_grad", "'inf'", "inf is not finite; give null or a number above 0"),
    ("optim.weight_decay", "1_000", "1_000 is text, not a number; write it without _"),
    ("memory.on_oom", "retry", "retry is none of replan, stop"),
    ("train.on_divergence", "skip", "skip is none of rollback, stop"),
    ("optim.lr", "true", "true is true/false; give auto or a number above 0"),
    ("optim.layer_decay", "1.5", "1.5 is above 1"),
    ("optim.warmup", "120%", "120% is not below 100%"),
    ("optim.warmup", "-5", "-5 is not below 100% and at least 0%"),
    ("optim.loss", "dicee", "dicee is none of auto, cross_entropy, focal, bce, asl, huber, mse, l1, dice_ce, dice; did you mean"),
    ("optim.mixup", "-0.2", "-0.2 is below 0; give a number of at least 0"),
    ("optim.name", "adam", "adam is none of adamw, sgd, lion, muon; did you mean adamw?"),
    ("train.epochs", "0", "0 is below 1"),
    ("train.seed", "4294967296", "4294967296 is above 4294967295"),
    ("train.deterministic", "on", "on is text in YAML 1.2; write true or false"),
    ("train.ema", "0.999", "0.999 is none of auto, true, false"),
    ("train.early_stop", "5", "5 is a whole number, not a mapping; write train.early_stop: {patience: ...}"),
    ("train.keep", "{best: 2}", "2 is not there yet; today: 1"),
    ("train.metric", "miu", "miu is none of auto, accuracy"),
    ("train.resize", "512", "512 is a whole number; give null, or steps such as [[0, 512], [60%, 1024]]"),
    ("train.resize", "[]", "[] is a list; give null, or steps"),
    ("train.resize", "[512, 1024]", "512 is not [share, size]"),
    ("train.resize", "[[0.5, 512]]", "0.5 is where the first size begins; write 0"),
    ("train.resize", "[[0, 512], [0, 1024]]", "0 is not after 0; give shares in their order"),
    ("train.resize", "[[0, 512], [120%, 1024]]", "120% is not below 100%"),
    ("train.resize", "[[0, 512], [60%, [512, 384]]]", "[512, 384] is not larger than 512; give sizes that grow"),
    ("train.resize", "[[0, 512.5]]", "512.5 is a number; give one whole number of pixels"),
    ("train.max_time", "3", "3 has no unit; write 3min or 3s"),
    ("train.max_time", "soon", "soon is no time"),
    ("train.save_every", "0s", "0s is not above 0"),
    ("train.strategy", "ddp", "ddp is not there yet; today: auto or single"),
    ("log.dir", "runs/{date}", "{date} is not filled in; only {name} is"),
    ("log.dir", "'runs/}'", "} is not filled in"),
    ("log.to", "[csv, neptune]", "neptune is none of csv, jsonl, tensorboard, wandb, mlflow"),
    ("log.to", "csv", "csv is text; give a list: [csv, jsonl]"),
    ("log.to", "[csv, csv]", "csv is there twice; keep one"),
    ("log.report", "yes", "yes is text in YAML 1.2; write true or false"),
]


def value_of(recipe, key):
    for part in key.split("."):
        recipe = getattr(recipe, part)
    return recipe


def with_value(key, text):
    value = yamltext.parse(text, lambda line, column: yamltext.Place("")).root.plain()
    raw = {name: dict(section) if isinstance(section, dict) else section for name, section in MINIMAL.items()}
    section, _, last = key.rpartition(".")
    (raw.setdefault(section, {}) if section else raw)[last] = value
    return raw


@pytest.mark.parametrize(("key", "text", "value"), GOOD)
def test_values_are_read_to_what_the_program_works_with(load, key, text, value):
    """Units become numbers, lists become tuples; what an editor's schema accepts agrees."""
    found = value_of(load(overrides=[f"{key}={text}"]).recipe, key)
    assert found == value
    assert type(found) is type(value)
    VALIDATOR.validate(with_value(key, text))


@pytest.mark.parametrize(("key", "text", "message"), BAD)
def test_refused_values_are_shown_against_what_is_allowed(problems, key, text, message):
    """The message gives the value, what is wrong with it and what to write."""
    (problem,) = problems(overrides=[f"{key}={text}"])
    assert message in problem.message, problem.message


# What a JSON schema cannot say, or a validator does not ask: that 2.0 is no whole number, infinity, and how one value stands to another.
BEYOND_THE_SCHEMA = {
    ("memory.micro_batch", "2.0"),
    ("optim.lr", ".inf"),
    ("data.scale", "[5, 5]"),
    ("train.resize", "[[0.5, 512]]"),
    ("train.resize", "[[0, 512], [0, 1024]]"),
    ("train.resize", "[[0, 512], [60%, [512, 384]]]"),
}


@pytest.mark.parametrize(("key", "text"), [*((key, text) for key, text, _ in BAD), ("lr", "1"), ("optim.wieght_decay", "1")])
def test_the_editor_schema_refuses_what_the_loader_refuses(key, text):
    """An editor underlines the same faults."""
    valid = VALIDATOR.is_valid(with_value(key, text))
    assert valid == ((key, text) in BEYOND_THE_SCHEMA)


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_editor_schema_takes_every_shipped_recipe(recipe):
    """What is shipped is not underlined."""
    raw = yamltext.parse(recipe.read_text(encoding="utf-8"), lambda line, column: yamltext.Place("")).root.plain()
    VALIDATOR.validate(raw)


def test_the_editor_schema_is_valid_and_describes_every_key():
    """The schema is JSON of draft 2020-12, and each key carries a description and, unless required, a default."""
    schema = json.loads(json.dumps(recipe_json_schema()))
    jsonschema.Draft202012Validator.check_schema(schema)
    sections = [schema, *schema["$defs"].values()]
    for section in sections:
        assert section["additionalProperties"] is False
        for name, field in section["properties"].items():
            described = schema["$defs"][field["$ref"].rpartition("/")[2]] if "$ref" in field else field
            assert described.get("description"), name
            assert name in section.get("required", []) or "default" in field, name


def test_defaults_are_the_documented_ones():
    """The full recipe of the documentation equals the recipe with nothing given."""
    documented = """
version: 1
task: classify
data: {train: d, val: 0.15, test: null, image: path, label: label, split: null, group: null, classes: auto, channels: auto,
  scale: auto, region: null, fit: resize, overlap: 25%, background: white, bad_images: error, unseen: error, max_pixels: 500M,
  balance: none, augment: standard, workers: auto, cache: auto}
model: {name: m, pretrained: true, init_from: null, image_size: 1024, adapt: full, lp_ft: null, lora: null, freeze: none,
  norm: auto, drop_path: auto}
memory: {budget: auto, micro_batch: auto, spacing: auto, goal: largest, exact: close, precision: auto, channels_last: auto,
  compile: false, on_oom: replan}
optim: {name: adamw, lr: auto, weight_decay: 0.05, layer_decay: auto, schedule: cosine, warmup: 5%, clip_grad: 1.0, loss: auto,
  label_smoothing: 0.0, mixup: 0.0, cutmix: 0.0}
train: {epochs: 20, batch: 16, seed: 0, deterministic: false, ema: auto, early_stop: {patience: 5}, metric: auto, resize: null,
  max_time: null, on_divergence: rollback, keep: {best: 1, last: 1}, save_every: 10min, strategy: auto}
log: {dir: "runs/{name}", ui: auto, to: [csv, jsonl], report: true}
"""
    assert Recipe.model_validate(yaml.safe_load(documented)) == Recipe.model_validate(MINIMAL)


def test_a_recipe_does_not_change():
    """Loaded values are frozen, sections too."""
    recipe = Recipe.model_validate(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.epochs = 3


def test_a_way_to_adapt_has_its_section(load):
    """At its defaults where it is not given, the rest of it where a part is; a way that is not taken has none."""
    for adapt, given, found in (
        ("lora", [], {"lora": {"rank": 8, "alpha": 16.0}, "lp_ft": None}),
        ("lora", ["model.lora.rank=2"], {"lora": {"rank": 2, "alpha": 16.0}, "lp_ft": None}),
        ("lp_ft", ["model.lp_ft.head_epochs=3"], {"lora": None, "lp_ft": {"head_epochs": 3, "head_lr": "auto"}}),
        ("head", [], {"lora": None, "lp_ft": None}),
    ):
        model = load(overrides=[f"model.adapt={adapt}", *given]).recipe.model
        assert model.model_dump(include={"lora", "lp_ft"}) == found


def test_every_key_has_a_kind():
    """Each key is read and written by exactly one kind, and its default survives both; those of a way to adapt where it is taken."""
    recipes = {way: Recipe.model_validate({**MINIMAL, "model": {"name": "m", "adapt": way}}) for way in ("full", "lp_ft", "lora")}
    for key in keys_of():
        kind = kind_of(key)
        way = key.split(".")[1] if key.count(".") == 2 else "full"
        value = value_of(recipes.get(way, recipes["full"]), key)
        assert kind.parse(kind.write(value)) == value, key
    with pytest.raises(ValueError, match="no key"):
        kind_of("optim.nothing")
