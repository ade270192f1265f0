"""How a member gets the parts of a commit that it does not have."""

import asyncio
import types

import numpy as np
import pytest

from shoal.core import PeerLost
from shoal.swarm.reduction import HeldPart, fetch_parts, plain_meta
from shoal.swarm.wire import STEP, Commit, PartResult, RoundPlan, SwarmMember, part_digest
from swarm.swarms import virtual

NUM = 40
REDUCER, LEADER = 7, 3
MEMBERS = [SwarmMember(bytes([number]) * 20, number, f"p{number}", 1) for number in range(NUM)]
VALUES = np.arange(8, dtype=np.float32)
META = plain_meta(8)
PART = HeldPart(part_digest(META, b"\x01", (VALUES,)), b"\x01", b"", META, (VALUES,))
PLAN = RoundPlan(tuple(range(NUM)), (1,) * NUM, (0, 8), (REDUCER,), (8,), 5.0, ((LEADER,),))
COMMIT = Commit(b"fork", 1, b"state", STEP, tuple(MEMBERS), plan=PLAN, parts=(PartResult(1, PART.digest),))
NOT_READY = HeldPart(b"", b"", b"", None, ())
SIGNED = types.SimpleNamespace(check_signed=lambda *_: None)


def fetched(place, answers):
    """Fetches the part for one member; returns whom it asked, in order, and when it had it."""
    asked, held = [], {}

    async def call(member, method, request, buffers, wait_s):
        number = member.start_number
        asked.append(number)
        answer = answers(number, len(asked))
        if isinstance(answer, Exception):
            raise answer
        return answer.reply

    async def main():
        await fetch_parts(call, MEMBERS[place], MEMBERS, COMMIT, held, SIGNED)
        assert held == {(0, PART.digest): PART}
        return asyncio.get_running_loop().time()

    return asked, virtual(main())


def test_whoever_leads_the_group_is_asked_until_it_has_the_part():
    asked, _ = fetched(10, lambda number, turn: PART if turn == 4 else NOT_READY)
    assert asked == [LEADER] * 4


@pytest.mark.parametrize("answer", [NOT_READY, PeerLost("it is gone.")], ids=["never ready", "gone"])
def test_where_the_leader_does_not_give_it_the_reducer_and_all_others_are_asked(answer):
    asked, took_s = fetched(10, lambda number, turn: PART if number == REDUCER else answer)
    assert asked[-2:] == [LEADER, REDUCER]
    assert took_s < 5


def test_who_leads_a_group_asks_the_reducer_at_once_and_others_after_that():
    answers = {REDUCER: PeerLost("it is gone."), 1: PART}
    asked, _ = fetched(LEADER, lambda number, turn: answers.get(number, NOT_READY))
    assert asked[0] == REDUCER
    assert asked[1:3] == [LEADER + 1, LEADER + 2]  # each begins after itself: nobody is asked by all at once
    assert asked[-1] == 1
