import asyncio

import pytest

from shoal.core import Address, UsageError
from shoal.experts.server.hosting import ExpertStatus, HostStatus, MetricsServer, metrics_text
from shoal.report import pages

ANYWHERE = Address("127.0.0.1", 0)


def test_the_text_is_what_prometheus_reads():
    expert = ExpertStatus(
        'odd"\\uid',
        num_forward_batches=3,
        num_forward_samples=30,
        num_backward_batches=6,
        num_backward_samples=60,
        num_updates=6,
        busy_s=1.5,
        num_clipped=2,
    )
    text = metrics_text(
        HostStatus(
            up_s=2.5,
            num_waiting=4,
            num_failed=5,
            num_peers=7,
            is_leaving=False,
            experts=(expert,),
            num_averaged=11,
            num_copied=12,
            num_adopted=13,
        )
    )
    values = {}
    kinds = {}
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            kinds[name] = kind
        elif not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
            assert name.partition("{")[0] in kinds
    assert text.endswith("\n")
    assert values["shoal_waiting_requests"] == 4
    assert values["shoal_failed_requests_total"] == 5
    assert values["shoal_dht_peers"] == 7
    assert values["shoal_samples_total"] == 90
    assert [values[f"shoal_{name}_total"] for name in ("averages", "copies", "adoptions")] == [11, 12, 13]
    assert values['shoal_expert_samples_total{expert="odd\\"\\\\uid",kind="backward"}'] == 60
    assert values['shoal_expert_busy_seconds_total{expert="odd\\"\\\\uid"}'] == 1.5
    assert values['shoal_expert_clipped_updates_total{expert="odd\\"\\\\uid"}'] == 2
    assert kinds["shoal_samples_total"] == "counter"
    assert kinds["shoal_up_seconds"] == "gauge"


async def ask(server, request):
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
    try:
        writer.write(request)
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def port_of(server):
    return int(server.url.rpartition(":")[2].partition("/")[0])


def test_it_is_read_over_http(run):
    async def check():
        async with MetricsServer(ANYWHERE, lambda: "shoal_experts 3\n") as server:
            assert server.url.startswith("http://127.0.0.1:")
            assert server.url.endswith("/metrics")
            got = await ask(server, b"GET /metrics HTTP/1.1\r\nHost: me\r\n\r\n")
            head, _, body = got.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.0 200 OK\r\n")
            assert b"Content-Type: text/plain; version=0.0.4" in head
            assert b"Content-Length: 16" in head
            assert body == b"shoal_experts 3\n"
            got = await ask(server, b"HEAD /metrics HTTP/1.0\r\n\r\n")
            assert got.startswith(b"HTTP/1.0 200")
            assert got.endswith(b"\r\n\r\n")
        with pytest.raises(UsageError, match="not open"):
            _ = server.url

    run(check())


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.0\r\n\r\n", b"405"),
        (b"\x16\x03\x01 hello\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.0\r\nX: " + b"x" * 9000, b"431"),
    ],
)
def test_nothing_else_is_given(run, request_bytes, status):
    async def check():
        async with MetricsServer(ANYWHERE, lambda: "secret") as server:
            got = await ask(server, request_bytes)
            assert got.split()[1] == status
            assert b"secret" not in got

    run(check())


def test_what_cannot_be_gathered_is_an_error_of_this_request_only(run, caplog):
    def fail():
        raise ZeroDivisionError

    async def check():
        async with MetricsServer(ANYWHERE, fail) as server:
            assert (await ask(server, b"GET /metrics HTTP/1.0\r\n\r\n")).split()[1] == b"500"

    run(check())
    assert "Metrics could not be gathered" in caplog.text


def test_who_says_nothing_is_let_go_and_makes_room_for_who_asks(run, monkeypatch):
    monkeypatch.setattr(pages, "_REQUEST_S", 0.05)
    monkeypatch.setattr(pages, "_MAX_CONNECTIONS", 1)

    async def check():
        async with MetricsServer(ANYWHERE, lambda: "fine") as server:
            silent, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
            assert await end_of(silent) == b""
            writer.close()
            monkeypatch.setattr(pages, "_REQUEST_S", 50.0)
            silent, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
            assert (await ask(server, b"GET /metrics HTTP/1.0\r\n\r\n")).endswith(b"fine")
            assert await end_of(silent) == b""
            writer.close()

    run(check())


async def end_of(reader):
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


def test_closing_does_not_wait_for_those_who_are_connected(run):
    async def check():
        async with MetricsServer(ANYWHERE, lambda: "") as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
            writer.write(b"GET ")
            await writer.drain()
        assert await end_of(reader) == b""
        writer.close()

    run(check())


def test_a_port_that_is_taken_is_refused(run):
    async def check():
        async with MetricsServer(ANYWHERE, lambda: "") as server:
            taken = MetricsServer(Address("127.0.0.1", port_of(server)), lambda: "")
            with pytest.raises(UsageError, match="Metrics cannot be served"):
                await taken.__aenter__()

    run(check())
