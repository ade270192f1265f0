import os
import stat

import pytest

from core.boards import NOW_S, gone, note
from shoal.core import ManualClock, board
from shoal.core.board import Keeper, look, name_of_run, own_keeper, pin

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
    put(note(1, keeper=Keeper(os.getpid(), "1")), "b")
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
    folder.chmod(0o700)
    folder.rename(folder.with_name("away"))
    full.write(note())
    full.remove()
    assert look(CLOCK) == []
    put(note())
    (folder / "broken.json").write_text("{")
    (folder / "huge.json").write_text("[" * (1 << 17))
    (folder / "other.txt").write_text("other")
    torn = folder / ".torn.json"
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
