import pytest

from shoal.core.errors import UsageError
from shoal.report import Report, Row, compare
from shoal.report.gate import check, parse_limit

BASE = [1.0, 1.01, 0.99, 1.0, 1.02]


def gate(old, new, limit=5.0, error=None):
    reports = []
    for medians, failure in ((old, None), (new, error)):
        starts = [[median] for median in medians]
        row = Row(key={"a": 1}, metric="m", unit="s", direction="lower", starts=starts, error=failure)
        reports.append(Report(benchmark="b", created="", rows=[row]))
    return check(compare(*reports), limit)


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
