"""Who carries out the orders of `shoal bench dht`: processes that host peers on sockets, or a virtual world.

Who is asked for what is `dht_swarm`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from shoal.bench.dht_config import DhtConfig
from shoal.bench.dht_grounds import MemoryGround
from shoal.bench.dht_hosting import Host
from shoal.bench.workers import Child, child
from shoal.core import BenchmarkError, Scope
from shoal.core.identity import Identity, new_secret
from shoal.transport import Conditions, Endpoint, Membership, MemoryNetwork, Profile, SwarmSecret

Details = dict[str, Any]
_ANSWER_S = 600.0
_AT_ONCE, _VIRTUAL_AT_ONCE = 32, 256


class Fleet(Protocol):
    """Hosts of peers, by rank; open it with `async with`."""

    num_ranks: int
    at_once: int
    """Peers that one host may begin at once."""

    async def deal(
        self, order: str, queues: Sequence[Iterable[Details]], on_answer: Callable[[Any], None]
    ) -> None:
        """Give each host the orders of its queue one after another; `on_answer` hears what they say."""

    def outsider(self) -> Endpoint:
        """An endpoint that belongs to no host, and is not open yet."""


class ProcessFleet:
    """Processes, each with a share of the peers, on real sockets."""

    at_once = _AT_ONCE

    def __init__(self, config: DhtConfig) -> None:
        self.num_ranks = config.num_ranks
        self._secret = new_secret()
        self._arguments = {
            "secret": self._secret,
            "wait_timeout_s": config.wait_timeout_s,
            "has_deaths": config.num_victims > 0,
        }
        self._children: list[Child] = []
        self._stack = contextlib.ExitStack()

    async def __aenter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for rank in range(self.num_ranks):
                name = f"Process {rank + 1} of {self.num_ranks}"
                hosting = child("shoal.bench.dht_peers:host", self._arguments, name=name)
                self._children.append(stack.enter_context(hosting))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hosting in self._children:  # all of them, before one is waited for
            hosting.end() if error is None else hosting.kill()
        self._stack.__exit__(kind, error, trace)

    async def deal(
        self, order: str, queues: Sequence[Iterable[Details]], on_answer: Callable[[Any], None]
    ) -> None:
        """Hosts work side by side, each at its own pace."""
        async with Scope("fleet") as scope:
            for hosting, queue in zip(self._children, queues, strict=True):
                scope.start(self._work_off(hosting, order, queue, on_answer))

    async def _work_off(
        self, hosting: Child, order: str, queue: Iterable[Details], on_answer: Callable[[Any], None]
    ) -> None:
        for details in queue:
            hosting.order(order=order, details=details)
            await _readable(hosting, order)
            on_answer(hosting.expect()["answer"])

    def outsider(self) -> Endpoint:
        """A member of the swarm that no process hosts."""
        return Endpoint(membership=Membership(Identity.generate(), SwarmSecret.parse(self._secret)))


class VirtualFleet:
    """One host in a simulated network, in virtual time."""

    num_ranks = 1
    at_once = _VIRTUAL_AT_ONCE

    def __init__(self, config: DhtConfig, seed: int) -> None:
        assert config.profile is not None
        self._network = MemoryNetwork(Conditions(Profile.load(config.profile), seed=seed), seed)
        self._host = Host(MemoryGround(self._network), config.settings, has_deaths=config.num_victims > 0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._host.close()

    async def deal(
        self, order: str, queues: Sequence[Iterable[Details]], on_answer: Callable[[Any], None]
    ) -> None:
        """The same orders, without a process between."""
        if order in ("settle", "memory"):
            return  # of processes
        for details in queues[0]:
            on_answer(await getattr(self._host, order)(**details))

    def outsider(self) -> Endpoint:
        """A host of its own."""
        return Endpoint(network=self._network.host("outsider"))


async def _readable(hosting: Child, order: str) -> None:
    """Wait until a child has something to say."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(hosting.fileno(), ready.set)
    try:
        async with asyncio.timeout(_ANSWER_S):
            await ready.wait()
    except TimeoutError:
        raise BenchmarkError(
            f"A process did not answer '{order}' within {_ANSWER_S:g} s.",
            cause="the machine is overloaded, or out of memory.",
            next_step="run it with fewer peers.",
        ) from None
    finally:
        loop.remove_reader(hosting.fileno())
