import msgspec

from shoal.bench.scaling import PointSpeeds, ScalingConfig, ScalingPoint, predicted_curves, rows_of
from shoal.bench.tables.scaling import predicted_items, predicted_result
from shoal.report import Report

CONFIG = ScalingConfig(
    model="small-mlp", image_size=8, num_classes=10, num_workers=(1, 2), strategies=("neighbor",)
)


def measured():
    alone = [[100.0]]
    yield from rows_of(ScalingPoint("none", 32, 1), {"neighbor": PointSpeeds([[99.0]], [[100.0]])}, alone)
    yield from rows_of(
        ScalingPoint("none", 32, 2), {"neighbor": PointSpeeds([[90.0] * 2], [[95.0] * 2])}, alone
    )


def test_what_one_start_measured_is_extended_to_many_workers():
    curves = list(predicted_curves(CONFIG, list(measured()), print))
    assert curves
    for curve in curves:
        assert max(curve.starts[0]["num_workers"]) >= 1000
        assert len(curve.starts[0]["value"]) == len(curve.starts[0]["num_workers"])


def test_without_figures_the_reason_is_told():
    told = []
    assert list(predicted_curves(CONFIG, [], told.append)) == []
    assert told[0].startswith("no prediction: ")
    report = Report(benchmark="scaling", created="", config=msgspec.to_builtins(CONFIG))
    assert "error" in predicted_result(report)
    assert predicted_items(report)[0][0].startswith("No prediction: ")
