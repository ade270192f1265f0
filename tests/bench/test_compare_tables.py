import pytest

from bench.sample_contests import FAST, config_of, race_of, record_of, report_of
from shoal.bench.compare_rows import metrics_of
from shoal.bench.compare_summary import headline, summarize_compare
from shoal.bench.compare_tables import compare_items, conditions, latex_of
from shoal.bench.frame import measured
from shoal.report.tables import Table
from shoal.simulate.task_facts import facts_of
from shoal.simulate.world import Compute, World
from shoal.transport import FaultScript
from shoal.transport.network.distributions import Exponential


@pytest.fixture
def race():
    return race_of()


def shown(items):
    lines = []
    for item in items:
        lines += (
            [line for line, _ in item.lines()]
            if isinstance(item, Table)
            else [item if isinstance(item, str) else item[0]]
        )
    return lines


def test_the_tables_show_figures_rankings_and_why_not(race):
    lines = shown(compare_items(race))
    (row,) = [line for line in lines if line.startswith("pair ")]
    assert "≥0.3" in row
    assert "77.5 ±10.6" in row
    assert "in 1/2" in row
    (row,) = [line for line in lines if line.startswith("neighbor ")]
    assert "3.00" in row
    assert "1.00 kB" in row
    assert any(line.startswith("pair, not reached: 1 of 2") for line in lines)
    assert any(line.split()[:3] == ["1", "all-reduce", "2.00"] for line in lines)


def test_a_contender_that_failed_is_named():
    error = measured(metrics_of(facts_of("digits")), "final_accuracy", {"strategy": "pair"}, error="it died")
    config = config_of("all-reduce", "pair")
    report = report_of({"all-reduce": FAST}, config, [error])
    assert summarize_compare(report)["failed"] == 1
    assert "pair failed: it died" in shown(compare_items(report))


def test_conditions_say_what_is_equal_and_how_rates_were_chosen():
    lines = conditions(config_of(learning_rates=(0.1, 0.2), world=World(num_workers=3)))
    text = " ".join(lines)
    for part in ("3 workers", "ideal", "virtual time", "2 seeds", "0.1, 0.2", "none of the contest's"):
        assert part in text
    slow = Compute(step_ms=Exponential(mean=3.0), factors={1: 4.0})
    world = World(num_workers=3, compute=slow, faults=FaultScript(name="churn"))
    text = " ".join(conditions(config_of(world=world)))
    assert "drawn from kind=exponential mean=3.0, rank 1 4 times that; faults: churn." in text
    assert "not tuned" in " ".join(conditions(config_of()))


def test_the_table_for_a_paper_is_in_the_order_of_seconds(race):
    lines = latex_of(race).splitlines()
    body = [line.split(" & ") for line in lines if line.endswith(r"\\")]
    assert [cells[0] for cells in body] == ["", "all-reduce", "neighbor", "pair"]
    assert body[0][1:] == [r"accuracy (\%)", r"worst worker (\%)", "time (s)", "traffic (kB)", r"steps \\"]
    assert body[1][1] == r"$\mathbf{90.0 \pm 0.0}$"
    assert body[3][3] == "--"
    assert any("80 \\%" in line for line in lines)


def test_distances_are_no_percentages():
    config = config_of("all-reduce", task="quadratic", target=1.5)
    records = [record_of(9.0, 2.0, value, task="quadratic") for value in (1.0, 1.2)]
    report = report_of({"all-reduce": records}, config)
    assert headline(report)[0] == "By seconds to 1.5: all-reduce, 2.00 s."
    assert summarize_compare(report)["final_distance"] == {"all-reduce": 1.1}
    (row,) = [line for line in shown(compare_items(report)) if line.startswith("all-reduce")]
    assert "1.10 ±0.1" in row
