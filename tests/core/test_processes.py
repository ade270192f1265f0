import ctypes
import os
import signal
import subprocess
import sys

import pytest

from shoal.core.processes import namespace, started, state_of

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


def test_a_name_may_be_any_bytes():
    system, own, before = ctypes.CDLL(None), os.getpid(), ctypes.create_string_buffer(16)
    began = started(own)
    system.prctl(16, before)
    system.prctl(15, "обучение".encode()[:15])  # the last character is cut in two
    try:
        assert started(own) == began
        assert state_of(own, began) == "running"
    finally:
        system.prctl(15, before)


def test_numbers_are_those_of_a_namespace_since_the_machine_began():
    boot, _, inode = namespace().partition("/")
    assert boot
    assert inode.isdecimal()
