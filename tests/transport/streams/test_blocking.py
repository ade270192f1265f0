"""Small calls of waiting threads, over loopback."""

import asyncio
import contextlib
import socket
import threading

import msgspec
import pytest

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    LoopThread,
    Peer,
    PeerBusy,
    PeerId,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    UsageError,
)
from shoal.core.identity import Identity
from shoal.transport import Limits, Membership, Reply, StreamTransport, SwarmSecret
from shoal.transport.streams import blocking
from shoal.transport.streams.blocking import MAX_CALL_BYTES, BlockingCaller

SOON_S = 30.0


class World:
    """A server on one loop, and a transport whose blocking calls are tried."""

    def __init__(self, closing, **options):
        self.loop = closing.enter_context(LoopThread("server"))
        self.own_loop = closing.enter_context(LoopThread("client"))
        self._closing = closing
        self.server = self.opened(self.loop, StreamTransport(**options.pop("server", {})))
        self.server.handle("echo", lambda head, buffers: Reply(head.payload, buffers))
        self.server.handle("large", lambda head, buffers: Reply(None, [bytes(200_000), b"end"]))
        self.server.handle("busy", self.busy)
        self.server.handle("slow", self.slow)
        self.address = self.loop.run(self.server.listen(Address("127.0.0.1", 0)))
        self.client = self.opened(self.own_loop, StreamTransport(**options.pop("client", {})))
        self.caller = BlockingCaller(self.client)
        closing.callback(self.caller.close)
        self.has_begun = threading.Event()

    def opened(self, loop, transport):
        loop.run(transport.__aenter__())
        self._closing.callback(lambda: loop.run(transport.__aexit__(None, None, None)))
        return transport

    @property
    def peer(self):
        return Peer(self.address)

    def busy(self, head, buffers):
        raise PeerBusy("not now.")

    async def slow(self, head, buffers):
        self.has_begun.set()
        await asyncio.sleep(SOON_S)

    def call(self, method, payload=None, buffers=(), timeout_s=SOON_S, decoder=None, peer=None):
        return self.caller.call(
            peer or self.peer, method, payload, buffers, Deadline.after(timeout_s), decoder
        )


@pytest.fixture
def world():
    with contextlib.ExitStack() as closing:
        yield World(closing)


def test_calls_are_answered_over_one_connection(world):
    for number in range(5):
        reply = world.call("echo", {"number": number}, [b"abc", bytes(number)])
        assert reply.payload == {"number": number}
        assert [bytes(buffer) for buffer in reply.buffers] == [b"abc", bytes(number)]
    assert world.call("echo", [1, 2], decoder=msgspec.msgpack.Decoder(tuple[int, int])).payload == (1, 2)
    assert world.server.num_connections == 1


def test_an_answer_may_be_large_and_a_call_may_not(world):
    reply = world.call("large")
    assert [len(buffer) for buffer in reply.buffers] == [200_000, 3]
    assert bytes(reply.buffers[1]) == b"end"
    with pytest.raises(UsageError, match="no small call"):
        world.call("echo", None, [bytes(MAX_CALL_BYTES + 1)])
    assert world.call("echo", 7).payload == 7


def test_a_call_for_which_the_server_has_no_room_yet_is_answered_when_it_has():
    small = 20_000
    with contextlib.ExitStack() as closing:
        limits = Limits(max_message_bytes=small + 1000, max_bytes_in_flight=small + 1000)
        world = World(closing, server={"limits": limits})
        may_end, held = asyncio.Event(), threading.Semaphore(0)

        async def hold(head, buffers):
            held.release()
            await may_end.wait()
            return Reply(None, [bytes(buffers[0])])

        world.server.handle("hold", hold)
        deadline = Deadline.after(SOON_S)
        first = world.own_loop.submit(
            world.client.call(world.peer, "hold", None, [b"a" * small], deadline=deadline)
        )
        assert held.acquire(timeout=SOON_S)
        caller = closing.enter_context(LoopThread("second"))

        async def call_beside():
            return bytes(world.call("hold", None, [b"b" * small, b""]).buffers[0])

        second = caller.submit(call_beside())
        while not world.server.budget._waiting:  # until it stands in line: nothing tells that from outside
            assert not second.done()
        world.loop.loop.call_soon_threadsafe(may_end.set)
        assert second.result(SOON_S) == b"b" * small
        assert bytes(first.result(SOON_S).buffers[0]) == b"a" * small
        assert world.call("echo", 7).payload == 7


def test_each_thread_has_a_connection_to_itself(world):
    with contextlib.ExitStack() as closing:
        threads = [closing.enter_context(LoopThread(f"caller{number}")) for number in range(4)]

        async def call_often(number):
            return [world.call("echo", [number, turn]).payload for turn in range(50)]

        futures = [thread.submit(call_often(number)) for number, thread in enumerate(threads)]
        for number, future in enumerate(futures):
            assert future.result(SOON_S) == [[number, turn] for turn in range(50)]
    assert 1 <= world.server.num_connections <= 4


def test_errors_of_the_peer_leave_the_connection_as_it_is(world):
    with pytest.raises(PeerBusy, match="not now"):
        world.call("busy")
    with pytest.raises(PeerRefused, match="no method"):
        world.call("nothing")
    with pytest.raises(PeerRefused, match="cannot be read"):
        world.call("echo", "text", decoder=msgspec.msgpack.Decoder(int))
    assert world.call("echo", 1).payload == 1


def test_a_deadline_ends_the_wait_and_the_work(world):
    with pytest.raises(DeadlineExceeded):
        world.call("slow", timeout_s=0.1)
    with pytest.raises(DeadlineExceeded):
        world.call("echo", timeout_s=0.0)
    for _ in range(1000):
        if world.server.num_calls == 0:
            break
        world.loop.run(asyncio.sleep(0.01))
    assert world.server.num_calls == 0
    assert world.call("echo", 1).payload == 1


def test_a_peer_that_has_left_meanwhile_is_dialed_again(world):
    assert world.call("echo", 1).payload == 1

    async def leave():
        for shard in world.server._shards:
            for connection in tuple(shard.connections):
                connection.leave("the connection was idle.")

    world.loop.run(leave())
    assert world.call("echo", 2).payload == 2


def test_a_peer_that_is_lost_in_a_call_says_so(world):
    with LoopThread("caller") as thread:

        async def call_slow():
            return world.call("slow")

        future = thread.submit(call_slow())
        assert world.has_begun.wait(SOON_S)

        async def abort():
            for shard in world.server._shards:
                for connection in tuple(shard.connections):
                    connection.abort()

        world.loop.run(abort())
        with pytest.raises(PeerLost):
            future.result(SOON_S)


def test_nobody_there_and_another_peer_there(world):
    with pytest.raises(PeerUnreachable):
        world.call("echo", peer=Peer(Address("127.0.0.1", 1)))
    with pytest.raises(PeerRefused, match=", not "):
        world.call("echo", peer=Peer(world.address, PeerId(bytes(20))))


def test_a_peer_without_a_place_is_not_dialed_for_every_call():
    with contextlib.ExitStack() as closing:
        world = World(closing, server={"limits": Limits(max_connections=1)})
        other = BlockingCaller(world.client)
        closing.callback(other.close)
        assert other.call(world.peer, "echo", 1, (), Deadline.after(SOON_S)).payload == 1
        with pytest.raises(PeerBusy, match="takes no connection"):
            world.call("echo")
        with pytest.raises(PeerBusy, match="a moment ago"):
            world.call("echo")
        assert other.call(world.peer, "echo", 2, (), Deadline.after(SOON_S)).payload == 2


def test_a_peer_that_does_not_accept_is_busy_until_the_deadline(world):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = Peer(Address(*silent.getsockname()))
        with pytest.raises(DeadlineExceeded):
            world.call("echo", peer=peer, timeout_s=0.2)
        other = BlockingCaller(world.client)
        with pytest.raises(PeerBusy, match="did not accept"):
            other.call(peer, "echo", None, (), Deadline.after(SOON_S))


def test_members_of_a_swarm_call_over_tls():
    secret = SwarmSecret(bytes(range(32)))
    server, client = (Membership(Identity.generate(), secret) for _ in range(2))
    with contextlib.ExitStack() as closing:
        world = World(closing, server={"membership": server}, client={"membership": client})
        for number in range(3):
            assert world.call("echo", number, peer=Peer(world.address, server.peer_id)).payload == number
        assert world.server.num_connections == 1
        with pytest.raises(PeerRefused, match=", not "):
            world.call("echo", peer=Peer(world.address, client.peer_id))


def test_it_is_closed_once_its_owner_is(world):
    assert world.caller.is_open
    world.call("echo", 1)
    world.caller.close()
    assert not world.caller.is_open
    for _ in range(1000):
        if world.server.num_connections == 0:
            break
        world.loop.run(asyncio.sleep(0.01))
    assert world.server.num_connections == 0


def test_a_wait_goes_on_after_each_look_at_its_deadline(world, monkeypatch):
    looks = []
    may_answer = asyncio.Event()
    look = blocking._BlockingConnection._look_at_deadline

    def look_and_count(connection):
        look(connection)
        looks.append(None)
        if len(looks) == 3:
            world.loop.loop.call_soon_threadsafe(may_answer.set)

    async def late(head, buffers):
        await may_answer.wait()
        return Reply(head.payload)

    monkeypatch.setattr(blocking, "_LOOK_S", 0.01)
    monkeypatch.setattr(blocking._BlockingConnection, "_look_at_deadline", look_and_count)
    world.server.handle("late", late)
    assert world.call("late", 7).payload == 7
    assert len(looks) >= 3
    with pytest.raises(DeadlineExceeded):
        world.call("slow", timeout_s=0.05)
    assert world.call("echo", 8).payload == 8
