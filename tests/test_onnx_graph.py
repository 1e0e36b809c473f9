"""An ONNX file is handed out only when onnxruntime computes what torch does, for any batch, whichever exporter made it."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch

from hiresvis import onnx_graph
from hiresvis.backbone.build import build_backbone
from hiresvis.data.contract import Contract, make_prepare
from hiresvis.data.transforms import Scale
from hiresvis.errors import HiresvisError, MissingExtra
from hiresvis.onnx_graph import Comparison, Graph, need_onnx, write_int8, write_onnx

CONTRACT = Contract(
    classes=("a", "b", "c"),
    image_size=(48, 64),
    fit="resize",
    background=(255, 255, 255),
    channels=3,
    scale=Scale(),
    mean=(0.3, 0.4, 0.5),
    std=(0.2, 0.3, 0.4),
    interpolation="bilinear",
    max_pixels=10**6,
)


@pytest.fixture(scope="module")
def graph() -> Graph:
    torch.manual_seed(0)
    backbone = build_backbone("test_resnet", num_classes=3, image_size=(48, 64), pretrained=False)
    for module in backbone.model.modules():  # statistics that a slip with training mode would show in
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return Graph(backbone.model.eval(), CONTRACT).eval()


def pixels(images: int, dtype: str = "uint8") -> torch.Tensor:
    made = torch.randint(0, 256, (images, 48, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(images))
    return made if dtype == "uint8" else made / 255


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_graph_takes_any_batch_and_normalises_by_itself(graph, tmp_path, monkeypatch, exporter, dtype):
    """Of bytes or of 0 to 1 it gives the logits of the normalised images and their scores, by either exporter."""
    monkeypatch.setattr(onnx_graph, "_EXPORTERS", {exporter: onnx_graph._EXPORTERS[exporter]})
    found = write_onnx(graph, [pixels(2, dtype), pixels(3, dtype)], tmp_path / "model.onnx", {"note": "ä"})
    assert (found.exporter, found.num_images, found.num_agreeing) == (exporter, 5, 5)
    assert 0 < found.differences["logits"] < 1e-5 < found.bounds["logits"]
    assert 0 < found.differences["scores"] < 1e-5 < found.bounds["scores"] == 1e-4
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    assert session.get_modelmeta().custom_metadata_map == {"note": "ä"}
    assert onnx.load(tmp_path / "model.onnx").opset_import[0].version == onnx_graph.OPSET
    for images in (1, 7):
        given = session.run(["logits", "scores"], {"pixels": pixels(images, dtype).numpy()})
        with torch.no_grad():
            wanted = graph.model(make_prepare(CONTRACT, torch.device("cpu"), True)(pixels(images, dtype)))
        np.testing.assert_allclose(given[0], wanted, atol=1e-5)
        np.testing.assert_allclose(given[1], wanted.softmax(1), atol=1e-5)
    other = "float32" if dtype == "uint8" else "uint8"
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument, match="Unexpected input data type"):
        session.run(None, {"pixels": pixels(1, other).numpy()})


def test_8_bits_are_compared_batch_by_batch(graph, tmp_path, monkeypatch):
    """Batches of any sizes are let go one after another, and the figures are those of all images together."""
    monkeypatch.setattr(onnx_graph, "_EXPORTERS", {"torchscript": onnx_graph._by_torchscript})
    write_onnx(graph, [pixels(2)], tmp_path / "model.onnx", {})
    sizes, alive = [1, 3, 2, 4, 1, 5], []

    def batches():
        for size in sizes:
            batch = pixels(size)
            alive.append(weakref.ref(batch))
            yield batch
            assert sum(one() is not None for one in alive) <= 2

    found = write_int8(tmp_path / "model.onnx", tmp_path / "small.onnx", batches(), CONTRACT)
    full, small = (
        np.concatenate([session.run(["scores"], {"pixels": pixels(size).numpy()})[0] for size in sizes])
        for session in (onnxruntime.InferenceSession(str(tmp_path / name)) for name in ("model.onnx", "small.onnx"))
    )
    away = np.abs(full - small)
    assert (found.num_images, found.num_changed) == (16, (full.argmax(1) != small.argmax(1)).sum())
    assert (found.largest, found.mean) == (pytest.approx(away.max()), pytest.approx(away.mean(dtype=np.float64)))
    assert found.largest > 0


def test_nothing_of_the_machine_is_in_the_file(graph, tmp_path):
    """Exporters note call stacks; no path of a source file is left."""
    write_onnx(graph, [pixels(2)], tmp_path / "model.onnx", {})
    written = (tmp_path / "model.onnx").read_bytes()
    for path in (Path(timm.__file__).parent, Path(onnx_graph.__file__).parent, Path.cwd()):
        assert str(path).encode() not in written


def wrong(graph: Graph, batch: torch.Tensor, path: Path) -> None:
    """Exports another model: one weight is off by what fp16 would make of it."""
    other = copy.deepcopy(graph)
    with torch.no_grad():
        next(other.model.parameters()).mul_(1 + 2**-8)
    onnx_graph._by_torchscript(other, batch, path)


def fails(graph: Graph, batch: torch.Tensor, path: Path) -> None:
    path.write_bytes(b"half a graph")
    raise RuntimeError("how to report it") from ValueError("an operator that is\nnot known")


@pytest.mark.parametrize("first", [wrong, fails])
def test_the_older_exporter_stands_in(graph, tmp_path, monkeypatch, first):
    """Where the newer one raises, or gives other numbers."""
    monkeypatch.setattr(onnx_graph, "_EXPORTERS", {**onnx_graph._EXPORTERS, "dynamo": first})
    assert write_onnx(graph, [pixels(2)], tmp_path / "model.onnx", {}).exporter == "torchscript"
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_graph_that_no_exporter_gets_right_is_refused(graph, tmp_path, monkeypatch):
    """With what each did: the reason of one, the difference and the bound of the other."""
    monkeypatch.setattr(onnx_graph, "_EXPORTERS", {"dynamo": fails, "torchscript": wrong})
    said = r"dynamo: ValueError, an operator that is; torchscript: logits differ by up to [\d.e-]+, above the bound of 0\.0001"
    with pytest.raises(HiresvisError, match=said):
        write_onnx(graph, [pixels(2)], tmp_path / "model.onnx", {})


@pytest.mark.parametrize("output", onnx_graph.OUTPUTS)
def test_either_output_alone_can_be_the_reason(output):
    """Each has its own scale and its own bound."""
    sound = {"logits": 1e-3, "scores": 1e-5}
    bounds = {"logits": 2e-3, "scores": 1e-4}
    assert not Comparison("dynamo", 1, sound, bounds, 1).refused
    for value in (3e-3, float("nan")):
        found = Comparison("dynamo", 1, {**sound, output: value}, bounds, 1)
        assert (found.worst, found.refused) == (output, True)


def test_outputs_that_are_no_numbers_are_refused(graph, tmp_path, monkeypatch):
    """NaN equals nothing, itself included."""
    broken = copy.deepcopy(graph)
    with torch.no_grad():
        next(broken.model.parameters()).fill_(float("nan"))
    monkeypatch.setattr(onnx_graph, "_EXPORTERS", {"torchscript": onnx_graph._by_torchscript})
    with pytest.raises(HiresvisError, match="differ by up to nan"):
        write_onnx(broken, [pixels(2)], tmp_path / "model.onnx", {})


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_weights_too_large_for_a_protobuf_lie_in_one_file_beside_it(graph, tmp_path, monkeypatch, exporter):
    """Two files, which are found wherever the folder is moved."""
    monkeypatch.setattr(onnx_graph, "_ONE_FILE_BYTES", 1000)
    monkeypatch.setattr(onnx_graph, "_EXPORTERS", {exporter: onnx_graph._EXPORTERS[exporter]})
    (tmp_path / "first").mkdir()
    write_onnx(graph, [pixels(2)], tmp_path / "first" / "model.onnx", {})
    moved = (tmp_path / "first").rename(tmp_path / "second")
    assert sorted(path.name for path in moved.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert (moved / "model.onnx").stat().st_size < 300_000 < (moved / "model.onnx.data").stat().st_size
    onnxruntime.InferenceSession(str(moved / "model.onnx")).run(None, {"pixels": pixels(1).numpy()})


def test_a_full_disk_is_not_taken_for_a_fault_of_the_model(graph, tmp_path, monkeypatch):
    """The system's errors pass as they are."""

    def full(graph, batch, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(onnx_graph, "_EXPORTERS", {"dynamo": full, "torchscript": full})
    with pytest.raises(OSError, match="No space left"):
        write_onnx(graph, [pixels(2)], tmp_path / "model.onnx", {})


def test_missing_packages_are_named_with_the_extra(monkeypatch):
    """Before anything is loaded."""
    monkeypatch.setattr(onnx_graph, "find_spec", lambda name: None if name in ("onnx", "onnxscript") else object())
    with pytest.raises(MissingExtra, match=r"--to onnx needs onnx, onnxscript: pip install 'hiresvis\[export\]'"):
        need_onnx()
