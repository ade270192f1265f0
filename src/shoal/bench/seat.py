"""A worker of a crew: the device that it computes on, and the groups that it opens."""

from __future__ import annotations

import abc
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import distributed

from shoal.bench.crew import Place
from shoal.core import Deadline, UsageError
from shoal.core.placement import Placement
from shoal.core.run_options import RunOptions
from shoal.group.base import Group, GroupSettings
from shoal.group.cluster.collectives import destroy_world
from shoal.group.cluster.rendezvous import Rendezvous, WorkerAddress
from shoal.group.host import open_host_group
from shoal.group.opening import WithServers, open_group
from shoal.group.solo import SoloGroup

stores: Any = distributed  # whose stubs leave the stores out
USUAL_SWITCH_INTERVAL_S = 0.005
_TIMEOUT_S = 120.0

CPU = torch.device("cpu")
Backend = Literal["gloo", "nccl"]


class Seat(abc.ABC):
    """One worker's place among `size`."""

    def __init__(self, place: Place) -> None:
        self.rank = place.rank
        self.size = place.size
        self._key = place.key

    @property
    @abc.abstractmethod
    def local_rank(self) -> int:
        """Among the workers of this machine."""

    @abc.abstractmethod
    def _open(self, name: str, size: int, settings: GroupSettings) -> Group:
        """A group of the first `size` workers."""

    def open_group(
        self,
        name: str,
        *,
        among: int | None = None,
        workers_per_machine: int | None = None,
        backend: Backend | None = None,
    ) -> Group:
        """The group of the crew's first `among` workers, or of all; each name is used once. Collective."""
        settings = GroupSettings(
            f"{self._key} {name}",
            timeout_s=_TIMEOUT_S,
            workers_per_machine=workers_per_machine,
            backend=backend,
        )
        return self._open(name, among or self.size, settings)

    def open_between_machines(self, name: str, workers_per_machine: int, *, is_encrypted: bool) -> Group:
        """The group of all, of whom those of different machines talk over streams, encrypted or not.

        Workers that share this machine count as those of several, so many on each. Collective.
        """
        settings = GroupSettings(
            f"{self._key} {name}",
            timeout_s=_TIMEOUT_S,
            workers_per_machine=workers_per_machine,
            encrypt="always" if is_encrypted else "never",
        )
        return self._open_streams(name, settings)

    @abc.abstractmethod
    def _open_streams(self, name: str, settings: GroupSettings) -> Group:
        """A group of all workers on the machines that the settings say."""

    @abc.abstractmethod
    def gloo(self) -> contextlib.AbstractContextManager[None]:
        """torch.distributed over gloo, among all workers, for as long as the block lasts."""

    def take(self) -> None:
        """Make this process what a user's worker is: one thread that computes, and Python's own pace."""
        sys.setswitchinterval(USUAL_SWITCH_INTERVAL_S)
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)  # momentum that fades away would slow down one model before another

    def device(self, kind: str) -> torch.device:
        """Where this worker computes, 'cpu' or 'cuda': GPUs go by the rank on this machine, in turn.

        Workers share GPUs where there are fewer of them. UsageError where there is none.
        """
        if kind == "cpu":
            return CPU
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if num_gpus == 0:
            raise UsageError(
                f"Worker {self.rank} is to compute on a GPU, and torch finds none on its machine.",
                next_step="give --device cpu, or see what `shoal doctor` says there.",
            )
        device = torch.device("cuda", self.local_rank % num_gpus)
        torch.cuda.set_device(device)
        return device

    def open_with_servers(self, name: str, num_servers: int) -> Group:
        """As `open_group`, with servers beside the workers."""
        raise UsageError(
            "Parameter servers are started beside workers of this machine alone.",
            next_step="leave parameter-server and staleness-aware out, or start servers and workers by hand: "
            "--ps-hosts, --worker-hosts, --job-name and --task-index.",
        )

    def open_as_server(self, name: str, num_servers: int, server: int) -> Group:
        """What `open_with_servers` opens on the workers, on one of the servers."""
        return self.open_with_servers(name, num_servers)


class HostSeat(Seat):
    """A child of the benchmark's own process, as all others of its crew."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._folder = Path(place.folder)

    @property
    def local_rank(self) -> int:
        """All are on one machine."""
        return self.rank

    def _open(self, name: str, size: int, settings: GroupSettings) -> Group:
        """In shared memory; over sockets if the machine is split into several, or a backend is asked for."""
        placement = Placement(self.rank, size, self.rank, size, "bench")
        if settings.backend is not None or size > (settings.workers_per_machine or size):
            return self._open_cluster(name, placement, settings)
        return SoloGroup() if size == 1 else open_host_group(placement, settings)

    def _open_streams(self, name: str, settings: GroupSettings) -> Group:
        placement = Placement(self.rank, self.size, self.rank, self.size, "bench")
        return self._open_cluster(name, placement, settings)

    def _open_cluster(self, name: str, placement: Placement, settings: GroupSettings) -> Group:
        from shoal.group.cluster import open_cluster_group

        file = str(self._folder / f"meeting-{name}-{placement.size}")
        meeting = Rendezvous(stores.FileStore(file, placement.size), placement.rank, placement.size)
        here = WorkerAddress.here(placement, workers_per_machine=settings.workers_per_machine)
        everybody = meeting.meet(here, Deadline.after(_TIMEOUT_S))
        return open_cluster_group(placement, settings, everybody, meeting)

    def open_with_servers(self, name: str, num_servers: int) -> Group:
        """As `open_group`, with servers beside the workers."""
        return self._beside_servers(name, num_servers, num_servers + self.rank, self.open_group(name))

    def open_as_server(self, name: str, num_servers: int, server: int) -> Group:
        """What `open_with_servers` opens on the workers, on one of the servers."""
        return self._beside_servers(name, num_servers, server, SoloGroup())

    def _beside_servers(self, name: str, num_servers: int, rank: int, own: Group) -> Group:
        size = num_servers + self.size
        settings = GroupSettings(f"{self._key}-{name}-servers", timeout_s=_TIMEOUT_S)
        everybody = open_host_group(Placement(rank, size, rank, size, "bench"), settings)
        return WithServers(own, everybody, num_servers)

    @contextlib.contextmanager
    def gloo(self) -> Iterator[None]:
        """torch.distributed over gloo, through loopback, for as long as the block lasts."""
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        meeting = (self._folder / "gloo").as_uri()
        distributed.init_process_group("gloo", meeting, rank=self.rank, world_size=self.size)
        try:
            yield
        finally:
            destroy_world()


class LaunchedSeat(Seat):
    """A process that a launcher has started, perhaps on another machine than its mates."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._machines = place.machines

    @property
    def local_rank(self) -> int:
        """By the machines that the ranks are on."""
        return self._mates(self.size).index(self.rank)

    def _open(self, name: str, size: int, settings: GroupSettings) -> Group:
        """As `shoal.init()` opens it."""
        asked = RunOptions.from_environment()
        settings = msgspec.structs.replace(
            settings, network_interface=asked.network_interface, all_reduce=asked.all_reduce
        )
        if settings.encrypt == "auto":
            settings = msgspec.structs.replace(settings, encrypt=asked.encrypt)
        return open_group(self._placement(size), settings, settings.key)

    def _open_streams(self, name: str, settings: GroupSettings) -> Group:
        return self._open(name, self.size, settings)

    @contextlib.contextmanager
    def gloo(self) -> Iterator[None]:
        """torch.distributed over gloo, through the interface that a group before it has found."""
        meeting = Rendezvous.open(self._placement(self.size), Deadline.after(_TIMEOUT_S), f"{self._key} gloo")
        distributed.init_process_group("gloo", store=meeting.store, rank=self.rank, world_size=self.size)
        try:
            yield
        finally:
            destroy_world()

    def _placement(self, size: int) -> Placement:
        mates = self._mates(size)
        placed = Placement.from_environment()
        return Placement(
            self.rank,
            size,
            mates.index(self.rank),
            len(mates),
            placed.source,
            placed.rendezvous,
            self._machines[self.rank],
        )

    def _mates(self, size: int) -> list[int]:
        """Those of the first `size` ranks that are on this machine."""
        here = self._machines[self.rank]
        return [rank for rank in range(size) if self._machines[rank] == here]


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that this process has told it to; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seat_of(place: Place) -> Seat:
    """Where this worker sits."""
    return HostSeat(place) if place.folder else LaunchedSeat(place)
