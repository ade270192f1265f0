"""Groups over several machines: who speaks, what travels, and what a loss means."""

import pytest
import torch

from group.clusters import open_cluster
from group.hosts import together
from shoal.core import Deadline, PeerLost, TensorError, UsageError
from shoal.topology import Weights

TWO_BY_TWO = [[0, 1], [2, 3]]


def waiting_for(handle):
    """What a wait ends in."""
    try:
        return handle.wait(Deadline.after(20))
    except PeerLost as error:
        return error


def loss_of(group):
    """Those that are lost, once somebody is."""
    deadline = Deadline.after(10)
    while not group.lost:
        deadline.check("somebody to be lost")
        group.progress()
    return list(group.lost)


def sent_bytes(groups):
    return sum(sum(group.mesh.traffic.sent_bytes.values()) for group in groups)


def test_machines_and_places():
    with open_cluster([[0, 2], [1]]) as groups:
        assert [group.machine for group in groups] == [0, 1, 0]
        assert groups[0].num_machines == 2
        assert list(groups[0].members) == [0, 1, 2]
        assert together(groups, lambda group: group.share(group.rank)) == [[0, 1, 2]] * 3


def test_a_hierarchical_exchange_sends_one_tensor_a_machine():
    count = 100_000

    def neighbor(group):
        other = (group.rank + 2) % 4
        tensor = torch.full((count,), float(group.rank))
        return group.exchange(tensor, Weights(0.5, {other: 0.5}, {other: 1.0})).wait()[0].item()

    def hierarchical(group):
        tensor = torch.full((count,), float(group.rank))
        return group.exchange_machines(tensor, Weights(0.5, {1 - group.machine: 0.5})).wait()[0].item()

    with open_cluster(TWO_BY_TWO) as groups:
        before = sent_bytes(groups)
        assert together(groups, neighbor) == [1.0, 2.0, 1.0, 2.0]
        flat_bytes = sent_bytes(groups) - before
        assert together(groups, hierarchical) == [1.5] * 4
        machine_bytes = sent_bytes(groups) - before - flat_bytes
    assert 4 * 4 * count < flat_bytes < 4 * 4 * count + 2000
    assert machine_bytes <= flat_bytes / 2


def test_an_all_reduce_sends_two_shares_a_machine():
    with open_cluster(TWO_BY_TWO) as groups:
        before = sent_bytes(groups)
        together(groups, lambda group: group.all_reduce(torch.ones(100_000)).wait())
        assert 2 * 400_000 < sent_bytes(groups) - before < 2 * 400_000 + 2000


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_peer_ends_a_collective_on_all_others_by_name(lost):
    """Whether it speaks for its machine or not."""
    with open_cluster(TWO_BY_TWO) as groups:
        handles = [group.all_reduce(torch.ones(10)) for group in groups if group.rank != lost]
        groups[lost].abandon()
        with_errors = [waiting_for(handle) for handle in handles]
        assert [error.peer for error in with_errors] == [lost] * 3
        assert all(f"rank {lost} is lost" in str(error) for error in with_errors)


def test_an_exchange_outlives_a_lost_peer():
    def mix(group):
        others = [rank for rank in range(4) if rank != group.rank]
        tensor = torch.full((1000,), float(group.rank))
        return group.exchange(tensor, Weights.uniform(others, others)).wait()[0].item()

    with open_cluster(TWO_BY_TWO) as groups:
        assert together(groups, mix) == [1.5] * 4
        for group in groups:
            group.should_survive = True
        groups[0].abandon()
        assert together(groups[1:], mix) == [(1 + 2 + 3 + rank) / 4 for rank in (1, 2, 3)]
        assert [list(group.members) for group in groups[1:]] == [[1, 2, 3]] * 3
        assert together(groups[1:], loss_of) == [[0]] * 3
        # another speaks for its machine now
        reduced = together(
            groups[1:], lambda g: g.all_reduce(torch.full((5,), float(g.rank))).wait()[0].item()
        )
        assert reduced == [2.0] * 3


def test_what_is_on_its_way_is_not_written_over():
    count = 500_000

    def work(group):
        other = 1 - group.rank
        live, spare = group.empty(count), group.empty(count)
        live.fill_(float(group.rank))
        for _ in range(5):
            group.exchange(live, Weights(0.0, {other: 1.0}, {other: 1.0}), out=spare).wait()
            group.settle(live)
            live.fill_(-1.0)  # the other one has it
            live, spare = spare, live
        return live.unique().tolist()

    with open_cluster([[0], [1]]) as groups:
        assert together(groups, work) == [[1.0], [0.0]]


def test_a_mutex_excludes_other_machines():
    inside = []

    def work(group):
        for _ in range(20):
            with group.mutex("m", 1):
                inside.append(group.rank)
                assert inside == [group.rank]
                inside.remove(group.rank)

    with open_cluster([[0, 1], [2]]) as groups:
        together(groups, work)


def test_a_mutex_of_a_lost_holder_is_free_again():
    with open_cluster([[0], [1], [2]]) as groups:
        held = groups[1].mutex("m", 0)
        held.__enter__()
        groups[1].abandon()
        with groups[2].mutex("m", 0):
            pass
        groups[0].abandon()
        with pytest.raises(PeerLost, match="rank 0"), groups[2].mutex("m", 0):
            pass


def test_a_read_waits_for_its_version_and_is_of_one_piece():
    count, rounds = 50_000, 30

    def work(group):
        memory = group.empty(count)
        if group.rank == 0:
            group.publish("w", memory, 0)
        group.barrier().wait()
        if group.rank == 0:
            for version in range(1, rounds + 1):
                with group.changing("w", version):
                    memory.fill_(float(version))
        else:
            mine = torch.empty(count)
            version = 0
            while version < rounds:
                version = group.read("w", 0, mine, version=version + 1).wait()
                assert mine.unique().tolist() == [float(version)]
        group.barrier().wait()

    with open_cluster([[0, 1], [2]]) as groups:
        together(groups, work)


def test_windows_over_machines_lose_and_double_nothing():
    def work(group):
        window = group.window("w", 100)
        others = [rank for rank in range(group.size) if rank != group.rank]
        mass, total = 0.0, torch.zeros(100)
        for _ in range(20):
            for other in others:
                window.accumulate(other, torch.ones(100), weight=0.5, mass=0.5).wait()
            for source in window.filled():
                with window.slot(source) as slot:
                    assert slot.source == source
                    mass += slot.mass
                    total += slot.tensor
                    slot.clear()
        group.barrier().wait()
        for source in window.filled():
            with window.slot(source) as slot:
                mass += slot.mass
                total += slot.tensor
        window.close()
        assert total.unique().tolist() == [mass]
        return mass

    with open_cluster([[0, 1], [2]]) as groups:
        assert together(groups, work) == [20.0] * 3


def test_sends_come_one_after_the_other():
    def work(group):
        window = group.window("w", 8, torch.int64)
        heard = {}
        if group.rank == 0:
            while sum(map(len, heard.values())) < 20:
                for source in window.wait(Deadline.after(10)):
                    with window.slot(source) as slot:
                        heard.setdefault(source, []).append(int(slot.tensor[0]))
                        assert slot.note == bytes([heard[source][-1]])
                        slot.clear()
        else:
            for number in range(10):
                window.send(0, torch.full((8,), number), note=bytes([number])).wait()
        window.close()
        return heard

    with open_cluster([[0, 1], [2]]) as groups:
        assert together(groups, work)[0] == {1: list(range(10)), 2: list(range(10))}


def test_what_is_written_must_fit():
    def work(group):
        window = group.window("w", 4)
        with pytest.raises(TensorError, match="do not fit"):
            window.put(1 - group.rank, torch.ones(5))
        with pytest.raises(UsageError, match="is open"):
            group.window("w", 4)

    with open_cluster([[0], [1]]) as groups:
        together(groups, work)
