"""Recipes read from files and overrides, and how everything wrong with them is told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hiresvis.errors import RecipeError
from hiresvis.recipe import load_recipe

MINIMAL = "task: classify\ndata: {train: data/train}\nmodel: {name: resnet18}\n"


def lines(problems):
    return [(problem.place, problem.key, problem.message) for problem in problems]


def test_six_lines_are_enough(load):
    """The six-line recipe of the product loads, and all else has its default."""
    recipe = load().recipe
    assert (recipe.model.image_size, recipe.train.batch, recipe.log.dir) == ((2048, 2048), 16, "runs/lesions")
    assert (recipe.optim.name, recipe.optim.warmup, recipe.data.max_pixels) == ("adamw", 0.05, 500_000_000)
    assert (recipe.train.save_every, recipe.train.early_stop.patience, recipe.data.background) == (600.0, 5, (255, 255, 255))


def test_only_task_train_and_name_are_required(load):
    """Sections may be left out, and the run folder is named after the file."""
    loaded = load(MINIMAL)
    assert loaded.given == {"task", "data.train", "model.name"}
    assert loaded.recipe.log.dir == "runs/recipe"


def test_an_empty_section_counts_as_left_out(load):
    """A section whose keys are all commented out is an empty one."""
    assert load(MINIMAL + "optim:\n  # lr: 1e-3\n").recipe.optim.lr == "auto"


def test_unknown_key_and_value_look_as_documented(load):
    """Place, key and message stand in columns, three and two blanks apart."""
    with pytest.raises(RecipeError) as caught:
        load(MINIMAL + "optim:\n  wieght_decay: 0.1\ntrain:\n  batch:    -16\n")
    assert str(caught.value).split("\n") == [
        "recipe.yaml:5:3    optim.wieght_decay  unknown key; did you mean weight_decay?",
        "recipe.yaml:7:13   train.batch         -16 is below 1; give auto or a whole number of at least 1",
    ]


def test_every_kind_of_fault_is_told_at_once(problems):
    """Form, unknown keys, wrong kinds, ranges, features to come, rules between keys: one message each, in file order."""
    found = problems(
        "task: detect\n"
        "data: [a, b]\n"
        "model: {name: resnet18, adapt: lore, image_size: [10, 20, 30]}\n"
        "memory: {micro_batch: 32}\n"
        "optim: {lr: -1, lr: 2, weight_decay: 1e-4, warmup: 010}\n"
        "train: {batch: 16, deterministic: on, epochs: 0}\n"
        "log: {to: [csv, neptune]}\n"
        "\tx: 1\n"
    )
    # The tab makes a mapping of line 7 impossible, so only the tab is certain.
    assert ("recipe.yaml:8:1", "", "a tab; YAML is indented with spaces: replace it with two spaces") in lines(found)
    found = problems(
        "task: detect\n"
        "data: [a, b]\n"
        "model: {name: resnet18, adapt: lore, image_size: [10, 20, 30]}\n"
        "memory: {micro_batch: 32}\n"
        "optim: {lr: -1, lr: 2, weight_decay: 1e-4, warmup: 010}\n"
        "train:\n"
        "\tbatch: 16\n"
        "\tdeterministic: on\n"
        "\tepochs: 0\n"
        "log: {to: [csv, neptune]}\n"
        "extra: 1\n"
    )
    assert [(problem.place.removeprefix("recipe.yaml:"), problem.key) for problem in found] == [
        ("1:7", "task"),
        ("2:7", "data"),
        ("3:32", "model.adapt"),
        ("3:50", "model.image_size"),
        ("4:23", "memory.micro_batch"),
        ("5:13", "optim.lr"),
        ("5:17", "optim.lr"),
        ("7:1", ""),
        ("8:1", ""),
        ("8:17", "train.deterministic"),
        ("9:1", ""),
        ("9:10", "train.epochs"),
        ("10:17", "log.to[1]"),
        ("11:1", "extra"),
    ]


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing here\n", "---\n", "~\n"])
def test_an_empty_file_says_what_a_recipe_needs(problems, text):
    """An empty recipe gives one message with the least it needs."""
    (problem,) = problems(text)
    assert problem.message == "empty; a recipe needs at least task, data.train, model.name"


@pytest.mark.parametrize(("text", "kind"), [("- a\n- b\n", "a list"), ("hello\n", "text"), ("12\n", "a whole number")])
def test_something_else_than_a_mapping_is_named(problems, text, kind):
    """A list, or one value, where the sections belong is told as such."""
    (problem,) = problems(text)
    assert problem.place == "recipe.yaml:1:1"
    assert problem.message.startswith(f"{kind} where the recipe's sections belong")


@pytest.mark.parametrize("value", ["[1, 2]", "7", "text"])
def test_something_else_than_a_section_is_named(problems, value):
    """A list or a value where a section belongs is shown with the way to write it."""
    (problem,) = problems(MINIMAL + f"memory: {value}\n")
    assert (problem.place, problem.key) == ("recipe.yaml:4:9", "memory")
    assert problem.message.startswith(f"{value} is ")
    assert problem.message.endswith("not a mapping; write memory: {budget: ...}")


def test_a_missing_file_offers_the_nearest_one(load):
    """A misspelt path names the recipe that is there."""
    load()
    with pytest.raises(RecipeError, match=r"recipy\.yaml  no such file; did you mean recipe\.yaml\?"):
        load_recipe("recipy.yaml")
    with pytest.raises(RecipeError, match="no such file; give the path of a recipe"):
        load_recipe("nowhere/at/all.yaml")


def test_a_folder_is_not_a_recipe(tmp_path):
    """A folder in place of the file is told as such."""
    with pytest.raises(RecipeError, match="a folder; give the path of a recipe"):
        load_recipe(tmp_path)


def test_text_that_is_not_utf8_is_located(problems):
    """A byte outside UTF-8 gives its line and column."""
    (problem,) = problems(b"task: classify\n# caf\xe9\n")
    assert (problem.place, problem.message) == ("recipe.yaml:2:6", "byte 0xe9 is not UTF-8; save the file as UTF-8")


def test_a_byte_order_mark_is_no_part_of_the_first_key(load):
    """A file saved with a BOM loads, and its columns are those an editor shows."""
    loaded = load(b"\xef\xbb\xbf" + MINIMAL.encode())
    assert loaded.recipe.task == "classify"
    assert loaded.place("task") == "recipe.yaml:1:7"
    assert not loaded.text.startswith("\ufeff")


def test_missing_keys_are_named_with_what_to_write(problems):
    """Each required key that is missing is told, also where its whole section is."""
    assert [(problem.key, problem.message) for problem in problems("train: {epochs: 2}\n")] == [
        ("task", "missing; write task: classify"),
        ("data.train", "missing; write data: {train: data/train}"),
        ("model.name", "missing; write model: {name: convnextv2_base}"),
    ]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("data: {tran: x}", "did you mean train?"),
        ("lr: 1", "did you mean optim.lr?"),
        ("memory: {lr: 1}", "did you mean optim.lr?"),
        ("epoch: 1", "did you mean train.epochs?"),
        ("optim.lr: 1", "dotted keys are for the command line; nest the key in its section"),
        ("qqq: 1", "a recipe has version, task, data, model, memory, optim, train, log"),
        ("train: {keep: {zzzz: 1}}", "train.keep has best, last"),
        ("1: 2", "a recipe has version"),
    ],
)
def test_an_unknown_key_is_met_with_the_likely_one(problems, key, hint):
    """A typo, a key of another section, a dotted key and nonsense each get the hint that helps."""
    assert any(problem.message.startswith(f"unknown key; {hint}") for problem in problems(key + "\n"))


def test_a_value_refused_for_its_form_is_not_called_missing(problems):
    """An alias for a required value gives one message, not a second about a missing key."""
    found = problems("task: &t classify\ndata: {train: *t}\nmodel: {name: resnet18}\n")
    assert [problem.key for problem in found] == ["task", "data.train"]


def test_overrides_follow_the_scalar_rules_of_the_file(load):
    """Override values are YAML 1.2 too: numbers, words, lists and mappings."""
    recipe = load(
        overrides=["optim.lr=1e-4", "train.epochs=010", "log.ui=off", "model.image_size=[720, 1280]", "memory.spacing={stage0: 2}"]
    ).recipe
    assert (recipe.optim.lr, recipe.train.epochs, recipe.log.ui) == (1e-4, 10, "off")
    assert (recipe.model.image_size, recipe.memory.spacing) == ((720, 1280), {"stage0": 2})


def test_overrides_reach_into_nested_and_empty_sections(load):
    """An override may name a key of a section that the file leaves out, or leaves empty."""
    recipe = load(MINIMAL + "train:\n  early_stop:\n", ["train.early_stop.patience=9", "memory.budget=22GiB"]).recipe
    assert (recipe.train.early_stop.patience, recipe.memory.budget) == (9, 22 * 2**30)


@pytest.mark.parametrize(
    ("override", "key", "part"),
    [
        ("optim.lr=-1", "optim.lr", "-1 is not above 0"),
        ("optim.wieght_decay=1", "optim.wieght_decay", "unknown key; did you mean weight_decay?"),
        ("lr=1", "lr", "did you mean optim.lr?"),
        ("optim.lr", "", "not key=value; write optim.lr=1e-4"),
        ("=3", "", "not key=value"),
        ("optim.lr=", "optim.lr", "no value after =; write optim.lr=null for none"),
        ("optim={lr: 1}", "optim", "a whole section; override its keys one by one: optim.name=..."),
        ("model.name.size=2", "model.name.size", "model.name is convnextv2_base, which has no keys"),
        ("data.val=[1", "data.val", "not YAML"),
        ("data.val=*x", "data.val", "an alias (*x) is not allowed"),
        ("optim..lr=1", "optim..lr", "unknown key"),
    ],
)
def test_a_faulty_override_is_located_by_its_number(problems, override, key, part):
    """A fault in an override names which one it is, and the key."""
    (problem,) = problems(overrides=["train.seed=1", override])
    assert problem.place == f"override 2 ({override})"
    assert part in problem.message, problem
    assert problem.key.startswith(key.split("..")[0])


def test_an_override_given_twice_is_refused(problems):
    """Of two overrides of one key none wins in silence."""
    (problem,) = problems(overrides=["train.seed=1", "train.seed=2"])
    assert str(problem) == "override 2 (train.seed=2)  train.seed  given twice, first as train.seed=1; keep one"


def test_an_override_mends_a_fault_of_the_file(load):
    """The overridden value of the file is not judged."""
    assert load(MINIMAL + "optim: {lr: -1}\n", ["optim.lr=0.1"]).recipe.optim.lr == 0.1


def test_relative_paths_start_at_the_recipe_and_those_of_overrides_here(tmp_path, monkeypatch):
    """`resolve_path` starts at the recipe's folder; an override's path at the current folder."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "a.yaml").write_text(MINIMAL)
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe("recipes/a.yaml", ["data.val=other/val", "log.dir=out/{name}", "model.pretrained=package:x"])
    assert loaded.recipe.data.train == "data/train"
    assert loaded.resolve_path(loaded.recipe.data.train) == tmp_path / "recipes/data/train"
    assert loaded.resolve_path(loaded.recipe.data.val) == tmp_path / "other/val"
    assert loaded.run_dir == tmp_path / "out/a"
    assert loaded.recipe.model.pretrained == "package:x"
    assert loaded.resolve_path("~/x") == Path(os.path.expanduser("~/x"))
    assert loaded.resolve_path("../x") == tmp_path / "x"


def test_places_are_kept_for_later_findings(load):
    """Checks beyond the recipe can name the value's place, or its section's where it is a default."""
    loaded = load(overrides=["optim.lr=1e-4"])
    assert loaded.place("model.image_size") == "recipe.yaml:3:44"
    assert loaded.place("optim.lr") == "override 1 (optim.lr=1e-4)"
    assert loaded.place("model.drop_path") == "recipe.yaml:3:8"
    assert loaded.place("train.keep.best") == "recipe.yaml:5:8"
    assert load(MINIMAL).place("optim.lr") == "recipe.yaml"
    message = "1000 is not a multiple of 32; 992 and 1024 are"
    assert str(RecipeError([loaded.problem("model.image_size", message)])) == f"recipe.yaml:3:44   model.image_size  {message}"


@pytest.mark.parametrize(
    ("text", "key", "part"),
    [
        ("data: {train: d, split: fold}", "data.split", "data.train (d) is no .csv"),
        ("data: {train: d, group: who}", "data.group", "is no .csv"),
        ("data: {train: d.csv, image: x, label: x}", "data.label", "also the column of data.image"),
        ("data: {train: d.csv, split: s, val: v}", "data.val", "beside data.split"),
        ("data: {train: d, val: d}", "data.val", "is data.train as well"),
        ("data: {train: d, region: [x, y, w, h]}", "data.region", "x, y, w, h names a manifest column, and data.train (d) is no .csv"),
        ("data: {train: d, root: /data}", "data.root", "/data bounds the paths of manifests, and data.train (d) is no .csv"),
        ("data: {train: d.csv, region: [x, y, w, label]}", "data.region", "label is also the column of data.label"),
        ("data: {train: d, overlap: 12.5%}", "data.overlap", "12.5% beside data.fit: resize"),
        ("train: {batch: 4}\nmemory: {micro_batch: 5}", "memory.micro_batch", "5 is above train.batch, 4"),
        ("model: {name: m, adapt: head, freeze: stem}", "model.freeze", "beside adapt: head"),
        ("model: {name: m, lora: {rank: 4}}", "model.lora", "given beside adapt: full; delete it, or set adapt: lora"),
        (
            "model: {name: m, adapt: lora, lp_ft: {head_epochs: 1}}",
            "model.lp_ft",
            "given beside adapt: lora; delete it, or set adapt: lp_ft",
        ),
        ("model: {name: m, adapt: lp_ft}\ntrain: {epochs: 1}", "train.epochs", "1 beside model.adapt: lp_ft, which has two phases"),
        ("model: {name: m, adapt: lp_ft, lp_ft: {head_epochs: 3}}\ntrain: {epochs: 3}", "model.lp_ft.head_epochs", "give at most 2"),
        ("data: {train: d.tsv, label: [x, y]}", "data.label", "an image of task classify has one class; give one column"),
        ("task: multilabel\ndata: {train: d.parquet, label: [x, path]}", "data.label", "path is also the column of data.image"),
        ("task: multilabel\ndata: {train: d}", "data.train", "d is no .csv, .tsv or .parquet; class folders give one class an image"),
        ("task: regress\ndata: {train: d.csv, val: v, label: x}", "data.val", "v is no .csv, .tsv or .parquet"),
        ("task: regress\ndata: {train: d.csv, classes: [a, b]}", "data.classes", "has no classes; delete this key"),
        ("task: regress\ndata: {train: d.csv}\noptim: {label_smoothing: 0.1}", "optim.label_smoothing", "0.1 spreads a label"),
        ("optim: {mixup: 0.2}\ntrain: {batch: 1}", "optim.mixup", "0.2 mixes an image with another of its batch, and train.batch is 1"),
        ("optim: {cutmix: 1.0}\ntrain: {batch: 1}", "optim.cutmix", "give a larger batch, or 0 here"),
        ("task: regress\ndata: {train: d.csv}\noptim: {cutmix: 1.0}", "optim.cutmix", "1 shares out labels by area"),
        (
            "optim: {loss: mse}",
            "optim.loss",
            "mse belongs to task regress, and the task is classify; write auto, cross_entropy, focal or bce",
        ),
        ("task: regress\ndata: {train: d.csv}\noptim: {loss: bce}", "optim.loss", "write auto, huber, mse or l1"),
        ("task: segment\ndata: {train: d, fit: crop}", "data.fit", "write tile, which trains on the same windows"),
        ("task: segment\ndata: {train: d.csv, region: [x, y, w, h]}", "data.region", "is not there yet for task segment"),
        ("task: segment\ndata: {train: d.csv, label: [x, y]}", "data.label", "an image of task segment has one mask"),
        ('task: segment\ndata: {train: d, classes: ["0", "255"]}', "data.ignore_index", "255 is a class of data.classes; write null"),
        ("task: segment\ndata: {train: d}\noptim: {loss: dice, label_smoothing: 0.1}", "optim.label_smoothing", "optim.loss is dice"),
        ("task: segment\ndata: {train: d}\noptim: {mixup: 0.2}", "optim.mixup", "0.2 mixes labels of whole images"),
        ("task: segment\ndata: {train: d}\ntrain: {metric: auroc}", "train.metric", "write auto, miou, dice or pixel_accuracy"),
        ("data: {train: d, ignore_index: 0}", "data.ignore_index", "only masks have ignored pixels, and the task is classify"),
        (
            "train: {metric: mae}",
            "train.metric",
            "the task is classify; write auto, accuracy, balanced_accuracy, macro_f1, auroc, map or kappa",
        ),
        ("task: regress\ndata: {train: d.csv, balance: weights}", "data.balance", "weights is not for task regress; write none"),
        (
            "task: multilabel\ndata: {train: d.csv, balance: sampler}",
            "data.balance",
            "sampler is not for task multilabel; write none, weights or focal",
        ),
        (
            "data: {train: d.csv, balance: focal}\noptim: {loss: bce}",
            "optim.loss",
            "bce beside data.balance: focal, which is a loss itself",
        ),
        ("task: multilabel\ndata: {train: d.csv}\ntrain: {metric: kappa}", "train.metric", "write auto, map, auroc, macro_f1 or accuracy"),
        ("task: regress\ndata: {train: d.csv}\ntrain: {metric: auroc}", "train.metric", "belongs to task classify or multilabel"),
        ("train: {resize: [[0, 512], [50%, 768]]}", "train.resize", "ends at 768, and model.image_size is 1024"),
        ("data: {train: d, fit: tile}\ntrain: {resize: [[0, 1024]]}", "train.resize", "data.fit: tile takes windows of full resolution"),
        ("task: segment\ndata: {train: d}\ntrain: {resize: [[0, 1024]]}", "train.resize", "is not there yet for task segment"),
        ("train: {epochs: 2, resize: [[0, 512], [80%, 1024]]}", "train.resize", "begins its sizes in epochs [1, 3] of 2"),
    ],
)
def test_keys_that_contradict_each_other_are_told(problems, text, key, part):
    """A rule between keys is told at the key to change, with the other key's value."""
    base = {"task": "task: classify", "data": "data: {train: d}", "model": "model: {name: m}"}
    given = {line.split(":")[0]: line for line in text.split("\n")}
    (problem,) = problems("\n".join({**base, **given}.values()) + "\n")
    assert problem.key == key
    assert part in problem.message, problem


def test_windows_and_regions_are_read_to_what_the_program_works_with(load):
    """A share by either spelling, four columns; the share by itself, as a resolved recipe writes it, contradicts nothing."""
    text = "task: classify\ndata: {train: d.csv, fit: tile, overlap: OVERLAP, region: [x, y, w, h]}\nmodel: {name: m}\n"
    for written, share in (("12.5%", 0.125), ("0", 0.0), ("0.5", 0.5)):
        data = load(text.replace("OVERLAP", written)).recipe.data
        assert (data.fit, data.overlap, data.region) == ("tile", share, ("x", "y", "w", "h"))
    assert load("task: classify\ndata: {train: d, fit: crop, overlap: 25%}\nmodel: {name: m}\n").recipe.data.fit == "crop"


@pytest.mark.parametrize("table", ["d.csv", "d.TSV", "d.parquet"])
def test_columns_may_be_named_for_every_kind_of_manifest(load, table):
    """A list of columns is kept in its order."""
    loaded = load(f"task: regress\ndata: {{train: {table}, label: [y, x], split: fold}}\nmodel: {{name: m}}\n")
    assert loaded.recipe.data.label == ("y", "x")


def test_rules_between_keys_say_nothing_about_a_refused_key(problems):
    """A key that is wrong by itself is not also called contradictory."""
    found = problems("task: classify\ndata: {train: 3, split: fold}\nmodel: {name: m}\ntrain: {batch: 0}\nmemory: {micro_batch: 99}\n")
    assert [problem.key for problem in found] == ["data.train", "train.batch"]
