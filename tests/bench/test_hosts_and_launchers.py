from pathlib import Path

import pytest

from shoal.bench.ranks import HostFlags
from shoal.core import UsageError


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")


def test_alone_the_flag_counts_then_the_slots_of_the_hosts_then_the_default():
    assert HostFlags().launched_size is None
    assert HostFlags(hosts="10.9.9.9:4").num_workers(5, 2) == 5
    assert HostFlags(hosts="10.9.9.9:4,10.9.9.8:3").num_workers(None, 2) == 7
    assert HostFlags().num_workers(None, 2) == 2


@pytest.mark.usefixtures("launched")
def test_a_launcher_has_decided_how_many_there_are():
    assert HostFlags().launched_size == 3
    assert HostFlags().num_workers(None, 2) == 3
    assert HostFlags().num_workers(3, 2) == 3
    with pytest.raises(UsageError, match="--np 4 is not the 3 processes"):
        HostFlags().num_workers(4, 2)


def test_this_machine_alone_needs_no_ssh():
    assert HostFlags().starter(2) is None
    assert HostFlags(hosts="localhost:2").starter(2) is None


def test_hosts_with_too_few_slots_are_refused_before_anything_starts():
    with pytest.raises(UsageError, match="4 workers need more than the 2 slots"):
        HostFlags(hosts="10.9.9.9:2").starter(4)


@pytest.mark.usefixtures("launched")
def test_ranks_do_not_start_other_ranks():
    with pytest.raises(UsageError, match="leave -H out"):
        HostFlags(hosts="10.9.9.9:4").starter(3)


def test_a_machine_has_as_many_workers_as_its_slots_or_its_launcher_say(monkeypatch):
    assert HostFlags().workers_per_machine is None
    assert HostFlags(hosts="localhost:4").workers_per_machine is None
    assert HostFlags(hosts="10.9.9.9:4,10.9.9.8:4").workers_per_machine == 4
    for name, value in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert HostFlags().workers_per_machine == 2


def test_hosts_are_named_by_a_list_or_a_file():
    assert not HostFlags().are_named
    assert HostFlags(hosts="far:2").are_named
    assert HostFlags(hostfile=Path("hosts")).are_named
