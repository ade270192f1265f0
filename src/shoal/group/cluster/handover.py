"""How an operation outlives the worker that speaks for its machine, where losses are to be outlived.

The workers of a machine all have what their machine gives, and leave it as it is until the operation is over.
One of them, the speaker, gets the result from the other machines, out of place, and hands it out. When it is
lost before, the next one speaks. The operation between machines is an *attempt*, named after the ranks that
were lost when it began; when another rank is lost, all give it up and begin anew without that rank.

All who are left must end with the same result. So a machine uses a result only when all machines have said
that they have it, too, or when it has it and one of the others is lost. Whoever begins anew asks all others
first: one that has a result gives it, also long after it has gone on; one that has none promises not to use
one of that attempt any more. If nobody has one, nobody has used one. The last result is kept for this until
the next operation is over, in which all machines have taken part.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence

import torch

from shoal.core import PeerLost, ShoalError, UsageError
from shoal.group.cluster.links import flat_bytes, view_of
from shoal.group.cluster.machine_exchange import LostMeanwhile, MachineExchange, Steps, until
from shoal.group.cluster.members import Members
from shoal.group.cluster.mesh import Mesh, poll_until
from shoal.group.host import HostGroup
from shoal.group.solo import SoloGroup
from shoal.tensors.memory import tensor_over
from shoal.transport import BufferPool, Head, Reply

_RESULT = "group.result"
Attempt = frozenset[int]
Step = tuple[int, str]
"""The number of an operation, and the name of one of its parts."""


class Handover:
    """Does one worker's part of operations that outlive the loss of any worker of the group."""

    def __init__(self, local: HostGroup | SoloGroup, mesh: Mesh, members: Members) -> None:
        self._local = local
        self._mesh = mesh
        self._members = members
        self._pool = BufferPool()
        self._results: dict[Step, torch.Tensor] = {}
        """The results that others may ask for."""
        self._void: dict[Step, Attempt] = {}
        """Losses that an attempt at an operation must know of, so that its result may be used."""
        self._awaited: dict[Step, int] = {}
        """The place of who is to hand out a result to this worker."""
        self._lock = threading.Lock()  # law: of both maps, between the caller's thread and the mesh's loop
        mesh.handle(_RESULT, self._serve_result, payload_type=tuple[int, str, list[int]])

    def empty_like(self, flat: torch.Tensor) -> torch.Tensor:
        """Makes memory of the host for a result; it is used again when nobody needs it any more."""
        if not flat.numel():
            return torch.empty(0, dtype=flat.dtype)
        return tensor_over(self._pool.allocate(flat.nbytes)).view(flat.dtype)

    def outlive(
        self, seq: int, name: str, present: Sequence[int], work: Callable[[MachineExchange], Steps]
    ) -> Steps:
        """Gives all workers of this machine what `work` returns to the one that speaks: bytes.

        `present` are the places of those that have what the machine gives. `work` gives the result and the
        machines that took part; it is done again when somebody is lost.
        """
        step = (seq, name)
        for speaker in present:
            result = None
            is_speaker = self._members.mates[speaker] == self._members.rank
            if is_speaker:
                result = yield from self._agree(step, present, work, is_successor=speaker != present[0])
            elif len(self._members.mates) > 1:
                self._awaited[step] = speaker
            if len(self._members.mates) > 1:
                result = yield from self._hand_out(speaker, result)
            if result is not None:
                self._keep(step, result)
                return result
            self._awaited.pop(step, None)
        raise UsageError("nobody is left to speak for this machine.")  # this worker is

    # --- between machines ---

    def _agree(
        self,
        step: Step,
        present: Sequence[int],
        work: Callable[[MachineExchange], Steps],
        *,
        is_successor: bool,
    ) -> Steps:
        """Makes attempts until this machine has the result that all others have."""
        (seq, name), should_ask = step, is_successor
        while True:
            yield until(lambda: not self._members.is_undecided(seq))
            if self._members.judge_split(seq):
                assert self._members.split is not None
                raise self._members.split
            lost = frozenset(self._members.lost)
            if should_ask and (found := (yield from self._ask(step, lost))) is not None:
                return found
            should_ask = True
            attempt = f"{name}{sorted(lost)} "
            between = MachineExchange(self._mesh, self._members, seq, present, attempt, lost)
            with contextlib.suppress(LostMeanwhile):
                result, machines = yield from work(between)
                if not self._may_use(step, lost, result):
                    yield until(between.is_void)
                    continue
                with contextlib.suppress(LostMeanwhile):  # whoever does not have the result asks for it
                    yield from between.agree(machines)
                return result

    def _ask(self, step: Step, lost: Attempt) -> Steps:
        """Asks all workers of other machines for the result of an earlier attempt; None when none has it.

        PeerLost when one has left that took part: it may have used a result that nobody else has.
        """
        (seq, name), members = step, self._members
        others = [
            rank
            for rank in range(members.size)
            if members.place_of(rank) is None and not members.is_gone(rank, seq)
        ]
        came: dict[int, torch.Tensor] = {}

        def allocate(rank: int) -> Callable[[Head], list[memoryview]]:
            def place(head: Head) -> list[memoryview]:
                came[rank] = torch.empty(head.total_bytes, dtype=torch.uint8)
                return [view_of(came[rank])] if head.total_bytes else []

            return place

        asked = {
            rank: self._mesh.call(rank, _RESULT, (seq, name, sorted(lost)), into=allocate(rank))
            for rank in others
        }
        found: torch.Tensor | None = None
        for rank, handle in asked.items():
            yield until(handle.is_done)
            try:
                if handle.wait().payload and found is None:
                    found = came.get(rank, torch.empty(0, dtype=torch.uint8))
            except PeerLost:
                if rank in self._mesh.monitor.left and found is None:
                    raise
                continue  # the next attempt knows of it
        return found

    async def _serve_result(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """Gives the result of an operation, or promises not to use one of an attempt that is over.

        One whose speaker is lost first looks whether that has handed out a result before.
        """
        seq, name, lost = head.payload
        step = (seq, name)

        def is_clear() -> bool:
            speaker = self._awaited.get(step)
            return speaker is None or speaker in self._local.members

        await poll_until(is_clear)
        with self._lock:
            result = self._results.get(step)
            if result is None:
                self._void[step] = self._void.get(step, Attempt()) | Attempt(lost)
                return Reply(payload=False)
        return Reply(payload=True, buffers=[view_of(result)] if result.numel() else [])

    def _may_use(self, step: Step, lost: Attempt, result: torch.Tensor) -> bool:
        """Keeps the result of an attempt for others, unless it was promised that it is not used."""
        with self._lock:
            if not self._void.get(step, lost) <= lost:
                return False
            self._results[step] = result
            return True

    def _keep(self, step: Step, result: torch.Tensor) -> None:
        """Keeps the result of a part of an operation that is over here, and forgets those before it."""
        with self._lock:
            self._results = {step: result}
            self._void = {other: lost for other, lost in self._void.items() if other[0] >= step[0]}
            self._awaited.pop(step, None)

    # --- inside the machine ---

    def _hand_out(self, speaker: int, result: torch.Tensor | None) -> Steps:
        """Gives the speaker's result to all workers of the machine; None when it was lost before."""
        size = torch.tensor([0 if result is None else result.numel()])
        if not (yield from self._copy(speaker, size)):
            return None
        num_bytes = int(size.item())
        if result is None:
            result = self.empty_like(torch.empty(num_bytes, dtype=torch.uint8, device="meta"))
        if num_bytes and not (yield from self._copy(speaker, result)):
            return None
        return result

    def _copy(self, speaker: int, tensor: torch.Tensor) -> Steps:
        """Copies the speaker's tensor to all; False when it was lost before it gave it, on all alike."""
        handle = self._local.broadcast(tensor, speaker)
        yield until(handle.is_done)
        try:
            handle.wait()
        except ShoalError:
            if speaker in self._local.members:
                raise
            return False
        return True


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Gives a result as the bytes that travel."""
    return flat_bytes(tensor) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
