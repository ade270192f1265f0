"""A peer that others cannot call becomes a client by itself, and serves again when they can."""

import logging

import pytest

from dht.memory_swarm import in_swarm
from shoal.dht import join
from shoal.transport import Reply
from shoal.transport.introductions import DIAL_BACK


class Answers:
    """An endpoint's datagrams where each peer's answer to being asked for a call back is known beforehand."""

    def __init__(self, real, outcomes):
        self._real = real
        self.outcomes = outcomes
        """By host."""
        self.asked = []

    def __getattr__(self, name):
        return getattr(self._real, name)

    async def call(self, peer, method, payload=None, **options):
        if method != DIAL_BACK:
            return await self._real.call(peer, method, payload, **options)
        assert payload.ip_protocols == ("udp",)
        self.asked.append(peer.address.host)
        outcome = self.outcomes[peer.address.host]
        attempts = outcome if isinstance(outcome, list) else [{"way": "udp", "outcome": outcome}]
        return Reply({"address": "10.0.0.7:1", "attempts": attempts})


def in_real_swarm(monkeypatch, num_others, work, **settings):
    """Run `work(dht, answers, contacts)` at a peer that takes its network for a real one."""

    async def prepare(swarm, *peers):
        dht = await swarm.add(**settings)
        answers = Answers(dht.endpoint.datagrams, {})
        monkeypatch.setattr(dht.endpoint.network, "is_simulated", False, raising=False)
        monkeypatch.setattr(dht.endpoint, "datagrams", answers)
        await work(dht, answers, [dht.protocol.book.of(peer.peer) for peer in peers])

    in_swarm(num_others, prepare)


@pytest.mark.parametrize(
    ("outcomes", "num_asked", "is_client"),
    [
        (["silent", "silent", "ok"], 2, True),
        (["refused", "silent"], 2, True),
        (["silent", "ok", "silent"], 2, False),
        (["ok", "silent"], 1, False),
        (["silent", [], "refused"], 3, True),
        (["silent", []], 2, False),
        (["silent", "failed", "unreachable", "other version", "silent"], 4, False),
        (["silent"], 1, True),
        (["failed"], 1, False),
        (["unknown host"], 1, False),
        (["nonsense"], 1, False),
        ([[]], 1, False),
    ],
)
def test_who_cannot_be_called_back_is_a_client(monkeypatch, caplog, outcomes, num_asked, is_client):
    async def check(dht, answers, contacts):
        answers.outcomes = {
            contact.peer.address.host: outcome for contact, outcome in zip(contacts, outcomes, strict=True)
        }
        await dht.joining.reachability.check(contacts)
        assert answers.asked == list(answers.outcomes)[:num_asked]
        assert dht.is_client is is_client
        assert (dht.protocol.port == 0) is is_client

    caplog.set_level(logging.WARNING)
    in_real_swarm(monkeypatch, len(outcomes), check)
    assert ("shoal doctor --join" in caplog.text) is is_client


def test_who_can_be_called_again_serves_again(monkeypatch, caplog):
    async def check(dht, answers, contacts):
        answers.outcomes = {"p0": "silent", "p1": "silent"}
        await dht.rejoin()
        assert dht.is_client
        assert answers.asked == ["p0", "p1"]  # the second was met after the first had made it a client
        await dht.rejoin()
        assert dht.is_client
        answers.outcomes["p0"] = "ok"
        await dht.rejoin()
        assert not dht.is_client
        assert dht.protocol.port == dht.peer.address.port

    caplog.set_level(logging.WARNING)
    in_real_swarm(monkeypatch, 2, check)
    assert caplog.text.count("cannot call this peer") == 1
    assert caplog.text.count("client no more") == 1


def test_whoever_was_met_later_may_know_better_than_the_only_one_known_before(monkeypatch):
    async def check(dht, answers, contacts):
        answers.outcomes = {"p0": "silent", "p1": "ok"}
        await dht.rejoin()
        assert answers.asked == ["p0", "p1"]
        assert not dht.is_client

    in_real_swarm(monkeypatch, 2, check)


def test_it_is_asked_again_when_a_split_is_looked_for(monkeypatch):
    async def check(dht, answers, contacts):
        reach = dht.joining.reachability
        answers.outcomes = {"p0": "silent"}
        await reach.check_again(contacts[0])
        assert not answers.asked
        await reach.check(contacts)
        assert dht.is_client
        answers.outcomes = {"p0": "ok"}
        await dht.upkeep._splits._ask(contacts[0].peer.address)
        assert not dht.is_client

    in_real_swarm(monkeypatch, 1, check)


def test_a_client_by_choice_stays_one_and_asks_nobody(monkeypatch):
    async def check(dht, answers, contacts):
        await dht.joining.reachability.check(contacts)
        await dht.rejoin()
        assert dht.is_client
        assert not answers.asked

    in_real_swarm(monkeypatch, 1, check, is_client=True)


def test_nobody_is_asked_where_that_is_not_wanted(monkeypatch):
    async def check(dht, answers, contacts):
        await dht.joining.reachability.check(contacts)
        assert not answers.asked

    in_real_swarm(monkeypatch, 1, check, checks_reach=False)


def test_it_is_really_dialed_back():
    async def check(swarm, first, second):
        assert await join._is_dialed_back(second.protocol, second.protocol.book.of(first.peer)) is True

    in_swarm(2, check)
