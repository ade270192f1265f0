"""Whole connections against peers that send anything: cut off at worst, and nothing stays behind."""

import asyncio
import gc
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.core import Deadline, UsageError
from shoal.core.loop import new_event_loop
from shoal.transport.frames import HEADER, MAX_CHUNK_BYTES, FrameKind, Mode, encode, frame
from shoal.transport.limits import Limits
from shoal.transport.messages import Reply
from transport.wire import FakeHost, chunk, fake_connection, feed, header, hello, message, request, turn

LIMITS = Limits(
    max_calls=6,
    max_message_bytes=200_000,
    max_bytes_in_flight=300_000,
    channel_window_bytes=60_000,
    max_buffers=100,
)
FUZZ = settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)


@pytest.fixture(scope="module")
def loop():
    made = new_event_loop()
    yield made
    made.run_until_complete(made.shutdown_asyncgens())
    made.close()


def host_with_handlers():
    host = FakeHost(LIMITS)

    async def echo(head, buffers):
        await asyncio.sleep(0)
        return Reply(head.payload, buffers)

    async def sit(head, buffers):
        await asyncio.Event().wait()

    async def double(head, channel):
        async for item in channel:
            await channel.send(item.payload, item.buffers)
        return Reply("done")

    def picky(head):
        raise UsageError("it does not fit.")

    host.routes.add("echo", echo, None, Any)
    host.routes.add("now", lambda head, buffers: Reply(head.payload, buffers), None, Any)
    host.routes.add("sit", sit, None, Any)
    host.routes.add("picky", echo, picky, Any)
    host.routes.add("typed", echo, None, dict[str, int])
    host.routes.add_channel("double", double, Any)
    return host


SIZES = st.one_of(
    st.lists(st.sampled_from([0, 1, 5, 1000, 40_000, 150_000]), max_size=4),
    st.just([-1]),
    st.just([10, -5]),
    st.just([10_000_000_000]),
    st.just([2**64 - 1, 2**64 - 1]),
    st.just([0] * 200),
)
METHODS = st.sampled_from(["echo", "now", "sit", "picky", "typed", "double", "ecko", "", "\0"])
PAYLOADS = st.one_of(
    st.none(), st.integers(-(2**63), 2**64 - 1), st.text(max_size=8), st.just({"a": 1}), st.just("x" * 9000)
)
IDS = st.one_of(st.integers(0, 16), st.integers(0, 2**64 - 1))


def body_for(sizes, is_inline):
    total = sum(sizes)
    return bytes(total) if is_inline and 0 <= total <= 30_000 and min(sizes, default=0) >= 0 else b""


@st.composite
def frames(draw):
    kind = draw(
        st.sampled_from([*FrameKind, FrameKind.REQUEST, FrameKind.REQUEST, FrameKind.CHUNK, FrameKind.ITEM])
    )
    call_id = draw(IDS)
    sizes = draw(SIZES)
    if kind is FrameKind.HELLO:
        return hello(draw(st.binary(max_size=25)), draw(st.integers(-5, 5)), draw(st.integers(-5, 5)))
    if kind is FrameKind.REQUEST:
        body = body_for(sizes, draw(st.booleans())) + draw(st.sampled_from([b"", b"", b"", b"?"]))
        mode, timeout_ms = (
            draw(st.sampled_from([0, 0, 1, 2, 3, -1])),
            draw(st.sampled_from([0, -1, 1, 2**62])),
        )
        return request(call_id, draw(METHODS), draw(PAYLOADS), sizes, body, mode, timeout_ms)
    if kind in (FrameKind.REPLY, FrameKind.ITEM):
        return message(kind, call_id, draw(PAYLOADS), sizes, body_for(sizes, draw(st.booleans())))
    if kind in (FrameKind.CHUNK, FrameKind.CHUNK_FROM_START):
        return chunk(call_id, bytes(draw(st.sampled_from([0, 1, 5, 1000, 40_000, 150_000]))), kind)
    if kind is FrameKind.ERROR:
        return frame(kind, call_id, encode([draw(st.text(max_size=5)), "what", "", ""]))
    if kind is FrameKind.GRANT:
        return frame(kind, call_id, encode([draw(st.booleans())]))
    if kind is FrameKind.WINDOW:
        return frame(kind, call_id, encode([draw(st.integers(-(2**63), 2**63))]))
    if kind is FrameKind.GOODBYE:
        return frame(kind, 0, encode([draw(st.sampled_from(["leaving", "version", "?"])), "bye", call_id]))
    return frame(kind, call_id)


class Script:
    """Calls that this side makes meanwhile."""

    def __init__(self, connection):
        self.connection = connection
        self.calls = []

    def begin(self):
        calling = self.connection.calling
        if not self.connection.is_usable or not calling.slots.try_take():
            return
        size = (0, 10, 50_000)[len(self.calls) % 3]
        into = [bytearray(5)] if len(self.calls) % 2 else None
        call = calling.begin("ask", None, [bytes(size)] if size else (), Deadline.never(), into, Mode.CALL)
        self.calls.append(call)

    def end(self):
        for call in self.calls:
            self.connection.calling.end(call)


async def survive(parts, step, is_dialer):
    """Feed the parts; the connection may be cut off, and must leave nothing behind."""
    host = host_with_handlers()
    async with fake_connection(host, is_dialer=is_dialer) as (connection, transport):
        script = Script(connection)
        start_s = connection.loop.time()
        for number, part in enumerate(parts):
            script.begin()
            feed(connection, part, step)
            if number % 3 == 0:
                await turn(1)
            if number % 7 == 0:
                connection.check(start_s + number)
            if transport.is_closed:
                break
        await turn(2)
        assert host.budget.used_bytes <= LIMITS.max_bytes_in_flight * 17 // 16
        assert len(connection.serving.calls) <= LIMITS.max_calls
        assert len(host.complaints) <= 1
        connection.connection_lost(None)
        script.end()
        await turn(3)
        assert host.budget.used_bytes == 0
        assert host.lost == [connection]
        assert connection.num_open == 0
        assert len(connection.arrivals) == 0
    return transport


def check(loop, parts, step=None, is_dialer=False):
    unhandled = []
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    transport = loop.run_until_complete(survive(parts, step, is_dialer))
    assert not unhandled
    return transport


@FUZZ
@given(st.lists(frames(), max_size=25), st.sampled_from([None, 1000, 7]), st.booleans())
def test_valid_looking_frames(loop, parts, step, is_dialer):
    if step == 7:
        parts = [part for part in parts if len(part) < 5000]
    check(loop, parts, step, is_dialer)


@FUZZ
@given(st.lists(frames(), min_size=1, max_size=6), st.data(), st.booleans())
def test_damaged_frames(loop, parts, data, is_dialer):
    joined = bytearray(b"".join(part[:3000] for part in parts))
    for _ in range(data.draw(st.integers(1, 5))):
        joined[data.draw(st.integers(0, len(joined) - 1))] = data.draw(st.integers(0, 255))
    check(loop, [bytes(joined)], None, is_dialer)


@FUZZ
@given(st.integers(1, 12), st.binary(max_size=60), IDS, st.integers(0, 100), st.booleans())
def test_heads_of_random_bytes(loop, kind, head, call_id, body_bytes, is_dialer):
    data = HEADER.pack(b"\xf0S", 1, kind, len(head), call_id, body_bytes) + head + bytes(body_bytes)
    check(loop, [data, request(2**40 + (0 if is_dialer else 1), "now")], None, is_dialer)


SURELY = {
    "second hello": hello(),
    "item for nobody": message(FrameKind.ITEM, 5, sizes=[3], body=b"abc"),
    "item for a call": request(1, "sit") + message(FrameKind.ITEM, 1),
    "window and end for a call": request(1, "sit")
    + frame(FrameKind.WINDOW, 1, encode([5]))
    + frame(FrameKind.END, 1),
    "grant for nobody": frame(FrameKind.GRANT, 5, encode([True])),
    "chunk for nobody": chunk(99, bytes(100_000)),
    "even id": request(2, "now"),
    "id again": request(1, "now") * 2,
    "10 GB": request(1, "echo", sizes=[10_000_000_000]) + chunk(1, bytes(1000)),
    "10 GB body": header(FrameKind.REQUEST, 0, 1, 10_000_000_000),
    "10 GB chunk": header(FrameKind.CHUNK, 0, 1, 10_000_000_000),
    "a million buffers": request(1, "echo", sizes=[0] * 1_000_000),
    "more than announced": request(1, "echo", sizes=[50_000]) + chunk(1, bytes(50_001)),
    "again without being asked": request(1, "echo", sizes=[50_000])
    + chunk(1, b"a", FrameKind.CHUNK_FROM_START),
    "channel with buffers": request(1, "double", sizes=[3], body=b"abc", mode=2),
    "too much for the window": request(1, "double", mode=2)
    + message(FrameKind.ITEM, 1, sizes=[59_000])
    + message(FrameKind.ITEM, 1, sizes=[30_000]),
    "goodbye, then more": frame(FrameKind.GOODBYE, 0, encode(["leaving", "bye", 0])) + request(1, "echo"),
    "largest chunk": chunk(1, bytes(MAX_CHUNK_BYTES)),
}
ENDS = {
    "second hello",
    "even id",
    "id again",
    "10 GB body",
    "10 GB chunk",
    "more than announced",
    "again without being asked",
    "too much for the window",
}


@pytest.mark.parametrize("name", SURELY)
def test_what_liars_send(loop, name):
    transport = check(loop, [SURELY[name]])
    if name != "goodbye, then more":
        assert transport.is_closed == (name in ENDS)


@pytest.mark.parametrize(
    "seed", [7, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 110))]
)
def test_a_long_quarrel(loop, seed):
    """Many frames on one connection, from a seed: what hypothesis keeps too short."""
    rng = random.Random(seed)
    for _ in range(500):
        parts = []
        for number in range(rng.randint(1, 60)):
            sizes = rng.choice([[], [5], [40_000], [150_000], [10, 20, 30_000]])
            parts.append(
                rng.choice(
                    [
                        request(2 * number + 1, rng.choice(["echo", "sit", "now", "picky"]), None, sizes),
                        request(2 * number + 1, "double", mode=2),
                        chunk(rng.randint(0, 2 * number + 1), bytes(rng.choice([1, 5, 40_000]))),
                        frame(FrameKind.CANCEL, rng.randint(0, 2 * number + 1)),
                        message(FrameKind.ITEM, rng.randint(0, 2 * number + 1), 1, [5], b"abcde"),
                        message(FrameKind.REPLY, rng.randint(0, 2 * number + 1), 1, sizes),
                        frame(
                            FrameKind.WINDOW, rng.randint(0, 2 * number + 1), encode([rng.randint(0, 99_999)])
                        ),
                    ]
                )
            )
        check(loop, parts)
    gc.collect()
