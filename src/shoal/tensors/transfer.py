"""A state that one peer takes from several that hold it, verified piece by piece.

A state is numbers, texts, lists and dicts with tensors in them, as a checkpoint holds it. Its tensors' bytes,
one after the other, are cut into leaves of 1 MiB. The index of a state has the plain part, the tensors' specs
and the SHA-256 of every leaf; the hash of the index is the state's name. So two peers hold equal bits if they
hold the same name, and whatever a donor sends is checked before it is used:

    taker                                              donors
    StateTaker.take(donors)
      state.index(name)   ──────────────────────────►  one of them: what the state consists of
      hash of the index = name?
      state.leaf(name, number)  ────────────────────►  all of them at once, a few leaves in flight each
      hash of the leaf as in the index?                wrong: the donor is named, and asked no more
      a leaf that takes long is asked for elsewhere    gone: its leaves are asked for elsewhere
                                                       late: it is asked for fewer leaves at once

What has come stays: a taker whose donors are all gone goes on with others.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import hashlib
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from shoal.core import (
    Deadline,
    DeadlineExceeded,
    Peer,
    PeerError,
    PeerLost,
    Scope,
    ShoalError,
    TensorError,
    VirtualLoop,
)
from shoal.core.errors import LimitExceeded, ProtocolError
from shoal.tensors.checkpoint import flatten, rebuild
from shoal.tensors.packing import pack, unpack
from shoal.tensors.specs import TensorLimits, TensorSpec, check, read_specs, size_bytes
from shoal.transport import Head, Reply
from shoal.transport.memory import aligned_memory
from shoal.transport.messages import Transport

LEAF_BYTES = 1 << 20
MAX_STATE_BYTES = 1 << 40
"""A state of more bytes than this is refused before memory is taken for it."""
_MAX_INDEX_BYTES = 64 << 20
_NUM_IN_FLIGHT = 4
"""Leaves that are asked of one donor at once."""
_LEAF_S = 30.0
"""A donor that has not sent a leaf after so long is asked for half as many at once, and left in the end."""
_MAX_PATIENCE = 16.0
"""A taker that gets no leaf at all from anybody waits up to so many times as long when it tries again."""
_LATE_FACTOR = 3.0
"""A leaf that takes so many times as long as they usually do is asked of another donor as well."""
_SHORTEST_LATE_S = 0.05
_INDEX, _LEAF = "state.index", "state.leaf"


class StateIndex(msgspec.Struct, frozen=True, array_like=True):
    """What a state consists of."""

    plain: bytes
    """All but the tensors, as JSON."""
    names: list[str]
    specs: list[TensorSpec]
    leaves: list[bytes]
    """The SHA-256 of each leaf."""
    leaf_bytes: int = LEAF_BYTES


class _Bytes:
    """Some buffers as one long row of bytes, divided into leaves."""

    def __init__(self, buffers: Sequence[memoryview], leaf_bytes: int) -> None:
        self.buffers = buffers
        self.size_bytes = sum(map(len, buffers))
        self.num_leaves = -(-self.size_bytes // leaf_bytes)
        self._leaf_bytes = leaf_bytes
        self._starts = [0]
        for buffer in buffers:
            self._starts.append(self._starts[-1] + len(buffer))

    def leaf(self, number: int) -> list[memoryview]:
        """Gives the parts of a leaf, in order; a leaf may go over several buffers."""
        begin = number * self._leaf_bytes
        end = min(begin + self._leaf_bytes, self.size_bytes)
        parts = []
        for place in range(bisect.bisect_right(self._starts, begin) - 1, len(self.buffers)):
            start = self._starts[place]
            if start >= end:
                break
            parts.append(self.buffers[place][max(begin - start, 0) : end - start])
        return [part for part in parts if part]

    def leaves(self) -> Iterator[list[memoryview]]:
        """Gives all leaves in order."""
        return map(self.leaf, range(self.num_leaves))


class HeldState:
    """A state as its donor holds it: the bytes are those of the tensors themselves where these are on a CPU.

    So nothing of it may be written while others take it.
    """

    def __init__(self, state: Any, leaf_bytes: int = LEAF_BYTES) -> None:
        plain, tensors = flatten(state)
        specs, buffers = pack(tensors.values())
        self._bytes = _Bytes([memoryview(buffer).cast("B") for buffer in buffers], leaf_bytes)
        self.size_bytes = self._bytes.size_bytes
        self.index = msgspec.msgpack.encode(
            StateIndex(
                msgspec.json.encode(plain),
                list(tensors),
                specs,
                [_digest(parts) for parts in self._bytes.leaves()],
                leaf_bytes,
            )
        )
        self.name = hashlib.sha256(self.index).hexdigest()

    def leaf(self, number: int) -> list[memoryview]:
        """Gives the bytes of a leaf; LimitExceeded for a number that there is not."""
        if not 0 <= number < self._bytes.num_leaves:
            raise LimitExceeded(
                f"The state has {self._bytes.num_leaves} leaves, and none is number {number}."
            )
        return self._bytes.leaf(number)


async def hold_state(state: Any) -> HeldState:
    """Makes a `HeldState` beside the loop, since its bytes are hashed; in virtual time on the loop."""
    is_virtual = isinstance(asyncio.get_running_loop(), VirtualLoop)
    return HeldState(state) if is_virtual else await asyncio.to_thread(HeldState, state)


class StateDonor:
    """Answers those who take states; made before its transport listens.

    `pause_s` is asked before so many bytes are given: 0.0, or the seconds after which it is asked again.
    """

    def __init__(self, transport: Transport, pause_s: Callable[[int], float] | None = None) -> None:
        self.asked_s: dict[str, float] = {}
        """When somebody last asked for a state that is held, by the loop's clock."""
        self._held: dict[str, HeldState] = {}
        self._transport = transport
        self._pause_s = pause_s
        transport.handle(_INDEX, self._serve_index, payload_type=str)
        serve_leaf = self._serve_leaf if pause_s is None else self._serve_leaf_slowly
        transport.handle(_LEAF, serve_leaf, payload_type=tuple[str, int])

    def hold(self, state: HeldState) -> None:
        """Gives this state from now on to whoever asks for its name."""
        self._held[state.name] = state

    def drop(self, name: str) -> None:
        """Gives it no more."""
        self._held.pop(name, None)
        self.asked_s.pop(name, None)

    def close(self) -> None:
        """Answers nobody any more."""
        self._held.clear()
        for method in (_INDEX, _LEAF):
            self._transport.routes.remove(method)

    def _serve_index(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        return Reply(buffers=[self._find(head.payload).index])

    def _serve_leaf(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        name, number = head.payload
        return Reply(buffers=self._find(name).leaf(number))

    async def _serve_leaf_slowly(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        assert self._pause_s is not None
        reply = self._serve_leaf(head, buffers)
        while True:
            pause_s = self._pause_s(sum(map(len, reply.buffers)))
            if pause_s <= 0:
                return reply
            await asyncio.sleep(pause_s)

    def _find(self, name: str) -> HeldState:
        held = self._held.get(name)
        if held is None:
            raise LimitExceeded(
                f"This peer does not hold the state {name[:12]} any more.", next_step="ask another peer."
            )
        self.asked_s[name] = asyncio.get_running_loop().time()
        return held


class StateTaker:
    """Takes one state from several donors; `take` may be called again, with others, when it has failed."""

    def __init__(
        self, transport: Transport, name: str, *, max_bytes: int = MAX_STATE_BYTES, leaf_s: float = _LEAF_S
    ) -> None:
        self.blamed: dict[Peer, str] = {}
        """Donors that sent what is not the state, or none at all, with the reason; not asked any more."""
        self.left: dict[Peer, str] = {}
        """Donors that the latest `take` has left because they are gone or late, or hold it no more."""
        self.received_bytes: dict[Peer, int] = {}
        """How much of the state came from each donor."""
        self._transport = transport
        self._name = name
        self._max_bytes = max_bytes
        self._leaf_s = leaf_s
        self._max_leaf_s = _MAX_PATIENCE * leaf_s
        self._num_at_once: dict[Peer, int] = {}
        """How many leaves are asked of a donor at once, where that is fewer than usual."""
        self._slowed_s: dict[Peer, float] = {}
        """When it was made fewer."""
        self._index: StateIndex | None = None
        self._memory = _Bytes((), LEAF_BYTES)
        self._missing: deque[int] = deque()
        self._asked_s: dict[int, float] = {}
        """Leaves that are under way: when they were asked for first."""
        self._durations_s: deque[float] = deque(maxlen=64)
        self._changed = asyncio.Event()
        """A leaf has come, or must be asked for again."""

    @property
    def num_missing(self) -> int:
        """How many leaves have not come; those under way count."""
        return len(self._missing) + len(self._asked_s)

    async def take(self, donors: Sequence[Peer], deadline: Deadline) -> Any:
        """Gives the state, whose tensors lie in memory of their own.

        PeerLost when no donor is left, DeadlineExceeded when it takes too long; what has come stays.
        """
        asked = [donor for donor in donors if donor not in self.blamed]
        self.left.clear()
        self._num_at_once.clear()
        if self._index is None:
            await self._take_index(asked, deadline)
        index = self._index
        assert index is not None
        timeout_s, num_before = deadline.timeout_s, self.num_missing
        try:
            async with asyncio.timeout(timeout_s), Scope("take a state") as scope:
                for donor in asked:
                    for number in range(_NUM_IN_FLIGHT):
                        taking = self._take_leaves(donor, number, scope)
                        scope.start_soon(taking, name=f"take leaves from {donor}")
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self.num_missing} of {len(index.leaves)} parts of the state have not come in time.",
                cause="the donors or their lines are slow.",
            ) from None
        finally:
            self._missing.extend(self._asked_s)
            self._asked_s.clear()
            if self.num_missing == num_before:  # the lines may be too slow for leaves in that time
                self._leaf_s = min(2 * self._leaf_s, self._max_leaf_s)
        if self._missing:
            raise self._no_donor_left(f"{len(self._missing)} of {len(index.leaves)} parts are missing")
        tensors = dict(zip(index.names, unpack(index.specs, self._memory.buffers), strict=True))
        try:
            return rebuild(msgspec.json.decode(index.plain), tensors)
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            self.blamed.update(dict.fromkeys(asked, "it holds a state that cannot be read"))
            raise self._no_donor_left("it cannot be read") from error

    async def _take_index(self, donors: Sequence[Peer], deadline: Deadline) -> None:
        for donor in donors:
            try:
                limit = Deadline.after(min(self._leaf_s, deadline.remaining_s))
                reply = await self._transport.call(donor, _INDEX, self._name, deadline=limit)
                data = b"".join(map(bytes, reply.buffers))
                if hashlib.sha256(data).hexdigest() != self._name:
                    raise _WrongBytes("it sent the index of another state")
                if len(data) > _MAX_INDEX_BYTES:
                    raise LimitExceeded(f"the index of the state has {len(data):,} bytes")
                self._begin(msgspec.msgpack.decode(data, type=StateIndex))
            except (ShoalError, msgspec.MsgspecError) as error:
                self._leave(donor, error)
            else:
                return
        raise self._no_donor_left("none of them has given its index")

    def _begin(self, index: StateIndex) -> None:
        """Takes memory for the state, once all that the index claims can be true."""
        try:
            specs = read_specs(msgspec.to_builtins(index.specs))
            sizes = [size_bytes(spec) for spec in specs]
            check(specs, sizes, TensorLimits(max_tensors=len(specs) + 1, max_bytes=self._max_bytes))
        except (TensorError, LimitExceeded) as error:
            raise _WrongBytes(f"it tells of a state that cannot be taken: {error.what}") from error
        if len(index.names) != len(specs) or index.leaf_bytes < 1:
            raise _WrongBytes("it sent an index that contradicts itself")
        if -(-sum(sizes) // index.leaf_bytes) != len(index.leaves):
            raise _WrongBytes("it sent an index with another number of parts than the state has")
        self._memory = _Bytes([aligned_memory(size) for size in sizes], index.leaf_bytes)
        self._missing = deque(range(len(index.leaves)))
        self._index = index

    async def _take_leaves(self, donor: Peer, place: int, scope: Scope) -> None:
        """Asks one donor for one leaf after the other until it fails, or all have come.

        `place` numbers the leaves that are asked of it at once.
        """
        clock = asyncio.get_running_loop().time
        while self._may_ask(donor, place) and (number := await self._next_leaf()) is not None:
            began_s = clock()
            try:
                reply = await self._transport.call(
                    donor, _LEAF, (self._name, number), deadline=Deadline.after(self._leaf_s)
                )
                self._store(number, reply, donor)
            except (ShoalError, msgspec.MsgspecError) as error:
                if not isinstance(error, DeadlineExceeded):
                    self._leave(donor, error)
                elif began_s >= self._slowed_s.get(donor, began_s):
                    self._slow_down(donor, error)
                if self._asked_s.pop(number, None) is not None:
                    self._missing.appendleft(number)
                    self._changed.set()
                continue
            self._durations_s.append(clock() - began_s)
        if not self.num_missing:
            scope.cancel()  # what others were asked for as well is not waited for

    def _may_ask(self, donor: Peer, place: int) -> bool:
        is_left = donor in self.blamed or donor in self.left
        return not is_left and place < self._num_at_once.get(donor, _NUM_IN_FLIGHT)

    def _slow_down(self, donor: Peer, error: ShoalError) -> None:
        """Asks for half as many leaves at once: its line, or this peer's, is too slow for so many."""
        num_at_once = self._num_at_once.get(donor, _NUM_IN_FLIGHT) // 2
        if num_at_once:
            self._num_at_once[donor] = num_at_once
            self._slowed_s[donor] = asyncio.get_running_loop().time()
        else:
            self._leave(donor, error)

    async def _next_leaf(self) -> int | None:
        """Chooses a leaf that nobody was asked for, else one that takes long; None when all have come."""
        clock = asyncio.get_running_loop().time
        while True:
            if self._missing:
                number = self._missing.popleft()
                self._asked_s[number] = clock()
                return number
            if not self._asked_s:
                return None
            oldest = min(self._asked_s, key=self._asked_s.__getitem__)
            usual_s = statistics.median(self._durations_s) if self._durations_s else self._leaf_s / 10
            late_s = self._asked_s[oldest] + max(_SHORTEST_LATE_S, _LATE_FACTOR * usual_s)
            if clock() >= late_s:
                self._asked_s[oldest] = clock()
                return oldest
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(late_s):
                    await self._changed.wait()

    def _store(self, number: int, reply: Reply, donor: Peer) -> None:
        """Keeps a leaf that is right; ProtocolError for another one."""
        assert self._index is not None
        buffers = [memoryview(buffer).cast("B") for buffer in reply.buffers]
        if _digest(buffers) != self._index.leaves[number]:
            raise _WrongBytes("it sent bytes that are not those of the state")
        if self._asked_s.pop(number, None) is None:
            return  # another donor was faster
        data, offset = buffers[0] if len(buffers) == 1 else memoryview(b"".join(buffers)), 0
        for part in self._memory.leaf(number):
            part[:] = data[offset : offset + len(part)]
            offset += len(part)
        self.received_bytes[donor] = self.received_bytes.get(donor, 0) + offset
        self._changed.set()

    def _leave(self, donor: Peer, error: Exception) -> None:
        reasons = self.blamed if isinstance(error, _WrongBytes | msgspec.MsgspecError) else self.left
        reasons.setdefault(donor, error.what if isinstance(error, ShoalError) else str(error))

    def _no_donor_left(self, what: str) -> PeerError:
        told = {**self.left, **self.blamed}
        reasons = "; ".join(f"{donor}: {reason}" for donor, reason in told.items())
        return PeerLost(
            f"The state cannot be taken: {what}, and no peer is left that gives them.",
            cause=reasons or "nobody was asked.",
            next_step="try again when peers that hold it are there.",
        )


class _WrongBytes(ProtocolError):
    """A donor sent something else than the state that it was asked for."""


def _digest(parts: Sequence[memoryview]) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.digest()
