"""Runs that meet checkpoints that are damaged, half written, left behind, or written by an earlier Shoal."""

import contextlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from shoal.data import shard
from shoal.group.solo import SoloGroup
from shoal.strategies import make_strategy
from workers import SOURCE

WITHOUT_CHECKSUM = Path(__file__).parent / "checkpoint_format_1"
"""Of two workers after three steps under `neighbor`, written before manifests had a checksum."""


def flipped(content, position):
    """The same bytes but for one bit."""
    damaged = bytearray(content)
    damaged[position // 8] ^= 1 << position % 8
    return bytes(damaged)


def resumes(group, arguments):
    """Resume; what was told, where it is, its weights, and the rest of the epoch."""
    told = []
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loader = shard(DataLoader(TensorDataset(torch.arange(12.0).view(12, 1))), group)
    strategy = make_strategy(group, "neighbor", topology="ring", local_steps=2)
    handler = Listening(told)
    logging.getLogger("shoal.strategies").addHandler(handler)
    try:
        strategy.load(arguments["folder"], loaders=[loader])
        with strategy.attach(model, optimizer, stays=True):
            weight = model.weight.tolist()
    finally:
        logging.getLogger("shoal.strategies").removeHandler(handler)
    return {
        "step": strategy.steps,
        "weight": weight,
        "momentum": optimizer.state_dict()["state"][0]["momentum_buffer"].tolist(),
        "rest": [int(item) for (item,) in loader],
        "told": told,
    }


class Listening(logging.Handler):
    def __init__(self, told):
        super().__init__()
        self._told = told

    def emit(self, record):
        self._told.append(record.getMessage())


def test_checkpoints_without_a_checksum_are_still_taken_up(workers):
    path = WITHOUT_CHECKSUM / "step-00000003"
    arguments = {"folder": str(WITHOUT_CHECKSUM)}
    both = workers.run(resumes, 2, arguments)
    for rank, resumed in enumerate(both):
        own = load_file(path / f"workers/rank-{rank}.safetensors")
        assert resumed["step"] == 3
        assert resumed["weight"] == own["tensors.weight"].tolist()
        assert resumed["momentum"] == own["optimizer.state.0.momentum_buffer"].tolist()
    assert sorted(both[0]["rest"] + both[1]["rest"]) == list(range(6, 12))
    (alone,) = workers.run(resumes, 1, arguments, kind="solo")
    assert alone["weight"] == load_file(path / "model.safetensors")["weight"].tolist()
    assert alone["rest"] == list(range(6, 12))


def saves_twice(group, arguments):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = shard(DataLoader(TensorDataset(torch.arange(12.0).view(12, 1))), group)
    strategy = make_strategy(group, "neighbor", topology="ring", local_steps=2)
    with strategy.attach(model, optimizer, stays=True):
        for (item,) in loader:
            optimizer.zero_grad()
            model(item.expand(1, 2)).sum().backward()
            optimizer.step()
            if strategy.steps in (1, 3):
                strategy.save(arguments["folder"], loaders=[loader])


@pytest.mark.parametrize("damage", ["cut", "one bit", "gone"])
def test_all_workers_leave_out_what_is_damaged_for_one(workers, tmp_path, damage):
    arguments = {"folder": str(tmp_path)}
    workers.run(saves_twice, 2, arguments)
    harm(tmp_path / "step-00000003" / "workers" / "rank-1.safetensors", damage)
    before = workers.run(resumes, 2, arguments)
    for rank, resumed in enumerate(before):
        own = load_file(tmp_path / f"step-00000001/workers/rank-{rank}.safetensors")
        assert resumed["step"] == 1
        assert resumed["weight"] == own["tensors.weight"].tolist()
    said = [line for resumed in before for line in resumed["told"] if "left out" in line]
    assert len(said) == 1
    assert "step-00000003 is left out" in said[0]
    assert "(rank 1)" in said[0]
    # the one before it, too: then the common part of the newest is better than nothing
    harm(tmp_path / "step-00000001" / "workers" / "rank-0.json", damage)
    common = load_file(tmp_path / "step-00000003" / "model.safetensors")
    for resumed in workers.run(resumes, 2, arguments):
        assert resumed["step"] == 3
        assert resumed["weight"] == common["weight"].tolist()


def harm(path, damage):
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-3] if damage == "cut" else flipped(content, 4 * len(content)))


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o002])
def test_all_files_of_a_checkpoint_follow_the_umask(tmp_path, mask):
    earlier = os.umask(mask)
    try:
        model = torch.nn.Linear(2, 2)
        strategy = make_strategy(SoloGroup(), "all-reduce")
        with strategy.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)):
            path = strategy.save(tmp_path / "run")
    finally:
        os.umask(earlier)
    assert {one.stat().st_mode & 0o777 for one in path.rglob("*") if one.is_file()} == {0o666 & ~mask}
    folders = [tmp_path / "run", path, path / "workers"]
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o777 & ~mask}


SAVE_AND_STOP = """
import sys, time
from pathlib import Path
import torch
from shoal.tensors.checkpoint import CheckpointWriter

writer = CheckpointWriter.begin(Path(sys.argv[1]), 7)
writer.write_tensors("model", {"x": torch.zeros(4)})
print(writer.staging.name, flush=True)
time.sleep(600)
"""


def staged(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@contextlib.contextmanager
def processes(*commands):
    """Started together, and killed at the end."""
    with contextlib.ExitStack() as stack:
        begun = [
            subprocess.Popen(
                [sys.executable, "-c", *command],
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": str(SOURCE)},
            )
            for command in commands
        ]
        for process in begun:
            stack.callback(process.stdout.close)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield begun


def test_what_killed_saves_leave_behind_is_cleared_at_the_next_start(tmp_path):
    def attach(*, saves=True):
        """The staging folders that are left when it has started, and when it has saved."""
        model = torch.nn.Linear(1, 1)
        strategy = make_strategy(SoloGroup(), "all-reduce")
        if folder.exists():
            strategy.load(folder)
        with strategy.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)):
            if saves:
                strategy.save(folder)
            return staged(folder)

    folder = tmp_path / "run"
    attach()
    with processes(*[(SAVE_AND_STOP, str(folder))] * 2) as (live, *killed):
        names = [process.stdout.readline().decode().strip() for process in (live, *killed)]
        assert staged(folder) == sorted(names)
        for process in killed:
            process.kill()
            process.wait()
        other = folder / ".step-00000009-deadbeef.1.1-00000000"
        other.mkdir()
        assert attach(saves=False) == sorted([names[0], other.name])
        os.utime(other, (time.time() - 48 * 3600,) * 2)
        assert attach() == [names[0]]
    assert attach() == []
