"""Training in four workers, each with two of a DataLoader, meets what happens to processes in real life."""

import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launch.programs import is_running
from launch.training_program import FAULTY_RANK, STEPS_AFTER, STEPS_BEFORE
from shoal.group.base import SILENCE_S
from shoal.strategies import BUILT_IN

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them"),
    pytest.mark.timeout(120),
]
PROGRAM = Path(__file__).with_name("training_program.py")
ELSEWHERE = ("horovod", "parameter-server", "staleness-aware")
"""Strategies that need more than workers; with servers, `tests/strategies` loses workers and servers."""
OWN_FAULTS = ("exception", "code", "early", "abrupt")
PATIENCE = 0.2
ENDING_S = 10


@dataclass
class Training:
    """A run of `shoal run`."""

    process: object
    strategy: str
    fault: str
    num_workers: int
    pids: list[int] = field(default_factory=list)
    """Of the workers, in rank order."""
    children: list[int] = field(default_factory=list)
    """Of their DataLoaders."""

    @property
    def others(self):
        return [rank for rank in range(self.num_workers) if rank != FAULTY_RANK]

    def wait_until_training(self):
        pids = {}
        while len(pids) < self.num_workers:
            line = self.process.stdout.readline()
            assert line, self.process.stderr.read()
            rank, _, pid, *children = line.split()
            assert len(children) == 2
            pids[rank] = int(pid)
            self.children += map(int, children)
        self.pids = [pids[rank] for rank in sorted(pids)]

    def meet_fault(self):
        """The fault now, and the rest of the run."""
        began_s = time.monotonic()
        if self.fault == "kill":
            os.kill(self.pids[FAULTY_RANK], signal.SIGKILL)
        elif self.fault == "stop":
            os.kill(self.pids[FAULTY_RANK], signal.SIGSTOP)
        elif self.fault == "interrupt":
            os.kill(self.process.pid, signal.SIGINT)
        self.out, self.err = self.process.stdout.read(), self.process.stderr.read()
        self.exit_code = self.process.wait()
        self.elapsed_s = time.monotonic() - began_s

    def remains(self):
        """Processes of its groups, and names in shared memory; ports and nameless memory end with those."""
        groups = {str(pid) for pid in self.pids}
        stats = [_fields_of(path) for path in Path("/proc").glob("[0-9]*/stat")]
        members = [fields for fields in stats if fields and fields[2] in groups and fields[0] not in "ZX"]
        processes = [pid for pid in (*self.pids, *self.children) if is_running(pid)]
        signs = ["shoal", *(f"_{pid}_" for pid in (*self.pids, *self.children))]
        signs += [f".{pid}.note" for pid in self.pids]  # on the board, where other runs' are too
        names = [path.name for path in Path("/dev/shm").rglob("*") if path.is_file()]
        return members + processes + [name for name in names if any(sign in name for sign in signs)]


def _fields_of(path):
    """The state, the parent, the group and so on; empty when it has just ended."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []


@pytest.fixture
def train(shoal_run):
    """Starts a run that will meet a fault."""

    def train(strategy, fault, num_workers=4):
        words = ["--workers-per-machine", 2] if strategy == "hierarchical" else []
        own = [fault] if fault in OWN_FAULTS else []
        # only silence takes time to be noticed, and on a busy machine processes that run are silent, too
        patience = {"stop": PATIENCE, "wake": 1}.get(fault, 3)
        words += ["--strategy", strategy, "--patience", patience]
        process = shoal_run("-np", num_workers, *words, PROGRAM, *own)
        return Training(process, strategy, fault, num_workers)

    return train


def assert_nothing_is_left(run):
    deadline_s = time.monotonic() + 10
    while run.remains() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not run.remains()


def assert_the_others_finished(run):
    assert run.exit_code == 0, run.err
    finished = {f"[{rank}] {STEPS_AFTER} steps without [{FAULTY_RANK}]" for rank in run.others}
    assert set(run.out.splitlines()) == finished
    for rank in run.others:
        assert run.err.count(f"[{rank}] rank {FAULTY_RANK} is lost: ") == 1, run.err
    assert f"shoal run: finished without rank {FAULTY_RANK}\n" in run.err


def assert_the_run_ended(run, exit_code, limit_s=ENDING_S):
    assert run.exit_code == exit_code, run.err
    assert run.elapsed_s < limit_s
    # a worker that fails by itself takes a while to end, and the others may finish in that time
    assert run.out == "" or (run.fault in OWN_FAULTS and _survives(run)), run.out
    tracebacks = [line for line in run.err.splitlines() if "Traceback (most recent" in line]
    own = [f"[{FAULTY_RANK}] Traceback (most recent call last):"] if run.fault == "exception" else []
    assert tracebacks == own, run.err


def _survives(run):
    return BUILT_IN[run.strategy].survives_loss


def assert_right(run):
    """What a user is promised."""
    who = f"shoal run: rank {FAULTY_RANK}"
    if run.fault == "interrupt":
        assert_the_run_ended(run, 128 + signal.SIGINT)
        said = [line for line in run.err.splitlines() if line.startswith("shoal run: ")]
        assert said == ["shoal run: interrupted; the workers are being ended"]
    elif run.fault == "early":
        assert run.exit_code == 0, run.err
        where = f"at step {2 * STEPS_BEFORE}, inside of attach"
        assert f"{who} ended early with exit code 0, {where}; " in run.err
        assert run.out.count("steps without []") == len(run.others)
    elif run.fault in OWN_FAULTS:
        assert_the_run_ended(run, 7 if run.fault == "code" else 1, 3 * ENDING_S)
    elif _survives(run):
        assert_the_others_finished(run)
    else:
        number = signal.SIGKILL if run.fault == "kill" else signal.SIGSTOP
        silence_s = 0 if run.fault == "kill" else SILENCE_S * PATIENCE
        assert_the_run_ended(run, 128 + number, silence_s + ENDING_S)
    if run.fault == "kill":
        assert f"{who} was killed by signal {signal.SIGKILL:d} (SIGKILL)" in run.err
    elif run.fault == "stop":
        assert f"{who} was stopped by signal {signal.SIGSTOP:d} (SIGSTOP)" in run.err
    elif run.fault == "abrupt":
        assert f"{who} ended with exit code 0 without leaving its group (os._exit?), at step " in run.err
        assert not re.search(r"shoal run: rank [^1].* failed with", run.err)
    elif run.fault == "code":
        assert f"{who} failed with exit code 7\n" in run.err
    elif run.fault == "exception":
        assert f"{who} failed with exit code 1\n" in run.err
        trace = [line for line in run.err.splitlines() if line.startswith(f"[{FAULTY_RANK}]")]
        assert "Traceback (most recent call last)" in trace[0]
        assert "training_program.py" in trace[1]
        assert [line for line in trace if "boom" in line][-1] == trace[-1]
        assert sum("Traceback" in line for line in trace) == 1
    assert_nothing_is_left(run)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "stop", "exception", "interrupt"])
@pytest.mark.parametrize("strategy", [name for name in BUILT_IN if name not in ELSEWHERE])
def test_a_fault_in_training(train, strategy, fault):
    run = train(strategy, fault)
    run.wait_until_training()
    run.meet_fault()
    assert_right(run)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["code", "early", "abrupt"])
@pytest.mark.parametrize("strategy", ["all-reduce", "pair", "neighbor"])
def test_a_worker_that_ends_by_itself(train, strategy, fault):
    run = train(strategy, fault, num_workers=3)
    run.wait_until_training()
    run.meet_fault()
    assert_right(run)


@pytest.mark.slow
def test_a_worker_that_the_others_have_gone_on_without_is_lost_when_it_wakes_up(train):
    """It ends with a PeerLost of its own, which is no error of the program."""
    run = train("neighbor", "wake")
    run.wait_until_training()
    os.kill(run.pids[FAULTY_RANK], signal.SIGSTOP)
    before = iter(run.process.stderr.readline, "")
    assert any(f"rank {FAULTY_RANK} is lost: silent for" in line for line in before)
    os.kill(run.pids[FAULTY_RANK], signal.SIGCONT)
    run.meet_fault()
    assert run.exit_code == 0, run.err
    assert f"shoal run: rank {FAULTY_RANK} failed with exit code 1 (PeerLost: " in run.err
    assert f"shoal run: finished without rank {FAULTY_RANK}\n" in run.err
    assert_nothing_is_left(run)


RAISING = """
import shoal, torch
group = shoal.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with shoal.from_args(group).attach(model, optimizer):
    for _ in range(5):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    raise ValueError(f"boom on rank {group.rank}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(4))
@pytest.mark.parametrize("body", [RAISING, "import torch\nimport nowhere_to_be_found"])
def test_workers_that_raise_at_once_show_one_traceback(shoal_run, write, body, attempt):
    """Some are ended while they print, or end while others do; before `shoal.init()` and in training."""
    process = shoal_run("-np", 3, write(body))
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1, err
    assert err.count("Traceback (most recent call last)") == 1, err
    said = [line for line in err.splitlines() if line.startswith("shoal run: ")]
    assert re.fullmatch(r"shoal run: rank \d failed with exit code 1", said[0]), err
    assert all("failed with the same error: " in line or "PeerLost" in line for line in said[1:]), err


@pytest.mark.slow
def test_two_runs_at_once_fail_each_in_its_own_way(train):
    first, second = train("neighbor", "kill", num_workers=3), train("all-reduce", "stop", num_workers=2)
    first.wait_until_training()
    second.wait_until_training()
    second.meet_fault()
    assert_right(second)
    assert all(map(is_running, first.pids + first.children))
    first.meet_fault()
    assert_right(first)


def test_training_goes_on_in_a_file_when_shared_memory_is_full(shoal_run):
    process = shoal_run("-np", 2, PROGRAM, "full")
    out, complaint = process.communicate(timeout=60)
    assert process.returncode == 0, complaint
    assert out.count(f"{STEPS_AFTER} steps without []") == 2
    assert "shared memory: /dev/shm (" in complaint
    assert "is used instead" in complaint
    assert "[1]" not in complaint
