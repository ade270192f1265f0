"""A network's profile as the links of the cost model: what `Shaped` makes of it, as far as numbers tell.

Links of a profile are held by each worker for itself, so that the workers of one machine do not share its
line. Jitter and loss are left out, delays are means, and where links differ the slowest counts.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Literal

from shoal.bench.cost_model import Line, Link, Network
from shoal.core import Address
from shoal.transport import Conditions, Profile
from shoal.transport.network.distributions import sampler_of

_NUM_QUANTILES = 200


def shaped_network(
    profile: Profile | str | Path,
    inside: Link,
    between: Literal["workers", "machines"],
    num_workers: int,
    workers_per_machine: int,
) -> Network:
    """As so many workers see it; `inside` is what the profile leaves alone."""
    if not isinstance(profile, Profile):
        profile = Profile.load(profile)
    if between == "workers":
        peers = [Address("rank", rank) for rank in range(num_workers)]
    else:
        num_machines = -(-num_workers // workers_per_machine)
        peers = [Address("machine", machine) for machine in range(num_machines)]
    link = slowest_link(profile, peers)
    return Network(
        inside=link if between == "workers" else inside,
        between=link,
        workers_per_machine=workers_per_machine,
        line_of=_line_of(profile, peers, link, between),
    )


def slowest_link(profile: Profile, peers: list[Address]) -> Link:
    """The longest mean delay and the narrowest bandwidth between any two of these; free for one alone."""
    conditions = Conditions(profile)
    pairs = list(itertools.permutations(peers, 2))
    return Link(
        max((mean_delay_s(profile, *pair) for pair in pairs), default=0.0),
        min((conditions.link(*pair).bytes_per_s for pair in pairs), default=float("inf")),
    )


def mean_delay_s(profile: Profile, source: Address, target: Address) -> float:
    """One way."""
    sample_s = sampler_of(profile.way_between(source, target).delay_ms or 0.0)
    return sum(sample_s((number + 0.5) / _NUM_QUANTILES) for number in range(_NUM_QUANTILES)) / _NUM_QUANTILES


def _line_of(
    profile: Profile, peers: list[Address], link: Link, between: Literal["workers", "machines"]
) -> Line:
    lines = [profile.line_of(peer) for peer in peers]
    limits = [mbit_s for line in lines for mbit_s in (line.up_mbit_s, line.down_mbit_s) if mbit_s]
    if limits and min(limits) * 1e6 / 8 <= link.bytes_per_s * (1 + 1e-9):
        return "worker"
    return "worker-pair" if between == "workers" else "machine-pair"
