"""`local-sgd`: some local steps, then the mean of all parameters (Stich 2019; Lin et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from shoal.group import Group, Handle, share
from shoal.strategies.attachment import Attachment
from shoal.strategies.averaging import packed, start_mean
from shoal.strategies.buffers import average_buffers
from shoal.strategies.coded import make_codec
from shoal.strategies.fragments import TAKE_MEAN, Fragment, private_memory
from shoal.strategies.optimizers import SteppedParameters
from shoal.strategies.options import CommonOptions, LocalSGDOptions
from shoal.strategies.parameters import ExchangeStrategy
from shoal.tensors import DTYPES
from shoal.tensors.dtypes import dtype_name
from shoal.topology import Weights

_Label = tuple[str, str, str]
"""Of a tensor of the optimizer's state: the parameter's name, the key and the dtype."""
_STEP = "step"


class LocalSGD(ExchangeStrategy):
    """`x_i ← mean of all x_j` after every `local_steps` steps, buffers included; outlives lost peers.

    With a codec, what each has learned since the last mean travels encoded, and what the codec leaves out
    comes with the next round.
    """

    name = "local-sgd"
    survives_loss = True
    Options: ClassVar[type[CommonOptions]] = LocalSGDOptions
    options: LocalSGDOptions

    def __init__(self, group: Group, *, options: CommonOptions | None = None, **named: Any) -> None:
        super().__init__(group, options=options, **named)
        self._codec = make_codec(self.options.codec, group.rank)
        self._stepped = SteppedParameters()
        self._fragment: Fragment | None = None
        self._loaded: Mapping[str, Any] | None = None

    @property
    def is_overlapped(self) -> bool:
        """Never: the mean comes after the step."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """With a codec also the last mean, and what the codec has kept."""
        state = super().state_dict()
        if self._codec is not None:
            state["codec"] = self._codec.state_dict()
            if self._fragment is not None:
                state["fragment"] = self._fragment.state_dict()
            elif self._loaded is not None:
                state["fragment"] = self._loaded
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before attach, the last mean waits until then."""
        self._load_common_state(state)
        if self._codec is not None and "codec" in state:
            self._codec.load_state_dict(state["codec"])

    def _load_common_state(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._codec is not None and "fragment" in state:
            if self._fragment is None:
                self._loaded = state["fragment"]
            else:
                self._fragment.load_state_dict(state["fragment"])

    def _started(self, attachment: Attachment) -> None:
        self._stepped = SteppedParameters()
        if self._codec is None:
            super()._started(attachment)
            return
        self._fragment = Fragment(0, attachment.named_parameters, private_memory, has_momentum=False)
        if self._loaded is not None:
            self._fragment.load_state_dict(self._loaded)
            self._loaded = None

    def _stopped(self) -> None:
        self._fragment = None
        super()._stopped()

    def _exchange(self, live: torch.Tensor, spare: torch.Tensor) -> Handle[torch.Tensor]:
        return self.group.exchange(live, Weights.uniform(self._others, self._others), out=spare)

    def _after_step(self) -> None:
        self._stepped.add_step(self.attachment)
        super()._after_step()

    def _finish_round(self) -> None:
        if self._fragment is None:
            super()._finish_round()
        else:
            self._look_for_losses()
            self._fragment.send(self.group, self._codec)
            self._fragment.step(TAKE_MEAN)
        average_buffers(self.group, self.attachment.model)
        if self.options.average_momentum:
            self._average_state()

    @property
    def has_last_round(self) -> bool:
        """Unless every step has its round."""
        return self.options.local_steps > 1

    def _last_round(self) -> None:
        self._finish_round()

    def _average_all(self) -> None:
        """Nothing: a round is one."""

    def _average_state(self) -> None:
        """Average what the optimizer keeps in the shape of a parameter, and its count of steps.

        The mean of a parameter's state is that of the workers that have stepped the parameter since the last
        round. torch leaves out a parameter without a gradient, so the others have nothing new to add; they
        keep what they have. Counts of steps (Adam's) become the nearest whole number to their mean: they say
        how many gradients are in the moments.
        """
        mine = self._stepped_state()
        everybody = [list(map(tuple, theirs)) for theirs in share(self.group, sorted(mine))]
        labels = sorted(dict.fromkeys(label for theirs in everybody for label in theirs))
        is_partial = any(len(theirs) < len(labels) for theirs in everybody)
        tensors = [mine[label] if label in mine else self._zeros(label) for label in labels]
        # they go with the same weights as the state, also when a worker is lost meanwhile
        parts = torch.tensor([float(label in mine) for label in labels], dtype=torch.float64)
        with torch.no_grad():
            for bucket, members in packed([*tensors, parts] if is_partial else tensors):
                start_mean(self.group, bucket.flat).wait()
                bucket.store(members)
            for label, part in zip(labels, parts.tolist(), strict=True):
                if label in mine:
                    self._store(label, mine[label].div_(part) if is_partial else mine[label])
        self._stepped.end_round()

    def _stepped_state(self) -> dict[_Label, torch.Tensor]:
        """The state of the parameters that were stepped in this round, sparse tensors as dense copies."""
        state = self.attachment.optimizer.state
        return {
            (name, key, dtype_name(value.dtype)): value.to_dense() if value.is_sparse else value
            for name, parameter in self.attachment.named_parameters.items()
            if parameter in self._stepped
            for key, value in state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
            if value.shape == parameter.shape or key == _STEP
        }

    def _zeros(self, label: _Label) -> torch.Tensor:
        """What a worker without this state sends in its place."""
        name, key, dtype = label
        if key == _STEP:
            return torch.zeros((), dtype=DTYPES[dtype])
        return torch.zeros_like(self.attachment.named_parameters[name].detach(), dtype=DTYPES[dtype])

    def _store(self, label: _Label, value: torch.Tensor) -> None:
        """Put a mean where the optimizer keeps it, unless it is there already."""
        name, key, _ = label
        entry = self.attachment.optimizer.state[self.attachment.named_parameters[name]]
        if key == _STEP:
            value.round_()
        elif entry[key].is_sparse:
            entry[key] = value.to_sparse(entry[key].sparse_dim())
