"""The one-sided operations of one machine: windows, what is published, locks, and what is left to do.

A lock is a range of bytes of a file that all have open; nothing is ever written there. It dies with its
process. On Linux it belongs to an open file description of the worker's own, so that workers of one process
keep each other out too; elsewhere to the process. Nobody blocks here: taking succeeds at once or not at all,
and waiting is the engine's. The kernel orders what is written under a lock before what the next holder reads,
on all processors.

Operations that could not be done when they were asked for are `Errands`, and are tried again: when somebody
looks (`is_done`, `wait`), and whenever the group makes progress. Those of one lane follow each other. Bytes
are counted when an operation is issued; those of a read when its result is taken.

What is published once and then changed where it lies is read as a whole copy (`Copies`). Each reader has a
byte of the lock, and who changes the memory takes all bytes of those that are not gone. One that was given up
while it held its byte learns of it before it uses what it has copied.

A window is slots in shared memory, which their sources write themselves. A writer takes the slot's lock and
passes once over the memory; the first write after a `clear` is a plain one, so that clearing costs nothing. A
source that ends in the middle of a write leaves the slot marked as torn: then the write did not take place,
and where others had been added before it, they are lost with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic

import torch

from shoal.core import Deadline, DeadlineExceeded, ShoalError, UsageError
from shoal.core.fork import close_in_children, keep_in_children
from shoal.group.base import Done, Group, Handle, Slot, Snapshot, T
from shoal.group.host.control import (
    CHANNELS,
    DTYPES,
    LEFT,
    NOT_YET,
    PUBLISHED,
    VERDICT,
    Bells,
    Control,
    code_of,
)
from shoal.group.host.engine import Engine
from shoal.group.host.memory import Arena, Segment
from shoal.group.kernels import (
    MAX_NOTE_BYTES,
    Write,
    WritingWindow,
    check_write,
    copy_out,
    write_first,
    write_more,
)
from shoal.group.operations import Tally
from shoal.topology import Weights

_NAMED = 1 << 61
"""Where locks of names begin; those of memory lie at the memory's own place."""
_NAME_STRIDE = 1 << 10
"""Bytes for each name: the lock, and one more for each rank."""
_FLOCK = struct.Struct("@hhqqi0q")
_in_process: dict[tuple[int, int, int], int] = {}
Attempt = Callable[[], list[T] | None]
"""Try once, never block: None for 'not yet', else the result alone in a list."""
_DIGEST, _CURRENT, _RECLAIMED, _CHANGE, _RECORDS = range(5)
SETTLED, WANTED, CHANGING = range(3)
"""Whether a publisher is about to change what it has published, or in the midst of it."""
_PLACE, _COUNT, _DTYPE, _NUMBER, _VERSION, _RECORD_WORDS = range(6)
_LOOKS = 100  # a record changes under a reader only when two newer ones are published in the meantime
_NUM, _TORN, _MASS, _NOTE_BYTES, _NOTE = range(5)
_WHOLE, _BEING_WRITTEN, _BEING_ADDED_TO = range(3)
_HEAD_BYTES = 8 * _NOTE + MAX_NOTE_BYTES


def place_of(kind: str, name: str, owner: int) -> int:
    """Where the lock of a name lies; the bytes of ranks follow it."""
    digest = hashlib.blake2b(f"{kind} {owner} {name}".encode(), digest_size=6).digest()
    return _NAMED + int.from_bytes(digest) * _NAME_STRIDE


class Locks:
    """Those that this worker takes."""

    def __init__(self, descriptor: int) -> None:
        self._file, self._is_own = _reopen(descriptor)
        close_in_children(self._file)
        status = os.fstat(self._file)
        self._key = (0, 0) if self._is_own else (status.st_dev, status.st_ino)
        self._taken = {} if self._is_own else _in_process
        """The thread that has taken a lock, by the lock's place."""
        self._own: list[tuple[int, int, int]] = []
        self._guard = threading.Lock()

    def try_take(self, at: int, num_bytes: int = 1) -> bool:
        """Whether it is this thread's now."""
        with self._guard:
            key = (*self._key, at)
            if key in self._taken or not self._file_lock(at, num_bytes, is_taken=True):
                return False
            self._taken[key] = threading.get_ident()
            self._own.append(key)
            return True

    def release(self, at: int, num_bytes: int = 1) -> None:
        """Give one back; nothing when it was not taken."""
        with self._guard:
            key = (*self._key, at)
            if key in self._own:
                self._file_lock(at, num_bytes, is_taken=False)
                self._own.remove(key)
                del self._taken[key]

    def is_held_here(self, at: int) -> bool:
        """Whether the calling thread itself has it."""
        return self._taken.get((*self._key, at)) == threading.get_ident()

    def first_taken(self, at: int, num_bytes: int) -> int | None:
        """Index of the first byte that another worker has; None also where the system does not say."""
        if not self._is_own or self._file < 0:
            return None
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, num_bytes, 0)
        kind, _, start, _, _ = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else max(0, start - at)

    def close(self) -> None:
        """Give back all that are taken."""
        with self._guard:
            if self._file >= 0:
                keep_in_children(self._file)
                os.close(self._file)
                self._file = -1
                while self._own:
                    self._taken.pop(self._own.pop(), None)

    def _file_lock(self, at: int, num_bytes: int, *, is_taken: bool) -> bool:
        if self._file < 0:
            return not is_taken
        with contextlib.suppress(BlockingIOError, PermissionError):
            if self._is_own:
                kind = fcntl.F_WRLCK if is_taken else fcntl.F_UNLCK
                asked = _FLOCK.pack(kind, os.SEEK_SET, at, num_bytes, 0)
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, asked)
            else:
                wanted = fcntl.LOCK_EX | fcntl.LOCK_NB if is_taken else fcntl.LOCK_UN
                fcntl.lockf(self._file, wanted, num_bytes, at)
            return True
        return False


def _reopen(descriptor: int) -> tuple[int, bool]:
    """A descriptor for locks, and whether its description is not shared with other workers."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # /proc may not be mounted
            return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC), True
    return os.dup(descriptor), False


class Errands:
    """Those of one worker."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lanes: dict[Hashable, deque[_Errand[Any]]] = {}
        self._guard = threading.Lock()
        self._pid = os.getpid()
        engine.besides = self.progress

    def begin(self, lane: Hashable, what: str, attempt: Attempt[T]) -> Handle[T]:
        """Do it now, or as soon as possible after those before it in its lane."""
        self._engine.check_usable()
        if lane in self._lanes:
            self.progress()
        if lane not in self._lanes:
            result = attempt()
            if result is not None:
                return Done(result[0])
        errand = _Errand(self._engine, what, attempt)
        self._lanes.setdefault(lane, deque()).append(errand)
        return errand

    @property
    def is_busy(self) -> bool:
        """Whether any is left to do."""
        return bool(self._lanes)

    def progress(self) -> None:
        """Try the first of each lane, and those behind it."""
        if not self._lanes or os.getpid() != self._pid or not self._guard.acquire(blocking=False):
            return
        try:
            for lane, errands in tuple(self._lanes.items()):
                while errands and errands[0].is_over():
                    errands.popleft()
                if not errands:
                    self._lanes.pop(lane, None)
        finally:
            self._guard.release()

    def drop(self, is_dropped: Callable[[Hashable], bool], why: str) -> None:
        """Forget those of some lanes: who waits for one gets a UsageError."""
        for lane in [lane for lane in self._lanes if is_dropped(lane)]:
            for errand in self._lanes.pop(lane):
                errand.fail(UsageError(why, next_step="wait for its handle first."))


class _Errand(Handle[T], Generic[T]):
    def __init__(self, engine: Engine, what: str, attempt: Attempt[T]) -> None:
        self._engine = engine
        self._what = what
        self._attempt = attempt
        self._result: list[T] | None = None
        self._error: ShoalError | None = None

    def is_over(self) -> bool:
        """After one more attempt."""
        if self._result is None and self._error is None:
            try:
                self._result = self._attempt()
            except ShoalError as error:
                self._error = error
        return self._is_known()

    def fail(self, error: ShoalError) -> None:
        """There will be no more attempts."""
        self._error = error

    def wait(self, deadline: Deadline | None = None) -> T:
        """While the engine lets all errands make progress."""
        if not self.is_done():
            self._engine.wait_until(self._is_known, deadline, self._what)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result[0]

    def is_done(self) -> bool:
        """After one more attempt of this one and those before it."""
        if not self._is_known():
            self._engine.progress()
        return self._is_known()

    def _is_known(self) -> bool:
        return self._result is not None or self._error is not None


class HostTally(Tally):
    """Of a worker in a group of one machine."""

    def __init__(
        self, rank: int, size: int, members: Callable[[], Collection[int]], control: Control
    ) -> None:
        super().__init__(rank, size)
        self._members = members
        self._left = control._words[LEFT :: control._stride]
        self._verdicts = control._words[VERDICT :: control._stride]
        self._nobody = [NOT_YET] * size

    def exchange(self, size_bytes: int, weights: Weights) -> None:
        """With those that the weights name and that are there."""
        sources = weights.sources
        destinations = sources if weights.destinations is None else weights.destinations
        if self._is_complete():
            self.sent_bytes += size_bytes * len(destinations)
            self.received_bytes += size_bytes * len(sources)
        else:
            members = self._members()
            self.sent_bytes += size_bytes * sum(rank in members for rank in destinations)
            self.received_bytes += size_bytes * sum(rank in members for rank in sources)

    def write(self, size_bytes: int, to: int) -> None:
        """Into a window of `to`, if it is there."""
        if to != self._rank and (self._is_complete() or to in self._members()):
            self.sent_bytes += size_bytes

    def fetch(self, handle: Handle[Snapshot | None], peer: int) -> None:
        """What a peer has published; the handle is done."""
        snapshot = None if peer == self._rank else handle.wait()
        if snapshot is not None:
            self.received_bytes += snapshot.tensor.nbytes

    def read(self, handle: Handle[int | None], peer: int, into: torch.Tensor) -> Handle[int | None]:
        """A copy of what a peer has published, once it is there."""
        return handle if peer == self._rank else _CountedRead(handle, self, into.nbytes)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count."""
        counted = self.sent_bytes, self.received_bytes
        try:
            yield
        finally:
            self.sent_bytes, self.received_bytes = counted

    def _num_members(self) -> int:
        return self._size if self._is_complete() else max(1, len(self._members()))

    def _is_complete(self) -> bool:
        """Whether nobody is gone: in one look, since a look at each rank takes longer than all the rest."""
        return self._left.tolist() == self._nobody and self._verdicts.tolist() == self._nobody


class _CountedRead(Handle[int | None]):
    def __init__(self, inner: Handle[int | None], tally: Tally, size_bytes: int) -> None:
        self._inner = inner
        self._tally = tally
        self._size_bytes = size_bytes

    def wait(self, deadline: Deadline | None = None) -> int | None:
        version = self._inner.wait(deadline)
        if version is not None:
            self._tally.received_bytes += self._size_bytes
            self._size_bytes = 0
        return version

    def is_done(self) -> bool:
        return self._inner.is_done()


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


class Channels:
    """Those of this worker, and a view of the others'."""

    def __init__(self, rank: int, arena: Arena, control: Control, bells: Bells) -> None:
        self._rank = rank
        self._arena = arena
        self._control = control
        self._bells = bells
        self._own: dict[str, int] = {}
        self._num_published = 0
        self._indices: dict[tuple[int, int], int] = {}
        """Of channels that were found, by peer and digest: they stay where they are."""

    def publish(self, name: str, tensor: torch.Tensor, version: int, code: int) -> None:
        """Let others read `tensor`, which lies at `code`."""
        if version < 0:
            raise UsageError(f"Version {version} of {name!r} is negative.", next_step="count from 0.")
        index = self._own.get(name, len(self._own))
        if index == CHANNELS:
            raise UsageError(
                f"A worker publishes under at most {CHANNELS} names.",
                next_step="use one of the earlier names.",
            )
        if name not in self._own:
            self._control.set_channel(index, _RECLAIMED, NOT_YET)
        self._publish(name, index, [code, tensor.numel(), code_of(tensor.dtype)], version)
        self._own[name] = index

    def reclaim(self, name: str, version: int) -> None:
        """Snapshots up to this version are void from now on."""
        if name in self._own:
            self._control.set_channel(self._own[name], _RECLAIMED, version)
            self._num_published += 1
            self._bells.tell(PUBLISHED, self._num_published)

    def publish_again(self, name: str, version: int) -> None:
        """The same memory is of another version now."""
        index = self._own[name]
        code, count, dtype, *_ = self._record(self._rank, index)
        self._publish(name, index, [code, count, dtype], version)

    def own_version(self, name: str) -> int:
        """Of what this worker has published; UsageError when it is nothing."""
        if name not in self._own:
            raise UsageError(
                f"Nothing is published as {name!r}, so it cannot be changed.", next_step="publish it first."
            )
        return self._record(self._rank, self._own[name])[_VERSION]

    def set_change(self, name: str, state: int) -> None:
        """How it stands with a change of what this worker has published."""
        self._control.set_channel(self._own[name], _CHANGE, state)

    def change(self, name: str, peer: int) -> int:
        """The same of a peer that has published."""
        index = self._find(name, peer)
        return SETTLED if index is None else self._control.channel(peer, index)[_CHANGE]

    def fetch(self, name: str, peer: int) -> Handle[Snapshot | None]:
        """The newest of a peer's; None when there is none, the peer is gone, or stopped while publishing."""
        self._bells.hear()
        if peer != self._rank and self._control.gone_after(peer) != NOT_YET:
            return Done(None)
        index = self._find(name, peer)
        return Done(None if index is None else self._look(peer, index))

    def _publish(self, name: str, index: int, what: list[int], version: int) -> None:
        self._num_published += 1
        # two records take turns, so that there is always a whole one
        turn = 1 - self._control.channel(self._rank, index)[_CURRENT]
        for word, value in enumerate([*what, self._num_published, version]):
            self._control.set_channel(index, _RECORDS + turn * _RECORD_WORDS + word, value)
        self._control.set_channel(index, _CURRENT, turn)
        self._control.set_channel(index, _DIGEST, _digest(name))
        self._bells.tell(PUBLISHED, self._num_published)

    def _find(self, name: str, peer: int) -> int | None:
        digest = _digest(name)
        found = self._indices.get((peer, digest))
        if found is not None:
            return found
        for index in range(CHANNELS):
            other = self._control.channel(peer, index)[_DIGEST]
            if other == digest:
                self._indices[peer, digest] = index
                return index
            if not other:
                break
        return None

    def _look(self, peer: int, index: int) -> Snapshot | None:
        for look in range(_LOOKS):
            # while a peer that publishes is held up, the one before is there
            is_newest = look % 2 == 0
            record = self._record(peer, index, is_newest=is_newest)
            is_told = 0 < record[_NUMBER] <= self._control.get(peer, PUBLISHED)
            if is_told and record == self._record(peer, index, is_newest=is_newest):
                return _SharedSnapshot(self._control, self._bells, self._arena, peer, index, record)
            self._bells.hear()
        return None

    def _record(self, peer: int, index: int, *, is_newest: bool = True) -> list[int]:
        words = self._control.channel(peer, index)
        turn = words[_CURRENT] if is_newest else 1 - words[_CURRENT]
        start = _RECORDS + turn * _RECORD_WORDS
        return words[start : start + _RECORD_WORDS]


class _SharedSnapshot(Snapshot):
    def __init__(
        self, control: Control, bells: Bells, arena: Arena, rank: int, index: int, record: list[int]
    ) -> None:
        self.rank = rank
        self.version = record[_VERSION]
        segment, offset = arena.at(record[_PLACE])
        self.tensor = segment.region(rank, offset, record[_COUNT], DTYPES[record[_DTYPE]])
        self._control = control
        self._bells = bells
        self._index = index

    def is_intact(self) -> bool:
        self._bells.hear()
        return self._control.channel(self.rank, self._index)[_RECLAIMED] < self.version


def _digest(name: str) -> int:
    """A number for a name, never 0."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest()) + 1


class Copies:
    """Changes of this worker, and copies of what the others have published."""

    def __init__(self, side: OneSided, channels: Channels) -> None:
        self._side = side
        self._channels = channels

    @contextlib.contextmanager
    def changing(self, name: str, version: int) -> Iterator[None]:
        """After a block that ends in an exception nobody can read it until another one has ended well."""
        before = self._channels.own_version(name)
        if version < before:
            raise UsageError(
                f"{name!r} is of version {before} and cannot become {version}.", next_step="count upwards."
            )
        self._side.engine.check_usable()
        at = _place(name, self._side.rank)
        self._channels.set_change(name, WANTED)
        taken: list[tuple[int, int]] = []
        try:
            if not self._try_all(at, taken):
                self._side.engine.wait_until(lambda: self._try_all(at, taken), None, f"changing {name!r}")
            self._channels.set_change(name, CHANGING)
            self._channels.reclaim(name, before)
            yield
            self._channels.publish_again(name, version)
            self._channels.set_change(name, SETTLED)
        finally:
            self._give_back(taken)
            self._side.wake_others()

    def read(self, name: str, peer: int, into: torch.Tensor, version: int) -> Handle[int | None]:
        """Once it is of that version or newer, and nobody changes it."""
        self._side.check_rank(peer)
        into = into.detach()
        at = _place(name, peer) + self._side.rank

        def attempt() -> list[int | None] | None:
            if self._side.is_gone(peer):
                return [None]
            snapshot = self._channels.fetch(name, peer).wait()
            if snapshot is None:
                return None if version else [None]
            if snapshot.version < version:
                return None
            if peer == self._side.rank:
                return [copy_out(snapshot, into, name)]
            # one that waits to change it comes first: readers alone would never let it
            if self._channels.change(name, peer) != SETTLED or not self._side.locks.try_take(at):
                return None
            try:
                if self._channels.change(name, peer) == CHANGING:
                    return None  # it has ended in the midst of it
                snapshot = self._channels.fetch(name, peer).wait()
                if snapshot is None:
                    return None
                got = copy_out(snapshot, into, name)
            finally:
                self._side.locks.release(at)
                self._side.bells.wake(peer)
            self._side.engine.check_own_verdict()
            return [got]

        return self._side.errands.begin(
            object(), f"read {name!r} of rank {self._side.name_of(peer)}", attempt
        )

    def _try_all(self, at: int, taken: list[tuple[int, int]]) -> bool:
        """Have all of them, or none."""
        if taken:
            return True
        for first, count in self._runs():
            if not self._side.locks.try_take(at + first, count):
                self._give_back(taken)
                blocker = self._side.locks.first_taken(at + first, count)
                if blocker is not None:
                    self._side.engine.blocked_by(first + blocker)
                return False
            taken.append((at + first, count))
        return True

    def _runs(self) -> list[tuple[int, int]]:
        """Ranks that follow each other and are there: the first, and how many."""
        runs: list[tuple[int, int]] = []
        for rank in range(self._side.size):
            if self._side.is_gone(rank):
                continue
            if runs and sum(runs[-1]) == rank:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((rank, 1))
        return runs

    def _give_back(self, taken: list[tuple[int, int]]) -> None:
        while taken:
            self._side.locks.release(*taken.pop())


def _place(name: str, owner: int) -> int:
    """The byte of rank 0."""
    return place_of("copy", name, owner) + 1


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
