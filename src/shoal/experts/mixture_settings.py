"""How a mixture asks its experts, and how many answers it needs."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any, Literal, Self

from shoal.core import UsageError

WhenNoneAnswers = Literal["raise", "zeros"]


@dataclass(frozen=True, slots=True)
class MixtureSettings:
    """Settings of a `MixtureOfExperts`."""

    k_best: int = 4
    """Experts that each sample is sent to."""
    k_min: int = 1
    """Answers that each sample needs."""
    backward_k_min: int = 1
    """Experts that each sample needs gradients from; those beyond it that fail contribute none."""
    beam_size: int | None = None
    """How many prefixes the search keeps; more find better experts and ask more. None: `k_best`."""
    forward_timeout_s: float | None = None
    """For all experts together, finding them and a second try included; None: as long as each server may
    usually take."""
    backward_timeout_s: float | None = None
    timeout_after_k_min_s: float | None = None
    """How long the others are waited for once every sample has what it needs; None: three times as long as
    that took, a second at least."""
    when_none_answers: WhenNoneAnswers = "raise"
    """A sample that no expert answers for: `raise` NotEnoughExperts, or `zeros` in its place."""
    is_checking: bool = True
    """Whether answers with NaN or infinity count as failures."""
    num_tries: int = 2
    """How often a batch is sent when samples lack answers; those that failed are left out the next time."""
    refresh_s: float = 30.0
    """How old may be what is known of who serves which expert."""

    def __post_init__(self) -> None:
        if not 0 <= self.k_min <= self.k_best or self.k_best < 1 or self.backward_k_min < 0:
            raise UsageError(
                f"k_min {self.k_min} and k_best {self.k_best} do not go together "
                f"(backward_k_min {self.backward_k_min}).",
                next_step="let k_best be 1 or more and k_min not above it; neither minimum below 0.",
            )
        if self.when_none_answers not in ("raise", "zeros"):
            raise UsageError(
                f"when_none_answers is 'raise' or 'zeros', not {self.when_none_answers!r}.",
            )
        if (self.beam_size is not None and self.beam_size < 1) or self.num_tries < 1:
            raise UsageError(f"beam_size ({self.beam_size}) and num_tries ({self.num_tries}) are above 0.")

    @property
    def is_none_enough(self) -> bool:
        """Whether a sample may go without any answer."""
        return self.when_none_answers == "zeros" or self.k_min == 0

    def but(self, **options: Any) -> Self:
        """The same with other values; UsageError for a name that is no setting."""
        names = [each.name for each in dataclasses.fields(self)]
        for name in options:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                raise UsageError(
                    f"A mixture has no setting {name!r}.",
                    next_step=f"use {close[0]}." if close else f"there are {', '.join(names)}.",
                )
        return dataclasses.replace(self, **options)
