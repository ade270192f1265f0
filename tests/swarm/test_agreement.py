"""Commits: whatever is lost, doubled or late, and whoever takes over, a round has one value."""

import random

import pytest

from shoal.core import ShoalError
from shoal.swarm.ballots import Acceptor, BallotTally, is_quorum
from shoal.swarm.membership import next_order, num_owners
from shoal.swarm.wire import ABORT, Commit, SwarmMember


def member(number, is_reachable=True):
    return SwarmMember(bytes([number]) * 20, number, f"p{number}", 1, is_reachable)


def commit(number):
    return Commit(b"fork", 0, b"state", ABORT, (member(number),))


@pytest.mark.parametrize("num", range(1, 9))
def test_any_two_quorums_meet(num):
    quorums = [
        frozenset(place for place in range(num) if bits >> place & 1)
        for bits in range(2**num)
        if is_quorum(num, [place for place in range(num) if bits >> place & 1])
    ]
    assert all(one & other for one in quorums for other in quorums)
    assert frozenset(range(num)) in quorums


@pytest.mark.parametrize("seed", range(100))
def test_never_two_different_commits(seed):
    """Random orders of promises, proposals and votes, with messages lost, doubled and arbitrarily late."""
    choice = random.Random(seed)
    num = choice.randint(1, 6)
    acceptors = [Acceptor() for _ in range(num)]
    tallies = {}
    decided = {}
    messages = []
    for _ in range(300):
        action = choice.random()
        if action < 0.15:
            ballot = choice.randint(0, 8)
            tally = tallies.setdefault(ballot, BallotTally(num, ballot))
            if tally.proposal is None and tally.has_promises:
                tally.propose(tally.bound_value() or commit(ballot))
        elif action < 0.45:  # a member goes on to a ballot and tells its owner
            place, ballot = choice.randrange(num), choice.randint(0, 8)
            acceptor = acceptors[place]
            if acceptor.promise(ballot):
                messages.append(("promise", ballot, place, acceptor.accepted_ballot, acceptor.accepted))
        elif action < 0.65:  # a member hears a proposal
            place = choice.randrange(num)
            proposed = [tally for tally in tallies.values() if tally.proposal is not None]
            if proposed:
                tally = choice.choice(proposed)
                if acceptors[place].accept(tally.ballot, tally.proposal):
                    messages.append(("vote", tally.ballot, place, tally.proposal.digest, None))
        elif messages and choice.random() < 0.8:
            kind, ballot, place, what, value = choice.choice(messages)  # stays there: it may come again
            tally = tallies.setdefault(ballot, BallotTally(num, ballot))
            if kind == "promise":
                tally.add_promise(place, what, value)
            else:
                tally.add_vote(place, what)
        for ballot, tally in tallies.items():
            if tally.is_decided:
                decided[ballot] = tally.proposal.digest
    assert len(set(decided.values())) <= 1


def test_a_ballot_proposes_what_the_highest_accepted():
    tally = BallotTally(3, 5)
    tally.add_promise(0, 1, commit(1))
    tally.add_promise(1, 3, commit(3))
    assert tally.bound_value() == commit(3)
    with pytest.raises(ShoalError):
        tally.propose(commit(9))
    tally.propose(commit(3))
    with pytest.raises(ShoalError):
        tally.propose(commit(3))


def test_who_agreed_to_a_fork_votes_no_more():
    acceptor = Acceptor()
    acceptor.close()
    assert not acceptor.promise(3)
    assert not acceptor.accept(3, commit(1))


def test_the_coordinator_stays_for_twenty_rounds():
    members, tenure = tuple(member(number) for number in range(5)), 1
    coordinators = []
    for number in range(60):
        coordinators.append(members[0])
        members, tenure = next_order(bytes([number]), members, members[0], tenure)
    changes = [index for index in range(1, 60) if coordinators[index] != coordinators[index - 1]]
    assert changes == [20, 40]


def test_only_who_can_be_reached_owns_ballots():
    members, _ = next_order(b"x", [member(0, False), member(1), member(2)], member(1), 1)
    assert members[0] == member(1)
    assert members[2] == member(0, False)
    assert num_owners(members) == 2  # ballots are those of the first two in turns
