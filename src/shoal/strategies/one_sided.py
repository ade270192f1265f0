"""What strategies share that write parameters into windows of others: nobody waits for anybody.

A round begins after the step with writes to neighbours. Where they are over at once, as in shared memory,
what has come is mixed in at once; over a network they go on during forward and backward, and the mix comes
before the next step. What is written, and how it is mixed, is left to the strategies.
"""

from __future__ import annotations

import abc
import contextlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from shoal.core import PeerLost
from shoal.core.errors import UsageError
from shoal.group import Group, Handle, Slot, Window, next_number
from shoal.strategies.attachment import Attachment
from shoal.strategies.averaging import start_mean
from shoal.strategies.flats import Flats
from shoal.strategies.options import CommonOptions
from shoal.strategies.parameters import SurvivingStrategy
from shoal.strategies.staleness import Staleness
from shoal.topology import Topology, make_topology_on

_ROUND = struct.Struct("<q")
_MANY_TURNS = 64


class OneSidedStrategy(SurvivingStrategy):
    """The trainable parameters live in flat memory, and each dtype has a window; outlives lost peers."""

    survives_loss = True
    is_lockstep = False

    def __init__(self, group: Group, *, options: CommonOptions | None = None, **named: Any) -> None:
        super().__init__(group, options=options, **named)
        self.topology = self._make_topology()
        self.staleness = Staleness()
        self._flats_or_none: Flats | None = None
        self._windows: list[Window] = []
        self._writes: list[Handle[None]] = []
        self._turn = 0
        """The round that has begun last."""
        self._is_open = False
        """Whether a round has begun, and what has come is not mixed yet."""

    @abc.abstractmethod
    def _make_topology(self) -> Topology:
        """Who writes to whom."""

    @abc.abstractmethod
    def _begin_round(self) -> None:
        """Write to neighbours (`_write`)."""

    @abc.abstractmethod
    def _end_round(self) -> None:
        """Mix what has come; the writes are over."""

    @property
    def stats(self) -> dict[str, Any]:
        """How far behind the models were that were mixed, in rounds, and how many rounds had none."""
        return self.staleness.summary()

    def settle(self) -> None:
        """As ever, and end the round that has begun: afterwards parameters stay what they are."""
        super().settle()
        self._finish_round()

    def state_dict(self) -> dict[str, Any]:
        """Also the counts of staleness."""
        return {**super().state_dict(), "staleness": self.staleness.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of any rank."""
        super().load_state_dict(state)
        self.staleness.load_state_dict(state["staleness"])

    @property
    def _flats(self) -> Flats:
        if self._flats_or_none is None:
            raise UsageError(f"{self.name} is not attached to a model.", next_step="attach it first.")
        return self._flats_or_none

    def _make(self, topology: object) -> Topology:
        return make_topology_on(topology, self.group.size, self.group.num_machines)

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which parameters of a dtype are written."""
        return dtype

    def _started(self, attachment: Attachment) -> None:
        flats = Flats(self.group, attachment.parameters)
        self._flats_or_none = flats
        # no name is used twice, not even for a model after one that was detached
        number = next_number(self.group, "windows of models")
        sources = self._sources()
        self._windows = [
            self.group.window(
                f"{self.name} {number}.{index}",
                flat.numel(),
                self._dtype(flat.dtype),
                sources=sources,
                device=flat.device,
            )
            for index, flat in enumerate(flats.tensors)
        ]

    def _sources(self) -> list[int] | None:
        """Who writes to this worker, ever; None, anybody, where that takes too long to say."""
        if self.topology.period > _MANY_TURNS:
            return None
        turns = range(self.topology.period)
        rank = self.group.rank
        return sorted({source for turn in turns for source in self.topology.sources(rank, turn)})

    def _stopped(self) -> None:
        if self._flats_or_none is not None:
            self._flats_or_none.close()
            self._flats_or_none = None

    def _after_forward(self) -> None:
        if self._writes:
            self.group.progress()

    def _before_step(self) -> None:
        self._look_for_losses()
        self._finish_round()

    def _after_step(self) -> None:
        if not self.is_round:
            return
        self._finish_round()
        self._flats.adopt()
        self._turn = self.rounds
        self._begin_round()
        self._is_open = True
        if all(write.is_done() for write in self._writes):
            self._finish_round()

    def _skipped_step(self) -> None:
        self._after_step()

    def _finish_round(self) -> None:
        if not self._is_open:
            return
        for write in self._writes:
            write.wait()
        self._writes.clear()
        self._is_open = False
        self._flats.adopt()
        self._end_round()

    def _average_all(self) -> None:
        """In place: of what is written into windows nothing is read until the next round."""
        self._finish_round()
        for flat in self._flats.tensors:
            start_mean(self.group, flat).wait()

    def _before_saving(self) -> None:
        self._finish_round()

    def detached(self, *, should_leave: bool, is_failed: bool) -> None:
        """What is under way ends first; the windows are given back, if all members stay."""
        try:
            if not is_failed and not self.is_alone:
                self._come_to_rest(should_leave=should_leave)
        except BaseException:
            self._windows = []
            super().detached(should_leave=False, is_failed=True)
            raise
        windows, self._windows = self._windows, []
        self._writes.clear()
        self._is_open = False
        super().detached(should_leave=should_leave, is_failed=is_failed)
        if not is_failed and not should_leave:
            for window in windows:
                window.close()

    def _come_to_rest(self, *, should_leave: bool) -> None:
        """The last thing while attached."""
        self._finish_round()

    def _slots(self, stack: contextlib.ExitStack, sources: Iterable[int]) -> dict[int, list[Slot]]:
        """The slots of some sources, one for each window, held until the stack closes; only full ones.

        One whose source was lost in the middle of a write is left out.
        """
        held = {}
        for source in sources:
            try:
                slots = [stack.enter_context(window.slot(source)) for window in self._windows]
            except PeerLost:
                continue
            if all(slot.num_writes for slot in slots):
                held[source] = slots
        return held

    def _note(self) -> bytes:
        return _ROUND.pack(self._turn)

    def _note_staleness(self, rounds: Sequence[int]) -> None:
        """From the rounds of what was mixed."""
        self.staleness.note(self._turn - min(rounds) if rounds else None)


def round_of(note: bytes) -> int:
    """The writer's round, from what it said with a write."""
    (number,) = _ROUND.unpack(note)
    return int(number)
