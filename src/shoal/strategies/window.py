"""Strategies that write parameters into windows of others, so that nobody waits for anybody.

A round begins after the step with writes to neighbours. Where they are over at once, as in shared memory,
what has come is mixed in at once; over a network they go on during forward and backward, and the mix comes
before the next step.

`window` (BlueFog's win_put) puts parameters, and mixes with what neighbours have put last. `push-sum`
(stochastic gradient push, Assran et al. 2019, asynchronous, on directed graphs) adds: every worker has a
share of a common mass. It pushes parts of its parameters, times their mass, to others, and adds what comes;
the parameters that train are the sum divided by its mass. So they agree on the mean of all, whoever pushes
how often to whom. What is not pushed is kept, what is pushed arrives once: the total stays.
"""

from __future__ import annotations

import abc
import contextlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shoal.core import PeerLost
from shoal.group import Group, Handle, Window, WindowSlot
from shoal.group.functions import start_mean
from shoal.group.kernels import mix_into
from shoal.strategies.options import PushSumOptions, WindowOptions
from shoal.strategies.session import TrainingSession
from shoal.strategies.sgp import mass_factor, mass_model
from shoal.strategies.staleness import Staleness
from shoal.strategies.strategy import Strategy
from shoal.topology import Topology, Weights, make_topology_on

_ROUND = struct.Struct("<q")
_MANY_TURNS = 64
_ROUNDING = 1e-6
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class OneSidedStrategy(Strategy):
    """Rounds of writes to neighbours' windows; what is written and how it is mixed is left to subclasses."""

    survives_loss = True
    is_lockstep = False
    options: WindowOptions | PushSumOptions
    topology: Topology
    _windows: list[Window]
    """One for each dtype."""
    _writes: list[Handle[None]]
    _turn: int
    """The round that has begun last."""
    _is_begun: bool
    """Whether a round has begun, and what has come is not mixed yet."""

    def __init__(self, group: Group | None = None, **options: Any) -> None:
        super().__init__(group, **options)
        self.staleness = Staleness()

    def set_group(self, group: Group) -> None:
        """Makes the topology that says who writes to whom."""
        super().set_group(group)
        self.topology = make_topology_on(self.options.topology, group.size, group.num_machines)

    @abc.abstractmethod
    def begin_round(self, session: TrainingSession) -> None:
        """Writes the parameters into the windows of neighbours."""

    @abc.abstractmethod
    def end_round(self, session: TrainingSession) -> None:
        """Mixes in what has come, once the writes are over."""

    @property
    def stats(self) -> dict[str, Any]:
        """How far behind the models were that were mixed, in rounds, and how many rounds had none."""
        return self.staleness.summary()

    def tracked_values(self) -> Mapping[str, float]:
        """Gives how old the models were that it mixed, in rounds, since the beginning."""
        behind = {"mean_staleness": self.staleness.mean_behind, "max_staleness": self.staleness.max_behind}
        return {**super().tracked_values(), **behind}

    def start(self, session: TrainingSession) -> None:
        """Opens a window for each dtype."""
        topology, rank, turns = self.topology, self.group.rank, range(self.topology.period)
        sources = None  # anybody, where it takes too long to say who writes to this worker, ever
        if len(turns) <= _MANY_TURNS:
            sources = sorted({source for turn in turns for source in topology.sources(rank, turn)})
        self._windows = [
            session.window(flat, self._sent_dtype(flat.dtype), sources=sources)
            for flat in session.parameters.flats
        ]
        self._writes, self._turn, self._is_begun = [], 0, False

    def after_forward(self, session: TrainingSession) -> None:
        """Lets writes go on."""
        if self._writes:
            self.group.progress()

    def before_step(self, session: TrainingSession) -> None:
        """Ends the round that has begun."""
        super().before_step(session)
        self._finish_round(session)

    def after_step(self, session: TrainingSession) -> None:
        """Begins a round, and ends it where that needs no waiting."""
        if not session.is_round:
            return
        self._finish_round(session)
        self._turn = self.rounds
        self.begin_round(session)
        self._is_begun = True
        if all(write.is_done() for write in self._writes):
            self._finish_round(session)

    def average_all(self, session: TrainingSession) -> None:
        """Averages in place: of what is written into windows nothing is read until the next round."""
        self._finish_round(session)
        session.average_parameters()

    def settle_round(self, session: TrainingSession) -> None:
        """Ends the round that has begun."""
        self._finish_round(session)

    def _sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which parameters are written."""
        return dtype

    def _finish_round(self, session: TrainingSession) -> None:
        if not self._is_begun:
            return
        for write in self._writes:
            write.wait()
        self._writes.clear()
        self._is_begun = False
        self.end_round(session)

    def _slots(self, stack: contextlib.ExitStack, sources: Iterable[int]) -> dict[int, list[WindowSlot]]:
        """The slots of some sources, one for each window, held until the stack closes; only full ones."""
        held = {}
        for source in sources:
            try:
                slots = [stack.enter_context(window.slot(source)) for window in self._windows]
            except PeerLost:  # in the middle of a write
                continue
            if all(slot.num_writes for slot in slots):
                held[source] = slots
        return held

    def _note(self) -> bytes:
        return _ROUND.pack(self._turn)

    def _note_staleness(self, rounds: Sequence[int]) -> None:
        """Counts how old what was mixed is, from the rounds of its writers."""
        self.staleness.note(self._turn - min(rounds) if rounds else None)


class WindowAverage(OneSidedStrategy):
    """`x_i ← W_ii x_i + Σ_j W_ij s_j` after the step; s_j is what j has put here last, however old.

    The weight of a neighbour that has put nothing yet, or is gone, goes to oneself. With `force_barrier` it
    computes what `neighbor` does.
    """

    name = "window"
    Options = WindowOptions
    options: WindowOptions
    _weights: Weights
    """Those of the round that has begun."""
    _coded: Sequence[torch.Tensor] = ()

    def begin_round(self, session: TrainingSession) -> None:
        """Puts the parameters, or what the codec makes of them, into neighbours' windows."""
        if self.options.force_barrier:
            self.group.barrier().wait()
        flats = session.parameters.flats
        # kept until the next round: writes may go on
        self._coded = [flat.to(window.dtype) for flat, window in zip(flats, self._windows, strict=True)]
        present = self.group.members
        gone = [rank for rank in range(self.group.size) if rank not in present]
        weights = self.topology.weights(self.group.rank, self._turn)
        self._weights = weights.without(gone) if gone else weights
        for rank, factor in (self._weights.destinations or {}).items():
            for window, tensor in zip(self._windows, self._coded, strict=True):
                self._writes.append(window.put(rank, tensor, weight=factor, note=self._note()))
        if self.options.force_barrier:
            for write in self._writes:
                write.wait()
            self.group.barrier().wait()

    def end_round(self, session: TrainingSession) -> None:
        """Mixes with what neighbours have put last; who has put nothing gives its weight to oneself."""
        weights, flats = self._weights, session.parameters.flats
        with contextlib.ExitStack() as stack:
            slots = self._slots(stack, weights.sources)
            if len(slots) < len(weights.sources):
                weights = weights.without([rank for rank in weights.sources if rank not in slots])
            self._note_staleness([_round_of(each[0].note) for each in slots.values()])
            if not slots:
                return
            for index, flat in enumerate(flats):
                sources = [
                    (slots[rank][index].tensor.to(flat.dtype), weight)
                    for rank, weight in weights.sources.items()
                ]
                mix_into(flat, flat, weights.own, sources)

    def average_all(self, session: TrainingSession) -> None:
        """Makes what has come before it void: it would pull back to older models."""
        super().average_all(session)
        with contextlib.ExitStack() as stack:
            filled = self._windows[0].filled() if self._windows else ()
            for slots in self._slots(stack, filled).values():
                if _round_of(slots[0].note) < self.rounds:
                    for slot in slots:
                        slot.clear()

    def _sent_dtype(self, dtype: torch.dtype) -> torch.dtype:
        half = _HALVES.get(self.options.codec, dtype)
        return half if half.itemsize < dtype.itemsize else dtype


class PushSum(OneSidedStrategy):
    """After the step: push 1/(d + 1) of the mass to each of d neighbours, then add what has come.

    A step moves the parameters by 1/`weight` of what the optimizer would, so that every worker's gradient
    counts alike in the sum. When a member is lost or leaves, its mass goes with it, and the others start anew
    with a weight of 1 each and the parameters that they have.
    """

    name = "push-sum"
    Options = PushSumOptions
    options: PushSumOptions

    def __init__(self, group: Group | None = None, **options: Any) -> None:
        super().__init__(group, **options)
        self.weight = 1.0
        """This worker's mass: 1 on average over all, less what is under way."""
        self.num_pushed = 0
        self.num_held = 0
        """Rounds in which nothing was pushed, since too little mass was left."""
        self._present: Sequence[int] = ()

    @property
    def rate_divisor(self) -> float:
        """The weight: the optimizer works on the parameters, but steps in the sum."""
        return self.weight

    @property
    def stats(self) -> dict[str, Any]:
        """Also the weight, and rounds with and without a push."""
        counts = {"weight": self.weight, "num_pushed": self.num_pushed, "num_held": self.num_held}
        return {**super().stats, **counts}

    def start(self, session: TrainingSession) -> None:
        """Remembers who is there."""
        super().start(session)
        self._present = self.group.members

    def begin_round(self, session: TrainingSession) -> None:
        """Pushes shares of the mass, if enough is left."""
        if self.group.members != self._present:
            self._present = self.group.members
            self.weight = 1.0
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
        flats = session.parameters.flats
        for rank in destinations:
            for window, flat in zip(self._windows, flats, strict=True):
                write = window.add(rank, flat, weight=share, mass=share, note=self._note())
                self._writes.append(write)
        self.weight = share

    def end_round(self, session: TrainingSession) -> None:
        """Adds what has come."""
        self._note_staleness(self._collect(session))

    def settle_round(self, session: TrainingSession) -> None:
        """Takes in all that is under way: the mean over the weights is exact then. Collective."""
        self._finish_round(session)
        if (
            session.device.type == "cuda"
        ):  # a barrier orders processors, and not what GPUs still have to write
            torch.cuda.synchronize(session.device)
        self.group.barrier().wait()
        self._collect(session)

    def finish(self, session: TrainingSession, *, should_leave: bool) -> None:
        """Takes in all that is under way, unless the others go on."""
        if should_leave:
            self._finish_round(session)
        else:
            self.settle_round(session)

    def average_all(self, session: TrainingSession) -> None:
        """Takes the mean over the weights, which are 1 afterwards."""
        self.settle_round(session)
        factor = mass_factor(self.group, self.weight)
        for flat in session.parameters.flats:
            flat.mul_(factor)
            start_mean(self.group, flat).wait()
        self.weight = 1.0

    def state_at_end(self) -> dict[str, Any]:
        """Leaves out what is under way: all begin anew with a weight of 1, as after a loss."""
        return {**self.state_dict(), "weight": 1.0}

    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Begins with a weight of 1."""
        self.load_state_dict({**state, "weight": 1.0})

    def common_model(self, session: TrainingSession) -> dict[str, torch.Tensor]:
        """Gives the mean over the weights, not over the workers."""
        return mass_model(session, super().common_model(session), self.weight)

    def _collect(self, session: TrainingSession) -> list[int]:
        """Adds what has come, of all sources at once; the rounds in which they pushed it last."""
        with contextlib.ExitStack() as stack:
            slots = [
                each
                for each in self._slots(stack, self._windows[0].filled()).values()
                # a source that is between two windows is left for the next time
                if len({slot.num_writes for slot in each}) == 1
            ]
            rounds = [_round_of(each[0].note) for each in slots]
            if slots:
                total = self.weight + sum(each[0].mass for each in slots)
                for index, flat in enumerate(session.parameters.flats):
                    sources = [(each[index].tensor, 1 / total) for each in slots]
                    mix_into(flat, flat, self.weight / total, sources)
                self.weight = total
                for each in slots:
                    for slot in each:
                        slot.clear()
        return rounds


def _round_of(note: bytes) -> int:
    """The writer's round, from what it said with a write."""
    (number,) = _ROUND.unpack(note)
    return int(number)
