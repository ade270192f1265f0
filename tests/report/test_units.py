import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.report.units import counted, digits, percent, scale_for


@pytest.mark.parametrize(
    ("unit", "value", "shown"),
    [
        ("s", 97.2e-6, "97.2 µs"),
        ("s", 0.0009999, "1.00 ms"),
        ("s", 0.104, "104 ms"),
        ("s", 12.5, "12.5 s"),
        ("s", 0, "0 s"),
        ("s", -0.002, "-2.00 ms"),
        ("1/s", 67_123, "67.1 k/s"),
        ("1/s", 999_960, "1.00 M/s"),
        ("1/s", 0.5, "0.500 /s"),
        ("GB/s", 2.712, "2.71 GB/s"),
        ("GB/s", 0.0123, "12.3 MB/s"),
        ("B", 1536, "1.54 kB"),
        ("bytes", 12, "12.0 B"),
        ("img/s", 329.4, "329 img/s"),
        ("img/s", 52_300, "52.3 k img/s"),
        ("%", 99.5, "99.5 %"),
        ("", 1234, "1,234"),
    ],
)
def test_values_read_as_people_write_them(unit, value, shown):
    assert scale_for(unit, value).format(value) == shown


def test_one_scale_serves_a_whole_row():
    scale = scale_for("s", 0.5e-3)
    assert [scale.format(value) for value in (0.5e-3, 2e-3)] == ["500 µs", "2,000 µs"]


@given(st.floats(1e-12, 1e12), st.sampled_from(["s", "1/s", "GB/s", "B", "img/s", ""]))
def test_a_shown_number_is_within_half_a_percent(value, unit):
    scale = scale_for(unit, value)
    assert float(scale.number(value).replace(",", "")) * scale.factor == pytest.approx(value, rel=0.006)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.00999, "0.00999"), (9.996, "10.0"), (99.96, "100"), (5e-5, "5.00e-05"), (-12345.6, "-12,346")],
)
def test_three_digits(value, shown):
    assert digits(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "n/a"), (-0.01, "+0.0%"), (-10.33, "-10.3%"), (5, "+5.0%"), (-1234.4, "-1,234%")],
)
def test_percentages_have_one_sign_for_zero(value, shown):
    assert percent(value) == shown


def test_counts_agree_with_their_nouns():
    assert [counted(number, "peer") for number in (0, 1, 1234)] == ["0 peers", "1 peer", "1,234 peers"]
    assert counted(2, "process", "processes") == "2 processes"
