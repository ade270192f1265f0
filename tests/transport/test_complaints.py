import logging

import pytest

from shoal.core import ManualClock, Peer
from shoal.transport.limits import Complaints

LOG = logging.getLogger("test complaints")
PEER = Peer.at("10.0.0.7:31337")


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, LOG.name)
    return lambda: [record.getMessage() for record in caplog.records]


def test_one_line_each_then_a_count(lines):
    clock = ManualClock()
    complaints = Complaints(LOG, clock)
    for number in range(5000):
        complaints.add("closed a connection", PEER, f"reason {number}")
    assert len(lines()) == 10
    assert lines()[0] == "closed a connection (10.0.0.7:31337): reason 0"
    clock.advance(1.0)
    complaints.add("closed a connection", PEER, "later")
    assert lines()[10:] == [
        "and 4990 more complaints of this kind",
        "closed a connection (10.0.0.7:31337): later",
    ]


def test_what_was_left_out_is_told_at_the_end(lines):
    complaints = Complaints(LOG, ManualClock())
    complaints.flush()
    for _ in range(12):
        complaints.add("refused a connection", PEER, "full")
    complaints.flush()
    complaints.flush()
    assert len(lines()) == 11
    assert lines()[-1] == "and 2 more complaints of this kind"


def test_a_stranger_cannot_write_lines_of_its_own(lines):
    Complaints(LOG, ManualClock()).add("closed", PEER, "bad\nCRITICAL: all is lost\x1b[31m" + "x" * 5000)
    (line,) = lines()
    assert "\n" not in line
    assert "\x1b" not in line
    assert len(line) < 600
