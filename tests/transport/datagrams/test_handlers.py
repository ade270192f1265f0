"""Replies that come later: whoever waits is told, and every reply is let go of once."""

import asyncio

import pytest

from shoal.core import PeerBusy, RemoteFailure
from shoal.transport import Reply
from transport.lossy import Air, open_on, run_virtual
from transport.wire import soon


class Later:
    """A server with one method, which answers with a future, and a call of it."""

    def __init__(self, server, client, address):
        self.server = server
        self.num_released = 0
        self.future = asyncio.get_running_loop().create_future()
        self.reply = Reply("late", on_sent=self.on_sent)
        server.handle("later", lambda head, buffers: self.future)
        self._calling = lambda: client.call(address, "later", deadline=soon())

    def on_sent(self):
        self.num_released += 1

    async def begin(self, scope):
        """Call, and wait until the handler has begun."""
        call = scope.create_task(self._calling())
        await asyncio.sleep(0.1)
        return call


def run(check):
    async def main():
        air = Air()
        async with (
            open_on(air, "server") as (server, address),
            open_on(air, "client", listen=False) as (client, _),
        ):
            later = Later(server, client, address)
            await check(later, asyncio.get_running_loop())
            await asyncio.sleep(1)
            assert server.num_calls == client.num_calls == 0
            assert server.budget.used_bytes == 0

    run_virtual(main())


def test_who_waits_is_told_the_reply_or_why_there_is_none():
    async def check(later, loop):
        call = await later.begin(loop)
        assert later.server.num_calls == 1
        later.future.set_result(later.reply)
        assert (await call).payload == "late"
        assert later.num_released == 1

    run(check)

    async def check_cancelled(later, loop):
        call = await later.begin(loop)
        later.future.cancel()
        with pytest.raises(PeerBusy, match="cancelled"):
            await call

    run(check_cancelled)

    async def check_failed(later, loop):
        call = await later.begin(loop)
        later.future.set_exception(KeyError("no"))
        with pytest.raises(RemoteFailure):
            await call

    run(check_failed)


@pytest.mark.parametrize("is_done", [False, True])
def test_a_session_that_ends_cancels_its_futures_or_releases_the_reply_that_has_just_come(is_done):
    async def check(later, loop):
        call = await later.begin(loop)
        if is_done:
            later.future.set_result(later.reply)
        (session,) = later.server.sessions.values()
        later.server.drop(session, "for this test.")
        assert later.future.cancelled() is not is_done
        await asyncio.sleep(0)
        assert later.num_released == is_done
        assert later.server.num_calls == 0
        call.cancel()

    run(check)


def test_a_call_that_is_cancelled_cancels_its_future():
    async def check(later, loop):
        call = await later.begin(loop)
        call.cancel()
        await asyncio.sleep(0.1)
        assert later.future.cancelled()
        assert later.num_released == 0

    run(check)


@pytest.mark.parametrize("is_done", [False, True])
def test_without_room_nothing_waits_and_the_reply_is_released(is_done):
    async def check(later, loop):
        budget = later.server.budget
        assert budget.try_take(budget.max_bytes)
        if is_done:
            later.future.set_result(later.reply)
        call = await later.begin(loop)
        with pytest.raises(PeerBusy, match="too many calls"):
            await call
        assert later.future.cancelled() is not is_done
        assert later.num_released == is_done
        budget.give_back(budget.max_bytes)

    run(check)
