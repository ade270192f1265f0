"""A worker that is lost: `neighbor` and `pair` name it and finish, the others end with its name.

In the pool it only leaves, and the group is made to call that a loss. In the slow test it is killed; those
workers are processes of that test alone, and the ones that are left meet again in smaller groups.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch

from shoal.core import PeerLost, Placement
from shoal.group import Loss
from shoal.group.base import GroupSettings
from shoal.group.host import open_host_group
from shoal.group.operations import GroupWrapper
from shoal.strategies import make_strategy
from strategies.quadratics import Point, step, targets

TESTS = Path(__file__).parents[1]
CASES = [
    ("neighbor", {"global_average_every": 4}, 5),
    ("pair", {"global_average_every": 8}, 4),
    ("hierarchical", {}, 3),
    ("sma", {}, 2),
]
"""Strategy, options and number of workers, of whom the last is killed in its fifth step."""
NUM_STEPS = 12


class Deserted(GroupWrapper):
    """When the last rank has left, it is lost."""

    @property
    def lost(self):
        last = self.size - 1
        return {} if last in self.members else {last: Loss(last, f"its process {1000 + last} ended")}


def train(group, strategy, options, vanish):
    """What is to be seen of the loss: the error, what was logged, how far training came."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("shoal.strategies")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    strategy = make_strategy(group, strategy, **options)
    error = None
    try:
        with strategy.attach(model, optimizer):
            for number in range(NUM_STEPS):
                if number == 4:
                    group.barrier().wait()  # nobody is ahead, under `pair` either
                    if group.rank == group.size - 1:
                        vanish()
                        return None
                    if strategy.name == "pair":
                        _wait_for_loss(group)
                step(model, optimizer, targets(group.size, NUM_STEPS)[number, group.rank])
    except PeerLost as lost:
        error = [lost.peer, str(lost)]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return {
        "lost": list(group.lost),
        "error": error,
        "lines": lines,
        "rounds": strategy.rounds,
        "value": model.x.tolist(),
    }


def _wait_for_loss(group):
    """Pair averaging would be through before anybody could notice."""
    while not group.lost:
        group.progress()


def check(strategy, survivors, pid):
    last = len(survivors)
    for rank, seen in enumerate(survivors):
        if strategy in ("neighbor", "pair"):
            assert seen["error"] is None
            assert seen["rounds"] == NUM_STEPS
            (line,) = seen["lines"]
            assert f"{strategy} on rank {rank} goes on without rank {last}, lost in round " in line
            assert f"its process {pid} ended" in line
        else:
            assert seen["error"][0] == last
            assert f"rank {last} is lost" in seen["error"][1]
            assert f"its process {pid} ended" in seen["error"][1]
            assert seen["rounds"] in (4, 5)
    if strategy == "neighbor":
        # the last round was a global average of those that are left
        values = torch.tensor([seen["value"] for seen in survivors])
        torch.testing.assert_close(values, values[0].expand_as(values))


def desert(group, arguments):
    return train(Deserted(group), *arguments, vanish=group.leave)


@pytest.mark.parametrize(("strategy", "options", "size"), CASES)
def test_a_worker_is_lost(workers, strategy, options, size):
    *survivors, _ = workers.run(desert, size, [strategy, options])
    check(strategy, survivors, 1000 + size - 1)


def main(rank, keys):
    torch.set_num_threads(1)
    for (strategy, options, size), key in zip(CASES, keys, strict=True):
        if rank < size:
            with open_host_group(Placement(rank, size, rank, size, "test"), GroupSettings(key=key)) as group:
                seen = train(group, strategy, options, lambda: os.kill(os.getpid(), signal.SIGKILL))
                print(json.dumps(seen), flush=True)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_worker_is_killed():
    size = max(size for *_, size in CASES)
    keys = [str(uuid.uuid4()) for _ in CASES]
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}{os.pathsep}{TESTS}"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), *keys], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
    assert [process.returncode for process in processes] == [0] + [-signal.SIGKILL] * (size - 1)
    results = [list(map(json.loads, output.splitlines())) for output in outputs]
    for number, (strategy, _, size) in enumerate(CASES):
        survivors = [results[rank][number] for rank in range(size - 1)]
        assert all(seen["lost"] == [size - 1] for seen in survivors)
        check(strategy, survivors, processes[size - 1].pid)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
