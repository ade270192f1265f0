"""What a callee sends back: answers whole or in parts, failures, and signs of life."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.core import (
    DeadlineExceeded,
    Peer,
    PeerId,
    PeerRefused,
    ProtocolError,
    ShoalError,
    VersionMismatch,
)
from shoal.core.scope import settle
from shoal.transport.datagrams.contents import copy_in, fill_all
from shoal.transport.datagrams.packets import (
    MAX_PARTS,
    VERSION,
    Answer,
    Challenge,
    Failure,
    Goodbye,
    Parked,
    Part,
    UnreadablePacket,
    Working,
    decode_outcome,
)
from shoal.transport.datagrams.pending import PendingCall, State
from shoal.transport.datagrams.sealing import TOKEN_BYTES
from shoal.transport.frames import UNREADABLE, ErrorHead, decode_payload, from_wire
from shoal.transport.messages import Head, Reply, fitting_views

if TYPE_CHECKING:
    from shoal.transport.datagrams.asking import Asker

_SILENCE = (
    "nothing was heard from it: the host is down, a firewall drops the packets, it has another secret or "
    "none, or what listens there is no Shoal peer."
)
_WORKING_WAIT_S = 1.0  # a call that is being served is asked about this seldom, at first


class AskOverStream(Exception):
    """The answer is too large for datagrams: take it over a stream with this ticket."""

    def __init__(self, ticket: bytes, size_bytes: int) -> None:
        super().__init__()
        self.ticket = ticket
        self.size_bytes = size_bytes


def _call_of(asker: Asker, call_id: int) -> PendingCall | None:
    call = asker.pending.get(call_id)
    if call is None or call.answer.done():
        asker.hub.stats.duplicates += 1
        return None
    if call.has_place:
        asker.leave_window(call)
    return call


def _on_answer(asker: Asker, frame: Answer) -> None:
    call = _call_of(asker, frame.id)
    if call is None:
        return
    if call.num_sends == 1:  # else nobody knows which of them was answered (Karn's rule)
        asker.round_trips.observe((asker.heard_at_s or 0.0) - call.sent_at_s)
    _settle(asker, call, frame)


def _settle(asker: Asker, call: PendingCall, frame: Answer) -> None:
    call.is_settled = True
    try:
        reply = Reply(decode_payload(frame.payload))
        if frame.buffers or call.into is not None:
            reply.buffers = _take_in(asker, call, reply.payload, frame.buffers)
    except Exception as error:  # noqa: BLE001 - whatever the caller's allocate raises belongs to the caller
        call.answer.set_exception(_unusable(asker, call, error))
    else:
        call.answer.set_result(reply)


def _take_in(asker: Asker, call: PendingCall, payload: Any, buffers: list[bytes]) -> list[memoryview]:
    sizes = [len(buffer) for buffer in buffers]
    asker.hub.limits.check_sizes(sizes)
    given = call.into
    if given is None:
        return copy_in(asker.hub.pool, buffers)
    if callable(given):
        given = given(Head(call.method, payload, sizes, asker.peer, call.deadline))
    views = fitting_views(given or (), sizes)
    fill_all(views, buffers)
    return views


def _on_failure(asker: Asker, frame: Failure) -> None:
    call = _call_of(asker, frame.id)
    if call is not None:
        _fail(asker, call, frame)


def _fail(asker: Asker, call: PendingCall, frame: Failure) -> None:
    call.is_settled = True
    head = ErrorHead(frame.code, frame.what, frame.cause, frame.next_step)
    call.answer.set_exception(from_wire(head, asker.peer, call.method))


def _on_part(asker: Asker, frame: Part) -> None:
    call = _call_of(asker, frame.id)
    if call is None:
        return
    if call.parts is None and 2 <= frame.num_parts <= MAX_PARTS:
        call.parts = [None] * frame.num_parts
    parts = call.parts
    if parts is None or len(parts) != frame.num_parts or not 0 <= frame.index < len(parts):
        asker.hub.on_bad_packet(asker.peer, "a part of an answer that does not fit to the others.")
        return
    parts[frame.index] = frame.data
    arrived = [part for part in parts if part is not None]
    if len(arrived) < len(parts):
        return
    try:
        outcome = decode_outcome(b"".join(arrived))
    except UnreadablePacket as error:
        call.is_settled = True
        settle(call.answer, _unusable(asker, call, error))
        return
    if isinstance(outcome, Answer):
        _settle(asker, call, outcome)
    else:
        _fail(asker, call, outcome)


def _on_working(asker: Asker, frame: Working) -> None:
    call = _call_of(asker, frame.id)
    if call is not None:
        call.is_working = True
        call.wait_s = max(call.wait_s, _WORKING_WAIT_S)
        call.quiet_until_s = asker.hub.loop.time() + call.wait_s


def _on_parked(asker: Asker, frame: Parked) -> None:
    call = _call_of(asker, frame.id)
    if call is not None:
        call.is_settled = True
        call.answer.set_exception(AskOverStream(frame.ticket, frame.size_bytes))


def _on_challenge(asker: Asker, frame: Challenge) -> None:
    """The other side sees another address than before: prove it, and ask again."""
    if len(frame.token) != TOKEN_BYTES:
        asker.hub.on_bad_packet(asker.peer, "a challenge that does not follow the protocol.")
    elif frame.token != asker.token:
        asker.token = frame.token
        for call in asker.pending.values():
            call.num_sends += 1  # it may be served twice elsewhere, were it made again
            asker.resend(call)


def _on_goodbye(asker: Asker, frame: Goodbye) -> None:
    asker.close(frame.reason[:200], frame.code)


def _unusable(asker: Asker, call: PendingCall, error: Exception) -> Exception:
    if isinstance(error, ShoalError) or not isinstance(error, (*UNREADABLE, UnreadablePacket)):
        return error
    return ProtocolError(f"The answer of {asker.peer} to {call.method} cannot be read: {error}.")


def late(asker: Asker, call: PendingCall, now_s: float) -> DeadlineExceeded:
    """The error of a call whose time is over."""
    if asker.state is State.GREETING or asker.heard_at_s is None:
        cause = _SILENCE
    elif call.is_working:
        cause = f"its handler was at it; {now_s - asker.heard_at_s:.1f} s ago the peer was heard from."
    else:
        ago_s = now_s - asker.heard_at_s
        cause = f"it was asked {call.num_sends} times; the peer was heard from {ago_s:.1f} s ago."
    return DeadlineExceeded(
        f"{call.method} at {asker.peer} was not answered before its deadline.", cause=cause
    )


def no_welcome(peer: Peer) -> DeadlineExceeded:
    """The error for a peer that does not greet back."""
    return DeadlineExceeded(
        f"No connection to {peer} before the deadline.",
        cause=_SILENCE,
        next_step="check the address, that its UDP port is reachable, and that both have the same secret.",
    )


def other_peer(target: Peer, peer_id: PeerId | None) -> PeerRefused:
    """The error for a target whose address another peer has."""
    other = peer_id.short if peer_id else "nobody in particular"
    expected = target.id.short if target.id else "nobody in particular"
    return PeerRefused(
        f"The peer at {target.address} is {other}, not {expected}.",
        peer=target,
        cause="another peer has taken that address.",
        next_step="look the peer up again.",
    )


def other_version(peer: Peer, version: int) -> VersionMismatch:
    """The error for a peer that cannot be understood."""
    return VersionMismatch(
        f"{peer} speaks another version of the datagram protocol ({version}) than this peer ({VERSION}).",
        next_step="install the same Shoal version on both sides; `shoal --version` tells it.",
    )


HANDLERS: dict[type[Any], Callable[[Asker, Any], None]] = {
    Answer: _on_answer,
    Failure: _on_failure,
    Part: _on_part,
    Working: _on_working,
    Parked: _on_parked,
    Challenge: _on_challenge,
    Goodbye: _on_goodbye,
}
"""What to do with a frame; other kinds are not for callers."""
