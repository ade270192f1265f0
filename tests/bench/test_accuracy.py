import msgspec
import pytest

from bench.sample_fake_workers import FakeWorkers
from shoal.bench.accuracy import (
    AccuracyConfig,
    AccuracyCourse,
    AccuracyRun,
    AccuracyScenario,
    Evaluation,
    bytes_moved,
    where_reached,
)
from shoal.bench.contenders import Contender, strategy_contenders
from shoal.core import BenchmarkError, UsageError
from shoal.report import Curve, Row

NAMES = ("all-reduce", "pair", "ddp")
CONFIG = AccuracyConfig(
    contenders=tuple(Contender(name, name) for name in NAMES),
    num_workers=2,
    steps=5,
    eval_every=2,
    batch_size=10,
    target_accuracy=0.5,
)


def look(seconds=1.0, accuracy=0.5, mean=0.6, loss=0.1, moved=(("exchange", (10, 10)),)):
    return Evaluation(seconds, dict(moved), accuracy, 0.25, mean, loss)


def by_name(told, kind):
    return {
        (one.metric, one.key["contender"], one.key["split"]): one for one in told if isinstance(one, kind)
    }


def test_bytes_count_once_whichever_side_has_counted_them():
    first = {"exchange": (10, 10), "fetch": (0, 7), "put": (5, 0), "broadcast": (30, 0)}
    second = {"exchange": (10, 10), "broadcast": (0, 30)}
    assert bytes_moved([first, second]) == 20 + 7 + 5 + 30


def test_a_target_is_reached_once():
    assert where_reached([0.1, 0.6, 0.4, 0.9], 0.5) == 1
    assert where_reached([0.1, 0.4], 0.5) is None


@pytest.fixture
def course():
    """Three evaluations of two workers, of which the second is the slower one."""
    course = AccuracyCourse(AccuracyRun(1, Contender("pair", "pair"), "iid"))
    course.add(0, [look(0.0, mean=0.1, moved=()), look(0.0, accuracy=0.05, moved=())])
    course.add(2, [look(1.0, mean=0.5), look(2.0, accuracy=0.3)])
    course.add(4, [look(2.0, mean=0.7), look(1.0, accuracy=0.4)])
    return course


def test_curves_go_along_steps_seconds_and_bytes(course):
    curves = by_name(course.told(CONFIG), Curve)
    accuracy = curves["accuracy", "pair", "iid"].starts[0]
    assert accuracy["value"] == [0.1, 0.5, 0.7]
    assert accuracy["step"] == [0, 2, 4]
    assert accuracy["s"] == [0, 2, 4]
    assert accuracy["bytes"] == [0, 20, 40]
    assert curves["worst_accuracy", "pair", "iid"].starts[0]["value"] == [0.05, 0.3, 0.4]
    assert {metric for metric, *_ in curves} == {"accuracy", "worst_accuracy", "consensus_distance", "loss"}


def test_rows_hold_what_was_at_the_end_and_when_the_target_was_reached(course):
    rows = by_name(course.told(CONFIG), Row)
    samples = {metric: row.samples for (metric, *_), row in rows.items()}
    assert samples == {
        "final_accuracy": [0.7],
        "worst_final_accuracy": [0.4],
        "seconds_to_target": [2.0],
        "bytes_to_target": [20.0],
        "steps_to_target": [2.0],
        "bytes_sent": [40.0],
        "examples_per_s": [2 * 10 * 5 / 4],
        "consensus_distance": [0.25],
    }


def test_a_target_that_was_not_reached_is_no_row_and_no_failure(course):
    rows = by_name(course.told(msgspec.structs.replace(CONFIG, target_accuracy=0.9)), Row)
    assert ("seconds_to_target", "pair", "iid") not in rows
    assert not [row for row in rows.values() if row.error]


def test_bytes_that_the_group_does_not_see_are_not_told(course):
    course.run = AccuracyRun(1, Contender("ddp", "ddp"), "iid")
    told = list(course.told(CONFIG))
    assert ("bytes_sent", "ddp", "iid") not in by_name(told, Row)
    assert all("bytes" not in curve.starts[0] for curve in by_name(told, Curve).values())


class LearningWorkers(FakeWorkers):
    """Two workers that learn by the number; `failing` orders of the contenders that it names break it."""

    def ask(self, order, run=None, num_steps=0):
        self.is_running = True
        if order == "begin":
            self.name = run["contender"]["name"]
        self.orders.append((order, num_steps) if order == "train" else order)
        if (order, getattr(self, "name", "")) in self.failing:
            self.is_running = False
            raise BenchmarkError(f"rank 1 of 2 failed: {self.name} broke.\n  Try: again.")
        if order in ("ready", "finish"):
            return [None, None]
        is_lost = order == "train" and self.name == "sma"
        return [
            msgspec.to_builtins(look(mean=0.1 + num_steps, loss=None if is_lost else 0.5)) for _ in range(2)
        ]


def told_by(config):
    scenario = AccuracyScenario(msgspec.to_builtins(config), 3)
    scenario.open_workers = LearningWorkers
    return list(scenario.run(lambda _: None))


def test_an_order_of_many_steps_has_as_long_as_other_benchmarks_give():
    opened = []
    scenario = AccuracyScenario(msgspec.to_builtins(CONFIG), 3)
    scenario.open_workers = lambda settings: opened.append(settings) or LearningWorkers(settings)
    assert list(scenario.run(lambda _: None))
    assert opened[0].answer_s >= 1800


def test_every_contender_is_trained_on_every_split():
    told = told_by(msgspec.structs.replace(CONFIG, splits=("iid", "dirichlet:0.1")))
    rows = by_name(told, Row)
    assert len([key for key in rows if key[0] == "final_accuracy"]) == 6
    once = ["begin", ("train", 2), ("train", 2), ("train", 1), "finish"]
    assert LearningWorkers.latest.orders == ["ready", *once * 6]
    assert not LearningWorkers.latest.helpers


@pytest.mark.parametrize("moment", ["begin", "train", "finish"])
def test_one_that_fails_is_a_row_and_the_rest_go_on(monkeypatch, moment):
    monkeypatch.setattr(LearningWorkers, "failing", [(moment, "pair")])
    rows = by_name(told_by(CONFIG), Row)
    assert rows["final_accuracy", "pair", "iid"].error == "rank 1 of 2 failed: pair broke. Try: again."
    assert [key[1] for key in rows if key[0] == "worst_final_accuracy"] == ["all-reduce", "ddp"]


def test_one_that_diverges_is_a_row_and_the_crew_goes_on():
    contenders = (Contender("sma", "sma"), Contender("pair", "pair"))
    rows = by_name(told_by(msgspec.structs.replace(CONFIG, contenders=contenders)), Row)
    assert "after 2 steps: it diverged" in rows["final_accuracy", "sma", "iid"].error
    assert rows["final_accuracy", "pair", "iid"].samples
    assert LearningWorkers.latest.orders[:4] == ["ready", "begin", ("train", 2), "finish"]


def test_parameter_servers_are_hired_before_the_workers_look_for_them():
    contender = Contender("ps", "ps")
    told_by(msgspec.structs.replace(CONFIG, contenders=(contender,), num_servers=2))
    assert [helper.name for helper in LearningWorkers.latest.helpers] == ["server 0", "server 1"]
    role = LearningWorkers.latest.helpers[1].arguments
    assert role["server"] == 1
    assert role["config"]["seed"] == 3


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"splits": ()}, {"contenders": ()}, {"target_accuracy": 95.0}, {"splits": ("dirichlet",)}],
)
def test_what_trains_nothing_is_refused(wrong):
    with pytest.raises(UsageError):
        msgspec.structs.replace(CONFIG, **wrong)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_learn_under_each_kind_of_strategy():
    texts = [
        "all-reduce",
        "neighbor order=adapt-while-combine",
        "pair",
        "local-sgd",
        "parameter-server",
        "ddp",
    ]
    config = AccuracyConfig(
        contenders=strategy_contenders(texts, {}),
        splits=("iid", "dirichlet:0.1"),
        num_workers=2,
        steps=60,
        eval_every=30,
    )
    told = list(AccuracyScenario(msgspec.to_builtins(config), 0).run(lambda _: None))
    rows = by_name(told, Row)
    assert not [row.error for row in rows.values() if row.error]
    for text in texts:
        assert rows["final_accuracy", text, "iid"].samples[0] > 0.7
        assert rows["worst_final_accuracy", text, "dirichlet:0.1"].samples[0] > 0.1
        if text != "ddp":
            assert rows["bytes_sent", text, "iid"].samples[0] > 0
    sent = {text: rows["bytes_sent", text, "iid"].samples[0] for text in texts if text != "ddp"}
    assert sent["local-sgd"] < sent["neighbor order=adapt-while-combine"] / 5
    assert rows["consensus_distance", "all-reduce", "iid"].samples[0] < 1e-4
    # its last round was four steps before the end
    assert rows["consensus_distance", "local-sgd", "dirichlet:0.1"].samples[0] < 1e-4
