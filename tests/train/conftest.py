"""The small real run, as a module: `small`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).with_name("small_run.py")


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_small_run", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def small() -> ModuleType:
    return _load()


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums are reassociated by the number of threads; the tests that compare bits keep to one, as do their subprocesses."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
