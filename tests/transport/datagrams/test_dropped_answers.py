"""Who goes when too much is kept."""

import asyncio
import contextlib

from shoal.transport import Limits, Reply
from shoal.transport.datagrams import callee, transport
from shoal.transport.datagrams.callee import ENTRY_BYTES
from transport.lossy import Air, open_on, run_virtual
from transport.wire import soon


def test_answers_go_before_sessions_and_those_of_the_longest_unused_first(monkeypatch):
    async def check():
        air = Air()
        async with (
            open_on(air, "server", limits=Limits()) as (server, address),
            contextlib.AsyncExitStack() as stack,
        ):
            server.handle("text", lambda head, buffers: Reply("x" * head.payload))
            for number in range(3):
                client, _ = await stack.enter_async_context(open_on(air, f"c{number}", listen=False))
                await client.call(address, "text", 500, deadline=soon())
                await asyncio.sleep(1)
            oldest, middle, newest = server.sessions.values()
            before = server.kept_bytes
            monkeypatch.setattr(transport, "MAX_KEPT_BYTES_IN_ALL", 2 * (before - 1))
            server.drop_answers()
            assert oldest.kept.get(1) == b""  # but known
            assert len(middle.kept.get(1)) == len(newest.kept.get(1)) > 500
            monkeypatch.setattr(transport, "MAX_KEPT_BYTES_IN_ALL", 2 * ENTRY_BYTES)
            server.drop_answers()
            assert list(server.sessions.values()) == [newest]
            assert newest.kept.get(1) == b""
            assert server.kept_bytes == ENTRY_BYTES
            monkeypatch.setattr(callee, "MAX_KEPT_BYTES_IN_ALL", 0)
            assert len((await client.call(address, "text", 5, deadline=soon())).payload) == 5

    run_virtual(check())
