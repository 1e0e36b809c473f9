"""Cards by name: their memory, rates and link to the host, for plans made without one.

Rates are those of the makers' data sheets: dense, not sparse, and accumulating in fp32, as training does (the consumer
cards' sheets give twice as much for fp16 accumulators). Memory is what a program can have, error correction on as the card
is shipped; that is less than the sheet's round number. The link is what copies from pinned memory reach, not what the
standard says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import SequenceMatcher

from hiresvis.errors import RecipeError
from hiresvis.units import GIB

EFFICIENCY = 0.45
"""Share of the dense rate that training reaches where arithmetic is the limit, launches, small kernels and all.

Held against timm's published training rates on an RTX 3090 (`results/benchmark-train-amp-*-pt112-*`): with it and
`MEMORY_EFFICIENCY`, nine models (ResNet-50, ViT-S, ViT-B at 224 and 384 px, ConvNeXt-T and -B, Swin-B, EfficientNet-B0 and
-B3) take 0.77 to 1.28 times the estimated time, 1.06 in the middle.
"""
MEMORY_EFFICIENCY = 0.8
"""Share of the data sheet's memory bandwidth that element-wise kernels reach."""

PCIE_3, PCIE_4, PCIE_5 = 12e9, 24e9, 48e9  # 16 lanes, one direction
NVLINK_C2C = 300e9  # 450e9 on paper; copies to the host reach about 300e9 (Fusco et al., 2024, arXiv:2408.11556)
UNIFIED = 0.0  # the GPU's memory is the host's: there is nowhere to offload to


@dataclass(frozen=True, slots=True)
class Card:
    """What a plan needs to know of a card.

    Attributes:
        name: as people write it.
        memory_bytes: what a program can have.
        bf16_flops, fp16_flops, fp32_flops: multiply-adds times two per second; 0 where the card has none.
        memory_bytes_per_s: bandwidth of its own memory.
        link_bytes_per_s: bandwidth to pinned host memory in each direction; 0 where memory is unified.
        note: where the figures are from, in short.
    """

    name: str
    memory_bytes: int
    bf16_flops: float
    fp16_flops: float
    fp32_flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    note: str

    @property
    def auto_precision(self) -> str:
        """What `memory.precision: auto` is on this card: bf16 where it has that, else fp16."""
        return "bf16" if self.bf16_flops else "fp16"

    def flops_per_s(self, precision: str) -> float:
        """The dense rate.

        >>> find_card("T4").flops_per_s("fp16") / 1e12
        65.0

        Raises:
            RecipeError: the card has no such arithmetic.
        """
        rate = {"bf16": self.bf16_flops, "fp16": self.fp16_flops, "fp32": self.fp32_flops}[precision]
        if not rate:
            raise RecipeError(f"memory.precision  {self.name} has no {precision}; give fp16, fp32 or auto")
        return rate


def _card(name: str, gib: float, half: float, single: float, memory: float, link: float, note: str, *, bf16: bool = True) -> Card:
    """A card from GiB, TFLOPS and GB/s."""
    flops = half * 1e12
    return Card(name, int(gib * GIB), flops if bf16 else 0.0, flops, single * 1e12, memory * 1e9, link, note)


# name, memory in GiB, fp16 (and bf16) TFLOPS, fp32 TFLOPS, memory GB/s, link
CARDS: tuple[Card, ...] = (
    _card("T4", 14.56, 65, 8.1, 320, PCIE_3, "NVIDIA T4 data sheet; fp16 only, 16 GB with ECC", bf16=False),
    _card("L4", 22.03, 121, 30.3, 300, PCIE_4, "NVIDIA L4 data sheet, sparse figure halved; 24 GB with ECC"),
    _card("A10", 21.96, 125, 31.2, 600, PCIE_4, "NVIDIA A10 data sheet; 24 GB with ECC"),
    _card("L40S", 44.4, 362, 91.6, 864, PCIE_4, "NVIDIA L40S data sheet; 48 GB with ECC"),
    _card("V100-16GB", 15.77, 125, 15.7, 900, PCIE_3, "NVIDIA V100 data sheet, SXM2; fp16 only", bf16=False),
    _card("V100-32GB", 31.73, 125, 15.7, 900, PCIE_3, "NVIDIA V100 data sheet, SXM2; fp16 only", bf16=False),
    _card("A100-40GB", 39.38, 312, 19.5, 1555, PCIE_4, "NVIDIA A100 data sheet"),
    _card("A100-80GB", 79.14, 312, 19.5, 2039, PCIE_4, "NVIDIA A100 data sheet, SXM4; the PCIe card's memory gives 1935 GB/s"),
    _card("H100", 79.14, 989, 67, 3350, PCIE_5, "NVIDIA H100 data sheet, SXM5, sparse figure halved"),
    _card("H100-PCIe", 79.14, 756, 51, 2000, PCIE_5, "NVIDIA H100 data sheet, PCIe, sparse figure halved"),
    _card("H200", 139.72, 989, 67, 4800, PCIE_5, "NVIDIA H200 data sheet, SXM, sparse figure halved; 141 GB"),
    _card("GH200", 94.5, 989, 67, 4000, NVLINK_C2C, "NVIDIA GH200 data sheet, 96 GB HBM3, sparse figure halved; NVLink-C2C"),
    _card("B200", 178.35, 2250, 75, 8000, PCIE_5, "NVIDIA HGX B200 data sheet, an eighth, sparse figure halved; 180 GB"),
    _card("RTX 3060", 11.6, 25.5, 12.7, 360, PCIE_4, "NVIDIA GA10x white paper's rates per core at 1777 MHz; 12 GB"),
    _card("RTX 3080", 9.64, 59.5, 29.8, 760, PCIE_4, "NVIDIA GA102 white paper, fp32 accumulation; 10 GB"),
    _card("RTX 3090", 23.55, 71, 35.6, 936, PCIE_4, "NVIDIA GA102 white paper, fp32 accumulation"),
    _card("RTX 4070 Ti", 11.57, 80.2, 40.1, 504, PCIE_4, "NVIDIA Ada white paper's rates per core at 2610 MHz; 12 GB"),
    _card("RTX 4080", 15.56, 97.5, 48.7, 717, PCIE_4, "NVIDIA Ada white paper, fp32 accumulation"),
    _card("RTX 4090", 23.52, 165.2, 82.6, 1008, PCIE_4, "NVIDIA Ada white paper, fp32 accumulation"),
    _card("RTX 5080", 15.46, 112.6, 56.3, 960, PCIE_5, "NVIDIA RTX Blackwell white paper, fp32 accumulation"),
    _card("RTX 5090", 31.36, 209.5, 104.8, 1792, PCIE_5, "NVIDIA RTX Blackwell white paper, fp32 accumulation"),
    _card("MI300X", 191.69, 1307, 163.4, 5300, PCIE_5, "AMD Instinct MI300X data sheet"),
    _card("M3 Max 64GB", 48.0, 14.2, 14.2, 400, UNIFIED, "Apple gives no rate: 40 cores at 1.39 GHz; Metal lends 3/4 of the memory"),
    _card("M2 Ultra 128GB", 96.0, 27.2, 27.2, 800, UNIFIED, "Apple's 27.2 TFLOPS (76 cores); Metal lends 3/4 of the memory"),
)

_MAKERS = re.compile(r"^(nvidia|geforce|tesla|amd|instinct|radeon|apple|mac)+")
_FORMS = re.compile(r"(sxm\d?|hbm\d\w?)")  # how a driver goes on: "NVIDIA A100-SXM4-80GB"
_PCIE = re.compile(r"pcie", re.IGNORECASE)
_MODEL = re.compile(r"s|ti")  # what makes another card of a name: an L40 is no L40S, an RTX 4070 no RTX 4070 Ti
_SIZE = re.compile(r"\b(\d+) ?gb\b", re.IGNORECASE)


def find_card(text: str) -> Card:
    """The card of this name: case, spaces and dashes do not matter, and the beginning of one name is enough.

    What drivers call a card is found too, unless it names another amount of memory.

    >>> find_card("rtx4090").name, find_card("4070 ti").name, find_card("NVIDIA A100-SXM4-80GB").name, find_card("l4").name
    ('RTX 4090', 'RTX 4070 Ti', 'A100-80GB', 'L4')

    Raises:
        RecipeError: no card, or more than one, begins so; the message lists those that come near.
    """
    wanted = _plain(text)
    found = [card for card in CARDS if wanted in _keys(card)] or _by_driver_name(text)
    found = found or [card for card in CARDS if wanted and any(_begins(wanted, key) for key in _keys(card))]
    if len(found) == 1:
        return found[0]
    if found:
        raise RecipeError(f"gpu  {text!r} could be {_listed(found, 'or')}; give one of them")
    near = sorted(CARDS, key=lambda card: -max(SequenceMatcher(None, wanted, key).ratio() for key in _keys(card)))[:3]
    names = ", ".join(card.name for card in CARDS)
    raise RecipeError(f"gpu  {text!r} is not known; near it are {_listed(near, 'and')}. Known: {names}. For another card give its budget")


def _begins(wanted: str, key: str) -> bool:
    return key.startswith(wanted) and not _MODEL.fullmatch(key.removeprefix(wanted))


def _by_driver_name(text: str) -> list[Card]:
    """Cards whose name is the text without "PCIe", or without the size of their memory."""
    size = _SIZE.search(text)
    found = []
    for card in CARDS:
        agrees = size is not None and abs(int(size[1]) * GIB - card.memory_bytes) < card.memory_bytes / 8
        if _plain(_PCIE.sub("", text)) in _keys(card) or (agrees and _plain(_SIZE.sub("", text)) in _keys(card)):
            found.append(card)
    return found


def _plain(text: str) -> str:
    return _FORMS.sub("", _MAKERS.sub("", re.sub(r"[^a-z0-9]", "", text.lower())))


def _keys(card: Card) -> tuple[str, ...]:
    """The name, and the name without what people leave out."""
    name = _plain(card.name)
    return (name, name.removeprefix("rtx"))


def _listed(cards: list[Card], word: str) -> str:
    names = [card.name for card in cards]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"
