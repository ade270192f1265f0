"""What the members of a run say to each other, and the commits that change what they share.

Every message is a call from a member to another one; nobody needs to be dialed but those who stand in the
order, so a member behind a router takes part fully. All requests can come twice, late or never: what they say
(a promise, a vote, a registration) stays true.

    swarm.follow   to the owner of a ballot: my promise, my vote, my registration; answered with what is new
    swarm.part     to a reducer: my values of one part
    swarm.take     to a reducer, or to whoever holds it: the average of one part
    swarm.commits  to any member: the commits after a round
    swarm.join     to any member: where the run is, and that I want to be listed
    swarm.fork     to members that are without a quorum as I am
    swarm.meet     to a member of another fork of the same run
    swarm.audit    to an auditor: my values of a part again; to all: what proves that its reducer has lied
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shoal.core import Address, Peer, PeerId, ProtocolError
from shoal.core.identity import Identity
from shoal.core.ids import ID_BYTES
from shoal.tensors import EncodedMeta

FOLLOW, PART, TAKE, COMMITS = "swarm.follow", "swarm.part", "swarm.take", "swarm.commits"
JOIN, FORK, MEET, AUDIT = "swarm.join", "swarm.fork", "swarm.meet", "swarm.audit"

STEP, ABORT, END = "step", "abort", "end"
"""What a commit does: moves the parameters, leaves them, or ends the fork in favour of another."""

TRAINER, AUXILIARY = "trainer", "auxiliary"
"""Kinds of members: an auxiliary averages parts for the others, brings no samples, and has no vote."""

GATHER, REGISTER, REDUCE, COMMIT = "gather", "register", "reduce", "commit"
"""The stages of a round."""


MAX_SAMPLES = 1 << 40
"""A member brings no more to a round: sums of many rounds must fit into what travels."""
MAX_CONTRIBUTORS = 1 << 16
_LARGEST, _LARGEST_PORT, _LONGEST_HOST = 1 << 62, 65_535, 255


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise ValueError(f"{what} cannot be right")


class SwarmMember(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A peer with a random number that it drew at its start: a restart is another member."""

    id_bytes: bytes
    start_number: int
    host: str
    port: int
    is_reachable: bool = True
    """Whether others can dial it; who cannot be dialed neither coordinates nor reduces. A member says so of
    itself, and a coordinator that has tried says it in its commit."""
    kind: str = TRAINER
    is_relayed: bool = False
    """Whether a relay listens at the address, who passes on what is meant for it."""

    def __post_init__(self) -> None:
        """ValueError for what is no member, so that a message with one is refused."""
        _require(len(self.id_bytes) == ID_BYTES and 0 <= self.start_number < _LARGEST, "the member's id")
        _require(0 <= self.port <= _LARGEST_PORT and len(self.host) <= _LONGEST_HOST, "the member's address")
        _require(bool(self.host) or not self.is_callable, "the member's address")
        _require(self.kind in (TRAINER, AUXILIARY), "the member's kind")

    @property
    def votes(self) -> bool:
        """Whether it votes; who does stands in the order before all who don't."""
        return self.kind == TRAINER

    @property
    def is_callable(self) -> bool:
        """Whether there is a way to call it; a client only dials out."""
        return self.is_reachable or self.is_relayed

    def is_same(self, other: SwarmMember) -> bool:
        """Whether both are one member, wherever it is reached."""
        return (self.id_bytes, self.start_number) == (other.id_bytes, other.start_number)

    @property
    def peer(self) -> Peer:
        """Where it is reached."""
        peer_id = PeerId(self.id_bytes)
        return Peer(Address(self.host, self.port, peer_id if self.is_relayed else None), peer_id)

    @property
    def way(self) -> str:
        """How others reach it, in a word for people."""
        return "dialed" if self.is_reachable else "relayed" if self.is_relayed else "client"

    @property
    def short(self) -> str:
        """Its name in messages."""
        return f"{self.id_bytes.hex()[:8]}@{self.host}:{self.port}"


class RoundPlan(msgspec.Struct, frozen=True, array_like=True):
    """Who contributes to a round, and who averages which part; numbers are places in the round's list."""

    contributors: tuple[int, ...]
    samples: tuple[int, ...]
    """How many samples stand behind each contribution: its weight."""
    bounds: tuple[int, ...]
    """Where the parts begin, in elements, and where the last one ends: those of a fragment where a round
    averages no more.
    """
    reducers: tuple[int, ...]
    backups: tuple[int, ...]
    """Who reduces a part once its reducer is lost; -1 for nobody."""
    reduce_s: float
    """After so long a reducer averages what has come."""
    leaders: tuple[tuple[int, ...], ...] = ()
    """Where there are many contributors: for each group, who averages which part for it, -1 for nobody."""

    def __post_init__(self) -> None:
        """ValueError for lists that do not fit together."""
        num = len(self.reducers)
        _require(0 < len(self.contributors) == len(self.samples) <= MAX_CONTRIBUTORS, "the contributors")
        _require(all(a < b for a, b in itertools.pairwise(self.contributors)), "the contributors' order")
        _require(self.contributors[0] >= 0, "the contributors' places")
        _require(all(0 < samples <= MAX_SAMPLES for samples in self.samples), "the samples")
        _require(num > 0 and len(self.bounds) == num + 1 and self.bounds[0] >= 0, "the number of parts")
        _require(all(a < b for a, b in itertools.pairwise(self.bounds)), "the bounds of parts")
        lists = (self.reducers, self.backups, *self.leaders)
        _require(all(len(places) == num and min(places) >= -1 for places in lists), "who averages")
        _require(min(self.reducers) >= 0 and 0 < self.reduce_s < _LARGEST, "who averages, or for how long")

    def fits(self, num_members: int, num_elements: int) -> bool:
        """Tells whether it is of so many members, and of no more than so many parameters."""
        lists = (self.contributors, self.reducers, self.backups, *self.leaders)
        return self.bounds[-1] <= num_elements and max(map(max, lists)) < num_members

    @property
    def num_elements(self) -> int:
        """How many elements all parts have together."""
        return self.bounds[-1] - self.bounds[0]

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return len(self.reducers)

    def reducer(self, part: int, attempt: int) -> int:
        """Gives the place of who averages a part at the first or second attempt, -1 for nobody."""
        return self.reducers[part] if attempt == 1 else self.backups[part]

    def leader(self, part: int, place: int) -> int:
        """Gives the place of who averages a part for the group that a member is in, -1 for nobody."""
        return self.leaders[place % len(self.leaders)][part] if self.leaders else -1

    def size(self, part: int) -> int:
        """Gives the number of elements of a part."""
        return self.bounds[part + 1] - self.bounds[part]


class PartResult(msgspec.Struct, frozen=True, array_like=True):
    """One part of a commit: which attempt's average it is, and who is in it."""

    attempt: int = 0
    """0: nobody could supply it, and it is zero for all."""
    digest: bytes = b""
    bitmap: bytes = b""
    """A bit for each contributor of the plan."""


class Commit(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """What a round has decided: its parts, and who is a member of the next one, in order."""

    fork: bytes
    round: int
    previous: bytes
    """The name of the state that it changes."""
    kind: str
    members: tuple[SwarmMember, ...]
    tenure: int = 0
    """For how many rounds the first member has coordinated."""
    plan: RoundPlan | None = None
    parts: tuple[PartResult, ...] = ()
    should_pin: bool = False
    """Whether all keep the state that it makes for those who join."""
    winner: bytes = b""
    winner_members: tuple[SwarmMember, ...] = ()
    """For an end: which fork goes on, and whom to ask there."""

    def __post_init__(self) -> None:
        """ValueError for what no round decides, and for members that are listed twice."""
        _require(self.kind in (STEP, ABORT, END) and 0 <= self.round < _LARGEST, "the commit's kind")
        _require(len(dict.fromkeys(self.members)) == len(self.members), "the list of members")
        for result in self.parts:
            _require(0 <= result.attempt <= 2 and len(result.bitmap) <= MAX_CONTRIBUTORS // 8, "a part")

    def fits(self, num_members: int, num_elements: int) -> bool:
        """Tells whether its plan is of so many members and parameters, and its parts are the plan's."""
        plan = self.plan
        if self.kind != STEP or plan is None:
            return self.kind != STEP
        bitmaps = dict.fromkeys(result.bitmap for result in self.parts)
        is_known = all(int.from_bytes(bitmap, "little") >> len(plan.contributors) == 0 for bitmap in bitmaps)
        return is_known and len(self.parts) == plan.num_parts and plan.fits(num_members, num_elements)

    @functools.cached_property
    def digest(self) -> bytes:
        """The hash by which votes name it."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()

    @property
    def state_name(self) -> bytes:
        """The name of the state that it makes: a hash of the previous name and of this commit."""
        return hashlib.sha256(self.previous + self.digest).digest()


class ShortCommit(msgspec.Struct, frozen=True):
    """A commit as it goes to members of its round, without the lists that they can make themselves."""

    commit: Commit
    dropped: bytes
    """A bit for each member that the next round does not have."""
    added: tuple[SwarmMember, ...]
    first: int
    """Which of the next members, in the order of their hashes, comes first."""
    has_known_plan: bool


class Registration(msgspec.Struct, frozen=True, array_like=True):
    """What a member brings to a round."""

    samples: int
    num_elements: int
    bandwidth: float = 0.0
    """Its line in Mbit/s, the slower direction; 0: not known, it counts as that of most others."""
    taken_mbit_s: float = 0.0
    """How fast averages came to it in the latest rounds, in Mbit/s; 0: not known."""


class FollowRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a follower tells the owner of a ballot: facts that stay true."""

    fork: bytes
    round: int
    state: bytes
    member: SwarmMember
    ballot: int
    """It takes part in no lower ballot any more: Paxos's promise."""
    seen: int = -1
    has_plan: bool = False
    accepted_ballot: int = -1
    accepted_digest: bytes = b""
    accepted: Commit | None = None
    """The value that it accepted; left out where the owner itself proposed it."""
    registration: Registration | None = None
    samples: int = 0
    is_ready: bool = False
    is_leaving: bool = False
    signature: bytes = b""
    """Of its `Promise`; left out where the owner has it."""
    proposed: bytes = b""
    """The signature of who proposed the value that it accepted, of the `Proposal`."""


class RoundStatus(msgspec.Struct, frozen=True, array_like=True):
    """What the owner of a ballot answers."""

    version: int = 0
    ballot: int = 0
    """The highest ballot that it knows of."""
    stage: str = GATHER
    plan: RoundPlan | None = None
    lost: tuple[int, ...] = ()
    """Reducers whose parts are to be sent to their backups, and contributors that nobody waits for."""
    proposal: ShortCommit | None = None
    num_accepted: int = 0
    decision: ShortCommit | None = None
    decided: bytes = b""
    """The hash of the decision, to a member that has accepted it."""
    finished: Commit | None = None
    """The decision of a round that the owner has left."""
    has_quorum: bool = False
    problem: str = ""
    proposed: bytes = b""
    """The signature of the `Proposal`."""


class PartMessage(msgspec.Struct, frozen=True):
    """A contributor's values of one part, or a group's; the encoded values follow as buffers."""

    fork: bytes
    round: int
    part: int
    attempt: int
    """0: to the leader of the sender's group."""
    contributor: int
    meta: EncodedMeta
    bitmap: bytes = b""
    """Whose average it is, where the sender leads a group: a bit for each contributor of the plan."""
    refused: bytes = b""
    """Contributors of the group that sent what is not finite."""
    signature: bytes = b""
    """The sender's, in a run with audits."""


class TakeRequest(msgspec.Struct, frozen=True):
    """Asks for the average of a part: of an attempt, or just the one with this hash."""

    fork: bytes
    round: int
    part: int
    attempt: int
    digest: bytes = b""


class TakeReply(msgspec.Struct, frozen=True):
    """The average of a part, whose values follow as buffers; `digest` is empty while it is not ready."""

    digest: bytes = b""
    bitmap: bytes = b""
    refused: bytes = b""
    """Contributors that sent what is not finite."""
    meta: EncodedMeta | None = None
    inputs: tuple[bytes, ...] = ()
    """In a run with audits, for each contributor that is in it: the hash of its values, and its signature."""
    signature: bytes = b""
    """The reducer's, in a run with audits."""


class AuditMessage(msgspec.Struct, frozen=True):
    """One contributor's values of a part that is audited, which follow as buffers; or a receipt for values
    that a reducer has left out.
    """

    fork: bytes
    round: int
    part: int
    member: SwarmMember
    """Who sends this."""
    contributor: int
    meta: EncodedMeta | None = None
    digest: bytes = b""
    receipt: bytes = b""


class CommitsRequest(msgspec.Struct, frozen=True):
    """Asks for the commits of a fork from a round on."""

    fork: bytes
    round: int


class JoinRunRequest(msgspec.Struct, frozen=True):
    """Asks where a run is; with a member, says that it wants to be listed, and how far it is."""

    run: str
    member: SwarmMember | None = None
    fork: bytes = b""
    round: int = -1
    """The round that it could take part in; -1 while it has no state."""
    state: str = ""
    """The name of the state that it is taking: as long as it says so, that is kept."""


class JoinReply(msgspec.Struct, frozen=True):
    """Where a run is."""

    run: str
    fork: bytes
    round: int
    members: tuple[SwarmMember, ...]
    samples: int
    pinned_round: int = -1
    """The round before which the pinned state was made; -1 while there is none."""
    pinned_state: str = ""
    """The name by which `StateTaker` takes it."""
    name: bytes = b""
    """The state's, after the latest commit."""
    steps: int = 0
    trusted: tuple[int, ...] = ()
    """The places of members that were listed by at least ten commits."""


class ForkRequest(msgspec.Struct, frozen=True):
    """Asks whether a member is without a quorum too, whether it agrees to a fork, and tells that it has
    begun.
    """

    stage: str
    fork: bytes
    round: int
    state: bytes
    new_fork: bytes = b""
    members: tuple[SwarmMember, ...] = ()


class MeetRequest(msgspec.Struct, frozen=True):
    """Says how far a fork is, and asks whether it may end in favour of the other one."""

    run: str
    fork: bytes
    samples: int


class MeetReply(msgspec.Struct, frozen=True):
    """Agrees or not, and says how far the other fork is."""

    agrees: bool
    fork: bytes
    samples: int
    members: tuple[SwarmMember, ...]


class Broadcast:
    """Wakes everybody who waits, whenever something has changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.num = 0

    def fire(self) -> None:
        """Wakes all that wait now."""
        self.num += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Waits for the next change, at most so long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return


def part_digest(
    meta: EncodedMeta, bitmap: bytes, buffers: Sequence[Any], inputs: tuple[bytes, ...] = ()
) -> bytes:
    """Computes the hash by which a commit names the average of a part, and a signature a contributor's
    values.
    """
    found = hashlib.sha256(msgspec.msgpack.encode((meta, bitmap, inputs) if inputs else (meta, bitmap)))
    for buffer in buffers:
        found.update(memoryview(buffer).cast("B"))
    return found.digest()


_KEY_BYTES, _SIGNED_BYTES = 32, 96
_DOMAIN = b"shoal swarm 1:"


def sign(identity: Identity, *facts: Any) -> bytes:
    """Signs facts, the first of which says what they are: the public key, and the signature after it."""
    text = _DOMAIN + msgspec.msgpack.encode(facts)
    return identity.public_key.public_bytes_raw() + identity.sign(text)


def has_signed(member: SwarmMember, signature: bytes, *facts: Any) -> bool:
    """Whether a member has signed these facts: the key must be the one that its id is the hash of."""
    key = signature[:_KEY_BYTES]
    if len(signature) != _SIGNED_BYTES or PeerId.of_public_key(key).digest != member.id_bytes:
        return False
    try:
        text = _DOMAIN + msgspec.msgpack.encode(facts)
        Ed25519PublicKey.from_public_bytes(key).verify(signature[_KEY_BYTES:], text)
    except (InvalidSignature, ValueError):
        return False
    return True


def to_bitmap(places: Sequence[int], num: int) -> bytes:
    """Makes a bitmap with these bits set."""
    value = 0
    for place in places:
        value |= 1 << place
    return value.to_bytes(-(-num // 8), "little")


def from_bitmap(bitmap: bytes) -> list[int]:
    """Lists the bits that are set; ProtocolError for more than there can be."""
    if len(bitmap) > MAX_CONTRIBUTORS // 8:
        raise ProtocolError(f"A bitmap of {len(bitmap)} bytes came.")
    return [8 * at + bit for at, byte in enumerate(bitmap) if byte for bit in range(8) if byte >> bit & 1]
