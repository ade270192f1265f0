"""`choco`: compressed gossip, CHOCO-SGD (Koloskova, Stich and Jaggi 2019, algorithm 2).

Every worker has a public copy of its parameters, which its neighbours hold too. In a round it sends, encoded,
what has changed since, and all add that to the copy; the parameters then move toward the neighbours' copies.
What a codec leaves out stays in the difference, and so comes later.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from shoal.core.errors import UsageError
from shoal.group import Group, share
from shoal.group.functions import Mail, start_copy, start_mean
from shoal.group.kernels import add_differences
from shoal.strategies.options import ChocoOptions
from shoal.strategies.session import TrainingSession
from shoal.strategies.strategy import Strategy
from shoal.tensors import Flat, private_memory
from shoal.tensors.codecs import codec_from_name
from shoal.tensors.codecs.formats import Format
from shoal.topology import Topology, Weights, make_topology_on
from shoal.topology.properties import require_symmetric

log = logging.getLogger(__name__)


class ChocoSGD(Strategy):
    """`x̂_j ← x̂_j + Q(x_j − x̂_j)` for all j, then `x_i ← x_i + γ Σ_j W_ij (x̂_j − x̂_i)`, after the step.

    The public copies begin as what the parameters are, not as zeros. With plain SGD that is the algorithm of
    the paper; other optimizers step in its place. It costs one copy of the parameters, and one for each
    neighbour. Outlives lost peers: their copies no longer count. Those of peers that cannot be heard for a
    while don't count until they have come again, whole. The copies are on the CPU, where codecs work.
    """

    name = "choco"
    survives_loss = True
    Options = ChocoOptions
    options: ChocoOptions

    topology: Topology
    _format: Format | None = None
    _mail: Mail | None = None

    def __init__(self, group: Group | None = None, **options: Any) -> None:
        super().__init__(group, **options)
        self.codec = codec_from_name(self.options.codec)
        self.codec.reseed(self.group.rank)
        self._public: dict[int, Flat] = {}
        """This worker's copy and its neighbours', by rank."""
        self._last: Mapping[str, Mapping[str, torch.Tensor]] = {}
        """The copies of a state that was loaded."""
        self._last_rank = self.group.rank

    def set_group(self, group: Group) -> None:
        """Makes a topology whose matrix is symmetric."""
        super().set_group(group)
        self.topology = make_topology_on(self.options.topology, group.size, group.num_machines)
        require_symmetric(self.topology, self.name)

    @property
    def message_bytes(self) -> int:
        """What goes to each neighbour in a round; 0 while it is not attached."""
        return 0 if self._format is None else self._format.size_bytes

    @property
    def gamma(self) -> float:
        """As it was given, or the share of the parameters' bytes that a message has; 1 while not attached."""
        if self.options.gamma is not None:
            return self.options.gamma
        return 1.0 if self._format is None else min(1.0, self._format.share)

    def state_dict(self) -> dict[str, Any]:
        """Gives also the public copies; after the `with` block those of its end."""
        state = super().state_dict()
        public = self._public_state() if self._public else dict(self._last) or state.get("public", {})
        return {**state, "rank": self.group.rank, "public": public}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up copies that fit, before attach then; see `_take_last`."""
        own = ("rank", "public")
        super().load_state_dict({name: value for name, value in state.items() if name not in own})
        self._last, self._last_rank = state.get("public", {}), int(state.get("rank", self.group.rank))
        if self._public and self._last:
            if not self._is_last_fit:
                self._last = {}
                raise UsageError(
                    f"the public copies of this state are not those that rank {self.group.rank} has.",
                    cause="it is of another rank, or of another topology.",
                    next_step="load it before attach: then the copies begin anew.",
                )
            self._load_public()

    def start(self, session: TrainingSession) -> None:
        """Begins with public copies of what the parameters are."""
        flat = session.parameters
        self._format = Format(self.codec, session.trainable)
        sizes = {"size_bytes": self._format.size_bytes, "whole_bytes": flat.nbytes}
        self._mail = Mail(self.group.rank, self.topology, session.window, **sizes)
        ranks = [self.group.rank, *self._mail.sources]
        self._public = {rank: flat.zeros_like(private_memory()) for rank in ranks}
        self._publish_all(flat)
        self._take_last()

    def _publish_all(self, flat: Flat) -> None:
        """Copies the parameters as they are, this worker's and, uncompressed, those of its neighbours."""
        rank = self.group.rank
        places = [self.topology.sources(each) for each in range(self.group.size)]
        for place in range(self.topology.degree()):
            sources = dict.fromkeys(places[rank][place : place + 1], 1.0)
            receivers = [each for each, own in enumerate(places) if own[place : place + 1] == (rank,)]
            weights = Weights(0.0 if sources else 1.0, sources, dict.fromkeys(receivers, 1.0))
            values = flat.clone(private_memory())
            for handle in [self.group.exchange(each, weights) for each in values.flats]:
                handle.wait()
            for source in sources:
                self._public[source].copy_(values)
        self._public[rank].copy_(flat)

    def _take_last(self) -> None:
        """A copy is one only where its owner has the same: all members take theirs, or none does."""
        if all(share(self.group, self._is_last_fit)):
            self._load_public()
        elif self._last:
            log.info("choco on rank %d begins with new public copies: not all states fit.", self.group.rank)
            self._last = {}

    @property
    def _is_last_fit(self) -> bool:
        return self._last_rank == self.group.rank and self._last.keys() == set(map(str, self._public))

    def _load_public(self) -> None:
        for rank, flat in self._public.items():
            flat.load_state_dict(self._last[str(rank)])
        self._last = {}

    def _public_state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {str(rank): flat.state_dict() for rank, flat in self._public.items()}

    def after_step(self, session: TrainingSession) -> None:
        """Gossips with the neighbours."""
        if not session.is_round:
            return
        assert self._format is not None
        assert self._mail is not None
        live = session.parameters
        flat = live if live.device.type == "cpu" else live.clone(private_memory())
        own = self._public[self.group.rank]
        message = self._format.encode((flat - own).flats)
        sends = self._mail.send(message, lambda: torch.cat([each.view(torch.uint8) for each in own.flats]))
        came = self._mail.receive()
        for send in sends:
            send.wait()
        session.check_lost_peers()
        self._format.add(message, own.flats)
        for source, (message, whole) in came.items():
            public = self._public[source].flats
            if whole is not None:
                wholes = torch.split(whole, [each.nbytes for each in public])
                for part, copy in zip(wholes, public, strict=True):
                    copy.copy_(part.clone().view(copy.dtype))
            self._format.add(message, public)
        weights = self.topology.weights(self.group.rank).sources
        factors = {source: self.gamma * weights[source] for source in came}
        for index, values in enumerate(flat.flats):
            theirs = [(self._public[source].flats[index], factor) for source, factor in factors.items()]
            add_differences(values, own.flats[index], theirs)
        if flat is not live:
            live.copy_(flat)

    def average_all(self, session: TrainingSession) -> None:
        """Makes the parameters the mean of all, and so the public copies, to the bit."""
        root, flat = self.group.members[0], session.parameters
        for values in flat.flats:
            start_mean(self.group, values).wait()
            start_copy(self.group, values, root).wait()
        for public in self._public.values():
            public.copy_(flat)

    def stop(self, session: TrainingSession) -> None:
        """Remembers the public copies."""
        if self._public:
            self._ended = {"public": self._public_state()}
        self._public = {}
