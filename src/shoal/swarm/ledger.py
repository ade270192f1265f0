"""What a member has computed and the run has not committed yet: each sample goes in once, or is listed as
lost.

Gradients (or differences of parameters) are kept as sums over samples. When a round registers, what is there
becomes one contribution; at the commit the parts that went in are done, and the others go back to what is
pending, for the next contribution. Where a contribution went in by half its elements, half of its samples
count as committed and half are carried over; elements that were carried over then have more samples behind
them than others, so the mean is taken element by element.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.core import UsageError
from shoal.swarm.state import credited_samples
from shoal.swarm.wire import STEP, Commit
from shoal.tensors import Codec, Encoded, Plain, decode

_MAX_CREDITS = 4096


@dataclass
class FrozenContribution:
    """What a member brings to one round."""

    samples: int
    base: int
    """Samples that are behind all elements."""
    extra: torch.Tensor | None
    """Samples that are behind some elements in addition."""
    mean: torch.Tensor
    begin: int = 0
    """The place of the first element of `mean`."""
    encoded: dict[int, Encoded] = field(default_factory=dict)
    """The parts as they are sent, kept until the commit: whoever asks again gets the same bytes."""
    rests: dict[int, torch.Tensor] = field(default_factory=dict)
    """What each encoded part leaves behind: adopted only if the part goes in."""

    def of(self, begin: int, end: int) -> torch.Tensor:
        """Gives the mean of some elements."""
        return self.mean[begin - self.begin : end - self.begin]

    @property
    def span(self) -> tuple[int, int]:
        """The elements that it has."""
        return self.begin, self.begin + self.mean.numel()


class SampleLedger:
    """Sums what was computed, hands it to rounds, and takes back what a commit left out.

    With `adds_up` what is added are differences that follow each other: their sum counts and not their mean,
    and a round may take some elements of it.
    """

    def __init__(self, num_elements: int, codec: Codec, *, adds_up: bool = False) -> None:
        self.num_elements = num_elements
        self._adds_up = adds_up
        self.num_added = 0
        self.num_committed = 0
        self.lost: list[tuple[str, int]] = []
        """Samples whose fate is unknown or that a fork took along, with the reason."""
        self._credits: deque[tuple[bytes, int, int]] = deque(maxlen=_MAX_CREDITS)
        """How many samples went in under which fork and round, lately: what is older no fork takes back."""
        self._codec = codec
        self._sum: torch.Tensor | None = None
        self._scale = 1
        """What `_sum` must still be multiplied by: the samples of a first mean that is alone so far."""
        self._spare: torch.Tensor | None = None
        """Memory of an earlier contribution, to be used again."""
        self._base = 0
        self._extra: torch.Tensor | None = None
        self._carried = 0
        self._residual: torch.Tensor | None = None
        self._frozen: FrozenContribution | None = None

    @property
    def num_pending(self) -> int:
        """Samples that the next contribution will have."""
        return self._base + self._carried

    @property
    def num_ready(self) -> int:
        """Samples that could go into a round now: what was only carried over waits for something new."""
        return self.num_pending if self._base else 0

    @property
    def sent(self) -> Mapping[int, Encoded]:
        """The parts of the contribution under way, as they were sent; `settle` takes their memory back."""
        return self._frozen.encoded if self._frozen else {}

    @property
    def num_under_way(self) -> int:
        """Samples of the contribution that has no commit yet."""
        return self._frozen.samples if self._frozen else 0

    @property
    def num_lost(self) -> int:
        """Samples that are listed as lost."""
        return sum(num for _, num in self.lost)

    @property
    def is_balanced(self) -> bool:
        """Whether every sample is committed, pending, under way or lost, once."""
        known = self.num_committed + self.num_pending + self.num_under_way + self.num_lost
        return known == self.num_added

    def add(self, mean: torch.Tensor, samples: int) -> None:
        """Takes the mean gradient (or difference) of so many samples."""
        if samples < 1 or mean.numel() != self.num_elements:
            raise UsageError(
                f"{mean.numel()} values of {samples} samples are no contribution to {self.num_elements}.",
                next_step="give one value for each parameter, and at least one sample.",
            )
        if self._adds_up:
            self._whole_sum().add_(mean.detach().reshape(-1))
        else:
            self._add_sum(mean.detach().reshape(-1), samples)
        self._base += samples
        self.num_added += samples

    def progress(self) -> torch.Tensor | None:
        """Copies the differences that no commit has, where they add up."""
        if not self._adds_up or self._sum is None:
            return None
        found = self._sum.clone()
        if self._frozen is not None:
            begin, end = self._frozen.span
            found[begin:end] += self._frozen.mean
        return found

    def freeze(self, span: tuple[int, int] | None = None) -> FrozenContribution | None:
        """Makes a contribution of what is pending, or of some elements of it where differences add up; None
        where there is nothing new or one is under way.
        """
        if self._frozen is not None or not self._base:
            return None
        assert self._sum is not None
        if self._adds_up:
            begin, end = span or (0, self.num_elements)
            due = self._sum[begin:end]
            self._frozen = FrozenContribution(self.num_pending, self._base, None, due.clone(), begin)
            due.zero_()
            self._base = self._carried = 0
            return self._frozen
        if self._extra is not None:
            self._whole_sum().div_(self._extra + self._base)
        elif self._scale != self._base:
            self._whole_sum().div_(self._base)
        self._frozen = FrozenContribution(self.num_pending, self._base, self._extra, self._sum)
        self._sum, self._scale = None, 1
        self._base, self._extra, self._carried = 0, None, 0
        return self._frozen

    def _add_sum(self, mean: torch.Tensor, counts: Any) -> None:
        """Adds a mean times its samples, one number or one for each element, to what is pending."""
        if self._sum is not None:
            self._whole_sum().add_(mean * counts)
            return
        self._sum = self._new_sum()
        if isinstance(counts, int):
            self._scale = counts
            self._sum.copy_(mean)
        else:
            torch.mul(mean, counts, out=self._sum)

    def _whole_sum(self) -> torch.Tensor:
        """Gives the sum itself, of zeros where there is none."""
        if self._sum is None:
            self._sum = self._new_sum().zero_()
        if self._scale != 1:
            self._sum *= self._scale
            self._scale = 1
        return self._sum

    def _new_sum(self) -> torch.Tensor:
        spare, self._spare = self._spare, None
        return torch.empty(self.num_elements) if spare is None else spare

    def encode(self, frozen: FrozenContribution, part: int, begin: int, end: int) -> Encoded:
        """Gives a part as it travels, with what the codec left behind earlier added; the same bytes each
        time.
        """
        if part not in frozen.encoded:
            due = frozen.of(begin, end)
            if self._residual is not None:
                due = due + self._residual[begin:end]
            encoded = self._codec.encode(due)
            if not isinstance(self._codec, Plain):
                frozen.rests[part] = due - decode(encoded)
            frozen.encoded[part] = encoded
        return frozen.encoded[part]

    def settle(self, commit: Commit, place: int) -> None:
        """Accounts for the contribution under way; `place` is that of its owner in the round's list."""
        frozen, self._frozen = self._frozen, None
        if frozen is None:
            return
        plan = commit.plan
        if commit.kind != STEP or plan is None or place not in plan.contributors:
            self._take_back(frozen, [frozen.span], 0)
            return
        index = plan.contributors.index(place)
        missing = []
        for part, result in enumerate(commit.parts):
            begin, end = plan.bounds[part], plan.bounds[part + 1]
            if not int.from_bytes(result.bitmap, "little") >> index & 1:
                missing.append((begin, end))
            elif self._residual is not None or part in frozen.rests:
                if self._residual is None:
                    self._residual = torch.zeros(self.num_elements)
                rest = frozen.rests.get(part)
                self._residual[begin:end] = 0 if rest is None else rest
        credited = credited_samples(commit)[index]
        self._credits.append((commit.fork, commit.round, credited))
        self._take_back(frozen, missing, credited)

    def take_back(self) -> None:
        """Has the contribution under way pending again: none of it was sent."""
        frozen, self._frozen = self._frozen, None
        if frozen is not None:
            self._take_back(frozen, [frozen.span], 0)

    def give_up(self, reason: str) -> None:
        """Lists the contribution under way as lost: nobody can say whether it went in."""
        if self._frozen is not None:
            self.lost.append((reason, self._frozen.samples))
            self._frozen = None

    def abandon(self, reason: str) -> int:
        """Lists what is pending and under way as lost, and gives how much that was: this member ends."""
        num = self.num_pending + self.num_under_way
        if num:
            self.lost.append((reason, num))
        self._frozen, self._base, self._carried, self._extra = None, 0, 0, None
        self._sum, self._scale = None, 1
        return num

    def reconcile(self, is_in_history: Callable[[bytes, int], bool]) -> None:
        """Lists as lost what was committed under forks and rounds that the state held now does not descend
        from.
        """
        lost = sum(samples for fork, number, samples in self._credits if not is_in_history(fork, number))
        if lost:
            self.lost.append(("the fork that they were committed in has ended", lost))
            self.num_committed -= lost
            kept = [credit for credit in self._credits if is_in_history(credit[0], credit[1])]
            self._credits = deque(kept, maxlen=_MAX_CREDITS)

    def _take_back(
        self, frozen: FrozenContribution, missing: Sequence[tuple[int, int]], credited: int
    ) -> None:
        self.num_committed += credited
        is_whole = credited == 0 and sum(end - begin for begin, end in missing) == frozen.mean.numel()
        if self._adds_up:
            self._base += frozen.base if is_whole else 0
            self._carried += frozen.samples - credited - (frozen.base if is_whole else 0)
            for begin, end in missing:
                self._whole_sum()[begin:end] += frozen.of(begin, end)
            return
        if is_whole:
            if self._sum is None and frozen.extra is None:
                self._sum, self._scale = frozen.mean, frozen.base
            else:
                self._add_sum(
                    frozen.mean, frozen.base if frozen.extra is None else frozen.extra + frozen.base
                )
            self._base += frozen.base
            self._carried += frozen.samples - frozen.base
            if frozen.extra is not None:
                self._extra = frozen.extra if self._extra is None else self._extra + frozen.extra
            return
        self._carried += frozen.samples - credited
        if not missing:
            self._spare = frozen.mean
        if missing and self._extra is None:
            self._extra = torch.zeros(self.num_elements)
        for begin, end in missing:
            assert self._extra is not None
            counts: Any = frozen.base if frozen.extra is None else frozen.extra[begin:end] + frozen.base
            self._whole_sum()[begin:end] += frozen.mean[begin:end] * counts
            self._extra[begin:end] += counts
