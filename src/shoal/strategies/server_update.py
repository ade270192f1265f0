"""The parameters of one server's share: published, and changed in place by the user's own optimizer.

The parameters are views of the published memory, and gradients are views of where a worker has written them:
an update is the optimizer's own passes over memory and no other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.strategies.server_channel import Channel


class Updater:
    """Of one server, for as long as it serves."""

    def __init__(self, channel: Channel, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        version = channel.first_version
        self._channel = channel
        self._optimizer = optimizer
        self._share = channel.shares[channel.group.rank]
        self._members = [chunk.layout.pick(parameters) for chunk in self._share]
        self._all = [list(group["params"]) for group in optimizer.param_groups]
        self._groups = [self._picked(members) for members in self._members]
        """Of each chunk: its parameters in each group of the optimizer."""
        self.versions = [version] * len(self._share)
        """Of each chunk, one more with each update."""
        for chunk, members in zip(self._share, self._members, strict=True):
            flat = channel.flats[chunk.number]
            for parameter, tensor in zip(members, chunk.tensors(flat), strict=True):
                tensor.copy_(parameter.detach())
                parameter.data = tensor
                parameter.grad = None
            if not channel.thens:
                channel.parameters(chunk).publish(flat, version)
            for worker, flats in zip(channel.workers, channel.thens, strict=False):
                flats[chunk.number].copy_(flat)
                channel.parameters(chunk, worker).publish(flats[chunk.number], version)

    def apply(self, position: int, gradient: torch.Tensor, has_gradient: Sequence[bool]) -> None:
        """One update of one chunk; `gradient` is flat and may be overwritten."""
        chunk, members = self._share[position], self._members[position]
        version = self.versions[position] + 1
        try:
            for parameter, view, is_there in zip(members, chunk.views(gradient), has_gradient, strict=True):
                parameter.grad = view if is_there else None
            for group, picked in zip(self._optimizer.param_groups, self._groups[position], strict=True):
                group["params"] = picked
            if self._channel.thens:
                self._optimizer.step()
            else:
                with self._channel.parameters(chunk).changing(version):
                    self._optimizer.step()
        finally:
            for parameter in members:
                parameter.grad = None
            for group, everything in zip(self._optimizer.param_groups, self._all, strict=True):
                group["params"] = everything
        self.versions[position] = version

    def compensate(self, position: int, gradient: torch.Tensor, worker: int) -> None:
        """`g + lambda g*g*(w_now - w_then)`, in place, for what a worker has computed from w_then."""
        then, flat = self._then(position, worker), self._channel.flats[self._share[position].number]
        drift = flat - then
        drift.mul_(gradient)
        gradient.addcmul_(drift, gradient, value=self._channel.options.delay_compensation)

    def lay_out(self, position: int, worker: int) -> None:
        """Where delays are compensated: what this worker will read from now on, and is then known to have."""
        if self._channel.thens:
            chunk = self._share[position]
            with self._channel.parameters(chunk, worker).changing(self.versions[position]):
                self._then(position, worker).copy_(self._channel.flats[chunk.number])

    def pass_over(self, position: int) -> None:
        """The next version of a chunk is equal to this one."""
        self.versions[position] += 1
        if not self._channel.thens:
            with self._channel.parameters(self._share[position]).changing(self.versions[position]):
                pass

    def close(self) -> None:
        """The parameters move back into private memory."""
        self._channel.end(max(self.versions))
        for members in self._members:
            for parameter in members:
                parameter.data = parameter.detach().clone()

    def _then(self, position: int, worker: int) -> torch.Tensor:
        return self._channel.thens[worker - self._channel.num_servers][self._share[position].number]

    def _picked(self, members: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        known = {id(parameter): True for parameter in members}
        return [[parameter for parameter in group if id(parameter) in known] for group in self._all]
