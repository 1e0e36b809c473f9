"""Small real models and their traced costs (`lab`), and chains made by hand (`hand`), as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

HERE = Path(__file__).parent


def _load(name: str, path: Path) -> ModuleType:
    if name in sys.modules:  # one module for all folders that use it: traces are made once
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def lab() -> ModuleType:
    return _load("planner_lab", HERE.parent / "backbone" / "lab.py")


@pytest.fixture(scope="session")
def hand() -> ModuleType:
    return _load("planner_by_hand", HERE / "by_hand.py")


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums are reassociated by the number of threads; tests that compare bits keep to one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
