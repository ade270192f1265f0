"""What a peer answers, to askers that say whatever they like."""

import random

import msgspec
import pytest

from dht.signing import sign
from dht.worlds import client_of, identity_of, in_world, keep_at, send, send_find, send_slots, send_store
from shoal.core import Key, PeerBusy, PeerRefused
from shoal.dht.records import (
    PLAIN,
    Schema,
    Slot,
    Verdict,
    encode_subkey,
    encode_value,
    key_of,
    reserved,
    reserved_key,
)
from shoal.dht.settings import DHTSettings
from shoal.dht.wire import (
    ABOUT,
    FIND,
    MAX_CONTACTS,
    MAX_WANTS,
    PING,
    STORE,
    Find,
    Found,
    Item,
    LookupKind,
    Ping,
    Pong,
    State,
    Store,
    StoreAnswer,
    Want,
    number_of,
    pack_coordinates,
    reach_of,
)

KEY = key_of("name").digest
ALICE, MALLORY = identity_of("alice"), identity_of("mallory")


def slot(dht, value, lifetime_s=60.0, subkey=None):
    return Slot(PLAIN if subkey is None else encode_subkey(subkey), encode_value(value), dht.in_s(lifetime_s))


def signed(identity, dht, name, value, lifetime_s=60.0, subkey=None):
    plain = slot(dht, value, lifetime_s, subkey)
    return sign(identity, key_of(name).digest, plain.subkey, plain.value, plain.expires_at_s)


# --- who is there ---


def test_a_ping_tells_who_where_and_when():
    async def work(swarm, one, two):
        pong = msgspec.msgpack.decode(await send(one, two, PING, Ping(0)), type=Pong)
        assert pong == Pong(two.peer_id.digest, str(one.peer.address), two.wall_s())

    in_world(work, 2)


def test_only_who_listens_where_it_asks_from_is_remembered():
    async def work(swarm, one):
        async with client_of(swarm) as client:
            for port in (0, 1, 65_535, -5, 2**40):
                await send(client, one, PING, Ping(port))
                await send_find(client, one, Want(KEY), port=port)
                await send_store(client, one, Store(port, []))
            assert len(one.table) == 0
        two = await swarm.start()
        assert one.table.contacts() == [one.protocol.book.of(two.peer)]

    in_world(work, 1)


def test_who_a_peer_is_is_told_to_whoever_asks():
    async def work(swarm, one, two):
        keep_at(two, "name", "value")
        about = await one.about(two.peer)
        assert (about.num_records, about.num_contacts, about.is_client) == (1, 1, False)
        assert about.record_bytes == two.storage.size_bytes
        assert about.wall_s == two.wall_s()
        with pytest.raises(PeerRefused):
            await send(one, two, ABOUT, {"nonsense": 1})

    in_world(work, 2)


# --- finding ---


def told(found, finding):
    return [found.contacts[index] for index in finding.near]


def test_the_nearest_peers_are_told_without_the_asker():
    async def work(swarm, *peers):
        one, asker = peers[0], peers[9]
        for target in (KEY, asker.peer_id.digest, one.peer_id.digest):
            number = number_of(target)
            found = await send_find(asker, one, Want(target, LookupKind.PEERS))
            nearest = one.table.nearest(number, MAX_CONTACTS, now_s=0.0)
            assert told(found, found.findings[0]) == [
                contact.packed for contact in nearest if contact.id != asker.peer_id
            ]
            assert len(found.findings[0].near) >= MAX_CONTACTS - 1

    in_world(work, 30)


def test_nobody_beyond_the_reach_is_told():
    async def work(swarm, *peers):
        one, asker = peers[0], peers[9]
        number = number_of(KEY)
        nearest = [
            contact
            for contact in one.table.nearest(number, MAX_CONTACTS, now_s=0.0)
            if contact.id != asker.peer_id
        ]
        for count in range(len(nearest)):
            reach = reach_of(nearest[count].number ^ number)
            found = await send_find(asker, one, Want(KEY, LookupKind.VALUE, reach))
            assert told(found, found.findings[0]) == [contact.packed for contact in nearest[: count + 1]]
        for reach in (0, -1, -(2**63)):
            found = await send_find(asker, one, Want(KEY, LookupKind.VALUE, reach))
            assert found == Found([], [found.findings[0]])

    in_world(work, 30)


def test_peers_are_listed_once_for_all_keys_of_a_find():
    async def work(swarm, *peers):
        wants = [Want(random.Random(at).randbytes(20), LookupKind.PEERS) for at in range(MAX_WANTS)]
        found = await send_find(peers[1], peers[0], *wants)
        assert len(found.contacts) == len(set(found.contacts)) <= 40
        for want, finding in zip(wants, found.findings, strict=True):
            nearest = peers[0].table.nearest(number_of(want.key), MAX_CONTACTS, now_s=0.0)
            assert told(found, finding) == [
                contact.packed for contact in nearest if contact.id != peers[1].peer_id
            ]

    in_world(work, 40)


def test_each_kind_of_look_up_gets_what_it_is_for():
    async def work(swarm, *peers):
        one, asker = peers[:2]
        assert keep_at(one, "name", "x", subkey=3) is Verdict.STORED
        assert keep_at(one, "name", "y", subkey="text") is Verdict.STORED
        kinds = {
            kind: (await send_find(asker, one, Want(KEY, kind))).findings[0] for kind in (*LookupKind, 99, -1)
        }
        assert [kinds[kind].state for kind in kinds] == [State.NOTHING] + 5 * [State.HERE]
        assert len(kinds[LookupKind.VALUE].slots) == len(kinds[LookupKind.LATEST].slots) == 2
        assert not kinds[LookupKind.VALUE].near
        assert kinds[LookupKind.LATEST].near
        assert kinds[LookupKind.COORDINATES].coordinates == pack_coordinates([3])
        assert not kinds[LookupKind.COORDINATES].slots

    in_world(work, 5)


def test_what_does_not_fit_beside_others_is_to_be_asked_for_alone():
    async def work(swarm, one, asker):
        names = [f"name {at}" for at in range(12)]
        for name in names:
            keep_at(one, name, b"x" * 1000)
        wants = [Want(key_of(name).digest) for name in names]
        found = await send_find(asker, one, *wants)
        states = [finding.state for finding in found.findings]
        assert states == [State.HERE] * 6 + [State.TOO_LARGE] * 6
        alone = await send_find(asker, one, wants[-1])
        assert [finding.state for finding in alone.findings] == [State.HERE]

    in_world(work, 2)


# --- storing ---


def test_each_slot_has_its_own_verdict():
    async def work(swarm, one, two):
        expired, fine = slot(one, 1, -1.0), slot(one, 2, 10.0, "a")
        too_long = slot(one, 3, 30 * 86_400.0, "b")
        large = Slot(encode_subkey("c"), bytes(2_000), one.in_s(10))
        other = Slot(fine.subkey, b"\x07", fine.expires_at_s)
        verdicts = await send_slots(two, one, "name", expired, fine, fine, other, too_long, large)
        assert verdicts == [
            Verdict.EXPIRED,
            Verdict.STORED,
            Verdict.STORED,
            Verdict.NOT_NEWER,
            Verdict.TOO_LONG,
            Verdict.TOO_LARGE,
        ]

    in_world(work, 2, max_value_bytes=1000)


def test_what_does_not_fit_a_schema_is_refused_by_who_should_store_it():
    async def work(swarm, one, liar):
        one.add_schema(Schema("price", float))
        one.add_schema(Schema("all", str, int))
        assert await send_slots(liar, one, "price.apple", slot(one, 1.5)) == [Verdict.STORED]
        for value in ("1.5", None, [1.5], {"a": 1.5}):
            assert await send_slots(liar, one, "price.pear", slot(one, value)) == [Verdict.BAD_VALUE]
        assert await send_slots(liar, one, "price.pear", slot(one, 1.5, subkey=1)) == [Verdict.BAD_VALUE]
        assert await send_slots(
            liar, one, "all", slot(one, "a", subkey=1), slot(one, "a", subkey="x"), slot(one, 5, subkey=2)
        ) == [Verdict.STORED, Verdict.BAD_VALUE, Verdict.BAD_VALUE]
        assert await send_slots(liar, one, "all", slot(one, "plain", 90.0)) == [Verdict.BAD_VALUE]
        nonsense = Slot(PLAIN, b"\xc1", one.in_s(10))
        assert await send_slots(liar, one, "price.pear", nonsense) == [Verdict.BAD_VALUE]
        assert len(one.storage) == 2

    in_world(work, 2)


def test_only_its_owner_replaces_a_record():
    async def work(swarm, one, liar):
        assert await send_slots(liar, one, "name", signed(ALICE, one, "name", 1)) == [Verdict.STORED]
        forged = msgspec.structs.replace(
            signed(MALLORY, one, "name", 2, 90.0), owner=ALICE.public_key.public_bytes_raw()
        )
        moved = signed(ALICE, one, "elsewhere", 2, 90.0)
        for theirs, verdict in [
            (slot(one, 2, 90.0), Verdict.NOT_OWNER),
            (slot(one, 2, 90.0, "subkey"), Verdict.NOT_OWNER),
            (signed(MALLORY, one, "name", 2, 90.0), Verdict.NOT_OWNER),
            (forged, Verdict.BAD_SIGNATURE),
            (moved, Verdict.BAD_SIGNATURE),
        ]:
            assert await send_slots(liar, one, "name", theirs) == [verdict]
        assert await send_slots(liar, one, "name", signed(ALICE, one, "name", 3, 90.0)) == [Verdict.STORED]

    in_world(work, 2)


def test_reserved_places_are_their_peers_from_the_start():
    async def work(swarm, one, liar):
        home, own = reserved_key(ALICE.peer_id, "home"), reserved(ALICE.peer_id)
        for name, subkey in ((home, None), (home, "any"), ("shared", own)):
            for theirs in (slot(one, 2, 90.0, subkey), signed(MALLORY, one, name, 2, 90.0, subkey)):
                assert await send_slots(liar, one, name, theirs) == [Verdict.NOT_OWNER]
        assert await send_slots(liar, one, home, signed(ALICE, one, home, 1)) == [Verdict.STORED]
        mine = signed(ALICE, one, "shared", 1, subkey=own)
        assert await send_slots(liar, one, "shared", mine) == [Verdict.STORED]

    in_world(work, 2)


def test_what_is_cached_hides_nothing_that_is_stored():
    """A liar puts later values into the cache of a peer that holds the right ones."""

    async def work(swarm, one, liar):
        await send_slots(liar, one, "name", signed(ALICE, one, "name", "right"))
        await send_slots(
            liar,
            one,
            "all",
            signed(ALICE, one, "all", "right", subkey=1),
            slot(one, "old", 10.0, 2),
        )
        lies = [slot(one, "lie", 500.0), signed(MALLORY, one, "name", "lie", 600.0)]
        for lie in lies:
            await send_slots(liar, one, "name", lie, is_pushed=True)
        for lie in (slot(one, "lie", 500.0, 1), slot(one, "new", 400.0, 2), slot(one, "more", 400.0, 3)):
            await send_slots(liar, one, "all", lie, is_pushed=True)
        assert (await one.get("name")).value == "right"
        assert len((await one.get("all")).value) == 2
        finds = [await send_find(liar, one, Want(key_of(name).digest)) for name in ("name", "all")]
        told = [{slot.subkey: slot.value for slot in found.findings[0].slots} for found in finds]
        assert told == [
            {PLAIN: encode_value("right")},
            {
                encode_subkey(1): encode_value("right"),
                encode_subkey(2): encode_value("new"),
                encode_subkey(3): encode_value("more"),
            },
        ]
        assert len(one.storage) == 3

    in_world(work, 2)


def test_a_cached_record_is_no_stored_one():
    async def work(swarm, one, two):
        assert await send_slots(two, one, "name", slot(one, 1), is_pushed=True) == [Verdict.STORED]
        assert len(one.storage) == len(one.cache) == 0
        assert (await send_find(two, one, Want(KEY))).findings[0].state == State.HERE
        assert await one.get("name") is None

    in_world(work, 2)


def test_a_marker_is_set_only_where_there_is_nothing_and_ends_with_a_store():
    async def work(swarm, one, two):
        mark = Store(0, [], absent=[KEY, b"short", *(bytes([at]) * 20 for at in range(100))], absent_s=1e9)
        keep_at(one, "kept", 1)
        await send_store(two, one, Store(0, [], absent=[key_of("kept").digest], absent_s=60.0))
        assert len(one.cache.absent) == 0
        await send_store(two, one, mark)
        assert len(one.cache.absent) == MAX_WANTS - 1
        assert one.cache.is_absent(KEY, one.in_s(one.settings.absent_s - 1))
        assert not one.cache.is_absent(KEY, one.in_s(one.settings.absent_s + 1))
        await send_store(two, one, mark)
        assert (await send_find(two, one, Want(KEY))).findings[0].state == State.ABSENT
        assert await send_slots(two, one, "name", slot(one, 1)) == [Verdict.STORED]
        assert (await send_find(two, one, Want(KEY))).findings[0].state == State.HERE

    in_world(work, 2)


def test_who_stores_is_told_of_nearer_peers_that_it_does_not_know():
    async def work(swarm, *peers):
        one, asker = peers[:2]
        number = number_of(KEY)
        nearest = [
            contact
            for contact in one.table.nearest(number, MAX_CONTACTS, now_s=0.0)
            if contact.id != asker.peer_id
        ]
        known = b"".join(contact.packed[18:20] for contact in nearest[::2])
        item = Item(KEY, [slot(one, 1)], reach_of(nearest[4].number ^ number), known)
        raw = await send(asker, one, STORE, Store(0, [item, Item(KEY, [])]))
        answer = msgspec.msgpack.decode(raw, type=StoreAnswer)
        assert [answer.contacts[index] for index in answer.near[0]] == [
            nearest[1].packed,
            nearest[3].packed,
        ]
        assert answer.near[1] == b""

    in_world(work, 30)


# --- too much ---


async def ask_often(greedy, one):
    for num_wants in (1, 10, 20, 32) * 50:
        await send_find(greedy, one, *[Want(KEY)] * num_wants)


def test_who_asks_too_often_is_told_so_and_others_are_not():
    async def work(swarm, one, greedy, other):
        with pytest.raises(PeerBusy, match="asks more than 50 times a second"):
            await ask_often(greedy, one)
        assert len((await send_find(other, one, Want(KEY))).findings) == 1

    in_world(work, 3, max_messages_a_s=50.0)


@pytest.mark.parametrize("has_slots", [True, False])
def test_who_stores_too_much_is_told_so_and_storage_is_bounded(has_slots):
    async def work(swarm, one, greedy, other):
        def some(num_items):
            slots = [slot(one, 1)] if has_slots else []
            return Store(0, [Item(random.Random(at).randbytes(20), slots) for at in range(num_items)])

        for _ in range(4 * 100 // 20):
            await send_store(greedy, one, some(20))
        with pytest.raises(PeerBusy, match="stores more than 100 records a second"):
            await send_store(greedy, one, some(1))
        assert len(one.storage) <= 16
        assert await send_slots(other, one, Key(one.peer_id.digest), slot(one, 1)) == [Verdict.STORED]

    in_world(work, 3, max_records_a_s=100.0, max_records=16)


# --- nonsense ---


def test_wrong_keys_and_too_many_are_refused():
    async def work(swarm, one, liar):
        for wants in ([Want(b"short")], [Want(bytes(21))], [Want(KEY)] * (MAX_WANTS + 1), [Want(b"")]):
            with pytest.raises(PeerRefused, match="at most 32 keys of 20 bytes"):
                await send_find(liar, one, *wants)
        for key in (b"", bytes(19), bytes(500)):
            item = Item(key, [slot(one, 1)], 2**32, b"odd")
            assert await send_store(liar, one, Store(0, [item])) == [Verdict.BAD_VALUE]
        assert (await send_find(liar, one)).findings == []
        assert len(one.storage) == 0

    in_world(work, 2)


def bent_payload(chance, good):
    """A request with a few bytes changed, or something else entirely; None when it cannot be sent at all."""
    bent = bytearray(chance.choice(good))
    for _ in range(chance.randint(1, 4)):
        bent[chance.randrange(len(bent))] = chance.randrange(256)
    try:
        return chance.choice([chance.randbytes(30), 0.5, [[[]]], {"a": [1]}, msgspec.msgpack.decode(bent)])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def test_bytes_of_any_kind_do_no_harm():
    async def work(swarm, one, liar):
        chance, num_refused = random.Random(0), 0
        good = [
            msgspec.msgpack.encode(Find(0, [Want(KEY)])),
            msgspec.msgpack.encode(Store(0, [Item(KEY, [slot(one, 1)])])),
        ]
        keep_at(one, "mine", "here")
        for _ in range(300):
            payload = bent_payload(chance, good)
            try:
                await send(liar, one, chance.choice([PING, FIND, STORE, ABOUT]), payload)
            except PeerRefused:
                num_refused += 1
        assert num_refused > 100
        assert (await liar.get("mine")).value == "here"

    in_world(work, 2)


def test_odd_numbers_do_no_harm():
    async def work(swarm, one, liar):
        for number in (-(2**63), -1, 2**63, 2**64 - 1):
            found = await send_find(liar, one, Want(KEY, number % 7, number), port=number)
            assert len(found.findings) == 1
        for until_s in (float("nan"), float("inf"), float("-inf"), -1.0):
            assert await send_store(liar, one, Store(0, [], False, [KEY], until_s)) == []
            assert await send_slots(liar, one, "name", Slot(PLAIN, b"\x01", until_s)) in (
                [Verdict.EXPIRED],
                [Verdict.TOO_LONG],
            )
        assert len(one.storage) == len(one.cache) == 0

    in_world(work, 2)


def test_a_client_answers_nobody():
    async def work(swarm, one):
        two = await swarm.start(settings=DHTSettings(is_client=True))
        with pytest.raises(PeerRefused, match="no method"):
            await send(one, two, PING, Ping(0))

    in_world(work, 1)
