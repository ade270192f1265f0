"""How long an iteration takes under each way of sharing: a model of compute, links, messages and overlap.

Nothing is measured here: `fit` finds the numbers that a model cannot know, `published` and `predict` say
where they come from. `docs/scaling.md` has the formulas in words.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from shoal.core import Address, UsageError
from shoal.topology import make_topology
from shoal.transport import Conditions, Profile
from shoal.transport.network.distributions import sampler_of

FORWARD_SHARE = 1 / 3
"""Of the time of forward and backward: backward computes two products where forward computes one."""
Line = Literal["machine", "worker", "machine-pair", "worker-pair"]
"""What has a line between machines for itself: all that a machine sends, all that a worker sends, what one
worker sends to one machine, or to one worker. Messages that share a line go one after another."""
_MOST_TURNS = 24
"""Of a schedule that repeats later, so many turns stand for all."""


class ModelLink(msgspec.Struct, frozen=True):
    """What lies between two workers: a message takes the latency, and its bytes the bandwidth."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        """How long one message of so many bytes takes."""
        return self.latency_s + size_bytes / self.bytes_per_s


class ModelNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """Machines of equally many workers, and the two classes of links."""

    inside: ModelLink
    """The links between workers of one machine."""
    between: ModelLink
    """The line of each machine to all others."""
    workers_per_machine: int
    line_of: Line = "machine"

    def num_machines(self, num_workers: int) -> int:
        """That so many workers fill, the last one perhaps in part."""
        return -(-num_workers // self.workers_per_machine)

    def mates(self, num_workers: int) -> int:
        """Workers of a full machine."""
        return min(num_workers, self.workers_per_machine)


class Method(msgspec.Struct, frozen=True, kw_only=True):
    """A way of sharing, as far as its cost goes."""

    kind: Literal["none", "all-reduce", "neighbor", "hierarchical"]
    leaves: Literal["after-forward", "as-layers-finish", "after-step"] = "after-step"
    """When what is shared may leave: parameters after forward (adapt-while-combine), what belongs to a layer
    when backward is through with it, or all of it after the step."""
    bucket_bytes: float = 25 * 2**20
    """The smallest portion that leaves at once, where portions leave as layers finish."""
    topology: str = "one-peer-exponential"
    """Of workers for `neighbor`, of machines for `hierarchical`."""
    speaks: Literal["machine", "worker"] = "machine"
    """Whether one speaks to other machines for all of its machine, or each for itself."""


class Work(msgspec.Struct, frozen=True):
    """What a worker does in one iteration, and what it has to share."""

    compute_s: float
    """The seconds of forward, backward and step together."""
    size_bytes: float
    """Of the parameters, as many as of the gradients."""
    mix_s: float = 0.0
    """To add what another has to one's own, all of it: work of this very core, so nothing hides it."""

    @property
    def forward_s(self) -> float:
        """Until the loss is known."""
        return self.compute_s * FORWARD_SHARE


class Terms(msgspec.Struct, frozen=True):
    """What no formula knows, in each iteration: to be measured."""

    overhead_s: float = 0.0
    """Copies, mixing, meetings: what cannot be hidden behind compute."""
    straggler_s: float = 0.0
    """For every doubling of the workers: the slowest of more is later."""


def iteration_s(
    work: Work, method: Method, network: ModelNetwork, num_workers: int, terms: Terms | None = None
) -> float:
    """The time from one step to the next, a mean over the turns of a schedule."""
    if num_workers < 2 or method.kind == "none":
        return work.compute_s
    terms = terms or Terms()
    if method.kind == "all-reduce":
        ends_s = [_all_reduced_s(work, method, network, num_workers)]
    else:
        ends_s = [
            _combined_s(work, method, seconds) for seconds in _turns_s(work, method, network, num_workers)
        ]
    extra_s = terms.overhead_s + terms.straggler_s * math.log2(num_workers)
    extra_s += work.mix_s * _num_mixings(method, network, num_workers)
    return sum(ends_s) / len(ends_s) + extra_s


def _num_mixings(method: Method, network: ModelNetwork, num_workers: int) -> float:
    """How often a worker goes through as many bytes as it has parameters, to reduce or to copy them.

    In a mean of n each reduces its share of all, and copies the shares of the others.
    """
    if method.kind == "neighbor":
        turns = traffic_of(method.topology, num_workers, network.mates(num_workers))
        return sum(max(turn.inside, turn.by_worker) for turn in turns) / len(turns)
    members = num_workers if method.kind == "all-reduce" else network.mates(num_workers)
    across = 1 if method.kind == "hierarchical" and network.num_machines(num_workers) > 1 else 0
    return 2 * (members - 1) / members + across


def ring_s(size_bytes: float, num_members: int, link: ModelLink) -> float:
    """An all-reduce in a ring: 2(n − 1) steps of a share each, at the pace of the slowest link."""
    if num_members < 2:
        return 0.0
    return 2 * (num_members - 1) * link.seconds(size_bytes / num_members)


def _all_reduced_s(work: Work, method: Method, network: ModelNetwork, num_workers: int) -> float:
    """Buckets follow each other over the links without a pause; what is late is late once."""
    if method.leaves == "after-step":
        return work.compute_s + sum(_all_reduce_parts_s(work.size_bytes, method, network, num_workers))
    num_buckets = max(1, round(work.size_bytes / method.bucket_bytes))
    backward_s = work.compute_s - work.forward_s
    latency_s, wire_s = _all_reduce_parts_s(work.size_bytes / num_buckets, method, network, num_workers)
    free_s = 0.0
    for number in range(1, num_buckets + 1):
        free_s = max(free_s, work.forward_s + backward_s * number / num_buckets) + wire_s
    return free_s + latency_s


def _all_reduce_parts_s(
    size_bytes: float, method: Method, network: ModelNetwork, num_workers: int
) -> tuple[float, float]:
    """Of one bucket: how long its steps are on their way, and how long its bytes keep the links."""
    mates, num_machines = network.mates(num_workers), network.num_machines(num_workers)
    if num_machines == 1:
        rings = [(mates, network.inside)]
    elif method.speaks == "worker":
        rings = [(num_workers, network.between)]
    else:
        rings = [(mates, network.inside), (num_machines, network.between)]
    latency_s = sum(ring_s(0, members, link) for members, link in rings)
    return latency_s, sum(ring_s(size_bytes, members, link) for members, link in rings) - latency_s


def _combined_s(work: Work, method: Method, seconds: float) -> float:
    """When an exchange that takes so long is over, or the compute that hides it."""
    if method.leaves == "after-step":
        return work.compute_s + seconds
    if method.leaves == "after-forward":
        return max(work.compute_s, work.forward_s + seconds)
    backward_s = work.compute_s - work.forward_s
    first = min(1.0, method.bucket_bytes / work.size_bytes)
    return max(work.compute_s + first * seconds, work.forward_s + first * backward_s + seconds)


def _turns_s(work: Work, method: Method, network: ModelNetwork, num_workers: int) -> list[float]:
    """How long the exchange of each turn takes."""
    mates = network.mates(num_workers)
    if method.kind == "neighbor":
        return [_messages_s(turn, work, network) for turn in traffic_of(method.topology, num_workers, mates)]
    num_machines = network.num_machines(num_workers)
    if method.speaks == "worker":
        # each worker speaks to all of its own machine and of the neighbours
        spoken = [
            ModelTurn(
                mates - 1, mates * mates * turn.crossing, mates * turn.crossing, mates * turn.to_machine
            )
            for turn in traffic_of(method.topology, num_machines, 1)
        ]
        return [_messages_s(turn, work, network) for turn in spoken]
    mean_s = ring_s(work.size_bytes, mates, network.inside)
    if num_machines == 1:
        return [mean_s]
    told_s = network.inside.seconds(work.size_bytes) if mates > 1 else 0.0
    turns = traffic_of(method.topology, num_machines, 1)
    between = [network.between.seconds(turn.crossing * work.size_bytes) for turn in turns]
    return [mean_s + seconds + told_s for seconds in between]


class ModelTurn(msgspec.Struct, frozen=True):
    """How many messages the workers of the first machine send in one turn."""

    inside: int
    """The most that one of them sends inside."""
    crossing: int
    """How many all of them together send to other machines."""
    by_worker: int
    """The most that one of them sends to other machines."""
    to_machine: int
    """The most that one of them sends to one other machine."""


@lru_cache(maxsize=256)
def traffic_of(topology: str, num_workers: int, workers_per_machine: int) -> tuple[ModelTurn, ...]:
    """The turns of a topology; UsageError where there is none of that size."""
    if num_workers % workers_per_machine:
        raise UsageError(
            f"{num_workers} workers do not fill machines of {workers_per_machine}.",
            next_step="ask for whole machines.",
        )
    plan = make_topology(topology, num_workers, workers_per_machine)
    turns = []
    for number in range(min(plan.period, _MOST_TURNS)):
        sends = [plan.destinations(rank, number) for rank in range(workers_per_machine)]
        machines = [[peer // workers_per_machine for peer in peers] for peers in sends]
        inside = [peers.count(0) for peers in machines]
        crossing = [[machine for machine in peers if machine] for peers in machines]
        to_machine = [peers.count(machine) for peers in crossing for machine in peers]
        counts = [len(peers) for peers in crossing]
        turns.append(ModelTurn(max(inside), sum(counts), max(counts), max(to_machine, default=0)))
    return tuple(turns)


def _messages_s(turn: ModelTurn, work: Work, network: ModelNetwork) -> float:
    """Inside and outside at once."""
    is_apart = network.line_of == "worker-pair"
    num_inside = min(turn.inside, 1) if is_apart else turn.inside
    inside_s = network.inside.seconds(num_inside * work.size_bytes) if num_inside else 0.0
    if not turn.crossing:
        return inside_s
    one_after_another = {
        "machine": turn.crossing,
        "worker": turn.by_worker,
        "machine-pair": turn.to_machine,
        "worker-pair": 1,
    }
    outside_s = network.between.seconds(one_after_another[network.line_of] * work.size_bytes)
    return max(inside_s, outside_s)


# --- links of a profile ---

_NUM_QUANTILES = 200


def shaped_network(
    profile: Profile | str | Path,
    inside: ModelLink,
    between: Literal["workers", "machines"],
    num_workers: int,
    workers_per_machine: int,
) -> ModelNetwork:
    """Describe a profile as so many workers see it; `inside` is what the profile leaves alone."""
    if not isinstance(profile, Profile):
        profile = Profile.load(profile)
    if between == "workers":
        peers = [Address("rank", rank) for rank in range(num_workers)]
    else:
        num_machines = -(-num_workers // workers_per_machine)
        peers = [Address("machine", machine) for machine in range(num_machines)]
    link = slowest_link(profile, peers)
    return ModelNetwork(
        inside=link if between == "workers" else inside,
        between=link,
        workers_per_machine=workers_per_machine,
        line_of=_line_of(profile, peers, link, between),
    )


def slowest_link(profile: Profile, peers: list[Address]) -> ModelLink:
    """The longest mean delay and the narrowest bandwidth between any two of these; free for one alone."""
    conditions = Conditions(profile)
    pairs = list(itertools.permutations(peers, 2))
    return ModelLink(
        max((mean_delay_s(profile, *pair) for pair in pairs), default=0.0),
        min((conditions.link(*pair).bytes_per_s for pair in pairs), default=float("inf")),
    )


def mean_delay_s(profile: Profile, source: Address, target: Address) -> float:
    """The mean delay of one way, without jitter."""
    sample_s = sampler_of(profile.way_between(source, target).delay_ms or 0.0)
    return sum(sample_s((number + 0.5) / _NUM_QUANTILES) for number in range(_NUM_QUANTILES)) / _NUM_QUANTILES


def _line_of(
    profile: Profile, peers: list[Address], link: ModelLink, between: Literal["workers", "machines"]
) -> Line:
    lines = [profile.line_of(peer) for peer in peers]
    limits = [mbit_s for line in lines for mbit_s in (line.up_mbit_s, line.down_mbit_s) if mbit_s]
    if limits and min(limits) * 1e6 / 8 <= link.bytes_per_s * (1 + 1e-9):
        return "worker"
    return "worker-pair" if between == "workers" else "machine-pair"


# --- least squares ---

Vector = npt.NDArray[np.float64]
Model = Callable[[Sequence[float]], Sequence[float]]
"""Maps parameters to what the model predicts with them."""

_ROUNDS = 60
_NUDGE = 1e-4
_LEAST = 1e-12


def fit(model: Model, measured: Sequence[float], beginnings: Sequence[Sequence[float]]) -> list[float]:
    """The parameters, at least zero, whose predictions are nearest to what was measured, in proportion.

    Gauss and Newton's way from each beginning, all of whose entries are above zero; the best end counts.
    """
    target = np.asarray(measured, dtype=float)

    def misses(parameters: Vector) -> Vector:
        predicted: Vector = np.asarray(model(parameters.tolist()), dtype=float)
        off: Vector = predicted / target - 1
        return off

    ends = [_descend(misses, np.asarray(beginning, dtype=float)) for beginning in beginnings]
    best: list[float] = min(ends, key=lambda end: float(np.sum(misses(end) ** 2))).tolist()
    return best


def _descend(misses: Callable[[Vector], Vector], at: Vector) -> Vector:
    scale = at.copy()
    damping = 1e-3
    now = misses(at)
    for _ in range(_ROUNDS):
        slopes = np.stack(
            [(misses(at + step) - now) / _NUDGE for step in np.diag(scale * _NUDGE)], axis=1
        )  # for each parameter, in units of its beginning
        square = slopes.T @ slopes
        move = np.linalg.solve(square + damping * np.eye(len(at)), -slopes.T @ now)
        there = np.maximum(at + move * scale, 0.0)
        then = misses(there)
        if float(then @ then) < float(now @ now):
            is_done = float(now @ now) - float(then @ then) < _LEAST * _LEAST
            at, now, damping = there, then, damping / 4
            if is_done:
                break
        else:
            damping *= 8
    return at
