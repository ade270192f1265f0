"""Runs of small programs: `start` in this process, `shoal_run` by the command, both without torch."""

import contextlib
import subprocess
import sys
import textwrap

import pytest

from launch.programs import PRELUDE, Done, Recorder
from shoal.launch import LaunchSettings, launch


@pytest.fixture
def write(tmp_path):
    """Writes a program of workers."""

    def write(body, name="program.py"):
        path = tmp_path / name
        path.write_text(PRELUDE + textwrap.dedent(body))
        return path

    return write


@pytest.fixture
def start(write):
    """Runs a program in this process, to its end."""

    def start(body, num_workers=2, *arguments, when=None, **settings):
        recorder = Recorder(when)
        command = (sys.executable, str(write(body)), *arguments)
        return Done(launch(LaunchSettings(command, num_workers, **settings), recorder), recorder)

    return start


@pytest.fixture
def shoal_run(tmp_path):
    """Starts `shoal run` as a process of its own, with pipes; ended with the test."""
    with contextlib.ExitStack() as stack:

        def shoal_run(*words, **settings):
            process = subprocess.Popen(
                [sys.executable, "-m", "shoal", "run", *map(str, words)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=tmp_path,
                text=True,
                **{"stdin": subprocess.DEVNULL, **settings},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield shoal_run
