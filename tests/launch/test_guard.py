import contextlib
import os
import subprocess

import pytest

from launch.programs import is_running
from shoal.launch.worker_process import Guard

pytestmark = pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX")


@pytest.fixture
def sleepers():
    processes = [subprocess.Popen(["sleep", "100"], process_group=0) for _ in range(3)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_only_the_groups_watched_at_last_are_killed(sleepers):
    with contextlib.closing(Guard()) as guard:
        guard.watch(process.pid for process in sleepers)
        guard.watch(process.pid for process in sleepers[1:])
    assert [process.wait(5) for process in sleepers[1:]] == [-9, -9]
    assert sleepers[0].poll() is None


def test_nobody_is_killed_after_an_end_in_order(sleepers):
    with contextlib.closing(Guard()) as guard:
        guard.watch(process.pid for process in sleepers)
        guard.watch([])
    assert [process.poll() for process in sleepers] == [None] * 3


def test_a_guard_that_was_killed_does_no_harm():
    with contextlib.closing(Guard()) as guard:
        guard._shell.kill()
        guard._shell.wait()
        assert not is_running(guard._shell.pid)
        guard.watch([1])
        guard.watch([])
