import asyncio

import pytest

from shoal.core.scope import settle


def test_whoever_waits_gets_a_result_or_an_error_and_only_the_first(run):
    async def check():
        loop = asyncio.get_running_loop()
        answered, failed = loop.create_future(), loop.create_future()
        settle(answered, 1)
        settle(answered, ValueError("too late"))
        assert await answered == 1
        settle(failed, ValueError("no"))
        settle(failed, 2)
        with pytest.raises(ValueError, match="no"):
            await failed
        gone = loop.create_future()
        gone.cancel()
        settle(gone, 1)

    run(check())
