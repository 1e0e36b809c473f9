"""Runs that read decoded copies are the runs that decode, bit for bit; what was decided is in the folder."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file

from hiresvis.data import cache as cache_module


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("HIRESVIS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "images"


def entries(copies):
    return sorted(copies.glob("objects/*/*"))


def test_run_with_copies_is_the_run_without_bit_for_bit(workshop, copies, monkeypatch):
    """Weights, predictions and evaluation; the first run fills the cache in its check, the second decodes nothing."""
    options = ("data.workers=1", "data.augment=heavy", "log.report=false")
    workshop.fit(*options, "data.cache=off", name="without")
    assert not entries(copies)
    workshop.fit(*options, "data.cache=100MiB", name="first")
    assert len(entries(copies)) == 32  # train, val and test
    decoded = cache_module.load_image
    # Whoever decodes all the same, in whatever process, leaves other pixels.
    monkeypatch.setattr(cache_module, "load_image", lambda *arguments, **options: decoded(*arguments, **options) // 2)
    workshop.fit(*options, "data.cache=100MiB", name="second")
    evaluated = workshop("evaluate", workshop.path("", "second"), "--json").json
    monkeypatch.undo()
    expected = load_file(workshop.path("weights/best.safetensors", "without"))
    for name in ("first", "second"):
        found = load_file(workshop.path("weights/best.safetensors", name))
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
        assert workshop.path("predictions.csv", name).read_text() == workshop.path("predictions.csv", "without").read_text()
    (finished,) = workshop.events("run_finished", "without")
    assert evaluated["test"]["accuracy"] == finished["test_metrics"]["accuracy"]


def test_what_auto_decides_is_told_and_resume_decides_again(workshop, copies):
    """Tiny images are decoded as fast as copies are read; a resume may turn copies on."""
    workshop.fit("train.epochs=1")
    line = next(line for line in workshop.path("recipe.resolved.yaml").read_text().splitlines() if line.startswith("  cache:"))
    assert re.fullmatch(r"  cache: (off|\d+[GM]iB)  # auto: (off: an image (is decoded within|takes) .*|on: 32 .*)", line)
    done = workshop.fit("train.epochs=2", "data.cache=100MiB", "--resume")
    assert "data.cache" in done.err
    assert "  cache: 100MiB  # given" in workshop.path("recipe.resolved.yaml").read_text()
    assert entries(copies)


def test_full_disk_is_told_once_and_the_run_goes_on(workshop, copies, monkeypatch):
    """Training needs no copies."""
    monkeypatch.setattr(cache_module, "KEPT_FREE_BYTES", 2**60)
    done = workshop.fit("data.cache=100MiB", "train.epochs=1")
    assert done.err.count("data.cache: nothing more is kept in") == 1
    assert workshop.path("weights/best.safetensors").is_file()
    assert not entries(copies)
