""""""

import pytest

from report import samples
from shoal.report import Curve, compare, load, save
from shoal.report.curves import (
    MAX_POINTS,
    Histogram,
    averaged,
    axes_of,
    class_width,
    histogram_of,
    is_histogram,
    resolution_of,
)
from shoal.report.html.page import chapter
from shoal.report.html.plots import Chapter, PageFigures, Shown, histogram_plots
from shoal.report.views import report_items


def curve(*starts):
    return Curve(key={}, metric="accuracy", unit="", direction="higher", starts=list(starts))


def test_equal_starts_are_averaged_point_by_point_on_every_axis():
    line = averaged(
        curve({"value": [0.0, 1.0], "s": [0.0, 10.0]}, {"value": [0.5, 2.0], "s": [0.0, 20.0]}), "s"
    )
    assert (line.x, line.mean) == ([0.0, 15.0], [0.25, 1.5])
    assert (line.low, line.high) == ([0.0, 1.0], [0.5, 2.0])
    assert line.has_band


def test_a_figure_is_as_coarse_as_the_curve_or_the_result_says():
    key = {"strategy": "pair"}
    course = Curve(
        key=key,
        metric="accuracy",
        unit="",
        direction="higher",
        starts=[{"value": [0.1, 0.5, 0.9], "s": [0.0, 1.0, 4.0], "step": [0.0, 5.0, 10.0]}],
    )
    found = samples.report("compare", curves=[course], result={"resolution": {"final_accuracy": 0.01}})

    def step_of(metric, **of):
        return resolution_of(found, samples.row({**key, **of}, metric, "", "lower", [[1.0]]))

    assert (step_of("seconds_to_target"), step_of("steps_to_target")) == (2.0, 5.0)
    assert step_of("final_accuracy") == 0.01
    assert step_of("bytes_to_target") == step_of("worst_final_accuracy") == 0.0
    assert step_of("seconds_to_target", strategy="window") == 0.0


def test_starts_of_other_lengths_are_read_where_all_reach():
    short = {"value": [0.0, 40.0], "step": [0.0, 4.0]}
    long = {"value": [10.0, 20.0, 30.0, 90.0], "step": [1.0, 2.0, 3.0, 9.0]}
    line = averaged(curve(short, long), "step")
    assert line.x == [1.0, 2.0, 3.0]
    assert line.mean == pytest.approx([10.0, 20.0, 30.0])


def test_starts_that_never_meet_leave_the_longest():
    line = averaged(curve({"value": [1.0], "step": [0.0]}, {"value": [2.0, 3.0], "step": [5.0, 6.0]}), "step")
    assert (line.x, line.num_starts) == ([5.0, 6.0], 1)


@pytest.mark.parametrize("starts", [(), ({"value": [], "step": []},), ({"value": [1.0], "bytes": [2.0]},)])
def test_without_points_on_the_axis_there_is_no_line(starts):
    assert averaged(curve(*starts), "step") is None


def test_long_curves_are_thinned_to_their_ends():
    values = [float(number) for number in range(5000)]
    line = averaged(curve({"value": values, "step": values}), "step")
    assert len(line.x) == MAX_POINTS
    assert (line.x[0], line.x[-1]) == (0.0, 4999.0)


def test_axes_are_those_of_any_start_and_curves_survive_the_disk(tmp_path, make_report):
    both = curve({"value": [1.0], "step": [0.0]}, {"value": [1.0], "s": [0.0]})
    assert axes_of([both]) == ["step", "s"]
    report = make_report(rows=[])
    report.curves.append(both)
    assert load(save(report, tmp_path / "r.json")) == report


def test_a_report_from_before_there_were_curves_is_read(tmp_path, make_report):
    path = save(make_report(), tmp_path / "r.json")
    path.write_text(path.read_text().replace('"curves": [],', ""))
    assert "curves" not in path.read_text()
    assert load(path).curves == []


def test_each_contender_setting_and_report_has_bars_that_hold_all_its_updates():
    figures = PageFigures()
    shown = [
        Shown(samples.convergence(), "A", 0),
        Shown(samples.convergence(1, 100), "B", 1),
    ]
    content = histogram_plots(Chapter(shown, figures))
    assert content.count("<h4>") == len(figures.plots) == 4
    assert "<h4>A · dmoe, 1000 ms · of trainers</h4>" in content
    drawn = [plot["figures"][0]["data"][0] for plot in figures.plots]
    for bars in drawn:
        assert len(bars["x"]) <= 60
        assert sum(bars["y"]) == pytest.approx(100, abs=0.2)
    rows = [row for row in samples.convergence().rows if row.key.get("of") == "trainers"]
    assert f"Of {sum(sum(row.samples) for row in rows):,.0f} half" in content
    assert drawn[0]["text"][1].startswith("5 to 9 behind")
    assert drawn[0]["marker"]["color"] != drawn[2]["marker"]["color"]


def test_a_report_without_staleness_has_no_bars():
    figures = PageFigures()
    assert histogram_plots(Chapter([Shown(samples.training())], figures)) == ""
    assert figures.plots == []


def test_counts_are_neither_in_the_tables_of_a_page_nor_judged():
    names = [section.name for section in chapter([Shown(samples.convergence())], PageFigures())]
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
