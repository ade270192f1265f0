import os
import select
import signal
import sys
import time

import pytest

from launch.programs import is_running
from shoal._version import __version__
from shoal.launch.protocol import (
    AGENT,
    AgentHello,
    JobFailed,
    PipeChannel,
    Post,
    Signal,
    Started,
    WorkerEnded,
    WorkerJob,
    WorkerTold,
    Wrote,
)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers are started on POSIX only")
LIMIT_S = 20.0


class Head:
    """As much of a head as speaks with one agent."""

    def __init__(self):
        self.channel = PipeChannel("here", [sys.executable, *AGENT])
        self.came = []

    def wait_for(self, kind, count=1):
        """So many messages of a kind."""
        end_s = time.monotonic() + LIMIT_S
        while len(found := [one for one in self.came if isinstance(one, kind)]) < count:
            assert time.monotonic() < end_s, self.came
            self._turn()
        return found if count > 1 else found[0]

    def wait_for_end(self):
        end_s = time.monotonic() + LIMIT_S
        while self.channel.is_open:
            assert time.monotonic() < end_s
            self._turn()

    def _turn(self):
        interests = {one[0]: one for one in self.channel.interests()}
        poll = select.poll()
        for descriptor, event, _ in interests.values():
            poll.register(descriptor, event)
        for descriptor, _ in poll.poll(100):
            interests[descriptor][2]()
        self.came += self.channel.take()

    def written(self, rank, stream):
        pieces = [one for one in self.came if isinstance(one, Wrote)]
        return b"".join(one.data for one in pieces if (one.rank, one.stream) == (rank, stream))

    def start(self, body, count=1, cwd="/", patience=1.0):
        posts = [Post(rank, {"SHOAL_RANK": str(rank)}) for rank in range(count)]
        variables = {"SHOAL_LOCAL_WORLD_SIZE": str(count), "SHOAL_RUN": "{}"}
        self.channel.send(
            WorkerJob([sys.executable, "-S", "-c", body], cwd, variables, posts, patience=patience)
        )


@pytest.fixture
def head():
    head = Head()
    yield head
    head.channel.close()


def test_it_says_who_it_is_and_passes_on_what_workers_do(head):
    hello = head.wait_for(AgentHello)
    assert (hello.version, hello.reached_at) == (__version__, "")
    assert hello.free_port > 0
    head.start(
        """
import json, os, sys
os.write(json.loads(os.environ["SHOAL_RUN"])["status_fd"], b'{"survives_loss": true}\\n')
print("out", os.environ["SHOAL_RANK"], os.getcwd()); print("err", file=sys.stderr); sys.exit(3)
""",
        2,
    )
    ends = head.wait_for(WorkerEnded, 2)
    assert sorted((end.rank, end.code) for end in ends) == [(0, 3), (1, 3)]
    assert sorted(
        one.rank for one in head.came if isinstance(one, WorkerTold) and one.status.survives_loss
    ) == [
        0,
        1,
    ]
    assert head.written(1, "stdout") == b"out 1 /\n"
    assert head.written(0, "stderr") == b"err\n"


def test_its_end_is_its_workers_end(head):
    head.start("import time; time.sleep(100)")
    pid = head.wait_for(Started).pid
    head.channel.close()
    assert not is_running(pid)


def test_a_head_that_says_nothing_any_more_has_gone(head):
    head.start("import time; time.sleep(100)", patience=0.01)
    pid = head.wait_for(Started).pid
    head.wait_for_end()
    assert not is_running(pid)


def test_signals_are_sent_on(head):
    head.start("import time; time.sleep(100)", 2)
    head.wait_for(Started, 2)
    head.channel.send(Signal([1, 7], 9))
    assert head.wait_for(WorkerEnded) == WorkerEnded(1, -9)


def test_a_folder_that_is_not_there_is_named(head):
    head.start("", cwd="/nowhere")
    assert "no folder /nowhere" in head.wait_for(JobFailed).what


def test_its_workers_obey_interrupts_where_the_head_ignores_them():
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        head = Head()
    finally:
        signal.signal(signal.SIGINT, earlier)
    try:
        head.start("import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)")
        head.wait_for(WorkerEnded)
        assert head.written(0, "stdout") == b"True\n"
    finally:
        head.channel.close()
