"""torch.distributed for the members of a group, where something of torch's own needs it.

Nothing of Shoal's computes by it, but NCCL between GPUs and the strategies that run torch's own code.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.core.errors import UsageError
from shoal.group.base import Group
from shoal.group.functions import share
from shoal.group.operations import GroupWrapper

_ended: deque[Any] = deque(maxlen=4)
"""Process groups that are over, and are let go of only when others have come after them."""


def open_process_group(group: Group, device: torch.device, stack: contextlib.ExitStack) -> None:
    """Use torch.distributed as the user has set it up, or set it up until the stack closes. Collective."""
    backend = _backend(group, device)  # which may bring it up: the group may be one of torch.distributed's
    if is_world_open(group.rank, group.size):
        return
    with contextlib.ExitStack() as until_met:
        # gloo connects at once, NCCL with the first operation
        store = (stack if backend == "nccl" else until_met).enter_context(_store(group))
        dist.init_process_group(backend, store=store, world_size=group.size, rank=group.rank)
        stack.callback(destroy_world)
        group.barrier().wait()


def _backend(group: Group, device: torch.device) -> str:
    """NCCL refuses workers that share a GPU. Collective."""
    is_gpu = device.type == "cuda" and dist.is_nccl_available()
    if is_gpu:
        torch.cuda.set_device(device)
    own = str(torch.cuda.get_device_properties(device).uuid) if is_gpu else ""
    gpus = share(group, own)
    return "nccl" if all(gpus) and len({*gpus}) == group.size else "gloo"


@contextlib.contextmanager
def _store(group: Group) -> Iterator[Any]:
    """Where torch's workers find each other: the group's own store over machines, else a file."""
    inner = group
    while isinstance(inner, GroupWrapper):
        inner = inner.inner
    common = getattr(inner, "torch_store", None)
    if common is not None:
        name = share(group, secrets.token_hex(8))[0]
        yield dist.PrefixStore(f"ddp-{name}", common)  # type: ignore[attr-defined]
        return
    folder = Path(tempfile.mkdtemp(prefix="shoal-ddp-")) if group.rank == 0 else None
    try:
        path = next(path for path in share(group, str(folder) if folder else "") if path)
        yield dist.FileStore(f"{path}/store", group.size)  # type: ignore[attr-defined]
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def is_world_open(rank: int, size: int) -> bool:
    """Tells whether the program has brought torch.distributed up; UsageError if its ranks are others."""
    is_open = dist.is_initialized()
    if is_open and (dist.get_rank(), dist.get_world_size()) != (rank, size):
        raise UsageError(
            f"rank {rank} of {size} is rank {dist.get_rank()} of {dist.get_world_size()} in "
            "torch.distributed.",
            next_step="let the group and torch.distributed have the same ranks.",
        )
    return is_open


def destroy_world() -> None:
    """Does what torch's `destroy_process_group` does, without the deadlock that this can be.

    When the last reference to a process group goes, torch waits for gloo's threads, and holds the
    interpreter's lock meanwhile, for which a thread may wait that has just done its last operation. So a
    group is let go of only when others have come after it.
    """
    _ended.append(dist.group.WORLD)
    dist.destroy_process_group()
