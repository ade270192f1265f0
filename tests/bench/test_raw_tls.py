import contextlib

import pytest

from shoal.bench.raw_tls import RawTlsClient
from shoal.bench.workers import child


@pytest.mark.parametrize("in_flight", [1, 3])
def test_the_ceiling_under_tls_echoes_and_counts_both_directions(in_flight):
    arguments = {"size_bytes": 100_000, "in_flight": in_flight}
    with child("shoal.bench.raw_tls:serve", arguments) as server:
        with contextlib.closing(RawTlsClient(server.expect()["port"], 100_000, in_flight)) as client:
            assert client._sending.version() == client._receiving.version() == "TLSv1.3"
            assert client.echo_for(0.05) > 2 * 100_000  # bytes a second
            assert client.echo_for(0.0) > 0
