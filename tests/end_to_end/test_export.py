"""export through the command line: what is written, what it is compared with, and what is refused."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hiresvis import export as export_module
from hiresvis import onnx_graph
from hiresvis.card import model_card
from hiresvis.data.contract import Contract, load_image, make_prepare
from hiresvis.data.loader import EvalLoader
from hiresvis.run import RunDirectory, read_events
from hiresvis.run.events import Evaluated, RunInterrupted
from hiresvis.trained import open_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trained(trained, tmp_path_factory, make_workshop):
    """A copy of the finished run: exports go into it."""
    work = make_workshop(tmp_path_factory.mktemp("exported"), trained.data)
    shutil.copytree(trained.path(""), work.path(""))
    return work


@pytest.fixture
def older_exporter(monkeypatch):
    """Ten times quicker where the exporter is not what is tested."""
    monkeypatch.setattr(onnx_graph, "_EXPORTERS", {"torchscript": onnx_graph._by_torchscript})


def readme_lines() -> str:
    """The five lines that build the model again."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if "model.safetensors" in block]
    return block


def test_the_five_lines_of_the_readme_build_the_model_again(trained, tmp_path):
    """Without hiresvis in the process; with the contract's mean and std it gives the scores that predict writes."""
    done = trained("export", trained.path(""), "--to", "safetensors", "--out", tmp_path / "exported")
    assert done.code == 0, done.err
    assert "equal bit for bit" in done.out
    assert len([line for line in readme_lines().splitlines() if line]) == 5
    contract = Contract.read(tmp_path / "exported" / "contract.json")
    image = sorted((trained.data / "test").rglob("*.jpg"))[0]
    pixels = torch.from_numpy(load_image(image, contract.preprocess(), max_pixels=contract.max_pixels))[None]
    np.save(tmp_path / "input.npy", make_prepare(contract, torch.device("cpu"), False)(pixels).numpy())
    tail = "import numpy, sys, torch\nassert 'hiresvis' not in sys.modules\nx = torch.from_numpy(numpy.load('input.npy'))\n"
    code = f"{readme_lines()}\n{tail}print(model(x).softmax(1).tolist()[0])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = csv.DictReader(trained("predict", trained.path(""), image).out.splitlines())
    scores = [float(row[f"score_{name}"]) for name in contract.classes]
    assert json.loads(done.stdout) == pytest.approx(scores, abs=1e-6)


def test_timm_loads_the_folder_by_its_name(trained, tmp_path):
    """`local-dir:`, as the model card has it: the same bits as the run's model, and the contract's size, mean and std in timm's words."""
    assert trained("export", trained.path(""), "--to", "safetensors", "--out", tmp_path / "exported").code == 0
    model = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True).eval()
    own = open_run(trained.path(""))
    images = torch.rand(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(images), own.backbone.model(images))
    wanted = timm.data.resolve_model_data_config(model)
    assert (wanted["input_size"], tuple(wanted["mean"]), tuple(wanted["std"])) == ((3, 96, 96), own.contract.mean, own.contract.std)


def test_the_readme_tells_on_how_many_images_a_graph_is_run():
    """As many as are compared."""
    (told,) = re.findall(r"onnxruntime runs it on (\d+) images of the validation data", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert int(told) == export_module._COMPARED


def test_the_model_card_is_read_by_the_hub_and_by_people(trained, tmp_path):
    """The hub's own reader finds library, task and every result; below stand the classes, the way to load it and each interval."""
    assert trained("export", trained.path(""), "--to", "safetensors", "--out", tmp_path / "exported").code == 0
    card = ModelCard.load(tmp_path / "exported" / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag, card.data.license) == ("timm", "image-classification", None)
    results = trained.events("run_finished")[-1]["results"]
    found = {(result.dataset_split, result.metric_type): result.metric_value for result in card.data.eval_results}
    for split in ("val", "test"):
        assert found[split, "accuracy"] == results[split]["accuracy"]
        low, high = results[split]["intervals"]["accuracy"]
        assert f"{results[split]['accuracy']:.4g} ({low:.3f}-{high:.3f})" in card.text
    assert "in this order: `defect`, `ok`" in card.text
    assert "local-dir:FOLDER" in card.text
    assert f"{results['test']['images']} images are few" in card.text
    _, code = re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL)
    assert code == readme_lines().replace("exported/", "")


def noted(run: Path, epoch: int, value: float) -> None:
    """The best weights as those of another epoch."""
    path = run / "weights" / "best.safetensors"
    save_file(load_file(path), path, metadata={"epoch": str(epoch), "metric": "accuracy", "value": repr(value)})


def test_the_card_of_a_run_that_went_on_tells_no_earlier_weights_results(trained, tmp_path):
    """Ended, gone on, a new best, stopped: the figures are of the validation that chose the weights that are exported, and nothing else."""
    run = Path(shutil.copytree(trained.path(""), tmp_path / "run"))
    ended = trained.events("run_finished")[-1]
    folder, opened = RunDirectory.open(run), open_run(run)
    assert f"the weights are of epoch {ended['best_epoch']}" in model_card(run, opened)
    folder.record(replace(next(e for e in read_events(folder.events) if e.kind == "run_started"), resumed_from_epoch=3))
    unfitted = replace(opened, contract=opened.contract.unfitted)
    for epoch, value in ((4, 0.8125), (5, 0.5)):
        said = {"loss": 0.25 * epoch, "metrics": {"accuracy": value}, "metric": "accuracy", "value": value}
        folder.record(Evaluated(epoch=epoch, split="val", is_best=epoch == 4, best_value=0.8125, best_epoch=4, **said))
    folder.record(RunInterrupted(signal="SIGINT", epoch=5, step=1, resume_command=""))
    noted(run, 4, 0.8125)
    card = ModelCard(model_card(run, unfitted))
    assert {(one.dataset_split, one.metric_type, one.metric_value) for one in card.data.eval_results} == {("val", "accuracy", 0.8125)}
    assert "the best weights so far, of epoch 4\n" in card.text
    assert "| accuracy | 0.8125 |" in card.text
    assert "The run has not ended: this is the validation in training that chose the weights." in card.text
    for text in ("In brackets", "intervals above", "calibration error", "temperature", f"epoch {ended['best_epoch']}\n"):
        assert text not in card.text
    noted(run, 6, 0.9)  # stopped between the weights and their event
    text = model_card(run, unfitted)
    assert "None: the run has not ended." in text
    assert "the best weights so far\n" in text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"temperature": 1.5}, "which chose the epoch and the temperature\n"),
        ({"temperature": 1.0}, "which chose the epoch\n"),
        ({"task": "multilabel", "thresholds": (0.3, 0.6)}, "which chose the epoch and the thresholds\n"),
        ({"task": "multilabel", "thresholds": ()}, "which chose the epoch\n"),
        ({"task": "regress", "target_mean": (0.0, 0.0), "target_std": (1.0, 1.0)}, "which chose the epoch\n"),
    ],
)
def test_the_card_says_what_validation_has_chosen(trained, changed, said):
    """By the task, and by what was fitted."""
    opened = open_run(trained.path(""))
    contract = replace(opened.contract, **{"temperature": 1.0, **changed})
    text = model_card(trained.path(""), replace(opened, contract=contract))
    assert said in text
    assert ("temperature" in text) is (contract.temperature != 1)


def test_the_weights_file_alone_tells_how_to_use_it(trained):
    """The default place is in the run; the file can be read by others than its owner, and its header has all of both JSON files."""
    assert trained("export", trained.path(""), "--to", "safetensors").code == 0
    folder = trained.path("export/safetensors")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "contract.json", "model.safetensors"]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["config"]) == json.loads((folder / "config.json").read_text())
    assert json.loads(metadata["contract"]) == json.loads((folder / "contract.json").read_text()) == trained.read("contract.json")
    exported, best = load_file(folder / "model.safetensors"), load_file(trained.path("weights/best.safetensors"))
    assert exported.keys() == best.keys()
    assert all(torch.equal(exported[name], best[name]) for name in best)


def test_what_is_written_is_told_as_text_and_as_json(trained, tmp_path):
    """Input, outputs, and what was compared, on bytes of the run's own validation images."""
    done = trained("export", trained.path(""), "--to", "onnx", "--out", tmp_path / "a")
    assert done.code == 0, done.err
    lines = dict(line.split(maxsplit=1) for line in done.out.splitlines())
    assert lines["input"] == "pixels (batch, 96, 96, 3) uint8 (all 8 images of val have 8 bits); normalised by the graph"
    assert lines["graph"] == "opset 18, by torch's dynamo exporter"
    assert re.fullmatch(
        r"with torch .* on 8 images of val: logits differ by up to \S+ \(bound 0\.0001\), same class on 8", lines["compared"]
    )
    found = trained("export", trained.path(""), "--to", "onnx", "--out", tmp_path / "b", "--json").json
    assert found["files"] == {name: (tmp_path / "a" / name).stat().st_size for name in ("contract.json", "model.onnx")}
    assert (found["compared"]["images"], found["compared"]["source"]) == (8, "val")
    assert (tmp_path / "a" / "model.onnx").read_bytes() == (tmp_path / "b" / "model.onnx").read_bytes()


def test_a_plan_and_half_precision_are_no_part_of_an_export(workshop, older_exporter, tmp_path):
    """A run that recomputed every block in bf16: each convolution once in the graph, all numbers fp32."""
    workshop.fit("memory.spacing=1", "memory.precision=bf16", "train.epochs=1", "model.norm=frozen")
    assert workshop.read("plan.json")["recompute_fraction"] > 0
    done = workshop("export", workshop.path(""), "--to", "onnx", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    model = open_run(workshop.path("")).backbone.model
    wanted = sum(isinstance(module, torch.nn.Conv2d) for module in model.modules())
    assert sum(node.op_type == "Conv" for node in graph.node) == wanted
    assert {tensor.data_type for tensor in graph.initializer if len(tensor.dims) > 1} == {onnx.TensorProto.FLOAT}
    assert all(value.dtype in (torch.float32, torch.int64) for value in load_file(workshop.path("weights/best.safetensors")).values())


def test_what_is_compared_was_held_out_even_where_the_source_has_grown(workshop, older_exporter, monkeypatch, tmp_path):
    """A draw anew would take other images for validation, training's among them."""
    paths = sorted(workshop.data.glob("train/*/*.png"))
    table = workshop.folder / "train.csv"
    table.write_text("path,label\n" + "".join(f"{path},{path.parent.name}\n" for path in paths))
    workshop.fit(f"data.train={table}", "data.root=/", "data.val=0.25", "data.test=null", "train.epochs=1", "train.seed=3")
    held = workshop.read("split.json")["val"]
    with table.open("a") as rows:
        for number, path in enumerate(paths * 3):
            copied = shutil.copy(path, tmp_path / f"{number}.png")
            rows.write(f"{copied},{path.parent.name}\n")
    compared: list[str] = []

    class Loader(EvalLoader):
        def __init__(self, samples, *given, **named):
            compared.extend(sample.name for sample in samples)
            super().__init__(samples, *given, **named)

    monkeypatch.setattr(export_module, "EvalLoader", Loader)
    done = workshop("export", workshop.path(""), "--to", "onnx", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert sorted(compared) == sorted(held)


def test_a_range_of_numbers_makes_the_input_float(trained, older_exporter, tmp_path):
    """0 to 1 in the graph, whatever the files hold; bytes are refused as an error of the command line."""
    run = shutil.copytree(trained.path(""), tmp_path / "run", ignore=shutil.ignore_patterns("export"))
    contract = {**trained.read("contract.json"), "scale": {"kind": "range", "low": 3.5, "high": 200.25}}
    (run / "contract.json").write_text(json.dumps(contract))
    refused = trained("export", run, "--to", "onnx", "--pixels", "uint8")
    assert refused.code == 2
    assert "--pixels uint8: this run's images have a number range, 3.5 to 200.25, which becomes 0 to 1; use float32" in refused.err
    done = trained("export", run, "--to", "onnx", "--json")
    assert done.code == 0, done.err
    assert done.json["input"]["dtype"] == "float32"
    assert done.json["compared"]["images"] == 8


def test_the_input_can_be_chosen(trained, older_exporter, tmp_path):
    """0 to 1 for bytes too, for whoever has 16-bit images to come."""
    done = trained("export", trained.path(""), "--to", "onnx", "--out", tmp_path / "out", "--pixels", "float32", "--json")
    assert done.json["input"] == {"name": "pixels", "shape": ["batch", 96, 96, 3], "dtype": "float32", "why": "given"}


def test_data_that_is_gone_is_told_and_random_pixels_are_compared(trained, older_exporter, tmp_path):
    """Whether the folder is missing or every file in it is broken."""
    run = shutil.copytree(trained.path(""), tmp_path / "run", ignore=shutil.ignore_patterns("export"))
    data = shutil.copytree(trained.data, tmp_path / "data")
    resolved = (run / "recipe.resolved.yaml").read_text()
    (run / "recipe.resolved.yaml").write_text(resolved.replace(str(trained.data), str(data)))
    for path in (data / "val").rglob("*.jpg"):
        path.write_bytes(b"")
    done = trained("export", run, "--to", "onnx", "--json")
    assert done.code == 0, done.err
    assert "no image of val can be read" in done.err
    assert done.json["compared"]["source"] == "random pixels"
    shutil.rmtree(data)
    done = trained("export", run, "--to", "safetensors", "--json")
    assert done.code == 0, done.err
    assert "the run's validation images cannot be had" in done.err
    assert done.json["compared"] == {"with": "the run's model", "images": 2, "source": "random pixels"}


def test_a_graph_that_differs_leaves_the_former_export_as_it_was(trained, older_exporter, monkeypatch, tmp_path):
    """Exit 1 with the difference, and no file under a new name either."""
    out = tmp_path / "out"
    assert trained("export", trained.path(""), "--to", "onnx", "--out", out).code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def wrong(graph, batch, path):
        with torch.no_grad():
            graph.model.fc.bias.add_(0.5)
            onnx_graph._by_torchscript(graph, batch, path)
            graph.model.fc.bias.sub_(0.5)

    monkeypatch.setattr(onnx_graph, "_EXPORTERS", {"torchscript": wrong})
    for arguments in (("--out", out, "--force"), ("--out", tmp_path / "new" / "out")):
        done = trained("export", trained.path(""), "--to", "onnx", *arguments)
        assert (done.code, done.out) == (1, "")
        assert "logits differ by up to 0.5, above the bound of 0.0001" in done.err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_that_is_there_is_refused_before_anything_is_loaded(trained, older_exporter, tmp_path):
    """Exit 6 with both ways on; --force replaces it."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "contract.json").write_text("{}")
    arguments = (trained.path(""), "--to", "onnx", "--out", tmp_path / "out")
    done = trained("export", *arguments)
    assert (done.code, done.out) == (6, "")
    assert "holds an export already; give another folder to --out, or --force to replace it" in done.err
    assert trained("export", *arguments, "--force").code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["contract.json", "model.onnx"]


def test_without_the_extra_the_way_to_get_it_is_named(trained, monkeypatch):
    """Exit 6; weights for timm need nothing more."""
    monkeypatch.setattr(onnx_graph, "find_spec", lambda name: None)
    done = trained("export", trained.path(""), "--to", "onnx")
    assert (done.code, done.out) == (6, "")
    assert done.err == "--to onnx needs onnx, onnxruntime, onnxscript: pip install 'hiresvis[export]'\n"
    assert trained("export", trained.path(""), "--to", "safetensors", "--force").code == 0


def test_no_run_and_a_run_without_weights_are_told(trained, tmp_path):
    """Exit 6, and nothing at the place that was asked for."""
    assert "no such folder" in trained("export", tmp_path / "nowhere", "--to", "onnx").err
    run = shutil.copytree(trained.path(""), tmp_path / "run", ignore=shutil.ignore_patterns("best.safetensors"))
    done = trained("export", run, "--to", "safetensors", "--out", tmp_path / "out")
    assert done.code == 6
    assert "no best weights yet" in done.err
    assert not (tmp_path / "out").exists()


def test_a_graph_with_the_resizing_in_it_gives_what_predict_gives(trained, older_exporter, tmp_path):
    """Whole files decoded by Pillow, 256 px, straight into onnxruntime: predict's scores but for roundings, and the report says how far."""
    done = trained("export", trained.path(""), "--to", "onnx", "--out", tmp_path / "out", "--with-preprocessing", "--int8", "--json")
    assert done.code == 0, done.err
    assert done.json["input"]["shape"] == ["batch", "height", "width", 3]
    told = done.json["preprocessing"]
    assert (told["images"], told["same_class"]) == (8, 8)
    assert told["largest_level"] <= 1
    assert told["share"] < 0.05
    images = sorted((trained.data / "test").rglob("*.jpg"))[:3]
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    rows = list(csv.DictReader(trained("predict", trained.path(""), *images).out.splitlines()))
    for image, row in zip(images, rows, strict=True):
        with Image.open(image) as opened:
            (scores,) = session.run(["scores"], {"pixels": np.asarray(opened.convert("RGB"))[None]})
        wanted = [float(row[f"score_{name}"]) for name in done.json["classes"]]
        assert scores[0] == pytest.approx(wanted, abs=max(0.02, 2 * told["scores"]))
    small = done.json["int8"]
    assert done.json["compared"]["images"] == small["images"] == 8
    assert 0 <= small["changed"] <= 8
    assert 0 < small["mean"] <= small["largest"] < 1
    assert done.json["files"]["model.int8.onnx"] < done.json["files"]["model.onnx"]
    assert onnxruntime.InferenceSession(str(tmp_path / "out" / "model.int8.onnx")).get_inputs()[0].name == "pixels"


@pytest.mark.parametrize("option", ["--with-preprocessing", "--int8"])
def test_weights_for_timm_are_no_graph(trained, option):
    """Exit 2 with the way on."""
    done = trained("export", trained.path(""), "--to", "safetensors", option)
    assert (done.code, done.out) == (2, "")
    assert "give --to onnx" in done.err


def test_windows_are_not_resized_by_a_graph(trained, tmp_path):
    """Exit 2, and nothing is written."""
    run = shutil.copytree(trained.path(""), tmp_path / "run", ignore=shutil.ignore_patterns("export"))
    (run / "contract.json").write_text(json.dumps({**trained.read("contract.json"), "fit": "tile"}))
    done = trained("export", run, "--to", "onnx", "--with-preprocessing", "--out", tmp_path / "out")
    assert done.code == 2
    assert "reads images in windows (data.fit: tile)" in done.err
    assert not (tmp_path / "out").exists()
