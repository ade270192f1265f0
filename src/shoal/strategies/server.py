"""What a parameter server does: take orders and gradients of the workers, apply them, and say so.

In the main thread, asleep while there is nothing to do, until all workers have said goodbye or are gone. Here
each gradient is applied as it comes (`async`, `bounded`); averages of them are left to `server_sync`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.core import Deadline
from shoal.group import Handle
from shoal.strategies.attachment import Attachment
from shoal.strategies.server_channel import Channel, Kind, Order, Reply
from shoal.strategies.server_handing import hand_state
from shoal.strategies.server_start import give_servers_state
from shoal.strategies.server_update import Updater
from shoal.strategies.staleness import Staleness
from shoal.tensors.codecs.base import is_finite

log = logging.getLogger(__name__)

_IDLE_S = 0.25
"""After so long a server that sleeps looks whether somebody is lost."""
_BUSY_S = 0.005
"""While one worker's gradients are under way, so long do others' wait at most that come in between."""
_SHORTEST_S = 2e-4
"""The first of the pauses, each twice as long as the one before, while some of a chunk have come."""


@dataclass(eq=False)
class Visitor:
    """One worker, as a server sees it."""

    rank: int
    reply: Reply = field(default_factory=Reply)
    order: Order | None = None
    """The one under way."""
    position: int = 0
    """In the server's share: the chunk that comes next."""
    staleness: int = 0
    """Updates that what is under way is behind."""
    is_dropped: bool = False
    """What is under way is received, and not applied."""
    clock: int = 0
    """Rounds that it has finished."""
    lead: int = 0
    """Rounds by which it led the slowest when it was let go on."""
    is_done: bool = False
    stays: bool = False

    @property
    def is_resting(self) -> bool:
        """Whether it waits for the other workers, and sends nothing until they have come, too."""
        return self.order is not None and self.order.kind in (Kind.REST, Kind.GIVE)


class Server:
    """Serves the workers of one channel; `async` and `bounded`."""

    def __init__(self, channel: Channel, attachment: Attachment, updater: Updater) -> None:
        self._channel = channel
        self._attachment = attachment
        self._updater = updater
        self._share = channel.shares[channel.group.rank]
        self._visitors = [Visitor(rank) for rank in channel.workers]
        self._turn = 0
        self._token = torch.zeros(1)
        self.beat: Callable[[], None] = _nothing
        """Called often, whether there is anything to do or not."""
        self.staleness = Staleness()
        self.leads = Staleness()
        self.num_pushes = self.num_applied = self.num_dropped = self.num_skipped = self.pushed_bytes = 0
        self.num_refused = 0
        """Chunks of gradients that were not finite."""
        self._told: dict[int, Handle[None]] = {}
        self._pause_s = _SHORTEST_S
        ends = itertools.accumulate((len(chunk.layout.slots) for chunk in self._share), initial=0)
        self._bounds = list(itertools.pairwise(ends))
        """Of each chunk, among the parameters of the share."""

    @property
    def versions(self) -> Sequence[int]:
        """Of each chunk."""
        return self._updater.versions

    def run(self) -> bool:
        """Until nobody is left; whether all that came to the end stay in the group."""
        while self._open():
            if self._move():
                self._pause_s = _SHORTEST_S
            else:
                self._rest()
            self.beat()
        lost = self._channel.group.lost
        for rank, told in self._told.items():
            if rank not in lost:
                told.wait()
        ended = [visitor for visitor in self._visitors if visitor.rank not in lost]
        return bool(ended) and all(visitor.stays for visitor in ended)

    # --- what becomes of gradients ---

    def _move(self) -> bool:
        """Do what can be done; whether there was anything."""
        visitors = self._open()
        # each comes first in turn: a quick one does not keep the others out
        self._turn += 1
        first = self._turn % len(visitors)
        moved = [self._advance(visitor) for visitor in visitors[first:] + visitors[:first]]
        return any(moved)

    def _begin_push(self, visitor: Visitor, order: Order) -> None:
        """Decide what becomes of gradients whose order has come."""
        self._judge(visitor, order)
        self._release(visitor, visitor.clock + 1)

    def _advance_push(self, visitor: Visitor) -> bool:
        """Handle the next chunk, if it is there."""
        if not self._is_there(visitor, visitor.position):
            return False
        with self._taken(visitor, visitor.position) as gradient:
            if gradient is not None and not visitor.is_dropped and self._accepts(visitor, gradient):
                self._apply(visitor, visitor.position, gradient)
        self._finish_chunk(visitor)
        return True

    def _skip(self, visitor: Visitor, order: Order) -> None:
        """A step without gradients."""
        visitor.reply.num_handled += 1
        if self._release(visitor, visitor.clock + 1):
            self._lay_out(visitor)
        self._finish_round(visitor)

    def _miss(self, visitor: Visitor) -> None:
        """One worker less, which has left or is lost."""
        self._say_lost(visitor)
        self._release_all()

    def _coming(self) -> int | None:
        """A chunk that some worker is about to send."""
        under_way = [visitor for visitor in self._open() if visitor.order and visitor.order.kind == Kind.PUSH]
        return under_way[0].position if under_way else None

    # --- orders ---

    def _advance(self, visitor: Visitor) -> bool:
        if visitor.order is None:
            return self._take_order(visitor)
        if visitor.is_resting:
            return self._meet(visitor.order.kind)
        return self._advance_push(visitor)

    def _take_order(self, visitor: Visitor) -> bool:
        orders = self._channel.orders
        if visitor.rank not in orders.filled():
            return False
        with orders.slot(visitor.rank) as slot:
            if not slot.num_writes:
                return False
            order = self._channel.read_order(self._channel.group.rank, slot.tensor, slot.note)
            slot.clear()
        if order.kind == Kind.PUSH:
            visitor.order, visitor.position = order, 0
            self.num_pushes += 1
            self._begin_push(visitor, order)
        elif order.kind == Kind.SKIP:
            self.num_skipped += 1
            self._skip(visitor, order)
        elif order.kind == Kind.BYE:
            visitor.is_done, visitor.stays = True, order.stays
            visitor.reply.num_handled += 1
            visitor.reply.summary = self.summary()
            self._tell(visitor)
            self._miss(visitor)
        elif order.kind == Kind.HAND:
            state = self._attachment.optimizer.state_dict()["state"]
            flats = [self._channel.flats[chunk.number] for chunk in self._share]
            hand_state(self._channel.states, visitor.rank, [state, flats])
            visitor.reply.num_handled += 1
            self._tell(visitor)
        else:
            visitor.order = order
        return True

    def _meet(self, kind: Kind) -> bool:
        """What is done with all workers that are left, once they have asked for it."""
        visitors = self._open()
        if any(visitor.order is None or visitor.order.kind != kind for visitor in visitors):
            return False
        if kind == Kind.GIVE:
            give_servers_state(self._channel.group, self._channel.num_servers, self._attachment.optimizer)
        for visitor in visitors:
            self._lay_out(visitor)
            visitor.order = None
            visitor.reply.num_handled += 1
            self._tell(visitor)
        return True

    # --- gradients ---

    def _judge(self, visitor: Visitor, order: Order) -> None:
        """How old the gradients are that will come, and whether they count."""
        visitor.staleness = self.versions[0] - order.versions[0]
        limit = self._channel.options.drop_stale
        visitor.is_dropped = limit is not None and visitor.staleness > limit
        if visitor.is_dropped:
            self.num_dropped += 1
            return
        self.num_applied += 1
        self.staleness.note(visitor.staleness)
        if self._channel.options.mode == "bounded":
            self.leads.note(visitor.lead)

    def _is_there(self, visitor: Visitor, position: int) -> bool:
        """Whether a chunk of a push can be taken."""
        if not self._has_any(visitor, position):
            return True  # then nothing is sent
        return visitor.rank in self._channel.gradients[self._share[position].number].filled()

    @contextlib.contextmanager
    def _taken(self, visitor: Visitor, position: int) -> Iterator[torch.Tensor | None]:
        """The flat gradient of a chunk that is there, gone when the block ends; None: there is none in it."""
        if not self._has_any(visitor, position):
            yield None
            return
        chunk = self._share[position]
        packing = self._channel.packings[chunk.number]
        with self._channel.gradients[chunk.number].slot(visitor.rank) as slot:
            if slot.num_writes:
                self.pushed_bytes += slot.tensor.numel() * slot.tensor.element_size()
                yield slot.tensor if packing is None else packing.decode(slot.tensor)
                slot.clear()
            else:
                yield None

    def _accepts(self, visitor: Visitor, gradient: torch.Tensor) -> bool:
        """Whether a chunk is finite: one that is not would spoil the model for all workers."""
        if not gradient.numel() or is_finite(gradient):
            return True
        visitor.reply.num_refused += 1
        self.num_refused += 1
        return False

    def _apply(self, visitor: Visitor, position: int, gradient: torch.Tensor) -> None:
        assert visitor.order is not None
        options, order = self._channel.options, visitor.order
        if options.delay_compensation and order.versions[position] != self.versions[position]:
            self._updater.compensate(position, gradient, visitor.rank)
        factor = 1 / max(1, visitor.staleness) if options.staleness_lr else 1.0
        self._channel.numbers.write(order.numbers, factor)
        self._updater.apply(position, gradient, self._flags(visitor, position))

    def _flags(self, visitor: Visitor, position: int) -> Sequence[bool]:
        """Which parameters of a chunk have a gradient."""
        assert visitor.order is not None
        start, end = self._bounds[position]
        return visitor.order.has_gradient[start:end]

    def _has_any(self, visitor: Visitor, position: int) -> bool:
        return any(self._flags(visitor, position))

    def _finish_chunk(self, visitor: Visitor) -> None:
        """One chunk of a push is handled; the last one ends the round."""
        if visitor.reply.released > visitor.clock:
            self._updater.lay_out(visitor.position, visitor.rank)
        visitor.position += 1
        visitor.reply.num_handled += 1
        if visitor.position == len(self._share):
            visitor.order = None
            self._finish_round(visitor)
        else:
            self._tell(visitor)

    def _finish_round(self, visitor: Visitor) -> None:
        visitor.clock += 1
        self._release_all()
        self._tell(visitor)

    # --- who may go on ---

    def _release_all(self) -> None:
        for visitor in self._open():
            if visitor.reply.released < visitor.clock and self._release(visitor, visitor.clock):
                self._lay_out(visitor)
                self._tell(visitor)

    def _release(self, visitor: Visitor, clock: int) -> bool:
        """Let a worker begin the round after `clock` ones, unless it would lead the slowest by too much."""
        slowest = min((other.clock for other in self._open() if other is not visitor), default=clock)
        lead = max(0, clock - slowest)
        if self._channel.options.mode == "bounded" and lead > self._channel.options.staleness:
            return False
        visitor.lead = lead
        visitor.reply.released = clock
        return True

    def _lay_out(self, visitor: Visitor) -> None:
        """All chunks, for a worker that reads them next."""
        for position in range(len(self._share)):
            self._updater.lay_out(position, visitor.rank)

    def _open(self) -> list[Visitor]:
        return [visitor for visitor in self._visitors if not visitor.is_done]

    # --- waiting and telling ---

    def _rest(self) -> None:
        """Go on without whoever is gone; else sleep until something comes, or for a moment."""
        members = self._channel.group.members
        gone = [visitor for visitor in self._open() if visitor.rank not in members]
        if gone:
            for visitor in gone:
                visitor.is_done, visitor.order = True, None
                self._miss(visitor)
            return
        coming = self._coming()
        if coming is None:
            self._channel.orders.wait(Deadline.after(_IDLE_S))
            return
        gradients = self._channel.gradients[self._share[coming].number]
        if not gradients.filled():
            gradients.wait(Deadline.after(_BUSY_S))
            return
        # Those that have come need others beside them. To wait for a gradient would end at once, again and
        # again, and in virtual time no other would ever come.
        self._channel.orders.wait(Deadline.after(self._pause_s))
        self._pause_s = min(2 * self._pause_s, _BUSY_S)

    def _say_lost(self, visitor: Visitor, besides: str = "") -> None:
        loss = self._channel.group.lost.get(visitor.rank)
        if loss is not None:
            log.warning(
                "server %d goes on without worker %d%s: %s",
                self._channel.group.rank,
                visitor.rank - self._channel.num_servers,
                besides,
                loss.reason,
            )

    def _tell(self, visitor: Visitor) -> None:
        self._told[visitor.rank] = self._channel.replies.put(
            visitor.rank, self._token, note=visitor.reply.note()
        )

    def summary(self) -> dict[str, Any]:
        """What it has counted."""
        return {
            "num_pushes": self.num_pushes,
            "num_applied": self.num_applied,
            "num_dropped": self.num_dropped,
            "num_skipped": self.num_skipped,
            "num_refused": self.num_refused,
            "pushed_bytes": self.pushed_bytes,
            "staleness": self.staleness.summary(),
            "leads": self.leads.summary(),
        }


def _nothing() -> None:
    pass
