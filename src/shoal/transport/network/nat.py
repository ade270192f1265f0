"""The table of a router that translates addresses: which outside port stands for whom, and what is let in.

It moves nothing and reads no clock, so that routers in memory (`MemoryRouter`) and those between network
namespaces, in tests, are one. Words are those of RFC 4787.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field
from typing import Literal

from shoal.core import Address, UsageError

Carrier = Literal["tcp", "udp"]
_FIRST_PORT = 1024
_NUM_PORTS = 65_536 - _FIRST_PORT
_PRUNE_SHARE = 2  # forgotten mappings are dropped when there are so many times more than last time


class Dependence(enum.IntEnum):
    """What of the other side's address a router looks at."""

    ENDPOINT_INDEPENDENT = 0
    ADDRESS_DEPENDENT = 1
    ADDRESS_AND_PORT_DEPENDENT = 2

    def part_of(self, remote: Address) -> tuple[str | int, ...]:
        """The part of an address that it looks at."""
        return (remote.host, remote.port)[: self.value]


@dataclass(frozen=True)
class NatRules:
    """How a router translates."""

    mapping: Dependence
    """Whether who talks to several has one outside port for all, one for each host, or one for each port."""
    filtering: Dependence
    """Whom an outside port lets in: anybody, or hosts or ports that it was used to send to."""
    udp_idle_s: float = 30.0
    """How long an outside port for datagrams lives after the last one that left through it."""
    tcp_idle_s: float = 120.0
    """The same for one through which no stream is open."""


NATS: dict[str, NatRules] = {
    "endpoint-independent": NatRules(Dependence.ENDPOINT_INDEPENDENT, Dependence.ENDPOINT_INDEPENDENT),
    "address-dependent": NatRules(Dependence.ADDRESS_DEPENDENT, Dependence.ADDRESS_DEPENDENT),
    "port-restricted": NatRules(Dependence.ENDPOINT_INDEPENDENT, Dependence.ADDRESS_AND_PORT_DEPENDENT),
    "symmetric": NatRules(Dependence.ADDRESS_AND_PORT_DEPENDENT, Dependence.ADDRESS_AND_PORT_DEPENDENT),
}
"""Kinds of routers by name; `port-restricted` is what most homes have."""


def nat_rules(kind: str | NatRules) -> NatRules:
    """The rules of a kind; UsageError for one that is not known."""
    rules = NATS.get(kind) if isinstance(kind, str) else kind
    if rules is None:
        raise UsageError(f"There is no router {kind!r}.", next_step=f"choose one of {', '.join(NATS)}.")
    return rules


@dataclass(eq=False)
class Mapping:
    """An outside port that stands for a port of a host inside."""

    carrier: Carrier
    inside: Address
    port: int
    used_at_s: float
    num_streams: int = 0
    """Those that are open through it; while there are any it lives."""
    sent_to: dict[tuple[str | int, ...], float] = field(default_factory=dict)
    """When something last left for whom, as far as filtering looks at them."""


class AddressTranslation:
    """What one router knows. Times are those of any one clock, and never go back."""

    def __init__(self, kind: str | NatRules, choice: random.Random) -> None:
        self.rules = nat_rules(kind)
        self._choice = choice
        self._by_inside: dict[tuple[object, ...], Mapping] = {}
        self._by_port: dict[tuple[Carrier, int], Mapping] = {}
        self._num_kept = 64

    def leave(self, carrier: Carrier, inside: Address, remote: Address, now_s: float) -> Mapping:
        """The outside port for something that leaves; a new one where there is none."""
        key = (carrier, inside, *self.rules.mapping.part_of(remote))
        mapping = self._by_inside.get(key)
        if mapping is None or not self._is_alive(mapping, now_s):
            self._forget_old(now_s)
            mapping = Mapping(carrier, inside, self._free_port(carrier, now_s), now_s)
            self._by_inside[key] = self._by_port[carrier, mapping.port] = mapping
        mapping.used_at_s = now_s
        mapping.sent_to[self.rules.filtering.part_of(remote)] = now_s
        return mapping

    def enter(self, carrier: Carrier, port: int, remote: Address, now_s: float) -> Mapping | None:
        """Who is meant by an outside port; None where what comes is dropped."""
        mapping = self.owner(carrier, port, now_s)
        if mapping is None:
            return None
        if self.rules.filtering is Dependence.ENDPOINT_INDEPENDENT:
            return mapping
        sent_at_s = mapping.sent_to.get(self.rules.filtering.part_of(remote))
        is_expected = sent_at_s is not None and (
            mapping.num_streams > 0 or now_s - sent_at_s <= self._idle_s(carrier)
        )
        return mapping if is_expected else None

    def owner(self, carrier: Carrier, port: int, now_s: float) -> Mapping | None:
        """Whose outside port it is, whoever asks; None where it is nobody's."""
        mapping = self._by_port.get((carrier, port))
        return mapping if mapping is not None and self._is_alive(mapping, now_s) else None

    def _idle_s(self, carrier: Carrier) -> float:
        return self.rules.udp_idle_s if carrier == "udp" else self.rules.tcp_idle_s

    def _is_alive(self, mapping: Mapping, now_s: float) -> bool:
        return mapping.num_streams > 0 or now_s - mapping.used_at_s <= self._idle_s(mapping.carrier)

    def _free_port(self, carrier: Carrier, now_s: float) -> int:
        """One at random, as routers do that do not want theirs guessed; the next that is free."""
        start = self._choice.randrange(_NUM_PORTS)
        for step in range(_NUM_PORTS):
            port = _FIRST_PORT + (start + step) % _NUM_PORTS
            if self.owner(carrier, port, now_s) is None:
                return port
        raise UsageError("A router has no free port left.", next_step="let fewer hosts share it.")

    def _forget_old(self, now_s: float) -> None:
        """Drop what is dead, when there may be much of it."""
        if len(self._by_inside) < self._num_kept:
            return
        alive = [item for item in self._by_inside.items() if self._is_alive(item[1], now_s)]
        self._by_inside = dict(alive)
        self._by_port = {(mapping.carrier, mapping.port): mapping for _, mapping in alive}
        self._num_kept = max(64, _PRUNE_SHARE * len(self._by_inside))
