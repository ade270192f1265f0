"""The wire format of datagrams, byte by byte, and what is no datagram of ours."""

import msgspec
import pytest

from shoal.transport.datagrams.wire import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_PACKET_BYTES,
    MAX_PARTS,
    PART_BYTES,
    PREFIX,
    TAG_BYTES,
    AnswerFrame,
    AnswerPart,
    Cancel,
    Failure,
    Request,
    UnreadablePacket,
    Working,
    cut,
    decode_answer,
    decode_frames,
    encode_failure,
    encode_frames,
    encode_request,
    version_answer,
)
from shoal.transport.frames import ErrorHead, encode


def test_a_packet_of_frames_byte_by_byte():
    assert encode_frames(7, [encode((8, 7)), encode((2, 300))]).hex() == "9207929208079202cd012c"


@pytest.mark.parametrize("num_frames", [0, 1, 15, 16, 200])
def test_frames_come_back_in_order(num_frames):
    content = encode_frames(5, [encode((8, number)) for number in range(num_frames)])
    assert decode_frames(content) == decode_frames(content)
    read = decode_frames(content)
    assert read.oldest == 5
    assert read.frames == [Working(number) for number in range(num_frames)]


def test_a_request_keeps_its_content():
    frame = encode_request(2**40, encode((1500, "find", 0, {"key": b"abc"})))
    (read,) = decode_frames(encode_frames(0, [frame])).frames
    assert (read.id, read.timeout_ms, read.method, read.mode) == (2**40, 1500, "find", 0)
    assert msgspec.msgpack.decode(read.payload) == {"key": b"abc"}
    assert read.buffers == []


def test_a_request_with_buffers():
    frame = encode_request(1, encode((0, "put", 1, None, [b"one", memoryview(b"two")])))
    (read,) = decode_frames(encode_frames(0, [frame])).frames
    assert isinstance(read, Request)
    assert read.buffers == [b"one", b"two"]


@pytest.mark.parametrize("min_bytes", [0, 10, 28, 29, 100, 255, 256])
def test_padding_reaches_the_size_and_is_ignored(min_bytes):
    content = encode_frames(1, [encode((2, 9))], min_bytes)
    assert min_bytes <= len(content) <= max(min_bytes, 8) + 2
    assert decode_frames(content).frames == [Cancel(9)]


def test_the_largest_packet_fits_into_a_datagram():
    token = encode((4, bytes(8)))
    frame = encode((5, 2**63, bytes(MAX_FRAME_BYTES - 14)))
    assert len(frame) == MAX_FRAME_BYTES
    content = encode_frames(2**63, [token, frame])
    assert HEADER_BYTES + len(content) + TAG_BYTES <= MAX_PACKET_BYTES


def test_parts_make_up_the_answer():
    answer = encode((5, 4, b"x" * (MAX_PARTS * PART_BYTES - 8)))
    parts = [decode_frames(encode_frames(0, [part])).frames[0] for part in cut(4, answer)]
    told = [(part.id, part.digest, part.index, part.num_parts) for part in parts]
    assert told == [(4, parts[0].digest, index, MAX_PARTS) for index in range(8)]
    assert cut(4, answer[:-1] + b"y")[0] != cut(4, answer)[0]
    assert all(isinstance(part, AnswerPart) and len(part.data) <= PART_BYTES for part in parts)
    assert all(len(part) <= MAX_FRAME_BYTES for part in cut(2**63, answer))
    assert isinstance(decode_answer(b"".join(part.data for part in parts)), AnswerFrame)


def test_an_answer_is_nothing_else():
    with pytest.raises(UnreadablePacket):
        decode_answer(encode((8, 1)))


def test_a_failure_is_cut_to_one_datagram():
    frame = encode_failure(2**63, ErrorHead("failed", "ü" * 2000, "é" * 2000, "💥" * 2000))
    assert len(frame) <= MAX_FRAME_BYTES
    (read,) = decode_frames(encode_frames(0, [frame])).frames
    assert isinstance(read, Failure)
    assert read.what == "ü" * 170
    assert read.next_step == "💥" * 85


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00",
        b"\xff" * 40,
        b"\x92\x00",
        b"\x92\x00\xdd\xff\xff\xff\xff",
        encode((0, [(99, 1)])),
        encode((0, [(1, "no id", 0, "m", 0, None)])),
        encode((0, [(7, 1, 0)])),
        encode(("old", [])),
        encode((0, [(2, 1)])) + b"\x00",
        b"\x92\x00\x91" + b"\x91" * 1000 + b"\x00",
    ],
)
def test_nonsense_is_unreadable(content):
    with pytest.raises(UnreadablePacket):
        decode_frames(content)


def test_the_answer_to_another_version_is_small_and_ours():
    packet = b"\xf0D\x09" + bytes(range(3, 80))
    assert version_answer(packet) == PREFIX + b"\x7f" + packet[4:12]
