"""Measures calls to an echo server: how long one takes, and how many pass with several in flight."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec

from shoal.core import Deadline, LoopThread, Peer, fanout
from shoal.transport import Reply, Transport

_DEADLINE_S = 30.0


class EchoClient:
    """Calls `echo` at one peer through one transport, on the loop's thread.

    With `in_payload` the bytes travel as payloads, as small records do, and not as buffers.
    """

    def __init__(
        self, loop: LoopThread, transport: Transport, peer: Peer, seed: int, *, in_payload: bool = False
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._peer = peer
        self._random = random.Random(seed)
        self._in_payload = in_payload
        self._places: dict[tuple[int, int], list[_Place]] = {}

    def latencies_s(self, size_bytes: int, count: int) -> list[float]:
        """How long each of so many calls takes, one after another."""
        return self._loop.run(self._latencies_s(self._places_of(1, size_bytes)[0], count))

    def calls_per_s(self, size_bytes: int, in_flight: int, seconds: float) -> float:
        """Calls a second with so many in flight; large answers arrive in memory that is used again."""
        return self._loop.run(self._rate(self._places_of(in_flight, size_bytes), seconds))

    def bytes_per_s(self, size_bytes: int, in_flight: int, seconds: float) -> float:
        """The same in bytes, both directions counted."""
        return 2 * size_bytes * self.calls_per_s(size_bytes, in_flight, seconds)

    async def _call(self, place: _Place) -> None:
        place.reply = await self._transport.call(
            self._peer,
            "echo",
            place.payload,
            place.outgoing,
            deadline=Deadline.after(_DEADLINE_S),
            into=place.into,
        )

    async def _latencies_s(self, place: _Place, count: int) -> list[float]:
        latencies_s = []
        for _ in range(count):
            began_s = time.perf_counter()
            await self._call(place)
            latencies_s.append(time.perf_counter() - began_s)
        return latencies_s

    async def _rate(self, places: list[_Place], seconds: float) -> float:
        num_done = 0
        began_s = time.perf_counter()

        async def keep_calling(place: _Place) -> None:
            nonlocal num_done
            while True:  # at least once, however short the block
                await self._call(place)
                num_done += 1
                if time.perf_counter() - began_s >= seconds:
                    return

        outcomes = await fanout(
            [keep_calling(place) for place in places], Deadline.after(seconds + _DEADLINE_S)
        )
        took_s = time.perf_counter() - began_s
        for place, outcome in zip(places, outcomes, strict=True):
            if isinstance(outcome, Exception):
                raise outcome
            if (place.reply.payload, list(place.reply.buffers)) != (place.payload, list(place.outgoing)):
                raise AssertionError("an echo came back changed")
        return num_done / took_s

    def _places_of(self, in_flight: int, size_bytes: int) -> list[_Place]:
        """What each call in flight sends and where its answer goes, made outside the measured time."""
        key = (in_flight, size_bytes)
        if key not in self._places:
            self._places[key] = [self._new_place(size_bytes) for _ in range(in_flight)]
        return self._places[key]

    def _new_place(self, size_bytes: int) -> _Place:
        data = self._random.randbytes(size_bytes)
        if self._in_payload:
            return _Place(data, (), None)
        return _Place(None, (data,), (bytearray(size_bytes),) if size_bytes >= _REUSED_BYTES else None)


_REUSED_BYTES = 1 << 20


class _Place(msgspec.Struct):
    """One of the calls that are in flight at a time."""

    payload: Any
    outgoing: tuple[bytes, ...]
    into: tuple[bytearray] | None
    reply: Reply = msgspec.field(default_factory=Reply)
