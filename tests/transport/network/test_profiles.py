"""Profiles: presets that say sensible things, rules that find their peers, refusals that help."""

import os
import statistics
import subprocess
import sys
from importlib import resources

import pytest

from shoal.core import Address, UsageError
from shoal.transport.network.distributions import Draws, Normal, Recorded, sampler_of
from shoal.transport.network.profiles import PRESETS, Between, Place, Profile, Way, Ways, is_pattern

HERE, THERE = Address("10.0.0.1", 1), Address("10.0.0.2", 2)

WORLD = """
[places.europe]
up_mbit_s = 100
[places.asia]
[ways.default]
delay_ms = 10
loss = 0.01
[[ways.between]]
from = "europe"
to = "asia"
delay_ms = 100
[[ways.between]]
from = "europe"
to = "10.0.0.2:2"
delay_ms = 70
one_way = true
[[ways.between]]
from = "10.0.0.9:*"
to = "asia"
mbit_s = 5
[peers]
"10.0.0.1:1" = "europe"
"10.0.0.2:*" = "asia"
"10.0.0.9:*" = "europe"
"""


def mean_ms(way):
    sample, draws = sampler_of(way.delay_ms), Draws(0, "mean")
    return statistics.fmean(1000 * sample(draws.uniform()) for _ in range(5000))


@pytest.mark.parametrize(
    ("name", "least_ms", "most_ms"),
    [("lan", 0.05, 0.2), ("wan", 35, 45), ("home", 18, 22), ("three-continents", 9, 125)],
)
def test_presets(name, least_ms, most_ms):
    profile = Profile.load(name)
    assert profile.name == name
    assert profile.description
    way = profile.way_between(HERE, THERE)
    assert least_ms <= mean_ms(way) <= most_ms
    assert way.loss < 0.01
    assert way.mbit_s or profile.line_of(HERE).up_mbit_s
    assert Profile.parse(profile.to_toml()) == profile


def test_every_preset_is_a_file_of_the_package_and_the_other_way_round():
    folder = resources.files("shoal.transport.network") / "presets"
    assert sorted(file.name for file in folder.iterdir()) == sorted(f"{name}.toml" for name in PRESETS)


def test_home_is_slower_up_than_down():
    line = Profile.load("home").line_of(HERE)
    assert (line.up_mbit_s, line.down_mbit_s) == (20, 100)


def test_three_continents():
    text = Profile.load("three-continents").to_toml()
    profile = Profile.parse(text + '\n[peers]\n"e:*" = "europe"\n"am:*" = "america"\n"as:*" = "asia"\n')
    e, america, asia = (Address(host, 1) for host in ("e", "am", "as"))
    assert mean_ms(profile.way_between(e, Address("e", 2))) == pytest.approx(10, rel=0.1)
    assert mean_ms(profile.way_between(e, america)) == pytest.approx(45, rel=0.1)
    assert mean_ms(profile.way_between(asia, e)) == pytest.approx(120, rel=0.1)
    assert mean_ms(profile.way_between(asia, america)) == mean_ms(profile.way_between(america, asia))


def test_the_last_rule_that_fits_counts_and_takes_the_rest_from_the_default():
    profile = Profile.parse(WORLD)
    asia = Address("10.0.0.2", 3)
    assert profile.way_between(HERE, asia) == Way(delay_ms=100, jitter_ms=0, loss=0.01, queue_ms=200)
    assert profile.way_between(asia, HERE).delay_ms == 100
    assert profile.way_between(HERE, THERE).delay_ms == 70
    assert profile.way_between(THERE, HERE).delay_ms == 100  # the later rule holds in one direction
    nine = Address("10.0.0.9", 4)
    assert profile.way_between(nine, asia) == profile.way_between(asia, nine)
    assert profile.way_between(nine, asia).mbit_s == 5
    assert profile.way_between(nine, asia).delay_ms == 10  # from the default, not from an earlier rule
    assert profile.way_between(HERE, nine).delay_ms == 10
    assert profile.line_of(HERE) == Place(up_mbit_s=100)


def test_an_empty_profile_is_an_ideal_network():
    profile = Profile.parse("")
    assert profile == Profile()
    assert profile.way_between(HERE, THERE) == Way(delay_ms=0, jitter_ms=0, loss=0, queue_ms=200)
    assert profile.line_of(HERE) == Place()
    assert profile.place_of(HERE) is None


def test_peers_that_nobody_names_are_spread_the_same_way_in_every_process():
    peers = [Address("10.0.0.1", port) for port in range(1000, 1300)]
    places = [Profile.load("three-continents").place_of(peer) for peer in peers]
    assert all(70 < places.count(place) < 130 for place in ("europe", "america", "asia"))
    program = (
        "from shoal.core import Address; from shoal.transport.network.profiles import Profile;"
        "p = Profile.load('three-continents');"
        "print([p.place_of(Address('10.0.0.1', port)) for port in range(1000, 1300)])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "3"},
        capture_output=True,
        check=True,
    )
    assert answer.stdout.decode().strip() == str(places)


def test_ipv6_peers_are_named_in_brackets():
    profile = Profile.parse('[places.a]\n[places.b]\n[peers]\n"[::1]:5" = "b"\n"[::2]:*" = "a"')
    assert profile.place_of(Address("::1", 5)) == "b"
    assert profile.place_of(Address("::2", 9)) == "a"
    assert is_pattern("[::1]:*")
    assert not is_pattern("::1")
    assert not is_pattern("host")
    assert not is_pattern("host:99999")


def test_what_was_measured_can_be_written():
    rule = Between(from_="10.0.0.1:*", to="10.0.0.2:2", delay_ms=Recorded([1.25, 0.5]), mbit_s=93.5)
    profile = Profile(name="measured", ways=Ways(default=Way(delay_ms=Normal(5, 1)), between=[rule]))
    assert Profile.parse(profile.to_toml()) == profile
    assert 'from = "10.0.0.1:*"' in profile.to_toml()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[ways.default]\ndelay = 3", r"at ways\.default: 'delay' is no key, did you mean 'delay_ms'\?"),
        ("[place.europe]", r"'place' is no key, did you mean 'places'\?"),
        (
            "[places.europe]\nup_mbits = 3",
            r"at places\.europe: 'up_mbits' is no key, did you mean 'up_mbit_s'\?",
        ),
        ("[ways.default]\nloss = 1.5", r"at ways\.default\.loss: expected `number` < 1"),
        ("[ways.default]\nmbit_s = 0", r"at ways\.default\.mbit_s: expected `number` > 0"),
        ("[ways.default]\ndelay_ms = -1", r"at ways\.default\.delay_ms: expected `number` >= 0"),
        ("[ways.default]\ndelay_ms = 'slow'", r"at ways\.default\.delay_ms: expected .*, got `str`"),
        (
            "[ways.default]\ndelay_ms = {kind = 'normal', mean = 4}",
            r"delay_ms: table missing required field `deviation`",
        ),
        ("[[ways.between]]\nfrom = 'a:1'", r"at ways\.between\[0\]: .*missing required field `to`"),
        (
            "[places.europe]\n[[ways.between]]\nfrom = 'europe'\nto = 'erope'",
            r"at ways\.between\[0\]\.to: 'erope' is neither a place.*did you mean 'europe'\?",
        ),
        ("[places.asia]\n[peers]\n'1.2.3.4:5' = 'asie'", r"'asie' is no place, did you mean 'asia'\?"),
        (
            "[places.asia]\n[peers]\n'1.2.3.4' = 'asia'",
            r"'1.2.3.4' is no address, write HOST:PORT or HOST:\*",
        ),
    ],
)
def test_refusals(text, message):
    with pytest.raises(UsageError, match=message):
        Profile.parse(text)


def test_loading(tmp_path):
    with pytest.raises(UsageError, match=r"(?s)no profile 'wam'.*did you mean 'wan'\?.*lan, wan, home"):
        Profile.load("wam")
    path = tmp_path / "mine.toml"
    with pytest.raises(UsageError, match="Cannot read"):
        Profile.load(path)
    path.write_text("[ways.default]\nlos = 3")
    with pytest.raises(UsageError, match=r"mine\.toml' is wrong at ways\.default: 'los' is no key"):
        Profile.load(path)
    path.write_text("[ways.default]\ndelay_ms = 3")
    assert Profile.load(str(path)).way_between(HERE, THERE).delay_ms == 3
