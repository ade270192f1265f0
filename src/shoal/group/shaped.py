"""A group that is as slow as a network of a given profile would make it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from shoal.core import Address, Deadline, ShoalError
from shoal.group.base import Group, Handle
from shoal.group.operations import Bytes, Operation
from shoal.group.sleeper import Sleeper
from shoal.group.wrapper import GroupWrapper
from shoal.transport import Conditions, Profile

T = TypeVar("T")


class Shaped(GroupWrapper):
    """Holds back each operation's end until its bytes would have come over the links of a profile.

    What is sent, and to whom, is what `shoal.group.operations` says. Links are those of the transport's
    profiles: queues with a bandwidth, a delay, jitter, loss as a pause; the same seed gives the same delays.
    With `between="workers"` every worker is a peer of its own, which a profile calls `rank:0`, `rank:1`, …;
    with "machines" the workers of one machine reach each other at once, and peers are `machine:0`, ….
    Each worker reckons with the links at its own end: a slow link elsewhere in a ring delays the others only
    by the next operation. Waits hold the caller's thread, and end by their deadline.
    """

    def __init__(
        self,
        inner: Group,
        profile: Profile | str | Path,
        *,
        between: Literal["workers", "machines"] = "workers",
        seed: int = 0,
        sleeper: Sleeper | None = None,
    ) -> None:
        super().__init__(inner)
        self._conditions = Conditions(
            profile if isinstance(profile, Profile) else Profile.load(profile), seed=seed
        )
        self._is_by_machine = between == "machines"
        self._sleeper = sleeper or Sleeper()
        self._here = self._address(inner.rank)

    def _issue(self, operation: Operation, start: Callable[[], Handle[T]]) -> Handle[T]:
        issued_s = self._sleeper.clock.now_s()
        handle = start()
        due_s = issued_s
        step_sends = {rank: size // operation.num_steps for rank, size in operation.sends.items()}
        step_receives = {rank: size // operation.num_steps for rank, size in operation.receives.items()}
        for _ in range(operation.num_steps):
            began_s = due_s
            due_s = self._sent_s(began_s, step_sends, has_to_arrive=operation.is_request)
            due_s = max(due_s, self._received_s(began_s, step_receives))
        learn = None
        if operation.learns is not None:
            learn = partial(self._learn, operation.learns, due_s if operation.is_request else issued_s)
        return _DelayedHandle(handle, self, operation.name, due_s, learn)

    def _learn(self, learns: Callable[[object], Bytes], began_s: float, result: object) -> float:
        return self._received_s(began_s, learns(result))

    def _sent_s(self, now_s: float, sends: Bytes, *, has_to_arrive: bool) -> float:
        """When the last byte has left this worker, or reached the other side."""
        ends_s = [now_s]
        for rank, size_bytes in sends.items():
            passage = self._conditions.link(self._here, self._address(rank)).carry_stream(now_s, size_bytes)
            ends_s.append(passage.arrives_at_s if has_to_arrive else passage.left_at_s)
        return max(ends_s)

    def _received_s(self, now_s: float, receives: Bytes) -> float:
        """When the last byte has come."""
        ends_s = [now_s]
        for rank, size_bytes in receives.items():
            passage = self._conditions.link(self._address(rank), self._here).carry_stream(now_s, size_bytes)
            ends_s.append(passage.arrives_at_s)
        return max(ends_s)

    def _address(self, rank: int) -> Address:
        if self._is_by_machine:
            return Address("machine", self.inner.machine_of(rank))
        return Address("rank", rank)


class _DelayedHandle(Handle[T]):
    """Over when the inner one is, and not before it is due."""

    def __init__(
        self,
        inner: Handle[T],
        group: Shaped,
        name: str,
        due_s: float,
        learn: Callable[[object], float] | None,
    ) -> None:
        self._inner = inner
        self._group = group
        self._name = name
        self._due_s = due_s
        self._learn = learn

    def wait(self, deadline: Deadline | None = None) -> T:
        """As the inner handle's, later."""
        result = self._inner.wait(deadline)
        self._take(result)
        self._group._sleeper.until(
            self._due_s,
            self._group.inner.progress,
            deadline or Deadline.never(),
            f"{self._name} over a shaped link",
        )
        return result

    def is_done(self) -> bool:
        """Not before it is due."""
        if not self._inner.is_done():
            return False
        if self._learn is not None:
            try:
                self._take(self._inner.wait())
            except ShoalError:
                return True  # `wait` says it at once
        return self._group._sleeper.clock.now_s() >= self._due_s

    def _take(self, result: T) -> None:
        if self._learn is not None:
            self._due_s = max(self._due_s, self._learn(result))
            self._learn = None
