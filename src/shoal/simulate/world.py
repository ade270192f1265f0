"""What a world is made of: workers, what a step costs each of them, the network between them, and faults.

A description only; who runs it is `exact` (a thread for each worker) or `stacked` (all workers in one
tensor). The same world and seed give the same bits.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shoal.core import Address, UsageError
from shoal.transport import FaultScript, Profile
from shoal.transport.network.distributions import Delay, Draws, Positive, Sampler, sampler_of
from shoal.transport.network.faults import JoinWorld, Kill, LeaveWorld, Slow

_WITH_SERVERS = (Kill, JoinWorld, LeaveWorld, Slow)
"""The faults of elastic worlds with servers: others happen to operations, of which each generation has new
ones there."""


class Compute(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What forward and backward of one step cost a worker."""

    step_ms: Delay = 10.0
    """A number, or a distribution that each worker draws from by itself in each step."""
    forward_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1 / 3
    """Of a step, what comes before backward."""
    factors: dict[int, Positive] = {}
    """Stragglers: how many times as long a rank takes."""


class World(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that train together. A profile calls them `rank:0`, `rank:1`, …, or `machine:0`, …."""

    num_workers: int
    num_servers: int = 0
    """Members beside the workers; they have ranks of their own before those of the workers."""
    workers_per_machine: int | None = None
    """All of them on one machine without it."""
    profile: Profile = Profile()
    """Describes the links; the empty one has links that cost nothing."""
    between: Literal["workers", "machines"] = "workers"
    """Whose links the profile describes; with "machines" those inside a machine cost nothing."""
    compute: Compute = Compute()
    faults: FaultScript | None = None
    elastic: bool = False
    """Whether the others go on in a smaller group when a worker is lost, whatever the strategy; so it is in
    any case where faults let workers join or leave."""
    patience: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_workers < 1 or self.num_servers < 0:
            raise UsageError(
                f"A world of {self.num_workers} workers and {self.num_servers} servers is none.",
                next_step="give 1 worker or more.",
            )
        if self.is_elastic and self.num_servers and self.faults is not None:
            for index, fault in enumerate(self.faults.fault):
                if not isinstance(fault, _WITH_SERVERS) or fault.at_step is not None:
                    raise UsageError(
                        f"Fault {index} cannot happen where parameter servers keep the model of workers that "
                        "come and go.",
                        cause="there a script may kill, join, leave and slow workers, each at a time (at_s).",
                        next_step="leave that fault out, or take a strategy without servers.",
                    )
        unknown = [
            rank for rank in self.compute.factors if not 0 <= rank < self.num_workers + self.num_joining
        ]
        if unknown:
            raise UsageError(
                f"There is no rank {unknown[0]} among {self.num_workers} workers to be slow.",
                next_step=f"name a rank from 0 to {self.num_workers - 1}.",
            )

    @property
    def size(self) -> int:
        """The number of members, workers and servers together."""
        return self.num_workers + self.num_servers

    @property
    def num_joining(self) -> int:
        """How many workers come later, by the script."""
        return 0 if self.faults is None else self.faults.num_joining

    @property
    def is_elastic(self) -> bool:
        """Whether workers come and go."""
        return self.elastic or (self.faults is not None and self.faults.changes_workers)

    def machine_of(self, rank: int) -> int:
        """Returns the machine of a worker."""
        return 0 if self.workers_per_machine is None else rank // self.workers_per_machine

    def addresses(self) -> list[Address]:
        """What the profile calls each worker."""
        return [self.address_of(rank) for rank in range(self.num_workers)]

    def address_of(self, rank: int) -> Address:
        """What the profile calls one worker."""
        if self.between == "machines":
            return Address("machine", self.machine_of(rank))
        return Address("rank", rank)

    @property
    def num_machines(self) -> int:
        """The number of machines that have workers."""
        return self.machine_of(self.num_workers - 1) + 1


class StepCosts:
    """What each step of one worker costs, one after another."""

    def __init__(self, world: World, rank: int) -> None:
        self._sample_s: Sampler = sampler_of(world.compute.step_ms)
        self._draws = Draws(world.seed, "compute", str(rank))
        self._factor = world.compute.factors.get(rank, 1.0)

    def next_s(self) -> float:
        """Draws the seconds of the next forward and backward together."""
        return self._factor * self._sample_s(self._draws.uniform())
