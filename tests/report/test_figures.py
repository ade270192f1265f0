"""Reports from Python: tables of pandas, figures of plotly."""

import statistics
import sys
import types

import pytest

import shoal
from report import samples
from shoal.core.errors import ReportError, UsageError
from shoal.report import Curve, Report, save
from shoal.report.html.figures import rows_figure


def curves():
    def curve(name, offset):
        starts = [{"value": [0.1 + offset, 0.5], "s": [0.0, 1.0], "bytes": [0.0, 9.0]}] * 2
        return Curve(key={"strategy": name}, metric="accuracy", unit="", direction="higher", starts=starts)

    return Report(
        benchmark="compare", created="2026-01-02T03:04:05+00:00", curves=[curve("a", 0), curve("b", 0.1)]
    )


def test_a_saved_report_is_read_again(tmp_path):
    report = samples.training()
    assert shoal.read_report(save(report, tmp_path / "r.json")) == report


def test_curves_are_lines_over_the_axis_that_is_asked_for():
    drawn = curves().figure()
    assert [(line.name, tuple(line.x)) for line in drawn.data] == [("a", (0.0, 1.0)), ("b", (0.0, 1.0))]
    assert drawn.layout.title.text == "Which strategy reaches the target first: accuracy"
    assert tuple(curves().figure("accuracy", over="bytes").data[0].x) == (0.0, 9.0)


def test_rows_are_bars_with_the_interval_of_their_mean():
    report = samples.training()
    drawn = report.figure("examples_per_s")
    measured = [row for row in report.rows if row.metric == "examples_per_s" and row.starts]
    assert len(drawn.data) == len(measured)
    for bar, row in zip(drawn.data, measured, strict=True):
        medians = [statistics.median(start) for start in row.starts]
        half = 4.303 * statistics.stdev(medians) / 3**0.5  # Student's t for three samples
        assert bar.x[0] == pytest.approx(statistics.fmean(medians), rel=1e-3)
        assert bar.error_x.array[0] == pytest.approx(half, rel=1e-2)


def test_what_is_not_there_is_refused_with_what_is():
    with pytest.raises(UsageError, match=r"(?s)Did you mean 'accuracy'.*choose one of accuracy"):
        curves().figure("acuracy")
    with pytest.raises(UsageError, match="choose one of s, bytes"):
        curves().figure("accuracy", over="minutes")


def test_every_sample_is_a_line_of_the_table(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=list))
    report = samples.training()
    lines = report.to_pandas()
    assert len([line for line in lines if "value" in line]) == sum(len(row.samples) for row in report.rows)
    assert [line["error"] for line in lines if "error" in line] == [row.error for row in report.failed]
    assert {"metric", "unit", "start", "strategy"} <= lines[0].keys()


def test_without_pandas_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ReportError, match="pip install pandas"):
        samples.training().to_pandas()


def test_few_samples_are_drawn_themselves_instead_of_percentiles():
    def drawn(count):
        values = [float(one) for one in range(count)]
        row = samples.row({"a": 1}, "latency", "s", "lower", [values])
        figure = rows_figure(("latency", "s", "lower"), ["a"], [[row]], [("", 0)])
        dots = [trace for trace in figure["data"] if trace.get("hovertemplate")]
        return " ".join(text for trace in dots for text in trace["text"]), figure

    said, figure = drawn(3)
    assert " to " not in said
    assert any(sorted(trace["x"]) == [0, 1, 2] for trace in figure["data"])
    assert "p25 to p75" in drawn(4)[0]
    assert "p5 to p95" not in drawn(4)[0]
    assert "p5 to p95" in drawn(20)[0]
