import json
import os
import subprocess
import sys
import textwrap

import pytest

from shoal.core.fork import keep_in_children
from shoal.core.run_options import VARIABLE, RunOptions
from shoal.core.status import MAX_BYTES, tell_launcher

pytestmark = pytest.mark.skipif(os.name != "posix", reason="pipes are inherited on POSIX")


@pytest.fixture
def pipe(monkeypatch):
    """A pipe to a launcher that this process was told about."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    options = RunOptions(status_fd=writer, status_inode=os.fstat(writer).st_ino)
    monkeypatch.setenv(VARIABLE, options.to_environment()[VARIABLE])
    yield reader, writer
    keep_in_children(writer)
    for end in (reader, writer):
        try:
            os.close(end)
        except OSError:
            continue


def test_a_message_is_a_line_of_json(pipe):
    tell_launcher(rank=2, survives_loss=True)
    tell_launcher(rank=2, survives_loss=False)
    lines = os.read(pipe[0], 4096).splitlines()
    assert list(map(json.loads, lines)) == [
        {"rank": 2, "survives_loss": True},
        {"rank": 2, "survives_loss": False},
    ]


def test_without_a_launcher_nothing_happens(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    tell_launcher(rank=0)


def test_a_launcher_that_has_gone_is_no_error(pipe):
    os.close(pipe[0])
    tell_launcher(rank=0)


def test_a_launcher_that_does_not_read_is_not_waited_for(pipe):
    for step in range(10_000):
        tell_launcher(step=step)
    assert json.loads(os.read(pipe[0], 4096).splitlines()[0]) == {"step": 0}


def test_another_file_under_the_same_number_is_left_alone(pipe, tmp_path):
    """A process that a worker starts inherits the variable, not the pipe."""
    other, end = os.pipe()
    os.set_blocking(other, False)
    os.dup2(end, pipe[1])
    tell_launcher(rank=0)
    with pytest.raises(BlockingIOError):
        os.read(other, 1)
    os.close(pipe[1])
    tell_launcher(rank=0)
    os.close(other)
    os.close(end)


def test_a_message_that_might_arrive_in_parts_is_refused(pipe):
    with pytest.raises(AssertionError, match=str(MAX_BYTES)):
        tell_launcher(text="x" * MAX_BYTES)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_forked_children_do_not_speak_for_their_parent():
    reader, writer = os.pipe()
    options = RunOptions(status_fd=writer, status_inode=os.fstat(writer).st_ino)
    body = """
        import os
        from shoal.core.status import tell_launcher
        tell_launcher(who="worker")
        child = os.fork()
        if child == 0:
            tell_launcher(who="child")
            os._exit(0)
        os.waitpid(child, 0)
    """
    environment = {**os.environ, **options.to_environment()}
    command = [sys.executable, "-c", textwrap.dedent(body)]
    subprocess.run(command, env=environment, pass_fds=(writer,), check=True, timeout=30)
    os.close(writer)
    with os.fdopen(reader) as told:
        assert [json.loads(line) for line in told] == [{"who": "worker"}]
