import functools
from typing import Any

import msgspec
import pytest

from shoal.core import SYSTEM_CLOCK, Address, Peer, PeerRefused, UsageError
from shoal.transport.frames import Mode, RequestHead, encode
from shoal.transport.messages import MethodTable


async def answer(head, buffers):
    pass


async def answer_for(owner, head, buffers):
    pass


class Answers:
    async def __call__(self, head, buffers):
        pass


def find(routes, method, mode=Mode.CALL, payload=None):
    request = RequestHead(method, mode, 0, [], msgspec.Raw(encode(payload)))
    return routes.accept(request, [], Peer(Address("10.0.0.1", 1)), SYSTEM_CLOCK)[0]


def test_finds_what_was_added():
    routes = MethodTable()
    routes.add("call", answer, None, Any)
    routes.add("plain", lambda head, buffers: None, None, Any)
    routes.add("partial", functools.partial(answer_for, 1), None, Any)
    routes.add("object", Answers(), None, Any)
    routes.add_channel("channel", answer, Any)
    assert find(routes, "call").serve is answer
    assert find(routes, "channel", Mode.CHANNEL).serve_channel is answer
    assert [find(routes, name).is_plain_function for name in ("call", "plain", "partial", "object")] == [
        False,
        True,
        False,
        False,
    ]


def test_a_method_has_one_handler():
    routes = MethodTable()
    routes.add("call", answer, None, Any)
    with pytest.raises(UsageError, match="'call' has a handler already"):
        routes.add_channel("call", answer, Any)


@pytest.mark.parametrize("mode", [-1, Mode.CALL, Mode.ONE_WAY, Mode.CHANNEL, 3])
def test_calls_and_channels_are_told_apart(mode):
    routes = MethodTable()
    routes.add("call", answer, None, Any)
    routes.add_channel("channel", answer, Any)
    for method, modes in (("call", (Mode.CALL, Mode.ONE_WAY)), ("channel", (Mode.CHANNEL,))):
        if mode in modes:
            assert find(routes, method, mode)
        else:
            with pytest.raises(PeerRefused, match=f"{method} is a {method}"):
                find(routes, method, mode)


def test_an_unknown_method_is_refused_with_a_guess():
    routes = MethodTable()
    with pytest.raises(PeerRefused, match=r"(?s)no method 'ecko'.*same version"):
        find(routes, "ecko")
    routes.add("echo", answer, None, Any)
    with pytest.raises(PeerRefused, match=r"(?s)no method 'ecko'.*Did you mean 'echo'"):
        find(routes, "ecko")
    with pytest.raises(PeerRefused) as caught:
        find(routes, "x" * 1_000_000)
    assert len(str(caught.value)) < 300


def test_payloads_are_checked_where_a_type_is_given():
    routes = MethodTable()
    routes.add("typed", answer, None, dict[str, int])
    routes.add("any", answer, None, Any)
    assert find(routes, "any").decoder is None
    assert find(routes, "typed", payload={"a": 1}).decoder.decode(encode({"a": 1})) == {"a": 1}
    with pytest.raises(PeerRefused, match="the payload of typed is not what it takes"):
        find(routes, "typed", payload={"a": "b"})
