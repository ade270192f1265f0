import numpy as np
import pytest

from shoal.core import PeerError, UsageError
from shoal.transport.messages import (
    EMPTY_REPLY,
    Reply,
    byte_views,
    checked_reply,
    encode_head,
    fitting_views,
    release,
)


def test_buffers_are_taken_as_they_lie():
    array = np.arange(3.0)
    views = byte_views([b"ab", bytearray(3), array])
    assert [len(view) for view in views] == [2, 3, 24]
    array[0] = 7
    assert bytes(views[2]) == array.tobytes()


@pytest.mark.parametrize("bad", ["text", 7, None, np.arange(6)[::2], np.asfortranarray(np.ones((2, 3)))])
def test_what_has_no_bytes_is_refused_with_a_hint(bad):
    with pytest.raises(UsageError, match=r"(?s)cannot be used.*contiguous.*shoal.tensors.pack"):
        byte_views([b"fine", bad])


def test_memory_must_fit_its_message():
    assert [len(view) for view in fitting_views([bytearray(3), bytearray(0)], [3, 0])] == [3, 0]
    with pytest.raises(PeerError, match=r"buffers of 3, 4 bytes, the memory given for it 3\."):
        fitting_views([bytearray(3)], [3, 4])
    with pytest.raises(PeerError, match=r"buffers of no bytes"):
        fitting_views([bytearray(3)], [])
    with pytest.raises(UsageError, match="read-only"):
        fitting_views([b"abc"], [3])
    with pytest.raises(PeerError, match="1, 1, 1, 1, 1, 1, 1, 1, …"):
        fitting_views([], [1] * 1000)


class Answer(Reply):
    pass


def test_replies_are_told_from_other_things():
    assert checked_reply(None) is EMPTY_REPLY
    assert isinstance(checked_reply(Answer(1)), Answer)
    for wrong in ({"a": 1}, 0, [], np.zeros(3)):
        with pytest.raises(TypeError, match="Reply or None, not with a"):
            checked_reply(wrong)


def test_a_coroutine_is_closed_and_explained():
    async def later():
        pass

    with pytest.raises(TypeError, match="async def"):
        checked_reply(later())


def test_an_owner_that_fails_is_logged(caplog):
    def fail():
        raise ZeroDivisionError

    release(Reply())
    release(Reply(on_sent=fail))
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("bad", [object(), np.zeros(3), 2**70, {"a": {1, 2}, "b": object()}])
def test_a_head_that_cannot_travel_is_explained(bad):
    with pytest.raises(UsageError, match=r"(?s)payload of echo cannot be sent.*MessagePack"):
        encode_head("echo", ("echo", bad), 1000)


def test_a_head_may_be_as_large_as_peers_take_and_no_larger():
    encoded = encode_head("echo", "x" * 100, 102)
    assert len(encoded) == 102
    with pytest.raises(UsageError, match=r"(?s)takes 102 bytes; 101 are allowed.*as buffers"):
        encode_head("echo", "x" * 100, 101)
