import pytest

from shoal.bench.open_files import ensure_open_files
from shoal.core import UsageError

resource = pytest.importorskip("resource")


@pytest.fixture
def limits(monkeypatch):
    """The limits of a process: soft and hard."""
    held = [100, 1000]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(held))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: held.__setitem__(slice(None), pair))
    return held


def test_nothing_is_said_or_done_where_there_is_room(limits):
    assert ensure_open_files(100, should_raise=False) is None
    assert ensure_open_files(100, should_raise=True) == "The limit on open files is 100 already."
    limits[:] = [resource.RLIM_INFINITY] * 2
    assert ensure_open_files(10**9, should_raise=False) is None


def test_it_is_raised_only_when_asked_and_said(limits):
    with pytest.raises(UsageError, match="needs up to 500 open files, and may have 100") as refused:
        ensure_open_files(500, should_raise=False)
    assert "--increase-file-limit" in str(refused.value)
    assert ensure_open_files(500, should_raise=True) == "Raised the limit on open files from 100 to 500."
    assert limits == [500, 1000]


def test_beyond_the_systems_own_limit_there_is_other_advice(limits):
    with pytest.raises(UsageError, match="--num-processes"):
        ensure_open_files(2000, should_raise=True)
    assert limits == [100, 1000]
