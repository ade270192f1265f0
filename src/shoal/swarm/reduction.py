"""The averaging of one round: senders, reducers, and those who take the averages.

Contributors send each part to its reducer. A reducer averages what has come once all are there, or once those
who are missing have been silent, and publishes the average with the bitmap of who is in it. Everybody takes
every part. A reducer that the coordinator cannot hear is named lost: senders then give the same bytes to its
backup, as attempt 2.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import statistics
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.core import Deadline, DeadlineExceeded, LimitExceeded, PeerBusy, PeerRefused, ShoalError, fanout
from shoal.swarm.ledger import FrozenContribution, SampleLedger
from shoal.swarm.membership import MemberContext
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
from shoal.tensors import BFloat16, Encoded, EncodedMeta, Float16, Int8, Plain, decode
from shoal.tensors.specs import TensorSpec
from shoal.transport import Head, Reply

Call = Callable[..., Coroutine[Any, Any, Reply]]
"""Calls the member at a place of the round's list: method, payload, buffers, seconds to wait, and where the
answer's buffers should go.
"""

_NUM_IN_FLIGHT = 8
_CLIP_FACTOR = 3.0
_SILENCE_S = 1.0
_GAP_FACTOR = 4.0
_RETRY_S = 0.1
_BEAT_S = 0.3
_PART_S = 10.0
_FETCH_S, _LONGEST_FETCH_S = 2.0, 30.0
GONE_SHARE = 0.3
"""Where nobody listens any more, this share of the usual silence is enough."""
TAKE_LATER = Reply(TakeReply())


@dataclass(frozen=True)
class HeldPart:
    """The average of a part as it travels."""

    digest: bytes
    bitmap: bytes
    refused: bytes
    meta: EncodedMeta
    buffers: tuple[Any, ...]
    vector: Any = None
    """The vector of all averages in which these values lie in their place, where they do."""

    @property
    def reply(self) -> Reply:
        """What is answered to those who take it."""
        return Reply(TakeReply(self.digest, self.bitmap, self.refused, self.meta), self.buffers)


def read_part(reply: Reply, vector: Any = None) -> HeldPart | None:
    """Reads an average and checks its hash; None where it is not ready, LimitExceeded where it is wrong."""
    given: TakeReply = reply.payload
    if given.meta is None:
        return None
    buffers = tuple(reply.buffers)
    if part_digest(given.meta, given.bitmap, buffers) != given.digest:
        raise LimitExceeded("A member sent the average of a part with another hash than it says.")
    return HeldPart(given.digest, given.bitmap, given.refused, given.meta, buffers, vector)


def squared_norm(values: Any) -> float:
    """Sums the squares of a vector; not finite where one of its values is not.

    Not by BLAS, whose threads wait for each other on a busy machine.
    """
    found = float(np.einsum("i,i->", values, values))
    if np.isfinite(found) or not np.isfinite(values).all():
        return found
    return float(np.square(values, dtype=np.float64).sum())  # the squares are beyond float32, the values not


def average(parts: Sequence[tuple[int, Any, float]], out: Any) -> None:
    """Averages vectors by weight into `out`, each clipped to three times the median norm.

    Each comes with its weight and its squared norm. By numpy, in one thread: on a busy machine torch's
    threads wait for each other at every operation.
    """
    norms = [squared**0.5 for _, _, squared in parts]
    limit = _CLIP_FACTOR * statistics.median(norms)
    total = sum(weight for weight, _, _ in parts)
    factors = [
        weight / total * (limit / norm if limit and norm > limit else 1.0)
        for (weight, _, _), norm in zip(parts, norms, strict=True)
    ]
    arrays = [array for _, array, _ in parts]
    if len(set(factors)) == 1:
        if len(arrays) > 1:
            np.add(arrays[0], arrays[1], out=out)
            for array in arrays[2:]:
                out += array
            out *= np.float32(factors[0])
        else:
            np.multiply(arrays[0], np.float32(factors[0]), out=out)
        return
    np.multiply(arrays[0], np.float32(factors[0]), out=out)
    scaled = np.empty_like(out)
    for array, factor in zip(arrays[1:], factors[1:], strict=True):
        np.multiply(array, np.float32(factor), out=scaled)
        out += scaled


class Reduction:
    """One member's part in the averaging of one plan."""

    def __init__(self, plan: RoundPlan, me: int, where: tuple[bytes, int], context: MemberContext) -> None:
        self.plan = plan
        self.held: dict[tuple[int, bytes], HeldPart] = {}
        """The averages that this member has, by part and hash."""
        self.lost: dict[int, None] = {}
        """The places of reducers and contributors that the coordinator has named lost."""
        self._me = me
        self._where = where
        self._now_s = context.now_s
        self._silence_s = _SILENCE_S * context.settings.patience
        # the average of sparse values is not sparse: it travels as it is
        is_dense = isinstance(context.codec, Float16 | BFloat16 | Int8)
        self._codec = context.codec if is_dense else Plain()
        self._vector = context.vector()
        """Where averages that travel as they are arrive, each part in its place."""
        self._claimed: dict[int, None] = {}
        """The parts whose place has been written, or is about to be."""
        self._inbox: dict[tuple[int, int], dict[int, tuple[Any, float]]] = {}
        """By part and attempt: each contributor's values and their squared norm."""
        self._refused: dict[tuple[int, int], dict[int, None]] = {}
        self._published: dict[tuple[int, int], HeldPart | None] = {}
        self._ready: dict[tuple[int, int], Broadcast] = {}
        """Wakes those who wait for the average of a part."""
        self._began_s: dict[int, float] = {}
        """When this member began to wait for parts of each attempt."""
        self._arrivals_s: dict[int, list[float]] = {}
        self._taken: dict[int, tuple[int, HeldPart]] = {}
        self._taken_changed = Broadcast()
        self._lost_changed = Broadcast()
        self._first_parts: dict[int, int] = {-1: 0}
        for part, places in enumerate(zip(plan.reducers, plan.backups, strict=True)):
            for place in places:
                self._first_parts.setdefault(place, part)
        self._num_places = 1 + max(*plan.contributors, *plan.reducers, me)

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
        tensor = decode(Encoded(message.meta, list(buffers)), 4 * size)
        fits = tensor.numel() == size and tensor.dtype == torch.float32
        values = tensor.reshape(-1).numpy() if fits else None
        squared = math.nan if values is None else squared_norm(values)
        if not math.isfinite(squared):
            self._refused.setdefault(key, {})[contributor] = None
            self._reduce_if_due(*key, self._now_s())
            raise PeerRefused("The values of a part are not finite, or not as many as the part has.")
        inbox[contributor] = values, squared
        self._reduce_if_due(*key, self._now_s())

    async def reduce(self) -> None:
        """Averages parts whose missing contributors are silent, and those of lost reducers; the others are
        averaged as they become complete. Ends when cancelled.
        """
        self._began_s[1] = self._now_s()
        mine = [
            (part, attempt)
            for part in range(self.plan.num_parts)
            for attempt in (1, 2)
            if self.plan.reducer(part, attempt) == self._me
        ]
        while True:
            mine = [key for key in mine if key not in self._published]
            for part, attempt in mine:
                self._reduce_if_due(part, attempt, self._now_s())
            await self._lost_changed.wait(_RETRY_S)

    def _reduce_if_due(self, part: int, attempt: int, now_s: float) -> None:
        key, plan = (part, attempt), self.plan
        if key in self._published:
            return
        if attempt == 2 and plan.reducers[part] not in self.lost and key not in self._inbox:
            return
        began_s = self._began_s.setdefault(attempt, now_s)
        inbox, refused = self._inbox.get(key, {}), self._refused.get(key, {})
        if len(inbox) + len(refused) < len(plan.contributors) and now_s - began_s < plan.reduce_s:
            waiting = [place for place in plan.contributors if place not in inbox and place not in refused]
            if not all(self._is_silent(place, began_s, now_s) for place in waiting):
                return
        self._inbox.pop(key, None)
        self._published[key] = self._average(key, inbox, list(refused)) if inbox else None
        if key in self._ready:
            self._ready.pop(key).fire()

    def _average(
        self, key: tuple[int, int], inbox: dict[int, tuple[Any, float]], refused: Sequence[int]
    ) -> HeldPart:
        part, plan = key[0], self.plan
        places = {place: index for index, place in enumerate(plan.contributors)}
        chosen = [place for place in plan.contributors if place in inbox]
        begin, end = plan.bounds[part], plan.bounds[part + 1]
        is_in_place = self._claim(part)
        out = self._vector[begin:end] if is_in_place else np.empty(end - begin, np.float32)
        average([(plan.samples[places[place]], *inbox[place]) for place in chosen], out)
        encoded = self._codec.encode(torch.from_numpy(out))
        bitmap = to_bitmap([places[place] for place in chosen], len(places))
        refused_bits = to_bitmap([places[place] for place in refused], len(places))
        is_in_place = is_in_place and encoded.meta.codec == Plain.name
        buffers = tuple(encoded.buffers)
        digest = part_digest(encoded.meta, bitmap, buffers)
        vector = self._vector if is_in_place else None
        held = HeldPart(digest, bitmap, refused_bits, encoded.meta, buffers, vector)
        self.held[part, digest] = held
        return held

    def _claim(self, part: int) -> bool:
        """Whether a part's place in the vector may be written: only one average of a part comes there."""
        is_free = part not in self._claimed
        self._claimed.setdefault(part)
        return is_free

    def _is_silent(self, place: int, began_s: float, now_s: float) -> bool:
        """Whether a contributor is lost, or has sent nothing for max(1 s, 4 × its median gap)."""
        if place in self.lost:
            return True
        arrivals = self._arrivals_s.get(place, [])
        gaps = [after - before for before, after in itertools.pairwise(arrivals)]
        limit_s = max(self._silence_s, _GAP_FACTOR * statistics.median(gaps)) if gaps else self._silence_s
        return now_s - max([began_s, *arrivals[-1:]]) > limit_s

    async def serve_take(self, part: int, attempt: int) -> Reply:
        """Answers with an average of this member's, or after a while that it is not ready."""
        held = await self._wait_published((part, attempt))
        return TAKE_LATER if held is None else held.reply

    async def _wait_published(self, key: tuple[int, int]) -> HeldPart | None:
        """Waits for an average of this member's; None when it takes longer than a beat, PeerRefused where
        there will be none.
        """
        if key not in self._published:
            await self._ready.setdefault(key, Broadcast()).wait(_BEAT_S)
        held = self._published.get(key)
        if held is None and key in self._published:
            raise PeerRefused("Nothing has come for this part.")
        return held

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
            due.sort(key=lambda key: self._turn(*key))
            calls = [self._send_part(call, ledger, frozen, part, attempt) for part, attempt in due]
            outcomes = await fanout(calls, Deadline.never(), limit=_NUM_IN_FLIGHT)
            for key, outcome in zip(due, outcomes, strict=True):
                if outcome is None or isinstance(outcome, PeerRefused):
                    sent[key] = None
            has_failed = any(key not in sent for key in due)
            await self._lost_changed.wait(_RETRY_S if has_failed else _BEAT_S)

    def _turn(self, part: int, attempt: int) -> tuple[int, int]:
        """Says when a part has its turn: the first parts of all reducers, then their second ones, and so on,
        each member beginning with the reducer after itself. So all lines are busy, and averages are complete
        early.
        """
        reducer = self.plan.reducer(part, attempt)
        return part - self._first_parts[reducer], (reducer - self._me - 1) % self._num_places

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
        parts = sorted(range(self.plan.num_parts), key=lambda part: self._turn(part, 1))
        calls = [self._take(call, part, give_up_s) for part in parts]
        found = await fanout(calls, Deadline.never(), limit=4 * _NUM_IN_FLIGHT)
        taken = {part: one for part, one in zip(parts, found, strict=True) if not isinstance(one, Exception)}
        return [taken.get(part) for part in range(self.plan.num_parts)]

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
                held = await self._take_once(call, place, part, attempt)
                if held is not None:
                    self.held[part, held.digest] = held
                    self._taken[part] = attempt, held
                    self._taken_changed.fire()
                    return attempt, held
                heard_s = self._now_s()
            except PeerRefused:
                return None
            except ShoalError as error:
                # who says that it is busy is there, and may still have to learn of the plan; where nobody
                # listens any more the process is gone
                patience = 3 if isinstance(error, PeerBusy) else GONE_SHARE if is_gone(error) else 1
                if give_up_s is not None and self._now_s() - heard_s > patience * give_up_s:
                    self.name_lost([place])
                await asyncio.sleep(_RETRY_S)

    async def wait_taken(self) -> None:
        """Waits for the parts that are on their way here, as long as they keep coming."""
        num_taken = -1
        while num_taken < len(self._taken) < self.plan.num_parts:
            num_taken = len(self._taken)
            await self._taken_changed.wait(self._silence_s)

    async def _take_once(self, call: Call, place: int, part: int, attempt: int) -> HeldPart | None:
        """Asks for an average, which arrives in its place in the vector; None where it is not ready."""
        if place == self._me:
            return await self._wait_published((part, attempt))
        begin, end = self.plan.bounds[part], self.plan.bounds[part + 1]
        due = memoryview(self._vector[begin:end]).cast("B")
        is_in_place = False

        def where(head: Head) -> list[Any]:
            nonlocal is_in_place
            is_in_place = list(head.sizes) == [len(due)] and self._claim(part)
            return [due] if is_in_place else [bytearray(size) for size in head.sizes]

        request = TakeRequest(*self._where, part, attempt)
        found: HeldPart | None = None
        try:
            reply = await self._until_lost(place, call(place, TAKE, request, (), _PART_S, where))
            found = read_part(reply)
        finally:
            if is_in_place and found is None:  # it came in part, or wrong
                del self._claimed[part]
        is_in_place = is_in_place and found is not None and found.meta == plain_meta(end - begin)
        return dataclasses.replace(found, vector=self._vector) if found and is_in_place else found

    async def _until_lost(self, place: int, calling: Coroutine[Any, Any, Reply]) -> Reply:
        """Waits for a reducer's answer, but no longer than until it is named lost."""

        async def watch() -> None:
            while place not in self.lost:
                await self._lost_changed.wait(_PART_S)

        answer, _ = await fanout([calling, watch()], Deadline.never(), is_enough=bool)
        if isinstance(answer, Reply):
            return answer
        raise answer if isinstance(answer, Exception) else PeerBusy("The reducer is lost.")

    def name_lost(self, places: Sequence[int]) -> None:
        """Has the parts of these reducers sent to their backups, and nobody wait for what they contribute."""
        for place in places:
            self.lost.setdefault(place)
        self._lost_changed.fire()

    def close(self) -> None:
        """Lets go of what contributors have sent; the averages stay with those who hold them."""
        self._inbox.clear()

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
        wait_s = _FETCH_S
        while (part, result.digest) not in held:
            for member in dict.fromkeys(asked):
                if member == me or not member.is_reachable:
                    continue
                try:
                    found = read_part(await call(member, TAKE, request, (), wait_s))
                except ShoalError as error:
                    if isinstance(error, DeadlineExceeded):  # the line may be too slow for so many at once
                        wait_s = min(2 * wait_s, _LONGEST_FETCH_S)
                    continue
                if found is not None and found.digest == result.digest:
                    held.setdefault((part, found.digest), found)
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
    """Puts the averages of a commit together; parts that nobody supplied are zero.

    Where all lie in their places in one vector, that is it, and it must not be written.
    """
    found = [held[part, result.digest] if result.attempt else None for part, result in enumerate(results)]
    vectors = [None if one is None else one.vector for one in found]
    if vectors[0] is not None and all(vector is vectors[0] for vector in vectors):
        return torch.from_numpy(vectors[0])
    made = np.zeros(plan.bounds[-1], np.float32)
    for part, one in enumerate(found):
        if one is not None:
            begin, end = plan.bounds[part], plan.bounds[part + 1]
            part_values = decode(Encoded(one.meta, list(one.buffers)), 4 * (end - begin))
            made[begin:end] = part_values.reshape(-1).numpy()
    return torch.from_numpy(made)


def plain_meta(num_elements: int) -> EncodedMeta:
    """Describes float32 values that travel as they are."""
    return EncodedMeta(Plain.name, TensorSpec("float32", (num_elements,)))


def is_gone(error: BaseException) -> bool:
    """Whether nobody listens any more where a member was: its process has ended."""
    return isinstance(error.__cause__, ConnectionRefusedError)
