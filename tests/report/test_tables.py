""""""

import io

import pytest

from shoal.report import Curve, Report, Row, compare
from shoal.report.tables import (
    Column,
    LatexColumn,
    Table,
    emit,
    latex_escape,
    latex_table,
    plus_minus,
    show,
    wrap,
)
from shoal.report.views import diff_items, report_items

LONG = {
    "scenario": "echo",
    "size_bytes": 1_000_000,
    "in_flight": 64,
    "transport": "stream",
    "codec": "error-feedback",
}


def report(*rows, **fields):
    return Report(benchmark="transport", created="2026-03-02T10:00:00Z", rows=list(rows), **fields)


def row(seconds=1e-4, key=LONG, num_starts=6, **fields):
    starts = [[seconds + seconds * i / 1000] * 3 for i in range(num_starts)]
    return Row(
        **{"key": key, "metric": "latency", "unit": "s", "direction": "lower", "starts": starts} | fields
    )


def shown(items):
    stream = io.StringIO()
    show(items, stream)
    return stream.getvalue()


def test_columns_align_and_wrap_only_between_words():
    table = Table(
        "", (Column("row", "left", wraps=True), Column("p50")), [("a=1 b=2 c=3", "1.0"), ("d=4", "10.0")]
    )
    assert [line for line, _ in table.lines(width=13)] == [
        "row       p50",
        "-------  ----",
        "a=1 b=2   1.0",
        "c=3",
        "",
        "d=4      10.0",
    ]


def test_a_word_is_never_cut_however_narrow_the_table():
    assert wrap("transport=stream in_flight=64", 5) == ["transport=stream", "in_flight=64"]


@pytest.mark.parametrize("num_starts", [6, 2])
def test_a_comparison_fits_eighty_columns_with_whole_keys(num_starts):
    text = shown(diff_items(compare(report(row()), report(row(2e-4, num_starts=num_starts)))))
    assert max(len(line) for line in text.splitlines()) <= 80
    for name, value in LONG.items():
        assert f"{name}={value}" in text
    assert "100 µs" in text
    assert (
        "worse: median -100.0%" if num_starts == 6 else "too few repeats to judge: 6 and 2 starts, needs 5"
    ) in text


def test_a_report_fits_eighty_columns_and_shows_failures():
    text = shown(
        report_items(report(row(), row(key={"scenario": "bulk"}, num_starts=0, error="PeerLost: peer 7")))
    )
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "failed: PeerLost: peer 7" in text


def test_a_comparison_shows_failures_differences_warnings_and_lone_rows():
    old = report(row(), row(key={"only": "old"}), config={"bucket": 25}, environment={"machine": "ws1"})
    new = report(row(num_starts=0, error="PeerLost: peer 7"), row(key={"only": "new"}), config={"bucket": 1})
    text = shown(diff_items(compare(old, new)))
    for words in (
        "failed in test: PeerLost: peer 7",
        "Only in the baseline: only=old",
        "Only in the test: only=new",
        "config.bucket        25",
        "Warning: the environments differ: machine",
        "1 row, negative is worse: 1 failed in test",
    ):
        assert words in text


def test_curves_are_their_ends_and_their_best_under_the_headline():
    starts = [
        {"value": [0.1, 0.9, 0.8], "step": [0, 10, 20]},
        {"value": [0.1, 0.7, 0.8], "step": [0, 10, 20]},
    ]
    curve = Curve(key={"contender": "pair"}, metric="accuracy", unit="", direction="higher", starts=starts)
    empty = Curve(key={"contender": "sma"}, metric="accuracy", unit="", direction="higher", starts=[])
    text = shown(report_items(report(curves=[curve, empty], result={"headline": ["pair was fastest."]})))
    assert "pair was fastest." in text
    assert text.splitlines()[-4:-1] == [
        "--------------  ------  ------  -----  -----  -----  -------",
        "contender=pair       2       3  0.100  0.800  0.800  step 10",
        "contender=sma        0       -      -      -      -        -",
    ]


def test_what_rows_share_is_said_once():
    text = shown(report_items(report(row(key={"mode": "a", "size": 1}), row(key={"mode": "a", "size": 2}))))
    assert text.count("mode=a") == 1


def test_a_terminal_gets_colours_and_the_same_words(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = io.StringIO()
    stream.isatty = lambda: True
    show(diff_items(compare(report(row()), report(row(2e-4)))), stream)
    text = stream.getvalue()
    assert "\x1b[31m  worse" in text
    assert "transport=stream" in text


def test_a_key_cannot_steer_the_terminal():
    text = shown(report_items(report(row(key={"scenario": "\x1b[2J\u202e"}))))
    assert "scenario=\\u001b[2J\\u202e" in text


def test_a_name_with_a_line_break_is_one_line():
    text = shown(report_items(report(row(key={"scenario": "x\nRESULT: {}"}))))
    assert not any(line.startswith("RESULT") for line in text.splitlines())


def test_a_stream_without_micro_gets_a_u():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", newline="\n")
    emit("97.2 µs – x", stream)
    stream.flush()
    assert raw.getvalue() == b"97.2 us ? x\n"


def test_what_latex_reads_otherwise_is_escaped():
    assert latex_escape("a_b & 90 % of {x} \\ #1 $2 ~ ^") == (
        r"a\_b \& 90 \% of \{x\} \textbackslash{} \#1 \$2 \textasciitilde{} \textasciicircum{}"
    )
    assert latex_escape("5 µs ± 1") == r"5 $\mu$s $\pm$ 1"


@pytest.mark.parametrize(
    ("samples", "shown"),
    [
        ([12.34], "12.3"),
        ([0.5, 0.5], r"0.500 \pm 0.000"),
        ([10.0, 12.0], r"11.0 \pm 1.4"),
        ([95.0, 95.02], r"95.01 \pm 0.01"),
        ([1234.0, 1236.0], r"1235 \pm 1"),
        ([0.0, 0.0], r"0 \pm 0"),
    ],
)
def test_means_have_as_many_digits_as_their_deviation(samples, shown):
    assert plus_minus(samples) == shown


def test_a_table_has_rules_units_and_the_best_in_bold():
    columns = [
        LatexColumn("accuracy", "%", "higher", [[90.0, 91.0, 92.0], [99.0, 99.0, 99.0], []]),
        LatexColumn("traffic", "B", "lower", [[2e6], [4e6], [3e6]]),
    ]
    table = latex_table(["all-reduce", "local_sgd", "d2"], columns, "100 % of it", "tab:x")
    lines = table.splitlines()
    assert r"\caption{100 \% of it}" in lines
    assert r"\label{tab:x}" in lines
    assert r"\begin{tabular}{lrr}" in lines
    assert r" & accuracy (\%) & traffic (MB) \\" in lines
    assert r"all-reduce & $91.0 \pm 1.0$ & $2.00$ \\" in lines
    assert r"local\_sgd & $\mathbf{99.0 \pm 0.0}$ & $4.00$ \\" in lines
    assert r"d2 & -- & $3.00$ \\" in lines
    assert [lines.index(rf"\{rule}rule") for rule in ("top", "mid", "bottom")] == sorted(
        lines.index(rf"\{rule}rule") for rule in ("top", "mid", "bottom")
    )


def test_who_is_alone_has_not_won():
    assert "mathbf" not in latex_table(["a"], [LatexColumn("x", "", "higher", [[1.0]])], "")


def test_no_winner_is_marked_that_was_measured_too_coarsely_or_too_seldom():
    def marked(**how):
        column = LatexColumn("time", "s", "lower", [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], **how)
        return "mathbf" in latex_table(["a", "b"], [column], "")

    assert marked()
    assert not marked(resolution=[1.0, 1.0])
    assert not marked(num_needed=5)
    assert "mathbf" not in latex_table(["a", "b"], [LatexColumn("x", "", None, [[1.0], [2.0]])], "")
