"""Fine-tune vision models on large images within a memory budget. Importing this alone imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Exported name -> the module it lives in, imported when the name is first used.
_EXPORTS = {
    "CheckpointPlan": "hiresvis.memory.plan",
    "DoesNotFit": "hiresvis.errors",
    "HiresvisError": "hiresvis.errors",
    "Recipe": "hiresvis.recipe",
    "apply_plan": "hiresvis.api",
    "load_recipe": "hiresvis.recipe",
    "plan_memory": "hiresvis.api",
    "verify_plan": "hiresvis.verify",
}
__all__ = [
    "CheckpointPlan",
    "DoesNotFit",
    "HiresvisError",
    "Recipe",
    "__version__",
    "apply_plan",
    "load_recipe",
    "plan_memory",
    "verify_plan",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _EXPORTS:
        raise AttributeError(f"module 'hiresvis' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def _version() -> str:
    """Asked of the installation; not at import, which costs a tenth of a second."""
    from importlib import metadata

    try:
        return metadata.version("hiresvis")
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
