"""Snapshots and weight files on disk."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import hiresvis.train.snapshot as snapshot_module
from hiresvis.errors import EnvironmentFailed, RunFolderError
from hiresvis.train.snapshot import load_snapshot, read_weights_metadata, save_snapshot, save_weights
from hiresvis.train.state import pack_optimizer, pack_rng, unpack_optimizer, unpack_rng


def _tensors(value: float) -> dict[str, torch.Tensor]:
    return {"model/a": torch.full((64, 8), value), "rng/cpu": torch.get_rng_state()}


def _value(folder) -> tuple[float, int] | None:
    snapshot = load_snapshot(folder)
    return None if snapshot is None else (snapshot.tensors["model/a"][0, 0].item(), snapshot.state["n"])


def test_what_was_saved_comes_back_bit_for_bit(tmp_path):
    """All dtypes, empty, scalar, tied and non-contiguous tensors; floats in the state to the last bit."""
    base = torch.randn(4, 6)
    tensors = {
        "f32": base, "tied": base, "part": base[1:3], "transposed": base.t(), "bf16": base.bfloat16(), "f64": base.double(),
        "int": torch.tensor(7), "bool": base > 0, "bytes": torch.get_rng_state(), "empty": torch.empty(0, 3),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    }  # fmt: skip
    save_snapshot(tmp_path / "snapshot", tensors=tensors, state={"x": 0.1 + 0.2, "list": [1, None, "ä"]})
    snapshot = load_snapshot(tmp_path / "snapshot")
    assert snapshot.state == {"x": 0.1 + 0.2, "list": [1, None, "ä"]}
    assert set(snapshot.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert snapshot.tensors[name].dtype == tensor.dtype
        assert torch.equal(snapshot.tensors[name], tensor), name


def test_no_snapshot_is_none(tmp_path):
    """A folder that is missing or empty has no snapshot, and that is no error."""
    assert load_snapshot(tmp_path / "missing") is None
    assert load_snapshot(tmp_path) is None


def test_only_the_newest_two_snapshots_take_room(tmp_path):
    """Each save leaves its own files and those of the one before."""
    for n in range(4):
        save_snapshot(tmp_path, tensors=_tensors(n), state={"n": n})
    assert _value(tmp_path) == (3.0, 3)
    kept = ["previous.json", "state.json", "tensors-3.safetensors", "tensors-4.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


@pytest.mark.parametrize("name", ["state.json", "tensors-2.safetensors"])
@pytest.mark.parametrize("damage", ["gone", "empty", "cut", "a bit"])
def test_damaged_snapshot_gives_way_to_the_one_before_and_says_so(tmp_path, name, damage):
    """Whichever file of the newest is damaged, however: the one before it loads, with the reason; never the damaged values."""
    for n in (1, 2):
        save_snapshot(tmp_path, tensors=_tensors(n), state={"n": n, "long": ["x"] * 100})
    path = tmp_path / name
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        middle = len(content) // 2
        content[middle] ^= 16
        path.write_bytes({"empty": b"", "cut": content[:middle], "a bit": content}[damage])
    snapshot = load_snapshot(tmp_path)
    assert (snapshot.state["n"], snapshot.tensors["model/a"][0, 0]) == (1, 1.0)
    assert (damage == "gone" and name == "state.json") or name in snapshot.note


def test_both_snapshots_damaged_is_an_error_that_names_the_newest(tmp_path):
    """There is nothing to fall back on, and nothing made up."""
    for n in (1, 2):
        save_snapshot(tmp_path, tensors=_tensors(n), state={"n": n})
    for path in tmp_path.glob("tensors-*"):
        path.write_bytes(b"other bytes")
    with pytest.raises(RunFolderError, match=r"tensors-2\.safetensors: 11 bytes, where .*state\.json recorded"):
        load_snapshot(tmp_path)


def test_snapshot_that_is_not_accepted_gives_way_to_the_one_before(tmp_path):
    """What is asked of a state decides between the two; where neither will do there is none."""
    for n in (1, 2):
        save_snapshot(tmp_path, tensors=_tensors(n), state={"n": n})
    assert load_snapshot(tmp_path, accept=lambda state: state["n"] < 2).state["n"] == 1
    assert load_snapshot(tmp_path, accept=lambda state: state["n"] > 2) is None


def _crash_states(tmp_path):
    """Every state of the folder between two saves, in the order in which the second save goes through them."""
    old, new = tmp_path / "old", tmp_path / "new"
    save_snapshot(old, tensors=_tensors(1), state={"n": 1})
    shutil.copytree(old, new)
    save_snapshot(new, tensors=_tensors(2), state={"n": 2})
    tensor_bytes, state_bytes = (new / "tensors-2.safetensors").read_bytes(), (new / "state.json").read_bytes()
    for share in (0.0, 0.3, 0.99, 1.0):
        yield "old", {"tensors-2.safetensors": tensor_bytes[: int(len(tensor_bytes) * share)]}
    for share in (0.0, 0.5, 1.0):
        yield "old", {"tensors-2.safetensors": tensor_bytes, "state.json.tmp": state_bytes[: int(len(state_bytes) * share)]}
    yield "new", {"tensors-2.safetensors": tensor_bytes, "state.json": state_bytes}  # the old tensor file not yet removed


def test_crash_at_any_point_of_a_save_leaves_a_whole_snapshot(tmp_path):
    """Whatever files a save has got to, the old or the new snapshot loads whole, and the next save works and cleans up."""
    for number, (expected, files) in enumerate(_crash_states(tmp_path)):
        folder = tmp_path / f"crash{number}"
        shutil.copytree(tmp_path / "old", folder)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        assert _value(folder) == {"old": (1.0, 1), "new": (2.0, 2)}[expected], files.keys()
        save_snapshot(folder, tensors=_tensors(3), state={"n": 3})
        assert _value(folder) == (3.0, 3)
        assert len(list(folder.iterdir())) == 4, sorted(folder.iterdir())


def test_crash_during_the_very_first_save_is_no_snapshot(tmp_path):
    """A tensor file that no state names is not taken for a snapshot."""
    (tmp_path / "tensors-1.safetensors").write_bytes(b"torn")
    assert load_snapshot(tmp_path) is None
    save_snapshot(tmp_path, tensors=_tensors(1), state={"n": 1})
    assert _value(tmp_path) == (1.0, 1)


def _save_for_ever(folder, written) -> None:
    last = load_snapshot(folder)
    n = last.state["n"] if last else 0
    while True:
        n += 1
        save_snapshot(folder, tensors={"a": torch.full((1000, 500), float(n)), "b": torch.full((77,), float(n))}, state={"n": n})
        os.write(written, f"{n}\n".encode())


def test_kill_at_any_moment_never_leaves_a_torn_snapshot(tmp_path):
    """A process that saves in a loop is killed, a dozen times: what loads is always one whole save, never older than one reported."""
    seen = 0
    for delay in random.Random(0).choices([0.0, 0.001, 0.002, 0.004, 0.007, 0.011], k=12):
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                _save_for_ever(tmp_path, writing)
            finally:
                os._exit(1)
        os.close(writing)
        with open(reading) as reports:
            printed = int(reports.readline())
            time.sleep(delay)
            os.kill(process, signal.SIGKILL)
            printed = int((reports.read().split() or [printed])[-1])
        assert os.waitpid(process, 0)[1] == signal.SIGKILL
        snapshot = load_snapshot(tmp_path)
        assert max(seen, printed) <= snapshot.state["n"] <= printed + 1
        assert all((tensor == snapshot.state["n"]).all() for tensor in snapshot.tensors.values())
        seen = snapshot.state["n"]


def _save_and_die_after(num_lines: int, folder) -> bool:
    """Saves in a forked process that kills itself after so many lines of snapshot.py; whether it died before the end."""
    process = os.fork()
    if process == 0:
        lines = itertools.count()

        def trace(frame, event, argument):
            if frame.f_code.co_filename != snapshot_module.__file__:
                return None
            if event == "line" and next(lines) == num_lines:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            sys.settrace(trace)
            save_snapshot(folder, tensors=_tensors(2), state={"n": 2})
        finally:
            os._exit(0)
    return os.waitpid(process, 0)[1] == signal.SIGKILL


def test_kill_after_each_line_of_a_save_leaves_a_whole_snapshot(tmp_path):
    """Wherever in a save the process dies, the old snapshot loads whole up to one line, and the new one from there on."""
    values = []
    for num_lines in itertools.count():
        folder = tmp_path / str(num_lines)
        save_snapshot(folder, tensors=_tensors(1), state={"n": 1})
        died = _save_and_die_after(num_lines, folder)
        values.append(_value(folder))
        if not died:
            break
    assert set(values) == {(1.0, 1), (2.0, 2)}
    assert values == sorted(values)
    assert len(values) > 50


@pytest.fixture
def full_disk():
    """No file may grow beyond 100 kB: a write fails half-way, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize(("num_values", "text"), [(100_000, ""), (10, "x" * 200_000)], ids=["in the tensors", "in the state"])
def test_full_disk_keeps_the_previous_snapshot_and_leaves_no_debris(tmp_path, full_disk, num_values, text):
    """A write that fails half-way is an EnvironmentFailed that says what is kept; folder and snapshot are as before."""
    save_snapshot(tmp_path, tensors=_tensors(1), state={"n": 1})
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(EnvironmentFailed, match="the previous snapshot is kept"):
        save_snapshot(tmp_path, tensors={"a": torch.zeros(num_values)}, state={"text": text})
    assert _value(tmp_path) == (1.0, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_full_disk_from_the_start_claims_no_earlier_files(tmp_path, full_disk):
    """Nothing is said to be kept where there was nothing."""
    large = {"a": torch.zeros(100_000)}
    with pytest.raises(EnvironmentFailed, match="there is no earlier one"):
        save_snapshot(tmp_path, tensors=large, state={})
    with pytest.raises(EnvironmentFailed, match="there is no earlier file of this name"):
        save_weights(tmp_path / "best.safetensors", large, metadata={})


def test_full_disk_keeps_the_previous_weights(tmp_path, full_disk):
    """best.safetensors is whole or the earlier one."""
    path = tmp_path / "weights" / "best.safetensors"
    save_weights(path, {"a": torch.ones(3)}, metadata={"epoch": "1"})
    with pytest.raises(EnvironmentFailed, match="an earlier file of this name is kept"):
        save_weights(path, {"a": torch.zeros(100_000)}, metadata={})
    assert load_file(path)["a"].tolist() == [1, 1, 1]
    assert read_weights_metadata(path) == {"epoch": "1"}
    assert [p.name for p in path.parent.iterdir()] == ["best.safetensors"]


def test_folder_that_cannot_be_made_is_an_environment_error(tmp_path):
    """A file where the folder should be."""
    (tmp_path / "run").write_text("a file")
    with pytest.raises(EnvironmentFailed, match="snapshot not saved"):
        save_snapshot(tmp_path / "run" / "snapshot", tensors=_tensors(1), state={})


@pytest.mark.parametrize("name", ["state.json", "tensors-1.safetensors"])
def test_pickles_are_never_loaded(tmp_path, name):
    """A file that would run code when unpickled is refused, and its code does not run."""

    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    folder = tmp_path / "snapshot"
    save_snapshot(folder, tensors=_tensors(1), state={"n": 1})
    bomb = pickle.dumps(Bomb(), protocol=0).ljust(0)
    (folder / name).write_bytes(bomb)
    commit = json.loads((folder / "state.json").read_text()) if name != "state.json" else None
    if commit:  # even where the size agrees
        (folder / "state.json").write_text(json.dumps({**commit, "bytes": len(bomb)}))
    with pytest.raises(RunFolderError):
        load_snapshot(folder)
    assert not (tmp_path / "exploded").exists()


def test_changed_tensor_file_is_refused_with_both_sizes(tmp_path):
    """Cut short by something else: the message has found and recorded bytes and the way on."""
    save_snapshot(tmp_path, tensors=_tensors(1), state={"n": 1})
    path = tmp_path / "tensors-1.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunFolderError, match=f"100 bytes, where .* recorded {size}"):
        load_snapshot(tmp_path)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_optimizer_state_comes_back_exactly_also_in_channels_last(small, tmp_path, optimizer):
    """After the round trip through files the next step gives the same bits, whatever the memory layout of the weights."""

    def make(steps):
        step = small.make_step("test_resnet", optimizer=optimizer, layer_decay=0.9, drop=False)
        step.model.to(memory_format=torch.channels_last)
        loader = small.Images(8, batch=8)
        for _ in range(steps):
            item = next(iter(loader))
            step.accumulate(item.images, item.targets, batch_images=8)
            step.apply()
        return step

    straight, saved, resumed = make(3), make(2), make(0)
    tensors, state = pack_optimizer(saved.optimizer)
    save_snapshot(tmp_path, tensors=tensors, state=state)
    snapshot = load_snapshot(tmp_path)
    resumed.model.load_state_dict(saved.model.state_dict())
    unpack_optimizer(resumed.optimizer, snapshot.tensors, snapshot.state)
    item = next(iter(small.Images(8, batch=8)))
    resumed.accumulate(item.images, item.targets, batch_images=8)
    resumed.apply()
    for (name, expected), got in zip(straight.model.state_dict().items(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(expected, got), name


def test_optimizer_of_other_parameters_is_refused(small):
    """A snapshot of the full model does not fit an optimizer over the head."""
    tensors, state = pack_optimizer(small.make_step().optimizer)
    other = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(RunFolderError, match="does not fit this run's"):
        unpack_optimizer(other, tensors, state)


@pytest.mark.parametrize(("before", "after"), [("adamw", "sgd"), ("sgd", "adamw")])
def test_another_kind_of_optimizer_is_refused_by_name(small, before, after):
    """Both are named; a snapshot that does not say its own, as earlier ones did not, is known by its groups."""
    names = {"adamw": "AdamW", "sgd": "SGD"}
    tensors, state = pack_optimizer(small.make_step(optimizer=before).optimizer)
    for packed in (state, {key: value for key, value in state.items() if key != "kind"}):
        with pytest.raises(RunFolderError, match=rf"optimizer is {names[before]}, this run's is {names[after]}: optim\.name was changed"):
            unpack_optimizer(small.make_step(optimizer=after).optimizer, tensors, packed)


def test_random_states_come_back(tmp_path):
    """torch, numpy and Python draw the same numbers again after a trip through the files."""
    np.random.standard_normal()  # leaves half a pair cached
    random.gauss(0, 1)
    tensors, state = pack_rng()
    save_snapshot(tmp_path, tensors=tensors, state=state)
    drawn = (torch.rand(3).tolist(), np.random.standard_normal(3).tolist(), random.gauss(0, 1), random.random())
    snapshot = load_snapshot(tmp_path)
    unpack_rng(snapshot.tensors, snapshot.state)
    assert (torch.rand(3).tolist(), np.random.standard_normal(3).tolist(), random.gauss(0, 1), random.random()) == drawn


def test_state_that_is_not_worth_keeping_does_not_take_the_place_of_one_that_is(tmp_path):
    """However many such states are saved one after another, the last one before them is still there."""
    for n in (1, 2, 3, 4, 5):
        save_snapshot(tmp_path, tensors=_tensors(n), state={"n": n}, worth_keeping=lambda state: state["n"] < 3)
    assert _value(tmp_path) == (5.0, 5)
    assert load_snapshot(tmp_path, accept=lambda state: state["n"] < 3).state["n"] == 2


def test_folder_that_cannot_be_synced_keeps_its_snapshots(tmp_path, monkeypatch):
    """Some network file systems refuse to sync folders: saving goes on, and nothing that was committed is taken back."""
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if os.path.isdir(path):
            raise OSError(22, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    for n in (1, 2):
        save_snapshot(tmp_path, tensors=_tensors(n), state={"n": n})
    assert _value(tmp_path) == (2.0, 2)
