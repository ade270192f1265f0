"""`shoal.init()` in processes that end in several ways, and the names by which the workers of a run meet."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest

import shoal
from shoal.core import Placement
from shoal.core.run_options import RunOptions
from shoal.group.opening import _key

ENDINGS = """
import os, sys, threading, time, shoal
group = shoal.init()
group.barrier().wait()
if group.rank == 1:
    raise ValueError("boom")
if group.rank == 2:
    sys.exit(3)
if group.rank == 3:
    thread = threading.Thread(target=sys.exit, args=(5,))
    thread.start()
    thread.join()
    sys.exit(0)
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
deadline_s = time.monotonic() + 20
while len(group.members) > 1 and time.monotonic() < deadline_s:
    time.sleep(0.01)
print(sorted(group.lost), list(group.members), flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def workers(size, body, **options):
    """Started by hand, as another launcher would."""
    options = RunOptions(run_id=f"test {os.getpid()}", **options)
    shared = {**os.environ, **options.to_environment(), "TORCHELASTIC_RUN_ID": options.run_id}
    shared |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(size):
            process = subprocess.Popen(
                [sys.executable, "-c", body],
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        yield started


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_only_a_program_that_ends_well_leaves_in_order_but_all_write_their_timeline(tmp_path):
    path = tmp_path / "trace.json"
    with workers(4, ENDINGS, timeline=str(path)) as started:
        assert started[0].stdout.readline() == "[1, 2] [0]\n"
        started[0].terminate()
        assert [process.wait(20) for process in started] == [-signal.SIGTERM, 1, 3, 0]
    for rank in range(4):
        trace = json.loads((tmp_path / f"trace.json.{rank}").read_text())
        assert "barrier" in [span["name"] for span in trace["traceEvents"]]


def test_a_group_of_one_has_the_patience_asked_for(monkeypatch):
    for name in ("RANK", "SHOAL_RUN"):
        monkeypatch.delenv(name, raising=False)
    with shoal.init(patience=3.0) as group:
        assert (group.size, group.patience) == (1, 3.0)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def key_of(source, environ, run_id=""):
    return _key(Placement(0, 2, 0, 2, source), RunOptions(run_id=run_id), environ)


@pytest.mark.parametrize(
    ("source", "environ"),
    [
        ("torchrun", TORCHRUN),
        ("Open MPI", {"PMIX_NAMESPACE": "prterun-1"}),
        ("MPICH or Intel MPI", {"PMI_JOBID": "7"}),
        ("Slurm", {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}),
    ],
)
def test_a_named_run_meets_whatever_process_started_its_workers(monkeypatch, source, environ):
    """A shell around each worker is the parent of one alone."""
    key = key_of(source, environ)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert key_of(source, environ) == key


@pytest.mark.parametrize(
    ("source", "environ"),
    [("torchrun", {}), ("MPICH or Intel MPI", {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"})],
)
def test_runs_without_a_name_are_told_apart_by_their_launchers(monkeypatch, source, environ):
    key = key_of(source, environ)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert key_of(source, environ) != key


def test_runs_of_one_script_are_told_apart():
    keys = [
        key_of("torchrun", TORCHRUN),
        key_of("torchrun", {**TORCHRUN, "MASTER_PORT": "29501"}),
        key_of("torchrun", {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}),
        key_of("torchrun", TORCHRUN, "one"),
        key_of("torchrun", TORCHRUN, "another"),
    ]
    assert len(set(keys)) == len(keys)
