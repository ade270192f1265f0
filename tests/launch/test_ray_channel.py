import socket

import pytest

from shoal.core.elastic import encode_message
from shoal.core.errors import PeerRefused, ProtocolError
from shoal.launch import Output, ray_engine
from shoal.launch.polling import poll_once
from shoal.launch.protocol import MAGIC, Beat, Decoder, DescriptorChannel, Down, Started, WorkerEnded
from shoal.launch.ray_bridge import ActorRequest


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()

    def explain(host):
        return PeerRefused(f"{host}: its power failed")

    channel = DescriptorChannel("a node", ours.fileno(), ours.fileno(), explain, ours.close)
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
    assert "a node: its power failed" in str(channel.explain())


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


STAND_IN = """
import os, sys
from shoal.core.elastic import encode_message
from shoal.launch.ray_bridge import BridgeReport
where = "a node (Ray node 12345678 at 10.0.0.7)"
reports = [BridgeReport(), BridgeReport(num_agents=1), BridgeReport(lost=(0, "its power failed", where))]
os.write(1, b"".join(map(encode_message, reports)))
os.close(int(sys.argv[1]))
sys.stdin.read()
"""
"""In the place of the process that speaks with Ray: its only actor is lost at once."""


def test_an_actor_that_is_lost_is_named_with_its_node(monkeypatch):
    monkeypatch.setattr(ray_engine, "_BRIDGE", STAND_IN)
    (agent,) = ray_engine.RayEngine(ActorRequest("", 1.0, 20.0), Output()).open(1, 1, is_restart=False)
    try:
        while agent.channel.is_open:
            poll_once(agent.channel.interests())
        assert "on a node (Ray node 12345678 at 10.0.0.7) is lost: its power failed" in str(
            agent.channel.explain()
        )
    finally:
        agent.channel.close()
