import contextlib
import socket

import pytest

from shoal.bench.raw_sockets import RawClient, receive_exactly
from shoal.bench.workers import child


@pytest.mark.parametrize("in_flight", [1, 3])
def test_the_ceiling_echoes_and_counts_both_directions(in_flight):
    arguments = {"size_bytes": 100_000, "in_flight": in_flight}
    with child("shoal.bench.raw_sockets:serve", arguments) as server:
        with contextlib.closing(RawClient(server.expect()["port"], 100_000, in_flight)) as client:
            assert client.echo_for(0.05) > 2 * 100_000  # bytes a second
            assert client.echo_for(0.0) > 0  # everything under way has come back in between


def test_a_peer_that_goes_is_noticed():
    here, there = socket.socketpair()
    there.sendall(b"abc")
    there.close()
    with here, pytest.raises(EOFError):
        receive_exactly(here, memoryview(bytearray(10)))
