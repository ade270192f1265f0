"""A window of a simulated group: what is written travels, and lies in its slot when it has come."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from shoal.core import Deadline, UsageError
from shoal.core.turns import Turn
from shoal.group.base import Done, Handle, Slot
from shoal.group.kernels import Write, WritingWindow, check_write, write_first, write_more
from shoal.group.simulated_hub import Hub, Pending


class SimulatedWindow(WritingWindow):
    """One member's: slots for its sources, and writes to others' of the same name."""

    on_write: Callable[[int, int], None]
    """Is told to whom so many bytes are written."""

    def __init__(
        self, hub: Hub, rank: int, name: str, form: tuple[int, torch.dtype], sources: Sequence[int]
    ) -> None:
        self.name = name
        self.num_elements, self.dtype = form
        self._hub = hub
        self._rank = rank
        self._slots = {source: _SimulatedSlot(source, *form) for source in sources}
        self._waiter: Turn | None = None
        self._is_open = True
        hub.windows[rank, name] = self
        hub.on_change(self._somebody_is_gone)

    def write(self, to: int, write: Write) -> Handle[None]:
        """Over when it is in the slot; at once for one that is gone."""
        self._check_open()
        check_write(write, self.name, self.num_elements, self.dtype)
        if not 0 <= to < self._hub.size:
            raise UsageError(f"There is no rank {to} to write to.", next_step="name a member.")
        self._hub.turns.current.look_up()
        if to not in self._hub.present:
            return Done(None)
        target: SimulatedWindow | None = self._hub.windows.get((to, self.name))
        if target is not None and self._rank not in target._slots:
            raise UsageError(
                f"rank {to} has no slot for rank {self._rank} in window {self.name!r}.",
                next_step="name it among the sources when the window is made.",
            )
        self.on_write(to, write.tensor.nbytes)
        handle: Pending[None] = Pending(self._hub, self._rank, f"{write.kind} to rank {to} in {self.name!r}")
        sent = dataclasses.replace(write, tensor=write.tensor.detach().clone())
        sent_s = self._hub.turns.now_s

        def arrived(now_s: float) -> None:
            there: SimulatedWindow | None = self._hub.windows.get((to, self.name))
            if there is None or to not in self._hub.present:
                handle.resolve(now_s, lambda: None)
            else:
                there._receive(self._rank, sent, handle)
                there._slots[self._rank].sent_s = sent_s

        self._hub.send(self._rank, to, write.tensor.nbytes, arrived)
        return handle

    @contextlib.contextmanager
    def slot(self, source: int) -> Iterator[Slot]:
        """What comes meanwhile comes after the block."""
        self._check_open()
        if source not in self._slots:
            raise UsageError(
                f"rank {self._rank} has no slot for rank {source} in window {self.name!r}.",
                next_step="name it among the sources when the window is made.",
            )
        self._hub.turns.current.look_up()
        slot = self._slots[source]
        if slot.is_held:
            raise UsageError(
                f"rank {self._rank} waits for slot of rank {source} in window {self.name!r}, which it holds "
                "itself.",
                next_step="end the first `with` block before the second begins.",
            )
        slot.is_held = True
        try:
            yield slot
        finally:
            slot.is_held = False
            slot.settle(self._hub.turns.now_s)

    def filled(self) -> Sequence[int]:
        """At this worker's own time."""
        self._check_open()
        self._hub.turns.current.poll(lambda: bool(self._filled()), f"writes into window {self.name!r}")
        return self._filled()

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """In virtual time."""
        self._check_open()
        turn = self._hub.turns.current
        turn.look_up()
        filled = self._filled()
        began_s = turn.now_s
        until_s = math.inf if deadline is None else turn.now_s + deadline.remaining_s
        while not filled and turn.now_s < until_s:
            if not any(source in self._hub.present for source in self._slots):
                break
            self._waiter = turn
            turn.park(f"writes into window {self.name!r}", until_s)
            self._waiter = None
            filled = self._filled()
        for source in filled[:1]:
            waited_s = self._slots[source].sent_s - began_s
            self._hub.waited_s[self._rank][source] += max(0.0, waited_s)
        return filled

    def close(self) -> None:
        """What comes later is dropped."""
        self._is_open = False
        if self._hub.windows.get((self._rank, self.name)) is self:
            del self._hub.windows[self._rank, self.name]
        self._drop()

    def _receive(self, source: int, write: Write, handle: Pending[None]) -> None:
        slot = self._slots[source]
        slot.queue.append((write, handle))
        slot.settle(self._hub.turns.now_s)
        self._rouse()

    def _filled(self) -> list[int]:
        return [source for source, slot in sorted(self._slots.items()) if slot.num_writes]

    def _somebody_is_gone(self) -> None:
        if self._rank not in self._hub.present:
            self._drop()
        self._rouse()

    def _drop(self) -> None:
        """What has come and is not written never will be: nobody waits for it."""
        for slot in self._slots.values():
            while slot.queue:
                slot.queue.pop(0)[1].resolve(self._hub.turns.now_s, lambda: None)

    def _rouse(self) -> None:
        if self._waiter is not None:
            self._waiter.wake(self._hub.turns.now_s)

    def _check_open(self) -> None:
        if not self._is_open:
            raise UsageError(f"Window {self.name!r} is closed.", next_step="make it again by group.window().")


class _SimulatedSlot(Slot):
    def __init__(self, source: int, num_elements: int, dtype: torch.dtype) -> None:
        self.source = source
        self.tensor = torch.zeros(num_elements, dtype=dtype)
        self.is_held = False
        self.sent_s = 0.0
        self.queue: list[tuple[Write, Pending[None]]] = []
        """What has come and cannot be written yet."""
        self.clear()

    def clear(self) -> None:
        """The memory is left as it is."""
        self.num_writes, self.mass, self.note = 0, 0.0, b""

    def settle(self, now_s: float) -> None:
        """Write what can be written, in the order in which it came."""
        while self.queue and not self.is_held:
            write, handle = self.queue[0]
            if write.kind == "send" and self.num_writes:
                return
            self.queue.pop(0)
            has_more = write.kind == "accumulate" and self.num_writes > 0
            (write_more if has_more else write_first)(self.tensor, write)
            self.mass = write.mass + (self.mass if has_more else 0.0)
            self.note = write.note
            self.num_writes += 1
            handle.resolve(now_s, lambda: None)
