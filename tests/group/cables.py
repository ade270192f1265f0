"""Cables between meshes of one process that can be cut: every connection passes through a relay.

While a cable is cut, nothing that is sent through it arrives, the end of a connection neither; connections
stay open, as they do when a switch loses its power.
"""

import asyncio
import contextlib

from shoal.core import Address, LoopThread, Peer


class Cables:
    """A relay for each pair of ranks and each direction in which they dial; a context manager."""

    def __init__(self):
        self._loop = LoopThread("cables", asyncio.new_event_loop)
        self._is_whole = {}
        """By source and destination."""
        self._servers = []
        self._writers = []

    def __enter__(self):
        self._loop.__enter__()
        return self

    def __exit__(self, *_):
        self._loop.run(self._close())
        self._loop.__exit__(None, None, None)

    def lay(self, source, to, peer):
        """Where `source` reaches the peer that is rank `to`."""
        return Peer(self.route(source, to, peer.address), peer.id)

    def route(self, source, to, address):
        """Where `source` reaches an address of rank `to`; one cable carries all that goes there."""
        return self._loop.run(self._lay(source, to, address))

    def cut(self, side, others=None):
        """Between these ranks and those, by default all others."""
        self._loop.run(self._cut(side, others))

    async def _lay(self, source, to, address):
        if (source, to) not in self._is_whole:
            self._is_whole[source, to] = asyncio.Event()
            self._is_whole[source, to].set()
        is_whole = self._is_whole[source, to]

        async def relay(reader, writer):
            self._writers.append(writer)
            await is_whole.wait()
            try:
                there_reader, there_writer = await asyncio.open_connection(address.host, address.port)
            except OSError:
                writer.close()
                return
            self._writers.append(there_writer)
            pumps = [_pump(reader, there_writer, is_whole), _pump(there_reader, writer, is_whole)]
            await asyncio.wait([asyncio.ensure_future(pump) for pump in pumps])

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        self._servers.append(server)
        return Address("127.0.0.1", server.sockets[0].getsockname()[1])

    async def _cut(self, side, others):
        for pair, is_whole in self._is_whole.items():
            beyond = [rank for rank in pair if rank not in side]
            if len(beyond) == 1 and (others is None or beyond[0] in others):
                is_whole.clear()

    async def _close(self):
        for server in self._servers:
            server.close()
        for writer in self._writers:
            writer.close()
        for is_whole in self._is_whole.values():
            is_whole.set()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if others:
            await asyncio.wait(others, timeout=10)


async def _pump(reader, writer, is_whole):
    with contextlib.suppress(OSError, RuntimeError):  # either end may be closed meanwhile
        while data := await reader.read(1 << 16):
            await is_whole.wait()
            writer.write(data)
            await writer.drain()
    await is_whole.wait()
    writer.close()
