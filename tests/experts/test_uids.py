"""Uids of experts, their prefixes, and patterns that uids are drawn from."""

import random

import pytest

from shoal.core import UsageError
from shoal.experts.names import MAX_COORDINATE, ExpertPrefix, ExpertUid, UidPattern


@pytest.mark.parametrize(
    ("text", "name", "coordinates"),
    [
        ("ffn.0", "ffn", (0,)),
        ("ffn.4.12", "ffn", (4, 12)),
        ("my-experts_2/a.0.10.200", "my-experts_2/a", (0, 10, 200)),
        ("фабрика.7", "фабрика", (7,)),
        (f"x.{MAX_COORDINATE}", "x", (MAX_COORDINATE,)),
    ],
)
def test_a_uid_is_a_name_and_numbers(text, name, coordinates):
    uid = ExpertUid.of(text)
    assert uid == ExpertUid(name, coordinates)
    assert str(uid) == text
    assert ExpertUid.of(uid) is uid


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ffn",
        "ffn.",
        ".3",
        "ffn.3.",
        "ffn..3",
        "ffn.03",
        "ffn.-1",
        "ffn.+1",
        "ffn.1.5x",
        "ffn.x.5",
        "ffn. 3",
        "f fn.3",
        "ffn\n.3",
        "ffn.3\n",
        "ffn.٣",  # a digit, but not one of ours
        f"x.{MAX_COORDINATE + 1}",
        f"x.{'9' * 5000}",
    ],
)
def test_what_is_no_uid_is_refused(text):
    with pytest.raises(UsageError):
        ExpertUid.of(text)


@pytest.mark.parametrize("coordinates", [(), (-1,), (1.0,), (True,), ("1",)])
def test_coordinates_are_whole_numbers(coordinates):
    with pytest.raises(UsageError):
        ExpertUid("ffn", coordinates)


def test_prefixes_are_proper_and_have_a_coordinate():
    assert list(map(str, ExpertUid.of("ffn.1.2.3").prefixes)) == ["ffn.1.", "ffn.1.2."]
    assert ExpertUid.of("ffn.1").prefixes == ()


@pytest.mark.parametrize(
    ("text", "coordinates", "printed"),
    [
        ("ffn", (), "ffn."),
        ("ffn.", (), "ffn."),
        ("ffn.3.", (3,), "ffn.3."),
        ("ffn.0.14.", (0, 14), "ffn.0.14."),
    ],
)
def test_a_prefix_ends_in_a_dot(text, coordinates, printed):
    prefix = ExpertPrefix.of(text)
    assert prefix == ExpertPrefix("ffn", coordinates)
    assert str(prefix) == printed
    assert ExpertPrefix.of(printed) == prefix


@pytest.mark.parametrize("text", ["", ".", "ffn.3", "ffn..", "ffn.03.", "ffn.x."])
def test_what_is_no_prefix_is_refused(text):
    with pytest.raises(UsageError):
        ExpertPrefix.of(text)


def test_uids_and_prefixes_are_different_things_in_a_set_order():
    uid = ExpertUid.of("ffn.3")
    assert uid != ExpertPrefix.of("ffn.3.")
    assert sorted(map(ExpertUid.of, ["ffn.10", "ffn.9.1", "a.11", "ffn.9"])) == [
        ExpertUid("a", (11,)),
        ExpertUid("ffn", (9,)),
        ExpertUid("ffn", (9, 1)),
        ExpertUid("ffn", (10,)),
    ]


def test_a_pattern_gives_every_place_once_and_no_other():
    pattern = UidPattern.of("ffn.[2:4].7.[0:3]")
    assert pattern.size == 6
    drawn = pattern.sample(100, random.Random(0))
    assert sorted(uid.coordinates for uid in drawn) == [
        (first, 7, last) for first in (2, 3) for last in (0, 1, 2)
    ]
    assert {uid.name for uid in drawn} == {"ffn"}


def test_draws_from_a_large_grid_are_many_different_places():
    pattern = UidPattern.of("ffn.[0:256].[0:1024]")
    drawn = pattern.sample(500, random.Random(1))
    assert len(dict.fromkeys(drawn)) == 500
    assert drawn == pattern.sample(500, random.Random(1))
    assert drawn != pattern.sample(500, random.Random(2))
    firsts = [uid.coordinates[0] for uid in drawn]
    assert min(firsts) < 32
    assert max(firsts) >= 224


@pytest.mark.parametrize(
    "text",
    [
        "ffn",
        "ffn.",
        ".[0:2]",
        "ffn.[2:2]",
        "ffn.[3:2]",
        "ffn.[0:02]",
        "ffn.[:2]",
        "ffn.[0-2]",
        f"ffn.[0:{MAX_COORDINATE + 2}]",
        f"ffn.[0:{MAX_COORDINATE}].[0:{MAX_COORDINATE}].[0:2]",
    ],
)
def test_what_is_no_pattern_is_refused(text):
    with pytest.raises(UsageError):
        UidPattern.of(text)
