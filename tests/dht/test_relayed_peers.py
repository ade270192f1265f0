"""Clients of the DHT that others call through relays: what they publish, and where they never are."""

import asyncio

import pytest

from dht.worlds import client_of, in_world, opened
from shoal.core import Address, Deadline, Peer, PeerUnreachable, UsageError
from shoal.dht import announce, present
from shoal.dht.settings import DHTSettings
from shoal.dht.wire import number_of
from shoal.experts.names import declare_experts, get_experts
from shoal.transport import Reply


def answer(dht):
    dht.endpoint.handle("echo", lambda head, buffers: Reply(head.payload))


async def echoes(caller, address, peer_id):
    peer = Peer(address, peer_id)
    reply = await caller.endpoint.datagrams.call(peer, "echo", 7, deadline=Deadline.after(5))
    return reply.payload == 7


async def until_true(condition, seconds):
    """Look again and again for so many seconds of the loop's time; how many it took."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while not await condition():
        assert loop.time() - began_s < seconds, "it did not become true in time"
        await asyncio.sleep(0.1)
    return loop.time() - began_s


def test_a_client_is_called_through_its_relays_and_is_in_no_table():
    async def work(swarm, *peers):
        async with client_of(swarm) as client:
            answer(client)
            assert client.addresses == ()
            await client.use_relays()
            await client.use_relays()  # once is as good as twice
            await asyncio.sleep(1)
            assert len(client.addresses) == 3
            assert client.peer == Peer(client.addresses[0], client.peer_id)
            assert client.is_client
            for address in client.addresses:
                assert address.relay in [peer.peer.address for peer in peers]
                assert await echoes(peers[0], address, client.peer_id)
            await client.store("name", 1, client.in_s(60))
            assert (await peers[3].get("name")).value == 1
            await asyncio.sleep(120)
            assert len(client.storage) == 0
            for peer in peers:
                contacts = peer.table.contacts()
                assert number_of(client.peer_id.digest) not in [contact.number for contact in contacts]
                assert not any(contact.peer.address.is_relayed for contact in contacts)

    in_world(work, 8)


def test_a_relay_that_dies_is_replaced_and_the_records_say_so_within_ten_seconds():
    async def work(swarm, *peers):
        async with client_of(swarm) as client:
            answer(client)
            await client.use_relays()
            announce(client, "group", lambda: [str(each) for each in client.addresses], 60)
            asker = peers[0]

            async def told():
                found = await present(asker, "group")
                return [Address.parse(text) for text in found[client.peer_id].value] if found else []

            async def are_three():
                return len(await told()) == 3

            await until_true(are_three, 10)
            first = next(each for each in await told() if each.relay != asker.peer.address)
            for name, peer in list(swarm.peers.items()):
                if peer.peer.address == first.relay:
                    await swarm.kill(name)

            async def are_others():
                addresses = await told()
                return first not in addresses and len(addresses) == 3

            await until_true(are_others, 10)
            for address in await told():
                assert await echoes(asker, address, client.peer_id)

    in_world(work, 8)


def test_experts_of_a_client_are_declared_where_its_relays_are():
    async def work(swarm, *peers):
        async with client_of(swarm) as client:
            with pytest.raises(UsageError, match="use_relays"):
                await declare_experts(client, ["ffn.1.2"], client.in_s(60))
            await client.use_relays(1)
            assert await declare_experts(client, ["ffn.1.2"], client.in_s(60))
            (expert,) = await get_experts(peers[3], ["ffn.1.2"])
            assert expert.peers == (Peer(client.addresses[0], client.peer_id),)

    in_world(work, 4)


def test_who_joins_by_a_relayed_address_joins_by_the_relay():
    async def work(swarm, *peers):
        async with client_of(swarm) as client:
            await client.use_relays(1)
            async with opened(swarm, "late", join=[str(client.addresses[0])]) as late:
                assert len(late.table) == 4
                assert not late.is_client
                await late.use_relays()  # others can call it: it needs none
                assert late.addresses == (late.peer.address,)
                assert late.endpoint.relays.addresses == ()

    in_world(work, 4)


def test_a_client_pinged_through_its_relay_is_no_contact():
    async def work(swarm, *peers):
        async with opened(swarm, "home", join=[peers[0].peer.address], is_listening=True) as home:
            home.protocol.is_client = True  # as when others could not call it
            await home.use_relays(1)
            before = len(peers[1].table)
            answered = await peers[1].ping(home.addresses[0])
            assert answered.peer == Peer(home.addresses[0], home.peer_id)
            assert len(peers[1].table) == before

    in_world(work, 3)


def test_a_client_that_knows_nobody_finds_no_relay():
    async def work(swarm):
        settings = DHTSettings(is_client=True)
        async with opened(swarm, "lonely", is_listening=False, settings=settings) as lonely:
            with pytest.raises(PeerUnreachable, match="No relay takes this peer"):
                await lonely.use_relays(deadline=Deadline.after(3))

    in_world(work)
