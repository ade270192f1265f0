"""Peers announce themselves and are found, on real peers in virtual time."""

import asyncio

import pytest

from dht.memory_swarm import in_swarm
from shoal.core import UsageError
from shoal.dht.node import announce, present
from shoal.dht.records import Verdict, reserved


def infos(found):
    return {peer_id: value.value for peer_id, value in found.items()}


def test_those_who_announce_themselves_are_present_with_what_they_say():
    async def work(swarm, *peers):
        kept = [announce(peer, "team", {"rank": rank}, 60.0) for rank, peer in enumerate(peers[:4])]
        for each in kept:
            assert all(await each.stored())
        found = await present(peers[-1], "team")
        assert infos(found) == {peer.peer_id: {"rank": rank} for rank, peer in enumerate(peers[:4])}
        assert list(found) == sorted(found)
        assert all(value.owner == peer_id for peer_id, value in found.items())
        assert await present(peers[-1], "another team") == {}

    in_swarm(8, work)


def test_presence_lasts_until_it_is_stopped_and_one_lifetime_more():
    async def work(swarm, first, second, asker):
        stays, leaves = announce(first, "team", "stays", 60.0), announce(second, "team", "leaves", 60.0)
        await asyncio.sleep(3600)
        assert infos(await present(asker, "team")) == {first.peer_id: "stays", second.peer_id: "leaves"}
        leaves.stop()
        await asyncio.sleep(61)
        assert infos(await present(asker, "team")) == {first.peer_id: "stays"}
        stays.stop()
        await asyncio.sleep(61)
        assert await present(asker, "team") == {}

    in_swarm(3, work)


def test_a_peer_that_vanishes_is_not_present_for_long():
    async def work(swarm, first, second, asker):
        announce(first, "team", None, 60.0)
        announce(second, "team", None, 60.0)
        await asyncio.sleep(100)
        swarm.network.hosts["p1"].kill()
        await asyncio.sleep(60)
        assert list(await present(asker, "team")) == [first.peer_id]

    in_swarm(3, work)


def test_what_is_told_may_change():
    async def work(swarm, peer, asker):
        steps = iter(range(1000))
        announce(peer, "team", lambda: {"step": next(steps)}, 60.0)
        await asyncio.sleep(1)
        assert infos(await present(asker, "team")) == {peer.peer_id: {"step": 0}}
        await asyncio.sleep(300)
        (info,) = infos(await present(asker, "team")).values()
        assert 9 <= info["step"] <= 11

    in_swarm(2, work)


def test_nobody_is_present_in_another_name():
    async def work(swarm, peer, liar, asker):
        announce(peer, "team", "true", 60.0)
        await asyncio.sleep(1)
        name = "presence.team"
        assert not await liar.store(
            name, "false", liar.in_s(600), subkey=reserved(peer.peer_id), is_owned=True
        )
        assert not await liar.store(name, "false", liar.in_s(600), subkey=reserved(peer.peer_id))
        assert not await liar.store(name, "false", liar.in_s(600))
        await liar.store(name, "false", liar.in_s(600), subkey=peer.peer_id.digest)
        await liar.store(name, "false", liar.in_s(600), subkey=7)
        assert infos(await present(asker, "team")) == {peer.peer_id: "true"}
        await liar.store("presence.plain", "a plain value", liar.in_s(600))
        assert await present(asker, "plain") == {}

    in_swarm(3, work)


def test_what_cannot_be_stored_is_refused_at_once():
    async def work(swarm, peer):
        with pytest.raises(UsageError, match="cannot be stored"):
            announce(peer, "team", object(), 60.0)
        with pytest.raises(UsageError, match="lifetime"):
            announce(peer, "team", None, 0.0)
        assert len(peer.keeper) == 0

    in_swarm(1, work)


def test_nobody_keeps_others_out_by_a_plain_value():
    async def work(swarm, squatter, peer, asker):
        for is_owned in (False, True):
            until_s = squatter.in_s(86_400)
            refused = await squatter.store("presence.team", "mine", until_s, is_owned=is_owned)
            assert refused.verdict is Verdict.BAD_VALUE
        assert all(await announce(peer, "team", 1, 60.0).stored())
        assert infos(await present(asker, "team")) == {peer.peer_id: 1}

    in_swarm(3, work)
