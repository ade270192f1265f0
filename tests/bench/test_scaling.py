import contextlib

import msgspec
import pytest

from shoal.bench.contenders import NONE
from shoal.bench.frame import make_scenario
from shoal.bench.scaling import PROCESSORS, PointSpeeds, ScalingConfig, ScalingPoint, processor_rows, rows_of
from shoal.core import BenchmarkError, UsageError

TINY = ScalingConfig(
    model="small-mlp",
    image_size=8,
    num_classes=10,
    batch_sizes=(4,),
    num_workers=(1, 2),
    strategies=("all-reduce", "neighbor"),
    num_warmup_batches=1,
    num_batches_per_iter=2,
    num_iters=2,
)


class StandInWorkers:
    """Workers that take one second a batch under `none`, and two under a strategy."""

    is_running = True

    def __init__(self, refused=(), broken=()):
        self.orders = []
        self._refused, self._broken = refused, broken

    def __call__(self, settings):
        self.settings = settings
        return contextlib.nullcontext(self)

    def ask(self, order, *, among=None, **details):
        among = among or self.settings.size
        strategy = details.get("strategy") or details.get("point", {}).get("strategy")
        self.orders.append((order, strategy, among))
        if order == "open":
            return ["it is not there." if strategy in self._refused else None] * among
        if order == "iterate":
            if (strategy, among) in self._broken:
                raise BenchmarkError("rank 1 was lost.")
            return [2.0 if strategy == NONE else 4.0] * among
        return [["here", 2]] * among if order == "machine" else [None] * among


def measure(config, crew, told=None):
    scenario = make_scenario("scaling", msgspec.to_builtins(config), 0)
    scenario.open_workers = crew
    return list(scenario.run(lambda text: told.append(text) if told is not None else None))


def by_key(rows):
    return {
        (row.metric, row.key.get("strategy"), row.key["num_workers"], row.key.get("rank")): row
        for row in rows
    }


def test_every_strategy_is_measured_with_every_number_beside_none():
    told = []
    rows = by_key(measure(TINY, StandInWorkers(), told))
    assert rows["images_per_s", NONE, 1, None].samples == [4.0] * 6
    assert rows["images_per_s", NONE, 2, None].samples == [8.0] * 4
    for name in TINY.strategies:
        assert rows["images_per_s", name, 2, None].samples == [4.0, 4.0]
        assert rows["images_per_s_per_worker", name, 2, 1].samples == [2.0, 2.0]
        assert rows["scaling_efficiency", name, 2, None].samples == [0.5, 0.5]
        assert rows["fraction_of_ceiling", name, 2, None].samples == [0.5, 0.5]
    assert rows["cores_per_worker", None, 2, None].samples == [1.0]
    at = "neighbor, 2 workers, batch 4: "
    assert [line.removeprefix(at) for line in told if line.startswith(at)] == [
        "Running warmup...", "Running benchmark...",
        "Iter #0: 2.0 img/sec per GPU", "Iter #1: 2.0 img/sec per GPU",
    ]  # fmt: skip


def test_a_strategy_and_none_change_their_order_from_iteration_to_iteration():
    crew = StandInWorkers()
    measure(msgspec.structs.replace(TINY, num_workers=(2,), strategies=("neighbor",)), crew)
    iterations = [strategy for order, strategy, among in crew.orders if (order, among) == ("iterate", 2)]
    assert iterations == ["neighbor", NONE, NONE, "neighbor"]


def test_one_worker_alone_is_measured_where_nobody_asks_for_it():
    rows = by_key(measure(msgspec.structs.replace(TINY, num_workers=(2,)), StandInWorkers()))
    assert rows["images_per_s", NONE, 1, None].samples == [4.0, 4.0]
    assert ("images_per_s", "neighbor", 1, None) not in rows


def test_what_cannot_be_or_breaks_is_a_row_and_the_rest_goes_on():
    crew = StandInWorkers(refused=["horovod"], broken=[("neighbor", 2)])
    config = msgspec.structs.replace(TINY, strategies=("horovod", "neighbor", "all-reduce"))
    rows = by_key(measure(config, crew))
    assert rows["images_per_s", "horovod", 2, None].error == "it is not there."
    assert rows["images_per_s", "neighbor", 2, None].error == "rank 1 was lost."
    assert rows["images_per_s", "neighbor", 1, None].error is None
    assert rows["images_per_s", "all-reduce", 2, None].samples == [4.0, 4.0]
    assert ("attach", "horovod", 2) not in crew.orders
    assert ("close", "horovod", 2) in crew.orders


def test_what_sends_past_its_group_cannot_be_shaped():
    rows = by_key(
        measure(msgspec.structs.replace(TINY, strategies=("ddp",), profile="lan"), StandInWorkers())
    )
    assert "no profile" in rows["images_per_s", "ddp", 2, None].error


def test_a_crew_may_be_larger_than_what_is_measured():
    crew = StandInWorkers()
    measure(msgspec.structs.replace(TINY, crew_size=4), crew)
    assert crew.settings.size == 4
    assert max(among for order, _, among in crew.orders if order == "iterate") == 2


def test_efficiency_is_of_the_mean_speed_of_one_worker():
    lane = PointSpeeds(speeds=[[8.0, 10.0], [9.0, 9.0]], ceilings=[[10.0, 10.0], [9.0, 9.0]])
    rows = by_key(rows_of(ScalingPoint(NONE, 4, 2), {"sma": lane}, [[9.0], [11.0]]))
    assert rows["scaling_efficiency", "sma", 2, None].samples == pytest.approx([0.9, 0.9])
    assert rows["scaling_efficiency", NONE, 2, None].samples == pytest.approx([1.0, 0.9])
    assert rows["fraction_of_ceiling", "sma", 2, None].samples == pytest.approx([0.9, 1.0])
    assert rows["images_per_s_per_worker", "sma", 2, 0].samples == [8.0, 9.0]


def test_cores_are_those_of_the_machines_that_take_part():
    machines = [["a", 2], ["a", 2], ["b", 4], ["b", 4]]
    rows = by_key(processor_rows(PROCESSORS["cpu"], machines, [1, 2, 4]))
    assert [rows["cores_per_worker", None, count, None].samples[0] for count in (1, 2, 4)] == [2.0, 1.0, 1.5]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_workers": ()},
        {"num_workers": (0, 2)},
        {"num_iters": 0},
        {"crew_size": 1},
        {"strategies": ("parameter-server",)},
    ],
)
def test_what_measures_nothing_is_bad_usage(changes):
    with pytest.raises(UsageError):
        msgspec.structs.replace(TINY, **changes)


@pytest.mark.slow
def test_workers_of_two_machines_train_over_a_shaped_network(tmp_path):
    config = msgspec.structs.replace(
        TINY,
        num_workers=(2, 4),
        strategies=("neighbor", "hierarchical", "all-reduce", "win_put", "horovod"),
        workers_per_machine=2,
        profile="lan",
        between="machines",
        trace_folder=str(tmp_path),
    )
    rows = by_key(make_scenario("scaling", msgspec.to_builtins(config), 0).run(lambda _: None))
    assert {row.key["strategy"] for row in rows.values() if row.error} == {"horovod"}
    for name in ("neighbor", "hierarchical", "all-reduce", "win_put"):
        assert len(rows["images_per_s", name, 4, None].samples) == 2
        assert len(rows["images_per_s_per_worker", name, 4, 3].samples) == 2
        assert (tmp_path / f"scaling-{name}-batch4-np4.trace.json").stat().st_size > 0
