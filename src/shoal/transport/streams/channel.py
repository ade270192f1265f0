"""Channels over a stream connection: items both ways inside one call, with a window of bytes each way."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.core import ProtocolError, UsageError
from shoal.core.scope import settle
from shoal.transport import frames
from shoal.transport.frames import FrameKind, encode
from shoal.transport.messages import Reply, byte_views, encode_head

if TYPE_CHECKING:
    from shoal.transport.streams.connection import Connection

_ITEM = "a channel's item"
_ITEM_BYTES = 256  # what an item counts beside its bytes: empty items are not free either


class StreamChannel:
    """One side of a channel; `answer` is what ends it, and fails when the call fails."""

    def __init__(
        self,
        connection: Connection,
        call_id: int,
        answer: asyncio.Future[Reply],
        window_bytes: int | None = None,
    ) -> None:
        self._connection = connection
        self._call_id = call_id
        self._answer = answer
        self._window_bytes = window_bytes or connection.limits.channel_window_bytes
        self._credit_bytes = 0  # what the other side has room for
        self._sent_bytes = 0  # of that, what is on its way or not taken yet
        self._items: collections.deque[tuple[Reply, int]] = collections.deque()
        self._held_bytes = 0
        self._taken_bytes = 0
        self._is_open = False
        self._is_broken = False
        self._is_ended_here = False
        self._is_ended_there = False
        self._changed = asyncio.Event()
        self._sending = asyncio.Lock()
        answer.add_done_callback(lambda _: self._changed.set())

    def open_window(self) -> None:
        """Tell the other side how many bytes it may send."""
        self._is_open = True
        self._connection.send(FrameKind.WINDOW, self._call_id, encode(frames.WindowHead(self._window_bytes)))

    async def send(self, payload: Any = None, buffers: Sequence[Any] = ()) -> None:
        """Send an item, when the other side has room; returns when its buffers may be changed again."""
        if self._is_ended_here:
            raise UsageError("This side of the channel has ended.", next_step="send before end().")
        views = byte_views(buffers)
        sizes = [len(view) for view in views]
        total_bytes = sum(sizes)
        self._connection.check_size_for_peer(_ITEM, total_bytes)
        max_bytes = self._connection.limits.max_head_bytes
        raw = encode_head(_ITEM, payload, max_bytes)  # apart from the head: the receiver counts it too
        head = encode_head(_ITEM, frames.MessageHead(sizes, msgspec.Raw(raw)), max_bytes)
        cost_bytes = total_bytes + len(raw) + _ITEM_BYTES
        async with self._sending:
            # an item larger than the whole window may go when nothing else is on its way
            while not self._has_room(cost_bytes):
                self._raise_if_over()
                self._changed.clear()
                await self._changed.wait()
            self._raise_if_over()
            self._sent_bytes += cost_bytes
            outbox = self._connection.outbox
            outbox.send_message(FrameKind.ITEM, self._call_id, head, views, None)
            left: asyncio.Future[None] = self._connection.loop.create_future()
            # small items wait too while the socket is full: a peer may open its window and yet not read
            outbox.when_sent(self._call_id, lambda: settle(left, None))
            try:
                await left
            except asyncio.CancelledError:
                # its owner may change the buffers now, and the other side must not take them for the item
                self._is_broken = left.cancelled() and total_bytes > frames.INLINE_BYTES
                outbox.drop(self._call_id)
                self._changed.set()
                raise

    async def end(self) -> None:
        """Say that no more items will be sent."""
        async with self._sending:
            if not (self._is_ended_here or self._is_broken or self._answer.done()):
                self._connection.send(FrameKind.END, self._call_id)
            self._is_ended_here = True

    async def receive(self) -> Reply | None:
        """The next item; None when the other side has ended; the call's error when it failed."""
        while not self._items:
            if self._is_ended_there or self._answer.done():
                if self._answer.done() and not self._answer.cancelled():
                    self._answer.result()
                return None
            self._changed.clear()
            await self._changed.wait()
        item, cost_bytes = self._items.popleft()
        self._held_bytes -= cost_bytes
        self._taken_bytes += cost_bytes
        if self._taken_bytes >= self._window_bytes // 4 or not self._items:
            self._connection.send(
                FrameKind.WINDOW, self._call_id, encode(frames.WindowHead(self._taken_bytes))
            )
            self._taken_bytes = 0
        return item

    async def __aiter__(self) -> AsyncIterator[Reply]:
        while (item := await self.receive()) is not None:
            yield item

    async def result(self) -> Reply:
        """Wait for the reply that ends the channel."""
        return await asyncio.shield(self._answer)

    def on_item(self, head: frames.MessageHead, body: memoryview) -> None:
        """An item has come, or begins to arrive when its buffers are large."""
        self._connection.limits.check_sizes(head.sizes)
        cost_bytes = sum(head.sizes) + len(memoryview(head.payload)) + _ITEM_BYTES
        is_too_much = self._held_bytes and self._held_bytes + cost_bytes > self._window_bytes
        if not self._is_open or self._is_ended_there or is_too_much:
            raise ProtocolError("A channel's sender sent more than its window allows.")
        if cost_bytes > self._window_bytes and not self._connection.serving.reserve(
            self._call_id, cost_bytes
        ):
            return
        self._held_bytes += cost_bytes
        item = Reply(_payload(head), self._connection.pool.allocate_all(head.sizes))

        def complete() -> None:
            self._items.append((item, cost_bytes))
            self._changed.set()

        self._connection.arrivals.receive(self._call_id, item.buffers, body, complete)

    def on_end(self) -> None:
        """The other side has no more items."""
        self._is_ended_there = True
        self._changed.set()

    def on_window(self, size_bytes: int) -> None:
        """The other side has taken bytes; its first word opens the window."""
        if self._credit_bytes == 0:
            self._credit_bytes = size_bytes
        else:
            self._sent_bytes -= size_bytes
            if size_bytes < 0 or self._sent_bytes < 0:
                raise ProtocolError("A channel's receiver took more than it was sent.")
        self._changed.set()

    def check_whole(self) -> None:
        """UsageError when an item was cut in two: the other side cannot go on from there."""
        if self._is_broken or self._connection.outbox.body_of(self._call_id) is not None:
            raise UsageError(
                "The sending of a channel's item was cancelled before all of it had left.",
                cause="the channel's handler was in a hurry, or one of its tasks went on without it.",
                next_step="let send() end, or give the whole channel up.",
            )

    def _has_room(self, cost_bytes: int) -> bool:
        if self._credit_bytes == 0:
            return False
        return self._sent_bytes == 0 or self._sent_bytes + cost_bytes <= self._credit_bytes

    def _raise_if_over(self) -> None:
        self.check_whole()
        if self._answer.done():
            if not self._answer.cancelled():
                self._answer.result()
            raise UsageError("The channel is over.", cause="the other side answered, or its block was left.")


def _payload(head: frames.MessageHead) -> Any:
    try:
        return frames.decode_payload(head.payload)
    except frames.UNREADABLE as error:
        raise ProtocolError(f"A channel's item cannot be read: {error}.") from error
