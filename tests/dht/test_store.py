"""Bringing slots to the peers nearest to them, in virtual time."""

import asyncio

import msgspec
import pytest

from dht.made_contacts import made_contact
from dht.worlds import Liar, in_world, keep_at
from shoal.core import PeerBusy
from shoal.dht.records import Entry, Schema, Stored, Verdict
from shoal.dht.store import PendingStore
from shoal.dht.wire import MAX_CONTACTS, StoreAnswer, pack
from shoal.transport import Reply


def names_of(num):
    return [f"name {at}" for at in range(num)]


def loop_s():
    return asyncio.get_running_loop().time()


def test_a_record_is_held_by_the_nearest_of_all():
    async def work(swarm, *peers):
        entries = [Entry(name, name, peers[7].in_s(60)) for name in names_of(60)]
        stored = await peers[7].store_many(entries)
        assert all(one.verdict is Verdict.STORED and one.num_stored >= 5 for one in stored)
        for name in names_of(60):
            holders, nearest = swarm.holders(name), swarm.nearest(name)
            assert holders[:4] == nearest[:4]
            assert len(holders) <= 10

    in_world(work, 50)


def test_in_a_small_swarm_everybody_holds_it():
    async def work(swarm, one, two, three):
        assert await two.store("name", 1, two.in_s(60)) == Stored(3, Verdict.STORED)
        assert len(swarm.holders("name")) == 3

    in_world(work, 3)


def test_alone_a_peer_holds_its_own():
    async def work(swarm, one):
        assert await one.store("name", 1, one.in_s(60)) == Stored(1, Verdict.STORED)
        assert (await one.get("name")).value == 1

    in_world(work, 1)


def test_entries_that_go_to_the_same_peers_share_messages():
    async def work(swarm, *peers):
        one = peers[0]
        entries = [Entry(name, 1, one.in_s(60)) for name in names_of(100)]
        assert all(await one.store_many(entries))
        assert one.counts.num_stores <= 60
        assert one.counts.num_finds <= 40
        assert sum(peer.endpoint.streams.num_connections for peer in peers) == 0

    in_world(work, 6)


def test_each_has_its_own_success():
    async def work(swarm, *peers):
        one = peers[0]
        for peer in peers:
            peer.add_schema(Schema("price", int))
        await peers[3].store("theirs", 1, one.in_s(60), is_owned=True)
        stored = await one.store_many(
            [
                Entry("fine", 1, one.in_s(60)),
                Entry("over", 1, one.in_s(-1)),
                Entry("price.a", "much", one.in_s(60)),
                Entry("price.a", 5, one.in_s(60)),
                Entry("theirs", 2, one.in_s(90)),
                Entry("dict", 1, one.in_s(60), subkey="a"),
                Entry("dict", 1, one.in_s(30 * 86_400), subkey="b"),
                Entry("large", bytes(2 << 20), one.in_s(60)),
                Entry("fine", 2, one.in_s(50)),
            ]
        )
        assert [one.verdict for one in stored] == [
            Verdict.STORED,
            Verdict.EXPIRED,
            Verdict.BAD_VALUE,
            Verdict.STORED,
            Verdict.NOT_OWNER,
            Verdict.STORED,
            Verdict.TOO_LONG,
            Verdict.TOO_LARGE,
            Verdict.NOT_NEWER,
        ]
        assert [bool(one) for one in stored] == [one.num_stored > 0 for one in stored]

    in_world(work, 8)


def test_nothing_is_stored_nowhere():
    async def work(swarm, one):
        assert await one.store_many([]) == []

    in_world(work, 1)


# --- peers that do not take it ---


def test_dead_peers_are_replaced_within_a_second():
    async def work(swarm, *peers):
        writer = peers[0]
        dead = [host for host in swarm.nearest("name 0")[:3] if host != "p0"]
        for host in dead:
            await swarm.kill(host)
        began_s = loop_s()
        stored = await writer.store_many([Entry(name, 1, writer.in_s(60)) for name in names_of(20)])
        assert loop_s() - began_s < 1.0
        assert all(one.num_stored >= 5 for one in stored)
        assert swarm.holders("name 0")[:4] == swarm.nearest("name 0")[:4]

    in_world(work, 40)


def be_busy(peer, num, now_s):
    raise PeerBusy("too much.")


def test_busy_peers_are_passed_over():
    async def work(swarm, *peers):
        writer = peers[0]
        busy = [swarm.peers[host] for host in swarm.nearest("name") if host != "p0"][:2]
        for peer in busy:
            peer.protocol.limits.take_records = be_busy
        stored = await writer.store("name", 1, writer.in_s(60))
        assert stored.num_stored >= 5
        assert loop_s() < 1.0
        assert len([host for host in swarm.holders("name") if swarm.peers[host] not in busy]) >= 5
        assert all(writer.protocol.book.of(peer.peer) in writer.table for peer in busy)

    in_world(work, 20)


def test_it_ends_with_its_time_and_tells_what_became_of_it():
    async def work(swarm, *peers):
        for host in list(swarm.peers)[1:]:
            await swarm.kill(host)
        peers[0].protocol.is_client = True
        stored = await peers[0].store("name", 1, peers[0].in_s(60))
        assert stored == Stored(0, Verdict.NOT_ASKED)
        assert not stored
        assert loop_s() < 30.0

    in_world(work, 6)


# --- peers that answer nonsense ---


class Odd(Liar):
    """Answers a Store with whatever it is told to."""

    def __init__(self, *args, answer):
        super().__init__(*args, values=None)
        self.answer = answer
        self.num_stores = 0

    def _contacts(self, want):
        return []

    def _store(self, head, buffers):
        self.num_stores += 1
        answer = self.answer(head.payload)
        return Reply(answer if isinstance(answer, bytes) else msgspec.msgpack.encode(answer))


INVENTED = [bytes((255,)) * 19 + bytes((at % 256,)) + b"\x04\x00\x00nowhere%d" % at for at in range(3000)]


@pytest.mark.parametrize(
    "answer",
    [
        lambda store: b"\xc1 no message at all",
        lambda store: StoreAnswer(b""),
        lambda store: StoreAnswer(bytes(9)),
        lambda store: StoreAnswer(b"\xff" * len(store.items)),
        lambda store: {"verdicts": 1},
    ],
)
def test_who_does_not_follow_the_protocol_is_backed_off_and_replaced(answer):
    async def work(swarm, *peers):
        async with Odd(swarm, "odd", answer=answer) as odd:
            await odd.mingle(peers)
            contact = peers[0].protocol.book.of(odd.peer)
            assert contact in peers[0].table
            stored = await peers[0].store("name", 1, peers[0].in_s(60))
            assert odd.num_stores == 1
            assert stored.num_stored == 4
            assert peers[0].protocol.is_backed_off(contact)

    in_world(work, 4)


@pytest.mark.parametrize(
    "answer",
    [
        lambda store: StoreAnswer(bytes(len(store.items)), INVENTED[:5], [bytes((0, 77, 255))] * 50),
        lambda store: StoreAnswer(bytes(len(store.items)), INVENTED, [bytes(range(256)) * 20]),
        lambda store: StoreAnswer(bytes(len(store.items)), [b"", b"x", bytes(500)], [bytes((0, 1, 2))]),
    ],
)
def test_contacts_that_are_none_keep_nobody_from_storing(answer):
    async def work(swarm, *peers):
        async with Odd(swarm, "odd", answer=answer) as odd:
            await odd.mingle(peers)
            for at in range(5):
                stored = await peers[at].store(f"name {at}", 1, peers[at].in_s(60))
                assert stored.num_stored >= 5
                assert len(swarm.holders(f"name {at}")) >= 4
            assert odd.num_stores

    in_world(work, 9)


def test_one_peer_names_no_more_others_than_an_honest_one():
    async def work(swarm, *peers):
        async with Odd(
            swarm,
            "odd",
            answer=lambda store: StoreAnswer(bytes(len(store.items)), INVENTED, [bytes(range(256))]),
        ) as odd:
            await odd.mingle(peers)
            before = peers[0].counts.num_stores
            await peers[0].store("name", 1, peers[0].in_s(60))
            assert peers[0].counts.num_stores - before <= 6 + MAX_CONTACTS

    in_world(work, 6)


def test_an_honest_peer_with_a_wrong_address_does_not_stand_for_the_right_one():
    """A liar names the nearest honest peers where they are not; others name them where they are."""

    async def work(swarm, *peers):
        name = "name"
        async with Liar(swarm, "liar", values=None, near="stolen") as liar:
            liar.honest = [pack(peer.peer) for peer in peers]
            await liar.mingle(peers)
            await peers[0].store(name, 1, peers[0].in_s(60))
            assert swarm.holders(name)[:3] == swarm.nearest(name)[:3]

    in_world(work, 30)


def far(*distances):
    """Contacts so far from the key that is all zeros."""
    return [(distance << 136, made_contact(distance << 136)) for distance in distances]


def test_who_is_told_of_replaces_those_that_are_gone_and_no_others():
    near = far(1, 2, 3, 100, 200)
    parcel = PendingStore(bytes(20), [], near, 2)
    assert [parcel.choose(), parcel.choose()] == [contact for _, contact in near[:2]]
    parcel.add(far(50)[0][1])
    assert parcel.num_wanted == 0
    reach = parcel.asking_item().reach
    for _, contact in near[:2]:
        parcel.on_gone(contact)
    assert [parcel.choose(), parcel.choose()] == [contact for _, contact in near[2:4]]
    assert parcel.asking_item().reach > reach
    assert parcel.asking_item().known == b"".join(contact.packed[18:20] for _, contact in near[2:4])
    parcel.add(far(50)[0][1])
    assert parcel.num_wanted == 1


def test_the_right_address_of_a_peer_is_wanted_beside_a_wrong_one():
    (_, first), (distance, right) = far(9, 5)
    wrong = made_contact(distance, "10.6.6.6")
    parcel = PendingStore(bytes(20), [], [(9 << 136, first)], 1)
    parcel.choose()
    parcel.add(wrong)
    parcel.add(right)
    assert {parcel.choose(), parcel.choose()} == {wrong, right}


# --- many slots of one key ---


def test_a_dictionary_is_cut_into_datagrams():
    async def work(swarm, *peers):
        one = peers[1]
        entries = [Entry("dict", bytes(100), one.in_s(60), subkey=at) for at in range(300)]
        stored = await one.store_many(entries)
        assert all(each.num_stored >= 5 for each in stored)
        assert sum(peer.endpoint.streams.num_connections for peer in peers) == 0
        assert len((await peers[9].get("dict")).value) == 300

    in_world(work, 12)


def test_what_expires_as_early_as_what_is_held_is_not_newer():
    async def work(swarm, *peers):
        until_s = peers[0].in_s(60)
        assert await peers[0].store("name", 1, until_s)
        assert await peers[1].store("name", 1, until_s)  # the same once more: a request may come twice
        assert await peers[1].store("name", 2, until_s) == Stored(0, Verdict.NOT_NEWER)
        for peer in peers:
            keep_at(peer, "later", 1, lifetime_s=90.0)
        assert not await peers[1].store("later", 1, until_s)

    in_world(work, 5)
