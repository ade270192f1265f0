"""Profiles as links: the narrowest and the longest, and who shares them."""

import pytest

from shoal.bench.cost_model import Link
from shoal.bench.profile_links import shaped_network, slowest_link
from shoal.core import Address
from shoal.transport import Profile

MEMORY = Link(0.0, 1e9)


def test_between_workers_all_links_are_the_profiles():
    profile = Profile.parse("[ways.default]\ndelay_ms = 20\nmbit_s = 80")
    network = shaped_network(profile, MEMORY, "workers", 4, 2)
    assert network.inside == network.between
    assert network.between.latency_s == pytest.approx(0.02)
    assert network.between.bytes_per_s == pytest.approx(1e7)
    assert network.line_of == "worker-pair"


def test_between_machines_the_inside_stays_what_it_is():
    profile = Profile.parse("[ways.default]\ndelay_ms = 20\nmbit_s = 80")
    network = shaped_network(profile, MEMORY, "machines", 4, 2)
    assert (network.inside, network.line_of) == (MEMORY, "machine-pair")
    alone = shaped_network(profile, MEMORY, "machines", 2, 2)
    assert alone.between == Link(0.0, float("inf")), "a single machine has nobody to talk to"


def test_a_line_of_ones_own_is_shared_by_all_that_one_sends():
    lines = "[places.home]\nup_mbit_s = 8\ndown_mbit_s = 80\n[ways.default]\ndelay_ms = 5"
    network = shaped_network(Profile.parse(lines), MEMORY, "workers", 2, 1)
    assert network.between.bytes_per_s == pytest.approx(1e6)
    assert network.line_of == "worker"


def test_the_slowest_of_unlike_links_counts_and_delays_are_means():
    text = (
        '[ways.default]\ndelay_ms = { kind = "exponential", mean = 10 }\nmbit_s = 80\n'
        '[[ways.between]]\nfrom = "rank:0"\nto = "rank:2"\ndelay_ms = 1\nmbit_s = 8'
    )
    peers = [Address("rank", rank) for rank in range(3)]
    link = slowest_link(Profile.parse(text), peers)
    assert link.latency_s == pytest.approx(0.01, rel=0.02)
    assert link.bytes_per_s == pytest.approx(1e6)
