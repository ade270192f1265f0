import pytest

from shoal.core import (
    DeadlineExceeded,
    LimitExceeded,
    Peer,
    PeerBusy,
    PeerLost,
    PeerRefused,
    ProtocolError,
    RemoteFailure,
    TensorError,
    UsageError,
    VersionMismatch,
)
from shoal.transport.frames import ErrorHead, GoodbyeHead, encode, from_goodbye, from_wire, to_wire

PEER = Peer.at("10.0.0.7:31337")

AROUND = [
    (DeadlineExceeded("late"), DeadlineExceeded),
    (PeerBusy("full", next_step="wait."), PeerBusy),
    (PeerRefused("no"), PeerRefused),
    (LimitExceeded("too much"), PeerRefused),
    (TensorError("shapes"), PeerRefused),
    (UsageError("wrong"), PeerRefused),
    (PeerLost("another peer went"), RemoteFailure),
    (ProtocolError("nonsense"), RemoteFailure),
    (ZeroDivisionError("by zero"), RemoteFailure),
]


@pytest.mark.parametrize(("error", "raised"), AROUND, ids=lambda value: type(value).__name__)
def test_an_error_arrives_as_what_it_means_to_the_caller(error, raised):
    arrived = from_wire(to_wire(error), PEER, "echo")
    assert type(arrived) is raised
    assert str(arrived).startswith("echo at 10.0.0.7:31337: ")
    assert str(error).splitlines()[0] in str(arrived)
    if raised is not DeadlineExceeded:
        assert arrived.peer is PEER


def test_an_unknown_code_is_a_failure():
    assert type(from_wire(ErrorHead("new", "what", "", ""), PEER, "echo")) is RemoteFailure


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "error", [Speechless(), OSError("\udcff.txt"), UsageError("\ud800"), ValueError("x" * 10**6)]
)
def test_every_error_can_be_sent(error):
    assert len(encode(to_wire(error))) < 10_000


def test_what_a_peer_says_is_cut_to_length():
    long = "x" * 10**6
    assert len(str(from_wire(ErrorHead("failed", long, long, long), PEER, "echo"))) < 10_000
    assert len(str(from_goodbye(GoodbyeHead("leaving", long, 0), PEER))) < 5000


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        ("version", VersionMismatch),
        ("busy", PeerBusy),
        ("protocol", ProtocolError),
        ("leaving", PeerLost),
        ("?", PeerLost),
    ],
)
def test_a_goodbye_says_why(code, raised):
    error = from_goodbye(GoodbyeHead(code, "because", 0), PEER)
    assert type(error) is raised
    assert "because" in str(error)
