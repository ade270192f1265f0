"""Machines for training runs, and runs whose lines come with the time at which they were read."""

import contextlib
import threading
import time

import pytest

from launch.machines import two_machines

LIMIT_S = 60


class Run:
    """Of `shoal run`; what it prints is kept, and is to be seen while it runs."""

    def __init__(self, process):
        self.process = process
        self._lines = {"out": [], "err": []}
        self._has_more = threading.Condition()
        streams = {"out": self.process.stdout, "err": self.process.stderr}
        self._readers = [threading.Thread(target=self._read, args=item) for item in streams.items()]
        for reader in self._readers:
            reader.start()

    @property
    def out(self):
        return [line for _, line in self._lines["out"]]

    @property
    def err(self):
        return "".join(f"{line}\n" for _, line in self._lines["err"])

    def wait_for(self, is_there, what, limit_s=LIMIT_S):
        """Until something can be seen in `out` and `err`."""
        with self._has_more:
            is_so = self._has_more.wait_for(lambda: is_there() or self._has_ended, limit_s)
        assert is_so, f"{what}: {self.out}\n{self.err}"
        assert is_there(), f"{what}: {self.out}\n{self.err}"

    def pids(self, num_processes):
        """By rank, once all train."""

        def found():
            words = [line.split() for line in self.out]
            return {int(word[0][1:-1]): int(word[2]) for word in words if word[1] == "training"}

        self.wait_for(lambda: len(found()) == num_processes, "all train")
        return found()

    def finish(self):
        """The exit code."""
        code = self.process.wait(LIMIT_S)
        for reader in self._readers:
            reader.join()
        return code

    def named_s(self, text, since_s):
        """Seconds until the first line on stderr that has this in it."""
        found = [at_s for at_s, line in self._lines["err"] if text in line]
        assert found, f"{text} is not in\n{self.err}"
        return found[0] - since_s

    def close(self):
        self.process.kill()
        self.finish()

    @property
    def _has_ended(self):
        return not any(reader.is_alive() for reader in self._readers)

    def _read(self, name, stream):
        with stream:
            for line in stream:
                with self._has_more:
                    self._lines[name].append((time.monotonic(), line.rstrip("\n")))
                    self._has_more.notify_all()


@pytest.fixture
def two(tmp_path):
    """Machines of one test, which may break them."""
    (tmp_path / "machines").mkdir()
    with two_machines(tmp_path / "machines") as machines:
        for machine in machines:
            machine.variables["OMP_NUM_THREADS"] = "1"
        yield machines


@pytest.fixture
def run_on():
    """Starts `shoal run` in a machine; ended with the test."""
    with contextlib.ExitStack() as stack:

        def run_on(machine, *words):
            run = Run(machine.start(*machine.shoal_words(*words)))
            stack.callback(run.close)
            return run

        yield run_on
