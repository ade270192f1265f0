"""Which experts a host serves: those that it was told to, saved ones, new ones, and those that nobody serves.

At the start `choose_uids` names them and `ExpertMaker` makes them, new or as they were saved. Later
`ExpertAdopter` serves experts again whose servers are gone, from their checkpoints.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from shoal.core import Deadline, LoopThread, Peer, PeerBusy, ShoalError, UsageError, fanout
from shoal.dht.node import DHT
from shoal.experts.classes import TrainingSettings, expert_class, make_expert
from shoal.experts.config import HostingConfig
from shoal.experts.expert import Expert
from shoal.experts.names import ExpertUid, UidPattern, sample_uids
from shoal.experts.server.checkpoints import Checkpoints, SavedExpert
from shoal.experts.server.publishing import is_in_grid, who_serves

if TYPE_CHECKING:
    from shoal.dht.node import DHT
    from shoal.experts.expert import Expert
    from shoal.experts.server.server import ExpertServer

log = logging.getLogger(__name__)


_LOOK_UP_S = 30.0
_PING_S = 5.0


async def choose_uids(
    config: HostingConfig, saved: Sequence[str], dht: DHT | None, held: Sequence[str] = ()
) -> list[str]:
    """As many uids as are wanted; UsageError when that cannot be, or would leave saved experts out.

    In a swarm saved ones are taken at random, for others may begin with the same folder at the same time.
    Those that were chosen before and are `held` come first, unless another peer serves them by now.
    """
    named = list(config.uid)
    others = [uid for uid in saved if uid not in named and uid not in held]
    if dht is not None:
        others, left = _fitting(others, config.uid_pattern)
        if left and not held:
            log.warning("%d saved experts are left alone: %s", len(left), ", ".join(left[:5]))
        dht.endpoint.network.random.shuffle(others)
        others = await _not_served([uid for uid in held if uid not in named] + others, dht)
    num_wanted = _num_wanted(config, len(others))
    room = num_wanted - len(named)
    if len(others) > room and not config.adopt and not named:
        raise UsageError(
            f"{config.checkpoint_dir} has {len(others)} experts, and --num-experts is {num_wanted}.",
            cause="those beyond it would be served by nobody.",
            next_step=f"give --num-experts {len(others)}, or --adopt to take in those that nobody serves, or "
            "another --checkpoint-dir.",
        )
    chosen = named + others[:room]
    if len(chosen) < num_wanted:
        chosen += await _new(num_wanted - len(chosen), chosen, config.uid_pattern, dht)
    return chosen


def _num_wanted(config: HostingConfig, num_saved: int) -> int:
    if config.num_experts is not None:
        return config.num_experts
    is_for_others = config.adopt and config.uid_pattern is None
    num_wanted = len(config.uid) or num_saved or (0 if is_for_others else 1)
    return num_wanted if config.max_experts is None else min(num_wanted, config.max_experts)


async def _new(count: int, taken: Sequence[str], pattern: str | None, dht: DHT | None) -> list[str]:
    if dht is None:
        plain = (f"expert{index}" for index in range(count + len(taken)))
        return [uid for uid in plain if uid not in taken][:count]
    drawn = await sample_uids(dht, pattern, count + len(taken), deadline=Deadline.after(_LOOK_UP_S))
    new = [str(uid) for uid in drawn if str(uid) not in taken][:count]
    if len(new) < count:
        raise UsageError(
            f"Only {len(new)} of {count} uids like {pattern or 'expert.0'} are free.",
            cause="others serve them already.",
            next_step="give a larger --uid-pattern, or --uid to serve one together with others.",
        )
    return new


def _fitting(uids: Sequence[str], pattern: str | None) -> tuple[list[str], list[str]]:
    """Those that a swarm can find and that are like the pattern, and the others."""
    grid = None if pattern is None else UidPattern.of(pattern)
    fitting: list[str] = []
    left: list[str] = []
    for text in uids:
        try:
            uid = ExpertUid.of(text)
        except UsageError:
            left.append(text)
            continue
        is_like = grid is None or (
            uid.name == grid.name
            and len(uid.coordinates) == len(grid.axes)
            and all(place in axis for place, axis in zip(uid.coordinates, grid.axes, strict=True))
        )
        (fitting if is_like else left).append(text)
    return fitting, left


async def _not_served(uids: list[str], dht: DHT) -> list[str]:
    """Those of which no record leads to another peer that answers."""
    found = await who_serves(dht, uids)
    peers = {peer: None for one in found if one is not None for peer in one.peers if peer.id != dht.peer_id}
    answers = await fanout((_answers(dht, peer) for peer in peers), Deadline.after(_PING_S))
    alive = {peer: answer is True for peer, answer in zip(peers, answers, strict=True)}
    return [
        uid
        for uid, one in zip(uids, found, strict=True)
        if one is None or not any(alive.get(peer, False) for peer in one.peers)
    ]


async def _answers(dht: DHT, peer: Peer) -> bool:
    try:
        await dht.ping(peer)
    except PeerBusy:
        return True
    except ShoalError:
        return False
    return True


class ExpertMaker:
    """Makes the experts of one host; UsageError at once when the configuration names no such class."""

    def __init__(self, config: HostingConfig, checkpoints: Checkpoints | None) -> None:
        self._config = config
        self._checkpoints = checkpoints
        self._class = expert_class(config.expert_class)
        self._training = config.part(TrainingSettings)
        self.about = {"expert_class": self._class.name, "hidden_dim": config.hidden_dim}
        """What is saved beside an expert, so that it is not mistaken for one of another kind."""

    def saved_uids(self) -> list[str]:
        """Of experts that can be restored."""
        return [] if self._checkpoints is None else self._checkpoints.uids()

    def make(self, uid: str) -> Expert:
        """As it was saved last, or new."""
        saved = None if self._checkpoints is None else self._checkpoints.load(uid)
        return self.new(uid) if saved is None else _loaded(self.like(saved), saved)

    def new(self, uid: str) -> Expert:
        """With its first weights: the same ones at all servers of an expert, so that replicas begin alike."""
        digest = hashlib.blake2b(f"{self._config.seed} {uid}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") >> 1
        return make_expert(uid, self._class, self._config.hidden_dim, self._training, seed)

    def like(self, saved: SavedExpert) -> Expert:
        """One that a saved state can be loaded into; UsageError when it was one of another kind."""
        differences = [
            f"{name} {saved.about[name]}, not {value}"
            for name, value in self.about.items()
            if name in saved.about and saved.about[name] != value
        ]
        if differences:
            raise UsageError(
                f"The expert {saved.uid} was saved with {' and '.join(differences)}.",
                cause=f"{saved.path.parent.parent} holds experts of another kind.",
                next_step="serve the kind that was saved, or give another --checkpoint-dir.",
            )
        return self.new(saved.uid)


MakeExpert = Callable[[SavedExpert], "Expert"]
"""A new expert that the saved state fits; it is loaded afterwards. Runs on a thread of its own."""
OnAdopted = Callable[[str], Awaitable[object] | None]
"""Told the uid of an expert that is served from now on: to declare it."""


class ExpertAdopter:
    """Has a server take over experts that nobody serves, up to `max_experts` with those that it has.

    Who serves what the folder has is looked up every `every_s`, give or take a half.
    """

    def __init__(
        self,
        server: ExpertServer,
        dht: DHT,
        checkpoints: Checkpoints,
        make_expert: MakeExpert,
        every_s: float,
        *,
        max_experts: int | None = None,
        on_adopted: OnAdopted | None = None,
    ) -> None:
        if not every_s > 0:
            raise UsageError(f"Experts cannot be looked for every {every_s} s.")
        self._server = server
        self._dht = dht
        self._checkpoints = checkpoints
        self._make_expert = make_expert
        self._every_s = every_s
        self._max_experts = max_experts
        self._on_adopted = on_adopted
        self._random = dht.endpoint.network.random
        self._missed: dict[str, None] = {}  # nobody served them last time
        self._num_failures: dict[str, int] = {}
        self._not_before: dict[str, int] = {}  # the round in which one that failed is tried again
        self._round = 0
        self.num_adopted = 0

    async def run(self) -> None:
        """Look for experts that nobody serves, until cancelled."""
        with LoopThread("shoal-adopting") as reader:
            while True:
                await asyncio.sleep(self._every_s * self._random.uniform(0.5, 1.5))
                try:
                    await self.look(reader)
                except ShoalError as error:
                    log.warning("It could not be found out which experts nobody serves: %s", error)

    async def look(self, reader: LoopThread) -> list[str]:
        """One round: adopt what nobody has served in the last one either. The uids that were adopted.

        A round in which it could not be found out who serves what does not count.
        """
        self._round += 1
        saved = await reader.run_blocking(self._checkpoints.uids)
        absent = await self._absent([uid for uid in saved if self._is_wanted(uid)])
        due = [uid for uid in absent if uid in self._missed]
        self._missed = dict.fromkeys(absent)
        self._random.shuffle(due)
        adopted = []
        for uid in due:
            if not self._has_room:
                break
            await asyncio.sleep(self._every_s / 4 * self._random.random())
            is_free = uid not in self._server.experts and await self._absent([uid])
            if is_free and await self._adopt(uid, reader):
                adopted.append(uid)
        return adopted

    @property
    def _has_room(self) -> bool:
        is_full = self._max_experts is not None and len(self._server.experts) >= self._max_experts
        return not (is_full or self._server.is_leaving)

    def _is_wanted(self, uid: str) -> bool:
        is_due = self._not_before.get(uid, 0) <= self._round
        return self._has_room and is_due and uid not in self._server.experts and is_in_grid(uid)

    async def _absent(self, uids: Sequence[str]) -> list[str]:
        found = await who_serves(self._dht, uids) if uids else []
        return [uid for uid, address in zip(uids, found, strict=True) if address is None]

    async def _adopt(self, uid: str, reader: LoopThread) -> bool:
        try:
            expert = await reader.run_blocking(lambda: self._restored(uid))
            await self._server.add(expert)
        except Exception as error:  # noqa: BLE001 - of a checkpoint, or of a class of one's own
            self._num_failures[uid] = self._num_failures.get(uid, 0) + 1
            self._not_before[uid] = self._round + 2 ** min(self._num_failures[uid], 10)
            log.warning("The expert %s could not be adopted: %s", uid, error)
            return False
        self._missed.pop(uid, None)
        self._num_failures.pop(uid, None)
        self._not_before.pop(uid, None)
        self.num_adopted += 1
        log.info(
            "The expert %s, which nobody served, is served here after %d updates.", uid, expert.num_updates
        )
        if self._on_adopted is not None:
            told = self._on_adopted(uid)
            if inspect.isawaitable(told):
                await told
        return True

    def _restored(self, uid: str) -> Expert:
        saved = self._checkpoints.load(uid)
        if saved is None:
            raise UsageError("none of its checkpoints is whole.")
        return _loaded(self._make_expert(saved), saved)


def _loaded(expert: Expert, saved: SavedExpert) -> Expert:
    """The expert with its saved state, which need not be saved again."""
    for warning in expert.load(saved.state):
        log.warning("%s", warning)
    expert.num_changes = 0
    return expert
