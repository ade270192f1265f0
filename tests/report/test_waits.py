from report import samples
from shoal.report.figures import Figures, Shown
from shoal.report.waits import wait_plots


def test_each_strategy_has_a_map_in_one_scale_and_a_sentence():
    figures = Figures()
    content = wait_plots([Shown(samples.training())], figures)
    sync, pair = figures.plots
    assert sync["names"] == ["0", "1", "2", "3"]
    assert sync["longest"] == pair["longest"]
    assert all(sync["values"][rank][rank] is None for rank in range(4))
    assert all(sync["values"][rank][1] > 10 * sync["values"][rank][2] for rank in (0, 3))
    assert "of waiting in all, 87% for rank 1" in content


def test_where_nobody_waited_the_map_says_so():
    key = {"rank": 0, "waited_for": 1}
    report = samples.report("training", [samples.row(key, "waited", "s", "lower", [[0.0]])])
    figures = Figures()
    assert "Nobody waited." in wait_plots([Shown(report)], figures)
    assert figures.plots[0]["longest"] == 0.0


def test_waits_without_whom_are_no_map():
    report = samples.report("training", [samples.row({"rank": 0}, "waited", "s", "lower", [[1.0]])])
    assert wait_plots([Shown(report)], Figures()) == ""
