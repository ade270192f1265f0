"""Workers that are killed or stopped at random moments of training, under every strategy.

The moments are drawn from a seed. Fifty losses of each kind, about an hour on two cores:
`SHOAL_NUM_LOSSES=50 pytest -m slow tests/launch/test_random_losses.py`; `SHOAL_LOSS_SEED` draws others.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import time

import pytest

from shoal.group.base import SILENCE_S
from shoal.strategies import BUILT_IN

NUM_LOSSES = int(os.environ.get("SHOAL_NUM_LOSSES", "3"))
SEED = os.environ.get("SHOAL_LOSS_SEED", "19")
NAMES = sorted(name for name in BUILT_IN if name not in ("horovod", "swarm"))
LIMIT_S = 120.0
"""Of a run from its loss on, so that one which hangs is known for that on a loaded machine, too."""
PROGRAM = """
import torch
import shoal

group = shoal.init()
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
if group.role == "server":
    print("here", rank, os.getpid(), flush=True)
num_steps_after = 0
with shoal.from_args(group).attach(model, optimizer):
    for step in range(10**9):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if step == int(sys.argv[1]):
            print("here", rank, os.getpid(), flush=True)
        num_steps_after += bool(group.lost) or (group.everybody is not None and bool(group.everybody.lost))
        if num_steps_after == 10:
            break
print("finished")
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="workers are started on POSIX only"),
    pytest.mark.timeout(2 * LIMIT_S),
]


def draw(fault, index):
    """A strategy, how many workers and servers it has, which rank is lost, when, and the patience."""
    names = random.Random(f"{SEED} {fault}").sample(NAMES, len(NAMES))
    dice = random.Random(f"{SEED} {fault} {index}")
    strategy = names[index % len(names)]
    num_servers = 1 if strategy in ("parameter-server", "staleness-aware") else 0
    num_workers = 4 if strategy == "hierarchical" else dice.randint(2, 4)
    lost = dice.randrange(num_workers + num_servers)
    patience = 1.0 if fault == "stop" else 3.0  # a process waits for seconds for a core of a busy machine
    return strategy, num_workers, num_servers, lost, dice.randint(1, 60), dice.uniform(0, 0.05), patience


def wait_until_there(process, rank, num_ranks):
    """Until this rank has said that it is there, and until a worker has for a server; the rank's process."""
    pids = {}
    while rank not in pids or (rank == 0 and num_ranks > 1 and len(pids) < 2):
        line = process.stdout.readline()
        assert line, process.stderr.read()
        if found := re.match(r"\[\d+\] here (\d+) (\d+)", line):
            pids[int(found[1])] = int(found[2])
    return pids[rank]


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("index", range(NUM_LOSSES))
def test_a_worker_is_lost_at_random(shoal_run, write, fault, index):
    strategy, num_workers, num_servers, lost, step, wait_s, patience = draw(fault, index)
    words = ["--strategy", strategy, "--num-servers", num_servers, "--patience", patience]
    words += ["--workers-per-machine", 2] if strategy == "hierarchical" else []
    process = shoal_run("-np", num_workers, *words, write(PROGRAM), step)
    print(f"{fault} of rank {lost} of {num_workers} and {num_servers} under {strategy}, step {step}")
    pid = wait_until_there(process, lost, num_workers + num_servers)
    time.sleep(wait_s)  # a moment within a step or between two
    number = signal.SIGKILL if fault == "kill" else signal.SIGSTOP
    os.kill(pid, number)
    try:
        out, said = process.communicate(timeout=LIMIT_S + SILENCE_S * patience)
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            out, said = process.communicate(timeout=20)
        pytest.fail(f"It hangs. {out} {said}")
    survives = BUILT_IN[strategy].survives_loss and lost >= num_servers
    assert process.returncode == (0 if survives else 128 + number), said
    how = "killed" if fault == "kill" else "stopped"
    assert f"shoal run: rank {lost} was {how} by signal {number:d} ({number.name})" in said
    lines = [
        line for line in said.splitlines() if line.startswith("shoal run: rank") and "after that" not in line
    ]
    assert all(line.startswith(f"shoal run: rank {lost} ") for line in lines), said
    # one that fails because of the loss may be lost in turn, and says whose loss it follows from
    directly = re.sub(rf"rank \d+ is lost: it failed because rank {lost} is lost", "", said)
    named = {int(rank) for rank in re.findall(r"\brank (\d+) is lost", directly)}
    assert named <= {lost - num_servers, lost}, said
    if survives:
        assert out.count("finished") >= num_workers - 1, said
        assert f"shoal run: finished without rank {lost}\n" in said
    else:
        assert "Traceback" not in said
