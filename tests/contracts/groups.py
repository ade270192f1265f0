"""Every kind of group, and how a worker opens one.

A new group adds a line to KINDS and passes `test_group.py`.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from shoal.core import Deadline, Placement
from shoal.group.base import GroupSettings
from shoal.group.operations import GroupWrapper
from shoal.group.solo import SoloGroup
from shoal.group.wrappers import Faulty, Metered, Shaped, Traced
from shoal.report.timeline import Timeline
from shoal.transport import FaultScript, Profile

NEAR = Profile.parse("[ways.default]\ndelay_ms = 0.05\nmbit_s = 50000")


@dataclass(frozen=True)
class Kind:
    """A way to open a group, and the sizes that its contract is tested with."""

    open: Callable
    """(rank, size, key, settings of the group) to a group"""
    sizes: tuple[int, ...]


def _host(rank, size, key, **settings):
    from shoal.group.host import open_host_group

    return open_host_group(Placement(rank, size, rank, size, "test"), GroupSettings(key=key, **settings))


class _OnDevice(GroupWrapper):
    """Takes memory on a device where nothing else is said."""

    def __init__(self, inner, device):
        super().__init__(inner)
        self._device = device

    def empty(self, *what, device=None):
        return self.inner.empty(*what, device=device or self._device)

    def window(self, *what, sources=None, device=None):
        return self.inner.window(*what, sources=sources, device=device or self._device)

    def barrier(self):
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # a barrier orders processors, not GPUs
        return self.inner.barrier()


def _on_gpu(rank, size, key, is_one=True, **settings):
    """All tensors on a GPU: a real one where SHOAL_TEST_DEVICE says so, else one made of a thread."""
    from group.fake_device import FakeDevice
    from shoal.group.host import open_host_group

    placement = Placement(rank, size, rank, size, "test")
    device = torch.device(os.environ.get("SHOAL_TEST_DEVICE", "meta"))
    if device.type == "cuda":
        torch.set_default_device(device)
        group = open_host_group(placement, GroupSettings(key=key, **settings))
    else:
        identity = "fake" if is_one else f"fake {rank}"
        make = partial(FakeDevice, seed=rank, identity=identity, is_everything=True)
        group = open_host_group(placement, GroupSettings(key=key, **settings), lambda _: make())
        group.empty(1, device=device)
    return _OnDevice(group, device)


def _torch(rank, size, key, workers_per_machine=None, **settings):
    """Two workers a machine, or one where there are only two; the store is a file that all know."""
    from torch.distributed import FileStore

    from shoal.group.cluster import open_cluster_group
    from shoal.group.cluster.rendezvous import Rendezvous, WorkerAddress

    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    # beside the workers' state, whose folder goes with them: torch leaves the file of those that are killed
    folder = Path(os.environ["SHOAL_STATE"]).parent
    store = FileStore(str(folder / f"store-{digest}"), size)
    rendezvous = Rendezvous(store, rank, size)
    placement = Placement(rank, size, rank, size, "test")
    own = WorkerAddress.here(placement, None, workers_per_machine or (2 if size > 2 else 1))
    addresses = rendezvous.meet(own, Deadline.after(30))
    return open_cluster_group(placement, GroupSettings(key=key, **settings), addresses, rendezvous)


def _solo(rank, size, key):
    assert (rank, size) == (0, 1)
    return SoloGroup()


def _wrapped(wrap):
    return lambda *place, **settings: wrap(_host(*place, **settings))


def _traced(group):
    folder = Path(os.environ["SHOAL_STATE"])
    return Traced(group, Timeline(folder / f"trace.{group.rank}", group.rank, max_events=100))


KINDS = {
    "solo": Kind(_solo, (1,)),
    "host": Kind(_host, (5, 4, 3, 2, 1)),  # the largest first: its workers start at the same time
    "gpu": Kind(_on_gpu, (4, 3, 2)),
    "gpus": Kind(partial(_on_gpu, is_one=False), (3,)),
    "torch": Kind(_torch, (4, 3, 2)),
    "gloo": Kind(partial(_torch, backend="gloo"), (2,)),
    "metered": Kind(_wrapped(Metered), (3,)),
    "shaped": Kind(_wrapped(lambda group: Shaped(group, NEAR)), (3,)),
    "faulty": Kind(_wrapped(lambda group: Faulty(group, FaultScript())), (3,)),
    "traced": Kind(_wrapped(_traced), (3,)),
}
EVERY = [(kind, size) for kind, what in KINDS.items() for size in what.sizes]


def open_group(kind, rank, size, key, **settings):
    """The group of one worker."""
    if os.environ.get("SHOAL_TEST_DEVICE"):
        torch.set_default_device("cpu")  # a group on a GPU may have been opened in this process before
    return KINDS[kind].open(rank, size, key, **settings)
