"""Checkpoints are whole or not there, the newest few are kept, and names stay inside the folder."""

import functools
import json
import os
import shutil
import time

import pytest
import torch

from experts.fake_server import small_expert, train, values
from shoal.core import UsageError
from shoal.experts.server.checkpoints import CheckpointError, Checkpoints
from shoal.experts.state import ExpertState
from shoal.tensors.checkpoint import CheckpointWriter

UID = "ffn.1.2"


@functools.cache
def state_after(num_updates):
    return small_expert(num_updates=num_updates).state()


def names(folder, uid=UID):
    """Of all that is there, hidden or not."""
    return sorted(path.name for path in (folder / uid).iterdir())


def test_training_goes_on_from_a_checkpoint_to_the_bit(tmp_path):
    expert = small_expert(num_updates=3)
    path = Checkpoints(tmp_path).save(UID, expert.state(), {"class": "ffn", "hidden_dim": 4})
    saved = Checkpoints(tmp_path).load(UID)
    assert (saved.uid, saved.num_updates, saved.about) == (UID, 3, {"class": "ffn", "hidden_dim": 4})
    assert saved.path == path
    other = small_expert(seed=1)
    assert other.load(saved.state) == []
    train(expert, 3)
    train(other, 3)
    assert torch.equal(values(expert), values(other))
    assert other.num_updates == 6


def test_ids_of_what_was_applied_are_saved_with_it_and_checkpoints_without_them_are_read(tmp_path):
    ids = [bytes([number] * 16) for number in range(3)]
    expert, checkpoints = small_expert(num_updates=3), Checkpoints(tmp_path)
    expert.backward([torch.randn(3, 4)], [torch.randn(3, 4)], ids[:2])
    checkpoints.save(UID, expert.state())
    restored = small_expert(seed=1)
    assert restored.load(checkpoints.load(UID).state) == []
    assert [restored.has_applied(one) for one in ids] == [True, True, False]

    old = expert.state()
    del old.tensors["applied_ids"], old.numbers["gradient_norms"]
    checkpoints.save(UID, old)
    assert restored.load(checkpoints.load(UID).state) == []
    assert not any(map(restored.has_applied, ids))
    assert torch.equal(values(restored), values(expert))


def test_the_newest_few_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, num_kept=2)
    expert = small_expert()
    for _ in range(4):
        train(expert, 1)
        checkpoints.save(UID, expert.state())
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert checkpoints.num_updates(UID) == 4
    with pytest.raises(UsageError, match="At least one"):
        Checkpoints(tmp_path, num_kept=0)


def test_the_latest_written_counts_however_many_updates_it_has(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for num_updates in (3, 1, 2, 1):
        checkpoints.save(UID, state_after(num_updates))
        assert checkpoints.load(UID).num_updates == checkpoints.num_updates(UID) == num_updates


def cut_tensors(path):
    os.truncate(path / "expert.safetensors", 100)


def flip_a_bit(path):
    file = path / "expert.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def change(path, **fields):
    """Without a checksum, so that what is changed is all that is wrong."""
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"sha256": ""} | fields))


DAMAGES = {
    "tensors cut": cut_tensors,
    "a bit flipped": flip_a_bit,
    "tensors gone": lambda path: (path / "expert.safetensors").unlink(),
    "state gone": lambda path: (path / "expert.json").unlink(),
    "half a state": lambda path: os.truncate(path / "expert.json", 50),
    "half a manifest": lambda path: os.truncate(path / "manifest.json", 50),
    "no manifest": lambda path: (path / "manifest.json").write_bytes(b""),
    "not an object": lambda path: (path / "manifest.json").write_bytes(b"[1]"),
    "deep JSON": lambda path: (path / "manifest.json").write_bytes(b"[" * 100_000),
    "a field of another type": lambda path: change(path, step="many"),
    "a newer format": lambda path: change(path, format=2),
    "of another expert": lambda path: change(path, strategy="ffn.1.3"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_what_is_not_whole_is_passed_over(tmp_path, caplog, damage):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(UID, state_after(1))
    newest = checkpoints.save(UID, state_after(2))
    damage(newest)
    assert checkpoints.load(UID).num_updates == 1
    assert str(newest) in caplog.text
    damage(tmp_path / UID / "step-00000001")
    assert checkpoints.load(UID) is None
    assert "none of them whole" in caplog.text
    checkpoints.save(UID, state_after(3))
    assert checkpoints.load(UID).num_updates == 3


def test_a_checkpoint_of_something_else_is_passed_over(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(UID, state_after(1))
    with CheckpointWriter.begin(tmp_path / UID, 2) as writer:
        writer.write_tensors("model", {})
        writer.seal(UID, 2)
    assert checkpoints.load(UID).num_updates == 1
    assert "step-00000002 is left out" in caplog.text


def test_damaged_ones_do_not_push_out_whole_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path, num_kept=2)
    for num_updates in (1, 2):
        checkpoints.save(UID, state_after(num_updates))
    cut_tensors(tmp_path / UID / "step-00000002")
    flip_a_bit(checkpoints.save(UID, state_after(3)))
    assert checkpoints.load(UID).num_updates == 1


@pytest.mark.parametrize(
    "failing", ["os.fsync", "pathlib.Path.replace", "shoal.tensors.checkpoint.save_file"]
)
def test_a_disk_that_fails_leaves_what_was_there(tmp_path, monkeypatch, failing):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(UID, state_after(1))
    before = names(tmp_path)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(failing, fail)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoints.save(UID, state_after(2))
    monkeypatch.undo()
    assert names(tmp_path) == before
    assert checkpoints.load(UID).num_updates == 1


def test_what_was_not_finished_is_no_checkpoint_and_goes_after_a_while(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.save(UID, state_after(1))
    left, foreign = tmp_path / UID / ".step-00000009-deadbeef.1.1-00000000", tmp_path / UID / "notes.txt"
    shutil.copytree(first, left)
    foreign.write_bytes(b"mine")
    second = checkpoints.save(UID, state_after(2))
    assert left.exists()  # a process of another machine may be writing it
    assert checkpoints.load(UID).num_updates == 2
    os.utime(left, (time.time() - 48 * 3600,) * 2)
    newest = checkpoints.save(UID, state_after(3))
    assert not left.exists()
    assert all(path.exists() for path in (foreign, first, second, newest))


@pytest.mark.parametrize(
    "uid",
    ["", ".", "..", "../x", "a/b", "/etc", "a\\b", "ffn..1", ".ffn", "ffn.", "a\0b", "a b", "a\n", "x" * 201],
)
def test_a_uid_that_leads_elsewhere_is_refused(tmp_path, uid):
    checkpoints = Checkpoints(tmp_path / "here")
    for work in (lambda: checkpoints.save(uid, state_after(0)), lambda: checkpoints.load(uid)):
        with pytest.raises(UsageError, match="cannot have checkpoints"):
            work()
    assert list(tmp_path.rglob("*.json")) == []


def test_only_folders_with_checkpoints_are_experts(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert Checkpoints(tmp_path / "nothing").uids() == []
    for uid in ("ffn.3.14", "expert0", "ffn.10"):
        checkpoints.save(uid, state_after(0))
    (tmp_path / "empty.1").mkdir()
    (tmp_path / "file.1").write_text("")
    shutil.copytree(tmp_path / "expert0", tmp_path / "lost+found")
    assert checkpoints.uids() == ["expert0", "ffn.10", "ffn.3.14"]
    assert checkpoints.load("nobody") is None
    assert checkpoints.num_updates("nobody") is None


def test_several_may_write_into_one_folder(tmp_path):
    several = [Checkpoints(tmp_path) for _ in range(3)]
    for num_updates in range(1, 7):
        several[num_updates % 3].save(UID, state_after(num_updates))
        assert [one.load(UID).num_updates for one in several] == [num_updates] * 3
    assert names(tmp_path) == ["step-00000004", "step-00000005", "step-00000006"]


def test_what_json_cannot_hold_is_said_and_nothing_is_left(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be written"):
        Checkpoints(tmp_path).save(UID, state_after(0), {"module": object()})
    assert Checkpoints(tmp_path).uids() == []


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_number_that_json_has_no_word_for_is_refused(tmp_path, number):
    numbers = state_after(0).numbers | {"scheduler": {"kind": "x", "values": {"best": [number]}}}
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        Checkpoints(tmp_path).save(UID, ExpertState(state_after(0).tensors, numbers))
    assert Checkpoints(tmp_path).uids() == []
