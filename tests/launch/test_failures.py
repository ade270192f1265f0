"""Runs with a parameter server, rank 0 here, that says with all workers that it survives a loss."""

import os
import signal

import pytest

from shoal.core.run_options import RunOptions
from shoal.launch import Elastic

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers are started on POSIX only")
SERVER = {"options": RunOptions(num_servers=1)}
TOGETHER = """
class PeerLost(Exception): pass
survive()
mark(f"here-{rank}", os.getpid())
for other in range(size):
    wait_for(f"here-{other}")
"""


def test_a_server_does_not_finish_what_all_workers_failed_at(start):
    body = f"""{TOGETHER}
if rank == 0: time.sleep(100)
if rank == 2: wait_for("failing")
if rank == 1: mark("failing")
raise ValueError("boom")
"""
    done = start(body, 2, elastic=Elastic(max_restarts=1), **SERVER)
    assert done.outcome.exit_code == 1
    assert done.outcome.cause.rank in (1, 2)
    assert "ValueError: boom" in done.outcome.traceback
    assert sum(said == "restart 1 of 1 with 2 workers" for said in done.said) == 1
    assert not any("finished" in said for said in done.said)


def test_the_first_of_workers_that_fail_one_by_one_is_the_cause(start, tmp_path):
    body = f"""{TOGETHER}
if rank == 0: time.sleep(100)
if rank == 1: sys.exit(3)
wait_for("told")
sys.exit(4)
"""
    told = {"the last one goes on": (tmp_path / "told").touch}
    done = start(body, 2, when=told, allows_failures=True, **SERVER)
    assert (done.outcome.exit_code, done.outcome.cause.rank) == (3, 1)
    assert done.said == [
        "rank 1 failed with exit code 3; the last one goes on",
        "rank 1 failed with exit code 3",
        "rank 2 failed with exit code 4 after that",
    ]


@pytest.mark.parametrize("follows", ["time.sleep(100)", "raise PeerLost('rank 0 has gone')"])
def test_workers_cannot_do_without_their_server(start, follows):
    body = f"""{TOGETHER}
if rank == 0: os.kill(os.getpid(), signal.SIGKILL)
{follows}
"""
    done = start(body, 2, **SERVER)
    assert done.outcome.exit_code == 128 + signal.SIGKILL
    assert done.outcome.cause.rank == 0
    assert "finished without" not in " ".join(done.said)


def test_nobody_is_said_to_go_on_without_a_server_that_is_stopped(start):
    body = f"""{TOGETHER}
if rank == 0: os.kill(os.getpid(), signal.SIGSTOP)
if rank == 1: time.sleep(100)
raise PeerLost("parameter server 0 is lost in round 7: it is silent.")
"""
    done = start(body, 2, **SERVER)
    assert done.outcome.exit_code == 128 + signal.SIGSTOP
    assert done.outcome.cause.rank == 0
    assert not any("goes on" in said for said in done.said)


@pytest.mark.parametrize("server", ["", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_one_worker_less_finishes_and_so_does_its_server(start, server):
    body = f"""{TOGETHER}
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
if rank == 0:
    for name in ("here-1", "here-2"):
        while Path("/proc", (here / name).read_text()).exists(): time.sleep(0.005)
    {server}
"""
    done = start(body, 2, **SERVER)
    assert (done.outcome.exit_code, done.outcome.cause) == (0, None)
    assert done.said[0].startswith("rank 1 was killed by signal 9 (SIGKILL); ")
    assert done.said[-1] == ("finished without ranks 0 and 1" if server else "finished without rank 1")


def test_workers_that_raise_end_the_run_with_their_server(start):
    done = start(f"{TOGETHER}\nif rank == 1: sys.exit(3)\ntime.sleep(100)", 2, **SERVER)
    assert (done.outcome.exit_code, done.outcome.cause.rank) == (3, 1)
