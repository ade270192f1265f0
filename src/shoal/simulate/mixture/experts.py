"""All experts of all layers: their parameters and optimizers, and the gradients that wait for them.

An expert's parameters lie in one vector. Backward leaves the factors of gradients in a pool of rows, not
whole matrices, until each expert has taken in its own, by Adam with AMSGrad (Reddi et al. 2018).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.optim.adam import adam

from shoal.simulate.mixture.settings import WIDTH, MixtureRunSettings


class AdamMoments:
    """What the optimizer remembers of one tensor; made when the tensor is first updated."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.mean, self.square, self.greatest = torch.zeros(3, *tensor.shape, device=tensor.device).unbind(0)
        self.num_steps = torch.zeros((), device=tensor.device)


def adam_step(
    tensors: list[torch.Tensor], gradients: list[torch.Tensor], moments: list[AdamMoments], rate: float
) -> None:
    """One step of each; the numbers of steps may differ. The tensors are contiguous."""
    adam(
        tensors,
        [gradient.contiguous() for gradient in gradients],  # the fused kernel takes for granted that they are
        [one.mean for one in moments],
        [one.square for one in moments],
        [one.greatest for one in moments],
        [one.num_steps for one in moments],
        fused=True,
        amsgrad=True,
        beta1=0.9,
        beta2=0.999,
        lr=rate,
        weight_decay=0.0,
        eps=1e-8,
        maximize=False,
    )


class Vectors(NamedTuple):
    """Biases of the three linear layers, and scales and shifts of the two norms between them."""

    biases: list[torch.Tensor]
    scales: list[torch.Tensor]
    shifts: list[torch.Tensor]


class Layout:
    """How experts of one width lie in vectors. Leading dimensions are free: one expert, all, or rows."""

    def __init__(self, dim: int) -> None:
        inner = WIDTH * dim
        self._shapes = [(inner, dim), (inner, inner), (dim, inner)]
        edges = list(accumulate((rows * columns for rows, columns in self._shapes), initial=0))
        self._spans = [slice(*pair) for pair in pairwise(edges)]
        self._inputs = [dim, inner, inner]
        self._vectors = [inner, inner, dim, inner, inner, inner, inner]
        self._row = self._inputs + self._vectors
        self._num_weights = edges[-1]
        self.expert_size = edges[-1] + sum(self._vectors)
        self.row_size = sum(self._row)

    def matrices(self, experts: torch.Tensor) -> list[torch.Tensor]:
        """Views of the three linear layers' weights."""
        parts = zip(self._spans, self._shapes, strict=True)
        return [experts[..., span].view(*experts.shape[:-1], *shape) for span, shape in parts]

    def all_vectors(self, experts: torch.Tensor) -> torch.Tensor:
        """A view of everything else, for `vectors`."""
        return experts[..., self._num_weights :]

    def vectors(self, all_vectors: torch.Tensor) -> Vectors:
        """Views of its parts."""
        parts = torch.split(all_vectors, self._vectors, dim=-1)
        return Vectors(list(parts[:3]), list(parts[3::2]), list(parts[4::2]))

    def row_parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Inputs of the linear layers, gradients of their outputs, then of each norm's scale and shift."""
        return torch.split(rows, self._row, dim=-1)

    def row_vectors(self, rows: torch.Tensor) -> torch.Tensor:
        """Gradients of all vectors: those of a linear layer's outputs are those of its bias."""
        return rows[..., sum(self._inputs) :]


class RowPool:
    """Rows that are taken and freed, as many as needed. Row 0 is always zero, and fills up too few rows."""

    def __init__(self, num_rows: int, row_size: int, device: torch.device) -> None:
        self._rows = torch.zeros(1 + num_rows, row_size, device=device)
        self._is_taken = bytearray([1]) + bytearray(num_rows)
        self._marks = [0] * (1 + num_rows)

    def take(self, count: int, mark: int) -> int:
        """The first of so many successive rows, with any content; `mark` comes back when one is freed."""
        first = self._is_taken.find(bytes(count))
        while first < 0:
            self._rows = torch.cat([self._rows, torch.zeros_like(self._rows)])
            self._is_taken += bytearray(len(self._is_taken))
            self._marks += [0] * len(self._marks)
            first = self._is_taken.find(bytes(count))
        self._is_taken[first : first + count] = b"\x01" * count
        self._marks[first : first + count] = [mark] * count
        return first

    def span(self, first: int, count: int) -> torch.Tensor:
        """A view of rows that may be written, and not kept: `take` may move it."""
        return self._rows[first : first + count]

    def rows(self, numbers: list[int] | list[list[int]]) -> torch.Tensor:
        """A copy of any of them."""
        index = torch.tensor(numbers).to(self._rows.device, non_blocking=True)
        return self._rows.index_select(0, index.view(-1)).view(*index.shape, -1)

    def free(self, row: int) -> int:
        """Frees a row, and gives the mark that it had."""
        self._is_taken[row] = 0
        return self._marks[row]


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

    def __init__(
        self, settings: MixtureRunSettings, generator: torch.Generator, *, is_one_by_one: bool
    ) -> None:
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
        """The vectors of one expert, or a row for each of several."""
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


_EPSILON = 1e-5


class Routing:
    """Which expert each row goes to. Experts are numbered through all layers.

    A row is one (sample, expert) pair; rows that are grouped lie in the order of their experts.
    """

    def __init__(self, chosen: torch.Tensor, *, is_grouped: bool) -> None:
        """Of `[samples, active]`."""
        self._num_samples, self._num_active = chosen.shape
        self.experts = chosen.reshape(-1)
        self.rows_of_pairs: Sequence[int] = range(len(self.experts))
        self.groups: list[int] | None = None
        """Experts, each once, when rows are grouped; `sizes` has the number of their rows."""
        if is_grouped:
            by_pair: list[int] = self.experts.tolist()
            order = sorted(range(len(by_pair)), key=by_pair.__getitem__)
            counts: dict[int, int] = {}
            back = [0] * len(order)
            for row, pair in enumerate(order):
                counts[by_pair[pair]] = counts.get(by_pair[pair], 0) + 1
                back[pair] = row
            self.groups, self.sizes = list(counts), list(counts.values())
            self.rows_of_pairs = back
            self._order, self._back = torch.tensor([order, back], device=chosen.device).unbind(0)
            self.experts = self.experts[self._order]

    def to_rows(self, pairs: torch.Tensor) -> torch.Tensor:
        """Turns `[samples, active, dim]` into rows."""
        rows = pairs.reshape(-1, pairs.shape[-1])
        return rows if self.groups is None else rows.index_select(0, self._order)

    def to_pairs(self, rows: torch.Tensor) -> torch.Tensor:
        """The other way: only ever gathered, never added up in an order that may change."""
        if self.groups is not None:
            rows = rows.index_select(0, self._back)
        return rows.view(self._num_samples, self._num_active, -1)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Gives each row its sample's values, from `[samples, dim]`."""
        return self.to_rows(x.unsqueeze(1).expand(-1, self._num_active, -1))


def through_experts(x: torch.Tensor, bank: ExpertBank, routing: Routing, first_row: int) -> torch.Tensor:
    """`[samples, dim]` to `[samples, active, dim]`: each sample through its experts.

    Backward leaves what an update needs in the pool, from `first_row` on.
    """
    y: torch.Tensor = _ExpertRows.apply(x, bank, routing, first_row)  # type: ignore[no-untyped-call]
    return y


class _ExpertRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bank: ExpertBank, routing: Routing, first_row: int
    ) -> torch.Tensor:
        given, hidden_1, hidden_2, *_ = _parts(bank, first_row, routing)
        given.copy_(routing.spread(x))
        vectors = bank.vectors_of(routing.experts)
        normed, scales, hidden = [], [], given
        for layer, out in enumerate((hidden_1, hidden_2)):
            n, scale = _normed(_times(hidden, bank, layer, routing, True).add_(vectors.biases[layer]))
            affine = torch.addcmul(vectors.shifts[layer], n, vectors.scales[layer])
            hidden = torch.clamp_min(affine, 0, out=out)
            normed.append(n)
            scales.append(scale)
        ctx.parts = (bank, routing, first_row, normed, scales, vectors)
        return routing.to_pairs(_times(hidden, bank, 2, routing, True).add_(vectors.biases[2]).add_(given))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Returns gradients of the inputs alone: parameters get theirs from the bank."""
        bank, routing, first_row, normed, scales, vectors = ctx.parts
        _, hidden_1, hidden_2, d_z_1, d_z_2, d_y, *d_norms = _parts(bank, first_row, routing)
        d_y.copy_(routing.to_rows(gradient))
        d_z = d_y
        for layer, hidden, out in ((1, hidden_2, d_z_2), (0, hidden_1, d_z_1)):
            d_hidden = _times(d_z, bank, layer + 1, routing, False)
            n, (d_scale, d_shift) = normed[layer], d_norms[2 * layer : 2 * layer + 2]
            torch.mul(d_hidden, hidden.sign(), out=d_shift)
            torch.mul(d_shift, n, out=d_scale)
            d_n = d_shift * vectors.scales[layer]
            along = torch.linalg.vecdot(d_n, n).unsqueeze(1).div_(n.shape[1])
            d_n -= d_n.mean(1, keepdim=True)
            d_z = torch.mul(d_n.addcmul_(n, along, value=-1), scales[layer], out=out)
        d_rows = _times(d_z, bank, 0, routing, False).add_(d_y)
        return routing.to_pairs(d_rows).sum(1), None, None, None


def evaluate_rows(
    x: torch.Tensor, bank: ExpertBank, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Many samples, each through its experts (`[samples, active]`), mixed by weights; grouped by expert."""
    by_pair = chosen.reshape(-1)
    order = torch.argsort(by_pair, stable=True)
    used, counts = torch.unique_consecutive(by_pair[order], return_counts=True)
    sizes: list[int] = counts.tolist()
    of_groups = torch.split(order // chosen.shape[1], sizes)
    parts = [
        _block(x[samples], bank, expert) for expert, samples in zip(used.tolist(), of_groups, strict=True)
    ]
    y = torch.empty(len(order), x.shape[1], device=x.device)
    y[order] = torch.cat(parts)
    return torch.bmm(weights.unsqueeze(1), y.view(len(x), chosen.shape[1], -1)).squeeze(1)


def _block(x: torch.Tensor, bank: ExpertBank, expert: int) -> torch.Tensor:
    vectors, hidden = bank.vectors_of(expert), x
    for layer in range(2):
        z = functional.linear(hidden, bank.matrices[layer][expert], vectors.biases[layer])
        z = functional.layer_norm(z, z.shape[1:], vectors.scales[layer], vectors.shifts[layer], _EPSILON)
        hidden = functional.relu(z)
    return functional.linear(hidden, bank.matrices[2][expert], vectors.biases[2]).add_(x)


def _parts(bank: ExpertBank, first_row: int, routing: Routing) -> tuple[torch.Tensor, ...]:
    return bank.layout.row_parts(bank.pool.span(first_row, len(routing.experts)))


def _normed(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In place, and what it was multiplied by. Faster than torch's own variance on few rows."""
    z -= z.mean(1, keepdim=True)
    scale = torch.linalg.vecdot(z, z).unsqueeze(1).div_(z.shape[1]).add_(_EPSILON).rsqrt_()
    return z.mul_(scale), scale


def _times(x: torch.Tensor, bank: ExpertBank, layer: int, routing: Routing, is_forward: bool) -> torch.Tensor:
    """Each row times its expert's matrix, which forward takes transposed."""
    if routing.groups is None:
        gathered = bank.weights[layer][routing.experts]
        return torch.bmm(x.unsqueeze(1), gathered.transpose(1, 2) if is_forward else gathered).squeeze(1)
    matrices = (bank.transposed if is_forward else bank.matrices)[layer]
    out = torch.empty(len(x), matrices[0].shape[1], device=x.device)
    parts = zip(routing.groups, torch.split(x, routing.sizes), torch.split(out, routing.sizes), strict=True)
    for expert, rows, result in parts:
        torch.mm(rows, matrices[expert], out=result)
    return out
