"""A remote expert as a module of the local model: its forward and backward are calls to a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from shoal.core import Deadline, DeadlineExceeded, Peer, PeerError, TensorError, UsageError
from shoal.experts.client import ExpertClient, Forwarded
from shoal.experts.schema import ExpertSchema


class RemoteExpert(nn.Module):
    """Calls an expert where its module would be called; gradients flow through it, and the expert learns.

    It has no parameters here. `forward_timeout_s` and `backward_timeout_s` bound a call; without them the
    client's own deadlines do, which follow what the server usually takes. Made by `ExpertClient.expert`.
    """

    def __init__(self, client: ExpertClient, uid: str, peers: Sequence[Peer] = ()) -> None:
        super().__init__()
        self._client = client
        self.uid = uid
        self._is_looked_up = not peers
        self.peers = tuple(peers) or tuple(client.run(client.find(uid)))
        self.forward_timeout_s: float | None = None
        self.backward_timeout_s: float | None = None

    @property
    def schema(self) -> ExpertSchema:
        """What it takes and gives; asked of a server the first time."""
        known = self._client.known_schema(self.uid)
        return known or self._client.run(self._client.schema_of(self.uid, self.peers))

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        """What the expert's module gives for these inputs."""
        schema = self.schema
        inputs = schema.flatten(args, kwargs)
        if not torch.is_grad_enabled():
            outputs = tuple(_on(inputs[0], self.call_forward(inputs, is_kept=False).outputs))
        else:
            # A tensor that needs a gradient, so that backward comes here although no input needs one.
            anchor = torch.empty(0, requires_grad=True)
            outputs = _RemoteCall.apply(self, anchor, *inputs)  # type: ignore[no-untyped-call]
        return outputs[0] if schema.is_single else outputs

    def extra_repr(self) -> str:
        """For printing the model."""
        return f"{self.uid} at {', '.join(map(str, self.peers))}"

    def call_forward(self, inputs: Sequence[torch.Tensor], *, is_kept: bool) -> Forwarded:
        """One forward call, outside of autograd."""
        deadline = None if self.forward_timeout_s is None else Deadline.after(self.forward_timeout_s)
        try:
            if self._is_looked_up:
                return self._client.run(self._forward(inputs, deadline, is_kept=is_kept))
            return self._client.run(
                self._client.forward(self.uid, self.peers, inputs, deadline=deadline, is_kept=is_kept)
            )
        except TensorError as error:
            raise UsageError(
                f"The expert {self.uid} takes {self.schema.describe_inputs()}, and {error.what}.",
                next_step="reshape or cast the input.",
            ) from None

    async def _forward(
        self, inputs: Sequence[torch.Tensor], deadline: Deadline | None, *, is_kept: bool
    ) -> Forwarded:
        client = self._client
        try:
            return await client.forward(self.uid, self.peers, inputs, deadline=deadline, is_kept=is_kept)
        except (PeerError, DeadlineExceeded):
            if deadline is not None and deadline.is_past:
                raise
            peers = tuple(await client.find(self.uid))
            if peers == self.peers:
                raise
            self.peers = peers  # it has moved, or was adopted
            return await client.forward(self.uid, peers, inputs, deadline=deadline, is_kept=is_kept)

    def call_backward(
        self, forwarded: Forwarded, inputs: Sequence[torch.Tensor], grad_outputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The backward call that belongs to a forward call."""
        deadline = None if self.backward_timeout_s is None else Deadline.after(self.backward_timeout_s)
        return self._client.run(self._client.backward(forwarded, inputs, grad_outputs, deadline=deadline))


class _RemoteCall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, expert: RemoteExpert, anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        forwarded = expert.call_forward([tensor.detach() for tensor in inputs], is_kept=True)
        outputs = tuple(_on(inputs[0], forwarded.outputs))
        ctx.mark_non_differentiable(*(tensor for tensor in outputs if not _has_gradient(tensor)))
        ctx.expert = expert
        ctx.forwarded = msgspec.structs.replace(forwarded, outputs=[])
        ctx.save_for_backward(*inputs)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = ctx.saved_tensors
        gradients = ctx.expert.call_backward(ctx.forwarded, inputs, grad_outputs)
        return (
            None,
            None,
            *(
                None if gradient is None else gradient.to(tensor.device)
                for gradient, tensor in zip(gradients, inputs, strict=True)
            ),
        )


def _on(like: torch.Tensor, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs on the device of an input."""
    return list(outputs) if like.is_cpu else [tensor.to(like.device) for tensor in outputs]


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
