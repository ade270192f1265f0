import pytest

from shoal.core import Peer, PeerBusy
from shoal.core.identity import Identity
from shoal.dht.protocol import BURST_S, RequestLimits, cost_of_find
from shoal.dht.settings import DHTSettings

SETTINGS = DHTSettings(max_messages_a_s=10, max_records_a_s=100)


def test_messages_and_records_are_counted_apart():
    rates, peer = RequestLimits(SETTINGS), Peer.at("10.0.0.1:7000")
    for _ in range(int(10 * BURST_S)):
        rates.take_messages(peer, 1, 5.0)
    with pytest.raises(PeerBusy, match="10 times a second") as caught:
        rates.take_messages(peer, 1, 5.0)
    assert "10.0.0.1:7000" in str(caught.value)
    assert "wait for 0.1 s" in str(caught.value)
    assert "max_messages_a_s" in str(caught.value)
    rates.take_records(peer, int(100 * BURST_S), 5.0)
    with pytest.raises(PeerBusy, match=r"(?s)100 records a second.*wait for 0.5 s.*max_records_a_s"):
        rates.take_records(peer, 50, 5.0)
    rates.take_records(peer, 50, 5.6)
    rates.take_messages(peer, 1, 5.6)


def test_more_ports_and_ids_of_a_host_gain_nothing():
    rates = RequestLimits(SETTINGS)
    rates.take_messages(Peer.at("10.0.0.1:7000"), 40, 0.0)
    twin = Peer(Peer.at("10.0.0.1:7001").address, Identity.from_seed(b"1" * 32).peer_id)
    with pytest.raises(PeerBusy):
        rates.take_messages(twin, 1, 0.0)
    rates.take_messages(Peer.at("10.0.0.2:7000"), 1, 0.0)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "[::1]", "localhost"])
def test_peers_on_this_machine_are_told_apart_by_their_ports(host):
    rates = RequestLimits(SETTINGS)
    rates.take_messages(Peer.at(f"{host}:7000"), 40, 0.0)
    with pytest.raises(PeerBusy):
        rates.take_messages(Peer.at(f"{host}:7000"), 1, 0.0)
    rates.take_messages(Peer.at(f"{host}:7001"), 40, 0.0)


def test_keys_that_share_a_find_cost_less_than_finds():
    assert [cost_of_find(num) for num in (0, 1, 2, 5, 32)] == [1, 1, 1.25, 2, 8.75]
    rates, peer = RequestLimits(SETTINGS), Peer.at("10.0.0.1:7000")
    for _ in range(20):
        rates.take_messages(peer, cost_of_find(5), 0.0)
    with pytest.raises(PeerBusy, match=r"wait for 0\.12 s"):
        rates.take_messages(peer, cost_of_find(2), 0.0)
    rates.take_messages(peer, cost_of_find(2), 0.125)
