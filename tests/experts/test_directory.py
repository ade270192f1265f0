import asyncio
import random

import pytest
import torch

from experts.fake_client import FakeClient, peer_at
from shoal.core import SYSTEM_CLOCK, Deadline, LoopThread, ManualClock, UsageError
from shoal.experts.client.directory import Directory
from shoal.experts.names import batch_beam_search

SIZES = (8, 8)


@pytest.fixture(scope="module")
def loop():
    with LoopThread("directory-tests") as loop:
        yield loop


class Place:
    """A directory in a world that tests change."""

    def __init__(self, loop, grid=SIZES, prefix="ffn"):
        self.client = FakeClient(loop)
        self.clock = ManualClock(now_s=1000.0)
        self.dht = self.client.dht
        self.directory = Directory(self.client, prefix, grid, refresh_s=30.0, clock=self.clock)

    def find(self, scores, *, k=2, k_min=1, beam_size=4):
        routes = self.directory.find(torch.as_tensor(scores), beam_size=beam_size, k=k, k_min=k_min)
        return [
            [str(routes.experts[number].uid) for number in row if number >= 0]
            for row in routes.slots.tolist()
        ]

    def pass_time(self, seconds):
        """A search afterwards, as in training, and what it leaves to do in the background."""
        self.clock.advance(seconds)
        self.directory.find(flat_scores(), beam_size=8, k=8, k_min=0)
        self.client.run(self.dht.settle())

    def expert(self, uid):
        routes = self.directory.find(flat_scores(), beam_size=8, k=8, k_min=0)
        return next(expert for expert in routes.experts if str(expert.uid) == uid)


@pytest.fixture
def place(loop):
    return Place(loop)


def flat_scores():
    return torch.zeros(1, sum(SIZES))


@pytest.mark.parametrize("sizes", [(12,), (8, 8), (5, 4, 3)])
def test_it_finds_what_a_search_of_the_dht_finds(loop, sizes):
    place = Place(loop, sizes)
    rng = random.Random(len(sizes))
    for _ in range(30):
        place.dht.declare(".".join(["ffn", *(str(rng.randrange(size)) for size in sizes)]))
    place.dht.declare("ffn.2.999.1")
    scores = torch.randn(16, sum(sizes))
    axes = [[axis.numpy() for axis in torch.split(row, sizes)] for row in scores]
    expected = loop.run(batch_beam_search(place.dht, "ffn", axes, beam_size=3, k=4))
    found = place.find(scores, k=4, beam_size=3)
    assert found == [[str(expert.uid) for expert in row] for row in expected]


def test_what_is_known_is_not_asked_again(place):
    for uid in ("ffn.1.2", "ffn.3.4", "ffn.5.6"):
        place.dht.declare(uid)
    scores = torch.randn(4, sum(SIZES))
    found = place.find(scores)
    assert place.dht.num_asked > 0
    place.dht.num_asked = 0
    place.clock.advance(29.0)
    assert place.find(scores) == found
    assert place.find(torch.randn(64, sum(SIZES)), beam_size=8, k=3)
    assert place.dht.num_asked == 0


def test_searches_do_not_wait_for_news(place):
    place.dht.declare("ffn.1.2")
    assert place.find(flat_scores()) == [["ffn.1.2"]]
    place.dht.declare("ffn.1.3")
    place.dht.declare("ffn.4.4")
    place.clock.advance(31.0)
    assert place.find(flat_scores(), beam_size=8, k=8) == [["ffn.1.2"]]
    place.client.run(place.dht.settle())
    place.dht.num_asked = 0
    assert sorted(place.find(flat_scores(), beam_size=8, k=8)[0]) == ["ffn.1.2", "ffn.1.3", "ffn.4.4"]
    assert place.dht.num_asked == 0


def test_an_expert_is_gone_once_it_was_missed_twice(place):
    place.dht.declare("ffn.1.2")
    place.dht.declare("ffn.3.4")
    assert len(place.find(flat_scores())[0]) == 2
    del place.dht.served["ffn.3.4"]
    place.pass_time(31.0)
    assert len(place.find(flat_scores())[0]) == 2
    place.pass_time(2.0)
    assert place.find(flat_scores()) == [["ffn.1.2"]]


def test_part_of_a_record_takes_nobody_away(place, monkeypatch):
    for last in range(4):
        place.dht.declare(f"ffn.1.{last}")
    assert len(place.find(flat_scores(), k=8)[0]) == 4

    async def get_coordinates(names, *, deadline=None):
        return [(1,) if name == "ffn.1." else None for name in names]

    monkeypatch.setattr(place.dht, "get_coordinates", get_coordinates)
    for _ in range(3):
        place.pass_time(31.0)
    assert len(place.find(flat_scores(), k=8)[0]) == 4
    del place.dht.served["ffn.1.3"]
    for _ in range(3):
        place.pass_time(31.0)
    assert len(place.find(flat_scores(), k=8)[0]) == 3


def test_one_miss_is_forgiven(place):
    place.dht.declare("ffn.1.2")
    place.find(flat_scores())
    for _ in range(5):
        peers = place.dht.served.pop("ffn.1.2")
        place.pass_time(31.0)
        place.dht.served["ffn.1.2"] = peers
        place.pass_time(2.0)
        assert place.find(flat_scores()) == [["ffn.1.2"]]


def test_after_a_long_time_without_searches_it_asks_first(place):
    place.dht.declare("ffn.1.2")
    place.find(flat_scores())
    place.dht.served.clear()
    place.dht.declare("ffn.3.4")
    place.clock.advance(1000.0)
    assert place.find(flat_scores()) == [["ffn.3.4"]]


def test_where_nobody_was_it_looks_again_at_once(place):
    assert place.find(flat_scores()) == [[]]
    place.dht.declare("ffn.3.4")
    assert place.find(flat_scores()) == [[]]  # asked a moment ago
    place.clock.advance(1.5)
    assert place.find(flat_scores()) == [["ffn.3.4"]]


def test_who_failed_is_left_out_for_a_growing_while(place):
    place.dht.declare("ffn.1.2")
    place.dht.declare("ffn.3.4", peer_at(2))
    expert = place.expert("ffn.1.2")
    for pause_s in (2.0, 4.0):
        place.directory.failed(expert, is_peer_lost=False)
        assert place.find(flat_scores()) == [["ffn.3.4"]]
        place.clock.advance(pause_s)
        assert len(place.find(flat_scores())[0]) == 2
    place.directory.answered(expert, expert.peer.id)
    place.directory.failed(expert, is_peer_lost=False)
    place.clock.advance(2.0)
    assert len(place.find(flat_scores())[0]) == 2


def test_who_failed_is_asked_when_there_is_nobody_else(place):
    place.dht.declare("ffn.1.2")
    place.dht.declare("ffn.3.4", peer_at(2))
    place.directory.failed(place.expert("ffn.1.2"), is_peer_lost=False)
    assert len(place.find(flat_scores(), k_min=2)[0]) == 2
    assert place.find(flat_scores(), k_min=1) == [["ffn.3.4"]]


def test_a_lost_peers_experts_are_all_left_out(place):
    place.dht.declare("ffn.1.2", peer_at(1))
    place.dht.declare("ffn.1.3", peer_at(1))
    place.dht.declare("ffn.1.4", peer_at(1), peer_at(2))
    place.dht.declare("ffn.3.4", peer_at(2))
    expert = place.expert("ffn.1.2")
    place.directory.failed(expert, is_peer_lost=True)
    assert sorted(place.find(flat_scores(), k=8)[0]) == ["ffn.1.4", "ffn.3.4"]
    place.directory.answered(expert, peer_at(1).id)
    assert len(place.find(flat_scores(), k=8)[0]) == 4


def test_those_left_out_do_not_hide_the_others(place):
    for last in range(3):
        place.dht.declare(f"ffn.7.{last}", peer_at(1))
        place.dht.declare(f"ffn.6.{last}", peer_at(1))
    place.dht.declare("ffn.1.2", peer_at(2))
    scores = torch.arange(float(sum(SIZES)))[None]
    assert place.find(scores, beam_size=2, k=1) == [["ffn.7.2"]]
    place.directory.failed(place.expert("ffn.7.2"), is_peer_lost=True)
    for _ in range(2):
        assert place.find(scores, beam_size=2, k=1) == [["ffn.1.2"]]
    place.clock.advance(2.0)
    assert place.find(scores, beam_size=2, k=1) == [["ffn.7.2"]]


def test_new_experts_are_found_below_a_prefix_that_is_not_in_use(place):
    place.dht.declare("ffn.0.0")
    place.dht.declare("ffn.1.0")
    assert len(place.find(flat_scores())[0]) == 2
    place.dht.declare("ffn.1.1", peer_at(3))
    first = torch.zeros(1, sum(SIZES))
    first[0, 0] = 9.0
    for _ in range(4):
        place.clock.advance(10.0)
        assert place.find(first, k=1) == [["ffn.0.0"]]
        place.client.run(place.dht.settle())
    place.dht.num_asked = 0
    assert len(place.find(flat_scores(), k=8)[0]) == 3
    assert place.dht.num_asked == 0


def test_at_a_deadline_it_makes_do_with_what_is_known(place, monkeypatch):
    place.dht.declare("ffn.1.2")

    async def get_coordinates(names, *, deadline=None):
        await asyncio.sleep(3600)

    monkeypatch.setattr(place.dht, "get_coordinates", get_coordinates)
    place.directory._clock = SYSTEM_CLOCK
    deadline = Deadline.after(0.05)
    routes = place.directory.find(flat_scores(), beam_size=2, k=1, deadline=deadline)
    assert routes.experts == ()
    assert deadline.is_past


def test_an_expert_that_another_peer_serves_now_is_called_at_once(place):
    place.dht.declare("ffn.1.2", peer_at(1))
    place.dht.declare("ffn.3.4", peer_at(2))
    place.directory.failed(place.expert("ffn.1.2"), is_peer_lost=True)
    place.dht.declare("ffn.1.2", peer_at(3))
    place.pass_time(1.1)  # far from the next refresh: a failure is looked into
    assert len(place.find(flat_scores())[0]) == 2
    assert place.expert("ffn.1.2").peer.id == peer_at(3).id


def test_an_expert_that_fails_is_looked_up_until_somebody_serves_it(place):
    place.dht.declare("ffn.1.2", peer_at(1))
    place.dht.declare("ffn.3.4", peer_at(2))
    expert = place.expert("ffn.1.2")
    for pause_s in (2.0, 4.0, 8.0):
        place.directory.failed(expert, is_peer_lost=True)
        place.pass_time(pause_s)
    place.directory.failed(expert, is_peer_lost=True)
    place.pass_time(1.1)
    place.dht.declare("ffn.1.2", peer_at(3))
    assert place.find(flat_scores()) == [["ffn.3.4"]]
    place.pass_time(5.0)  # of sixteen
    assert place.expert("ffn.1.2").peer.id == peer_at(3).id


def test_a_part_of_a_grid(loop):
    place = Place(loop, (8,), "ffn.1.")
    place.dht.declare("ffn.1.2")
    place.dht.declare("ffn.2.3")
    assert place.find(torch.zeros(1, 8)) == [["ffn.1.2"]]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_not_numbers_are_refused(place, value):
    with pytest.raises(UsageError, match="NaN or infinity"):
        place.find(torch.full((1, sum(SIZES)), value))
