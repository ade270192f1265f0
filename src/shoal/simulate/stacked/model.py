"""Models of all workers as the rows of one tensor, their gradients, and the mixing of a round.

Gradients come from one vectorised pass. A round is a product with a mixing matrix, and the edges over which
its messages go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from shoal.core import UsageError
from shoal.simulate.tasks import Batch, TrainingTask
from shoal.tensors import BucketLayout
from shoal.topology import Topology, Weights

EXACT = "take `--executor exact`."
_CHUNK_BYTES = 256 * 2**20
"""Of parameters whose gradients are taken at once: activations come on top of it."""


class StackedModel:
    """Row i is worker i's trainable parameters, one after another in the model's order.

    All start with the values of one model, as they do after a strategy's `attach`.
    """

    values: torch.Tensor

    def __init__(self, task: TrainingTask, num_workers: int) -> None:
        self._task = task
        self._module = task.model()
        self.named = dict(self._module.named_parameters())
        self._require_fit()
        self._sizes = [parameter.numel() for parameter in self.named.values()]
        first = torch.cat([parameter.detach().flatten() for parameter in self.named.values()])
        self.values = first.repeat(num_workers, 1)
        chunk_size = max(1, _CHUNK_BYTES // max(1, first.nbytes))
        self._gradients: Callable[..., torch.Tensor] = vmap(grad(self._loss), chunk_size=chunk_size)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of one worker, for their shapes."""
        return list(self.named.values())

    def gradients(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Computes the gradients of each worker's own loss at its own parameters; batches have one shape."""
        inputs, labels = zip(*batches, strict=True)
        return self._gradients(self.values, torch.stack(inputs), torch.stack(labels))

    def tensors(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Views of one worker's parameters, in the model's order and shapes."""
        parts = torch.split(row, self._sizes)
        return [part.view(like.shape) for part, like in zip(parts, self.named.values(), strict=True)]

    def layouts(self, max_bytes: int, *, is_reversed: bool = False) -> list[BucketLayout]:
        """How one worker's parameters lie in buckets."""
        return BucketLayout.plan(self.parameters, max_bytes=max_bytes, is_reversed=is_reversed)

    def shares_of_backward(self, layouts: Sequence[BucketLayout]) -> list[float]:
        """Of what backward costs, what passes until each bucket can leave, after the one before it.

        A gradient costs by its size; in which order they come is seen in one backward pass.
        """
        parameters = self.parameters
        order: list[int] = []
        module = self._task.model()
        for place, parameter in enumerate(module.parameters()):
            hook = partial(_note, order, place)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        inputs, labels = next(self._task.batches(0))
        self._task.loss(module(inputs), labels).backward()  # type: ignore[no-untyped-call]
        past: dict[int, int] = {}
        for place in order:
            past[place] = parameters[place].numel() + (past[order[len(past) - 1]] if past else 0)
        ready, shares = 0, []
        for layout in layouts:
            until = max(ready, *(past[index] for index in layout.indices))
            shares.append((until - ready) / sum(self._sizes))
            ready = until
        return shares

    def _loss(self, values: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        parts = zip(self.named.items(), torch.split(values, self._sizes), strict=True)
        parameters = {name: part.view(like.shape) for (name, like), part in parts}
        return self._task.loss(functional_call(self._module, parameters, (inputs,)), labels)

    def _require_fit(self) -> None:
        if next(self._module.buffers(), None) is not None:
            raise UsageError("The stacked executor has no place for a model's buffers.", next_step=EXACT)
        kinds = {(parameter.dtype, parameter.requires_grad): None for parameter in self.named.values()}
        if len(kinds) != 1 or not next(iter(kinds))[1]:
            raise UsageError(
                "The stacked executor trains models whose parameters are all of one dtype and trainable.",
                next_step=EXACT,
            )


def _note(order: list[int], place: int, parameter: torch.Tensor) -> None:
    order.append(place)


Ranks: TypeAlias = npt.NDArray[np.int64]
Peers: TypeAlias = Sequence[Sequence[int]]
"""The peers of each rank, in order."""

_DENSE_SHARE = 0.1
"""Of all pairs, from which on a dense product is faster than one over edges."""
_KEPT_TURNS = 64


class Edges:
    """Whose values each rank needs, and to whom each sends without being asked, which may be others."""

    def __init__(self, sources: Peers, targets: Peers) -> None:
        self.size = len(sources)
        self.sources = sources
        self.targets = targets

    @cached_property
    def needed_by(self) -> Peers:
        """Those that have each rank as a source, by rank."""
        receivers: list[list[int]] = [[] for _ in self.sources]
        for receiver, senders in enumerate(self.sources):
            for sender in senders:
                receivers[sender].append(receiver)
        return receivers

    @cached_property
    def num_sent(self) -> Ranks:
        """The number of peers that each rank sends to."""
        return np.array([len(peers) for peers in self.targets])

    @cached_property
    def num_needed(self) -> Ranks:
        """The number of peers that each rank needs something of."""
        return np.array([len(peers) for peers in self.sources])

    @cached_property
    def senders(self) -> Ranks:
        """The senders of all edges over which something is needed, those to one receiver together."""
        return np.array([sender for peers in self.sources for sender in peers], np.int64)

    @cached_property
    def receivers(self) -> Ranks:
        """The receivers of the same edges."""
        return np.repeat(np.arange(self.size), self.num_needed)


class Mix(Protocol):
    """A linear map of workers' values, and the messages that it takes."""

    @property
    def edges(self) -> Edges:
        """Who needs whose values."""

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Maps the rows of `values`, which stay as they are."""


class Mixing:
    """`x_i ← own_i · x_i + Σ_j w_ij x_j` for all i, where row i of `values` is x_i."""

    def __init__(self, turn: Sequence[Weights]) -> None:
        size = len(turn)
        self.edges = Edges(
            [sorted(weights.sources) for weights in turn],
            [
                sorted(weights.sources if weights.destinations is None else weights.destinations)
                for weights in turn
            ],
        )
        factors = [weights.own for weights in turn]
        for rank, sources in enumerate(self.edges.sources):
            for source in sources:
                sends = turn[source].destinations
                factors.append(turn[rank].sources[source] * (1.0 if sends is None else sends[rank]))
        ranks = np.arange(size)
        places = np.stack(
            [np.append(ranks, self.edges.receivers), np.append(ranks, self.edges.senders)],
        )
        self._is_dense = len(factors) - size > _DENSE_SHARE * size**2
        self._sparse = torch.sparse_coo_tensor(
            torch.from_numpy(places),
            torch.tensor(factors, dtype=torch.float64),
            (size, size),
            check_invariants=True,
        ).coalesce()
        self._matrices: dict[torch.dtype, torch.Tensor] = {}

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Maps the rows of `values`, which stay as they are."""
        matrix = self._matrices.get(values.dtype)
        if matrix is None:
            matrix = self._sparse.to_dense() if self._is_dense else self._sparse
            self._matrices[values.dtype] = matrix = matrix.to(values.dtype)
        return matrix @ values if self._is_dense else torch.sparse.mm(matrix, values)


class Everybody:
    """`x_i ← x_i + share · (mean of all − x_i)`: an exchange of all with all, as one mean."""

    def __init__(self, size: int, share: float = 1.0) -> None:
        self._size = size
        self._share = share

    @cached_property
    def edges(self) -> Edges:
        """The edges from everybody to everybody."""
        return all_edges(self._size)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """Maps the rows of `values`, which stay as they are."""
        return torch.lerp(values, values.mean(0, keepdim=True), self._share)


class Rounds:
    """The rounds of a topology, each made when it is first asked for."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._made = lru_cache(_KEPT_TURNS)(self._make)

    def __getitem__(self, number: int) -> Mixing:
        return self._made(number % self._topology.period)

    def _make(self, number: int) -> Mixing:
        return Mixing(self._topology.rule(number))


class MachineRounds(Rounds):
    """The rounds of a topology of machines: each worker gets the weighted mean of its machine and others.

    `machines` are those of the workers, by rank.
    """

    def __init__(self, topology: Topology, machines: Sequence[int]) -> None:
        super().__init__(topology)
        self._machines = machines
        self._workers: list[list[int]] = [[] for _ in range(topology.size)]
        for rank, machine in enumerate(machines):
            self._workers[machine].append(rank)

    def _make(self, number: int) -> Mixing:
        turn = self._topology.rule(number)
        return Mixing([self._spread(rank, turn[machine]) for rank, machine in enumerate(self._machines)])

    def _spread(self, rank: int, weights: Weights) -> Weights:
        factors = {self._machines[rank]: weights.own, **weights.sources}
        spread = {
            worker: factor / len(self._workers[machine])
            for machine, factor in factors.items()
            for worker in self._workers[machine]
        }
        return Weights(spread.pop(rank), spread)


def all_edges(size: int) -> Edges:
    """Returns the edges from everybody to everybody."""
    others = [[peer for peer in range(size) if peer != rank] for rank in range(size)]
    return Edges(others, others)


def edges_from(root: int, size: int) -> Edges:
    """Returns the edges from one to everybody."""
    others = [rank for rank in range(size) if rank != root]
    return Edges(
        [[root] if rank != root else [] for rank in range(size)],
        [others if rank == root else [] for rank in range(size)],
    )
