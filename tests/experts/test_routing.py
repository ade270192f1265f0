import itertools
import random

import pytest
import torch

from experts.fake_client import peer_at
from shoal.experts.client.directory import GridTables
from shoal.experts.names import ExpertAddress, ExpertUid


def address(place):
    return ExpertAddress(ExpertUid("ffn", place), (peer_at(1),), 0.0)


def known(places, root=()):
    """All there is to know of a grid with experts at these places."""
    prefixes, experts = {}, {}
    for place in places:
        experts[place] = address(place)
        for length in range(len(root), len(place)):
            prefixes.setdefault(place[:length], []).append(place[length])
    return {place: sorted(set(following)) for place, following in prefixes.items()}, experts


def best(places, scores, beam_size, k):
    """By plain lists."""
    beam = [()]
    for axis in range(len(scores)):
        longer = {place[: axis + 1] for place in places if place[:axis] in beam}
        ranked = sorted(longer, key=lambda place: -sum(map(lambda s, at: float(s[at]), scores, place)))
        beam = ranked[: k if axis == len(scores) - 1 else beam_size]
    return beam


@pytest.mark.parametrize("sizes", [(12,), (8, 8), (6, 5, 4), (3, 3, 3, 3)])
def test_every_sample_gets_what_plain_lists_find(sizes):
    rng = random.Random(len(sizes))
    everywhere = list(itertools.product(*map(range, sizes)))
    places = rng.sample(everywhere, len(everywhere) // 3)
    tables = GridTables((), sizes, *known(places))
    scores = [torch.randn(20, size) for size in sizes]
    routes = tables.routes(tables.search(scores, beam_size=3, k=5))
    for sample in range(20):
        numbers = [number for number in routes.slots[sample].tolist() if number >= 0]
        expected = best(places, [axis[sample] for axis in scores], 3, 5)
        assert [routes.experts[number].uid.coordinates for number in numbers] == expected
        assert [tuple(routes.coordinates[number].tolist()) for number in numbers] == expected
        assert routes.num_routes[sample] == len(expected)


def test_experts_that_nobody_goes_to_are_not_among_the_routes():
    tables = GridTables((), (4, 4), *known([(0, 0), (1, 1), (2, 2)]))
    scores = [torch.tensor([[0.0, 9.0, 0.0, 0.0]]), torch.zeros(1, 4)]
    routes = tables.routes(tables.search(scores, beam_size=1, k=1))
    assert [str(expert.uid) for expert in routes.experts] == ["ffn.1.1"]
    assert routes.slots.tolist() == [[0]]


def test_a_sample_with_fewer_experts_has_empty_slots():
    tables = GridTables((), (4, 4), *known([(0, 0), (3, 1)]))
    routes = tables.routes(tables.search([torch.randn(3, 4)] * 2, beam_size=4, k=4))
    assert routes.num_routes.tolist() == [2, 2, 2]
    nobody = GridTables((), (4, 4), {(): range(4), **dict.fromkeys([(at,) for at in range(4)])}, {})
    routes = nobody.routes(nobody.search([torch.randn(3, 4)] * 2, beam_size=4, k=4))
    assert routes.experts == ()
    assert routes.num_routes.tolist() == [0, 0, 0]
    assert routes.coordinates.shape == (0, 2)


def test_minus_infinity_leaves_a_coordinate_out():
    tables = GridTables((), (2, 2), *known([(0, 0), (1, 0), (1, 1)]))
    scores = [torch.tensor([[0.0, -torch.inf]]), torch.zeros(1, 2)]
    routes = tables.routes(tables.search(scores, beam_size=2, k=4))
    assert [str(expert.uid) for expert in routes.experts] == ["ffn.0.0"]
    assert routes.num_routes.tolist() == [1]


def test_those_left_out_are_replaced_by_the_next_best():
    tables = GridTables((), (4,), *known([(0,), (1,), (2,)]))
    scores = [torch.tensor([[3.0, 2.0, 1.0, 0.0]])]
    found = tables.without(torch.tensor([True, False, False])).search(scores, beam_size=2, k=2)
    assert found.tolist() == [[1, 2]]


@pytest.mark.parametrize("sizes", [(8, 8), (5, 4, 3)])
def test_those_left_out_take_no_place_in_the_beam(sizes):
    rng = random.Random(len(sizes))
    places = rng.sample(list(itertools.product(*map(range, sizes))), 20)
    tables = GridTables((), sizes, *known(places))
    marks = torch.tensor([rng.random() < 0.7 for _ in tables.experts])
    left = [expert.uid.coordinates for expert, mark in zip(tables.experts, marks, strict=True) if not mark]
    scores = [torch.randn(20, size) for size in sizes]
    routes = tables.routes(tables.without(marks).search(scores, beam_size=2, k=2))
    for sample in range(20):
        found = [routes.experts[number].uid.coordinates for number in routes.slots[sample] if number >= 0]
        assert found == best(left, [axis[sample] for axis in scores], 2, 2)


def test_what_is_unknown_is_not_left_out():
    prefixes, experts = known([(0, 0), (1, 1)])
    prefixes[(0,)].append(3)
    tables = GridTables((), (2, 4), prefixes, experts).without(torch.tensor([True, True]))
    assert tables.search([torch.zeros(1, 2), torch.zeros(1, 4)], beam_size=1, k=1) == [(0, 3)]


def test_it_names_what_it_needs_to_know():
    prefixes = {(): range(8), (7,): None, (5,): [0, 3]}
    tables = GridTables((), (8, 4), prefixes, {})
    scores = [torch.arange(8.0).expand(2, 8), torch.zeros(2, 4)]
    # 7 is absent and 5 known; a reach of 2 looks at four of them
    assert tables.search(scores, beam_size=2, k=1) == [(6,)]
    assert tables.search(scores, beam_size=2, k=1, reach=2) == [(3,), (4,), (6,)]
    assert tables.search(scores, beam_size=2, k=1, reach=None).tolist() == [[-1], [-1]]
    told = {**prefixes, (6,): None, (4,): [1]}
    assert GridTables((), (8, 4), told, {}).search(scores, beam_size=2, k=4) == [(4, 1), (5, 0), (5, 3)]
    only_third = [scores[0], torch.tensor([[-torch.inf, -torch.inf, -torch.inf, 0.0]]).expand(2, 4)]
    assert GridTables((), (8, 4), told, {}).search(only_third, beam_size=2, k=4) == [(5, 3)]


def test_a_prefix_whose_experts_are_gone_takes_no_place_in_the_beam():
    prefixes, experts = known([(0, 0), (1, 1), (3, 3)])
    experts[(3, 3)] = None
    prefixes[(2,)] = None
    prefixes[()] = range(4)
    tables = GridTables((), (4, 4), prefixes, experts)
    routes = tables.routes(tables.search([torch.arange(4.0)[None]] * 2, beam_size=1, k=1))
    assert [str(expert.uid) for expert in routes.experts] == ["ffn.1.1"]


def test_a_part_of_a_grid():
    tables = GridTables((1,), (4, 4), *known([(1, 2, 3), (1, 0, 0)], root=(1,)))
    routes = tables.routes(tables.search([torch.arange(4.0)[None]] * 2, beam_size=2, k=2))
    assert [str(expert.uid) for expert in routes.experts] == ["ffn.1.0.0", "ffn.1.2.3"]
    assert routes.coordinates.tolist() == [[0, 0], [2, 3]]
    assert routes.slots.tolist() == [[1, 0]]


def test_an_empty_batch():
    tables = GridTables((), (4,), *known([(0,), (1,)]))
    routes = tables.routes(tables.search([torch.zeros(0, 4)], beam_size=2, k=2))
    assert routes.slots.shape == (0, 2)
