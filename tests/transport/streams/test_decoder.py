"""The decoder alone: any cutting of the bytes gives the same frames, and no bytes break it."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.core import LimitExceeded, ProtocolError, VersionMismatch
from shoal.transport.frames import HEADER, MAX_CHUNK_BYTES, VERSION, FrameKind, encode, frame
from shoal.transport.streams.decoder import FrameDecoder
from transport.wire import chunk, header, hello, message, request

MAX_HEAD_BYTES = 1 << 20


class Sink:
    """Keeps frames; chunks of odd calls have memory, those of even ones are dropped."""

    def __init__(self, target_sizes=None):
        self.seen = []
        self.memory = {}
        self.target_sizes = target_sizes
        self.on_begin = None

    def on_frame(self, kind, call_id, head, body):
        self.seen.append((kind, call_id, None if head is None else encode(head), bytes(body)))

    def targets(self, call_id, body_bytes, *, is_from_start):
        if self.on_begin is not None:
            self.on_begin(call_id)
        if call_id % 2 == 0:
            self.seen.append(("dropped", call_id, body_bytes))
            return None
        sizes = self.target_sizes or [body_bytes]
        self.memory[call_id] = [bytearray(size) for size in sizes]
        return [memoryview(memory) for memory in self.memory[call_id] if len(memory)]

    def on_chunk_end(self, call_id):
        self.seen.append(("chunk", call_id, [bytes(memory) for memory in self.memory[call_id]]))


def decoder(sink=None, *, is_welcome=True):
    sink = sink or Sink()
    made = FrameDecoder(sink.on_frame, MAX_HEAD_BYTES)
    made.arrivals = sink
    if is_welcome:
        made.welcome()
        made.buffer_updated(0)
    return made


def feed(target, data, step=None):
    data = memoryview(data)
    while data:
        buffer = target.get_buffer()
        assert len(buffer) > 0
        num_bytes = min(len(buffer), len(data), step or len(data))
        buffer[:num_bytes] = data[:num_bytes]
        target.buffer_updated(num_bytes)
        data = data[num_bytes:]


SOME_FRAMES = (
    hello()
    + request(1, "echo", {"a": [1, 2]}, sizes=[3, 0, 4], body=b"abcdefg")
    + chunk(3, bytes(range(200)))
    + chunk(4, b"nobody wants this")
    + message(FrameKind.REPLY, 2, "ü", sizes=[1], body=b"!")
    + frame(FrameKind.CANCEL, 9)
    + chunk(5, b"")
    + frame(FrameKind.GOODBYE, 0, encode(["leaving", "bye", 7]))
)


def test_frames_cut_anywhere_are_the_same_frames():
    whole = Sink()
    feed(decoder(whole), SOME_FRAMES)
    assert [entry[0] for entry in whole.seen] == [
        FrameKind.HELLO,
        FrameKind.REQUEST,
        "chunk",
        "dropped",
        FrameKind.REPLY,
        FrameKind.CANCEL,
        FrameKind.GOODBYE,
    ]
    for cut in range(len(SOME_FRAMES)):
        sink = Sink()
        cutting = decoder(sink)
        feed(cutting, SOME_FRAMES[:cut])
        feed(cutting, SOME_FRAMES[cut:])
        assert sink.seen == whole.seen, cut
    for step in (1, 2, 3, 7, 23, 24, 25):
        sink = Sink()
        feed(decoder(sink), SOME_FRAMES, step=step)
        assert sink.seen == whole.seen, step


def test_many_small_frames_in_one_read():
    sink = Sink()
    one = decoder(sink)
    data = b"".join(request(2 * n + 1, "echo", n) for n in range(1000))
    feed(one, data)
    assert [call_id for _, call_id, *_ in sink.seen] == [2 * n + 1 for n in range(1000)]
    assert not one.is_inside_frame
    feed(one, data)
    buffer = one.get_buffer()
    assert len(buffer) > len(data)  # so much came at once: the next time one read takes it
    buffer[: len(data)] = data
    one.buffer_updated(len(data))
    assert len(sink.seen) == 3000


def test_chunks_are_read_into_their_own_memory():
    sink = Sink()
    one = decoder(sink)
    one.expects_chunk = True
    body = random.Random(1).randbytes(100_000)
    data = chunk(1, body)
    buffer = one.get_buffer()
    assert len(buffer) == HEADER.size  # no more, so that the chunk itself is not read along
    feed(one, data[: HEADER.size])
    buffer = one.get_buffer()
    assert buffer.obj is sink.memory[1][0]
    assert len(buffer) == len(body)
    buffer[:50_000] = body[:50_000]
    one.buffer_updated(50_000)
    assert one.is_inside_frame
    one.drop_chunk(3)  # of another call: nothing to drop
    assert len(one.get_buffer()) == 50_000
    assert one.get_buffer().obj is sink.memory[1][0]
    feed(one, body[50_000:])
    assert sink.seen == [("chunk", 1, [body])]
    assert not one.is_inside_frame


def test_small_targets_are_filled_by_one_read():
    sizes = [100, 3, 70_000, 20_000, 1, 9]
    sink = Sink(sizes)
    one = decoder(sink)
    body = random.Random(2).randbytes(sum(sizes))
    feed(one, chunk(1, body), step=5000)
    assert b"".join(sink.seen[0][2]) == body


def test_a_large_head_is_taken_and_its_memory_given_back():
    sink = Sink()
    one = decoder(sink)
    payload = "x" * 900_000
    data = request(1, "echo", payload)
    feed(one, data[:100_000])
    assert 900_000 < len(one._scratch) < 1_000_000
    feed(one, data[100_000:])
    assert len(sink.seen) == 1
    assert len(one.get_buffer()) <= 128 << 10


def test_dropping_a_chunk_under_way_leaves_its_memory_alone():
    sink = Sink()
    one = decoder(sink)
    one.expects_chunk = True
    data = chunk(1, b"x" * 100_000) + frame(FrameKind.CANCEL, 5)
    feed(one, data[:1000])
    one.drop_chunk(1)
    before = bytes(sink.memory[1][0])
    feed(one, data[1000:])
    assert bytes(sink.memory[1][0]) == before
    assert [entry[0] for entry in sink.seen] == [FrameKind.CANCEL]


def test_a_stranger_gets_little_memory_and_a_busy_friend_more():
    one = decoder(is_welcome=False)
    assert len(one.get_buffer()) <= 4096
    with pytest.raises(LimitExceeded, match="4,096 are allowed"):
        feed(one, header(FrameKind.HELLO, head_bytes=5000))

    class Welcoming(Sink):
        def on_frame(self, kind, call_id, head, body):
            super().on_frame(kind, call_id, head, body)
            one.welcome()

    friendly = Welcoming()
    one = decoder(friendly, is_welcome=False)
    feed(one, hello() + request(1, "echo"))
    assert len(one.get_buffer()) <= 4096
    feed(one, request(3, "echo", "x" * 100_000) + request(5, "echo", "x" * 300_000))
    assert [call_id for _, call_id, *_ in friendly.seen] == [0, 1, 3, 5]
    assert len(one.get_buffer()) == 128 << 10


def test_a_closed_decoder_swallows_everything():
    sink = Sink()
    one = decoder(sink)
    feed(one, SOME_FRAMES[:50])
    one.close()
    del sink.seen[:]
    feed(one, b"anything" * 10_000)
    assert sink.seen == []
    assert len(one._scratch) < 100


BAD_FRAMES = {
    "http": (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", ProtocolError, "does not speak.*GET / HTTP"),
    "magic": (header(magic=b"\0\0"), ProtocolError, "does not speak"),
    "version": (
        header(version=VERSION + 1),
        VersionMismatch,
        rf"version {VERSION + 1} of the protocol, this peer version {VERSION}",
    ),
    "kind": (header(200), ProtocolError, "unknown kind 200"),
    "kind 0": (header(0), ProtocolError, "unknown kind 0"),
    "head": (header(FrameKind.REQUEST, head_bytes=MAX_HEAD_BYTES + 1), LimitExceeded, "1,048,577"),
    "body": (header(FrameKind.REQUEST, body_bytes=10_000_000_000), LimitExceeded, "10,000,000,000"),
    "chunk": (header(FrameKind.CHUNK, body_bytes=MAX_CHUNK_BYTES + 1), LimitExceeded, "CHUNK"),
    "chunk head": (header(FrameKind.CHUNK, head_bytes=4, body_bytes=1), ProtocolError, "must not have"),
    "cancel body": (header(FrameKind.CANCEL, body_bytes=1), LimitExceeded, "CANCEL"),
    "no head": (header(FrameKind.HELLO), ProtocolError, "cannot be read"),
    "wrong head": (frame(FrameKind.HELLO, 0, encode({"a": 1})), ProtocolError, "cannot be read"),
    "deep head": (frame(FrameKind.REQUEST, 1, b"\x91" * 100_000), ProtocolError, "cannot be read"),
    "not utf-8": (
        frame(FrameKind.REQUEST, 1, b"\x95\xa2\xff\xff\x00\x00\x90\xc0"),
        ProtocolError,
        "cannot be read",
    ),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_bytes_that_no_honest_peer_sends(name):
    data, error, match = BAD_FRAMES[name]
    with pytest.raises(error, match=match):
        feed(decoder(), data)
    with pytest.raises(error, match=match):
        feed(decoder(), SOME_FRAMES + data, step=11)


# --- any bytes whatever ---

FUZZ = settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
MAX_SCRATCH_BYTES = MAX_HEAD_BYTES + (1 << 16)

heads = st.one_of(
    st.binary(max_size=80),
    st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=20),
        lambda inner: st.lists(inner, max_size=6),
        max_leaves=12,
    ).map(encode),
)


@st.composite
def any_frames(draw):
    data = b""
    for _ in range(draw(st.integers(1, 8))):
        head, body = draw(heads), draw(st.binary(max_size=200))
        kind = draw(st.integers(0, 14))
        has_body = draw(st.booleans()) or kind in (5, 6)
        data += header(kind, 0 if kind in (5, 6, 8, 10) else len(head), draw(st.integers(0, 9)))[:16]
        data += (len(body) if has_body else 0).to_bytes(8, "little")
        data += b"" if kind in (5, 6, 8, 10) else head
        data += body if has_body else b""
    return data


@st.composite
def mutated(draw):
    data = bytearray(SOME_FRAMES)
    for _ in range(draw(st.integers(1, 6))):
        where = draw(st.integers(0, len(data) - 1))
        data[where] = draw(st.integers(0, 255))
    cut = draw(st.integers(0, len(data)))
    return bytes(data[:cut])


def assert_survives(data, step):
    one = decoder(Sink())
    try:
        feed(one, data, step)
    except (ProtocolError, LimitExceeded):
        pass
    else:
        assert len(one.get_buffer()) > 0
    assert len(one._scratch) <= MAX_SCRATCH_BYTES


@FUZZ
@given(st.binary(max_size=300), st.integers(1, 300))
def test_random_bytes(data, step):
    assert_survives(data, step)


@FUZZ
@given(mutated(), st.integers(1, 300))
def test_damaged_frames(data, step):
    assert_survives(data, step)


@FUZZ
@given(any_frames(), st.integers(1, 300))
def test_frames_with_any_content(data, step):
    assert_survives(data, step)
