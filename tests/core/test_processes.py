import os
import signal
import subprocess
import sys

import pytest

from shoal.core.processes import started, state_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")


def test_a_process_is_told_by_its_number_and_its_start():
    own = os.getpid()
    assert started(own)
    assert state_of(own, started(own)) == "running"
    assert state_of(own, "1") == "gone"
    assert started(2**22 + 1) == ""


def test_one_that_is_stopped_and_one_that_has_ended_are_told_apart():
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        began = started(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert state_of(child.pid, began) == "stopped"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert state_of(child.pid, began) == "gone"  # a zombie, which nobody has waited for
    assert state_of(child.pid, began) == "gone"
