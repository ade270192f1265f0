"""A worker's side of the channel to the servers: gradients go there, parameters come from there.

The parameters are views of the memory that a pull writes, so that a pull is one copy; a large gradient is
pushed from where it lies, so that a push is one copy, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shoal.core import Deadline, PeerLost
from shoal.group import Handle
from shoal.strategies.server_channel import Channel, Kind, Order, Reply
from shoal.strategies.server_handing import Incoming
from shoal.strategies.shares import Chunk
from shoal.tensors import TensorSpec, describe
from shoal.tensors.codecs import ErrorFeedback, codec_from_name
from shoal.tensors.memory import copy_into
from shoal.tensors.packing import densify

_LOOK_S = 0.25
"""After so long a worker that waits looks whether a server is lost."""

Gradients = Sequence[torch.Tensor | None]
"""Of all parameters."""


class Link:
    """Of one worker, for as long as it is attached."""

    def __init__(self, channel: Channel, parameters: Sequence[nn.Parameter]) -> None:
        self._channel = channel
        self._members = [chunk.layout.pick(parameters) for chunk in channel.chunks]
        self._tensors = [
            chunk.tensors(flat) for chunk, flat in zip(channel.chunks, channel.flats, strict=True)
        ]
        for members, tensors in zip(self._members, self._tensors, strict=True):
            for parameter, tensor in zip(members, tensors, strict=True):
                tensor.copy_(parameter.detach())
                parameter.data = tensor
        self._versions = [channel.first_version] * len(channel.chunks)
        """Of each chunk, the one that was read."""
        self._buffers: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._handles: list[Handle[None]] = []
        self._expected = [0] * channel.num_servers
        self._replies = [Reply() for _ in range(channel.num_servers)]
        self._due = [0] * len(channel.chunks)
        """How much its server must have handled before a chunk is read."""
        self._feedback = ErrorFeedback(codec_from_name(channel.options.compression))
        self._feedback.reseed(channel.group.rank)
        self._num_unsent = 0
        self.clock = 0
        self.num_pushes = self.num_pulls = 0
        self.pushed_bytes = [0] * channel.num_servers
        self.pulled_bytes = [0] * channel.num_servers

    @property
    def summaries(self) -> list[dict[str, object]]:
        """What each server has counted; known after the goodbye."""
        return [reply.summary for reply in self._replies if reply.summary is not None]

    @property
    def num_refused(self) -> int:
        """Chunks of gradients that held a NaN or an infinity, and were not applied, as far as is known."""
        return self._num_unsent + sum(reply.num_refused for reply in self._replies)

    def push(self, gradients: Gradients, numbers: Sequence[float]) -> None:
        """Start to send gradients; they must not be written until `finish_push`."""
        channel = self._channel
        flags = [
            [gradient is not None for gradient in chunk.layout.pick(gradients)] for chunk in channel.chunks
        ]
        encoded = {
            chunk.number: self._encode(chunk, gradients)
            for chunk, packing in zip(channel.chunks, channel.packings, strict=True)
            if packing is not None and any(flags[chunk.number])
        }
        for number, payload in encoded.items():
            if payload is None:
                flags[number] = [False] * len(flags[number])
                self._num_unsent += 1
        for server, share in enumerate(channel.shares):
            versions = [self._versions[chunk.number] for chunk in share]
            has_gradient = [flag for chunk in share for flag in flags[chunk.number]]
            order = Order(Kind.PUSH, False, numbers, versions, has_gradient)
            self._handles.append(channel.send_order(server, order))
        for chunk in channel.chunks:
            self._expected[chunk.server] += 1
            self._due[chunk.number] = self._expected[chunk.server]
            if any(flags[chunk.number]):
                payload = encoded.get(chunk.number)
                if payload is None:
                    payload = self._flat(chunk, gradients)
                self._handles.append(channel.gradients[chunk.number].send(chunk.server, payload))
                self.pushed_bytes[chunk.server] += payload.numel() * payload.element_size()
        self.num_pushes += 1
        self.clock += 1

    def finish_push(self) -> None:
        """Until the gradients have been sent, not until they are applied."""
        for handle in self._handles:
            handle.wait()
        self._handles.clear()

    def pull(self) -> None:
        """Read every chunk once its server has handled what was pushed, and lets this worker go on."""
        channel = self._channel
        waiting = list(channel.chunks)
        reading: list[tuple[Chunk, Handle[int | None]]] = []
        while waiting:
            is_due = {chunk.number: self._is_due(chunk) for chunk in waiting}
            reading += [(chunk, self._read(chunk)) for chunk in waiting if is_due[chunk.number]]
            waiting = [chunk for chunk in waiting if not is_due[chunk.number]]
            if not any(is_due.values()):
                self._listen()
        for chunk, handle in reading:
            version = handle.wait()
            if version is None:
                raise self._lost(chunk.server)
            self._versions[chunk.number] = version
            self.pulled_bytes[chunk.server] += chunk.num_elements * chunk.dtype.itemsize
        self._adopt()
        self.num_pulls += 1

    def skip(self) -> None:
        """A round without gradients; then pull."""
        self.clock += 1
        self.ask(Kind.SKIP)
        self.wait_for_all()
        self.pull()

    def rest(self) -> None:
        """Wait until all workers do so and all that was pushed is applied; then pull."""
        self.ask(Kind.REST)
        self.wait_for_all()
        self.pull()

    def take_states(self) -> list[Any]:
        """What each server's optimizer keeps, and its parameters of that moment; nobody else takes part."""
        self.ask(Kind.HAND)
        window = self._channel.states
        incoming = [Incoming() for _ in range(self._channel.num_servers)]
        while not all(state.is_whole for state in incoming):
            filled = window.wait(Deadline.after(_LOOK_S))
            for server in filled:
                with window.slot(server) as slot:
                    if slot.num_writes:
                        incoming[server].take(slot)
                        slot.clear()
            if not filled:
                self._require_servers()
        self.wait_for_all()
        states = [state.state() for state in incoming]
        for share, (_, flats) in zip(self._channel.shares, states, strict=True):
            for chunk, flat in zip(share, flats, strict=True):
                self._channel.flats[chunk.number].copy_(flat)
        self._adopt()
        return [state for state, _ in states]

    def ask(self, kind: Kind, *, stays: bool = False) -> None:
        """Send an order that no gradients follow."""
        for server, share in enumerate(self._channel.shares):
            versions = [self._versions[chunk.number] for chunk in share]
            order = Order(kind, stays, self._channel.numbers.read(), versions)
            self._expected[server] += 1
            for chunk in share:
                self._due[chunk.number] = self._expected[server]
            self._handles.append(self._channel.send_order(server, order))
        self.finish_push()

    def wait_for_all(self) -> None:
        """Until the servers have handled everything."""
        while any(
            reply.num_handled < expected
            for reply, expected in zip(self._replies, self._expected, strict=True)
        ):
            self._listen()

    def release(self) -> None:
        """The parameters move back into private memory."""
        for members in self._members:
            for parameter in members:
                parameter.data = parameter.detach().clone()
        self._tensors, self._buffers = [], {}

    def _adopt(self) -> None:
        """The parameters are what was read, also where somebody has put others into their place."""
        for members, tensors in zip(self._members, self._tensors, strict=True):
            for parameter, tensor in zip(members, tensors, strict=True):
                if parameter.data_ptr() != tensor.data_ptr():
                    parameter.data = tensor

    def _is_due(self, chunk: Chunk) -> bool:
        reply = self._replies[chunk.server]
        if self._channel.options.mode == "bounded" and reply.released < self.clock:
            return False
        return reply.num_handled >= self._due[chunk.number]

    def _read(self, chunk: Chunk) -> Handle[int | None]:
        window = self._channel.parameters(chunk, self._channel.group.rank)
        return window.read(chunk.server, self._channel.flats[chunk.number])

    def _listen(self) -> None:
        """Wait for replies; PeerLost when a server is gone."""
        replies = self._channel.replies
        filled = replies.wait(Deadline.after(_LOOK_S))
        for server in filled:
            with replies.slot(server) as slot:
                if slot.num_writes:
                    self._replies[server] = Reply.of(slot.note)
                    slot.clear()
        if not filled:
            self._require_servers()

    def _require_servers(self) -> None:
        members = self._channel.group.members
        for server in range(self._channel.num_servers):
            if server not in members:
                raise self._lost(server)

    def _lost(self, server: int) -> PeerLost:
        loss = self._channel.group.lost.get(server)
        reason = "it has ended" if loss is None else loss.reason
        return PeerLost(
            f"parameter server {server} is lost in round {self.clock}: {reason}.",
            peer=server,
            cause="it was killed, stopped, or failed; its own output says more.",
            next_step="start again, from a checkpoint if there is one: its share of the model is gone.",
        )

    def _flat(self, chunk: Chunk, gradients: Gradients) -> torch.Tensor:
        """The gradients of a chunk in its layout: where they lie, if that is one piece."""
        picked = chunk.layout.pick(gradients)
        spec = chunk.layout.slots[0].spec
        if chunk.is_alone and picked[0] is not None and _lies_as(picked[0], spec):
            flat = densify(picked[0])[0]
            return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        if chunk.number not in self._buffers:
            buffer = torch.zeros(chunk.num_elements, dtype=chunk.dtype)
            self._buffers[chunk.number] = buffer, chunk.views(buffer)
        flat, views = self._buffers[chunk.number]
        for view, gradient in zip(views, picked, strict=True):
            if gradient is None:
                view.zero_()
            else:
                copy_into(view, (gradient.to_dense() if gradient.is_sparse else gradient).detach())
        return flat

    def _encode(self, chunk: Chunk, gradients: Gradients) -> torch.Tensor | None:
        """The bytes that travel; None for what holds an inf or a nan, which is not pushed.

        What was kept of parameters without a gradient waits until they have one: nothing of them is applied.
        """
        packing = self._channel.packings[chunk.number]
        assert packing is not None
        slot, residuals = str(chunk.number), self._feedback.residuals
        picked = chunk.layout.pick(gradients)
        absent = [span for span, gradient in zip(chunk.spans, picked, strict=True) if gradient is None]
        kept = residuals[slot].clone() if absent and slot in residuals else None
        for span in absent if kept is not None else ():
            residuals[slot][span] = 0
        encoded = self._feedback.encode(self._flat(chunk, gradients), slot)
        for span in absent if slot in residuals else ():
            residuals[slot][span] = 0 if kept is None else kept[span]
        if encoded.meta != packing.meta:
            return None
        parts = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in encoded.buffers]
        return torch.cat(parts)


def _lies_as(gradient: torch.Tensor, spec: TensorSpec) -> bool:
    return gradient.layout is torch.strided and describe(gradient) == spec
