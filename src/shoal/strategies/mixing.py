"""What strategies share that mix over a topology, and remember something of each parameter between rounds.

What they remember is part of their state, and of one model: another one begins anew. What it is, and how it
takes part in a round, is left to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from shoal.group import Group, Handle
from shoal.strategies.attachment import Attachment
from shoal.strategies.companions import Companion
from shoal.strategies.exact_options import MixOptions
from shoal.strategies.options import CommonOptions
from shoal.strategies.parameters import ExchangeStrategy
from shoal.topology import Topology, make_topology_on


class MixStrategy(ExchangeStrategy):
    """`x_i ← Σ_j W_ij x_j` after the step, unless a subclass has more to do."""

    Options: ClassVar[type[CommonOptions]] = MixOptions
    options: MixOptions

    def __init__(self, group: Group, *, options: CommonOptions | None = None, **named: Any) -> None:
        super().__init__(group, options=options, **named)
        self.topology = self._make_topology()
        """What a round mixes with."""
        self._kept: dict[str, Companion] = {}
        self._scratch: dict[str, Companion] = {}
        """Companions that are no part of the state."""
        self._loaded: Mapping[str, Mapping[str, torch.Tensor]] = {}
        """What the next model begins with."""
        self._ended: dict[str, dict[str, torch.Tensor]] = {}
        self._last_model: weakref.ref[nn.Module] | None = None
        """What was remembered of which model at the end, for it alone."""

    @property
    def is_overlapped(self) -> bool:
        """The exchange of parameters comes after the step."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Also what is remembered of each parameter; after the `with` block as it was at its end."""
        state = super().state_dict()
        state["kept"] = self._kept_state() if self._kept else dict(self._loaded or self._ended)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before attach, what is remembered waits until then."""
        super().load_state_dict(state)
        loaded = state.get("kept", {})
        if self._kept:
            _fill(self._kept, loaded)
        else:
            self._loaded, self._ended = loaded, {}

    def _load_common_state(self, state: Mapping[str, Any]) -> None:
        """What a worker remembers is right for those that it trained with: others begin anew."""
        self.load_state_dict({**state, "kept": {}})

    # For subclasses.

    def _make_topology(self) -> Topology:
        return make_topology_on(self.options.topology, self.group.size, self.group.num_machines)

    def _make_kept(self, attachment: Attachment) -> dict[str, Companion]:
        """What is remembered, by its name in the state; scratch is made here too. All do the same here."""
        return {}

    def _private(self, attachment: Attachment) -> Companion:
        """Zeros in memory of this worker."""
        device = attachment.device
        return Companion(
            attachment.named_parameters, lambda count, dtype: torch.zeros(count, dtype=dtype, device=device)
        )

    def _shared(self, attachment: Attachment) -> Companion:
        """Zeros in memory of the group, for what travels. Collective."""
        return Companion(attachment.named_parameters, self._allocate)

    # What the base asks for.

    def _exchange(self, live: torch.Tensor, spare: torch.Tensor) -> Handle[torch.Tensor]:
        weights = self.topology.weights(self.group.rank, self.rounds)
        return self.group.exchange(live, weights, out=spare)

    def _started(self, attachment: Attachment) -> None:
        super()._started(attachment)
        kept = self._make_kept(attachment)
        is_same = self._last_model is not None and self._last_model() is attachment.model
        _fill(kept, self._loaded or (self._ended if is_same else {}))
        self._kept, self._loaded, self._ended = kept, {}, {}
        self._last_model = weakref.ref(attachment.model)

    def _stopped(self) -> None:
        """A state that an attach which failed has not taken stays."""
        if self._kept:
            self._ended = self._kept_state()
        self._kept, self._scratch = {}, {}
        super()._stopped()

    def _kept_state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {kind: companion.state_dict() for kind, companion in self._kept.items()}


def _fill(kept: Mapping[str, Companion], state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    for kind, companion in kept.items():
        companion.load(state.get(kind, {}))
