"""The experts of a grid as mixtures call them: a batch goes out, and gradients find their way back.

Which experts a sample goes to is decided by scores that a gate gives; how their answers are weighed is the
mixture's.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.core import Deadline, TensorError, UsageError, fanout
from shoal.dht import Swarm
from shoal.dht.declaring import ExpertAddress
from shoal.experts.client import ExpertClient
from shoal.experts.directory import Directory
from shoal.experts.last_call import LastCall, NotEnoughExperts
from shoal.experts.mixture_settings import MixtureSettings
from shoal.experts.parallel import ExpertRound
from shoal.experts.routing import Routes
from shoal.experts.schema import ExpertSchema
from shoal.experts.shares import sum_by_sample
from shoal.tensors.dtypes import DTYPES

_SCHEMA_S = 5.0
_NUM_SCHEMAS = 5  # asked at first: one expert that is unlike the others must not speak for all


class RemoteGrid:
    """For any thread but the client's loop. A copy of it, with its mixture, is the same one."""

    def __init__(
        self, client: ExpertClient | Swarm, prefix: str, grid: Sequence[int], settings: MixtureSettings
    ) -> None:
        if isinstance(client, Swarm):
            client = ExpertClient(client).open()  # on a swarm it has nothing of its own to close
        self.directory = Directory(client, prefix, grid, refresh_s=settings.refresh_s)
        self.settings = settings
        self._schema: ExpertSchema | None = None

    def __deepcopy__(self, memo: Any) -> RemoteGrid:
        return self

    def call(
        self,
        scores: torch.Tensor,
        args: Sequence[torch.Tensor],
        kwargs: Mapping[str, torch.Tensor],
        deadline: Deadline | None,
    ) -> Called:
        """Ask the best experts of each sample, by scores [batch, sum(grid)]; all that they answered.

        NotEnoughExperts when there are not as many as are needed; whether as many have answered is for
        `Called.check`.
        """
        began_s = time.perf_counter()
        routes = self._find(scores)
        search_s = time.perf_counter() - began_s
        schema = self._schema_of(routes.experts)
        inputs = self._inputs(schema, args, kwargs)
        round_ = ExpertRound(self.directory, self.settings, routes, schema)
        round_.check(routes.slots >= 0)
        # a tensor that needs a gradient, so that backward comes to the experts although no input needs one
        anchor = torch.empty(0, requires_grad=torch.is_grad_enabled())
        outputs = _Round.apply(round_, deadline, anchor, *inputs)  # type: ignore[no-untyped-call]
        round_.last_call.search_seconds = search_s
        round_.last_call.seconds = time.perf_counter() - began_s
        return Called(round_, routes, schema, outputs, scores.device)

    def _find(self, scores: torch.Tensor) -> Routes:
        settings = self.settings
        return self.directory.find(
            scores.detach().cpu(),
            beam_size=settings.beam_size or settings.k_best,
            k=settings.k_best,
            k_min=settings.k_min,
        )

    def _schema_of(self, experts: Sequence[ExpertAddress]) -> ExpertSchema:
        """What all experts take and give, asked of a few of them the first time."""
        if self._schema is None:
            schema = self.directory.client.run(self._most_common_schema(experts))
            for each in schema.outputs:
                if not DTYPES[each.dtype].is_floating_point:
                    raise UsageError(f"Experts that give {each} cannot be mixed: there is no mean of it.")
            self._schema = schema
        return self._schema

    async def _most_common_schema(self, experts: Sequence[ExpertAddress]) -> ExpertSchema:
        client = self.directory.client
        first_of_peers = {expert.peer: expert for expert in reversed(experts)}
        asked = list(dict.fromkeys((*first_of_peers.values(), *experts)))[:_NUM_SCHEMAS]
        deadline = Deadline.after(_SCHEMA_S * client.settings.patience)
        told = await fanout(
            [client.schema_of(str(expert.uid), expert.peers, deadline) for expert in asked],
            deadline,
            is_enough=lambda results: any(count > 1 for _, count in _by_frequency(results)),
        )
        if schemas := _by_frequency(told):
            return schemas[0][0]
        errors = [error for error in told if isinstance(error, Exception)]
        raise NotEnoughExperts(
            f"No expert of {self.directory.prefix} tells what it takes and gives.",
            LastCall(),
            cause=str(errors[0]) if errors else "none is declared in the DHT.",
            next_step="start one with `shoal serve`; see that its uids and this grid fit together.",
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
        round_: ExpertRound,
        routes: Routes,
        schema: ExpertSchema,
        outputs: tuple[torch.Tensor, ...],
        device: torch.device,
    ) -> None:
        self.last_call = round_.last_call
        self.schema = schema
        self.is_answered = round_.is_answered.to(device)
        """Of each slot [batch, k]."""
        self._round = round_
        self._routes = routes
        self._outputs = outputs
        self._device = device

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
        """NotEnoughExperts when a sample has fewer answers than it needs."""
        self._round.check(self._round.is_answered)

    def mixed(self, weights: torch.Tensor) -> Any:
        """The sum of each sample's answers by weights [batch, k], as the experts' module would give it.

        Weights of slots without an answer count as zero.
        """
        answered = self._round.answered
        weights = weights.masked_fill(~self.is_answered, 0.0)
        num_outputs = len(self.schema.outputs)
        mixed = [
            sum_by_sample(answered, self._outputs[index::num_outputs], weights.shape, weights)
            if answered
            else torch.zeros((len(weights), *each.shape), dtype=DTYPES[each.dtype], device=self._device)
            for index, each in enumerate(self.schema.outputs)
        ]
        return mixed[0] if self.schema.is_single else tuple(mixed)


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
