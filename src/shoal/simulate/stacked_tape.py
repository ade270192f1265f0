"""What every worker does, one thing after another, as far as time is concerned: the same for all of them.

Written while the values are reckoned, read by `stacked_times`, which knows how long things take: in lockstep
no value depends on a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.group.operations import ring_bytes
from shoal.simulate.stacked_mixing import Edges

Bytes: TypeAlias = npt.NDArray[np.int64]
"""By rank."""


@dataclass(frozen=True, eq=False, slots=True)
class Exchange:
    """Straight from each sender to its receivers; who has no sources is through when its own has left."""

    edges: Edges
    size_bytes: Bytes
    """What each sends to each of its receivers."""
    is_for_all: bool = False
    """Whether everybody waits for everybody, so that the last of all is blamed."""

    @property
    def sent_bytes(self) -> Bytes:
        """To all receivers together."""
        return self.size_bytes * self.edges.num_sent


@dataclass(frozen=True, eq=False, slots=True)
class Ring:
    """An all-reduce of so many bytes."""

    size: int
    size_bytes: int

    @property
    def sent_bytes(self) -> Bytes:
        """To the next one."""
        return np.full(self.size, ring_bytes(self.size_bytes, self.size))


Operation: TypeAlias = Exchange | Ring


@dataclass(frozen=True, slots=True)
class Forward:
    """Of a step's cost what comes before backward."""


@dataclass(frozen=True, slots=True)
class Backward:
    """A share of what is left of a step's cost."""

    share: float


@dataclass(frozen=True, slots=True)
class Issue:
    """An operation begins; its number counts from 0."""

    number: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Until an operation is over."""

    number: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment to be told."""


Event: TypeAlias = Forward | Backward | Issue | Wait | Mark


@dataclass(slots=True)
class Tape:
    """The events until now."""

    size: int
    events: list[Event] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    marked_bytes: list[Bytes] = field(default_factory=list)
    """At each mark, what each worker has sent since the first one."""
    _sent_bytes: Bytes = field(init=False)

    def __post_init__(self) -> None:
        self._sent_bytes = np.zeros(self.size, np.int64)

    def forward(self) -> None:
        """Takes note that a step begins."""
        self.events.append(Forward())

    def backward(self, share: float = 1.0) -> None:
        """All of it, or a share."""
        self.events.append(Backward(share))

    def issue(self, operation: Operation) -> int:
        """Its number, for `wait`."""
        number = len(self.operations)
        self.operations.append(operation)
        self.events.append(Issue(number))
        self._sent_bytes = self._sent_bytes + operation.sent_bytes
        return number

    def exchange(self, edges: Edges, size_bytes: int | Sequence[int], *, is_for_all: bool = False) -> int:
        """Of as many bytes from each, or of some by rank; its number."""
        sizes = np.broadcast_to(np.asarray(size_bytes, np.int64), self.size)
        return self.issue(Exchange(edges, sizes, is_for_all))

    def wait(self, number: int) -> None:
        """Nobody goes on before its part of the operation is over."""
        self.events.append(Wait(number))

    def mark(self) -> None:
        """Now; bytes count from the first one on."""
        if not self.marked_bytes:
            self._sent_bytes = np.zeros(self.size, np.int64)
        self.events.append(Mark())
        self.marked_bytes.append(self._sent_bytes)
