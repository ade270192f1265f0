"""Sessions of strangers are few, and those of one host cost no other host its place."""

import pytest

from shoal.transport.datagrams import handshake
from shoal.transport.datagrams.handshake import UnprovenSessions


class Stranger:
    def __init__(self, host, number):
        self.where, self.id = (host, number), f"{host} {number}".encode()


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(handshake, "MAX_UNPROVEN", 10)
    monkeypatch.setattr(handshake, "MAX_UNPROVEN_A_HOST", 4)


def test_a_host_pushes_out_its_own_only():
    sessions = {}
    some = UnprovenSessions(sessions)
    first = Stranger("quiet", 0)
    some.add(first)
    for number in range(100):
        some.add(Stranger("loud", number))
    assert sorted(sessions) == [b"loud 96", b"loud 97", b"loud 98", b"loud 99", b"quiet 0"]
    assert len(some) == 5


def test_there_are_never_too_many():
    sessions = {}
    some = UnprovenSessions(sessions)
    for number in range(100):
        some.add(Stranger(f"host{number}", 1))
    assert len(some) == len(sessions) == 10
    assert b"host99 1" in sessions


def test_who_has_proven_itself_is_not_pushed_out_any_more():
    sessions = {}
    some = UnprovenSessions(sessions)
    proven = Stranger("host", 0)
    some.add(proven)
    some.remove(proven)
    some.remove(proven)
    assert len(some) == 0
    for number in range(1, 50):
        some.add(Stranger("host", number))
    assert sessions[proven.id] is proven
