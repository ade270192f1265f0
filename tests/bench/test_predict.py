"""Forecasts from reports made by hand, and one from a real run over slow links."""

import msgspec
import pytest

from shoal.bench.forecast.cost_model import Method, ModelLink, ModelNetwork, Terms, Work, iteration_s
from shoal.bench.forecast.predict import forecast_curves, forecast_items, forecast_of, forecast_result
from shoal.bench.scaling import ScalingConfig, ScalingScenario
from shoal.core import ReportError
from shoal.report import Report, Row
from shoal.report.tables import Table

SLOW = "[ways.default]\ndelay_ms = 5\nmbit_s = 1600\n"
COMPUTE_S = {1: 0.1, 2: 0.12, 4: 0.12}
PARAMETER_BYTES = 2410 * 4  # of small-mlp


def report_of(times_s, **config):
    """A report in which iterations of 8 images took so long, by strategy and number of workers."""
    rows = []
    for strategy, by_size in {"none": COMPUTE_S, **times_s}.items():
        for size, seconds in by_size.items():
            key = {"strategy": strategy, "batch_size": 8, "num_workers": size}
            speed = 8 * size / seconds
            for metric, value in (("images_per_s", speed), ("scaling_efficiency", 0.1 / seconds)):
                rows.append(
                    Row(
                        key=key,
                        metric=metric,
                        unit="",
                        direction="higher",
                        starts=[[value, value * 1.5, value]],
                    )
                )
    settings = ScalingConfig(
        **{
            "model": "small-mlp",
            "image_size": 8,
            "num_classes": 10,
            "batch_sizes": (8,),
            "num_workers": (1, 2, 4),
            "strategies": tuple(times_s),
            **config,
        }
    )
    return Report(benchmark="scaling", created="", config=msgspec.to_builtins(settings), rows=rows)


def lane_of(forecast, strategy):
    (lane,) = [lane for lane in forecast.lanes if lane.strategy == strategy]
    return lane


def test_overhead_and_stragglers_are_calibrated_and_carried_on():
    times_s = {size: COMPUTE_S[size] + 0.010 + 0.005 * size.bit_length() - 0.005 for size in (2, 4)}
    forecast = forecast_of(report_of({"neighbor": times_s}))
    lane = lane_of(forecast, "neighbor")
    assert lane.fitted.terms.overhead_s == pytest.approx(0.010, abs=1e-3)
    assert lane.fitted.terms.straggler_s == pytest.approx(0.005, abs=5e-4)
    assert [point.num_workers for point in lane.points] == [2**power for power in range(11)]
    last = lane.points[-1]
    assert last.efficiency == pytest.approx(0.1 / (0.12 + 0.010 + 0.05), rel=0.01)
    assert last.images_per_s == pytest.approx(1024 * 8 / (0.12 + 0.06), rel=0.01)
    assert last.nominal_efficiency == pytest.approx(0.1 / 0.12, rel=0.01)
    measured = {point.num_workers: point.measured_efficiency for point in lane.points}
    assert measured[4] == pytest.approx(0.1 / times_s[4])
    assert measured[8] is None


def test_the_link_between_machines_is_calibrated_where_several_were_measured():
    network = ModelNetwork(inside=ModelLink(20e-6, 8e9), between=ModelLink(50e-6, 2e6), workers_per_machine=2)
    method = Method(kind="all-reduce", leaves="as-layers-finish")
    times_s = {
        size: iteration_s(Work(COMPUTE_S[size], PARAMETER_BYTES), method, network, size, Terms(0.002))
        for size in (2, 4)
    }
    forecast = forecast_of(report_of({"all-reduce": times_s}, workers_per_machine=2))
    fitted = lane_of(forecast, "all-reduce").fitted
    assert fitted.between.bytes_per_s == pytest.approx(2e6, rel=0.01)
    assert fitted.terms.overhead_s == pytest.approx(0.002, rel=0.05)


def test_a_profile_is_checked_with_nothing_fitted(tmp_path):
    profile = tmp_path / "slow.toml"
    profile.write_text("[ways.default]\ndelay_ms = 50\n")
    times_s = {"all-reduce": {2: 0.22, 4: 0.5}, "neighbor": {2: 0.12, 4: 0.12}}
    forecast = forecast_of(report_of(times_s, profile=str(profile)))
    checks = {(check.strategy, check.num_workers): check for check in forecast.checks}
    assert checks["all-reduce", 2].predicted_s == pytest.approx(0.12 + 2 * 0.05)
    assert checks["all-reduce", 4].off == pytest.approx((0.12 + 6 * 0.05) / 0.5 - 1)
    assert checks["neighbor", 4].predicted_s == pytest.approx(0.12), "hidden behind backward"
    assert forecast_result(forecast)["checks_within"] == pytest.approx(0.16, abs=1e-3)
    table = next(item for item in forecast_items(forecast) if isinstance(item, Table))
    assert [row[-1] for row in table.rows] == ["", "over 15%", "", ""]
    far = lane_of(forecast, "neighbor").points[-1]
    assert far.efficiency == pytest.approx(1.0, rel=0.01), "each worker has cores of its own there"


def test_mixing_is_counted_as_it_was_measured(tmp_path):
    profile = tmp_path / "slow.toml"
    profile.write_text(SLOW)
    plain = report_of({"neighbor": {2: 0.2}}, num_workers=(1, 2), profile=str(profile))
    mixing = Row(key={"num_workers": 2}, metric="mixing", unit="s", direction="lower", starts=[[0.03] * 3])
    mixed = msgspec.structs.replace(plain, rows=[*plain.rows, mixing])
    (without,), (with_it,) = (forecast_of(report).checks for report in (plain, mixed))
    assert with_it.predicted_s - without.predicted_s == pytest.approx(0.03)


def test_inside_a_machine_a_profile_of_machines_has_nothing_to_check(tmp_path):
    profile = tmp_path / "slow.toml"
    profile.write_text("[ways.default]\ndelay_ms = 50\n")
    options = {"profile": str(profile), "between": "machines", "workers_per_machine": 2}
    forecast = forecast_of(report_of({"neighbor": {2: 0.13, 4: 0.13}}, **options))
    assert [check.num_workers for check in forecast.checks] == [4]


def test_a_strategy_without_a_formula_is_told_and_the_rest_go_on():
    forecast = forecast_of(report_of({"pair": {2: 0.2}, "neighbor": {2: 0.2}}))
    assert "no formula for pair" in lane_of(forecast, "pair").error
    assert lane_of(forecast, "neighbor").points
    assert any("pair: no prediction" in str(item) for item in forecast_items(forecast))
    assert {curve.key["strategy"] for curve in forecast_curves(forecast)} == {"neighbor"}


def test_curves_go_along_the_number_of_workers_under_the_keys_of_rows():
    forecast = forecast_of(report_of({"neighbor": {2: 0.13, 4: 0.14}}))
    speed, efficiency = forecast_curves(forecast)
    assert (speed.metric, speed.unit, efficiency.metric) == ("images_per_s", "images/s", "scaling_efficiency")
    assert speed.key == {"strategy": "neighbor", "batch_size": 8}
    assert speed.starts[0]["num_workers"][-1] == 1024
    assert len(speed.starts[0]["value"]) == len(speed.starts[0]["num_workers"])


def test_a_report_without_compute_or_of_something_else_is_refused():
    whole = report_of({"neighbor": {2: 0.13}})
    shared = [row for row in whole.rows if row.key["strategy"] != "none"]
    with pytest.raises(ReportError, match="share nothing"):
        forecast_of(msgspec.structs.replace(whole, rows=shared))
    with pytest.raises(ReportError, match="not one of"):
        forecast_of(msgspec.structs.replace(whole, config={"sizes": [1]}))


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("between", ["workers", "machines"])
def test_real_runs_over_shaped_links_come_within_fifteen_percent(tmp_path, between):
    profile = tmp_path / "slow.toml"
    profile.write_text(SLOW)
    config = ScalingConfig(
        model="mlp",
        image_size=28,
        num_classes=10,
        batch_sizes=(16,),
        num_workers=(2, 4),
        workers_per_machine=2 if between == "machines" else None,
        strategies=("neighbor", "all-reduce"),
        num_warmup_batches=2,
        num_batches_per_iter=3,
        num_iters=4,
        profile=str(profile),
        between=between,
        should_predict=True,  # so that what mixing takes is measured too, which the formula counts
    )
    scenario = ScalingScenario(msgspec.to_builtins(config), 0)
    rows = [row for row in scenario.run(lambda text: None) if isinstance(row, Row)]
    report = Report(benchmark="scaling", created="", config=msgspec.to_builtins(config), rows=rows)
    checks = forecast_of(report).checks
    sizes = (4,) if between == "machines" else (2, 4)
    assert len(checks) == 2 * len(sizes)
    for check in checks:
        assert abs(check.off) <= 0.15, check
