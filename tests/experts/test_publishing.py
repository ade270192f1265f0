"""Experts are declared and withdrawn on real peers in virtual time."""

import asyncio

from dht.memory_swarm import in_swarm
from shoal.experts.names import declare_experts, get_experts
from shoal.experts.server.publishing import Publishing

UIDS = ["ffn.1.2", "ffn.3.4"]


def test_experts_are_found_for_as_long_as_they_are_declared():
    async def work(swarm, server, _, client):
        publishing = Publishing(server, lifetime_s=20)
        assert await publishing.declare([]) == 0
        assert await publishing.declare(UIDS) == 2
        assert await publishing.declare(["lone.7"]) == 1
        assert publishing.uids == [*UIDS, "lone.7"]
        await asyncio.sleep(100)  # many lifetimes
        found = await get_experts(client, [*UIDS, "lone.7"], latest=True)
        assert [one.peers for one in found] == [(server.peer,)] * 3
        assert await client.get_coordinates(["ffn.1."]) == [(2,)]

    in_swarm(3, work)


def test_what_is_withdrawn_is_found_no_more_and_replicas_stay():
    async def work(swarm, server, other, client):
        publishing = Publishing(server, lifetime_s=20)
        await publishing.declare(UIDS)
        await declare_experts(other, UIDS[:1], other.in_s(500))
        assert len((await get_experts(client, UIDS[:1], latest=True))[0].peers) == 2
        assert await publishing.withdraw()
        assert publishing.uids == []
        for asker in (client, other, server):
            stays, gone = await get_experts(asker, UIDS, latest=True)
            assert stays.peers == (other.peer,)
            assert gone is None
        await asyncio.sleep(60)  # nothing stores them again
        assert (await get_experts(client, UIDS, latest=True))[1] is None

    in_swarm(3, work)


def test_who_has_withdrawn_an_expert_can_serve_it_again():
    async def work(swarm, server, client):
        publishing = Publishing(server, lifetime_s=20)
        await publishing.declare(UIDS)
        await publishing.withdraw()
        await asyncio.sleep(1)
        assert await publishing.declare(UIDS) == 2
        assert [one.peers for one in await get_experts(client, UIDS, latest=True)] == [(server.peer,)] * 2

    in_swarm(2, work)


def test_a_withdrawal_wins_over_a_declaration_that_is_under_way():
    async def work(swarm, server, client):
        publishing = Publishing(server, lifetime_s=20)
        await publishing.declare(UIDS)
        late = publishing._entries(tuple(UIDS), server.in_s(20))
        await publishing.withdraw()
        await server.store_many(late)
        assert await get_experts(client, UIDS, latest=True) == [None, None]

    in_swarm(2, work)


def test_while_nobody_can_call_the_peer_nothing_is_declared(caplog):
    async def work(swarm, server, client):
        publishing = Publishing(server, lifetime_s=20)
        server.protocol.is_client = True
        assert await publishing.declare(UIDS) == 0
        await asyncio.sleep(30)
        assert caplog.text.count("Experts are not declared") == 1
        server.protocol.is_client = False
        await asyncio.sleep(15)
        assert [one.peers for one in await get_experts(client, UIDS, latest=True)] == [(server.peer,)] * 2

    in_swarm(2, work)
