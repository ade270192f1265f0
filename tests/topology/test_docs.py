"""The table of docs/topologies.md holds what the code computes."""

import re
from pathlib import Path

from shoal.topology import TOPOLOGIES, consensus_time, make_topology, spectral_gap

DOCS = Path(__file__).parents[2] / "docs" / "topologies.md"
SIZES = (8, 16, 64)
NAME, _, PARTNERS, GAP, TURNS = range(5)


def rows():
    cells = [
        line.strip("| ").split(" | ") for line in DOCS.read_text().splitlines() if line.startswith("| `")
    ]
    return {re.findall(r"`(.+?)`", row[NAME])[0]: row for row in cells}


def test_every_topology_is_there():
    assert {name.partition(":")[0] for name in rows()} == set(TOPOLOGIES)


def test_the_figures_are_right():
    for name, row in rows().items():
        graphs = [make_topology(name, size, local_size=4) for size in SIZES]
        assert row[PARTNERS] == " / ".join(str(graph.degree()) for graph in graphs), name
        assert row[GAP] == " / ".join(f"{spectral_gap(graph):.3g}" for graph in graphs), name
        assert row[TURNS] == " / ".join(f"{consensus_time(graph):.0f}" for graph in graphs), name
