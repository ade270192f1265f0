import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import Address, Key, Peer, PeerId, UsageError

DIGEST = bytes(range(20))
digests = st.binary(min_size=20, max_size=20)


@given(digests)
def test_an_id_is_read_back_from_its_printed_form(digest):
    for kind in (PeerId, Key):
        assert kind.parse(str(kind(digest))) == kind(digest)


@given(digests, digests)
def test_ids_of_one_kind_are_ordered_as_their_digests(first, second):
    assert (PeerId(first) < PeerId(second)) == (first < second)
    assert (PeerId(first) == PeerId(second)) == (first == second)
    assert (PeerId(first) >= PeerId(second)) == (first >= second)


def test_ids_of_different_kinds_are_never_equal_or_ordered():
    assert PeerId(DIGEST) != Key(DIGEST)
    assert PeerId(DIGEST) != DIGEST
    assert len({PeerId(DIGEST), Key(DIGEST)}) == 2
    with pytest.raises(TypeError):
        assert PeerId(DIGEST) < Key(DIGEST)


def test_the_same_bytes_have_different_ids_as_a_public_key_and_as_a_name():
    assert PeerId.of_public_key(b"x" * 32).digest != Key.of(b"x" * 32).digest
    assert Key.of("läuft") == Key.of("läuft".encode())


def test_an_id_cannot_be_changed():
    with pytest.raises(AttributeError, match="PeerId cannot be changed"):
        PeerId(DIGEST).digest = b""


def test_short_and_repr_show_the_digits():
    peer_id = PeerId(DIGEST)
    assert peer_id.short == "00010203"
    assert repr(peer_id) == f"PeerId({DIGEST.hex()})"


@pytest.mark.parametrize("wrong", [b"", b"x" * 19, b"x" * 21, "x" * 20, bytearray(20), None])
def test_an_id_takes_20_bytes(wrong):
    with pytest.raises(UsageError, match=r"Key takes 20 bytes, not (a|\d+) \w+\.\n.*Key\.parse"):
        Key(wrong)


@pytest.mark.parametrize("wrong", ["", "12", "g" * 40, "0" * 39, "0" * 42, "ä" * 40])
def test_what_is_no_id_is_named_and_explained(wrong):
    with pytest.raises(UsageError, match="is not a PeerId") as caught:
        PeerId.parse(wrong)
    assert repr(wrong) in str(caught.value)
    assert "40 hexadecimal digits" in str(caught.value)


def test_ids_and_peers_can_be_copied():
    peer = Peer(Address("10.0.0.7", 31337), PeerId(DIGEST))
    assert copy.deepcopy(peer) == copy.copy(peer) == peer
    assert dataclasses.asdict(peer)["id"] == peer.id


def test_a_peer_from_another_process_is_found_in_a_table():
    """Text hashes differently in every process, so a hash must not travel."""
    code = (
        "import pickle, sys; from shoal.core import Address, Peer;"
        "sys.stdout.buffer.write(pickle.dumps(Peer(Address('host', 1))))"
    )
    sent = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert pickle.loads(sent) in {Peer(Address("host", 1)): None}


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:31337", "127.0.0.1", 31337),
        ("[::1]:80", "::1", 80),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
        ("gpu-7.example.org:0", "gpu-7.example.org", 0),
        ("  host:65535 ", "host", 65535),
    ],
)
def test_addresses_are_read(text, host, port):
    address = Address.parse(text)
    assert address == Address(host, port)
    assert Address.parse(str(address)) == address
    assert str(address) == text.strip()


@pytest.mark.parametrize(
    "text",
    ["", "host", ":80", "host:", "host:port", "::1:80", "[::1]", "[]:80", "a b:1", "http://h:1", "h:-1"],
)
def test_what_is_no_address_is_named_and_an_example_given(text):
    with pytest.raises(UsageError, match="is no address") as caught:
        Address.parse(text)
    assert repr(text) in str(caught.value)
    assert "10.0.0.7:31337" in str(caught.value)


@pytest.mark.parametrize(("host", "port"), [("", 80), ("host", -1), ("host", 65536)])
def test_an_address_needs_a_host_and_a_port_that_exists(host, port):
    with pytest.raises(UsageError, match="is no address"):
        Address(host, port)


def test_a_port_above_the_highest_is_refused_when_read():
    with pytest.raises(UsageError, match="0 to 65535"):
        Address.parse("host:65536")


def test_equal_peers_hash_alike_and_a_known_id_makes_another_peer():
    known = Peer(Address("host", 1), PeerId(DIGEST))
    assert Peer.at("host:1") == Peer(Address("host", 1))
    assert hash(Peer.at("host:1")) == hash(Peer.at(Address("host", 1)))
    assert known != Peer.at("host:1")
    assert dataclasses.replace(known, id=None) in {Peer.at("host:1"): None}


def test_a_peer_prints_where_it_is_and_who():
    assert str(Peer.at("host:1")) == "host:1"
    assert str(Peer(Address("::1", 1), PeerId(DIGEST))) == "00010203 ([::1]:1)"
