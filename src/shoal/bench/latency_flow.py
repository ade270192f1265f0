"""How clients of a chain of blocks are timed: one alone for latency, all of them at once for throughput.

Works on any loop: real clients run on that of their process, simulated ones in virtual time. What a client
does with a batch is its own affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from shoal.core import Deadline, fanout
from shoal.core.clock import Clock, running_clock
from shoal.transport.network.distributions import Draws, Exponential, sampler_of


class Client(Protocol):
    """Whoever sends batches through all blocks."""

    async def push(self) -> None:
        """One batch, from the first block to the last, and back where backward is measured."""


class Load(msgspec.Struct, frozen=True):
    """What is measured as throughput."""

    batch_size: int
    num_batches: int
    """Of each client in a run, on average."""
    num_runs: int


class Pings:
    """Waits of one client: mean × Exp(1), drawn as the links of a profile draw their delays.

    One wait for each answer, not for each packet: an answer of many packets with a delay each would arrive
    with the slowest of them. `who` and the seed decide the numbers, so that no two clients share theirs.
    """

    def __init__(self, ping_s: float, seed: int, who: str) -> None:
        delay_ms = Exponential(1e3 * ping_s) if ping_s > 0 else 0.0
        self._sample_s = sampler_of(delay_ms)
        self._uniform = Draws(seed, "bench latency", who, repr(ping_s)).uniform

    def draw_s(self) -> float:
        """The next."""
        return self._sample_s(self._uniform())


async def latencies(client: Client, num_batches: int) -> list[float]:
    """Seconds of each batch of one client; one more goes first, and does not count."""
    clock = running_clock()
    took_s = []
    for _ in range(num_batches + 1):
        began_s = clock.now_s()
        await client.push()
        took_s.append(clock.now_s() - began_s)
    return took_s[1:]


async def rates(clients: Sequence[Client], load: Load) -> list[float]:
    """Samples a second of all clients, in each run.

    Runs follow each other without a pause: nobody waits for the slowest client at the end of one, and what
    the first batches do (as many as there are clients) is in none. When the last run is over, what is still
    under way is given up.
    """
    flow = _Flow(len(clients), load, running_clock())
    failures: list[Exception] = []

    async def keep_pushing(client: Client) -> None:
        try:
            while not flow.is_over:
                await client.push()
                flow.count()
        except Exception as error:
            failures.append(error)
            raise

    calls = [keep_pushing(client) for client in clients]
    await fanout(calls, Deadline.never(), is_enough=lambda _: flow.is_over or bool(failures))
    if not flow.is_over:
        raise failures[0]
    return flow.rates


class _Flow:
    """Counts batches, and takes the time whenever a run is full."""

    def __init__(self, num_clients: int, load: Load, clock: Clock) -> None:
        self.rates: list[float] = []
        self._load = load
        self._clock = clock
        self._run_size = num_clients * load.num_batches
        self._num_left = num_clients
        self._began_s: float | None = None

    @property
    def is_over(self) -> bool:
        return len(self.rates) == self._load.num_runs

    def count(self) -> None:
        self._num_left -= 1
        if self._num_left or self.is_over:
            return
        now_s = self._clock.now_s()
        if self._began_s is not None:
            self.rates.append(self._run_size * self._load.batch_size / (now_s - self._began_s))
        self._began_s = now_s
        self._num_left = self._run_size
