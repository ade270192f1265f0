"""What `shoal doctor --join` saw of a peer, and how the peer sees this machine."""

from __future__ import annotations

import datetime

import msgspec

from shoal.bench.looking import Look
from shoal.core import Address
from shoal.transport.introductions import About, Attempt, Outcome, Way

CLOCK_WARN_S = 1.0
CLOCK_FAIL_S = 30.0


class Out(msgspec.Struct, frozen=True):
    """How calling the peer went over one way."""

    outcome: Outcome
    says: str = ""
    about: About | None = None
    round_trip_s: float = 0.0
    ahead_s: float = 0.0
    """How far the peer's clock is ahead of this one."""


class Facts(msgspec.Struct, frozen=True):
    """All that was seen."""

    target: Address
    listens: Address
    has_secret: bool
    tcp: Out
    udp: Out
    look: Look | None = None
    """What a closer look saw, where the call over TCP failed."""
    attempts: tuple[Attempt, ...] = ()
    """How the peer's dialing back went."""
    dial_back_error: str = ""
    """Why the peer did not even try."""
    seen_as: Address | None = None
    """Where the peer sees this machine, with the port that this peer listens on."""
    is_own_address: bool = True
    """Whether that host is an address of this machine."""
    port_to_open: int = 0
    """The port that advice should name: the one that was asked for, else the one that the peer uses."""
    wall_s: float = 0.0
    patience_s: float = 0.0

    @property
    def about(self) -> About | None:
        """What the peer says of itself."""
        return self.tcp.about or self.udp.about

    def out(self, way: Way) -> Out:
        """How calling the peer went over this way."""
        return self.tcp if way == "tcp" else self.udp


def any_host(like: str) -> str:
    """All addresses of a machine, of the same kind as this one."""
    return "::" if ":" in like else "0.0.0.0"


def duration(seconds: float) -> str:
    """For people."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.0f} h"


def date(wall_s: float) -> str:
    """For people."""
    return f"{datetime.datetime.fromtimestamp(wall_s, datetime.UTC):%Y-%m-%d %H:%M} UTC"
