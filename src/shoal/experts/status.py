"""How hosts of experts are: what they tell of themselves, and how others ask for it. Needs no torch."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from shoal.core import Deadline, Peer, fanout
from shoal.report.units import digits
from shoal.transport.messages import read_answer

if TYPE_CHECKING:
    from shoal.dht.node import DHT

STATUS = "expert.status"
"""The method by which a host tells its `HostStatus`."""
MAX_TOLD = 1000
"""Experts of one host that it tells of."""
_ANSWER_S = 3.0
_AT_ONCE = 32
_PAUSE_S = 1.0  # between two looks, which tell the rate


class ExpertStatus(msgspec.Struct, frozen=True):
    """One expert, since it is served here."""

    uid: str
    num_forward_batches: int
    num_forward_samples: int
    num_backward_batches: int
    num_backward_samples: int
    num_updates: int
    busy_s: float
    num_clipped: int = 0
    """Steps whose gradient was far above what is usual for the expert."""

    @property
    def num_samples(self) -> int:
        """Computed so far, forward and backward."""
        return self.num_forward_samples + self.num_backward_samples


class HostStatus(msgspec.Struct, frozen=True):
    """A host; numbers only grow, but for those of what is there now."""

    up_s: float
    num_waiting: int
    num_failed: int
    """Requests that were accepted and ended in an error."""
    num_peers: int
    """That the DHT knows."""
    is_leaving: bool
    experts: tuple[ExpertStatus, ...]
    num_averaged: int = 0
    """Averages with other replicas that this host began."""
    num_copied: int = 0
    """Experts that have become copies of other replicas."""
    num_adopted: int = 0
    expert_class: str = ""

    @property
    def num_samples(self) -> int:
        """Computed so far, forward and backward."""
        return sum(expert.num_samples for expert in self.experts)

    @property
    def num_batches(self) -> int:
        """That these were computed in."""
        return sum(expert.num_forward_batches + expert.num_backward_batches for expert in self.experts)

    def line(self, before: HostStatus) -> str:
        """In words; rates and batches are those since `before`."""
        took_s = self.up_s - before.up_s
        num_samples = self.num_samples - before.num_samples
        num_batches = self.num_batches - before.num_batches
        rate = num_samples / took_s if took_s > 0 else 0.0
        mean = f" of {digits(num_samples / num_batches)}" if num_batches else ""
        parts = [
            f"{digits(rate)} samples/s",
            f"{self.num_waiting:,} waiting",
            f"{len(self.experts):,} expert{'' if len(self.experts) == 1 else 's'}",
            f"{num_batches:,} batch{'' if num_batches == 1 else 'es'}{mean}",
        ]
        if num_clipped := sum(expert.num_clipped for expert in self.experts):
            parts.append(f"{num_clipped:,} clipped")
        if self.num_failed:
            parts.append(f"{self.num_failed:,} failed")
        if self.is_leaving:
            parts.append("leaving")
        return ", ".join(parts)


# --- for others ---


class SeenExpert(msgspec.Struct, frozen=True):
    """An expert at one of the hosts that serve it."""

    uid: str
    expert_class: str
    server: str
    """The peer that serves it."""
    num_replicas: int
    """Hosts that serve it, this one included."""
    num_waiting: int
    """Requests that wait for any expert of its host."""
    load: float | None = None
    """Which part of the time since the look before its host has computed it; None at the first look."""
    samples_per_s: float | None = None


async def ask_hosts(dht: DHT, peers: Sequence[Peer]) -> dict[Peer, HostStatus]:
    """How those of these peers are that serve experts; the others refuse, or do not answer in time."""

    async def ask(peer: Peer) -> HostStatus:
        reply = await dht.endpoint.streams.call(peer, STATUS, deadline=Deadline.after(_ANSWER_S))
        return read_answer(reply, HostStatus, STATUS)

    outcomes = await fanout([ask(peer) for peer in peers], Deadline.never(), limit=_AT_ONCE)
    return {
        peer: outcome
        for peer, outcome in zip(peers, outcomes, strict=True)
        if not isinstance(outcome, Exception)
    }


async def look_at_experts(dht: DHT, peers: Sequence[Peer]) -> list[SeenExpert]:
    """All experts that these peers serve; takes a second where there are any, for their rates."""
    before = await ask_hosts(dht, peers)
    if not before:
        return []
    await asyncio.sleep(_PAUSE_S)
    return list(seen_experts(await ask_hosts(dht, list(before)), before))


def seen_experts(hosts: Mapping[Peer, HostStatus], before: Mapping[Peer, HostStatus]) -> Iterator[SeenExpert]:
    """Each expert of these hosts, by uid; rates are those since the look before, where it saw the host."""
    num_replicas = Counter(expert.uid for host in hosts.values() for expert in host.experts)
    found = [(expert.uid, str(peer), peer, expert) for peer, host in hosts.items() for expert in host.experts]
    for uid, _, peer, expert in sorted(found, key=lambda each: each[:2]):
        host, earlier = hosts[peer], before.get(peer)
        load, samples_per_s = None, None
        if earlier is not None and (took_s := host.up_s - earlier.up_s) > 0:
            known = {each.uid: each for each in earlier.experts}.get(uid)
            if known is not None:
                load = (expert.busy_s - known.busy_s) / took_s
                samples_per_s = (expert.num_samples - known.num_samples) / took_s
        yield SeenExpert(
            uid,
            host.expert_class,
            peer.id.short if peer.id else str(peer.address),
            num_replicas[uid],
            host.num_waiting,
            load,
            samples_per_s,
        )
