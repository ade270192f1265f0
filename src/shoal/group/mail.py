"""Messages between the neighbours of a static topology, each in its turn, by one-sided windows.

None is missed but those that are cut off on the way. Who has missed one says so in its next, and gets the
whole that the messages before it say, in pieces, before the next that it hears; what came in between is of no
use to it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import torch

from shoal.group.base import Handle, Window
from shoal.topology import Topology

_NOTE = struct.Struct("<QI?")
"""A number that counts what one worker sends another, which piece of the whole it is (0: it is a message),
and whether something was missed."""


class Mail:
    """Messages of one size to and from this worker's neighbours; made by all members together.

    `open_window` opens a window for tensors like the one that it is given, into which `sources` may write.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        open_window: Callable[..., Window],
        *,
        size_bytes: int,
        whole_bytes: int,
    ) -> None:
        self.sources = topology.sources(rank)
        self._size_bytes = size_bytes
        self._whole_bytes = whole_bytes
        like = torch.empty(size_bytes, dtype=torch.uint8)
        self._windows = [
            open_window(like, sources=self.sources[place : place + 1]) for place in range(topology.degree())
        ]
        """One for each source of this worker, so that one can be waited for alone; others may have more."""
        self._routes = [
            (destination, self._windows[topology.sources(destination).index(rank)])
            for destination in topology.destinations(rank)
        ]
        self._num_sent = dict.fromkeys(topology.destinations(rank), 0)
        self._num_heard = dict.fromkeys(self.sources, 0)
        self._missing: list[int] = []
        """Those of whom something was missed."""
        self._asking: list[int] = []
        """Those who have missed something of this worker's."""
        self._answered: list[int] = []
        """Those who have been sent the whole in this round."""

    def send(self, message: torch.Tensor, whole: Callable[[], torch.Tensor]) -> list[Handle[None]]:
        """Sends a message to all neighbours; it must not be written until the handles are done.

        `whole` is all that the messages before it say, as bytes, for those who have missed one.
        """
        handles = []
        self._answered, self._asking = self._asking, []
        pieces = self._pieces(whole()) if self._answered else []
        for to, window in self._routes:
            for place, piece in enumerate(pieces if to in self._answered else [], 1):
                handles.append(window.send(to, piece, note=self._note(to, place)))
            handles.append(window.send(to, message, note=self._note(to, 0)))
        return handles

    def receive(self) -> Mapping[int, tuple[torch.Tensor, torch.Tensor | None]]:
        """Gives the next message of each source, by its rank, and all that those before it say, if missed.

        There is none of those that are gone, that cannot be heard, or whose whole has yet to come.
        """
        windows = zip(self.sources, self._windows, strict=False)
        came = {source: self._next_of(source, window) for source, window in windows}
        return {source: received for source, received in came.items() if received is not None}

    def _next_of(self, source: int, window: Window) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        pieces: list[torch.Tensor] = []
        while source in window.wait():
            with window.slot(source) as slot:
                number, place, is_asking = _NOTE.unpack(slot.note)
                tensor = slot.tensor.clone()
                slot.clear()
            if number != self._num_heard[source]:
                pieces.clear()
                if source not in self._missing:
                    self._missing.append(source)
            self._num_heard[source] = number + 1
            if place:
                pieces += [tensor] if place == len(pieces) + 1 else []
                continue
            if is_asking and source not in self._answered:
                self._asking.append(source)
            if source not in self._missing:
                return tensor, None
            if len(pieces) * self._size_bytes < self._whole_bytes:
                return None
            self._missing.remove(source)
            return tensor, torch.cat(pieces)[: self._whole_bytes]
        return None

    def _pieces(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """Each of the size of a message."""
        short_bytes = -len(whole) % self._size_bytes
        return torch.split(torch.cat([whole, whole.new_zeros(short_bytes)]), self._size_bytes)

    def _note(self, to: int, place: int) -> bytes:
        number = self._num_sent[to]
        self._num_sent[to] += 1
        return _NOTE.pack(number, place, to in self._missing)
