"""The stream transport on real sockets: dialing, reuse, restarts, threads, forks and ends."""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    LoopThread,
    Peer,
    PeerBusy,
    PeerError,
    PeerId,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    ShoalError,
    UsageError,
    VersionMismatch,
    fork,
    run_virtual,
)
from shoal.transport import Limits, MemoryNetwork, Reply, StreamTransport
from shoal.transport.frames import FrameKind, GoodbyeHead, encode, frame
from shoal.transport.messages import CONNECTION_ENDED
from shoal.transport.network import sockets as network
from shoal.transport.streams import transport as shard
from shoal.transport.streams import transport as stream
from transport.wire import LOOPBACK, hello, open_descriptors, parse, resident_bytes, soon, until

IDS = PeerId(bytes(20)), PeerId(bytes(range(20)))


async def echo(head, buffers):
    return Reply(head.payload, buffers)


async def sit(head, buffers):
    await asyncio.Event().wait()


async def talk(head, channel):
    async for item in channel:
        await channel.send(item.payload)
    return Reply("done")


def serving(**settings):
    transport = StreamTransport(**settings)
    transport.handle("echo", echo)
    transport.handle("now", lambda head, buffers: Reply(head.payload, buffers))
    transport.handle("sit", sit)
    transport.handle("thread", lambda head, buffers: Reply(threading.get_ident()))
    transport.handle_channel("talk", talk)
    return transport


@contextlib.asynccontextmanager
async def pair(server_settings=None, client_settings=None, address=LOOPBACK):
    async with serving(**(server_settings or {})) as server, serving(**(client_settings or {})) as client:
        yield server, client, Peer(await server.listen(address))


@pytest.fixture
def _look_often(monkeypatch):
    monkeypatch.setattr(shard, "SWEEP_S", 0.05)


# --- dialing ---


@pytest.mark.parametrize("run", ["uvloop", "asyncio"], indirect=True)
def test_first_calls_share_one_dial_and_later_ones_the_connection(run):
    async def check():
        async with pair() as (server, client, peer):
            targets = [peer, peer.address]
            await asyncio.gather(
                *(client.call(targets[n % 2], "echo", n, deadline=soon()) for n in range(50))
            )
            assert client.num_connections == server.num_connections == 1
            for number in range(20):
                await client.call(peer, "echo", number, deadline=soon())
            assert client.num_connections == server.num_connections == 1

    run(check())


def test_a_port_where_nobody_listens(run):
    async def check():
        with socket.socket() as taken:  # bound and not listening: nobody else gets the port meanwhile
            taken.bind(("127.0.0.1", 0))
            address = Address(*taken.getsockname())
            async with serving() as client:
                with pytest.raises(
                    PeerUnreachable, match=rf"(?s)Cannot connect.*{address.port}.*nothing listens"
                ):
                    await client.call(address, "echo", deadline=soon())
                assert client.num_connections == 0

    run(check())


def test_calls_that_failed_keep_nothing_of_their_callers(run):
    """Tracebacks have the callers' frames: a cycle would keep all that those hold, often for minutes."""

    class Held:
        pass

    async def fail(transport, target):
        held = Held()
        kept = weakref.ref(held)
        with contextlib.suppress(ShoalError):
            await through(transport, target, held)
        return kept

    async def through(transport, target, held):
        how = transport.call if isinstance(target, Address) else transport.call_over
        await how(target, "no such method", deadline=Deadline.after(10))

    async def main():
        async with StreamTransport() as server, StreamTransport() as client:
            there = await server.listen(LOOPBACK)
            with socket.socket() as reserved:
                reserved.bind(("127.0.0.1", 0))
                nowhere = Address(*reserved.getsockname())
                gc.collect()
                gc.disable()
                try:
                    kept = [await fail(client, target) for target in (nowhere, there)]
                    (connection,) = client._dialed.values()  # as those have it that a relay has told of one
                    kept.append(await fail(client, connection))
                    await asyncio.sleep(0.05)
                    assert [one() for one in kept] == [None, None, None]
                finally:
                    gc.enable()

    run(main())


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70 + ".invalid", "bad\0name", "ü" * 80])
def test_a_name_that_nobody_knows_concerns_its_caller_alone(run, host):
    async def check():
        async with pair() as (_, client, peer):
            with pytest.raises(PeerUnreachable, match=r"(?s)Cannot connect.*is not known here"):
                await client.call(Address(host, 9), "echo", deadline=soon())
            async with StreamTransport(is_insecure=True) as open_to_all:
                with pytest.raises(UsageError, match="Cannot listen"):
                    await open_to_all.listen(Address(host, 9))
            assert (await client.call(peer, "echo", 1, deadline=soon())).payload == 1

    run(check())


def test_whoever_listens_and_says_nothing(run):
    async def check():
        with socket.create_server(("127.0.0.1", 0)) as mute:
            address = Address(*mute.getsockname())
            async with serving(limits=Limits(handshake_s=0.3)) as client:
                with pytest.raises(DeadlineExceeded, match="No connection"):
                    await client.call(address, "echo", deadline=Deadline.after(0.1))
                with pytest.raises(DeadlineExceeded, match="No connection"):
                    await client.call(address, "echo", deadline=soon())
                await until(lambda: client.num_connections == 0)

    run(check())


def test_whoever_speaks_something_else(run):
    async def check():
        async def answer(reader, writer):
            writer.write(answers.pop())
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()

        newer = frame(FrameKind.HELLO, 0, b"")[:2] + bytes([9]) + frame(FrameKind.HELLO, 0, b"")[3:]
        goodbye = frame(FrameKind.GOODBYE, 0, encode(GoodbyeHead("version", "version 9 here", 0)))
        answers = [b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n", newer, goodbye]
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        address = Address(*server.sockets[0].getsockname())
        async with server, serving() as client:
            for error, match in (
                (VersionMismatch, "another version"),
                (VersionMismatch, "version 9"),
                (ShoalError, "does not speak Shoal"),
            ):
                with pytest.raises(error, match=match):
                    await client.call(address, "echo", deadline=soon())
            await until(lambda: client.num_connections == 0)

    run(check())


def test_the_peer_must_be_the_one_that_was_meant(run):
    async def check():
        async with pair({"peer_id": IDS[0]}) as (server, client, peer):
            await client.call(Peer(peer.address, IDS[0]), "echo", deadline=soon())
            with pytest.raises(PeerRefused, match=r"(?s)is 00000000, not 00010203.*look the peer up"):
                await client.call(Peer(peer.address, IDS[1]), "echo", deadline=soon())
            await until(lambda: server.num_connections == client.num_connections == 1)

    run(check())


def test_a_port_in_use(run):
    async def check():
        async with pair() as (_, client, peer):
            with pytest.raises(UsageError, match=r"(?s)Cannot listen on 127.0.0.1.*another program.*or 0"):
                await client.listen(peer.address)
            async with StreamTransport(is_insecure=True) as open_to_all:
                with pytest.raises(UsageError, match="Cannot listen"):
                    await open_to_all.listen(Address("192.0.2.1", 0))

    run(check())


def test_a_full_server_says_busy(run):
    async def check():
        async with pair({"limits": Limits(max_connections=1)}) as (_, client, peer), serving() as other:
            await client.call(peer, "echo", deadline=soon())
            with pytest.raises((PeerBusy, PeerLost)):
                await other.call(peer, "echo", deadline=soon())
            assert (await client.call(peer, "echo", 2, deadline=soon())).payload == 2

    run(check())


def test_dialed_connections_take_no_places_of_accepted_ones(run):
    async def check():
        async with pair({"limits": Limits(max_connections=1)}) as (server, client, peer), serving() as third:
            await server.call(Peer(await third.listen(LOOPBACK)), "echo", deadline=soon())
            assert (await client.call(peer, "echo", 2, deadline=soon())).payload == 2

    run(check())


# --- connections that end, and calls that come after ---


@pytest.mark.usefixtures("_look_often")
def test_an_idle_connection_is_closed_and_made_again(run):
    async def check():
        async with pair(client_settings={"limits": Limits(idle_s=0.1)}) as (server, client, peer):
            for number in range(3):
                assert (await client.call(peer, "echo", number, deadline=soon())).payload == number
                await until(lambda: server.num_connections == client.num_connections == 0)

    run(check())


def test_a_server_that_restarts_on_its_port(run):
    async def check():
        async with serving() as client:
            address = LOOPBACK
            for number in range(4):
                async with serving() as server:
                    address = await server.listen(address)
                    reply = await client.call(address, "echo", number, deadline=soon())
                    assert reply.payload == number
            with pytest.raises((PeerUnreachable, PeerLost)):
                await client.call(address, "echo", deadline=soon())

    run(check())


@pytest.mark.parametrize("how", ["call", "notify", "channel"])
def test_a_goodbye_between_two_calls_is_not_noticed(run, how):
    """The server leaves the connection while a request is on its way: the call goes to the next one."""

    async def check():
        async with pair() as (server, client, peer):
            seen = []
            server.handle("note", lambda head, buffers: seen.append(head.payload))
            for number in range(10):
                await client.call(peer, "now", deadline=soon())
                (accepted,) = server._shards[0].connections
                accepted.leave("making room.")  # the client does not know it yet
                if how == "call":
                    assert (await client.call(peer, "echo", number, deadline=soon())).payload == number
                elif how == "notify":
                    await client.notify(peer, "note", number, [bytes(100_000)], deadline=soon())
                else:
                    await asyncio.sleep(0.01)
                    async with client.open_channel(peer, "talk", deadline=soon()) as channel:
                        await channel.send(number)
                        assert (await channel.receive()).payload == number
                await until(lambda: server.num_connections == 1)
            if how == "notify":
                await until(lambda: seen == list(range(10)))

    run(check())


def test_a_channel_that_was_not_looked_at_ends_with_an_error_of_ours(run):
    async def check():
        async with pair() as (server, client, peer):
            await client.call(peer, "now", deadline=soon())
            (accepted,) = server._shards[0].connections
            accepted.leave("making room.")
            async with client.open_channel(peer, "talk", deadline=soon()) as channel:
                with pytest.raises(PeerLost, match=r"talk at .*making room"):
                    await channel.receive()
                with pytest.raises(PeerLost):
                    await channel.send(1)
                with pytest.raises(PeerLost):
                    await channel.result()
            async with client.open_channel(peer, "talk", deadline=soon()) as channel:
                await channel.send(1)
                assert (await channel.receive()).payload == 1

    run(check())


def test_a_channel_outlives_neither_its_block_nor_its_handler(run):
    async def check():
        async with pair() as (server, client, peer):
            async with client.open_channel(peer, "talk", deadline=soon()) as channel:
                receiving = asyncio.ensure_future(channel.receive())
                await asyncio.sleep(0)
                for bad in (object(), "\ud800", "x" * 2_000_000):
                    with pytest.raises(UsageError, match="payload"):
                        await channel.send(bad)
                with pytest.raises(UsageError, match="buffer"):
                    await channel.send(None, ["text"])
            assert await receiving is None
            with pytest.raises(UsageError, match="over"):
                await channel.send(1)
            await until(lambda: server.num_calls == client.num_calls == 0)

    run(check())


def test_a_connection_that_breaks_is_replaced(run):
    async def check():
        async with pair() as (server, client, peer):
            for number in range(5):
                call = asyncio.ensure_future(client.call(peer, "sit", deadline=soon()))
                await until(lambda: server.num_calls == 1)
                (accepted,) = server._shards[0].connections
                accepted.abort()
                with pytest.raises(PeerLost, match=rf"sit at {peer.address}"):
                    await call
                assert (await client.call(peer, "echo", number, deadline=soon())).payload == number
            assert client.num_calls == 0

    run(check())


def test_one_peer_can_be_cut_off(run):
    async def check():
        async with pair({"peer_id": IDS[0]}, {"peer_id": IDS[1]}) as (server, client, peer):
            call = asyncio.ensure_future(client.call(peer, "sit", deadline=soon()))
            await until(lambda: server.num_calls == 1)
            server.cut_off(IDS[0])
            await client.call(peer, "echo", deadline=soon())
            assert not call.done(), "that was somebody else"
            server.cut_off(IDS[1])
            with pytest.raises(PeerLost, match="sit at"):
                await call
            await until(lambda: server.num_connections == 0)
            assert (await client.call(peer, "echo", 1, deadline=soon())).payload == 1

    run(check())


# --- threads ---


def test_helpers_share_the_connections(run):
    async def check():
        with LoopThread("one") as one, LoopThread("two") as two:
            async with (
                pair({"helpers": [one, two]}) as (server, client, peer),
                serving() as b,
                serving() as c,
                serving() as d,
            ):
                clients = [client, b, c, d]
                threads = [(await a.call(peer, "thread", deadline=soon())).payload for a in clients]
                assert len(set(threads)) == 3
                assert threading.get_ident() in threads
                assert server.num_connections == 4
                calls = [
                    a.call(peer, "echo", n, [bytes(200_000)], deadline=soon())
                    for n in range(10)
                    for a in clients
                ]
                await asyncio.gather(*calls)
                await until(lambda: server.budget.used_bytes == 0)
            assert server.num_connections == 0

    run(check())


def test_helpers_share_the_bytes_in_flight(run):
    async def check():
        limits = Limits(max_message_bytes=1 << 20, max_bytes_in_flight=2 << 20)
        with LoopThread("one") as one, LoopThread("two") as two:
            async with pair({"helpers": [one, two], "limits": limits}) as (server, client, peer):
                async with serving() as b, serving() as c:
                    data = bytes(1 << 20)
                    calls = [
                        a.call(peer, "echo", n, [data], deadline=soon())
                        for n in range(8)
                        for a in (client, b, c)
                    ]
                    assert len(await asyncio.gather(*calls)) == 24
                    await until(lambda: server.budget.used_bytes == 0 and server.num_calls == 0)

    run(check())


def test_many_connections_come_and_go_on_several_threads(run):
    async def check():
        limits = Limits(max_connections=8)
        with LoopThread("one") as one, LoopThread("two") as two:
            async with pair({"helpers": [one, two], "limits": limits}) as (server, client, peer):
                await client.call(peer, "now", deadline=soon())

                def knock():
                    for _ in range(150):
                        with (
                            contextlib.suppress(OSError),
                            socket.create_connection((peer.address.host, peer.address.port), 5) as knocker,
                        ):
                            knocker.sendall(hello()[: os.getpid() % 20])

                await asyncio.gather(*(asyncio.to_thread(knock) for _ in range(4)))
                await until(lambda: server.num_connections == 1)
                await until(lambda: server.places.used_bytes == 1)
                assert (await client.call(peer, "now", 5, deadline=soon())).payload == 5

    run(check())


def test_a_helper_that_was_closed_too_early_does_not_keep_the_rest_open(run, caplog):
    async def check():
        helper = LoopThread("helper")
        helper.__enter__()
        before = open_descriptors()
        server = serving(helpers=[helper])
        await server.__aenter__()
        await server.listen(LOOPBACK)
        helper.__exit__(None, None, None)
        with pytest.raises(UsageError, match="not open"):
            await server.__aexit__(None, None, None)
        assert open_descriptors() <= before

    run(check())


# --- closing ---


def test_closing_ends_calls_under_way_at_once(run):
    async def check():
        async with serving() as client:
            server = serving()
            await server.__aenter__()
            peer = Peer(await server.listen(LOOPBACK))
            calls = [
                asyncio.ensure_future(client.call(peer, "sit", n, [bytes(100_000)], deadline=soon()))
                for n in range(20)
            ]
            calls.append(
                asyncio.ensure_future(client.call(peer, "echo", 0, [bytes(64 << 20)], deadline=soon()))
            )
            await until(lambda: server.num_calls >= 20)
            began_s = time.monotonic()
            await server.__aexit__(None, None, None)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert time.monotonic() - began_s < 2
            assert {type(outcome) for outcome in outcomes[:20]} == {PeerLost}
            await until(lambda: client.num_calls == client.num_connections == 0)
            assert server.num_connections == server.num_calls == server.budget.used_bytes == 0

    run(check())


def test_closing_while_dialing_is_told_as_an_error_of_ours(run):
    async def check():
        with socket.create_server(("127.0.0.1", 0)) as mute:
            client = serving()
            await client.__aenter__()
            address = Address(*mute.getsockname())
            calls = [asyncio.ensure_future(client.call(address, "echo", deadline=soon())) for _ in range(3)]
            await until(lambda: client.num_connections == 1)
            await client.__aexit__(None, None, None)
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {PeerLost}
            assert client.num_connections == 0

    run(check())


def test_a_caller_cancelled_while_dialing_is_cancelled(run):
    async def check():
        with socket.create_server(("127.0.0.1", 0)) as mute:
            async with serving(limits=Limits(handshake_s=0.3)) as client:
                address = Address(*mute.getsockname())
                call = asyncio.ensure_future(client.call(address, "echo", deadline=soon()))
                await until(lambda: client.num_connections == 1)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                await until(lambda: client.num_connections == 0)

    run(check())


def test_a_transport_may_be_opened_again_and_not_twice(run):
    async def check():
        transport = serving()
        with pytest.raises(UsageError, match="not open"):
            await transport.listen(LOOPBACK)
        async with serving() as client:
            for number in range(3):
                async with transport:
                    with pytest.raises(UsageError, match="open already"):
                        await transport.__aenter__()
                    address = await transport.listen(LOOPBACK)
                    assert (await client.call(address, "echo", number, deadline=soon())).payload == number
                with pytest.raises(UsageError, match="not open"):
                    await transport.call(address, "echo", deadline=soon())

    run(check())


def test_nothing_is_left_open(run):
    async def check():
        gc.collect()
        await asyncio.to_thread(int)
        async with pair() as (_, client, peer):  # what the loop itself opens on first use
            await client.call(peer, "echo", deadline=soon())
        before = open_descriptors()
        for _ in range(20):
            async with pair() as (_, client, peer):
                await client.call(peer, "echo", None, [bytes(100_000)], deadline=soon())
        await until(lambda: open_descriptors() <= before)
        assert fork._descriptors == {}

    run(check())


def test_accepting_goes_on_after_it_ran_out_of_descriptors(run, monkeypatch, caplog):
    async def check():
        loop = asyncio.get_running_loop()
        problems = [ConnectionAbortedError(), OSError(errno.EMFILE, "Too many open files")]

        class TroubledLoop:
            async def sock_accept(self, listener):
                if problems:
                    raise problems.pop()
                return await loop.sock_accept(listener)

        async with serving() as server, serving() as client:
            with monkeypatch.context() as patch:
                patch.setattr(stream, "SWEEP_S", 0.01)
                listener = await server.network.listen(LOOPBACK)
                patch.setattr(network.asyncio, "get_running_loop", TroubledLoop)
                accepting = loop.create_task(server._accept(listener))
                await until(lambda: not problems)
            assert (await client.call(listener.address, "echo", 1, deadline=soon())).payload == 1
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)

    run(check())
    assert "cannot accept connections right now" in caplog.text


# --- failures in numbers ---


def test_thousands_of_failed_calls_leave_nothing(run, caplog):
    caplog.set_level(logging.CRITICAL)

    async def check():
        async with pair() as (server, client, peer):

            async def fail(number):
                kind = number % 4
                if kind == 0:
                    await client.call(peer, "nothing of the kind", deadline=soon())
                elif kind == 1:
                    await client.call(peer, "sit", None, [bytes(1000)], deadline=Deadline.after(0.001))
                elif kind == 2:
                    async with asyncio.timeout(0.001):
                        await client.call(peer, "sit", None, [bytes(100_000)], deadline=soon())
                else:
                    await client.call(peer, "echo", object(), deadline=soon())

            async def round_of_failures(count):
                for start in range(0, count, 100):
                    outcomes = await asyncio.gather(
                        *(fail(n) for n in range(start, start + 100)), return_exceptions=True
                    )
                    assert all(isinstance(outcome, (ShoalError, TimeoutError)) for outcome in outcomes)
                await until(lambda: server.num_calls == client.num_calls == 0)
                await until(lambda: server.budget.used_bytes == 0)

            await round_of_failures(2000)
            before = open_descriptors(), resident_bytes(), len(gc.get_objects())
            await round_of_failures(8000)
            assert open_descriptors() <= before[0]
            assert resident_bytes() - before[1] < 16 << 20
            assert len(gc.get_objects()) - before[2] < 2000
            assert server.num_connections == client.num_connections == 1

    run(check())


def test_thousands_of_failed_dials_leave_nothing(run):
    async def check():
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            address = Address(*taken.getsockname())
            async with serving() as client:
                before = open_descriptors(), 0
                for number in range(1000):
                    if number == 200:
                        before = open_descriptors(), len(gc.get_objects())
                    with pytest.raises(PeerError):
                        await client.call(address, "echo", deadline=soon())
                gc.collect()
                assert open_descriptors() <= before[0]
                assert len(gc.get_objects()) - before[1] < 2000
                assert client.num_connections == 0

    run(check())


# --- forks ---

FORKING = """
    import asyncio, os, signal, sys, time
    from shoal.core import Address, Deadline
    from shoal.transport import StreamTransport

    async def main():
        async with StreamTransport() as transport:
            mine = await transport.listen(Address("127.0.0.1", 0))
            await transport.call(Address.parse(sys.argv[1]), "now", deadline=Deadline.after(20))
            child = os.fork()
            if child == 0:
                time.sleep(20)  # as a data loader's worker that nobody told of the end
                os._exit(0)
            print(mine.port, child, flush=True)
            os._exit(0)

    asyncio.run(main())
"""


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", port), 2).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_forked_child_does_not_keep_its_parents_connections(run):
    async def check():
        async with serving() as server:
            address = await server.listen(LOOPBACK)
            script = subprocess.Popen(  # noqa: ASYNC220 - it starts in no time
                [sys.executable, "-c", textwrap.dedent(FORKING), str(address)],
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                line = await asyncio.to_thread(script.stdout.readline)
                port, child = map(int, line.split())
                ended_s = time.monotonic()
                os.kill(child, 0)  # it lives
                await until(lambda: server.num_connections == 0, 2)
                assert time.monotonic() - ended_s < 1.5
                await until(lambda: not listens(port), 2)  # nor does it listen
                os.kill(child, 0)
                os.kill(child, 9)
            finally:
                script.stdout.close()
                await asyncio.to_thread(script.wait)

    run(check())


def test_a_refusal_is_a_whole_frame(run):
    async def check():
        async with pair({"limits": Limits(max_connections=1)}) as (_, client, peer):
            await client.call(peer, "now", deadline=soon())

            def knock():
                with socket.create_connection((peer.address.host, peer.address.port), 5) as knocker:
                    return knocker.recv(4096)

            ((kind, _, head, _),) = parse(await asyncio.to_thread(knock))
            assert kind is FrameKind.GOODBYE
            assert b"all 1 connections" in head

    run(check())


@pytest.mark.parametrize("ends", ["connection", "call"])
def test_a_handler_learns_whether_its_caller_has_gone_or_only_ended_its_call(ends):
    async def check():
        started, reasons = asyncio.Event(), []

        async def serve(head, buffers):
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as cancelled:
                reasons.append(cancelled.args)
                raise

        network = MemoryNetwork()
        async with (
            StreamTransport(network=network.host("server"), peer_id=IDS[0]) as server,
            StreamTransport(network=network.host("client"), peer_id=IDS[1]) as client,
        ):
            server.handle("sit", serve)
            peer = Peer(await server.listen(Address("server", 0)))
            call = asyncio.ensure_future(client.call(peer, "sit", deadline=soon()))
            await started.wait()
            if ends == "call":
                call.cancel()
            else:
                network.host("client").kill()
            await asyncio.gather(call, return_exceptions=True)
            await until(lambda: reasons)
        assert reasons == [(CONNECTION_ENDED,) if ends == "connection" else ()]

    run_virtual(check())
