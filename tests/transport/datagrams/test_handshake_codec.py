"""HandshakeCodec: who they come from, and that nobody else could have written them."""

import random

import pytest

from shoal.core import PeerId
from shoal.core.identity import Identity
from shoal.transport.datagrams.handshake import HandshakeCodec, SealedHandshakeCodec
from shoal.transport.datagrams.wire import (
    HELLO_BYTES,
    MIN_PACKET_BYTES,
    SEALED,
    Hello,
    PacketKind,
    Refusal,
    UnreadablePacket,
    Welcome,
)
from shoal.transport.trust.membership import Membership
from shoal.transport.trust.secret import SwarmSecret

SECRET = SwarmSecret.parse("the secret of this swarm, long enough")
OTHER = SwarmSecret.parse("the secret of another swarm, long enough")


def sealed(secret=SECRET):
    return SealedHandshakeCodec(Membership(Identity.generate(), secret), random.SystemRandom())


def bare(peer_id=None):
    return HandshakeCodec(peer_id, random.Random(1))


def hello_of(codec, target=b""):
    return Hello(b"s" * 16, codec.ephemeral, b"session1", target, 1e9)


def welcome_of(codec):
    return Welcome(b"s" * 16, b"t" * 16, codec.ephemeral, b"session2", b"token678", 1024)


def read(codec, packet):
    greeting = codec.open(packet)
    return codec.verified(greeting), greeting.body


def test_a_sealed_hello_tells_who_wrote_it():
    alice, bob = sealed(), sealed()
    packet = alice.write(PacketKind.HELLO, hello_of(alice))
    assert packet[3] == PacketKind.HELLO | SEALED
    assert len(packet) == HELLO_BYTES
    assert read(bob, packet) == (alice.peer_id, hello_of(alice))


def test_a_bare_hello_tells_who_it_claims_to_be():
    peer_id = PeerId(bytes(range(20)))
    packet = bare(peer_id).write(PacketKind.HELLO, hello_of(bare()))
    assert len(packet) == HELLO_BYTES
    assert read(bare(), packet)[0] == peer_id
    assert read(bare(), bare().write(PacketKind.HELLO, hello_of(bare())))[0] is None


@pytest.mark.parametrize("codec", [sealed(), bare()])
def test_answers_are_not_larger_than_a_hello(codec):
    assert len(codec.write(PacketKind.WELCOME, welcome_of(codec))) <= HELLO_BYTES
    assert len(codec.write(PacketKind.REFUSAL, Refusal(b"s" * 16, "x" * 110))) <= HELLO_BYTES
    assert len(codec.unknown(bytes(100))) <= MIN_PACKET_BYTES


def test_another_secret_opens_nothing():
    alice = sealed()
    with pytest.raises(UnreadablePacket, match="another secret"):
        sealed(OTHER).open(alice.write(PacketKind.HELLO, hello_of(alice)))


def test_a_greeting_cannot_be_changed_nor_used_as_another_kind():
    alice, bob = sealed(), sealed()
    packet = alice.write(PacketKind.HELLO, hello_of(alice))
    for place in (3, 4, 20, -1):
        changed = bytearray(packet)
        changed[place] ^= 3
        with pytest.raises(UnreadablePacket):
            read(bob, bytes(changed))


def test_a_member_cannot_sign_for_another():
    alice, mallory, bob = sealed(), sealed(), sealed()
    mallory._public_key = alice._public_key  # knows the secret, claims to be Alice
    with pytest.raises(UnreadablePacket, match="signature"):
        read(bob, mallory.write(PacketKind.HELLO, hello_of(mallory)))


@pytest.mark.parametrize("content", [b"", b"\xc0", b"\xff" * 300, b"\x93\x01\x02\x03"])
def test_nonsense_is_unreadable(content):
    header = bare().write(PacketKind.HELLO, hello_of(bare()))[:16]
    with pytest.raises(UnreadablePacket):
        read(bare(), header + content)


def test_a_claimed_id_of_the_wrong_length_is_refused():
    from shoal.transport.frames import encode

    header = bare().write(PacketKind.HELLO, hello_of(bare()))[:16]
    with pytest.raises(UnreadablePacket, match="wrong length"):
        read(bare(), header + encode((b"short", b"", encode(hello_of(bare())))))


def test_both_sides_of_a_session_get_the_same_keys_and_nobody_else():
    alice, bob, mallory = sealed(), sealed(), sealed()
    hello, welcome = hello_of(alice), welcome_of(bob)
    asking = alice.session_seal(welcome, bob.peer_id, hello.salt)
    answering = bob.session_seal(hello, alice.peer_id, welcome.salt)
    packet = asking.seal(bytes(20), b"question")
    assert answering.open(packet) == b"question"
    assert asking.open(answering.seal(bytes(20), b"answer")) == b"answer"
    # a member that saw both greetings lacks both private halves
    for half in (hello, welcome):
        for their_id in (alice.peer_id, bob.peer_id):
            guess = mallory.session_seal(half, their_id, hello.salt)
            assert guess.open(packet) is None
    # another session between the same two has other keys
    again = bob.session_seal(hello, alice.peer_id, b"u" * 16)
    assert again.open(packet) is None


def test_a_half_that_is_no_key_is_refused():
    alice = sealed()
    for half in (b"", b"short", bytes(32)):  # the last one is of low order
        with pytest.raises(UnreadablePacket):
            alice.session_seal(Hello(b"s" * 16, half, b"session1", b"", 1e9), alice.peer_id, b"t" * 16)


def test_only_a_member_can_say_that_a_session_is_unknown():
    alice, bob = sealed(), sealed()
    packet = bytes([*b"\xf0D\x01\x04", *range(16), *range(44)])
    answer = bob.unknown(packet)
    assert answer[4:20] == packet[4:20]
    assert len(answer) == 48
    assert alice.is_genuine_unknown(answer, bob.peer_id)
    assert not alice.is_genuine_unknown(sealed().unknown(packet), bob.peer_id)  # of somebody else's sessions
    assert not alice.is_genuine_unknown(answer, None)
    assert not alice.is_genuine_unknown(sealed(OTHER).unknown(packet), bob.peer_id)
    assert not alice.is_genuine_unknown(answer[:20], bob.peer_id)
    assert not alice.is_genuine_unknown(answer[:4] + bytes(16) + answer[20:], bob.peer_id)
    assert bare().is_genuine_unknown(bare().unknown(packet), None)


def test_nothing_secret_in_a_repr():
    codec = sealed()
    assert "secret of" not in repr(codec)
    assert codec.ephemeral.hex() not in repr(codec)
