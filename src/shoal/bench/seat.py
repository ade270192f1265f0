"""A worker of a crew: its place, and the groups that it opens."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from torch import distributed

from shoal.core.placement import Placement
from shoal.group.base import Group
from shoal.group.host import open_host_group
from shoal.group.servers import WithServers
from shoal.group.settings import GroupSettings
from shoal.group.solo import SoloGroup

USUAL_SWITCH_INTERVAL_S = 0.005
_TIMEOUT_S = 120.0


class Seat(msgspec.Struct, frozen=True):
    """One worker's place among `size` on this machine."""

    rank: int
    """-1 for a helper, which is beside them."""
    size: int
    key: str
    """Of this crew."""
    folder: str
    """For files that the crew shares; it goes with the crew."""

    def take(self) -> None:
        """Make this process what a user's worker is: one thread that computes, and Python's own pace."""
        sys.setswitchinterval(USUAL_SWITCH_INTERVAL_S)
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)  # momentum that fades away would slow down one model before another

    def open_group(self, name: str, workers_per_machine: int | None = None) -> Group:
        """The group of this crew that has this name."""
        placement = Placement(self.rank, self.size, self.rank, self.size, "bench")
        settings = GroupSettings(
            f"{self.key}-{name}", timeout_s=_TIMEOUT_S, workers_per_machine=workers_per_machine
        )
        return open_host_group(placement, settings)

    def open_with_servers(self, name: str, num_servers: int) -> Group:
        """As `open_group`, with servers beside the workers."""
        return self._beside_servers(name, num_servers, num_servers + self.rank, self.open_group(name))

    def open_as_server(self, name: str, num_servers: int, server: int) -> Group:
        """What `open_with_servers` opens on the workers, on one of the servers."""
        return self._beside_servers(name, num_servers, server, SoloGroup())

    def _beside_servers(self, name: str, num_servers: int, rank: int, own: Group) -> Group:
        size = num_servers + self.size
        settings = GroupSettings(f"{self.key}-{name}-servers", timeout_s=_TIMEOUT_S)
        everybody = open_host_group(Placement(rank, size, rank, size, "bench"), settings)
        return WithServers(own, everybody, num_servers)

    @contextlib.contextmanager
    def gloo(self) -> Iterator[None]:
        """torch.distributed over gloo, through loopback, for as long as the block lasts."""
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        meeting = (Path(self.folder) / "gloo").as_uri()
        distributed.init_process_group("gloo", meeting, rank=self.rank, world_size=self.size)
        try:
            yield
        finally:
            distributed.destroy_process_group()
