"""What peers of the DHT send each other, byte for byte: peers of different versions must understand it."""

# ruff: noqa: E501

import hashlib

import msgspec
import pytest

from dht.signing import sign
from shoal.core import Address, Peer, PeerId
from shoal.core.identity import Identity
from shoal.dht.records import (
    PLAIN,
    Slot,
    Validator,
    Verdict,
    encode_subkey,
    encode_value,
    key_of,
    reserved,
    reserved_key,
    sign_many,
)
from shoal.dht.wire import (
    ABOUT,
    FIND,
    PING,
    STORE,
    About,
    ContactBook,
    Find,
    Finding,
    Found,
    Item,
    LookupKind,
    Ping,
    Pong,
    State,
    Store,
    StoreAnswer,
    Want,
    pack,
    pack_coordinates,
    unpack_coordinates,
)

OWNER = Identity.from_seed(hashlib.sha256(b"owner").digest())
KEY = bytes(range(20))
SLOT = Slot(b"\x07", b"\xa3abc", 1_700_000_000.5)

MESSAGES = {
    "ping": Ping(4000),
    "pong": Pong(KEY, "10.0.0.7:4000", 1_700_000_000.25),
    "find": Find(4000, [Want(KEY), Want(KEY, LookupKind.COORDINATES, 77)]),
    "found": Found(
        [b"contact"],
        [
            Finding(State.NOTHING, b"\x00"),
            Finding(State.HERE, b"", [SLOT]),
            Finding(State.HERE, b"", [], b"\x92\x01\x02"),
            Finding(State.TOO_LARGE, b"\x00"),
            Finding(State.ABSENT, b"\x00"),
        ],
    ),
    "store": Store(4000, [Item(KEY, [SLOT]), Item(KEY, [SLOT], 9, b"tags")]),
    "store in a cache": Store(0, [Item(KEY, [SLOT])], True),
    "absence": Store(0, [], False, [KEY], 300.0),
    "store answer": StoreAnswer(bytes(Verdict), [b"contact"], [b"", b"\x00"]),
    "about": About("1.0", 2.5, 3, 4, 5, 6, False, 7.5),
}
BYTES = {
    "ping": "91cd0fa0",
    "pong": "93c414000102030405060708090a0b0c0d0e0f10111213ad31302e302e302e373a34303030cb41d954fc40100000",
    "find": "92cd0fa09293c414000102030405060708090a0b0c0d0e0f1011121301ceffffffff93c414000102030405060708090a0b0c0d0e0f10111213024d",
    "found": "9291c407636f6e74616374959400c4010090c4009401c4009195c40107c404a3616263cb41d954fc40200000c400c400c4009401c40090c4039201029402c4010090c4009403c4010090c400",
    "store": "95cd0fa09294c414000102030405060708090a0b0c0d0e0f101112139195c40107c404a3616263cb41d954fc40200000c400c40000c40094c414000102030405060708090a0b0c0d0e0f101112139195c40107c404a3616263cb41d954fc40200000c400c40009c40474616773c290cb0000000000000000",
    "store in a cache": "95009194c414000102030405060708090a0b0c0d0e0f101112139195c40107c404a3616263cb41d954fc40200000c400c40000c400c390cb0000000000000000",
    "absence": "950090c291c414000102030405060708090a0b0c0d0e0f10111213cb4072c00000000000",
    "store answer": "93c40a0001020304050607080991c407636f6e7461637492c400c40100",
    "about": "88a8736f667477617265a3312e30a8757074696d655f73cb4004000000000000ab6e756d5f7265636f72647303ac7265636f72645f627974657304aa6e756d5f63616368656405ac6e756d5f636f6e746163747306a969735f636c69656e74c2a677616c6c5f73cb401e000000000000",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_these_bytes(name):
    encoded = msgspec.msgpack.encode(MESSAGES[name])
    assert encoded.hex() == BYTES[name]
    assert msgspec.msgpack.decode(encoded, type=type(MESSAGES[name])) == MESSAGES[name]


def test_methods_have_these_names():
    assert (PING, FIND, STORE, ABOUT) == ("dht.ping", "dht.find", "dht.store", "dht.about")


@pytest.mark.parametrize(
    ("host", "packed"),
    [
        ("10.0.0.7", "0fa0040a000007"),
        ("::ffff:10.0.0.7", "0fa0040a000007"),
        ("2001:db8::1", "0fa00620010db8000000000000000000000001"),
        ("p1", "0fa0007031"),
    ],
)
def test_a_contact_is_these_bytes(host, packed):
    peer = Peer(Address(host, 4000), PeerId(KEY))
    assert pack(peer).hex() == KEY.hex() + packed
    read = ContactBook(has_names=True).read(pack(peer), Address("10.0.0.9", 1))
    assert (read.peer.id, read.peer.address.port, read.packed) == (PeerId(KEY), 4000, pack(peer))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("plain name", "358ba8f0c93ac7718627fe4f57b87286efcf075f"),
        ("ffn.3.14", "cbf5cd4a975ee7ae9a700e94b79fedd937018770"),
        (b"bytes", "118b011e1086ac4baf4d44a49a0b675981c130bf"),
        (("a", 1, None), "6f9b748fbe51d8ae956640424a29baa240e64d89"),
    ],
)
def test_a_name_has_this_key(name, key):
    assert key_of(name).digest.hex() == key


def test_values_and_subkeys_are_these_bytes():
    value = {"a": [1, 2.5, None, True, b"x"], "b": ("t", (1,))}
    assert encode_value(value).hex() == "82a1619501cb4004000000000000c0c3c40178a162c7070192a174d5019101"
    assert encode_subkey(("t", 5, None)).hex() == "c7050193a17405c0"
    assert (
        encode_subkey(reserved(OWNER.peer_id, "label")).hex()
        == "c7290193ab73686f616c2e6f776e6572c414efde43d8c87a9f4a5dc48483487765302e20f169a56c6162656c"
    )
    assert reserved_key(OWNER.peer_id, "label").digest.hex() == "2336171b9a6defde43d8c87a9f4a5dc40cab8187"


def test_signatures_are_these_bytes():
    alone = sign(OWNER, KEY, PLAIN, b"\x01", 1_700_000_000.0)
    unsigned = [(bytes([at]) * 20, Slot(PLAIN, bytes([at]), 1_700_000_000.0)) for at in range(3)]
    together = sign_many(OWNER, unsigned)
    assert (
        alone.signature.hex()
        == "452e8c46faed33658a67de0ef29b39a8c3657a2480e00ab74b55e7bf5e9209640072d9d2c381745d230b996acb0ee7f38831fc318ab7b99def5c32e0da96cc0a"
    )
    assert (
        together[2].signature.hex()
        == "39c26a0c7f3a74587f1c060970caa717201b5e059f34e076f01cb027381f7370006d50a5d2c8d0763b6240b234d1683c4e2f8d4fc8292cb5188e19800b355b0d0275501b7665621467880830b82b57b1bff0fc95bb1fe9a0a7b689b0441774d487"
    )
    checker = Validator()
    assert checker.check(KEY, alone) is None
    assert [checker.check(key, slot) for (key, _), slot in zip(unsigned, together, strict=True)] == [None] * 3


def test_coordinates_are_these_bytes():
    coordinates = [-1, 0, 1, 200, 70_000]
    packed = pack_coordinates(coordinates)
    assert packed.hex() == "95010101ccc7ce000110a8"
    assert unpack_coordinates(packed) == coordinates
