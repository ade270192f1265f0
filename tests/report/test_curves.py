import pytest

from shoal.report import Curve, load, save
from shoal.report.curves import MAX_POINTS, averaged, axes_of


def curve(*starts):
    return Curve(key={}, metric="accuracy", unit="", direction="higher", starts=list(starts))


def test_equal_starts_are_averaged_point_by_point_on_every_axis():
    line = averaged(
        curve({"value": [0.0, 1.0], "s": [0.0, 10.0]}, {"value": [0.5, 2.0], "s": [0.0, 20.0]}), "s"
    )
    assert (line.x, line.mean) == ([0.0, 15.0], [0.25, 1.5])
    assert (line.low, line.high) == ([0.0, 1.0], [0.5, 2.0])
    assert line.has_band


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
