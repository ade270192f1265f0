"""Fault scripts: what is refused, when faults hold, whom they concern, and that a seed decides it all."""

import math

import pytest

from shoal.core import Address, UsageError
from shoal.transport.network.faults import FaultScript, Schedule

A, B, C = (Address("10.0.0.1", port) for port in (1, 2, 3))


def schedule(text, seed=0):
    return Schedule(FaultScript.parse(text), seed)


def active(faults):
    return [event.fault.__struct_config__.tag for event in faults.events if event.is_active]


def names(faults, peer, place=None):
    return faults.names_of(peer, place)


def touched(text, *, at=(1.0, 0)):
    faults = schedule(text)
    faults.advance(*at)
    peers = {"a": A, "b": B, "c": C}
    return [
        f"{one}{other}"
        for one in peers
        for other in peers
        if one != other
        and any(
            event.touches(names(faults, peers[one], f"in {one}"), names(faults, peers[other], f"in {other}"))
            for event in faults.events
        )
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[faults]]", r"'faults' is no key, did you mean 'fault'\?"),
        (
            "[[fault]]\nkind = 'partion'",
            r"at fault\[0\]\.kind: 'partion' is not known, did you mean 'partition'\?",
        ),
        ("[[fault]]\nat_s = 1", r"at fault\[0\]: it needs a 'kind', one of 'kill', 'pause'"),
        ("[[fault]]\nkind = 'kill'\nat = 1", r"'at' is no key of 'kill', did you mean 'at_s'\?"),
        ("[[fault]]\nkind = 'drop'\nfactor = 1", "'factor' is no key of 'drop'"),
        ("[[fault]]\nkind = 'drop'", "missing required field `probability`"),
        ("[[fault]]\nkind = 'drop'\nprobability = 2", r"at fault\[0\]\.probability: expected `number` <= 1"),
        ("[[fault]]\nkind = 'slow'\nfactor = 0", r"at fault\[0\]\.factor: expected `number` > 0"),
        ("[[fault]]\nkind = 'kill'\nat_s = -1", r"at fault\[0\]\.at_s: expected `number` >= 0"),
        ("[[fault]]\nkind = 'kill'\nat_step = 1.5", r"at fault\[0\]\.at_step: expected `int`"),
        ("[[fault]]\nkind = 'kill'\nfor_s = 1", r"who is killed stays dead; 'pause' holds"),
        ("[[fault]]\nkind = 'pause'\nat_s = 1\nat_step = 1", "'at_s' and 'at_step' exclude each other"),
        ("[[fault]]\nkind = 'pause'\nfor_s = 1\nfor_steps = 1", "'for_s' and 'for_steps' exclude each other"),
        ("[[fault]]\nkind = 'kill'\npeer = 'a:1'\npeers = ['a:1']", "'peer' and 'peers' exclude each other"),
        ("[[fault]]\nkind = 'kill'\nlink = ['a:1', 'b:1']", "'link' is no key of 'kill'"),
        (
            "[[fault]]\nkind = 'partition'\nlink = ['a:1']",
            r"at fault\[0\]\.link: expected `list` of length >= 2",
        ),
        (
            "[[fault]]\nkind = 'partition'\npeer = 'a:1'\none_way = true",
            "'one_way' needs 'link' or 'between'",
        ),
        ("[[fault]]\nkind = 'kill'\npeer = 'a:1'\ncount = 1", "'count' picks among 'peers', not of 'peer'"),
        ("[[fault]]\nkind = 'kill'\npeers = ['a:1']\ncount = 2", "it cannot pick 2 of 1 peers"),
        ("[[fault]]\nkind = 'kill'\ncount = 1", "it cannot pick 1 of 0 peers"),
        ("[[fault]]\nkind = 'join'\npeer = 'rank:4'", "who joins has no name before"),
        ("[[fault]]\nkind = 'join'\nat_step = 4", "does no steps; say 'at_s'"),
        ("[[fault]]\nkind = 'join'\nfor_s = 4", "who joins stays"),
        ("[[fault]]\nkind = 'leave'\nat_s = 4", "it does not say who leaves"),
        ("[[fault]]\nkind = 'leave'\npeer = 'a:1'\nfor_s = 4", "who leaves does not come back"),
        ("[peers]\na = 'b'", r"at peers\.a: 'b' is no address"),
    ],
)
def test_refusals(text, message):
    with pytest.raises(UsageError, match=message):
        FaultScript.parse(text)


def test_names_must_be_known():
    script = FaultScript.parse(
        "[peers]\nanna = 'a:1'\n[[fault]]\nkind = 'kill'\npeers = ['anna', 'x:*', 'asia']"
    )
    script.check_names(["asia"])
    with pytest.raises(UsageError, match=r"at fault\[0\]: no peer is called 'asia', known are 'anna'"):
        script.check_names([])
    script = FaultScript.parse(
        "[peers]\nanna = 'a:1'\n[[fault]]\nkind = 'drop'\nprobability = 1\nlink = ['ana', 'a:1']"
    )
    with pytest.raises(UsageError, match=r"no peer is called 'ana', did you mean 'anna'\?"):
        script.check_names([])


def test_loading(tmp_path):
    path = tmp_path / "script.toml"
    path.write_text("[[fault]]\nkind = 'pause'")
    assert len(FaultScript.load(path).fault) == 1
    path.write_text("[[fault]]\nkind = 'kill'\nfor_s = 3")
    with pytest.raises(UsageError, match=r"script\.toml' is wrong at fault\[0\]: who is killed"):
        FaultScript.load(str(path))


# --- when ---


def test_by_time():
    faults = schedule("[[fault]]\nkind = 'pause'\nat_s = 2\nfor_s = 3")
    assert faults.next_change_s == 2
    assert not faults.advance(1.999, 0)
    assert faults.advance(2.0, 0)
    assert active(faults) == ["pause"]
    assert faults.next_change_s == 5
    assert not faults.advance(4.9, 100)
    assert faults.advance(5.0, 100)
    assert active(faults) == []
    assert faults.next_change_s == math.inf


def test_by_step():
    faults = schedule("[[fault]]\nkind = 'pause'\nat_step = 2\nfor_steps = 3")
    assert faults.next_change_s == math.inf
    seen = []
    for step in range(8):
        faults.advance(step * 10.0, step)
        seen.append(bool(active(faults)))
    assert seen == [False, False, True, True, True, False, False, False]


def test_begun_by_a_step_and_ended_by_time_and_the_other_way_round():
    faults = schedule(
        "[[fault]]\nkind = 'pause'\nat_step = 2\nfor_s = 3\n[[fault]]\nkind = 'skew'\nat_s = 1\nfor_steps = 2"
    )
    faults.advance(1.5, 1)
    assert active(faults) == ["skew"]
    faults.advance(10.0, 2)
    assert active(faults) == ["pause", "skew"]
    assert faults.next_change_s == 13.0
    faults.advance(12.9, 3)
    assert active(faults) == ["pause"]
    faults.advance(13.0, 3)
    assert active(faults) == []


def test_from_the_start_and_to_the_end():
    faults = schedule("[[fault]]\nkind = 'pause'")
    assert faults.next_change_s == 0
    faults.advance(0.0, 0)
    faults.advance(1e9, 10**9)
    assert active(faults) == ["pause"]


def test_a_fault_between_two_looks_is_over_but_a_kill_is_not():
    faults = schedule("[[fault]]\nkind = 'pause'\nat_s = 1\nfor_s = 1\n[[fault]]\nkind = 'kill'\nat_s = 1")
    assert faults.advance(5.0, 0)
    assert active(faults) == ["kill"]
    assert not faults.advance(6.0, 0)


# --- for whom ---


@pytest.mark.parametrize(
    ("target", "links"),
    [
        ("", ["ab", "ac", "ba", "bc", "ca", "cb"]),
        ("peer = '10.0.0.1:1'", ["ab", "ac", "ba", "ca"]),
        ("peers = ['anna', 'bert']", ["ab", "ac", "ba", "bc", "ca", "cb"]),
        ("peer = 'in c'", ["ac", "bc", "ca", "cb"]),
        ("peer = '10.0.0.1:*'", ["ab", "ac", "ba", "bc", "ca", "cb"]),
        ("link = ['anna', 'bert']", ["ab", "ba"]),
        ("link = ['anna', 'bert']\none_way = true", ["ab"]),
        ("between = [['anna'], ['bert', 'in c']]", ["ab", "ac", "ba", "ca"]),
        ("between = [['anna'], ['bert', 'in c']]\none_way = true", ["ab", "ac"]),
        ("between = [['anna'], ['bert'], ['in c']]", ["ab", "ac", "ba", "bc", "ca", "cb"]),
    ],
)
def test_links(target, links):
    head = "[peers]\nanna = '10.0.0.1:1'\nbert = '10.0.0.1:2'\n[[fault]]\n"
    assert touched(f"{head}kind = 'slow'\nfactor = 2\n{target}") == links
    spared = {"peers = ['anna', 'bert']": ["ac", "bc", "ca", "cb"], "peer = '10.0.0.1:*'": []}
    assert touched(f"{head}kind = 'partition'\n{target}") == spared.get(target, links)


def test_peers():
    faults = schedule("[peers]\nanna = '10.0.0.1:1'\n[[fault]]\nkind = 'kill'\npeers = ['anna', 'asia']")
    event = faults.events[0]
    assert [
        event.concerns(names(faults, peer, place)) for peer, place in ((A, None), (B, None), (B, "asia"))
    ] == [
        True,
        False,
        True,
    ]


# --- chance ---


def test_the_seed_picks_peers():
    listed = "', '".join(f"h{number}:*" for number in range(50))
    text = f"[[fault]]\nkind = 'kill'\npeers = ['{listed}']\ncount = 3"

    def picked(seed):
        event = schedule(text, seed).events[0]
        return [number for number in range(50) if event.concerns((f"h{number}:*",))]

    assert picked(0) == picked(0)
    assert len(picked(0)) == 3
    assert len({tuple(picked(seed)) for seed in range(10)}) > 5
    named = "[peers]\na = 'h1:*'\nb = 'h2:*'\n[[fault]]\nkind = 'kill'\ncount = 1"
    assert {schedule(named, seed).events[0].concerns(("a",)) for seed in range(20)} == {True, False}


def test_the_seed_decides_what_happens_at_all():
    text = "[[fault]]\nkind = 'pause'\nchance = 0.3\n" * 100
    counts = [len(schedule(text, seed).events) for seed in range(20)]
    assert sum(counts) / 20 == pytest.approx(30, rel=0.15)
    assert counts == [len(schedule(text, seed).events) for seed in range(20)]
    assert schedule("[[fault]]\nkind = 'pause'\nchance = 0").events == []
