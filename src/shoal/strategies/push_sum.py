"""`push-sum`: stochastic gradient push (Assran et al. 2019), asynchronous, on directed graphs.

Every worker has a share of a common mass. It pushes parts of its parameters, times their mass, to others, and
adds what comes; the parameters that train are the sum divided by its mass. So they agree on the mean of all,
whoever pushes how often to whom. What is not pushed is kept, what is pushed arrives once: the total stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, ClassVar

from shoal.group import Group
from shoal.group.kernels import mix_into
from shoal.strategies.attachment import Attachment
from shoal.strategies.averaging import start_mean
from shoal.strategies.masses import MassStrategy
from shoal.strategies.one_sided import OneSidedStrategy, round_of
from shoal.strategies.options import CommonOptions, PushSumOptions
from shoal.topology import Topology

_ROUNDING = 1e-6


class PushSum(MassStrategy, OneSidedStrategy):
    """After the step: push 1/(d + 1) of the mass to each of d neighbours, then add what has come.

    A step moves the parameters by 1/`weight` of what the optimizer would, so that every worker's gradient
    counts alike in the sum. When a member is lost or leaves, its mass goes with it, and the others start anew
    with a weight of 1 each and the parameters that they have.
    """

    name = "push-sum"
    Options: ClassVar[type[CommonOptions]] = PushSumOptions
    options: PushSumOptions

    def __init__(self, group: Group, *, options: CommonOptions | None = None, **named: Any) -> None:
        super().__init__(group, options=options, **named)
        self.num_pushed = 0
        self.num_held = 0
        """Rounds in which nothing was pushed, since too little mass was left."""
        self._present: Sequence[int] = ()

    @property
    def stats(self) -> dict[str, Any]:
        """Also the weight, and rounds with and without a push."""
        counts = {"weight": self.weight, "num_pushed": self.num_pushed, "num_held": self.num_held}
        return {**super().stats, **counts}

    def settle(self) -> None:
        """As ever, and take in all that is under way: the mean over the weights is exact then. Collective."""
        super().settle()
        if not self.is_alone:
            self._gather()

    def _make_topology(self) -> Topology:
        return self._make(self.options.topology)

    def _started(self, attachment: Attachment) -> None:
        super()._started(attachment)
        self._present = self.group.members

    def _begin_round(self) -> None:
        self._start_anew()
        if self.weight < self.options.min_weight * (1 - _ROUNDING):
            self.num_held += 1
            return
        # by pushes, not by rounds: who can push in every second round only shall meet all its neighbours
        wanted = self.topology.destinations(self.group.rank, self.num_pushed)
        destinations = [rank for rank in wanted if rank in self._present]
        if not destinations:
            return
        self.num_pushed += 1
        share = self.weight / (len(destinations) + 1)
        for rank in destinations:
            for window, flat in zip(self._windows, self._flats.tensors, strict=True):
                write = window.add(rank, flat, weight=share, mass=share, note=self._note())
                self._writes.append(write)
        self.weight = share

    def _end_round(self) -> None:
        self._note_staleness(self._collect())

    def _collect(self) -> list[int]:
        """Add what has come, of all sources at once; the rounds in which they pushed it last."""
        with contextlib.ExitStack() as stack:
            slots = [
                each
                for each in self._slots(stack, self._windows[0].filled()).values()
                # a source that is between two windows is left for the next time
                if len({slot.num_writes for slot in each}) == 1
            ]
            rounds = [round_of(each[0].note) for each in slots]
            if slots:
                total = self.weight + sum(each[0].mass for each in slots)
                for index, flat in enumerate(self._flats.tensors):
                    sources = [(each[index].tensor, 1 / total) for each in slots]
                    mix_into(flat, flat, self.weight / total, sources)
                self.weight = total
                for each in slots:
                    for slot in each:
                        slot.clear()
        return rounds

    def _gather(self) -> None:
        """All that anybody has pushed until now is taken in. Collective."""
        self._finish_round()
        self.group.barrier().wait()
        self._collect()

    def _start_anew(self) -> None:
        present = self.group.members
        if present != self._present:
            self._present = present
            self.weight = 1.0

    def _average_all(self) -> None:
        """The mean over the weights, which are 1 afterwards."""
        self._gather()
        factor = self._mass_factor()
        for flat in self._flats.tensors:
            flat.mul_(factor)
            start_mean(self.group, flat).wait()
        self.weight = 1.0

    def _before_saving(self) -> None:
        if not self.is_alone:
            self._gather()

    def _state_at_end(self) -> dict[str, Any]:
        """What is under way then is nobody's: all begin anew with a weight of 1, as after a loss."""
        return {**self.state_dict(), "weight": 1.0}

    def _come_to_rest(self, *, should_leave: bool) -> None:
        if should_leave:
            self._finish_round()
        else:
            self._gather()
