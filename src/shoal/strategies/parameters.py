"""What strategies share that average parameters: twins, one exchange a round, and what a lost peer means.

Which exchange, and with whom, is left to the strategies.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Sequence
from typing import Any

import torch

from shoal.core.errors import UsageError
from shoal.group import Group, Handle
from shoal.strategies.attachment import Attachment
from shoal.strategies.base import Strategy
from shoal.strategies.options import CommonOptions
from shoal.strategies.twins import Twins
from shoal.topology import Weights

log = logging.getLogger(__name__)


class SurvivingStrategy(Strategy):
    """Looks for lost peers in its rounds, and says once for each that it goes on."""

    def __init__(self, group: Group, *, options: CommonOptions | None = None, **named: Any) -> None:
        super().__init__(group, options=options, **named)
        self._missed: list[int] = []
        """Lost peers that were announced."""

    @property
    def _others(self) -> list[int]:
        return [rank for rank in self.group.members if rank != self.group.rank]

    def _look_for_losses(self) -> None:
        """Go on without lost peers, saying so once for each; PeerLost where the strategy needs everybody.

        NetworkSplit on the side of a cut network that stops.
        """
        if self.group.split is not None:
            raise self.group.split
        if len(self.group.lost) == len(self._missed):
            return
        for rank, loss in list(self.group.lost.items()):
            if not self.survives_loss:
                raise loss.error(f" in round {self.rounds}")
            if rank not in self._missed:
                self._missed.append(rank)
                # the group has warned of the loss and its reason
                log.info(
                    "%s on rank %d goes on without rank %d, lost in round %d: %s",
                    self.name,
                    self.group.rank,
                    rank,
                    self.rounds,
                    loss.reason,
                )


class ParameterStrategy(SurvivingStrategy):
    """The trainable parameters live in twin buffers of the group; see `twins`."""

    def __init__(self, group: Group, *, options: CommonOptions | None = None, **named: Any) -> None:
        super().__init__(group, options=options, **named)
        self._twins_or_none: Twins | None = None

    @property
    def _twins(self) -> Twins:
        if self._twins_or_none is None:
            raise UsageError(f"{self.name} is not attached to a model.", next_step="attach it first.")
        return self._twins_or_none

    def _started(self, attachment: Attachment) -> None:
        num_buffers = self._num_buffers(attachment.device)
        self._twins_or_none = Twins(
            self.group, attachment.parameters, self._allocate, num_buffers=num_buffers
        )

    def _num_buffers(self, device: torch.device) -> int:
        """Says in how many buffers the parameters live in turn."""
        return 2

    def _stopped(self) -> None:
        if self._twins_or_none is not None:
            self._twins_or_none.close()
            self._twins_or_none = None

    def _average_all(self) -> None:
        """An exchange over the full graph: it outlives a lost peer."""
        self._twins.adopt()
        weights = Weights.uniform(self._others, self._others)
        self._finish([self.group.exchange(live, weights, out=spare) for live, spare in self._twins.pairs])

    def _finish(self, handles: Sequence[Handle[torch.Tensor]], *, should_keep: bool = False) -> None:
        """Wait for exchanges into the spare buffers; what fails until the swap leaves all as it was.

        With `should_keep` what came is left out, and the parameters stay what they are.
        """
        for handle in handles:
            handle.wait()
        self._look_for_losses()
        if should_keep:
            self._twins.keep()
        self._twins.swap()


class ExchangeStrategy(ParameterStrategy):
    """One exchange a round, in lockstep.

    Adapt-then-combine: `w ← Mix(w − lr·g(w))`, after the step. Adapt-while-combine: the exchange starts after
    the forward and goes on during loss and backward; before the step, `w ← Mix(w)`, and the optimizer steps
    from there with the gradient taken at the old w. Parameters that are written in between (a forward that no
    step follows, then `load_state_dict`) win over the mix: this worker leaves out what it receives, once.
    """

    def __init__(self, group: Group, *, options: CommonOptions | None = None, **named: Any) -> None:
        super().__init__(group, options=options, **named)
        self._under_way: list[Handle[torch.Tensor]] | None = None

    @property
    @abc.abstractmethod
    def is_overlapped(self) -> bool:
        """Adapt while combine."""

    @abc.abstractmethod
    def _exchange(self, live: torch.Tensor, spare: torch.Tensor) -> Handle[torch.Tensor]:
        """Start this round's exchange of one buffer into another."""

    @property
    def hears_forward(self) -> bool:
        """Whether it is overlapped: the round starts then."""
        return self.is_overlapped

    def _after_forward(self) -> None:
        is_early = self.is_accumulating or self._under_way is not None
        if self.is_overlapped and self.is_round and not is_early:
            self._under_way = self._start_round()
            self._twins.mark()

    def _before_step(self) -> None:
        self._look_for_losses()
        if self.is_overlapped and self.is_round:
            self._finish_round()

    def _after_step(self) -> None:
        if self.is_round and not self.is_overlapped:
            self._finish_round()

    def _skipped_step(self) -> None:
        if self.is_round:
            self._finish_round()

    def _stopped(self) -> None:
        self._under_way = None
        super()._stopped()

    def _start_round(self) -> list[Handle[torch.Tensor]]:
        self._twins.adopt()
        return [self._exchange(live, spare) for live, spare in self._twins.pairs]

    def _finish_round(self) -> None:
        handles, self._under_way = self._under_way, None
        if handles is None:
            self._finish(self._start_round())
        else:
            self._finish(handles, should_keep=self._twins.is_written())
