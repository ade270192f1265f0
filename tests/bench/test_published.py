"""The model beside BlueFog's bars: what it must reach, and that it does so without looking."""

import copy

import pytest

from shoal.bench.forecast import published
from shoal.report.tables import Table


@pytest.fixture(autouse=True)
def fresh_calibration():
    published.calibrate.cache_clear()
    yield
    published.calibrate.cache_clear()


def test_every_held_out_bar_at_batch_64_is_within_seven_points():
    held_out = [bar for bar in published.bars() if bar.batch_size == 64 and bar.is_held_out]
    assert {(bar.method, bar.num_workers) for bar in held_out} == {
        (method, size) for method in ("horovod", "hierarchical", "neighbor") for size in (64, 128)
    }
    for bar in held_out:
        assert abs(bar.points) <= 0.07, bar


def test_the_data_sheet_alone_promises_too_much():
    for bar in published.bars():
        if bar.batch_size == 64:
            assert bar.nominal > bar.published


def test_at_batch_32_the_neighbours_lead_grows_as_published():
    rows = {(name, size): (told, predicted) for name, size, told, predicted in published.ratios()}
    assert len(rows) == 8
    for (_, size), (told, predicted) in rows.items():
        if size > 16:
            assert predicted == pytest.approx(told, rel=0.15)
    for name in ("hierarchical", "neighbor"):
        leads = [rows[name, size][1] for size in published.SIZES]
        assert leads == sorted(leads)


def test_no_bar_that_is_held_out_enters_the_calibration(monkeypatch):
    before = published.calibrate()
    wrong = copy.deepcopy(published.IMAGES_PER_S)
    for batch_size, methods in wrong.items():
        for method, told in methods.items():
            spoiled = (1.0, 2.0, 3.0, 4.0)
            methods[method] = (*told[:2], *spoiled[2:]) if batch_size == 64 else spoiled
    monkeypatch.setattr(published, "IMAGES_PER_S", wrong)
    published.calibrate.cache_clear()
    assert published.calibrate() == before
    wrong[64]["neighbor"] = (5.0e3, 10.0e3, 1.0, 1.0)
    published.calibrate.cache_clear()
    assert published.calibrate().terms["neighbor"] != before.terms["neighbor"]


def test_what_was_fitted_is_plausible_and_told():
    found = published.calibrate()
    assert 5e9 / 8 < found.network.between.bytes_per_s < 25e9 / 8
    assert found.network.between.latency_s > published.NOMINAL.between.latency_s
    inputs, efficiencies, ratios = [item for item in published.published_items() if isinstance(item, Table)]
    fitted = {row[0]: row[3] for row in inputs.rows if row[3]}
    assert fitted == {
        "between machines": "horovod",
        "not hidden, hierarchical": "hierarchical",
        "not hidden, neighbor": "neighbor",
    }
    assert [row[-1] for row in efficiencies.rows] == ["fitted", "fitted", "held out", "held out"] * 3
    assert len(ratios.rows) == 8


def test_the_result_says_how_near_it_came():
    result = published.published_result()
    assert result["is_within_tolerance"] is True
    assert result["held_out_within_points"] <= 7
    assert len(result["bars"]) == 24
    assert result["calibrated"]["terms"]["horovod"] == {"overhead_s": 0.0, "straggler_s": 0.0}
