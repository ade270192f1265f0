"""How errors cross the wire: a code and three sentences, never an object."""

from __future__ import annotations

from shoal.core import (
    DeadlineExceeded,
    LimitExceeded,
    Peer,
    PeerBusy,
    PeerError,
    PeerLeaving,
    PeerLost,
    PeerRefused,
    ProtocolError,
    RemoteFailure,
    ShoalError,
    TensorError,
    UsageError,
    VersionMismatch,
)
from shoal.transport.frames import VERSION, ErrorHead, GoodbyeHead

_REFUSALS = (PeerRefused, LimitExceeded, TensorError, UsageError)
_MAX_TEXT = 2000  # characters of one sentence: an error must fit where a head fits

ERRORS_BY_CODE: dict[str, type[PeerError]] = {
    "busy": PeerBusy,
    "leaving": PeerLeaving,
    "refused": PeerRefused,
    "failed": RemoteFailure,
}
"""What a code from a peer is raised as; `deadline` is DeadlineExceeded, an unknown one a RemoteFailure."""


def to_wire(error: Exception) -> ErrorHead:
    """What the caller is told of an error that a handler raised."""
    if isinstance(error, DeadlineExceeded):
        code = "deadline"
    elif isinstance(error, PeerLeaving):
        code = "leaving"
    elif isinstance(error, PeerBusy):
        code = "busy"
    elif isinstance(error, _REFUSALS):
        code = "refused"
    else:
        code = "failed"
    if isinstance(error, ShoalError):
        return ErrorHead(code, _text(error.what), _text(error.cause), _text(error.next_step))
    try:
        what = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - a handler's error need not be able to describe itself
        what = type(error).__name__
    return ErrorHead(code, _text(what), "", "")


def from_wire(head: ErrorHead, peer: Peer, method: str) -> ShoalError:
    """The error to raise at the caller, naming peer and method."""
    what, cause, next_step = (
        f"{method} at {peer}: {_text(head.what)}",
        _text(head.cause),
        _text(head.next_step),
    )
    if head.code == "deadline":
        return DeadlineExceeded(what, cause=cause, next_step=next_step)
    kind = ERRORS_BY_CODE.get(head.code, RemoteFailure)
    return kind(what, peer=peer, cause=cause, next_step=next_step)


def from_goodbye(head: GoodbyeHead, peer: Peer) -> ShoalError:
    """Why a connection ended, as its peer has said."""
    reason = _text(head.reason)
    if head.code == "version":
        return VersionMismatch(
            f"{peer} speaks another version of the protocol than this peer ({VERSION}): {reason}",
            next_step="install the same Shoal version on both sides; `shoal --version` tells it.",
        )
    if head.code == "busy":
        return PeerBusy(f"{peer} takes no connection now: {reason}", peer=peer, next_step="try again later.")
    if head.code == "refused":
        return PeerRefused(
            f"{peer} closed the connection: {reason}",
            peer=peer,
            next_step="ask who runs it to allow this peer's id, which `shoal keys show` prints.",
        )
    if head.code == "protocol":
        return ProtocolError(f"{peer} closed the connection: {reason}")
    return PeerLost(f"{peer} closed the connection: {reason}", peer=peer)


def _text(text: str) -> str:
    """Short enough to travel, and valid UTF-8: names of files may hold characters that are not."""
    return str(text)[:_MAX_TEXT].encode(errors="replace").decode()
