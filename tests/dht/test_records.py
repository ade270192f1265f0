"""Records on the wire, and what became of storing them."""

import msgspec
import pytest

from shoal.dht.records import PLAIN, Entry, Slot, Stored, Value, Verdict
from shoal.dht.wire import Item


def test_items_travel():
    item = Item(b"k" * 20, [Slot(PLAIN, b"v", 10.5), Slot(b"x", b"w", 11.0, b"o" * 32, b"s" * 64)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(item), type=Item) == item


def test_a_slot_of_a_newer_version_is_read():
    encoded = msgspec.msgpack.encode([b"x", b"v", 10.0, b"", b"", "more"])
    assert msgspec.msgpack.decode(encoded, type=Slot) == Slot(b"x", b"v", 10.0)


@pytest.mark.parametrize(
    "fields",
    [[], [b"x"], [b"x", b"v"], ["x", b"v", 1.0], [b"x", b"v", "soon"], [b"x", b"v", None], {"subkey": b"x"}],
)
def test_what_is_no_slot(fields):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Slot)


def test_slots_cannot_be_changed():
    with pytest.raises(AttributeError):
        Slot(PLAIN, b"v", 1.0).value = b"other"


def test_verdicts_fit_into_a_byte_each():
    assert [Verdict(number) for number in bytes(Verdict)] == list(Verdict)


def test_one_replica_is_enough_to_count_as_stored():
    assert not Stored(0, Verdict.NOT_NEWER)
    assert Stored(1, Verdict.FULL)


def test_a_value_is_a_pair_with_an_owner_to_ask_for():
    value, expires_at_s, owner = Value("v", 10.0)
    assert (value, expires_at_s, owner) == ("v", 10.0, None)


def test_entries_are_plain_and_unowned_unless_said_otherwise():
    entry = Entry("name", 1, 10.0)
    assert entry.subkey is None
    assert not entry.is_owned
