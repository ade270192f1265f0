import os
import select
import signal
import subprocess
import sys

import pytest

from shoal.bench.workers import child, describe_exit
from shoal.core import BenchmarkError

SAMPLES = "bench.sample_scenarios"


@pytest.fixture(autouse=True)
def _tests_are_importable(monkeypatch, request):
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath / "tests"))


def test_a_child_tells_and_ends_with_its_block():
    with child(f"{SAMPLES}:answer", {"number": 21}) as process:
        assert process.expect() == {"double": 42}
    assert process._process.returncode == 0


def test_a_child_that_ends_early_is_noticed():
    with child(f"{SAMPLES}:silent", {}) as process:
        with pytest.raises(BenchmarkError, match="before it was ready"):
            process.expect()


def test_a_failure_is_told_with_its_cause():
    with child(f"{SAMPLES}:no_such_function", {}) as process:
        with pytest.raises(BenchmarkError, match="AttributeError"):
            process.receive()


def test_a_child_that_fails_is_not_interrupted_while_it_says_so(capfd):
    with child(f"{SAMPLES}:failing", {}) as process:
        with pytest.raises(BenchmarkError, match="below zero"):
            process.receive()
    assert process.exit_code == 1
    assert "KeyboardInterrupt" not in capfd.readouterr().err


def test_a_child_ends_when_its_block_is_left_by_an_error():
    def leave_by_error():
        with child(f"{SAMPLES}:answer", {"number": 1}) as process:
            process.expect()
            started.append(process)
            raise ZeroDivisionError

    started = []
    with pytest.raises(ZeroDivisionError):
        leave_by_error()
    assert started[0]._process.returncode is not None


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is noticed when they next talk")
def test_a_child_that_does_not_listen_ends_when_its_parent_is_killed():
    parent = f"""
from shoal.bench.workers import child
with child("{SAMPLES}:busy", {{}}) as process:
    print(process.expect()["pid"], flush=True)
    process.receive()
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        watched = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        assert select.select([watched], [], [], 10.0)[0]
        os.close(watched)


def test_a_child_can_be_interrupted_whose_parent_ignores_interrupts():
    """As a shell's background job does."""
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with child(f"{SAMPLES}:busy", {}) as process:
            pid = process.expect()["pid"]
            assert os.getpgid(pid) == pid  # a Ctrl-C that its parent ignores does not reach it
            os.kill(pid, signal.SIGINT)
            with pytest.raises(BenchmarkError, match="exit code 130"):
                process.receive()
    finally:
        signal.signal(signal.SIGINT, earlier)


def test_exits_in_words():
    assert describe_exit(-9) == "signal 9"
    assert describe_exit(3) == "exit code 3"
