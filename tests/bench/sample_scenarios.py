"""Scenarios that the tests of the frame run in child processes."""

import os
import signal
import time

from shoal.bench.workers import WorkerSettings, end_with_parent
from shoal.report import Row


class Steady:
    """Gives the samples that it is told to, and says which start it is."""

    def __init__(self, config, seed):
        self.config, self.seed = config, seed

    def run(self, tell):
        tell("measuring")
        print("noise on stdout must not disturb")
        yield Row(
            key={"scenario": "steady"},
            metric="time",
            unit="s",
            direction="lower",
            starts=[[self.seed + 1.0, 2.0]],
        )
        if self.seed in self.config.get("failing", ()):
            yield Row(key={"scenario": "shaky"}, metric="time", unit="s", direction="lower", error="it broke")
        else:
            yield Row(key={"scenario": "shaky"}, metric="time", unit="s", direction="lower", starts=[[1.0]])
        if self.seed in self.config.get("raising", ()):
            raise RuntimeError("no more")
        if self.seed in self.config.get("dying", ()):
            os.kill(os.getpid(), signal.SIGKILL)


def answer(arguments, parent):
    """A child that serves until its parent has had enough."""
    parent.tell(double=2 * arguments["number"])
    parent.wait_for_end()


def silent(arguments, parent):
    """A child that ends without a word."""


def busy(arguments, parent):
    """A child that does not listen to its parent."""
    end_with_parent()
    parent.tell(pid=os.getpid())
    time.sleep(60)


def failing(arguments, parent):
    """A child that is told to end while it says what went wrong."""
    end_with_parent()
    told = parent.tell

    def tell(**message):
        told(**message)
        os.kill(os.getpid(), signal.SIGTERM)

    parent.tell = tell
    raise ValueError("below zero")


class Crewed:
    """Asks one worker for its rank."""

    def __init__(self, config, seed):
        self.seed = seed

    def run(self, tell):
        tell("asking")
        with self.open_workers(WorkerSettings("bench.sample_workers:work", 1)) as workers:
            ((rank, _),) = workers.ask("describe")
        yield Row(key={"rank": rank}, metric="seed", unit="", direction="lower", starts=[[float(self.seed)]])
