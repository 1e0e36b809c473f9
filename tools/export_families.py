"""One small model of each module of timm.models as an ONNX graph: which exporter took it, and how far its outputs are from torch's.

Weights are random (the classifier's too, which some models begin with at nothing), images 128 to 512 px; each graph is run by
onnxruntime in batches of two and three and alone. About half a minute a model on one core:

    python tools/export_families.py            # or with names of modules
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_families import CLASSES, build, family_of, modules
from torch import nn

from hiresvis.data.contract import Contract
from hiresvis.data.transforms import Scale
from hiresvis.errors import HiresvisError
from hiresvis.onnx_graph import BOUND, Graph, write_onnx
from hiresvis.train.freezing import classifier_parameters


def row(module: str) -> str:
    """One line of the table."""
    family = family_of(module)
    start = time.perf_counter()
    torch.manual_seed(0)
    model = build(family).eval()
    for name, parameter in model.named_parameters():
        if name in classifier_parameters(model):
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    contract = Contract(
        classes=tuple(map(str, range(CLASSES))),
        image_size=(family.px, family.px),
        fit="resize",
        background=(255, 255, 255),
        channels=3,
        scale=Scale(),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        interpolation="bilinear",
        max_pixels=10**8,
    )
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 256, (images, family.px, family.px, 3), dtype=torch.uint8, generator=generator) for images in (2, 3)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = write_onnx(Graph(model, contract).eval(), batches, Path(folder) / "model.onnx", {})
        except HiresvisError as error:
            return f"{module:28} {family.model:36} refused: {error}"
    seconds = time.perf_counter() - start
    numbers = f"{found.differences['logits'] / found.bounds['logits'] * BOUND:8.1e} of the largest logit (or of 1)"
    same = f"same class {found.num_agreeing}/{found.num_images}"
    return f"{module:28} {family.model:36} {found.exporter:12} {numbers}, {same} {seconds:4.0f} s"


def main(chosen: list[str]) -> None:
    for module in chosen or modules():
        print(row(module), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
