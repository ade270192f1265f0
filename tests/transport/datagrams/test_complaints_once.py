"""Log lines about misbehaving hosts that are said once."""

import random
import types

from shoal.core import Address, ManualClock, Peer
from shoal.transport.datagrams.transport import DatagramTransport


def transport_at(clock):
    return DatagramTransport(
        network=types.SimpleNamespace(clock=clock, random=random.Random(1), is_simulated=True)
    )


def test_each_host_and_reason_is_said_once_in_ten_minutes(caplog):
    clock = ManualClock()
    complain_once = transport_at(clock).complain_once
    one, other = Peer(Address("10.0.0.1", 1)), Peer(Address("10.0.0.2", 1))
    for seconds in range(100):
        complain_once("refused", one, f"it is {seconds} s late.")
        clock.advance(1)
    complain_once("refused", Peer(Address("10.0.0.1", 2)), "it is 7 s late.")
    complain_once("refused", other, "it is 7 s late.")
    complain_once("refused", one, "it is early.")
    assert [record.getMessage() for record in caplog.records] == [
        "refused (10.0.0.1:1): it is 0 s late.",
        "refused (10.0.0.2:1): it is 7 s late.",
        "refused (10.0.0.1:1): it is early.",
    ]
    clock.advance(601)
    complain_once("refused", one, "it is early.")
    assert len(caplog.records) == 4


def test_what_is_remembered_is_bounded():
    transport = transport_at(ManualClock())
    for number in range(5000):
        transport.complain_once("refused", Peer(Address(f"host{number}", 1)), "no.")
    assert len(transport._complained) <= 1024
