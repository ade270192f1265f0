"""The way to a peer: a socket that reaches it, and a session with it."""

from __future__ import annotations

import asyncio
from typing import Any

from shoal.core import Address, Deadline, Peer, UsageError
from shoal.transport.datagrams.asking import Asker
from shoal.transport.datagrams.hub import DatagramHub
from shoal.transport.datagrams.outcomes import no_welcome
from shoal.transport.datagrams.pending import State
from shoal.transport.datagrams.ports import Port
from shoal.transport.network.sockets import unreachable


class ConnectingHub(DatagramHub):
    """A hub that finds those who are to be asked."""

    async def _connect(self, peer: Peer, deadline: Deadline) -> Asker:
        """A session that new calls may use; concurrent callers share one greeting."""
        if (known := self._known_by_address(peer)) is not None:
            return known
        try:
            async with asyncio.timeout(deadline.timeout_s):
                while True:  # a session may be replaced by another while it greets, or right after
                    asker = self._askers.get(peer)
                    if asker is None:
                        where, port = await self._way_to(peer)
                        asker = self._askers.get(peer) or self.open_asker(peer, where, port)
                    if asker.state is State.READY:
                        return asker
                    await asker.wait_for_welcome()
        except TimeoutError:
            raise no_welcome(peer) from None

    def _known_by_address(self, peer: Peer) -> Asker | None:
        """A session that was begun with whoever is at the peer's address, and it was this peer."""
        asker = self._askers.get(Peer(peer.address)) if peer.id is not None else None
        if asker is None or asker.state is not State.READY or asker.peer.id != peer.id:
            return None
        asker.target = peer  # whoever comes to be at this address later is not asked in its place
        self._askers[peer] = asker
        return asker

    async def _way_to(self, peer: Peer) -> tuple[tuple[Any, ...], Port]:
        """A peer's address as sockets know it, and the socket to ask from."""
        try:
            where = await self.network.resolve(peer.address)
            port = await self._port_for(where)
        except (UsageError, TimeoutError):  # the second is the deadline's
            raise
        except (OSError, ValueError) as error:
            raise unreachable(peer, error) from error
        self._require_open()
        return where, port

    async def _port_for(self, where: tuple[Any, ...]) -> Port:
        """A socket to ask from, the one that listens where there is one: then both ways have one address."""
        async with self._opening:  # those who ask at the same time share one
            for port in self._ports:
                if port.can_reach(where):
                    return port
            if self.network.is_simulated:
                address = Address(getattr(self.network, "name", "localhost"), 0)
            else:
                address = Address("0.0.0.0" if len(where) == 2 else "::", 0)
            return await self._open_port(address, is_listening=False)

    def _require_open(self) -> None:
        if not self.is_open:
            raise UsageError("The transport is not open.", next_step="use it inside 'async with'.")
