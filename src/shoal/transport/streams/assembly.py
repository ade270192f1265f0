"""Messages whose buffers are still arriving, and the memory that they arrive in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.core import ProtocolError
from shoal.transport.memory import Cursor, fill
from shoal.transport.streams.decoder import FrameDecoder


class Assembly:
    """The memory of one message and how far it is filled."""

    __slots__ = (
        "_cursor",
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

    @property
    def has_room(self) -> bool:
        """Whether there is memory for it, so that its bytes may come."""
        return bool(self._views)

    @classmethod
    def without_room(cls, total_bytes: int, on_complete: Callable[[], None]) -> Assembly:
        """A message that cannot be taken yet: what arrives is dropped until `make_room` and a new start."""
        assembly = cls((), total_bytes, on_complete)
        assembly.is_waiting_for_start = True
        return assembly

    def _rewind(self) -> None:
        self.left_bytes = self.total_bytes
        self._cursor = Cursor(self._views)

    def make_room(self, views: Sequence[memoryview]) -> None:
        """There is memory now; the sender has been asked to begin again."""
        self._views = views

    def next_targets(self, num_bytes: int, *, is_from_start: bool) -> list[memoryview] | None:
        """Where the next `num_bytes` belong, or None when they must be dropped."""
        if is_from_start:
            if not (self.is_waiting_for_start and self.has_room):
                raise ProtocolError("A message began again that was not asked to.")
            self.is_waiting_for_start = False
            self._rewind()
        elif self.is_waiting_for_start:
            return None
        if num_bytes > self.left_bytes:
            raise ProtocolError(f"{num_bytes:,} bytes arrived for a message that lacks {self.left_bytes:,}.")
        self.left_bytes -= num_bytes
        return self._cursor.take(num_bytes)


class Arrivals:
    """All messages that are arriving on one connection, by the call that they belong to."""

    def __init__(self, decoder: FrameDecoder) -> None:
        self._decoder = decoder
        self._assemblies: dict[int, Assembly] = {}

    def __len__(self) -> int:
        return len(self._assemblies)

    def get(self, call_id: int) -> Assembly | None:
        """The message of this call that is arriving, if there is one."""
        return self._assemblies.get(call_id)

    def ids_with_room(self) -> list[int]:
        """Calls whose messages nothing here keeps from arriving."""
        return [call_id for call_id, assembly in self._assemblies.items() if assembly.has_room]

    def receive(
        self, call_id: int, views: Sequence[memoryview], body: memoryview, on_complete: Callable[[], None]
    ) -> None:
        """Fill a message's buffers with the body that came along, or with the chunks that will come."""
        total_bytes = sum(map(len, views)) if views else 0
        if len(body) != total_bytes:
            if len(body):
                raise ProtocolError(f"A message announced {total_bytes:,} bytes and carries {len(body):,}.")
            self._expect(call_id, Assembly(views, total_bytes, on_complete))
            return
        if self._assemblies and call_id in self._assemblies:
            raise _too_early(call_id)
        fill(views, body)
        on_complete()

    def is_plain(self, sizes: Sequence[int], body: memoryview) -> bool:
        """Whether a message is nothing but the one buffer that came along: the quick case of `receive`."""
        return len(sizes) == 1 and sizes[0] == len(body) and not self._assemblies

    def receive_later(self, call_id: int, total_bytes: int, on_complete: Callable[[], None]) -> None:
        """Expect a message for which there is no room yet; see `make_room`."""
        self._expect(call_id, Assembly.without_room(total_bytes, on_complete))

    def _expect(self, call_id: int, assembly: Assembly) -> None:
        if call_id in self._assemblies:
            raise _too_early(call_id)
        self._assemblies[call_id] = assembly
        self._decoder.expects_chunk = True

    def make_room(self, call_id: int, views: Sequence[memoryview]) -> None:
        """Memory for a message that was expected later."""
        self._assemblies[call_id].make_room(views)

    def targets(self, call_id: int, num_bytes: int, *, is_from_start: bool) -> list[memoryview] | None:
        """Where a part of a message belongs; parts of messages that were given up are dropped."""
        assembly = self._assemblies.get(call_id)
        return None if assembly is None else assembly.next_targets(num_bytes, is_from_start=is_from_start)

    def on_chunk_end(self, call_id: int) -> None:
        """A part is in its place; the message may be complete with it."""
        assembly = self._assemblies.get(call_id)
        if assembly is not None and assembly.left_bytes == 0:
            del self._assemblies[call_id]
            self._decoder.expects_chunk = bool(self._assemblies)
            assembly.on_complete()

    def forget(self, call_id: int) -> None:
        """Receive no more of a call's message; its memory is the owner's again."""
        if self._assemblies.pop(call_id, None) is not None:
            self._decoder.expects_chunk = bool(self._assemblies)
            if self._decoder.is_receiving(call_id):
                self._decoder.drop_chunk()

    def clear(self) -> None:
        """Let go of everything."""
        self._assemblies.clear()


def _too_early(call_id: int) -> ProtocolError:
    return ProtocolError(f"A message of call {call_id} began before the one before it had ended.")
