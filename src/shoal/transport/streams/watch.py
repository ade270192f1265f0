"""Notices a peer that stalls: inside a frame, between the parts of a message, or in reading what it is sent.

It looks about once a second and costs nothing in between. Each rule is a stock of patience, in seconds: time
uses it up, bytes bring it back, so that a peer that sends a byte now and then is not taken for a slow one.
"""

from __future__ import annotations

from shoal.transport.limits import Limits

_MAX_ELAPSED_S = 2.0  # of one look: when this process itself stood still, the peer is not to blame


class Patience:
    """The time that a peer has left while something is expected of it."""

    def __init__(self, max_s: float, min_bytes_per_s: int) -> None:
        self._max_s = self._left_s = max_s
        self._min_bytes_per_s = min_bytes_per_s
        self._is_waiting = False
        self._seen_at_s = 0.0
        self._seen_bytes = 0

    def has_ended(self, now_s: float, num_bytes: int, *, is_expected: bool) -> bool:
        """Look: `num_bytes` is what has moved in all, `is_expected` whether more should have."""
        elapsed_s = min(now_s - self._seen_at_s, _MAX_ELAPSED_S)
        moved_bytes = num_bytes - self._seen_bytes
        self._seen_at_s, self._seen_bytes = now_s, num_bytes
        if not is_expected:
            self.renew()
        elif not self._is_waiting:  # since when is not known: count from this look on
            self._is_waiting = True
        else:
            self._left_s = min(self._max_s, self._left_s - elapsed_s + moved_bytes / self._min_bytes_per_s)
        return self._left_s < 0

    def renew(self) -> None:
        """Forget what was: what is expected now is something new."""
        self._left_s = self._max_s
        self._is_waiting = False


class Watch:
    """What is known of a peer's pace."""

    def __init__(self, limits: Limits) -> None:
        self.num_frames = 0
        """Frames that have begun to arrive."""
        self.message_bytes = 0
        """Bytes of chunks that found their place."""
        self._seen_frames = 0
        self._seen_bytes = 0
        self._frame = Patience(limits.frame_s, limits.min_bytes_per_s)
        # a sender may have more to do between the parts of a message, and a reader before it reads
        self._messages = Patience(3 * limits.frame_s, limits.min_bytes_per_s)
        self._reading = Patience(3 * limits.frame_s, limits.min_bytes_per_s)

    def rest(self) -> None:
        """Nothing is expected now."""
        for patience in (self._frame, self._messages, self._reading):
            patience.renew()

    def is_stuck(self, now_s: float, received_bytes: int, *, is_inside_frame: bool) -> bool:
        """Whether the frame that is arriving has been for too long."""
        if self._seen_frames != self.num_frames:
            self._seen_frames = self.num_frames
            self._frame.renew()
        return self._frame.has_ended(now_s, received_bytes, is_expected=is_inside_frame)

    def has_stalled(self, now_s: float, *, is_expecting: bool) -> bool:
        """Whether the messages for which there is room here have stopped arriving."""
        if not self._messages.has_ended(now_s, self.message_bytes, is_expected=is_expecting):
            return False
        self._messages.renew()
        return True

    def does_not_read(self, now_s: float, sent_bytes: int, held_bytes: int) -> bool:
        """Whether the peer lets what it was sent lie: `held_bytes` of it have not left this machine."""
        return self._reading.has_ended(now_s, sent_bytes - held_bytes, is_expected=held_bytes > 0)

    def has_heard(self, received_bytes: int) -> bool:
        """Whether anything has come since the last time this was asked."""
        seen_bytes, self._seen_bytes = self._seen_bytes, received_bytes
        return seen_bytes != received_bytes
