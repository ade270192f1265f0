"""Workers that meet in a store, all in this process."""

import concurrent.futures
import os
import socket

import msgspec
import pytest
import torch.distributed as dist

from shoal.core import Address, Deadline, DeadlineExceeded, PeerRefused, Placement, UsageError
from shoal.core.processes import own_address
from shoal.core.run_options import SECRET_VARIABLE
from shoal.group.cluster.rendezvous import Rendezvous, WorkerAddress, host_id


def soon():
    return Deadline.after(20.0)


def together(size, work):
    """`work(rendezvous)` by rank, at once, over one store; errors as values."""
    store = dist.HashStore()

    def one(rank):
        try:
            return work(Rendezvous(store, rank, size))
        except Exception as error:  # noqa: BLE001
            return error

    with concurrent.futures.ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


def address_of(rank, **changes):
    fields = {"machine": str(rank // 2), "host_id": f"host {rank // 2}", "pid": 100 + rank}
    return WorkerAddress(rank, **{**fields, **changes})


def test_everybody_sees_every_address_in_rank_order():
    met = together(4, lambda rendezvous: rendezvous.meet(address_of(rendezvous.rank), soon()))
    assert met == [[address_of(rank) for rank in range(4)]] * 4


def test_those_that_do_not_come_are_named():
    alone = Rendezvous(dist.HashStore(), 1, 4)
    with pytest.raises(DeadlineExceeded, match=r"1 of 4 workers have come; rank 0, 2, 3 is missing"):
        alone.meet(address_of(1), Deadline.after(0.05))


def test_another_version_is_refused_and_named():
    def meet(rendezvous):
        version = "0.0.1" if rendezvous.rank == 2 else address_of(0).version
        return rendezvous.meet(address_of(rendezvous.rank, version=version, host="node"), soon())

    first, second, third = together(3, meet)
    assert isinstance(first, PeerRefused)
    assert first.peer == second.peer == 2
    assert "rank 2 on node runs Shoal 0.0.1" in first.what
    assert third.peer == 0


def test_a_worker_does_not_learn_its_own_address_from_the_store():
    """Strangers may reach the store, and private addresses would make workers send plain tensors."""

    class ChangedStore:
        def __init__(self, inner):
            self._inner = inner

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def get(self, key):
            rank = int(key.rpartition("/")[2])
            changed = address_of(rank, address=f"10.1.2.{rank}", network="10.1.2.0/24")
            return msgspec.msgpack.encode(changed).hex().encode()

    own = address_of(0, address="8.8.8.8", network="8.8.8.0/24")
    addresses = Rendezvous(ChangedStore(dist.HashStore()), 0, 1).meet(own, soon())
    assert addresses == [own]


@pytest.mark.parametrize("given", [None, "f" * 64])
def test_all_have_one_secret_that_the_launcher_or_rank_0_has_made(monkeypatch, given):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(SECRET_VARIABLE, given)
    secrets = together(3, lambda rendezvous: rendezvous.secret(soon()))
    assert len(set(secrets)) == 1
    assert secrets[0] == (given or secrets[0])
    assert len(secrets[0]) >= 32


def test_a_launcher_that_puts_two_machines_together_is_not_believed():
    def meet(rendezvous):
        return rendezvous.meet(address_of(rendezvous.rank, machine="0"), soon())

    addresses = together(4, meet)[0]
    assert addresses[0].machine == addresses[1].machine != addresses[2].machine == addresses[3].machine


def test_one_machine_that_is_split_counts_as_several():
    placements = [Placement(rank, 4, rank, 4, "torchrun", machine=0) for rank in range(4)]
    addresses = [WorkerAddress.here(placement, "127.0.0.1", 2) for placement in placements]
    assert [each.machine for each in addresses] == ["0/0", "0/0", "0/1", "0/1"]
    assert len({each.host_id for each in addresses}) == 1
    assert addresses[0].pid == os.getpid()


def test_without_the_launchers_word_machines_are_told_apart_by_what_they_are():
    here = WorkerAddress.here(Placement(1, 2, 0, 1, "torchrun"), "127.0.0.1")
    assert here.machine == here.host_id == host_id()


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_rank_0_opens_the_store_and_groups_of_a_run_do_not_see_each_other(free_port, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    placement = Placement(0, 1, 0, 1, "torchrun", Address("127.0.0.1", free_port))
    groups = [Rendezvous.open(placement, soon()), Rendezvous.open(placement, soon(), "workers")]
    groups.append(Rendezvous.open(placement, soon()))
    for number, group in enumerate(groups):
        group.store.set("key", str(number))
    assert [group.store.get("key") for group in groups] == [b"0", b"1", b"2"]


def test_a_store_that_nobody_opens_is_named(free_port, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    placement = Placement(1, 2, 0, 1, "torchrun", Address("127.0.0.1", free_port))
    with pytest.raises(DeadlineExceeded, match=f"rank 0 cannot be reached at 127.0.0.1:{free_port}"):
        Rendezvous.open(placement, Deadline.after(0.1))


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("Open MPI", "mpirun -x MASTER_ADDR -x MASTER_PORT"),
        ("MPICH or Intel MPI", "-genvlist MASTER_ADDR,MASTER_PORT"),
        ("torchrun", "set MASTER_ADDR"),
    ],
)
def test_without_a_place_to_meet_the_error_says_how_to_name_one(source, line):
    with pytest.raises(UsageError) as raised:
        Rendezvous.open(Placement(0, 4, 0, 2, source), soon())
    assert line in raised.value.next_step
    assert "2 of 4 workers here" in raised.value.what


def test_an_interface_is_named_or_found():
    assert own_address("127.0.0.1", None) == "127.0.0.1"
    names = [name for _, name in socket.if_nameindex()]
    with pytest.raises(UsageError, match="no network interface 'nowhere0'") as raised:
        own_address("nowhere0", None)
    assert names[0] in raised.value.cause
    assert own_address(None, Address("localhost", 29500))


@pytest.mark.skipif("lo" not in [name for _, name in socket.if_nameindex()], reason="not on this system")
def test_the_address_of_an_interface():
    assert own_address("lo", None) == "127.0.0.1"


def test_an_address_travels_as_it_is():
    own = address_of(1, address="fd00::2")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(own), type=WorkerAddress) == own
