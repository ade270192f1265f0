import asyncio
import contextlib
import logging
import socket

import pytest

from shoal._version import __version__
from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    Peer,
    PeerBusy,
    PeerLost,
    PeerRefused,
    ProtocolError,
    VersionMismatch,
)
from shoal.transport import introductions
from shoal.transport.endpoint import Endpoint
from shoal.transport.frames import VERSION
from shoal.transport.introductions import (
    ABOUT,
    DIAL_BACK,
    MAX_BULK_BYTES,
    SINK,
    SOURCE,
    Attempt,
    DialBack,
    DialedBack,
    Introduction,
    Source,
    answer,
    ask_about,
    outcome_of,
)
from shoal.transport.messages import Reply, read_answer
from shoal.transport.network.sockets import SocketNetwork, unreachable
from transport.members import Swarm

LOOPBACK = Address("127.0.0.1", 0)


def soon(seconds=5.0):
    return Deadline.after(seconds)


@contextlib.asynccontextmanager
async def pair(swarm=None, server_network=None):
    """A peer that asks, one that answers, and their addresses."""
    async with contextlib.AsyncExitStack() as stack:
        ends = []
        for network in (None, server_network):
            endpoint = Endpoint(membership=swarm.member() if swarm else None, network=network)
            answer(endpoint)
            await stack.enter_async_context(endpoint)
            ends += [endpoint, await endpoint.listen(LOOPBACK)]
        yield ends


@pytest.mark.parametrize("swarm", [None, Swarm()], ids=["plain", "members"])
def test_about(run, swarm):
    async def main():
        async with pair(swarm) as (client, here, server, there):
            over_tcp = await ask_about(client.streams, there, "tcp", soon())
            over_udp = await ask_about(client.datagrams, there, "udp", soon())
            return here, there, server, over_tcp, over_udp

    here, there, server, over_tcp, over_udp = run(main())
    assert over_udp.seen_as == str(here)
    assert over_tcp.seen_as.startswith("127.0.0.1:")
    for about in (over_tcp, over_udp):
        assert (about.software, about.protocol) == (__version__, VERSION)
        assert about.peer_id == (str(server.peer_id) if swarm else "")
        assert about.listens == (str(there),)
        assert about.wall_s == pytest.approx(SocketNetwork().clock.wall_s(), abs=60)


def test_answering_twice_is_answering_once():
    endpoint = Endpoint()
    answer(endpoint)
    answer(endpoint)


def test_what_a_caller_calls_itself_cannot_steer_a_terminal(run, caplog):
    caplog.set_level(logging.INFO)

    async def main():
        async with pair() as (client, _, _, there):
            await client.streams.call(
                there, ABOUT, {"software": "1\x1b[2J\n2", "way": "\x1b"}, deadline=soon()
            )
            with pytest.raises(PeerRefused):
                await client.streams.call(there, ABOUT, {"software": "x" * 300}, deadline=soon())

    run(main())
    assert caplog.messages[0].endswith(r"asks who is here, shoal 1\u001b[2J\u000a2")


# --- dialing back ---


async def dial_back(transport, there, wish, seconds=5.0):
    reply = await transport.call(there, DIAL_BACK, wish, deadline=soon(seconds))
    return read_answer(reply, DialedBack, DIAL_BACK)


@pytest.mark.parametrize("swarm", [None, Swarm()], ids=["plain", "members"])
@pytest.mark.parametrize("way", ["tcp", "udp"])
def test_dialing_back_reaches_the_caller(run, swarm, way):
    async def main():
        async with pair(swarm) as (client, here, _, there):
            transport = client.streams if way == "tcp" else client.datagrams
            return here, await dial_back(transport, there, DialBack(here.port))

    here, told = run(main())
    assert told == DialedBack(str(here), (Attempt("tcp", "ok"), Attempt("udp", "ok")))


def test_datagrams_come_back_from_a_port_that_the_caller_does_not_know(run, caplog):
    caplog.set_level(logging.INFO)

    async def main():
        async with pair() as (client, here, _, there):
            await dial_back(client.streams, there, DialBack(here.port, ("udp",)))
            return there

    there = run(main())
    asked = [message for message in caplog.messages if "asks who is here over UDP" in message]
    assert len(asked) == 1
    assert not asked[0].startswith(str(there))


def test_dialing_back_to_a_port_where_nobody_listens(run):
    async def main():
        async with pair() as (client, _, _, there):
            with socket.socket() as nobody:
                nobody.bind(("127.0.0.1", 0))
                wish = DialBack(nobody.getsockname()[1], patience_s=0.2)
                return await dial_back(client.streams, there, wish)

    told = run(main())
    assert [(attempt.ip_protocol, attempt.outcome) for attempt in told.attempts] == [
        ("tcp", "refused"),
        ("udp", "silent"),
    ]
    assert all(attempt.says for attempt in told.attempts)


def test_a_peer_dials_its_caller_and_nobody_else(run):
    """The question has no room for a host, and a stranger at the port is found out where ids are known."""
    swarm = Swarm()
    assert DialBack.__struct_encode_fields__ == ("port", "ways", "patience_s")

    async def main():
        async with pair(swarm) as (client, _, _, there):
            async with Endpoint(membership=swarm.member()) as stranger:
                elsewhere = await stranger.listen(LOOPBACK)
                wish = {"port": elsewhere.port, "host": "192.0.2.1"}
                return elsewhere, await dial_back(client.streams, there, wish)

    elsewhere, told = run(main())
    assert told.address == str(elsewhere)
    assert [attempt.outcome for attempt in told.attempts] == ["failed", "failed"]
    assert all("not " in attempt.says for attempt in told.attempts)


@pytest.mark.parametrize(
    "wish",
    [
        {"port": 0},
        {"port": 65536},
        {"port": 80, "ways": []},
        {"port": 80, "ways": ["tcp"] * 3},
        {"port": 80, "ways": ["icmp"]},
        {"port": 80, "patience_s": -1.0},
        {"port": 80, "patience_s": float("nan")},
        None,
    ],
)
def test_wishes_that_make_no_sense_are_refused(run, wish):
    async def main():
        async with pair() as (client, _, _, there):
            with pytest.raises(PeerRefused):
                await dial_back(client.streams, there, wish)

    run(main())


class Dropping(SocketNetwork):
    async def dial(self, address, protocol, *, tls=None, sock=None):
        await asyncio.Event().wait()


def test_patience_is_bounded_and_few_are_dialed_at_once(run, monkeypatch):
    monkeypatch.setattr(introductions, "MAX_PATIENCE_S", 0.3)
    wish = DialBack(9, ("tcp",), patience_s=1e9)

    async def main():
        async with pair(server_network=Dropping()) as (client, _, _, there):
            at_once = [asyncio.ensure_future(dial_back(client.streams, there, wish)) for _ in range(4)]
            await ask_about(client.streams, there, "tcp", soon())  # by then all four have begun
            with pytest.raises(PeerBusy, match="dials back to others"):
                await dial_back(client.streams, there, wish)
            return [await each for each in at_once]

    assert [told.attempts[0].outcome for told in run(main())] == ["silent"] * 4


def test_a_host_that_asks_too_often_is_sent_away(run):
    async def main():
        async with pair() as (client, here, _, there):
            for _ in range(6):
                await dial_back(client.streams, there, DialBack(here.port, ("tcp",)))
            with pytest.raises(PeerBusy, match="too often"):
                await dial_back(client.streams, there, DialBack(here.port, ("tcp",)))

    run(main())


# --- bulk ---


@pytest.mark.parametrize("size_bytes", [1, 300_000, MAX_BULK_BYTES])
def test_source_and_sink(run, size_bytes):
    async def main():
        async with pair() as (client, _, _, there):
            answered = await client.streams.call(there, SOURCE, Source(size_bytes), deadline=soon())
            sunk = await client.streams.call(there, SINK, None, [bytes(size_bytes)], deadline=soon())
            return answered, sunk

    answered, sunk = run(main())
    assert sum(map(len, answered.buffers)) == size_bytes
    assert sunk.payload is None
    assert list(sunk.buffers) == []


def test_bulk_is_bounded(run):
    async def main():
        async with pair() as (client, _, _, there):
            for size_bytes in (0, MAX_BULK_BYTES + 1, -5):
                with pytest.raises(PeerRefused):
                    await client.streams.call(there, SOURCE, {"size_bytes": size_bytes}, deadline=soon())
            with pytest.raises(PeerRefused, match="at once"):
                await client.streams.call(there, SINK, None, [bytes(MAX_BULK_BYTES + 1)], deadline=soon())

    run(main())


# --- reading answers ---


@pytest.mark.parametrize("payload", [None, [], {"software": 3}, {"software": "1", "protocol": 1}])
def test_an_answer_that_is_none(payload):
    with pytest.raises(ProtocolError, match=ABOUT):
        read_answer(Reply(payload), Introduction, ABOUT)


PEER = Peer(Address("10.0.0.7", 7))


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (unreachable(PEER, ConnectionRefusedError(111, "refused")), "refused"),
        (unreachable(PEER, OSError(113, "No route to host")), "unreachable"),
        (unreachable(PEER, socket.gaierror(-2, "Name or service not known")), "unknown host"),
        (unreachable(PEER, ValueError("label too long")), "unknown host"),
        (DeadlineExceeded("late"), "silent"),
        (VersionMismatch("other"), "other version"),
        (PeerLost("gone"), "failed"),
        (ZeroDivisionError(), "failed"),
    ],
)
def test_kinds_of_failure(error, outcome):
    assert outcome_of(error) == outcome
