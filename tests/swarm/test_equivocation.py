"""Ballots are signed: who says one thing to some and another to others is named, with the proof; nobody else
is."""

import asyncio
import contextlib
import random

import msgspec
import pytest

from shoal.core import Deadline, ShoalError
from shoal.swarm.ballots import Equivocation, Promise, Proposal, Witness, contradiction, sign_statement
from shoal.swarm.wire import ABORT, FOLLOW, Commit, FollowRequest, Registration, SwarmMember
from swarm.swarms import CountedTransport, World, gradient, identity_of, peer_id, virtual

FORK = b"fork"


def member(number):
    return SwarmMember(peer_id(number).digest, number, f"p{number}", 1)


def promise(ballot, accepted_ballot=-1, digest=b"", round_=0):
    return Promise(FORK, round_, ballot, accepted_ballot, digest)


def signed(number, statement):
    return sign_statement(identity_of(number), statement, member(number))


CONTRADICTIONS = [
    (promise(1, 1, b"a"), promise(1, 1, b"b"), "accepted two values in ballot 1"),
    (promise(1, 1, b"a"), promise(3, 1, b"b"), "accepted two values in ballot 1"),
    (promise(4, 0, b"a"), promise(5, 2, b"b"), "promised in ballot 4"),
    (promise(4), promise(0, 0, b"a"), "accepted a value in ballot 0"),
    (Proposal(FORK, 0, 2, b"a"), Proposal(FORK, 0, 2, b"b"), "proposed two values in ballot 2"),
]
CONSISTENT = [
    (promise(0), promise(0, 0, b"a")),
    (promise(0, 0, b"a"), promise(2, 0, b"a")),
    (promise(2, 0, b"a"), promise(2, 2, b"b")),
    (promise(1, 1, b"a"), promise(1, 1, b"b", round_=1)),
    (Proposal(FORK, 0, 2, b"a"), Proposal(FORK, 0, 3, b"b")),
    (Proposal(FORK, 0, 1, b"a"), promise(1, 1, b"b")),
]


async def unless_late(call):
    with contextlib.suppress(ShoalError):
        await call


@pytest.mark.parametrize(("first", "second", "why"), CONTRADICTIONS)
def test_two_statements_that_contradict_each_other_are_a_proof(first, second, why):
    for one, other in ((first, second), (second, first)):
        witness = Witness()
        assert witness.hear(member(1), one, signed(1, one)) is None
        proof = witness.hear(member(1), other, signed(1, other))
        assert proof is not None
        assert why in proof.reason
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(proof))  # it can be shown to others
        assert proof.is_proven
        assert not msgspec.structs.replace(proof, member=member(2)).is_proven
        assert not msgspec.structs.replace(proof, second_signature=proof.first_signature).is_proven
        assert not msgspec.structs.replace(
            proof, second=one, second_signature=proof.first_signature
        ).is_proven


@pytest.mark.parametrize(("first", "second"), CONSISTENT)
def test_what_an_honest_member_may_say_is_none(first, second):
    assert not contradiction(first, second)
    assert not contradiction(second, first)


def test_a_statement_counts_only_with_its_members_signature():
    witness, said = Witness(), promise(1)
    for signature in (b"", signed(2, said), signed(1, promise(2)), bytes(96)):
        with pytest.raises(ShoalError, match="has not signed"):
            witness.hear(member(1), said, signature)
        assert not witness.knows(member(1), said)
    restarted = msgspec.structs.replace(member(1), start_number=99)  # it has promised nothing
    with pytest.raises(ShoalError, match="has not signed"):
        witness.hear(restarted, said, signed(1, said))
    assert witness.hear(member(1), said, signed(1, said)) is None
    assert witness.hear(member(1), said, b"") is None  # it was heard before


def test_memory_for_what_one_member_says_is_bounded():
    witness = Witness()
    for ballot in range(100):
        assert witness.hear(member(1), promise(ballot), signed(1, promise(ballot))) is None
    assert not witness.knows(member(1), promise(0))
    assert witness.knows(member(1), promise(99))


def test_a_request_is_small():
    long = SwarmMember(bytes(20), 2**62 - 1, "203.0.113.177", 31337)
    request = FollowRequest(
        bytes(32), 10**6, bytes(32), long, 0, seen=100, registration=Registration(10**5, 10**9, 100.0)
    )
    assert len(msgspec.msgpack.encode(request)) <= 200


def test_a_member_that_votes_for_two_values_is_named_by_the_coordinator():
    """It sends another vote before each of its own."""
    liars = []

    class LyingTransport(CountedTransport):
        async def call(self, peer, method, payload=None, buffers=(), **options):
            if method == FOLLOW and self._number in liars and payload.accepted_digest:
                other = msgspec.structs.replace(payload, accepted_digest=bytes(32), accepted=None)
                said = Promise(
                    other.fork, other.round, other.ballot, other.accepted_ballot, other.accepted_digest
                )
                signature = sign_statement(identity_of(self._number), said, other.member)
                other = msgspec.structs.replace(other, signature=signature)
                lie = super().call(peer, method, other, buffers, deadline=Deadline.after(1.0))
                self._world.scope.start_soon(unless_late(lie), name="lie")
                await asyncio.sleep(0)
            return await super().call(peer, method, payload, buffers, **options)

    async def main():
        async with World() as world:
            world.make_transport = lambda *where: LyingTransport(*where)
            await world.start_all(3)
            members = world.runs[0].members
            coordinator, liar = world.runs[int(members[0].host[1:])], members[1]
            liars.append(int(liar.host[1:]))
            for number, run in world.runs.items():
                run.add(gradient(number), 5)
            await world.wait(lambda: coordinator.context.proofs)
            assert list(coordinator.context.proofs) == [liar]
            proof = coordinator.context.proofs[liar]
            assert coordinator.context.bans.is_paused(liar.id_bytes, coordinator.context.now_s())
            assert isinstance(proof, Equivocation)
            assert proof.is_proven
            assert "accepted two values" in proof.reason

    virtual(main())


def test_a_coordinator_that_proposes_two_values_is_named_by_the_next_one():
    """Two members have accepted different values of one ballot; who takes over hears of both."""

    async def main():
        async with World() as world:
            await world.start_all(4)
            round_ = world.runs[0].round
            order = [int(one.host[1:]) for one in round_.members]
            liar, next_, *others = order
            values = [
                Commit(round_.fork, round_.number, round_.state, ABORT, round_.members[:num])
                for num in (2, 3)
            ]
            world.kill(liar)
            for number, value in zip(others, values, strict=True):
                run = world.runs[number]
                said = Proposal(round_.fork, round_.number, 0, value.digest)
                run.round._proposed[0] = sign_statement(identity_of(liar), said, round_.members[0])
                run.round.acceptor.accept(0, value)
            await world.wait(lambda: world.runs[next_].context.proofs)
            ((named, proof),) = world.runs[next_].context.proofs.items()
            assert named == round_.members[0]
            assert proof.is_proven
            assert "proposed two values in ballot 0" in proof.reason

    virtual(main())


def test_a_vote_that_nobody_has_signed_does_not_count():
    async def main():
        async with World() as world:
            await world.start_all(2)
            coordinator = next(run for run in world.runs.values() if run.round.me == 0)
            round_, other = coordinator.round, coordinator.round.members[1]
            forged = FollowRequest(
                round_.fork, round_.number, round_.state, other, 0, accepted_ballot=0, accepted_digest=b"x"
            )
            status = await round_.serve_follow(forged)
            assert status.problem == "not signed"
            accepted = Commit(round_.fork, round_.number, round_.state, ABORT, ())
            said = Promise(round_.fork, round_.number, 2, 0, accepted.digest)
            number = int(other.host[1:])
            invented = FollowRequest(
                round_.fork,
                round_.number,
                round_.state,
                other,
                2,
                accepted_ballot=0,
                accepted_digest=accepted.digest,
                accepted=accepted,  # which nobody has proposed
                signature=sign_statement(identity_of(number), said, other),
            )
            status = await round_.serve_follow(invented)
            assert status.problem == "not signed"

    virtual(main())


@pytest.mark.parametrize("seed", range(20))
def test_whatever_order_messages_come_in_an_honest_member_contradicts_itself_never(seed):
    """An acceptor under random promises and proposals: what it says at any two times is consistent."""
    choice = random.Random(seed)
    promised, accepted = 0, (-1, b"")
    said = []
    for _ in range(60):
        ballot = choice.randint(promised, promised + 2)
        promised = ballot
        if choice.random() < 0.4 and accepted[0] < ballot:
            accepted = (ballot, bytes([choice.randrange(3)]))
        said.append(promise(choice.randint(max(0, accepted[0]), promised), *accepted))
    assert not any(contradiction(one, other) for one in said for other in said)
