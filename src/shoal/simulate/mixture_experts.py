"""Rows through experts: forward, and a backward that leaves its factors in the bank instead of matrices.

The block is Learning@home's (`experts.classes.LahFeedForward`), with an expert of its own for every row.
Either rows are sorted by expert and each expert's weights are read where they lie; or the weights of each row
are gathered, so that an accelerator need not wait for the host to learn which experts they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from shoal.simulate.mixture_bank import ExpertBank

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
        """From `[samples, active, dim]`."""
        rows = pairs.reshape(-1, pairs.shape[-1])
        return rows if self.groups is None else rows.index_select(0, self._order)

    def to_pairs(self, rows: torch.Tensor) -> torch.Tensor:
        """The other way: only ever gathered, never added up in an order that may change."""
        if self.groups is not None:
            rows = rows.index_select(0, self._back)
        return rows.view(self._num_samples, self._num_active, -1)

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """From `[samples, dim]` to each sample's rows."""
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
        """For the inputs alone: parameters get theirs from the bank."""
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
