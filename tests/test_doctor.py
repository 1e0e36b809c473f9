"""The doctor: what a machine lacks is named with the mend, and plans are proved by real steps."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

from hiresvis import doctor as doctor_module
from hiresvis.doctor import SELF_TEST, doctor
from hiresvis.errors import EnvironmentFailed, HiresvisError, RecipeError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """A cache folder of this test alone."""
    monkeypatch.setenv("HIRESVIS_CACHE", str(tmp_path / "cache"))


def _proofs(diagnosis) -> list:
    return [finding for finding in diagnosis.findings if "units ran again" in finding.text or finding.failed]


def test_a_healthy_machine_has_its_plans_proved():
    """Every line is there, nothing failed, and the small model's units ran again to the same bits."""
    found = doctor()
    assert {"hiresvis", "packages", "device", "cache", f"{SELF_TEST} 160 px"} <= {finding.subject for finding in found.findings}
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
    found = list(doctor_module._packages())
    missing = [finding for finding in found if finding.failed]
    assert [finding.text for finding in missing] == ["missing: timm"]
    (export,) = [finding for finding in found if finding.subject == "extra export"]
    assert "onnx" in export.text
    assert export.mend == "pip install 'hiresvis[export]'"


def test_a_cache_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    """A file where the folder should be: said with its path, and no failure, since plans work without."""
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("HIRESVIS_CACHE", str(tmp_path / "taken"))
    cache = next(finding for finding in doctor_module._folders() if finding.subject == "cache")
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
