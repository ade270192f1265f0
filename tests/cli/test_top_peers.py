from shoal.cli.status import swarm_shot
from shoal.core import Address, Peer, PeerId
from shoal.dht.crawl import Crawl, Visited
from shoal.dht.wire import About
from shoal.experts.status import SeenExpert

START = Address("10.0.0.7", 1001)


def visited(number, round_trip_s):
    about = About(
        software="1",
        uptime_s=90.0,
        num_records=3,
        record_bytes=400,
        num_cached=0,
        num_contacts=2,
        is_client=False,
        wall_s=0.0,
    )
    peer = Peer(Address("10.0.0.7", 1000 + number), PeerId(bytes([number]) * 20))
    return Visited(peer, about, round_trip_s)


def test_peers_stay_where_they_are_from_one_look_to_the_next():
    looks = [[visited(1, 0.02), visited(2, 0.01)], [visited(2, 0.02), visited(1, 0.01)]]
    shots = [swarm_shot(Crawl(peers, [], 0, 2, 1), [START]) for peers in looks]
    assert [[row[0] for row in shot.terminal.table.rows] for shot in shots] == [["01010101", "02020202"]] * 2
    shot = shots[0]
    assert shot.terminal.figures == (
        ("peers", "2"),
        ("silent", "0"),
        ("records", "6"),
        ("size", "800 B"),
        ("round trip", "15.0 ms"),
    )
    assert shot.terminal.notes == ()
    assert shot.result["num_peers"] == len(shot.document["peers"]) == 2
    assert 'shoal_peer_records{peer="' in shot.metrics
    assert "shoal_swarm_peers 2\n" in shot.metrics


def test_experts_stand_below_the_peers():
    expert = SeenExpert("ffn.1", "ffn", "01010101", 2, 3, 0.5, 120.0)
    shot = swarm_shot(Crawl([visited(1, 0.02)], [], 0, 1, 1), [START], [expert])
    (table,) = shot.terminal.more_tables
    assert table.rows == [("ffn.1", "ffn", "01010101", "2", "50%", "3", "120")]
    assert table in shot.terminal.items()
    assert shot.document["experts"][0]["samples_per_s"] == 120.0
