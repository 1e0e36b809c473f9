"""The contact sheet: one page of what the model will be given. Needs no network and no script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render_sheet(title: str, facts: Mapping[str, str], images: Sequence[Any], num_classes: int) -> str:
    """The page as text.

    Args:
        title: the recipe's name.
        facts: what was done to the images, by name.
        images: of `hiresvis.data.sheet.show_images`.
        num_classes: of the data set, of which the images may show a part.
    """
    environment = Environment(
        loader=PackageLoader("hiresvis", "ui"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    classes = [(label, list(shown)) for label, shown in groupby(images, key=lambda image: image.label)]
    page = environment.get_template("sheet.html.j2")
    return page.render(title=title, facts=facts, classes=classes, num_classes=num_classes)
