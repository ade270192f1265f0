"""Handlers that take their time: each ends with its caller's deadline, and frees what it held."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from shoal.core import DeadlineExceeded, PeerBusy, Scope, UsageError
from shoal.transport.limits import ByteBudget
from shoal.transport.messages import Head, Reply, Route, release

LATER = "try again later."


class HandlingHub(Protocol):
    """What handlers run on."""

    loop: asyncio.AbstractEventLoop
    scope: Scope
    budget: ByteBudget


class ServedCall(msgspec.Struct, eq=False):
    """One call whose handler runs."""

    id: int
    head: Head
    buffers: Sequence[memoryview]
    is_one_way: bool
    held_bytes: int
    is_over: bool = False
    work: asyncio.Future[Any] | None = None
    timer: asyncio.TimerHandle | None = None


class Handlers:
    """The handlers that run for one session; each ends in `on_reply` or `on_error`, unless cancelled."""

    def __init__(
        self,
        hub: HandlingHub,
        on_reply: Callable[[ServedCall, Any], None],
        on_error: Callable[[ServedCall, Exception], None],
    ) -> None:
        self._hub = hub
        self._on_reply = on_reply
        self._on_error = on_error
        self._running: dict[int, ServedCall] = {}

    def __len__(self) -> int:
        return len(self._running)

    def start(self, route: Route, call: ServedCall, timeout_s: float | None) -> None:
        """Run a handler as a task; PeerBusy when there is no room for it."""
        self._open(call, timeout_s)
        try:
            call.work = self._hub.scope.start(self._run(route, call), name=call.head.method)
        except UsageError:  # closing
            self._finish(call)
            raise PeerBusy("this peer is leaving.", next_step="ask another peer.") from None

    def wait_for(self, later: asyncio.Future[Any], call: ServedCall, timeout_s: float | None) -> None:
        """Wait for the reply of a handler that has begun; PeerBusy, and it is cancelled, without room."""
        call.work = later
        later.add_done_callback(functools.partial(self._on_done, call))
        try:
            self._open(call, timeout_s)
        except PeerBusy:
            call.is_over = True
            later.cancel()
            raise

    def _open(self, call: ServedCall, timeout_s: float | None) -> None:
        if not self._hub.budget.try_take(call.held_bytes, may_pass=True):
            raise PeerBusy("too many calls are being served already.", next_step=LATER)
        self._running[call.id] = call
        if timeout_s is not None:
            call.timer = self._hub.loop.call_later(timeout_s, self._expire, call)

    def cancel(self, call_id: int) -> None:
        """The caller of this one wants no answer, if it still runs."""
        call = self._running.get(call_id)
        if call is not None:
            self._finish(call)
            if call.work is not None:
                call.work.cancel()

    def cancel_all(self) -> None:
        """End all, oldest first."""
        for call_id in tuple(self._running):
            self.cancel(call_id)

    async def _run(self, route: Route, call: ServedCall) -> None:
        try:
            reply = await route.serve(call.head, call.buffers)  # type: ignore[misc]
        except asyncio.CancelledError:
            if not call.is_over:
                # cancelled by what it waited for, or by the closing transport: its caller must not wait on
                self._fail(call, _cancelled())
            raise
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is told to its caller
            self._fail(call, error)
        else:
            self._end(call, reply)

    def _on_done(self, call: ServedCall, later: asyncio.Future[Any]) -> None:
        if later.cancelled():
            self._fail(call, _cancelled())
        elif (error := later.exception()) is None:
            self._end(call, later.result())
        elif isinstance(error, Exception):
            self._fail(call, error)

    def _end(self, call: ServedCall, reply: Any) -> None:
        if not call.is_over:
            self._finish(call)
            self._on_reply(call, reply)
        elif isinstance(reply, Reply):
            release(reply)

    def _expire(self, call: ServedCall) -> None:
        if not call.is_over:
            self._fail(call, DeadlineExceeded("the deadline passed before the answer was ready."))
            if call.work is not None:
                call.work.cancel()

    def _fail(self, call: ServedCall, error: Exception) -> None:
        if not call.is_over:
            self._finish(call)
            self._on_error(call, error)

    def _finish(self, call: ServedCall) -> None:
        """Free what a call holds."""
        call.is_over = True
        self._running.pop(call.id, None)
        call.buffers = ()
        if call.timer is not None:
            call.timer.cancel()
        self._hub.budget.give_back(call.held_bytes)


def _cancelled() -> PeerBusy:
    return PeerBusy("the handler was cancelled.", next_step="try again.")
