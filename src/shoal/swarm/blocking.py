"""A run for blocking code: found through the DHT, on a loop thread of its own, waited for.

    with shoal.dht.connect("HOST:31337") as swarm, BlockingSwarmRun(swarm, "digits", parameters) as run:
        run.add(gradient, samples)
        run.wait_for_commit()
        parameters = run.parameters()

What a round does is `SwarmRun`'s; this file crosses to its loop and back, says who begins a run that several
peers come to at once, and answers those who ask how it goes.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import platform
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    Peer,
    PeerId,
    PeerRefused,
    ShoalError,
    StandingScope,
    UsageError,
)
from shoal.dht import DHT, Swarm, announce
from shoal.swarm.facts import (
    FACTS,
    FactsRequest,
    MemberFacts,
    ModelFacts,
    ask_facts,
    find_members,
    presence_name,
    require_same_model,
)
from shoal.swarm.membership import SwarmSettings
from shoal.swarm.optimizers import CommittedOptimizer
from shoal.swarm.run import SwarmRun
from shoal.swarm.wire import TRAINER
from shoal.tensors import Codec
from shoal.transport import Head, Reply
from shoal.transport.streams.transport import CONNECTION_KINDS

log = logging.getLogger(__name__)

LIFETIME_S = 60.0
"""A member that vanishes is found for so long."""
MAX_NOTES = 8
_ANNOUNCE_S = 5.0
_FIND_RELAYS_S = 3.0
_FOUND_S = 1.0
"""Of several peers that come at once the one with the lowest id begins the run, the others after five times
as long: whoever was announced before them may be gone."""
_LEAVE_S = 30.0
_MAX_FOUND = 32
_LOOK_S = 0.5
_CHECK_MODEL_S = 5.0


def where_called(dht: DHT) -> tuple[Address, bool]:
    """Says where others call a peer, with port 0 for a client, and whether they can dial it."""
    nowhere = Address(platform.node()[:40] or "client", 0)
    return next(iter(dht.addresses), nowhere), not dht.is_client


def finder(dht: DHT, run: str) -> Callable[[], Awaitable[Sequence[Peer]]]:
    """Makes the function by which a member finds others of its run in the DHT, this peer left out."""

    async def find() -> list[Peer]:
        await be_callable(dht, _FIND_RELAYS_S)  # whoever is found should find this peer as well
        return (await find_members(dht, run))[:_MAX_FOUND]

    return find


async def be_callable(dht: DHT, wait_s: float) -> None:
    """Has relays call a peer that others cannot dial, unless that takes longer; it is tried on then."""
    if dht.is_client and not dht.addresses:
        try:
            await dht.use_relays(deadline=Deadline.after(wait_s))
        except ShoalError as error:
            log.debug("no relay yet: %s", error)


class BlockingSwarmRun:
    """A member of a run, for any thread but the loop's own; open it with `with`.

    `swarm` must be open. Where others cannot call it this is a client: it trains, votes and sends, and
    averages nothing. With `model` a run whose members train another one is refused. `offers_when_asked`: see
    `MemberContext`. The parameters of an auxiliary say how many there are, and nobody reads them.
    """

    def __init__(
        self,
        swarm: Swarm,
        run: str,
        parameters: torch.Tensor,
        optimizer: CommittedOptimizer | None = None,
        *,
        settings: SwarmSettings | None = None,
        codec: Codec | None = None,
        model: ModelFacts | None = None,
        offers_when_asked: bool = False,
        kind: str = TRAINER,
    ) -> None:
        self._kind = kind
        self._swarm = swarm
        self._name = run
        self._made = (parameters, optimizer)
        self._settings = settings
        self._codec = codec
        self._model = model
        self._offers_when_asked = offers_when_asked
        self._run: SwarmRun | None = None
        self._kept: Any = None
        self._where = Address("client", 0), False
        self._standing = StandingScope(f"beside run {run}")
        self.notes: deque[str] = deque(maxlen=MAX_NOTES)
        """What went wrong lately, for those who ask."""
        self.loss: float | None = None
        """The latest loss, where the program has told it."""
        self.samples_per_s = 0.0

    def __enter__(self) -> Self:
        self._swarm.run(self.open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._swarm.run(self.close(is_in_order=kind is None))

    @property
    def run(self) -> SwarmRun:
        """The member itself, for code on its loop."""
        if self._run is None:
            raise UsageError("This run is not open.", next_step="use it inside 'with'.")
        return self._run

    def add(self, mean: torch.Tensor, samples: int, *, is_ready: bool = False) -> None:
        """Takes the mean gradient, or the difference from the committed parameters, of so many samples.

        With `is_ready` this member's local steps are done. Keeps no reference to `mean`.
        """

        def add() -> None:
            self.run.add(mean, samples)
            if is_ready:
                self.run.set_ready()

        self._cross(add)

    def set_ready(self) -> None:
        """Says that this member's local steps are done."""
        self._cross(self.run.set_ready)

    def parameters(self) -> torch.Tensor:
        """Copies the committed parameters, as one vector."""
        copied: torch.Tensor = self._cross(self.run.state.parameters.clone)
        return copied

    def committed(self) -> tuple[tuple[bytes, int], torch.Tensor]:
        """Copies the committed parameters, and says which they are: the fork, and the steps made.

        Where rounds average fragments, with what this member has learned that no commit has.
        """

        def copy_them() -> tuple[tuple[bytes, int], torch.Tensor]:
            parameters, progress = self.run.state.parameters, self.run.ledger.progress()
            return self.version, parameters.clone() if progress is None else parameters - progress

        copied: tuple[tuple[bytes, int], torch.Tensor] = self._cross(copy_them)
        return copied

    def kept(self) -> dict[str, Any]:
        """Copies what the optimizer of the committed parameters keeps."""
        copied: dict[str, Any] = self._cross(lambda: copy.deepcopy(self.run.state.kept))
        return copied

    @property
    def version(self) -> tuple[bytes, int]:
        """Which committed parameters there are now: the fork, and the steps made. Read without waiting."""
        state = self.run.state
        return state.fork, state.num_steps

    def current_facts(self) -> MemberFacts:
        """Says how far this member is, and how others are reached."""
        found: MemberFacts = self._cross(self.facts)
        return found

    def wait_for_commit(self, after_round: int | None = None, timeout_s: float = 60.0) -> int:
        """Waits until the run is past a round, by default the one that it is in; gives the round it is in."""
        return self._swarm.run(self._pass_round(after_round, Deadline.after(timeout_s)))

    def wait_until(self, condition: Callable[[SwarmRun], bool], timeout_s: float) -> bool:
        """Waits until a condition of the member holds, asked on its loop; False when it is too late.

        UsageError when this peer is kept out because the run trains another model.
        """
        return self._swarm.run(self._wait_until(condition, Deadline.after(timeout_s)))

    def leave(self, timeout_s: float = _LEAVE_S) -> None:
        """Leaves the run by a commit; what no round has taken by then is listed as lost."""
        self._swarm.run(self._leave(timeout_s))

    async def _leave(self, timeout_s: float) -> None:
        run = self.run
        if run.is_member and not run.has_left:
            await _unless_late(run.leave(Deadline.after(timeout_s)))
        run.ledger.abandon("training ended before a round took them")

    def note(self, text: str) -> None:
        """Tells what went wrong, to the log and to those who ask."""
        self.notes.append(text)
        log.warning("run %s: %s", self._name, text)

    async def _wait_until(self, condition: Callable[[SwarmRun], bool], deadline: Deadline) -> bool:
        run, checked = self.run, Deadline.after(_CHECK_MODEL_S)
        while not condition(run):
            if deadline.is_past:
                return False
            if not run.is_member and checked.is_past:
                await self._check_model()
                checked = Deadline.after(_CHECK_MODEL_S)
            await run.next_change(min(_LOOK_S, deadline.remaining_s))
        return True

    async def _pass_round(self, after_round: int | None, deadline: Deadline) -> int:
        run = self.run
        number = run.state.round if after_round is None else after_round
        while run.state.round <= number or not run.is_member:
            await run.next_commit(deadline)
        return run.state.round

    def _cross(self, work: Callable[[], Any]) -> Any:
        async def do() -> Any:
            return work()

        return self._swarm.run(do())

    # --- on the loop ---

    async def open(self) -> None:
        """Looks for the run, announces this member, and lets it join or found; for code on the loop."""
        dht = self._swarm.dht
        if FACTS in dht.endpoint.streams.routes:
            raise UsageError(
                "This peer is a member of a run already.",
                next_step="connect a second time for a second run: shoal.connect(...).",
            )
        await self._check_model()
        await be_callable(dht, _ANNOUNCE_S)
        where, is_reachable = self._where = where_called(dht)
        if not is_reachable and self._kind != TRAINER:
            raise UsageError(
                "Others cannot call this peer, so it can average nothing for them.",
                cause="it listens nowhere, or a router or firewall lets no strangers in.",
                next_step="open a port, or look at `shoal doctor --join HOST:PORT`.",
            )
        run = self._run = SwarmRun(
            dht.endpoint.streams,
            where,
            self._name,
            *self._made,
            settings=self._settings,
            codec=self._codec,
            find=finder(dht, self._name),
            may_found=False,
            kind=self._kind,
            is_reachable=is_reachable,
            choice=dht.endpoint.network.random,
            identity=dht.identity,
        )
        run.context.offers_when_asked = self._offers_when_asked
        dht.endpoint.streams.handle(FACTS, self._serve_facts, payload_type=FactsRequest)
        # announced before it looks: of two that come at once one at least sees the other
        self._kept = announce(dht, presence_name(self._name), self._presence, LIFETIME_S)
        try:
            await self._kept.stored(Deadline.after(_ANNOUNCE_S))
        except DeadlineExceeded:
            log.warning("run %s: the DHT did not take this peer's address yet; it is tried again", self._name)
        await run.__aenter__()
        self._standing = StandingScope(f"beside run {self._name}")
        scope = await self._standing.open()
        scope.start_soon(self._watch_where(run), name="watch how it is called")
        if self._kind == TRAINER:
            scope.start_soon(self._found_if_first(run), name="begin the run")

    async def _found_if_first(self, run: SwarmRun) -> None:
        """Lets this member begin the run, unless somebody else does or has."""
        dht = self._swarm.dht
        others = await find_members(dht, self._name)
        if others:
            is_lowest = all(dht.peer_id < peer.id for peer in others if peer.id is not None)
            await asyncio.sleep(_FOUND_S * (1 if is_lowest else 5))
            while True:
                if run.is_member or not await self._is_there_a_run():
                    break
                await asyncio.sleep(_FOUND_S)  # it is on its way into it
        run.may_found = True

    def _presence(self) -> list[Any]:
        """Tells the DHT where this member is called: a host and port, or relayed addresses."""
        dht = self._swarm.dht
        if dht.is_client:
            return [str(address) for address in dht.addresses]
        return [dht.peer.address.host, dht.peer.address.port]

    async def _watch_where(self, run: SwarmRun) -> None:
        """Has the run and the DHT know when others can call this peer in another way; ends when cancelled."""
        dht = self._swarm.dht
        while True:
            await asyncio.sleep(_LOOK_S)
            await be_callable(dht, _ANNOUNCE_S)
            if self._where != where_called(dht):
                where, is_reachable = self._where = where_called(dht)
                run.be_at(where, is_reachable=is_reachable)
                dht.keeper.store_all_again()

    async def _is_there_a_run(self) -> bool:
        peers = await find_members(self._swarm.dht, self._name)
        answers = await ask_facts(self._swarm.dht.endpoint.streams, peers, FactsRequest(self._name))
        return any(isinstance(facts, MemberFacts) and facts.is_member for facts in answers.values())

    async def _check_model(self) -> None:
        """UsageError when the members of the run train another model, or in another way."""
        if self._model is None:
            return
        dht = self._swarm.dht
        peers = await find_members(dht, self._name)
        answers = await ask_facts(dht.endpoint.streams, peers, FactsRequest(self._name, with_model=True))
        known = [facts for facts in answers.values() if isinstance(facts, MemberFacts) and facts.is_member]
        if known:
            furthest = max(known, key=lambda facts: (facts.num_samples, facts.fork))
            if furthest.model is not None:
                require_same_model(self._name, self._model, furthest.model)

    def _serve_facts(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        request: FactsRequest = head.payload
        if request.run != self._name or self._run is None:
            raise PeerRefused(f"This peer is no member of the run {request.run[:100]!r}.")
        return Reply(self.facts(with_model=request.with_model))

    def facts(self, *, with_model: bool = False) -> MemberFacts:
        """Says how far this member is; on its loop."""
        run = self.run
        state, ledger = run.state, run.ledger
        is_simulated = self._swarm.dht.endpoint.network.is_simulated
        lost: dict[str, int] = {}
        for reason, num in ledger.lost:
            lost[reason] = lost.get(reason, 0) + num
        problems = [run.problem] if run.problem else []
        blamed = [f"{peer} sent wrong bytes: {why}" for peer, why in list(run.blamed.items())[-MAX_NOTES:]]
        proofs = list(run.context.proofs.items())[-MAX_NOTES:]
        liars = [f"{member.short} lies: {proof.reason}" for member, proof in proofs]
        return MemberFacts(
            peer_id=str(self._swarm.dht.peer_id),
            address=str(self._where[0]),
            name="" if is_simulated else f"{platform.node()[:40]}:{os.getpid()}",
            fork=state.fork.hex()[:8],
            round=state.round,
            num_steps=state.num_steps,
            num_samples=state.num_samples,
            members=tuple(str(member.peer.address) for member in run.members),
            ways=tuple(member.way for member in run.members),
            way=run.context.me.way,
            links=self._links(run),
            is_member=run.is_member,
            num_committed=ledger.num_committed,
            num_pending=ledger.num_pending + ledger.num_under_way,
            num_lost=ledger.num_lost,
            lost=dict(list(lost.items())[-MAX_NOTES:]),
            num_failed=run.num_failed,
            num_bytes=run.num_sent_bytes,
            samples_per_s=self.samples_per_s,
            loss=self.loss,
            notes=tuple([*blamed, *liars, *problems, *self.notes][-MAX_NOTES:]),
            model=self._model if with_model else None,
            kind=self._kind,
            codec=str(getattr(run.context.codec, "name", "")),
        )

    def _links(self, run: SwarmRun) -> dict[str, int]:
        """Counts the other members by how this one is connected with them."""
        kinds = self._swarm.dht.endpoint.streams.connection_kinds()
        found = [kinds.get(PeerId(member.id_bytes)) for member in run.members]
        return {kind: found.count(kind) for kind in CONNECTION_KINDS if kind in found}

    async def close(self, *, is_in_order: bool) -> None:
        """Leaves, if that is to be in order, and ends this member; for code on the loop."""
        run = self.run
        self._kept.stop()
        await self._standing.close()
        try:
            if is_in_order:
                await self._leave(_LEAVE_S)
        finally:
            try:
                await run.__aexit__(None, None, None)
            finally:
                self._run = None
                self._swarm.dht.endpoint.streams.routes.remove(FACTS)


async def _unless_late(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except ShoalError as error:
        log.warning("left without a commit: %s", error)
