from experts.fake_client import peer_at
from shoal.experts.client.directory import GridCache
from shoal.experts.names import ExpertAddress, ExpertUid


def address(*place):
    return ExpertAddress(ExpertUid("ffn", place), (peer_at(1),), 0.0)


def test_what_lies_outside_of_the_grid_does_not_count():
    known = GridCache((), (2, 3), 30.0)
    known.note_prefixes({(0,): (-1, 0, 2, 3), (1,): (7,)}, 0.0)
    assert known.new_below({(0,): (0, 1, 2, 9), (1,): (0,)}) == [(0, 1), (1, 0)]


def test_tables_are_made_anew_when_something_is_news():
    known = GridCache((), (2, 3), 30.0)
    before = known.tables
    assert known.tables is before
    known.note_prefixes({(0,): (1,)}, 0.0)
    known.note_experts({(0, 1): address(0, 1)}, 0.0)
    after = known.tables
    assert [str(expert.uid) for expert in after.experts] == ["ffn.0.1"]
    known.note_prefixes({(0,): (1,)}, 5.0)
    known.note_experts({(0, 1): address(0, 1)}, 5.0)
    assert known.tables is after


def test_what_is_old_is_to_be_looked_up():
    known = GridCache((), (2, 3), 30.0)
    known.note_prefixes({(0,): (1, 2), (1,): None}, 0.0)
    known.note_experts({(0, 1): address(0, 1), (0, 2): address(0, 2)}, 0.0)
    assert known.stale([(0, 1)], 29.0) == ([], [])
    assert known.stale([(0, 1)], 30.0) == ([(0,), (1,)], [(0, 1)])
    known.note_prefixes({(0,): (1, 2), (1,): None}, 30.0)
    known.note_experts({(0, 1): address(0, 1)}, 30.0)
    assert known.stale([(0, 1)], 31.0) == ([], [])


def test_prefixes_that_nobody_uses_have_their_turn(monkeypatch):
    monkeypatch.setattr("shoal.experts.client.directory._MAX_UNUSED", 2)
    known = GridCache((), (4, 3), 30.0)
    for at in range(4):
        known.note_prefixes({(at,): (1,)}, 3.0 - at)
    assert known.stale([], 29.0) == ([], [])
    assert known.stale([], 40.0) == ([(3,), (2,)], [])
    known.note_prefixes({(3,): (1,), (2,): (1,)}, 40.0)
    assert known.stale([], 41.0) == ([(1,), (0,)], [])


def test_an_expert_in_doubt_is_looked_up_more_often():
    known = GridCache((), (3,), 30.0)
    known.note_experts({(1,): address(1)}, 0.0)
    known.doubt((1,), 1.0)
    assert known.stale([], 1.0) == ([], [(1,)])
    known.note_experts({(1,): address(1)}, 1.0)
    assert known.stale([], 5.0) == ([], [])
    assert known.stale([], 6.0) == ([], [(1,)])
    known.trust((1,))
    assert known.stale([], 6.0) == ([], [])


def test_absences_are_forgotten_by_age():
    known = GridCache((), (2, 3), 30.0)
    known.note_prefixes({(0,): None, (1,): (1,)}, 0.0)
    known.note_experts({(1, 1): None}, 10.0)
    assert not known.forget_absence(0.0)
    assert known.forget_absence(5.0)
    assert known.forget_absence(11.0)
    assert not known.forget_absence(99.0)
