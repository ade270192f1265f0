"""Answers that wait to be taken over a stream."""

import asyncio
import random

import pytest

from shoal.core import Address, Deadline, Peer, PeerId, PeerRefused
from shoal.transport import Head, Reply
from shoal.transport.datagrams.parking import KEPT_S, MAX_PARKED, MAX_PARKED_BYTES, PARKED, Parking
from shoal.transport.messages import Routes
from transport.lossy import run_virtual

ALICE, BOB = PeerId(b"a" * 20), PeerId(b"b" * 20)


def ask(parking, ticket, peer_id):
    head = Head(PARKED, ticket, (), Peer(Address("10.0.0.1", 1), peer_id), Deadline.never())
    return parking.take(head, ())


def test_an_answer_is_taken_once_by_the_peer_that_asked():
    async def check():
        routes = Routes()
        parking = Parking(routes, random.Random(1))
        reply = Reply("large")
        ticket = parking.park(reply, 5, ALICE, asyncio.get_running_loop())
        assert routes.find(PARKED).is_plain_function
        for wrong in ((b"no such ticket", ALICE), (ticket, BOB)):
            with pytest.raises(PeerRefused, match="not kept any longer"):
                ask(parking, *wrong)
        assert ask(parking, ticket, ALICE) is reply
        with pytest.raises(PeerRefused):
            ask(parking, ticket, ALICE)

    run_virtual(check())


def test_what_nobody_takes_is_given_back():
    async def check():
        parking, given_back = Parking(Routes(), random.Random(1)), []
        loop = asyncio.get_running_loop()
        for number in range(MAX_PARKED + 5):
            parking.park(Reply(on_sent=lambda number=number: given_back.append(number)), 1, None, loop)
        assert given_back == [0, 1, 2, 3, 4]
        await asyncio.sleep(KEPT_S + 0.1)
        assert given_back == list(range(MAX_PARKED + 5))
        parking.park(Reply(on_sent=lambda: given_back.append("closed")), 1, None, loop)
        parking.close()
        assert given_back[-1] == "closed"

    run_virtual(check())


def test_large_answers_crowd_out_earlier_ones_and_no_timer_stays():
    async def check():
        loop, gone = asyncio.get_running_loop(), []
        parking = Parking(Routes(), random.Random(1))
        third = MAX_PARKED_BYTES // 3
        tickets = [
            parking.park(Reply(on_sent=lambda n=n: gone.append(n)), third, None, loop) for n in range(4)
        ]
        assert gone == [0]
        ask(parking, tickets[1], ALICE)
        parking.park(Reply(), third, None, loop)
        assert gone == [0]  # what was taken has made room
        parking.park(Reply(on_sent=lambda: gone.append("huge")), 2 * MAX_PARKED_BYTES, None, loop)
        assert gone == [0, 2, 3]
        parking.close()
        assert gone == [0, 2, 3, "huge"]
        assert not [timer for timer in loop._timers if not timer[2].cancelled()]

    run_virtual(check())
