"""The Ray actor of one worker: it runs an agent as its child, and passes bytes between it and the bridge.

What those bytes mean is known to the head and the agent alone. An actor that dies closes the agent's standard
input, by which the agent ends its worker and itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO

READ_BYTES = 1 << 16
_LAST_WORDS_BYTES = 2000
_ENDING_S = 5.0


class AgentActor:
    """Methods are called by `ray_bridge`, at most one reading and one writing at a time."""

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def where(self) -> tuple[str, str, str, str, list[str]]:
        """Node id, address, host name, interpreter, and the GPUs that Ray has given to this actor."""
        import ray

        context = ray.get_runtime_context()
        gpus = [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])]
        address = ray.util.get_node_ip_address()
        return context.get_node_id(), address, socket.gethostname(), sys.executable, gpus

    def start(self, arguments: Sequence[str], variables: dict[str, str]) -> None:
        """Run the agent by this actor's interpreter, with these variables besides the actor's own."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  as long as the agent lives
        self._agent = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            env={**os.environ, **variables},
        )

    def read(self, wait_s: float) -> bytes | None:
        """What the agent has written; b"" when it has ended, None when nothing came in this time."""
        assert self._agent is not None
        assert self._agent.stdout is not None
        poll = select.poll()
        poll.register(self._agent.stdout.fileno(), select.POLLIN)
        if not poll.poll(wait_s * 1000):
            return None
        return os.read(self._agent.stdout.fileno(), READ_BYTES)

    def write(self, data: bytes) -> None:
        """Give it to the agent; an agent that has ended does not want it."""
        assert self._agent is not None
        assert self._agent.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            view = memoryview(data)
            while view:
                view = view[self._agent.stdin.write(view) :]

    def close(self) -> None:
        """No more is written: the agent ends its worker and itself."""
        if self._agent is not None and self._agent.stdin is not None:
            self._agent.stdin.close()

    def last_words(self) -> tuple[int | None, str]:
        """The agent's exit code, and the end of its standard error; it has ended, or is about to."""
        assert self._agent is not None
        assert self._errors is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._agent.wait(_ENDING_S)
        size_bytes = os.fstat(self._errors.fileno()).st_size
        end = os.pread(self._errors.fileno(), _LAST_WORDS_BYTES, max(0, size_bytes - _LAST_WORDS_BYTES))
        return self._agent.poll(), end.decode(errors="replace").strip()
