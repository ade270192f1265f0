"""What can be said with the operations of any group, each written once.

These are averages, values and states that members give each other, what all do and fail in together, a mutex,
a count of steps, and mail to neighbours.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import msgspec
import torch

from shoal.core import SYSTEM_CLOCK, Deadline, DeadlineExceeded
from shoal.core.errors import CheckpointError, ShoalError, UsageError
from shoal.group.base import Group, Handle, Window, WindowSlot, held_by_itself
from shoal.tensors.buckets import packed
from shoal.tensors.checkpoint import SentState, rebuild
from shoal.topology import MachineWeights, Topology, Weights

T = TypeVar("T")
PIECE_BYTES = 2**20
"""The size of the pieces in which a state goes through a window."""
Fail = Callable[[str], ShoalError]
_CHOOSING, _TICKET = range(2)
_NO_PROGRESS_S = 10.0
"""A worker that makes no step for so long, and for as many steps as `_NO_PROGRESS_STEPS` take this one, may
wait for this worker in an operation of the user's own."""
_NO_PROGRESS_STEPS = 4.0
_PUBLISH_S = 0.02
"""With a GPU, whose steps may be short, the number of steps is published after so long at the earliest."""
_NOTE = struct.Struct("<QI?")
"""A number that counts what one worker sends another, which piece of the whole it is (0: it is a message),
and whether something was missed."""


def others(group: Group) -> list[int]:
    """Lists the members but this worker."""
    return [rank for rank in group.members if rank != group.rank]


def announce(group: Group, num_operations: int) -> None:
    """Says that this worker will issue so many all-reduces next, whatever it computes before.

    On a GPU others need not wait for it then: their streams do. Who announces and then issues something else
    is told so as ever, a call later. Other groups have no use for it.
    """
    tell = getattr(group, "announce", None)
    if tell is not None:
        tell(num_operations)


def pair_gossip(group: Group, tensor: torch.Tensor, peer: int, weight: float = 0.5) -> Handle[torch.Tensor]:
    """Takes `(1 − weight) · own + weight · peer's` in place; a collective in which each may name another."""
    return group.exchange(tensor, Weights(1 - weight, {peer: weight}))


def start_mean(group: Group, tensor: torch.Tensor) -> Handle[torch.Tensor]:
    """Starts a mean in place, over the members that are there; on one machine others' bits may differ."""
    if group.num_machines > 1:  # one worker of each sends, once, and all get equal bits
        return group.all_reduce(tensor)
    peers = others(group)
    return group.exchange(tensor, Weights.uniform(peers, peers))


def start_copy(group: Group, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
    """Copies in place from `root`; who finds it gone keeps what it has, so that its loss ends nothing."""
    if group.rank != root:
        return group.exchange(tensor, Weights(0.0, {root: 1.0}, {}))
    return group.exchange(tensor, Weights(1.0, {}, dict.fromkeys(others(group), 1.0)))


def exchange_machines(
    group: Group, tensor: torch.Tensor, weights: Weights, *, out: torch.Tensor | None = None
) -> Handle[torch.Tensor]:
    """Averages inside each machine, and with other machines by `weights` over machine indices."""
    return group.exchange(tensor, MachineWeights(weights), out=out)


def spread_over_ranks(group: Group, between: Weights | MachineWeights) -> Weights:
    """Divides the weights of machines among those of their workers that are there."""
    if isinstance(between, Weights):
        return between
    weights = between.weights
    weights.check(group.machine, group.num_machines)
    factors = {group.machine: weights.own, **weights.sources}
    ranks: dict[int, list[int]] = {}
    for rank in group.members:
        ranks.setdefault(group.machines[rank], []).append(rank)
    gone = [machine for machine in weights.sources if machine not in ranks]
    factors[group.machine] += sum(factors.pop(machine) for machine in gone)
    spread = {
        rank: factor / len(ranks[machine]) for machine, factor in factors.items() for rank in ranks[machine]
    }
    return Weights(spread.pop(group.rank), spread, is_by_rule=True)


def share(group: Group, value: Any) -> list[Any]:
    """Collects everybody's small value (numbers, strings, lists, dicts), in rank order. Collective."""
    encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
    return [msgspec.msgpack.decode(part.numpy().data) for part in group.all_gather(encoded).wait()]


def next_number(group: Group, kind: str) -> int:
    """Gives a number that nothing of this kind has had in this group, the same to all members. Collective."""
    number: int = max(share(group, group.notes.get(kind, 0)))
    group.notes[kind] = number + 1
    return number


@contextlib.contextmanager
def span(group: Group, name: str) -> Iterator[None]:
    """Marks a part of the user's program in the timeline; does nothing without one."""
    if group.timeline is None:
        yield
    else:
        with group.timeline.span(name):
            yield


class Continued(Handle[T]):
    """An operation whose result is made of that of another one, when it is first asked for."""

    _result: T

    def __init__(self, first: Handle[Any], finish: Callable[[Any], T]) -> None:
        self._first: Handle[Any] | None = first
        self._finish = finish

    def wait(self, deadline: Deadline | None = None) -> T:
        """Gives the result, made of the other one's once that is there."""
        if self._first is not None:
            self._result = self._finish(self._first.wait(deadline))
            self._first = None
        return self._result

    def is_done(self) -> bool:
        """Tells whether the other one is over."""
        return self._first is None or self._first.is_done()


class Mutex:
    """Lets one member at a time into its `with` block; one that is lost or leaves holds it no more.

    Made on all members together. Lamport's bakery algorithm ("A New Solution of Dijkstra's Concurrent
    Programming Problem", 1974): each member publishes whether it is choosing a ticket, and its ticket; who
    has the lowest one, of equal ones the lowest rank, is let in.
    """

    def __init__(self, group: Group, name: str) -> None:
        self._group = group
        self._name = name
        self._memory = group.empty(2, torch.int64)
        self._window = group.window(f"mutex {name}", 2, torch.int64, sources=())
        self._window.publish(self._memory, 0)
        self._version = 0
        self._is_inside = False
        group.barrier().wait()

    def __enter__(self) -> Self:
        if self._is_inside:
            raise held_by_itself(self._group.rank, f"mutex {self._name!r}")
        self._say(_CHOOSING, 1)
        own = 1 + max([0, *(self._look(rank)[_TICKET] for rank in others(self._group))]), self._group.rank
        self._say(_TICKET, own[0])
        self._say(_CHOOSING, 0)
        for rank in others(self._group):
            self._wait_for(rank, own)
        self._is_inside = True
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_inside = False
        self._say(_TICKET, 0)

    def close(self) -> None:
        """Gives the memory back; collective."""
        self._window.close()
        self._group.free(self._memory)

    def _say(self, index: int, value: int) -> None:
        self._version += 1
        with self._window.changing(self._version):
            self._memory[index] = value

    def _look(self, rank: int, version: int = 0) -> tuple[int, int, int]:
        """Reads whether a member is choosing, its ticket and the version, once it is that new."""
        into = torch.zeros(2, dtype=torch.int64)
        seen = self._window.read(rank, into, version=version).wait()
        if seen is None:
            return 0, 0, 0  # it is gone, and wants nothing
        choosing, ticket = into.tolist()
        return choosing, ticket, seen

    def _wait_for(self, rank: int, own: tuple[int, int]) -> None:
        """Waits until a member has chosen, and has no ticket that comes before this worker's."""
        choosing, ticket, version = self._look(rank)
        while choosing or (ticket and (ticket, rank) < own):
            choosing, ticket, version = self._look(rank, version + 1)


def take_values(group: Group, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
    """Copies the values of `root` into equal tensors; of DTensors its part. Collective."""
    for bucket, mine in packed([tensor.detach() for tensor in tensors]):
        group.broadcast(bucket.flat.view(torch.uint8), root).wait()
        if group.rank != root:
            bucket.store(mine)


def take_state(group: Group, make: Callable[[], Any], root: int = 0) -> Any:
    """Gives all members the state that `make` returns on `root`, where alone it is called.

    A state has numbers, texts, tensors, lists and dicts. Collective; UsageError on all when it has others.
    """
    sent, tensors = SentState.of(make) if group.rank == root else (SentState(), {})
    sent = msgspec.convert(share(group, sent)[list(group.members).index(root)], SentState)
    if sent.problem:
        raise UsageError(
            f"what rank {root} has cannot be given to the others: {sent.problem}",
            next_step="load the same checkpoint on all workers, and attach(..., should_start_equal=False).",
        )
    if group.rank != root:
        tensors = sent.room()
    take_values(group, list(tensors.values()), root)
    return rebuild(sent.plain, tensors)


def send_state(window: Window, to: int, state: Any) -> None:
    """Sends a state; returns when `to` has it, or is gone. What cannot travel is the receiver's error."""
    head, tensors = SentState.of(lambda: state)
    piece = torch.zeros(PIECE_BYTES, dtype=torch.uint8)

    def send(message: torch.Tensor) -> None:
        for part in torch.split(message, PIECE_BYTES):
            piece[: part.numel()] = part
            window.send(to, piece, note=b"%d" % message.numel()).wait()

    send(torch.frombuffer(bytearray(msgspec.msgpack.encode(head)), dtype=torch.uint8))
    for bucket, _ in packed(list(tensors.values())):
        send(bucket.flat.view(torch.uint8))


def receive_state(next_slot: Callable[[], contextlib.AbstractContextManager[WindowSlot]]) -> Any:
    """Receives what `send_state` sent, slot by slot; CheckpointError when that was not possible."""

    def receive() -> torch.Tensor:
        message: torch.Tensor | None = None
        num_bytes = 0
        while message is None or num_bytes < message.numel():
            with next_slot() as slot:
                if message is None:
                    message = torch.empty(int(slot.note), dtype=torch.uint8)
                part = message[num_bytes : num_bytes + PIECE_BYTES]
                part.copy_(slot.tensor[: part.numel()])
                num_bytes += part.numel()
        return message

    head = msgspec.msgpack.decode(receive().numpy().data, type=SentState)
    if head.problem:
        raise CheckpointError(f"a server's state cannot be had: {head.problem}")
    tensors = head.room()
    for bucket, members in packed(list(tensors.values())):
        bucket.flat.view(torch.uint8).copy_(receive())
        bucket.store(members)
    return rebuild(head.plain, tensors)


def agree(group: Group, act: Callable[[], Any], fail: Fail = CheckpointError) -> dict[int, Any]:
    """Acts, and returns what that gives on each member, by rank; where one fails, all raise. Collective."""
    value, problem = None, ""
    try:
        value = act()
    except ShoalError as error:
        problem = error.what
    except OSError as error:
        problem = f"{error.strerror or error}"
    said = {rank: theirs for rank, *theirs in share(group, [group.rank, value, problem])}
    for rank, (_, trouble) in said.items():
        if trouble:
            raise fail(f"{trouble} (rank {rank})")
    return {rank: theirs for rank, (theirs, _) in said.items()}


def on_first(group: Group, first: int, act: Callable[[], Any], fail: Fail = CheckpointError) -> Any:
    """Acts on the first member alone, and returns on all what that gives; where it fails, all raise."""
    said = agree(group, lambda: act() if group.rank == first else None, fail)
    if first not in said:
        raise fail(f"rank {first} was lost")
    return said[first]


class StepCounter:
    """The steps that this worker has begun, for the others to see; made on all members together.

    It tells whether all workers end their training after the same step, so that they can share a last time.
    Workers with more data than others go on, and nobody may wait for them: an operation of the whole group is
    safe only when everybody has come to the end. So each worker publishes how many steps it has begun, and at
    its end waits until every other one has ended too, has begun another step, or is gone.

    What is published stays as it is: only the version counts, 2 for each step and 1 for the end. It is memory
    of the CPU also where the model is on a GPU, which nobody shall wait for.
    """

    def __init__(self, group: Group, steps: int, *, is_on_device: bool = False) -> None:
        self._group = group
        self._pause_s = _PUBLISH_S if is_on_device else 0.0
        self._published_s = 0.0
        self._memory = group.empty(1)
        name = f"steps {next_number(group, 'step counters')}"
        self._window = group.window(name, 1, sources=())
        self._stepped_s = SYSTEM_CLOCK.now_s()
        self._longest_s = 0.0
        self.publish(steps)

    def publish(self, steps: int, *, is_urgent: bool = False) -> None:
        """Says how many steps this worker has begun; at once only if that is urgent: `meet` says it again."""
        now_s = SYSTEM_CLOCK.now_s()
        self._longest_s = max(self._longest_s, now_s - self._stepped_s)
        self._stepped_s = now_s
        if is_urgent or now_s - self._published_s >= self._pause_s:
            self._published_s = now_s
            self._window.publish(self._memory, 2 * steps)

    def meet(self, steps: int) -> bool:
        """At the end of training: whether another worker ends after the same step, and none goes on."""
        ended = 2 * steps + 1
        self._window.publish(self._memory, ended)
        versions = []
        for rank in others(self._group):
            version = self._wait_for(rank, ended)
            if version is not None and version != ended:
                return False
            versions.append(version)
        return ended in versions

    def close(self) -> None:
        """Takes the count back, with all others: who leaves alone lets them see that it has ended."""
        self._window.close()
        self._group.free(self._memory)

    def _wait_for(self, rank: int, ended: int) -> int | None:
        """Of a worker, once it has come so far; -1 when it makes no step, None when it is gone."""
        into = torch.empty_like(self._memory)
        before = -1
        while True:
            patience_s = max(_NO_PROGRESS_S, _NO_PROGRESS_STEPS * self._longest_s) * self._group.patience
            handle = self._window.read(rank, into, version=ended)
            try:
                return handle.wait(Deadline.after(patience_s))
            except DeadlineExceeded:
                now = self._window.read(rank, into).wait()
            if now is None or now == before:
                return None if now is None else -1
            before = now


class Mail:
    """Messages of one size to and from this worker's neighbours in a static topology; made by all together.

    They go by one-sided windows, each in its turn, and none is missed but those that are cut off on the way.
    Who has missed one says so in its next, and gets the whole that the messages before it say, in pieces,
    before the next that it hears; what came in between is of no use to it.

    `open_window` opens a window for tensors like the one that it is given, into which `sources` may write.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        open_window: Callable[..., Window],
        *,
        size_bytes: int,
        whole_bytes: int,
    ) -> None:
        self.sources = topology.sources(rank)
        self._size_bytes = size_bytes
        self._whole_bytes = whole_bytes
        like = torch.empty(size_bytes, dtype=torch.uint8)
        self._windows = [
            open_window(like, sources=self.sources[place : place + 1]) for place in range(topology.degree())
        ]
        """One for each source of this worker, so that one can be waited for alone; others may have more."""
        self._routes = [
            (destination, self._windows[topology.sources(destination).index(rank)])
            for destination in topology.destinations(rank)
        ]
        self._num_sent = dict.fromkeys(topology.destinations(rank), 0)
        self._num_heard = dict.fromkeys(self.sources, 0)
        self._missing: list[int] = []
        """Those of whom something was missed."""
        self._asking: list[int] = []
        """Those who have missed something of this worker's."""
        self._answered: list[int] = []
        """Those who have been sent the whole in this round."""

    def send(self, message: torch.Tensor, whole: Callable[[], torch.Tensor]) -> list[Handle[None]]:
        """Sends a message to all neighbours; it must not be written until the handles are done.

        `whole` is all that the messages before it say, as bytes, for those who have missed one.
        """
        handles = []
        self._answered, self._asking = self._asking, []
        pieces = self._pieces(whole()) if self._answered else []
        for to, window in self._routes:
            for place, piece in enumerate(pieces if to in self._answered else [], 1):
                handles.append(window.send(to, piece, note=self._note(to, place)))
            handles.append(window.send(to, message, note=self._note(to, 0)))
        return handles

    def receive(self) -> Mapping[int, tuple[torch.Tensor, torch.Tensor | None]]:
        """Gives the next message of each source, by its rank, and all that those before it say, if missed.

        There is none of those that are gone, that cannot be heard, or whose whole has yet to come.
        """
        windows = zip(self.sources, self._windows, strict=False)
        came = {source: self._next_of(source, window) for source, window in windows}
        return {source: received for source, received in came.items() if received is not None}

    def _next_of(self, source: int, window: Window) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        pieces: list[torch.Tensor] = []
        while source in window.wait():
            with window.slot(source) as slot:
                number, place, is_asking = _NOTE.unpack(slot.note)
                tensor = slot.tensor.clone()
                slot.clear()
            if number != self._num_heard[source]:
                pieces.clear()
                if source not in self._missing:
                    self._missing.append(source)
            self._num_heard[source] = number + 1
            if place:
                pieces += [tensor] if place == len(pieces) + 1 else []
                continue
            if is_asking and source not in self._answered:
                self._asking.append(source)
            if source not in self._missing:
                return tensor, None
            if len(pieces) * self._size_bytes < self._whole_bytes:
                return None
            self._missing.remove(source)
            return tensor, torch.cat(pieces)[: self._whole_bytes]
        return None

    def _pieces(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """Each of the size of a message."""
        short_bytes = -len(whole) % self._size_bytes
        return torch.split(torch.cat([whole, whole.new_zeros(short_bytes)]), self._size_bytes)

    def _note(self, to: int, place: int) -> bytes:
        number = self._num_sent[to]
        self._num_sent[to] += 1
        return _NOTE.pack(number, place, to in self._missing)
