"""One batch at the experts of a grid: each is called once with all its samples, all of them at the same time.

Which experts a sample goes to is decided by scores that a gate gives; how their answers are weighed is the
mixture's. A batch waits until each sample has enough answers, and a little for the rest.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import functools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from shoal.core import (
    Deadline,
    DeadlineExceeded,
    Peer,
    PeerError,
    PeerLeaving,
    PeerLost,
    PeerUnreachable,
    RemoteFailure,
    Scope,
    ShoalError,
    TensorError,
    UsageError,
    fanout,
    running_clock,
)
from shoal.dht import Swarm
from shoal.experts.client.client import ExpertClient, Forwarded
from shoal.experts.client.directory import Directory, Routes
from shoal.experts.names import ExpertAddress
from shoal.experts.schema import ExpertSchema
from shoal.experts.settings import MixtureSettings
from shoal.tensors.dtypes import DTYPES

_SCHEMA_S = 5.0
_NUM_VOTERS = 5  # peers asked at first: one that is unlike the others must not speak for all
_GONE = (PeerLost, PeerUnreachable, PeerLeaving)
_QUIET_S = 1.0
_MAX_NAMED = 8


class RemoteGrid:
    """Calls the experts of a grid for mixtures, from any thread but the client's loop.

    A copy of it, with its mixture, shares its directory.
    """

    def __init__(
        self, client: ExpertClient | Swarm, prefix: str, grid: Sequence[int], settings: MixtureSettings
    ) -> None:
        if isinstance(client, Swarm):
            client = ExpertClient(client).open()  # on a swarm it has nothing of its own to close
        self.directory = Directory(client, prefix, grid, refresh_s=settings.refresh_s)
        self.settings = settings
        self.last_call = LastCall()
        """Of the last batch, also when it ended in an error."""
        self._schema: ExpertSchema | None = None
        self._disproved: ExpertSchema | None = None
        """What it was before, and most experts did not follow."""

    def __deepcopy__(self, memo: Any) -> RemoteGrid:
        return copy.copy(self)

    def call(
        self, scores: torch.Tensor, args: Sequence[torch.Tensor], kwargs: Mapping[str, torch.Tensor]
    ) -> BatchCall:
        """Ask the best experts of each sample, by scores [batch, sum(grid)]; all that they answered.

        Once more when a sample lacks answers, without those that failed; NotEnoughExperts in the end.
        """
        began_s = time.perf_counter()
        timeout_s = self.settings.forward_timeout_s
        deadline = None if timeout_s is None else Deadline.after(timeout_s)
        self.last_call = LastCall()
        try:
            for num_left in reversed(range(self.settings.num_tries)):
                batch = self._try(scores, args, kwargs, deadline)
                is_late = deadline is not None and deadline.is_past
                if not batch.is_lacking or not self.last_call.num_failed or is_late or not num_left:
                    break
            batch.check_answers()
            return batch
        finally:
            self.last_call.seconds = time.perf_counter() - began_s

    def _try(
        self,
        scores: torch.Tensor,
        args: Sequence[torch.Tensor],
        kwargs: Mapping[str, torch.Tensor],
        deadline: Deadline | None,
    ) -> BatchCall:
        settings = self.settings
        began_s = time.perf_counter()
        routes = self.directory.find(
            scores.detach().cpu(),
            beam_size=settings.beam_size or settings.k_best,
            k=settings.k_best,
            k_min=settings.k_min,
            deadline=deadline,
        )
        search_s = time.perf_counter() - began_s
        schema: ExpertSchema | NotEnoughExperts
        try:
            schema = self._schema_of(routes, deadline)
        except NotEnoughExperts as error:
            schema = error
        inputs = [] if isinstance(schema, NotEnoughExperts) else self._inputs(schema, args, kwargs)
        batch = BatchCall(self.directory, settings, routes, schema, scores.device)
        self.last_call = batch.last_call
        self.last_call.search_seconds = search_s
        if batch.has_schema:
            batch.run(inputs, deadline)
            if batch.is_schema_disproved:
                self._drop_schema()
        return batch

    def _schema_of(self, routes: Routes, deadline: Deadline | None) -> ExpertSchema:
        """What all experts take and give, as most of a few peers say that are asked the first time."""
        if self._schema is None:
            limit_s = _SCHEMA_S * self.directory.client.settings.patience
            if deadline is not None:
                limit_s = min(limit_s, deadline.remaining_s / 2)  # what remains is for the calls
            schema = self._voted(routes, Deadline.after(limit_s))
            for each in schema.outputs:
                if not DTYPES[each.dtype].is_floating_point:
                    raise UsageError(f"Experts that give {each} cannot be mixed: there is no mean of it.")
            self._schema = schema
        return self._schema

    def _drop_schema(self) -> None:
        self._schema, self._disproved = None, self._schema

    def _voted(self, routes: Routes, deadline: Deadline) -> ExpertSchema:
        """Each peer has one vote, however many experts it serves."""
        voters: dict[object, tuple[ExpertAddress, Peer]] = {}
        for expert in routes.experts:
            for peer in expert.peers:
                voters.setdefault(peer.id or peer, (expert, peer))
        asked = list(voters.values())[:_NUM_VOTERS]
        told = self.directory.client.run(self._ask_schemas(asked, deadline))
        votes = _by_frequency(told)
        if votes:
            # of as many votes, one that was tried already comes last
            return max(votes, key=lambda vote: (vote[1], vote[0] != self._disproved))[0]
        last_call = LastCall(num_samples=len(routes.slots))
        for (expert, peer), error in zip(asked, told, strict=True):
            if isinstance(error, ShoalError):
                call = ExpertCall(str(expert.uid), peer, 0, error=describe_error(error))
                last_call.experts.append(call)
                is_lost = isinstance(error, _GONE) and len(expert.peers) == 1
                self.directory.failed(expert, is_peer_lost=is_lost)
        none = "none was found in time." if deadline.is_past else "none is declared in the DHT."
        raise NotEnoughExperts(
            f"No expert of {self.directory.prefix} tells what it takes and gives.",
            last_call,
            cause=(last_call.experts[0].error if last_call.experts else None) or none,
            next_step="start one with `shoal serve`; see that its uids and this grid fit together.",
        )

    async def _ask_schemas(
        self, asked: Sequence[tuple[ExpertAddress, Peer]], deadline: Deadline
    ) -> list[ExpertSchema | Exception]:
        client = self.directory.client
        return await fanout(
            [client.schema_of(str(expert.uid), (peer,), deadline) for expert, peer in asked],
            deadline,
            is_enough=lambda results: any(2 * count > len(asked) for _, count in _by_frequency(results)),
        )

    def _inputs(
        self, schema: ExpertSchema, args: Sequence[torch.Tensor], kwargs: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """What travels: in the experts' order, floating point numbers as they take them."""
        try:
            flat = [
                tensor.to(DTYPES[each.dtype])
                if tensor.is_floating_point() and DTYPES[each.dtype].is_floating_point
                else tensor
                for tensor, each in zip(schema.flatten(args, kwargs), schema.inputs, strict=True)
            ]
            schema.check_inputs(flat)
        except TensorError as error:
            self._drop_schema()  # it may be the schema that is wrong: the next call asks again
            raise UsageError(
                f"The experts {self.directory.prefix} take {schema.describe_inputs()}, and {error.what}.",
                next_step="reshape or cast the input.",
            ) from None
        except UsageError:
            self._drop_schema()
            raise
        return flat


class BatchCall:
    """A batch at its experts: who is asked for which samples, what they answer, and how gradients go back.

    Where it is not known what experts take and give, `schema` is the error that says why; nobody is asked.
    """

    def __init__(
        self,
        directory: Directory,
        settings: MixtureSettings,
        routes: Routes,
        schema: ExpertSchema | NotEnoughExperts,
        device: torch.device,
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._routes = routes
        self._schema = schema
        self._device = device
        self._num_samples = len(routes.slots)
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._is_answered = torch.zeros(routes.slots.shape, dtype=torch.bool)
        self._parts: list[ExpertPart] = []
        if isinstance(schema, NotEnoughExperts):
            self.last_call = schema.last_call
        else:
            self._parts = _parts_of(routes)
            self.last_call = LastCall([part.call for part in self._parts], self._num_samples)

    # --- what mixtures read ---

    @property
    def has_schema(self) -> bool:
        """Whether it is known what experts give; where it is not, there are no answers."""
        return isinstance(self._schema, ExpertSchema)

    @property
    def is_answered(self) -> torch.Tensor:
        """Of each slot [batch, k]."""
        return self._is_answered.to(self._device)

    @property
    def is_lacking(self) -> bool:
        """Whether a sample has fewer answers than it needs, be that an error or not."""
        return bool((self._is_answered.sum(1) < self._settings.k_min).any())

    @property
    def is_routed(self) -> torch.Tensor:
        """Whether there is an expert in each slot [batch, k]."""
        return (self._routes.slots >= 0).to(self._device)

    @property
    def coordinates(self) -> torch.Tensor:
        """Of the expert in each slot [batch, k, axes]; zeros where there is none."""
        slots, coordinates = self._routes.slots, self._routes.coordinates
        if not self._routes.experts:
            return torch.zeros((*slots.shape, coordinates.shape[1]), dtype=torch.int64, device=self._device)
        return (coordinates[slots.clamp(min=0)] * (slots >= 0).unsqueeze(-1)).to(self._device)

    @property
    def answered(self) -> list[ExpertPart]:
        """Those whose answers count."""
        return [part for part in self._parts if part.forwarded is not None]

    @property
    def is_schema_disproved(self) -> bool:
        """Whether more peers take or give something else than do what the schema says."""
        alike = dict.fromkeys(part.call.peer for part in self.answered)
        unlike = dict.fromkeys(part.call.peer for part in self._parts if part.is_unlike)
        return len([peer for peer in unlike if peer not in alike]) > len(alike)

    def check_answers(self) -> None:
        """NotEnoughExperts when a sample has fewer answers than it needs, and zeros do not do."""
        if not isinstance(self._schema, NotEnoughExperts):
            self._check(self._is_answered)
        elif not self._settings.is_none_enough:
            raise self._schema

    def mixed(self, weights: torch.Tensor, dtype: torch.dtype) -> Any:
        """The sum of each sample's answers by weights [batch, k], as the experts' module would give it.

        Weights of slots without an answer count as zero. In `dtype`, where that is one of floating point;
        NotEnoughExperts when it is not known how large zeros would be.
        """
        if isinstance(self._schema, NotEnoughExperts):
            raise self._schema
        answered, schema = self.answered, self._schema
        weights = weights.masked_fill(~self.is_answered, 0.0)
        mixed = []
        for index, each in enumerate(schema.outputs):
            to_dtype = dtype if dtype.is_floating_point else DTYPES[each.dtype]
            if answered:
                outputs = self._outputs[index :: len(schema.outputs)]
                mixed.append(sum_by_sample(answered, outputs, weights.shape, weights).to(to_dtype))
            else:
                mixed.append(torch.zeros((len(weights), *each.shape), dtype=to_dtype, device=self._device))
        return mixed[0] if schema.is_single else tuple(mixed)

    # --- asking ---

    def run(self, inputs: Sequence[torch.Tensor], deadline: Deadline | None) -> None:
        """Ask all experts, in a way that gradients go back through them."""
        self._check(self._routes.slots >= 0)
        # a tensor that needs a gradient, so that backward comes to the experts although no input needs one
        anchor = torch.empty(0, requires_grad=torch.is_grad_enabled())
        self._outputs = _AutogradCall.apply(self, deadline, anchor, *inputs)  # type: ignore[no-untyped-call]

    def forward(
        self, inputs: Sequence[torch.Tensor], deadline: Deadline | None, *, is_kept: bool
    ) -> list[torch.Tensor]:
        """Outputs of the experts that answered, one after another, on the device of the inputs."""
        device = inputs[0].device
        for part in self._parts:
            rows = part.rows.to(device)
            part.inputs = [tensor.detach().index_select(0, rows) for tensor in inputs]

        async def ask(part: ExpertPart) -> None:
            try:
                forwarded = await self._directory.client.forward(
                    part.call.uid,
                    part.expert.peers,
                    part.inputs,
                    deadline=deadline,
                    is_kept=is_kept,
                    accept=functools.partial(self._accept, part),
                )
            except TensorError:  # not of an answer: this expert takes something else
                part.is_unlike = True
                raise
            part.is_unlike = False  # if another replica was
            part.call.peer = forwarded.peer
            part.outputs = forwarded.outputs
            part.forwarded = msgspec.structs.replace(forwarded, outputs=[])

        self._call_all(self._parts, ask, self._settings.k_min, deadline)
        flat = self._is_answered.view(-1)
        outputs: list[torch.Tensor] = []
        for part in self._parts:
            part.call.seconds, part.call.is_answered = part.seconds, part.error is None
            part.call.error = None if part.error is None else describe_error(part.error)
            if part.forwarded is not None:
                flat[part.positions] = True
                outputs += [output.to(device) for output in part.outputs]
            part.outputs = []
            if not is_kept:
                part.inputs = []
        return outputs

    def _accept(self, part: ExpertPart, outputs: Sequence[torch.Tensor]) -> None:
        """TensorError for what an expert cannot have answered."""
        assert isinstance(self._schema, ExpertSchema)
        try:
            self._schema.check_outputs(outputs, len(outputs[0]) if outputs else 0)
        except TensorError:
            part.is_unlike = True
            raise
        if self._settings.is_checking and not all(map(is_finite, outputs)):
            raise TensorError("NaN or infinity")

    def backward(self, grad_outputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Gradients of the inputs, from gradients of what forward has given; None where there are none.

        A gradient that is not finite goes to no expert, and comes back as NaN, as from a local module.
        """
        began_s = time.perf_counter()
        answered = self.answered
        num_outputs = len(grad_outputs) // len(answered)
        diverged: list[ExpertPart] = []
        for at, part in enumerate(answered):
            part.grad_outputs = list(grad_outputs[num_outputs * at : num_outputs * (at + 1)])
            part.error, part.gradients = None, None
            if self._settings.is_checking and not all(map(is_finite, part.grad_outputs)):
                diverged.append(part)
                part.call.backward_error = "its gradient is not finite, and was not sent"
        asked = [part for part in answered if part not in diverged]
        timeout_s = self._settings.backward_timeout_s
        deadline = None if timeout_s is None else Deadline.after(timeout_s)

        async def ask(part: ExpertPart) -> None:
            assert part.forwarded is not None
            gradients = await self._directory.client.backward(
                part.forwarded, part.inputs, part.grad_outputs, deadline=deadline
            )
            there = [gradient for gradient in gradients if gradient is not None]
            if self._settings.is_checking and not all(map(is_finite, there)):
                peer, uid = part.forwarded.peer, part.call.uid
                raise RemoteFailure(f"{peer} answered NaN or infinity as a gradient of {uid}.", peer=peer)
            part.gradients = gradients

        if asked:
            self._call_all(asked, ask, self._settings.backward_k_min, deadline)
        for part in asked:
            part.call.backward_seconds = part.seconds
            part.call.backward_error = None if part.error is None else describe_error(part.error)
        self._check_backward(asked)
        self.last_call.backward_seconds = time.perf_counter() - began_s
        gradients = [
            self._gradient(index, asked, diverged) if tensor.is_floating_point() else None
            for index, tensor in enumerate(answered[0].inputs)
        ]
        for part in answered:
            part.gradients, part.grad_outputs = None, []
        return gradients

    def _gradient(
        self, index: int, asked: Sequence[ExpertPart], diverged: Sequence[ExpertPart]
    ) -> torch.Tensor:
        example = self.answered[0].inputs[index]
        given = [
            (part, gradient.to(example.device))
            for part in asked
            if part.gradients is not None and (gradient := part.gradients[index]) is not None
        ]
        if given:
            parts, gradients = zip(*given, strict=True)
            total = sum_by_sample(parts, gradients, self._is_answered.shape)
        else:
            total = example.new_zeros((self._num_samples, *example.shape[1:]))
        for part in diverged:
            total[part.rows.to(total.device)] = torch.nan
        return total

    def _call_all(
        self,
        parts: Sequence[ExpertPart],
        ask: Callable[[ExpertPart], Coroutine[Any, Any, None]],
        k_min: int,
        deadline: Deadline | None,
    ) -> None:
        """Ask all of them at once; each part then has its error, or none, and the seconds that it took."""
        directory = self._directory
        after_s = self._settings.timeout_after_k_min_s
        patience = Patience(k_min, deadline, after_s, _QUIET_S * directory.client.settings.patience)
        has_time = deadline is None or not deadline.is_past
        directory.client.run(self._asked(parts, ask, patience))
        # answers count last: a peer that answered for one expert is there, though another may have failed
        for part in parts:
            if part.error is not None and has_time and not (part.is_left_behind and after_s is not None):
                is_lost = isinstance(part.error, (DeadlineExceeded, *_GONE)) and not part.is_left_behind
                directory.failed(part.expert, is_peer_lost=is_lost)
        for part in parts:
            if part.error is None:
                directory.answered(part.expert, part.call.peer.id)

    async def _asked(
        self,
        parts: Sequence[ExpertPart],
        ask: Callable[[ExpertPart], Coroutine[Any, Any, None]],
        patience: Patience,
    ) -> None:
        began_s = time.perf_counter()
        not_yet = ShoalError("It has not answered yet.")

        async def one(part: ExpertPart) -> bool:
            try:
                await ask(part)
                part.error = None
            except ShoalError as error:
                part.error = error
                if isinstance(error, PeerError) and isinstance(error.peer, Peer):
                    part.call.peer = error.peer
            part.seconds = time.perf_counter() - began_s
            return part.error is None

        for part in parts:
            part.error = not_yet
            part.is_relied_on = not self._directory.is_on_trial(part.expert)
        is_enough = await ask_all(parts, one, self._num_samples, patience)
        for part in parts:
            part.is_left_behind = is_enough and part.error is not_yet
            if part.error is not_yet:
                when = "the others had" if is_enough else "the time was over"
                part.error = DeadlineExceeded(f"It had not answered when {when}, and was left behind.")
                part.seconds = time.perf_counter() - began_s

    # --- whether it is enough ---

    def _check(self, is_there: torch.Tensor) -> None:
        """NotEnoughExperts when a sample has too few of these slots [batch, k]: routes, or answers."""
        num_there = is_there.sum(1)
        is_short = num_there < self._settings.k_min
        if self._settings.when_none_answers == "zeros":
            is_short &= num_there > 0
        if bool(is_short.any()):
            raise self._not_enough(is_short, self._settings.k_min, "answers")

    def _check_backward(self, asked: Sequence[ExpertPart]) -> None:
        num_asked = _count_by_sample(asked, self._num_samples)
        answered = [part for part in asked if part.gradients is not None]
        num_answered = _count_by_sample(answered, self._num_samples)
        is_short = (num_answered < self._settings.backward_k_min) & (num_asked > 0)
        if bool(is_short.any()):
            raise self._not_enough(is_short, self._settings.backward_k_min, "gradients")

    def _not_enough(self, is_short: torch.Tensor, k_min: int, what: str) -> NotEnoughExperts:
        short = is_short.nonzero().flatten().tolist()
        failed = [
            f"{part.call.uid} at {part.call.peer}: {describe_error(part.error)}"
            for part in self._parts
            if part.error is not None and bool(is_short[part.rows].any())
        ]
        return NotEnoughExperts(
            f"{len(short)} of {len(is_short)} samples have fewer than {k_min} {what} of experts "
            f"{self._directory.prefix}: {_listed(short, ', ')}.",
            self.last_call,
            cause=_listed(failed, "; ") or "so few of them are declared in the DHT.",
            next_step="see `last_call`; start more servers, lower k_min, or let when_none_answers='zeros'.",
        )


class _AutogradCall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, batch: BatchCall, deadline: Deadline | None, anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.batch = batch
        return tuple(batch.forward(inputs, deadline, is_kept=anchor.requires_grad))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, None, *ctx.batch.backward(grad_outputs))


class ExpertPart:
    """What one expert does for the batch."""

    def __init__(self, expert: ExpertAddress, rows: torch.Tensor, positions: torch.Tensor) -> None:
        self.expert = expert
        self.rows = rows
        """Which samples, on the CPU."""
        self.positions = positions
        """The same in [batch * k]."""
        self.call = ExpertCall(str(expert.uid), expert.peer, len(rows))
        self.inputs: list[torch.Tensor] = []
        self.forwarded: Forwarded | None = None
        self.outputs: list[torch.Tensor] = []
        self.grad_outputs: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor | None] | None = None
        self.error: ShoalError | None = None
        self.seconds = 0.0
        self.is_relied_on = True
        """Whether samples that lack answers wait for it; else only those do that can rely on no other."""
        self.is_left_behind = False
        """Whether the error is only that its answer was not needed any more."""
        self.is_unlike = False
        """Whether the expert takes or gives something else than the others."""


def _parts_of(routes: Routes) -> list[ExpertPart]:
    flat = routes.slots.flatten()
    num_empty, *sizes = torch.bincount(flat + 1, minlength=len(routes.experts) + 1).tolist()
    positions = torch.split(flat.argsort(stable=True)[num_empty:], sizes)
    k = max(1, routes.slots.shape[1])
    return [ExpertPart(expert, at // k, at) for expert, at in zip(routes.experts, positions, strict=True)]


def sum_by_sample(
    parts: Sequence[ExpertPart],
    tensors: Sequence[torch.Tensor],
    shape: Sequence[int],
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Of what these experts gave for their samples, the sum for each sample of a batch with [batch, k] slots.

    By weights of the slots, where there are some; sums in float32 at least.
    """
    batch_size, k = shape
    sample = tensors[0][:1]
    dtype = torch.promote_types(sample.dtype, torch.float32)
    positions = torch.cat([part.positions for part in parts])
    slots = torch.full((batch_size * k,), len(positions))
    slots[positions] = torch.arange(len(positions))
    rows = torch.cat([*tensors, torch.zeros_like(sample)]).to(dtype)  # the last row is for empty slots
    total = nn.functional.embedding_bag(
        slots.view(batch_size, k).to(rows.device),
        rows.view(len(rows), -1),
        mode="sum",
        per_sample_weights=None if weights is None else weights.to(dtype),
    )
    return total.view(batch_size, *sample.shape[1:]).to(sample.dtype)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether there is no NaN and no infinity in it; one pass unless there may be."""
    if not tensor.is_floating_point():
        return True
    total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
    return bool(total.isfinite()) or bool(tensor.isfinite().all())


def _by_frequency(results: Sequence[ExpertSchema | Exception]) -> list[tuple[ExpertSchema, int]]:
    return collections.Counter(result for result in results if isinstance(result, ExpertSchema)).most_common()


def _listed(things: Sequence[object], separator: str) -> str:
    listed = separator.join(map(str, things[:_MAX_NAMED]))
    return f"{listed}{separator}…" if len(things) > _MAX_NAMED else listed


# --- how long a batch waits ---


@dataclass(frozen=True, slots=True)
class Patience:
    """The rule: `k_min` answers for each sample before `deadline`; then `after_s` for the others.

    Without `after_s` the others are waited for as long as answers keep coming: until none came for three
    times as long as it took to have enough, or for `quiet_s` where that is longer.
    """

    k_min: int
    deadline: Deadline | None
    after_s: float | None
    quiet_s: float = 1.0


async def ask_all(
    parts: Sequence[ExpertPart],
    ask: Callable[[ExpertPart], Coroutine[Any, Any, bool]],
    num_samples: int,
    patience: Patience,
) -> bool:
    """Ask for all parts at once, where True is an answer.

    Late ones are cut off: those that nobody needed any more, when it gives True.
    """
    clock = running_clock()
    began_s = clock.now_s()
    waiting = _Waiting(parts, num_samples, max(1, patience.k_min))  # who needs none would rather have one

    async def one(part: ExpertPart) -> None:
        waiting.ended(part, is_answered=await ask(part))

    async with Scope("experts") as scope:
        for part in parts:
            scope.start(one(part))
        deadline = patience.deadline
        try:
            async with asyncio.timeout(None if deadline is None else deadline.timeout_s):
                await waiting.is_enough.wait()
                await _the_others(waiting, patience, clock.now_s() - began_s)
        except TimeoutError:
            scope.cancel()
    return waiting.is_enough.is_set()


async def _the_others(waiting: _Waiting, patience: Patience, elapsed_s: float) -> None:
    if patience.after_s is not None:
        async with asyncio.timeout(patience.after_s):
            await waiting.is_all.wait()
        return
    while not waiting.is_all.is_set():
        waiting.has_moved.clear()
        async with asyncio.timeout(max(patience.quiet_s, 3 * elapsed_s)):
            await waiting.has_moved.wait()


class _Waiting:
    """Tells when every sample has enough answers or can have no more, and when all calls have ended."""

    def __init__(self, parts: Sequence[ExpertPart], num_samples: int, k_min: int) -> None:
        self.is_enough = asyncio.Event()
        self.is_all = asyncio.Event()
        self.has_moved = asyncio.Event()
        self._num_calls = len(parts)
        self._num_relied_on = _count_by_sample([part for part in parts if part.is_relied_on], num_samples)
        """Of each sample: calls that are open or answered."""
        self._num_open = self._num_relied_on.clone()
        self._num_open_others = _count_by_sample(
            [part for part in parts if not part.is_relied_on], num_samples
        )
        self._lacking = torch.full_like(self._num_open, k_min)
        self._update()

    def ended(self, part: ExpertPart, *, is_answered: bool) -> None:
        """A call is over."""
        self._num_calls -= 1
        (self._num_open if part.is_relied_on else self._num_open_others)[part.rows] -= 1
        if part.is_relied_on and not is_answered:
            self._num_relied_on[part.rows] -= 1
        if is_answered:
            self._lacking[part.rows] -= 1
        self._update()

    def _update(self) -> None:
        if self._num_calls == 0:
            self.is_all.set()
        if not self.is_enough.is_set():
            num_awaited = torch.where(self._num_relied_on > 0, self._num_open, self._num_open_others)
            if not bool(((self._lacking > 0) & (num_awaited > 0)).any()):
                self.is_enough.set()
        self.has_moved.set()


def _count_by_sample(parts: Sequence[ExpertPart], num_samples: int) -> torch.Tensor:
    rows = torch.cat([torch.empty(0, dtype=torch.int64), *(part.rows for part in parts)])
    return torch.bincount(rows, minlength=num_samples)


# --- what became of it ---


@dataclass(slots=True)
class ExpertCall:
    """What became of one expert's part of a batch."""

    uid: str
    peer: Peer
    """Who answered or failed; the first to be asked while that is not known."""
    num_samples: int
    is_answered: bool = False
    seconds: float | None = None
    """Until the answer or the failure."""
    error: str | None = None
    backward_seconds: float | None = None
    backward_error: str | None = None


@dataclass(slots=True)
class LastCall:
    """What became of a mixture's last batch: filled in by forward, and later by backward."""

    experts: list[ExpertCall] = field(default_factory=list)
    num_samples: int = 0
    search_seconds: float = 0.0
    """Of finding the experts; next to nothing unless the DHT had to be asked."""
    seconds: float = 0.0
    """Of the whole forward."""
    backward_seconds: float | None = None

    @property
    def num_asked(self) -> int:
        """Experts that were called."""
        return len(self.experts)

    @property
    def num_answered(self) -> int:
        """Experts whose answers count."""
        return sum(call.is_answered for call in self.experts)

    @property
    def num_failed(self) -> int:
        """Experts that were called in vain."""
        return self.num_asked - self.num_answered

    def __str__(self) -> str:
        backward = "" if self.backward_seconds is None else f", backward {_ms(self.backward_seconds)}"
        head = (
            f"{self.num_answered} of {self.num_asked} experts answered for {self.num_samples} samples in "
            f"{_ms(self.seconds)} (search {_ms(self.search_seconds)}{backward})"
        )
        rows = [("expert", "peer", "samples", "forward", "backward", "error")]
        rows += [
            (
                call.uid,
                str(call.peer),
                str(call.num_samples),
                _ms(call.seconds),
                _ms(call.backward_seconds),
                call.error or call.backward_error or "",
            )
            for call in self.experts
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                text.rjust(width) if 2 <= at <= 4 else text.ljust(width)
                for at, (text, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([head, *lines])


class NotEnoughExperts(ShoalError):
    """A sample has fewer answers than it needs; `last_call` has every expert that was asked."""

    def __init__(self, what: str, last_call: LastCall, *, cause: str = "", next_step: str = "") -> None:
        super().__init__(what, cause=cause, next_step=next_step)
        self.last_call = last_call


def describe_error(error: BaseException) -> str:
    """One line that names the kind of error and what happened."""
    what = error.what if isinstance(error, ShoalError) else str(error)
    return f"{type(error).__name__}: {what}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"
