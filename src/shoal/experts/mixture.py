"""Layers whose experts are elsewhere: a gate here chooses them for each sample, and weighs their answers.

Experts that do not answer are left out of the softmax; in backward they give no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.core import UsageError
from shoal.dht import Swarm
from shoal.experts.client.batch import BatchCall, LastCall, RemoteGrid
from shoal.experts.client.client import ExpertClient
from shoal.experts.settings import MixtureSettings, WhenNoneAnswers


class MixtureOfExperts(nn.Module):
    """The `k_best` experts of each sample, found in the DHT, weighed by a product-key gate over `grid`.

    Settings are given as a struct or one by one: `MixtureOfExperts(swarm, "ffn", 512, (32, 32), k_best=4)`.
    `last_call` says of the last batch who was asked, who answered and how long it took. Its parameters are
    the gate's alone: experts are trained by their servers, once for each backward.
    """

    def __init__(
        self,
        client: ExpertClient | Swarm,
        prefix: str,
        in_features: int,
        grid: Sequence[int],
        settings: MixtureSettings | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.settings = (settings or MixtureSettings()).but(**options)
        self.gate = ProductKeyGate(in_features, grid)
        self.experts = RemoteGrid(client, prefix, grid, self.settings)

    @property
    def last_call(self) -> LastCall:
        """What became of the last batch, also when it ended in an error."""
        return self.experts.last_call

    def forward(self, x: torch.Tensor, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        """The weighted answers of the experts, called with all of these batch-first tensors; in x's dtype.

        NotEnoughExperts when a sample has fewer than `k_min` answers after all tries.
        """
        scores = self.gate(x)
        batch = self.experts.call(scores, (x, *args), kwargs)
        return batch.mixed(self._weights(scores, batch), x.dtype)

    def _weights(self, scores: torch.Tensor, batch: BatchCall) -> torch.Tensor:
        """Of each slot [batch, k]; zero where there is no answer, also for a sample that has none."""
        is_answered = batch.is_answered
        logits = self.gate.logits(scores, batch.coordinates).masked_fill(~is_answered, -torch.inf)
        logits = logits.masked_fill(~is_answered.any(1, keepdim=True), 0.0)
        return logits.softmax(1).masked_fill(~is_answered, 0.0)

    def extra_repr(self) -> str:
        """Describes the layer when the model is printed."""
        return f"{self.experts.directory.prefix}, k_best={self.settings.k_best}, k_min={self.settings.k_min}"


@dataclass(frozen=True, slots=True)
class SwitchSettings(MixtureSettings):
    """Settings of a `SwitchMixtureOfExperts`; a sample that gets no answer is passed on as it came."""

    k_best: int = 1
    k_min: int = 0
    backward_k_min: int = 0
    beam_size: int | None = 4
    when_none_answers: WhenNoneAnswers = "zeros"
    jitter: float = 0.01
    """In training the gate sees its input times noise of 1 ± this."""
    keep_probability: float = 1.0
    """In training each coordinate of an axis is there with this probability, at least one of them always."""
    utilization_decay: float = 0.9
    """How much of the running mean of utilization a batch leaves as it was."""

    def __post_init__(self) -> None:
        MixtureSettings.__post_init__(self)
        if self.k_best != 1:
            raise UsageError(
                f"A switch sends a sample to one expert, not to {self.k_best}.",
                next_step="use MixtureOfExperts for more.",
            )
        if not 0 <= self.jitter < 1 or not 0 < self.keep_probability <= 1:
            raise UsageError(
                f"jitter {self.jitter} is from 0 to 1, and keep_probability {self.keep_probability} above 0."
            )


class SwitchMixtureOfExperts(nn.Module):
    """Gives the output and the balancing loss, to be added to the model's with a small factor (0.01).

    The loss is 1 for each axis when samples and probabilities spread evenly, and more when they do not.
    """

    def __init__(
        self,
        client: ExpertClient | Swarm,
        prefix: str,
        in_features: int,
        grid: Sequence[int],
        settings: SwitchSettings | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.settings = (settings or SwitchSettings()).but(**options)
        self.gate = ProductKeyGate(in_features, grid)
        self.experts = RemoteGrid(client, prefix, grid, self.settings)
        for axis, size in enumerate(self.gate.grid):
            self.register_buffer(f"utilization_{axis}", torch.full((size,), 1 / size))

    @property
    def utilization(self) -> list[torch.Tensor]:
        """Of each axis: which part of the samples went to each coordinate, over the last batches."""
        return [self.get_buffer(f"utilization_{axis}") for axis in range(len(self.gate.grid))]

    @property
    def last_call(self) -> LastCall:
        """What became of the last batch, also when it ended in an error."""
        return self.experts.last_call

    def forward(
        self, x: torch.Tensor, *args: torch.Tensor, **kwargs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` plus the answer of each sample's expert; and the loss."""
        axes = self._scores(x)
        probabilities = [axis.softmax(1) for axis in axes]
        batch = self.experts.call(torch.cat(axes, 1), (x, *args), kwargs)
        coordinates = batch.coordinates.squeeze(1)
        chosen = [axis.gather(1, coordinates[:, at : at + 1]) for at, axis in enumerate(probabilities)]
        weights = math.prod(chosen[1:], start=chosen[0]).masked_fill(~batch.is_answered, 0.0)
        answer = batch.mixed(weights, x.dtype) if batch.has_schema else torch.zeros_like(x)
        if not isinstance(answer, torch.Tensor) or answer.shape != x.shape:
            raise UsageError(
                f"A switch adds its input {list(x.shape)} to what experts answer, which is of another shape.",
                next_step="use experts that give one tensor as large as their first input.",
            )
        return x + answer, self._balance(probabilities, coordinates, batch)

    def _scores(self, x: torch.Tensor) -> list[torch.Tensor]:
        settings = self.settings
        if self.training and settings.jitter:
            x = x * torch.empty_like(x).uniform_(1 - settings.jitter, 1 + settings.jitter)
        axes = list(self.gate.split(self.gate(x)))
        if self.training and settings.keep_probability < 1:
            axes = [axis.masked_fill(_dropped(axis, settings.keep_probability), -torch.inf) for axis in axes]
        return axes

    def _balance(
        self, probabilities: Sequence[torch.Tensor], coordinates: torch.Tensor, batch: BatchCall
    ) -> torch.Tensor:
        """Number of coordinates × part of the samples × mean probability, summed over each axis and all."""
        routed = coordinates[batch.is_routed.squeeze(1)]
        losses = []
        for axis, (probability, running) in enumerate(zip(probabilities, self.utilization, strict=True)):
            counts = torch.bincount(routed[:, axis], minlength=len(running))
            parts = counts.to(probability.dtype) / max(1, len(routed))
            losses.append(len(running) * (parts * probability.mean(0)).sum())
            if self.training and len(routed):
                running.lerp_(parts.detach().to(running.dtype), 1 - self.settings.utilization_decay)
        return torch.stack(losses).sum()

    def extra_repr(self) -> str:
        """Describes the layer when the model is printed."""
        return str(self.experts.directory.prefix)


def _dropped(scores: torch.Tensor, keep_probability: float) -> torch.Tensor:
    """Which coordinates of an axis are left out of this batch: never all."""
    draws = torch.rand(scores.shape[1], device=scores.device)
    return (draws >= keep_probability) & (draws > draws.min())


class ProductKeyGate(nn.Module):
    """One linear layer for all axes."""

    def __init__(self, in_features: int, grid: Sequence[int]) -> None:
        super().__init__()
        if not grid or any(size < 1 for size in grid):
            raise UsageError(
                f"{tuple(grid)} is no grid of experts.",
                next_step="give the number of coordinates of each axis, such as (32, 32).",
            )
        self.in_features = in_features
        self.grid = tuple(grid)
        self.projection = nn.Linear(in_features, sum(self.grid))
        starts = [sum(self.grid[:axis]) for axis in range(len(self.grid))]
        self.register_buffer("_starts", torch.tensor(starts), persistent=False)
        self._starts: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores [batch, sum(grid)] in float32 at least; what lies between batch and features is averaged."""
        if x.dim() < 2 or x.shape[-1] != self.in_features:
            raise UsageError(
                f"The gate takes [batch, ..., {self.in_features}], not {list(x.shape)}.",
                next_step="give in_features of the mixture's first input.",
            )
        if x.dim() > 2:
            x = x.flatten(1, -2).mean(1)
        scores: torch.Tensor = self.projection(x.to(self.projection.weight.dtype))
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def split(self, scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The scores of each axis."""
        return torch.split(scores, list(self.grid), dim=1)

    def logits(self, scores: torch.Tensor, coordinates: torch.Tensor) -> torch.Tensor:
        """The sum of scores at `coordinates` [batch, k, axes]; [batch, k]."""
        columns = coordinates + self._starts
        return scores.gather(1, columns.flatten(1)).view(columns.shape).sum(-1)

    def extra_repr(self) -> str:
        """Describes the layer when the model is printed."""
        return f"grid={' × '.join(map(str, self.grid))}, {math.prod(self.grid)} places"
