"""Complaints that are said once."""

import logging

from shoal.core import Address, ManualClock, Peer
from shoal.transport.datagrams.grievances import Grievances
from shoal.transport.limits import Complaints


def test_each_host_and_reason_is_said_once_in_ten_minutes(caplog):
    clock = ManualClock()
    grievances = Grievances(Complaints(logging.getLogger("test"), clock), clock)
    one, other = Peer(Address("10.0.0.1", 1)), Peer(Address("10.0.0.2", 1))
    for seconds in range(100):
        grievances.add("refused", one, f"it is {seconds} s late.")
        clock.advance(1)
    grievances.add("refused", Peer(Address("10.0.0.1", 2)), "it is 7 s late.")
    grievances.add("refused", other, "it is 7 s late.")
    grievances.add("refused", one, "it is early.")
    assert [record.getMessage() for record in caplog.records] == [
        "refused (10.0.0.1:1): it is 0 s late.",
        "refused (10.0.0.2:1): it is 7 s late.",
        "refused (10.0.0.1:1): it is early.",
    ]
    clock.advance(600)
    grievances.add("refused", one, "it is early.")
    assert len(caplog.records) == 4


def test_what_is_remembered_is_bounded():
    clock = ManualClock()
    grievances = Grievances(Complaints(logging.getLogger("test"), clock), clock)
    for number in range(5000):
        grievances.add("refused", Peer(Address(f"host{number}", 1)), "no.")
    assert len(grievances._said_at_s) <= 1024
