"""From a backbone's feature maps to one logit for each class and each pixel of the finest map: a small feature pyramid.

Maps of several strides go through the top-down path of an FPN (Lin et al. 2017), are smoothed and added at the finest stride, as in the
semantic branch of Panoptic FPN (Kirillov et al. 2019): no concatenation, whose maps would be the peak of large images. A plain
transformer has maps of one stride; its last one is brought to four, as in ViTDet (Li et al. 2022): twice and four times as fine by
transposed convolutions, as it is, and half as fine by pooling. Convolutions over neighbours are separable (DeepLabv3+, Chen et al.
2018): at the finest stride they are most of the decoder's FLOPs, and whole ones would take eight times as many. Norms are GroupNorm, so an
image's result does not depend on the micro-batch.

The decoder is three modules in a line, so that the planner sees three units.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 128
_GROUPS = 32


class Decoder(nn.Sequential):
    """Maps of a backbone to logits (b, num_classes, h, w) at the stride of the finest map (a plain transformer's quarter).

    Args:
        channels: of the maps, coarsest first; a single one for a plain transformer.
        num_classes: of the logits.
    """

    def __init__(self, channels: Sequence[int], num_classes: int) -> None:
        super().__init__()
        if len(channels) == 1:
            self.scales = Scales(channels[0])
            channels = [channels[0]] * 4
        self.pyramid = Pyramid(channels)
        self.fuse = Fuse(len(channels))
        self.classify = nn.Conv2d(WIDTH, num_classes, 1)


class Scales(nn.Module):
    """One map of a plain transformer to four, coarsest first: half, once, twice and four times as fine."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.twice = nn.ConvTranspose2d(channels, channels, 2, stride=2)
        self.four = nn.Sequential(
            nn.ConvTranspose2d(channels, channels // 2, 2, stride=2),
            nn.GroupNorm(1, channels // 2),
            nn.GELU(),
            nn.ConvTranspose2d(channels // 2, channels, 2, stride=2),
        )

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        (plain,) = maps
        half = F.max_pool2d(plain, 2, ceil_mode=True)
        return [half, plain, self.twice(plain), self.four(plain)]


class Pyramid(nn.Module):
    """Maps of any widths to maps of WIDTH, coarsest first, each with what the coarser ones know."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(count, WIDTH, 1) for count in channels)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        for lateral, one in zip(self.lateral, maps, strict=True):
            level = lateral(one)
            found.append(level + upsample(found[-1], level) if found else level)
        return found


class Fuse(nn.Module):
    """Every level smoothed and brought to the finest, and their sum smoothed once more."""

    def __init__(self, num_levels: int) -> None:
        super().__init__()
        self.smooth = nn.ModuleList(_smooth() for _ in range(num_levels))
        self.last = _smooth()

    def forward(self, levels: Sequence[Tensor]) -> Tensor:
        finest = levels[-1]
        total = self.smooth[-1](finest)
        for smooth, level in zip(self.smooth[:-1], levels[:-1], strict=True):
            total = total + upsample(smooth(level), finest)
        return self.last(total)


def _smooth() -> nn.Sequential:
    around = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False)
    return nn.Sequential(around, nn.Conv2d(WIDTH, WIDTH, 1, bias=False), nn.GroupNorm(_GROUPS, WIDTH), nn.GELU())


def upsample(values: Tensor, like: Tensor) -> Tensor:
    """(b, c, h, w) at the size of another map, bilinear."""
    return F.interpolate(values, size=like.shape[-2:], mode="bilinear", align_corners=False)
