"""A worker's side of the channel: it pushes gradients to the servers, and pulls parameters from them.

On the CPU the parameters are views of the memory that a pull writes, and a large gradient is pushed from
where it lies: either is one copy. Where all members are on GPUs both stay there. A model on a GPU whose
servers are elsewhere goes through pinned memory, and its worker waits for the GPU once in a push.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from shoal.core import Deadline, PeerLost
from shoal.group import Handle, Window, WindowSlot
from shoal.group.functions import receive_state
from shoal.strategies.parameter_server.channel import (
    ParameterShard,
    Presence,
    RequestKind,
    ServerChannel,
    ServerReply,
    WorkerRequest,
)
from shoal.strategies.session import TrainingSession
from shoal.tensors import describe
from shoal.tensors.codecs import ErrorFeedback, codec_from_name
from shoal.tensors.codecs.base import is_finite
from shoal.tensors.codecs.formats import Packing
from shoal.tensors.flat import views_over
from shoal.tensors.memory import copy_into
from shoal.tensors.packing import densify

_LOOK_S = 0.25
"""After so long a worker that waits looks whether a server is lost."""
_DELIVERY = msgspec.msgpack.Decoder(tuple[int, ServerReply])
"""Reads the note of parameters that are put on a worker's GPU: their version, and the reply."""

Gradients = Sequence[torch.Tensor | None]
"""The gradients of all parameters, or of those of a shard."""


class ServerClient:
    """Pushes and pulls for one worker, as long as it is attached."""

    def __init__(self, channel: ServerChannel, session: TrainingSession) -> None:
        parameters = session.trainable
        self._channel = channel
        self._optimizer = session.optimizer
        is_cpu = session.device.type == "cpu"
        self._is_staged = channel.device is None and not is_cpu
        """Whether the model is on a GPU, and what travels in host memory."""
        device = parameters[0].device if parameters else None
        self._flats = channel.flats
        if not is_cpu:
            self._flats = [
                torch.zeros(shard.num_elements, dtype=shard.dtype, device=device) for shard in channel.shards
            ]
        self._moved = [
            moved
            for shard, flat in zip(channel.shards, self._flats, strict=True)
            for moved in shard.move(parameters, flat)
        ]
        """Each parameter with its tensor in the memory of a shard."""
        self._staging = [
            torch.zeros(flat.numel(), dtype=flat.dtype, pin_memory=flat.is_cuda)
            for flat in self._flats
            if self._is_staged
        ]
        self._gathered: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        """For each shard, memory in which its gradients are put together, and views of it."""
        self._versions = [channel.first_version] * len(channel.shards)
        """The version of each shard that was read."""
        self._handles: list[Handle[None]] = []
        self._expected = [0] * channel.num_servers
        self._replies = [ServerReply() for _ in range(channel.num_servers)]
        self._due = [0] * len(channel.shards)
        """How much its server must have handled before a shard is read."""
        self._taken = [0] * len(channel.shards)
        """How much its server had handled when it put what was taken last on this worker's GPU."""
        self._feedback = ErrorFeedback(codec_from_name(channel.options.compression))
        self._feedback.reseed(channel.group.rank)
        self._clock = 0
        self.num_pushes = self.num_pulls = 0
        self.pushed_bytes = [0] * channel.num_servers
        self.pulled_bytes = [0] * channel.num_servers

    @property
    def summaries(self) -> list[dict[str, object]]:
        """What each server has counted; known after LEAVE."""
        return [reply.summary for reply in self._replies if reply.summary is not None]

    @property
    def num_refused(self) -> int:
        """The shards of gradients that held a NaN or an infinity, and were not applied, as far as known."""
        return sum(reply.num_refused for reply in self._replies)

    # --- push ---

    def push(self, gradients: Gradients, rate_factor: float = 1.0) -> None:
        """Begins to send gradients; they must not be written until `finish_push`."""
        channel, numbers = self._channel, self._channel.numbers.read(rate_factor)
        picked = [shard.layout.pick(gradients) for shard in channel.shards]
        presence = [[Presence.NONE if each is None else Presence.SENT for each in own] for own in picked]
        pushed = [shard for shard in channel.shards if Presence.SENT in presence[shard.number]]
        prepared = self._prepare(pushed, picked)
        for number in [number for number, payload in prepared.items() if payload is None]:
            presence[number] = [Presence.WITHHELD] * len(presence[number])
        for server, shards in enumerate(channel.by_server):
            present = [presence[shard.number] for shard in shards]
            self._send(server, WorkerRequest(RequestKind.PUSH, numbers, gradients=present))
        for shard in channel.shards:
            self._expected[shard.server] += 1
            self._due[shard.number] = self._expected[shard.server]
            if Presence.SENT in presence[shard.number]:
                payload = prepared.get(shard.number)
                if payload is None:
                    payload = self._gather(shard, picked[shard.number])
                self._handles.append(channel.gradients[shard.number].send(shard.server, payload))
                self.pushed_bytes[shard.server] += payload.nbytes
        self.num_pushes += 1
        self._clock += 1

    def finish_push(self) -> None:
        """Waits until the gradients have been sent, not until they are applied."""
        for handle in self._handles:
            handle.wait()
        self._handles.clear()

    def _prepare(
        self, shards: Sequence[ParameterShard], picked: Sequence[Gradients]
    ) -> dict[int, torch.Tensor | None]:
        """Prepares what must be known before the requests go: what is encoded, and what is on a GPU.

        None stands for a shard that holds a NaN or an infinity. A shard that is not named is sent as it is,
        and is put together when its turn comes.
        """
        prepared: dict[int, torch.Tensor | None] = {}
        plain = []
        for shard in shards:
            packing = self._channel.packings[shard.number]
            if packing is None:
                plain.append(shard)
            else:
                prepared[shard.number] = self._encode(shard, packing, picked[shard.number])
        if self._is_staged:
            for shard in plain:
                staging = self._staging[shard.number]
                prepared[shard.number] = staging.copy_(
                    self._gather(shard, picked[shard.number]), non_blocking=True
                )
            _synchronize(self._flats)
        elif self._channel.device is not None and plain:
            # The worker waits for its servers anyway. A server would wait for the GPU once more to look.
            flats = [self._gather(shard, picked[shard.number]) for shard in plain]
            are_all_finite = math.isfinite(torch.nn.utils.get_total_norm(flats).item())  # by few operations
            for shard, flat in zip(plain, flats, strict=True):
                # a norm may be too large where no value is
                prepared[shard.number] = flat if are_all_finite or is_finite(flat) else None
        return prepared

    def _gather(self, shard: ParameterShard, gradients: Gradients) -> torch.Tensor:
        """Puts the gradients of a shard together: where they lie, if that is one piece."""
        only = gradients[0] if len(gradients) == 1 else None
        spec = None if only is None or only.layout is not torch.strided else describe(only)
        if only is not None and spec == shard.layout.slots[0].spec:
            flat = densify(only)[0]
            return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        if shard.number not in self._gathered:
            buffer = torch.zeros_like(self._flats[shard.number])
            self._gathered[shard.number] = buffer, views_over(shard.layout, buffer)
        flat, views = self._gathered[shard.number]
        copied: list[torch.Tensor] = []
        into: list[torch.Tensor] = []
        for view, gradient in zip(views, gradients, strict=True):
            if gradient is None:
                view.zero_()
            elif gradient.is_cpu or gradient.is_sparse:
                copy_into(view, (gradient.to_dense() if gradient.is_sparse else gradient).detach())
            else:
                into.append(view)
                copied.append(gradient.detach())
        if into:
            torch._foreach_copy_(into, copied)  # in a few operations of the GPU, not one for each parameter
        return flat

    def _encode(self, shard: ParameterShard, packing: Packing, gradients: Gradients) -> torch.Tensor | None:
        """Gives the bytes that travel; None for what holds an inf or a nan, which is not pushed.

        What was kept of parameters without a gradient waits until they have one: nothing of them is applied.
        """
        slot, residuals = str(shard.number), self._feedback.residuals
        absent = [span for span, gradient in zip(shard.spans, gradients, strict=True) if gradient is None]
        kept = [residuals[slot][span].clone() if slot in residuals else 0 for span in absent]
        for span in absent if slot in residuals else ():
            residuals[slot][span] = 0
        encoded = packing.encode(self._feedback, self._gather(shard, gradients), slot)
        for span, rest in zip(absent, kept, strict=True) if slot in residuals else ():
            residuals[slot][span] = rest
        return encoded

    # --- pull ---

    def pull(self) -> None:
        """Reads every shard once its server has handled what was pushed, and lets this worker go on."""
        if self._channel.device is None:
            self._read_all()
        for shard in self._channel.shards:
            if self._channel.device is not None:
                self._take(shard)
            self.pulled_bytes[shard.server] += shard.num_elements * shard.dtype.itemsize
        self._adopt()
        self.num_pulls += 1

    def _read_all(self) -> None:
        """Reads what the servers have published in host memory."""
        if self._is_staged:
            _synchronize(self._flats)  # the last pull may still be on its way to the GPU
        into = self._staging if self._is_staged else self._flats
        waiting = list(self._channel.shards)
        reading: list[tuple[ParameterShard, Handle[int | None]]] = []
        while waiting:
            due = [shard for shard in waiting if self._is_due(shard)]
            waiting = [shard for shard in waiting if not self._is_due(shard)]
            for shard in due:
                window = self._channel.parameters(shard, self._channel.group.rank)
                reading.append((shard, window.read(shard.server, into[shard.number])))
            if not due:
                self._listen()
        for shard, handle in reading:
            version = handle.wait()
            if version is None:
                raise self._lost(shard.server)
            self._versions[shard.number] = version
            if self._is_staged:
                self._flats[shard.number].copy_(self._staging[shard.number], non_blocking=True)

    def _is_due(self, shard: ParameterShard) -> bool:
        reply = self._replies[shard.server]
        if self._channel.options.mode == "bounded" and reply.released < self._clock:
            return False
        return reply.num_handled >= self._due[shard.number]

    def _take(self, shard: ParameterShard) -> None:
        """Takes what a server has put on this worker's GPU, once the GPU has done that."""
        window = self._channel.parameters(shard, self._channel.group.rank)
        # what is there may be of an earlier push; and nothing more comes where a pull follows a pull
        while self._taken[shard.number] < self._due[shard.number]:
            with self._next_slot(window, shard.server) as slot:
                version, reply = _DELIVERY.decode(slot.note)
                self._versions[shard.number] = version
                self._taken[shard.number] = reply.num_handled
                if reply.num_handled > self._replies[shard.server].num_handled:
                    self._replies[shard.server] = reply
                self._flats[shard.number].copy_(slot.tensor)

    def _adopt(self) -> None:
        """Makes the parameters what was read, also where somebody has put others into their place."""
        for parameter, tensor in self._moved:
            if parameter.data_ptr() != tensor.data_ptr():
                parameter.data = tensor

    # --- requests besides pushes ---

    def skip(self) -> None:
        """Counts a round without gradients; then pulls."""
        self._clock += 1
        self.ask(RequestKind.SKIP)
        self.pull()

    def meet(self) -> None:
        """Waits until all workers do so and all that was pushed is applied; then pulls."""
        self.ask(RequestKind.MEET)
        self.pull()

    def take_optimizer(self) -> dict[str, Any]:
        """Makes one `state_dict` of the servers' optimizers, and takes their parameters; no other takes part.

        Each server has state for its own shards alone, by positions among all parameters.
        """
        merged: dict[int, Any] = {}
        for server, shards in enumerate(self._channel.by_server):
            self._ask(server, RequestKind.SEND_STATE)
            self.finish_push()
            state, flats = receive_state(partial(self._next_slot, self._channel.states, server))
            merged.update(state)
            for shard, flat in zip(shards, flats, strict=True):
                self._flats[shard.number].copy_(flat)
        self.wait_for_all()
        self._adopt()
        return {**self._optimizer.state_dict(), "state": merged}

    def ask(self, kind: RequestKind) -> None:
        """Sends all servers a request that no gradients follow, and waits until they have handled it."""
        for server in range(self._channel.num_servers):
            self._ask(server, kind)
        self.finish_push()
        self.wait_for_all()

    def wait_for_all(self) -> None:
        """Waits until the servers have handled everything."""
        while any(
            reply.num_handled < expected
            for reply, expected in zip(self._replies, self._expected, strict=True)
        ):
            self._listen()

    def release(self) -> None:
        """Moves the parameters back into private memory."""
        for parameter, _ in self._moved:
            parameter.data = parameter.detach().clone()
        self._moved, self._flats, self._staging, self._gathered = [], [], [], {}

    def _ask(self, server: int, kind: RequestKind) -> None:
        self._expected[server] += 1
        for shard in self._channel.by_server[server]:
            self._due[shard.number] = self._expected[server]
        self._send(server, WorkerRequest(kind, self._channel.numbers.read()))

    def _send(self, server: int, request: WorkerRequest) -> None:
        versions = [self._versions[shard.number] for shard in self._channel.by_server[server]]
        self._handles.append(self._channel.send(server, request._replace(versions=versions)))

    # --- waiting ---

    def _listen(self) -> None:
        """Waits for replies; PeerLost when a server is gone."""
        window = self._channel.replies
        for server in self._wait(window):
            with window.slot(server) as slot:
                if slot.num_writes:
                    self._replies[server] = msgspec.msgpack.decode(slot.note, type=ServerReply)
                    slot.clear()

    @contextlib.contextmanager
    def _next_slot(self, window: Window, server: int) -> Iterator[WindowSlot]:
        """Waits until a server has written something, and empties the slot at the end of the block."""
        is_taken = False
        while not is_taken:
            if server in self._wait(window):
                with window.slot(server) as slot:
                    is_taken = slot.num_writes > 0
                    if is_taken:
                        yield slot
                        slot.clear()

    def _wait(self, window: Window) -> Sequence[int]:
        """Waits for a moment until something is in a window; PeerLost when a server is gone."""
        filled = window.wait(Deadline.after(_LOOK_S))
        if not filled:
            members = self._channel.group.members
            for server in range(self._channel.num_servers):
                if server not in members:
                    raise self._lost(server)
        return filled

    def _lost(self, server: int) -> PeerLost:
        loss = self._channel.group.lost.get(server)
        reason = "it has ended" if loss is None else loss.reason
        return PeerLost(
            f"parameter server {server} is lost in round {self._clock}: {reason}.",
            peer=server,
            cause="it was killed, stopped, or failed; its own output says more.",
            next_step="start again, from a checkpoint if there is one: its share of the model is gone.",
        )


def _synchronize(flats: Sequence[torch.Tensor]) -> None:
    """Waits until the GPU has done what this worker has told it to."""
    if flats and flats[0].is_cuda:
        torch.cuda.current_stream(flats[0].device).synchronize()
