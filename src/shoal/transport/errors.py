"""How errors cross the wire: a code and three sentences, never an object."""

from __future__ import annotations

from shoal.core import (
    DeadlineExceeded,
    LimitExceeded,
    Peer,
    PeerBusy,
    PeerError,
    PeerRefused,
    RemoteFailure,
    ShoalError,
    TensorError,
    UsageError,
)
from shoal.transport.frames import ErrorHead

_REFUSALS = (PeerRefused, LimitExceeded, TensorError, UsageError)
_MAX_TEXT = 2000  # characters of one sentence: an error must fit where a head fits

ERRORS_BY_CODE: dict[str, type[PeerError]] = {
    "busy": PeerBusy,
    "refused": PeerRefused,
    "failed": RemoteFailure,
}
"""What a code from a peer is raised as; `deadline` is DeadlineExceeded, an unknown one a RemoteFailure."""


def to_wire(error: Exception) -> ErrorHead:
    """What the caller is told of an error that a handler raised."""
    if isinstance(error, DeadlineExceeded):
        code = "deadline"
    elif isinstance(error, PeerBusy):
        code = "busy"
    elif isinstance(error, _REFUSALS):
        code = "refused"
    else:
        code = "failed"
    if isinstance(error, ShoalError):
        return ErrorHead(code, error.what[:_MAX_TEXT], error.cause[:_MAX_TEXT], error.next_step[:_MAX_TEXT])
    return ErrorHead(code, f"{type(error).__name__}: {error}"[:_MAX_TEXT], "", "")


def from_wire(head: ErrorHead, peer: Peer, method: str) -> ShoalError:
    """The error to raise at the caller, naming peer and method."""
    if head.code == "deadline":
        return DeadlineExceeded(
            f"{method} at {peer}: {head.what}", cause=head.cause, next_step=head.next_step
        )
    kind = ERRORS_BY_CODE.get(head.code, RemoteFailure)
    return kind(f"{method} at {peer}: {head.what}", peer=peer, cause=head.cause, next_step=head.next_step)
