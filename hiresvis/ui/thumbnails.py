"""Small previews of the user's images, as data for the page."""

from __future__ import annotations

import base64
import io
import warnings
from pathlib import Path

from PIL import Image, ImageOps

SIDE_PX = 240
MAX_PIXELS = 200_000_000  # a preview is not worth more memory than that
_DEEP_MODES = ("I;16", "I;16B", "I;16L", "I", "F")


def thumbnail(path: Path) -> str | None:
    """A JPEG data URI of at most 240 px a side, turned by EXIF; None where Pillow cannot read the file or it is too large."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # bombs are bounded below, and a preview warns of nothing else that matters
            with Image.open(path) as image:
                if image.width * image.height > MAX_PIXELS:
                    return None
                image.draft("RGB", (2 * SIDE_PX, 2 * SIDE_PX))
                small = ImageOps.exif_transpose(_eight_bit(image))
                small.thumbnail((SIDE_PX, SIDE_PX))
                out = io.BytesIO()
                _on_white(small).save(out, "JPEG", quality=80)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # Pillow: a broken PNG is a SyntaxError
        return None
    return "data:image/jpeg;base64," + base64.b64encode(out.getvalue()).decode("ascii")


def _eight_bit(image: Image.Image) -> Image.Image:
    """Deep grey images are stretched between their darkest and brightest pixel: to be seen, not to be measured."""
    if image.mode not in _DEEP_MODES:
        return image
    grey = image.convert("F")
    low, high = grey.getextrema()
    assert isinstance(low, float) and isinstance(high, float), "one band"  # noqa: PT018 - one fact, for the type checker
    return grey.point(lambda value: value * (255 / (high - low or 1)) - low * (255 / (high - low or 1))).convert("L")


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")
