"""How an expert's parameters lie in one vector, and what backward leaves of a sample in one row.

The expert is Learning@home's block (`experts.classes.LahFeedForward`): linear, norm, ReLU, linear, norm,
ReLU, linear, and a residual.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from shoal.simulate.mixture_settings import WIDTH


class Vectors(NamedTuple):
    """Biases of the three linear layers, and scales and shifts of the two norms between them."""

    biases: list[torch.Tensor]
    scales: list[torch.Tensor]
    shifts: list[torch.Tensor]


class Layout:
    """Of experts of one width. Leading dimensions are free: one expert, all of them, a row for each."""

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
