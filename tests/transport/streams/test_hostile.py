"""A real server and clients that mean it harm: each is refused or closed with a plain line in the log,
nothing of it stays, and a well-behaved caller notices nothing."""

import asyncio
import contextlib
import logging
import random
import re
import resource
import socket
import struct
import time

import msgspec
import pytest
import torch

from shoal.core import Peer
from shoal.tensors import allocate_for, pack, read_specs, unpack
from shoal.transport import Limits, Reply, StreamTransport
from shoal.transport.frames import HEADER, VERSION, ErrorHead, FrameKind, GoodbyeHead, frame
from shoal.transport.streams import transport as shard
from transport.wire import (
    LOOPBACK,
    chunk,
    dial,
    header,
    hello,
    open_descriptors,
    parse,
    request,
    resident_bytes,
    soon,
    until,
)

MIB = 1 << 20
QUICK = {"handshake_s": 0.8, "frame_s": 0.3, "min_bytes_per_s": 1000}


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr(shard, "SWEEP_S", 0.05)


class Scene:
    """A server, a friend that calls it all the time, and what the attackers know."""

    def __init__(self, server, friend, address):
        self.server, self.friend, self.address = server, friend, address
        self.num_calls = 0
        self.num_made = self.num_freed = 0
        self.is_over = False

    async def keep_calling(self):
        peer = Peer(self.address)
        while not self.is_over:
            data = random.Random(self.num_calls).randbytes(1000)
            reply = await self.friend.call(peer, "echo", self.num_calls, [data], deadline=soon(10))
            assert reply.payload == self.num_calls
            assert bytes(reply.buffers[0]) == data
            self.num_calls += 1
            await asyncio.sleep(0.005)

    def freed(self):
        self.num_freed += 1


def _handlers(server, scene):
    async def echo(head, buffers):
        return Reply(head.payload, buffers)

    async def tensors(head, buffers):
        (tensor,) = unpack(read_specs(head.payload), buffers)
        return Reply(list(tensor.shape))

    async def produce(head, buffers):
        scene.num_made += 1
        return Reply(None, [bytearray(head.payload)], scene.freed)

    server.handle("echo", echo)
    server.handle("now", lambda head, buffers: Reply(head.payload, buffers))
    server.handle("produce", produce)
    server.handle(
        "tensors", tensors, allocate=lambda head: allocate_for(read_specs(head.payload), head.sizes)
    )


@pytest.fixture
def attack(run, caplog):
    """Runs a blocking attack(scene) on a thread of its own, and checks that it did no harm."""
    caplog.set_level(logging.INFO)

    def perform(attacker, limits=None, grace_bytes=48 * MIB, finish=None):
        async def scene_of_the_crime():
            async with StreamTransport(limits=limits or Limits()) as server, StreamTransport() as friend:
                scene = Scene(server, friend, await server.listen(LOOPBACK))
                _handlers(server, scene)
                calling = asyncio.ensure_future(scene.keep_calling())
                await asyncio.to_thread(int)  # the thread that attacks keeps its descriptors
                await until(lambda: scene.num_calls > 3)
                before = open_descriptors(), resident_bytes()
                found = await asyncio.to_thread(attacker, scene)
                await until(lambda: server.num_connections == 1, 15)
                await until(lambda: server.places.used_bytes == 1)
                await until(lambda: open_descriptors() <= before[0], 15)
                num_calls = scene.num_calls
                await until(lambda: calling.done() or scene.num_calls > num_calls + 2)
                scene.is_over = True
                await calling
                await until(lambda: server.num_calls == 0 and server.budget.used_bytes == 0)
                assert scene.num_made == scene.num_freed
                server.pool.clear()
                assert resident_bytes() - before[1] < grace_bytes
                return found

        found = run(scene_of_the_crime())
        for record in caplog.records:
            assert record.exc_info is None, record.getMessage()
            assert "\n" not in record.getMessage()
            assert "never retrieved" not in record.getMessage()
        return found, [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    return perform


def read_all(client, timeout_s=8.0):
    """Everything until the server closes; how it closes does not matter."""
    client.settimeout(timeout_s)
    data = b""
    try:
        while part := client.recv(1 << 16):
            data += part
    except ConnectionError:
        pass
    return data


def read_frames(client, num_frames):
    """So many whole frames, after which the connection is still open."""
    client.settimeout(8)
    data = b""
    while True:
        with contextlib.suppress(struct.error, AssertionError):
            frames = parse(data)
            if len(frames) >= num_frames and sum(HEADER.size + len(h) + len(b) for *_, h, b in frames) == len(
                data
            ):
                return frames
        part = client.recv(1 << 16)
        assert part, "the server has closed"
        data += part


def goodbye_of(data):
    kind, _, head, _ = parse(data)[-1]
    assert kind is FrameKind.GOODBYE
    return msgspec.msgpack.decode(head, type=GoodbyeHead)


def error_of(frames, call_id):
    (head,) = [head for kind, number, head, _ in frames if kind is FrameKind.ERROR and number == call_id]
    return msgspec.msgpack.decode(head, type=ErrorHead)


# --- bytes that are no frames ---

NONSENSE = {
    "http": (b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", "protocol", "does not speak Shoal's protocol"),
    "random": (random.Random(5).randbytes(5000), "protocol", "does not speak Shoal's protocol"),
    "version": (header(version=VERSION + 8), "version", f"version {VERSION + 8} .* version {VERSION}"),
    "10 GB body": (hello() + header(FrameKind.REQUEST, 10, 1, 10_000_000_000), "protocol", "10,000,000,000"),
    "10 GB chunk": (hello() + header(FrameKind.CHUNK, 0, 1, 10_000_000_000), "protocol", "10,000,000,000"),
    "10 GB hello": (header(FrameKind.HELLO, 4_000_000_000, 0, 0), "protocol", "4,000,000,000"),
    "no hello": (request(1, "echo"), "protocol", "before the hello"),
    "not utf-8": (
        hello() + frame(FrameKind.REQUEST, 1, b"\x95\xa2\xff\xff\0\0\x90\xc0"),
        "protocol",
        "be read",
    ),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_answered_with_a_goodbye_and_one_line(attack, name):
    data, code, what = NONSENSE[name]

    def attacker(scene):
        goodbyes = []
        for _ in range(3):
            with dial(scene.address) as client:
                client.sendall(data)
                answer = read_all(client)
                if parse(answer)[-1][0] is FrameKind.GOODBYE:  # a reset may have overtaken it
                    goodbyes.append(goodbye_of(answer))
        return goodbyes

    goodbyes, lines = attack(attacker)
    assert {goodbye.code for goodbye in goodbyes} <= {code}
    assert len(lines) == 3
    for line in lines:
        assert line.startswith("closed a connection (127.0.0.1:")
        assert re.search(what, line)


def test_a_frame_cut_short(attack):
    whole = hello() + request(1, "echo", "x" * 1000, sizes=[50], body=bytes(50))

    def attacker(scene):
        for cut in (1, 10, len(hello()) - 1, len(hello()) + 3, len(whole) - 1):
            with dial(scene.address) as client:
                client.sendall(whole[:cut])
                client.shutdown(socket.SHUT_WR)
                read_all(client)

    _, lines = attack(attacker)
    assert len(lines) == 5
    assert all("ended in the middle of a frame" in line for line in lines)


# --- requests that ask too much ---


def test_sizes_of_10_gb_are_refused_before_any_memory_is_taken(attack):
    def attacker(scene):
        with dial(scene.address) as client:
            client.sendall(
                hello()
                + request(1, "echo", sizes=[10_000_000_000])
                + request(3, "echo", sizes=[-1, 5])
                + request(5, "echo", sizes=[2**64 - 1] * 3)
                + request(7, "echo", sizes=[1] * 100_000)
                + chunk(1, bytes(100_000))
                + request(9, "echo", "still here")
            )
            return read_frames(client, 6)

    frames, lines = attack(attacker)
    assert {error_of(frames, call_id).code for call_id in (1, 5, 7)} == {"refused"}
    assert "10,000,000,000 bytes" in error_of(frames, 1).what
    assert "negative" in error_of(frames, 3).what
    assert (FrameKind.REPLY, 9) in [(kind, call_id) for kind, call_id, *_ in frames]
    assert lines == []


def test_tensors_that_cannot_be(attack):
    specs, buffers = pack([torch.arange(6.0).view(2, 3)])
    honest = msgspec.to_builtins(specs)
    lies = [
        ([["float99", [2, 2]]], [16], "float99"),
        ([["float32", [2, 3]]], [16], "takes 24 bytes"),
        ([["float32", [-2, -2]]], [16], "size -2"),
        ([["float32", [2**62, 2**62]]], [16], "more elements"),
        ([["float32", [2, 2], [0, 0]]], [16], "strides"),
        ([["float32", [4]], ["float32", [4]]], [16], "2 tensor specs"),
        ("no specs", [16], "tensor specs"),
        ([["float32", [2_500_000_000]]], [10_000_000_000], "10,000,000,000"),
    ]

    def attacker(scene):
        with dial(scene.address) as client:
            client.sendall(hello())
            for number, (payload, sizes, _) in enumerate(lies):
                body = bytes(16) if sizes == [16] else b""
                client.sendall(request(2 * number + 1, "tensors", payload, sizes, body))
            client.sendall(request(99, "tensors", honest, [24], bytes(buffers[0])))
            return read_frames(client, 2 + len(lies))

    frames, lines = attack(attacker)
    for number, (_, _, what) in enumerate(lies):
        error = error_of(frames, 2 * number + 1)
        assert error.code == "refused"
        assert what in error.what
    replies = [head for kind, call_id, head, _ in frames if (kind, call_id) == (FrameKind.REPLY, 99)]
    assert msgspec.msgpack.decode(replies[0]) == [[], [2, 3]]
    assert lines == []


def test_a_request_whose_buffers_never_come_is_given_up(attack):
    def attacker(scene):
        with dial(scene.address) as client:
            client.sendall(hello() + request(1, "echo", sizes=[100 * MIB]) + chunk(1, bytes(1000)))
            frames = read_frames(client, 3)  # hello, grant, error
            client.sendall(request(3, "echo", "still here"))
            return frames + read_frames(client, 1)

    frames, lines = attack(attacker, Limits(**QUICK))
    assert "stopped arriving" in error_of(frames, 1).what
    assert frames[-1][:2] == (FrameKind.REPLY, 3)
    assert lines == []


def test_room_that_is_taken_and_not_used_is_given_to_others(attack):
    """Four requests take all the room there is; the friend's calls with their small buffers pass."""

    def attacker(scene):
        clients = [dial(scene.address) for _ in range(4)]
        for client in clients:
            client.sendall(
                hello() + request(1, "echo", sizes=[8 * MIB]) + header(FrameKind.CHUNK, 0, 1, 4 * MIB)
            )
        for client in clients:
            with client:
                read_all(client)

    limits = Limits(max_message_bytes=8 * MIB, max_bytes_in_flight=16 * MIB, **QUICK)
    _, lines = attack(attacker, limits)
    assert any("did not arrive at 1,000 bytes/s" in line for line in lines)


# --- the slow ones ---


def test_a_slow_loris(attack):
    def attacker(scene):
        before_hello, inside_frame = dial(scene.address), dial(scene.address)
        silent = dial(scene.address)
        inside_frame.sendall(hello())
        parts = {before_hello: iter(hello()), inside_frame: iter(request(1, "echo", "x" * 1000))}
        ends_at_s = time.monotonic() + 6
        while parts and time.monotonic() < ends_at_s:
            for client, bytes_left in tuple(parts.items()):
                try:
                    client.sendall(bytes([next(bytes_left)]))
                except ConnectionError:
                    del parts[client]
            time.sleep(0.05)
        for client in (before_hello, inside_frame, silent):
            with client:
                read_all(client)
        return len(parts)

    num_left, lines = attack(attacker, Limits(**QUICK))
    assert num_left == 0
    assert len(lines) == 3
    assert sum("No hello came within 0.8 s" in line for line in lines) >= 1
    assert sum("A frame did not arrive" in line for line in lines) >= 1


def test_a_client_that_never_reads_its_large_answers(attack):
    def attacker(scene):
        with dial(scene.address) as client:
            client.sendall(hello())
            for number in range(8):
                client.sendall(request(2 * number + 1, "produce", 8 * MIB))
            ends_at_s = time.monotonic() + 6
            while scene.num_freed < 8 and time.monotonic() < ends_at_s:
                time.sleep(0.02)
            return scene.num_freed

    num_freed, lines = attack(attacker, Limits(**QUICK))
    assert num_freed == 8
    assert len(lines) == 1
    assert "stays unread" in lines[0]


def test_a_client_that_asks_on_and_on_and_never_reads(attack):
    def attacker(scene):
        with dial(scene.address) as client, contextlib.suppress(ConnectionError):
            client.sendall(hello())
            body = bytes(30_000)
            for number in range(100_000):
                client.sendall(request(2 * number + 1, "now", None, [len(body)], body))
            raise AssertionError("it was never stopped")

    _, lines = attack(attacker, Limits(max_calls=64))
    assert len(lines) == 1
    assert "does not read the answers" in lines[0]


# --- the many ---


def test_five_thousand_connections(attack):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    num_clients = min(5000, (min(hard, 20_000) - 1000) // 2)

    def attacker(scene):
        clients = []
        try:
            for number in range(num_clients):
                client = dial(scene.address)
                clients.append(client)
                if number % 10 == 0:
                    client.sendall(hello())
            for silent in clients[1:10] + clients[11:20]:  # dropped for others that waited in the backlog
                read_all(silent, timeout_s=30)
            return scene.server.num_connections
        finally:
            for client in clients:
                client.close()

    try:
        num_connections, lines = attack(attacker, grace_bytes=120 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert num_connections <= 1024
    assert len(lines) <= 10 * 30  # ten a second, and a count
    assert any("dropped a silent connection" in line for line in lines)
    assert any("more complaints" in line for line in lines)


def test_when_every_place_is_taken_newcomers_are_told(attack):
    def attacker(scene):
        clients = []
        for _ in range(4):  # the friend has the fifth place
            client = dial(scene.address)
            client.sendall(hello())
            read_frames(client, 1)
            clients.append(client)
        ends_at_s = time.monotonic() + 5
        while not all(c.ready.done() for c in tuple(scene.server._shards[0].connections)):
            assert time.monotonic() < ends_at_s
            time.sleep(0.01)
        with dial(scene.address) as late:
            goodbye = goodbye_of(read_all(late))
        for client in clients:
            client.close()
        return goodbye

    goodbye, lines = attack(attacker, Limits(max_connections=5))
    assert (goodbye.code, goodbye.reason) == ("busy", "all 5 connections are taken.")
    assert len(lines) == 1
    assert "refused a connection" in lines[0]
