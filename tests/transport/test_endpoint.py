"""One port number for streams and datagrams, with the same handlers."""

import contextlib
import socket

import pytest

from shoal.core import Address, Peer, UsageError
from shoal.transport import Reply
from shoal.transport.endpoint import Endpoint
from shoal.transport.streams.transport import StreamTransport
from transport.members import Swarm
from transport.wire import LOOPBACK, open_descriptors, soon


def register(endpoint):
    endpoint.handle("echo", lambda head, buffers: Reply(head.payload, buffers))

    async def count(head, channel):
        for number in range(head.payload):
            await channel.send(number)
        await channel.end()
        return Reply("done")

    endpoint.handle_channel("count", count)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("is_sealed", [True, False])
def test_one_address_serves_both(run, host, is_sealed):
    async def check():
        swarm = Swarm()
        members = [swarm.member() if is_sealed else None for _ in range(2)]
        async with Endpoint(membership=members[0]) as server, Endpoint(membership=members[1]) as client:
            register(server)
            address = await server.listen(Address(host, 0))
            assert server.addresses == [address]
            peer = Peer(address, server.peer_id)
            for transport in (client.streams, client.datagrams):
                assert (await transport.call(peer, "echo", 1, deadline=soon())).payload == 1
            assert client.streams.num_connections == client.datagrams.num_sessions == 1
            large = bytes(100_000)
            reply = await client.datagrams.call(peer, "echo", 1, [large], deadline=soon())
            assert bytes(reply.buffers[0]) == large
            async with client.datagrams.open_channel(peer, "count", 3, deadline=soon()) as channel:
                assert [item.payload async for item in channel] == [0, 1, 2]
            assert server.num_calls == client.num_calls == 0
        assert server.addresses == []

    run(check())


def test_a_port_that_is_taken_by_either_kind_leaves_nothing_bound(run):
    async def check():
        async with Endpoint() as endpoint:
            before = open_descriptors()
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                with socket.socket(socket.AF_INET, kind) as taken:
                    taken.bind(("127.0.0.1", 0))
                    if kind == socket.SOCK_STREAM:
                        taken.listen()
                    address = Address(*taken.getsockname())
                    with pytest.raises(UsageError, match="Cannot listen"):
                        await endpoint.listen(address)
                    assert endpoint.addresses == []
                assert await endpoint.listen(address) == address  # free for both again
                await endpoint.__aexit__(None, None, None)
                assert open_descriptors() <= before
                await endpoint.__aenter__()

    run(check())


def test_port_0_is_tried_again_where_only_one_kind_is_free(run, monkeypatch):
    async def check():
        async with Endpoint() as endpoint:
            listen, attempts = endpoint.streams.listen, []

            async def clash(address):
                attempts.append(address.port)
                if len(attempts) < 4:
                    raise UsageError("taken.")
                return await listen(address)

            monkeypatch.setattr(endpoint.streams, "listen", clash)
            bound = await endpoint.listen(LOOPBACK)
            assert len(set(attempts)) >= 2
            assert bound.port == attempts[-1]

            async def taken(address):
                raise UsageError("taken.", cause="the moon is full.")

            monkeypatch.setattr(endpoint.streams, "listen", taken)
            with pytest.raises(UsageError, match=r"(?s)no port was free for both.*the moon is full"):
                await endpoint.listen(LOOPBACK)
            await endpoint.datagrams.stop_listening(bound)
            with pytest.raises(UsageError, match=r"(?s)streams cannot.*the moon is full"):
                await endpoint.listen(bound)
            assert endpoint.addresses == [bound]
            async with StreamTransport() as other:  # datagrams alone would not notice a port left behind
                num_free = 0
                for port in dict.fromkeys(attempts[:-1]):
                    with contextlib.suppress(UsageError):  # another program's by now
                        await other.listen(Address("127.0.0.1", port))
                        num_free += 1
                assert num_free >= 1

    run(check())


def test_without_a_secret_only_this_machine_is_listened_to(run):
    async def check():
        async with Endpoint() as endpoint:
            with pytest.raises(UsageError, match="secret"):
                await endpoint.listen(Address("0.0.0.0", 0))
        async with Endpoint(is_insecure=True) as endpoint:
            await endpoint.listen(Address("0.0.0.0", 0))

    run(check())
