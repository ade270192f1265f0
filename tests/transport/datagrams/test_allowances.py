"""How many strangers are answered."""

from shoal.transport.datagrams.limits import Allowance


def test_so_many_in_a_second():
    allowance = Allowance(3)
    assert [allowance.take(10.0 + n / 10) for n in range(5)] == [True, True, True, False, False]
    assert [allowance.take(11.0) for _ in range(4)] == [True, True, True, False]
