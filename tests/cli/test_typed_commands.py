"""What each command would run, or why it refuses, is what `typed.json` lists; nothing is started.

`recorded` says how the file is written anew. To hold another command, add it to the file with null first.
"""

import os
import shlex
from pathlib import Path

import msgspec
import pytest

from recorded import check_recorded, recorded
from shoal.cli import bench, program

RECORDED = Path(__file__).parent / "typed.json"


class Asked(Exception):
    """What a command has asked for."""


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    def ask(benchmark, config, settings, **more):
        raise Asked(benchmark, config, settings)

    monkeypatch.setattr(bench, "run_benchmark", ask)
    # some defaults go by the cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # what a command sets there goes with the test
        monkeypatch.delenv(name)


@pytest.mark.parametrize("typed", recorded(RECORDED))
def test_a_command_asks_for_what_it_asked_before(typed, capsys):
    asked = {}
    try:
        asked["exit code"] = program.run(shlex.split(typed))
    except Asked as ran:
        benchmark, config, settings = ran.args
        asked = {"benchmark": benchmark, "starts": settings.num_starts, "seed": settings.seed}
        # as the report has it: tuples are lists there
        asked["config"] = msgspec.json.decode(msgspec.json.encode(config))
    asked["stderr"] = capsys.readouterr().err.splitlines()
    if "Usage: " in "".join(asked["stderr"][:1]):
        asked["stderr"] = ["usage"]  # which typer words, and breaks into lines
    check_recorded(RECORDED, typed, asked)
