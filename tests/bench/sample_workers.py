"""Workers that the tests of crews give orders to; they know neither torch nor a group."""

import os
import select
import signal
import time

from shoal.bench.crew import serve


def work(arguments, parent):
    rank, word = arguments["seat"]["rank"], arguments["arguments"].get("word")

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

    answers = {"pid": os.getpid, "describe": lambda: [rank, word], "fail": fail, "lose": lose}
    serve(parent, answers)
    if word == "fail at the end" and rank == 1:
        raise ZeroDivisionError("at the end")


def stand_by(arguments, parent):
    """A helper: it takes no orders."""
    seat = arguments["seat"]
    parent.tell(rank=seat["rank"], size=seat["size"], word=arguments["arguments"].get("word"))
    parent.wait_for_end()
