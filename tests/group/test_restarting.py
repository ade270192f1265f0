"""What a worker leaves in the memory of its machine, and who may find it there."""

import os
import stat
import subprocess
import sys

import pytest
import torch

from shoal.core import Placement
from shoal.core.processes import started
from shoal.group import SoloGroup
from shoal.group.elastic import has_restarts_left, open_restarted
from shoal.tensors.restart_memory import RestartMemory, _machine

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "a run",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_RESTART_COUNT": "1",
}
PLACED = Placement(source="torchrun")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="torchrun restarts by signals")


def keep(memory, generation=1, number=1, step=7):
    memory.keep(number, generation, "all-reduce", step, {"weight": torch.arange(3.0), "steps": step})


def test_what_was_kept_is_taken_and_nothing_stays(tmp_path):
    memory = RestartMemory("kept", [tmp_path])
    assert memory.generation == 0
    assert memory.take(1) is None
    keep(memory, generation=4)
    again = RestartMemory("kept", [tmp_path])
    assert again.generation == 4
    state = again.take(1)
    assert state["steps"] == 7
    assert state["weight"].tolist() == [0.0, 1.0, 2.0]
    again.discard(1)
    assert not list(tmp_path.iterdir())


def test_a_later_state_takes_the_place_of_an_earlier_one_also_with_fewer_steps(tmp_path):
    memory = RestartMemory("kept", [tmp_path])
    keep(memory, generation=1, step=9)
    keep(memory, generation=2, step=5)
    assert memory.take(1)["steps"] == 5
    assert memory.generation == 2


def test_each_session_has_its_own(tmp_path):
    memory = RestartMemory("kept", [tmp_path])
    keep(memory, number=1, step=3)
    keep(memory, number=2, step=4)
    memory.discard(1)
    assert memory.take(1) is None
    assert memory.take(2)["steps"] == 4


def test_nobody_else_can_read_it(tmp_path):
    keep(RestartMemory("kept", [tmp_path]))
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700


def test_a_folder_that_others_can_write_to_is_not_believed(tmp_path):
    memory = RestartMemory("kept", [tmp_path])
    keep(memory)
    (tmp_path / "kept").chmod(0o777)
    assert memory.take(1) is None
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        keep(memory)


def test_without_room_in_the_first_place_the_second_is_taken(tmp_path):
    (tmp_path / "full").write_text("no folder")
    memory = RestartMemory("kept", [tmp_path / "full", tmp_path])
    keep(memory)
    assert memory.take(1)["steps"] == 7


def test_a_damaged_state_is_left_out(tmp_path, caplog):
    memory = RestartMemory("kept", [tmp_path])
    keep(memory)
    (written,) = (tmp_path / "kept").rglob("worker.json")
    written.write_text("{}")
    assert memory.take(1) is None
    assert "is left out" in caplog.text


def test_what_a_run_has_left_that_is_over_is_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.tensors.restart_memory._SHARED_MEMORY", tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        names = [
            f"shoal-restart-{_machine()}.{pid}.{started(pid)}-01234567-0" for pid in (other.pid, os.getpid())
        ]
        for name in names:
            keep(RestartMemory(name, [tmp_path]))
        RestartMemory.of_torchrun(TORCHRUN, 0)
        assert {path.name for path in tmp_path.iterdir()} == set(names)
        other.communicate(b"\n")
    RestartMemory.of_torchrun(TORCHRUN, 0)
    assert [path.name for path in tmp_path.iterdir()] == names[1:]


def test_only_torchrun_with_restarts_starts_anew():
    group = SoloGroup()
    assert open_restarted(group, Placement(), TORCHRUN) is group
    assert open_restarted(group, Placement(source="shoal run"), TORCHRUN) is group
    for name in TORCHRUN:
        other = {key: value for key, value in TORCHRUN.items() if key != name}
        assert open_restarted(group, PLACED, other) is group or name == "TORCHELASTIC_RESTART_COUNT"
    assert open_restarted(group, PLACED, {**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "0"}) is group
    assert open_restarted(group, PLACED, TORCHRUN).form.generation == 1


@pytest.mark.parametrize(("count", "is_left"), [("0", True), ("2", True), ("3", False)])
def test_restarts_that_are_left(count, is_left):
    assert has_restarts_left({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": count}) is is_left
