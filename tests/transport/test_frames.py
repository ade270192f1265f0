"""The wire format, byte by byte: a change here is a new VERSION."""

import msgspec
import pytest

from shoal.transport.frames import (
    DECODERS,
    HEADER,
    MAGIC,
    VERSION,
    FrameKind,
    RequestHead,
    decode_payload,
    encode,
    frame,
)


def test_the_header_is_laid_out_as_drawn():
    assert frame(FrameKind.CHUNK, 0x0102030405060708, b"", 0x1112131415161718) == bytes.fromhex(
        "f053"  # magic
        "01"  # version
        "05"  # kind
        "00000000"  # head size
        "0807060504030201"  # call id
        "1817161514131211"  # body size
    )
    assert HEADER.size == 24
    assert (MAGIC, VERSION) == (b"\xf0S", 1)


def test_no_text_protocol_begins_with_the_magic():
    with pytest.raises(UnicodeDecodeError):
        MAGIC.decode()


def test_kinds_keep_their_numbers():
    assert [kind.name for kind in FrameKind] == [
        "HELLO",
        "REQUEST",
        "REPLY",
        "ERROR",
        "CHUNK",
        "CHUNK_FROM_START",
        "GRANT",
        "CANCEL",
        "ITEM",
        "END",
        "WINDOW",
        "GOODBYE",
    ]
    assert [int(kind) for kind in FrameKind] == list(range(1, 13))


def test_kinds_without_a_head_have_no_decoder():
    without = [kind.name for kind in FrameKind if DECODERS[kind] is None]
    assert without == ["CHUNK", "CHUNK_FROM_START", "CANCEL", "END"]
    assert DECODERS[0] is None


def test_a_request_is_an_array_whose_payload_stays_raw_until_its_type_is_known():
    head = DECODERS[FrameKind.REQUEST].decode(encode(("echo", 0, 1500, [3, 4], {"a": [1, None]})))
    assert isinstance(head, RequestHead)
    assert (head.method, head.mode, head.timeout_ms, head.sizes) == ("echo", 0, 1500, [3, 4])
    assert decode_payload(head.payload) == {"a": [1, None]}
    with pytest.raises(msgspec.ValidationError):
        decode_payload(head.payload, msgspec.msgpack.Decoder(dict[str, int]))
