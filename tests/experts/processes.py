"""`shoal serve` in processes of its own: what it says, what its metrics tell, how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from shoal.core import Address, Peer

SMALL = ("--device", "cpu", "--num-loops", 1, "--num-threads", 1, "--metrics-port", 0)


class ServeProcess:
    """One that was started; `ready` waits until it serves."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        self.said = ""

    @property
    def pid(self) -> int:
        return self._child.pid

    def ready(self) -> ServeProcess:
        while "Ctrl-C ends it." not in self.said:
            line = self._child.stdout.readline()
            assert line, self.said
            self.said += line
        return self

    @property
    def peer(self) -> Peer:
        return Peer(Address.parse(re.search(r"Listening on (\S+), ", self.said)[1]))

    @property
    def peer_id(self) -> str:
        return re.search(r"as peer (\w+),", self.said)[1]

    def numbers(self, name: str) -> dict[str, float]:
        """A metric by expert; of those without an expert the key is empty."""
        url = re.search(r"Metrics: (\S+)", self.said)[1]
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        found = re.findall(rf'^shoal_{name}(?:{{expert="([^"]*)"}})? (\S+)$', text, re.MULTILINE)
        return {expert: float(value) for expert, value in found}

    @property
    def rss_mib(self) -> float:
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

    def send(self, number: signal.Signals) -> None:
        self._child.send_signal(number)

    def end(self) -> tuple[int, dict[str, object]]:
        """Wait for its end; the exit code, and its result."""
        self.said += self._child.stdout.read()
        code = self._child.wait(timeout=20)
        last = self.said.rstrip("\n").splitlines()[-1]
        result = json.loads(last.removeprefix("RESULT: ")) if last.startswith("RESULT: ") else {}
        return code, result

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()


class ServeProcesses:
    """Starts them."""

    def __init__(self, closing: contextlib.ExitStack) -> None:
        self._closing = closing

    def start(self, *arguments: object) -> ServeProcess:
        child = self._closing.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "shoal", "serve", *map(str, (*SMALL, *arguments))],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        self._closing.callback(child.kill)
        return ServeProcess(child)


@contextlib.contextmanager
def serve_processes() -> Iterator[ServeProcesses]:
    """All that are started inside are dead at its end, also those that were stopped."""
    with contextlib.ExitStack() as closing:
        yield ServeProcesses(closing)
