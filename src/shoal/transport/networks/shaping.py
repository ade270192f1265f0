"""Real sockets that behave like a worse network: a profile's delays, bandwidth and loss, a script's faults.

Peers agree on nothing but the profile, the script and the seed. Whoever dials shapes the way between, in both
directions; whoever sends a datagram shapes its way; each shapes its own line. So a peer that is not shaped
can be talked to, and only its own line is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import random
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from shoal.core import Address, Clock
from shoal.core.fork import keep_in_children
from shoal.transport.conditions.conditions import Conditions
from shoal.transport.conditions.distributions import digest_of
from shoal.transport.conditions.faults import FaultScript
from shoal.transport.conditions.lines import WayLink
from shoal.transport.conditions.profiles import Profile
from shoal.transport.networks.network import Accepted, Listener, Network, SocketAccepted, SocketNetwork
from shoal.transport.networks.pipes import nothing
from shoal.transport.networks.shaped_datagrams import ShapedDatagrams
from shoal.transport.networks.shaped_listener import ShapedListener
from shoal.transport.networks.sockets import is_wildcard
from shoal.transport.networks.timers import PreciseTimers
from shoal.transport.networks.tunnel import Tunnel, call_home, cross

_NOBODY = Address("nobody", 0)
_DIAL_BYTES = 60


class ShapedNetwork:
    """A network of sockets under conditions; leave it as a context manager to end what is still on its way.

    `here` is the address that others know this peer by, and that profile and script name it by; without it,
    the first one that it listens on. A peer without any is nobody, in a place that chance picks. When the
    script kills this peer, its sockets end and `on_kill` is called. Conditions that it owns stop with it.
    """

    is_simulated = False
    linger_s = 2.0
    """How long `close` waits for what is still on its way."""

    def __init__(
        self,
        network: SocketNetwork,
        conditions: Conditions,
        here: Address | None = None,
        *,
        on_kill: Callable[[], None] | None = None,
        owns_conditions: bool = False,
    ) -> None:
        self.network = network
        self.conditions = conditions
        self.here = here
        self._is_here_named = here is not None
        self.random: random.Random = network.random
        self.clock: Clock = _ClockHere(self)
        self._on_kill = on_kill
        self._owns_conditions = owns_conditions
        self._is_dead = False
        self._timers: dict[asyncio.AbstractEventLoop, PreciseTimers] = {}
        self._tunnels: dict[Tunnel, None] = {}
        self._listeners: dict[ShapedListener, None] = {}
        self._datagrams: dict[ShapedDatagrams, None] = {}
        self._known: dict[tuple[Any, ...], Address] = {}
        self._on_all_over: Callable[[], None] = nothing
        self._choices = random.Random(digest_of(conditions.seed, "tunnels", str(here)))
        self._stop_watching: Callable[[], None] | None = None

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Let what has been sent arrive, and end the rest."""
        for datagrams in tuple(self._datagrams):
            datagrams.close()
        for should_abort in (False, True):
            if should_abort:
                self._abort_all()
            all_over = asyncio.Event()
            # a tunnel may end in another thread
            self._on_all_over = functools.partial(call_home, asyncio.get_running_loop(), all_over.set)
            self._check_over()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.linger_s):
                    await all_over.wait()
        if self._stop_watching is not None:
            self._stop_watching()
        if self._owns_conditions:
            self.conditions.stop()

    # --- streams ---

    async def listen(self, address: Address) -> Listener:
        """Accept TCP connections there; UsageError when that cannot be."""
        timers = self._begin()
        listener = ShapedListener(await self.network.listen(address), timers.loop, self._listeners)
        self._settle(listener.address)
        if self._is_dead:
            listener.kill()
        return listener

    async def dial(
        self, address: Address, protocol: asyncio.BufferedProtocol, *, tls: ssl.SSLContext | None = None
    ) -> None:
        """Have `protocol` speak to whoever listens there, after one round trip."""
        timers = self._begin()
        if self.conditions.is_dead(address):
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{address} was killed")
        here = self.here or _NOBODY
        leaving = self.conditions.leaving(here, address)
        arriving = self.conditions.arriving(address, here)
        await cross(leaving, timers, _DIAL_BYTES)
        try:
            outside = await self.network.connect(address)
        except OSError:
            await cross(arriving, timers, _DIAL_BYTES)
            raise
        try:
            await cross(arriving, timers, _DIAL_BYTES)
        except BaseException:
            outside.close()
            raise
        inside = await self._open_tunnel(outside, leaving, arriving, timers, address)
        await self.network.dial(address, protocol, tls=tls, sock=inside)

    async def adopt(
        self, accepted: Accepted, protocol: asyncio.BufferedProtocol, *, tls: ssl.SSLContext | None = None
    ) -> None:
        """Have `protocol` serve an accepted connection, on the running loop."""
        timers = self._begin()
        here = self.here or _NOBODY
        taken = cast("SocketAccepted", accepted)
        if not self.conditions.concern_line(here):
            await self.network.adopt(taken, protocol, tls=tls)
            return
        keep_in_children(taken.socket.fileno())  # the tunnel says so again once it holds it
        outside = socket.socket(fileno=taken.socket.detach())
        leaving, arriving = self.conditions.leaving(here, None), self.conditions.arriving(None, here)
        inside = await self._open_tunnel(outside, leaving, arriving, timers, None)
        await self.network.adopt(SocketAccepted(inside, taken.origin), protocol, tls=tls)

    async def _open_tunnel(
        self,
        outside: socket.socket,
        leaving: WayLink,
        arriving: WayLink,
        timers: PreciseTimers,
        target: Address | None,
    ) -> socket.socket:
        tunnel = Tunnel(timers, leaving, arriving, random.Random(self._choices.random()))
        inside = await tunnel.open(outside)
        self._tunnels[tunnel] = None
        forget = nothing
        if target is not None:
            forget = self.conditions.on_kill(target, lambda: call_home(tunnel.loop, tunnel.reset))

        def on_over() -> None:
            self._tunnels.pop(tunnel, None)
            forget()
            self._check_over()

        tunnel.on_over = on_over
        if self._is_dead:
            tunnel.abort()
        return inside

    # --- datagrams ---

    async def open_datagrams(
        self, address: Address, protocol: asyncio.DatagramProtocol
    ) -> asyncio.DatagramTransport:
        """A UDP socket there; UsageError when that cannot be."""
        is_named = address.port != 0 or not is_wildcard(address.host)
        datagrams = ShapedDatagrams(self, self._begin(), protocol, is_named=is_named)
        await self.network.open_datagrams(address, datagrams.receiver)
        return datagrams

    async def resolve(self, address: Address) -> tuple[Any, ...]:
        """A socket address; what it was called is remembered, since rules may go by names."""
        where = await self.network.resolve(address)
        self._known[where[:2]] = address
        return where

    def address_of(self, where: tuple[Any, ...]) -> Address:
        """The address that a socket address was resolved from."""
        return self._known.get(where[:2]) or Address(where[0], where[1])

    def on_datagrams_open(self, datagrams: ShapedDatagrams, bound: Address, *, is_named: bool) -> None:
        """They are in use now; `is_named`: at an address that others may know."""
        self._datagrams[datagrams] = None
        self._settle(bound, is_named=is_named)
        if self._is_dead:
            datagrams.abort()

    def on_datagrams_over(self, datagrams: ShapedDatagrams) -> None:
        """They are closed."""
        self._datagrams.pop(datagrams, None)
        self._check_over()

    # --- this peer ---

    def _begin(self) -> PreciseTimers:
        """Timers of the running loop; the script's time begins with the first use."""
        loop = asyncio.get_running_loop()
        timers = self._timers.get(loop)
        if timers is None:
            timers = self._timers[loop] = PreciseTimers(loop)
        self.conditions.start(timers)
        if self.here is not None:
            self._settle(self.here, is_named=self._is_here_named)
        if self._is_dead:
            raise OSError(errno.ENETDOWN, "this peer was killed by the fault script")
        return timers

    def _settle(self, address: Address, *, is_named: bool = True) -> None:
        """Be known by an address, the first that has a name, and until then the first of all."""
        if self.here is None or (is_named and not self._is_here_named):
            self.here, self._is_here_named = address, is_named
            if self._stop_watching is not None:
                self._stop_watching()
                self._stop_watching = None
        if self._stop_watching is None:
            self._stop_watching = self.conditions.on_kill(self.here, self._die)

    def _die(self) -> None:
        self._is_dead = True
        for listener in tuple(self._listeners):
            listener.kill()
        self._abort_all()
        if self._on_kill is not None:
            self._on_kill()

    def _abort_all(self) -> None:
        for tunnel in tuple(self._tunnels):
            call_home(tunnel.loop, tunnel.abort)
        for datagrams in tuple(self._datagrams):
            datagrams.abort()

    def _check_over(self) -> None:
        if not self._tunnels and not self._datagrams:
            self._on_all_over()


class _ClockHere:
    """The clock of this peer, as far as its address is known."""

    def __init__(self, network: ShapedNetwork) -> None:
        self._network = network
        self._here: Address | None = None
        self._clock = network.network.clock

    def now_s(self) -> float:
        return self._clock.now_s()

    def wall_s(self) -> float:
        network = self._network
        if network.here != self._here and network.here is not None:
            self._here = network.here
            self._clock = network.conditions.clock_for(self._here, network.network.clock)
        return self._clock.wall_s()


def shaped(
    network: SocketNetwork,
    profile: str | Path | Profile | None = None,
    script: str | Path | FaultScript | None = None,
    seed: int = 0,
    *,
    here: Address | None = None,
) -> ShapedNetwork:
    """Sockets under a profile and a fault script, given by name, path or as they are; for one run."""
    if isinstance(profile, str | Path):
        profile = Profile.load(profile)
    if isinstance(script, str | Path):
        script = FaultScript.load(script)
    return ShapedNetwork(network, Conditions(profile, script, seed=seed), here, owns_conditions=True)


if TYPE_CHECKING:

    def _is_a_network(network: ShapedNetwork) -> Network:
        """Held by mypy."""
        return network
