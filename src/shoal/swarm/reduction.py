"""The averaging of one round: senders, reducers, and those who take the averages.

Contributors send each part to its reducer. A reducer averages what has come once all are there, or once those
who are missing have been silent, and publishes the average with the bitmap of who is in it. Everybody takes
every part. A reducer that the coordinator cannot hear is named lost: senders then give the same bytes to its
backup, as attempt 2.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.core import Deadline, LimitExceeded, PeerBusy, PeerRefused, ShoalError, fanout
from shoal.swarm.ledger import FrozenContribution, SampleLedger
from shoal.swarm.wire import (
    PART,
    TAKE,
    Broadcast,
    Commit,
    PartMessage,
    PartResult,
    RoundPlan,
    SwarmMember,
    TakeReply,
    TakeRequest,
    from_bitmap,
    part_digest,
    to_bitmap,
)
from shoal.tensors import BFloat16, Codec, Encoded, EncodedMeta, Float16, Int8, Plain, decode
from shoal.transport import Reply

Call = Callable[[int, str, Any, Sequence[Any], float], Coroutine[Any, Any, Reply]]
"""Calls the member at a place of the round's list: method, payload, buffers, seconds to wait."""

_NUM_IN_FLIGHT = 8
_CLIP_FACTOR = 3.0
_SILENCE_S = 1.0
_GAP_FACTOR = 4.0
_RETRY_S = 0.1
_BEAT_S = 0.3
_PART_S = 10.0
_FETCH_S = 2.0


@dataclass(frozen=True)
class HeldPart:
    """The average of a part as it travels."""

    digest: bytes
    bitmap: bytes
    refused: bytes
    meta: EncodedMeta
    buffers: tuple[Any, ...]

    @property
    def reply(self) -> Reply:
        """What is answered to those who take it."""
        return Reply(TakeReply(self.digest, self.bitmap, self.refused, self.meta), self.buffers)


def read_part(reply: Reply) -> HeldPart | None:
    """Reads an average and checks its hash; None where it is not ready, LimitExceeded where it is wrong."""
    given: TakeReply = reply.payload
    if given.meta is None:
        return None
    held = HeldPart(given.digest, given.bitmap, given.refused, given.meta, tuple(map(bytes, reply.buffers)))
    if part_digest(held.meta, held.bitmap, held.buffers) != held.digest:
        raise LimitExceeded("A member sent the average of a part with another hash than it says.")
    return held


def average(parts: Sequence[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """Averages by weight, each clipped to three times the median norm.

    By numpy, in one thread: on a busy machine torch's threads wait for each other at every operation.
    """
    arrays = [tensor.numpy() for _, tensor in parts]
    norms = [float(np.linalg.norm(array)) for array in arrays]
    limit = _CLIP_FACTOR * statistics.median(norms)
    total = np.zeros_like(arrays[0])
    for (weight, _), array, norm in zip(parts, arrays, norms, strict=True):
        factor = weight * (limit / norm if limit and norm > limit else 1.0)
        total += array * np.float32(factor)
    total /= np.float32(sum(weight for weight, _ in parts))
    return torch.from_numpy(total)


class Reduction:
    """One member's part in the averaging of one plan."""

    def __init__(
        self, plan: RoundPlan, me: int, where: tuple[bytes, int], codec: Codec, now_s: Callable[[], float]
    ) -> None:
        self.plan = plan
        self.held: dict[tuple[int, bytes], HeldPart] = {}
        """The averages that this member has, by part and hash."""
        self.lost: dict[int, None] = {}
        """The places of reducers that the coordinator has named lost."""
        self._me = me
        self._where = where
        self._now_s = now_s
        # the average of sparse values is not sparse: it travels as it is
        self._codec = codec if isinstance(codec, Float16 | BFloat16 | Int8) else Plain()
        self._inbox: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        self._refused: dict[tuple[int, int], dict[int, None]] = {}
        self._published: dict[tuple[int, int], HeldPart | None] = {}
        self._began_s: dict[int, float] = {}
        """When this member began to wait for parts of each attempt."""
        self._arrivals_s: dict[int, list[float]] = {}
        self._taken: dict[int, tuple[int, HeldPart]] = {}
        self._changed = Broadcast()

    # --- as a reducer ---

    def receive(self, message: PartMessage, buffers: Sequence[Any]) -> None:
        """Takes a contributor's values; PeerRefused if they are not finite, or not for this member."""
        key, contributor = (message.part, message.attempt), message.contributor
        plan = self.plan
        is_mine = 0 <= message.part < plan.num_parts and plan.reducer(*key) == self._me
        if not is_mine or message.attempt not in (1, 2) or contributor not in plan.contributors:
            raise PeerRefused("This member does not reduce that part for that contributor.")
        inbox = self._inbox.setdefault(key, {})
        self._arrivals_s.setdefault(contributor, []).append(self._now_s())
        if contributor in inbox or key in self._published:
            return  # it came twice, or too late
        size = plan.size(message.part)
        tensor = decode(Encoded(message.meta, list(map(bytes, buffers))), 4 * size)
        fits = tensor.numel() == size and tensor.dtype == torch.float32
        if not fits or not bool(np.isfinite(tensor.numpy()).all()):
            self._refused.setdefault(key, {})[contributor] = None
            self._changed.fire()
            raise PeerRefused("The values of a part are not finite, or not as many as the part has.")
        inbox[contributor] = tensor
        self._changed.fire()

    async def reduce(self) -> None:
        """Averages the parts that are this member's as they become complete; ends when cancelled."""
        self._began_s[1] = self._now_s()
        while True:
            for part in range(self.plan.num_parts):
                for attempt in (1, 2):
                    self._reduce_if_due(part, attempt, self._now_s())
            await self._changed.wait(_RETRY_S)

    def _reduce_if_due(self, part: int, attempt: int, now_s: float) -> None:
        key, plan = (part, attempt), self.plan
        if plan.reducer(part, attempt) != self._me or key in self._published:
            return
        if attempt == 2:
            if plan.reducers[part] not in self.lost and key not in self._inbox:
                return
            self._began_s.setdefault(2, now_s)
        inbox, refused = self._inbox.get(key, {}), self._refused.get(key, {})
        waiting = [place for place in plan.contributors if place not in inbox and place not in refused]
        began_s = self._began_s[attempt]
        if now_s - began_s < plan.reduce_s and not all(self._is_silent(p, began_s, now_s) for p in waiting):
            return
        self._inbox.pop(key, None)
        if not inbox:
            self._published[key] = None
            return
        chosen = [place for place in plan.contributors if place in inbox]
        places = {place: index for index, place in enumerate(plan.contributors)}
        mean = average([(plan.samples[places[place]], inbox[place]) for place in chosen])
        encoded = self._codec.encode(mean)
        bitmap = to_bitmap([places[place] for place in chosen], len(places))
        refused_bits = to_bitmap([places[place] for place in refused], len(places))
        buffers = tuple(map(bytes, encoded.buffers))
        digest = part_digest(encoded.meta, bitmap, buffers)
        held = HeldPart(digest, bitmap, refused_bits, encoded.meta, buffers)
        self._published[key] = self.held[part, digest] = held
        self._changed.fire()

    def _is_silent(self, place: int, began_s: float, now_s: float) -> bool:
        """Whether a contributor has been silent for max(1 s, 4 × its median gap), here, since this began."""
        arrivals = self._arrivals_s.get(place, [])
        gaps = [after - before for before, after in itertools.pairwise(arrivals)]
        limit_s = max(_SILENCE_S, _GAP_FACTOR * statistics.median(gaps)) if gaps else _SILENCE_S
        return now_s - max([began_s, *arrivals[-1:]]) > limit_s

    async def serve_take(self, part: int, attempt: int) -> Reply:
        """Answers with an average of this member's, or after a while that it is not ready."""
        for _ in range(3):
            held = self._published.get((part, attempt))
            if held is not None:
                return held.reply
            if (part, attempt) in self._published:
                raise PeerRefused("Nothing has come for this part.")
            await self._changed.wait(_BEAT_S / 3)
        return Reply(TakeReply())

    # --- as a contributor ---

    async def send(self, call: Call, ledger: SampleLedger, frozen: FrozenContribution) -> None:
        """Sends all parts to their reducers, and those of lost ones to their backups; ends when cancelled."""
        plan = self.plan
        sent: dict[tuple[int, int], None] = {}
        while True:
            due = [
                (part, attempt)
                for attempt in (1, 2)
                for part in range(plan.num_parts)
                if (part, attempt) not in sent
                and (attempt == 2) == (plan.reducers[part] in self.lost)
                and plan.reducer(part, attempt) >= 0
            ]
            due = due[self._me % len(due) :] + due[: self._me % len(due)] if due else due
            calls = [self._send_part(call, ledger, frozen, part, attempt) for part, attempt in due]
            outcomes = await fanout(calls, Deadline.never(), limit=_NUM_IN_FLIGHT)
            for key, outcome in zip(due, outcomes, strict=True):
                if outcome is None or isinstance(outcome, PeerRefused):
                    sent[key] = None
            has_failed = any(key not in sent for key in due)
            await self._changed.wait(_RETRY_S if has_failed else _BEAT_S)

    async def _send_part(
        self, call: Call, ledger: SampleLedger, frozen: FrozenContribution, part: int, attempt: int
    ) -> None:
        plan = self.plan
        encoded = ledger.encode(frozen, part, plan.bounds[part], plan.bounds[part + 1])
        message = PartMessage(*self._where, part, attempt, self._me, encoded.meta)
        await call(plan.reducer(part, attempt), PART, message, encoded.buffers, _PART_S)

    # --- as one who takes the averages ---

    async def take_all(self, call: Call, give_up_s: float | None) -> list[tuple[int, HeldPart] | None]:
        """Takes every part, with its attempt: from its reducer, or the backup once that is lost; None for a
        zero.

        The coordinator gives `give_up_s`: who is silent for that long is named lost. Others go on trying.
        """
        calls = [self._take(call, part, give_up_s) for part in range(self.plan.num_parts)]
        found = await fanout(calls, Deadline.never(), limit=4 * _NUM_IN_FLIGHT)
        return [None if isinstance(part, Exception) else part for part in found]

    async def _take(self, call: Call, part: int, give_up_s: float | None) -> tuple[int, HeldPart] | None:
        heard_s, attempt = self._now_s(), 0
        while True:
            if part in self._taken:
                return self._taken[part]
            if attempt != (2 if self.plan.reducers[part] in self.lost else 1):
                attempt, heard_s = attempt + 1, self._now_s()
            place = self.plan.reducer(part, attempt)
            if place < 0 or place in self.lost:
                return None
            try:
                request = TakeRequest(*self._where, part, attempt)
                taking = self._until_lost(place, call(place, TAKE, request, (), _PART_S))
                held = read_part(await taking)
                if held is not None:
                    self.held[part, held.digest] = held
                    self._taken[part] = attempt, held
                    return attempt, held
                heard_s = self._now_s()
            except PeerRefused:
                return None
            except ShoalError as error:
                # who says that it is busy is there, and may still have to learn of the plan
                limit_s = None if give_up_s is None else give_up_s * (3 if isinstance(error, PeerBusy) else 1)
                if limit_s is not None and self._now_s() - heard_s > limit_s:
                    self.name_lost([place])
                await asyncio.sleep(_RETRY_S)

    async def _until_lost(self, place: int, calling: Coroutine[Any, Any, Reply]) -> Reply:
        """Waits for a reducer's answer, but no longer than until it is named lost."""

        async def watch() -> None:
            while place not in self.lost:
                await self._changed.wait(_PART_S)

        answer, _ = await fanout([calling, watch()], Deadline.never(), is_enough=bool)
        if isinstance(answer, Reply):
            return answer
        raise answer if isinstance(answer, Exception) else PeerBusy("The reducer is lost.")

    def name_lost(self, places: Sequence[int]) -> None:
        """Has the parts of these reducers sent to their backups."""
        for place in places:
            self.lost.setdefault(place)
        self._changed.fire()

    def blamed(self, taken: Sequence[tuple[int, HeldPart] | None]) -> list[int]:
        """Lists the contributors that sent what is not finite."""
        found: dict[int, None] = {}
        for _, held in filter(None, taken):
            for index in from_bitmap(held.refused):
                found.setdefault(self.plan.contributors[index])
        return list(found)


def results(taken: Sequence[tuple[int, HeldPart] | None]) -> tuple[PartResult, ...]:
    """Writes what was taken as a commit lists it."""
    return tuple(PartResult(one[0], one[1].digest, one[1].bitmap) if one else PartResult() for one in taken)


async def fetch_parts(
    call: Callable[[SwarmMember, str, Any, Sequence[Any], float], Awaitable[Reply]],
    me: SwarmMember,
    members: Sequence[SwarmMember],
    commit: Commit,
    held: dict[tuple[int, bytes], HeldPart],
) -> None:
    """Fetches every part of a commit that is not in `held`, from whoever has it, until all are there."""
    plan = commit.plan
    if plan is None:
        return

    async def fetch(part: int, result: PartResult) -> None:
        likely = plan.reducer(part, result.attempt)
        asked = [*members[likely : likely + 1], *members]
        request = TakeRequest(commit.fork, commit.round, part, result.attempt, result.digest)
        while (part, result.digest) not in held:
            for member in dict.fromkeys(asked):
                if member == me or not member.is_reachable:
                    continue
                try:
                    found = read_part(await call(member, TAKE, request, (), _FETCH_S))
                except ShoalError:
                    continue
                if found is not None and found.digest == result.digest:
                    held[part, found.digest] = found
                    break
            else:
                await asyncio.sleep(_BEAT_S)

    missing = [
        (part, result)
        for part, result in enumerate(commit.parts)
        if result.attempt and (part, result.digest) not in held
    ]
    await fanout([fetch(*one) for one in missing], Deadline.never(), limit=_NUM_IN_FLIGHT)


def assemble(
    plan: RoundPlan, results: Sequence[PartResult], held: dict[tuple[int, bytes], HeldPart]
) -> torch.Tensor:
    """Puts the averages of a commit together; parts that nobody supplied are zero."""
    made = np.zeros(plan.bounds[-1], np.float32)
    for part, result in enumerate(results):
        if result.attempt:
            found = held[part, result.digest]
            begin, end = plan.bounds[part], plan.bounds[part + 1]
            part_values = decode(Encoded(found.meta, list(found.buffers)), 4 * (end - begin))
            made[begin:end] = part_values.numpy()
    return torch.from_numpy(made)
