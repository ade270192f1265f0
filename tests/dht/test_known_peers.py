import logging

import msgspec
import pytest

from shoal.core import Address, Peer, PeerId
from shoal.core.identity import Identity, new_secret
from shoal.dht.join import MAX_PEERS, KnownPeers, swarm_tag
from shoal.transport import Membership, SwarmSecret


def peer(number, host="10.0.0.1"):
    return Peer(Address(host, 1000 + number), PeerId(number.to_bytes(20)))


def kept(path, swarm="open"):
    return KnownPeers(path, swarm).load()


def test_peers_are_there_next_time(tmp_path):
    path = tmp_path / "folder" / "peers.json"
    known = KnownPeers(path)
    known.remember([peer(1), peer(2, "::1")])
    known.save()
    assert kept(path) == [peer(1), peer(2, "::1")]


def test_without_a_file_they_are_kept_in_memory():
    known = KnownPeers()
    assert known.load() == []
    known.remember([peer(1)])
    known.save()
    assert known.load() == [peer(1)]


def test_those_of_another_swarm_are_left_out(tmp_path):
    known = KnownPeers(tmp_path / "peers.json", "one")
    known.remember([peer(1)])
    known.save()
    assert kept(known.path, "one") == [peer(1)]
    assert kept(known.path, "other") == []


def test_the_tag_of_a_swarm_comes_from_its_secret():
    def tag(secret):
        return swarm_tag(Membership(Identity.generate(), SwarmSecret.parse(secret)))

    secret = new_secret()
    assert tag(secret) == tag(secret) != tag(new_secret())
    assert swarm_tag(None) == "open"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"{}",
        b"[1, 2",
        b'{"schema": "shoal report", "swarm": "open", "peers": []}',
        b'{"schema": "shoal known peers", "swarm": "open", "peers": [{"id": "zz", "address": "a:1"}]}',
        b'{"schema": "shoal known peers", "swarm": "open", "peers": [{"id": "'
        + b"0" * 40
        + b'", "address": "a"}]}',
        b" " * (2 << 20),
    ],
)
def test_a_damaged_file_counts_as_empty_and_is_written_anew(tmp_path, caplog, content):
    path = tmp_path / "peers.json"
    path.write_bytes(content)
    known = KnownPeers(path)
    assert known.load() == []
    assert "cannot be read" in caplog.text
    known.remember([peer(1)])
    known.save()
    assert kept(path) == [peer(1)]


def test_newer_ones_come_first_and_the_oldest_are_forgotten():
    known = KnownPeers()
    known.remember(peer(number) for number in range(1, MAX_PEERS + 1))
    known.remember([peer(500), Peer(Address("nobody", 1))])
    assert known.peers == [peer(500), *(peer(number) for number in range(1, MAX_PEERS))]


def test_of_too_many_some_of_all_are_taken():
    known = KnownPeers()
    known.remember(peer(number) for number in range(1000))
    assert MAX_PEERS // 2 < len(known.peers) <= MAX_PEERS
    assert known.peers[-1].address.port - 1000 > 900


def test_a_peer_that_has_a_new_id_replaces_the_old_one():
    known = KnownPeers()
    known.remember([peer(1)])
    reborn = Peer(peer(1).address, PeerId(bytes(20)))
    known.remember([reborn])
    assert known.peers == [reborn]


def test_the_file_is_left_alone_while_nothing_changes(tmp_path):
    known = KnownPeers(tmp_path / "peers.json")
    known.remember([peer(1), peer(2)])
    known.save()
    known.path.write_bytes(b"not again")
    known.remember([peer(2), peer(1)])
    known.save()
    assert known.path.read_bytes() == b"not again"


def test_nobody_does_not_overwrite_those_who_were_known(tmp_path):
    path = tmp_path / "peers.json"
    known = KnownPeers(path)
    known.remember([peer(1)])
    known.save()
    KnownPeers(path).save()
    assert kept(path) == [peer(1)]


def test_a_file_that_cannot_be_written_is_complained_of_once(tmp_path, caplog):
    known = KnownPeers(tmp_path)
    for number in range(3):
        known.remember([peer(number)])
        known.save()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert known.peers


def test_the_file_is_plain_json(tmp_path):
    known = KnownPeers(tmp_path / "peers.json", "tag")
    known.remember([peer(1)])
    known.save()
    assert msgspec.json.decode(known.path.read_bytes()) == {
        "schema": "shoal known peers",
        "swarm": "tag",
        "peers": [{"id": f"{1:040x}", "address": "10.0.0.1:1001"}],
    }
