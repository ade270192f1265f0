"""Strategies that average parameters by one exchange with neighbours a round, in lockstep."""

from __future__ import annotations

import abc

import torch

from shoal.group import Handle
from shoal.strategies.session import TrainingSession
from shoal.strategies.strategy import Strategy
from shoal.tensors import ParameterBuffers
from shoal.topology import Weights


class ExchangeStrategy(Strategy):
    """`w ← Mix(w)` once a round; which mix is left to subclasses.

    Adapt-then-combine: `w ← Mix(w − lr·g(w))`, after the step. Adapt-while-combine (`is_overlapped`): the
    exchange starts after the forward and goes on during loss and backward; before the step, `w ← Mix(w)`, and
    the optimizer steps from there with the gradient taken at the old w. Parameters that are written in
    between (a forward that no step follows, then `load_state_dict`) win over the mix: this worker leaves out
    what it receives, once.
    """

    _buffers: ParameterBuffers
    _under_way: list[Handle[torch.Tensor]] | None = None

    @property
    def is_overlapped(self) -> bool:
        """Whether it adapts while it combines."""
        return False

    @abc.abstractmethod
    def round_weights(self, session: TrainingSession) -> Weights:
        """Gives the weights of this worker in the round that comes."""

    def exchange(
        self, session: TrainingSession, live: torch.Tensor, spare: torch.Tensor
    ) -> Handle[torch.Tensor]:
        """Starts this round's exchange of one buffer into another."""
        return session.group.exchange(live, self.round_weights(session), out=spare)

    def hears(self, method: str) -> bool:
        """Listens to forward passes only where rounds start with them."""
        return self.is_overlapped if method == "after_forward" else super().hears(method)

    def start(self, session: TrainingSession) -> None:
        """Moves the parameters into two buffers of the group."""
        self._buffers = session.hold_parameters(2)
        self._under_way = None

    def after_forward(self, session: TrainingSession) -> None:
        """Starts a round that is overlapped with backward."""
        is_early = session.is_accumulating or self._under_way is not None
        if self.is_overlapped and session.is_round and not is_early:
            self._under_way = self._start_round(session)
            self._buffers.mark()

    def before_step(self, session: TrainingSession) -> None:
        """Finishes an overlapped round."""
        session.check_lost_peers()
        if self.is_overlapped and session.is_round:
            self._finish_round(session)

    def after_step(self, session: TrainingSession) -> None:
        """Makes the round, unless it is overlapped."""
        if session.is_round and not self.is_overlapped:
            self._finish_round(session)

    def _start_round(self, session: TrainingSession) -> list[Handle[torch.Tensor]]:
        self._buffers.adopt()
        return [self.exchange(session, live, spare) for live, spare in self._buffers.pairs]

    def _finish_round(self, session: TrainingSession) -> None:
        handles, self._under_way = self._under_way, None
        if handles is None:
            session.finish_exchange(self._start_round(session))
        else:
            session.finish_exchange(handles, should_keep=self._buffers.is_written())
