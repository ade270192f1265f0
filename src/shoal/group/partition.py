"""A network that may be cut in two: which side of it goes on.

Workers that fall silent at once, and whose end nobody has seen, may be alive and train a model of their own
beyond a cut. So the side with more workers goes on, and of two equal sides the one with the lowest rank; the
other side stops. All decide alike, because each counts the same workers: those that were there before the
cut. Workers that end one by one leave no side behind, and the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shoal.core import NetworkSplit
from shoal.group.base import Loss

_NOTICING = 1.25
"""How long after a cut silence is noticed, at the latest: a beat may have been answered just before."""


@dataclass(frozen=True, slots=True)
class NetworkPartition:
    """The two sides of a network that may be cut, as one worker sees them."""

    here: Sequence[int]
    """Ranks on this side, in order."""
    silent: Sequence[int]
    """Ranks that may be alive on the other side, in order."""
    verdict: Loss | None = None
    """Of one that has said that it goes on without this worker, if any has."""

    @property
    def should_stop(self) -> bool:
        """Whether this side is the smaller one, or the equal one without the lowest rank."""
        if len(self.here) != len(self.silent):
            return len(self.here) < len(self.silent)
        return self.here[0] > self.silent[0]

    @property
    def is_worth_saying(self) -> bool:
        """Whether it is more than one worker that the others lose."""
        return len(self.silent) > 1 or len(self.here) == 1

    def error(self) -> Exception:
        """What is raised on the side that stops."""
        if self.verdict is not None:
            return self.verdict.error()
        return NetworkSplit(
            f"{self._what()}: this side stops, {self._reason()}.",
            peer=self.silent[0],
            cause="the network is cut, or the machines of the silent ranks are down.",
            next_step="start again from a checkpoint; with --allow-split, or shoal.init(allow_split=True), "
            "each side of a cut network goes on with a model of its own.",
        )

    def line(self, *, is_allowed: bool) -> str:
        """What is said once on the side that goes on."""
        if is_allowed:
            return (
                f"{self._what()}: this side goes on, by --allow-split, and the other may train another model"
            )
        return f"{self._what()}: this side goes on, {self._reason()}"

    def _what(self) -> str:
        when = " at once" if len(self.silent) > 1 else ""
        verb = "is" if len(self.here) == 1 else "are"
        return f"{_ranks(self.silent)} fell silent{when}, and {_ranks(self.here)} {verb} on this side"

    def _reason(self) -> str:
        if len(self.here) != len(self.silent):
            return f"being the {'smaller' if self.should_stop else 'larger'} one"
        return "because the lowest rank is on " + ("the other" if self.should_stop else "it")


def find_partition(
    losses: Iterable[Loss], members: Sequence[int], left_at_s: Mapping[int, float], silence_s: float
) -> NetworkPartition | None:
    """The latest workers that may be alive elsewhere, each lost at most `silence_s` after the one before.

    Those that were lost longer ago are not counted on any side: the others have gone on without them. One
    that has left or ended since the cut, and this worker could learn of it, is counted here: to the others it
    is silent.
    """
    losses = list(losses)
    unconfirmed = sorted((loss for loss in losses if loss.kind != "ended"), key=lambda loss: -loss.at_s)
    latest: list[Loss] = []
    for loss in unconfirmed:
        if latest and latest[-1].at_s - loss.at_s > silence_s:
            break
        latest.append(loss)
    if not latest:
        return None
    cut_at_s = latest[-1].at_s - _NOTICING * silence_s
    ended_at_s = {loss.rank: loss.at_s for loss in losses if loss.kind == "ended"}
    gone = [rank for rank, at_s in {**ended_at_s, **left_at_s}.items() if at_s > cut_at_s]
    here = dict.fromkeys([*members, *gone])
    verdict = next((loss for loss in latest if loss.kind == "verdict"), None)
    return NetworkPartition(sorted(here), sorted(loss.rank for loss in latest), verdict)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
