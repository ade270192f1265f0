"""A worker that trains until it has lost a peer, and then some steps more; `fault` is what it does itself.

Its DataLoader has two workers. It prints its processes when training is under way, and a line at its end.
"""

import errno
import multiprocessing
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import shoal

FAULTY_RANK = 1
STEPS_BEFORE = 5
STEPS_AFTER = 20


class Numbers(Dataset):
    """More examples than any run takes, and not for nothing: two runs share the cores."""

    def __len__(self):
        return 10**7

    def __getitem__(self, index):
        time.sleep(0.005)
        x = torch.full((8,), index % 7 / 7)
        return x, x.sum(0, keepdim=True)


def fill_memory():
    """/dev/shm has no room from now on."""
    allocate = os.posix_fallocate

    def posix_fallocate(descriptor, offset, size):
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to("/dev/shm"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, offset, size)

    os.posix_fallocate = posix_fallocate


def fail(fault):
    if fault == "exception":
        raise ValueError("boom")
    if fault == "code":
        sys.exit(7)
    if fault == "early":
        sys.exit(0)
    if fault == "abrupt":
        os._exit(0)


def main(fault=""):
    if fault == "full":
        fill_memory()
    group = shoal.init()
    torch.manual_seed(group.rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2)
    num_steps = num_steps_after = 0
    with shoal.from_args(group).attach(model, optimizer):
        for x, y in shoal.shard(loader, group):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            num_steps += 1
            if num_steps == STEPS_BEFORE:
                children = [child.pid for child in multiprocessing.active_children()]
                print("training", os.getpid(), *children, flush=True)
            if num_steps == 2 * STEPS_BEFORE and group.rank == FAULTY_RANK:
                fail(fault)
            num_steps_after += (
                num_steps > 2 * STEPS_BEFORE if fault in ("full", "early") else bool(group.lost)
            )
            if num_steps_after == STEPS_AFTER:
                break
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    print(f"{num_steps_after} steps without {list(group.lost)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
