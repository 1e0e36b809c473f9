"""`hiresvis models`: what is listed, what is looked into, and what is remembered."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from hiresvis import catalog, cli, profiles

ROOT = Path(__file__).resolve().parent.parent
SMALL = "test_efficientnet_[gl]n"


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory):
    """What these tests trace goes into a folder of theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HIRESVIS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def models(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        cli.main(["models", *arguments])
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def traced() -> list[dict]:
    """The rows of a few small models, traced."""
    code, out, err = models(SMALL, "--json")
    assert (code, err.count("tracing")) == (0, 2)
    return json.loads(out)["models"]


@pytest.fixture
def _no_trace(monkeypatch):
    def trace(key):
        pytest.fail(f"{key.model} is traced")

    monkeypatch.setattr(catalog, "_trace", trace)


def test_rows_tell_what_the_planner_can_do(traced):
    """Size, stride and parameters of the published model; units, the share that can be recomputed, and how."""
    assert [row["name"] for row in traced] == ["test_efficientnet_gn", "test_efficientnet_ln"]
    for row in traced:
        assert row["image_size"] == [160, 160]
        assert row["stride"] == 32
        assert row["parameters"] > 100_000
        assert row["num_units"] > 5
        assert 0.9 < row["recomputable"] <= 1
        assert {"recompute", "keep", "offload"} <= set(row["tiers"])
        assert row["why_not"] == ""


def test_a_second_look_comes_from_disk_and_needs_no_torch(traced):
    """In a fresh interpreter: the same rows, no torch and no timm imported, nothing traced."""
    code = (
        "import json, sys; from hiresvis.catalog import models\n"
        f"rows = models({SMALL!r}).to_json()\n"
        "print(json.dumps([rows, sorted({'torch', 'timm'} & set(sys.modules))]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    found, loaded = json.loads(done.stdout)
    assert found == {"traced": True, "models": traced}
    assert loaded == []


def test_the_table_names_every_model(traced):
    """One line each below the head; numbers in columns."""
    code, out, _ = models(SMALL)
    head, *rows = out.splitlines()
    assert code == 0
    assert head.split()[:5] == ["model", "size", "stride", "params", "units"]
    assert [row.split()[:3] for row in rows] == [["test_efficientnet_gn", "160", "32"], ["test_efficientnet_ln", "160", "32"]]


@pytest.mark.usefixtures("_no_trace")
def test_many_are_listed_and_not_traced():
    """More than ten: names and sizes, and how to see more; as JSON `traced` is false."""
    code, out, _ = models("resnet")
    *names, last = out.splitlines()
    assert code == 0
    assert len(names) > 10
    assert any(line.split() == ["resnet50", "224"] for line in names)
    assert last.startswith(f"{len(names)} models; narrow the pattern")
    assert "--all" in last
    found = json.loads(models("resnet", "--json")[1])
    assert (found["traced"], len(found["models"]), found["models"][0]["num_units"]) == (False, len(names), None)


def test_all_traces_what_is_many(monkeypatch, traced):
    """--all looks into every match however many there are."""
    monkeypatch.setattr(catalog, "MOST_TRACED", 1)
    assert json.loads(models(SMALL, "--json")[1])["traced"] is False
    assert json.loads(models(SMALL, "--json", "--all")[1]) == {"traced": True, "models": traced}


@pytest.mark.usefixtures("_no_trace")
def test_a_pattern_without_wildcards_is_a_part_of_a_name():
    """resnet50 finds seresnet50 too, resnet50* does not."""
    part, whole = ({row.name for row in catalog.models(pattern).rows} for pattern in ("resnet50", "resnet50*"))
    assert "seresnet50" in part - whole
    assert whole < part


def test_no_match_is_told_with_the_pattern():
    """Exit 2, the pattern, and what would match."""
    code, out, err = models("convnexxt")
    assert (code, out) == (2, "")
    assert "no model of timm matches 'convnexxt'" in err


class OneModule(nn.Module):
    """A single module: nobody hands a tensor on."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.only(x).relu().mean(dim=(2, 3))


def test_what_cannot_be_planned_says_why_and_is_remembered(monkeypatch):
    """A model that is no chain has its reason, the second time from disk; a failure of its own is no fault of ours."""
    monkeypatch.setattr("hiresvis.backbone.catalog.bare_model", lambda *_: (OneModule(), 8))
    code, out, _ = models("test_resnet")
    assert code == 0
    assert "nothing: test_resnet is no chain of modules" in out
    assert out.splitlines()[1].split()[:4] == ["test_resnet", "160", "8", "0.0M"]
    monkeypatch.undo()
    assert models("test_resnet") == (0, out, "")

    def fail(*_):
        raise RuntimeError("data-dependent control flow\nand more")

    monkeypatch.setattr("hiresvis.backbone.catalog.bare_model", fail)
    assert "nothing: data-dependent control flow\n" in models("test_convnext")[1]


def test_the_share_is_of_bytes_and_counts_shared_storages_once(traced):
    """With no unit recomputable it is none; with all of them, all; the boundary that a fixed unit keeps as well is fixed."""
    sizes = catalog._default_sizes()
    profile = profiles.read(catalog._key("test_efficientnet_gn", sizes["test_efficientnet_gn"])).profile
    units = profile.units
    assert catalog.recomputable_share(replace(profile, units=tuple(replace(unit, recomputable=False) for unit in units))) == 0
    assert catalog.recomputable_share(replace(profile, units=tuple(replace(unit, recomputable=True) for unit in units))) == 1
    block = next(index for index, unit in enumerate(units) if unit.kind == "block")
    fixed = replace(profile, units=tuple(replace(unit, recomputable=index != block) for index, unit in enumerate(units)))
    saved = units[block].interior.slope + sum(profile.boundaries[number].slope for number in units[block].saves)
    everything = sum(u.interior.slope for u in units) + sum(
        profile.boundaries[number].slope for number in {number for u in units for number in u.saves}
    )
    assert catalog.recomputable_share(fixed) == pytest.approx(1 - saved / everything)
