"""Messages whose buffers are still arriving."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.core import ProtocolError


class Assembly:
    """The memory of one message and how far it is filled."""

    __slots__ = (
        "_offset",
        "_view_index",
        "_views",
        "is_waiting_for_start",
        "left_bytes",
        "on_complete",
        "total_bytes",
    )

    def __init__(
        self, views: Sequence[memoryview], total_bytes: int, on_complete: Callable[[], None]
    ) -> None:
        self.on_complete = on_complete
        self.total_bytes = total_bytes
        self.is_waiting_for_start = False
        self._views = views
        self._rewind()

    @classmethod
    def without_room(cls, total_bytes: int, on_complete: Callable[[], None]) -> Assembly:
        """A message that cannot be taken yet: what arrives is dropped until `make_room` and a new start."""
        assembly = cls((), total_bytes, on_complete)
        assembly.is_waiting_for_start = True
        return assembly

    def _rewind(self) -> None:
        self.left_bytes = self.total_bytes
        self._view_index = 0
        self._offset = 0

    def make_room(self, views: Sequence[memoryview]) -> None:
        """There is memory now; the sender has been asked to begin again."""
        self._views = views

    def next_targets(self, num_bytes: int, *, is_from_start: bool) -> list[memoryview] | None:
        """Where the next `num_bytes` belong, or None when they must be dropped."""
        if is_from_start:
            if not self.is_waiting_for_start or not self._views:
                raise ProtocolError("A message began again that was not asked to.")
            self.is_waiting_for_start = False
            self._rewind()
        elif self.is_waiting_for_start:
            return None
        if num_bytes > self.left_bytes:
            raise ProtocolError(f"{num_bytes:,} bytes arrived for a message that lacks {self.left_bytes:,}.")
        self.left_bytes -= num_bytes
        targets = []
        while num_bytes:
            view = self._views[self._view_index]
            target = view[self._offset : self._offset + num_bytes]
            num_bytes -= len(target)
            self._offset += len(target)
            if self._offset == len(view):
                self._view_index += 1
                self._offset = 0
            if len(target):
                targets.append(target)
        return targets
