"""Pair averaging (KungFu's async-sgd; AD-PSGD, Lian et al. 2018): nobody waits for anybody.

Before a step: pull the newest model that a random peer has published, and average one half. Then the step.
Then publish. The order is fixed. Of the twins one is published while the other trains; the mix into the
published one's place happens only after a newer one is published. A snapshot that was overwritten while it
was read is pulled again, and left out when that happens too often. On a GPU, which comes to what it is told
later, there is a third buffer: the model before the last is there to pull while the last one is not yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from shoal.group import Group, Window, share
from shoal.strategies.attachment import Attachment
from shoal.strategies.options import CommonOptions, PairOptions
from shoal.strategies.parameters import ParameterStrategy
from shoal.strategies.staleness import Staleness
from shoal.strategies.twins import Pair

_ATTEMPTS = 3
_SEED_STRIDE = 1_000_003
_SEED_MASK = 2**63 - 1


@dataclass(slots=True)
class _Published:
    """What this worker has published by pair averaging in one group."""

    numbers: list[int] = field(default_factory=list)
    """Of the models that are attached: several can be, side by side."""
    retired: list[Window] = field(default_factory=list)
    """Of models that were detached: others may pull them still, until all meet to attach another one."""
    last_version: int = -1
    """Versions never fall, not even for a model that takes the place of one that was detached."""


class PairAverage(ParameterStrategy):
    """`w ← ½(w + w_peer)`, step, publish; the peer is drawn uniformly from those that are there.

    With `local_steps` J the mix comes before the first of J steps, and the model is published after the last.
    After the start no worker waits for another, except for a global average, which is a collective.
    """

    name = "pair"
    survives_loss = True
    is_lockstep = False
    Options: ClassVar[type[CommonOptions]] = PairOptions
    options: PairOptions

    def __init__(self, group: Group, *, options: CommonOptions | None = None, **named: Any) -> None:
        super().__init__(group, options=options, **named)
        self.staleness = Staleness()
        self._version = 0
        self._is_published = False
        """Others may read the live buffers: the next step must find the parameters in the spare ones."""
        self._number = -1
        self._windows: list[Window] = []
        """One for each pair of the twins."""
        self._published: _Published = group.notes.setdefault(self.name, _Published())
        self._generator = self._seeded(0)

    @property
    def stats(self) -> dict[str, Any]:
        """How far behind the models were that were pulled, in rounds, and how many rounds had none."""
        return self.staleness.summary()

    def state_dict(self) -> dict[str, Any]:
        """Also the version, the generator of peers and the counts of staleness."""
        return {
            **super().state_dict(),
            "rank": self.group.rank,
            "version": self._version,
            "generator": self._generator.get_state(),
            "staleness": self.staleness.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The state of another rank gives all but its generator: peers are drawn independently."""
        super().load_state_dict(state)
        self._version = max(self._version, int(state["version"]))
        if state["rank"] == self.group.rank:
            self._generator.set_state(state["generator"])
        else:
            self._generator = self._seeded(self._version)
        self.staleness.load_state_dict(state["staleness"])

    def _num_buffers(self, device: torch.device) -> int:
        return 2 if device.type == "cpu" else 3

    def _started(self, attachment: Attachment) -> None:
        super()._started(attachment)
        number = 1 + max(self._published.numbers, default=-1)
        version = max(self._version, self._published.last_version + 1)
        everybody = share(self.group, [number, version])
        self._number, self._version = (max(values) for values in zip(*everybody, strict=True))
        for window in self._published.retired:
            window.close()
        self._published.retired.clear()
        self._published.numbers.append(self._number)
        self._windows = [
            self.group.window(
                f"pair {self._number}.{index}",
                pair.live.numel(),
                pair.live.dtype,
                sources=(),
                device=pair.live.device,
            )
            for index, pair in enumerate(self._twins.pairs)
        ]
        self._publish()
        self.group.barrier().wait()

    def _stopped(self) -> None:
        self._is_published = False
        if self._number in self._published.numbers:
            self._published.numbers.remove(self._number)
        self._number = -1
        self._published.retired += self._windows
        self._windows = []
        super()._stopped()

    def _before_step(self) -> None:
        if self._is_published:
            self._mix()

    def _after_step(self) -> None:
        if self.is_round:
            self._version += 1
            self._publish()

    def _skipped_step(self) -> None:
        self._before_step()
        self._after_step()

    def _average_all(self) -> None:
        """Collective. What it writes was published, what it reads is: a round has just ended."""
        self._retire()
        while not self._twins.is_home:
            # Workers have done different numbers of rounds, but an exchange is one of equal buffers.
            self._move()
            self._retire()
        super()._average_all()
        self._version += 1
        self._publish()

    def _mix(self) -> None:
        self._look_for_losses()
        others = self._others
        if not others:
            return
        self._retire()
        self._twins.adopt()
        peer = others[int(torch.randint(len(others), (), generator=self._generator))]
        places = zip(self._windows, self._twins.pairs, strict=True)
        pulled = [self._pull(window, pair, peer) for window, pair in places]
        known = [version for version in pulled if version is not None]
        self.staleness.note(self._version - min(known) if known else None)
        self._twins.swap()
        self._is_published = False

    def _pull(self, window: Window, pair: Pair, peer: int) -> int | None:
        """Fill a spare buffer with the mean of the live one and the peer's; the version of the latter."""
        live, spare = pair
        for _ in range(_ATTEMPTS):
            snapshot = window.fetch(peer).wait()
            if snapshot is None:
                break
            torch.lerp(live, snapshot.tensor, 0.5, out=spare)
            if snapshot.is_intact():
                return snapshot.version
        spare.copy_(live)
        return None

    def _publish(self) -> None:
        for window, pair in zip(self._windows, self._twins.pairs, strict=True):
            window.publish(pair.live, self._version)
        self._is_published = True
        self._published.last_version = max(self._published.last_version, self._version)

    def _retire(self) -> None:
        """Nobody reads the spare buffers from now on; only what a global average left there is waited for."""
        num_kept = self._num_buffers(self.attachment.device) - 1
        for window, pair in zip(self._windows, self._twins.pairs, strict=True):
            window.reclaim(self._version - num_kept)
            self.group.settle(pair.spare)

    def _move(self) -> None:
        """The same parameters, in the other buffers."""
        self._twins.adopt()
        for live, spare in self._twins.pairs:
            spare.copy_(live)
        self._twins.swap()
        self._version += 1
        self._publish()

    def _seeded(self, version: int) -> torch.Generator:
        seed = (self.options.seed * _SEED_STRIDE + self.group.rank) * _SEED_STRIDE + version
        return torch.Generator().manual_seed(seed & _SEED_MASK)
