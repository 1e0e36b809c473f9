"""One small model of each module of timm.models as an ONNX graph: which exporter took it, and how far its outputs are from torch's.

Weights are random (the classifier's too, which some models begin with at nothing), images 128 to 512 px; each graph is run by
onnxruntime in batches of two and three and alone. About half a minute a model on one core:

    python tools/export_families.py                           # or with names of modules
    python tools/export_families.py --images FOLDER convnext  # 20 images of a folder instead of random pixels, resized as in training
    python tools/export_families.py --oblong convnext         # half as high as wide, where the model takes it
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from bench_families import CLASSES, family_of, modules
from torch import nn

from hiresvis.backbone.build import build_backbone
from hiresvis.data.contract import Contract, load_image
from hiresvis.data.inputs import find_inputs
from hiresvis.data.transforms import Scale
from hiresvis.errors import HiresvisError, RecipeError
from hiresvis.onnx_graph import BOUND, Graph, write_onnx
from hiresvis.train.freezing import classifier_parameters

NUM_IMAGES = 20


def pixels(folder: Path | None, contract: Contract) -> list[torch.Tensor]:
    """Batches of two and three: of images in the folder, spread over it, or random ones."""
    if folder is None:
        generator = torch.Generator().manual_seed(0)
        return [torch.randint(0, 256, (count, *contract.image_size, 3), dtype=torch.uint8, generator=generator) for count in (2, 3)]
    files = [sample.path for sample in find_inputs([str(folder)]).samples]
    chosen = [files[position * len(files) // NUM_IMAGES] for position in range(NUM_IMAGES)]
    preprocess = contract.preprocess()
    arrays = [torch.from_numpy(load_image(path, preprocess, max_pixels=contract.max_pixels)) for path in chosen]
    return [torch.stack(arrays[begin:end]) for begin, end in pairwise((0, 2, 5, 7, 10, 12, 15, 17, 20))]


def row(module: str, folder: Path | None, *, oblong: bool) -> str:
    """One line of the table."""
    family = family_of(module)
    start = time.perf_counter()
    torch.manual_seed(0)
    size = (family.px // 2 if oblong else family.px, family.px)
    try:
        model = build_backbone(family.model, num_classes=CLASSES, image_size=size, pretrained=False).model.eval()
    except RecipeError as error:
        return f"{module:28} {family.model:36} {error}"
    for name, parameter in model.named_parameters():
        if name in classifier_parameters(model):
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    contract = Contract(
        classes=tuple(map(str, range(CLASSES))),
        image_size=size,
        fit="resize",
        background=(255, 255, 255),
        channels=3,
        scale=Scale(),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        interpolation="bilinear",
        max_pixels=10**8,
    )
    batches = pixels(folder, contract)
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = write_onnx(Graph(model, contract).eval(), batches, Path(folder) / "model.onnx", {})
        except HiresvisError as error:
            return f"{module:28} {family.model:36} refused: {error}"
    seconds = time.perf_counter() - start
    numbers = f"{found.differences['logits'] / found.bounds['logits'] * BOUND:8.1e} of the largest logit (or of 1), "
    numbers += f"scores {found.differences['scores']:8.1e}"
    same = f"same class {found.num_agreeing}/{found.num_images}"
    return f"{module:28} {family.model:36} {found.exporter:12} {numbers}, {same} {seconds:4.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="of timm.models; all when none are named")
    parser.add_argument("--images", type=Path, metavar="FOLDER", help=f"{NUM_IMAGES} images from here instead of random pixels")
    parser.add_argument("--oblong", action="store_true", help="images half as high as wide")
    args = parser.parse_args()
    for module in args.modules or modules():
        print(row(module, args.images, oblong=args.oblong), flush=True)


if __name__ == "__main__":
    main()
