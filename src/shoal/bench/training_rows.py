"""What the blocks of `shoal bench training` amount to: its metrics, and the rows of one strategy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec

from shoal.bench.frame import Measured, Metrics, RowKey, measured

FRACTION, SPEED, OWN_SPEED = "fraction_of_ceiling", "examples_per_s", "examples_per_s_per_worker"
ITERATION, OWN_FRACTION, WAITED = "seconds_per_iteration", "fraction_of_own_speed", "waited"
METRICS: Metrics = {
    FRACTION: ("", "higher"),
    SPEED: ("1/s", "higher"),
    OWN_SPEED: ("1/s", "higher"),
    ITERATION: ("s", "lower"),
    OWN_FRACTION: ("", "higher"),
    WAITED: ("s", "lower"),
}
"""In the order in which a reader asks for them: ratios of neighbouring blocks; the speed of all workers
together in a block, and of each; a worker's iterations; ratios of a worker's own speed; how long a worker
waited for another in a block."""
row = partial(measured, METRICS)


class Block(msgspec.Struct, frozen=True):
    """What one worker did in one block."""

    times_s: list[float]
    """Of each iteration."""
    waited_s: list[float] = []
    """For each rank, by this worker."""

    @property
    def seconds(self) -> float:
        """From the first iteration's beginning to the last one's end."""
        return sum(self.times_s)

    def examples_per_s(self, batch_size: int) -> float:
        """Of this worker."""
        return batch_size * len(self.times_s) / self.seconds


Blocks = list[Block]
"""One for each rank."""


class Lane(msgspec.Struct):
    """All that was measured of one strategy, or why it could not be."""

    blocks: list[Blocks] = []
    ceilings: list[Blocks] = []
    """The neighbours in time of `blocks`, under `none`."""
    evens: list[Blocks] = []
    """Where somebody is slow: the same strategy beside `blocks`, with nobody slow."""
    error: str | None = None


def lane_rows(name: str, lane: Lane, batch_size: int) -> Iterator[Measured]:
    """The figures of one strategy, or of the ceiling, which has nothing beside it."""
    key: RowKey = {"strategy": name}
    if lane.error is not None:
        yield row(SPEED, key, error=lane.error)
        return
    speeds = [total_speed(blocks, batch_size) for blocks in lane.blocks]
    beside = [total_speed(blocks, batch_size) for blocks in lane.ceilings]
    if beside:
        yield row(FRACTION, key, [ours / theirs for ours, theirs in zip(speeds, beside, strict=True)])
    yield row(SPEED, key, speeds)
    num_workers = len(lane.blocks[0])
    has_waits = any(any(block.waited_s) for blocks in lane.blocks for block in blocks)
    for rank in range(num_workers):
        own = [blocks[rank] for blocks in lane.blocks]
        by_rank: RowKey = {**key, "rank": rank}
        yield row(OWN_SPEED, by_rank, [block.examples_per_s(batch_size) for block in own])
        yield row(ITERATION, by_rank, [time_s for block in own for time_s in block.times_s])
        if lane.evens:
            pairs = zip(own, (blocks[rank] for blocks in lane.evens), strict=True)
            fractions = [ours.examples_per_s(1) / theirs.examples_per_s(1) for ours, theirs in pairs]
            yield row(OWN_FRACTION, by_rank, fractions)
        for other in range(num_workers) if has_waits else ():
            if other != rank:
                waits_s = [block.waited_s[other] for block in own]
                yield row(WAITED, {**by_rank, "waited_for": other}, waits_s)


def total_speed(blocks: Blocks, batch_size: int) -> float:
    """Examples a second of all workers together."""
    return sum(block.examples_per_s(batch_size) for block in blocks)
