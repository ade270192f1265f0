import os
import signal
import sys
from functools import partial

import pytest

from launch.programs import Recorder
from launch.stations import Children, FakeChannel
from shoal.core import PeerRefused, UsageError
from shoal.launch import Elastic, LaunchSettings, launch
from shoal.launch.head import AgentHandle, Engine

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers are started on POSIX only")
COUNT = 'count = int(os.environ["SHOAL_RESTART_COUNT"])\n'
NAMES = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")


def test_one_machine_starts_anew_until_it_works(start, tmp_path):
    body = f"""{COUNT}
print(*(os.environ[name] for name in {NAMES}), os.environ["SHOAL_RUN_ID"], os.environ["SHOAL_MASTER_PORT"])
if count < 2 and rank == 1: raise ValueError("boom")
"""
    done = start(body, elastic=Elastic(max_restarts=3), log_dir=tmp_path / "logs", env="torchrun")
    assert done.outcome.exit_code == 0
    told = [line.split() for line in done.out[1]]
    assert [words[:2] for words in told] == [["0", "3"], ["1", "3"], ["2", "3"]]
    assert len({words[2] for words in told}) == 3
    assert done.said == [
        "rank 1 failed with exit code 1",
        "restart 1 of 3 with 2 workers",
        "rank 1 failed with exit code 1",
        "restart 2 of 3 with 2 workers",
    ]
    assert (tmp_path / "logs" / "rank-1.log").read_text().count("ValueError: boom") == 2


def test_restarts_end(start):
    done = start("sys.exit(4)", 1, elastic=Elastic(max_restarts=1))
    assert done.outcome.exit_code == 4
    assert done.said == [
        "rank 0 failed with exit code 4",
        "restart 1 of 1 with 1 worker",
        "rank 0 failed with exit code 4",
    ]


def test_who_is_interrupted_does_not_start_anew(start):
    interrupt = {"ready": partial(os.kill, os.getpid(), signal.SIGINT)}
    done = start("print('ready')\ntime.sleep(100)", 1, when=interrupt, elastic=Elastic(max_restarts=3))
    assert done.outcome.exit_code == 130
    assert done.said == ["interrupted; the workers are being ended"]


def test_an_interrupt_while_the_run_starts_anew_is_not_missed(start):
    body = f"{COUNT}\nsys.exit(1) if count == 0 else time.sleep(100)"
    interrupt = {"restart 1 of 1": partial(os.kill, os.getpid(), signal.SIGINT)}
    done = start(body, 1, when=interrupt, elastic=Elastic(max_restarts=1))
    assert done.outcome.exit_code == 130
    assert done.said[-1] == "interrupted; the workers are being ended"


def test_the_time_counts_from_the_first_start(start):
    done = start(
        f"{COUNT}\nsys.exit(1) if count < 2 else time.sleep(100)", 1, elastic=Elastic(9), timeout_s=1.5
    )
    assert done.outcome.exit_code == 124
    assert done.outcome.elapsed_s < 6


@pytest.mark.parametrize("bounds", [(3, None), (None, 1), (0, 4)])
def test_bounds_that_leave_no_room_are_refused(bounds):
    with pytest.raises(UsageError, match="not between --min-np"):
        LaunchSettings(("x",), 2, elastic=Elastic(1, *bounds))


class Mixed(Engine):
    """A host that answers, and one that has gone."""

    def open(self, min_processes, max_processes, *, is_restart):
        good = Children("a").open(min_processes, max_processes, is_restart=is_restart)
        gone = FakeChannel("b")
        gone.close()
        return [*good, AgentHandle(gone, 2, "b")]


def test_a_start_without_a_host_needs_leave_to_shrink(write):
    command = (sys.executable, str(write("print(size)")))
    with pytest.raises(PeerRefused, match="b has gone"):
        launch(LaunchSettings(command, 4), Recorder(), Mixed())
    recorder = Recorder()
    settings = LaunchSettings(command, 4, elastic=Elastic(min_workers=2))
    assert launch(settings, recorder, Mixed()).exit_code == 0
    assert recorder.out == {0: ["2"], 1: ["2"]}
    assert recorder.said == ["goes on without b: b has gone."]
