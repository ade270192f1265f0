"""`choco`: compressed gossip, CHOCO-SGD (Koloskova, Stich and Jaggi 2019, algorithm 2).

Every worker has a public copy of its parameters, which its neighbours hold too. In a round it sends, encoded,
what has changed since, and all add that to the copy; the parameters then move toward the neighbours' copies.
What a codec leaves out stays in the difference, and so comes later.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shoal.core.errors import UsageError
from shoal.group import Group, Handle, Window, share
from shoal.group.functions import start_copy, start_mean
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

_NOTE = struct.Struct("<QI?")
"""A number that counts what one worker sends another, which piece of the whole it is (0: it is a message),
and whether something was missed."""


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
        self._mail = Mail(session, self.topology, self._format.size_bytes, flat.nbytes)
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


class Mail:
    """Messages to and from the neighbours in a static symmetric topology, each in turn. Collective.

    None is missed but those that are cut off on the way. Who has missed one says so in its next, and gets
    the whole, in pieces, before the next that it hears; what came in between is of no use to it.
    """

    def __init__(
        self, session: TrainingSession, topology: Topology, size_bytes: int, whole_bytes: int
    ) -> None:
        group = session.group
        self.sources = topology.sources(group.rank)
        self._size_bytes = size_bytes
        self._whole_bytes = whole_bytes
        like = torch.empty(size_bytes, dtype=torch.uint8)
        self._windows = [
            session.window(like, sources=self.sources[place : place + 1])
            for place in range(topology.degree())
        ]
        """One for each source of this worker, so that one can be waited for alone; others may have more."""
        self._routes = [
            (destination, self._windows[topology.sources(destination).index(group.rank)])
            for destination in topology.destinations(group.rank)
        ]
        self._num_sent = dict.fromkeys(topology.destinations(group.rank), 0)
        self._num_heard = dict.fromkeys(self.sources, 0)
        self._missing: list[int] = []
        """Those of whom something was missed."""
        self._asking: list[int] = []
        """Those who have missed something of this worker's."""
        self._answered: list[int] = []
        """Those who have been sent the whole in this round."""

    def send(self, message: torch.Tensor, whole: Callable[[], torch.Tensor]) -> list[Handle[None]]:
        """Sends a message to all neighbours; it must not be written until the handles are done.

        `whole` is all that the messages before it say, as bytes, for those who have missed one.
        """
        handles = []
        self._answered, self._asking = self._asking, []
        pieces = self._pieces(whole()) if self._answered else []
        for to, window in self._routes:
            for place, piece in enumerate(pieces if to in self._answered else [], 1):
                handles.append(window.send(to, piece, note=self._note(to, place)))
            handles.append(window.send(to, message, note=self._note(to, 0)))
        return handles

    def receive(self) -> Mapping[int, tuple[torch.Tensor, torch.Tensor | None]]:
        """Gives the next message of each source, by its rank, and all that those before it say, if missed.

        There is none of those that are gone, that cannot be heard, or whose whole has yet to come.
        """
        windows = zip(self.sources, self._windows, strict=False)
        came = {source: self._next_of(source, window) for source, window in windows}
        return {source: received for source, received in came.items() if received is not None}

    def _next_of(self, source: int, window: Window) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        pieces: list[torch.Tensor] = []
        while source in window.wait():
            with window.slot(source) as slot:
                number, place, is_asking = _NOTE.unpack(slot.note)
                tensor = slot.tensor.clone()
                slot.clear()
            if number != self._num_heard[source]:
                pieces.clear()
                if source not in self._missing:
                    self._missing.append(source)
            self._num_heard[source] = number + 1
            if place:
                pieces += [tensor] if place == len(pieces) + 1 else []
                continue
            if is_asking and source not in self._answered:
                self._asking.append(source)
            if source not in self._missing:
                return tensor, None
            if len(pieces) * self._size_bytes < self._whole_bytes:
                return None
            self._missing.remove(source)
            return tensor, torch.cat(pieces)[: self._whole_bytes]
        return None

    def _pieces(self, whole: torch.Tensor) -> Sequence[torch.Tensor]:
        """Each of the size of a message."""
        short_bytes = -len(whole) % self._size_bytes
        return torch.split(torch.cat([whole, whole.new_zeros(short_bytes)]), self._size_bytes)

    def _note(self, to: int, place: int) -> bytes:
        number = self._num_sent[to]
        self._num_sent[to] += 1
        return _NOTE.pack(number, place, to in self._missing)
