"""The experts of a grid as mixtures call them: a batch goes out, and gradients find their way back.

Which experts a sample goes to is decided by scores that a gate gives; how their answers are weighed is the
mixture's.
"""

from __future__ import annotations

import collections
import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.core import (
    Deadline,
    Peer,
    PeerLeaving,
    PeerLost,
    PeerUnreachable,
    ShoalError,
    TensorError,
    UsageError,
    fanout,
)
from shoal.dht import Swarm
from shoal.experts.client import ExpertClient
from shoal.experts.directory import Directory
from shoal.experts.last_call import ExpertCall, LastCall, NotEnoughExperts, describe_error
from shoal.experts.mixture_settings import MixtureSettings
from shoal.experts.names import ExpertAddress
from shoal.experts.parallel import ExpertRound
from shoal.experts.routing import Routes
from shoal.experts.schema import ExpertSchema
from shoal.experts.shares import sum_by_sample
from shoal.tensors.dtypes import DTYPES

_SCHEMA_S = 5.0
_NUM_VOTERS = 5  # peers asked at first: one that is unlike the others must not speak for all
_LOST = (PeerLost, PeerUnreachable, PeerLeaving)


class RemoteGrid:
    """For any thread but the client's loop. A copy of it, with its mixture, shares its directory."""

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
    ) -> Called:
        """Ask the best experts of each sample, by scores [batch, sum(grid)]; all that they answered.

        Once more when a sample lacks answers, without those that failed; NotEnoughExperts in the end.
        """
        began_s = time.perf_counter()
        timeout_s = self.settings.forward_timeout_s
        deadline = None if timeout_s is None else Deadline.after(timeout_s)
        self.last_call = LastCall()
        try:
            for num_left in reversed(range(self.settings.num_tries)):
                called = self._called(scores, args, kwargs, deadline)
                is_late = deadline is not None and deadline.is_past
                if not called.is_lacking or not self.last_call.num_failed or is_late or not num_left:
                    break
            called.check()
            return called
        finally:
            self.last_call.seconds = time.perf_counter() - began_s

    def _called(
        self,
        scores: torch.Tensor,
        args: Sequence[torch.Tensor],
        kwargs: Mapping[str, torch.Tensor],
        deadline: Deadline | None,
    ) -> Called:
        began_s = time.perf_counter()
        routes = self._find(scores, deadline)
        search_s = time.perf_counter() - began_s
        try:
            schema = self._schema_of(routes, deadline)
        except NotEnoughExperts as error:
            self.last_call = error.last_call
            self.last_call.search_seconds = search_s
            return Called(error, routes, (), scores.device, self.settings)
        try:
            inputs = self._inputs(schema, args, kwargs)
        except UsageError:
            self._drop_schema()  # it may be the schema that is wrong: the next call asks again
            raise
        round_ = ExpertRound(self.directory, self.settings, routes, schema)
        self.last_call = round_.last_call
        self.last_call.search_seconds = search_s
        round_.check(routes.slots >= 0)
        # a tensor that needs a gradient, so that backward comes to the experts although no input needs one
        anchor = torch.empty(0, requires_grad=torch.is_grad_enabled())
        outputs = _Round.apply(round_, deadline, anchor, *inputs)  # type: ignore[no-untyped-call]
        if round_.is_schema_disproved:
            self._drop_schema()
        return Called(round_, routes, outputs, scores.device, self.settings)

    def _find(self, scores: torch.Tensor, deadline: Deadline | None) -> Routes:
        settings = self.settings
        return self.directory.find(
            scores.detach().cpu(),
            beam_size=settings.beam_size or settings.k_best,
            k=settings.k_best,
            k_min=settings.k_min,
            deadline=deadline,
        )

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
                is_lost = isinstance(error, _LOST) and len(expert.peers) == 1
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
        flat = [
            tensor.to(DTYPES[each.dtype])
            if tensor.is_floating_point() and DTYPES[each.dtype].is_floating_point
            else tensor
            for tensor, each in zip(schema.flatten(args, kwargs), schema.inputs, strict=True)
        ]
        try:
            schema.check_inputs(flat)
        except TensorError as error:
            raise UsageError(
                f"The experts {self.directory.prefix} take {schema.describe_inputs()}, and {error.what}.",
                next_step="reshape or cast the input.",
            ) from None
        return flat


class Called:
    """A batch that has been at its experts."""

    def __init__(
        self,
        outcome: ExpertRound | NotEnoughExperts,
        routes: Routes,
        outputs: tuple[torch.Tensor, ...],
        device: torch.device,
        settings: MixtureSettings,
    ) -> None:
        self._outcome = outcome
        self._routes = routes
        self._outputs = outputs
        self._device = device
        self._settings = settings

    @property
    def has_schema(self) -> bool:
        """Whether it is known what experts give; where it is not, there are no answers."""
        return isinstance(self._outcome, ExpertRound)

    @property
    def is_answered(self) -> torch.Tensor:
        """Of each slot [batch, k]."""
        if isinstance(self._outcome, ExpertRound):
            return self._outcome.is_answered.to(self._device)
        return torch.zeros(self._routes.slots.shape, dtype=torch.bool, device=self._device)

    @property
    def is_lacking(self) -> bool:
        """Whether a sample has fewer answers than it needs, be that an error or not."""
        return bool((self.is_answered.sum(1) < self._settings.k_min).any())

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

    def check(self) -> None:
        """NotEnoughExperts when a sample has fewer answers than it needs, and zeros do not do."""
        if isinstance(self._outcome, ExpertRound):
            self._outcome.check(self._outcome.is_answered)
        elif not self._settings.is_none_enough:
            raise self._outcome

    def mixed(self, weights: torch.Tensor, dtype: torch.dtype) -> Any:
        """The sum of each sample's answers by weights [batch, k], as the experts' module would give it.

        Weights of slots without an answer count as zero. In `dtype`, where that is one of floating point;
        NotEnoughExperts when it is not known how large zeros would be.
        """
        if not isinstance(self._outcome, ExpertRound):
            raise self._outcome
        answered, schema = self._outcome.answered, self._outcome.schema
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


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, round_: ExpertRound, deadline: Deadline | None, anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.round = round_
        return tuple(round_.forward(inputs, deadline, is_kept=anchor.requires_grad))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, None, *ctx.round.backward(grad_outputs))


def _by_frequency(results: Sequence[ExpertSchema | Exception]) -> list[tuple[ExpertSchema, int]]:
    return collections.Counter(result for result in results if isinstance(result, ExpertSchema)).most_common()
