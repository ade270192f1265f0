"""Who takes part in a group over several machines, and which side of a network that is cut in two goes on.

Each worker beats, and asks every worker of another machine to tell when it goes. The question stays open as
long as the other takes part. Its answer says how it went: it has left in order, it failed, and because of
whose loss, or it has found the asker silent. Where the connection ends without an answer, or nothing is heard
for longer than `silence_s`, the other is lost; then all connections with it are ended, so that nothing of it
comes any more. The `HeartbeatMonitor` lives on the mesh's loop.

The workers of a machine tell each other, in a table that each publishes inside the machine, which workers of
other machines have left, and which operation they could not finish and because of whom: one that passes a
result on has often learned this before those that get the result.

Workers that fall silent at once, and whose end nobody has seen, may be alive and train a model of their own
beyond a cut. So the side with more workers goes on, and of two equal sides the one with the lowest rank; the
other side stops. All decide alike, because each counts the same workers: those that were there before the
cut. Workers that end one by one leave no side behind, and the others go on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch

from shoal.core import Deadline, NetworkSplit, Peer, PeerId, PeerLost, PeerRefused, Scope, ShoalError, fanout
from shoal.group.base import GroupSettings, Loss
from shoal.group.host import HostGroup
from shoal.group.solo import SoloGroup
from shoal.transport import Head, Reply, StreamTransport

log = logging.getLogger(__name__)
_DEPARTURES = "shoal: departures"
_GREET, _WATCH, _BEAT, _FAREWELL = "mesh.greet", "mesh.watch", "mesh.beat", "mesh.farewell"
_BEAT_S = 1.0
_LOOKS_PER_BEAT = 4
_ASK_AGAIN_S = 1.0
_TURN_S = 0.005  # for a verdict to leave before its connection is ended, and for that end to be noticed
_NOTICING = 1.25
"""Times `silence_s`: a cut is noticed after so long at the latest, if a beat was answered just before."""


class Members:
    """The ranks of a group, the machines that they are on, and which of them are gone."""

    def __init__(
        self,
        machines: Sequence[Sequence[int]],
        local: HostGroup | SoloGroup,
        monitor: HeartbeatMonitor,
        settings: GroupSettings,
    ) -> None:
        self.rank = monitor.rank
        self.size = sum(map(len, machines))
        self.ranks_on = [list(ranks) for ranks in machines]
        """The ranks of each machine."""
        where = {rank: index for index, ranks in enumerate(machines) for rank in ranks}
        self.machines = [where[rank] for rank in range(self.size)]
        """The machine of each rank."""
        self.machine = where[self.rank]
        self._outside = [rank for rank in range(self.size) if where[rank] != self.machine]
        self.ranks_here = self.ranks_on[self.machine]
        """The ranks of this machine; a rank's place among them is its rank in the machine's own group."""
        self._local = local
        self._monitor = monitor
        self._lost: dict[int, Loss] = {}
        self._settings = settings
        self._judged: Mapping[int, Loss] = monitor.lost
        """The losses for which it is settled which side of a cut network this worker is on."""
        self._said: Sequence[int] = ()
        """The silent ranks that were spoken of last."""
        self.split: Exception | None = None
        """Why this worker stops, if it is on the wrong side of a cut network; `judge_split` finds out."""
        self._own_table = local.empty(self.size + 2, torch.int64)
        self._window = local.window(_DEPARTURES, self.size + 2, torch.int64, sources=())
        self._window.publish(self._own_table, 0)
        self._own_words = self._own_table.numpy().data
        self._tables = {self.ranks_here.index(self.rank): self._own_words}
        """For each mate's place: by rank, one more than the last operation in which that rank takes part; and
        behind them the number of an operation that the mate could not finish, and one more than the rank
        that was to blame."""

    def read_tables(self) -> None:
        """Finds the tables of this machine's workers, all of which have published theirs."""
        for place, rank in enumerate(self.ranks_here):
            if rank != self.rank and (found := self._window.fetch(place).wait()) is not None:
                self._tables[place] = found.tensor.numpy().data

    def place_of(self, rank: int) -> int | None:
        """Gives a rank's place inside this machine; None for those of others."""
        return self.ranks_here.index(rank) if rank in self.ranks_here else None

    def present(self, seq: int) -> list[int]:
        """Lists the ranks that take part in an operation that has not begun."""
        inside = [self.ranks_here[place] for place in self._local.members]
        return sorted(inside + [rank for rank in self._outside if not self.is_gone(rank, seq)])

    # --- losses ---

    @property
    def lost(self) -> Mapping[int, Loss]:
        """The peers that ended or fell silent without having left."""
        inside = tuple(self._local.lost.items())
        found = [dataclasses.replace(loss, rank=self.ranks_here[place]) for place, loss in inside]
        for loss in (*found, *tuple(self._monitor.lost.values())):
            self._lost.setdefault(loss.rank, loss)
        return self._lost

    def first_loss(self) -> Loss | None:
        """Gives the loss of anybody, where a loss ends every operation."""
        return None if self._local.should_survive else next(iter(self.lost.values()), None)

    def is_gone(self, rank: int, seq: int) -> bool:
        """Tells whether a rank of another machine is lost, or left in order before an operation."""
        if rank in self._monitor.lost or self._monitor.left.get(rank, seq) < seq:
            return True
        return any(0 < table[rank] <= seq for table in self._tables.values())

    def loss_on(self, machine: int) -> Loss:
        """Tells why a machine that took part gives nothing more."""
        ranks = self.ranks_on[machine]
        losses = [self.first_loss(), *map(self._monitor.lost.get, ranks)]
        left = Loss(ranks[0], "it left in the middle of an operation")
        return next((loss for loss in losses if loss is not None), left)

    def error_of_absence(self, seq: int) -> PeerLost | None:
        """Gives the error of somebody who is lost, or has left before an operation that needs everybody."""
        for loss in self.lost.values():
            return loss.error()
        for rank in sorted(set(range(self.size)).difference(self.present(seq))):
            return PeerLost(
                f"rank {rank} has left the group, and torch.distributed cannot go on without it.",
                peer=rank,
                next_step="let all workers take the same number of steps.",
            )
        return None

    # --- what workers of this machine tell each other ---

    def tell_departures(self) -> None:
        """Tells the machine's workers who has left elsewhere, before they get a result from this one."""
        for rank, after in self._monitor.left.items():
            self._own_words[rank] = after + 1

    def note_absent(self, machine: int, workers: Collection[int], seq: int) -> None:
        """Takes note of those for whom their machine does not speak in an operation: they have gone before.

        What they say themselves may come later.
        """
        for rank in self.ranks_on[machine]:
            if rank not in workers and not self._own_words[rank]:
                self._own_words[rank] = seq

    def tell_failure(self, seq: int, blamed: int | None) -> None:
        """Tells the machine's workers that this one could not finish an operation, and because of whom."""
        self._own_words[self.size + 1] = 0 if blamed is None else blamed + 1
        self._own_words[self.size] = seq

    def has_failed(self, place: int, seq: int) -> bool:
        """Tells whether a worker of this machine says that it could not finish an operation."""
        return place in self._tables and self._tables[place][self.size] == seq

    def failure_of(self, place: int) -> PeerLost:
        """Gives the error of those for whom a worker of this machine spoke that was lost, or failed."""
        rank = self.ranks_here[place]
        blamed = self._tables[place][self.size + 1] - 1 if place in self._tables else -1
        if blamed >= 0:
            return (self.lost.get(blamed) or Loss(blamed, "it failed")).error()
        return (self.lost.get(rank) or Loss(rank, "it failed in the middle of an operation")).error()

    # --- cut networks ---

    def judge_split(self, seq: int) -> bool:
        """Settles on which side of a network this worker is, if it was cut; tells whether it stops now."""
        if self._monitor.lost is self._judged or self.is_undecided(seq):
            return False
        self._judged = self._monitor.lost
        found = self._find_partition(seq)
        if found is None or self._settings.on_split == "ignore":
            return False
        is_allowed = self._settings.on_split == "continue"
        if found.should_stop and not is_allowed:
            self.split = found.error()
            return True
        is_more_than_one = len(found.silent) > 1 or len(found.here) == 1
        if is_more_than_one and found.silent != self._said:
            self._said = found.silent
            log.warning("rank %d: %s", self.rank, found.line(is_allowed=is_allowed))
        return False

    def is_undecided(self, seq: int) -> bool:
        """Tells whether somebody else seems to fall silent too, so that it is not clear yet who is where."""
        return self._find_partition(seq) is not None and any(
            self._monitor.silent_s(rank) > self._settings.silence_s / 2
            for rank in self._outside
            if not self.is_gone(rank, seq)
        )

    def _find_partition(self, seq: int) -> NetworkPartition | None:
        """Finds the latest workers that may be alive elsewhere, each lost soon after the one before.

        Those that were lost longer ago are not counted on any side: the others have gone on without them. One
        that has left or ended since the cut, and this worker could learn of it, is counted here: to the
        others it is silent.
        """
        losses, silence_s = list(self.lost.values()), self._settings.silence_s
        latest: list[Loss] = []
        for loss in sorted((loss for loss in losses if loss.kind != "ended"), key=lambda loss: -loss.at_s):
            if latest and latest[-1].at_s - loss.at_s > silence_s:
                break
            latest.append(loss)
        if not latest:
            return None
        gone_at_s = {loss.rank: loss.at_s for loss in losses if loss.kind == "ended"}
        gone_at_s |= self._monitor.left_at_s
        if isinstance(self._local, HostGroup):
            gone_at_s |= {self.ranks_here[place]: at_s for place, at_s in self._local.left_at_s.items()}
        cut_at_s = latest[-1].at_s - _NOTICING * silence_s
        gone = [rank for rank, at_s in gone_at_s.items() if at_s > cut_at_s]
        verdict = next((loss for loss in latest if loss.kind == "verdict"), None)
        return NetworkPartition(
            sorted({*self.present(seq), *gone}), sorted(loss.rank for loss in latest), verdict
        )


class Departure(msgspec.Struct, frozen=True):
    """Says how a worker goes."""

    kind: Literal["left", "failed", "verdict"]
    after: int = 0
    """Of one that leaves: the last operation in which it takes part."""
    reason: str = ""
    """Of a verdict: why the asked one goes on without the asker; of a failure: why `culprit` is lost."""
    culprit: int | None = None
    """Of a failure: the lost rank because of which it failed."""
    num_sent: dict[int, int] = {}
    """Of one that leaves: how many tensors it has sent to each rank; some may still be on their way."""


@dataclass(slots=True)
class _Watched:
    """What a worker knows of one of another machine."""

    peer: Peer
    name: str
    """For people: 'process 4711 on node2'."""
    ended: asyncio.Future[None]
    """Done when it is lost, or has left."""
    loss: Loss | None = None
    """Why it is lost, from when connections with it are being ended."""
    silent_s: float = 0.0
    """Seconds since something came from it, to within a beat."""
    is_beat_open: bool = False
    """Whether a beat to it was not answered yet."""
    asker: asyncio.Future[Reply | None] | None = None
    """The answer to its question how this worker goes."""

    def answer(self, ending: Departure) -> bool:
        """Tells it how this worker goes; False when it does not ask, or has been told."""
        if self.asker is None or self.asker.done():
            return False
        self.asker.set_result(Reply(ending))
        return True


class HeartbeatMonitor:
    """Beats to the others, and knows who of them is lost or has left; calls `on_change` for each."""

    def __init__(
        self,
        rank: int,
        transport: StreamTransport,
        scope: Scope,
        silence_s: float,
        on_change: Callable[[], None],
    ) -> None:
        # the first two are replaced, never changed: other threads look at them
        self.lost: Mapping[int, Loss] = {}
        """Those that went without having said so, in the order noticed."""
        self.left: Mapping[int, int] = {}
        """Those that have left, and the last operation in which each takes part."""
        self.left_at_s: dict[int, float] = {}
        self.num_sent_by: dict[int, int] = {}
        """How many tensors those that have left have sent to this worker."""
        self.rank = rank
        self.greeting: Any = None
        """What this worker says to all that connect; set it before `open`."""
        self._transport = transport
        self._scope = scope
        self._silence_s = silence_s
        self._on_change = on_change
        self._others: dict[int, _Watched] = {}
        self._ranks: dict[PeerId, int] = {}
        self._ready = asyncio.get_running_loop().create_future()
        self.ending: Departure | None = None
        """How this worker goes, once it has told the others."""
        transport.handle(_GREET, self._answer_greeting)
        transport.handle(_WATCH, self._answer_watch)
        transport.handle(_BEAT, self._answer_beat)
        transport.handle(_FAREWELL, self._answer_farewell)

    async def open(
        self, peers: Mapping[int, Peer], names: Mapping[int, str], deadline: Deadline
    ) -> dict[int, Any]:
        """Connects with all of them, and begins; gives what each has said as its `greeting`.

        PeerLost names one that does not answer.
        """
        for rank, peer in sorted(peers.items()):
            assert peer.id is not None
            self._ranks[peer.id] = rank
            ended = asyncio.get_running_loop().create_future()
            self._others[rank] = _Watched(peer, names.get(rank) or str(peer.address), ended)
        self._ready.set_result(None)
        there = [other.peer for other in self._others.values()]
        answers = await fanout(
            [self._transport.call(peer, _GREET, deadline=deadline) for peer in there], deadline
        )
        greetings: dict[int, Any] = {}
        for (rank, other), answer in zip(self._others.items(), answers, strict=True):
            if not isinstance(answer, Exception):
                greetings[rank] = answer.payload
            else:
                raise PeerLost(
                    f"rank {rank} cannot be reached at {other.peer.address}: {answer}",
                    peer=rank,
                    cause="it has ended, or a firewall lies between, or that is not the right interface.",
                    next_step=f"see rank {rank}'s output, or name the interface: "
                    "shoal run --network-interface NAME.",
                ) from answer
        for rank in self._others:
            self._scope.start_soon(self._watch(rank), name=f"watch rank {rank}")
        if self._others:
            self._scope.start_soon(self._beat(), name="beat")
        return greetings

    def rank_of(self, head: Head) -> int:
        """Tells who calls; PeerRefused for one that is not of this mesh."""
        rank = None if head.peer.id is None else self._ranks.get(head.peer.id)
        if rank is None:
            raise PeerRefused(f"{head.peer} is not of this group.")
        return rank

    def is_gone(self, rank: int) -> bool:
        """Tells whether nothing more can be asked of a rank."""
        return rank in self.left or self._others[rank].loss is not None

    def why_gone(self, rank: int) -> PeerLost:
        """Gives the error to raise where somebody depends on a rank that is gone."""
        if rank in self.left and rank not in self.lost:
            return PeerLost(
                f"rank {rank} has left the group.",
                peer=rank,
                cause="its program has ended, or closed its group, before this one.",
                next_step="let all workers take the same number of steps.",
            )
        return (self._others[rank].loss or Loss(rank, "the mesh was closed")).error()

    def tell(self, ending: Departure) -> None:
        """Answers all who ask, and all who will, that this worker goes; the first time counts."""
        if self.ending is None:
            self.ending = ending
            for other in self._others.values():
                other.answer(ending)

    async def say_farewell(self, deadline: Deadline) -> None:
        """Waits until those who are there have heard what was told."""
        there = [other.peer for rank, other in self._others.items() if not self.is_gone(rank)]
        await fanout([self._transport.call(peer, _FAREWELL, deadline=deadline) for peer in there], deadline)

    def describe(self, rank: int) -> str:
        """Says who a rank is and when it was last heard, for people."""
        other = self._others[rank]
        return f"rank {rank} ({other.name}), last beat {other.silent_s:.1f} s ago"

    def silent_s(self, rank: int) -> float:
        """Gives the seconds since something came from a rank, to within a beat."""
        return self._others[rank].silent_s

    def heard(self, rank: int) -> None:
        """Takes note that something has come from a rank."""
        self._others[rank].silent_s = 0.0

    def lose(self, loss: Loss) -> None:
        """Goes on without a rank that has ended, or is taken for it; the first time counts."""
        other = self._others[loss.rank]
        if not self.is_gone(loss.rank):
            other.loss = dataclasses.replace(loss, at_s=time.monotonic())
            self._scope.start_soon(self._lose(other, other.loss), name=f"lose rank {loss.rank}")

    async def _lose(self, other: _Watched, loss: Loss) -> None:
        assert other.peer.id is not None
        if other.answer(Departure("verdict", reason=loss.reason)):
            await asyncio.sleep(_TURN_S)
        self._transport.cut_off(other.peer.id)
        await asyncio.sleep(_TURN_S)
        self.lost = {**self.lost, loss.rank: loss}
        log.warning("rank %d is lost: %s", loss.rank, loss.reason)
        self._end(other)

    def _end(self, other: _Watched) -> None:
        if not other.ended.done():
            other.ended.set_result(None)
        self._on_change()

    # --- asking ---

    async def _watch(self, rank: int) -> None:
        other = self._others[rank]
        kind: Literal["ended", "silent"] = "ended"
        # asked again, one that has ended refuses; one that has gone on without this worker says so, or is not
        # reached
        for limit_s in (math.inf, min(_ASK_AGAIN_S, self._silence_s / 5)):
            try:
                reply = await self._transport.call(other.peer, _WATCH, deadline=Deadline.after(limit_s))
                ending = msgspec.convert(reply.payload, Departure)
                break
            except (ShoalError, msgspec.ValidationError) as error:
                kind = "silent" if _is_out_of_reach(error) else "ended"
        else:
            self.lose(Loss(rank, f"the connection to {other.name} ended", kind))
            return
        if ending.kind == "left":
            if other.loss is None:
                self.left_at_s[rank] = time.monotonic()
                self.num_sent_by[rank] = ending.num_sent.get(self.rank, 0)
                self.left = {**self.left, rank: ending.after}
                self._end(other)
        elif ending.kind == "verdict" or ending.culprit == self.rank:
            reason = f"it has gone on without this worker ({ending.reason})"
            if self.ending is None:
                own = Loss(self.rank, f"{ending.reason}, and rank {rank} went on without it")
                self.lose(Loss(rank, reason, "verdict", because=own))
            else:  # this worker has said itself that it goes
                self.lose(Loss(rank, reason))
        elif ending.culprit is None:
            self.lose(Loss(rank, ending.reason or "it failed"))
        else:
            culprit = self._others.get(ending.culprit)
            because = (culprit and culprit.loss) or Loss(ending.culprit, ending.reason)
            self.lose(Loss(rank, f"it failed because rank {ending.culprit} is lost", because=because))

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        look_s = min(_BEAT_S, self._silence_s / 5) / _LOOKS_PER_BEAT
        looked_s, num_looks = loop.time(), 0
        while there := {rank: other for rank, other in self._others.items() if not self.is_gone(rank)}:
            if num_looks % _LOOKS_PER_BEAT == 0:
                for rank, other in there.items():
                    if not other.is_beat_open:
                        other.is_beat_open = True
                        self._scope.start_soon(self._beat_to(other), name=f"beat to rank {rank}")
            num_looks += 1
            await asyncio.sleep(look_s)
            # a pause of this worker itself (suspended, stopped, starved) is nobody else's silence
            passed_s, looked_s = min(loop.time() - looked_s, 2 * look_s), loop.time()
            for rank, other in there.items():
                if other.is_beat_open:
                    other.silent_s += passed_s
                    if other.silent_s > self._silence_s:
                        self.lose(Loss(rank, f"silent for {other.silent_s:.1f} s", "silent"))

    async def _beat_to(self, other: _Watched) -> None:
        try:
            await self._transport.call(other.peer, _BEAT, deadline=Deadline.never())
            other.silent_s = 0.0
        except ShoalError as error:
            log.debug("a beat to %s was not answered: %s", other.name, error.what)
        finally:
            other.is_beat_open = False

    # --- answering ---

    async def _answer_greeting(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        await asyncio.shield(self._ready)
        return Reply(self.greeting)

    def _answer_watch(
        self, head: Head, buffers: Sequence[memoryview]
    ) -> Reply | asyncio.Future[Reply | None]:
        other = self._others[self.rank_of(head)]
        if self.ending is not None:
            return Reply(self.ending)
        if other.loss is not None:
            return Reply(Departure("verdict", reason=other.loss.reason))
        other.asker = asyncio.get_running_loop().create_future()
        return other.asker

    def _answer_beat(self, head: Head, buffers: Sequence[memoryview]) -> None:
        self.heard(self.rank_of(head))

    async def _answer_farewell(self, head: Head, buffers: Sequence[memoryview]) -> None:
        """Answers once this worker has heard how the caller went."""
        await asyncio.shield(self._others[self.rank_of(head)].ended)


def _is_out_of_reach(error: Exception) -> bool:
    """Tells whether no answer came at all; where a process has ended, its machine refuses the connection."""
    cause = error.__cause__
    return isinstance(error, TimeoutError) or (
        isinstance(cause, OSError) and not isinstance(cause, ConnectionError)
    )


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

    def error(self) -> Exception:
        """Gives what is raised on the side that stops."""
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
        """Gives what is said once on the side that goes on."""
        by_choice = "by --allow-split, and the other may train another model"
        return f"{self._what()}: this side goes on, {by_choice if is_allowed else self._reason()}"

    def _what(self) -> str:
        when = " at once" if len(self.silent) > 1 else ""
        verb = "is" if len(self.here) == 1 else "are"
        return f"{_ranks(self.silent)} fell silent{when}, and {_ranks(self.here)} {verb} on this side"

    def _reason(self) -> str:
        if len(self.here) != len(self.silent):
            return f"being the {'smaller' if self.should_stop else 'larger'} one"
        return "because the lowest rank is on " + ("the other" if self.should_stop else "it")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
