"""The doctor: what a machine lacks is named with the mend, and plans are proved by real steps."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import partial
from importlib import metadata

import pytest
import torch

from hiresvis import device, machine
from hiresvis import doctor as doctor_module
from hiresvis.data import heif
from hiresvis.doctor import SELF_TEST, doctor
from hiresvis.errors import EnvironmentFailed, HiresvisError, RecipeError
from hiresvis.rehearsal import Pace, Rehearsal, pace_of, rehearse
from hiresvis.run.events import StepDone


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """A cache folder of this test alone."""
    monkeypatch.setenv("HIRESVIS_CACHE", str(tmp_path / "cache"))


def _proofs(diagnosis) -> list:
    return [finding for finding in diagnosis.findings if "units ran again" in finding.text or finding.failed]


def test_a_healthy_machine_has_its_plans_proved_and_runs_in_small(monkeypatch):
    """Every line is there, nothing failed, the small model's units ran again to the same bits, and a real fit had the peak of its plan."""
    monkeypatch.setattr(doctor_module, "rehearse", partial(rehearse, model="test_resnet", image_px=64))
    found = doctor()
    subjects = {finding.subject for finding in found.findings}
    assert {"hiresvis", "packages", "device", "formats", "cache", "disk", "hub", f"{SELF_TEST} 160 px", "small run", "planner"} <= subjects
    text = "\n".join(found.lines())
    assert re.search(r"4 steps of 8 images on cpu: \S+ images/s, \d+% of it waiting for images; \d+ s in all", text)
    assert re.search(r"live tensors at the peak \S+ MiB predicted, \S+ MiB counted \([+-]0\.\d%\)", text)
    assert not found.failed
    proofs = _proofs(found)
    assert proofs
    assert all("equal bit for bit" in finding.text for finding in proofs)
    assert json.dumps(found.to_json())
    assert len(found.lines()) >= len(found.findings)


def test_a_named_model_is_proved_in_every_kind_of_tier_that_it_has():
    """Of a transformer: recompute, kept outputs, and slices close to the bits."""
    text = "\n".join(doctor(verify="vit_tiny_patch16_224", image_size=64).lines())
    assert "recompute" in text
    assert "chunk" in text
    assert "within 0.0001" in text
    assert "equal bit for bit" in text


def test_a_plan_that_changes_a_bit_is_a_failure(monkeypatch, capsys):
    """A rerun that is not the forward's is seen, named with its tensor, and ends with the environment's exit code."""
    from hiresvis.cli import main

    verify = doctor_module.verify_plan

    def counts_its_runs(module, _):
        module.weight.data.add_(1e-3)  # behind the back of autograd and of version counters

    def broken(model, plan, **kwargs):
        for module in model.modules():
            if hasattr(module, "momentum"):
                module.register_forward_pre_hook(counts_its_runs)
        return verify(model, plan, **kwargs)

    monkeypatch.setattr(doctor_module, "verify_plan", broken)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--verify", SELF_TEST, "--px", "64"])
    assert ended.value.code == EnvironmentFailed.exit_code
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "px", "message"), [("resnet5000", None, "timm has no model"), ("test_vit", 50, "not a multiple")])
def test_a_model_or_size_that_there_is_not_is_refused(model, px, message):
    """As in a recipe, with what is near."""
    with pytest.raises(RecipeError, match=message):
        doctor(verify=model, image_size=px)


def test_what_is_missing_is_named_with_the_way_to_get_it(monkeypatch):
    """A package that every run needs is a failure; an extra is not."""
    real = metadata.version

    def version(name: str) -> str:
        if name in ("timm", "onnx"):
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = list(machine.packages())
    missing = [finding for finding in found if finding.failed]
    assert [finding.text for finding in missing] == ["missing: timm"]
    (export,) = [finding for finding in found if finding.subject == "extra export"]
    assert "onnx" in export.text
    assert export.mend == "pip install 'hiresvis[export]'"


def test_a_run_and_the_doctor_name_the_system_alike():
    """So that a report can be held against what the doctor says of a machine."""
    made_on = device.machine(torch.device("cpu"), "CPU")
    assert machine.software().text.endswith(f"Python {made_on['python']}, {made_on['system']}")


def test_a_cache_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    """A file where the folder should be: said with its path, and no failure, since plans work without."""
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("HIRESVIS_CACHE", str(tmp_path / "taken"))
    cache = next(finding for finding in machine.folders() if finding.subject == "cache")
    assert str(tmp_path / "taken") in cache.text
    assert "HIRESVIS_CACHE" in cache.mend
    assert not cache.failed


@pytest.mark.parametrize("error", [RuntimeError("saves another tensor"), HiresvisError("the loss differs")])
def test_a_rerun_that_fails_is_a_finding_and_the_other_plans_are_still_tried(monkeypatch, error):
    """Whatever a plan's steps raise is told with the plan that raised it."""

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(doctor_module, "verify_plan", fails)
    findings = doctor(verify=SELF_TEST, image_size=64).findings
    assert len(findings) > 1
    assert all(finding.failed and str(error) in finding.text for finding in findings)


SMALL_RUN = Rehearsal(
    device="cpu",
    micro_batch=8,
    num_steps=4,
    images_per_second=5.0,
    waiting=0.1,
    predicted_counted_bytes=1000,
    counted_bytes=1000,
    predicted_peak_bytes=2000,
    measured_peak_bytes=1900,
    seconds=9.0,
)


def test_waiting_is_a_part_of_a_step_and_counts_once():
    """Two steps of one second each, a quarter and three quarters of them waited: 8 images a second, half of it waiting."""
    numbers = {"epoch": 1, "num_steps": 2, "loss": 1.0, "lr": 1e-3, "grad_norm": 1.0, "num_images": 8, "step_ms": 1000.0, "memory_bytes": 0}
    assert pace_of([StepDone(step=at, data_wait_ms=wait, **numbers) for at, wait in ((1, 250.0), (2, 750.0))]) == Pace(8.0, 0.5)


@pytest.mark.parametrize(("counted", "failed"), [(1000, False), (1015, False), (1030, True), (960, True)])
def test_a_plan_that_misses_what_was_counted_is_a_failure(monkeypatch, counted, failed):
    """By more than two in a hundred, to either side."""
    monkeypatch.setattr(doctor_module, "rehearse", lambda: replace(SMALL_RUN, counted_bytes=counted))
    _, planner = doctor_module._rehearsed(lambda _: None)
    assert planner.failed is failed
    assert f"({counted / 1000 - 1:+.1%})" in planner.text


def test_a_small_run_that_fails_says_why(monkeypatch):
    """The error of `fit`, as a failure."""

    def fails():
        raise EnvironmentFailed("the disk is full")

    monkeypatch.setattr(doctor_module, "rehearse", fails)
    (found,) = doctor_module._rehearsed(lambda _: None)
    assert found.failed
    assert found.text == "the disk is full"


def test_a_format_that_cannot_be_read_is_named_with_the_extra(monkeypatch):
    """Without pillow-heif HEIC cannot be read, which is no failure; everything else was written and read."""
    monkeypatch.setattr(heif, "pillow_heif", None)
    good, bad = machine.formats()
    assert good.text == "read and checked: JPEG, PNG, WEBP, TIFF, JP2, AVIF"
    assert bad.text.startswith("HEIC cannot be read here")
    assert bad.mend == "pip install 'hiresvis[heic]'"
    assert not bad.failed


@pytest.mark.skipif(sys.platform == "win32", reason="the driver's tool is a shell script here")
@pytest.mark.parametrize(
    ("built", "usable", "said", "failed"),
    [
        (None, False, "was built without CUDA", True),
        ("13.0", False, "whose driver knows CUDA up to 12.4; torch was built for 13.0", True),
        ("12.4", True, "CUDA up to 12.4; torch was built for 12.4", False),
    ],
)
def test_a_card_that_torch_cannot_use_is_told(tmp_path, monkeypatch, built, usable, said, failed):
    """By what the driver's own tool says, here a script that speaks as it does."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ $# -gt 0 ] && echo "NVIDIA L4" || echo "| Driver Version: 550.54   CUDA Version: 12.4     |"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    (found,) = machine.driver()
    assert said in found.text
    assert found.text.startswith("NVIDIA L4")
    assert found.failed is failed
    assert bool(found.mend) is failed


def test_a_machine_without_a_card_says_nothing_of_drivers(tmp_path, monkeypatch):
    """No tool, no line."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(machine.driver()) == []


def test_little_room_is_told_with_what_to_do(monkeypatch):
    """On disk and in shared memory; nothing fails by it."""
    monkeypatch.setattr(machine, "_LEAST_DISK", 1 << 60)
    monkeypatch.setattr(machine, "_LEAST_SHARED", 1 << 60)
    found = {finding.subject: finding for finding in machine.folders()}
    assert "hiresvis plan" in found["disk"].mend
    assert "--shm-size" in found["shared memory"].mend
    assert not any(finding.failed for finding in found.values())
