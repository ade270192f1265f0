"""The checkpoint format: folders that are whole or not there, and states that come back as they were."""

import json
import math
import os
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest
import torch

from shoal.core import CheckpointError, UsageError
from shoal.tensors.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    checkpoint_paths,
    clear_leftovers,
    flatten,
    newest_first,
    rebuild,
    this_process,
)


def write(folder, step, value, num_kept=2):
    with CheckpointWriter.begin(folder, step) as writer:
        writer.write_tensors("model", {"x": torch.tensor([value])})
        return writer.seal("all-reduce", step, num_kept=num_kept)


def value_of(checkpoint):
    return checkpoint.tensors("model")["x"].item()


def newest(folder):
    return value_of(next(newest_first(folder)))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_is_read_and_nothing_else_is_there(tmp_path):
    state = {"x": torch.arange(3), 7: [1, (2.0, None)], "all": torch.ones(2, 3).t()}
    with CheckpointWriter.begin(tmp_path / "run", 120) as writer:
        writer.write_state("workers/rank-0", state)
        assert not checkpoint_paths(tmp_path / "run")
        path = writer.seal("pair", 120, num_workers=3)
    assert names(tmp_path / "run") == ["step-00000120"]
    checkpoint = Checkpoint.open(path)
    manifest = checkpoint.manifest
    assert (manifest.owner, manifest.step, manifest.num_workers, manifest.number) == ("pair", 120, 3, 1)
    assert checkpoint.has_state("workers/rank-0")
    assert not checkpoint.has_state("workers/rank-1")
    checkpoint.check_state("workers/rank-0")
    again = checkpoint.state("workers/rank-0")
    assert again[7] == [1, (2.0, None)]
    assert torch.equal(again["x"], state["x"])
    assert torch.equal(again["all"], state["all"])


def test_what_is_not_sealed_leaves_nothing_behind(tmp_path):
    with CheckpointWriter.begin(tmp_path, 1) as writer:
        writer.write_tensors("model", {"x": torch.zeros(1)})
        with pytest.raises(UsageError, match="of type object"):
            writer.write_state("optimizer", {"x": object()})
    assert names(tmp_path) == []


def test_several_processes_write_one_checkpoint(tmp_path):
    first = CheckpointWriter.begin(tmp_path, 5)
    second = CheckpointWriter(first.staging)
    first.write_state("workers/rank-0", {"a": 1})
    second.write_state("workers/rank-1", {"a": 2})
    checkpoint = Checkpoint.open(first.seal("pair", 5, num_workers=2, files=second.files))
    assert [checkpoint.state(f"workers/rank-{rank}")["a"] for rank in range(2)] == [1, 2]
    checkpoint.check(list(checkpoint.manifest.files))
    assert checkpoint.has_all_bytes


def test_one_of_those_that_leave_one_by_one_gets_the_notes_of_all(tmp_path):
    staging, names_of_all = tmp_path / ".end-x", ["0", "1", "2"]
    got = []
    for name in names_of_all:
        writer = CheckpointWriter.join(staging, [this_process()])
        got.append(writer.leave(name, name.encode(), names_of_all))
    assert got == [{}, {}, {"0": b"0", "1": b"1", "2": b"2"}]
    assert writer.leave("1", b"again", names_of_all) == {}
    path = writer.seal("pair", 3)
    assert names(path) == ["manifest.json"]


def test_the_newest_are_kept_and_what_is_damaged_pushes_out_nothing(tmp_path):
    for step in (5, 1, 3):
        write(tmp_path, step, float(step))
        assert newest(tmp_path) == step  # the latest written, whatever its step
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    os.truncate(tmp_path / "step-00000003" / "model.safetensors", 9)
    os.truncate(tmp_path / "step-00000001" / "manifest.json", 9)
    write(tmp_path, 4, 4.0)
    assert names(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]
    write(tmp_path, 6, 6.0)
    assert names(tmp_path) == ["step-00000004", "step-00000006"]


def test_who_saves_the_same_step_at_once_replaces_each_other(tmp_path):
    num_saves, failures = 20, []
    start = threading.Barrier(3)

    def save(value):
        start.wait()
        try:
            for _ in range(num_saves):
                write(tmp_path, 1, value)
        except OSError as error:
            failures.append(error)

    several = [threading.Thread(target=save, args=(float(number),)) for number in range(3)]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
    assert not failures
    assert newest(tmp_path) in (0.0, 1.0, 2.0)
    write(tmp_path, 1, 9.0)
    assert names(tmp_path) == ["step-00000001"]
    assert newest(tmp_path) == 9.0


def test_what_is_replaced_counts_until_the_new_one_is_there(tmp_path, monkeypatch):
    write(tmp_path, 1, 1.0)
    path = write(tmp_path, 2, 2.0)
    rename = type(path).rename

    def stop_halfway(self, target):
        if target == path:
            raise OSError(5, "power failed")
        return rename(self, target)

    with monkeypatch.context() as patches:
        patches.setattr(type(path), "rename", stop_halfway)
        with pytest.raises(OSError, match="power failed"):
            write(tmp_path, 2, 3.0)
    assert not path.exists()
    assert newest(tmp_path) == 2.0
    write(tmp_path, 3, 4.0)
    (replaced,) = tmp_path.glob(".*-replaced")
    assert not (tmp_path / "step-00000001").exists()
    assert value_of(Checkpoint.open(replaced)) == 2.0
    write(tmp_path, 2, 5.0)
    assert not list(tmp_path.glob(".*-replaced"))
    assert newest(tmp_path) == 5.0


def flipped(content, position):
    """The same bytes but for one bit."""
    damaged = bytearray(content)
    damaged[position // 8] ^= 1 << position % 8
    return bytes(damaged)


def test_no_bit_of_a_manifest_can_change_what_is_loaded(tmp_path):
    path = write(tmp_path, 1, 2.0)
    whole = Checkpoint.open(path).manifest
    content = (path / "manifest.json").read_bytes()
    num_refused = 0
    with (path / "manifest.json").open("rb+", buffering=0) as file:
        for position in range(8 * len(content)):
            place = position // 8
            file.seek(place)
            file.write(flipped(content, position)[place : place + 1])
            try:
                manifest = Checkpoint.open(path).manifest
            except CheckpointError:
                num_refused += 1
            else:
                # what can be lost is the checksum's own name
                assert msgspec.structs.replace(manifest, sha256=whole.sha256) == whole
            file.seek(place)
            file.write(content[place : place + 1])
    assert Checkpoint.open(path).manifest == whole
    assert num_refused > 6 * len(content)


def test_a_newer_format_is_named(tmp_path, caplog):
    path = write(tmp_path, 1, 1.0)
    content = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps(content | {"format": 2}))
    assert list(newest_first(tmp_path)) == []
    assert "its format is 2, and this Shoal reads 1" in caplog.text


def test_a_field_that_a_later_version_adds_is_part_of_the_checksum(tmp_path):
    path = write(tmp_path, 1, 1.0)
    file, content = path / "manifest.json", json.loads((path / "manifest.json").read_bytes())
    file.write_text(json.dumps(content | {"later": 1}))
    with pytest.raises(CheckpointError, match=r"manifest\.json is not what was written"):
        Checkpoint.open(path)


def test_the_folder_of_several_writers_stays_while_one_of_them_runs(tmp_path):
    machine, *_ = this_process().split(".")
    commands = ["import time; time.sleep(600)", ""]
    live, gone = [subprocess.Popen([sys.executable, "-c", command]) for command in commands]
    try:
        gone.wait()
        staging = tmp_path / f".end-{machine}.{gone.pid}.1-00000000"  # of the first worker, which has ended
        CheckpointWriter.join(staging, [f"{machine}.{gone.pid}.1", f"{machine}.{live.pid}."])
        clear_leftovers(tmp_path)
        assert staging.exists()
    finally:
        live.kill()
        live.wait()
    clear_leftovers(tmp_path)
    assert not staging.exists()


def test_a_state_comes_back_as_it_was():
    state = {
        "state": {0: {"step": torch.tensor(3.0), "betas": (0.9, 0.99)}, 7: {}},
        "list": [1, None, True, "text", torch.ones(2, 2, dtype=torch.bfloat16)],
        "odd": [math.inf, -math.inf, {"$tensor": "a"}, {}],
        "state.0": {"step": torch.tensor(4)},
        "number": np.float64(0.5),
    }
    plain, tensors = flatten(state)
    again = rebuild(json.loads(json.dumps(plain, allow_nan=False)), tensors)
    assert again["state"][0]["step"] == 3.0
    assert again["state.0"]["step"] == 4
    assert again["state"][0]["betas"] == (0.9, 0.99)
    assert again["state"][7] == {}
    assert again["list"][:4] == state["list"][:4]
    assert again["odd"] == state["odd"]
    assert type(again["number"]) is float
    assert math.isnan(rebuild(flatten({"x": math.nan})[0], {})["x"])


def test_what_has_no_place_is_named():
    with pytest.raises(UsageError, match=r"state\.0\.what is of type object"):
        flatten({"state": {0: {"what": object()}}})
