"""Which topologies fit a method whose proof asks something of the mixing matrix, and lazier ones that do.

UsageError says what is asked, and names topologies that have it.
"""

from __future__ import annotations

import numpy as np

from shoal.core.errors import UsageError
from shoal.topology.checks import is_connected, is_doubly_stochastic
from shoal.topology.plan import Topology
from shoal.topology.weights import Weights

SYMMETRIC = "ring, mesh, torus, star, full, hypercube, symmetric-exponential, random-regular"
"""Those that are static and symmetric."""
_TOLERANCE = 1e-6
_MOST_TURNS = 64


def require_doubly_stochastic(topology: Topology, strategy: str) -> None:
    """In every turn (of very many, the first ones), and connected over all of them."""
    num_turns = min(topology.period, _MOST_TURNS)
    for turn in range(num_turns):
        if not is_doubly_stochastic(topology.matrix(turn)):
            raise UsageError(
                f"{strategy} needs weights that sum to 1 over sources and over destinations; those of "
                f"'{topology.name}' do not{f' in turn {turn}' if topology.period > 1 else ''}.",
                cause="the topology is irregular, or its matrix is only row-stochastic.",
                next_step="take a named topology (exponential-2, ring, one-peer-exponential), or sgp.",
            )
    if topology.period <= _MOST_TURNS:
        _require_connected(topology, strategy)


def require_symmetric(topology: Topology, strategy: str) -> None:
    """Static, symmetric, doubly stochastic and connected."""
    if topology.period != 1:
        raise UsageError(
            f"{strategy} needs the same weights in every round; '{topology.name}' changes them.",
            next_step=f"take a static symmetric topology ({SYMMETRIC}), or gradient-tracking.",
        )
    matrix = topology.matrix()
    if abs(matrix - matrix.T).max() > _TOLERANCE or not is_doubly_stochastic(matrix):
        raise UsageError(
            f"{strategy} needs a symmetric matrix whose rows sum to 1; that of '{topology.name}' is not.",
            cause="some edges go one way only, or their two ends have different weights.",
            next_step=f"take a static symmetric topology ({SYMMETRIC}), or gradient-tracking.",
        )
    _require_connected(topology, strategy)


def smallest_eigenvalue(topology: Topology) -> float:
    """Of a symmetric matrix."""
    return float(np.linalg.eigvalsh(topology.matrix())[0])


def lazier(topology: Topology, laziness: float) -> Topology:
    """`laziness · I + (1 − laziness) · W`, of a static topology, on the same edges."""
    if not laziness:
        return topology
    turn = tuple(
        Weights(
            laziness + (1 - laziness) * weights.own,
            {rank: (1 - laziness) * weight for rank, weight in weights.sources.items()},
            weights.destinations,
        )
        for weights in (topology.weights(rank) for rank in range(topology.size))
    )
    return Topology.static(f"lazy {topology.name}", turn)


def _require_connected(topology: Topology, strategy: str) -> None:
    if not is_connected(topology):
        raise UsageError(
            f"{strategy} needs a way from every worker to every other; '{topology.name}' has none.",
            next_step="add edges between its parts.",
        )
