"""A run's model as an ONNX graph, and the graph held against the model it was made from.

The graph begins where preprocessing ends, and normalises by itself: `pixels` (batch, height, width, channels), bytes or 0 to 1, so
that nobody can normalise wrongly. It gives `logits` and `scores`. torch's dynamo exporter is tried first, its older one where that
fails or gives other numbers; onnxruntime then runs the file itself on real images.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from hiresvis.data.contract import Contract, make_prepare
from hiresvis.errors import HiresvisError, MissingExtra, first_line
from hiresvis.onnx_pixels import FitPixels
from hiresvis.train.metrics import THRESHOLD
from hiresvis.trained import scores

OPSET = 18  # what dynamo's translations are written for; onnxruntime 1.14 and later read it
INPUT, OUTPUTS = "pixels", ("logits", "scores")
BOUND = 1e-4  # of an output's largest value, or of 1: rounding gives some 1e-6, a layer done wrongly far more
_ONE_FILE_BYTES = 1 << 30  # a protobuf ends at 2 GiB; weights above this lie in a file beside it
_NEEDED = ("onnx", "onnxruntime", "onnxscript")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The graph in onnxruntime against the model in torch, both fp32 on the CPU.

    Attributes:
        exporter: which of torch's made the graph.
        num_images: compared, in batches and one alone.
        differences: by output, the largest.
        bounds: by output, above which the graph is refused.
        num_agreeing: images of which both say the same: the class, or all classes; values are held by their bound alone.
    """

    exporter: str
    num_images: int
    differences: Mapping[str, float]
    bounds: Mapping[str, float]
    num_agreeing: int

    @property
    def worst(self) -> str:
        """The output that comes nearest to its bound, or has gone beyond it; one with a NaN first."""
        return max(OUTPUTS, key=lambda name: np.nan_to_num(self.differences[name] / self.bounds[name], nan=np.inf))

    @property
    def refused(self) -> bool:
        """Whether any output is out of its bound, as a NaN always is."""
        return not self.differences[self.worst] <= self.bounds[self.worst]


class Graph(nn.Module):
    """Pixels as preprocessing leaves them, (batch, height, width, channels), to logits and scores (batch, outputs).

    Args:
        model: in eval mode, on the CPU, fp32.
        contract: its mean and std, and how outputs are read.
        fits: the graph resizes by itself: it takes bytes of any height and width, whole and upright.
    """

    def __init__(self, model: nn.Module, contract: Contract, *, fits: bool = False) -> None:
        super().__init__()
        self.model, self.contract = model, contract
        self.fit = FitPixels(contract) if fits else None
        self.dynamic = {0: "batch", 1: "height", 2: "width"} if fits else {0: "batch"}
        self._prepare = make_prepare(contract, torch.device("cpu"), channels_last=False)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        fitted = pixels if self.fit is None else self.fit(pixels) / 255
        logits = self.model(self._prepare(fitted))
        return logits, scores(logits, self.contract).to(logits.dtype)


def need_onnx() -> None:
    """Refuses at once what would fail after the model is loaded.

    Raises:
        MissingExtra: a package is not installed.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"--to onnx needs {', '.join(missing)}: pip install 'hiresvis[export]'")


def write_onnx(graph: Graph, batches: Sequence[Tensor], path: Path, metadata: Mapping[str, str]) -> Comparison:
    """Writes the graph and compares it.

    Args:
        graph: in eval mode.
        batches: of pixels, each (b, h, w, c) of one dtype, which becomes the input's; the first has two images or more.
        path: of the file to write; weights of more than 1 GiB go into one beside it, `<name>.data`.
        metadata: goes into the file as text.

    Raises:
        HiresvisError: no exporter gives a graph with the model's numbers; says what each did. `path` is then not to be used.
    """
    failures = []
    for exporter, write in _EXPORTERS.items():
        made = path.parent / exporter  # a folder of its own: the older exporter writes large weights as a file a tensor
        made.mkdir()
        try:
            with _quiet(), torch.no_grad():
                write(graph, batches[0], made / path.name)
            _rewrite(made / path.name, path, metadata, apart=_num_bytes(graph) > _ONE_FILE_BYTES)
            found = compare(graph, batches, path, exporter)
        except (OSError, MemoryError):  # the machine, not the model
            raise
        except Exception as error:  # exporters and runtime raise anything for a model that they do not take
            failures.append(f"{exporter}: {_root(error)}")
            continue
        finally:
            shutil.rmtree(made)
        if not found.refused:
            return found
        name = found.worst
        failures.append(f"{exporter}: {name} differ by up to {found.differences[name]:.3g}, above the bound of {found.bounds[name]:.3g}")
    raise HiresvisError(
        f"no ONNX graph of this model computes what torch {torch.__version__} does; nothing is written. {'; '.join(failures)}. "
        "--to safetensors hands on the same weights for timm"
    )


def compare(graph: Graph, batches: Sequence[Tensor], path: Path, exporter: str) -> Comparison:
    """Every batch whole, and the first image by itself, through the file and through the model."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    differences, largest, num_agreeing = dict.fromkeys(OUTPUTS, 0.0), dict.fromkeys(OUTPUTS, 1.0), 0
    for position, pixels in enumerate((*batches, batches[0][:1])):
        with torch.no_grad():
            wanted = [output.numpy() for output in graph(pixels)]
        given = session.run(list(OUTPUTS), {INPUT: pixels.numpy()})
        for name, one, other in zip(OUTPUTS, given, wanted, strict=True):
            # NumPy's maximum, unlike Python's, lets a NaN through
            differences[name] = float(np.maximum(differences[name], np.abs(one - other).max()))
            largest[name] = max(largest[name], float(np.abs(other).max()))
        if position < len(batches):
            num_agreeing += int((_said(given[1], graph.contract) == _said(wanted[1], graph.contract)).all(axis=1).sum())
    bounds = {name: BOUND * value for name, value in largest.items()}
    return Comparison(exporter, sum(len(pixels) for pixels in batches), differences, bounds, num_agreeing)


@dataclass(frozen=True, slots=True)
class Int8Comparison:
    """The graph of 8-bit weights against the one that it was made of.

    Attributes:
        largest, mean: difference of a score.
        num_changed: images of which the two say something else.
    """

    num_images: int
    largest: float
    mean: float
    num_changed: int


def write_int8(path: Path, small: Path, batches: Iterable[Tensor], contract: Contract) -> Int8Comparison:
    """Writes a graph whose weights are 8-bit whole numbers and whose activations become such as they come (dynamic quantisation).

    Args:
        path: of a graph that `write_onnx` made; small: of the file to write.
        batches: of what the graph takes, to compare on, one or more; one is held at a time.

    Raises:
        HiresvisError: onnxruntime cannot quantise or run it, or its scores are no numbers.
    """
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    try:
        with _quiet():
            quantize_dynamic(path, small, weight_type=QuantType.QUInt8)  # convolutions take twice as long by signed weights
        sessions = [onnxruntime.InferenceSession(str(one), providers=["CPUExecutionProvider"]) for one in (path, small)]
    except (OSError, MemoryError):
        raise
    except Exception as error:  # the runtime raises anything for what it does not take
        raise _no_int8(error) from error
    num_images, largest, total, num_scores, num_changed = 0, 0.0, 0.0, 0, 0
    for pixels in batches:
        try:
            full, whole = (session.run(["scores"], {INPUT: pixels.numpy()})[0] for session in sessions)
        except (OSError, MemoryError):
            raise
        except Exception as error:
            raise _no_int8(error) from error
        away = np.abs(full - whole)
        if not np.isfinite(away).all():
            raise HiresvisError("--int8: the graph of 8 bits gives scores that are no numbers; export without it")
        num_images, num_scores = num_images + len(full), num_scores + away.size
        largest, total = max(largest, float(away.max())), total + float(away.sum(dtype=np.float64))
        num_changed += int((_said(full, contract) != _said(whole, contract)).any(axis=1).sum())
    return Int8Comparison(num_images, largest, total / num_scores, num_changed)


def _no_int8(error: Exception) -> HiresvisError:
    from onnxruntime import __version__ as version

    return HiresvisError(f"--int8: onnxruntime {version} makes no graph of 8 bits that it can run: {_root(error)}")


def _said(scores: np.ndarray, contract: Contract) -> np.ndarray:
    """(n, _) what the scores say of each image."""
    if contract.task == "classify":
        return scores.argmax(axis=1, keepdims=True)
    return scores >= np.array(contract.thresholds or (THRESHOLD,)) if contract.task == "multilabel" else np.ones((len(scores), 1))


def _by_dynamo(graph: Graph, pixels: Tensor, path: Path) -> None:
    torch.onnx.export(
        graph,
        (pixels,),
        path,
        dynamo=True,
        opset_version=OPSET,
        input_names=[INPUT],
        output_names=list(OUTPUTS),
        dynamic_shapes=({axis: torch.export.Dim(name) for axis, name in graph.dynamic.items()},),
        external_data=_num_bytes(graph) > _ONE_FILE_BYTES,  # in one file a protobuf would be too large
        verbose=False,
    )


def _by_torchscript(graph: Graph, pixels: Tensor, path: Path) -> None:
    torch.onnx.export(
        graph,
        (pixels,),
        str(path),
        dynamo=False,
        opset_version=OPSET,
        input_names=[INPUT],
        output_names=list(OUTPUTS),
        dynamic_axes={INPUT: graph.dynamic, **{name: {0: "batch"} for name in OUTPUTS}},
    )


_EXPORTERS: Mapping[str, Callable[[Graph, Tensor, Path], None]] = {"dynamo": _by_dynamo, "torchscript": _by_torchscript}


def _num_bytes(graph: Graph) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in graph.state_dict().values())


def _rewrite(made: Path, path: Path, metadata: Mapping[str, str], *, apart: bool) -> None:
    """What an exporter made as one file, or with its weights apart as two; our metadata in, and out what exporters note of the machine
    (call stacks with paths, at every node)."""
    import onnx

    model = onnx.load(str(made))
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    onnx.helper.set_model_props(model, dict(metadata))
    onnx.save(model, str(path), save_as_external_data=apart, location=f"{path.name}.data")
    onnx.checker.check_model(str(path))


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters advise their own developers, in warnings and log lines; what comes of it is measured here."""
    loggers = {logger: logger.level for logger in map(logging.getLogger, ("", "torch.onnx", "onnxscript", "onnx_ir"))}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)


def _root(error: BaseException) -> str:
    """The first line of what began it: around that, exporters wrap advice on how to report it to their developers."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}, {first_line(error)}"
