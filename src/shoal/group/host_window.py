"""Windows of one machine: slots in shared memory, which their sources write themselves.

A writer takes the slot's lock and passes once over the memory; the first write after a `clear` is a plain
one, so that clearing costs nothing. A source that ends in the middle of a write leaves the slot marked as
torn: then the write did not take place, and where others had been added before it, they are lost with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from shoal.core import Deadline, DeadlineExceeded, UsageError
from shoal.group.arena import Segment
from shoal.group.base import Group, Handle, Slot
from shoal.group.control import DTYPES, code_of
from shoal.group.kernels import MAX_NOTE_BYTES, Write, WritingWindow, check_write, write_first, write_more
from shoal.group.one_sided import OneSided

_NUM, _TORN, _MASS, _NOTE_BYTES, _NOTE = range(5)
_WHOLE, _BEING_WRITTEN, _BEING_ADDED_TO = range(3)
_HEAD_BYTES = 8 * _NOTE + MAX_NOTE_BYTES


class Layout:
    """Where each slot lies: all who name their sources alike come to the same."""

    def __init__(self, sources: Mapping[int, Sequence[int]], num_elements: int, dtype: torch.dtype) -> None:
        self.sources = sources
        self.num_elements = num_elements
        self.dtype = dtype
        slot_bytes = _HEAD_BYTES + -(-num_elements * dtype.itemsize // 64) * 64
        pairs = [(owner, source) for owner, named in sources.items() for source in named]
        self.starts = {pair: index * slot_bytes for index, pair in enumerate(pairs)}
        self.size_bytes = len(pairs) * slot_bytes


def layout_of(
    group: Group, name: str, num_elements: int, dtype: torch.dtype, sources: Collection[int] | None
) -> Layout:
    """Of what all members ask for; UsageError on all of them when they ask for different things."""
    if num_elements < 1:
        raise UsageError(f"Window {name!r} would have no elements.", next_step="give it one at least.")
    own = range(group.size) if sources is None else sources
    named = [
        rank for rank in range(group.size) if rank in own and (sources is not None or rank != group.rank)
    ]
    told = group.share([group.rank, named, name, num_elements, code_of(dtype)])
    first, _, *wanted = told[0]
    for rank, _, *what in told:
        if what != wanted:
            raise UsageError(
                f"rank {rank} makes window {what[0]!r} of {what[1]} elements ({DTYPES[what[2]]}) where rank "
                f"{first} makes {wanted[0]!r} of {wanted[1]} ({DTYPES[wanted[2]]}).",
                next_step="let all workers make the same windows in the same order.",
            )
    return Layout({rank: sources for rank, sources, *_ in told}, num_elements, dtype)


class _Cell:
    """The memory of one slot."""

    def __init__(self, segment: Segment, start: int, num_elements: int, dtype: torch.dtype) -> None:
        self.lock = segment.code + start
        head = segment.flat[start : start + _HEAD_BYTES].numpy().data
        self.words = head.cast("B").cast("q")
        self.numbers = head.cast("B").cast("d")
        self.note = head.cast("B")[8 * _NOTE :]
        data = segment.flat[start + _HEAD_BYTES :]
        self.tensor = data[: num_elements * dtype.itemsize].view(dtype)

    def write(self, write: Write) -> None:
        """One pass over the memory."""
        words, numbers = self.words, self.numbers
        has_more = write.kind == "accumulate" and words[_NUM] > 0
        if has_more and words[_TORN]:
            raise UsageError(
                "An earlier write into the same slot was broken off half-way.",
                next_step="end this worker; what comes after an interrupted operation cannot be right.",
            )
        words[_TORN] = _BEING_ADDED_TO if has_more else _BEING_WRITTEN
        (write_more if has_more else write_first)(self.tensor, write)
        numbers[_MASS] = write.mass + (numbers[_MASS] if has_more else 0.0)
        words[_NOTE_BYTES] = len(write.note)
        self.note[: len(write.note)] = write.note
        words[_NUM] = words[_NUM] + 1
        words[_TORN] = _WHOLE


class HostWindow(WritingWindow):
    """`HostGroup.window` makes one."""

    def __init__(
        self, name: str, layout: Layout, segment: Segment, side: OneSided, free: Callable[[], None]
    ) -> None:
        self.name = name
        self.num_elements = num_elements = layout.num_elements
        self.dtype = dtype = layout.dtype
        self._side = side
        self._free = free
        self._sources = layout.sources.get(side.rank, ())
        self._cells = {
            (owner, source): _Cell(segment, start, num_elements, dtype)
            for (owner, source), start in layout.starts.items()
            if side.rank in (owner, source)
        }
        self._is_open = True

    @contextlib.contextmanager
    def slot(self, source: int) -> Iterator[Slot]:
        """PeerLost when the source ended, or was stopped, while it added to what was there."""
        cell = self._cell(self._side.rank, source)
        self._side.take(
            cell.lock, lambda: source, f"slot of rank {self._side.name_of(source)} in window {self.name!r}"
        )
        try:
            torn = cell.words[_TORN]
            if torn == _BEING_ADDED_TO:
                raise self._side.engine.lost_error(source)
            if torn == _BEING_WRITTEN:
                cell.words[_NUM], cell.words[_TORN] = 0, _WHOLE
            yield _HostSlot(source, cell)
        finally:
            self._side.locks.release(cell.lock)
            self._side.bells.wake(source)

    def filled(self) -> Sequence[int]:
        """Without looking at what a source that is gone left torn."""
        self._check_open()
        self._side.engine.progress()
        return self._filled()

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """Asleep until a source writes."""
        self._check_open()
        found: list[int] = []

        def is_over() -> bool:
            is_all_gone = all(self._side.is_gone(source) for source in self._sources)
            found[:] = self._filled()
            return bool(found) or is_all_gone

        with contextlib.suppress(DeadlineExceeded):
            self._side.engine.wait_until(is_over, deadline, f"window {self.name!r}")
        return found

    def close(self) -> None:
        """Writes that are still under way are dropped."""
        if self._is_open:
            self._is_open = False
            self._side.errands.drop(
                lambda lane: isinstance(lane, tuple) and lane[0] is self,
                f"Window {self.name!r} was closed before it was written.",
            )
            self._cells.clear()
            self._free()

    def write(self, to: int, write: Write) -> Handle[None]:
        """At once, unless its owner holds the slot, or it is full for a send."""
        cell = self._cell(to, self._side.rank)
        check_write(write, self.name, self.num_elements, self.dtype)
        self._side.tally.write(write.tensor.nbytes, to)

        def attempt() -> list[None] | None:
            if self._side.is_gone(to):
                return [None]
            if not self._side.locks.try_take(cell.lock):
                return None
            try:
                if write.kind == "send" and cell.words[_NUM]:
                    return None
                cell.write(write)
            finally:
                self._side.locks.release(cell.lock)
            self._side.bells.wake(to)
            return [None]

        what = f"{write.kind} to rank {self._side.name_of(to)} in window {self.name!r}"
        return self._side.errands.begin((self, to), what, attempt)

    def _filled(self) -> list[int]:
        return [source for source in self._sources if self._is_filled(source)]

    def _is_filled(self, source: int) -> bool:
        is_gone = self._side.is_gone(source)
        words = self._cells[self._side.rank, source].words
        return words[_NUM] > 0 and not (is_gone and words[_TORN])

    def _cell(self, owner: int, source: int) -> _Cell:
        self._check_open()
        self._side.check_rank(owner)
        self._side.check_rank(source)
        if (owner, source) not in self._cells:
            owner, source = self._side.name_of(owner), self._side.name_of(source)
            raise UsageError(
                f"rank {owner} has no slot for rank {source} in window {self.name!r}.",
                next_step="name it among the sources when the window is made.",
            )
        return self._cells[owner, source]

    def _check_open(self) -> None:
        if not self._is_open:
            raise UsageError(f"Window {self.name!r} is closed.", next_step="make it again by group.window().")


class _HostSlot(Slot):
    def __init__(self, source: int, cell: _Cell) -> None:
        self.source = source
        self.num_writes = cell.words[_NUM]
        self.mass = cell.numbers[_MASS] if self.num_writes else 0.0
        self.note = bytes(cell.note[: cell.words[_NOTE_BYTES]]) if self.num_writes else b""
        self.tensor = cell.tensor
        self._cell = cell

    def clear(self) -> None:
        """The memory is left as it is."""
        self._cell.words[_NUM] = 0
        self.num_writes, self.mass, self.note = 0, 0.0, b""
