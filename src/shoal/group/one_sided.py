"""What the one-sided operations of one machine have in common: locks, and things that are left to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from shoal.core import UsageError
from shoal.group.control import NOT_YET, Bells, Control
from shoal.group.engine import Engine
from shoal.group.errands import Errands
from shoal.group.locks import Locks, place_of
from shoal.group.tally import HostTally


class OneSided:
    """One worker's side of them."""

    def __init__(
        self, rank: int, size: int, engine: Engine, control: Control, bells: Bells, locks: Locks
    ) -> None:
        self.rank = rank
        self.size = size
        self.engine = engine
        self.bells = bells
        self.locks = locks
        self.errands = Errands(engine)
        self.tally = HostTally(rank, size, engine.members, control)
        self._control = control

    def is_gone(self, rank: int) -> bool:
        """Whether another rank is lost or has left."""
        return rank != self.rank and self._control.gone_after(rank) != NOT_YET

    def name_of(self, rank: int) -> int:
        """The rank that people know a member by."""
        return self.engine._name(rank)

    def check_rank(self, rank: int) -> None:
        """UsageError for a rank that does not exist."""
        if not 0 <= rank < self.size:
            raise UsageError(f"There is no rank {rank} among {self.size}.", next_step="name a member.")

    def take(self, at: int, holder: Callable[[], int | None], what: str) -> None:
        """Wait for a lock; PeerLost when `holder`, who has it, is gone and keeps it: it was stopped."""
        self.engine.check_usable()
        if self.locks.is_held_here(at):
            raise UsageError(
                f"rank {self.name_of(self.rank)} waits for {what}, which it holds itself.",
                next_step="end the first `with` block before the second begins.",
            )

        is_taken = self.locks.try_take(at)

        def try_again() -> bool:
            nonlocal is_taken
            if is_taken:
                return True
            who = holder()
            was_gone = who is not None and self.is_gone(who)
            is_taken = self.locks.try_take(at)
            if who is not None and not is_taken:
                if was_gone:
                    raise self.engine.lost_error(who)
                self.engine.blocked_by(who)
            return is_taken

        try:
            if not is_taken:
                self.engine.wait_until(try_again, None, what)
        except BaseException:
            if is_taken:
                self.locks.release(at)
            raise

    @contextlib.contextmanager
    def mutex(self, name: str, owner: int) -> Iterator[None]:
        """Held by one worker at a time; the kernel frees it when that worker's process ends."""
        self.check_rank(owner)
        at = place_of("mutex", name, owner)
        own_mark = at + 1 + self.rank

        def holder() -> int | None:
            if self.is_gone(owner):
                raise self.engine.lost_error(owner)
            return self.locks.first_taken(at + 1, self.size)

        if self.is_gone(owner):
            raise self.engine.lost_error(owner)
        self.take(at, holder, f"mutex {name!r} of rank {self.name_of(owner)}")
        try:
            self.locks.try_take(own_mark)
            yield
        finally:
            self.locks.release(own_mark)
            self.locks.release(at)
            self.wake_others()

    def try_lock(self, name: str, owner: int) -> bool:
        """Take a mutex if nobody has it; from any thread."""
        return self.locks.try_take(place_of("mutex", name, owner))

    def unlock(self, name: str, owner: int) -> None:
        """Give back what `try_lock` took; from any thread."""
        self.locks.release(place_of("mutex", name, owner))
        self.wake_others()

    def wake_others(self) -> None:
        """Those that sleep may look again."""
        for rank in range(self.size):
            if rank != self.rank:
                self.bells.wake(rank)
