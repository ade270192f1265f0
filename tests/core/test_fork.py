import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")


def run_script(body):
    """Run a script in a process of its own: a fork of the test process would hold all that pytest holds."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_forked_child_does_not_keep_a_socket_open():
    said = run_script("""
        import os, socket
        from shoal.core.fork import close_in_children, keep_in_children
        ours, theirs = socket.socketpair()
        kept, other = socket.socketpair()
        for end in (ours, kept):
            close_in_children(end.fileno())
        keep_in_children(kept.fileno())
        go, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(told)
            os.read(go, 1)  # lives until the parent ends it
            os._exit(0)
        os.close(go)
        ours.close()
        kept.close()
        theirs.settimeout(10)
        print("closed" if theirs.recv(1) == b"" else "open")
        other.settimeout(0)
        try:
            print("closed" if other.recv(1) == b"" else "data")
        except BlockingIOError:
            print("held")
        os.close(told)
        os.waitpid(child, 0)
    """)
    assert said == ["closed", "held"]


def test_an_inherited_object_that_is_collected_closes_nothing_of_the_childs_own():
    said = run_script("""
        import os, socket
        from shoal.core.fork import close_in_children
        ours, theirs = socket.socketpair()
        close_in_children(ours.fileno())
        child = os.fork()
        if child == 0:
            number = os.open(os.devnull, os.O_RDONLY)  # may get the number of the socket
            ours.close()
            try:
                os.fstat(number)
            except OSError:
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    assert said == ["0"]


def test_a_child_holds_no_more_descriptors_than_its_parent_and_grandchildren_none():
    said = run_script("""
        import os, socket
        from shoal.core.fork import close_in_children, _descriptors
        ours, theirs = socket.socketpair()
        close_in_children(ours.fileno())
        close_in_children(10_000)  # closed without telling: no reason to fail
        before = len(os.listdir("/dev/fd"))
        child = os.fork()
        if child == 0:
            os._exit(0 if len(os.listdir("/dev/fd")) == before and not _descriptors else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(_descriptors))
    """)
    assert said == ["0", "2"]


def test_a_loop_thread_of_the_parent_refuses_work_in_a_child():
    said = run_script("""
        import asyncio, os, warnings
        warnings.simplefilter("error")
        from shoal.core import LoopThread, UsageError
        with LoopThread() as loop:
            assert loop.run(asyncio.sleep(0, 1)) == 1
            child = os.fork()
            if child == 0:
                try:
                    loop.run(asyncio.sleep(0))
                except UsageError as error:
                    loop.__exit__(None, None, None)
                    os._exit(0 if "forked" in str(error) else 1)
                os._exit(2)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), loop.run(asyncio.sleep(0, 7)))
    """)
    assert said == ["0", "7"]
