import dataclasses

import pytest

from shoal.core import LimitExceeded, UsageError
from shoal.transport import Limits


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Limits)])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_every_limit_is_above_zero(name, value):
    with pytest.raises(UsageError, match=name):
        Limits(**{name: value})


def test_the_largest_message_must_fit():
    with pytest.raises(UsageError, match=r"(?s)could never arrive.*Try: raise max_bytes_in_flight"):
        Limits(max_message_bytes=2000, max_bytes_in_flight=1000)
    assert Limits(max_message_bytes=1000, max_bytes_in_flight=1000).max_message_bytes == 1000


@pytest.mark.parametrize("sizes", [[60, 41], [1, 1, 1, 1]])
def test_what_is_too_large_or_in_too_many_buffers_is_refused(sizes):
    limits = Limits(max_message_bytes=100, max_buffers=3)
    limits.check_sizes([60, 40, 0])
    with pytest.raises(LimitExceeded, match="100 bytes in 3"):
        limits.check_sizes(sizes)
