"""Peers as the DHT knows them."""

import asyncio

import pytest

from shoal.core import Address, Peer, PeerId, PeerUnreachable, UsageError
from shoal.dht.wire import Contact, ContactBook, number_of, pack, resolved
from shoal.transport.network.memory import MemoryNetwork
from shoal.transport.network.sockets import SocketNetwork

ID = PeerId(bytes(range(20)))
HEAD = ID.digest + (31337).to_bytes(2)
FAR, NEAR = Address("10.0.0.1", 5000), Address("127.0.0.1", 5000)


def peer_at(host, port=31337, peer_id=ID):
    return Peer(Address(host, port), peer_id)


@pytest.mark.parametrize("host", ["10.0.0.7", "fe80::1", "2001:db8::5"])
def test_addresses_travel(host):
    packed = pack(peer_at(host))
    contact = ContactBook(has_names=False).read(packed, FAR)
    assert contact.peer == peer_at(host)
    assert contact.id == ID
    assert contact.number == number_of(ID.digest) == int(str(ID), 16)
    assert len(packed) in (20 + 3 + 4, 20 + 3 + 16)


def test_a_scope_stays_at_home():
    assert pack(peer_at("fe80::1%eth0")) == pack(peer_at("fe80::1"))


def test_contacts_are_the_same_when_id_and_address_are():
    first = Contact(peer_at("10.0.0.7"), pack(peer_at("10.0.0.7")))
    assert first == Contact(peer_at("10.0.0.7"), pack(peer_at("10.0.0.7")))
    others = [
        peer_at("10.0.0.8"),
        peer_at("10.0.0.7", 31338),
        peer_at("10.0.0.7", peer_id=PeerId(bytes(20))),
    ]
    assert all(first != Contact(other, pack(other)) for other in others)
    assert first != "10.0.0.7"


def test_a_peer_that_is_met_again_is_the_same_contact():
    book = ContactBook(has_names=False)
    contact = book.of(peer_at("10.0.0.7"))
    assert book.of(peer_at("10.0.0.7")) is contact
    assert book.read(pack(peer_at("10.0.0.7")), FAR) is contact
    assert book.read(pack(peer_at("10.0.0.8")), FAR) is book.of(peer_at("10.0.0.8"))


def test_names_are_for_simulated_networks_only():
    packed = pack(peer_at("p17"))
    assert ContactBook(has_names=True).read(packed, Address("p1", 1)).peer == peer_at("p17")
    assert ContactBook(has_names=False).read(packed, FAR) is None


def test_no_contact_of_a_real_network_has_a_name():
    with pytest.raises(UsageError, match="by a name only"):
        ContactBook(has_names=False).of(peer_at("localhost"))


def test_names_are_resolved_where_they_mean_nothing_to_others():
    async def main():
        network = SocketNetwork()
        found = await resolved(network, Peer(Address("localhost", 31337), ID))
        assert found in (peer_at("127.0.0.1"), peer_at("::1"))
        assert await resolved(network, found) == found
        ContactBook(has_names=False).of(found)
        with pytest.raises(PeerUnreachable, match="is not known here"):
            await resolved(network, peer_at("no name at all"))
        assert await resolved(MemoryNetwork().host("p1"), peer_at("p17")) == peer_at("p17")

    asyncio.run(main())


def test_an_ipv4_address_written_as_ipv6_is_the_same_contact():
    book = ContactBook(has_names=False)
    mapped = peer_at("::ffff:10.0.0.7")
    assert pack(mapped) == pack(peer_at("10.0.0.7"))
    told = HEAD + b"\x06" + bytes(10) + b"\xff\xff\x0a\x00\x00\x07"
    assert book.read(told, FAR) is book.of(peer_at("10.0.0.7")) is book.of(mapped)


def test_another_machine_does_not_tell_of_this_one_as_ipv6():
    told = HEAD + b"\x06" + bytes(10) + b"\xff\xff\x7f\x00\x00\x01"
    for known in ([], [peer_at("::ffff:127.0.0.1")]):
        book = ContactBook(has_names=False)
        for peer in known:
            book.of(peer)
        assert book.read(told, FAR) is None
        assert book.read(told, NEAR).packed == pack(peer_at("127.0.0.1"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1"])
def test_another_machine_does_not_tell_of_this_one(host):
    book = ContactBook(has_names=False)
    packed = pack(peer_at(host))
    assert book.read(packed, FAR) is None
    assert book.read(packed, NEAR).peer == peer_at(host)
    assert book.read(packed, FAR) is None  # not even once it is known


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        ID.digest,
        HEAD + b"\x04",
        HEAD + b"\x04" + bytes(3),
        HEAD + b"\x04" + bytes(16),
        HEAD + b"\x06" + bytes(4),
        HEAD + b"\x09" + bytes(4),
        HEAD + b"\x00" + b"x" * 65,
        HEAD + b"\x00" + "ü".encode(),
        ID.digest + bytes(2) + b"\x04\x0a\x00\x00\x01",
        HEAD + b"\x04" + bytes(4),
        HEAD + b"\x04\xe0\x00\x00\x01",
        HEAD + b"\x06" + bytes(16),
        HEAD + b"\x06\xff\x02" + bytes(13) + b"\x01",
        HEAD + b"\x06" + bytes(10) + b"\xff\xff" + bytes(4),
        HEAD + b"\x06" + bytes(10) + b"\xff\xff" + bytes(3),
    ],
    ids=[
        "nothing",
        "only an id",
        "no host",
        "half a host",
        "v4 of 16 bytes",
        "v6 of 4 bytes",
        "no such kind",
        "a long name",
        "no ASCII",
        "port 0",
        "any v4",
        "multicast v4",
        "any v6",
        "multicast v6",
        "any v4 as v6",
        "half a v4 as v6",
    ],
)
def test_what_is_no_contact(packed):
    assert ContactBook(has_names=True).read(packed, NEAR) is None


def test_the_book_is_bounded_and_keeps_the_newest():
    book = ContactBook(has_names=False)
    contacts = [
        book.of(peer_at(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")) for number in range(20_000)
    ]
    assert book.of(contacts[-1].peer) is contacts[-1]
    forgotten = book.of(contacts[0].peer)
    assert forgotten == contacts[0]
    assert forgotten is not contacts[0]
