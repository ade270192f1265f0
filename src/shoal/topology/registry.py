"""Topologies by name, and whatever else a user may give for one, made into a Topology."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shoal.core.errors import UsageError, did_you_mean
from shoal.topology import graphs, schedules
from shoal.topology.graphs import base_graph
from shoal.topology.plan import Graph, Topology, check_size, from_graph, from_matrices, from_matrix


def _one_peer(size: int, graph: str = "exponential-2", local_size: int = 1) -> Topology:
    return schedules.one_peer(make_topology(graph, size, local_size))


TOPOLOGIES: Mapping[str, Callable[..., Topology]] = {
    "exponential-2": graphs.exponential_two,
    "exponential": graphs.exponential,
    "symmetric-exponential": graphs.symmetric_exponential,
    "ring": graphs.ring,
    "mesh": graphs.mesh,
    "torus": graphs.torus,
    "star": graphs.star,
    "full": graphs.full,
    "hypercube": graphs.hypercube,
    "random-regular": graphs.random_regular,
    "one-peer": _one_peer,
    "one-peer-exponential": schedules.one_peer_exponential,
    "inner-outer-ring": schedules.inner_outer_ring,
    "inner-outer-exponential": schedules.inner_outer_exponential,
    "machine-exponential": schedules.machine_exponential,
    "base": base_graph,
    "random-matching": schedules.random_matching,
}
"""Each takes the number of ranks, and `local_size` where it must know which ranks share a machine."""

ALIASES: Mapping[str, str] = {
    "exponential-two": "exponential-2",
    "exponential-two-graph": "exponential-2",
    "exponential-graph": "exponential",
    "symmetric-exponential-graph": "symmetric-exponential",
    "ring-graph": "ring",
    "mesh-grid-2d-graph": "mesh",
    "star-graph": "star",
    "fully-connected": "full",
    "fully-connected-graph": "full",
}


def _shape(text: str) -> tuple[int, int]:
    rows, columns = text.lower().split("x")
    return int(rows), int(columns)


_PARAMETERS: Mapping[str, tuple[str, Callable[[str], Any], str]] = {
    "exponential": ("base", int, "exponential:3"),
    "symmetric-exponential": ("base", int, "symmetric-exponential:4"),
    "ring": ("direction", str, "ring:left"),
    "mesh": ("shape", _shape, "mesh:2x3"),
    "torus": ("shape", _shape, "torus:2x3"),
    "star": ("center", int, "star:0"),
    "random-regular": ("degree", int, "random-regular:4"),
    "one-peer": ("graph", str, "one-peer:torus"),
    "base": ("base", int, "base:3"),
    "random-matching": ("seed", int, "random-matching:7"),
}
"""What stands after the colon: which argument it is, how it is read, and an example."""


def make_topology_on(spec: object, size: int, num_machines: int) -> Topology:
    """As `make_topology`, of workers on machines; those that have unequal numbers count as one's own each."""
    local_size, rest = divmod(size, num_machines)
    return make_topology(spec, size, 1 if rest else local_size)


def make_topology(spec: object, size: int, local_size: int = 1) -> Topology:
    """The topology of `size` ranks that `spec` means; UsageError when it means none.

    A name with or without parameter ('ring', 'exponential:3'); a function of the number of ranks, as
    `one_peer_exponential`; a Topology; a mixing matrix or a list of them; a networkx graph over the ranks.
    `local_size` is the number of ranks on each machine.
    """
    check_size(size)
    if isinstance(spec, str):
        topology = _named(spec, size, local_size)
    elif isinstance(spec, Topology):
        topology = spec
    elif isinstance(spec, Graph):
        topology = from_graph(spec)
    elif callable(spec):
        return make_topology(spec(size, **_places(spec, local_size)), size, local_size)
    else:
        topology = _from_array(spec)
    if topology.size != size:
        raise UsageError(
            f"the topology '{topology.name}' is for {topology.size} ranks, but there are {size}.",
            next_step="make it for this number, or give a name or a function instead.",
        )
    return topology


def canonical(name: str) -> str:
    """The name in `TOPOLOGIES` that `name` means, whatever its case and separators."""
    known = {_squashed(key): key for key in TOPOLOGIES} | {_squashed(k): v for k, v in ALIASES.items()}
    found = known.get(_squashed(name))
    if found is None:
        raise UsageError(
            f"there is no topology '{name}'.{did_you_mean(name, [*TOPOLOGIES, *ALIASES])}",
            next_step=f"take one of {', '.join(TOPOLOGIES)}.",
        )
    return found


def _named(spec: str, size: int, local_size: int) -> Topology:
    given, colon, text = spec.partition(":")
    name = canonical(given)
    arguments: dict[str, Any] = {}
    if colon:
        if name not in _PARAMETERS:
            raise UsageError(
                f"'{name}' takes no parameter, but '{spec}' gives one.", next_step=f"write '{name}'."
            )
        keyword, read, example = _PARAMETERS[name]
        try:
            arguments[keyword] = read(text)
        except ValueError as error:
            raise UsageError(
                f"'{text}' is no {keyword} of '{name}'.", next_step=f"write it as in '{example}'."
            ) from error
    return TOPOLOGIES[name](size, **arguments, **_places(TOPOLOGIES[name], local_size))


def _places(function: Callable[..., object], local_size: int) -> dict[str, int]:
    try:
        wanted = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    return {"local_size": local_size} if "local_size" in wanted else {}


def _from_array(spec: Any) -> Topology:
    try:
        num_dimensions = np.ndim(spec)
    except ValueError:
        num_dimensions = 0
    if num_dimensions not in (2, 3):
        raise UsageError(
            f"a {type(spec).__name__} is no topology.",
            next_step="give a name, a function of the number of ranks, a square matrix or a networkx graph.",
        )
    return from_matrix(spec) if num_dimensions == 2 else from_matrices(spec)


def _squashed(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
