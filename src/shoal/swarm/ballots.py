"""Agreement on one commit for each round: single-decree Paxos over the round's list of members.

Lamport, "Paxos Made Simple" (2001), section 2. The acceptor and the proposer are plain objects without time
and messages, so that tests can put them through every order of events. A member's acceptor lives as long as
the member: a restart is another member, so nothing is written to disk.

Ballot b belongs to the member at b mod k of the order, of which the first k can be reached. Nobody but the
owner of ballot 0 can have proposed before ballot 1, so ballot 0 needs no promises.

All this holds against crashes, not liars. What is said in a ballot is signed, so that who says one thing to
some and another thing to others can be proven to lie, by anybody who has heard both.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from shoal.core import ShoalError
from shoal.core.identity import Identity
from shoal.swarm.wire import Commit, SwarmMember, has_signed, sign

_MAX_HEARD = 64
"""The latest statements of one member in one round that are kept; it makes a few for each ballot."""


class Promise(msgspec.Struct, frozen=True, array_like=True):
    """What a member says of itself: it takes part in no lower ballot, and which value it accepted last."""

    fork: bytes
    round: int
    ballot: int
    accepted_ballot: int
    accepted_digest: bytes


class Proposal(msgspec.Struct, frozen=True, array_like=True):
    """What the owner of a ballot says to all: this is the value."""

    fork: bytes
    round: int
    ballot: int
    digest: bytes


Statement = Promise | Proposal


def sign_statement(identity: Identity, statement: Statement, member: SwarmMember) -> bytes:
    """Signs what a member says; the key and the signature, 96 bytes."""
    return sign(identity, *_facts(statement, member))


def _facts(statement: Statement, member: SwarmMember) -> tuple[Any, ...]:
    # a restart is another member, who has promised nothing
    return (type(statement).__name__.lower(), member.start_number, *msgspec.structs.astuple(statement))


def contradiction(first: Statement, second: Statement) -> str:
    """Says why no honest member makes both of these; empty where one may, in whichever order."""
    if (first.fork, first.round) != (second.fork, second.round):
        return ""
    if isinstance(first, Proposal) and isinstance(second, Proposal):
        if first.ballot == second.ballot and first.digest != second.digest:
            return f"it proposed two values in ballot {first.ballot}"
    elif isinstance(first, Promise) and isinstance(second, Promise):
        if (
            first.accepted_ballot == second.accepted_ballot
            and first.accepted_digest != second.accepted_digest
        ):
            return f"it accepted two values in ballot {first.accepted_ballot}"
        for one, other in ((first, second), (second, first)):
            if one.accepted_ballot < other.accepted_ballot < one.ballot:
                return (
                    f"it accepted a value in ballot {other.accepted_ballot}, and promised in ballot "
                    f"{one.ballot} that it had accepted none since ballot {one.accepted_ballot}"
                )
    return ""


class Equivocation(msgspec.Struct, frozen=True):
    """Two statements of a member that contradict each other, both signed: a proof for anybody."""

    member: SwarmMember
    first: Statement
    first_signature: bytes
    second: Statement
    second_signature: bytes

    @property
    def reason(self) -> str:
        """What the member did."""
        return contradiction(self.first, self.second)

    @property
    def is_proven(self) -> bool:
        """Whether the member has signed both, and they contradict each other."""
        pairs = ((self.first, self.first_signature), (self.second, self.second_signature))
        return bool(self.reason) and all(
            has_signed(self.member, signature, *_facts(statement, self.member))
            for statement, signature in pairs
        )


class Witness:
    """What a member has heard of others in one round, and who of them contradicts itself."""

    def __init__(self) -> None:
        self._heard: dict[SwarmMember, dict[Statement, bytes]] = {}

    def knows(self, member: SwarmMember, statement: Statement) -> bool:
        """Whether it has heard just this before."""
        return statement in self._heard.get(member, ())

    def hear(self, member: SwarmMember, statement: Statement, signature: bytes) -> Equivocation | None:
        """Notes a statement; ShoalError where the member has not signed it.

        Gives the proof where it contradicts an earlier one.
        """
        heard = self._heard.setdefault(member, {})
        if statement in heard:
            return None
        if not has_signed(member, signature, *_facts(statement, member)):
            raise ShoalError(f"{member.short} has not signed what it says in a ballot.")
        if len(heard) == _MAX_HEARD:
            del heard[next(iter(heard))]
        heard[statement] = signature
        for earlier, known in heard.items():
            if contradiction(earlier, statement):
                return Equivocation(member, earlier, known, statement, signature)
        return None


def is_quorum(num_voters: int, places: Collection[int]) -> bool:
    """Tells whether these are more than half, or exactly half with the first: any two such meet.

    The first so many places of the order vote; others do not count.
    """
    num = sum(place < num_voters for place in places)
    return 2 * num > num_voters or (2 * num == num_voters and 0 in places)


class Acceptor:
    """What one member has promised and accepted in one round."""

    def __init__(self) -> None:
        self.promised = 0
        self.accepted_ballot = -1
        self.accepted: Commit | None = None
        self.is_closed = False

    def promise(self, ballot: int) -> bool:
        """Takes part in no lower ballot from now on; False where it already takes part in a higher one."""
        if self.is_closed or ballot < self.promised:
            return False
        self.promised = ballot
        return True

    def accept(self, ballot: int, value: Commit) -> bool:
        """Votes for a value; False where a higher ballot was promised meanwhile."""
        if self.is_closed or ballot < self.promised:
            return False
        self.promised = self.accepted_ballot = ballot
        self.accepted = value
        return True

    def close(self) -> None:
        """Votes no more: the member has agreed to a fork."""
        self.is_closed = True


class BallotTally:
    """What the owner of one ballot has heard: promises, then votes."""

    def __init__(self, num_voters: int, ballot: int) -> None:
        self.ballot = ballot
        self.proposal: Commit | None = None
        self._digest = b""
        self._num_voters = num_voters
        self._promises: dict[int, tuple[int, Commit | None]] = {}
        self._votes: dict[int, bytes] = {}
        self._voters: dict[bytes, dict[int, None]] = {}
        """Who has accepted the value of this hash."""

    @property
    def promised(self) -> list[int]:
        """The places of those who have promised."""
        return sorted(self._promises)

    @property
    def has_promises(self) -> bool:
        """Whether a value may be proposed: a quorum has promised, or no lower ballot exists."""
        return self.ballot == 0 or is_quorum(self._num_voters, self._promises)

    @property
    def leaves_quorum(self) -> bool:
        """Whether those who have not promised could decide without those who have."""
        others = [place for place in range(self._num_voters) if place not in self._promises]
        return is_quorum(self._num_voters, others)

    @property
    def num_votes(self) -> int:
        """How many have accepted the proposal."""
        return len(self._accepted())

    @property
    def is_decided(self) -> bool:
        """Whether a quorum has accepted the proposal."""
        return self.proposal is not None and is_quorum(self._num_voters, self._accepted())

    def add_promise(self, place: int, accepted_ballot: int, accepted: Commit | None) -> bool:
        """Notes a promise with what was accepted under lower ballots; False where it was known."""
        is_new = place not in self._promises
        if is_new and accepted_ballot < self.ballot:
            # a member's first promise for this ballot is the one that counts: later messages may tell of a
            # vote under this very ballot, which says nothing of lower ones
            self._promises[place] = (accepted_ballot, accepted)
        return is_new

    def add_vote(self, place: int, digest: bytes) -> bool:
        """Notes a vote under this ballot; False where it was known."""
        known = self._votes.get(place)
        if known == digest:
            return False
        if known is not None:
            del self._voters[known][place]
        self._votes[place] = digest
        self._voters.setdefault(digest, {})[place] = None
        return True

    def bound_value(self) -> Commit | None:
        """Gives the value that must be proposed: the accepted one of the highest ballot; None: any may be."""
        if self.ballot == 0:
            return None
        return max(self._promises.values(), key=lambda promise: promise[0], default=(-1, None))[1]

    def propose(self, value: Commit) -> None:
        """Sets what this ballot is about, once."""
        bound = self.bound_value()
        if self.proposal is not None or not self.has_promises or (bound is not None and bound != value):
            raise ShoalError(f"Ballot {self.ballot} must not propose this commit.")
        self.proposal, self._digest = value, value.digest

    def _accepted(self) -> Collection[int]:
        return () if self.proposal is None else self._voters.get(self._digest, ())
