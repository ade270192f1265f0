"""How long to wait for an answer, and frames that share a packet."""

import random

import pytest

from shoal.core import Address, Peer
from shoal.transport.datagrams.sessions import (
    INITIAL_TIMEOUT_S,
    MAX_TIMEOUT_S,
    MIN_TIMEOUT_S,
    AeadSeal,
    BareSeal,
    RoundTrips,
    Session,
    Stats,
)
from shoal.transport.datagrams.wire import COUNTER, MAX_PACKET_BYTES, PREFIX, UnreadablePacket, Working
from shoal.transport.frames import encode

PEER = Peer(Address("10.0.0.1", 1))
ELSEWHERE = ("10.0.0.66", 6)


class FakeLoop:
    def time(self):
        return 0.0


class FakeHub:
    def __init__(self):
        self.loop, self.stats, self.random = FakeLoop(), Stats(), random.Random(0)
        self.dirty, self.bad, self.replays, self.blamed = [], [], 0, []

    def on_dirty(self, session):
        self.dirty.append(session)

    def on_bad_packet(self, peer, why):
        self.bad.append(why)
        self.blamed.append(peer.address.host)

    def on_replay(self, peer):
        self.replays += 1
        self.blamed.append(peer.address.host)


class FakePort:
    def __init__(self):
        self.sent = []

    def send(self, packet, where):
        self.sent.append(packet)


def session(seal=None, *, has_begun=True):
    made = Session(FakeHub(), FakePort(), PEER, ("10.0.0.1", 1))
    if has_begun:
        made.begin(seal or BareSeal(), b"theirsid")
    return made


def test_frames_of_a_turn_share_a_packet():
    one = session()
    for number in range(10):
        one.queue(encode((8, number)))
    assert one.transport.dirty == [one]
    assert one.socket.sent == []
    one.flush()
    (packet,) = one.socket.sent
    assert packet.startswith(PREFIX + b"\x04theirsid" + COUNTER.pack(0))
    assert one.read(packet, ELSEWHERE).frames == [Working(number) for number in range(10)]
    one.flush()
    assert len(one.socket.sent) == 1


def test_frames_that_do_not_fit_take_several_packets_in_order():
    one = session(AeadSeal(b"k" * 32, b"k" * 32))
    for number in range(50):
        one.queue(encode((5, number, None, [bytes(100)])))
    one.flush()
    assert all(len(packet) <= MAX_PACKET_BYTES for packet in one.socket.sent)
    assert len(one.socket.sent) == 5
    ids = [frame.id for packet in one.socket.sent for frame in one.read(packet, ELSEWHERE).frames]
    assert ids == list(range(50))
    assert one.num_sent == 5


def test_a_packet_that_comes_twice_is_read_once():
    one = session(AeadSeal(b"k" * 32, b"k" * 32))
    packet = one.packet([encode((8, 1))])
    assert one.read(packet, ELSEWHERE) is not None
    assert one.read(packet, ELSEWHERE) is None
    assert one.transport.replays == 1
    assert one.transport.blamed == ["10.0.0.66"]  # not the peer whose packet it is


def test_what_is_not_genuine_or_not_readable_is_dropped():
    one = session(AeadSeal(b"k" * 32, b"k" * 32))
    packet = one.packet([encode((8, 1))])
    assert one.read(packet[:-1] + bytes([packet[-1] ^ 1]), ELSEWHERE) is None
    bare = session()
    assert bare.read(packet[:20] + b"nonsense", ELSEWHERE) is None
    assert session(has_begun=False).read(packet, ELSEWHERE) is None
    assert len(one.transport.bad) == len(bare.transport.bad) == 1
    assert one.transport.blamed == ["10.0.0.66"]


def test_nothing_is_sent_before_the_greetings():
    one = session(has_begun=False)
    one.queue(encode((8, 1)))
    one.flush()
    assert one.socket.sent == []
    with pytest.raises(UnreadablePacket):
        one.packet([])


def test_frames_that_cannot_be_sent_are_not_tried_again():
    one = session(AeadSeal(b"k" * 32, b"k" * 32))
    one.begin(one.seal, b"long" * 200)  # no nonce can be made from it
    one.queue(encode((8, 1)))
    with pytest.raises(ValueError, match="Nonce"):
        one.flush()
    one.flush()


def test_the_timeout_follows_the_round_trips():
    trips = RoundTrips()
    assert trips.timeout_s == INITIAL_TIMEOUT_S
    trips.observe(0.1)
    assert trips.timeout_s == pytest.approx(0.1 + 4 * 0.05)
    for _ in range(100):
        trips.observe(0.1)
    assert trips.timeout_s == pytest.approx(0.101, abs=0.002)
    for _ in range(200):
        trips.observe(0.3)
    assert trips.smoothed_s == pytest.approx(0.3, rel=0.01)


def test_the_timeout_has_a_floor_and_a_ceiling():
    trips = RoundTrips()
    for _ in range(50):
        trips.observe(0.0)
    assert trips.timeout_s == MIN_TIMEOUT_S
    for _ in range(50):
        trips.observe(100.0)
    assert trips.timeout_s == MAX_TIMEOUT_S


def test_a_timeout_that_was_too_short_grows_until_an_answer_teaches_better():
    trips = RoundTrips()
    trips.missed(0.5)
    assert trips.timeout_s == 1.0
    trips.missed(0.1)  # an earlier, shorter wait says nothing new
    assert trips.timeout_s == 1.0
    trips.observe(0.6)
    assert 0.6 < trips.timeout_s < 2.0


def test_a_steady_line_is_rarely_asked_twice():
    source, trips, num_early = random.Random(1), RoundTrips(), 0
    for _ in range(1000):
        trip_s = source.uniform(0.08, 0.12)
        num_early += trip_s > trips.timeout_s
        trips.observe(trip_s)
    assert num_early <= 3
