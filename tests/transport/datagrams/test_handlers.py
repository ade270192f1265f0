"""Replies that come later: whoever waits is told, and every reply is let go of once."""

import asyncio
import types

import pytest

from shoal.core import Address, Deadline, Peer, PeerBusy, Scope
from shoal.transport.datagrams.handlers import Handlers, ServedCall
from shoal.transport.limits import ByteBudget
from shoal.transport.messages import Head, Reply

PEER = Peer(Address("127.0.0.1", 1))


class Waiting:
    """Handlers with one call, which waits for a future."""

    def __init__(self, scope, max_bytes=100):
        loop = asyncio.get_running_loop()
        self.budget = ByteBudget(max_bytes)
        hub = types.SimpleNamespace(loop=loop, scope=scope, budget=self.budget)
        self.told = []
        self.num_released = 0
        self.handlers = Handlers(
            hub, lambda _, reply: self.told.append(reply), lambda _, error: self.told.append(type(error))
        )
        self.later = loop.create_future()
        self.reply = Reply(on_sent=self.on_sent)

    def on_sent(self):
        self.num_released += 1

    def begin(self):
        head = Head("method", None, (), PEER, Deadline.never())
        self.handlers.wait_for(self.later, ServedCall(1, head, (), False, 100), None)


def run(check, **options):
    async def main():
        async with Scope() as scope:
            waiting = Waiting(scope, **options)
            await check(waiting)
            assert len(waiting.handlers) == 0
            assert waiting.budget.used_bytes == 0

    asyncio.run(main())


async def turns():
    for _ in range(3):
        await asyncio.sleep(0)


def test_who_waits_is_told_the_reply_or_why_there_is_none():
    async def check(waiting):
        waiting.begin()
        assert len(waiting.handlers) == 1
        waiting.later.set_result(waiting.reply)
        await turns()
        assert waiting.told == [waiting.reply]
        assert waiting.num_released == 0  # that is up to who sends it

    run(check)

    async def check_cancelled(waiting):
        waiting.begin()
        waiting.later.cancel()
        await turns()
        assert waiting.told == [PeerBusy]

    run(check_cancelled)

    async def check_failed(waiting):
        waiting.begin()
        waiting.later.set_exception(KeyError("no"))
        await turns()
        assert waiting.told == [KeyError]

    run(check_failed)


@pytest.mark.parametrize("is_done", [False, True])
def test_a_cancelled_call_cancels_its_future_or_releases_the_reply_that_has_just_come(is_done):
    async def check(waiting):
        waiting.begin()
        if is_done:
            waiting.later.set_result(waiting.reply)
        waiting.handlers.cancel(1)
        assert waiting.later.cancelled() is not is_done
        await turns()
        assert waiting.num_released == is_done
        assert waiting.told == []

    run(check)


@pytest.mark.parametrize("is_done", [False, True])
def test_without_room_nothing_waits_and_the_reply_is_released(is_done):
    async def check(waiting):
        if is_done:
            waiting.later.set_result(waiting.reply)
        with pytest.raises(PeerBusy):
            waiting.begin()
        assert waiting.later.cancelled() is not is_done
        await turns()
        assert waiting.num_released == is_done
        assert waiting.told == []

    run(check, max_bytes=0)
