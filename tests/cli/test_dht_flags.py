import pytest

from shoal.cli.bench import with_bare_latest


@pytest.mark.parametrize(
    ("typed", "means"),
    [
        ("--latest True --num-keys 3", "--latest --num-keys 3"),
        ("--latest false", "--no-latest"),
        ("--latest=False --latest", "--no-latest --latest"),
        ("--latest --num-keys 3", "--latest --num-keys 3"),
        ("--profile true --no-latest", "--profile true --no-latest"),
        ("--latest maybe", "--latest maybe"),
    ],
)
def test_latest_takes_a_value_or_none(typed, means):
    assert with_bare_latest(typed.split()) == means.split()
