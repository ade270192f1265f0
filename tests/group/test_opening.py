"""`shoal.init()` in processes that end in several ways, and the names by which the workers of a run meet."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

import shoal
from shoal.core import Placement, UsageError
from shoal.core.run_options import RunOptions
from shoal.group import GroupSettings, SoloGroup, opening
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
def workers(size, body, local_size=None, **options):
    """Started by hand, as another launcher would; with `local_size`, as if by several machines' launchers."""
    options = RunOptions(run_id=f"test {os.getpid()}", **options)
    local_size = local_size or size
    shared = {**os.environ, **options.to_environment(), "SHOAL_RUN_ID": options.run_id}
    shared |= {
        "SHOAL_WORLD_SIZE": str(size),
        "SHOAL_LOCAL_WORLD_SIZE": str(local_size),
        "OMP_NUM_THREADS": "1",
    }
    with socket.create_server(("127.0.0.1", 0)) as probe:
        shared |= {"SHOAL_MASTER_ADDR": "127.0.0.1", "SHOAL_MASTER_PORT": str(probe.getsockname()[1])}
    with contextlib.ExitStack() as stack:
        started = []
        for rank in range(size):
            machine, local_rank = divmod(rank, local_size)
            own = {"SHOAL_RANK": rank, "SHOAL_LOCAL_RANK": local_rank, "SHOAL_MACHINE": machine}
            process = subprocess.Popen(
                [sys.executable, "-c", body],
                env={**shared, **{name: str(value) for name, value in own.items()}},
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


ROLES = """
import shoal, torch
group = shoal.init()
everybody = group.everybody
total = everybody.all_reduce(torch.ones(3), "sum").wait()[0].item()
among = group.all_reduce(torch.ones(3), "sum").wait()[0].item()
counts = (total, among, everybody.num_machines, group.local_rank)
print(group.role, group.rank, group.size, everybody.rank, *counts, flush=True)
"""


def test_servers_are_the_first_of_everybody():
    with workers(3, ROLES, num_servers=1) as started:
        said = [process.communicate(timeout=40) for process in started]
        assert [out for out, _ in said] == [
            "server 0 1 0 3.0 1.0 1 0\n",
            "worker 0 2 1 3.0 2.0 1 1\n",
            "worker 1 2 2 3.0 2.0 1 2\n",
        ], said


@pytest.mark.slow
@pytest.mark.parametrize("local_size", [2, None])
def test_servers_on_several_machines(local_size):
    """Two launchers of two processes each, or one of four whose machine is split."""
    options = {} if local_size else {"workers_per_machine": 2}
    with workers(4, ROLES, local_size, num_servers=1, **options) as started:
        said = [process.communicate(timeout=40) for process in started]
        assert [out for out, _ in said] == [
            "server 0 1 0 4.0 1.0 2 0\n",
            "worker 0 3 1 4.0 3.0 2 1\n",
            f"worker 1 3 2 4.0 3.0 2 {0 if local_size else 2}\n",
            f"worker 2 3 3 4.0 3.0 2 {1 if local_size else 3}\n",
        ], said


MACHINES = """
import os, signal, shoal, torch
group = shoal.init()
mean = group.all_reduce(torch.full((4,), float(group.rank))).wait()[0].item()
print(type(group).__name__, group.machine, group.num_machines, mean, flush=True)
try:
    group.barrier().wait()  # what one says last before it is killed need not arrive: now all have the mean
    if group.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier().wait()
except shoal.ShoalError as error:
    print(error.what, flush=True)
    raise
"""


@pytest.mark.slow
@pytest.mark.parametrize("local_size", [2, 1])
def test_workers_of_several_machines_meet_and_name_the_dead(local_size):
    with workers(4, MACHINES, local_size) as started:
        said = [process.communicate(timeout=40) for process in started]
        for rank, (out, errors) in enumerate(said):
            machine = rank // local_size
            assert out.startswith(f"ClusterGroup {machine} {4 // local_size} 1.5\n"), errors
            # who comes late may find one lost that has ended because of rank 3
            assert rank == 3 or "is lost" in out, errors
        assert any("rank 3 is lost" in out for out, _ in said)


ENCRYPTION = """
import os, platform
platform.node = lambda: "node" + os.environ["SHOAL_RANK"]  # as if each were a host of its own
import shoal
group = shoal.init()
group.everybody.barrier().wait()
among_workers = None if group.role == "server" else group.inner.mesh.is_encrypted
print(group.everybody.mesh.is_encrypted, among_workers, flush=True)
"""


@pytest.mark.parametrize(
    ("choice", "is_encrypted", "line"),
    [
        ("auto", True, "3 machines encrypted (TLS), since"),
        ("never", False, "3 machines without encryption, as"),
    ],
)
def test_one_worker_says_whether_machines_encrypt(choice, is_encrypted, line):
    """Also in a run with servers, whose workers have a second group."""
    options = {"num_servers": 1, "network_interface": "127.0.0.1", "encrypt": choice}
    with workers(3, ENCRYPTION, 1, **options) as started:
        said = [process.communicate(timeout=40) for process in started]
    expected = [f"{is_encrypted} None\n", *[f"{is_encrypted} {is_encrypted}\n"] * 2]
    assert [out for out, _ in said] == expected, said
    assert f"Shoal sends tensors between {line}" in said[0][1]
    assert ["Shoal sends tensors" in errors for _, errors in said] == [True, False, False]


@pytest.mark.parametrize(
    ("asked", "given", "expected"),
    [
        ({}, {}, ("auto", "auto")),
        ({"encrypt": "always", "all_reduce": "direct"}, {}, ("always", "direct")),
        ({"encrypt": "always"}, {"encrypt": False, "all_reduce": "ring"}, ("never", "ring")),
        ({"encrypt": "never", "all_reduce": "ring"}, {"encrypt": True}, ("always", "ring")),
    ],
)
def test_a_group_is_opened_with_what_the_run_or_the_program_chose(monkeypatch, asked, given, expected):
    for name, value in RunOptions(**asked).to_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SHOAL_RUN_ID", raising=False)
    opened = []

    def open_group(placement, settings):
        opened.append(settings)
        return SoloGroup()

    # a group does not say what it was opened with
    monkeypatch.setattr(opening, "open_group", open_group)
    shoal.init(**given).close()
    assert [(settings.encrypt, settings.all_reduce) for settings in opened] == [expected]


@pytest.mark.parametrize("wrong", [{"encrypt": "sometimes"}, {"all_reduce": "star"}])
def test_a_choice_that_there_is_not_is_refused(wrong):
    with pytest.raises(UsageError, match="is unknown") as raised:
        GroupSettings("key", **wrong)
    assert "auto" in raised.value.next_step


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


def test_nodes_of_a_torchrun_meet_though_they_count_restarts_of_their_own():
    """Where each restart has a port of its own."""
    alone = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    counts = [{**alone, "TORCHELASTIC_RESTART_COUNT": count} for count in "01"]
    assert len({key_of("torchrun", environ) for environ in counts}) == 1


def test_runs_of_one_script_are_told_apart():
    keys = [
        key_of("torchrun", TORCHRUN),
        key_of("torchrun", {**TORCHRUN, "MASTER_PORT": "29501"}),
        key_of("torchrun", {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}),
        key_of("torchrun", TORCHRUN, "one"),
        key_of("torchrun", TORCHRUN, "another"),
    ]
    assert len(set(keys)) == len(keys)
