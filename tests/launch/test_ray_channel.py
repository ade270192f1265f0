import socket

import pytest

from shoal.core.elastic import encode_message
from shoal.core.errors import ProtocolError
from shoal.launch.protocol import MAGIC, Beat, Decoder, Down, Started, WorkerEnded
from shoal.launch.ray_bridge import ActorPlace
from shoal.launch.ray_engine import RayChannel


class Bridge:
    """Knows of a single actor."""

    def __init__(self, end):
        self.ends = [end]
        self.place = None

    def place_of(self, index):
        return self.place

    def why_lost(self, index):
        return "its power failed"

    def close_ends(self, indices):
        for index in indices:
            self.ends[index].close()


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    channel = RayChannel(Bridge(ours), 0, ActorPlace("1234567890", "10.0.0.7", "a node", "python"))
    yield channel, theirs
    channel.close()
    theirs.close()


def let_it_work(channel):
    for _, _, action in channel.interests():
        action()


def test_messages_come_whole_and_in_order(pair):
    channel, theirs = pair
    data = MAGIC + encode_message(Started(3, 77)) + encode_message(WorkerEnded(3, 0))
    theirs.sendall(data[:-2])
    let_it_work(channel)
    assert channel.take() == [Started(3, 77)]
    theirs.sendall(data[-2:])
    let_it_work(channel)
    assert channel.take() == [WorkerEnded(3, 0)]
    assert channel.is_open


def test_what_the_bridge_does_not_take_at_once_is_sent_later(pair):
    channel, theirs = pair
    num_messages = 200_000
    for _ in range(num_messages):
        channel.send(Beat())
    decoder, num_came = Decoder(Down), 0
    while num_came < num_messages:
        num_came += len(decoder.feed(theirs.recv(1 << 20)))
        let_it_work(channel)
    assert num_came == num_messages


def test_a_way_that_the_bridge_closes_has_ended_and_says_why(pair):
    channel, theirs = pair
    theirs.close()
    let_it_work(channel)
    assert not channel.is_open
    assert channel.interests() == []
    channel.send(Beat())
    assert "on a node (Ray node 12345678 at 10.0.0.7) is lost" in str(channel.explain())
    assert "its power failed" in str(channel.explain())


def test_what_is_no_message_is_an_error_after_those_that_were(pair):
    channel, theirs = pair
    theirs.sendall(MAGIC + encode_message(Started(0, 1)))
    let_it_work(channel)
    theirs.sendall(b"\xff" * 64)
    let_it_work(channel)
    assert channel.take() == [Started(0, 1)]
    with pytest.raises(ProtocolError):
        channel.take()


def test_closing_it_closes_the_way_to_the_actor(pair):
    channel, theirs = pair
    channel.close()
    channel.close()
    assert not channel.is_open
    assert theirs.recv(1) == b""


def test_an_actor_that_was_asked_for_later_says_where_it_is(pair):
    channel, _ = pair
    places = []
    channel.on_place = places.append
    assert channel.take() == []
    assert not places
    channel._bridge.place = ActorPlace("abcdefghij", "10.0.0.8", "another", "python")
    channel.take()
    channel.take()
    assert [place.host for place in places] == ["another"]
    assert channel.host == "another (Ray node abcdefgh at 10.0.0.8)"
