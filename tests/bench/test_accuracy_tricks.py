import pytest

from shoal.bench.accuracy import ALL, TRICKS, TrickSettings, trick_contenders
from shoal.bench.contenders import strategy_contenders
from shoal.core import UsageError

SETTINGS = TrickSettings(steps=900, num_workers=8, topology="ring")


def named(contenders):
    return {contender.name: contender for contender in contenders}


def test_each_order_takes_part_plain_with_each_trick_and_with_all():
    names = [contender.name for contender in trick_contenders(SETTINGS)]
    tricks = ("", "+warm-up", "+average", "+decay", "+all")
    assert names == ["all-reduce", *(f"atc{trick}" for trick in tricks), *(f"awc{trick}" for trick in tricks)]


def test_a_trick_changes_nothing_but_what_it_says():
    contenders = named(trick_contenders(SETTINGS))
    changed = {}
    for trick in TRICKS:
        contender, plain = contenders[f"awc+{trick}"], contenders["awc"]
        assert (contender.base, contender.trick) == ("awc", trick)
        changed[trick] = {
            name: value for name, value in contender.options.items() if value != plain.options[name]
        }
    assert changed["warm-up"] == {"warmup_factor": pytest.approx(1 / 80)}
    assert changed["average"] == {"global_average_every": 16}
    assert changed["decay"] == {"decay_every": 250}
    assert changed[ALL] == changed["warm-up"] | changed["average"] | changed["decay"]


def test_all_share_one_schedule_and_the_graph():
    contenders = named(trick_contenders(SETTINGS))
    schedule = {"warmup_steps": 50, "warmup_factor": 1 / 8, "decay_every": 300, "decay_factor": 0.1}
    for name in ("all-reduce", "atc", "awc"):
        assert schedule.items() <= contenders[name].options.items()
    assert contenders["atc"].options["order"] == "adapt-then-combine"
    assert contenders["awc"].options["order"] == "adapt-while-combine"
    assert contenders["atc+all"].options["topology"] == "ring"


def test_the_legend_has_the_numbers():
    assert [line.partition(":")[0] for line in SETTINGS.legend()] == list(TRICKS)
    assert "every 250 steps instead of every 300" in SETTINGS.legend()[2]


def test_one_order_can_be_left_out():
    one = TrickSettings(900, 4, orders=("adapt-then-combine",))
    assert "awc" not in named(trick_contenders(one))
    assert len(trick_contenders(one)) == 6


def test_a_topology_that_is_none_is_refused():
    with pytest.raises(UsageError, match="no topology 'foo'"):
        TrickSettings(900, 8, topology="foo")


def test_strategies_have_options_of_their_own_before_common_ones():
    texts = ["all-reduce", "neighbor", "neighbor  topology=ring local-steps=2", "async-sgd", "allreduce"]
    contenders = named(strategy_contenders(texts, {"topology": "full", "bucket_mib": "3"}))
    assert list(contenders) == [
        "all-reduce",
        "neighbor",
        "neighbor topology=ring local-steps=2",
        "async-sgd",
        "allreduce",
    ]
    assert contenders["all-reduce"].options["bucket_mib"] == 3.0
    assert contenders["neighbor"].options["topology"] == "full"
    own = contenders["neighbor topology=ring local-steps=2"].options
    assert (own["topology"], own["local_steps"]) == ("ring", 2)
    assert contenders["allreduce"].options["topology"] == "full"
    assert "seed" in contenders["async-sgd"].options


@pytest.mark.parametrize(
    ("texts", "common", "says"),
    [
        (["pair"], {"topology": "ring"}, "None of pair has an option 'topology'"),
        (["neighbor topology"], {}, "'topology' in 'neighbor topology' sets nothing"),
        (["neighbor foo=1"], {}, "neighbor has no option 'foo'"),
        (["foo"], {}, "no strategy 'foo'"),
        ([], {}, "no strategy to train with"),
    ],
)
def test_what_does_not_fit_is_refused(texts, common, says):
    with pytest.raises(UsageError, match=says):
        strategy_contenders(texts, common)
