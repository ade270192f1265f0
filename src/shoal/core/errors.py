"""Every error that Shoal raises on purpose, and nothing else.

An error says what happened, why it probably did, and what to try next; errors of libraries are translated
into these at the seam where they arise.

    ShoalError
    ├── UsageError                  the call or its arguments are wrong (also a ValueError)
    ├── IdentityError               a key or secret cannot be read, made or trusted
    ├── DeadlineExceeded            the time given to a call is over (also a TimeoutError)
    ├── LimitExceeded               a size, count or rate is above what this peer allows
    ├── ProtocolError               bytes that do not follow the protocol
    │   └── VersionMismatch         the other side speaks another version of it
    ├── PeerError                   a peer did not do what it was asked; names the peer
    │   ├── PeerUnreachable         no connection could be made
    │   ├── PeerLost                the connection ended while something depended on it
    │   │   └── NetworkSplit        this worker is on the side of a cut network that stops
    │   ├── PeerRefused             the peer said no: unknown method, not allowed, too large
    │   ├── PeerBusy                the peer said 'not now'; trying again later may work
    │   │   └── PeerLeaving         the peer is about to go; trying another one may work
    │   └── RemoteFailure           the peer's own code failed while serving the call
    ├── TensorError                 a tensor, its description and its bytes do not fit together
    ├── CheckpointError             a checkpoint cannot be written, or is not whole
    ├── ReportError                 a report cannot be read or written
    │   └── NotComparable           two reports measure different things
    └── BenchmarkError              a benchmark could not run at all
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ShoalError(Exception):
    """The root: `what` happened, its likely `cause`, and the `next_step` to try."""

    def __init__(self, what: str, *, cause: str = "", next_step: str = "") -> None:
        self.what = what
        self.cause = cause
        self.next_step = next_step
        super().__init__(what)

    def __str__(self) -> str:
        parts = [self.what]
        if self.cause:
            parts.append(f"Likely cause: {self.cause}")
        if self.next_step:
            parts.append(f"Try: {self.next_step}")
        return "\n  ".join(parts)


class UsageError(ShoalError, ValueError):
    """The call or its arguments are wrong; nothing was done."""


class IdentityError(ShoalError):
    """A key or secret cannot be read, made or trusted."""


class DeadlineExceeded(ShoalError, TimeoutError):
    """The time given to a call is over; what it held has been freed."""


class LimitExceeded(ShoalError):
    """A size, count or rate is above what this peer allows."""


class ProtocolError(ShoalError):
    """Bytes arrived that do not follow the protocol; their connection is closed."""


class VersionMismatch(ProtocolError):
    """The other side speaks another version of the protocol."""


class PeerError(ShoalError):
    """A peer did not do what it was asked; `peer` names it."""

    def __init__(self, what: str, *, peer: object = None, cause: str = "", next_step: str = "") -> None:
        super().__init__(what, cause=cause, next_step=next_step)
        self.peer = peer


class PeerUnreachable(PeerError):
    """No connection to the peer could be made."""


class PeerLost(PeerError):
    """The connection to the peer ended while something depended on it."""


class NetworkSplit(PeerLost):
    """The network is cut, and this worker is on the side that stops: otherwise there would be two models."""


class PeerRefused(PeerError):
    """The peer said no, and would say so again."""


class PeerBusy(PeerError):
    """The peer said 'not now'; trying again later may work."""


class PeerLeaving(PeerBusy):
    """The peer takes no new work because it is about to go."""


class RemoteFailure(PeerError):
    """The peer's own code failed while serving the call."""


class TensorError(ShoalError):
    """A tensor, its description and its bytes do not fit together."""


class CheckpointError(ShoalError):
    """A checkpoint cannot be written, or is not whole."""


class ReportError(ShoalError):
    """A report cannot be read or written."""


class NotComparable(ReportError):
    """Two reports measure different things."""


class BenchmarkError(ShoalError):
    """A benchmark could not run at all."""


def did_you_mean(name: str, known: Iterable[str], n: int = 1, cutoff: float = 0.6) -> str:
    """Ask for the end of a sentence whether one of the nearest known names was meant; empty for none near.

    Capitals, hyphens and underscores make no difference.
    """
    by_plain = {_plain(each): each for each in known}
    near = difflib.get_close_matches(_plain(name)[:64], by_plain, n=n, cutoff=cutoff)
    return f" Did you mean {' or '.join(repr(by_plain[each]) for each in near)}?" if near else ""


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
