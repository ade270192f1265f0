import msgspec
import pytest

from bench.sample_fake_workers import FakeWorkers
from shoal.bench import training
from shoal.bench.frame import make_scenario
from shoal.bench.training import TrainingConfig
from shoal.core import BenchmarkError, UsageError

TINY = TrainingConfig(
    model="small-mlp", batch_size=4, strategies=("all-reduce", "pair"), num_pairs=2, block_s=0.05
)


def measure(config, seed=0):
    return list(make_scenario("training", msgspec.to_builtins(config), seed).run(lambda _: None))


def by_key(rows):
    names = ("strategy", "rank", "waited_for")
    return {(row.metric, *(row.key[name] for name in names if name in row.key)): row for row in rows}


@pytest.fixture(scope="module")
def rows():
    """Two workers, of which rank 1 is slow, and a parameter server beside them."""
    strategies = (*TINY.strategies, "parameter-server")
    # so slow, in so short blocks, that no other load of the machine hides it
    slow = msgspec.structs.replace(TINY, slow_rank=1, slow_factor=200.0, iterations=4, strategies=strategies)
    return by_key(measure(slow))


def test_each_strategy_is_measured_beside_none(rows):
    assert not [row for row in rows.values() if row.error]
    for name in (*TINY.strategies, "parameter-server"):
        fractions = rows["fraction_of_ceiling", name].samples
        assert len(fractions) == len(rows["examples_per_s", name].samples) == 2
        assert all(0 < fraction < 5 for fraction in fractions)
    assert len(rows["examples_per_s", "none"].samples) == 6
    assert ("fraction_of_ceiling", "none") not in rows


def test_workers_that_wait_do_equally_many_iterations_and_others_do_not(rows):
    def count(name, rank):
        return len(rows["seconds_per_iteration", name, rank].samples)

    assert count("all-reduce", 0) == count("all-reduce", 1)
    assert count("none", 0) > 2 * count("none", 1)
    assert count("pair", 0) > 2 * count("pair", 1)
    assert count("parameter-server", 0) > count("parameter-server", 1)


def test_a_slow_worker_is_waited_for_under_all_reduce_alone(rows):
    waited = {rank: sum(rows["waited", "all-reduce", rank, 1 - rank].samples) for rank in (0, 1)}
    assert waited[0] > 3 * waited[1]
    assert max(rows["fraction_of_own_speed", "all-reduce", 0].samples) < 0.5
    assert not [key for key in rows if key[:2] == ("waited", "pair")]


class TrainingWorkers(FakeWorkers):
    """Workers that take 10 ms an iteration; what they are told to fails, once or always."""

    def ask(self, order, strategy, iterations=0, seconds=0.0, sleep_s=0.0):
        self.is_running = True
        self.orders.append((order, strategy))
        if (order, strategy) in self.failing and (
            order == "attach" or self.orders.count((order, strategy)) > 2
        ):
            self.is_running = False
            raise BenchmarkError(f"rank 1 of 2 failed: {strategy} broke.\n  Try: again.")
        count = iterations if iterations is not None else round(seconds / 0.01)
        return [{"times_s": [0.01] * count, "waited_s": []}] * 2


@pytest.mark.parametrize("moment", ["attach", "block"])
def test_a_strategy_that_fails_is_a_row_and_the_rest_go_on(monkeypatch, moment):
    monkeypatch.setattr(training, "LocalWorkers", TrainingWorkers)
    monkeypatch.setattr(TrainingWorkers, "failing", [(moment, "sma")])
    config = msgspec.structs.replace(TINY, strategies=("all-reduce", "sma", "pair"), num_pairs=3)
    rows = by_key(measure(config))
    assert rows["examples_per_s", "sma"].error == "rank 1 of 2 failed: sma broke. Try: again."
    assert ("fraction_of_ceiling", "sma") not in rows
    for name in ("all-reduce", "pair"):
        assert rows["fraction_of_ceiling", name].samples == [1.0] * 3
    orders = TrainingWorkers.latest.orders
    assert orders.count(("attach", "all-reduce")) == 2
    assert orders.count(("attach", "sma")) == 1


def test_when_all_fail_nothing_is_started_again(monkeypatch):
    monkeypatch.setattr(training, "LocalWorkers", TrainingWorkers)
    monkeypatch.setattr(TrainingWorkers, "failing", [("attach", "sma")])
    rows = measure(msgspec.structs.replace(TINY, strategies=("sma",)))
    assert [row.error is not None for row in rows] == [True]
    assert [order for order in TrainingWorkers.latest.orders if order[0] == "attach"] == [
        ("attach", "none"),
        ("attach", "sma"),
    ]


def test_neighbouring_blocks_take_turns(monkeypatch):
    monkeypatch.setattr(training, "LocalWorkers", TrainingWorkers)
    measure(msgspec.structs.replace(TINY, strategies=("sma",), num_pairs=2))
    warm, measured = TrainingWorkers.latest.orders[:4], TrainingWorkers.latest.orders[4:]
    assert [order for order, _ in warm] == ["attach", "block"] * 2
    assert [strategy for _, strategy in measured] == ["sma", "none", "none", "sma"]


def test_a_block_holds_whole_rounds(monkeypatch):
    monkeypatch.setattr(training, "LocalWorkers", TrainingWorkers)
    options = {"local-sgd": {"local_steps": 8}}
    config = msgspec.structs.replace(TINY, strategies=("local-sgd",), options=options, block_s=0.1)
    rows = by_key(measure(config))
    assert len(rows["seconds_per_iteration", "local-sgd", 0].samples) == 2 * 16


def test_servers_are_hired_for_the_strategy_that_needs_them(monkeypatch):
    monkeypatch.setattr(training, "LocalWorkers", TrainingWorkers)
    measure(msgspec.structs.replace(TINY, strategies=("sma", "parameter-server"), num_servers=2))
    hired = TrainingWorkers.latest.helpers
    assert [helper.name for helper in hired] == ["server 0", "server 1"]
    assert [helper.arguments["strategy"] for helper in hired] == ["parameter-server"] * 2


@pytest.mark.parametrize(
    "wrong", [{"slow_rank": 2}, {"num_workers": 0}, {"num_servers": 0}, {"num_pairs": 0}, {"pears": 1}]
)
def test_what_cannot_be_measured_is_refused(wrong):
    with pytest.raises((UsageError, msgspec.ValidationError)):
        make_scenario("training", wrong, 0)
