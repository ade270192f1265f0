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
import logging
import math
import statistics
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from shoal.core import Deadline, DeadlineExceeded, LimitExceeded, PeerBusy, PeerRefused, ShoalError, fanout
from shoal.swarm.ledger import FrozenContribution, SampleLedger
from shoal.swarm.membership import BYTES_PER_S_OF_MBIT, MemberContext, crowd_factor
from shoal.swarm.robust import average, capped, is_finite, squared_norm
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
    has_signed,
    part_digest,
    sign,
    to_bitmap,
)
from shoal.tensors import (
    BFloat16,
    Codec,
    Encoded,
    EncodedMeta,
    Float16,
    Int8,
    Plain,
    SparseTwoBit,
    TopK,
    decode,
)
from shoal.tensors.specs import TensorSpec
from shoal.transport import Head, Reply

log = logging.getLogger(__name__)

Call = Callable[..., Coroutine[Any, Any, Reply]]
"""Calls the member at a place of the round's list: method, payload, buffers, seconds to wait, and where the
answer's buffers should go.
"""

_NUM_IN_FLIGHT = 8
_LEAST_SENT, _LEAST_TAKEN = 2, 8
_SENT_AHEAD_S, _TAKEN_AHEAD_S = 0.5, 1.0
"""Parts that are sent, or taken, at once are no more than the line carries in so long: all that are under way
share it, and on a slow line many would come together, late, and be taken for lost."""
_UNKNOWN_MBIT_S = 10.0
_SILENCE_S = 1.0
_GAP_FACTOR = 4.0
_RETRY_S = 0.1
_BEAT_S = 0.3
_PART_S = 10.0
_LED = -1
_FETCH_S, _LONGEST_FETCH_S = 2.0, 30.0
_LED_S = 3.0  # in which a part is asked for from whoever leads the group alone
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
    inputs: tuple[bytes, ...] = ()
    """In a run with audits, the hash and the signature of each contributor's values."""
    signature: bytes = b""

    @property
    def reply(self) -> Reply:
        """What is answered to those who take it."""
        told = (self.digest, self.bitmap, self.refused, self.meta, self.inputs, self.signature)
        return Reply(TakeReply(*told), self.buffers)


class _Arrived(NamedTuple):
    """Values that came for a part: those of one contributor, or the average of several."""

    places: tuple[int, ...]
    values: Any
    squared: float
    """The square of their norm."""
    input: bytes = b""
    """In a run with audits, the hash of what was sent, and the sender's signature."""


def read_part(reply: Reply, vector: Any = None) -> HeldPart | None:
    """Reads an average and checks its hash; None where it is not ready, LimitExceeded where it is wrong."""
    given: TakeReply = reply.payload
    if given.meta is None:
        return None
    buffers = tuple(reply.buffers)
    if part_digest(given.meta, given.bitmap, buffers, given.inputs) != given.digest:
        raise LimitExceeded("A member sent the average of a part with another hash than it says.")
    told = (given.digest, given.bitmap, given.refused, given.meta)
    return HeldPart(*told, buffers, vector, given.inputs, given.signature)


class Reduction:
    """One member's part in the averaging of one plan."""

    def __init__(
        self,
        plan: RoundPlan,
        members: Sequence[SwarmMember],
        me: int,
        where: tuple[bytes, int],
        context: MemberContext,
    ) -> None:
        self.plan = plan
        self.held: dict[tuple[int, bytes], HeldPart] = {}
        """The averages that this member has, by part and hash."""
        self.lost: dict[int, None] = {}
        """The places of reducers and contributors that the coordinator has named lost."""
        self._gone: dict[int, None] = {}
        """Leaders of this member's group where nobody listens any more."""
        self.receipts: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        """By part and attempt, what a reducer has signed that it has of this member, and its signature."""
        self._me = me
        self._members = members
        self._where = where
        # a group's average is signed by nobody: then its leader would have to be audited, too
        self._identity = context.identity if context.settings.robust and not plan.leaders else None
        self._now_s = context.now_s
        self._robust = context.settings.robust
        self._weights = capped(plan.samples) if self._robust else plan.samples
        self._silence_s = _SILENCE_S * context.settings.patience
        self._beat_s = _BEAT_S * crowd_factor(len(plan.contributors))
        """Who asks for an average that is not ready is answered after so long."""
        self._context = context
        self._codec = context.codec
        part_bytes = context.settings.bytes_per_element * max(map(plan.size, range(plan.num_parts)))
        self._num_sent, self._send_s = _at_once(
            part_bytes, context.bandwidth, _SENT_AHEAD_S, _LEAST_SENT, _NUM_IN_FLIGHT
        )
        self._num_taken, self._take_s = _at_once(
            part_bytes, context.taken_mbit_s, _TAKEN_AHEAD_S, _LEAST_TAKEN, 4 * _NUM_IN_FLIGHT
        )
        self._vector = context.vector()
        """Where averages that travel as they are arrive, each part in its place."""
        self._given: dict[tuple[int, int, int, bytes], bytes] = {}
        """Receipts, by part, attempt, contributor and the hash of its values."""
        self._claimed: dict[int, None] = {}
        """The parts whose place has been written, or is about to be."""
        self._inbox: dict[tuple[int, int], dict[int, _Arrived]] = {}
        """By part and attempt, what each sender has given; attempt 0 is for this member's own group."""
        self._awaited: dict[tuple[int, int], Collection[int]] = {}
        """The contributors whose values a part waits for."""
        self._settled: dict[tuple[int, int], dict[int, None]] = {}
        """The contributors of which nothing more is waited for."""
        self._refused: dict[tuple[int, int], dict[int, None]] = {}
        self._published: dict[tuple[int, int], HeldPart | None] = {}
        self._ready: dict[tuple[int, int], Broadcast] = {}
        """Wakes those who wait for the average of a part; as a leader's, `_LED` in place of the attempt."""
        self._began_s: dict[int, float] = {}
        """When this member began to wait for parts of each attempt."""
        self._arrivals_s: dict[int, list[float]] = {}
        self._heard_s: dict[int, float] = {}
        """When anybody else's values came last, by attempt."""
        self._limits: dict[int, dict[asyncio.Timeout, None]] = {}
        """Of calls under way, by the place of who is called: they end once that one is lost."""
        self._taken: dict[int, tuple[int, HeldPart]] = {}
        self._taken_changed = Broadcast()
        self._arriving: dict[int, int] = {}
        """Of averages that are on their way here, how many bytes they have."""
        self._lost_changed = Broadcast()
        self._first_parts: dict[int, int] = {-1: 0}
        for part, places in enumerate(zip(plan.reducers, plan.backups, strict=True)):
            for place in (*places, plan.leader(part, me)):
                self._first_parts.setdefault(place, part)
        self._num_places = 1 + max(*self._first_parts, *plan.contributors, me)
        self._index = {place: index for index, place in enumerate(plan.contributors)}

    # --- as a reducer ---

    def receive(self, message: PartMessage, buffers: Sequence[Any]) -> bytes | None:
        """Takes the values of a contributor or a group; PeerRefused if they are not finite, or not for this
        member. With audits, gives a receipt for values that will be in the average.
        """
        key, sender, plan = (message.part, message.attempt), message.contributor, self.plan
        is_part = 0 <= message.part < plan.num_parts and 0 <= message.attempt <= 2
        if not is_part or self._target(*key, sender) != self._me:
            raise PeerRefused("This member does not reduce that part for that contributor.")
        places = self._places_of(message.bitmap) if message.bitmap else (sender,)
        group = self._group(message.part, sender) if message.bitmap else {}
        if any(place not in (group if message.bitmap else self._index) for place in places):
            raise PeerRefused("This member does not reduce that part for that contributor.")
        digest = b""
        if self._identity is not None:
            digest = part_digest(message.meta, b"", buffers)
            facts = ("part", *self._where, message.part, digest)
            if not has_signed(self._members[sender], message.signature, *facts):
                raise PeerRefused("The values of a part are not signed by their sender.")
        inbox, settled = self._inbox.setdefault(key, {}), self._settled.setdefault(key, {})
        self._arrivals_s.setdefault(sender, []).append(self._now_s())
        if sender != self._me:
            self._heard_s[message.attempt] = self._now_s()
        if key in self._published or any(place in settled for place in places):
            return self._given.get((*key, sender, digest))  # it came twice, or too late
        size = plan.size(message.part)
        tensor = decode(Encoded(message.meta, list(buffers)), 4 * size)
        fits = tensor.numel() == size and tensor.dtype == torch.float32
        values = tensor.reshape(-1).numpy() if fits else None
        squared = math.nan if values is None else squared_norm(values)
        is_finite = math.isfinite(squared)
        # a leader answers for its whole group: who is not in its average is waited for no longer
        settled |= group or dict.fromkeys(places)
        if is_finite:
            inbox[sender] = _Arrived(places, values, squared, digest + message.signature)
            if self._identity is not None:
                receipt = sign(self._identity, "receipt", *self._where, *key, sender, digest)
                self._given[*key, sender, digest] = receipt
        refused = [place for place in self._places_of(message.refused) if place in group]
        if not is_finite and not message.bitmap:
            refused.append(sender)
        if refused:
            self._refused.setdefault(key, {}).update(dict.fromkeys(refused))
        self._reduce_if_due(*key, self._now_s())
        if not is_finite:
            raise PeerRefused("The values of a part are not finite, or not as many as the part has.")
        return self._given.get((*key, sender, digest))

    def _group(self, part: int, leader: int) -> dict[int, None]:
        """Lists the contributors for whom this member averages a part first."""
        plan = self.plan
        return dict.fromkeys(place for place in plan.contributors if plan.leader(part, place) == leader)

    def _places_of(self, bitmap: bytes) -> tuple[int, ...]:
        contributors = self.plan.contributors
        return tuple(contributors[index] for index in from_bitmap(bitmap) if index < len(contributors))

    def _target(self, part: int, attempt: int, sender: int) -> int:
        """Gives the place of whom a member sends a part to, at an attempt; -1 for nobody."""
        return self.plan.reducer(part, attempt) if attempt else self.plan.leader(part, sender)

    async def reduce(self) -> None:
        """Averages parts whose missing contributors are silent, and those of lost reducers; the others are
        averaged as they become complete. Ends when cancelled.
        """
        self._began_s[0] = self._began_s[1] = self._now_s()
        mine = [
            (part, attempt)
            for part in range(self.plan.num_parts)
            for attempt in (0, 1, 2)
            if self._target(part, attempt, self._me) == self._me
        ]
        while mine := [key for key in mine if key not in self._published]:
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
        if now_s - began_s < plan.reduce_s:
            settled = self._settled.get(key, {})
            if key not in self._awaited:
                self._awaited[key] = self._index if attempt else self._group(part, self._me)
            for place in self._awaited[key]:
                if place not in settled and not self._is_silent(place, attempt, now_s):
                    return
        inbox, refused = self._inbox.pop(key, {}), self._refused.get(key, {})
        self._published[key] = self._average(key, inbox, list(refused)) if inbox else None
        if key in self._ready:
            self._ready.pop(key).fire()
        if attempt == 0:
            self._lost_changed.fire()  # there is something to pass on

    def _average(self, key: tuple[int, int], inbox: dict[int, _Arrived], refused: Sequence[int]) -> HeldPart:
        (part, attempt), plan = key, self.plan
        index = self._index
        arrived = [inbox[sender] for sender in sorted(inbox)]
        weights = [sum(self._weights[index[place]] for place in one.places) for one in arrived]
        begin, end = plan.bounds[part], plan.bounds[part + 1]
        is_in_place = attempt > 0 and self._claim(part)
        out = self._vector[begin:end] if is_in_place else np.empty(end - begin, np.float32)
        pairs = zip(weights, arrived, strict=True)
        average(self._robust, [(weight, one.values, one.squared) for weight, one in pairs], out)
        is_audited = self._identity is not None
        codec = audited_codec(self._codec) if is_audited else average_codec(self._codec, out)
        encoded = codec.encode(torch.from_numpy(out))
        bitmap = to_bitmap([index[place] for one in arrived for place in one.places], len(index))
        refused_bits = to_bitmap([index[place] for place in refused], len(index))
        is_in_place = is_in_place and encoded.meta.codec == Plain.name
        buffers = tuple(encoded.buffers)
        identity = self._identity
        inputs = () if identity is None else tuple(one.input for one in arrived)
        digest = part_digest(encoded.meta, bitmap, buffers, inputs)
        signature = (
            b"" if identity is None else sign(identity, "average", *self._where, part, attempt, digest)
        )
        vector = self._vector if is_in_place else None
        held = HeldPart(digest, bitmap, refused_bits, encoded.meta, buffers, vector, inputs, signature)
        if attempt:
            self.held[part, digest] = held
        return held

    def _claim(self, part: int) -> bool:
        """Whether a part's place in the vector may be written: only one average of a part comes there."""
        is_free = part not in self._claimed
        self._claimed.setdefault(part)
        return is_free

    def _is_silent(self, place: int, attempt: int, now_s: float) -> bool:
        """Whether a contributor is lost, or has sent nothing for max(1 s, 4 × its median gap).

        One that has sent nothing yet may still be busy with its parts for other reducers: it has twice the
        time that those took who have sent, and while nobody has, nothing is known of it.
        """
        if place in self.lost:
            return True
        arrivals, began_s = self._arrivals_s.get(place, []), self._began_s[attempt]
        gaps = [after - before for before, after in itertools.pairwise(arrivals)]
        if gaps:
            limit_s = max(self._silence_s, _GAP_FACTOR * statistics.median(gaps))
            return now_s - max(began_s, arrivals[-1]) > limit_s
        heard_s = self._heard_s.get(attempt)
        if heard_s is None:
            return False
        # who leads a group waits as long for its members
        silence_s = self._silence_s * (2 if attempt and self.plan.leaders else 1)
        return now_s - max(began_s, heard_s) > max(silence_s, heard_s - began_s)

    async def serve_take(self, part: int, attempt: int) -> Reply:
        """Answers with an average of this member's or, to its group, with another's that it has taken; after
        a while that it is not ready.
        """
        if not (0 <= part < self.plan.num_parts and 1 <= attempt <= 2):
            raise PeerRefused("The round has no such part.")
        if self.plan.reducer(part, attempt) == self._me:
            held = await self._wait_published((part, attempt))
            return TAKE_LATER if held is None else held.reply
        if part not in self._taken:
            await self._ready.setdefault((part, _LED), Broadcast()).wait(self._beat_s)
        return self._taken[part][1].reply if part in self._taken else TAKE_LATER

    async def _wait_published(self, key: tuple[int, int]) -> HeldPart | None:
        """Waits for an average of this member's; None when it takes longer than a beat, PeerRefused where
        there will be none.
        """
        if key not in self._published:
            await self._ready.setdefault(key, Broadcast()).wait(self._beat_s)
        held = self._published.get(key)
        if held is None and key in self._published:
            raise PeerRefused("Nothing has come for this part.")
        return held

    # --- as a contributor ---

    async def send(self, call: Call, ledger: SampleLedger, frozen: FrozenContribution) -> None:
        """Sends all parts to their reducers, or to the leaders of this member's group, and those of lost ones
        to whoever comes next; ends when cancelled.
        """
        plan = self.plan

        def due() -> list[tuple[int, int]]:
            found = []
            for part in range(plan.num_parts):
                leader = plan.leader(part, self._me)
                is_led = leader >= 0 and leader not in self.lost and leader not in self._gone
                found.append((part, 0 if is_led else self._attempt(part)))
            return sorted(found, key=lambda key: self._turn(*key))

        async def send(part: int, attempt: int) -> None:
            encoded = ledger.encode(frozen, part, plan.bounds[part], plan.bounds[part + 1])
            message, digest = PartMessage(*self._where, part, attempt, self._me, encoded.meta), b""
            if self._identity is not None:
                digest = part_digest(encoded.meta, b"", encoded.buffers)
                signature = sign(self._identity, "part", *self._where, part, digest)
                message = msgspec.structs.replace(message, signature=signature)
            target = self._target(part, attempt, self._me)
            sending = call(target, PART, message, encoded.buffers, self._send_s)
            reply = await self._until_lost(target, sending)
            if digest and isinstance(reply.payload, bytes):
                self.receipts[part, attempt] = digest, reply.payload

        await self._deliver(due, send)

    async def lead(self, call: Call) -> None:
        """Passes on averages of the group that this member leads, if it leads one; ends when cancelled."""
        plan = self.plan
        led = [part for part in range(plan.num_parts) if plan.leader(part, self._me) == self._me]

        def due() -> list[tuple[int, int]]:
            return [(part, self._attempt(part)) for part in led if self._published.get((part, 0))]

        async def send(part: int, attempt: int) -> None:
            held = self._published[part, 0]
            assert held is not None
            where = (*self._where, part, attempt, self._me)
            message = PartMessage(*where, held.meta, held.bitmap, held.refused)
            target = plan.reducer(part, attempt)
            await self._until_lost(target, call(target, PART, message, held.buffers, self._send_s))

        if led:
            await self._deliver(due, send)

    def _attempt(self, part: int) -> int:
        return 2 if self.plan.reducers[part] in self.lost else 1

    async def _deliver(
        self,
        due: Callable[[], list[tuple[int, int]]],
        send: Callable[[int, int], Coroutine[Any, Any, None]],
    ) -> None:
        """Sends what is due, again where that failed, and what becomes due."""
        sent: dict[tuple[int, int], None] = {}
        while True:
            keys = [key for key in due() if key not in sent and self._target(*key, self._me) >= 0]
            outcomes = await fanout([send(*key) for key in keys], Deadline.never(), limit=self._num_sent)
            for key, outcome in zip(keys, outcomes, strict=True):
                if outcome is None or isinstance(outcome, PeerRefused):
                    sent[key] = None
                elif key[1] == 0 and is_gone(outcome):
                    self._gone.setdefault(self._target(*key, self._me))
            has_failed = any(key not in sent for key in keys)
            await self._lost_changed.wait(_RETRY_S if has_failed else _BEAT_S)

    def _turn(self, part: int, attempt: int) -> tuple[int, int]:
        """Says when a part has its turn: the first parts of all reducers, then their second ones, and so on,
        each member beginning with the reducer after itself. So all lines are busy, and averages are complete
        early.
        """
        reducer = self._target(part, attempt, self._me)
        return part - self._first_parts[reducer], (reducer - self._me - 1) % self._num_places

    # --- as one who takes the averages ---

    async def take_all(self, call: Call, give_up_s: float | None) -> list[tuple[int, HeldPart] | None]:
        """Takes every part, with its attempt: from its reducer, or the backup once that is lost; None for a
        zero.

        The coordinator gives `give_up_s`: who is silent for that long is named lost. Others go on trying.
        """
        parts = sorted(range(self.plan.num_parts), key=lambda part: self._turn(part, 1))
        calls = [self._take(call, part, give_up_s) for part in parts]
        found = await fanout(calls, Deadline.never(), limit=self._num_taken)
        taken = {part: one for part, one in zip(parts, found, strict=True) if not isinstance(one, Exception)}
        return [taken.get(part) for part in range(self.plan.num_parts)]

    async def _take(self, call: Call, part: int, give_up_s: float | None) -> tuple[int, HeldPart] | None:
        began_s = heard_s = self._now_s()
        attempt, leader = 0, self.plan.leader(part, self._me)
        while True:
            if part in self._taken:
                return self._taken[part]
            if attempt != self._attempt(part):
                attempt, heard_s = self._attempt(part), self._now_s()
            place = self.plan.reducer(part, attempt)
            if place < 0 or place in self.lost:
                return None
            if leader in self.lost or leader == self._me or self._now_s() - began_s > self.plan.reduce_s:
                leader = -1
            is_led = leader >= 0 and place != self._me
            try:
                held = await self._take_once(call, leader if is_led else place, part, attempt)
                if held is not None:
                    self.held[part, held.digest] = held
                    self._taken[part] = attempt, held
                    self._taken_changed.fire()
                    if (part, _LED) in self._ready:
                        self._ready.pop((part, _LED)).fire()
                    return attempt, held
                heard_s = self._now_s()
            except ShoalError as error:
                if is_led:  # the reducer itself may answer
                    leader, heard_s = -1, self._now_s()
                    continue
                if isinstance(error, PeerRefused):
                    return None
                # who says that it is busy is there, and may still have to learn of the plan; where nobody
                # listens any more the process is gone
                patience = 3 if isinstance(error, PeerBusy) else GONE_SHARE if is_gone(error) else 1
                if give_up_s is not None and self._now_s() - heard_s > patience * give_up_s:
                    self.name_lost([place])
                await asyncio.sleep(_RETRY_S)

    async def wait_taken(self, *, is_decided: bool = False) -> None:
        """Waits for the parts that are on their way here, as long as they keep coming; once the round is
        decided only for those that have begun to come, since anybody may have the others.
        """
        num_taken = -1
        while num_taken < len(self._taken) < self.plan.num_parts and (self._arriving or not is_decided):
            num_taken = len(self._taken)
            speed = BYTES_PER_S_OF_MBIT * self._context.taken_mbit_s
            # on a slow way down all come at once, and late: nobody is to send them a second time
            usual_s = sum(self._arriving.values()) / speed if speed else 0.0
            await self._taken_changed.wait(min(max(self._silence_s, _GAP_FACTOR * usual_s), _PART_S))

    async def _take_once(self, call: Call, place: int, part: int, attempt: int) -> HeldPart | None:
        """Asks for an average, which arrives in its place in the vector; None where it is not ready."""
        if place == self._me:
            return await self._wait_published((part, attempt))
        begin, end = self.plan.bounds[part], self.plan.bounds[part + 1]
        due = memoryview(self._vector[begin:end]).cast("B")
        is_in_place = False

        def where(head: Head) -> list[Any]:
            nonlocal is_in_place
            self._arriving[part] = sum(head.sizes)
            is_in_place = list(head.sizes) == [len(due)] and self._claim(part)
            return [due] if is_in_place else [bytearray(size) for size in head.sizes]

        request = TakeRequest(*self._where, part, attempt)
        found: HeldPart | None = None
        try:
            reply = await self._until_lost(place, call(place, TAKE, request, (), self._take_s, where))
            found = read_part(reply)
            if found is not None:
                self.check_signed(found, part, attempt)
        finally:
            self._arriving.pop(part, None)
            if is_in_place and found is None:  # it came in part, or wrong
                del self._claimed[part]
        is_in_place = is_in_place and found is not None and found.meta == plain_meta(end - begin)
        return dataclasses.replace(found, vector=self._vector) if found and is_in_place else found

    def check_signed(self, held: HeldPart, part: int, attempt: int) -> None:
        """LimitExceeded for an average that its reducer has not signed, where that is audited: nobody may
        have it answer for another one's average.
        """
        reducer = self.plan.reducer(part, attempt)
        facts = ("average", *self._where, part, attempt, held.digest)
        if self._identity is not None and not has_signed(self._members[reducer], held.signature, *facts):
            raise LimitExceeded("A member sent an average that its reducer has not signed.")

    async def _until_lost(self, place: int, calling: Coroutine[Any, Any, Reply]) -> Reply:
        """Waits for a reducer's answer, but no longer than until it is named lost: one that was stopped
        leaves its connections open.
        """
        if place in self.lost:
            calling.close()
            raise PeerBusy("The reducer is lost.")
        limit, limits = asyncio.timeout(None), self._limits.setdefault(place, {})
        limits[limit] = None
        try:
            async with limit:
                return await calling
        except TimeoutError:
            if limit.expired():
                raise PeerBusy("The reducer is lost.") from None
            raise
        finally:
            del limits[limit]

    def name_lost(self, places: Sequence[int]) -> None:
        """Has the parts of these reducers sent to their backups, and nobody wait for what they contribute."""
        now_s = asyncio.get_running_loop().time()
        for place in [place for place in places if place not in self.lost]:
            self.lost[place] = None
            for limit in self._limits.get(place, {}):
                limit.reschedule(now_s)
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


def _at_once(part_bytes: float, mbit_s: float, ahead_s: float, least: int, most: int) -> tuple[int, float]:
    """Says how many parts may be under way at once over a line, and how long each may take."""
    part_s = part_bytes / (BYTES_PER_S_OF_MBIT * (mbit_s or _UNKNOWN_MBIT_S))
    num = min(max(least, int(ahead_s / part_s)), most)
    return num, max(_PART_S, _GAP_FACTOR * num * part_s)


def results(taken: Sequence[tuple[int, HeldPart] | None]) -> tuple[PartResult, ...]:
    """Writes what was taken as a commit lists it."""
    return tuple(PartResult(one[0], one[1].digest, one[1].bitmap) if one else PartResult() for one in taken)


async def fetch_parts(
    call: Callable[[SwarmMember, str, Any, Sequence[Any], float], Awaitable[Reply]],
    me: SwarmMember,
    members: Sequence[SwarmMember],
    commit: Commit,
    held: dict[tuple[int, bytes], HeldPart],
    reduction: Reduction | None = None,
) -> None:
    """Fetches every part of a commit that is not in `held`, from whoever has it, until all are there.

    With the `reduction` of the commit's plan, nothing that should be signed and is not.
    """
    plan = commit.plan
    if plan is None:
        return
    my_place = next((place for place, one in enumerate(members) if one.id_bytes == me.id_bytes), -1)

    async def fetch(part: int, result: PartResult) -> None:
        likely = plan.reducer(part, result.attempt)
        leader = -1 if reduction is None else plan.leader(part, my_place)  # else members may be others
        others = [*members[likely : likely + 1], *members[my_place + 1 :], *members[:my_place]]
        # the one line of its reducer is not for hundreds at once: whoever leads the group has it before
        first = members[leader : leader + 1] if leader >= 0 and leader not in (my_place, likely) else ()
        led_until_s = asyncio.get_running_loop().time() + _LED_S
        request = TakeRequest(commit.fork, commit.round, part, result.attempt, result.digest)
        wait_s = _FETCH_S
        while (part, result.digest) not in held:
            is_led = bool(first) and asyncio.get_running_loop().time() < led_until_s
            for member in dict.fromkeys(first if is_led else [*first, *others]):
                if member.id_bytes == me.id_bytes or not member.is_callable:
                    continue
                try:
                    found = read_part(await call(member, TAKE, request, (), wait_s))
                    if found is not None and reduction is not None:
                        reduction.check_signed(found, part, result.attempt)
                except ShoalError as error:
                    if isinstance(error, DeadlineExceeded):  # the line may be too slow for so many at once
                        wait_s = min(2 * wait_s, _LONGEST_FETCH_S)
                    elif is_led:
                        led_until_s = -math.inf
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

    They begin at the plan's first bound. Where all lie in their places in one vector, that is it, and it must
    not be written.
    """
    first, last = plan.bounds[0], plan.bounds[-1]
    found = [held[part, result.digest] if result.attempt else None for part, result in enumerate(results)]
    vectors = [None if one is None else one.vector for one in found]
    vector = vectors[0]
    if vector is not None and all(one is vector for one in vectors) and is_finite(vector[first:last]):
        return torch.from_numpy(vector)[first:last]
    made = np.zeros(last - first, np.float32)
    for part, one in enumerate(found):
        values = None if one is None else _read_values(one, plan.size(part))
        if values is not None:
            made[plan.bounds[part] - first : plan.bounds[part + 1] - first] = values
    return torch.from_numpy(made)


def average_codec(codec: Codec, values: Any) -> Codec:
    """Chooses how an average travels: as what it was made of where that is dense, else as it is.

    The average of sparse values is less sparse than they are: what is not zero is sent, with its place.
    """
    if isinstance(codec, Float16 | BFloat16 | Int8):  # and Int4, which is one
        return codec
    if isinstance(codec, TopK | SparseTwoBit):
        return TopK(max(1, int(np.count_nonzero(values))) / len(values))
    return Plain()


def audited_codec(codec: Codec) -> Codec:
    """Chooses how an average travels that others make again: by what gives them the same bytes."""
    if isinstance(codec, Int8):
        return type(codec)(codec.block_size)  # without a generator of its own
    return codec if isinstance(codec, Float16 | BFloat16) else Plain()


def _read_values(held: HeldPart, num_elements: int) -> Any:
    """Decodes an average; None, for all who read these bytes, where its reducer sent nonsense."""
    try:
        tensor = decode(Encoded(held.meta, list(held.buffers)), 4 * num_elements)
    except ShoalError as error:
        log.warning("the average of a part cannot be read, and is taken for zero: %s", error)
        return None
    values = tensor.reshape(-1).numpy()
    is_right = len(values) == num_elements and values.dtype == np.float32 and is_finite(values)
    if not is_right:
        log.warning("the average of a part has values that are not finite, or too few: it is taken for zero")
    return values if is_right else None


def plain_meta(num_elements: int) -> EncodedMeta:
    """Describes float32 values that travel as they are."""
    return EncodedMeta(Plain.name, TensorSpec("float32", (num_elements,)))


def is_gone(error: BaseException) -> bool:
    """Whether nobody listens any more where a member was: its process has ended."""
    return isinstance(error.__cause__, ConnectionRefusedError)
