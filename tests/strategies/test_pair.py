"""`pair`: the order of a round, whom it pulls, how old that is, and that nobody waits."""

import collections
import contextlib
import itertools

import pytest
import torch

from shoal.group import Done, Snapshot
from shoal.group.operations import GroupWrapper
from shoal.strategies.pair import PairAverage
from shoal.strategies.staleness import Staleness
from strategies.quadratics import Point, close, step, targets

RATE = 0.3


class Spying(GroupWrapper):
    """Notes who is pulled and what is published; spoils as many snapshots as it is told to."""

    num_torn = 0

    def __init__(self, inner):
        super().__init__(inner)
        self.events = []

    def window(self, *arguments, **named):
        window = super().window(*arguments, **named)
        publish, fetch = window.publish, window.fetch
        window.publish = lambda tensor, version: self._publish(publish, tensor, version)
        window.fetch = lambda peer: self._fetch(fetch, peer)
        return window

    def _publish(self, publish, tensor, version):
        self.events.append(("publish", version))
        publish(tensor, version)

    def _fetch(self, fetch, peer):
        self.events.append(("fetch", peer))
        snapshot = fetch(peer).wait()
        if self.num_torn and snapshot is not None:
            self.num_torn -= 1
            return Done(Torn(snapshot))
        return Done(snapshot)


class Torn(Snapshot):
    def __init__(self, inner):
        self.rank, self.version = inner.rank, inner.version
        self.tensor = torch.full_like(inner.tensor, torch.nan)

    def is_intact(self):
        return False


@contextlib.contextmanager
def attached(group, **options):
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    strategy = PairAverage(group, **options)
    with strategy.attach(model, optimizer, stays=True):
        yield model, optimizer, strategy


def takes_turns(group, _):
    """One runs ahead while the other stands still: each mix is with what the other published last."""
    goals = targets(2, 10)
    published = torch.zeros(2, goals.shape[-1], dtype=torch.float64)
    spy = Spying(group)
    with attached(spy) as (model, optimizer, strategy):
        for turn in range(2):
            for goal in goals:
                if group.rank == turn:
                    step(model, optimizer, goal[turn])
                gradient = published[turn] - goal[turn]
                published[turn] = published.mean(0) - RATE * gradient
            if group.rank == turn:
                close(model.x, published[turn])
            group.barrier().wait()
        assert strategy.rounds == 10
        ahead = {"num_mixed": 10, "num_unmixed": 0, "mean_behind": 4.5, "max_behind": 9}
        if group.rank == 0:
            assert strategy.stats == {**ahead, "behind": {0: 1, 1: 1, 2: 2, 4: 4, 8: 2}}
        else:
            assert strategy.stats["behind"] == {-1: 10}
            assert strategy.stats["mean_behind"] == 0
    first = spy.events[0][1]
    assert spy.events[1::2] == [("fetch", 1 - group.rank)] * 10
    assert spy.events[::2] == [("publish", first + number) for number in range(11)]


def local_steps(group, _):
    """One mix before, one publication after three steps."""
    spy = Spying(group)
    with attached(spy, local_steps=3) as (model, optimizer, strategy):
        for goal in targets(2, 6):
            spy.events.append("step")
            step(model, optimizer, goal[group.rank])
        assert strategy.rounds == 2
    kinds = [event[0] if isinstance(event, tuple) else event for event in spy.events]
    # what the other has written over meanwhile is fetched again
    again = [index for index, pair in enumerate(itertools.pairwise(kinds)) if pair == ("fetch", "fetch")]
    once = [kind for index, kind in enumerate(kinds) if index not in again]
    assert once == ["publish", *["step", "fetch", "step", "step", "publish"] * 2]


def torn_and_skipped(group, _):
    """A snapshot that cannot be read in one piece is left out; a skipped step mixes and publishes."""
    spy = Spying(group)
    with attached(spy) as (model, optimizer, strategy):
        goal = torch.ones(4, dtype=torch.float64)
        spy.num_torn = 2
        step(model, optimizer, goal)
        assert strategy.stats["num_mixed"] == 1
        group.barrier().wait()
        before = model.x.detach().clone()
        spy.num_torn = 3
        step(model, optimizer, goal)
        assert strategy.stats["num_unmixed"] == 1
        close(model.x, before - RATE * (before - goal))
        optimizer.zero_grad()
        model(goal).backward()
        optimizer.zero_grad()
        model(goal)
        assert strategy.steps == strategy.rounds == 3
        assert spy.events[-1][0] == "publish"


def side_by_side(group, _):
    """Two models in one group, and one after another under the same name."""
    with attached(group) as (one, first, _), attached(group) as (two, second, _):
        for _ in range(4):
            step(one, first, torch.full((4,), 1.0))
            step(two, second, torch.full((4,), -1.0))
        group.barrier().wait()
        assert one.x.min() > 0 > two.x.max()
    with attached(group) as (model, optimizer, strategy):
        step(model, optimizer, torch.zeros(4))
        assert strategy.stats["num_mixed"] == 1


def global_average(group, _):
    """A collective of workers whose buffers have been swapped different numbers of times."""
    with attached(group, global_average_every=3) as (model, optimizer, strategy):
        strategy.rounds = strategy.steps = group.rank  # as after resuming from states of different rounds
        for number in range(6 - group.rank):
            step(model, optimizer, targets(2, 6)[number, group.rank])
            if strategy.rounds == 3:
                # no round until all have measured
                assert strategy.consensus_distance() < 1e-12
        assert strategy.consensus_distance() < 1e-12


def two_workers(group, _):
    for check in (takes_turns, local_steps, torn_and_skipped, side_by_side, global_average):
        check(group, None)
        group.barrier().wait()


def test_rounds_of_two(workers):
    workers.run(two_workers, 2)


def choices(group, _):
    """Whom a worker pulls; and again from a state taken half-way."""
    peers = []
    for seed in (1, 2):
        spy = Spying(group)
        with attached(spy, seed=seed) as (model, optimizer, strategy):
            for number in range(150):
                if number == 100:
                    state = strategy.state_dict()
                step(model, optimizer, torch.zeros(4))
        # those of torn snapshots are asked again
        peers.append(_without_repeats(spy.events))
    spy = Spying(group)
    strategy = PairAverage(spy, seed=2)
    strategy.load_state_dict(state)
    assert strategy.rounds == 100
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    with strategy.attach(model, optimizer, stays=True):
        for _ in range(50):
            step(model, optimizer, torch.zeros(4))
        assert strategy.stats["num_mixed"] + strategy.stats["num_unmixed"] == 150
        assert _without_repeats(spy.events) == peers[1][100:]
    other = PairAverage(group, seed=2)
    other.load_state_dict({**state, "rank": group.rank + 1})
    assert not torch.equal(other.state_dict()["generator"], state["generator"])
    return peers


def _without_repeats(events):
    peers, has_pulled = [], False
    for kind, value in events:
        if kind == "fetch" and not has_pulled:
            peers.append(value)
        has_pulled = kind == "fetch"
    return peers


def test_peers_are_drawn_uniformly(workers):
    results = workers.run(choices, 4)
    assert len({tuple(peers) for pair in results for peers in pair}) == 8
    for rank, pair in enumerate(results):
        counts = collections.Counter(peer for peers in pair for peer in peers)
        assert sorted(counts) == [peer for peer in range(4) if peer != rank]
        assert all(60 < count < 145 for count in counts.values())


def test_staleness_goes_on_from_a_state():
    one = Staleness()
    for behind in (0, 5, None, -3):
        one.note(behind)
    two = Staleness()
    two.load_state_dict(one.state_dict())
    two.note(6)
    assert two.summary() == {
        "num_mixed": 4,
        "num_unmixed": 1,
        "mean_behind": pytest.approx(11 / 4),
        "max_behind": 6,
        "behind": {-1: 1, 0: 1, 4: 2},
    }
