"""Audits of those who average: a few parts of every round are averaged again, and who lied is banned.

    contributor                  reducer                     all who take the average
    its values, signed    ────►  checks the signature
                          ◄────  a receipt, signed
                                 the average, signed, with the hash and signature of each input ────►
    the commit: by its hash it is known which parts are audited, and who are the two auditors of each
    its values again      ────────────────────────────────►  auditor: averages them again
                                                             other bits: passes the values on to all
                                                             all average them again, and ban the reducer

Nobody is believed: values count by their hash, which the average names, and each member bans by what it has
computed itself. A contributor that has a receipt and is not in the average shows it to all. A lie is seen
once its part is audited, at latest then; a *sender* that lies cannot be told from an unlucky one: that is
what robust averages are for. Gorbunov et al. 2022, "Secure Distributed Training at Scale", section 3, audits
gradients, too, which needs data that can be computed again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shoal.core import Deadline, PeerBusy, PeerRefused, ShoalError, VirtualLoop, fanout
from shoal.swarm.membership import MemberContext
from shoal.swarm.reduction import HeldPart, audited_codec
from shoal.swarm.robust import average, capped, squared_norm
from shoal.swarm.wire import (
    AUDIT,
    STEP,
    AuditMessage,
    Broadcast,
    Commit,
    SwarmMember,
    from_bitmap,
    has_signed,
    part_digest,
)
from shoal.tensors import Codec, Encoded, Int8, Plain, decode

log = logging.getLogger(__name__)

AUDITED_SHARE = 0.01
"""Of a round's parts, and not less than one for every four reducers: all of a small model's liars are met
within a dozen rounds."""
REDUCERS_TO_AN_AUDIT = 4
NUM_AUDITORS = 2
MAX_CLAIMS = 2
"""Parts of a round that a member averages again because an auditor says that it should."""
_NUM_ROUNDS = 2
_DIGEST_BYTES = 32
_WAIT_S, _CALL_S, _RETRY_S, _NUM_TRIES = 1.0, 5.0, 0.5, 4
_NUM_IN_FLIGHT = 4


def audited_parts(commit: Commit) -> list[int]:
    """Says which parts of a round are audited: nobody knows it before the commit."""
    plan = commit.plan
    if commit.kind != STEP or plan is None or plan.leaders:
        return []
    num_reducers = len(dict.fromkeys(plan.reducers))
    num = math.ceil(max(AUDITED_SHARE * plan.num_parts, num_reducers / REDUCERS_TO_AN_AUDIT))
    parts = [part for part, result in enumerate(commit.parts) if result.attempt]
    return sorted(parts, key=lambda part: _rank(commit, part))[:num]


def auditors(commit: Commit, members: Sequence[SwarmMember], part: int) -> list[int]:
    """Says who averages a part again: the places in the list of two that train and can be reached."""
    reducer = _reducer(commit, part)
    places = [
        place
        for place, member in enumerate(members)
        if place != reducer and member.votes and member.is_reachable and member in commit.members
    ]
    return sorted(places, key=lambda place: _rank(commit, part, place))[:NUM_AUDITORS]


def _rank(commit: Commit, *numbers: int) -> bytes:
    return hashlib.sha256(commit.digest + repr(numbers).encode()).digest()


def _reducer(commit: Commit, part: int) -> int:
    assert commit.plan is not None
    return commit.plan.reducer(part, commit.parts[part].attempt)


@dataclass
class _AuditedRound:
    """What a member knows of a round that is audited."""

    commit: Commit
    members: tuple[SwarmMember, ...]
    me: int
    """This member's place in the round's list."""
    held: Mapping[tuple[int, bytes], HeldPart]
    parts: list[int]
    values: dict[int, dict[int, Encoded]] = field(default_factory=dict)
    """By part and the place of its contributor, what has come here to be averaged again."""
    is_done: dict[int, None] = field(default_factory=dict)

    def inputs(self, part: int) -> dict[int, bytes] | None:
        """Gives the hash and signature of each contributor's values; None where the reducer gave none."""
        plan, result = self.commit.plan, self.commit.parts[part]
        assert plan is not None
        indices = from_bitmap(result.bitmap)
        held = self.held.get((part, result.digest))
        if held is None or any(index >= len(plan.contributors) for index in indices):
            return None
        places = sorted(plan.contributors[index] for index in indices)
        return dict(zip(places, held.inputs, strict=False)) if len(places) == len(held.inputs) else None


class AuditKeeper:
    """One member's part in the audits of a run's rounds."""

    def __init__(self, context: MemberContext, start_soon: Callable[..., Any]) -> None:
        self.num_audited = 0
        """Parts that this member has averaged again."""
        self._context = context
        self._start_soon = start_soon
        self._rounds: dict[tuple[bytes, int], _AuditedRound] = {}
        self._changed = Broadcast()

    @property
    def is_on(self) -> bool:
        """Whether rounds are audited."""
        return bool(self._context.settings.robust) and self._context.identity is not None

    def begin(
        self,
        commit: Commit,
        members: tuple[SwarmMember, ...],
        me: int,
        held: Mapping[tuple[int, bytes], HeldPart],
        sent: Mapping[int, Encoded],
        receipts: Mapping[tuple[int, int], tuple[bytes, bytes]],
    ) -> None:
        """Audits a round that is over: what this member has sent in it is given to the auditors.

        Call it while what was sent is still whole: of parts that are audited a copy is made.
        """
        parts = audited_parts(commit) if self.is_on else []
        if not parts:
            return
        round_ = _AuditedRound(commit, members, me, held, parts)
        self._rounds[commit.fork, commit.round] = round_
        while len(self._rounds) > _NUM_ROUNDS:
            del self._rounds[next(iter(self._rounds))]
        self._changed.fire()
        copies = {
            part: Encoded(sent[part].meta, [bytes(buffer) for buffer in sent[part].buffers])
            for part in parts
            if part in sent
        }
        self._start_soon(self._audit(round_, copies, dict(receipts)), name="audit a round")

    async def _audit(
        self,
        round_: _AuditedRound,
        sent: Mapping[int, Encoded],
        receipts: Mapping[tuple[int, int], tuple[bytes, bytes]],
    ) -> None:
        """Checks signatures, gives this member's values to auditors, and shows receipts that prove a lie."""
        commit, place = round_.commit, round_.me
        plan, me = commit.plan, round_.members[place]
        assert plan is not None
        for part in round_.parts:
            if (part, commit.parts[part].digest) in round_.held:
                self._check_inputs(round_, part)
            await asyncio.sleep(0)
        calls = []
        for part, encoded in sent.items():
            if place in (round_.inputs(part) or ()):
                message = AuditMessage(commit.fork, commit.round, part, me, place, encoded.meta)
                asked = auditors(commit, round_.members, part)
                calls += [self._tell(round_, other, message, encoded.buffers) for other in asked]
        for (part, attempt), (digest, receipt) in receipts.items():
            result = commit.parts[part]
            is_in = any(plan.contributors[index] == place for index in from_bitmap(result.bitmap))
            reducer = plan.reducer(part, attempt)
            facts = ("receipt", commit.fork, commit.round, part, attempt, place, digest)
            if (
                result.attempt == attempt
                and not is_in
                and has_signed(round_.members[reducer], receipt, *facts)
            ):
                message = AuditMessage(commit.fork, commit.round, part, me, place, None, digest, receipt)
                calls += [self._tell(round_, other, message, ()) for other in range(len(round_.members))]
        await fanout(calls, Deadline.never(), limit=_NUM_IN_FLIGHT)

    def _check_inputs(self, round_: _AuditedRound, part: int) -> None:
        """Bans a reducer whose average has inputs that nobody has signed."""
        commit, inputs = round_.commit, round_.inputs(part)
        is_signed = inputs is not None and all(
            has_signed(
                round_.members[place],
                given[_DIGEST_BYTES:],
                "part", commit.fork, commit.round, part, given[:_DIGEST_BYTES],
            )
            for place, given in inputs.items()
        )  # fmt: skip
        if not is_signed:
            self._ban(round_, part, "names values that nobody has signed")

    async def _tell(
        self, round_: _AuditedRound, place: int, message: AuditMessage, buffers: Sequence[Any]
    ) -> None:
        """Gives a message to a member, which may still have to learn of the commit."""
        member = round_.members[place]
        if not member.is_callable:
            return
        for _ in range(_NUM_TRIES):
            try:
                await self._context.call(member, AUDIT, message, buffers, _CALL_S)
                return
            except PeerRefused:
                return
            except ShoalError:
                await asyncio.sleep(_RETRY_S)

    # --- as an auditor, or one who is told of a lie ---

    async def serve_audit(self, message: AuditMessage, buffers: Sequence[Any]) -> None:
        """Takes values that are to be averaged again, or a receipt; PeerRefused where they prove nothing."""
        round_ = await self._round_of(message.fork, message.round)
        commit, members = round_.commit, round_.members
        plan = commit.plan
        assert plan is not None
        part, contributor = message.part, message.contributor
        is_one = 0 <= part < plan.num_parts and contributor in plan.contributors
        if not is_one or message.member not in members:
            raise PeerRefused("This is no part of that round.")
        if message.receipt:
            result = commit.parts[part]
            is_in = any(plan.contributors[index] == contributor for index in from_bitmap(result.bitmap))
            facts = ("receipt", commit.fork, commit.round, part, result.attempt, contributor, message.digest)
            reducer = _reducer(commit, part) if result.attempt else -1
            if reducer < 0 or is_in or not has_signed(members[reducer], message.receipt, *facts):
                raise PeerRefused("This receipt proves nothing.")
            self._ban(round_, part, f"leaves out {members[contributor].short}, whose values it has")
            return
        place = members.index(message.member)
        chosen = auditors(commit, members, part)
        is_auditor = round_.me in chosen
        if part not in round_.parts or not (place in chosen or (is_auditor and place == contributor)):
            raise PeerRefused("Nobody asked for these values.")
        await self._take(round_, message, buffers, is_auditor)

    async def _take(
        self, round_: _AuditedRound, message: AuditMessage, buffers: Sequence[Any], is_auditor: bool
    ) -> None:
        part, place = message.part, message.contributor
        inputs = round_.inputs(part)
        if part in round_.is_done or inputs is None:
            return
        if not is_auditor and part not in round_.values and len(round_.values) >= MAX_CLAIMS:
            raise PeerBusy("This member has enough to average again.")
        wanted = inputs.get(place, b"")[:_DIGEST_BYTES]
        if message.meta is None or part_digest(message.meta, b"", buffers) != wanted:
            raise PeerRefused("These are not the values that the average names.")
        values = round_.values.setdefault(part, {})
        values[place] = Encoded(message.meta, list(buffers))
        if len(values) < len(inputs):
            return
        round_.is_done[part] = None
        if isinstance(asyncio.get_running_loop(), VirtualLoop):
            is_right = self._is_right(round_, part, values)
        else:
            is_right = await asyncio.to_thread(self._is_right, round_, part, values)
        self.num_audited += 1
        del round_.values[part]
        if is_right:
            return
        self._ban(round_, part, "is not what its contributors have sent")
        if is_auditor:
            self._start_soon(self._pass_on(round_, part, values), name="tell of a lie")

    async def _pass_on(self, round_: _AuditedRound, part: int, values: Mapping[int, Encoded]) -> None:
        commit, me = round_.commit, round_.members[round_.me]
        known = auditors(commit, round_.members, part)
        calls = [
            self._tell(
                round_,
                other,
                AuditMessage(commit.fork, commit.round, part, me, place, encoded.meta),
                encoded.buffers,
            )
            for other in range(len(round_.members))
            if other not in known
            for place, encoded in values.items()
        ]
        await fanout(calls, Deadline.never(), limit=_NUM_IN_FLIGHT)

    def _is_right(self, round_: _AuditedRound, part: int, values: Mapping[int, Encoded]) -> bool:
        """Averages the values of a part again: whether that gives the same bits."""
        commit = round_.commit
        plan, result = commit.plan, commit.parts[part]
        assert plan is not None
        held = round_.held[part, result.digest]
        codec = _codec_of(held, self._context.codec)
        weights = dict(zip(plan.contributors, capped(plan.samples), strict=True))
        size = plan.size(part)
        parts = []
        for place in sorted(values):
            try:
                tensor = decode(values[place], 4 * size)
            except ShoalError:
                return False
            if tensor.numel() != size or tensor.dtype != torch.float32:
                return False
            row = tensor.reshape(-1).numpy()
            parts.append((weights[place], row, squared_norm(row)))
        out = np.empty(size, np.float32)
        average(self._context.settings.robust, parts, out)
        if codec is None or not all(np.isfinite(squared) for _, _, squared in parts):
            return False
        encoded = codec.encode(torch.from_numpy(out))
        return part_digest(encoded.meta, result.bitmap, encoded.buffers, held.inputs) == result.digest

    async def _round_of(self, fork: bytes, number: int) -> _AuditedRound:
        until = Deadline.after(_WAIT_S)
        while (found := self._rounds.get((fork, number))) is None:
            if until.is_past:
                raise PeerBusy(f"This member does not audit round {number}.")
            await self._changed.wait(until.remaining_s)
        return found

    def _ban(self, round_: _AuditedRound, part: int, why: str) -> None:
        """Leaves a reducer out for a while, longer each time."""
        context, member = self._context, round_.members[_reducer(round_.commit, part)]
        if member.id_bytes == context.me.id_bytes:
            return
        now_s, name = context.now_s(), member.id_bytes
        if not context.bans.is_paused(name, now_s):
            context.bans.failed(name, now_s)
            log.warning(
                "%s is left out for %.0f s: its average of part %d in round %d %s",
                member.short, context.bans.pause_s(name), part, round_.commit.round, why,
            )  # fmt: skip


def _codec_of(held: HeldPart, own: Codec) -> Codec | None:
    """Gives the codec by which an average was encoded, if members of this run use it."""
    meta, codec = held.meta, audited_codec(own)
    if meta.codec == Plain.name:
        return Plain()
    if meta.codec != codec.name:  # type: ignore[attr-defined]
        return None
    if not isinstance(codec, Int8):
        return codec
    return type(codec)(meta.options[0]) if len(meta.options) == 1 and meta.options[0] > 0 else None
