"""Models that FSDP2 (`fully_shard`) shards inside each machine: the workers that hold the same shard.

The workers of a machine hold one model together, and each of them shares its shard with the workers of other
machines that hold the same shard: its *replicas*. They are all that a strategy sees of the group, which stays
one for the operations beneath: all workers issue them in the same order, and on equally many elements
(`tensors.buckets`). What looks at values looks at this worker's shard alone.

A worker that is lost leaves the others of its machine, its *mates*, without their model: they end. The other
machines go on, if their strategy outlives losses.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from typing import Any, Self, cast

import msgspec
import torch

from shoal.core import Deadline, PeerLost
from shoal.core.errors import UsageError
from shoal.group.base import Done, Group, Handle, Loss, Reduction
from shoal.group.functions import Continued, others, share
from shoal.group.operations import GroupWrapper
from shoal.topology import Weights

_NOTICE_S, _NAP_S = 2.0, 0.02
"""How long a loss may take to be noticed after torch's connection to that worker has broken."""
_LABEL_BYTES = 8


class ShardReplicas(GroupWrapper):
    """The group, with this worker's replicas as its only members; ranks and machines stay what they are."""

    def __init__(self, inner: Group, replicas: Sequence[Sequence[int]]) -> None:
        super().__init__(inner)
        self._all_replicas = replicas
        """The ranks that hold each shard, one of each machine, machine by machine."""
        self._shard = next(number for number, ranks in enumerate(replicas) if inner.rank in ranks)
        self._replicas = replicas[self._shard]
        self.mates = [rank for rank in range(self.size) if self.machines[rank] == self.machine]
        """The workers of this machine, which hold the model together."""

    @classmethod
    def find(cls, group: Group, sharded: Sequence[torch.Tensor]) -> Self:
        """Finds the workers that hold the same shards. Collective; UsageError, on all, for other meshes."""
        meshes: list[Any] = [tensor.device_mesh for tensor in cast(Sequence[Any], sharded)]
        coordinates = msgspec.msgpack.encode([mesh.get_coordinate() for mesh in meshes])
        num_shards = max(mesh.size() for mesh in meshes)
        told = share(group, [group.rank, hashlib.sha256(coordinates).digest(), num_shards])
        holders: dict[bytes, list[int]] = {}
        for rank, shard, _ in sorted(told, key=lambda one: (group.machines[one[0]], one[0])):
            holders.setdefault(shard, []).append(rank)
        machines = sorted({group.machines[rank] for rank in group.members})
        is_one_each = all([group.machines[rank] for rank in ranks] == machines for ranks in holders.values())
        if not is_one_each or {size for _, _, size in told} != {len(holders)}:
            num_workers = [list(group.machines).count(machine) for machine in machines]
            raise UsageError(
                f"the meshes of fully_shard ({max(size for _, _, size in told)} workers) are not the "
                f"machines of the group ({', '.join(map(str, num_workers))} workers).",
                cause="every machine holds the whole model once: its workers are one mesh, and there are "
                "equally many on each.",
                next_step="init_device_mesh(device, (group.num_machines, workers per machine), "
                'mesh_dim_names=("machine", "shard")), and fully_shard(model, mesh=mesh["shard"]).',
            )
        return cls(group, sorted(holders.values()))

    @property
    def members(self) -> Sequence[int]:
        """The replicas that are there, with this worker."""
        return [rank for rank in self.inner.members if rank in self._replicas]

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """Takes the mean over the replicas, in place; bits may differ, since each sums in its own order."""
        if op != "mean":
            raise UsageError(f"Shards are averaged; {op} is not supported.", next_step='take op="mean".')
        peers = others(self)
        return self.exchange(tensor, Weights.uniform(peers, peers))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """Copies the replica `root`'s tensor; each shard in turn, from the same machine."""
        place = self._replicas.index(root)
        for shard, ranks in enumerate(self._all_replicas):
            into = tensor if shard == self._shard else torch.empty_like(tensor)
            self.inner.broadcast(into, ranks[place]).wait()
        return Done(tensor)

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Collects the replicas' tensors, out of everybody's."""
        # with its shard, since it cannot be told who is missing when a worker is lost meanwhile
        label = torch.tensor([self._shard]).view(torch.uint8)
        labelled = torch.cat([tensor.detach().cpu().contiguous().view(-1).view(torch.uint8), label])

        def pick(parts: list[torch.Tensor]) -> list[torch.Tensor]:
            own = [part[:-_LABEL_BYTES] for part in parts if torch.equal(part[-_LABEL_BYTES:], label)]
            return [part.view(tensor.dtype).view(-1, *tensor.shape[1:]).to(tensor.device) for part in own]

        return Continued(self.inner.all_gather(labelled), pick)

    def norm(self, part: float) -> float:
        """Combines the norms of all shards, each the same on its replicas, into that of all. Collective."""
        return math.sqrt(sum(share(self.inner, part**2)) / len(self.members))

    def find_lost_mate(self) -> Loss | None:
        """Finds the worker of this machine without which torch's collectives fail; waits a little for it."""
        deadline = Deadline.after(_NOTICE_S * self.patience)
        while not deadline.is_past:
            lost = self.lost
            if found := [lost[rank] for rank in self.mates if rank in lost]:
                return found[0]
            time.sleep(_NAP_S)
        return None


def lost_mate(loss: Loss) -> PeerLost:
    """Makes the error of a worker whose machine has no whole model any more."""
    root = loss.root
    return PeerLost(
        f"rank {root.rank} is lost, which held a part of this machine's model: {root.reason}.",
        peer=root.rank,
        cause="it was killed, stopped, or failed; its own output says more.",
        next_step="look at its output; the machine takes part again when the run is started again.",
    )
