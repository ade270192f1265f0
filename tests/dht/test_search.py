"""Look-ups over peers that are played by a model, in virtual time."""

import asyncio
import itertools
import random

import pytest

from dht.made_contacts import by_distance, made_contact
from shoal.core import Deadline, PeerUnreachable, run_virtual
from shoal.dht.records import PLAIN, Slot
from shoal.dht.search import Lookup, Search
from shoal.dht.wire import (
    ANYWHERE,
    MAX_CONTACTS,
    MAX_WANTS,
    REACH_SHIFT,
    Finding,
    Found,
    LookupKind,
    State,
    pack_coordinates,
)

SLOW_S = 0.2
DEAD_S = 3.0
KEY = bytes.fromhex("8000000000000000000000000000000000000000")


def contacts_at(*distances, key=KEY):
    """Contacts so far from the key, in their first bytes."""
    return [made_contact(int.from_bytes(key) ^ (distance << 136)) for distance in distances]


def slot_of(text):
    return Slot(PLAIN, text.encode(), 1.0)


class Peers:
    """The peers that a search asks. Everybody knows everybody, and holds what it is told to."""

    def __init__(self, contacts):
        self.contacts = list(contacts)
        self.held = {}
        """Findings by contact and key."""
        self.told = {}
        """Who is told by whom, in place of everybody."""
        self.dead = []
        self.delays_s = {}
        self.asked = []
        """Who was asked when, for what."""
        self.backed_off = []
        self.checked = []
        self.num_witnesses = 0
        self.rest = []

    def hold(self, contact, text, key=KEY):
        self.held[contact, key] = Finding(State.HERE, b"", [slot_of(text)])

    async def call_find(self, contact, wants):
        self.asked.append((asyncio.get_running_loop().time(), contact, list(wants)))
        if contact in self.dead:
            await asyncio.sleep(DEAD_S)
            raise PeerUnreachable("it is dead.")
        await asyncio.sleep(self.delays_s.get(contact, 0.01))
        contacts, findings = [], []
        for want in wants:
            near = self._near(contact, want, contacts)
            found = self.held.get((contact, want.key)) or Finding(State.NOTHING, b"")
            if callable(found):
                found = found(want)
            found = Finding(found.state, near, found.slots, found.coordinates)
            findings.append(found)
        return Found(contacts, findings)

    def _near(self, teller, want, contacts):
        number = int.from_bytes(want.key)
        others = [other for other in self.told.get(teller, self.contacts) if other != teller]
        near = [
            other
            for other in by_distance(others, number)[:MAX_CONTACTS]
            if (other.number ^ number) >> REACH_SHIFT < want.reach
        ]
        start = len(contacts)
        contacts += near
        return bytes(range(start, start + len(near)))

    def believed(self, key, slots):
        return [slot for slot in slots if slot.value != b"a lie"]

    def read_contacts(self, packed, teller):
        return [None if contact in self.backed_off else contact for contact in packed]

    def is_backed_off(self, contact):
        return contact in self.backed_off

    def witnesses(self, number):
        self.num_witnesses += 1
        return self.rest

    def check_soon(self, contact):
        self.checked.append(contact)

    def slow_s(self):
        return SLOW_S

    # --- what a test asks ---

    def search(self, *lookups, seeds=None, parallel=3, timeout_s=30.0):
        """Run lookups that begin with these peers; how long it took."""

        async def main():
            loop = asyncio.get_running_loop()
            for lookup in lookups:
                begin = by_distance(self.contacts if seeds is None else seeds, lookup.number)
                lookup.begin(begin[: max(8, lookup.width + 5)])
            await Search(self, parallel).run(lookups, Deadline.after(timeout_s))
            return loop.time()

        return run_virtual(main())

    def num_asked(self, contact):
        return sum(other == contact for _, other, _ in self.asked)


def values_of(lookup):
    return [slot.value.decode() for _, slots in lookup.replicas for slot in slots]


def near_of(lookup, limit):
    return [contact for _, contact in lookup.near[:limit]]


# --- whom it asks ---


def test_it_goes_from_peer_to_peer_to_the_nearest():
    """Each knows only the one that is half as far."""
    line = contacts_at(*(1 << bit for bit in range(15, -1, -1)))
    peers = Peers(line)
    peers.told = {teller: [nearer] for teller, nearer in itertools.pairwise(line)}
    peers.told[line[-1]] = []
    lookup = Lookup(KEY, LookupKind.PEERS, 3)
    peers.search(lookup, seeds=line[:1])
    assert near_of(lookup, 3) == line[:-4:-1]
    assert lookup.hops == len(line)
    assert [contact for _, contact, _ in peers.asked] == line


def test_it_ends_when_enough_of_the_nearest_have_answered():
    peers = Peers(contacts_at(*range(1, 41)))
    lookup = Lookup(KEY, LookupKind.VALUE, 8)
    peers.search(lookup)
    assert lookup.is_done
    assert not lookup.replicas
    assert {contact for _, contact, _ in peers.asked} == set(peers.contacts[:8])


def test_it_asks_several_at_once_but_never_more():
    peers = Peers(contacts_at(*range(1, 41)))
    lookup = Lookup(KEY, LookupKind.VALUE, 8)
    lookup.first_parallel = 3
    peers.search(lookup, parallel=3)
    times = [time_s for time_s, _, _ in peers.asked]
    assert max(times.count(time_s) for time_s in times) == 3
    assert times.count(0.0) == 3


def test_the_first_value_ends_it():
    peers = Peers(contacts_at(*range(1, 41)))
    peers.hold(peers.contacts[2], "third")
    peers.hold(peers.contacts[5], "sixth")
    lookup = Lookup(KEY, LookupKind.VALUE, 8)
    peers.search(lookup, parallel=1)
    assert values_of(lookup) == ["third"]
    assert len(peers.asked) == 3
    assert lookup.passed_by() == peers.contacts[:2]


def test_the_latest_is_looked_for_at_all_that_count():
    peers = Peers(contacts_at(*range(1, 41)))
    for at in (1, 4, 6, 20):
        peers.hold(peers.contacts[at], f"value {at}")
    lookup = Lookup(KEY, LookupKind.LATEST, 8)
    peers.search(lookup)
    assert sorted(values_of(lookup)) == ["value 1", "value 4", "value 6"]


def test_what_is_not_believed_is_no_value():
    peers = Peers(contacts_at(*range(1, 41)))
    peers.hold(peers.contacts[0], "a lie")
    peers.hold(peers.contacts[3], "true")
    lookup = Lookup(KEY, LookupKind.VALUE, 8)
    peers.search(lookup)
    assert values_of(lookup) == ["true"]


def test_nobody_is_told_of_whom_it_has_no_use_for():
    peers = Peers(contacts_at(*range(1, 41)))
    lookup = Lookup(KEY, LookupKind.VALUE, 8)
    peers.search(lookup)
    reaches = [want.reach for _, _, wants in peers.asked for want in wants]
    tenth = (peers.contacts[9].number ^ lookup.number) >> REACH_SHIFT
    assert all(tenth < reach <= ANYWHERE for reach in reaches)
    assert reaches[-1] == tenth + 1


def test_nothing_to_begin_with_ends_at_once():
    peers = Peers([])
    lookup = Lookup(KEY, LookupKind.VALUE, 8)
    assert peers.search(lookup) == 0.0
    assert lookup.is_done


# --- peers that do not answer ---


def test_a_slow_peer_is_not_waited_for():
    peers = Peers(contacts_at(*range(1, 21)))
    peers.dead = peers.contacts[:2]
    peers.hold(peers.contacts[4], "here")
    lookup = Lookup(KEY, LookupKind.VALUE, 8)
    assert peers.search(lookup) < 3 * SLOW_S
    assert values_of(lookup) == ["here"]
    assert peers.checked == peers.dead


def test_a_slow_peers_answer_counts_when_it_comes():
    peers = Peers(contacts_at(1, 2, 3))
    peers.delays_s[peers.contacts[0]] = 1.5
    peers.hold(peers.contacts[0], "late")
    lookup = Lookup(KEY, LookupKind.VALUE, 3)
    assert peers.search(lookup) == pytest.approx(1.5)
    assert values_of(lookup) == ["late"]


def test_enough_that_answer_are_enough_though_some_are_slow():
    peers = Peers(contacts_at(*range(1, 21)))
    peers.dead = peers.contacts[1:4]
    lookup = Lookup(KEY, LookupKind.PEERS, 8)
    assert peers.search(lookup) < DEAD_S
    assert [contact for contact in near_of(lookup, 11) if not lookup.is_slow(contact)] == [
        peers.contacts[0],
        *peers.contacts[4:11],
    ]


def test_those_that_fail_are_gone_and_others_take_their_places():
    peers = Peers(contacts_at(*range(1, 9)))
    peers.dead = peers.contacts[:3]
    lookup = Lookup(KEY, LookupKind.PEERS, 8)
    assert DEAD_S <= peers.search(lookup) < DEAD_S + 3 * SLOW_S
    assert near_of(lookup, 8) == peers.contacts[3:]
    assert all(peers.num_asked(contact) == 1 for contact in peers.contacts)


def test_who_is_backed_off_is_not_asked():
    peers = Peers(contacts_at(*range(1, 9)))
    peers.backed_off = peers.contacts[:4]
    lookup = Lookup(KEY, LookupKind.PEERS, 8)
    peers.search(lookup)
    assert near_of(lookup, 8) == peers.contacts[4:]
    assert not any(peers.num_asked(contact) for contact in peers.backed_off)


def test_it_ends_with_its_time():
    peers = Peers(contacts_at(*range(1, 9)))
    peers.dead = peers.contacts
    lookup = Lookup(KEY, LookupKind.VALUE, 8)
    assert peers.search(lookup, timeout_s=1.0) == pytest.approx(1.0)
    assert not lookup.is_done


# --- peers that lie ---


def test_who_was_asked_for_peers_nearer_than_invented_ones_is_asked_again():
    honest, holder, *liars = contacts_at(*range(100, 108)), *contacts_at(50, 90, 91)
    invented = contacts_at(*range(1, 17))
    peers = Peers([*honest, holder, *liars])
    peers.told = {liars[0]: invented[:8], liars[1]: invented[8:]}
    peers.dead = invented
    peers.hold(holder, "here")
    lookup = Lookup(KEY, LookupKind.VALUE, 8)
    took_s = peers.search(lookup, seeds=[*liars, *honest], parallel=1)
    assert values_of(lookup) == ["here"]
    assert took_s < 30.0


def test_many_liars_cannot_push_honest_peers_out():
    """They all answer before any honest peer was asked."""
    honest, liars = contacts_at(*range(1000, 1008)), contacts_at(*range(500, 506))
    peers = Peers([*honest, *liars])
    for index, liar in enumerate(liars):
        peers.told[liar] = contacts_at(*range(1 + 20 * index, 9 + 20 * index))
        peers.dead += peers.told[liar]
    peers.hold(honest[1], "here")
    lookup = Lookup(KEY, LookupKind.VALUE, 8)
    lookup.first_parallel = 6
    peers.search(lookup, parallel=6)
    assert values_of(lookup) == ["here"]


def test_one_answer_names_no_more_peers_than_an_honest_one():
    liar, far = contacts_at(100, 50_000)
    peers = Peers([liar, far])
    many = contacts_at(*range(1, 60))

    async def call_find(contact, wants):
        peers.asked.append((0.0, contact, wants))
        near = bytes(range(59)) * 1000 if contact == liar else b""
        return Found(many if contact == liar else [], [Finding(State.NOTHING, near) for _ in wants])

    peers.call_find = call_find
    lookup = Lookup(KEY, LookupKind.PEERS, 3)
    peers.search(lookup)
    assert len(lookup.near) == 2 + MAX_CONTACTS


def test_indexes_beyond_the_list_name_nobody():
    peers = Peers(contacts_at(1, 2))

    async def call_find(contact, wants):
        return Found(peers.contacts[:1], [Finding(77, bytes((0, 1, 200, 255))) for _ in wants])

    peers.call_find = call_find
    lookup = Lookup(KEY, LookupKind.VALUE, 8)
    peers.search(lookup)
    assert lookup.is_done
    assert near_of(lookup, 8) == peers.contacts


def test_a_peer_named_with_a_wrong_address_does_not_stand_for_itself():
    right, wrong = made_contact(3, "10.0.0.1"), made_contact(3, "10.6.6.6")
    for contacts in ([right, wrong], [wrong, right]):
        lookup = Lookup(KEY, LookupKind.PEERS, 8)
        lookup.begin(contacts)
        for contact in contacts:
            lookup.on_asked(contact)
        lookup.on_failed(wrong)
        assert near_of(lookup, 8) == [right]


def test_others_are_asked_before_it_ends_with_nothing_where_somebody_may_have_lied():
    """All peers near the key that it knows of are liars."""
    liars, invented = contacts_at(*range(10, 20)), contacts_at(*range(1, 9))
    witness, holder = contacts_at(60_000, 9)
    peers = Peers([*liars, witness, holder])
    peers.told = dict.fromkeys(liars, invented)
    peers.dead = invented
    peers.rest = [witness]
    peers.hold(holder, "here")
    lookup = Lookup(KEY, LookupKind.VALUE, 8)
    peers.search(lookup, seeds=liars)
    assert values_of(lookup) == ["here"]
    assert peers.num_witnesses == 1


def test_others_are_asked_until_somebody_answers():
    """All whom it begins with are gone, and so are the next whom the table names."""
    gone, there = contacts_at(*range(1, 31)), contacts_at(40, 41)
    peers = Peers([*gone, *there])
    peers.dead = gone
    peers.hold(there[0], "here")
    left = iter([gone[10:15], gone[15:20], there])
    peers.witnesses = lambda number: next(left)
    lookup = Lookup(KEY, LookupKind.VALUE, 8)
    assert peers.search(lookup, seeds=gone[:10]) < 4 * DEAD_S
    assert values_of(lookup) == ["here"]


def test_it_ends_where_nobody_is_left():
    peers = Peers(contacts_at(*range(1, 9)))
    peers.dead = peers.contacts
    peers.rest = peers.contacts[:2]
    lookup = Lookup(KEY, LookupKind.VALUE, 8)
    peers.search(lookup)
    assert lookup.is_done
    assert not lookup.answered()


def test_nobody_else_is_asked_where_all_answer():
    peers = Peers(contacts_at(*range(1, 41)))
    peers.rest = peers.contacts[-1:]
    peers.search(Lookup(KEY, LookupKind.VALUE, 8))
    assert peers.num_witnesses == 0


# --- batches ---


def drawn_keys(num):
    chance = random.Random(num)
    return [chance.randbytes(20) for _ in range(num)]


def test_keys_that_go_to_the_same_peer_share_its_requests():
    peers = Peers(contacts_at(1, 2, 3))
    lookups = [Lookup(key, LookupKind.VALUE, 3) for key in drawn_keys(100)]
    for lookup in lookups:
        for contact in peers.contacts:
            peers.hold(contact, lookup.key.hex(), lookup.key)
    peers.search(*lookups, parallel=1)
    assert [values_of(lookup) for lookup in lookups] == [[lookup.key.hex()] for lookup in lookups]
    assert sum(len(wants) for _, _, wants in peers.asked) == 100
    assert max(len(wants) for _, _, wants in peers.asked) <= MAX_WANTS
    assert len(peers.asked) <= 3 + 100 // MAX_WANTS


def test_a_batch_finds_what_each_key_alone_finds():
    chance = random.Random(1)
    contacts = [made_contact(chance.getrandbits(160)) for _ in range(60)]
    keys = drawn_keys(80)
    peers = Peers(contacts)
    for index, key in enumerate(keys[:60]):
        for contact in by_distance(contacts, int.from_bytes(key))[:5]:
            peers.hold(contact, str(index), key)
    together = [Lookup(key, LookupKind.LATEST, 8) for key in keys]
    peers.search(*together)
    for index, lookup in enumerate(together):
        alone = Lookup(lookup.key, LookupKind.LATEST, 8)
        peers.search(alone)
        assert (
            sorted(values_of(lookup)) == sorted(values_of(alone)) == [str(index)] * (5 if index < 60 else 0)
        )
        assert near_of(lookup, 8) == by_distance(contacts, lookup.number)[:8]


def test_one_dead_peer_does_not_hold_up_a_batch():
    contacts = [made_contact(random.Random(2).getrandbits(160) ^ at << 150) for at in range(40)]
    peers = Peers(contacts)
    peers.dead = contacts[::5]
    lookups = [Lookup(key, LookupKind.VALUE, 8) for key in drawn_keys(50)]
    for lookup in lookups:
        live = [contact for contact in by_distance(contacts, lookup.number) if contact not in peers.dead]
        peers.hold(live[2], "here", lookup.key)
    assert peers.search(*lookups) < 1.0
    assert all(values_of(lookup) == ["here"] for lookup in lookups)


def test_what_is_too_large_is_asked_for_alone():
    peers = Peers(contacts_at(1))
    keys = drawn_keys(10)
    (contact,) = peers.contacts
    large = keys[3]
    requests = []

    def answer(want):
        requests.append(len(peers.asked[-1][2]))
        if requests[-1] > 1:
            return Finding(State.TOO_LARGE, b"")
        return Finding(State.HERE, b"", [slot_of("large")])

    for key in keys:
        peers.hold(contact, "small", key)
    peers.held[contact, large] = answer
    lookups = [Lookup(key, LookupKind.VALUE, 1) for key in keys]
    peers.search(*lookups)
    assert [values_of(lookup) for lookup in lookups] == [
        ["large"] if key == large else ["small"] for key in keys
    ]
    assert requests == [10, 1]


def test_who_always_says_too_large_is_asked_twice():
    peers = Peers(contacts_at(1, 2))
    liar, holder = peers.contacts
    peers.held[liar, KEY] = Finding(State.TOO_LARGE, b"")
    peers.hold(holder, "here")
    lookup = Lookup(KEY, LookupKind.VALUE, 2)
    peers.search(lookup, parallel=1)
    assert values_of(lookup) == ["here"]
    assert peers.num_asked(liar) == 2


# --- absence ---


def absent(peers, *contacts):
    for contact in contacts:
        peers.held[contact, KEY] = Finding(State.ABSENT, b"")


def test_markers_at_the_three_nearest_end_it():
    peers = Peers(contacts_at(*range(1, 21)))
    absent(peers, *peers.contacts[:3])
    lookup = Lookup(KEY, LookupKind.COORDINATES, 8)
    peers.search(lookup, parallel=1)
    assert lookup.is_done
    assert lookup.has_marker
    assert len(peers.asked) == 3


@pytest.mark.parametrize("at", range(3))
def test_one_of_them_that_was_told_of_something_overrides_the_others(at):
    peers = Peers(contacts_at(*range(1, 21)))
    absent(peers, *peers.contacts[:3])
    peers.held[peers.contacts[at], KEY] = Finding(State.HERE, b"", [], pack_coordinates([7]))
    lookup = Lookup(KEY, LookupKind.COORDINATES, 8)
    peers.search(lookup)
    assert lookup.coordinates == [7]
    assert not lookup.has_marker


def test_markers_elsewhere_hide_nothing():
    """Liars far from the key, and peers that a liar has told of an absence that is none."""
    peers = Peers(contacts_at(*range(1, 21)))
    absent(peers, *peers.contacts[:2], *peers.contacts[3:])
    peers.held[peers.contacts[2], KEY] = Finding(State.HERE, b"", [], pack_coordinates([7]))
    lookup = Lookup(KEY, LookupKind.COORDINATES, 8)
    peers.search(lookup, seeds=peers.contacts[5:])
    assert lookup.coordinates == [7]


def test_no_marker_hides_a_value():
    peers = Peers(contacts_at(*range(1, 21)))
    absent(peers, *peers.contacts[:7])
    peers.hold(peers.contacts[7], "here")
    for kind in (LookupKind.VALUE, LookupKind.LATEST):
        lookup = Lookup(KEY, kind, 8)
        peers.search(lookup)
        assert values_of(lookup) == ["here"]


# --- coordinates ---


def test_those_of_the_first_that_has_any_are_taken():
    coordinates = list(range(0, 5_000_000, 1000))
    peers = Peers(contacts_at(1, 2, 3, 4))
    peers.held[peers.contacts[1], KEY] = Finding(State.HERE, b"", [], pack_coordinates(coordinates))
    lookup = Lookup(KEY, LookupKind.COORDINATES, 4)
    peers.search(lookup, parallel=1)
    assert lookup.coordinates == coordinates
    assert peers.num_asked(peers.contacts[1]) == 1


@pytest.mark.parametrize(
    "packed",
    [b"\x80", b"\x00", b"\x91\x00", b"\x92\x01", b"\xff" * 800, pack_coordinates(range(300_000))],
    ids=["no list", "a number", "twice", "cut off", "nonsense", "too many"],
)
def test_what_are_no_coordinates_counts_as_no_answer(packed):
    peers = Peers(contacts_at(1, 2, 3))
    peers.held[peers.contacts[0], KEY] = Finding(State.HERE, b"", [], packed)
    peers.held[peers.contacts[1], KEY] = Finding(State.HERE, b"", [], pack_coordinates([1, 2]))
    lookup = Lookup(KEY, LookupKind.COORDINATES, 3)
    peers.search(lookup, parallel=1)
    assert lookup.coordinates == [1, 2]


@pytest.mark.parametrize("packed", [b"", b"\x90"])
def test_an_empty_list_hides_nothing(packed):
    peers = Peers(contacts_at(1, 2, 3))
    peers.held[peers.contacts[0], KEY] = Finding(State.HERE, b"", [], packed)
    peers.held[peers.contacts[1], KEY] = Finding(State.HERE, b"", [], pack_coordinates([1, 2]))
    lookup = Lookup(KEY, LookupKind.COORDINATES, 3)
    peers.search(lookup, parallel=1)
    assert lookup.coordinates == [1, 2]
