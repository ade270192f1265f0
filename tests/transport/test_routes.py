import functools
from typing import Any

import pytest

from shoal.core import PeerRefused, UsageError
from shoal.transport.frames import encode
from shoal.transport.messages import Routes


async def answer(head, buffers):
    pass


async def answer_for(owner, head, buffers):
    pass


class Answers:
    async def __call__(self, head, buffers):
        pass


def test_finds_what_was_added():
    routes = Routes()
    routes.add("call", answer, None, Any)
    routes.add("plain", lambda head, buffers: None, None, Any)
    routes.add("partial", functools.partial(answer_for, 1), None, Any)
    routes.add("object", Answers(), None, Any)
    routes.add_channel("channel", answer, Any)
    assert routes.find("call").serve is answer
    assert routes.find("channel").serve_channel is answer
    assert [routes.find(name).is_plain_function for name in ("call", "plain", "partial", "object")] == [
        False,
        True,
        False,
        False,
    ]


def test_a_method_has_one_handler():
    routes = Routes()
    routes.add("call", answer, None, Any)
    with pytest.raises(UsageError, match="'call' has a handler already"):
        routes.add_channel("call", answer, Any)


def test_an_unknown_method_is_refused_with_a_guess():
    routes = Routes()
    with pytest.raises(PeerRefused, match=r"(?s)no method 'ecko'.*same version"):
        routes.find("ecko")
    routes.add("echo", answer, None, Any)
    with pytest.raises(PeerRefused, match=r"(?s)no method 'ecko'.*Did you mean 'echo'"):
        routes.find("ecko")
    with pytest.raises(PeerRefused) as caught:
        routes.find("x" * 1_000_000)
    assert len(str(caught.value)) < 300


def test_payloads_are_checked_where_a_type_is_given():
    routes = Routes()
    routes.add("typed", answer, None, dict[str, int])
    routes.add("any", answer, None, Any)
    assert routes.find("any").decoder is None
    assert routes.find("typed").decoder.decode(encode({"a": 1})) == {"a": 1}
