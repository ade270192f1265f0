"""What every transport promises, whatever carries its bytes."""

import asyncio
import hashlib
import random

import pytest
import torch

from conftest import LOOPS, Runner
from contracts.transports import LARGE, TRANSPORTS, new_loop, open_pair
from shoal.core import (
    Deadline,
    DeadlineExceeded,
    LimitExceeded,
    PeerBusy,
    PeerError,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    RemoteFailure,
    UsageError,
)
from shoal.tensors import pack, unpack
from shoal.transport import ALIGNMENT_BYTES, Head, Limits, Reply

SLOW = (
    "stream-3-loops",
    "stream-home",
    "tls",
    "tls-home",
    "stream-faults",
    "tls-faults",
    "datagrams-alone",
    "datagrams-alone-faults",
    "datagrams-faults",
    "datagrams-home",
)
"""Each is a part of one that is run always: TLS on three loops, datagrams with streams and TLS in them, and
the same network and faults in memory, where they take no time."""


def param(name, *more):
    return pytest.param(name, *more, marks=[pytest.mark.slow] if name in SLOW else [])


every_transport = pytest.mark.parametrize("name", [param(name) for name in TRANSPORTS])
large_ones = pytest.mark.parametrize("name", [param(name) for name in LARGE])
ON_LOOPS = [param(name, "uvloop") for name in TRANSPORTS]
ON_LOOPS += [(name, "asyncio") for name, kind in TRANSPORTS.items() if kind.is_plain]

SIZES = [0, 1, 63, 64, 65, 1000, 65535, 65536, 65537, 1 << 20, (8 << 20) + 1, 64 << 20]


class Probe:
    """Handlers of a test, and what they saw."""

    def __init__(self):
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.gate = asyncio.Event()
        self.seen = []
        self.sent = 0

    def register(self, transport):
        transport.handle("echo", self.echo)
        transport.handle("echo now", lambda head, buffers: Reply(head.payload, buffers))
        transport.handle("later", self.later)
        transport.handle("sizes", self.sizes)
        transport.handle("block", self.block)
        transport.handle("fail", self.fail)
        transport.handle("busy", self.busy)
        transport.handle("note", self.note)
        transport.handle("typed", self.echo, payload_type=dict[str, int])
        transport.handle("picky", self.echo, allocate=self.refuse)
        transport.handle("produce", self.produce)
        transport.handle_channel("double", self.double)
        transport.handle_channel("count", self.count)
        transport.handle_channel("break", self.break_off)
        transport.handle_channel("sit", self.sit)

    async def echo(self, head: Head, buffers):
        return Reply(head.payload, buffers, on_sent=self.on_sent)

    def on_sent(self):
        self.sent += 1

    def later(self, head: Head, buffers):
        """A plain function that answers by a future: soon, with an error, or never."""
        reply = asyncio.get_running_loop().create_future()
        reply.add_done_callback(lambda done: self.cancelled.set() if done.cancelled() else None)
        self.started.set()
        if head.payload == "fail":
            reply.get_loop().call_soon(reply.set_exception, PeerBusy("not now."))
        elif head.payload != "never":
            reply.get_loop().call_soon(reply.set_result, Reply(head.payload, buffers, on_sent=self.on_sent))
        return reply

    async def sizes(self, head: Head, buffers):
        return Reply([head.total_bytes, [len(buffer) for buffer in buffers], [_offset(b) for b in buffers]])

    async def block(self, head: Head, buffers):
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def fail(self, head: Head, buffers):
        raise ZeroDivisionError("a handler's own mistake")

    async def busy(self, head: Head, buffers):
        raise PeerBusy("the queue is full.", next_step="wait.")

    async def note(self, head: Head, buffers):
        self.seen.append((head.payload, [bytes(buffer) for buffer in buffers]))
        self.started.set()
        await until(self.gate.is_set)

    def refuse(self, head: Head):
        raise UsageError("the shapes do not fit.")

    async def produce(self, head: Head, buffers):
        return Reply(None, [bytearray(head.payload)])

    async def double(self, head: Head, channel):
        total = 0
        async for item in channel:
            total += item.payload
            await channel.send(2 * item.payload, item.buffers)
        return Reply(total)

    async def count(self, head: Head, channel):
        for number in range(head.payload):
            await channel.send(number, [bytes([number % 256]) * 100_000])
            self.sent = number + 1
        await channel.end()
        return Reply("done")

    async def break_off(self, head: Head, channel):
        await channel.receive()
        raise UsageError("enough.")

    async def sit(self, head: Head, channel):
        self.started.set()
        try:
            await channel.receive()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def _offset(buffer):
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() % ALIGNMENT_BYTES if len(buffer) else 0


def soon(seconds=20.0):
    return Deadline.after(seconds)


def gone(name):
    """What a call to a peer that has gone ends in; nobody answers a datagram that finds nobody."""
    return DeadlineExceeded if "datagrams" in name else (PeerUnreachable, PeerLost)


async def until(condition):
    """Wait for a condition that the other side makes true; the test's own timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - the condition may belong to another thread's loop
        await asyncio.sleep(0.001)


async def eventually_idle(pair):
    await until(pair.is_idle)


@pytest.fixture
def probe():
    return Probe()


@pytest.fixture(params=["uvloop"])
def run(request, name):
    """Runs a coroutine to its end, on the loop that the transport needs."""
    loop = new_loop(name, LOOPS[request.param])
    try:
        yield Runner(loop)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


@pytest.mark.parametrize(("name", "run"), ON_LOOPS, indirect=["run"])
@pytest.mark.parametrize("method", ["echo", "echo now"])
def test_echoes_every_size(name, run, probe, method):
    async def check():
        async with open_pair(name, probe.register) as pair:
            for size in dict.fromkeys(map(pair.size, SIZES)):
                sent = random.Random(size).randbytes(min(size, 1 << 20)) * (max(1, size >> 20))
                sent = sent[:size].ljust(size, b"!")
                reply = await pair.client.call(
                    pair.server_peer, method, {"size": size}, [sent], deadline=soon()
                )
                assert reply.payload == {"size": size}
                assert hashlib.sha256(reply.buffers[0]).digest() == hashlib.sha256(sent).digest()
                assert _offset(reply.buffers[0]) == 0
            await eventually_idle(pair)

    run(check())


@every_transport
def test_payloads_without_buffers(name, run, probe):
    async def check():
        async with open_pair(name, probe.register) as pair:
            for payload in (None, 0, -1, 2**63, 1.5, "ü", b"\0", [1, [2, {"a": None}]], {"x": [True, False]}):
                reply = await pair.client.call(pair.server_peer, "echo", payload, deadline=soon())
                assert reply.payload == payload
                assert list(reply.buffers) == []

    run(check())


@large_ones
def test_many_buffers_arrive_in_place_and_aligned(name, run, probe):
    async def check():
        async with open_pair(name, probe.register) as pair:
            sizes = [0, 5, 70_000, 1, 0, pair.size(3 << 20) // 2, 64, 17, 200_000, 0]
            sent = [bytes([index]) * size for index, size in enumerate(sizes)]
            reply = await pair.client.call(pair.server_peer, "sizes", None, sent, deadline=soon())
            assert reply.payload == [sum(sizes), sizes, [0] * len(sizes)]
            into = [bytearray(size) for size in sizes]
            reply = await pair.client.call(pair.server_peer, "echo", None, sent, deadline=soon(), into=into)
            assert [bytes(buffer) for buffer in into] == sent
            assert all(memoryview(a).obj is b for a, b in zip(reply.buffers, into, strict=True) if len(b))

    run(check())


@every_transport
def test_into_may_be_picked_after_the_head(name, run, probe):
    async def check():
        async with open_pair(name, probe.register) as pair:
            memory = bytearray(3 << 20)
            size = pair.size(1000)
            reply = await pair.client.call(
                pair.server_peer,
                "produce",
                size,
                deadline=soon(),
                into=lambda head: [memoryview(memory)[: head.sizes[0]]],
            )
            assert len(reply.buffers[0]) == size
            with pytest.raises(PeerError, match=f"{size} bytes"):
                await pair.client.call(
                    pair.server_peer, "produce", size, deadline=soon(), into=[bytearray(size - 1)]
                )
            with pytest.raises(UsageError, match="read-only"):
                await pair.client.call(pair.server_peer, "produce", 3, deadline=soon(), into=[b"abc"])
            await eventually_idle(pair)

    run(check())


@large_ones
def test_every_dtype(name, run, probe):
    async def check():
        async with open_pair(name, probe.register) as pair:
            tensors = []
            for dtype in sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str):
                raw = torch.arange(0, 192, dtype=torch.uint8)
                try:
                    tensors.append(raw.view(dtype).clone() if dtype != torch.bool else raw % 2 == 0)
                    pack(tensors[-1:])
                except Exception:  # noqa: BLE001 - quantized and packed dtypes that no plain tensor can have
                    tensors = tensors[:-1] if tensors and tensors[-1].dtype == dtype else tensors
            names = {str(tensor.dtype) for tensor in tensors}
            assert {
                "torch.bfloat16",
                "torch.float8_e4m3fn",
                "torch.complex64",
                "torch.int64",
                "torch.bool",
            } <= names
            specs, buffers = pack(tensors)
            reply = await pair.client.call(pair.server_peer, "echo", specs, buffers, deadline=soon())
            for before, after in zip(tensors, unpack(specs, reply.buffers), strict=True):
                assert before.dtype == after.dtype
                assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))

    run(check())


@every_transport
def test_a_thousand_calls_at_once(name, run, probe):
    async def check():
        async with open_pair(name, probe.register) as pair:

            async def one(number):
                data = number.to_bytes(4, "big") * (number % 50)
                reply = await pair.client.call(pair.server_peer, "echo", number, [data], deadline=soon())
                return reply.payload == number and bytes(reply.buffers[0]) == data

            assert all(await asyncio.gather(*map(one, range(1000))))
            await eventually_idle(pair)
            if name.startswith(("stream", "tls", "memory")) and "datagrams" not in name:
                assert pair.client.num_connections == 1

    run(check())


@large_ones
def test_more_calls_than_places_wait_their_turn(name, run, probe):
    async def check():
        limits = Limits(max_calls=4)
        async with open_pair(name, probe.register, server_limits=limits) as pair:
            calls = [pair.client.call(pair.server_peer, "echo", n, deadline=soon()) for n in range(100)]
            replies = await asyncio.gather(*calls)
            assert [reply.payload for reply in replies] == list(range(100))

    run(check())


@every_transport
def test_both_directions_at_once(name, run, probe):
    async def check():
        async with open_pair(name, probe.register) as pair:
            data = (bytes(range(256)) * 8192)[: min(2 << 20, pair.max_bytes // 8)]

            async def talk(caller, callee):
                for _ in range(5):
                    reply = await caller.call(callee, "echo", None, [data], deadline=soon())
                    assert bytes(reply.buffers[0]) == data

            ways = [(pair.client, pair.server_peer), (pair.server, pair.client_peer)]
            await asyncio.gather(*(talk(*way) for way in ways for _ in range(4)))

    run(check())


@large_ones
def test_small_calls_pass_large_ones(name, run, probe):
    async def check():
        async with open_pair(name, probe.register) as pair:
            large = bytes(min(64 << 20, 4 * pair.max_bytes))
            done = []

            async def slow():
                await pair.client.call(pair.server_peer, "echo", None, [large], deadline=soon())
                done.append("large")

            async def quick():
                for _ in range(3):
                    await pair.client.call(pair.server_peer, "echo", 1, deadline=soon())
                done.append("small")

            await pair.client.call(pair.server_peer, "echo", 0, deadline=soon())
            await asyncio.gather(slow(), quick())
            assert done == ["small", "large"]

    run(check())


@every_transport
def test_a_deadline_that_passes_ends_the_call_on_both_sides(name, run, probe):
    async def check():
        async with open_pair(name, probe.register) as pair:
            await pair.client.call(pair.server_peer, "echo", None, deadline=soon())
            data = bytes(min(1 << 20, pair.max_bytes // 16))
            with pytest.raises(DeadlineExceeded, match="block"):
                await pair.client.call(pair.server_peer, "block", None, [data], deadline=Deadline.after(0.4))
            await until(probe.cancelled.is_set)
            await eventually_idle(pair)
            with pytest.raises(DeadlineExceeded):
                await pair.client.call(pair.server_peer, "echo", None, deadline=Deadline.after(-1))
            assert (await pair.client.call(pair.server_peer, "echo", 1, deadline=soon())).payload == 1

    run(check())


@every_transport
def test_a_cancelled_call_is_cancelled_there_too(name, run, probe):
    async def check():
        async with open_pair(name, probe.register) as pair:
            call = asyncio.ensure_future(
                pair.client.call(
                    pair.server_peer, "block", None, [bytes(pair.size(1 << 20))], deadline=soon()
                )
            )
            await until(probe.started.is_set)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until(probe.cancelled.is_set)
            await eventually_idle(pair)

    run(check())


@large_ones
def test_cancelling_while_buffers_arrive_leaves_into_alone(name, run, probe):
    async def check():
        async with open_pair(name, probe.register) as pair:
            into = bytearray(pair.size(48 << 20))
            started = asyncio.Event()

            def begin(head):
                started.set()
                return [into]

            call = asyncio.ensure_future(
                pair.client.call(
                    pair.server_peer, "echo", None, [b"x" * len(into)], deadline=soon(), into=begin
                )
            )
            await started.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            written = into.count(b"x")
            for _ in range(3):  # whatever was on its way has arrived by then
                await pair.client.call(pair.server_peer, "echo", None, [bytes(100_000)], deadline=soon())
            assert into.count(b"x") == written
            await eventually_idle(pair)

    run(check())


@every_transport
def test_a_caller_that_goes_ends_its_calls(name, run, probe):
    async def check():
        async with open_pair(name, probe.register) as pair:
            call = asyncio.ensure_future(
                pair.client.call(
                    pair.server_peer, "block", None, [bytes(pair.size(1 << 20))], deadline=soon()
                )
            )
            await until(probe.started.is_set)
            await pair.client_owner.__aexit__(None, None, None)
            with pytest.raises(PeerError):
                await call
            await until(probe.cancelled.is_set)
            await until(lambda: pair.server.num_calls == 0 and pair.server.budget.used_bytes == 0)
            await pair.client_owner.__aenter__()

    run(check())


@every_transport
def test_a_callee_that_goes_is_named(name, run, probe):
    async def check():
        async with open_pair(name, probe.register) as pair:
            calls = [
                asyncio.ensure_future(pair.client.call(pair.server_peer, "block", n, deadline=soon()))
                for n in range(3)
            ]
            await until(lambda: pair.server.num_calls == 3)
            await pair.server_owner.__aexit__(None, None, None)
            for call in calls:
                with pytest.raises(PeerLost, match=str(pair.server_peer.address.port)) as caught:
                    await call
                assert caught.value.peer is not None
            with pytest.raises(gone(name), match=r"[Cc]onnect"):
                await pair.client.call(pair.server_peer, "echo", None, deadline=soon(1.5))
            await pair.server_owner.__aenter__()

    run(check())


@every_transport
def test_plain_functions_may_answer_by_futures(name, run, probe):
    async def check():
        async with open_pair(name, probe.register) as pair:
            for size in (0, 10, pair.size(1 << 20)):
                data = [bytes(size)] if size else []
                reply = await pair.client.call(pair.server_peer, "later", size, data, deadline=soon())
                assert (reply.payload, [bytes(buffer) for buffer in reply.buffers]) == (size, data)
            await until(lambda: probe.sent == 3)
            with pytest.raises(PeerBusy, match="not now"):
                await pair.client.call(pair.server_peer, "later", "fail", deadline=soon())
            assert not probe.cancelled.is_set()
            with pytest.raises(DeadlineExceeded):
                await pair.client.call(pair.server_peer, "later", "never", deadline=soon(0.2))
            await until(probe.cancelled.is_set)
            await eventually_idle(pair)

    run(check())


@every_transport
def test_errors_of_handlers_reach_the_caller(name, run, probe, caplog):
    async def check():
        async with open_pair(name, probe.register) as pair:
            with pytest.raises(RemoteFailure, match=r"ZeroDivisionError: a handler's own mistake"):
                await pair.client.call(pair.server_peer, "fail", None, deadline=soon())
            with pytest.raises(PeerBusy, match=r"(?s)the queue is full.*Try: wait"):
                await pair.client.call(pair.server_peer, "busy", None, deadline=soon())
            with pytest.raises(PeerRefused, match=r"no method 'ecko'\. Did you mean 'echo'"):
                await pair.client.call(pair.server_peer, "ecko", None, deadline=soon())
            with pytest.raises(PeerRefused, match="payload of typed"):
                await pair.client.call(pair.server_peer, "typed", ["no dict"], deadline=soon())
            with pytest.raises(PeerRefused, match="shapes do not fit"):
                await pair.client.call(
                    pair.server_peer, "picky", None, [bytes(pair.size(9 << 20))], deadline=soon()
                )
            with pytest.raises(PeerRefused, match="is a channel"):
                await pair.client.call(pair.server_peer, "double", None, deadline=soon())
            with pytest.raises(UsageError, match="payload"):
                await pair.client.call(pair.server_peer, "echo", object(), deadline=soon())
            reply = await pair.client.call(pair.server_peer, "typed", {"a": 1}, deadline=soon())
            assert reply.payload == {"a": 1}
            await eventually_idle(pair)

    run(check())
    assert "ZeroDivisionError" in caplog.text


@large_ones
def test_limits_refuse_what_is_too_large_and_go_on(name, run, probe):
    async def check():
        limits = Limits(max_message_bytes=1 << 20, max_bytes_in_flight=1 << 20, max_head_bytes=10_000)
        async with open_pair(name, probe.register, server_limits=limits) as pair:
            with pytest.raises(PeerRefused, match="more than the 1,048,576"):
                await pair.client.call(
                    pair.server_peer, "echo", None, [bytes((1 << 20) + 1)], deadline=soon()
                )
            with pytest.raises(PeerError, match="head"):
                await pair.client.call(pair.server_peer, "echo", "x" * 20_000, deadline=soon())
            exact = await pair.client.call(pair.server_peer, "echo", None, [bytes(1 << 20)], deadline=soon())
            assert len(exact.buffers[0]) == 1 << 20
        small = Limits(max_message_bytes=1000)
        async with open_pair(name, probe.register, client_limits=small) as pair:
            with pytest.raises(LimitExceeded, match=r"2,000 bytes"):
                await pair.client.call(pair.server_peer, "produce", 2000, deadline=soon())
            await eventually_idle(pair)

    run(check())


@large_ones
def test_calls_beyond_the_bytes_in_flight_wait_and_arrive_whole(name, run, probe):
    async def check():
        unit = min(1 << 20, TRANSPORTS[name].max_bytes // 100)
        limits = Limits(max_message_bytes=12 * unit, max_bytes_in_flight=12 * unit)
        async with open_pair(name, probe.register, server_limits=limits) as pair:
            sizes = [10 * unit, 3 * unit, 12 * unit, min(40_000, 5 * unit), unit, 9 * unit, 7 * unit, 100]

            async def one(number):
                data = random.Random(number).randbytes(1000) * (sizes[number % len(sizes)] // 1000)
                reply = await pair.client.call(pair.server_peer, "echo", None, [data], deadline=soon(40))
                return hashlib.md5(reply.buffers[0]).digest() == hashlib.md5(data).digest()

            assert all(await asyncio.gather(*map(one, range(24))))
            await eventually_idle(pair)

    run(check())


@every_transport
def test_one_way_calls_do_not_wait_for_the_handler(name, run, probe):
    async def check():
        async with open_pair(name, probe.register) as pair:
            large = bytearray(b"a" * pair.size(20 << 20))
            await pair.client.notify(pair.server_peer, "note", 1, [b"small"], deadline=soon())
            await pair.client.notify(pair.server_peer, "note", 2, [large], deadline=soon())
            large[:] = b"b" * len(large)  # its owner may change it again
            await pair.client.notify(pair.server_peer, "no such method", 3, deadline=soon())
            await until(lambda: len(probe.seen) == 2)
            assert dict(probe.seen) == {1: [b"small"], 2: [b"a" * len(large)]}
            assert pair.server.num_calls == 2  # their handlers are still at it
            probe.gate.set()
            await eventually_idle(pair)

    run(check())


@large_ones
def test_channels_both_ways(name, run, probe):
    num_items = 50 if TRANSPORTS[name].max_bytes > 1 << 20 else 10

    async def check():
        async with (
            open_pair(name, probe.register) as pair,
            pair.client.open_channel(pair.server_peer, "double", deadline=soon()) as channel,
        ):
            for number in range(num_items):
                await channel.send(number, [bytes([number]) * number * 5000])
                item = await channel.receive()
                assert item.payload == 2 * number
                assert bytes(item.buffers[0]) == bytes([number]) * number * 5000
            await channel.end()
            assert await channel.receive() is None
            assert (await channel.result()).payload == sum(range(num_items))

    run(check())


@large_ones
def test_a_slow_reader_holds_a_channels_sender_back(name, run, probe):
    async def check():
        limits = Limits(channel_window_bytes=1 << 20)
        async with (
            open_pair(name, probe.register, client_limits=limits) as pair,
            pair.client.open_channel(pair.server_peer, "count", 30, deadline=soon()) as channel,
        ):
            await until(lambda: probe.sent >= 8)
            for _ in range(10):
                await pair.client.call(pair.server_peer, "sizes", None, deadline=soon())
            assert probe.sent <= 11  # 1 MiB of items of 100 KB, and the one that waits
            numbers = [item.payload async for item in channel]
            assert numbers == list(range(30))
            assert (await channel.result()).payload == "done"

    run(check())


@large_ones
def test_channels_end_with_errors_and_with_their_block(name, run, probe):
    async def check():
        async with open_pair(name, probe.register) as pair:
            async with pair.client.open_channel(pair.server_peer, "break", deadline=soon()) as channel:
                await channel.send("x")
                with pytest.raises(PeerRefused, match="enough"):
                    await channel.receive()
                with pytest.raises(PeerRefused, match="enough"):
                    await channel.result()
            async with pair.client.open_channel(pair.server_peer, "sit", deadline=soon()):
                await until(probe.started.is_set)
            await until(probe.cancelled.is_set)
            await eventually_idle(pair)

    run(check())


@every_transport
def test_buffers_are_handed_back_after_sending(name, run, probe):
    async def check():
        async with open_pair(name, probe.register) as pair:
            for size in (10, pair.size(1 << 20)):
                before = probe.sent
                await pair.client.call(pair.server_peer, "echo", None, [bytes(size)], deadline=soon())
                # a datagram whose answer was lost is served once more
                await until(lambda before=before: probe.sent > before)

    run(check())


@every_transport
def test_a_peer_that_is_not_there_is_said_to_be_unreachable(name, run, probe):
    async def check():
        async with open_pair(name, probe.register) as pair:
            await pair.server_owner.__aexit__(None, None, None)
            with pytest.raises(gone(name), match=r"[Cc]onnect"):
                await pair.client.call(pair.server_peer, "echo", None, deadline=soon(1.5))
            await pair.server_owner.__aenter__()

    run(check())
