import pytest

from report import samples
from shoal.report import compare
from shoal.report.chapters import chapter
from shoal.report.figures import Figures, Shown
from shoal.report.histograms import Histogram, class_width, histogram_of, histogram_plots, is_histogram
from shoal.report.views import report_items


def test_each_contender_setting_and_report_has_bars_that_hold_all_its_updates():
    figures = Figures()
    shown = [
        Shown(samples.convergence(), "A", 0),
        Shown(samples.convergence(1, 100), "B", 1),
    ]
    content = histogram_plots(shown, figures, {})
    assert content.count("<h4>") == len(figures.plots) == 4
    assert "<h4>A · dmoe, 1000 ms · of=trainers</h4>" in content
    for plot in figures.plots:
        assert len(plot["behind"]) <= 60
        assert sum(plot["shares"]) == pytest.approx(100)
    rows = [row for row in samples.convergence().rows if row.key.get("of") == "trainers"]
    assert sum(figures.plots[0]["counts"]) == sum(sum(row.samples) for row in rows)
    assert figures.plots[0]["names"][1] == "5 to 9"
    assert figures.plots[0]["colour"] != figures.plots[2]["colour"]


def test_a_report_without_staleness_has_no_bars():
    figures = Figures()
    assert histogram_plots([Shown(samples.training())], figures, {}) == ""
    assert figures.plots == []


def test_counts_are_neither_in_the_tables_of_a_page_nor_judged():
    names = [section.name for section in chapter([Shown(samples.convergence())], Figures())]
    assert "Staleness" in names
    assert not any("staleness" in name or name == "More figures" for name in names)
    diff = compare(samples.convergence(), samples.convergence(1))
    assert [row.baseline.metric for row in diff.rows] == ["val_accuracy"]
    assert not diff.only_test


def test_only_whole_numbers_behind_are_a_histogram():
    key = {"behind": 3}
    assert is_histogram(samples.row(key, "staleness", "", "lower", [[1.0]]))
    assert not is_histogram(samples.row(key, "waited", "s", "lower", [[1.0]]))
    assert not is_histogram(samples.row({"rank": 3}, "staleness", "", "lower", [[1.0]]))


def test_the_sentence_counts_all_starts_together():
    rows = [
        samples.row({"behind": behind}, "staleness", "", "lower", counts)
        for behind, counts in ((7, [[1.0], [0.0]]), (0, [[40.0], [9.0]]), (2, [[30.0], [20.0]]))
    ]
    said = "Of 100 half were at most 2 behind, 95% at most 2, all at most 7."
    assert histogram_of(rows).said() == said


def test_text_bars_are_few_and_the_furthest_hundredth_is_one_of_them():
    counts = {behind: 1000.0 * 0.99**behind for behind in range(1000)}
    lines = Histogram(counts).lines()
    assert len(lines) <= 17
    assert lines[0].split()[:3] == ["0", "to", "49"]
    assert lines[0].count("█") == 40
    assert lines[-1].strip().startswith("over ")
    shares = [float(line.split("%")[0].split()[-1]) for line in lines]
    assert sum(shares) == pytest.approx(100, abs=1)
    assert Histogram({0: 5.0}).lines() == ["0  100.0%  " + "█" * 40]


def test_a_report_prints_bars_instead_of_a_row_for_each_count():
    items = report_items(samples.convergence())
    assert ("staleness  of=experts", "bold") in items
    assert 0 < sum(isinstance(item, str) and "█" in item for item in items) <= 34


def test_classes_are_as_narrow_as_their_number_allows():
    assert class_width(0, 23, 24) == 1
    assert class_width(0, 24, 24) == 2
    assert class_width(300, 640, 24) == 20
