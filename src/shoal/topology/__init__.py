"""Who exchanges with whom, and with which weight."""

from shoal.topology.base_graphs import base_graph
from shoal.topology.checks import (
    is_column_stochastic,
    is_connected,
    is_doubly_stochastic,
    is_equivalent,
    is_regular,
    is_row_stochastic,
)
from shoal.topology.graphs import (
    exponential,
    exponential_two,
    full,
    hypercube,
    mesh,
    random_regular,
    ring,
    star,
    symmetric_exponential,
    torus,
)
from shoal.topology.machines import (
    inner_outer_exponential,
    inner_outer_ring,
    machine_exponential,
    over_machines,
)
from shoal.topology.mixing import metropolis_hastings, uniform
from shoal.topology.own import from_graph, from_matrices, from_matrix
from shoal.topology.plan import Topology
from shoal.topology.registry import TOPOLOGIES, make_topology, make_topology_on
from shoal.topology.schedules import one_peer, one_peer_exponential, random_matching
from shoal.topology.sides import destinations_from_sources, sources_from_destinations
from shoal.topology.speed import consensus_time, spectral_gap
from shoal.topology.weights import MachineWeights, Weights

__all__ = [
    "TOPOLOGIES",
    "MachineWeights",
    "Topology",
    "Weights",
    "base_graph",
    "consensus_time",
    "destinations_from_sources",
    "exponential",
    "exponential_two",
    "from_graph",
    "from_matrices",
    "from_matrix",
    "full",
    "hypercube",
    "inner_outer_exponential",
    "inner_outer_ring",
    "is_column_stochastic",
    "is_connected",
    "is_doubly_stochastic",
    "is_equivalent",
    "is_regular",
    "is_row_stochastic",
    "machine_exponential",
    "make_topology",
    "make_topology_on",
    "mesh",
    "metropolis_hastings",
    "one_peer",
    "one_peer_exponential",
    "over_machines",
    "random_matching",
    "random_regular",
    "ring",
    "sources_from_destinations",
    "spectral_gap",
    "star",
    "symmetric_exponential",
    "torus",
    "uniform",
]
