"""Who takes part in a group over several machines, as one worker knows it from its machine and its streams.

The workers of a machine tell each other, in a table that each publishes inside the machine, which workers of
other machines have left, and which operation they could not finish and because of whom: one that passes a
result on has often learned this before those that get the result.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.core import PeerLost
from shoal.group.base import GroupSettings, Loss, Window
from shoal.group.cluster.heartbeat import HeartbeatMonitor, NetworkPartition, find_partition
from shoal.group.host import HostGroup
from shoal.group.solo import SoloGroup

log = logging.getLogger(__name__)
_DEPARTURES = "shoal: departures"


class Members:
    """The ranks of a group, the machines that they are on, and which of them are gone."""

    def __init__(
        self,
        machines: Sequence[Sequence[int]],
        local: HostGroup | SoloGroup,
        monitor: HeartbeatMonitor,
        settings: GroupSettings,
    ) -> None:
        self.rank = monitor.rank
        self.size = sum(map(len, machines))
        self.ranks_on = [list(ranks) for ranks in machines]
        """The ranks of each machine."""
        where = {rank: index for index, ranks in enumerate(machines) for rank in ranks}
        self.machines = [where[rank] for rank in range(self.size)]
        """The machine of each rank."""
        self.machine = where[self.rank]
        self.mates = self.ranks_on[self.machine]
        """The ranks of this machine; a rank's place among them is its rank in the machine's own group."""
        self._local = local
        self._monitor = monitor
        self._lost: dict[int, Loss] = {}
        self._silence_s = settings.silence_s
        self._on_split = settings.on_split
        self._judged: Mapping[int, Loss] = monitor.lost
        """The losses for which it is settled which side of a cut network this worker is on."""
        self._said: Sequence[int] = ()
        """The silent ranks that were spoken of last."""
        self.split: Exception | None = None
        """Why this worker stops, if it is on the wrong side of a cut network; `judge_split` finds out."""
        self._own_table: torch.Tensor | None = None
        self._window: Window | None = None
        self._tables: dict[int, Any] = {}
        """For each mate's place: by rank, one more than the last operation in which that rank takes part; and
        behind them the number of an operation that the mate could not finish, and one more than the rank
        that was to blame."""
        if isinstance(local, HostGroup):
            self._own_table = local.empty(self.size + 2, torch.int64)
            self._window = local.window(_DEPARTURES, self.size + 2, torch.int64, sources=())
            self._window.publish(self._own_table, 0)

    def read_tables(self) -> None:
        """Finds the tables of this machine's workers, all of which have published theirs."""
        for place, rank in enumerate(self.mates):
            if self._window is not None and rank != self.rank:
                found = self._window.fetch(place).wait()
                if found is not None:
                    self._tables[place] = found.tensor.numpy()

    def place_of(self, rank: int) -> int | None:
        """Gives a rank's place inside this machine; None for those of others."""
        return self.mates.index(rank) if rank in self.mates else None

    def present(self, seq: int) -> list[int]:
        """Lists the ranks that take part in an operation that has not begun."""
        inside = [self.mates[place] for place in self._local.members]
        outside = [
            rank
            for rank in range(self.size)
            if self.machines[rank] != self.machine and not self.is_gone(rank, seq)
        ]
        return sorted(inside + outside)

    # --- losses ---

    @property
    def lost(self) -> Mapping[int, Loss]:
        """The peers that ended or fell silent without having left."""
        inside = tuple(self._local.lost.items())
        found = [dataclasses.replace(loss, rank=self.mates[place]) for place, loss in inside]
        for loss in (*found, *tuple(self._monitor.lost.values())):
            self._lost.setdefault(loss.rank, loss)
        return self._lost

    def first_loss(self) -> Loss | None:
        """Gives the loss of anybody, where a loss ends every operation."""
        return None if self._local.should_survive else next(iter(self.lost.values()), None)

    def loss(self, rank: int) -> Loss | None:
        """Tells why a rank of another machine is lost, if it is."""
        return self._monitor.lost.get(rank)

    def has_left(self, rank: int, seq: int) -> bool:
        """Tells whether a rank of another machine left in order before an operation."""
        if self._monitor.left.get(rank, seq) < seq:
            return True
        return any(0 < table[rank] <= seq for table in self._tables.values())

    def is_gone(self, rank: int, seq: int) -> bool:
        """Tells whether a rank of another machine takes no part in an operation."""
        return rank in self._monitor.lost or self.has_left(rank, seq)

    def loss_on(self, machine: int) -> Loss:
        """Tells why a machine that took part gives nothing more."""
        ranks = self.ranks_on[machine]
        losses = [loss for rank in ranks if (loss := self.loss(rank)) is not None]
        left = Loss(ranks[0], "it left in the middle of an operation")
        return self.first_loss() or next(iter(losses), left)

    def error_of_absence(self, seq: int) -> PeerLost | None:
        """Gives the error of somebody who is lost, or has left before an operation that needs everybody."""
        for loss in self.lost.values():
            return loss.error()
        there = self.present(seq)
        for rank in range(self.size):
            if rank not in there:
                return PeerLost(
                    f"rank {rank} has left the group, and torch.distributed cannot go on without it.",
                    peer=rank,
                    next_step="let all workers take the same number of steps.",
                )
        return None

    # --- what workers of this machine tell each other ---

    def tell_departures(self) -> None:
        """Tells the machine's workers who has left elsewhere, before they get a result from this one."""
        if self._own_table is not None:
            for rank, after in self._monitor.left.items():
                self._own_table[rank] = after + 1

    def tell_failure(self, seq: int, blamed: int | None) -> None:
        """Tells the machine's workers that this one could not finish an operation, and because of whom."""
        if self._own_table is not None:
            self._own_table[self.size + 1] = 0 if blamed is None else blamed + 1
            self._own_table[self.size] = seq

    def has_failed(self, place: int, seq: int) -> bool:
        """Tells whether a worker of this machine says that it could not finish an operation."""
        return place in self._tables and int(self._tables[place][self.size]) == seq

    def failure_of(self, place: int) -> PeerLost:
        """Gives the error of those for whom a worker of this machine spoke that was lost, or failed."""
        rank = self.mates[place]
        blamed = int(self._tables[place][self.size + 1]) - 1 if place in self._tables else -1
        if blamed >= 0:
            return (self.lost.get(blamed) or Loss(blamed, "it failed")).error()
        return (self.lost.get(rank) or Loss(rank, "it failed in the middle of an operation")).error()

    # --- cut networks ---

    def judge_split(self, seq: int) -> bool:
        """Settles on which side of a network this worker is, if it was cut; tells whether it stops now."""
        if self._monitor.lost is self._judged or self.is_undecided(seq):
            return False
        self._judged = self._monitor.lost
        found = self._find_partition(seq)
        if found is None or self._on_split == "ignore":
            return False
        is_allowed = self._on_split == "continue"
        if found.should_stop and not is_allowed:
            self.split = found.error()
            return True
        if found.is_worth_saying and found.silent != self._said:
            self._said = found.silent
            log.warning("rank %d: %s", self.rank, found.line(is_allowed=is_allowed))
        return False

    def is_undecided(self, seq: int) -> bool:
        """Tells whether somebody else seems to fall silent too, so that it is not clear yet who is where."""
        return self._find_partition(seq) is not None and any(
            self._monitor.silent_s(rank) > self._silence_s / 2
            for rank in self.present(seq)
            if self.machines[rank] != self.machine
        )

    def _find_partition(self, seq: int) -> NetworkPartition | None:
        left_at_s = dict(self._monitor.left_at_s)
        if isinstance(self._local, HostGroup):
            left_at_s |= {self.mates[place]: at_s for place, at_s in self._local.left_at_s.items()}
        return find_partition(self.lost.values(), self.present(seq), left_at_s, self._silence_s)
