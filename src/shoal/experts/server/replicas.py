"""Several peers serve one expert: they find each other in the DHT, and every while two of them average.

Each peer looks up who else serves its experts and meets one of them after another, in a ring of peer ids. An
expert has one meeting at a time; whoever asks meanwhile is told 'busy', and is met another time.

Only peers that the expert's own record in the DHT named when this peer last looked may average with it. In a
swarm with a secret they are known by ids that are proven. Without one, which is on this machine alone unless
that was asked for, an id is a peer's own word, and one that gives none may average too. Any peer of the swarm
may read a state.

An expert that was never trained when it was first seen is a newcomer: it copies an older replica instead of
averaging with it. Where all are newcomers, the one with the lowest id is the one to be copied.

To average, one side sends what it has; the other sets itself to the mean and answers with it; the first moves
by as much as the mean differs from what it had sent. Updates that it made meanwhile are kept, and the mean of
the two is what it was. `average` is the caller's side, `answer_average` the other. Parts go one by one, the
next one while the mean of the one before is on its way, so that neither side holds more than two of them and
the device is never kept for long. A meeting may take any time, as long as neither side falls silent: how long
an expert takes says nothing of a larger one, or of another peer's line.

To be copied, a replica holds its state as it is then, by the name that its bytes have, for as long as the
newcomer takes it, leaf by leaf and verified: `shoal.tensors.transfer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import torch

from shoal.core import (
    Deadline,
    DeadlineExceeded,
    LimitExceeded,
    Peer,
    PeerBusy,
    PeerError,
    PeerId,
    PeerLeaving,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    ShoalError,
    TensorError,
    UsageError,
    fanout,
)
from shoal.experts.server.publishing import is_in_grid, who_serves
from shoal.experts.state import APPLIED_IDS, ExpertState, cpu_copy
from shoal.tensors import TensorSpec, pack, unpack
from shoal.tensors.dtypes import dtype_name
from shoal.tensors.transfer import StateDonor, StateTaker, hold_state
from shoal.transport import Channel, Head, Reply, Transport

if TYPE_CHECKING:
    from shoal.dht.node import DHT
    from shoal.experts.expert import Expert
    from shoal.experts.server.server import ExpertServer

T = TypeVar("T")
log = logging.getLogger(__name__)


AVERAGE = "expert.average"
STATE = "expert.state"
_AT_ONCE = 4  # experts that meet their replicas at the same time
_NEWCOMER_S = 2.0
_LATER = (PeerBusy, PeerUnreachable, PeerLost, DeadlineExceeded)
"""What is nobody's fault, and not worth a word: the peer is met another time, or its record expires."""


class ReplicaRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks to average an expert, or for its state."""

    uid: str


class Replicas:
    """Keeps a server's experts together with those that other peers serve under the same uid."""

    def __init__(self, server: ExpertServer, dht: DHT, every_s: float) -> None:
        if not every_s > 0:
            raise UsageError(f"Replicas cannot average every {every_s} s.", next_step="give a time above 0.")
        self._server = server
        self._dht = dht
        self._every_s = every_s
        self._random = dht.endpoint.network.random
        self._donor: StateDonor  # while it runs
        self._peers: dict[str, dict[PeerId, list[Peer]]] = {}  # who serves an expert, this peer included
        self._newcomers: dict[str, bool] = {}
        self._met: dict[str, object] = {}  # experts that are in a meeting now
        self._turns: dict[str, int] = {}
        self.num_averaged = 0
        """Meetings that this peer began and that came to their end."""
        self.num_copied = 0
        """Experts that have become copies of others."""

    async def run(self) -> None:
        """Answer other replicas, and meet them every so many seconds, until cancelled."""
        routes = self._dht.endpoint.routes
        with contextlib.ExitStack() as closing:
            self._donor = StateDonor(self._dht.endpoint.streams)
            closing.callback(self._donor.close)
            for method, serve in ((AVERAGE, self._rpc_average), (STATE, self._rpc_state)):
                routes.add_channel(method, serve, ReplicaRequest)
                closing.callback(routes.remove, method)
            while True:
                await self.sync()
                wait_s = self._every_s
                if any(self._newcomers.values()):
                    wait_s = min(wait_s, _NEWCOMER_S)
                await asyncio.sleep(wait_s * self._random.uniform(0.75, 1.25))

    async def sync(self, uids: Sequence[str] | None = None) -> int:
        """Meet one other replica of each expert (of these) now; how many were averaged or copied.

        For an expert that is added, before it is declared: it then is a copy before it is found here.
        """
        wanted = [uid for uid in (self._server.experts if uids is None else uids) if is_in_grid(uid)]
        try:
            await self._look_up(wanted)
        except ShoalError as error:
            log.warning("Who else serves the experts here could not be found out: %s", error)
            return 0
        experts = [self._server.experts[uid] for uid in wanted if uid in self._server.experts]
        meetings = [self._meet(expert) for expert in experts]
        outcomes = await fanout(meetings, Deadline.never(), limit=_AT_ONCE)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                log.error("Replicas could not meet", exc_info=outcome)
        return sum(outcome is True for outcome in outcomes)

    def is_newcomer(self, expert: Expert) -> bool:
        """Whether an expert is to become a copy of another replica before it averages with any."""
        return self._newcomers.setdefault(expert.uid, expert.num_updates == 0)

    # --- asking ---

    async def _look_up(self, uids: Sequence[str]) -> None:
        found = await who_serves(self._dht, uids)
        for uid, address in zip(uids, found, strict=True):
            peers: dict[PeerId, list[Peer]] = {}
            for peer in address.peers if address is not None else ():
                if peer.id is not None:
                    peers.setdefault(peer.id, []).append(peer)
            self._peers[uid] = peers
        for table in (self._peers, self._newcomers, self._turns):
            for uid in [uid for uid in table if uid not in self._server.experts]:
                del table[uid]

    async def _meet(self, expert: Expert) -> bool:
        uid = expert.uid
        if self._server.is_leaving:
            return False
        others = [peer_id for peer_id in sorted(self._peers[uid]) if peer_id != self._dht.peer_id]
        if self.is_newcomer(expert):
            return await self._catch_up(expert, others)
        turn = self._turns.get(uid, 0)
        first = sum(peer_id < self._dht.peer_id for peer_id in others) + turn
        for step in range(len(others)):
            other = others[(first + step) % len(others)]
            self._turns[uid] = turn + step + 1
            try:
                await self._at(expert, other, AVERAGE)
            except ShoalError as error:
                _tell(error, uid, other)
                if type(error) is PeerBusy:
                    return False
            else:
                self.num_averaged += 1
                return True
        return False

    async def _catch_up(self, expert: Expert, others: Sequence[PeerId]) -> bool:
        """Copy an older replica; where it is certain that there is none, this one is a newcomer no more."""
        uid = expert.uid
        is_oldest = True
        for other in others:
            try:
                if await self._at(expert, other, STATE):
                    self._newcomers[uid] = False
                    self.num_copied += 1
                    return True
                is_oldest &= self._dht.peer_id < other
            except ShoalError as error:
                _tell(error, uid, other)
                is_oldest = False  # who does not answer may be older; when it is gone, its record expires
        self._newcomers[uid] = not is_oldest
        return False

    async def _at(self, expert: Expert, other: PeerId, method: str) -> bool:
        """Call a peer at the first of its addresses that answers."""
        *first, last = self._peers[expert.uid][other]
        with self._meeting(expert.uid):
            for peer in first:
                with contextlib.suppress(PeerUnreachable):
                    return await self._call(expert, peer, method)
            return await self._call(expert, last, method)

    async def _call(self, expert: Expert, peer: Peer, method: str) -> bool:
        """Average with a peer, or become its copy; False where it is a newcomer itself."""
        request, streams = ReplicaRequest(expert.uid), self._dht.endpoint.streams
        async with streams.open_channel(peer, method, request, deadline=Deadline.never()) as channel:
            if method == AVERAGE:
                await average(expert, peer, channel, self._server.on_device)
                return True
            with _blaming(expert, peer):
                name = _convert(await _next(channel), str)
            if not name:
                return False
            warnings = await copy_state(expert, peer, name, streams, self._server.on_device)
            await channel.end()
        log.info("%s is a copy of the one at %s now. %s", expert.uid, peer, " ".join(warnings))
        return True

    # --- answering, on any of the endpoint's loops ---

    async def _rpc_average(self, head: Head, channel: Channel) -> Reply:
        expert = self._expert(head)
        uid, caller = expert.uid, head.peer
        is_anybody = caller.id is None and self._dht.endpoint.membership is None  # as good as any claim
        if not (is_anybody or caller.id in self._peers.get(uid, ())):
            raise PeerBusy(
                f"{caller} is not known here as one that serves {uid}.",
                cause="it has declared the expert just now, or not at all.",
                next_step="declare it, and try again later.",
            )
        if self.is_newcomer(expert):
            raise PeerBusy("this replica is new and copies another one first.", next_step="try again later.")
        with self._meeting(uid):
            try:
                await answer_average(expert, channel, self._server.on_device)
            except TensorError as error:
                log.warning("%s is not averaged with what %s has sent: %s", uid, caller, error)
                raise
        return Reply()

    async def _rpc_state(self, head: Head, channel: Channel) -> Reply:
        expert = self._expert(head)
        if self.is_newcomer(expert):
            await channel.send("")
        else:
            with self._meeting(expert.uid):
                await self._give_state(expert, channel)
        await channel.end()
        return Reply()

    async def _give_state(self, expert: Expert, channel: Channel) -> None:
        """Hold the expert's state as it is now until the caller has it, is gone, or falls silent."""
        state = await self._server.on_device(expert.state)
        tensors = {name: tensor for name, tensor in state.tensors.items() if name != APPLIED_IDS}
        numbers = json.dumps(state.numbers)
        held = await hold_state({"uid": expert.uid, "tensors": tensors, "numbers": numbers})
        self._donor.hold(held)
        try:
            await channel.send(held.name)
            loop, began_s = asyncio.get_running_loop(), asyncio.get_running_loop().time()
            while (left_s := self._donor.asked_s.get(held.name, began_s) + ITEM_S - loop.time()) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await channel.receive()
                        break
        finally:
            self._donor.drop(held.name)

    def _expert(self, head: Head) -> Expert:
        if self._server.is_leaving:
            raise PeerLeaving("this server is leaving.", next_step="ask another replica.")
        uid = head.payload.uid
        expert = self._server.experts.get(uid)
        if expert is None:
            raise PeerRefused(f"the expert {uid[:100]!r} is not served here.")
        return expert

    @contextlib.contextmanager
    def _meeting(self, uid: str) -> Iterator[None]:
        mine = object()
        if self._met.setdefault(uid, mine) is not mine:  # one step: handlers run on several threads
            raise PeerBusy(f"{uid} is meeting another replica.", next_step="try again later.")
        try:
            yield
        finally:
            del self._met[uid]


def _tell(error: ShoalError, uid: str, other: PeerId) -> None:
    level = logging.DEBUG if isinstance(error, _LATER) else logging.WARNING
    log.log(level, "%s did not meet its replica at %s: %s", uid, other.short, error)


ITEM_S = 60.0
"""How long either side waits for the other's next part."""
_STATE_TO_MODULE = 8  # no optimizer keeps more than a few tensors for each of the module's
_SLACK_BYTES = 1 << 20


class OnDevice(Protocol):
    """Runs blocking code between two batches: `ExpertServer.on_device`."""

    async def __call__(self, work: Callable[[], T]) -> T:
        """What the work returns."""


async def average(expert: Expert, peer: Peer, channel: Channel, on_device: OnDevice) -> None:
    """Meet the other replica half-way; PeerError that names it when it gives what is not to be used."""
    tensors = await on_device(expert.parameters_and_buffers)
    under_way: deque[tuple[Part, list[torch.Tensor]]] = deque()

    async def take_mean() -> None:
        part, sent = under_way.popleft()
        item = await _next(channel)
        with _blaming(expert, peer):
            answered, means = _read(item)
            if answered != part:
                raise TensorError("it answers with other pieces than it was sent")
            await on_device(functools.partial(_move_to_mean, expert, tensors, part, sent, means))

    for part in plan(tensors):
        sent = await on_device(functools.partial(take, tensors, part))
        await _send(channel, part, sent)
        under_way.append((part, sent))
        if len(under_way) > 1:
            await take_mean()
    while under_way:
        await take_mean()
    await channel.end()
    await _in_time(channel.result())


async def answer_average(expert: Expert, channel: Channel, on_device: OnDevice) -> None:
    """Meet whoever asks half-way; TensorError when it sends what is not to be used."""
    tensors = await on_device(expert.parameters_and_buffers)
    while (item := await _next(channel)) is not None:
        part, theirs = _read(item)
        means = await on_device(functools.partial(_meet_half_way, expert, tensors, part, theirs))
        await _send(channel, part, means)


async def copy_state(
    expert: Expert, peer: Peer, name: str, transport: Transport, on_device: OnDevice
) -> list[str]:
    """Become a copy of the replica that holds this state; warnings of what it lacks.

    Weights and what the optimizer has learned are copied; how fast it learns stays this expert's own. Nothing
    is changed before all of it is here. PeerError that names the peer when it is not to be used.
    """
    own = await on_device(expert.parameters_and_buffers)
    max_bytes = _STATE_TO_MODULE * sum(map(_num_bytes, own.values())) + _SLACK_BYTES
    taker = StateTaker(transport, name, max_bytes=max_bytes, leaf_s=ITEM_S)
    with _blaming(expert, peer):
        try:
            state = await taker.take([peer], Deadline.never())
        except PeerLost as error:
            if reason := taker.blamed.get(peer):
                raise TensorError(reason) from error
            raise
        return await on_device(functools.partial(_load, expert, own, state))


def _move_to_mean(
    expert: Expert,
    tensors: Tensors,
    part: Part,
    sent: Sequence[torch.Tensor],
    means: Sequence[torch.Tensor],
) -> None:
    move(tensors, part, sent, means)
    expert.num_changes += 1


def _meet_half_way(
    expert: Expert, tensors: Tensors, part: Part, theirs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    means = meet(tensors, part, theirs)
    expert.num_changes += 1
    return means


def _load(expert: Expert, own: Tensors, taken: Any) -> list[str]:
    try:
        state = ExpertState(
            msgspec.convert(taken["tensors"], dict[str, torch.Tensor]),
            msgspec.convert(json.loads(taken["numbers"]), dict[str, Any]),
        )
        for name, mine in own.items():
            given = state.tensors.get(f"module.{name}")
            if given is not None and given.shape == mine.shape:  # the others are `load`'s to refuse
                check_finite(name, given.to(mine.device), mine)
        return expert.load(state, keeps_settings=True)
    except UsageError as error:
        raise TensorError(error.what, cause=error.cause) from error
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise TensorError(f"it cannot be loaded: {error}") from error


async def _send(channel: Channel, part: Part, tensors: Sequence[torch.Tensor]) -> None:
    await _in_time(channel.send(part, pack(tensors)[1]))


async def _next(channel: Channel) -> Reply | None:
    return await _in_time(channel.receive())


async def _in_time(work: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(ITEM_S):
            return await work
    except TimeoutError:
        raise DeadlineExceeded("the other replica fell silent.") from None


def _read(item: Reply | None) -> tuple[Part, list[torch.Tensor]]:
    part = _convert(item, Part)
    assert item is not None
    return part, unpack([piece.spec for piece in part], item.buffers)


def _convert(item: Reply | None, kind: type[T]) -> T:
    if item is None:
        raise TensorError("it ends before all has come")
    try:
        return msgspec.convert(item.payload, kind)
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
        raise TensorError(f"it cannot be read: {error}") from None


@contextlib.contextmanager
def _blaming(expert: Expert, peer: Peer) -> Iterator[None]:
    """What is wrong with an answer is said with the name of who gave it."""
    try:
        yield
    except (TensorError, LimitExceeded) as error:
        raise PeerError(
            f"What {peer} gives as a replica of {expert.uid} is not to be used: {error.what}",
            peer=peer,
            cause=error.cause or "a broken or hostile replica.",
            next_step="leave it out with the deny-list, or have it serve the same model.",
        ) from error


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


PART_BYTES = 4 << 20
"""What is sent at once: little enough for a slow line, and the device is soon free again."""
_NUM_IN_A_PART = 4096

Tensors = Mapping[str, torch.Tensor]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Some rows of a tensor, or all of it."""

    name: str
    start: int
    """The first of the rows, which are along the first dimension."""
    spec: TensorSpec


Part = tuple[Piece, ...]


def plan(tensors: Tensors, max_bytes: int = PART_BYTES) -> list[Part]:
    """All tensors cut into parts of at most so many bytes; a single row may be larger."""
    parts: list[Part] = []
    open_part: list[Piece] = []
    room_bytes = max_bytes
    for name, tensor in tensors.items():
        for piece, piece_bytes in _pieces(name, tensor, max_bytes):
            if open_part and (piece_bytes > room_bytes or len(open_part) == _NUM_IN_A_PART):
                parts.append(tuple(open_part))
                open_part, room_bytes = [], max_bytes
            open_part.append(piece)
            room_bytes -= piece_bytes
    if open_part:
        parts.append(tuple(open_part))
    return parts


def take(tensors: Tensors, part: Part) -> list[torch.Tensor]:
    """Copies of these pieces in the CPU's memory."""
    return [cpu_copy(_rows(tensors, piece)) for piece in part]


@torch.no_grad()
def meet(tensors: Tensors, part: Part, theirs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Set these pieces to the mean of what they are and what `theirs` are; the mean, in the CPU's memory.

    TensorError, and nothing is changed, when they are not pieces of the same tensors or not finite.
    """
    check_shapes(tensors, part, theirs)
    rows = [_rows(tensors, piece) for piece in part]
    means = [_mean(mine, other.to(mine.device)) for mine, other in zip(rows, theirs, strict=True)]
    for piece, mine, mean in zip(part, rows, means, strict=True):
        check_finite(piece.name, mean, mine)
    for mine, mean in zip(rows, means, strict=True):
        mine.copy_(mean)
    return [cpu_copy(mean) for mean in means]


@torch.no_grad()
def move(tensors: Tensors, part: Part, sent: Sequence[torch.Tensor], means: Sequence[torch.Tensor]) -> None:
    """Bring these pieces, which were `sent` and may have changed since, to the mean.

    TensorError, and nothing is changed, when it cannot be their mean.
    """
    check_shapes(tensors, part, means)
    for piece, old, mean in zip(part, sent, means, strict=True):
        check_finite(piece.name, mean, old)
    for piece, old, mean in zip(part, sent, means, strict=True):
        now = _rows(tensors, piece)
        before, after = old.to(now.device), mean.to(now.device)
        # by itself the sum would differ from the mean in the last bit, and replicas would never be equal
        now.copy_(torch.where(now == before, after, now + (after - before)))


def check_shapes(tensors: Tensors, part: Part, given: Sequence[torch.Tensor]) -> None:
    """TensorError when what another replica has given is not these pieces."""
    for piece, tensor in zip(part, given, strict=True):
        mine = _rows(tensors, piece)
        if tensor.shape != mine.shape or tensor.dtype != mine.dtype:
            raise TensorError(
                f"{piece.name[:100]!r} is {dtype_name(tensor.dtype)}{list(tensor.shape)}, "
                f"not {dtype_name(mine.dtype)}{list(mine.shape)}",
                cause="replicas of one expert run different models.",
            )


def check_finite(name: str, given: torch.Tensor, own: torch.Tensor) -> None:
    """TensorError when a tensor is not finite; what was infinite before, as masks are, may stay so."""
    if not (given.isfinite() | (given == own)).all():
        raise TensorError(f"{name[:100]!r} is not finite", cause="a broken or hostile replica.")


def _pieces(name: str, tensor: torch.Tensor, max_bytes: int) -> list[tuple[Piece, int]]:
    size_bytes = tensor.numel() * tensor.element_size()
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    if size_bytes <= max_bytes or not shape or shape[0] < 2:
        return [(Piece(name, 0, TensorSpec(dtype, shape)), size_bytes)]
    row_bytes = size_bytes // shape[0]
    num_rows = max(1, max_bytes // row_bytes)
    pieces = []
    for start in range(0, shape[0], num_rows):
        num = min(num_rows, shape[0] - start)
        pieces.append((Piece(name, start, TensorSpec(dtype, (num, *shape[1:]))), num * row_bytes))
    return pieces


def _rows(tensors: Tensors, piece: Piece) -> torch.Tensor:
    """The piece itself, to be read or written to; TensorError when there is no such piece."""
    tensor = tensors.get(piece.name)
    if tensor is None:
        raise TensorError(
            f"there is no tensor {piece.name[:100]!r}", cause="replicas of one expert run different models."
        )
    shape = piece.spec.shape
    if tensor.dim() == 0 or (piece.start == 0 and shape == tuple(tensor.shape)):
        return tensor
    num_rows = shape[0] if shape else 0
    if piece.start < 0 or num_rows < 1 or piece.start + num_rows > tensor.shape[0]:
        raise TensorError(f"{piece.name[:100]!r} has {tensor.shape[0]} rows, and not those that were sent")
    return tensor.narrow(0, piece.start, num_rows)


def _mean(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    wide = mine.dtype if mine.dtype.itemsize >= 4 else torch.float32
    mean = torch.lerp(mine.to(wide), theirs.to(wide), 0.5).to(mine.dtype)
    return torch.where(mine == theirs, mine, mean)
