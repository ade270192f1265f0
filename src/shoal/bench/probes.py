"""The checks of `shoal doctor` that measure: ports, loopback, timers, thread switching and the clock.

Quick looks to find a machine in trouble, not benchmarks: together they take about a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator

from shoal.bench.findings import Finding, fail, ok, warn
from shoal.core.clock import SYSTEM_CLOCK
from shoal.core.loop import SWITCH_INTERVAL_S, LoopThread

LOOPBACK = "127.0.0.1"
SLOW_LOOPBACK_GB_S = 0.5
LATE_TIMER_S = 0.010
LATE_SWITCH_S = 0.005
COARSE_CLOCK_S = 0.002
_ANSWER_S = 1.0
_PORT_TRIES = 8
_EARLIEST_YEAR, _LATEST_YEAR = 2025, 2100


def check_ports() -> Finding:
    """One port number for TCP and UDP both, as every peer needs, and a connection to it."""
    next_step = "check the firewall's rules for 127.0.0.1, and whether this user may open ports."
    with contextlib.ExitStack() as stack:
        try:
            listener, datagrams = _bind_both(stack)
        except OSError as error:
            return fail(f"No port of {LOOPBACK} can be bound for TCP and UDP: {error.strerror}.", next_step)
        port = listener.getsockname()[1]
        try:
            caller = stack.enter_context(socket.create_connection((LOOPBACK, port), _ANSWER_S))
            listener.settimeout(_ANSWER_S)
            accepted = stack.enter_context(listener.accept()[0])
            accepted.settimeout(_ANSWER_S)
            caller.sendall(b"shoal")
            is_heard = accepted.recv(5) == b"shoal"
            way = "TCP"
            if is_heard:
                sender = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                sender.sendto(b"shoal", (LOOPBACK, port))
                datagrams.settimeout(_ANSWER_S)
                way = "UDP"
                is_heard = datagrams.recv(5) == b"shoal"
        except OSError as error:
            return fail(f"A listening socket on {LOOPBACK} cannot be reached: {error}.", next_step)
    if not is_heard:
        return fail(f"{way} to {LOOPBACK} arrives damaged.", next_step)
    return ok("TCP and UDP share a port number, and a listening socket can be reached.", port=port)


def _bind_both(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
    for attempt in range(_PORT_TRIES):
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0)))
        datagrams = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        try:
            datagrams.bind(listener.getsockname())
        except OSError:
            if attempt == _PORT_TRIES - 1:
                raise
            continue  # some other program has this number for UDP
        return listener, datagrams
    raise AssertionError


def check_loopback(seconds: float = 0.2, chunk_bytes: int = 1 << 20) -> Finding:
    """How fast blocking sockets move bytes between two threads."""
    received = bytearray(chunk_bytes)
    chunk = memoryview(bytes(chunk_bytes))
    num_bytes = 0
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((LOOPBACK, 0)))
        sender = stack.enter_context(socket.create_connection(listener.getsockname(), _ANSWER_S))
        receiver = stack.enter_context(listener.accept()[0])
        receiver.settimeout(_ANSWER_S)
        began_s = time.perf_counter()

        def send() -> None:
            with contextlib.suppress(OSError):
                while time.perf_counter() - began_s < seconds:
                    sender.sendall(chunk)
                sender.shutdown(socket.SHUT_WR)

        with _thread(send):
            while count := receiver.recv_into(received):
                num_bytes += count
        took_s = time.perf_counter() - began_s
    speed = num_bytes / took_s / 1e9
    says = f"{speed:.1f} GB/s one way through TCP on {LOOPBACK}."
    if speed < SLOW_LOOPBACK_GB_S:
        return warn(
            says,
            "see what else runs here (top); a virtual machine or a security program may slow sockets down.",
            gb_per_s=round(speed, 2),
        )
    return ok(says, gb_per_s=round(speed, 2))


def check_timers(num_sleeps: int = 60, sleep_s: float = 0.002) -> Finding:
    """How late the loop wakes up from a short sleep."""

    async def measure() -> list[float]:
        late_s = []
        for _ in range(num_sleeps):
            began_s = time.perf_counter()
            await asyncio.sleep(sleep_s)
            late_s.append(time.perf_counter() - began_s - sleep_s)
        return late_s

    with LoopThread("doctor") as loop:
        p50_s, p95_s = _p50_p95(loop.run(measure()))
    says = f"A sleep of {sleep_s * 1e3:g} ms ends {_shown(p50_s)} late (p50), {_shown(p95_s)} (p95)."
    figures = {"p50_s": p50_s, "p95_s": p95_s}
    if p95_s > LATE_TIMER_S:
        return warn(says, "see what else runs here (top): latencies measured now mean little.", **figures)
    return ok(says, **figures)


def check_switching(num_echoes: int = 40, most_s: float = 0.4) -> Finding:
    """How long a call to the loop takes beside a busy Python thread, at two switch intervals."""
    is_over = threading.Event()

    def be_busy() -> None:
        number = 0
        while not is_over.is_set():
            for _ in range(100):
                number += 1

    def measure(loop: LoopThread, interval_s: float) -> float:
        sys.setswitchinterval(interval_s)
        took_s: list[float] = []
        began_s = time.perf_counter()
        while len(took_s) < num_echoes and time.perf_counter() - began_s < most_s:
            start_s = time.perf_counter()
            loop.run(asyncio.sleep(0))
            took_s.append(time.perf_counter() - start_s)
        return _p50_p95(took_s)[1]

    usual_s = sys.getswitchinterval()
    with LoopThread("doctor") as loop:
        loop.run(asyncio.sleep(0))
        try:
            with _thread(be_busy, before_join=is_over.set):
                slow_s = measure(loop, usual_s)
                fast_s = measure(loop, SWITCH_INTERVAL_S)
        finally:
            sys.setswitchinterval(usual_s)
    says = (
        f"Beside a busy Python thread a call to the loop takes {_shown(slow_s)} (p95); "
        f"{_shown(fast_s)} with the switch interval that Shoal's own processes set."
    )
    figures = {
        "p95_s": slow_s,
        "interval_s": usual_s,
        "p95_at_short_interval_s": fast_s,
        "short_interval_s": SWITCH_INTERVAL_S,
    }
    if fast_s > LATE_SWITCH_S:
        return warn(says, "see what else runs here (top): too few cores are free.", **figures)
    return ok(says, **figures)


def check_clock() -> Finding:
    """A calendar that certificates and records can live by, and a clock that can time a call."""
    today = datetime.datetime.fromtimestamp(SYSTEM_CLOCK.wall_s(), datetime.UTC)
    tick_s = _tick_s()
    figures = {"wall": today.isoformat(timespec="seconds"), "tick_s": tick_s}
    says = f"{today:%Y-%m-%d %H:%M} UTC; the monotonic clock ticks every {_shown(tick_s)}."
    if not _EARLIEST_YEAR <= today.year < _LATEST_YEAR:
        return fail(
            says,
            "set the clock (timedatectl set-ntp true): records expire and certificates hold by it.",
            **figures,
        )
    if tick_s > COARSE_CLOCK_S:
        return warn(says, "nothing to do: short waits are rounded to these ticks.", **figures)
    return ok(says, **figures)


def _tick_s() -> float:
    """The smallest step that the monotonic clock shows, of a few."""
    steps_s = []
    for _ in range(5):
        before_s = SYSTEM_CLOCK.now_s()
        while (now_s := SYSTEM_CLOCK.now_s()) == before_s:
            pass
        steps_s.append(now_s - before_s)
    return min(steps_s)


def _p50_p95(values: list[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(values, n=20, method="inclusive")
    return cuts[9], cuts[18]


def _shown(seconds: float) -> str:
    if abs(seconds) >= 0.001:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs" if abs(seconds) >= 1e-6 else f"{seconds * 1e9:.0f} ns"


@contextlib.contextmanager
def _thread(function: Callable[[], None], before_join: Callable[[], None] | None = None) -> Iterator[None]:
    thread = threading.Thread(target=function, daemon=True)  # law: it measures threads
    thread.start()
    try:
        yield
    finally:
        if before_join is not None:
            before_join()
        thread.join(_ANSWER_S)
