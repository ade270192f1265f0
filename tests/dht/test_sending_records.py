import asyncio
import itertools

from dht.living_swarm import LivingSwarm
from shoal.core import PeerBusy, PeerLost, run_virtual
from shoal.dht.records import PLAIN, Slot
from shoal.dht.replication import requests_of, send_records
from shoal.dht.wire import MAX_STORE_BYTES, size_of


def test_every_slot_is_sent_once_and_in_order():
    records = [
        (bytes([number]) * 20, [Slot(b"%d" % sub, bytes(40 * number), 1.0) for sub in range(1, 30)])
        for number in range(10)
    ]
    sent = [
        (item.key, slot.subkey) for items in requests_of(records) for item in items for slot in item.slots
    ]
    assert sent == [(key, slot.subkey) for key, slots in records for slot in slots]


def test_requests_fit_into_datagrams():
    records = [(bytes([number]) * 20, [Slot(PLAIN, bytes(100), 1.0)]) for number in range(100)]
    messages = list(requests_of(records))
    assert 10 < len(messages) < 20
    assert all(
        sum(size_of(slot) for item in items for slot in item.slots) <= MAX_STORE_BYTES for items in messages
    )


def test_a_slot_that_is_too_large_is_alone():
    sizes = (10, 5000, 10)
    records = [(bytes([size % 256]) * 20, [Slot(PLAIN, bytes(size), 1.0)]) for size in sizes]
    assert [len(items) for items in requests_of(records)] == [1, 1, 1]


def test_much_goes_in_large_pieces():
    records = [(number.to_bytes(20), [Slot(PLAIN, bytes(1000), 1.0)]) for number in range(1000)]
    assert len(list(requests_of(records))) < 50


def test_nothing_is_no_message():
    assert list(requests_of([])) == []


RECORDS = [(bytes([number]) * 20, [Slot(PLAIN, bytes(800), 1_700_001_000.0)]) for number in range(4)]


def run_hand(answers):
    """Hand four requests to a peer that answers so; how often it was asked, and how long that took."""

    async def main():
        async with LivingSwarm() as swarm:
            dht, _ = await swarm.start_many(2)
            target = dht.table.contacts()[0]
            asked = []

            async def call_store(contact, items):
                asked.append(items)
                if isinstance(answer := next(answers), Exception):
                    raise answer

            dht.protocol.call_store = call_store
            began_s = asyncio.get_running_loop().time()
            await send_records(dht.protocol, {target: RECORDS})
            return len(asked), asyncio.get_running_loop().time() - began_s

    return run_virtual(main())


def test_a_busy_peer_is_waited_for():
    answers = iter([PeerBusy("not now"), PeerBusy("not now"), None, PeerBusy("not now"), None, None, None])
    assert run_hand(answers) == (7, 3.0)


def test_one_that_stays_busy_is_left_alone():
    num_asked, took_s = run_hand(itertools.repeat(PeerBusy("not now")))
    assert num_asked == 1 + took_s == 11


def test_one_that_fails_is_asked_no_further():
    assert run_hand(itertools.repeat(PeerLost("gone"))) == (1, 0.0)


def test_the_others_get_theirs_when_one_fails():
    async def main():
        async with LivingSwarm() as swarm:
            dht, gone, there = await swarm.start_many(3)
            contacts = {contact.id: contact for contact in dht.table.contacts()}
            await swarm.kill("p1")
            await send_records(
                dht.protocol, {contacts[gone.peer_id]: RECORDS, contacts[there.peer_id]: RECORDS}
            )
            assert len(there.storage) == len(RECORDS)

    run_virtual(main())
