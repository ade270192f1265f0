"""examples/slurm/train.sbatch under a real Slurm: its controller and its node are processes here."""

import contextlib
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
MISSING = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"no {', '.join(MISSING)} here: apt install --no-install-recommends slurm-wlm munge",
    ),
    pytest.mark.skipif(os.getuid() != 0, reason="Slurm's node needs root"),
]
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
PROGRAM = """
import os, pathlib, torch, shoal

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
group = shoal.init()
strategy = shoal.from_args(group)
folder = pathlib.Path(os.environ["FOLDER"])
(folder / f"pid-{group.rank}").write_text(str(os.getpid()))
with strategy.attach(model, optimizer):
    while strategy.steps < 40:
        if strategy.steps == 20 and not (folder / "go-on").exists():
            while not (folder / "go-on").exists():
                os.sched_yield()
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
print(f"rank {group.rank} of {group.size} ends after step {strategy.steps}", flush=True)
"""


def wait_for(found, what, timeout_s=150):
    """What `found` gives, once it gives something."""
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        value = found()
        if value:
            return value
        time.sleep(0.2)  # it is a file or a state of another system, which tells nobody
    raise AssertionError(what())


class Cluster:
    """A Slurm of one node with two processors."""

    def __init__(self, folder, environ):
        self.folder, self.environ = folder, environ

    def call(self, *words):
        done = subprocess.run(
            [*map(str, words)],
            cwd=self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout + done.stderr

    def submit(self, *words):
        answer = self.call("sbatch", *words)
        return re.search(r"Submitted batch job (\d+)", answer)[1]

    def about(self, job, name):
        found = re.search(rf"\b{name}=(\S+)", self.call("scontrol", "show", "job", job))
        return found and found[1]

    def log(self, job):
        path = self.folder / f"shoal-{job}.log"
        return path.read_text() if path.exists() else ""


def end(process):
    """It is asked first: what it has started ends with it."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents[:3]):
        if parent.owner() == pwd.getpwuid(os.getuid()).pw_name and parent != Path("/tmp"):
            parent.chmod(0o755)  # munge's clients must reach its socket
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host = socket.gethostname().partition(".")[0]
    config = CONFIG.format(host=host, controller=free_port(), node=free_port(), user="root", folder=folder)
    (folder / "slurm.conf").write_text(config)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    sockets = f"--socket={folder}/munge.socket"
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SHOAL")},
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": f"{os.environ['PATH']}:/usr/sbin",
        "PYTHON": sys.executable,
        "FOLDER": str(folder),
        "SHOAL_CHECKPOINT_EVERY": "5",
    }
    with contextlib.ExitStack() as stack:
        for command in (
            ["munged", "--foreground", "--force", sockets, *files],
            ["slurmctld", "-D", "-i"],
            ["slurmd", "-D", "-N", host],
        ):
            log = stack.enter_context((folder / f"{command[0]}.out").open("w"))
            process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, cwd=folder)
            stack.callback(end, process)
            if command[0] == "munged":
                wait_for((folder / "munge.socket").exists, (folder / "munged.out").read_text, 20)
        made = Cluster(folder, environ)
        wait_for(
            lambda: "State=IDLE" in made.call("scontrol", "show", "node"),
            lambda: (
                made.call("scontrol", "show", "node")
                + "".join((folder / f"{name}.out").read_text()[-3000:] for name in ("slurmctld", "slurmd"))
            ),
            60,
        )
        (folder / "train.py").write_text(PROGRAM)
        yield made
        made.call("scancel", "--user", "root")


def test_the_script_trains_and_ends_0(cluster):
    job = cluster.submit(SCRIPT, ROOT / "examples" / "train_digits.py", "--epochs", "2")
    wait_for(
        lambda: cluster.about(job, "JobState") in ("COMPLETED", "FAILED"),
        lambda: cluster.log(job) or "no log",
    )
    assert cluster.about(job, "JobState") == "COMPLETED", cluster.log(job)
    assert cluster.about(job, "ExitCode") == "0:0"
    assert "all-reduce, 2 workers" in cluster.log(job)


def test_a_killed_task_is_requeued_and_resumes(cluster):
    job = cluster.submit(SCRIPT, "train.py")
    pids = [cluster.folder / f"pid-{rank}" for rank in range(2)]
    saved = cluster.folder / f"checkpoints-{job}" / "step-00000020" / "manifest.json"
    wait_for(lambda: all(path.exists() for path in pids) and saved.exists(), lambda: cluster.log(job))
    os.kill(int(pids[1].read_text()), signal.SIGKILL)
    (cluster.folder / "go-on").touch()
    wait_for(lambda: cluster.about(job, "Restarts") == "1", lambda: cluster.log(job))
    wait_for(
        lambda: cluster.about(job, "JobState") in ("COMPLETED", "FAILED"),
        lambda: cluster.log(job) or "no log",
        250,  # Slurm itself lets a job that is requeued wait for two minutes
    )
    assert cluster.about(job, "JobState") == "COMPLETED", cluster.log(job)
    assert "resumed step 20" in cluster.log(job)
    assert len(re.findall(r"rank \d of 2 ends after step 40", cluster.log(job))) == 2


def test_the_page_shows_the_script():
    assert SCRIPT.read_text() in (ROOT / "docs" / "slurm.md").read_text()
