"""Seals of sessions, replays, and the tokens that prove addresses."""

import os
import random

import pytest

from shoal.transport.datagrams.sessions import REPLAY_WINDOW, AddressTokens, AeadSeal, BareSeal, ReplayWindow
from shoal.transport.datagrams.wire import HEADER_BYTES

A, B = ("10.0.0.1", 4000), ("10.0.0.2", 4000)


def pair():
    there, back = os.urandom(32), os.urandom(32)
    return AeadSeal(there, back), AeadSeal(back, there)


def test_what_is_sealed_can_be_opened_by_the_other_side_alone():
    one, other = pair()
    header = bytes(range(HEADER_BYTES))
    packet = one.seal(header, b"content")
    assert packet.startswith(header)
    assert b"content" not in packet
    assert other.open(packet) == b"content"
    assert one.open(packet) is None
    assert pair()[1].open(packet) is None


@pytest.mark.parametrize("place", [0, 3, 5, 15, HEADER_BYTES, -1])
def test_a_changed_byte_anywhere_is_noticed(place):
    one, other = pair()
    packet = bytearray(one.seal(bytes(HEADER_BYTES), b"content"))
    packet[place] ^= 1
    assert other.open(bytes(packet)) is None


@pytest.mark.parametrize("size", [0, 10, 16])
def test_a_truncated_packet_is_refused(size):
    one, other = pair()
    assert other.open(one.seal(bytes(HEADER_BYTES), b"content")[: HEADER_BYTES + size]) is None


def test_a_bare_seal_changes_nothing():
    seal = BareSeal()
    assert seal.open(seal.seal(bytes(HEADER_BYTES), b"content")) == b"content"
    assert seal.is_fresh(0)
    assert seal.is_fresh(0)


def test_no_key_appears_in_a_repr():
    key = b"k" * 32
    assert "kkk" not in repr(AeadSeal(key, key)) + repr(AddressTokens(random.Random(1)))


def test_each_counter_is_fresh_once_in_any_order():
    window = ReplayWindow()
    counters = list(range(500))
    random.Random(3).shuffle(counters)
    assert all(window.is_fresh(counter) for counter in counters)
    assert not any(window.is_fresh(counter) for counter in counters)


def test_a_packet_that_was_overtaken_by_too_many_is_refused():
    window = ReplayWindow()
    assert window.is_fresh(0)
    assert window.is_fresh(REPLAY_WINDOW + 1)
    assert not window.is_fresh(1)  # never came, but nobody remembers that
    assert window.is_fresh(2)
    assert not window.is_fresh(2)


def test_a_jump_far_ahead_forgets_nothing_that_is_still_in_the_window():
    window = ReplayWindow()
    for counter in (5, 2**64 - 1):
        assert window.is_fresh(counter)
        assert not window.is_fresh(counter)
    assert not window.is_fresh(5)
    assert window.is_fresh(2**64 - 2)


def test_a_token_is_good_for_one_address_one_session_and_a_minute_or_two():
    tokens = AddressTokens(random.Random(1))
    token = tokens.make(A, b"session1", 1000.0)
    assert tokens.is_good(token, A, b"session1", 1000.0)
    assert tokens.is_good(token, A, b"session1", 1060.0)
    assert not tokens.is_good(token, A, b"session1", 1130.0)
    assert not tokens.is_good(token, B, b"session1", 1000.0)
    assert not tokens.is_good(token, (A[0], 4001), b"session1", 1000.0)
    assert not tokens.is_good(token, A, b"session2", 1000.0)
    assert not tokens.is_good(b"", A, b"session1", 1000.0)
    assert not AddressTokens(random.Random(2)).is_good(token, A, b"session1", 1000.0)
