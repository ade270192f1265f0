"""What a peer puts up with: sizes, counts and times, with defaults that a home machine survives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core import LimitExceeded, UsageError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of a transport; every peer has its own, and says those that concern callers in its hello."""

    max_connections: int = 1024
    """Accepted connections; one more makes the oldest that has said nothing go, or is refused."""
    max_calls: int = 1024
    """Calls that one connection may have open in one direction; a caller waits for a free place."""
    max_head_bytes: int = 1 * MIB
    """A call's method and payload; what is larger belongs into buffers."""
    max_message_bytes: int = 256 * MIB
    """All buffers of one message; what is larger goes through a channel."""
    max_buffers: int = 16_384
    """Buffers of one message."""
    max_bytes_in_flight: int = 1 * GIB
    """Buffers and large payloads of requests that are received or served, over all connections; callers
    beyond it wait."""
    channel_window_bytes: int = 8 * MIB
    """What a channel's sender may have sent before the receiver has taken it."""
    handshake_s: float = 10.0
    """Time from connection to a complete hello."""
    frame_s: float = 10.0
    """Time for a frame to arrive once it has begun, beside its bytes at `min_bytes_per_s`; thrice this for a
    message to come on, and for a peer to read what it was sent."""
    min_bytes_per_s: int = 4 * KIB
    """A sender or reader slower than this is cut off."""
    idle_s: float = 60.0
    """A connection without calls is closed by the dialing side after this time, by the other after thrice."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise UsageError(f"The limit {name} must be above 0, not {getattr(self, name)}.")
        if self.max_message_bytes > self.max_bytes_in_flight:
            raise UsageError(
                "max_message_bytes is above max_bytes_in_flight: the largest message could never arrive.",
                next_step="raise max_bytes_in_flight to at least max_message_bytes.",
            )

    def check_sizes(self, sizes: Sequence[int]) -> None:
        """LimitExceeded when a message's buffers are more than this peer takes."""
        total_bytes = sum(sizes)
        if total_bytes > self.max_message_bytes or len(sizes) > self.max_buffers:
            raise LimitExceeded(
                f"a message of {total_bytes:,} bytes in {len(sizes):,} buffers is above the limit of "
                f"{self.max_message_bytes:,} bytes in {self.max_buffers:,}.",
                next_step="send it in parts through a channel, or raise the receiver's limits.",
            )
