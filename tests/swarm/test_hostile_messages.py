"""A member, who has the secret, sends anything at all: others notice nothing but a line of the log."""

import asyncio
import collections
import logging
import random
import sys

import msgspec
import pytest

from shoal.core import Deadline, PeerBusy, RemoteFailure, ShoalError, fanout
from shoal.swarm.ballots import Promise, sign_statement
from shoal.swarm.wire import (
    ABORT,
    AUDIT,
    COMMITS,
    FOLLOW,
    FORK,
    JOIN,
    MEET,
    PART,
    STEP,
    TAKE,
    AuditMessage,
    Commit,
    CommitsRequest,
    FollowRequest,
    ForkRequest,
    JoinRunRequest,
    MeetRequest,
    PartMessage,
    PartResult,
    Registration,
    RoundPlan,
    SwarmMember,
    TakeRequest,
)
from shoal.tensors import EncodedMeta
from shoal.tensors.specs import TensorSpec
from swarm.swarms import World, gradient, identity_of, peer_id, virtual
from swarm.test_faults import resident_bytes

KINDS = [FOLLOW, PART, TAKE, COMMITS, JOIN, FORK, MEET, AUDIT]
NUM_HONEST = 4
NUM_ELEMENTS = 9000  # two reducers
A_SECOND = 80
"""Messages to each member: what it takes of one peer, so that all are read and none is only refused."""
VALUES = [
    None, True, -1, 0, 1, 2, 7, 255, 65_536, 2**31, 2**53, 2**62, 2**63, -(2**63), 0.0, -1.5, 1e300,
    float("nan"), float("inf"), "", "x", "trainer", "step", "begin", "agree", b"", b"\0", b"\xff" * 8,
    b"\x01" * 20, b"x" * 32, b"y" * 96, b"\xff" * 9000, [], [[]], [1, 2, 3], [-1] * 5, list(range(40)), {},
    {"a": 1},
]  # fmt: skip


def message_of(kind, run, me, key, choice):
    """Makes a message that could be right now, but for some of it."""
    round_ = run.round
    fork, number, state = run.state.fork, run.state.round + choice.choice([0, 0, 0, -1, 1]), run.state.name
    spec = EncodedMeta(choice.choice(["none", "fp16", "int8"]), TensorSpec("float32", (NUM_ELEMENTS // 2,)))
    members = round_.members if round_ is not None else (me,)
    plan = RoundPlan((0, 1), (5, 5), (0, 4096, NUM_ELEMENTS), (0, 1), (1, 0), 5.0)
    parts = (PartResult(1, b"x" * 32, b"\3"), PartResult(2, b"y" * 32, b"\1"))
    what = choice.choice([ABORT, STEP])
    commit = Commit(fork, number, state, what, members, plan=plan, parts=parts if what == STEP else ())
    part, attempt = choice.randrange(3), choice.randrange(3)
    if kind == FOLLOW:
        statement = Promise(
            fork, number, choice.choice([0, 1, 2, 5, 200, 2**40]), choice.choice([-1, 0, 3]), commit.digest
        )
        return FollowRequest(
            fork,
            number,
            state,
            me,
            statement.ballot,
            seen=choice.randrange(-1, 5),
            accepted_ballot=statement.accepted_ballot,
            accepted_digest=commit.digest,
            accepted=choice.choice([None, commit]),
            signature=sign_statement(key, statement, me),
            registration=choice.choice([None, Registration(choice.choice([5, 2**50]), NUM_ELEMENTS)]),
            samples=choice.choice([0, 5, 2**60]),
            is_ready=choice.random() < 0.5,
        )
    if kind == PART:
        return PartMessage(
            fork, number, part, attempt, choice.randrange(6), spec, choice.choice([b"", b"\3"])
        )
    if kind == TAKE:
        return TakeRequest(fork, number, part, attempt, choice.choice([b"", b"x" * 32]))
    if kind == COMMITS:
        return CommitsRequest(fork, number - choice.randrange(3))
    if kind == JOIN:
        return JoinRunRequest("test", me, fork, choice.choice([-1, 0, number]), "state")
    if kind == FORK:
        return ForkRequest(choice.choice(["ask", "agree", "begin"]), fork, number, state, b"new", members)
    if kind == MEET:
        return MeetRequest("test", choice.choice([fork, b"other"]), choice.choice([0, 2**60]))
    return AuditMessage(
        fork, number - 1, part, me, choice.randrange(6), spec, b"d" * 32, choice.choice([b"", b"r" * 96])
    )


def spoiled(value, choice):
    """Puts something else in place of one of the values that a message is made of."""
    if isinstance(value, dict | list) and value and choice.random() < 0.85:
        made = dict(value) if isinstance(value, dict) else list(value)
        key = choice.choice(list(made)) if isinstance(made, dict) else choice.randrange(len(made))
        made[key] = spoiled(made[key], choice)
        return made
    return choice.choice(VALUES)


async def flood(world, transport, me, key, kinds, num_each, a_second=A_SECOND):
    """Sends so many messages of each kind to all honest members; counts what came back."""
    choice = random.Random(7)
    answers = collections.Counter()

    async def send(run, kind):
        payload = msgspec.to_builtins(message_of(kind, run, me, key, choice), builtin_types=(bytes,))
        for _ in range(choice.randrange(4)):
            payload = spoiled(payload, choice)
        size = choice.choice([0, 1, 4, NUM_ELEMENTS * 2])
        buffers = (
            [choice.randbytes(size) for _ in range(choice.randrange(3))] if kind in (PART, AUDIT) else ()
        )
        try:
            await transport.call(run.context.me.peer, kind, payload, buffers, deadline=Deadline.after(3.0))
            answers[kind, "answered"] += 1
        except ShoalError as error:
            answers[kind, type(error).__name__] += 1
            if isinstance(error, RemoteFailure):  # the member's own code has failed
                raise AssertionError(f"{kind}: {error} after {payload}") from None

    honest = [world.runs[number] for number in range(NUM_HONEST)]
    left = [kind for kind in kinds for _ in range(num_each)]
    choice.shuffle(left)
    while left:
        sent, left = left[:a_second], left[a_second:]
        calls = [send(honest[at % len(honest)], kind) for at, kind in enumerate(sent)]
        outcomes = await fanout(calls, Deadline.after(60))
        assert not [one for one in outcomes if isinstance(one, Exception)], outcomes
        await asyncio.sleep(1 / len(honest))
    return answers


async def train(world):
    for key in range(1_000_000):
        for number in range(NUM_HONEST):
            world.runs[number].add(gradient(10 * key + number, NUM_ELEMENTS), 5)
        await asyncio.sleep(0.5)


async def survive(num_each, is_listed, **settings):
    """Members that train while another one floods them; gives the answers and the memory taken meanwhile."""
    async with World(target_samples=5 * NUM_HONEST, num_elements=NUM_ELEMENTS, **settings) as world:
        await world.start_all(NUM_HONEST + is_listed)
        training = asyncio.ensure_future(train(world))
        if is_listed:
            me = world.runs[NUM_HONEST].context.me
            transport = world.runs[NUM_HONEST].transport  # what it says is in its own name
        else:
            host = world.network.host("p9")
            transport = world.make_transport(world, 9, host, peer_id(9))
            await world._stack.enter_async_context(transport)
            me = SwarmMember(peer_id(9).digest, 5, "p9", 7)
        key = identity_of(NUM_HONEST if is_listed else 9)
        before = world.runs[0].state.num_steps
        answers = await flood(world, transport, me, key, KINDS, num_each // 5)
        sizes = [resident_bytes()]
        answers += await flood(world, transport, me, key, KINDS, num_each - num_each // 5)
        world.commits.clear()
        sizes.append(resident_bytes())
        steps = world.runs[0].state.num_steps
        assert steps > before + num_each // 100  # rounds went on
        await world.wait(lambda: world.runs[0].state.num_steps > steps + 3, 120)
        training.cancel()
        await asyncio.sleep(15)
        honest = {number: world.runs[number] for number in range(NUM_HONEST)}
        assert all(run.is_member for run in honest.values())
        assert len({run.state.fingerprint() for run in honest.values()}) == 1
        for run in honest.values():  # who says one thing to one and another to another is named, and rightly
            liars = {member.id_bytes for member in run.context.proofs}
            assert liars <= {me.id_bytes}
            run.context.proofs.clear()
        world.check(honest)
        names = [run.context.me.id_bytes for run in honest.values()]
        assert not any(run.context.bans.has_failed(name) for run in honest.values() for name in names)
        return answers, sizes


def errors_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("is_listed", [False, True])
def test_hostile_messages_of_every_kind_harm_nobody(is_listed, caplog):
    answers, _ = virtual(survive(40, is_listed, robust="centered-clip"))
    assert not errors_in(caplog)
    assert {kind for kind, _ in answers} == {*KINDS}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_ten_thousand_hostile_messages_of_every_kind_harm_nobody(is_listed, caplog):
    caplog.set_level(logging.ERROR, "shoal")  # pytest keeps warnings
    answers, (first, last) = virtual(survive(10_000, is_listed, robust="centered-clip"))
    assert not errors_in(caplog)
    for kind in KINDS:
        assert sum(num for (one, _), num in answers.items() if one == kind) == 10_000
    assert last < 1.1 * first


def test_who_asks_too_often_is_told_to_wait_and_the_log_has_few_lines(caplog):
    async def main():
        async with World(target_samples=20, num_elements=NUM_ELEMENTS) as world:
            await world.start_all(NUM_HONEST)
            transport = world.make_transport(world, 9, world.network.host("p9"), peer_id(9))
            await world._stack.enter_async_context(transport)
            request = CommitsRequest(world.runs[0].state.fork, world.runs[0].state.round)
            peer = world.runs[0].context.me.peer
            calls = [transport.call(peer, COMMITS, request, deadline=Deadline.after(5)) for _ in range(1000)]
            answers = await fanout(calls, Deadline.after(10))
            num_busy = sum(isinstance(answer, PeerBusy) for answer in answers)
            assert 500 < num_busy < 700
            for run in world.runs.values():  # others are served as ever
                run.add(gradient(1, NUM_ELEMENTS), 5)
            await world.wait(lambda: all(run.state.num_steps for run in world.runs.values()))

    virtual(main())
    assert len([line for line in caplog.messages if "too many" in line]) < 50
