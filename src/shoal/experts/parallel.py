"""One batch at many experts: each is called once with all its samples, and all at the same time.

How long they are waited for is `stragglers`' to say, how their answers are weighed the mixtures'.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import torch

from shoal.core import (
    Deadline,
    DeadlineExceeded,
    Peer,
    PeerError,
    PeerLeaving,
    PeerLost,
    PeerUnreachable,
    RemoteFailure,
    ShoalError,
    TensorError,
)
from shoal.experts.directory import Directory
from shoal.experts.last_call import LastCall, NotEnoughExperts, describe_error
from shoal.experts.mixture_settings import MixtureSettings
from shoal.experts.routing import Routes
from shoal.experts.schema import ExpertSchema
from shoal.experts.shares import Share, is_finite, sum_by_sample
from shoal.experts.stragglers import Call, Patience, ask_all

_LOST = (DeadlineExceeded, PeerLost, PeerUnreachable, PeerLeaving)
_QUIET_S = 1.0
_MAX_NAMED = 8


class ExpertRound:
    """A batch on its way through its experts."""

    def __init__(
        self, directory: Directory, settings: MixtureSettings, routes: Routes, schema: ExpertSchema
    ) -> None:
        self._directory = directory
        self._settings = settings
        self.schema = schema
        self._num_samples, self._k = routes.slots.shape
        flat = routes.slots.flatten()
        order = flat.argsort(stable=True)
        num_empty, *sizes = torch.bincount(flat + 1, minlength=len(routes.experts) + 1).tolist()
        positions = torch.split(order[num_empty:], sizes)
        self._shares = [
            Share(expert, part // max(1, self._k), part)
            for expert, part in zip(routes.experts, positions, strict=True)
        ]
        self.last_call = LastCall([share.call for share in self._shares], self._num_samples)
        self.is_answered = torch.zeros(routes.slots.shape, dtype=torch.bool)
        """Of each slot, after forward."""

    @property
    def answered(self) -> list[Share]:
        """Those whose answers count."""
        return [share for share in self._shares if share.forwarded is not None]

    def forward(
        self, inputs: Sequence[torch.Tensor], deadline: Deadline | None, *, is_kept: bool
    ) -> list[torch.Tensor]:
        """Outputs of the experts that answered, one after another, on the device of the inputs."""
        device = inputs[0].device
        for share in self._shares:
            rows = share.rows.to(device)
            share.inputs = [tensor.detach().index_select(0, rows) for tensor in inputs]

        async def ask(share: Share) -> None:
            try:
                forwarded = await self._directory.client.forward(
                    share.call.uid,
                    share.expert.peers,
                    share.inputs,
                    deadline=deadline,
                    is_kept=is_kept,
                    accept=functools.partial(self._accept, share),
                )
            except TensorError:  # not of an answer: this expert takes something else
                share.is_unlike = True
                raise
            share.is_unlike = False  # if another replica was
            share.call.peer = forwarded.peer
            share.outputs = forwarded.outputs
            share.forwarded = msgspec.structs.replace(forwarded, outputs=[])

        def note(share: Share, seconds: float) -> None:
            share.call.seconds = seconds
            share.call.is_answered = share.error is None
            share.call.error = None if share.error is None else describe_error(share.error)

        self._call_all(self._shares, ask, note, self._settings.k_min, deadline)
        flat = self.is_answered.view(-1)
        for share in self.answered:
            flat[share.positions] = True
        outputs = [output.to(device) for share in self.answered for output in share.outputs]
        for share in self._shares:
            share.outputs = []
            if not is_kept:
                share.inputs = []
        return outputs

    def _accept(self, share: Share, outputs: Sequence[torch.Tensor]) -> None:
        """TensorError for what an expert cannot have answered."""
        try:
            self.schema.check_outputs(outputs, len(outputs[0]) if outputs else 0)
        except TensorError:
            share.is_unlike = True
            raise
        if self._settings.is_checking and not all(map(is_finite, outputs)):
            raise TensorError("NaN or infinity")

    @property
    def is_schema_disproved(self) -> bool:
        """Whether more peers take or give something else than do what the schema says."""
        alike = dict.fromkeys(share.call.peer for share in self.answered)
        unlike = dict.fromkeys(share.call.peer for share in self._shares if share.is_unlike)
        return len([peer for peer in unlike if peer not in alike]) > len(alike)

    def check(self, is_there: torch.Tensor) -> None:
        """NotEnoughExperts when a sample has too few of these slots [batch, k]: routes, or answers."""
        num_there = is_there.sum(1)
        is_short = num_there < self._settings.k_min
        if self._settings.when_none_answers == "zeros":
            is_short &= num_there > 0
        if bool(is_short.any()):
            raise self._not_enough(is_short, self._settings.k_min, "answers")

    def backward(self, grad_outputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradients of the inputs, from gradients of what forward has given; None where there are none.

        A gradient that is not finite goes to no expert, and comes back as NaN, as from a local module.
        """
        began_s = time.perf_counter()
        answered = self.answered
        num_outputs = len(self.schema.outputs)
        grads = {
            id(share): list(grad_outputs[num_outputs * at : num_outputs * (at + 1)])
            for at, share in enumerate(answered)
        }
        diverged = []
        if self._settings.is_checking:
            diverged = [share for share in answered if not all(map(is_finite, grads[id(share)]))]
        for share in diverged:
            share.call.backward_error = "its gradient is not finite, and was not sent"
        asked = [share for share in answered if share not in diverged]
        timeout_s = self._settings.backward_timeout_s
        deadline = None if timeout_s is None else Deadline.after(timeout_s)

        async def ask(share: Share) -> None:
            assert share.forwarded is not None
            gradients = await self._directory.client.backward(
                share.forwarded, share.inputs, grads[id(share)], deadline=deadline
            )
            there = [gradient for gradient in gradients if gradient is not None]
            self._check_finite(there, share.forwarded.peer, f"as a gradient of {share.call.uid}")
            share.gradients = gradients

        def note(share: Share, seconds: float) -> None:
            share.call.backward_seconds = seconds
            share.call.backward_error = None if share.error is None else describe_error(share.error)

        for share in answered:
            share.error, share.gradients = None, None
        if asked:
            self._call_all(asked, ask, note, self._settings.backward_k_min, deadline)
        self._check_backward(asked)
        self.last_call.backward_seconds = time.perf_counter() - began_s
        gradients = [
            self._gradient(index, asked, diverged) if tensor.is_floating_point() else None
            for index, tensor in enumerate(answered[0].inputs)
        ]
        for share in asked:
            share.gradients = None
        return gradients

    def _check_backward(self, asked: Sequence[Share]) -> None:
        num_asked = self._count(asked)
        num_answered = self._count([share for share in asked if share.gradients is not None])
        is_short = (num_answered < self._settings.backward_k_min) & (num_asked > 0)
        if bool(is_short.any()):
            raise self._not_enough(is_short, self._settings.backward_k_min, "gradients")

    def _count(self, shares: Sequence[Share]) -> torch.Tensor:
        rows = [share.rows for share in shares] or [torch.empty(0, dtype=torch.int64)]
        return torch.bincount(torch.cat(rows), minlength=self._num_samples)

    def _gradient(self, index: int, asked: Sequence[Share], diverged: Sequence[Share]) -> torch.Tensor:
        example = self.answered[0].inputs[index]
        given = [
            (share, gradient.to(example.device))
            for share in asked
            if share.gradients is not None and (gradient := share.gradients[index]) is not None
        ]
        if given:
            shares, gradients = zip(*given, strict=True)
            total = sum_by_sample(shares, gradients, self.is_answered.shape)
        else:
            total = example.new_zeros((self._num_samples, *example.shape[1:]))
        for share in diverged:
            total[share.rows.to(total.device)] = torch.nan
        return total

    # --- calling all of them ---

    def _call_all(
        self,
        shares: Sequence[Share],
        ask: Callable[[Share], Coroutine[Any, Any, None]],
        note: Callable[[Share, float], None],
        k_min: int,
        deadline: Deadline | None,
    ) -> None:
        client = self._directory.client
        after_s = self._settings.timeout_after_k_min_s
        patience = Patience(k_min, deadline, after_s, _QUIET_S * client.settings.patience)
        has_time = deadline is None or not deadline.is_past
        client.run(self._asked(shares, ask, note, patience))
        # answers count last: a peer that answered for one expert is there, though another may have failed
        for share in shares:
            if share.error is not None and has_time and not (share.is_left_behind and after_s is not None):
                is_lost = isinstance(share.error, _LOST) and not share.is_left_behind
                self._directory.failed(share.expert, is_peer_lost=is_lost)
        for share in shares:
            if share.error is None:
                self._directory.answered(share.expert, share.call.peer.id)

    async def _asked(
        self,
        shares: Sequence[Share],
        ask: Callable[[Share], Coroutine[Any, Any, None]],
        note: Callable[[Share, float], None],
        patience: Patience,
    ) -> None:
        began_s = time.perf_counter()
        is_open = ShoalError("It has not answered yet.")

        async def one(share: Share) -> bool:
            try:
                await ask(share)
                share.error = None
            except ShoalError as error:
                share.error = error
                if isinstance(error, PeerError) and isinstance(error.peer, Peer):
                    share.call.peer = error.peer
            note(share, time.perf_counter() - began_s)
            return share.error is None

        for share in shares:
            share.error = is_open
        calls = [
            Call(functools.partial(one, share), share.rows, not self._directory.is_on_trial(share.expert))
            for share in shares
        ]
        is_enough = await ask_all(calls, self._num_samples, patience)
        for share in shares:
            share.is_left_behind = is_enough and share.error is is_open
            if share.error is is_open:
                when = "the others had" if is_enough else "the time was over"
                share.error = DeadlineExceeded(f"It had not answered when {when}, and was left behind.")
                note(share, time.perf_counter() - began_s)

    def _check_finite(self, tensors: Sequence[torch.Tensor], peer: Peer, what: str) -> None:
        if self._settings.is_checking and not all(map(is_finite, tensors)):
            raise RemoteFailure(f"{peer} answered NaN or infinity {what}.", peer=peer)

    def _not_enough(self, is_short: torch.Tensor, k_min: int, what: str) -> NotEnoughExperts:
        short = is_short.nonzero().flatten().tolist()
        failed = [
            f"{share.call.uid} at {share.call.peer}: {describe_error(share.error)}"
            for share in self._shares
            if share.error is not None and bool(is_short[share.rows].any())
        ]
        return NotEnoughExperts(
            f"{len(short)} of {len(is_short)} samples have fewer than {k_min} {what} of experts "
            f"{self._directory.prefix}: {_listed(short, ', ')}.",
            self.last_call,
            cause=_listed(failed, "; ") or "so few of them are declared in the DHT.",
            next_step="see `last_call`; start more servers, lower k_min, or let when_none_answers='zeros'.",
        )


def _listed(things: Sequence[object], separator: str) -> str:
    listed = separator.join(map(str, things[:_MAX_NAMED]))
    return f"{listed}{separator}…" if len(things) > _MAX_NAMED else listed
