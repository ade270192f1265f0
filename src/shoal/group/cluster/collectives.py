"""What each collective of a group over several machines does, step by step, as the operation queue drives it.

Everything begins inside the machine, by the machine's own group, on a GPU's memory too. Then one worker of
each machine exchanges tensors with the others (`machine_exchange`), those of a GPU through pinned memory of
the host (`HostStaging`), and passes the result on.

GPU tensors go through NCCL instead where each worker of the group has a GPU of its own, and all tensors
through torch.distributed where its gloo backend was asked for (`torch_world`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from shoal.core import PeerLost, ShoalError, UsageError
from shoal.group.base import PENDING, Done, Handle, Reduction, absent_root, mismatch
from shoal.group.cluster.links import MeshHandle
from shoal.group.cluster.machine_exchange import (
    ABSENT,
    FREE,
    SMALL_BYTES,
    Algorithm,
    AlgorithmChoice,
    Handover,
    MachineExchange,
    MachineGreeting,
    MachineReduction,
    PendingStep,
    Steps,
    arrived,
    as_bytes,
    describe,
    until,
)
from shoal.group.cluster.members import Members
from shoal.group.cluster.mesh import Mesh, poll_until
from shoal.group.cluster.rendezvous import host_id
from shoal.group.cluster.torch_world import TorchOperations
from shoal.group.host import HostGroup
from shoal.group.host.engine import Span, is_overlapping, put_back, span_of
from shoal.group.kernels import add_differences, mix_into, reduce_into
from shoal.group.solo import SoloGroup
from shoal.tensors.dtypes import DTYPES, dtype_name
from shoal.topology import Weights
from shoal.transport import Head, Reply

_ALIGNED = 64
_ASK_AFTER_S = 1.0
_SENDS = "group.sends"
_REMEMBERED = 64
PIECE_BYTES = 16 << 20
"""A network of 10 Gbit/s carries it in 13 ms, so that delays do not count, and a bus of 10 GB/s in 2 ms."""
_EXCHANGED_BYTES = 4 << 20
"""A piece of an exchange: the processor's cache may still hold it when it is mixed."""
_EARLY_BYTES = 4 << 20
"""Up to this size a tensor is sent before it is known that all machines have come to the operation."""


class Collectives:
    """Makes the steps of one worker's operations; `seq` is the number of each."""

    def __init__(
        self,
        local: HostGroup | SoloGroup,
        mesh: Mesh,
        members: Members,
        staging: HostStaging,
        through_torch: TorchOperations,
        choice: AlgorithmChoice,
    ) -> None:
        self._local = local
        self._mesh = mesh
        self._members = members
        self._ranks_here = members.ranks_here
        self._staging = staging
        self._torch = through_torch
        self._choice = choice
        self._handover = Handover(local, mesh, members)
        self._sending: list[tuple[Span, MeshHandle[None]]] = []
        """Memory that is on its way to other machines."""
        self._called: dict[int, str | Collection[int]] = {}
        """The last operations by number: to whom this worker has sent in an exchange, else the name."""
        self._forgotten = 0
        """The last operation that is not there any more."""
        mesh.handle(_SENDS, self._serve_sends, payload_type=int)

    def begin(self, seq: int, what: str, *arguments: Any) -> Steps:
        """Makes the steps of an operation, by its name."""
        if what != "exchange":
            self._note(seq, what)
        steps: Steps = getattr(self, what)(seq, *arguments)
        return steps

    def all_reduce(self, seq: int, tensor: torch.Tensor, op: Reduction) -> Steps:
        """Reduces inside each machine, then between machines, and passes the result on inside."""
        if (yield from self._is_for_torch(seq, tensor)):
            return (yield from self._torch.all_reduce(seq, tensor, op))
        flat = _flat(tensor)
        present = yield from _inside(self._local.all_reduce(flat, op))
        if self._local.should_survive:
            host = yield from self._staging.to_host(flat)

            def work(between: MachineExchange) -> Steps:
                result = self._handover.empty_like(host)
                machines = yield from self._reduce_machines(between, host, op, result)
                return as_bytes(result), machines

            content = yield from self._handover.outlive(seq, "", present, work)
            yield self._staging.copy(flat, content.view(flat.dtype))
            return put_back(flat, tensor)
        if self._is_leader(present):
            yield from self._reduce_machines(self._between(seq, present), flat, op, flat)
        yield from self._pass_on(seq, present[0], self._local.broadcast(flat, present[0]))
        return put_back(flat, tensor)

    def _reduce_machines(
        self, between: MachineExchange, flat: torch.Tensor, op: Reduction, out: torch.Tensor
    ) -> Steps:
        """Reduces this machine's tensor and those of others into `out`; gives the machines that took part.

        A mean is one over machines; where these have unequal numbers of workers, each is scaled before. What
        is small comes with the greetings. For what is larger all is prepared before them, on assumptions that
        nearly always hold, so that what comes finds its place; what is not large is sent right behind them.
        Where not all machines have assumed the same, they begin anew with what they have heard.
        """
        is_in_place, is_staged = out is flat, self._staging.takes(flat)
        is_small = flat.nbytes <= SMALL_BYTES and not is_staged
        content = flat.contiguous().view(torch.uint8).numpy().tobytes() if is_small and flat.numel() else b""
        algorithm: Algorithm = "direct"
        following: Algorithm = "direct"
        if is_in_place:
            algorithm, following = self._choice.plan(flat, len(self._members.ranks_on))
        there = between.find_machines()
        assumed = [there, len(between.workers) if op == "mean" else 0, algorithm]
        reduction: MachineReduction | None = None
        if len(there) > 1 and not is_small and not is_staged:
            reduction = MachineReduction(between, there, algorithm, op, flat, out, str(assumed))
        between.announce(describe("all_reduce", flat, op), [assumed, following], content)
        is_early = algorithm == "direct" and flat.nbytes <= _EARLY_BYTES
        if reduction is not None and is_early:
            reduction.start()
        heard = yield from between.hear_greetings()
        machines, total = list(heard), sum(len(greeting.workers) for greeting in heard.values())
        factors = [
            len(greeting.workers) * len(machines) / total if op == "mean" else 1.0
            for greeting in heard.values()
        ]
        is_even = all(factor == 1 for factor in factors)
        if len(machines) == 1 or not flat.numel():
            if not is_in_place:
                out.copy_(flat)
        elif is_small:
            came = [bytearray(greeting.content) for greeting in heard.values()]
            parts = [torch.frombuffer(content, dtype=flat.dtype) for content in came]
            for part, factor in zip(parts, factors, strict=True):
                if not is_even:
                    part.mul_(factor)
            reduce_into(out, parts, op)
        elif (
            reduction is not None
            and machines == there
            and all(each.detail[0] == assumed for each in heard.values())
        ):
            began_s = time.perf_counter()
            if not is_early:
                reduction.start()
            yield from between.finish(reduction)
            self._choice.note(flat, algorithm, time.perf_counter() - began_s)
        else:
            if not is_even:
                scaled = flat * factors[machines.index(between.machine)]
                flat = flat.copy_(scaled) if is_in_place else scaled

            def reduce(number: int, piece: torch.Tensor) -> Steps:
                result = piece if is_in_place else out
                anew = MachineReduction(between, machines, "direct", op, piece, result, str(number))
                anew.start()
                yield from between.finish(anew)

            yield from self._staging.in_pieces(flat, reduce)
        if is_in_place:
            self._choice.tell(flat, heard[machines[0]].detail[1])
        return machines

    def broadcast(self, seq: int, tensor: torch.Tensor, root: int) -> Steps:
        """Sends to one worker of each other machine, which passes it on."""
        if (yield from self._is_for_torch(seq, tensor)):
            return (yield from self._torch.broadcast(seq, tensor, root))
        flat = _flat(tensor)
        present = yield from _inside(self._local.barrier())
        is_leader, place = self._is_leader(present), self._members.place_of(root)
        if place is not None and place in present:
            passed_on = self._local.broadcast(flat, place)
            if not is_leader:
                yield FREE
            yield passed_on
        if is_leader:
            yield from self._broadcast_machines(self._between(seq, present), flat, root, place in present)
        if place is None:
            yield from self._pass_on(seq, present[0], self._local.broadcast(flat, present[0]))
        elif place not in present:
            raise absent_root(root)
        return put_back(flat, tensor)

    def _broadcast_machines(
        self, between: MachineExchange, flat: torch.Tensor, root: int, has_root: bool
    ) -> Steps:
        """Sends a broadcast's tensor to all other machines, or receives it."""
        source = self._members.machines[root]
        heard = yield from between.greet(describe("broadcast", flat, f"root {root}"), has_root)
        if source not in heard or not heard[source].detail:
            raise absent_root(root)
        others = [machine for machine in heard if machine != between.machine]

        def send(number: int, piece: torch.Tensor) -> Steps:
            for machine in others:
                between.say(machine, f"whole {number}", piece)
            yield between.told()

        def receive(number: int, piece: torch.Tensor) -> Steps:
            yield between.hear(source, f"whole {number}", piece, is_required=True)

        if has_root and others:
            yield from self._staging.in_pieces(flat, send, should_write=False)
            for machine in others:
                yield between.hear(machine, "got")
        elif not has_root:
            yield from self._staging.in_pieces(flat, receive, should_read=False)
            between.say(source, "got", torch.zeros(1, dtype=torch.uint8))
            yield between.told()

    def barrier(self, seq: int, name: str = "", *, is_last: bool = True) -> Steps:
        """Lets all come inside, then everywhere, and then all inside know it."""
        present = yield from _inside(self._local.barrier())
        if self._local.should_survive:

            def work(between: MachineExchange) -> Steps:
                heard = yield from between.greet(describe("barrier"))
                return torch.zeros(1, dtype=torch.uint8), list(heard)

            yield from self._handover.outlive(seq, name, present, work)
            return
        if self._is_leader(present):
            yield from self._between(seq, present, name).greet(describe("barrier"))
        yield from self._pass_on(seq, present[0], self._local.barrier(), is_last=is_last)

    def all_gather(self, seq: int, tensor: torch.Tensor) -> Steps:
        """Collects the tensors of a machine, which travel as one, in the host's memory."""
        tensor = tensor.detach()
        if (yield from self._is_for_torch(seq, tensor)):
            return (yield from self._torch.all_gather(seq, tensor))
        flat = yield from self._staging.to_host(tensor.contiguous().reshape(-1))
        mine = flat.view(tensor.shape or (1,))
        parts = yield from self._gather(seq, mine)
        for rank, theirs in parts:
            if (theirs.dtype, theirs.shape[1:]) != (mine.dtype, mine.shape[1:]):
                raise UsageError(
                    f"rank {self._mesh.rank} called all_gather of {_rows(mine)}, where rank {rank} called "
                    f"all_gather of {_rows(theirs)}.",
                    next_step="let all workers give tensors that differ in their first dimension alone.",
                )
        return [theirs.to(tensor.device, non_blocking=True) for _, theirs in parts]

    def exchange(self, seq: int, tensor: torch.Tensor, weights: Weights, out: torch.Tensor | None) -> Steps:
        """Goes straight from rank to rank; inside the machine its own group does it."""
        given = tensor if out is None else out
        flat = _flat(tensor)
        mixed = flat if out is None else out.detach().view(-1)
        destinations = weights.destinations
        if destinations is None:  # those that name this rank as a source
            named = torch.tensor(list(weights.sources), dtype=torch.int64)
            everybody = yield from self._gather(seq, named, is_last=False)
            destinations = {rank: 1.0 for rank, theirs in everybody if self._mesh.rank in theirs.tolist()}
        place_of = self._members.place_of
        outside = [rank for rank in destinations if place_of(rank) is None]
        sources = {rank: weight for rank, weight in weights.sources.items() if place_of(rank) is None}
        own = flat
        if out is None and (outside or sources):
            own = flat.clone()  # on its way, or needed for those who are gone, when the result is written
        self._note(seq, outside)
        host = (yield from self._staging.to_host(own)) if outside else own
        places = self._staging.places(flat)
        for rank in outside:
            if not self._members.is_gone(rank, seq):
                said = MachineGreeting(describe("exchange", flat), self._mesh.rank, detail=destinations[rank])
                self._mesh.send(rank, (seq, "said", self._mesh.rank), said.encode())
                for number, place in enumerate(places):
                    key = (seq, f"x {number}", self._mesh.rank)
                    sending = self._mesh.send(rank, key, host[place], is_bounded=True)
                    if host is flat:
                        self._sending.append((span_of(host[place]), sending))
        coming = {rank: self._from_rank(seq, rank, flat, places) for rank in sorted(sources)}
        if out is not None:
            yield arrived(self.sending_of(mixed))
        inside = None
        if len(self._ranks_here) > 1:
            inside = self._local.exchange(tensor, self._inside_weights(weights), out=out)
        yield FREE
        if inside is not None:
            yield inside
        factors, kept = {}, 0.0
        for rank, (said_by, *_) in coming.items():
            came = yield said_by
            if came is None:
                kept += sources[rank]
                continue
            heard = MachineGreeting.decode(came, describe("exchange", flat), self._mesh.rank)
            factors[rank] = sources[rank] * heard.detail
        parts: dict[int, list[torch.Tensor]] = {rank: [] for rank in factors}
        # One source's pieces are mixed while the next ones come: should it be lost before the last, all is
        # computed anew from one's own values, which are still there, and `out` is nobody's parameters yet.
        is_mixed_early = inside is None and out is not None and not kept and len(parts) == 1
        for number, place in enumerate(places):
            for rank in list(parts):
                came = yield coming[rank][1 + number]
                if came is None:
                    del parts[rank]
                    kept += sources[rank]
                    continue
                piece = came.view(flat.dtype).to(flat.device, non_blocking=True)
                parts[rank].append(piece)
                if is_mixed_early:
                    mix_into(mixed[place], own[place], weights.own, [(piece, factors[rank])])
        if is_mixed_early and parts:
            return put_back(mixed, given)
        for number, place in enumerate(places):
            theirs = [(pieces[number], factors[rank]) for rank, pieces in parts.items()]
            if inside is None:
                mix_into(mixed[place], own[place], weights.own + kept, theirs)
            elif weights.is_difference:
                add_differences(mixed[place], own[place], theirs)
            else:
                if kept:
                    theirs.append((own[place], kept))
                mix_into(mixed[place], mixed[place], 1.0, theirs)
        return put_back(mixed, given)

    def exchange_machines(
        self, seq: int, tensor: torch.Tensor, weights: Weights, out: torch.Tensor | None
    ) -> Steps:
        """Averages inside each machine, and lets one worker of each exchange the averages."""
        given = tensor if out is None else out
        if out is not None:
            yield arrived(self.sending_of(out))
            self._local.settle(out)
            out.detach().copy_(tensor.detach())
        flat = _flat(given)
        present = yield from _inside(self._local.all_reduce(flat, "mean"))
        if self._is_leader(present):
            yield from self._mix_machines(self._between(seq, present), flat, weights)
        yield from self._pass_on(seq, present[0], self._local.broadcast(flat, present[0]))
        return put_back(flat, given)

    def _mix_machines(self, between: MachineExchange, flat: torch.Tensor, weights: Weights) -> Steps:
        """Takes the weighted average of this machine's tensor and those of other machines, in place."""
        machine, named = between.machine, sorted(weights.sources)
        heard = yield from between.greet(describe("exchange_machines", flat), named)
        wanted_by = [other for other in heard if other != machine and machine in heard[other].detail]
        coming = {
            other: between.hear(other, "mean", self._staging.pinned(flat))
            for other in named
            if other in heard
        }
        if wanted_by:
            host = yield from self._staging.to_host(flat)
            for other in wanted_by:
                between.say(other, "mean", host)
        parts: list[tuple[torch.Tensor, float]] = []
        own = weights.own
        for other, weight in weights.sources.items():
            came: Any = (yield coming[other]) if other in coming else ABSENT
            if came is ABSENT:
                own += weight
            else:
                parts.append((came.view(flat.dtype).to(flat.device, non_blocking=True), weight))
        yield between.told()
        mix_into(flat, flat, own, parts)

    # --- parts of them ---

    def _gather(self, seq: int, mine: torch.Tensor, *, name: str = "", is_last: bool = True) -> Steps:
        """Gives everybody's tensor of the host with its rank; with `is_last` the queue is free after it."""
        gathered = self._local.all_gather(_pack([(self._mesh.rank, mine)]))
        yield gathered
        inside = [part for blob in gathered.wait() for part in _unpack(blob)]
        present = [self._ranks_here.index(rank) for rank, _ in inside]
        if self._local.should_survive:

            def work(between: MachineExchange) -> Steps:
                parts, machines = yield from self._gather_machines(between, inside)
                return _pack(sorted(inside + parts, key=lambda part: part[0])), machines

            return _unpack((yield from self._handover.outlive(seq, name, present, work)))
        outside = torch.empty(0, dtype=torch.uint8)
        if self._is_leader(present):
            others, _ = yield from self._gather_machines(self._between(seq, present, name), inside)
            outside = _pack(others)
        passed_on = self._local.all_gather(outside)
        yield from self._pass_on(seq, present[0], passed_on, is_last=is_last)
        # the leader alone has something to pass on, if only that there is nothing
        others = [part for blob in passed_on.wait() if blob.numel() for part in _unpack(blob)]
        return sorted(inside + others, key=lambda part: part[0])

    def _gather_machines(self, between: MachineExchange, inside: list[tuple[int, torch.Tensor]]) -> Steps:
        """Gives the tensors of other machines with their ranks, and the machines that took part."""
        blob = _pack(inside)
        heard = yield from between.greet(describe("all_gather"), blob.numel())
        blobs = []
        for machine, greeting in heard.items():
            if machine != between.machine:
                between.say(machine, "whole", blob)
                theirs = torch.empty(greeting.detail, dtype=torch.uint8)
                blobs.append(between.hear(machine, "whole", theirs, is_required=True))
        others = []
        for each in blobs:
            others += _unpack((yield each))
        yield between.told()
        return others, list(heard)

    def _is_for_torch(self, seq: int, tensor: torch.Tensor) -> Steps:
        """Tells whether a collective goes through torch.distributed; all members find the same.

        Whether each of them has a GPU of its own is asked once, when the first GPU tensor comes.
        """
        if self._torch.is_wanted is None and tensor.is_cuda:
            name = torch.frombuffer(bytearray(self._own_gpu(tensor).encode()), dtype=torch.uint8)
            parts = yield from self._gather(seq, name, name="gpu ", is_last=False)
            self._torch.choose([theirs.numpy().tobytes() for _, theirs in parts])
        if not self._torch.takes(tensor):
            return False
        absent = self._members.error_of_absence(seq)
        if absent is not None:
            raise absent
        if not self._torch.is_up:
            yield from self.barrier(seq, "torch ", is_last=False)  # torch could not say who is missing
            self._torch.bring_up(tensor)
        return True

    def _own_gpu(self, tensor: torch.Tensor) -> str:
        """Names the GPU of a tensor among those of all machines; "-" where NCCL cannot be used."""
        if self._local.should_survive or not dist.is_nccl_available():
            return "-"
        return f"{host_id()} {torch.cuda.get_device_properties(tensor.device).uuid}"

    def _inside_weights(self, weights: Weights) -> Weights:
        """Gives the part of an exchange that stays in this machine, by places."""

        def by_place(factors: Mapping[int, float]) -> dict[int, float]:
            placed = ((self._members.place_of(rank), factor) for rank, factor in factors.items())
            return {place: factor for place, factor in placed if place is not None}

        sends = None if weights.destinations is None else by_place(weights.destinations)
        inside = by_place(weights.sources)
        # differences from oneself: those from members elsewhere are added when they have come
        own = -sum(inside.values()) if weights.is_difference else weights.own
        return Weights(own, inside, sends)

    def sending_of(self, tensor: torch.Tensor) -> list[MeshHandle[None]]:
        """Lists what is still on its way of some memory that is to be written."""
        self._sending = [entry for entry in self._sending if not entry[1].is_done()]
        span = span_of(tensor)
        return [handle for other, handle in self._sending if is_overlapping([other], [span])]

    async def _serve_sends(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """Tells another worker, once it is known, whether this one sends to it in an exchange.

        Where it does something else, what that is; None where it cannot say any more.
        """
        seq = head.payload
        await poll_until(lambda: seq in self._called or seq <= self._forgotten)
        called = self._called.get(seq)
        if called is None or isinstance(called, str):
            return Reply(called)
        return Reply(self._mesh.monitor.rank_of(head) in called)

    def _note(self, seq: int, called: str | Collection[int]) -> None:
        self._called[seq] = called
        self._forgotten = max(self._forgotten, seq - _REMEMBERED)
        self._called.pop(self._forgotten, None)

    def _is_leader(self, present: Sequence[int]) -> bool:
        return self._ranks_here[present[0]] == self._mesh.rank

    def _between(self, seq: int, present: Sequence[int], name: str = "") -> MachineExchange:
        return MachineExchange(self._mesh, self._members, seq, present, name)

    def _pass_on(self, seq: int, leader: int, handle: Handle[Any], *, is_last: bool = True) -> Steps:
        """Waits for the operation's last step inside the machine, where the leader gives the result."""
        members = self._members

        def look() -> Any:
            # the leader may be lost, or fail, before it has passed anything on
            if not handle.is_done():
                loss, has_failed = members.first_loss(), members.has_failed(leader, seq)
                if (loss is None and not has_failed) or handle.is_done():
                    return PENDING
                raise members.failure_of(leader) if loss is None else loss.error()
            # without the leader it was lost on the way: whether the others have what it said nobody knows
            try:
                handle.wait()
            except UsageError:
                if leader in self._local.members:
                    raise
                raise members.failure_of(leader) from None
            if leader not in getattr(handle, "present", (0,)):
                raise members.failure_of(leader)
            return None

        if is_last:
            yield FREE
        yield PendingStep(look)

    def _from_rank(
        self, seq: int, rank: int, like: torch.Tensor, places: Sequence[slice]
    ) -> list[PendingStep]:
        """Waits for what a rank sends in an exchange: a greeting, then its pieces; None when it is gone."""
        receives = [self._mesh.receive(rank, (seq, "said", rank))]
        pinned = self._staging.pinned(like)
        for number, place in enumerate(places):
            into = None if pinned is None else pinned[place]
            receives.append(self._mesh.receive(rank, (seq, f"x {number}", rank), into))
        ask_at_s = time.monotonic() + _ASK_AFTER_S
        asked: MeshHandle[Reply] | None = None

        def ask() -> Any:
            """Asks, when it has been long, if anything will come: True, False, or what is called instead."""
            nonlocal asked
            if asked is None and time.monotonic() > ask_at_s:
                asked = self._mesh.call(rank, _SENDS, seq)
            with contextlib.suppress(ShoalError):
                return asked.wait().payload if asked is not None and asked.is_done() else None
            return None

        def look(received: Handle[torch.Tensor | None]) -> Any:
            if not received.is_done() and not self._members.is_gone(rank, seq):
                answer = ask()
                if received.is_done() or answer in (None, True):
                    return PENDING
                if isinstance(answer, str):
                    raise mismatch(self._mesh.rank, "exchange", rank, answer)
                raise UsageError(
                    f"rank {self._mesh.rank} wants to receive from rank {rank}, which does not send to it.",
                    next_step="let sources and destinations agree; a Topology's weights do.",
                )
            if received.is_done():
                with contextlib.suppress(PeerLost):
                    return received.wait()
            return None

        return [PendingStep(partial(look, received), lambda: rank) for received in receives]


def _inside(handle: Handle[Any]) -> Steps:
    """Waits for a step inside the machine, and gives the places of those that took part."""
    yield handle
    return getattr(handle, "present", (0,))  # one that is alone there has no handle that could tell


def _pack(parts: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Puts tensors and their ranks in one tensor of bytes, each tensor from a 64-byte boundary on."""
    kinds = [(rank, dtype_name(tensor.dtype), list(tensor.shape)) for rank, tensor in parts]
    head = msgspec.msgpack.encode(kinds)
    head = len(head).to_bytes(8, "little") + head
    contents = [torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    contents += [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in parts]
    gaps = [torch.zeros(_aligned(each.numel()) - each.numel(), dtype=torch.uint8) for each in contents]
    return torch.cat([each for pair in zip(contents, gaps, strict=True) for each in pair])


def _unpack(blob: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Does the reverse; the tensors are views."""
    end = 8 + int.from_bytes(blob[:8].numpy().tobytes(), "little")
    kinds = msgspec.msgpack.decode(blob[8:end].numpy().tobytes(), type=list[tuple[int, str, list[int]]])
    parts, at = [], _aligned(end)
    for rank, name, shape in kinds:
        dtype = DTYPES[name]
        size_bytes = math.prod(shape) * dtype.itemsize
        parts.append((rank, blob[at : at + size_bytes].view(dtype).view(shape)))
        at += _aligned(size_bytes)
    return parts


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _rows(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}, rows of {list(tensor.shape[1:])}"


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Gives one dimension, of the tensor's own memory where it can be."""
    return tensor.detach().reshape(-1)


class HostStaging:
    """Copies between the memory of a GPU and that of the host; tests give another `takes`."""

    def __init__(
        self,
        takes: Callable[[torch.Tensor], bool] = lambda tensor: tensor.device.type != "cpu",
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.takes = takes
        """Tells which tensors must pass through the host's memory."""
        self._piece_bytes = piece_bytes
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Makes memory of the host for a flat tensor; torch keeps pinned memory for the next one."""
        return torch.empty(like.numel(), dtype=like.dtype, pin_memory=like.is_cuda)

    def pinned(self, like: torch.Tensor) -> torch.Tensor | None:
        """Makes memory for what comes to a GPU; None for the CPU, to which it comes in memory used again."""
        return self.buffer(like) if like.is_cuda else None

    def places(self, flat: torch.Tensor) -> list[slice]:
        """Cuts a tensor into the pieces in which it travels in an exchange, alike on all machines."""
        step = max(1, _EXCHANGED_BYTES // flat.element_size())
        return [slice(start, start + step) for start in range(0, max(1, flat.numel()), step)]

    def copy(self, out: torch.Tensor, source: torch.Tensor) -> Handle[None]:
        """Begins to copy in the current stream; done when the host may use both."""
        device = out.device if out.is_cuda else source.device
        if device.type != "cuda":
            out.copy_(source)
            return Done(None)
        out.copy_(source, non_blocking=True)
        return until(torch.cuda.current_stream(device).record_event().query)

    def to_host(self, flat: torch.Tensor) -> Steps:
        """Gives the tensor itself if it is in the host's memory, else a copy there."""
        if not self.takes(flat):
            return flat
        host = self.buffer(flat)
        yield self.copy(host, flat)
        return host

    def in_pieces(
        self,
        flat: torch.Tensor,
        work: Callable[[int, torch.Tensor], Steps],
        *,
        should_read: bool = True,
        should_write: bool = True,
    ) -> Steps:
        """Does `work(number, piece)` in the host's memory, piece by piece, and copies in and out around it.

        A piece's memory must not be in use any more when its work is over.
        """
        if not self.takes(flat):
            yield from work(0, flat)
            return
        parts = torch.split(flat, max(1, self._piece_bytes // flat.element_size()))
        buffers = [self.buffer(part) for part in parts[:2]]
        pieces = [buffers[index % 2][: part.numel()] for index, part in enumerate(parts)]
        # copies follow each other in their stream: one into a buffer comes after the one out of it before
        copied: list[Handle[None]] = [Done(None), Done(None)]
        if should_read:
            copied[0] = self.copy(pieces[0], parts[0])
        for index, part in enumerate(parts):
            yield copied[index % 2]
            if should_read and index + 1 < len(parts):
                copied[(index + 1) % 2] = self.copy(pieces[index + 1], parts[index + 1])
            yield from work(index, pieces[index])
            if should_write:
                copied[index % 2] = self.copy(part, pieces[index])

    def stream_of(self, tensors: Sequence[torch.Tensor]) -> torch.cuda.Stream | None:
        """Gives the stream in which an operation on these tensors runs; None unless they are of a GPU."""
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if device is not None and device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return None if device is None else self._streams[device]
