"""Pair averaging (KungFu's async-sgd; AD-PSGD, Lian et al. 2018): nobody waits for anybody.

Before a step: pull the newest model that a random peer has published, and average one half. Then the step.
Then publish. The order is fixed. Of two buffers one is published while the other trains; the mix into the
published one's place happens only after a newer one is published. A snapshot that was overwritten while it
was read is pulled again, and left out when that happens too often. On a GPU, which comes to what it is told
later, there is a third buffer: the model before the last is there to pull while the last one is not yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.group import Group, Window, share
from shoal.strategies.options import PairOptions
from shoal.strategies.session import TrainingSession
from shoal.strategies.staleness import Staleness
from shoal.strategies.strategy import Strategy
from shoal.tensors import ParameterBuffers

_ATTEMPTS = 3
_SEED_STRIDE = 1_000_003
_SEED_MASK = 2**63 - 1


@dataclass(slots=True)
class _Published:
    """What this worker has published by pair averaging in one group."""

    next_number: int = 0
    """That of the model which is attached next: no name of a window is used twice."""
    retired: list[Window] = field(default_factory=list)
    """Of models that were detached: others may pull them still, until all meet to attach another one."""


class PairAverage(Strategy):
    """`w ← ½(w + w_peer)`, step, publish; the peer is drawn uniformly from those that are there.

    With `local_steps` J the mix comes before the first of J steps, and the model is published after the last.
    After the start no worker waits for another, except for a global average, which is a collective.
    """

    name = "pair"
    survives_loss = True
    is_lockstep = False
    Options = PairOptions
    options: PairOptions

    _buffers: ParameterBuffers

    def __init__(self, group: Group | None = None, **options: Any) -> None:
        super().__init__(group, **options)
        self.staleness = Staleness()
        self._version = 0
        """The version of the model that was published last."""
        self._is_published = False
        """Others may read the live buffers: the next step must find the parameters in the spare ones."""
        self._windows: list[Window] = []
        """One for each dtype."""

    def set_group(self, group: Group) -> None:
        """Draws peers independently of those of other ranks."""
        super().set_group(group)
        self._published: _Published = group.notes.setdefault(self.name, _Published())
        self.generator = self._seeded(0)

    @property
    def stats(self) -> dict[str, Any]:
        """How far behind the models were that were pulled, in rounds, and how many rounds had none."""
        return self.staleness.summary()

    def tracked_values(self) -> Mapping[str, float]:
        """Gives how old the models were that it mixed, in rounds, since the beginning."""
        behind = {"mean_staleness": self.staleness.mean_behind, "max_staleness": self.staleness.max_behind}
        return {**super().tracked_values(), **behind}

    def state_dict(self) -> dict[str, Any]:
        """Gives also the version, and the rank whose generator of peers it has."""
        return {**super().state_dict(), "rank": self.group.rank, "version": self._version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes all but its generator from a state of another rank: peers are drawn independently."""
        is_own = state["rank"] == self.group.rank
        left_out = ("rank", "version") if is_own else ("rank", "version", "generator")
        super().load_state_dict({name: value for name, value in state.items() if name not in left_out})
        self._version = max(self._version, int(state["version"]))
        if not is_own:
            self.generator = self._seeded(self._version)

    def load_common_state(self, state: Mapping[str, Any]) -> None:
        """Takes up counts and version of another worker."""
        self.load_state_dict({**state, "rank": -1})

    def start(self, session: TrainingSession) -> None:
        """Publishes the first model, and waits until all have."""
        self._buffers = session.hold_parameters(2 if session.device.type == "cpu" else 3)
        everybody = share(self.group, [self._published.next_number, self._version])
        number, self._version = (max(values) for values in zip(*everybody, strict=True))
        self._published.next_number = number + 1
        for window in self._published.retired:
            window.close()
        self._published.retired.clear()
        self._windows = [
            self.group.window(
                f"pair {number}.{index}", live.numel(), live.dtype, sources=(), device=live.device
            )
            for index, live in enumerate(self._buffers.live.flats)
        ]
        self._publish()
        self.group.barrier().wait()

    def stop(self, session: TrainingSession) -> None:
        """Leaves what is published for others to pull."""
        self._is_published = False
        self._published.retired += self._windows
        self._windows = []

    def before_step(self, session: TrainingSession) -> None:
        """Mixes one half of a random peer's model in."""
        if not self._is_published:
            return
        super().before_step(session)
        others = session.others
        if not others:
            return
        self._retire()
        self._buffers.adopt()
        peer = others[0]
        if len(others) > 1:
            peer = others[int(torch.randint(len(others), (), generator=self.generator))]
        places = zip(self._windows, self._buffers.pairs, strict=True)
        pulled = [self._pull(window, live, spare, peer) for window, (live, spare) in places]
        known = [version for version in pulled if version is not None]
        self.staleness.note(self._version - min(known) if known else None)
        self._buffers.swap()
        self._is_published = False

    def after_step(self, session: TrainingSession) -> None:
        """Publishes the model, for others to pull."""
        if session.is_round:
            self._publish_next()

    def average_all(self, session: TrainingSession) -> None:
        """Averages all members: what it writes was published, what it reads is. Collective."""
        self._retire()
        while not self._buffers.is_home:
            # Workers have done different numbers of rounds, but an exchange is one of equal buffers: the same
            # parameters move into the others.
            self._buffers.adopt()
            self._buffers.spare.copy_(self._buffers.live)
            self._buffers.swap()
            self._publish_next()
            self._retire()
        session.average_parameters()
        self._publish_next()

    def _pull(self, window: Window, live: torch.Tensor, spare: torch.Tensor, peer: int) -> int | None:
        """Fills a spare buffer with the mean of the live one and the peer's; the version of the latter."""
        for _ in range(_ATTEMPTS):
            snapshot = window.fetch(peer).wait()
            if snapshot is None:
                break
            torch.lerp(live, snapshot.tensor, 0.5, out=spare)
            if snapshot.is_intact():
                return snapshot.version
        spare.copy_(live)
        return None

    def _publish_next(self) -> None:
        self._version += 1
        self._publish()

    def _publish(self) -> None:
        for window, live in zip(self._windows, self._buffers.live.flats, strict=True):
            window.publish(live, self._version)
        self._is_published = True

    def _retire(self) -> None:
        """Nobody reads the spare buffers from now on; only what a global average left there is waited for."""
        for window, spare in zip(self._windows, self._buffers.spare.flats, strict=True):
            window.reclaim(self._version - (self._buffers.num_buffers - 1))
            self.group.settle(spare)

    def _seeded(self, version: int) -> torch.Generator:
        seed = (self.options.seed * _SEED_STRIDE + self.group.rank) * _SEED_STRIDE + version
        return torch.Generator().manual_seed(seed & _SEED_MASK)
