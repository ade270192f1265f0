""""""

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import NotComparable, UsageError
from shoal.report import Code, Report, Row, RowVerdict, compare
from shoal.report.diff import JUDGED, check_gate, holm, judge, parse_limit, starts_needed
from shoal.report.tables import Table
from shoal.report.views import diff_items


def row(key=None, starts=None, **fields):
    starts = [[1.0, 2.0]] * 5 if starts is None and "error" not in fields else starts or []
    defaults = {"metric": "m", "unit": "s", "direction": "lower"}
    return Row(**defaults | {"key": key or {"size": 1}, "starts": starts} | fields)


def report(*rows, **fields):
    return Report(**{"benchmark": "transport", "created": "", "rows": list(rows) or [row()]} | fields)


def test_rows_pair_by_key_and_metric_not_by_position():
    keys = [{"size": 1, "mode": "a"}, {"size": 2, "mode": "a"}, {"size": 3, "mode": "a"}]
    old = report(row(keys[0], [[1.0]]), row(keys[1], [[2.0]]), row(keys[2], [[3.0]]))
    new = report(row({"mode": "a", "size": 2.0}, [[2.0]]), row(keys[0], [[1.0]]), row(keys[0], metric="n"))
    diff = compare(old, new)
    assert [pair.changes[0].percent for pair in diff.rows] == [0, 0]
    assert [lone.key["size"] for lone in diff.only_baseline] == [3]
    assert [lone.metric for lone in diff.only_test] == ["n"]


def test_all_four_percentiles_change_with_the_sign_of_their_direction():
    samples = [float(number) for number in range(1, 21)]
    doubled = [2 * sample for sample in samples]
    slow = compare(report(row(starts=[samples])), report(row(starts=[doubled])))
    assert [(change.q, change.percent) for change in slow.rows[0].changes] == [
        (q, -100) for q in (50, 75, 90, 95)
    ]
    rate = {"direction": "higher", "unit": "1/s"}
    fast = compare(report(row(starts=[[10.0]], **rate)), report(row(starts=[[11.0]], **rate)))
    assert fast.rows[0].changes[0].percent == pytest.approx(10)


def test_percentiles_of_too_few_samples_are_not_there():
    few = compare(report(row(starts=[[1.0, 2.0, 3.0]])), report(row(starts=[[2.0] * 20])))
    first, *others = few.rows[0].changes
    assert (first.baseline, first.test, first.percent) == (2.0, 2.0, 0)
    assert [(change.baseline, change.test, change.percent) for change in others] == [(None, 2.0, None)] * 3
    (table,) = [item for item in diff_items(few) if isinstance(item, Table) and item.title]
    assert [cell.split("\n")[0] for cell in table.rows[0][3:]] == ["-"] * 3


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (report(benchmark="dht"), report(), "'dht'"),
        (report(row(unit="s")), report(row(unit="ms")), "unit 's'"),
        (report(row(direction="lower")), report(row(direction="higher")), "direction"),
        (report(row({"size": 1})), report(row({"size": 2})), "no row in common"),
        (report(rows=[]), report(), "no row in common"),
        (report(environment={"device": "cpu"}), report(environment={"device": "cuda:0"}), "cuda"),
        (
            report(environment={"device": {"kind": "cpu"}}),
            report(environment={"device": {"kind": "cuda"}}),
            "cuda",
        ),
        (report(config={"batch_size": 32}), report(config={"batch_size": 64}), "batch_size is 32"),
        (report(benchmark="pytorch-ddp"), report(), "PyTorch's DDP-benchmark JSON"),
    ],
)
def test_what_measures_different_things_is_refused_with_a_next_step(old, new, words):
    with pytest.raises(NotComparable, match=words) as caught:
        compare(old, new)
    assert caught.value.next_step


def test_a_workload_that_is_in_the_keys_may_differ_between_configs():
    key = {"model": "resnet50"}
    compare(
        report(row(key), config={"model": ["resnet50"]}),
        report(row(key), config={"model": ["resnet50", "vgg"]}),
    )


def test_differences_of_config_and_environment_are_named_and_the_rest_is_not():
    old = report(
        config={"bucket": 25, "net": {"delay": 1, "loss": 0}},
        environment={"machine": "ws1", "cores": 2, "before": {"load_average": 0.1}},
        code=Code(version="1", revision="a" * 40),
    )
    new = report(
        config={"bucket": 1, "net": {"delay": 1}},
        environment={"machine": "ws2", "cores": 2, "before": {"load_average": 0.2}},
        code=Code(version="1", revision="a" * 40, is_dirty=True),
    )
    diff = compare(old, new)
    assert [(item.name, item.baseline, item.test) for item in diff.differences] == [
        ("code", "1 (aaaaaaaaaaaa)", "1 (aaaaaaaaaaaa, changed)"),
        ("config.bucket", "25", "1"),
        ("config.net.loss", "0", "-"),
        ("environment.machine", "ws1", "ws2"),
    ]
    assert diff.warnings == ("the environments differ: machine",)


def test_a_busy_machine_is_warned_about():
    loud = {"cores": 2, "before": {"load_average": [7.5, 1, 1]}, "after": {"cpu_steal_percent": 12.0}}
    warnings = compare(report(environment={"cores": 2}), report(environment=loud)).warnings
    assert len(warnings) == 2
    assert all(warning.startswith("test: ") for warning in warnings)


def test_the_document_is_plain_json_with_every_row():
    old = report(row({"size": 1}), row({"size": 2}), row({"size": 3}))
    new = report(row({"size": 1}), row({"size": 2}, error="lost"))
    document = msgspec.json.decode(msgspec.json.encode(compare(old, new).document()))
    assert [entry["verdict"] for entry in document["rows"]] == [RowVerdict.NO_DIFFERENCE, RowVerdict.FAILED]
    assert document["rows"][1]["errors"] == [None, "lost"]
    assert document["only_baseline"] == [{"key": {"size": 3}, "metric": "m"}]
    assert document["result"]["failed"] == 1


DIFFERENT = (RowVerdict.BETTER, RowVerdict.WORSE)


def row_judge(medians, direction="lower", error=None):
    starts = [[median] for median in medians]
    return Row(key={"a": 1}, metric="m", unit="s", direction=direction, starts=starts, error=error)


def one(old, new, direction="lower"):
    return judge([(row_judge(old, direction), row_judge(new, direction))])[0]


@pytest.mark.parametrize("seed", range(5))
def test_equal_reports_are_called_different_in_at_most_one_of_twenty_pairs(make_report, seed):
    rng = random.Random(seed)
    pairs = [compare(make_report(rng), make_report(rng)) for _ in range(20)]
    assert sum(pair.count(*DIFFERENT) for pair in pairs) <= 1


@pytest.mark.parametrize("seed", range(5))
def test_a_slowdown_of_a_tenth_is_found_in_at_least_eighteen_of_twenty_pairs(make_report, seed):
    rng = random.Random(seed)
    pairs = [compare(make_report(rng), make_report(rng, median=0.11)) for _ in range(20)]
    assert sum(pair.count(RowVerdict.WORSE) for pair in pairs) >= 18
    assert sum(pair.count(RowVerdict.BETTER) for pair in pairs) == 0


@pytest.mark.parametrize("num_starts", [5, 20])
def test_many_rows_together_are_held_to_the_same_error(make_report, num_starts):
    rng = random.Random(11)
    options = {"num_rows": 12, "num_starts": num_starts, "num_samples": 3}
    pairs = [compare(make_report(rng, **options), make_report(rng, **options)) for _ in range(20)]
    assert sum(pair.count(*JUDGED) for pair in pairs) == 240
    assert sum(pair.count(*DIFFERENT) > 0 for pair in pairs) <= 1


def test_iterations_do_not_count_as_repeats(make_report):
    """Thousands of samples from two starts are still two observations."""
    old = make_report(random.Random(0), num_starts=2, num_samples=2000)
    new = make_report(random.Random(1), num_starts=2, num_samples=2000, median=0.2)
    assert compare(old, new).rows[0].verdict is RowVerdict.TOO_FEW


def test_a_report_does_not_differ_from_itself(make_report):
    report = make_report(num_rows=4)
    for pair in compare(report, report).rows:
        assert pair.verdict is RowVerdict.NO_DIFFERENCE
        assert pair.judgement.change_percent == 0
        assert pair.judgement.p_value == 1
        assert pair.judgement.low_percent < 0 < pair.judgement.high_percent


@pytest.mark.parametrize(
    ("direction", "verdict", "sign"), [("lower", RowVerdict.WORSE, -1), ("higher", RowVerdict.BETTER, 1)]
)
def test_direction_decides_what_growth_means(direction, verdict, sign):
    judgement = one([1.0, 1.01, 0.99, 1.0, 1.02], [2.0, 2.01, 1.99, 2.0, 2.02], direction)
    assert judgement.verdict is verdict
    assert judgement.change_percent == pytest.approx(100 * sign, rel=0.02)
    assert judgement.low_percent < judgement.change_percent < judgement.high_percent


def test_welch_agrees_with_a_worked_example():
    """Logarithms 0, 1, 2, 3, 4 and 2, 4, 6, 8, 10: t = 4 / sqrt(2.5), 5.882 degrees of freedom, p = 0.046."""
    judgement = one([2.718281828459045**i for i in range(5)], [2.718281828459045**i for i in range(2, 11, 2)])
    assert judgement.p_value == pytest.approx(0.0457, abs=3e-4)
    assert judgement.verdict is RowVerdict.NO_DIFFERENCE


@pytest.mark.parametrize(
    ("old", "new", "verdict", "change"),
    [
        ([0.1] * 5, [0.1] * 5, RowVerdict.NO_DIFFERENCE, 0),
        ([100.0] * 5, [101.0] * 5, RowVerdict.WORSE, -1),
        ([100.0] * 5, [50.0, 51.0, 50.0, 49.0, 50.0], RowVerdict.BETTER, 50),
        ([0.0] * 5, [0.0] * 5, RowVerdict.NO_DIFFERENCE, 0),
        ([0.0] * 5, [1.0] * 5, RowVerdict.WORSE, None),
        ([-10.0, -10.1, -9.9, -10.0, -10.0], [-5.0, -5.1, -4.9, -5.0, -5.0], RowVerdict.WORSE, -50),
        ([0.0, 1.0, 2.0, 1.0, 0.0], [1.0, 0.0, 1.0, 2.0, 0.0], RowVerdict.NO_DIFFERENCE, 0),
    ],
)
def test_constant_zero_and_negative_medians(old, new, verdict, change):
    judgement = one(old, new)
    assert judgement.verdict is verdict
    assert judgement.change_percent == (change if change is None else pytest.approx(change, rel=0.01))


def test_failures_are_verdicts():
    good, bad = row_judge([1.0] * 5), row_judge([], error="lost")
    verdicts = [
        judgement.verdict for judgement in judge([(good, bad), (bad, good), (bad, bad), (good, good)])
    ]
    assert verdicts == [RowVerdict.FAILED, RowVerdict.FIXED, RowVerdict.FAILED_BOTH, RowVerdict.NO_DIFFERENCE]


@pytest.mark.parametrize(("few", "many"), [(4, 20), (20, 4), (1, 1)])
def test_fewer_than_five_starts_on_a_side_say_how_many_are_needed(few, many):
    rng = random.Random(0)
    judgement = one(*([rng.lognormvariate(0, 0.05) for _ in range(n)] for n in (few, many)))
    assert judgement.verdict is RowVerdict.TOO_FEW
    assert judgement.starts_needed >= 5
    assert judgement.p_value is None


def test_the_number_of_starts_that_is_asked_for_suffices():
    rng = random.Random(5)

    def medians(count, median=1.0):
        return [median * rng.lognormvariate(0, 0.05) for _ in range(count)]

    needed = starts_needed(medians(500), medians(500), effect_percent=5)
    found = sum(one(medians(needed), medians(needed, 1.05)).verdict is RowVerdict.WORSE for _ in range(100))
    assert 80 <= found <= 98


def test_more_spread_needs_more_starts_and_no_spread_the_least():
    assert starts_needed([1.0, 1.0], [1.0]) == 5
    assert starts_needed([1.0, 1.02, 0.98], []) < starts_needed([1.0, 1.1, 0.9], [])


@given(st.lists(st.floats(1e-9, 1), min_size=1, max_size=15))
def test_holm_lies_between_no_correction_and_bonferroni(p_values):
    adjusted, levels = holm(p_values, 0.01)
    for p, corrected, level in zip(p_values, adjusted, levels, strict=True):
        assert p <= corrected <= min(1, p * len(p_values)) + 1e-12
        assert 0.01 / len(p_values) <= level <= 0.01
        if abs(p - level) > 1e-12:
            assert (corrected <= 0.01) == (p <= level)


def test_holm_steps_down():
    assert holm([0.01, 0.04, 0.03], 0.05)[0] == pytest.approx([0.03, 0.06, 0.06])


def test_intervals_exclude_zero_exactly_when_a_row_is_called_different(make_report):
    rng = random.Random(2)
    for _ in range(10):
        old = make_report(rng, num_rows=8, num_samples=1)
        new = make_report(rng, num_rows=8, num_samples=1, median=0.105)
        for pair in compare(old, new).rows:
            excludes = not pair.judgement.low_percent <= 0 <= pair.judgement.high_percent
            assert excludes == (pair.verdict in DIFFERENT)


def drifting(factor):
    """Starts of a machine that is at times half as fast, and a change that is small beside that."""
    return [100.0 * drift * factor * wobble for drift, wobble in zip(DRIFTS, WOBBLES[factor], strict=True)]


DRIFTS = (1.0, 1.9, 1.1, 1.8, 1.2, 1.7, 1.0, 1.5)
WOBBLES = {
    1.0: (1.0, 1.01, 0.99, 1.0, 1.02, 0.99, 1.0, 1.01),
    1.1: (1.01, 1.0, 1.0, 0.98, 1.0, 1.01, 0.99, 1.0),
}


def test_starts_that_took_turns_are_judged_in_pairs():
    pair = [(row_judge(drifting(1.0)), row_judge(drifting(1.1)))]
    (apart,) = judge(pair)
    (beside,) = judge(pair, took_turns=True)
    assert apart.verdict is RowVerdict.NO_DIFFERENCE
    assert beside.verdict is RowVerdict.WORSE
    assert beside.change_percent == pytest.approx(apart.change_percent)
    assert beside.low_percent < -10 < beside.high_percent < 0


def test_equal_starts_that_took_turns_are_not_told_apart_more_often_than_allowed():
    generator = random.Random(7)
    num_different = 0
    for _ in range(400):
        drifts = [generator.gauss(0, 0.3) for _ in range(6)]
        old, new = ([math.exp(drift + generator.gauss(0, 0.05)) for drift in drifts] for _ in range(2))
        (judgement,) = judge([(row_judge(old), row_judge(new))], alpha=0.05, took_turns=True)
        num_different += judgement.verdict is not RowVerdict.NO_DIFFERENCE
    assert num_different <= 34


def test_the_number_of_starts_that_is_asked_for_suffices_among_many_rows():
    """With so many starts, a change of a tenth in one row of twelve is found nine times in ten."""
    rng, num_rows, spread = random.Random(7), 12, 0.1
    few = [
        (
            row_judge([math.exp(-spread), 1.0, math.exp(spread)]),
            row_judge([math.exp(-spread), 1.0, math.exp(spread)]),
        )
    ]
    # the spread of the medians 1/e^s, 1, e^s is exactly s
    needed = [judgement.starts_needed for judgement in judge(few * num_rows, effect_percent=10.0)]
    assert needed == [needed[0]] * num_rows
    assert needed[0] > judge(few, effect_percent=10.0)[0].starts_needed

    def medians(median=1.0):
        return row_judge([median * rng.lognormvariate(0, spread) for _ in range(needed[0])])

    equal = [(row_judge([1.0] * 5), row_judge([1.0] * 5))] * (num_rows - 1)
    num_tries = 150
    found = [judge([(medians(), medians(1.1)), *equal])[0].verdict for _ in range(num_tries)]
    num_found = found.count(RowVerdict.WORSE)
    assert 0.82 <= num_found / num_tries <= 0.97


def test_rows_that_failed_ask_for_no_more_starts():
    few, failed = (
        (row_judge([0.9, 1.0, 1.1]), row_judge([0.9, 1.0, 1.1])),
        (row_judge([], error="lost"), row_judge([1.0])),
    )
    assert judge([few, failed, failed])[0].starts_needed == judge([few])[0].starts_needed


BASE = [1.0, 1.01, 0.99, 1.0, 1.02]


def gate(old, new, limit=5.0, error=None):
    reports = []
    for medians, failure in ((old, None), (new, error)):
        starts = [[median] for median in medians]
        row = Row(key={"a": 1}, metric="m", unit="s", direction="lower", starts=starts, error=failure)
        reports.append(Report(benchmark="b", created="", rows=[row]))
    return check_gate(compare(*reports), limit)


@pytest.mark.parametrize(
    ("text", "percent"), [("5%", 5), ("5", 5), (" 2.5 % ", 2.5), ("0", 0), ("0.5%", 0.5), ("150%", 150)]
)
def test_limits_are_percentages(text, percent):
    assert parse_limit(text) == percent


@pytest.mark.parametrize("text", ["0.05", "-5%", "five", "", "%", "5%%", "1e3", "nan", "inf", "٥"])
def test_other_limits_are_refused(text):
    with pytest.raises(UsageError):
        parse_limit(text)


def test_only_a_judged_loss_beyond_the_limit_fails():
    slower = [1.1 * median for median in BASE]
    assert gate(BASE, slower).exit_code == 1
    assert gate(BASE, slower, limit=15).exit_code == 0
    assert gate(slower, BASE).exit_code == 0
    assert gate(BASE, BASE, limit=0).exit_code == 0


def test_a_loss_that_is_noise_passes():
    noisy = [1.0, 1.6, 0.7, 1.3, 1.1]
    assert gate(BASE, noisy, limit=5).exit_code == 0


def test_too_few_starts_are_undecided_only_past_the_limit():
    undecided = gate(BASE, [1.2])
    assert undecided.exit_code == 3
    assert "too few repeats to judge" in undecided.reasons[0]
    assert gate(BASE, [1.02]).exit_code == 0
    assert gate([1.2], BASE).exit_code == 0


def test_a_row_that_fails_in_the_test_fails():
    failed = gate(BASE, [], error="peer lost")
    assert failed.exit_code == 1
    assert "peer lost" in failed.reasons[0]


@pytest.mark.parametrize(("old", "new", "code"), [(0.0, 1.0, 1), (1.0, 0.0, 0)])
def test_any_loss_from_zero_is_past_any_limit(old, new, code):
    assert gate([old] * 5, [new] * 5).exit_code == code
    assert gate([old] * 2, [new] * 2).exit_code == (3 if code else 0)
