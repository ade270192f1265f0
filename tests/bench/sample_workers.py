"""Workers that the tests give orders to; they know neither torch nor a group."""

import os
import select
import signal
import time
from types import SimpleNamespace

from shoal.bench.workers import LocalWorkers, WorkerSettings


def work(place, arguments, stack):
    rank, word = place.rank, arguments.get("word")

    def fail(who):
        if rank == who:
            raise ZeroDivisionError("nothing is left")
        time.sleep(60)

    def lose(who, pid):
        """One is killed, and the other says so, as a group does."""
        if rank == who:
            os.kill(os.getpid(), signal.SIGKILL)
        watched = os.pidfd_open(pid)
        select.select([watched], [], [])
        raise ConnectionError(f"rank {who} is lost")

    if word == "fail at the end" and rank == 1:
        stack.callback(fail_at_the_end)
    return SimpleNamespace(pid=os.getpid, describe=lambda: [rank, word], fail=fail, lose=lose)


def fail_at_the_end():
    raise ZeroDivisionError("at the end")


def stand_by(arguments, parent):
    """A helper: it takes no orders."""
    place = arguments["place"]
    parent.tell(rank=place["rank"], size=place["size"], word=arguments["arguments"].get("word"))
    parent.wait_for_end()


def lead(arguments, parent):
    """Has workers that do something long."""
    with LocalWorkers(WorkerSettings("bench.sample_workers:work", 2)) as workers:
        parent.tell(pids=workers.ask("pid"))
        workers.ask("fail", who=None)
