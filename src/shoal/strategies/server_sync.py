"""`sync`: one update of the average of the first gradients of a step, the rest of which are dropped.

The workers whose orders come first are chosen, as many as make an update; what they send is averaged chunk by
chunk. A gradient that was computed from an older version, or that comes when enough are chosen, is received
and dropped, and its worker goes on from the next version. Each of several servers chooses for itself.
"""

from __future__ import annotations

import contextlib
import logging

from shoal.group.kernels import mix_into
from shoal.strategies.attachment import Attachment
from shoal.strategies.server import Server, Visitor
from shoal.strategies.server_channel import Channel, Kind, Order
from shoal.strategies.server_update import Updater

log = logging.getLogger(__name__)


class SyncServer(Server):
    """Averages; with `num_aggregate` below the number of workers the others are backups."""

    def __init__(self, channel: Channel, attachment: Attachment, updater: Updater) -> None:
        super().__init__(channel, attachment, updater)
        self._wanted = channel.options.num_aggregate or len(self._visitors)
        self._chosen: list[Visitor] = []
        self._late: list[Visitor] = []
        """Too late for the update under way: they go on when it is done."""
        self._position = 0
        """The chunk that is averaged next."""

    @property
    def _num_wanted(self) -> int:
        """Without those that rest: they wait for the others, and would be waited for in vain."""
        return min(self._wanted, sum(not visitor.is_resting for visitor in self._open()))

    @property
    def _is_updating(self) -> bool:
        """Whether enough are chosen."""
        return bool(self._position or (self._chosen and len(self._chosen) >= self._num_wanted))

    def _begin_push(self, visitor: Visitor, order: Order) -> None:
        visitor.is_dropped = True
        if min(order.versions) == min(self.versions):
            if self._is_updating:
                self._late.append(visitor)
            else:
                visitor.is_dropped = False
                self._chosen.append(visitor)
        self._release(visitor, visitor.clock + 1)
        if visitor.is_dropped:
            self.num_dropped += 1
        else:
            self.num_applied += 1
            self.staleness.note(0)

    def _skip(self, visitor: Visitor, order: Order) -> None:
        """It is one of those that are waited for, and adds nothing."""
        if min(order.versions) == min(self.versions) and not self._is_updating:
            visitor.order, visitor.is_dropped = order, False
            self._chosen.append(visitor)
        else:
            super()._skip(visitor, order)

    def _move(self) -> bool:
        has_moved = super()._move()
        return (self._is_updating and self._update()) or has_moved

    def _advance_push(self, visitor: Visitor) -> bool:
        is_push = visitor.order is not None and visitor.order.kind == Kind.PUSH
        return is_push and visitor.is_dropped and super()._advance_push(visitor)

    def _update(self) -> bool:
        """Average and apply one chunk, if all of it is there."""
        position = self._position
        pushers = sorted(
            (visitor for visitor in self._chosen if visitor.order and visitor.order.kind == Kind.PUSH),
            key=lambda visitor: visitor.rank,
        )
        if not all(self._is_there(visitor, position) for visitor in pushers):
            return False
        with contextlib.ExitStack() as stack:
            taken = [(visitor, stack.enter_context(self._taken(visitor, position))) for visitor in pushers]
            accepted = [(one, given) for one, given in taken if given is None or self._accepts(one, given)]
            pushers = [visitor for visitor, _ in accepted]
            gradients = [gradient for _, gradient in accepted if gradient is not None]
            if gradients:
                share = 1 / len(pushers)
                first, *others = gradients
                if share != 1:
                    mix_into(first, first, share, [(other, share) for other in others])
                assert pushers[0].order is not None
                self._channel.numbers.write(pushers[0].order.numbers)
                flags = zip(*(self._flags(visitor, position) for visitor in pushers), strict=True)
                self._updater.apply(position, first, [any(each) for each in flags])
            else:
                self._updater.pass_over(position)
        self._position = (position + 1) % len(self._share)
        for visitor in list(self._chosen):
            self._finish_chosen(visitor)
        if not self._position:
            self._chosen.clear()
            late, self._late = self._late, []
            for visitor in late:
                self._tell(visitor)
        return True

    def _finish_chosen(self, visitor: Visitor) -> None:
        assert visitor.order is not None
        if visitor.order.kind == Kind.PUSH:
            self._finish_chunk(visitor)
        elif not self._position:
            visitor.order = None
            super()._skip(visitor, Order(Kind.SKIP))

    def _tell(self, visitor: Visitor) -> None:
        if visitor not in self._late:
            super()._tell(visitor)

    def _miss(self, visitor: Visitor) -> None:
        if visitor in self._chosen:
            self._chosen.remove(visitor)
        if visitor in self._late:
            self._late.remove(visitor)
        besides = ""
        num_left = len(self._open())
        if num_left < self._wanted:
            besides = f", with {num_left} instead of {self._wanted} gradients for an update"
        self._say_lost(visitor, besides)
        self._release_all()

    def _coming(self) -> int | None:
        if self._is_updating:
            return self._position
        return next(
            (
                visitor.position
                for visitor in self._open()
                if visitor.is_dropped and visitor.order and visitor.order.kind == Kind.PUSH
            ),
            None,
        )
