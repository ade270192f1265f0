"""Small programs as workers, what is kept of a run, and a look at processes."""

import contextlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

from shoal.launch import Outcome, Output

PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank, size = int(os.environ["SHOAL_RANK"]), int(os.environ["SHOAL_WORLD_SIZE"])
here = Path(__file__).parent
def wait_for(name, seconds=20):
    end = time.monotonic() + seconds
    while not (here / name).exists():
        assert time.monotonic() < end, f"{name} never came"
        time.sleep(0.005)
def mark(name, text=""):
    (here / f"{name}.tmp").write_text(str(text))
    (here / f"{name}.tmp").rename(here / name)
def wait_until_ended(other):
    while Path("/proc", (here / f"here-{other}").read_text()).exists(): time.sleep(0.005)
def tell(**message):
    import json
    options = json.loads(os.environ["SHOAL_RUN"])
    os.write(options["status_fd"], json.dumps(message).encode() + b"\\n")
def survive(answer=True):
    tell(survives_loss=answer)
"""
"""What every program of these tests begins with."""


class Recorder(Output):
    """Keeps everything; `when` maps a text to what is done when a line contains it for the first time."""

    def __init__(self, when=None):
        self.out, self.err, self.said, self.when = {}, {}, [], dict(when or {})

    def lines(self, rank, stream, lines):
        kept = self.out if stream == "stdout" else self.err
        for line in lines:
            text = line.decode(errors="backslashreplace")
            kept.setdefault(rank, []).append(text)
            self._react(text)

    def say(self, text):
        self.said.append(text)
        self._react(text)

    def _react(self, text):
        for sign in [sign for sign in self.when if sign in text]:
            self.when.pop(sign)()


@dataclass
class Done:
    outcome: Outcome
    recorder: Recorder = field(repr=False)

    def __post_init__(self):
        self.out, self.err, self.said = self.recorder.out, self.recorder.err, self.recorder.said


def state_of(pid):
    """Of a process, one letter: T is stopped, Z and X have ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def is_running(pid):
    """Whether a process exists and has not ended; a zombie has."""
    return state_of(pid) not in "ZX"


def read_pid(folder, name):
    return int((Path(folder) / name).read_text())


def kill(pid, number=signal.SIGKILL):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
