"""What a caller knows of a call that has not been answered yet."""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.core import Deadline
from shoal.transport.messages import Reply

if TYPE_CHECKING:
    from shoal.transport.datagrams.asking import Asker


class State(enum.Enum):
    """How far a session has come."""

    GREETING = 1
    READY = 2
    RETIRED = 3  # finishes the calls that it has
    CLOSED = 4


class PendingCall(msgspec.Struct, eq=False):
    """One call that has been sent and not yet answered."""

    id: int
    asker: Asker
    method: str
    frame: bytes
    into: Any
    deadline: Deadline
    expires_at_s: float
    answer: asyncio.Future[Reply]
    sent_at_s: float
    wait_s: float
    counter: int = 0
    """Of the first packet with it in its session."""
    num_sends: int = 1
    has_place: bool = True
    """In the window of unanswered packets."""
    is_settled: bool = False
    is_working: bool = False
    quiet_until_s: float = 0.0
    """Not to be sent again before this: its handler is at it."""
    parts: list[bytes | None] | None = None

    @property
    def is_over(self) -> bool:
        """For its alarm."""
        return self.answer.done()

    def on_alarm(self, now_s: float) -> None:
        """No answer has come in time."""
        self.asker.on_overdue(self, now_s)
