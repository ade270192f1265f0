"""One poll that waits for all there is: streams of bytes, ends of processes, and signals."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any, Self

Interest = tuple[int, int, Callable[[], object] | None]
"""A descriptor, poll's event (POLLIN, POLLOUT), and what to do when it is there; None only wakes the poll."""
TICK_S = 0.2
"""How long a poll waits at most; what has no descriptor is noticed so late."""
CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
_MAY_BE_IGNORED = (signal.SIGHUP, signal.SIGTSTP)
"""Whoever started this process so (nohup) did it on purpose."""
_ENDS = select.POLLERR | select.POLLHUP | select.POLLNVAL
_READ_BYTES = 1 << 16
"""As much as a pipe holds."""


def poll_once(interests: Iterable[Interest], limit_s: float = TICK_S) -> None:
    """Wait until something is there or the time is over, and do what is to be done for it."""
    wanted = list(interests)
    events: dict[int, int] = {}
    for descriptor, event, _ in wanted:
        events[descriptor] = events.get(descriptor, 0) | event
    poll = select.poll()
    for descriptor, event in events.items():
        poll.register(descriptor, event)
    ready = dict(poll.poll(limit_s * 1000))
    for descriptor, event, action in wanted:
        if action is not None and ready.get(descriptor, 0) & (event | _ENDS):
            action()


class ByteStream:
    """Bytes over one descriptor, or two; nothing blocks, and what is not written is queued.

    The descriptors are the caller's to close.
    """

    def __init__(self, source: int, sink: int | None = None) -> None:
        self.is_open = True
        """Whether more may be read."""
        self.queue = bytearray()
        """What has not been written yet."""
        self._source, self._sink = source, source if sink is None else sink
        self._can_write = True
        for descriptor in (self._source, self._sink):
            os.set_blocking(descriptor, False)

    def events(self, on_input: Callable[[], object]) -> list[Interest]:
        """Say what a poll should wait for, and what to do when something can be read."""
        wanted: list[Interest] = [(self._source, select.POLLIN, on_input)] if self.is_open else []
        return [*wanted, (self._sink, select.POLLOUT, self._write)] if self.queue else wanted

    def read(self) -> bytes:
        """Return some of what is there; nothing where nothing is there, or the other side has gone."""
        data = b""
        if self.is_open:
            try:
                data = os.read(self._source, _READ_BYTES)
            except BlockingIOError:
                return b""
            except OSError:  # of a socket whose other end was killed
                data = b""
            self.is_open = bool(data)
        return data

    def write(self, data: bytes) -> None:
        """Queue bytes, and write what goes at once; to one that has gone they go nowhere."""
        if self._can_write:
            self.queue += data
            self._write()

    def stop_writing(self) -> None:
        """Drop what is queued and what will be written."""
        self._can_write = False
        self.queue.clear()

    def _write(self) -> None:
        try:
            while self.queue:
                del self.queue[: os.write(self._sink, self.queue)]
        except BlockingIOError:
            return
        except OSError:  # the other side has gone: reading tells
            self.stop_writing()


class SignalInbox:
    """While it is open, signals that would end or stop this process are collected instead.

    Python gives signals to its main thread alone: a launcher in another thread leaves them as they are.
    """

    def __enter__(self) -> Self:
        self._restore = contextlib.ExitStack()
        self._reader, writer = os.pipe()
        for end in (self._reader, writer):
            os.set_blocking(end, False)
            self._restore.callback(os.close, end)
        if threading.current_thread() is threading.main_thread():
            # by this descriptor a signal is not missed that comes just before the poll waits
            earlier = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            self._restore.callback(signal.set_wakeup_fd, earlier)
            for number in CAUGHT:
                is_ignored = signal.getsignal(number) is signal.SIG_IGN
                if not is_ignored or number not in _MAY_BE_IGNORED:
                    self._handle(number, lambda number, frame: None)
            # a parent that ignores it lets the kernel throw the exit codes of our children away
            self._handle(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def _handle(self, number: int, handler: Any) -> None:
        self._restore.callback(signal.signal, number, signal.signal(number, handler))

    @property
    def interest(self) -> Interest:
        """What to poll for to be woken by a signal."""
        return self._reader, select.POLLIN, None

    def take(self) -> list[int]:
        """Return the signals that have come, in order."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self._reader, 512) if number in CAUGHT]
        return []

    def stop_here(self) -> None:
        """Stop as SIGTSTP asks, until SIGCONT; does nothing where no shell could let this process go on."""
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)

    def __exit__(self, *_: object) -> None:
        self._restore.close()
