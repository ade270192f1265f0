"""That a group's own count of bytes is that of `Metered`, operation by operation."""

import torch

from contracts import group_checks
from group.clusters import open_cluster
from group.hosts import finish, open_hosts, together
from shoal.group import Metered, SoloGroup
from shoal.group.functions import exchange_machines
from shoal.group.opening import WithServers
from shoal.group.operations import TrafficCounter
from shoal.topology import Weights


def totals(group):
    counted = group.totals().values()
    return sum(one.sent_bytes for one in counted), sum(one.received_bytes for one in counted)


def moved(group):
    return group.stats.sent_bytes, group.stats.received_bytes


class Compared(Metered):
    """Looks after every operation that is over whether both have counted alike."""

    def _count(self, operation):
        assert moved(self.inner) == totals(self), f"before {operation.name}"
        return super()._count(operation)


def test_it_is_that_of_the_formulas_after_every_operation():
    with open_hosts(3, workers_per_machine=2) as groups:
        compared = [Compared(group) for group in groups]
        together(compared, lambda group: group_checks.metered(group, None))
        for group in compared:
            assert moved(group) == totals(group) != (0, 0)


def test_who_is_gone_does_not_count_and_what_is_asked_twice_counts_once():
    with open_hosts(4) as groups:
        first, second, third, fourth = (Compared(group) for group in groups)
        windows = together([first, second, third, fourth], lambda group: group.window("w", 5))
        fourth.leave()
        there = [first, second, third]
        for begin in (
            lambda group: group.all_reduce(torch.ones(7)),
            lambda group: group.broadcast(torch.ones(7), 1),
            lambda group: group.exchange(torch.ones(7), Weights.uniform({0, 1, 2, 3} - {group.rank})),
            lambda group: exchange_machines(group, torch.ones(7), Weights(1.0)),
        ):
            finish([begin(group) for group in there])
        together(there, lambda group: group.all_gather(torch.ones(2, 3)).wait())
        windows[0].put(3, torch.ones(5)).wait()
        published = together(there, lambda group: group.empty(3))
        window, other = (group.window("y", 3, sources=()) for group in (first, second))
        other.publish(published[1], 0)
        read = window.read(1, torch.zeros(3))
        assert [read.wait(), read.wait()] == [0, 0]
        assert window.fetch(3).wait() is None
        assert [moved(group) for group in there] == [totals(group) for group in there]
        assert first.stats.received_bytes > second.stats.received_bytes


def assert_balanced(groups, one_sided=()):
    """What one has counted for another, that one has counted for it, but for one-sided operations."""
    for one in groups:
        stats = one.stats
        assert (sum(stats.sent_to), sum(stats.received_from)) == (stats.sent_bytes, stats.received_bytes)
        for other in groups:
            if (one.rank, other.rank) not in one_sided:
                assert stats.sent_to[other.rank] == other.stats.received_from[one.rank]


def test_what_one_sends_another_receives():
    with open_hosts(4, workers_per_machine=2) as groups:
        finish([group.all_reduce(torch.ones(7)) for group in groups])
        finish([group.broadcast(torch.ones(7), 1) for group in groups])
        finish([group.exchange(torch.ones(5), Weights.uniform([(group.rank + 1) % 4, (group.rank - 1) % 4]))
                for group in groups])  # fmt: skip
        together(groups, lambda group: group.all_gather(torch.ones(2 + group.rank, 3)).wait())
        assert_balanced(groups)
        before = [group.stats for group in groups]
        windows = together(groups, lambda group: group.window("w", 5))
        windows[0].put(3, torch.ones(5)).wait()
        published = together(groups, lambda group: group.empty(5))
        windows[2].publish(published[2], 1)
        windows[1].fetch(2).wait()
        assert groups[0].stats.sent_to[3] - before[0].sent_to[3] == 20
        assert groups[1].stats.received_from[2] - before[1].received_from[2] == 20
        assert_balanced(groups, [(0, 3), (2, 1)])
        groups[3].leave()
        finish([group.all_reduce(torch.ones(6)) for group in groups[:3]])
        assert_balanced(groups[:3], [(2, 1)])


def test_between_machines_each_byte_has_its_place():
    with open_cluster([[0, 1], [2]]) as groups:
        together(groups, lambda group: group.broadcast(torch.ones(100_000), 0).wait())
        third = groups[2].stats
        assert third.received_from[0] > 400_000
        assert groups[0].stats.sent_to[2] >= 400_000
        assert 400_000 <= groups[0].stats.sent_to[1] <= groups[1].stats.received_from[0] < 402_000
        assert sum(third.received_from) == third.received_bytes


def test_a_group_with_servers_adds_both():
    with open_hosts(3) as everybody, open_hosts(2) as workers:
        groups = [WithServers(*both, 1) for both in zip([SoloGroup(), *workers], everybody, strict=True)]
        finish([group.broadcast(torch.ones(10), 0) for group in everybody])
        assert [moved(group) for group in groups] == [(80, 0), (0, 40), (0, 40)]
        finish([group.all_reduce(torch.ones(10)) for group in workers])
        assert [moved(Metered(group)) for group in groups] == [(80, 0), (40, 80), (40, 80)]
        assert [group.stats.sent_to for group in groups] == [(0, 40, 40), (0, 0, 40), (0, 40, 0)]
        assert [group.stats.received_from for group in groups] == [(0, 0, 0), (40, 0, 40), (40, 40, 0)]


def test_machines_add_what_went_over_their_streams():
    with open_cluster([[0, 1], [2]]) as groups:
        opened = [moved(group) for group in groups]
        together(groups, lambda group: group.broadcast(torch.ones(100_000), 0).wait())
        carried = [
            [now - before for now, before in zip(moved(group), then, strict=True)]
            for group, then in zip(groups, opened, strict=True)
        ]
    for counted, expected in zip(carried, [(800_000, 0), (0, 400_000), (0, 400_000)], strict=True):
        for size_bytes, least in zip(counted, expected, strict=True):
            assert least <= size_bytes < least + 2000  # heads of messages


def test_what_goes_through_torch_counts_by_the_same_formulas():
    counter = TrafficCounter(1, 4)
    counter.all_reduce(100)
    assert (counter.sent_to, counter.received_from) == ([0, 0, 150, 0], [150, 0, 0, 0])
    counter.broadcast(10, 0)
    counter.broadcast(10, 1)
    assert (counter.sent_to, counter.received_from) == ([10, 0, 160, 10], [160, 0, 0, 0])
    counter.all_gather(10, {0: 3, 1: 10, 2: 0, 3: 2})
    assert (counter.sent_to, counter.received_from) == ([20, 0, 170, 20], [163, 0, 0, 2])
    stats = counter.stats((0.5,) * 4)
    assert (stats.sent_bytes, stats.received_bytes) == (210, 165)
