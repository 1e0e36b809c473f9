"""Fine-tune vision models on large images within a memory budget. Importing this alone imports no torch."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

try:
    __version__ = metadata.version("hiresvis")
except metadata.PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"

# Exported name -> the module it lives in, imported when the name is first used.
_EXPORTS = {
    "HiresvisError": "hiresvis.errors",
    "Recipe": "hiresvis.recipe",
    "load_recipe": "hiresvis.recipe",
}
__all__ = ["HiresvisError", "Recipe", "__version__", "load_recipe"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'hiresvis' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
