"""What each collective of a group over several machines does, step by step, as the lane goes through it.

For tensors on a device, and for all where a backend was asked for, they are those of torch.distributed. NCCL
needs a device for each worker; gloo lets several share one, and works without any. torch.distributed is
brought up when the first such tensor comes, unless the user has done so.
"""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from shoal.core import PeerLost, UsageError
from shoal.group.base import Handle, Reduction
from shoal.group.cluster.machine_exchange import (
    ABSENT,
    FREE,
    Action,
    Arrived,
    Conversation,
    Step,
    Steps,
    Words,
    gone_from,
)
from shoal.group.cluster.mesh import MeshHandle
from shoal.group.cluster.rendezvous import Rendezvous
from shoal.group.host.engine import Span, is_overlapping, put_back, span_of
from shoal.group.kernels import add_differences, mix_into
from shoal.group.solo import SoloGroup
from shoal.topology import Weights
from shoal.transport import Reply

if TYPE_CHECKING:
    from shoal.group.cluster.group import TorchGroup

_ALIGNED = 64
_ROOT_IS_GONE = "gone"
_ASK_AFTER_S = 1.0
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_FOREVER = datetime.timedelta(days=365)  # who is lost is noticed by the mesh
_ended: deque[Any] = deque(maxlen=4)


class Collectives:
    """Of one worker."""

    def __init__(self, group: TorchGroup) -> None:
        self._group = group
        self._local = group.local
        self._mesh = group.mesh
        self._mates = group.ranks_on(group.machine)
        self._talks: dict[int, list[Conversation]] = {}
        self._expected: dict[int, list[_FromRank]] = {}
        """What operations under way wait for, by their numbers."""
        self._sending: list[tuple[Span, MeshHandle[None]]] = []
        """Memory that is on its way to other machines."""

    def all_reduce(self, seq: int, tensor: torch.Tensor, op: Reduction) -> Steps:
        """Inside each machine, then between machines; what comes of it is passed on inside."""
        flat = _flat(tensor)
        present = yield _Inside(self._local.all_reduce(flat, op))
        if self._is_speaker(present):
            talk = self._conversation(seq)
            heard = yield from self._greet(talk, Action.on("all_reduce", flat, op), len(present))
            machines = list(heard)
            if op == "mean":
                total = sum(words.num_workers for words in heard.values())
                if len(machines) > 1:
                    flat.mul_(len(present) / total)
            yield from talk.reduce(flat, machines, "sum" if op == "mean" else op)
        passed_on = self._local.broadcast(flat, present[0])
        yield FREE
        yield _Guarded(self._group, passed_on, seq, present[0])
        return put_back(flat, tensor)

    def broadcast(self, seq: int, tensor: torch.Tensor, root: int) -> Steps:
        """To one worker of each other machine, which passes it on."""
        flat = _flat(tensor)
        present = yield _Inside(self._local.barrier())
        place = self._group.place_of(root)
        action = Action.on("broadcast", flat, f"root {root}")
        if place is not None and place not in present:
            if self._is_speaker(present):
                yield from self._greet(self._conversation(seq), action, len(present), _ROOT_IS_GONE)
            raise _has_left(root)
        if place is not None:
            passed_on = self._local.broadcast(flat, place)
            if not self._is_speaker(present):
                yield FREE
            yield _Inside(passed_on)
            if self._is_speaker(present):
                talk = self._conversation(seq)
                heard = yield from self._greet(talk, action, len(present))
                for machine in heard:
                    if machine != self._group.machine:
                        talk.say(machine, "whole", flat)
                for machine in heard:
                    if machine != self._group.machine:
                        yield talk.hear(machine, "got")
                yield talk.told()
            return put_back(flat, tensor)
        if self._is_speaker(present):
            talk = self._conversation(seq)
            source = self._group.machine_of(root)
            heard = yield from self._greet(talk, action, len(present))
            if source not in heard or heard[source].detail == _ROOT_IS_GONE:
                raise _has_left(root)
            if (yield talk.hear(source, "whole", flat)) is ABSENT:
                raise self._lost_on(source)
            talk.say(source, "got", torch.zeros(1, dtype=torch.uint8))
            yield talk.told()
        passed_on = self._local.broadcast(flat, present[0])
        yield FREE
        yield _Guarded(self._group, passed_on, seq, present[0])
        return put_back(flat, tensor)

    def barrier(self, seq: int) -> Steps:
        """All have come inside, then everywhere, then all inside know it."""
        present = yield _Inside(self._local.barrier())
        if self._is_speaker(present):
            yield from self._greet(self._conversation(seq), Action.of("barrier"), len(present))
        passed_on = self._local.barrier()
        yield FREE
        yield _Guarded(self._group, passed_on, seq, present[0])

    def all_gather(self, seq: int, tensor: torch.Tensor) -> Steps:
        """The parts of a machine travel as one."""
        tensor = tensor.detach()
        shape = tuple(tensor.shape) if tensor.ndim else (1,)
        mine = _Part(self._mesh.rank, str(tensor.dtype).removeprefix("torch."), shape)
        flat = tensor.contiguous().cpu().reshape(-1)
        parts = yield from self._gather_parts(seq, mine, flat)
        for part, _ in parts:
            if (part.dtype, part.shape[1:]) != (mine.dtype, mine.shape[1:]):
                raise UsageError(
                    f"rank {mine.rank} called all_gather of {mine.dtype}, rows of {list(shape[1:])}, where "
                    f"rank {part.rank} called all_gather of {part.dtype}, rows of {list(part.shape[1:])}.",
                    next_step="let all workers give tensors that differ in their first dimension alone.",
                )
        made = [payload.view(tensor.dtype).view(part.shape) for part, payload in parts]
        return [each.to(tensor.device) for each in made]

    def _gather_parts(self, seq: int, mine: _Part, flat: torch.Tensor, *, is_last: bool = True) -> Steps:
        """Everybody's, by rank: (description, bytes); with `is_last` the lane is free after it."""
        packed = _pack([(mine, flat)])
        # it waits inside for the others: their sizes are needed
        gathered = self._local.all_gather(packed)
        yield _Inside(gathered)
        inside = [entry for blob in gathered.wait() for entry in _unpack(blob)]
        present = [self._mates.index(part.rank) for part, _ in inside]
        outside = torch.empty(0, dtype=torch.uint8)
        if self._is_speaker(present):
            talk = self._conversation(seq)
            blob = _pack(inside)
            heard = yield from self._greet(talk, Action.of("all_gather"), len(present), blob.numel())
            blobs = {}
            for machine, words in heard.items():
                if machine != self._group.machine:
                    talk.say(machine, "whole", blob)
                    blobs[machine] = torch.empty(words.detail, dtype=torch.uint8)
            for machine, theirs in blobs.items():
                if (yield talk.hear(machine, "whole", theirs)) is ABSENT:
                    raise self._lost_on(machine)
            # never nothing, so that its mates know that it has spoken
            outside = torch.cat([torch.zeros(_ALIGNED, dtype=torch.uint8), *blobs.values()])
            yield talk.told()
        passed_on = self._local.all_gather(outside)
        if is_last:
            yield FREE
        yield _Guarded(self._group, passed_on, seq, present[0])
        others = [entry for blob in passed_on.wait() for entry in _unpack(blob[_ALIGNED:])]
        return sorted(inside + others, key=lambda entry: entry[0].rank)

    def exchange(self, seq: int, tensor: torch.Tensor, weights: Weights, out: torch.Tensor | None) -> Steps:
        """Straight from rank to rank; between machines as it is, inside as the machine's group does it."""
        given = tensor if out is None else out
        flat = _flat(tensor)
        mixed = flat if out is None else out.detach().view(-1)
        destinations = weights.destinations
        if destinations is None:
            destinations = yield from self._named_by(seq, weights)
        outside = [rank for rank in destinations if self._group.place_of(rank) is None]
        sources = {
            rank: weight for rank, weight in weights.sources.items() if self._group.place_of(rank) is None
        }
        own = flat
        if out is None and (outside or sources):
            own = flat.clone()  # on its way, or needed for those who are gone, when the result is written
        self._group.remote.note_exchange(seq, outside)
        self._send_to(seq, outside, destinations, own, is_staged=own is not flat)
        coming = {
            rank: (
                _FromRank(self._group, seq, rank, "said"),
                _FromRank(self._group, seq, rank, "x", torch.empty_like(flat)),
            )
            for rank in sorted(sources)
        }
        if out is not None:
            yield Arrived(self.take_sending(span_of(mixed)))
        self._expected[seq] = [step for pair in coming.values() for step in pair]
        inside = None
        if not isinstance(self._local, SoloGroup):
            inside = self._local.exchange(tensor, self._inside(weights), out=out)
        yield FREE
        if inside is not None:
            yield _Inside(inside)
        parts, kept = [], 0.0
        for rank, (said, came) in coming.items():
            heard, theirs = (yield said), (yield came)
            if heard is None or theirs is None:
                kept += sources[rank]
                continue
            Words.heard(heard[8:], Action.on("exchange", flat), self._mesh.rank)
            parts.append((theirs, sources[rank] * float(heard[:8].view(torch.float64))))
        if inside is None:
            mix_into(mixed, own, weights.own + kept, parts)
        elif weights.is_difference:
            add_differences(mixed, own, parts)
        else:
            if kept:
                parts.append((own, kept))
            mix_into(mixed, mixed, 1.0, parts)
        return put_back(mixed, given)

    def exchange_machines(
        self, seq: int, tensor: torch.Tensor, weights: Weights, out: torch.Tensor | None
    ) -> Steps:
        """The mean of each machine travels, once."""
        given = tensor if out is None else out
        if out is not None:
            yield Arrived(self.take_sending(span_of(out)))
            self._local.settle(out)
            out.detach().copy_(tensor.detach())
        flat = _flat(given)
        present = yield _Inside(self._local.all_reduce(flat, "mean"))
        if self._is_speaker(present):
            talk = self._conversation(seq)
            named = sorted(weights.sources)
            heard = yield from self._greet(talk, Action.on("exchange_machines", flat), len(present), named)
            for machine, words in heard.items():
                if machine != self._group.machine and self._group.machine in words.detail:
                    talk.say(machine, "mean", flat)
            coming = {
                machine: talk.hear(machine, "mean", torch.empty_like(flat))
                for machine in named
                if machine in heard
            }
            sources: list[tuple[torch.Tensor, float]] = []
            own = weights.own
            for machine, weight in weights.sources.items():
                came: Any = (yield coming[machine]) if machine in coming else ABSENT
                if came is ABSENT:
                    own += weight
                else:
                    sources.append((came, weight))
            yield talk.told()
            mix_into(flat, flat, own, sources)
        passed_on = self._local.broadcast(flat, present[0])
        yield FREE
        yield _Guarded(self._group, passed_on, seq, present[0])
        return put_back(flat, given)

    def _named_by(self, seq: int, weights: Weights) -> Steps:
        """The ranks that want to receive from this one, where nobody has said so beforehand: factors of 1."""
        named = torch.tensor(list(weights.sources), dtype=torch.int64)
        mine = _Part(self._mesh.rank, "int64", (named.numel(),))
        parts = yield from self._gather_parts(seq, mine, named, is_last=False)
        return {
            part.rank: 1.0
            for part, payload in parts
            if part.rank != self._mesh.rank and self._mesh.rank in payload.view(torch.int64).tolist()
        }

    def _inside(self, weights: Weights) -> Weights:
        """The part of an exchange that stays in this machine, by places."""

        def by_place(factors: Mapping[int, float]) -> dict[int, float]:
            placed = ((self._group.place_of(rank), factor) for rank, factor in factors.items())
            return {place: factor for place, factor in placed if place is not None}

        sends = None if weights.destinations is None else by_place(weights.destinations)
        inside = by_place(weights.sources)
        # differences from oneself: those from members elsewhere are added when they have come
        own = -sum(inside.values()) if weights.is_difference else weights.own
        return Weights(own, inside, sends)

    def _send_to(
        self,
        seq: int,
        ranks: Sequence[int],
        factors: Mapping[int, float],
        own: torch.Tensor,
        *,
        is_staged: bool,
    ) -> None:
        """Start what an exchange sends to other machines."""
        words = Words(Action.on("exchange", own), self._mesh.rank).said()
        for rank in ranks:
            if self._group.is_gone(rank, seq):
                continue
            factor = torch.tensor([factors[rank]], dtype=torch.float64).view(torch.uint8)
            self._mesh.send(rank, (seq, "said", self._mesh.rank), torch.cat([factor, words]))
            sending = self._mesh.send(rank, (seq, "x", self._mesh.rank), own)
            if not is_staged:
                self._sending.append((span_of(own), sending))

    def take_sending(self, span: Span) -> list[MeshHandle[None]]:
        """What is still on its way of some memory that is to be written."""
        self._sending = [entry for entry in self._sending if not entry[1].is_done()]
        return [handle for other, handle in self._sending if is_overlapping([other], [span])]

    def _is_speaker(self, present: Sequence[int]) -> bool:
        return self._mates[present[0]] == self._mesh.rank

    def close_talks(self, seq: int) -> None:
        """An operation is over: what it has asked for, and nobody sent, is forgotten."""
        for talk in self._talks.pop(seq, ()):
            talk.close()
        for step in self._expected.pop(seq, ()):
            step.forget()

    def _conversation(self, seq: int) -> Conversation:
        machine = self._group.machine
        others = [other for other in range(self._group.num_machines) if other != machine]
        talk = Conversation(self._mesh, self._group, seq, machine, others)
        self._talks.setdefault(seq, []).append(talk)
        return talk

    def _greet(self, talk: Conversation, action: Action, num_workers: int, detail: Any = None) -> Steps:
        heard = yield from talk.greet(action, num_workers, detail)
        self._group.tell_mates()
        return heard

    def _lost_on(self, machine: int) -> PeerLost:
        return gone_from(self._group, machine).error()


class _Inside(Step):
    """An operation inside the machine; gives the places of those that took part."""

    def __init__(self, handle: Handle[Any]) -> None:
        self._handle = handle

    def is_done(self) -> bool:
        return self._handle.is_done()

    def result(self) -> Sequence[int]:
        self._handle.wait()
        return getattr(self._handle, "present", (0,))


class _Guarded(_Inside):
    """What the speaker passes on inside the machine: it may be lost, or fail, before it does."""

    def __init__(self, group: TorchGroup, handle: Handle[Any], seq: int, speaker: int) -> None:
        super().__init__(handle)
        self._group = group
        self._seq = seq
        self._speaker = speaker

    def is_done(self) -> bool:
        return super().is_done() or self._error() is not None

    def result(self) -> Sequence[int]:
        if not super().is_done():
            error = self._error()
            assert error is not None
            raise error
        try:
            present = super().result()
        except UsageError:
            if self._speaker in self._group.local.members:
                raise
            present = ()
        if self._speaker not in present:
            # it was lost on the way: whether the others have what it said nobody knows
            raise self._group.mate_error(self._speaker)
        return present

    def _error(self) -> PeerLost | None:
        loss = self._group.first_loss()
        if loss is not None:
            return loss.error()
        return (
            self._group.mate_error(self._speaker)
            if self._group.has_failed(self._speaker, self._seq)
            else None
        )


class _FromRank(Step):
    """What a rank of another machine sends in an exchange; None when it is gone without having done so."""

    def __init__(
        self, group: TorchGroup, seq: int, rank: int, topic: str, into: torch.Tensor | None = None
    ) -> None:
        self._group = group
        self._seq = seq
        self._rank = rank
        self._received = group.mesh.receive(rank, (seq, topic, rank), into)
        self._ask_at_s: float | None = None
        self._asked: MeshHandle[Reply] | None = None

    def is_done(self) -> bool:
        if self._received.is_done() or self._group.is_gone(self._rank, self._seq):
            return True
        return self._is_refused()

    def forget(self) -> None:
        """Nobody waits for it any more."""
        if not self._received.is_done():
            self._group.mesh.forget(self._received)

    def result(self) -> torch.Tensor | None:
        if not self._received.is_done():
            if not self._group.is_gone(self._rank, self._seq):
                raise UsageError(
                    f"rank {self._group.rank} wants to receive from rank {self._rank}, which does not send "
                    "to it.",
                    next_step="let sources and destinations agree; a Topology's weights do.",
                )
            return None
        try:
            return self._received.result()
        except PeerLost:
            return None

    def awaited(self) -> int | None:
        return self._rank

    def _is_refused(self) -> bool:
        """Ask, when it has been long, whether anything will come."""
        now_s = time.monotonic()
        if self._ask_at_s is None:
            self._ask_at_s = now_s + _ASK_AFTER_S
        if self._asked is None:
            if now_s > self._ask_at_s:
                self._asked = self._group.remote.ask_whether_sent(self._seq, self._rank)
            return False
        if not self._asked.is_done():
            return False
        answer = None if self._asked.error is not None else self._asked.result().payload
        if answer is None:
            self._asked, self._ask_at_s = None, now_s + _ASK_AFTER_S
        return answer is False


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """One rank's tensor in a gathering."""

    rank: int
    dtype: str
    shape: tuple[int, ...]


def _pack(entries: Sequence[tuple[_Part, torch.Tensor]]) -> torch.Tensor:
    """Descriptions and contents in one tensor of bytes, each content from a 64-byte boundary on."""
    pieces, at = [], 0
    for part, flat in entries:
        head = msgspec.msgpack.encode(part)
        payload = flat.contiguous().view(torch.uint8)
        start = -(-(at + 16 + len(head)) // _ALIGNED) * _ALIGNED
        lengths = torch.tensor([len(head), payload.numel()], dtype=torch.int64).view(torch.uint8)
        gap = torch.zeros(start - at - 16 - len(head), dtype=torch.uint8)
        rest = torch.zeros(-payload.numel() % _ALIGNED, dtype=torch.uint8)
        pieces += [lengths, torch.frombuffer(bytearray(head), dtype=torch.uint8), gap, payload, rest]
        at = start + payload.numel() + rest.numel()
    return torch.cat(pieces)


def _unpack(blob: torch.Tensor) -> list[tuple[_Part, torch.Tensor]]:
    """The reverse; contents are views."""
    entries, at = [], 0
    while at < blob.numel():
        num_head, num_payload = blob[at : at + 16].clone().view(torch.int64).tolist()
        head = blob[at + 16 : at + 16 + num_head].numpy().tobytes()
        start = -(-(at + 16 + num_head) // _ALIGNED) * _ALIGNED
        entries.append((msgspec.msgpack.decode(head, type=_Part), blob[start : start + num_payload]))
        at = start + -(-num_payload // _ALIGNED) * _ALIGNED
    return entries


def on_host(tensor: torch.Tensor, out: torch.Tensor | None, run: Callable[[torch.Tensor], Steps]) -> Steps:
    """An operation on a device's tensor, by way of the host's memory."""
    staged = tensor.detach().to("cpu", copy=True)
    yield from run(staged)
    given = tensor if out is None else out
    given.detach().copy_(staged)
    return given


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """One dimension, the tensor's own memory where it can be."""
    return tensor.detach().reshape(-1)


def _has_left(root: int) -> UsageError:
    return UsageError(
        f"rank {root}, which should broadcast, has left the group.", next_step="broadcast from a member."
    )


class DeviceOperations:
    """Of one worker.

    torch.distributed cannot go on without a member: `watch(seq)` gives the error of one that is lost, or has
    left before an operation. `gather(seq)` lets all come together before it is brought up, and names the
    lost.
    """

    def __init__(
        self, rank: int, size: int, num_mates: int, backend: str | None, rendezvous: Rendezvous | None
    ) -> None:
        self.watch: Callable[[int], PeerLost | None] = lambda seq: None
        self.gather: Callable[[int], Steps]
        self._rank = rank
        self._size = size
        self._num_mates = num_mates
        """Workers of this machine, which share its devices."""
        self._backend = backend
        self._rendezvous = rendezvous
        self._is_own = False
        self._is_up = False

    @property
    def store(self) -> Any:
        """Shared by all members."""
        return None if self._rendezvous is None else self._rendezvous.store

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor goes this way."""
        return tensor.device.type != "cpu" or self._backend == "gloo"

    def all_reduce(self, seq: int, tensor: torch.Tensor, op: Reduction) -> Steps:
        """In place."""
        yield from self._prepare(seq, tensor)
        flat = tensor.detach().contiguous()
        reducing = dist.all_reduce(flat, _OPS[op], async_op=True)
        yield FREE
        yield self._work(seq, reducing)
        if op == "mean":
            flat.div_(self._size)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat)
        return tensor

    def broadcast(self, seq: int, tensor: torch.Tensor, root: int) -> Steps:
        """In place."""
        yield from self._prepare(seq, tensor)
        flat = tensor.detach().contiguous()
        sending = dist.broadcast(flat, root, async_op=True)
        yield FREE
        yield self._work(seq, sending)
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat)
        return tensor

    def all_gather(self, seq: int, tensor: torch.Tensor) -> Steps:
        """Rows may differ in number: all are filled up to the longest, and cut again."""
        yield from self._prepare(seq, tensor)
        own = tensor.detach().contiguous()
        own = own.view(1) if own.ndim == 0 else own
        rows = torch.zeros(self._size, dtype=torch.int64, device=tensor.device)
        rows[self._rank] = own.shape[0]
        yield self._work(seq, dist.all_reduce(rows, async_op=True))
        counts = rows.tolist()
        longest = max(counts)
        padded = own.new_zeros((longest, *own.shape[1:]))
        padded[: own.shape[0]] = own
        parts = [torch.empty_like(padded) for _ in counts]
        gathering = dist.all_gather(parts, padded, async_op=True)
        yield FREE  # the lane is kept until the last is issued: all ranks must do so in the same order
        yield self._work(seq, gathering)
        return [part[:count].clone() for part, count in zip(parts, counts, strict=True)]

    def close(self) -> None:
        """Take torch.distributed down if it was brought up here."""
        if self._is_own and dist.is_initialized():
            destroy_world()
        self._is_own = self._is_up = False

    def abandon(self) -> None:
        """The same without waiting for the others."""
        if self._is_own and dist.is_initialized():
            abort = getattr(dist.group.WORLD, "abort", None)
            if abort is not None:
                abort()
        self._is_own = self._is_up = False

    def _prepare(self, seq: int, tensor: torch.Tensor) -> Steps:
        gone = self.watch(seq)
        if gone is not None:
            raise gone
        if not self._is_up:
            yield from self.gather(seq)
            self._bring_up(tensor)

    def _bring_up(self, tensor: torch.Tensor) -> None:
        if self._is_up:
            return
        if dist.is_initialized():
            if (dist.get_rank(), dist.get_world_size()) != (self._rank, self._size):
                raise UsageError(
                    f"rank {self._rank} of {self._size} is rank {dist.get_rank()} of "
                    f"{dist.get_world_size()} in torch.distributed.",
                    next_step="let the group and torch.distributed have the same ranks.",
                )
            self._is_up = True
            return
        backend = self._backend or ("nccl" if dist.is_nccl_available() else "gloo")
        if backend == "nccl" and self._num_mates > torch.cuda.device_count():
            if self._backend is not None:
                raise UsageError(
                    f"NCCL wants a device for each worker; {self._num_mates} workers of this machine have "
                    f"{torch.cuda.device_count()}.",
                    next_step='start fewer workers, or let them share one: shoal.init(backend="gloo").',
                )
            backend = "gloo"
        if tensor.device.type == "cuda":
            torch.cuda.set_device(tensor.device)
        dist.init_process_group(
            backend, store=self.store, rank=self._rank, world_size=self._size, timeout=_FOREVER
        )
        self._is_up = self._is_own = True

    def _work(self, seq: int, work: Any) -> Step:
        return _Work(work, lambda: self.watch(seq))


class _Work(Step):
    """What torch has under way."""

    def __init__(self, work: Any, watch: Callable[[], PeerLost | None]) -> None:
        self._work = work
        self._watch = watch

    def is_done(self) -> bool:
        return bool(self._work.is_completed()) or self._watch() is not None

    def result(self) -> None:
        if not self._work.is_completed():
            lost = self._watch()
            if lost is not None:
                raise lost
        try:
            self._work.wait()
        except RuntimeError as error:
            lost = self._watch()
            if lost is not None:
                raise lost from None
            raise PeerLost(f"torch.distributed failed: {error}.", cause="a worker has ended.") from None


def destroy_world() -> None:
    """As torch's `destroy_process_group`, without the deadlock that this can be.

    When the last reference to a process group goes, torch waits for gloo's threads, and holds the
    interpreter's lock meanwhile, for which a thread may wait that has just done its last operation. So a
    group is let go of only when others have come after it.
    """
    _ended.append(dist.group.WORLD)
    dist.destroy_process_group()
