"""One address for all: a peer's streams and datagrams on the same port number, with the same handlers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Self

from shoal.core import Address, LoopThread, PeerId, UsageError
from shoal.transport import introductions
from shoal.transport.datagrams.transport import DatagramTransport
from shoal.transport.limits import Limits
from shoal.transport.messages import HasMethods, MethodTable
from shoal.transport.network.sockets import Network, SocketNetwork
from shoal.transport.punching import Punching
from shoal.transport.relay import DEFAULT_LIMITS, RelayClient, RelayLimits, RelayService
from shoal.transport.streams.transport import StreamTransport
from shoal.transport.trust.membership import Membership

_ATTEMPTS = 20  # a port that is free for datagrams may be taken for streams


class Endpoint(HasMethods):
    """A peer's transports, opened and closed together: `datagrams` for small calls, `streams` for others.

    It answers the methods of `introductions` by itself, and relays for others within the limits `relaying`
    (None: for nobody), unless it has `helpers`.
    """

    def __init__(
        self,
        *,
        membership: Membership | None = None,
        is_insecure: bool = False,
        network: Network | None = None,
        limits: Limits | None = None,
        helpers: Sequence[LoopThread] = (),
        peer_id: PeerId | None = None,
        relaying: RelayLimits | None = DEFAULT_LIMITS,
    ) -> None:
        self.membership = membership
        self.network = network or SocketNetwork()
        self.routes = MethodTable()
        self.limits = limits or Limits()
        self.streams = StreamTransport(
            membership=membership,
            is_insecure=is_insecure,
            peer_id=peer_id,
            limits=self.limits,
            network=self.network,
            routes=self.routes,
            helpers=helpers,
        )
        self.datagrams = DatagramTransport(
            membership=membership,
            is_insecure=is_insecure,
            peer_id=peer_id,
            limits=self.limits,
            network=self.network,
            routes=self.routes,
            streams=self.streams,
        )
        self.peer_id = self.streams.peer_id
        self.addresses: list[Address] = []
        """Where it listens."""
        self._closing = contextlib.AsyncExitStack()
        introductions.answer(self)
        self.relays = RelayClient(self)
        """The way for others to call this peer where they cannot dial it."""
        self.punching = Punching(self)
        """Direct ways to peers that are reached through relays."""
        # the two connections that a stream passes must live on one loop
        self.relaying = RelayService(self, relaying) if relaying is not None and not helpers else None

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as closing:
            await closing.enter_async_context(self.streams)
            await closing.enter_async_context(self.datagrams)
            closing.callback(self.addresses.clear)
            self._closing = closing.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._closing.aclose()

    @property
    def num_calls(self) -> int:
        """Calls under way, both ways and of both kinds."""
        return self.datagrams.num_calls

    async def listen(self, address: Address) -> Address:
        """Accept calls of both kinds there; port 0 picks a number that is free for both."""
        clash: UsageError | None = None
        for _ in range(_ATTEMPTS if address.port == 0 else 1):
            bound = await self.datagrams.listen(address)
            try:
                await self.streams.listen(Address(address.host, bound.port))
            except BaseException as error:
                await self.datagrams.stop_listening(bound)
                if not isinstance(error, UsageError):
                    raise
                clash = error
            else:
                self.addresses.append(bound)
                return bound
        why = "datagrams can, streams cannot" if address.port else "no port was free for both"
        raise UsageError(
            f"Cannot listen on {address}: {why}.",
            cause=(clash.cause or clash.what) if clash is not None else "",
            next_step="choose a port that nobody uses, or 0 for one that is free for both.",
        ) from clash
