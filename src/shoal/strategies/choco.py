"""`choco`: compressed gossip, CHOCO-SGD (Koloskova, Stich and Jaggi 2019, algorithm 2).

Every worker has a public copy of its parameters, which its neighbours hold too. In a round it sends, encoded,
what has changed since, and all add that to the copy; the parameters then move toward the neighbours' copies.
What a codec leaves out stays in the difference, and so comes later.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from shoal.core.errors import UsageError
from shoal.group import Group, share
from shoal.group.kernels import add_differences
from shoal.strategies.attachment import Attachment
from shoal.strategies.averaging import start_copy, start_mean
from shoal.strategies.companions import Companion
from shoal.strategies.fitting import require_symmetric
from shoal.strategies.flats import Flats
from shoal.strategies.messages import Format, Mail
from shoal.strategies.options import CommonOptions
from shoal.strategies.parameters import SurvivingStrategy
from shoal.strategies.research_options import ChocoOptions
from shoal.tensors.codecs import codec_from_name
from shoal.topology import Weights, make_topology_on

log = logging.getLogger(__name__)


class ChocoSGD(SurvivingStrategy):
    """`x̂_j ← x̂_j + Q(x_j − x̂_j)` for all j, then `x_i ← x_i + γ Σ_j W_ij (x̂_j − x̂_i)`, after the step.

    The public copies begin as what the parameters are, not as zeros. With plain SGD that is the algorithm of
    the paper; other optimizers step in its place. It costs one copy of the parameters, and one for each
    neighbour. Outlives lost peers: their copies no longer count. Those of peers that cannot be heard for a
    while don't count until they have come again, whole.
    """

    name = "choco"
    survives_loss = True
    runs_on_devices = False
    Options: ClassVar[type[CommonOptions]] = ChocoOptions
    options: ChocoOptions

    def __init__(self, group: Group, *, options: CommonOptions | None = None, **named: Any) -> None:
        super().__init__(group, options=options, **named)
        self.topology = make_topology_on(self.options.topology, group.size, group.num_machines)
        require_symmetric(self.topology, self.name)
        self._codec = codec_from_name(self.options.codec)
        self._codec.reseed(group.rank)
        self._flats_or_none: Flats | None = None
        self._format: Format | None = None
        self._mail: Mail | None = None
        self._public: dict[int, Companion] = {}
        """This worker's copy and its neighbours', by rank."""
        self._loaded: Mapping[str, Mapping[str, torch.Tensor]] = {}
        self._loaded_rank = group.rank
        self._ended: Mapping[str, Mapping[str, torch.Tensor]] = {}

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
        """Also what the codec keeps, and the public copies; after the `with` block those of its end."""
        public = self._public_state() if self._public else dict(self._loaded or self._ended)
        own = {"rank": self.group.rank, "public": public, "codec": self._codec.state_dict()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before attach, the copies wait until then, and count if those of all members fit.

        While attached, load it on all members. UsageError for one of another rank or topology.
        """
        super().load_state_dict(state)
        self._codec.load_state_dict(state["codec"])
        self._loaded, self._ended = state["public"], {}
        self._loaded_rank = int(state.get("rank", self.group.rank))
        if self._public and self._loaded:
            if not self._is_loaded_fit:
                self._loaded = {}
                raise UsageError(
                    f"the public copies of this state are not those that rank {self.group.rank} has.",
                    cause="it is of another rank, or of another topology.",
                    next_step="load it before attach: then the copies begin anew.",
                )
            self._load_public()

    def _load_common_state(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)

    def _started(self, attachment: Attachment) -> None:
        self._flats_or_none = Flats(self.group, attachment.parameters)
        self._format = Format(self._codec, attachment.parameters)
        whole_bytes = sum(flat.nbytes for flat in self._flats.tensors)
        self._mail = Mail(self.group, self.name, self.topology, self._format.size_bytes, whole_bytes)
        ranks = [self.group.rank, *self._mail.sources]
        self._public = {rank: Companion(attachment.named_parameters, _zeros) for rank in ranks}
        self._publish_all()
        self._take_loaded()

    def _publish_all(self) -> None:
        """Copy the parameters as they are, this worker's and, uncompressed, those of its neighbours."""
        rank = self.group.rank
        places = [self.topology.sources(each) for each in range(self.group.size)]
        for place in range(self.topology.degree()):
            sources = dict.fromkeys(places[rank][place : place + 1], 1.0)
            receivers = [each for each, own in enumerate(places) if own[place : place + 1] == (rank,)]
            weights = Weights(0.0 if sources else 1.0, sources, dict.fromkeys(receivers, 1.0))
            handles = [self.group.exchange(flat.clone(), weights) for flat in self._flats.tensors]
            values = [handle.wait() for handle in handles]
            for source in sources:
                _copy(values, self._public[source].flats)
        _copy(self._flats.tensors, self._public[rank].flats)

    def _take_loaded(self) -> None:
        """A copy is one only where its owner has the same: all members take theirs, or none does."""
        if all(share(self.group, self._is_loaded_fit)):
            self._load_public()
        elif self._loaded:
            log.info("choco on rank %d begins with new public copies: not all states fit.", self.group.rank)
            self._loaded = {}

    @property
    def _is_loaded_fit(self) -> bool:
        return self._loaded_rank == self.group.rank and self._loaded.keys() == set(map(str, self._public))

    def _load_public(self) -> None:
        for rank, companion in self._public.items():
            companion.load(self._loaded[str(rank)])
        self._loaded = {}

    def _public_state(self) -> dict[str, dict[str, torch.Tensor]]:
        return {str(rank): companion.state_dict() for rank, companion in self._public.items()}

    @property
    def _flats(self) -> Flats:
        assert self._flats_or_none is not None
        return self._flats_or_none

    def _before_step(self) -> None:
        self._look_for_losses()

    def _after_step(self) -> None:
        if self.is_round:
            self._gossip()

    def _skipped_step(self) -> None:
        self._after_step()

    def _gossip(self) -> None:
        assert self._format is not None
        assert self._mail is not None
        self._flats.adopt()
        own = self._public[self.group.rank].flats
        message = self._format.encode(
            [flat - public for flat, public in zip(self._flats.tensors, own, strict=True)]
        )
        sends = self._mail.send(message, partial(_bytes_of, own))
        came = self._mail.receive()
        for send in sends:
            send.wait()
        self._look_for_losses()
        self._format.add(message, own)
        weights = self.topology.weights(self.group.rank).sources
        for source, letter in came.items():
            public = self._public[source].flats
            if letter.whole is not None:
                _copy_bytes(letter.whole, public)
            self._format.add(letter.message, public)
        factors = {source: self.gamma * weights[source] for source in came}
        for index, flat in enumerate(self._flats.tensors):
            theirs = [(self._public[source].flats[index], factor) for source, factor in factors.items()]
            add_differences(flat, own[index], theirs)

    def _average_all(self) -> None:
        """The parameters become the mean of all, and so do the public copies, to the bit."""
        root = self.group.members[0]
        for flat in self._flats.tensors:
            start_mean(self.group, flat).wait()
            start_copy(self.group, flat, root).wait()
        for companion in self._public.values():
            _copy(self._flats.tensors, companion.flats)

    def detached(self, *, should_leave: bool, is_failed: bool) -> None:
        """The windows are given back, if all members stay."""
        mail, self._mail = self._mail, None
        super().detached(should_leave=should_leave, is_failed=is_failed)
        if mail is not None and not is_failed and not should_leave:
            mail.close()

    def _stopped(self) -> None:
        if self._public:
            self._ended = self._public_state()
        self._public, self._format = {}, None
        if self._flats_or_none is not None:
            self._flats_or_none.close()
            self._flats_or_none = None


def _zeros(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(num_elements, dtype=dtype)


def _bytes_of(flats: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([flat.view(torch.uint8) for flat in flats])


def _copy_bytes(whole: torch.Tensor, into: list[torch.Tensor]) -> None:
    for part, flat in zip(torch.split(whole, [flat.nbytes for flat in into]), into, strict=True):
        flat.copy_(part.clone().view(flat.dtype))


def _copy(values: list[torch.Tensor], into: list[torch.Tensor]) -> None:
    for value, flat in zip(values, into, strict=True):
        flat.copy_(value)
