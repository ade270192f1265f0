"""What a peer does unasked: it keeps its table fresh, its records in their places, and itself in the swarm.

One task looks every few seconds whether anything is due; what takes time is done beside it, each kind of work
at most once at a time. Where records belong is `replication`'s, what a split looks like `join`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.core import Deadline, Scope, ShoalError, fanout
from shoal.core.ids import ID_BYTES
from shoal.core.rates import FailureBackoff
from shoal.dht.join import Joining, SplitCheck
from shoal.dht.protocol import DHTProtocol
from shoal.dht.replication import Replicator, Work
from shoal.dht.search import Lookup, find_records, look_up
from shoal.dht.wire import Contact, LookupKind

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""How often a peer looks whether there is anything to do."""
_JUMP_S = 10.0  # of the wall clock against the loop's: this machine slept, or its clock was set
_LATE_S = 30.0  # of a look: this process was stopped
_NEWCOMER_S = 1.0  # after meeting one: others may come with it
_PINGS_AT_ONCE = 8
_CONTACT_TURNS = 1.5  # of `refresh_s`, in which every contact is pinged: sessions with them stay
_STRANGER_TURNS = 0.25
_ALONE = "having nobody"
_BUCKET_TURNS = 20  # in `refresh_s`, so that not all buckets are refreshed at once


@dataclass(slots=True, eq=False)
class _Duty:
    """Something to be done again and again: `find` says what there is to do now, or does it at once."""

    every_s: float
    find: Callable[[], Work | None]
    next_s: float
    is_under_way: bool = False


class Upkeep:
    """The upkeep of one peer; `run` does the work, in a task of the DHT's own."""

    def __init__(self, protocol: DHTProtocol, joining: Joining) -> None:
        self._protocol = protocol
        self._joining = joining
        self._replicator = Replicator(protocol)
        self._splits = SplitCheck(protocol, joining)
        self._wake = asyncio.Event()
        self._is_waking = False
        """Whether a timer is to set it soon."""
        self._duties: list[_Duty] = []
        self._began_s = self._looked_s = 0.0
        self._was_stopped = False
        self._clock_gap_s = 0.0
        self._rejoining = FailureBackoff(LOOK_S, protocol.settings.check_s)
        """Attempts to join, having nobody, are made less and less often."""
        self._pinged = -1
        """The id of the contact that was pinged last in turn; others have theirs after it."""
        self.num_rejoins = 0

    async def run(self) -> None:
        """Look after everything, until cancelled."""
        loop = asyncio.get_running_loop()
        random = self._protocol.random
        self._wake = asyncio.Event()  # of this loop: a DHT may be opened again on another
        self._is_waking = False
        self._began_s = self._looked_s = loop.time()
        self._clock_gap_s = self._protocol.wall_s() - loop.time()
        self._duties = [
            _Duty(every_s, find, loop.time() + random.uniform(0.5, 1.0) * every_s)
            for every_s, find in self._all_duties()
        ]
        async with Scope("dht upkeep") as scope:
            while True:
                for duty in self._duties:
                    self._turn(duty, scope, loop.time())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S * random.uniform(0.9, 1.1)):
                        await self._wake.wait()
                if self._wake.is_set():
                    self._wake.clear()
                    self._is_waking = False
                self._was_stopped |= loop.time() - self._looked_s > LOOK_S + _LATE_S
                self._looked_s = loop.time()

    def on_new_peer(self, contact: Contact) -> None:
        """Somebody was met: records that belong to it are sent to it soon."""
        if len(self._protocol.records.storage) == 0:
            return
        self._replicator.on_met(contact)
        if not self._is_waking:
            self._is_waking = True
            asyncio.get_running_loop().call_later(_NEWCOMER_S, self._wake.set)

    def _all_duties(self) -> list[tuple[float, Callable[[], Work | None]]]:
        protocol, settings = self._protocol, self._protocol.settings
        return [
            (0.0, self._notice_absence),
            (0.0, self._refresh_cache),
            (0.0, lambda: self._ping(protocol.table.due_for_retry(protocol.now_s()))),  # they may be back
            (0.8 * LOOK_S, self._ping_in_turn),  # not at looks that a newcomer has brought forward
            (0.0, self._splits.check),
            (settings.refresh_s / _BUCKET_TURNS, self._refresh_bucket),
            (settings.check_s, self._tidy),
            # of records, of which a client has none
            (0.0, self._replicator.follow_neighbours),
            (settings.check_s, lambda: self._ping(self._replicator.other_holders())),  # some may be gone
            (settings.republish_s / 10, self._replicator.republish),
        ]

    def _turn(self, duty: _Duty, scope: Scope, now_s: float) -> None:
        if duty.is_under_way or now_s < duty.next_s:
            return
        duty.next_s = now_s + duty.every_s
        work = duty.find()
        if work is not None:
            duty.is_under_way = True
            scope.start_soon(self._do(duty, work), name="dht upkeep")

    async def _do(self, duty: _Duty, work: Work) -> None:
        try:
            await work
        except ShoalError as error:
            log.debug("The DHT's upkeep was kept from something: %s", error)
        finally:
            duty.is_under_way = False

    # --- being part of the swarm ---

    def _notice_absence(self) -> Work | None:
        """After a sleep of this machine or process, and when nobody is left, the swarm is to be met again."""
        now_s = self._protocol.now_s()
        gap_s = self._protocol.wall_s() - now_s
        was_away = abs(gap_s - self._clock_gap_s) > _JUMP_S or self._was_stopped
        self._clock_gap_s, self._was_stopped = gap_s, False
        if was_away:
            log.info("This peer was away: it joins the swarm again.")
            return self._rejoin()
        if len(self._protocol.table):
            self._rejoining.answered(_ALONE)
            return None
        has_addresses = self._joining.addresses or self._joining.known.peers
        if self._rejoining.is_paused(_ALONE, now_s) or not has_addresses:
            return None
        self._rejoining.failed(_ALONE, now_s)
        return self._rejoin()

    async def _rejoin(self) -> None:
        self.num_rejoins += 1
        self._splits.hurry()
        num_answered = await self._joining.rejoin()
        log.info("Joined the swarm again: %d peers answer.", num_answered)

    def _ping_in_turn(self) -> Work | None:
        """Every contact once in `refresh_s`, so that the table holds no dead for longer."""
        table = self._protocol.table
        share = len(table) * LOOK_S / self._protocol.settings.refresh_s
        num_due = int(share) + (self._protocol.random.random() < share % 1)
        if num_due == 0:
            return None
        contacts = table.contacts()
        later = [contact for contact in contacts if contact.number > self._pinged]
        chosen = [*later, *contacts][:num_due]
        self._pinged = chosen[-1].number
        return self._ping(chosen)

    def _ping(self, contacts: Sequence[Contact]) -> Work | None:
        """Ping peers; the table is told of those that do not answer."""
        if not contacts:
            return None
        work = [self._protocol.check(contact) for contact in contacts]
        return fanout(work, Deadline.never(), limit=_PINGS_AT_ONCE)

    def _refresh_bucket(self) -> Work | None:
        """Look up any id of a bucket in which nobody was sought for long."""
        protocol, now_s = self._protocol, self._protocol.now_s()
        settings = protocol.settings
        stale = protocol.table.stale_ranges(now_s, settings.refresh_s)
        if not stale or now_s < self._began_s + settings.refresh_s:
            return None
        key = protocol.random.choice(stale).to_bytes(ID_BYTES)
        lookup = Lookup(key, LookupKind.PEERS, settings.num_replicas)
        return look_up(protocol, [lookup], protocol.look_up_deadline())

    # --- what it holds ---

    def _refresh_cache(self) -> Work | None:
        """Fetch records again that are used, before they expire."""
        protocol = self._protocol
        before_s = protocol.settings.refresh_before_expiry_s + LOOK_S
        due = protocol.records.cache.due_for_refresh(protocol.wall_s(), before_s)
        if not due:
            return None
        return find_records(protocol, due, protocol.look_up_deadline(), latest=True)

    def _tidy(self) -> None:
        """Drop what is over, write down who is there, and end sessions that nobody uses.

        Those with strangers, or peers that are gone, end soon, those with contacts later.
        """
        protocol, records, wall_s = self._protocol, self._protocol.records, self._protocol.wall_s()
        records.storage.expire(wall_s)
        records.cache.expire(wall_s)
        self._joining.remember()
        datagrams, refresh_s = protocol.endpoint.datagrams, protocol.settings.refresh_s
        contacts = dict.fromkeys(contact.peer.address for contact in protocol.table.contacts())
        for session in tuple(datagrams.sessions.values()):
            turns = _CONTACT_TURNS if session.peer.address in contacts else _STRANGER_TURNS
            is_unused = protocol.now_s() - session.used_at_s > turns * refresh_s
            if session.is_established and not session.num_open and is_unused:
                datagrams.drop(session, "nothing was heard of it for a long time.")
