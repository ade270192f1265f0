"""Beam search on real peers in virtual time, against a model that knows the whole grid."""

import asyncio
import itertools
import random

import numpy as np
import pytest

from dht.memory_swarm import in_swarm
from shoal.core import Deadline, UsageError
from shoal.dht.records import key_of
from shoal.experts.names import ExpertUid, batch_beam_search, beam_search, declare_experts, expert_entries
from shoal.transport.network.memory import MemoryHost


def uids_of(found):
    return [str(one.uid) for one in found]


def model(name, places, scores, beam_size, k):
    """What a beam search should find, by plain lists: places are the coordinates of all experts."""
    beam = [()]
    for axis in range(len(scores)):
        is_last = axis == len(scores) - 1
        longer = {place[: axis + 1] for place in places if place[:axis] in beam}
        ranked = sorted(longer, key=lambda place: (-sum(map(lambda s, at: s[at], scores, place)), place))
        beam = ranked[: k if is_last else beam_size]
    return [str(ExpertUid(name, place)) for place in beam]


def drawn_scores(rng, sizes):
    return [[rng.gauss(0, 1) for _ in range(size)] for size in sizes]


class Recorder:
    """Notes what a peer's look-ups ask for."""

    def __init__(self, dht, monkeypatch):
        self.prefixes, self.experts = [], []
        get_coordinates, get_many = dht.get_coordinates, dht.get_many

        async def coordinates(names, **options):
            self.prefixes.append(list(names))
            return await get_coordinates(names, **options)

        async def many(names, **options):
            self.experts.append(list(names))
            return await get_many(names, **options)

        monkeypatch.setattr(dht, "get_coordinates", coordinates)
        monkeypatch.setattr(dht, "get_many", many)


@pytest.fixture
def dials(monkeypatch):
    """Streams that anybody has tried to open since."""
    opened = []
    dial = MemoryHost.dial

    async def record(host, address, *args, **options):
        opened.append((host.name, address))
        return await dial(host, address, *args, **options)

    monkeypatch.setattr(MemoryHost, "dial", record)
    return opened


@pytest.mark.parametrize("sizes", [(12,), (8, 8), (6, 5, 4), (3, 3, 3, 3)])
def test_it_finds_what_a_model_finds_that_knows_everything(sizes):
    rng = random.Random(len(sizes))
    everywhere = list(itertools.product(*map(range, sizes)))

    async def work(swarm, *peers):
        places = rng.sample(everywhere, len(everywhere) // 3)
        uids = [ExpertUid("ffn", place) for place in places]
        half = len(uids) // 2
        await declare_experts(peers[0], uids[:half], peers[0].in_s(600))
        await declare_experts(peers[1], uids[half:], peers[0].in_s(600))
        for beam_size, k in [(1, 1), (2, 5), (4, 4), (1000, 3), (1000, 1000)]:
            scores = drawn_scores(rng, sizes)
            found = await beam_search(peers[2], "ffn", scores, beam_size=beam_size, k=k)
            # on a single axis there is nothing to prune
            assert uids_of(found) == model("ffn", places, scores, beam_size, k)
            servers = {str(uid): peers[0 if uid in uids[:half] else 1].peer for uid in uids}
            assert [one.peer for one in found] == [servers[str(one.uid)] for one in found]

    in_swarm(3, work)


def test_a_batch_finds_the_same_and_shares_its_look_ups(monkeypatch):
    rng = random.Random(0)

    async def work(swarm, server, client):
        places = rng.sample(list(itertools.product(range(12), range(12))), 50)
        await declare_experts(server, [ExpertUid("ffn", place) for place in places], server.in_s(600))
        batch = [drawn_scores(rng, (12, 12)) for _ in range(16)]
        recorder = Recorder(client, monkeypatch)
        found = await batch_beam_search(client, "ffn", batch, beam_size=3, k=4)
        assert [uids_of(each) for each in found] == [model("ffn", places, scores, 3, 4) for scores in batch]
        asked = [name for names in recorder.prefixes for name in names]
        assert len(asked) == len(set(asked)) <= 12
        assert len(recorder.prefixes) <= 2
        assert len(recorder.experts) == 1
        assert len(recorder.experts[0]) == len(set(recorder.experts[0]))
        assert await batch_beam_search(client, "ffn", [], beam_size=3) == []

    in_swarm(2, work)


def test_only_as_much_is_looked_up_as_is_needed(monkeypatch):
    async def work(swarm, server, client):
        uids = [f"ffn.{first}.{last}" for first in range(0, 64, 4) for last in range(3)]
        await declare_experts(server, uids, server.in_s(600))
        recorder = Recorder(client, monkeypatch)
        ascending = [float(at) for at in range(64)]
        (full,) = await batch_beam_search(client, "ffn", [[ascending, [0.0, 1.0, 2.0]]], beam_size=4)
        assert uids_of(full) == ["ffn.60.2", "ffn.60.1", "ffn.60.0", "ffn.56.2"]
        # one in four is there: rounds of 4, 4 and 8 reach four of them
        assert recorder.prefixes == [
            [f"ffn.{at}." for at in range(63, 59, -1)],
            [f"ffn.{at}." for at in range(59, 55, -1)],
            [f"ffn.{at}." for at in range(55, 47, -1)],
        ]
        assert recorder.experts == [uids_of(full)]

    in_swarm(2, work)


def test_experts_that_are_gone_are_replaced_by_the_next_best(monkeypatch):
    async def work(swarm, server, client):
        there = ["ffn.0.0", "ffn.1.1", "ffn.2.0"]
        await declare_experts(server, there, server.in_s(600))
        gone = expert_entries(server, ["ffn.0.1", "ffn.1.0", "ffn.2.1", "ffn.3.0"], server.in_s(600))
        await server.store_many([entry for entry in gone if entry.name.endswith(".")])
        scores = [[4.0, 3.0, 2.0, 1.0], [0.0, 0.5]]
        found = await beam_search(client, "ffn", scores, beam_size=4, k=2)
        assert uids_of(found) == ["ffn.0.0", "ffn.1.1"]
        found = await beam_search(client, "ffn", scores, beam_size=4, k=10)
        assert uids_of(found) == there

    in_swarm(2, work)


@pytest.mark.parametrize("uid", ["ffn.5", "ffn.5.1", "ffn.5.1.2"])
def test_a_declaration_is_found_although_its_absence_was_remembered(uid, monkeypatch):
    async def work(swarm, *peers):
        server, client, other = peers[0], peers[6], peers[7]
        sizes = [8] * len(ExpertUid.of(uid).coordinates)
        scores = drawn_scores(random.Random(0), sizes)
        assert await beam_search(client, "ffn", scores, beam_size=2) == []
        await asyncio.sleep(1)
        key = key_of("ffn.5.").digest
        assert any(peer.cache.is_absent(key, peer.wall_s()) for peer in peers)
        assert await beam_search(other, "ffn", scores, beam_size=2) == []
        await declare_experts(server, [uid], server.in_s(600))
        for peer in (client, other):
            assert uids_of(await beam_search(peer, "ffn", scores, beam_size=2)) == [uid]

    in_swarm(8, work)


@pytest.mark.parametrize("num_peers", [1, 2, 7])
def test_a_peer_finds_its_own_experts(num_peers):
    async def work(swarm, server, *_):
        await declare_experts(server, ["ffn.1.2", "ffn.0.3"], server.in_s(600))
        found = await beam_search(server, "ffn", [[0.0, 1.0, 2.0, 3.0]] * 2, beam_size=4)
        assert uids_of(found) == ["ffn.1.2", "ffn.0.3"]

    in_swarm(num_peers, work)


def test_a_part_of_a_grid_can_be_searched():
    async def work(swarm, server, client):
        await declare_experts(server, ["ffn.1.2.3", "ffn.1.0.0", "ffn.2.2.2", "ffn.1.2"], server.in_s(600))
        scores = [[0.0, 1.0, 2.0, 3.0]] * 2
        assert uids_of(await beam_search(client, "ffn.1.", scores, beam_size=2)) == ["ffn.1.2.3", "ffn.1.0.0"]
        assert uids_of(await beam_search(client, "ffn.1.", scores[:1], beam_size=2)) == ["ffn.1.2"]
        assert uids_of(await beam_search(client, "ffn.1.2.", scores[:1], beam_size=2)) == ["ffn.1.2.3"]
        assert await beam_search(client, "ffn.3.", scores, beam_size=2) == []

    in_swarm(2, work)


def test_an_axis_may_take_several_pages():
    async def work(swarm, *peers):
        server, client = peers[0], peers[-1]
        uids = [f"ffn.3.{last}" for last in range(0, 3000, 3)]
        await declare_experts(server, uids, server.in_s(600), is_owned=False)
        assert await client.get_coordinates(["ffn.3."]) == [tuple(range(0, 3000, 3))]
        found = await beam_search(client, "ffn.3.", [np.arange(3000.0)], beam_size=3)
        assert uids_of(found) == ["ffn.3.2997", "ffn.3.2994", "ffn.3.2991"]

    in_swarm(8, work)


def test_only_places_with_a_score_are_found():
    async def work(swarm, server, client):
        await declare_experts(server, ["ffn.0.0", "ffn.0.3", "ffn.1.9", "ffn.2", "ffn.3.1"], server.in_s(600))
        scores = [[0.0, 3.0, 2.0, 1.0], [0.0, 1.0, 2.0, 3.0]]
        # ffn.1 leads outside of the grid, ffn.2 is of one axis: neither takes a place in the beam
        assert uids_of(await beam_search(client, "ffn", scores, beam_size=2)) == ["ffn.0.3", "ffn.3.1"]
        left_out = [scores[0], [0.0, 1.0, 2.0, -np.inf]]
        assert uids_of(await beam_search(client, "ffn", left_out, beam_size=2, k=4)) == ["ffn.3.1", "ffn.0.0"]
        assert uids_of(await beam_search(client, "ffn", scores[:1], beam_size=2, k=4)) == ["ffn.2"]

    in_swarm(2, work)


def test_equal_scores_go_in_order_of_coordinates():
    async def work(swarm, server, client):
        await declare_experts(server, [f"ffn.{at}.{at % 3}" for at in range(20)], server.in_s(600))
        found = await beam_search(client, "ffn", np.zeros((2, 20)), beam_size=5)
        assert uids_of(found) == [f"ffn.{at}.{at % 3}" for at in range(5)]

    in_swarm(2, work)


def test_a_deadline_ends_the_search():
    async def work(swarm, server, client):
        await declare_experts(server, ["ffn.0.0"], server.in_s(600))
        scores = [[1.0, 2.0]] * 2
        assert await beam_search(client, "ffn", scores, beam_size=1, deadline=Deadline.after(0)) == []
        assert await beam_search(client, "ffn", scores, beam_size=1, deadline=Deadline.after(9)) != []

    in_swarm(2, work)


@pytest.mark.parametrize(
    ("prefix", "batch", "beam_size", "k"),
    [
        ("ffn", [[[1.0]]], 0, None),
        ("ffn", [[[1.0]]], 1, 0),
        ("ffn", [[]], 1, None),
        ("ffn", [[[]]], 1, None),
        ("ffn", [[[[1.0]]]], 1, None),
        ("ffn", [[[1.0, float("nan")]]], 1, None),
        ("ffn", [[[1.0, float("inf")]]], 1, None),
        ("ffn", [[[1.0]], [[1.0, 2.0]]], 1, None),
        ("ffn", [[[1.0]], [[1.0], [2.0]]], 1, None),
        ("ffn.3", [[[1.0]]], 1, None),
    ],
)
def test_what_is_no_search_is_refused(prefix, batch, beam_size, k):
    async def work(swarm, client):
        with pytest.raises(UsageError):
            await batch_beam_search(client, prefix, batch, beam_size=beam_size, k=k)

    in_swarm(1, work)


@pytest.mark.parametrize("size", [24, pytest.param(256, marks=pytest.mark.slow)])
def test_searching_a_full_grid_opens_no_stream(size, dials):
    rng = random.Random(size)

    async def work(swarm, *peers):
        for first, server in zip(range(size), itertools.cycle(peers), strict=False):
            row = [ExpertUid("ffn", (first, last)) for last in range(size)]
            assert all((await declare_experts(server, row, server.in_s(9999))).values())
        client = await swarm.add()
        dials.clear()
        assert swarm.num_streams() == 0
        batch = [drawn_scores(rng, (size, size)) for _ in range(size // 2)]
        for scores in batch[:2]:
            assert uids_of(await beam_search(client, "ffn", scores, beam_size=4)) == best(scores, 4)
        found = await batch_beam_search(client, "ffn", batch, beam_size=4)
        assert [uids_of(each) for each in found] == [best(scores, 4) for scores in batch]
        assert dials == []
        assert swarm.num_streams() == 0

    def best(scores, beam_size):
        """Of a grid in which everything is there."""
        firsts = sorted(range(size), key=lambda at: -scores[0][at])[:beam_size]
        places = itertools.product(firsts, range(size))
        ranked = sorted(places, key=lambda place: -scores[0][place[0]] - scores[1][place[1]])
        return [str(ExpertUid("ffn", place)) for place in ranked[:beam_size]]

    in_swarm(12, work)
