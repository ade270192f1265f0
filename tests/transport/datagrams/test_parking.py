"""Answers that wait to be taken over a stream."""

import asyncio
import random

import pytest

from shoal.core import Address, Deadline, Peer, PeerId, PeerRefused
from shoal.transport import Head, Reply
from shoal.transport.datagrams.parking import KEPT_S, MAX_PARKED, PARKED, Parking
from shoal.transport.routes import Routes
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
        ticket = parking.park(reply, ALICE, asyncio.get_running_loop())
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
            parking.park(Reply(on_sent=lambda number=number: given_back.append(number)), None, loop)
        assert given_back == [0, 1, 2, 3, 4]
        await asyncio.sleep(KEPT_S + 0.1)
        assert given_back == list(range(MAX_PARKED + 5))
        parking.park(Reply(on_sent=lambda: given_back.append("closed")), None, loop)
        parking.close()
        assert given_back[-1] == "closed"

    run_virtual(check())
