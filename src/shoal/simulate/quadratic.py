"""Least squares with a solution in closed form: each worker has rows of its own, and so its own optimum.

Worker i has `f_i(x) = ½‖A_i x − b_i‖²`; all together want the x where the sum of all f_i is least. There is
no noise: a worker's gradient is that of all its rows, so only the strategy is between it and the optimum.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import nn

from shoal.data.seeds import mix
from shoal.data.splits import check_split
from shoal.simulate.job import Job
from shoal.simulate.task import Batch, Score, Task

_DIM, _NUM_ROWS = 16, 64
_NOISE = 0.2
_FLATTEST = 0.5  # scale of the last coordinate of a row; that of the first is 1


class Point(nn.Module):
    """A point x, from 0; `model(A)` is A·x."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(_DIM, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """One number for each row."""
        return rows @ self.x


class Quadratic(Task):
    """How far workers differ is the split: by chance with 'iid', more the smaller a is in 'dirichlet:a'.

    The largest eigenvalue of every worker's Hessian is 1.
    """

    name = "quadratic"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        concentration = check_split(job.split)
        self._spread = 0.0 if concentration is None else 1 / (1 + concentration)
        self._all = [self._rows_of(rank) for rank in range(job.num_parts)]
        self._hessian = torch.stack([rows.T @ rows for rows, _ in self._all]).mean(0)
        pull = torch.stack([rows.T @ values for rows, values in self._all]).mean(0)
        self.optimum = torch.linalg.solve(self._hessian, pull)

    def model(self) -> nn.Module:
        """A point at 0."""
        return Point()

    def batches(self, rank: int) -> Iterator[Batch]:
        """All its rows, each time; the size of a batch does not count."""
        return itertools.repeat(self._all[rank])

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Half the squared distance."""
        return (outputs - labels).square().sum() / 2

    def evaluate(self, model: nn.Module) -> Score:
        """Distance to the optimum of all workers together; the loss is what is above the least one."""
        assert isinstance(model, Point)
        off = model.x.detach() - self.optimum
        return Score(float(torch.linalg.vector_norm(off)), float(off @ self._hessian @ off) / 2)

    def _rows_of(self, rank: int) -> Batch:
        common = torch.Generator().manual_seed(mix(self.job.seed, _DIM))
        own = torch.Generator().manual_seed(mix(self.job.seed, _DIM, rank))
        goal = _normal(common, _DIM) + self._spread * _normal(own, _DIM)
        scales = torch.logspace(0, torch.log10(torch.tensor(_FLATTEST)).item(), _DIM, dtype=torch.float64)
        scales = scales * torch.exp(self._spread * _normal(own, _DIM) / 2)
        rows = _normal(own, _NUM_ROWS, _DIM) * scales
        rows /= torch.linalg.matrix_norm(rows, 2)
        noise = _NOISE * _normal(own, _NUM_ROWS) / _NUM_ROWS**0.5
        return rows, rows @ goal + noise


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
