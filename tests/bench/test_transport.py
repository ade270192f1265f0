""""""

import contextlib
import socket

import msgspec
import pytest

from shoal.bench.frame import make_scenario
from shoal.bench.transport import SHORT, RawClient, RawTlsClient, receive_exactly, summarize_transport
from shoal.bench.workers import child
from shoal.report import Report

TINY = msgspec.structs.replace(
    SHORT, repeats=1, block_s=0.05, num_latency_calls=20, virtual_peers=5, virtual_s=2
)


@pytest.fixture(scope="module")
def report():
    rows = list(make_scenario("transport", msgspec.to_builtins(TINY), seed=1).run(lambda _: None))
    return Report(benchmark="transport", created="2026-01-01T00:00:00+00:00", rows=rows)


def test_it_measures_ours_and_the_sockets_with_the_same_in_flight(report):
    echoes = {
        (row.key["via"], row.key["in_flight"]): row.samples for row in report.rows if row.metric == "echo"
    }
    assert sorted(echoes) == [
        *(("shoal", 1), ("shoal", 4), ("shoal-tls", 4)),
        *(("sockets", 1), ("sockets", 4), ("tls-sockets", 4)),
    ]
    assert all(rate > 0 for samples in echoes.values() for rate in samples)
    for metric, ours, raw in (
        ("fraction_of_sockets", "shoal", "sockets"),
        ("fraction_of_tls_sockets", "shoal-tls", "tls-sockets"),
    ):
        rows = [row for row in report.rows if row.metric == metric]
        assert rows
        for row in rows:
            in_flight = row.key["in_flight"]
            pairs = zip(echoes[ours, in_flight], echoes[raw, in_flight], strict=True)
            assert row.samples == [mine / theirs for mine, theirs in pairs]


def test_the_result_has_the_names_that_scripts_read(report):
    result = summarize_transport(report)
    assert {"calls_per_s", "p50_us", "echo_gb_s", "raw_echo_gb_s"} <= set(result)
    assert {"udp_calls_per_s", "tls_echo_gb_s", "raw_tls_echo_gb_s", "virtual_calls_per_s"} <= set(result)
    by_key = {
        (row.metric, row.key.get("via"), row.key.get("in_flight")): row.samples[0] for row in report.rows
    }
    assert result["udp_calls_per_s"] == round(by_key["calls_per_s", "udp", 64])
    assert result["virtual_calls_per_s"] == round(by_key["virtual_calls_per_s", "datagram", None])
    assert result["tls_echo_gb_s"] == round(by_key["echo", "shoal-tls", 4], 3)
    assert result["echo_gb_s"] == round(by_key["echo", "shoal", 4], 3)
    assert result["raw_echo_gb_s"] == round(by_key["echo", "sockets", 4], 3)
    assert result["echo_gb_s_1_in_flight"] == round(by_key["echo", "shoal", 1], 3)


def test_unknown_settings_are_refused():
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        make_scenario("transport", {"repeat": 3}, seed=0)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_the_ceiling_echoes_and_counts_both_directions(in_flight):
    arguments = {"size_bytes": 100_000, "in_flight": in_flight}
    with child("shoal.bench.transport:serve_raw", arguments) as server:
        with contextlib.closing(RawClient(server.expect()["port"], 100_000, in_flight)) as client:
            assert client.echo_for(0.05) > 2 * 100_000  # bytes a second
            assert client.echo_for(0.0) > 0  # everything under way has come back in between


def test_a_peer_that_goes_is_noticed():
    here, there = socket.socketpair()
    there.sendall(b"abc")
    there.close()
    with here, pytest.raises(EOFError):
        receive_exactly(here, memoryview(bytearray(10)))


@pytest.mark.parametrize("in_flight", [1, 3])
def test_the_ceiling_under_tls_echoes_and_counts_both_directions(in_flight):
    arguments = {"size_bytes": 100_000, "in_flight": in_flight}
    with child("shoal.bench.transport:serve_raw_tls", arguments) as server:
        with contextlib.closing(RawTlsClient(server.expect()["port"], 100_000, in_flight)) as client:
            assert client._sending.version() == client._receiving.version() == "TLSv1.3"
            assert client.echo_for(0.05) > 2 * 100_000  # bytes a second
            assert client.echo_for(0.0) > 0
