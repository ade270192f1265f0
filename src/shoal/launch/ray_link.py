"""The way between one actor and the descriptor behind which the head waits for it. Nothing here blocks."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from shoal.core import SYSTEM_CLOCK
from shoal.launch.ray_actor import READ_BYTES
from shoal.launch.ray_reports import reason_of

ENDING_S = 3.0
"""For an agent to end its worker and itself when the head has closed the way; it ends without us, too."""
READ_WAIT_S = 10.0
"""After which an actor with nothing to pass on is asked again."""
_MAX_QUEUED_BYTES = 1 << 20


class Link:
    """`wake` is called in a thread of Ray's whenever `step` has something to do."""

    def __init__(self, index: int, descriptor: int, actor: Any, wake: Callable[[object], None]) -> None:
        self.index = index
        self.is_finished = False
        """Whether nothing more will come from the actor."""
        self.why_lost = ""
        """Empty after an orderly end."""
        self._end = socket.socket(fileno=descriptor)
        self._end.setblocking(False)
        self._has_input = True
        self._closed_s: float | None = None
        """Since when the head wants no more of it."""
        self._actor = actor
        self._wake = wake
        self._reading: Future[Any] | None = self._ask(actor.read.remote(READ_WAIT_S))
        self._writing: Future[Any] | None = None
        self._last_words: Future[Any] | None = None
        self._queue = bytearray()

    @property
    def descriptor(self) -> int:
        """To be polled."""
        return self._end.fileno()

    @property
    def events(self) -> int | None:
        """What to poll it for; None when there is nothing to be learned."""
        wants_input = self._has_input and self._writing is None
        if self._closed_s is not None and not wants_input and not self._queue:
            return None
        return (select.POLLIN if wants_input else 0) | (select.POLLOUT if self._queue else 0)

    def step(self, *, is_hung_up: bool = False) -> None:
        """Pass on what has come from either side; `is_hung_up` says that the head has closed its end."""
        now_s = SYSTEM_CLOCK.now_s()
        if is_hung_up and self._closed_s is None:
            self._closed_s = now_s
        try:
            self._take_input()
            self._take_output()
        except Exception as error:  # noqa: BLE001  Ray has many kinds for an actor that has gone
            self.why_lost, self.is_finished = reason_of(error), True
        if self._queue:
            self._pass_on()
        if self._closed_s is not None and now_s > self._closed_s + ENDING_S:
            self.is_finished = True

    def close(self) -> None:
        """The head finds the end of what came."""
        self._end.close()

    def _ask(self, reference: Any) -> Future[Any]:
        future: Future[Any] = reference.future()
        future.add_done_callback(self._wake)
        return future

    def _take_input(self) -> None:
        if self._writing is not None and self._writing.done():
            writing, self._writing = self._writing, None
            writing.result()
        if not self._has_input or self._writing is not None:
            return
        try:
            data = self._end.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        self._writing = self._ask(self._actor.write.remote(data) if data else self._actor.close.remote())
        self._has_input = bool(data)
        if not data and self._closed_s is None:
            self._closed_s = SYSTEM_CLOCK.now_s()

    def _take_output(self) -> None:
        if self._reading is not None and self._reading.done() and len(self._queue) < _MAX_QUEUED_BYTES:
            data = self._reading.result()
            self._queue += data or b""
            if data == b"":
                self._reading, self._last_words = None, self._ask(self._actor.last_words.remote())
            else:
                self._reading = self._ask(self._actor.read.remote(READ_WAIT_S))
        if self._last_words is not None and self._last_words.done() and not self._queue:
            code, text = self._last_words.result()
            if code:
                self.why_lost = f"its agent ended with exit code {code}{f': {text}' if text else ''}"
            self.is_finished = True

    def _pass_on(self) -> None:
        try:
            del self._queue[: self._end.send(self._queue)]
        except BlockingIOError:
            return
        except ConnectionError:  # the head does not want it any more
            self._queue.clear()
