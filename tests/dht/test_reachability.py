"""A peer that others cannot call becomes a client by itself."""

import logging

import pytest

from dht.memory_swarm import in_swarm
from shoal.dht import reachability
from shoal.transport import Reply
from shoal.transport.introductions import DIAL_BACK


class Answers:
    """An endpoint's datagrams whose answer to being asked for a call back is known beforehand."""

    def __init__(self, real, attempts):
        self._real, self._attempts = real, attempts

    def __getattr__(self, name):
        return getattr(self._real, name)

    async def call(self, peer, method, payload=None, **options):
        if method != DIAL_BACK:
            return await self._real.call(peer, method, payload, **options)
        assert payload.ways == ("udp",)
        return Reply({"address": "10.0.0.7:1", "attempts": self._attempts})


@pytest.mark.parametrize(
    ("attempts", "is_client"),
    [
        ([{"way": "udp", "outcome": "silent"}], True),
        ([{"way": "udp", "outcome": "ok"}], False),
        ([], False),
        ("nonsense", False),
    ],
)
def test_who_cannot_be_called_back_is_a_client(monkeypatch, caplog, attempts, is_client):
    async def check(swarm, first, second):
        assert not second.is_client
        monkeypatch.setattr(second.endpoint.network, "is_simulated", False, raising=False)
        monkeypatch.setattr(second.endpoint, "datagrams", Answers(second.endpoint.datagrams, attempts))
        await reachability.check_reachable(second, second.book.of(first.peer))
        assert second.is_client is is_client
        assert (second.asking.port == 0) is is_client

    caplog.set_level(logging.WARNING)
    in_swarm(2, check)
    assert ("shoal doctor --join" in caplog.text) is is_client


def test_it_is_really_dialed_back():
    async def check(swarm, first, second):
        assert await reachability._is_dialed_back(second, second.book.of(first.peer)) is True

    in_swarm(2, check)
