"""What `import hiresvis` offers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hiresvis

ROOT = Path(__file__).resolve().parent.parent


def test_every_exported_name_is_there():
    """Each name of __all__ can be had, and is listed."""
    for name in hiresvis.__all__:
        assert getattr(hiresvis, name) is not None
        assert name in dir(hiresvis)


def test_an_unknown_name_is_an_attribute_error():
    """A misspelt name fails as on any module."""
    with pytest.raises(AttributeError, match="module 'hiresvis' has no attribute 'load_recipy'"):
        hiresvis.load_recipy  # noqa: B018  (the access is what is tested)


def test_importing_the_package_loads_no_library():
    """`import hiresvis` costs nothing: what it exports is imported when it is first used."""
    code = "import sys, hiresvis; print(sorted({'torch', 'timm', 'pydantic', 'yaml', 'numpy', 'hiresvis.recipe'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_commands_come_without_torchmetrics_until_a_metric_is_asked_for():
    """It takes 1.4 s and 90 MiB; before a CPU's memory is measured it can be had at once."""
    code = (
        "import sys, hiresvis.fit, hiresvis.evaluating, hiresvis.inference, hiresvis.checking\n"
        "from hiresvis.train import metrics\n"
        "print('torchmetrics' in sys.modules)\n"
        "metrics.load()\n"
        "print({'torchmetrics.functional.classification', 'torchmetrics.functional.regression'} <= sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
