"""What passes between machines, counted."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec


class MeshTraffic:
    """What has passed over the mesh, by rank: buffers and heads, without beats. Read it from any thread."""

    def __init__(self) -> None:
        self.sent_bytes: dict[int, int] = {}
        self.received_bytes: dict[int, int] = {}
        self.num_sent: dict[int, int] = {}
        self.num_received: dict[int, int] = {}
        self._lock = threading.Lock()

    def sent(self, to: int, size_bytes: int) -> None:
        """A message has left."""
        with self._lock:
            self.sent_bytes[to] = self.sent_bytes.get(to, 0) + size_bytes
            self.num_sent[to] = self.num_sent.get(to, 0) + 1

    def received(self, source: int, size_bytes: int) -> None:
        """A message has come."""
        with self._lock:
            self.received_bytes[source] = self.received_bytes.get(source, 0) + size_bytes
            self.num_received[source] = self.num_received.get(source, 0) + 1


def size_of(payload: Any, buffers: Sequence[Any]) -> int:
    """Bytes of a message as it travels, but for its frames."""
    head_bytes = 0 if payload is None else len(msgspec.msgpack.encode(payload))
    return head_bytes + sum(memoryview(buffer).nbytes for buffer in buffers)
