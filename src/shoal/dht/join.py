"""Becoming part of a swarm, and staying in one: from addresses that are given, or peers of last time.

`Joining` pings those addresses, has others try whether they can call this peer (`Reachability`), and looks
for its own id, which makes its neighbours known both ways. Peers that were there are written into a small
JSON file, a way back when no join address answers (`KnownPeers`). A swarm that fell apart is noticed by
asking the join addresses now and then who is near this peer (`SplitCheck`).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    Peer,
    PeerId,
    PeerRefused,
    PeerUnreachable,
    ReportError,
    ShoalError,
    UsageError,
    fanout,
)
from shoal.core.ids import ID_BYTES, is_loopback
from shoal.core.untrusted import decode_json
from shoal.dht.protocol import Answered, DHTProtocol
from shoal.dht.search import Lookup, look_up
from shoal.dht.wire import ID_BITS, Contact, Found, LookupKind, Want, named
from shoal.report.storage import write_atomically
from shoal.transport import Membership
from shoal.transport.introductions import DIAL_BACK, DialBack, DialedBack
from shoal.transport.messages import read_answer

log = logging.getLogger(__name__)

_ENOUGH = 3  # peers that are waited for; those that answer later are met in look-ups
_AT_ONCE = 8
_NUM_PLACES, _NUM_TELLERS = 16, 3  # where others are asked for, and by whom


class Joining:
    """The way into the swarm, and back into it."""

    def __init__(self, protocol: DHTProtocol, addresses: Sequence[Address], peers_file: Path | None) -> None:
        self._protocol = protocol
        self.addresses = list(addresses)
        """Where this peer was told to join."""
        self.known = KnownPeers(peers_file, swarm_tag(protocol.endpoint.membership))
        self.reachability = Reachability(protocol)
        self.seen_as = ""
        """The host that others see this peer's packets come from; nothing before any has told."""
        self.on_rejoined: Callable[[], None] = lambda: None
        """Called when this peer was away and is back."""
        self._has_warned_of_clocks = False

    async def join(self) -> int:
        """Become known to the swarm; how many peers answered.

        When addresses were given, the settings are strict and there is nobody to join by: UsageError if their
        clocks are why, else PeerUnreachable or PeerRefused. Who was given its own address may be the first.
        """
        known = self.known.load()
        met = await self._meet([Peer(address) for address in self.addresses])
        if not met.contacts and known:
            if self.addresses:
                log.warning("No address to join answers; trying %d peers of last time.", len(known))
            await self._meet(known, met)
        if not met.contacts and self.addresses:
            self._complain(met)
        self._warn_of_clocks(met)
        return len(met.contacts)

    async def rejoin(self) -> int:
        """Meet the swarm again, after being away or alone; how many peers answered."""
        met = await self._meet([*(Peer(address) for address in self.addresses), *self.known.peers])
        self._warn_of_clocks(met)
        self.on_rejoined()
        return len(met.contacts)

    def remember(self) -> None:
        """Write down who is there, for the next time."""
        self.known.remember(contact.peer for contact in self._protocol.table.contacts())
        self.known.save()

    async def _meet(self, peers: Sequence[Peer], met: JoinAttempt | None = None) -> JoinAttempt:
        """Ping peers, then look for this peer's own id, which makes its neighbours known both ways."""
        protocol = self._protocol
        met = met or JoinAttempt(protocol)
        await met.ask(peers)
        self.seen_as = met.seen_as or self.seen_as
        if met.contacts:
            await self.reachability.check(met.contacts)
            lookup = Lookup(protocol.peer_id.digest, LookupKind.PEERS, protocol.settings.beam)
            await look_up(protocol, [lookup], protocol.call_deadline(4), seeds=met.contacts)
            await self._fill_gaps(protocol.call_deadline(4))
            await self._hear_of_others(protocol.call_deadline())
            if self.reachability.rests_on_one_report:
                others = [one for one in protocol.table.contacts() if one not in met.contacts]
                await self.reachability.check(others)
        return met

    async def _fill_gaps(self, deadline: Deadline) -> None:
        """Meet somebody in every part of the swarm (Kademlia, section 2.3): look-ups of others depend on it.

        The parts are those that differ from this peer's id in the first bit, in the second and not in the
        first, and so on down to where its nearest neighbour is.
        """
        own, table = self._protocol.number, self._protocol.table
        shared_bits = {ID_BITS - (contact.number ^ own).bit_length(): None for contact in table.contacts()}
        gaps = [bits for bits in range(max(shared_bits, default=0)) if bits not in shared_bits]
        lookups = []
        for bits in gaps:
            below = ID_BITS - bits - 1
            number = (own >> below ^ 1) << below | self._protocol.random.getrandbits(below)
            lookups.append(Lookup(number.to_bytes(ID_BYTES), LookupKind.PEERS, 1))
        await look_up(self._protocol, lookups, deadline)

    async def _hear_of_others(self, deadline: Deadline) -> None:
        """Be told of peers everywhere by a few that have been met, so that look-ups begin near their end.

        Those told of are met when a look-up needs them.
        """
        protocol, random = self._protocol, self._protocol.random
        contacts = protocol.table.contacts()
        wants = [Want(random.randbytes(ID_BYTES), LookupKind.PEERS) for _ in range(_NUM_PLACES)]
        tellers = random.sample(contacts, min(len(contacts), _NUM_TELLERS))
        answers = await fanout([protocol.call_find(teller, wants) for teller in tellers], deadline)
        for teller, found in zip(tellers, answers, strict=True):
            if isinstance(found, Found):
                for other in protocol.read_contacts(found.contacts, teller.peer.address):
                    if other is not None:
                        protocol.table.on_heard_of(other)

    def _warn_of_clocks(self, met: JoinAttempt) -> None:
        if met.wrong_clock is not None and not self._has_warned_of_clocks:
            self._has_warned_of_clocks = True
            is_strict = self._protocol.settings.is_strict
            follows = "That peer is left out" if is_strict else "Records may be lost"
            log.warning("%s %s: %s", met.wrong_clock.what, follows, met.wrong_clock.cause)

    def _complain(self, met: JoinAttempt) -> None:
        """Say why there is nobody to join by, unless this peer is the first of a swarm."""
        if met.is_first:
            log.info("Nobody but this peer answers at the addresses to join: a swarm begins here.")
            return
        refusal = met.refusals[0] if met.refusals else None
        error: ShoalError = unreachable(
            self._protocol,
            f"Nobody answers at {', '.join(map(str, self.addresses))}.",
            (refusal.cause or refusal.what) if refusal is not None else "",
            self.addresses[0],
        )
        if met.wrong_clock is not None:
            error = met.wrong_clock
        elif isinstance(refusal, PeerRefused):
            error = refusal
        if self._protocol.settings.is_strict:
            raise error
        log.warning("%s It is tried again every %g s.", error, self._protocol.settings.check_s)


def unreachable(protocol: DHTProtocol, what: str, cause: str, address: Address) -> PeerUnreachable:
    """The error of a peer that has found nobody at an address."""
    secret = " --secret-file FILE" if protocol.endpoint.membership is not None else ""
    next_step = f"shoal doctor --join {address}{secret} looks at the way there and back."
    return PeerUnreachable(what, cause=cause, next_step=next_step)


# --- who answers at addresses that this peer was given, and why the others are none to join by ---


async def first_ping(protocol: DHTProtocol, peer: Peer) -> Answered:
    """Ping a peer for the first time; PeerRefused tells of one that has no DHT."""
    try:
        return await protocol.call_ping(peer)
    except PeerRefused as error:
        if "has no method" not in error.what:
            raise
        raise PeerRefused(
            f"At {peer.address} is a Shoal peer without a DHT.",
            peer=error.peer,
            cause="`shoal doctor --serve` runs there, or a program that opens no DHT.",
            next_step="join a peer that `shoal dht` runs, or a program's `shoal.DHT`.",
        ) from error


class JoinAttempt:
    """Pings peers to join by, and knows what came of it."""

    def __init__(self, protocol: DHTProtocol) -> None:
        self.contacts: list[Contact] = []
        """Peers to join by, each once."""
        self.refusals: list[ShoalError] = []
        """Why the other addresses are none to join by."""
        self.wrong_clock: UsageError | None = None
        """Of the first whose clock differs too much."""
        self._protocol = protocol
        self._is_here = False
        """Whether this peer itself is at one of them."""
        self._hosts: dict[str, int] = {}
        """Where its packets come from, and how many of the contacts say so."""

    @property
    def seen_as(self) -> str:
        """The host that most of them see this peer at, of several the first named."""
        return max(self._hosts, key=lambda host: self._hosts[host], default="")

    @property
    def is_first(self) -> bool:
        """Whether this peer is one of those asked, and the only one that is there."""
        silences = (DeadlineExceeded, PeerUnreachable)
        has_others = self.wrong_clock or not all(isinstance(one, silences) for one in self.refusals)
        return self._is_here and not has_others

    async def ask(self, peers: Sequence[Peer]) -> None:
        """Ping peers, a few at once, until enough of them have answered."""

        def is_enough(outcomes: Sequence[Answered | Exception]) -> bool:
            return sum(isinstance(one, Answered) and self._is_welcome(one) for one in outcomes) >= _ENOUGH

        for start in range(0, len(peers), _AT_ONCE):
            outcomes = await fanout(
                [first_ping(self._protocol, peer) for peer in peers[start : start + _AT_ONCE]],
                self._protocol.call_deadline(1.1),
                is_enough=is_enough,
            )
            for outcome in outcomes:
                if isinstance(outcome, Answered):
                    self._note(outcome)
                elif isinstance(outcome, ShoalError):
                    self.refusals.append(outcome)
                else:
                    raise outcome
            if len(self.contacts) >= _ENOUGH:
                break

    def _note(self, answered: Answered) -> None:
        """Note who has answered, and what it says."""
        peer, limit_s = answered.peer, self._protocol.settings.max_clock_gap_s
        if peer.id == self._protocol.peer_id:
            if self._is_itself(peer):
                self._is_here = True
            else:
                self.refusals.append(
                    PeerRefused(
                        f"{peer.address} has the identity of this peer.",
                        peer=peer,
                        cause="both use the same identity file, or copies of it.",
                        next_step="give one of them another: --identity-file, or SHOAL_STATE for each.",
                    )
                )
            return
        if (gap_s := _clock_gap_s(answered)) > limit_s:
            self.wrong_clock = self.wrong_clock or UsageError(
                f"The clock of {peer} and this machine's are {gap_s:.1f} s apart.",
                cause=f"records expire by the wall clock; peers must agree on it within {limit_s:g} s.",
                next_step="set both clocks, for example with NTP.",
            )
        if self._is_welcome(answered) and all(one.id != peer.id for one in self.contacts):
            self.contacts.append(self._protocol.book.of(peer))
            with contextlib.suppress(UsageError):  # nonsense
                host = Address.parse(answered.seen_as).host
                self._hosts[host] = self._hosts.get(host, 0) + 1

    def _is_welcome(self, answered: Answered) -> bool:
        """Whether it is somebody else, with a clock that is right as far as that matters here."""
        settings = self._protocol.settings
        is_timely = _clock_gap_s(answered) <= settings.max_clock_gap_s or not settings.is_strict
        return is_timely and answered.peer.id != self._protocol.peer_id

    def _is_itself(self, peer: Peer) -> bool:
        """Whether it is this very peer, at whichever address: then both ends of the session are here."""
        sessions = self._protocol.endpoint.datagrams.sessions
        return any(session.their_id in sessions for session in sessions.values() if session.peer == peer)


def _clock_gap_s(answered: Answered) -> float:
    """How far its clock and this machine's are apart at least."""
    return abs(answered.clock_gap_s) - answered.round_trip_s / 2


# --- whether others can call this peer: some are asked to try, from a port that it has never talked to ---

_DIAL_BACK_S = 2.0
_MOST_ASKED = 4
_NEEDED = 2  # peers that say the same: one alone may be mistaken, or lie
_NOBODY = ("silent", "refused")


class Reachability:
    """What others say of this peer's port, and what it has made of that.

    A peer that cannot be called takes part as a client, and serves again once somebody has reached it.
    """

    def __init__(self, protocol: DHTProtocol) -> None:
        self._protocol = protocol
        self._is_unreachable = False
        self.rests_on_one_report = False
        """Whether a single peer's report has made this one a client, there being nobody else to ask then."""

    async def check(self, contacts: Sequence[Contact]) -> None:
        """Ask some of these in turn, until one has reached this peer or enough have not.

        Who cannot tell leaves it as it is, and a client by choice stays one.
        """
        protocol = self._protocol
        if protocol.endpoint.network.is_simulated or not protocol.settings.checks_reach:
            return
        if protocol.is_client and not self._is_unreachable:
            return
        far = [each for each in contacts if not is_loopback(each.peer.address.host)]
        in_vain: list[Contact] = []
        for contact in far[:_MOST_ASKED]:
            is_reached = await _is_dialed_back(protocol, contact)
            if is_reached:
                self._serve()
                return
            if is_reached is False:
                in_vain.append(contact)
            if len(in_vain) == _NEEDED:
                break
        if in_vain and len(in_vain) == min(_NEEDED, len(far)):
            self._be_client(in_vain)

    async def check_again(self, contact: Contact) -> None:
        """Ask somebody, if this peer is a client because it could not be called."""
        if self._is_unreachable:
            await self.check([contact])

    def _be_client(self, in_vain: Sequence[Contact]) -> None:
        self.rests_on_one_report = len(in_vain) < _NEEDED and (
            self.rests_on_one_report or not self._is_unreachable
        )
        if self._is_unreachable:
            return
        self._is_unreachable = True
        self._protocol.is_client = True
        log.warning(
            "Others cannot call this peer at UDP port %d: it takes part as a client, and stores nothing for "
            "others. Likely cause: a router or firewall lets no strangers in. Try: shoal doctor --join %s",
            self._protocol.endpoint.addresses[0].port,
            in_vain[0].peer.address,
        )

    def _serve(self) -> None:
        if self._is_unreachable:
            self._is_unreachable = self.rests_on_one_report = self._protocol.is_client = False
            log.warning("Others can call this peer again: it is a client no more.")


async def _is_dialed_back(protocol: DHTProtocol, contact: Contact) -> bool | None:
    """Whether the peer's packets arrive; None when it does not say."""
    wish = DialBack(protocol.endpoint.addresses[0].port, ("udp",), _DIAL_BACK_S)
    try:
        reply = await protocol.endpoint.datagrams.call(
            contact.peer, DIAL_BACK, wish, deadline=Deadline.after(2 * _DIAL_BACK_S)
        )
        (attempt,) = read_answer(reply, DialedBack, DIAL_BACK).attempts
    except (ShoalError, ValueError):  # too busy, most likely
        return None
    return True if attempt.outcome == "ok" else False if attempt.outcome in _NOBODY else None


# --- a swarm that fell apart: halves that share a bootstrap peer find each other again ---

_MOST_PATIENT = 8
"""Times `check_s`: how seldom is asked while all is well, so that a bootstrap peer serves a large swarm."""


class SplitCheck:
    """Asks one address at a time who is nearest to this peer, seldom as long as there is nothing new.

    Whoever they name and this peer has never met belongs to another half, or has only just come.
    """

    def __init__(self, protocol: DHTProtocol, joining: Joining) -> None:
        self._protocol = protocol
        self._joining = joining
        self._next_s = -math.inf
        self._wait_s = protocol.settings.check_s
        self._turn = 0
        self.num_found = 0
        """Times that another half was found."""

    def check(self) -> Coroutine[Any, Any, None] | None:
        """What there is to do now."""
        now_s = self._protocol.now_s()
        if self._next_s == -math.inf:  # right after joining there is nothing to be learnt
            self._put_off(now_s)
        if now_s < self._next_s:
            return None
        self._put_off(now_s)
        self._turn += 1
        addresses = self._addresses()
        return self._ask(addresses[self._turn % len(addresses)]) if addresses else None

    def hurry(self) -> None:
        """Something happened: ask as often as at first."""
        self._wait_s = self._protocol.settings.check_s
        self._next_s = -math.inf

    def _put_off(self, now_s: float) -> None:
        self._next_s = now_s + self._wait_s * self._protocol.random.uniform(0.75, 1.25)

    def _addresses(self) -> list[Address]:
        """Join addresses, and of peers known before those that are known no more."""
        here = dict.fromkeys(self._protocol.endpoint.addresses)
        met = dict.fromkeys(contact.peer.address for contact in self._protocol.table.contacts())
        before = [peer.address for peer in self._joining.known.peers if peer.address not in met]
        return [each for each in dict.fromkeys((*self._joining.addresses, *before)) if each not in here]

    async def _ask(self, address: Address) -> None:
        protocol, own, check_s = self._protocol, self._protocol.number, self._protocol.settings.check_s
        try:
            teller = (await first_ping(protocol, Peer(address))).peer
            if teller.id == protocol.peer_id:
                return
            contact = protocol.book.of(teller)
            found = await protocol.call_find(contact, [Want(protocol.peer_id.digest, LookupKind.PEERS)])
        except ShoalError as error:
            log.debug("%s does not tell who is near: %s", address, error)
            self._wait_s = check_s
            return
        await self._joining.reachability.check_again(contact)
        told = named(protocol.read_contacts(found.contacts, teller.address), found.findings[0].near)
        strangers = [each for each in told if each not in protocol.table]
        # whoever is nearer than the nearest contact would have met this peer when it came
        nearest = protocol.table.nearest(own, 1, now_s=protocol.now_s())
        reach = nearest[0].number ^ own if nearest else 1 << ID_BITS
        pings = [protocol.call_ping(each.peer) for each in strangers]
        answers = await fanout(pings, Deadline.never(), limit=_AT_ONCE)
        met = [each for each, answer in zip(strangers, answers, strict=True) if isinstance(answer, Answered)]
        if not met:
            self._wait_s = min(2 * self._wait_s, _MOST_PATIENT * check_s)
            return
        self._wait_s = check_s
        if min(each.number ^ own for each in met) < reach:
            self.num_found += 1
            level = log.warning if self.num_found == 1 else log.debug
            level("This swarm was split: %s knows %d near peers that this one had not met.", teller, len(met))
            await self._joining.rejoin()


# --- the peers that were there last time ---

MAX_PEERS = 64
_MAX_FILE_BYTES = 1 << 20
_SCHEMA = "shoal known peers"


class _Line(msgspec.Struct, frozen=True):
    id: str
    address: str


class _Document(msgspec.Struct, frozen=True):
    schema: str
    swarm: str
    peers: list[_Line]


def swarm_tag(membership: Membership | None) -> str:
    """What tells one swarm from another in the file; says nothing of its secret."""
    return "open" if membership is None else membership.secret.derive("known peers", size_bytes=8).hex()


class KnownPeers:
    """The last known peers of one swarm, newest first; without a path they are kept in memory alone.

    A file that cannot be read, or belongs to another swarm, counts as empty; one that cannot be written is
    complained of once.
    """

    def __init__(self, path: Path | None = None, swarm: str = "open") -> None:
        self.path = path
        self.peers: list[Peer] = []
        self._swarm = swarm
        self._saved: list[str] = []
        self._has_complained = False

    def load(self) -> list[Peer]:
        """Read the file, if there is one."""
        if self.path is None or not self.path.exists():
            return self.peers
        try:
            if self.path.stat().st_size > _MAX_FILE_BYTES:
                raise ValueError("it is too large")
            document = decode_json(self.path.read_bytes(), _Document)
            if document.schema != _SCHEMA:
                raise ValueError("it is something else")
            found = [Peer(Address.parse(line.address), PeerId.parse(line.id)) for line in document.peers]
        except (OSError, UsageError, ValueError) as error:  # msgspec's errors are ValueErrors
            log.warning("The known peers in %s cannot be read and are left out: %s", self.path, error)
            return self.peers
        if document.swarm != self._swarm:
            log.info("The known peers in %s are of another swarm and are left out.", self.path)
            return self.peers
        self._saved = _names(found)
        self.remember(peer for peer in found if peer.address.port)
        return self.peers

    def remember(self, peers: Iterable[Peer]) -> None:
        """Put these first, or of too many every so-manieth; the oldest that were known are forgotten."""
        newest = list(peers)
        step = -(-len(newest) // MAX_PEERS) or 1
        by_address: dict[Address, Peer] = {}
        for peer in (*newest[::step], *self.peers):
            if peer.id is not None:
                by_address.setdefault(peer.address, peer)
        self.peers = list(by_address.values())[:MAX_PEERS]

    def save(self) -> None:
        """Write the file if other peers are known than it holds."""
        if self.path is None or not self.peers or _names(self.peers) == self._saved:
            return
        lines = [_Line(str(peer.id), str(peer.address)) for peer in self.peers]
        content = msgspec.json.format(msgspec.json.encode(_Document(_SCHEMA, self._swarm, lines)), indent=1)
        try:
            write_atomically(self.path, content + b"\n")
        except ReportError as error:
            if not self._has_complained:
                log.warning("The known peers are not kept: %s", error)
            self._has_complained = True
        else:
            self._saved = _names(self.peers)


def _names(peers: Iterable[Peer]) -> list[str]:
    return sorted(map(str, peers))
