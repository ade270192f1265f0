"""All experts of all layers: their parameters, their optimizers, and the gradients that wait for them.

A gradient is kept as its factors, a row for each (sample, expert) pair: the inputs of the linear layers and
the gradients of their outputs. The matrices that they make exist only while an expert updates.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

import torch

from shoal.simulate.mixture_adam import AdamMoments, adam_step
from shoal.simulate.mixture_layout import Layout, Vectors
from shoal.simulate.mixture_rows import RowPool
from shoal.simulate.mixture_settings import MixtureSettings

_AT_ONCE = 32
"""Experts whose gradients are matrices at the same time, where weights are gathered."""


class _Pending:
    """What one expert has to take in at its next update."""

    def __init__(self, first_step: int) -> None:
        self.first_step = first_step
        self.rows: list[int] = []


class _Scratch:
    """Room for one expert's gradient, used again and again: making views of it anew would take its time."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.flat = torch.empty(layout.expert_size, device=device)
        self.matrices = layout.matrices(self.flat)
        self.vectors = layout.all_vectors(self.flat)


class ExpertBank:
    """Experts numbered through all layers: expert i of layer l is l · experts a layer + i."""

    def __init__(self, settings: MixtureSettings, generator: torch.Generator, *, is_one_by_one: bool) -> None:
        """Experts update one by one, with little memory for gradients, or many with the same kernels."""
        self.layout = Layout(settings.layer_dim)
        count = settings.num_layers * settings.experts_a_layer
        flat = torch.empty(count, self.layout.expert_size, device=generator.device)
        self.weights = self.layout.matrices(flat)
        self.matrices = [list(weight.unbind(0)) for weight in self.weights]
        self.transposed = [[matrix.t() for matrix in matrices] for matrices in self.matrices]
        self.pool = RowPool(
            settings.num_layers * settings.rows_a_layer, self.layout.row_size, generator.device
        )
        self.staleness: Counter[int] = Counter()
        self.num_updates = 0
        """How often some experts were updated."""
        self._experts = list(flat.unbind(0))
        self._vectors = self.layout.all_vectors(flat)
        self._settings = settings
        self._moments: dict[int, AdamMoments] = {}
        self._pending: dict[int, _Pending] = {}
        self._num_steps = 0
        self._due: list[list[tuple[int, list[int]]]] = [[] for _ in range(settings.num_layers)]
        self._updated_at: dict[int, list[int]] = {}
        self._at_once = 1 if is_one_by_one else _AT_ONCE
        self._scratch = _Scratch(self.layout, generator.device) if is_one_by_one else None
        self._initialise(generator)

    def vectors_of(self, experts: torch.Tensor | int) -> Vectors:
        """Of one expert, or a row for each."""
        return self.layout.vectors(self._vectors[experts])

    def count_step(self) -> None:
        """Some trainer has computed: experts that wait for too many steps are updated anyway."""
        self._num_steps += 1

    def deliver(self, rows: list[int], experts: list[int]) -> None:
        """Gradients of some rows reach their experts; below 0 is one whose gradient was lost."""
        for row, expert in zip(rows, experts, strict=True):
            if expert < 0:
                self.pool.free(row)
                continue
            pending = self._pending.get(expert)
            if pending is None:
                pending = self._pending[expert] = _Pending(self._num_steps)
            pending.rows.append(row)

    def decide(self) -> None:
        """Whose turn it is: experts that have gathered enough inputs, or waited for enough steps.

        They change in `update`, which has to be called before anything reads their parameters.
        """
        for layer in range(self._settings.num_layers):
            self.update(layer)
        num_inputs, num_steps = self._settings.inputs_an_update, self._settings.update_every_steps
        latest_first = self._num_steps + 1 - num_steps
        due = [
            (expert, pending.rows)
            for expert, pending in self._pending.items()
            if len(pending.rows) >= num_inputs or pending.first_step <= latest_first
        ]
        self.num_updates += 1
        for expert, rows in due:
            del self._pending[expert]
            self._due[expert // self._settings.experts_a_layer].append((expert, rows))

    def update(self, layer: int) -> None:
        """Those of one layer whose turn it is, just before they are used: they are in the cache then."""
        due, self._due[layer] = self._due[layer], []
        for start in range(0, len(due), self._at_once):
            experts, rows = zip(*due[start : start + self._at_once], strict=True)
            adam_step(
                [self._experts[expert] for expert in experts],
                self.gradients(rows),
                [self._moments_of(expert) for expert in experts],
                self._settings.learning_rate,
            )
            for expert, rows_of_expert in zip(experts, rows, strict=True):
                self._close(expert, rows_of_expert)

    def num_touched(self) -> int:
        """Experts that were ever updated, and so have optimizer state."""
        return len(self._moments)

    def gradients(self, numbers: Sequence[list[int]]) -> list[torch.Tensor]:
        """What the rows of each of some experts make together; used before it is asked for again."""
        if self._scratch is not None:
            (rows_of_one,) = numbers
            rows = self.pool.rows(rows_of_one)
            parts = self.layout.row_parts(rows)
            for given, received, out in zip(parts[:3], parts[3:6], self._scratch.matrices, strict=True):
                torch.mm(received.t(), given, out=out)
            torch.sum(self.layout.row_vectors(rows), 0, out=self._scratch.vectors)
            return [self._scratch.flat]
        most = max(map(len, numbers))
        rows = self.pool.rows([some + [0] * (most - len(some)) for some in numbers])
        parts = self.layout.row_parts(rows)
        flat = torch.empty(len(numbers), self.layout.expert_size, device=rows.device)
        for given, received, out in zip(parts[:3], parts[3:6], self.layout.matrices(flat), strict=True):
            torch.bmm(received.transpose(1, 2), given, out=out)
        torch.sum(self.layout.row_vectors(rows), 1, out=self.layout.all_vectors(flat))
        return list(flat.unbind(0))

    def _moments_of(self, expert: int) -> AdamMoments:
        if expert not in self._moments:
            self._moments[expert] = AdamMoments(self._experts[expert])
        return self._moments[expert]

    def _close(self, expert: int, rows: list[int]) -> None:
        """Count how many updates the expert made since it gave these rows their outputs."""
        updated_at = self._updated_at.setdefault(expert, [])
        for row in rows:
            computed_at = self.pool.free(row)
            self.staleness[len(updated_at) - bisect_right(updated_at, computed_at)] += 1
        updated_at.append(self.num_updates)

    def _initialise(self, generator: torch.Generator) -> None:
        """As torch starts linear layers and norms."""
        biases, scales, shifts = self.layout.vectors(self._vectors)
        for weight, bias in zip(self.weights, biases, strict=True):
            bound = 1 / math.sqrt(weight.shape[2])
            weight.uniform_(-bound, bound, generator=generator)
            bias.uniform_(-bound, bound, generator=generator)
        for scale, shift in zip(scales, shifts, strict=True):
            scale.fill_(1)
            shift.zero_()
