import pytest

from shoal.core import ProtocolError
from shoal.core.elastic import encode_message
from shoal.launch.protocol import (
    MAGIC,
    MAX_PREAMBLE_BYTES,
    AgentHello,
    Beat,
    Decoder,
    Down,
    Post,
    Signal,
    Up,
    WorkerEnded,
    WorkerJob,
    Wrote,
)

JOB = WorkerJob(["python", "x.py"], "/home", {"A": "b"}, [Post(3, {"SHOAL_RANK": "3"})], patience=2.0)


def test_messages_arrive_in_order_however_they_are_cut():
    messages = [JOB, Beat(), Signal([3, 4], 15)]
    data = b"".join(map(encode_message, messages))
    for size in (1, 3, 1000):
        decoder, came = Decoder(Down), []
        for start in range(0, len(data), size):
            came += decoder.feed(data[start : start + size])
        assert came == messages


def test_what_a_login_shell_prints_first_is_skipped():
    decoder = Decoder(Up, expects_magic=True)
    assert decoder.feed(b"Welcome!\r\n" + MAGIC[:3]) == []
    wrote = Wrote(1, "stderr", b"\xff\n")
    assert decoder.feed(MAGIC[3:] + encode_message(WorkerEnded(1, -9)) + encode_message(wrote)) == [
        WorkerEnded(1, -9),
        wrote,
    ]


def test_a_shell_that_prints_without_end_is_refused():
    decoder = Decoder(Up, expects_magic=True)
    with pytest.raises(ProtocolError, match="does not answer as an agent"):
        decoder.feed(b"x" * (MAX_PREAMBLE_BYTES + 1))


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\x01", encode_message(WorkerEnded(0, 0))]
)
def test_what_is_none_of_the_messages_is_refused(data):
    with pytest.raises(ProtocolError):
        Decoder(Down).feed(data)


def test_a_newer_hello_can_be_read():
    class Newer(AgentHello, frozen=True, tag="Hello"):
        more: int = 3

    (hello,) = Decoder(Up).feed(encode_message(Newer("9.9", "b")))
    assert (hello.version, hello.host) == ("9.9", "b")
