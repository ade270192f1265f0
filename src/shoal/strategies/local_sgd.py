"""`local-sgd`: some local steps, then the mean of all parameters (Stich 2019; Lin et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from shoal.group import Group, Handle
from shoal.strategies.attachment import Attachment
from shoal.strategies.averaging import packed, start_mean
from shoal.strategies.buffers import average_buffers
from shoal.strategies.coded import make_codec
from shoal.strategies.fragments import TAKE_MEAN, Fragment, private_memory
from shoal.strategies.options import CommonOptions, LocalSGDOptions
from shoal.strategies.parameters import ExchangeStrategy
from shoal.topology import Weights


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
        self._codec = make_codec(self.options.codec)
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
        """Of the optimizer, what has the shape of a parameter, where all members have it."""
        state = self.attachment.optimizer.state
        mine = {
            f"{name} {key}": value
            for name, parameter in self.attachment.named_parameters.items()
            for key, value in state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        }
        everybody = self.group.share(sorted(mine))
        common = [name for name in everybody[0] if all(name in theirs for theirs in everybody[1:])]
        with torch.no_grad():
            for bucket, members in packed([mine[name] for name in common]):
                start_mean(self.group, bucket.flat).wait()
                bucket.store(members)
