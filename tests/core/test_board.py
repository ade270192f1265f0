import math
import os
import shutil
import stat
from pathlib import Path

import pytest

from core.boards import NOW_S, gone, note
from shoal.core import ManualClock, board
from shoal.core.board import KeeperProcess, look, name_of_run, own_keeper, pin

pytestmark = pytest.mark.skipif(os.name != "posix", reason="folders have owners on POSIX only")
CLOCK = ManualClock(wall_s=NOW_S + 0.5)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(board, "_MEMORY", tmp_path / "none")
    monkeypatch.setattr(board.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path / "shoal"


def put(one, name=None):
    pinned = pin(name or ".".join(map(str, (*one.who, one.pid))))
    pinned.write(one)
    return pinned


def seen():
    return [(one.note.run, one.note.rank, one.state) for one in look(CLOCK)]


def test_what_is_pinned_up_is_seen_until_it_is_taken_down(folder):
    first, second = put(note(1, step=3)), put(note(0, step=4))
    assert [(one.note.rank, one.note.step, one.age_s) for one in look(CLOCK)] == [(0, 4, 0.5), (1, 3, 0.5)]
    first.write(note(1, step=5))
    assert [one.note.step for one in look(CLOCK)] == [4, 5]
    first.remove()
    first.remove()
    second.remove()
    assert look(CLOCK) == []
    assert list(folder.iterdir()) == []


def test_a_worker_that_is_gone_is_seen_while_others_of_its_run_are_there(folder):
    put(gone(0))
    there = put(note(1))
    put(gone(0, "over"))
    assert seen() == [("job", 0, "gone"), ("job", 1, "running")]
    assert [path.name.partition(".")[0] for path in folder.iterdir()] == ["job", "job"]
    there.remove()
    assert seen() == []
    assert list(folder.iterdir()) == []


def test_of_several_notes_of_one_worker_that_of_its_own_counts(folder):
    put(note(0, host="b", step=9, keeper=own_keeper()), "copy")
    assert [one.note.host for one in look(CLOCK)] == ["b"]
    put(note(0, host="here", step=8))
    put(gone(0, host="before", noted_s=NOW_S + 1), "older")
    assert [one.note.host for one in look(CLOCK)] == ["here"]


def test_a_copy_goes_with_its_keeper_and_has_the_state_that_was_seen_elsewhere(folder):
    put(note(0, pid=1, started="?", keeper=own_keeper(), state="stopped"), "a")
    put(note(1, keeper=KeeperProcess(os.getpid(), "1")), "b")
    assert seen() == [("job", 0, "stopped")]
    assert len(list(folder.iterdir())) == 1


def test_nobody_else_can_read_it_or_put_anything_there(folder, tmp_path):
    put(note())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()] == [0o600]
    folder.chmod(0o770)
    assert look(CLOCK) == []
    put(note(1), "elsewhere")
    assert not (tmp_path / "tmp").exists()  # there is no temporary folder either: done without
    folder.chmod(0o700)
    assert [one.note.rank for one in look(CLOCK)] == [0]


def test_a_folder_that_somebody_has_linked_is_not_used(folder, tmp_path):
    (tmp_path / "trap").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "trap")
    put(note())
    assert list((tmp_path / "trap").iterdir()) == []


def test_a_disk_that_is_full_or_files_that_are_none_of_ours_are_lived_with(folder):
    full = pin("full")
    folder.rename(folder.with_name("away"))
    folder.write_text("in the way")
    full.write(note())
    full.remove()
    assert look(CLOCK) == []
    folder.unlink()
    put(note())
    (folder / "broken.note").write_text("{")
    (folder / "huge.note").write_text("[" * (1 << 17))
    (folder / "other.txt").write_text("other")
    torn = folder / ".torn.note"
    torn.write_text("{")
    os.utime(torn, (NOW_S - 3600, NOW_S - 3600))
    assert seen() == [("job", 0, "running")]
    assert not torn.exists()


@pytest.mark.parametrize(("value", "is_wanted"), [("", True), ("1", True), ("0", False)])
def test_it_can_be_turned_off(value, is_wanted):
    assert board.is_wanted({"SHOAL_TOP": value}) is is_wanted


def test_names_of_runs_are_short_words():
    assert name_of_run("5294743b4f07-1") == "5294743b4f07-1"
    odd = name_of_run("torchrun MASTER_ADDR=x MASTER_PORT=1")
    assert odd.isalnum()
    assert odd != name_of_run("torchrun MASTER_ADDR=x MASTER_PORT=2")


def test_a_loss_that_is_no_number_is_seen_as_it_is(folder):
    put(note(values={"loss": math.nan, "most": math.inf, "least": -math.inf}, waited_s={3: 1.5}))
    (seen,) = look(CLOCK)
    assert math.isnan(seen.note.values["loss"])
    assert (seen.note.values["most"], seen.note.values["least"]) == (math.inf, -math.inf)
    assert seen.note.waited_s == {3: 1.5}


def test_a_board_that_was_removed_is_made_anew_by_the_next_note(folder):
    pinned = put(note(step=1))
    shutil.rmtree(folder)
    assert look(CLOCK) == []
    pinned.write(note(step=2))
    assert [one.note.step for one in look(CLOCK)] == [2]
    pinned.remove()
    assert list(folder.iterdir()) == []


def test_a_note_of_which_only_half_went_out_takes_no_ones_place(folder, monkeypatch):
    pinned, write = put(note(step=1)), os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[: len(data) // 2]))
        pinned.write(note(step=2))
    assert [one.note.step for one in look(CLOCK)] == [1]
    assert len(list(folder.iterdir())) == 1


def test_processes_of_another_namespace_are_seen_by_their_age_and_left_alone(folder, monkeypatch):
    put(gone(0, namespace="another"))
    put(
        note(0, "copied", pid=1, namespace="another", keeper=KeeperProcess(os.getpid(), "1"), state="stopped")
    )
    assert seen() == [("copied", 0, "stopped"), ("job", 0, "running")]
    put(gone(1, namespace=board.namespace()))
    assert ("job", 1, "gone") in seen()
    assert len(list(folder.iterdir())) == 3
    assert look(ManualClock(wall_s=NOW_S + 2 * 3600)) == []
    assert list(folder.iterdir()) == []


def test_a_folder_that_goes_while_it_is_read_has_nothing(folder, monkeypatch):
    monkeypatch.setattr(board, "is_own", lambda folder: True)
    assert not Path(folder).exists()
    assert look(CLOCK) == []


@pytest.mark.parametrize(
    ("state", "age_s", "steps_per_s", "rate", "share"),
    [
        ("running", 2.9, 10.0, 100.0, 0.5),
        ("running", 3.1, 10.0, 0.0, None),
        ("running", 25.0, 0.1, 100.0, 0.5),  # a step takes ten seconds
        ("running", 31.0, 0.1, 0.0, None),
        ("stopped", 0.5, 10.0, 0.0, None),
        ("gone", 0.5, 10.0, None, None),
    ],
)
def test_the_rates_of_a_worker_that_has_long_noted_nothing_are_not_those_of_now(
    state, age_s, steps_per_s, rate, share
):
    told = note(steps_per_s=steps_per_s, examples_per_s=100.0, wait_share=0.5, waits_for=1, step=7)
    now = board.Sighting(told, state, age_s).now()
    assert (now.note.examples_per_s, now.note.wait_share, now.note.step) == (rate, share, 7)
    assert board.Sighting(note(), state, 60.0).now().note.examples_per_s is None
