"""Answers that wait to be taken over a stream."""

import asyncio
import random

import pytest

from shoal.core import Address, Deadline, Peer, PeerId, PeerRefused
from shoal.transport import Head, Reply
from shoal.transport.datagrams.callee import (
    LARGE_KEPT_S,
    MAX_LARGE,
    MAX_LARGE_BYTES,
    TAKE_LARGE,
    LargeAnswers,
)
from shoal.transport.messages import Routes
from transport.lossy import run_virtual

ALICE, BOB = PeerId(b"a" * 20), PeerId(b"b" * 20)


def ask(large, ticket, peer_id):
    head = Head(TAKE_LARGE, ticket, (), Peer(Address("10.0.0.1", 1), peer_id), Deadline.never())
    return large.take(head, ())


def test_an_answer_is_taken_once_by_the_peer_that_asked():
    async def check():
        routes = Routes()
        large = LargeAnswers(routes, random.Random(1))
        reply = Reply("large")
        ticket = large.add(reply, 5, ALICE, asyncio.get_running_loop())
        assert routes.find(TAKE_LARGE).is_plain_function
        for wrong in ((b"no such ticket", ALICE), (ticket, BOB)):
            with pytest.raises(PeerRefused, match="not kept any longer"):
                ask(large, *wrong)
        assert ask(large, ticket, ALICE) is reply
        with pytest.raises(PeerRefused):
            ask(large, ticket, ALICE)

    run_virtual(check())


def test_what_nobody_takes_is_given_back():
    async def check():
        large, given_back = LargeAnswers(Routes(), random.Random(1)), []
        loop = asyncio.get_running_loop()
        for number in range(MAX_LARGE + 5):
            large.add(Reply(on_sent=lambda number=number: given_back.append(number)), 1, None, loop)
        assert given_back == [0, 1, 2, 3, 4]
        await asyncio.sleep(LARGE_KEPT_S + 0.1)
        assert given_back == list(range(MAX_LARGE + 5))
        large.add(Reply(on_sent=lambda: given_back.append("closed")), 1, None, loop)
        large.close()
        assert given_back[-1] == "closed"

    run_virtual(check())


def test_large_answers_crowd_out_earlier_ones_and_no_timer_stays():
    async def check():
        loop, gone = asyncio.get_running_loop(), []
        large = LargeAnswers(Routes(), random.Random(1))
        third = MAX_LARGE_BYTES // 3
        tickets = [large.add(Reply(on_sent=lambda n=n: gone.append(n)), third, None, loop) for n in range(4)]
        assert gone == [0]
        ask(large, tickets[1], ALICE)
        large.add(Reply(), third, None, loop)
        assert gone == [0]  # what was taken has made room
        large.add(Reply(on_sent=lambda: gone.append("huge")), 2 * MAX_LARGE_BYTES, None, loop)
        assert gone == [0, 2, 3]
        large.close()
        assert gone == [0, 2, 3, "huge"]
        assert not [timer for timer in loop._timers if not timer[2].cancelled()]

    run_virtual(check())
