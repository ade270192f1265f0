"""Too many sessions, or too much kept for them: who goes first."""

from __future__ import annotations

from typing import Protocol

from shoal.transport.datagrams.answering import Answerer
from shoal.transport.datagrams.kept import MAX_KEPT_BYTES_IN_ALL
from shoal.transport.datagrams.sessions import Session
from shoal.transport.limits import Limits

SESSIONS_A_CONNECTION = 4
"""So many sessions for each of `Limits.max_connections`: they cost much less."""
_EVICTED_SHARE = 8  # one in so many sessions goes when there are too many


class CrowdedHub(Protocol):
    """Whose sessions they are."""

    limits: Limits
    sessions: dict[bytes, Session]
    kept_bytes: int

    def drop(self, session: Session, reason: str) -> None:
        """End a session and forget it."""


def make_room(hub: CrowdedHub, *, num_newcomers: int) -> bool:
    """Drop the sessions unused for longest when there are too many; False when all are in use."""
    max_sessions = SESSIONS_A_CONNECTION * hub.limits.max_connections + num_newcomers
    if len(hub.sessions) <= max_sessions:
        return True
    idle = [session for session in hub.sessions.values() if session.is_settled and not session.num_open]
    idle.sort(key=lambda session: session.used_at_s)
    for session in idle[: 1 + len(idle) // _EVICTED_SHARE]:
        hub.drop(session, "it was not used for a long time.")
    return bool(idle)


def shed(hub: CrowdedHub) -> None:
    """Forget answers of the sessions that were not used for the longest time, then those sessions.

    That a call was served is forgotten with its session only: else it could run twice.
    """
    keepers = [one for one in hub.sessions.values() if isinstance(one, Answerer) and one.is_proven]
    keepers.sort(key=lambda session: session.used_at_s)
    for keeper in keepers:
        if hub.kept_bytes <= MAX_KEPT_BYTES_IN_ALL // 2:
            return
        keeper.kept.shed()
    for keeper in keepers:
        if hub.kept_bytes <= MAX_KEPT_BYTES_IN_ALL // 2:
            return
        if not keeper.num_open:
            hub.drop(keeper, "too much was kept for it.")
