"""The planner's small models and measurements, as a module: `lab`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

LAB = Path(__file__).with_name("lab.py")


def _load() -> ModuleType:
    if "planner_lab" in sys.modules:  # one module for all folders that use it: traces are made once
        return sys.modules["planner_lab"]
    spec = importlib.util.spec_from_file_location("planner_lab", LAB)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def lab() -> ModuleType:
    return _load()


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums are reassociated by the number of threads; tests that compare bits keep to one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
