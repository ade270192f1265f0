import os

import pytest

from shoal.core import board
from shoal.core.board import folders, folders_to_read, make_folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="folders have owners on POSIX only")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Three folders where a board may be made, in their order, and one of the user's sessions."""
    found = {name: tmp_path / name for name in ("runtime", "memory", "tmp", "sessions")}
    for place in found.values():
        place.mkdir()
        place.chmod(0o700)
    (found["sessions"] / str(os.getuid())).mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(found["runtime"]))
    monkeypatch.setattr(board, "_MEMORY", found["memory"])
    monkeypatch.setattr(board, "_SESSIONS", found["sessions"])
    monkeypatch.setattr(board.tempfile, "gettempdir", lambda: str(found["tmp"]))
    return found


def names(found):
    return [folder.parent.name for folder in found]


def test_the_folder_of_the_session_is_preferred(places):
    assert names(folders()) == names(folders_to_read()) == ["runtime", "memory", "tmp"]
    assert make_folder() == places["runtime"] / "shoal"


def test_what_others_can_change_is_not_used(places):
    places["runtime"].chmod(0o1777)
    assert make_folder() == places["memory"] / f"shoal-{os.getuid()}"
    places["memory"].chmod(0o777)
    places["tmp"].chmod(0o1777)
    assert names(folders()) == ["tmp"]
    places["tmp"].chmod(0o770)
    assert folders() == []
    assert make_folder() is None


def test_whoever_looks_from_outside_of_a_session_looks_into_its_folder_too(places, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert names(folders()) == ["memory", "tmp"]
    assert names(folders_to_read()) == [str(os.getuid()), "memory", "tmp"]
    (places["sessions"] / str(os.getuid())).chmod(0o777)
    assert names(folders_to_read()) == ["memory", "tmp"]
