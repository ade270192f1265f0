"""The head's side of the process that speaks with Ray, `ray_bridge`: one for each start."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import IO

import msgspec

from shoal.core import SYSTEM_CLOCK
from shoal.core.errors import PeerUnreachable, ShoalError
from shoal.launch.ray_reports import Place, Report, Request

_READ_BYTES = 1 << 16
_ENDING_S = 10.0
_TICK_S = 0.2


class BridgeProcess:
    """The child process that speaks with Ray, for one start."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._began_s = SYSTEM_CLOCK.now_s()
        self._is_connected = False
        self._why_lost: dict[int, str] = {}
        pairs = [socket.socketpair() for _ in range(request.num_workers)]
        self.ends = [ours for ours, _ in pairs]
        """The ways to the actors."""
        theirs = [end.fileno() for _, end in pairs]
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  until it is closed
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "shoal.launch.ray_bridge", *map(str, theirs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=theirs,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the head's to understand
        )
        for _, end in pairs:
            end.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._rest = b""
        with contextlib.suppress(OSError):  # it has ended already
            self._stdin.write(msgspec.json.encode(request) + b"\n")

    def poll_places(self, wake_descriptor: int, say: Callable[[str], None]) -> list[Place] | None:
        """Wait shortly; where the agents are, once all of them run. ShoalError when none does."""
        poll = select.poll()
        for descriptor in (self._stdout.fileno(), wake_descriptor):
            poll.register(descriptor, select.POLLIN)
        poll.poll(_TICK_S * 1000)
        has_ended = self._process.poll() is not None
        for report in self._take_reports():
            self._is_connected = True
            if report.is_refused:
                raise ShoalError(report.what, cause=report.cause, next_step=report.next_step)
            if report.places is not None:
                return report.places
            if report.waiting:
                say(report.waiting)
        if has_ended:
            raise ShoalError(
                f"The process that speaks with Ray {self._describe_end()}.",
                next_step="look at `ray status`, and at the versions of Ray here and there.",
            )
        if not self._is_connected and SYSTEM_CLOCK.now_s() - self._began_s > self._request.start_timeout_s:
            raise PeerUnreachable(
                f"The Ray cluster {self._request.address} has not answered within "
                f"{self._request.start_timeout_s:g} s.",
                next_step="look at `ray status`, or give more time by --start-timeout.",
            )
        return None

    def why_lost(self, index: int) -> str:
        """What Ray says of an actor that has gone."""
        self._take_reports()
        if index in self._why_lost or self._process.poll() is None:
            return self._why_lost.get(index, "")
        return f"the process that speaks with Ray {self._describe_end()}"

    def close(self) -> None:
        """The agents end their workers, the Ray job ends; idempotent."""
        if not self._is_connected:
            self._process.kill()
        for end in self.ends:
            end.close()
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()
        self._errors.close()

    def _take_reports(self) -> list[Report]:
        try:
            data = os.read(self._stdout.fileno(), _READ_BYTES)
        except BlockingIOError:
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        reports = [msgspec.json.decode(line, type=Report) for line in lines]
        self._why_lost |= {report.lost: report.what for report in reports if report.lost is not None}
        return reports

    def _describe_end(self) -> str:
        size_bytes = os.fstat(self._errors.fileno()).st_size
        end = os.pread(self._errors.fileno(), _READ_BYTES, max(0, size_bytes - _READ_BYTES))
        lines = end.decode(errors="replace").strip().splitlines()
        return f"ended with exit code {self._process.poll()}{f': {lines[-1]}' if lines else ''}"
