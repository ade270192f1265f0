"""A mutex of a simulated group: asked for at its owner, granted one after another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from shoal.core import UsageError
from shoal.group.base import Loss
from shoal.group.simulated_hub import Hub, Pending, raising


class _Mutex:
    """At its owner."""

    def __init__(self, hub: Hub, owner: int) -> None:
        self._hub = hub
        self._owner = owner
        self.holder: int | None = None
        """As its owner knows: a little longer than the block lasts."""
        self.inside: int | None = None
        self._queue: list[tuple[int, Pending[None]]] = []
        hub.on_change(self._look)

    def ask(self, rank: int, handle: Pending[None]) -> None:
        """A request has come."""
        self._queue.append((rank, handle))
        self._look()

    def give_back(self, rank: int) -> None:
        """The holder has told that it is done."""
        if self.holder == rank:
            self.holder = None
        self._look()

    def _look(self) -> None:
        hub = self._hub
        if self._owner not in hub.present:
            loss = hub.lost.get(self._owner, Loss(self._owner, "it has left the group"))
            for _, handle in self._queue:
                handle.resolve(hub.turns.now_s, raising(loss.error()))
            self._queue.clear()
            return
        if self.holder is not None and self.holder not in hub.present:
            self.holder = None
        self._queue = [each for each in self._queue if each[0] in hub.present]
        if self.holder is None and self._queue:
            self.holder, handle = self._queue.pop(0)
            now_s = hub.turns.now_s
            if self.holder != self._owner:
                now_s = hub.links.carry(self._owner, self.holder, now_s, 0).arrives_at_s
            handle.resolve(now_s, lambda: None)


@contextlib.contextmanager
def hold(hub: Hub, rank: int, owner: int, name: str) -> Iterator[None]:
    """Have it for as long as the block lasts."""
    hub.turns.current.look_up()
    if (owner, name) not in hub.mutexes:
        hub.mutexes[owner, name] = _Mutex(hub, owner)
    mutex: _Mutex = hub.mutexes[owner, name]
    if mutex.inside == rank:
        raise UsageError(
            f"rank {rank} waits for mutex {name!r} of rank {owner}, which it holds itself.",
            next_step="end the first `with` block before the second begins.",
        )
    handle: Pending[None] = Pending(hub, rank, f"mutex {name!r} of rank {owner}")
    hub.send(rank, owner, 0, lambda _: mutex.ask(rank, handle))
    handle.wait()
    mutex.inside = rank
    try:
        yield
    finally:
        mutex.inside = None
        hub.turns.current.look_up()
        hub.send(rank, owner, 0, lambda _: mutex.give_back(rank))
