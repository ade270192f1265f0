import pytest

from shoal.bench import experts_fleet
from shoal.bench.experts_config import config_of
from shoal.bench.experts_fleet import ClientFleet
from shoal.core import BenchmarkError


@pytest.fixture(autouse=True)
def _sample_clients(monkeypatch, request):
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath / "tests"))
    monkeypatch.setattr(experts_fleet, "_ATTEND", "bench.sample_clients:attend")


def fleet(uid="expert0", num_clients=5, client_processes=2):
    given = {"num_clients": num_clients, "client_processes": client_processes, "batch_size": 10}
    config = config_of("minimalistic", {**given, "num_batches_per_client": 3, "device": "cpu"})
    return ClientFleet(config, 0, {"port": 1, "uids": [uid]})


def test_clients_are_spread_and_what_they_did_is_added_up():
    looks = []
    with fleet() as clients:
        clients.connect()
        tally, seconds = clients.phase("experts", lambda: looks.append(1))
    assert tally.num_samples == 5 * 3 * 10
    assert sorted(tally.forward_us) == [1000, 1001, 1002, 1003, 1004]
    assert tally.failures == {"PeerBusy": 2}
    assert tally.first_failure == "PeerBusy: later"
    assert seconds > 0
    assert looks
    assert clients.num_lost == 0


@pytest.mark.parametrize("uid", ["deadly", "silent"])
def test_a_process_that_dies_or_hangs_is_counted_and_the_others_go_on(uid, monkeypatch):
    with fleet(uid) as clients:
        clients.connect()
        if uid == "silent":
            monkeypatch.setattr(experts_fleet, "_ANSWER_S", 0.3)
            monkeypatch.setattr(experts_fleet, "_CALL_S", 0)
        tally, _ = clients.phase("experts")
    assert clients.num_lost == 3
    assert tally.num_samples == 2 * 3 * 10
    assert tally.failures == {"PeerBusy": 1, "LostClient": 3 * 3 * 2}
    assert ("signal 9" if uid == "deadly" else "did not answer 'experts'") in clients.complaint


def test_a_fleet_without_anybody_left_is_a_failure():
    with fleet("deadly", num_clients=1, client_processes=1) as clients:
        clients.connect()
        with pytest.raises(BenchmarkError, match="Client process 1 of 1 ended with signal 9"):
            clients.phase("experts")
