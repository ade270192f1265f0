"""Workers that count by a mass each: their one model is the mean over the masses, not over the workers.

For the push-sum strategies, asynchronous (`push_sum`) and synchronous (`sgp`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.group import Group, share
from shoal.strategies.averaging import mean_over
from shoal.strategies.options import CommonOptions
from shoal.strategies.parameters import SurvivingStrategy


class MassStrategy(SurvivingStrategy):
    """The parameters that train are this worker's part of a sum divided by its `weight`, which it keeps."""

    def __init__(self, group: Group, *, options: CommonOptions | None = None, **named: Any) -> None:
        super().__init__(group, options=options, **named)
        self.weight = 1.0
        """This worker's mass: 1 on average over all, less what is under way."""

    def state_dict(self) -> dict[str, Any]:
        """Also the weight."""
        return {**super().state_dict(), "weight": self.weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """With the parameters that go with it."""
        super().load_state_dict(state)
        self.weight = float(state["weight"])

    def step_begins(self, num_missed: int) -> float:
        """The optimizer works on the parameters, but steps in the sum."""
        return super().step_begins(num_missed) / self.weight

    def _mass_factor(self) -> float:
        """By which this worker counts in a mean over the members. Collective."""
        masses = share(self.group, self.weight)
        return float(self.weight * len(masses) / sum(masses))

    def _common_model(self) -> dict[str, torch.Tensor]:
        common = super()._common_model()
        if self.is_alone:
            return common
        factor = self._mass_factor()
        parameters = dict(self.attachment.model.named_parameters(remove_duplicate=False))
        names = [name for name, parameter in parameters.items() if parameter.requires_grad]
        means = mean_over(self.group, [parameters[name].detach() * factor for name in names])
        return {**common, **dict(zip(names, means, strict=True))}

    def _load_common_state(self, state: Mapping[str, Any]) -> None:
        self.load_state_dict({**state, "weight": 1.0})
