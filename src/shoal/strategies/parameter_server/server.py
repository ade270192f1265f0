"""What a parameter server does: take requests and gradients of the workers, apply them, and say so.

It runs in the main thread, asleep while there is nothing to do, until all workers have left or are lost. The
user's own optimizer changes the model in place, shard by shard.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from shoal.core import Deadline
from shoal.group import Handle, Window
from shoal.group.functions import send_state
from shoal.group.kernels import mix_into
from shoal.strategies.parameter_server.channel import (
    NO_REQUEST,
    ParameterShard,
    Presence,
    RequestKind,
    ServerChannel,
    ServerReply,
    WorkerRequest,
)
from shoal.strategies.session import TrainingSession
from shoal.strategies.staleness import Staleness
from shoal.tensors.codecs.base import is_finite
from shoal.tensors.flat import views_over

log = logging.getLogger(__name__)

_IDLE_S = 0.25
"""After so long a server that sleeps looks whether somebody is lost."""
_BUSY_S = 0.005
"""While one worker's gradients are under way, so long do others' wait at most that come in between."""
_SHORTEST_S = 2e-4
"""The first of the pauses, each twice as long as the one before, while some of a shard have come."""
COUNTS = ("num_pushes", "num_applied", "num_dropped", "num_skipped", "num_refused", "pushed_bytes")
"""What a server counts: `num_refused` are shards of gradients that were not finite, the others are pushes."""


class ServedShard:
    """The parameters of one shard on its server.

    They lie in flat memory, and gradients are views of where a worker has written them: an update is the
    optimizer's own passes over memory and no other. A model on the CPU is published where it lies; that of a
    GPU is copied to host memory after each update, unless all members are on GPUs (see `channel`).
    """

    def __init__(self, shard: ParameterShard, channel: ServerChannel, session: TrainingSession) -> None:
        self.shard = shard
        self.version = channel.first_version
        """One more with each update."""
        self._channel = channel
        self._optimizer = session.optimizer
        self._members = shard.layout.pick(session.trainable)
        known = {id(parameter) for parameter in self._members}
        self._all = [list(group["params"]) for group in self._optimizer.param_groups]
        self._groups = [[each for each in group if id(each) in known] for group in self._all]
        """Its parameters in each group of the optimizer."""
        is_host = channel.device is None
        if is_host and session.device.type == "cpu":
            self.flat = channel.flats[shard.number]
        else:
            device = self._members[0].device if self._members else None
            self.flat = torch.zeros(shard.num_elements, dtype=shard.dtype, device=device)
        shard.move(session.trainable, self.flat)
        for parameter in self._members:
            parameter.grad = None
        self._views: dict[int, list[torch.Tensor]] = {}
        """The views of gradients, by where they lie: in a slot of each worker."""
        self._puts: dict[int, Handle[None]] = {}
        """The last one to each worker, where parameters are put on its GPU."""
        self._copies: dict[int, torch.Tensor] = {}
        """What each worker reads, or has read, where delays are compensated."""
        for index, worker in enumerate(channel.workers if channel.compensates else ()):
            copy = channel.copies[index][shard.number] if is_host else torch.empty_like(self.flat)
            self._copies[worker] = copy.copy_(self.flat)
            if is_host:
                channel.parameters(shard, worker).publish(copy, self.version)
        self._published: torch.Tensor | None = None
        """What all workers read; it is `flat` itself where that is in host memory."""
        if is_host and not channel.compensates:
            self._published = channel.flats[shard.number].copy_(self.flat)
            self._window.publish(self._published, self.version)

    def apply(self, gradient: torch.Tensor, has_gradient: Sequence[bool]) -> None:
        """Makes one update; `gradient` is flat and may be overwritten."""
        gradient = gradient.to(self.flat.device)
        for put in self._puts.values():
            put.wait()  # until then it reads what the optimizer writes; nearly always it is over
        try:
            for parameter, view, is_there in zip(
                self._members, self._views_of(gradient), has_gradient, strict=True
            ):
                parameter.grad = view if is_there else None
            for group, picked in zip(self._optimizer.param_groups, self._groups, strict=True):
                group["params"] = picked
            with self._changing():
                self._optimizer.step()
        finally:
            for parameter in self._members:
                parameter.grad = None
            for group, everything in zip(self._optimizer.param_groups, self._all, strict=True):
                group["params"] = everything

    def _views_of(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        if self._channel.device is None:
            return views_over(self.shard.layout, gradient)
        place = gradient.data_ptr()
        if place not in self._views:
            self._views[place] = views_over(self.shard.layout, gradient.detach())
        return self._views[place]

    def pass_over(self) -> None:
        """Makes the next version equal to this one."""
        with self._changing():
            pass

    def compensate(self, gradient: torch.Tensor, worker: int) -> torch.Tensor:
        """Gives `g + lambda g*g*(w_now - w_then)` for what a worker has computed from w_then."""
        gradient = gradient.to(self.flat.device)
        drift = self.flat - self._copies[worker].to(self.flat.device)
        drift.mul_(gradient)
        return gradient.addcmul_(drift, gradient, value=self._channel.options.delay_compensation)

    def deliver(self, worker: int, reply: ServerReply) -> None:
        """Lets a worker have these parameters, where they are not the same for all.

        On a GPU they are put there, with the reply. Where delays are compensated the server then knows what
        the worker has.
        """
        window = self._channel.parameters(self.shard, worker)
        if self._channel.device is not None:
            source = self.flat
            if worker in self._copies:
                if worker in self._puts:
                    self._puts[worker].wait()
                source = self._copies[worker].copy_(self.flat)
            note = msgspec.msgpack.encode((self.version, reply))
            self._puts[worker] = window.put(worker, source, note=note)
        elif self._copies:
            with window.changing(self.version):
                self._copies[worker].copy_(self.flat)

    def close(self) -> None:
        """Moves the parameters back into private memory."""
        self._channel.keep_version(self.version)
        for parameter in self._members:
            parameter.data = parameter.detach().clone()

    @property
    def _window(self) -> Window:
        """The window of all workers."""
        return self._channel.parameters(self.shard, self._channel.num_servers)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Counts a version, and lets nobody read what is published while it changes."""
        if self._published is None:
            yield
        else:
            with self._window.changing(self.version + 1):
                yield
                self._published.copy_(self.flat)
        self.version += 1


@dataclass(eq=False)
class WorkerState:
    """One worker, as a server sees it."""

    rank: int
    reply: ServerReply = field(default_factory=ServerReply)
    request: WorkerRequest = NO_REQUEST
    """The one under way."""
    position: int = 0
    """The shard of this server that comes next."""
    staleness: int = 0
    """How many updates the gradients under way are behind."""
    is_dropped: bool = False
    """Whether what is under way is received, and not applied."""
    clock: int = 0
    """The rounds that it has finished."""
    lead: int = 0
    """The rounds by which it led the slowest when it was let go on."""
    is_done: bool = False
    stays: bool = False

    @property
    def is_pushing(self) -> bool:
        """Whether gradients are under way."""
        return self.request.kind == RequestKind.PUSH

    @property
    def is_meeting(self) -> bool:
        """Whether it waits for the other workers, and sends nothing until they have come, too."""
        return self.request.kind == RequestKind.MEET


class AsyncServer:
    """Serves the workers of one channel, and applies each gradient as it comes: `async` and `bounded`."""

    _num_aggregate = 0
    """The gradients that make one update, where they are averaged."""

    def __init__(self, channel: ServerChannel, session: TrainingSession) -> None:
        self._channel = channel
        self._options = channel.options
        self._optimizer = session.optimizer
        own = channel.by_server[channel.group.rank]
        self._shards = [ServedShard(shard, channel, session) for shard in own]
        self._workers = [WorkerState(rank) for rank in channel.workers]
        self._late: list[WorkerState] = []
        """Too late for the update under way (`sync`): they go on when it is done, and hear nothing before."""
        self._turn = 0
        self._told: dict[int, Handle[None]] = {}
        self._pause_s = _SHORTEST_S
        self.staleness, self.leads = Staleness(), Staleness()
        self.counts = dict.fromkeys(COUNTS, 0)

    def run(self, beat: Callable[[], None]) -> bool:
        """Serves until nobody is left, calling `beat` often; tells whether all that came to the end stay."""
        while self._open():
            if self._move():
                self._pause_s = _SHORTEST_S
            else:
                self._pause()
            beat()
        lost = self._channel.group.lost
        for rank, told in self._told.items():
            if rank not in lost:
                told.wait()
        self.release()
        ended = [worker for worker in self._workers if worker.rank not in lost]
        return bool(ended) and all(worker.stays for worker in ended)

    def release(self) -> None:
        """Moves the parameters back into private memory."""
        for shard in self._shards:
            shard.close()

    def summary(self) -> dict[str, Any]:
        """Gives what the server has counted."""
        return {**self.counts, "staleness": self.staleness.summary(), "leads": self.leads.summary()}

    # --- requests ---

    def _open(self) -> list[WorkerState]:
        return [worker for worker in self._workers if not worker.is_done]

    def _move(self) -> bool:
        """Does what can be done; tells whether there was anything."""
        workers = self._open()
        # each comes first in turn: a quick one does not keep the others out
        self._turn += 1
        first = self._turn % len(workers)
        moved = [self._advance(worker) for worker in workers[first:] + workers[:first]]
        return any(moved)

    def _advance(self, worker: WorkerState) -> bool:
        if worker.request is NO_REQUEST:
            worker.request = self._channel.receive(worker.rank)
            return self._begin(worker)
        if worker.is_meeting:
            return self._meet()
        return self._advance_push(worker)

    def _begin(self, worker: WorkerState) -> bool:
        """Begins with a worker's request, if it has one."""
        kind = worker.request.kind
        if kind == RequestKind.PUSH:
            worker.position = 0
            self.counts["num_pushes"] += 1
            self._begin_push(worker)
        elif kind == RequestKind.SKIP:
            self.counts["num_skipped"] += 1
            self._skip(worker)
        elif kind == RequestKind.SEND_STATE:
            state = self._optimizer.state_dict()["state"]
            send_state(self._channel.states, worker.rank, [state, [shard.flat for shard in self._shards]])
            self._end_request(worker)
            self._tell(worker)
        elif kind in (RequestKind.LEAVE, RequestKind.DETACH):
            worker.is_done, worker.stays = True, kind == RequestKind.DETACH
            worker.reply.summary = self.summary()
            self._end_request(worker)
            self._tell(worker)
            self._miss(worker)
        return kind != RequestKind.NONE

    def _end_request(self, worker: WorkerState) -> None:
        worker.request = NO_REQUEST
        worker.reply.num_handled += 1

    def _meet(self) -> bool:
        """Answers all workers that are left, once they have asked to meet."""
        workers = self._open()
        if not all(worker.is_meeting for worker in workers):
            return False
        for worker in workers:
            self._end_request(worker)
            self._deliver(worker)
            self._tell(worker)
        return True

    def _skip(self, worker: WorkerState) -> None:
        """Handles a step without gradients."""
        self._end_request(worker)
        if self._release(worker, worker.clock + 1):
            self._deliver(worker)
        worker.clock += 1
        self._release_all()
        self._tell(worker)

    def _miss(self, worker: WorkerState) -> None:
        """Goes on without a worker that has left or is lost."""
        loss = self._channel.group.lost.get(worker.rank)
        if loss is not None:
            num_left, num_wanted = len(self._open()), self._num_aggregate
            shortage = f", with {num_left} instead of {num_wanted} gradients for an update"
            log.warning(
                "server %d goes on without worker %d%s: %s",
                self._channel.group.rank, worker.rank - self._channel.num_servers,
                shortage if num_left < num_wanted else "", loss.reason,
            )  # fmt: skip
        self._release_all()

    # --- gradients ---

    def _begin_push(self, worker: WorkerState) -> None:
        """Decides what becomes of gradients whose request has come."""
        worker.staleness = self._shards[0].version - worker.request.versions[0]
        limit = self._options.drop_stale
        worker.is_dropped = limit is not None and worker.staleness > limit
        if worker.is_dropped:
            self.counts["num_dropped"] += 1
        else:
            self.counts["num_applied"] += 1
            self.staleness.note(worker.staleness)
            if self._options.mode == "bounded":
                self.leads.note(worker.lead)
        self._release(worker, worker.clock + 1)

    def _advance_push(self, worker: WorkerState) -> bool:
        """Handles the next shard, if it is there."""
        if not self._is_there(worker, worker.position):
            return False
        with self._taken(worker, worker.position) as gradient:
            if gradient is not None and not worker.is_dropped and self._accepts(worker, gradient):
                self._apply(worker, gradient)
        self._finish_shard(worker)
        return True

    def _apply(self, worker: WorkerState, gradient: torch.Tensor) -> None:
        shard, request = self._shards[worker.position], worker.request
        if self._channel.compensates and request.versions[worker.position] != shard.version:
            gradient = shard.compensate(gradient, worker.rank)
        factor = 1 / max(1, worker.staleness) if self._options.staleness_lr else 1.0
        self._channel.numbers.write(request.numbers, factor)
        has_gradient = [presence == Presence.SENT for presence in worker.request.gradients[worker.position]]
        shard.apply(gradient, has_gradient)

    def _is_there(self, worker: WorkerState, position: int) -> bool:
        """Tells whether a shard of a push can be taken."""
        if Presence.SENT not in worker.request.gradients[position]:
            return True  # then nothing is sent
        return worker.rank in self._channel.gradients[self._shards[position].shard.number].filled()

    @contextlib.contextmanager
    def _taken(self, worker: WorkerState, position: int) -> Iterator[torch.Tensor | None]:
        """Gives the flat gradient of a shard that is there, until the block ends; None: there is none."""
        if Presence.SENT not in worker.request.gradients[position]:
            yield None
            return
        number = self._shards[position].shard.number
        packing = self._channel.packings[number]
        with self._channel.gradients[number].slot(worker.rank) as slot:
            if slot.num_writes:
                self.counts["pushed_bytes"] += slot.tensor.numel() * slot.tensor.element_size()
                yield slot.tensor if packing is None else packing.decode(slot.tensor)
                slot.clear()
            else:
                yield None

    def _accepts(self, worker: WorkerState, gradient: torch.Tensor) -> bool:
        """Tells whether a shard is finite: one that is not would spoil the model for all workers."""
        # on GPUs the workers have looked, and withhold what is not (`ServerClient._prepare`)
        if self._channel.device is not None or not gradient.numel() or is_finite(gradient):
            return True
        self._refuse(worker)
        return False

    def _refuse(self, worker: WorkerState) -> None:
        worker.reply.num_refused += 1
        self.counts["num_refused"] += 1

    def _finish_shard(self, worker: WorkerState) -> None:
        """Ends one shard of a push; the last one ends the round."""
        if Presence.WITHHELD in worker.request.gradients[worker.position]:
            self._refuse(worker)
        worker.reply.num_handled += 1
        is_released = worker.reply.released > worker.clock
        if is_released:
            self._deliver(worker, self._shards[worker.position : worker.position + 1])
        # on GPUs the reply comes with the parameters, for which a worker that pulls waits anyway
        is_told = is_released and self._channel.device is not None and self._options.pull_every == 1
        worker.position += 1
        if worker.position == len(self._shards):
            worker.request = NO_REQUEST
            worker.clock += 1
            self._release_all()
        if not is_told:
            self._tell(worker)

    # --- who may go on ---

    def _release_all(self) -> None:
        for worker in self._open():
            if worker.reply.released < worker.clock and self._release(worker, worker.clock):
                self._deliver(worker)
                self._tell(worker)

    def _release(self, worker: WorkerState, clock: int) -> bool:
        """Lets a worker begin the round after `clock` ones, unless it would lead the slowest by too much."""
        slowest = min((other.clock for other in self._open() if other is not worker), default=clock)
        lead = max(0, clock - slowest)
        if self._options.mode == "bounded" and lead > self._options.staleness:
            return False
        worker.lead = lead
        worker.reply.released = clock
        return True

    def _deliver(self, worker: WorkerState, shards: Sequence[ServedShard] | None = None) -> None:
        """Lets a worker have the parameters of these shards, or of all."""
        if worker not in self._late:
            for shard in self._shards if shards is None else shards:
                shard.deliver(worker.rank, worker.reply)

    def _tell(self, worker: WorkerState) -> None:
        if worker not in self._late:
            note = msgspec.msgpack.encode(worker.reply)
            self._told[worker.rank] = self._channel.replies.put(worker.rank, torch.zeros(1), note=note)

    # --- waiting ---

    def _pause(self) -> None:
        """Goes on without whoever is gone; else sleeps until something comes, or for a moment."""
        members = self._channel.group.members
        gone = [worker for worker in self._open() if worker.rank not in members]
        for worker in gone:
            worker.is_done, worker.request = True, NO_REQUEST
            self._miss(worker)
        if gone:
            return
        position = self._awaited()
        if position is None:
            self._channel.requests.wait(Deadline.after(_IDLE_S))
            return
        gradients = self._channel.gradients[self._shards[position].shard.number]
        if not gradients.filled():
            gradients.wait(Deadline.after(_BUSY_S))
            return
        # Those that have come need others beside them. To wait for a gradient would end at once, again and
        # again, and in virtual time no other would ever come.
        self._channel.requests.wait(Deadline.after(self._pause_s))
        self._pause_s = min(2 * self._pause_s, _BUSY_S)

    def _awaited(self) -> int | None:
        """Finds a shard that some worker is about to send."""
        return next((worker.position for worker in self._open() if worker.is_pushing), None)


class SyncServer(AsyncServer):
    """Averages the gradients of a step; with `num_aggregate` below the number of workers, others are backups.

    The workers whose requests come first are chosen, as many as make an update; what they send is averaged
    shard by shard. A gradient that was computed from an older version, or that comes when enough are chosen,
    is received and dropped, and its worker goes on from the next version. Each of several servers chooses for
    itself.
    """

    def __init__(self, channel: ServerChannel, session: TrainingSession) -> None:
        super().__init__(channel, session)
        self._num_aggregate = self._options.num_aggregate or len(self._workers)
        self._chosen: list[WorkerState] = []
        self._position = 0
        """The shard that is averaged next."""

    @property
    def _is_updating(self) -> bool:
        """Whether enough are chosen; those that meet wait for the others, and are not waited for."""
        num_wanted = min(self._num_aggregate, sum(not worker.is_meeting for worker in self._open()))
        return bool(self._position or (self._chosen and len(self._chosen) >= num_wanted))

    def _is_current(self, worker: WorkerState) -> bool:
        return min(worker.request.versions) == min(shard.version for shard in self._shards)

    def _begin_push(self, worker: WorkerState) -> None:
        is_current, is_updating = self._is_current(worker), self._is_updating
        worker.is_dropped = not is_current or is_updating
        self._release(worker, worker.clock + 1)
        if worker.is_dropped:
            self.counts["num_dropped"] += 1
            if is_current:
                self._late.append(worker)
        else:
            self.counts["num_applied"] += 1
            self.staleness.note(0)
            self._chosen.append(worker)

    def _skip(self, worker: WorkerState) -> None:
        """Counts a worker among those that are waited for, and adds nothing of it."""
        if self._is_current(worker) and not self._is_updating:
            worker.is_dropped = False
            self._chosen.append(worker)
        else:
            super()._skip(worker)

    def _move(self) -> bool:
        has_moved = super()._move()
        return (self._is_updating and self._update()) or has_moved

    def _advance_push(self, worker: WorkerState) -> bool:
        return worker.is_pushing and worker.is_dropped and super()._advance_push(worker)

    def _update(self) -> bool:
        """Averages and applies one shard, if all of it is there."""
        position, shard = self._position, self._shards[self._position]
        pushing = sorted((worker for worker in self._chosen if worker.is_pushing), key=lambda each: each.rank)
        if not all(self._is_there(worker, position) for worker in pushing):
            return False
        with contextlib.ExitStack() as stack:
            taken = [
                (worker, stack.enter_context(self._taken(worker, position)))
                for worker in pushing
                if Presence.WITHHELD not in worker.request.gradients[position]
            ]
            accepted = [(one, given) for one, given in taken if given is None or self._accepts(one, given)]
            gradients = [gradient for _, gradient in accepted if gradient is not None]
            if not gradients:
                shard.pass_over()
            else:
                mean, weight = gradients[0], 1 / len(accepted)
                if weight != 1:
                    mix_into(mean, mean, weight, [(other, weight) for other in gradients[1:]])
                self._channel.numbers.write(accepted[0][0].request.numbers)
                presences = zip(*(worker.request.gradients[position] for worker, _ in accepted), strict=True)
                shard.apply(mean, [Presence.SENT in each for each in presences])
        self._position = (position + 1) % len(self._shards)
        for worker in list(self._chosen):
            if worker.is_pushing:
                self._finish_shard(worker)
            elif not self._position:
                super()._skip(worker)
        if not self._position:
            self._chosen.clear()
            late, self._late = self._late, []
            for worker in late:
                self._deliver(worker)
                self._tell(worker)
        return True

    def _miss(self, worker: WorkerState) -> None:
        for workers in (self._chosen, self._late):
            if worker in workers:
                workers.remove(worker)
        super()._miss(worker)

    def _awaited(self) -> int | None:
        if self._is_updating:
            return self._position
        pushing = (worker for worker in self._open() if worker.is_pushing and worker.is_dropped)
        return next((worker.position for worker in pushing), None)
