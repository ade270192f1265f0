"""The head's end of the way to the agent of one Ray actor."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

from shoal.core.errors import PeerRefused, ProtocolError, ShoalError
from shoal.launch.channel import Channel, Interest
from shoal.launch.messages import Decoder, Down, Up, encode

_READ_BYTES = 1 << 18


class RayChannel(Channel):
    """Over a socket to `ray_bridge`."""

    def __init__(
        self, host: str, end: socket.socket, why_lost: Callable[[], str], on_close: Callable[[], None]
    ) -> None:
        self.host = host
        self._end = end
        self._end.setblocking(False)
        self._why_lost = why_lost
        self._on_close = on_close
        self._decoder: Decoder[Up] = Decoder(Up, expects_magic=True)
        self._queue = bytearray()
        self._came: list[Up] = []
        self._broken: ProtocolError | None = None
        self._is_open = True
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether the bridge has not closed it."""
        return self._is_open

    def interests(self) -> list[Interest]:
        """Its socket."""
        if not self._is_open:
            return []
        if self._queue:
            return [(self._end.fileno(), select.POLLIN | select.POLLOUT, self._exchange)]
        return [(self._end.fileno(), select.POLLIN, self._read)]

    def take(self) -> list[Up]:
        """Those that have been read."""
        if self._broken is not None and not self._came:
            raise self._broken
        came, self._came = self._came, []
        return came

    def send(self, message: Down) -> None:
        """Queue it, and write what goes at once."""
        if self._is_open:
            self._queue += encode(message)
            self._write()

    def explain(self) -> ShoalError:
        """As the bridge says it."""
        why = self._why_lost() or "it does not answer"
        return PeerRefused(
            f"The worker's actor on {self.host} is lost: {why}.",
            peer=self.host,
            next_step="`ray status` shows which nodes there are.",
        )

    def close(self) -> None:
        """By which the bridge has the agent end."""
        self._is_open = False
        if not self._is_closed:
            self._is_closed = True
            self._end.close()
            self._on_close()

    def _exchange(self) -> None:
        self._write()
        self._read()

    def _read(self) -> None:
        try:
            data = self._end.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            self._came += self._decoder.feed(data)
        except ProtocolError as error:
            self._broken = error
            data = b""
        self._is_open = self._is_open and bool(data)

    def _write(self) -> None:
        try:
            while self._queue:
                del self._queue[: self._end.send(self._queue)]
        except BlockingIOError:
            return
        except OSError:  # the bridge has closed it: reading tells
            self._queue.clear()
