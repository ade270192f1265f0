"""Where a shaped peer accepts streams."""

from __future__ import annotations

import asyncio
import contextlib

from shoal.transport.networks.network import Accepted, Listener
from shoal.transport.networks.tunnel import call_home


class ShapedListener:
    """Stops when its peer is killed, without an error for those who wait."""

    def __init__(
        self, listener: Listener, loop: asyncio.AbstractEventLoop, siblings: dict[ShapedListener, None]
    ) -> None:
        self.address = listener.address
        self._listener = listener
        self._loop = loop
        self._waits: asyncio.Timeout | None = None
        self._is_dead = False
        self._siblings = siblings
        siblings[self] = None

    async def accept(self) -> Accepted:
        """The next connection; none ever when this peer is dead."""
        while not self._is_dead:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None) as self._waits:
                    return await self._listener.accept()
        self._waits = None
        self._listener.close()
        never: asyncio.Future[Accepted] = self._loop.create_future()
        return await never

    def kill(self) -> None:
        """Accept no more, from any thread."""
        call_home(self._loop, self._kill)

    def _kill(self) -> None:
        self._is_dead = True
        if self._waits is not None:
            self._waits.reschedule(self._loop.time())

    def close(self) -> None:
        """Accept no more."""
        self._siblings.pop(self, None)
        self._listener.close()
