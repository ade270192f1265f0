"""Child processes of a benchmark: fresh interpreters that talk to their parent in lines of JSON.

A child runs one function, `module:name`, with the arguments that it is given and its `Parent`. It ends when
the function returns; a function that serves until its parent has had enough calls `parent.wait_for_end()`, or
takes orders with `parent.receive()` until there are no more.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from shoal.core import BenchmarkError
from shoal.core.loop import own_the_process
from shoal.core.processes import obey_interrupts

_ENDING_S = 10.0
_INTERRUPTED_S = 3.0
_READ_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


class Child:
    """A running child, as its parent sees it."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self._process = process
        self._name = name
        self._read = bytearray()

    @property
    def has_more(self) -> bool:
        """Whether something was read already that `receive` would give: a selector does not know of it."""
        return b"\n" in self._read

    @property
    def exit_code(self) -> int | None:
        """None while it runs, negative when a signal ended it."""
        return self._process.poll()

    def fileno(self) -> int:
        """Readable when there is something to receive that was not read yet (`has_more`); for selectors."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def order(self, **message: Any) -> None:
        """Send something that JSON can carry; one that has ended does not hear it, as `receive` will say."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """There are no more orders: it may end. Does not wait for that."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def receive(self) -> dict[str, Any] | None:
        """The next thing that the child tells, None at its end; BenchmarkError when it failed."""
        line = self._next_line()
        if not line:
            try:
                code = self._process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                self.kill()
                raise BenchmarkError(f"{self._name} told everything, and did not end.") from None
            if code:
                raise BenchmarkError(
                    f"{self._name} ended with {describe_exit(code)}.",
                    cause="what it printed before that is above.",
                )
            return None
        message: dict[str, Any] = msgspec.json.decode(line)
        if "failure" in message:
            raise BenchmarkError(f"{self._name} failed: {message['failure']}", cause=message["trace"])
        return message

    def _next_line(self) -> bytes:
        """Nothing at the end."""
        while not self.has_more:
            some = os.read(self.fileno(), _READ_BYTES)
            if not some:
                return b""
            self._read += some
        line, _, self._read = self._read.partition(b"\n")
        return bytes(line)

    def expect(self) -> dict[str, Any]:
        """The next thing that the child tells; BenchmarkError when it ended instead."""
        message = self.receive()
        if message is None:
            raise BenchmarkError(f"{self._name} ended before it was ready.")
        return message


class Parent:
    """The parent, as a child sees it."""

    def __init__(self, stdin: BinaryIO, stdout: BinaryIO) -> None:
        self._stdin = stdin
        self._stdout = stdout

    def tell(self, **message: Any) -> None:
        """Send something that JSON can carry."""
        self._stdout.write(msgspec.json.encode(message) + b"\n")
        self._stdout.flush()

    def fail(self, error: Exception) -> None:
        """Say what went wrong; whoever receives it meets a BenchmarkError."""
        self.tell(failure=f"{type(error).__name__}: {error}", trace=traceback.format_exc(limit=-3))

    def receive(self) -> dict[str, Any] | None:
        """The next order; None when the parent has had enough, or is gone."""
        line = self._stdin.readline()
        if not line:
            return None
        order: dict[str, Any] = msgspec.json.decode(line)
        return order

    def leave(self) -> None:
        """End this process now: everything is told, and to take a large world apart would take minutes."""
        sys.stderr.flush()
        self._stdout.flush()
        os._exit(0)

    def wait_for_end(self) -> None:
        """Block until the parent has had enough, or is gone."""
        while self._stdin.read(1):
            pass


@contextlib.contextmanager
def child(
    function: str,
    arguments: dict[str, Any],
    *,
    source: Path | None = None,
    name: str = "",
    variables: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Run `module:name` in a new interpreter for as long as the block lasts.

    `source` is a folder that holds the package to use, for comparing versions; by default the one in use.
    `name` is what errors call it. `variables` count where the environment has none of that name.
    """
    environment = {**(variables or {}), **os.environ}
    if source is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(source), environment.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        )
    process = subprocess.Popen(
        [sys.executable, "-m", "shoal.bench.children"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        # in the background a script's Ctrl-C is not for us, and so not for our children, who would obey it
        process_group=0 if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else None,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    running = Child(process, name or f"The process that runs {function}")
    try:
        running.order(function=function, arguments=arguments)
        yield running
        running.end()
        process.wait(_ENDING_S)
    finally:
        _end(process)
        process.stdout.close()
        running.end()
        process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let it take down what it has started; a moment later it is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_INTERRUPTED_S)
        except subprocess.TimeoutExpired:
            process.kill()


def end_with_parent() -> None:
    """For a child that does not listen to its parent all the time: be interrupted when that is gone.

    At once on Linux, elsewhere when it next tells or receives something. SIGTERM interrupts it too.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def describe_exit(code: int) -> str:
    """An exit status in words."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def main() -> None:
    """What a child does: read what to run, run it, and tell when it fails."""
    own_the_process()
    obey_interrupts()
    stdin = sys.stdin.buffer
    # what the function prints must not mix with what it tells
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    parent = Parent(stdin, stdout)
    order = msgspec.json.decode(stdin.readline())
    module, _, name = order["function"].partition(":")
    try:
        try:
            getattr(importlib.import_module(module), name)(order["arguments"], parent)
        except BrokenPipeError:
            sys.exit(1)  # the parent is gone
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent reports it
            # it ends by itself: the parent, who hears this, need not interrupt it
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            parent.fail(error)
            sys.exit(1)
    except KeyboardInterrupt:
        os._exit(130)  # what was cut short is not to be collected, and complained of
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
