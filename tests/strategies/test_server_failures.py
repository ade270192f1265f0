"""Workers and servers that are killed, in processes of their own: each case has one process less."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

from shoal.core import PeerLost, Placement
from shoal.group import GroupSettings, open_host_group
from shoal.group.opening import WithServers
from shoal.group.solo import SoloGroup
from shoal.strategies.parameter_server import ParameterServer
from strategies.servers import model_and_optimizer, train

TESTS = Path(__file__).parents[1]
NUM_STEPS = 12
CASES = [({}, 5, 4), ({"mode": "sync"}, 4, 3), ({"mode": "bounded", "staleness": 1}, 3, 2), ({}, 2, 0)]
"""Options, processes (the first is the server), and who is killed in the midst of it."""


def open_part(rank, size, key):
    everybody = open_host_group(Placement(rank, size, rank, size, "test"), GroupSettings(key=key))
    own = SoloGroup()
    if rank and size > 2:
        place = Placement(rank - 1, size - 1, rank - 1, size - 1, "test")
        own = open_host_group(place, GroupSettings(key=f"{key} workers"))
    return WithServers(own, everybody, 1)


class Mortal(torch.optim.SGD):
    """Its process dies in the fifth step."""

    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        if self.num_steps == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def take_part(rank, key, options, size, victim):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shoal.strategies").addHandler(handler)
    seen = {"error": None, "lines": lines}

    def besides(step):
        if rank == victim and step == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    with open_part(rank, size, key) as group:
        strategy = ParameterServer(group, **options)
        if rank == 0:
            strategy.serve(*model_and_optimizer(1, Mortal if victim == 0 else torch.optim.SGD, lr=0.01))
            return seen | {"stats": strategy.stats}
        model, optimizer = model_and_optimizer(rank, lr=0.01)
        try:
            with strategy.attach(model, optimizer):
                train(model, optimizer, rank, range(NUM_STEPS), besides)
        except PeerLost as error:
            seen["error"] = [error.peer, str(error), time.time()]
        return seen | {"steps": strategy.steps}


def main(rank, keys):
    torch.set_num_threads(1)
    for case, key in zip(CASES, keys, strict=True):
        if rank < case[1]:
            print(json.dumps(take_part(rank, key, *case)), flush=True)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_whoever_is_killed_the_others_go_on_or_name_the_server():
    keys = [str(uuid.uuid4()) for _ in CASES]
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}{os.pathsep}{TESTS}"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), *keys], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(CASES[0][1])
    ]
    try:
        killed_s = processes[0].wait(150) and time.time()
        outputs = [process.communicate(timeout=30)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
    killed = [-signal.SIGKILL]
    assert [process.returncode for process in processes] == [*killed, 0, *killed * 3]
    results = [list(map(json.loads, output.splitlines())) for output in outputs]
    for number, (options, size, victim) in enumerate(CASES[:3]):
        server, *workers = (results[rank][number] for rank in range(size) if rank != victim)
        assert all(worker["steps"] == NUM_STEPS and not worker["error"] for worker in workers)
        line = next(line for line in server["lines"] if "goes on without" in line)
        assert f"server 0 goes on without worker {victim - 1}" in line
        assert f"its process {processes[victim].pid} ended" in line
        if options.get("mode") == "sync":
            assert f"with {size - 2} instead of {size - 1} gradients" in line
        assert server["stats"]["num_pushes"] == NUM_STEPS * (size - 2) + 5
        if options.get("mode") == "bounded":
            assert server["stats"]["leads"]["max_behind"] <= 1
    (last,) = results[1][3:]
    peer, message, noticed_s = last["error"]
    assert peer == 0
    assert "parameter server 0 is lost" in message
    assert f"its process {processes[0].pid} ended" in message
    assert noticed_s - killed_s < 10


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
