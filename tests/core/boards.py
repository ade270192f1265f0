"""Notes for tests of the board and of what shows it."""

import os

from shoal.core.board import Note
from shoal.core.processes import started

NOW_S = 1_700_000_000.0


def note(rank=0, run="job", **fields):
    """Of a worker that is this process, unless `fields` say otherwise."""
    known = {
        "size": 2,
        "pid": os.getpid(),
        "started": started(os.getpid()),
        "host": "here",
        "noted_s": NOW_S,
        "began_s": NOW_S - 60,
        "strategy": "all-reduce",
        "program": "train.py",
        "place": rank,
    }
    return Note(run=run, rank=rank, **{**known, **fields})


def gone(rank=0, run="job", **fields):
    """Of a process whose number another one has by now."""
    return note(rank, run, started="1", **fields)
