"""`torchrun --nnodes 1:2`: when a node is lost or comes, all workers restart, and go on where they were.

What they had learned is in the memory of their machines, or in a checkpoint where they keep one.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from shoal.launch.settings import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="ends nodes by signals"),
    pytest.mark.timeout(600),
]
CLUSTER = Path(__file__).parent.parent / "cluster"
PROGRAM = CLUSTER / "growing.py"
LIMIT_S = 200.0


class Nodes:
    """Agents of torchrun with one worker each, and what all their workers print."""

    def __init__(self, folder):
        self._folder = folder
        self.program = [PROGRAM, folder]
        self.variables = {}
        self.num_workers = 1
        self._port = free_port()
        self._lines = []
        self._came = threading.Condition()
        self.agents = []
        self._readers = []

    def train(self, strategy, **options):
        """Lets them train epochs whose examples can be counted."""
        self.program = [CLUSTER / "epochs.py", self._folder, strategy, json.dumps(options)]

    def start(self):
        """Starts one more node."""
        words = [
            "--nnodes",
            "1:2",
            "--nproc-per-node",
            str(self.num_workers),
            "--max-restarts",
            "5",
            "--rdzv-backend",
            "c10d",
        ]
        words += ["--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "sizes"]
        words += ["--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1"]
        words += ["--log-dir", str(self._folder / "logs")]  # else it makes a folder, and leaves it there
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", **self.variables}
        agent = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words, *self.program],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._readers.append(threading.Thread(target=self._read, args=[agent.stdout]))
        self._readers[-1].start()
        self.agents.append(agent)
        return agent

    def wait_for_meeting(self):
        """Until the first node has opened the place where all meet, which must not be lost."""
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            time.sleep(0.1)

    def _read(self, stream):
        with stream:
            for line in stream:
                with self._came:
                    self._lines.append(line)
                    self._came.notify_all()

    def wait_for(self, pattern, num_lines):
        """The numbers in the first so many lines of a kind."""

        def found():
            return [match for line in self._lines if (match := re.search(pattern, line))]

        with self._came:
            assert self._came.wait_for(lambda: len(found()) >= num_lines, LIMIT_S), "".join(self._lines)
        return [int(match[1]) for match in found()]

    def texts(self, pattern):
        """What a pattern finds in each line until now."""
        return [match[1] for line in self._lines if (match := re.search(pattern, line))]

    def close(self):
        """Ends all of them."""
        for agent in self.agents:
            self.lose(agent)
            agent.wait(20)
        for reader in self._readers:
            reader.join(20)

    def lose(self, agent):
        """Takes a node and its worker at once."""
        children = []
        with contextlib.suppress(OSError):  # it has ended
            children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        for pid in [agent.pid, *map(int, children)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def nodes(tmp_path):
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


def left_in_memory():
    """What workers of this user have left in the memory of this machine for those that come after them."""
    return {
        path for place in ("/dev/shm", tempfile.gettempdir()) for path in Path(place).glob("shoal-restart-*")
    }


def test_a_lost_node_and_one_that_comes_need_no_checkpoint(nodes, tmp_path):
    before = left_in_memory()
    nodes.start()
    nodes.wait_for_meeting()
    second = nodes.start()
    nodes.wait_for(r"training \d+ size (2) from 0", 2)
    (tmp_path / "lose").touch()
    (reached,) = nodes.wait_for(r"reached (\d+)", 1)
    nodes.lose(second)
    (alone_from,) = nodes.wait_for(r"training \d+ size 1 from (\d+)", 1)
    assert alone_from >= reached > 0
    nodes.start()
    again_from = nodes.wait_for(r"training \d+ size 2 from ([1-9]\d*)", 2)
    assert len(set(again_from)) == 1
    assert again_from[0] > alone_from
    (tmp_path / "end").touch()
    nodes.wait_for(r"ends .* size (2)", 2)
    assert len(set(nodes.texts(r"ends (\S+) size 2"))) == 1
    nodes.close()
    assert left_in_memory() <= before


def learned(folder):
    """By epoch: the examples of all steps that count, and those of lost workers that may be missing."""
    notes = [json.loads(line) for line in (folder / "learned").read_text().splitlines()]
    began = {}
    for generation, step, _, _ in notes:
        began[generation] = min(step, began.get(generation, step))
    num_epochs, lost = json.loads((folder / "lost.json").read_text())
    seen = [[] for _ in range(num_epochs + 1)]
    for generation, step, epoch, items in notes:
        later = [first for other, first in began.items() if other > generation]
        if step < min(later, default=step + 1):  # else it was dropped, and done again
            seen[epoch] += items
    return seen, [lost.get(str(epoch), []) for epoch in range(num_epochs + 1)]


def num_learned(folder):
    path = folder / "learned"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("strategy", ["all-reduce", "local-sgd"])
def test_every_example_of_an_epoch_comes_once_or_is_listed(nodes, tmp_path, strategy):
    nodes.train(strategy, **({"local_steps": 4} if strategy == "local-sgd" else {}))
    nodes.start()
    nodes.wait_for_meeting()
    second = nodes.start()
    nodes.wait_for(r"training \d+ size (2) from 0", 2)
    while num_learned(tmp_path) < 50:
        time.sleep(0.1)
    nodes.lose(second)
    nodes.wait_for(r"training \d+ size (1) from [1-9]", 1)
    nodes.start()
    nodes.wait_for(r"training \d+ size (2) from [1-9]", 2)
    (tmp_path / "end").touch()
    nodes.wait_for(r"ends .* size (2)", 2)
    nodes.close()
    assert len(set(nodes.texts(r"ends (\S+) size 2"))) == 1
    for seen, lost in zip(*learned(tmp_path), strict=True):
        assert set(seen) | set(lost) == set(range(240))
        assert {item for item in seen if seen.count(item) > 1} <= set(lost)
        assert len(lost) <= (0 if strategy == "all-reduce" else 40)


def test_the_others_of_a_node_keep_what_a_killed_worker_had(nodes, tmp_path):
    nodes.num_workers = 2
    nodes.train("all-reduce")
    nodes.start()
    first, _ = nodes.wait_for(r"training (\d+) size 2 from 0", 2)
    while num_learned(tmp_path) < 50:
        time.sleep(0.1)
    os.kill(first, signal.SIGKILL)
    again_from = nodes.wait_for(r"training \d+ size 2 from ([1-9]\d*)", 2)
    assert again_from[0] == again_from[1] >= 20
    (tmp_path / "end").touch()
    nodes.wait_for(r"ends .* size (2)", 2)
    assert len(set(nodes.texts(r"ends (\S+) size 2"))) == 1
    for seen in learned(tmp_path)[0]:
        assert sorted(seen) == list(range(240))


def test_a_lost_node_and_one_that_comes_change_the_size(nodes, tmp_path):
    nodes.variables = {
        "SHOAL_CHECKPOINT": str(tmp_path / "checkpoint"),
        "SHOAL_CHECKPOINT_EVERY": "10",
    }
    nodes.start()
    nodes.wait_for_meeting()
    second = nodes.start()
    nodes.wait_for(r"training \d+ size (2) from 0", 2)
    while not list((tmp_path / "checkpoint").glob("step-*")):
        time.sleep(0.1)
    nodes.lose(second)
    (alone_from,) = nodes.wait_for(r"training \d+ size 1 from (\d+)", 1)
    assert alone_from >= 10
    nodes.start()
    again_from = nodes.wait_for(r"training \d+ size 2 from ([1-9]\d*)", 2)
    assert len(set(again_from)) == 1
    assert again_from[0] >= alone_from
    (tmp_path / "end").touch()
    nodes.wait_for(r"ends .* size (2)", 2)
