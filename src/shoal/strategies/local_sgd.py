"""`local-sgd`: some local steps, then the mean of all parameters (Stich 2019; Lin et al. 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.group import Group, share
from shoal.strategies.averaging import average, make_codec
from shoal.strategies.options import LocalSGDOptions
from shoal.strategies.outer_step import TAKE_MEAN, OuterStep
from shoal.strategies.session import TrainingSession
from shoal.strategies.strategy import Strategy
from shoal.tensors import DTYPES, private_memory
from shoal.tensors.dtypes import dtype_name

_Label = tuple[str, str, str]
"""Of a tensor of the optimizer's state: the parameter's name, the key and the dtype."""
_STEP = "step"


class LocalSGD(Strategy):
    """`x_i ← mean of all x_j` after every `local_steps` steps, buffers included; outlives lost peers.

    With a codec, what each has learned since the last mean travels encoded, and what the codec leaves out
    comes with the next round.
    """

    name = "local-sgd"
    survives_loss = True
    is_equal_after_round = True
    trains_shards = True
    Options = LocalSGDOptions
    options: LocalSGDOptions
    common_state = ("fragment",)
    fragment: OuterStep
    """The last mean, where what was learned since travels encoded."""
    _stepped: SteppedParameters

    def __init__(self, group: Group | None = None, **options: Any) -> None:
        super().__init__(group, **options)
        self.codec = make_codec(self.options.codec, self.group.rank)

    def start(self, session: TrainingSession) -> None:
        """Makes room for the mean."""
        self._stepped = SteppedParameters()
        if self.codec is None:
            if not session.is_sharded:  # the memory of shards is FSDP2's, and stays where it is
                session.hold_parameters(2)
        else:
            self.fragment = OuterStep(0, session.named_parameters, private_memory(), has_momentum=False)

    def after_step(self, session: TrainingSession) -> None:
        """Averages after every so many steps."""
        if self.options.average_momentum and not session.is_skipped:
            self._stepped.add_step(session)
        if session.is_round:
            self.last_round(session)

    def last_round(self, session: TrainingSession) -> None:
        """Averages parameters, buffers and, where it is an option, the optimizer's state."""
        if self.codec is None:
            session.average_parameters()
        else:
            session.check_lost_peers()
            self.fragment.send(self.group, self.codec)
            self.fragment.step(TAKE_MEAN)
        session.average_buffers()
        if self.options.average_momentum:
            self._average_state(session)

    def average_all(self, session: TrainingSession) -> None:
        """Does nothing: a round is one."""

    def _average_state(self, session: TrainingSession) -> None:
        """Averages what the optimizer keeps in the shape of a parameter, and its count of steps.

        The mean is that of the workers that have stepped the parameter since the last round, the others keep
        what they have (`SteppedParameters`). Counts of steps (Adam's) become the nearest whole number to
        their mean: they say how many gradients are in the moments.
        """
        mine = self._stepped_state(session)
        everybody = [list(map(tuple, theirs)) for theirs in share(self.group, sorted(mine))]
        labels = sorted(dict.fromkeys(label for theirs in everybody for label in theirs))
        is_partial = any(len(theirs) < len(labels) for theirs in everybody)
        tensors = [mine[label] if label in mine else _zeros(session, label) for label in labels]
        # they go with the same weights as the state, also when a worker is lost meanwhile
        parts = torch.tensor([float(label in mine) for label in labels], dtype=torch.float64)
        average(self.group, [*tensors, parts] if is_partial else tensors)
        for label, part in zip(labels, parts.tolist(), strict=True):
            if label in mine:
                _store(session, label, mine[label].div_(part) if is_partial else mine[label])
        self._stepped.is_round_over = True

    def _stepped_state(self, session: TrainingSession) -> dict[_Label, torch.Tensor]:
        """The state of the parameters that were stepped in this round, sparse tensors as dense copies."""
        state = session.optimizer.state
        return {
            (name, key, dtype_name(value.dtype)): value.to_dense() if value.is_sparse else value
            for name, parameter in session.named_parameters.items()
            if parameter in self._stepped
            for key, value in state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
            if value.shape == parameter.shape or key == _STEP
        }


class SteppedParameters:
    """Remembers which parameters this worker's optimizer has stepped since the round before.

    torch leaves out a parameter without a gradient, and its state then stays what it was. So in a round only
    the workers that have stepped a parameter have momentum of it that is new: to average in that of the
    others, or zeros for those that have none, would take momentum away from those that use the parameter. A
    worker all of whose steps were skipped (a GradScaler's) takes part as in the round before.
    """

    def __init__(self) -> None:
        self._stepped: dict[nn.Parameter, None] = {}
        self.is_round_over = False
        """Whether the next step begins anew; until then the round's parameters are known."""

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Tells whether the round that is under way, or was the last, has momentum of this parameter."""
        return parameter in self._stepped

    def add_step(self, session: TrainingSession) -> None:
        """Takes note of a step, before its gradients are gone."""
        if self.is_round_over:
            self._stepped = {}
            self.is_round_over = False
        for parameter in session.trainable:
            if parameter.grad is not None:
                self._stepped[parameter] = None


def _zeros(session: TrainingSession, label: _Label) -> torch.Tensor:
    """Makes what a worker without this state sends in its place."""
    name, key, dtype = label
    if key == _STEP:
        return torch.zeros((), dtype=DTYPES[dtype])
    return torch.zeros_like(session.named_parameters[name].detach(), dtype=DTYPES[dtype])


def _store(session: TrainingSession, label: _Label, value: torch.Tensor) -> None:
    """Puts a mean where the optimizer keeps it, unless it is there already."""
    name, key, _ = label
    entry = session.optimizer.state[session.named_parameters[name]]
    if key == _STEP:
        value.round_()
    elif entry[key].is_sparse:
        entry[key] = value.to_sparse(entry[key].sparse_dim())
