"""Calls over UDP: on real sockets, and on a network that loses, repeats and reorders packets."""

import asyncio
import contextlib
import random

import pytest

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    LimitExceeded,
    Peer,
    PeerBusy,
    PeerId,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    ProtocolError,
    RemoteFailure,
    UsageError,
    VersionMismatch,
)
from shoal.transport import Limits, Reply, StreamTransport
from shoal.transport.datagrams import wire
from shoal.transport.datagrams.transport import WINDOW, DatagramTransport
from shoal.transport.datagrams.wire import MAX_PACKET_BYTES, PacketKind
from shoal.transport.frames import encode
from shoal.transport.memory import ALIGNMENT_BYTES, aligned_memory
from transport.lossy import Air, open_on, run_virtual
from transport.members import Swarm
from transport.wire import LOOPBACK, soon, until


class Probe:
    """Handlers of a test, and what they saw."""

    def __init__(self):
        self.seen, self.num_sent, self.num_cancelled = [], 0, 0
        self.gate = asyncio.Event()

    def register(self, transport):
        transport.handle("echo", self.echo)
        transport.handle("echo now", self.echo_now)
        transport.handle("make", lambda head, buffers: Reply(None, [bytes(head.payload)]))
        transport.handle("text", lambda head, buffers: Reply("x" * head.payload))
        transport.handle("block", self.block)
        transport.handle("nap", self.nap)
        transport.handle("fail", self.fail)
        transport.handle("typed", self.echo_now, payload_type=dict[str, int])
        transport.handle("who", lambda head, buffers: Reply([str(head.peer), head.deadline.remaining_s]))

    def on_sent(self):
        self.num_sent += 1

    def echo_now(self, head, buffers):
        self.seen.append(head.payload)
        return Reply(head.payload, buffers, on_sent=self.on_sent)

    async def echo(self, head, buffers):
        self.seen.append(head.payload)
        return Reply(head.payload, buffers, on_sent=self.on_sent)

    async def block(self, head, buffers):
        self.seen.append(head.payload)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return Reply("opened")

    async def nap(self, head, buffers):
        self.seen.append(head.payload)
        await asyncio.sleep(head.payload)
        return Reply("awake")

    async def fail(self, head, buffers):
        raise ZeroDivisionError("a handler's own mistake")


@contextlib.asynccontextmanager
async def real_pair(probe, *, is_sealed=True, host="127.0.0.1", limits=None, has_streams=False):
    """A server and a client on loopback sockets."""
    swarm = Swarm()
    async with contextlib.AsyncExitStack() as stack:
        sides = []
        for _ in range(2):
            membership = swarm.member() if is_sealed else None
            streams = None
            if has_streams:
                streams = await stack.enter_async_context(StreamTransport(membership=membership))
            sides.append(
                await stack.enter_async_context(
                    DatagramTransport(membership=membership, limits=limits, streams=streams)
                )
            )
        server, client = sides
        probe.register(server)
        address = await server.listen(Address(host, 0))
        if has_streams:
            await server.streams.listen(address)
        yield server, client, Peer(address)


@pytest.mark.parametrize("run", ["uvloop", "asyncio"], indirect=True)
@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_calls_on_real_sockets(run, is_sealed, host):
    async def check():
        probe = Probe()
        async with real_pair(probe, is_sealed=is_sealed, host=host) as (server, client, peer):
            for payload in (None, 1, "ü", b"\0" * 100, [1, {"a": None}]):
                for method in ("echo", "echo now"):
                    reply = await client.call(peer, method, payload, deadline=soon())
                    assert reply.payload == payload
            assert server.num_calls == client.num_calls == 0
            assert server.budget.used_bytes == 0
            # one hello, ten requests, and what a busy machine was too slow to answer
            assert client.stats.packets_out - client.stats.resent <= 11 + client.num_sessions

    run(check())


def test_the_handler_is_told_who_asks_and_until_when(run):
    async def check():
        async with real_pair(Probe()) as (_, client, peer):
            who, remaining_s = (await client.call(peer, "who", deadline=soon(3))).payload
            assert who.startswith(client.peer_id.short)
            assert 2 < remaining_s <= 3
            who, remaining_s = (await client.call(peer, "who", deadline=Deadline.never())).payload
            assert remaining_s == float("inf")

    run(check())


def test_many_at_once_share_packets_and_keep_to_the_window(run):
    async def check():
        probe = Probe()
        async with real_pair(probe) as (server, client, peer):
            await client.call(peer, "echo now", 0, deadline=soon())
            calls = [client.call(peer, "echo now", number, deadline=soon()) for number in range(1, 1000)]
            replies = await asyncio.gather(*calls)
            assert [reply.payload for reply in replies] == list(range(1, 1000))
            assert list(dict.fromkeys(probe.seen)) == list(range(1000))  # in order of asking
            assert client.stats.packets_out < 200
            assert client.num_sessions == server.num_sessions == 1

    run(check())


def test_buffers_travel_inside_and_arrive_aligned(run):
    async def check():
        probe = Probe()
        async with real_pair(probe) as (_, client, peer):
            sent = [b"", b"abc", bytes(range(200)), b"x" * 64]
            reply = await client.call(peer, "echo", "p", sent, deadline=soon())
            assert [bytes(view) for view in reply.buffers] == sent
            assert all(_address(view) % ALIGNMENT_BYTES == 0 for view in reply.buffers if len(view))
            into = [bytearray(len(buffer)) for buffer in sent]
            await client.call(peer, "echo", None, sent, deadline=soon(), into=into)
            assert [bytes(buffer) for buffer in into] == sent
            memory = aligned_memory(100)
            heads = []
            reply = await client.call(
                peer, "make", 30, deadline=soon(), into=lambda head: heads.append(head) or [memory[:30]]
            )
            assert (heads[0].method, list(heads[0].sizes)) == ("make", [30])
            with pytest.raises(Exception, match="30 bytes"):
                await client.call(peer, "make", 30, deadline=soon(), into=[bytearray(29)])
            with pytest.raises(UsageError, match="read-only"):
                await client.call(peer, "make", 3, deadline=soon(), into=[b"abc"])
            assert probe.num_sent == 2

    run(check())


def _address(view):
    import numpy as np

    return np.frombuffer(view, np.uint8).__array_interface__["data"][0]


def test_errors_reach_the_caller(run, caplog):
    async def check():
        probe = Probe()
        async with real_pair(probe) as (server, client, peer):
            with pytest.raises(RemoteFailure, match="ZeroDivisionError: a handler's own mistake"):
                await client.call(peer, "fail", deadline=soon())
            with pytest.raises(PeerRefused, match=r"no method 'ecko'\. Did you mean 'echo'"):
                await client.call(peer, "ecko", deadline=soon())
            with pytest.raises(PeerRefused, match="payload of typed"):
                await client.call(peer, "typed", ["no dict"], deadline=soon())
            with pytest.raises(UsageError, match="payload"):
                await client.call(peer, "echo", object(), deadline=soon())
            with pytest.raises(DeadlineExceeded, match="before it was sent"):
                await client.call(peer, "echo", deadline=Deadline.after(-1))
            with pytest.raises(PeerUnreachable, match="connect"):
                await client.call(Peer(Address("no such host.invalid", 1)), "echo", deadline=soon())
            with pytest.raises(UsageError, match="no channels"):
                client.open_channel(peer, "echo", deadline=soon())
            assert server.num_calls == client.num_calls == 0
        with pytest.raises(UsageError, match="not open"):
            await client.call(peer, "echo", deadline=soon())

    run(check())
    assert "ZeroDivisionError" in caplog.text


def test_without_streams_what_is_too_large_says_so(run):
    async def check():
        async with real_pair(Probe()) as (_, client, peer):
            with pytest.raises(LimitExceeded, match="no streams"):
                await client.call(peer, "echo", "x" * 1200, deadline=soon())
            with pytest.raises(LimitExceeded, match="no streams"):
                await client.notify(peer, "echo", None, [bytes(1200)], deadline=soon())
            with pytest.raises(PeerRefused, match=r"(?s)20,000 bytes.*datagrams alone"):
                await client.call(peer, "make", 20_000, deadline=soon())
            assert len((await client.call(peer, "make", 8000, deadline=soon())).buffers[0]) == 8000

    run(check())


@pytest.mark.parametrize("is_sealed", [True, False])
def test_with_streams_size_does_not_matter(run, is_sealed):
    async def check():
        probe = Probe()
        async with real_pair(probe, is_sealed=is_sealed, has_streams=True) as (server, client, peer):
            large = random.Random(1).randbytes(100_000)
            reply = await client.call(peer, "echo", "p", [large], deadline=soon())
            assert bytes(reply.buffers[0]) == large
            assert client.num_sessions == 0  # no greeting for what cannot go that way

            def double(head, buffers):
                probe.seen.append("double")
                return Reply([1], [buffers[0]] * 100, on_sent=probe.on_sent)

            server.handle("double", double)
            methods = []

            def pick(head):
                methods.append(head.method)
                return [bytearray(size) for size in head.sizes]

            before = probe.num_sent
            reply = await client.call(peer, "double", None, [large[:1000]], deadline=soon(), into=pick)
            assert reply.payload == [1]
            assert all(bytes(buffer) == large[:1000] for buffer in reply.buffers)
            assert len(reply.buffers) == 100
            assert methods == ["double"]
            # once for a datagram, which it does not fit into, and once over the stream: both give memory back
            await until(lambda: probe.num_sent == before + 2)
            assert probe.seen.count("double") == 2
            assert len((await client.call(peer, "text", 50_000, deadline=soon())).payload) == 50_000
            await client.notify(peer, "echo", "told", [large], deadline=soon())
            await until(lambda: "told" in probe.seen)
            await until(lambda: server.num_calls == client.num_calls == 0)

    run(check())


def test_one_way_calls(run):
    async def check():
        probe = Probe()
        async with real_pair(probe) as (server, client, peer):
            await client.notify(peer, "block", 1, [b"small"], deadline=soon())
            await client.notify(peer, "no such method", 2, deadline=soon())
            await client.notify(peer, "echo now", 3, deadline=soon())
            await until(lambda: 3 in probe.seen and client.num_calls == 0)
            assert server.num_calls == 1  # its handler is still at it
            probe.gate.set()
            await until(lambda: server.num_calls == 0)
            assert server.budget.used_bytes == 0
            assert probe.num_cancelled == 0

    run(check())


def test_a_deadline_ends_the_call_on_both_sides(run):
    async def check():
        probe = Probe()
        async with real_pair(probe) as (server, client, peer):
            with pytest.raises(DeadlineExceeded, match="block"):
                await client.call(peer, "block", 1, deadline=Deadline.after(0.15))
            await until(lambda: probe.num_cancelled == 1)
            await until(lambda: server.num_calls == 0 and server.budget.used_bytes == 0)
            assert (await client.call(peer, "echo", 2, deadline=soon())).payload == 2

    run(check())


def test_a_cancelled_call_is_cancelled_there_too(run):
    async def check():
        probe = Probe()
        async with real_pair(probe) as (server, client, peer):
            call = asyncio.ensure_future(client.call(peer, "block", 1, deadline=soon()))
            await until(lambda: probe.seen)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until(lambda: probe.num_cancelled == 1 and server.num_calls == 0)

    run(check())


@pytest.mark.parametrize("who_goes", ["client", "server"])
def test_who_goes_tells_the_other(run, who_goes):
    async def check():
        probe = Probe()
        async with real_pair(probe) as (server, client, peer):
            calls = [asyncio.ensure_future(client.call(peer, "block", n, deadline=soon())) for n in range(3)]
            await until(lambda: server.num_calls == 3)
            await (server if who_goes == "server" else client).__aexit__(None, None, None)
            for call in calls:
                with pytest.raises(PeerLost, match=f"block at .*{peer.address.port}"):
                    await call
            await until(lambda: probe.num_cancelled == 3 and server.budget.used_bytes == 0)
            if who_goes == "client":
                await until(lambda: server.num_sessions == 0)

    run(check())


def test_the_places_that_the_server_has_are_kept_to(run):
    async def check():
        probe = Probe()
        async with real_pair(probe, limits=Limits(max_calls=4)) as (server, client, peer):
            calls = [asyncio.ensure_future(client.call(peer, "block", n, deadline=soon())) for n in range(20)]
            await until(lambda: server.num_calls == 4)
            with pytest.raises(DeadlineExceeded, match="could not be sent"):
                await client.call(peer, "echo", None, deadline=Deadline.after(0.05))
            assert server.num_calls == 4
            probe.gate.set()
            assert [reply.payload for reply in await asyncio.gather(*calls)] == ["opened"] * 20

    run(check())


def test_a_peer_is_who_it_is_expected_to_be(run):
    async def check():
        async with real_pair(Probe()) as (server, client, peer):
            assert (await client.call(Peer(peer.address, server.peer_id), "echo", 1, deadline=soon())).payload
            stranger = Peer(peer.address, PeerId(bytes(20)))
            with pytest.raises(PeerRefused, match="another peer is expected here"):
                await client.call(stranger, "echo", 1, deadline=soon())

    run(check())


def test_a_peer_met_by_its_address_is_not_greeted_again_by_its_id(run):
    async def check():
        async with real_pair(Probe()) as (server, client, peer):
            await client.call(peer, "echo now", 1, deadline=soon())
            assert client.num_sessions == 1
            await client.call(Peer(peer.address, server.peer_id), "echo now", 2, deadline=soon())
            await client.call(peer, "echo now", 3, deadline=soon())
            assert client.num_sessions == 1
            with pytest.raises(PeerRefused, match="another peer is expected"):
                await client.call(Peer(peer.address, PeerId(bytes(20))), "echo now", 4, deadline=soon())

    run(check())


def test_both_ways_over_the_same_sockets(run):
    async def check():
        probe = Probe()
        async with real_pair(probe) as (server, client, peer):
            probe.register(client)
            back = Peer(await client.listen(LOOPBACK))
            for _ in range(3):
                await client.call(peer, "echo", 1, deadline=soon())
                await server.call(back, "echo", 2, deadline=soon())
            who, _ = (await client.call(peer, "who", deadline=soon())).payload
            assert who == str(Peer(back.address, client.peer_id))

    run(check())


def test_an_address_must_be_free_and_allowed(run):
    async def check():
        async with DatagramTransport() as one, DatagramTransport() as other:
            address = await one.listen(LOOPBACK)
            with pytest.raises(UsageError, match="Cannot listen"):
                await other.listen(address)
            with pytest.raises(UsageError, match="secret"):
                await other.listen(Address("0.0.0.0", 0))
            with pytest.raises(UsageError, match="open already"):
                await one.__aenter__()
        async with DatagramTransport(is_insecure=True) as open_to_all:
            await open_to_all.listen(Address("0.0.0.0", 0))

    run(check())


# --- on networks that misbehave ---


@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_every_call_is_answered_on_a_bad_network(is_sealed, seed):
    async def check():
        air = Air(seed, loss=0.2, duplicate=0.2, delay_s=(0.01, 0.08))
        swarm, probe = Swarm(), Probe()
        options = [{"membership": swarm.member() if is_sealed else None} for _ in range(2)]
        async with (
            open_on(air, "server", handlers=probe.register, **options[0]) as (server, address),
            open_on(air, "client", listen=False, **options[1]) as (client, _),
        ):
            methods = ["echo", "echo now"]
            calls = [
                client.call(address, methods[number % 2], number, deadline=soon(60)) for number in range(400)
            ]
            replies = await asyncio.gather(*calls)
            assert [reply.payload for reply in replies] == list(range(400))
            assert sorted(dict.fromkeys(probe.seen)) == list(range(400))
            assert len(probe.seen) < 800  # again only where an answer was lost, or a request came twice
            assert probe.num_sent == len(probe.seen)
            assert client.stats.resent > 20
            assert server.stats.duplicates > 20 or not is_sealed
            await asyncio.sleep(10)
            assert client.num_calls == server.num_calls == 0
            assert all(len(packet) <= MAX_PACKET_BYTES for _, _, packet in air.packets)

    run_virtual(check())


@pytest.mark.parametrize("seed", range(3))
def test_answers_of_several_datagrams_on_a_bad_network(seed):
    async def check():
        air, probe = Air(seed, loss=0.3, duplicate=0.1, delay_s=(0.01, 0.05)), Probe()
        async with (
            open_on(air, "server", handlers=probe.register) as (_, address),
            open_on(air, "client", listen=False) as (client, _),
        ):
            for size in (1100, 1130, 1160, 2000, 5000, 8700):
                payload = (await client.call(address, "text", size, deadline=soon(60))).payload
                assert payload == "x" * size
            with pytest.raises(PeerRefused, match="more than 8 datagrams"):
                await client.call(address, "text", 9000, deadline=soon(60))
            assert all(len(packet) <= MAX_PACKET_BYTES for _, _, packet in air.packets)

    run_virtual(check())


def test_parts_of_two_answers_are_not_mixed():
    """A call that is served again, since a part of its answer was lost, may be answered otherwise."""

    async def check():
        air, letters = Air(), iter("abc")

        def register(transport):
            transport.handle("letter", lambda head, buffers: Reply(next(letters) * 5000))

        async with (
            open_on(air, "server", handlers=register) as (_, address),
            open_on(air, "client", listen=False) as (client, _),
        ):
            num_large = 0

            def lose_the_third(source, target, packet):
                nonlocal num_large
                num_large += len(packet) > 1000
                return not (len(packet) > 1000 and num_large == 3)

            air.should_pass = lose_the_third
            assert (await client.call(address, "letter", deadline=soon())).payload == "b" * 5000
            assert client.stats.resent == 1

    run_virtual(check())


def test_parts_that_make_up_no_answer_fail_their_call_alone():
    async def check():
        air = Air()

        def register(transport):
            def nonsense(head, buffers):
                session = next(iter(transport.sessions.values()))
                for part in wire.cut(1, b"\xc1" * 3000):  # of the first call; no handler could send it
                    session.queue(part)
                return asyncio.get_running_loop().create_future()

            transport.handle("nonsense", nonsense)
            transport.handle("echo", lambda head, buffers: Reply(head.payload))

        async with (
            open_on(air, "server", handlers=register) as (_, address),
            open_on(air, "client", listen=False) as (client, _),
        ):
            with pytest.raises(ProtocolError, match="nonsense cannot be read"):
                await client.call(address, "nonsense", deadline=soon())
            assert (await client.call(address, "echo", 1, deadline=soon())).payload == 1

    run_virtual(check())


def test_a_slow_handler_is_asked_about_seldom_and_run_once():
    async def check():
        air, probe = Air(), Probe()
        async with (
            open_on(air, "server", handlers=probe.register) as (_, address),
            open_on(air, "client", listen=False) as (client, _),
        ):
            for _ in range(20):
                await client.call(address, "echo", 0, deadline=soon())
            assert (await client.call(address, "nap", 30, deadline=soon(60))).payload == "awake"
            assert probe.seen.count(30) == 1
            assert 2 <= client.stats.resent <= 8

    run_virtual(check())


def test_slow_calls_do_not_block_the_window():
    async def check():
        air, probe = Air(), Probe()
        async with (
            open_on(air, "server", handlers=probe.register) as (_, address),
            open_on(air, "client", listen=False) as (client, _),
        ):
            slow = [
                asyncio.ensure_future(client.call(address, "nap", 20, deadline=soon(60)))
                for _ in range(2 * WINDOW)
            ]
            await asyncio.sleep(2)
            assert client.num_calls == 2 * WINDOW
            assert (await client.call(address, "echo", 1, deadline=soon(1))).payload == 1
            await asyncio.gather(*slow)

    run_virtual(check())


def test_at_most_so_many_requests_are_unanswered_at_once():
    async def check():
        air, probe = Air(delay_s=(0.2, 0.2)), Probe()
        async with (
            open_on(air, "server", handlers=probe.register) as (_, address),
            open_on(air, "client", listen=False) as (client, _),
        ):
            await client.call(address, "echo", 0, deadline=soon())
            calls = [
                asyncio.ensure_future(client.call(address, "echo", n, deadline=soon())) for n in range(200)
            ]
            await asyncio.sleep(0.3)
            assert len(probe.seen) == 1 + WINDOW
            await asyncio.gather(*calls)

    run_virtual(check())


def test_a_peer_that_is_not_there_is_asked_less_and_less_until_the_deadline():
    async def check():
        air = Air()
        async with open_on(air, "client", listen=False) as (client, _):
            with pytest.raises(DeadlineExceeded, match="No connection to nowhere"):
                await client.call(Address("nowhere", 9), "echo", deadline=soon(20))
            assert 5 <= len(air.between("client", "nowhere")) <= 9
            assert client.num_calls == 0
            await asyncio.sleep(30)
            assert client.num_sessions == 0  # nobody waits for it any more

    run_virtual(check())


def test_a_peer_that_falls_silent_is_told_of_at_the_deadline():
    async def check():
        air, probe = Air(), Probe()
        async with (
            open_on(air, "server", handlers=probe.register) as (_, address),
            open_on(air, "client", listen=False) as (client, _),
        ):
            await client.call(address, "echo", 1, deadline=soon())
            air.should_pass = lambda source, target, packet: False
            before = len(air.packets)
            with pytest.raises(DeadlineExceeded, match=r"(?s)asked \d+ times.* 30\.\d s ago"):
                await client.call(address, "echo", 2, deadline=soon(30))
            assert 8 <= len(air.packets) - before <= 20

    run_virtual(check())


def test_nothing_ticks_while_nothing_is_asked():
    async def check():
        air, probe, swarm = Air(), Probe(), Swarm()
        async with (
            open_on(air, "server", handlers=probe.register, membership=swarm.member()) as (_, address),
            open_on(air, "client", listen=False, membership=swarm.member()) as (client, _),
        ):
            await client.call(address, "echo", 1, deadline=soon())
            await asyncio.sleep(10)
            loop = asyncio.get_running_loop()
            assert [timer for timer in loop._timers if not timer[2].cancelled()] == []

    run_virtual(check())


def test_a_peer_that_was_started_again_is_greeted_again():
    async def check():
        air, swarm, probe = Air(), Swarm(), Probe()
        member = swarm.member()
        async with open_on(air, "client", listen=False, membership=swarm.member()) as (client, _):
            async with open_on(air, "server", port=7, handlers=probe.register, membership=member) as (
                _,
                address,
            ):
                await client.call(address, "echo", 1, deadline=soon())
            async with open_on(air, "server", port=7, handlers=probe.register, membership=member):
                calls = [client.call(address, "echo", n, deadline=soon()) for n in range(2, 50)]
                replies = await asyncio.gather(*calls)
                assert [reply.payload for reply in replies] == list(range(2, 50))
            assert probe.seen == list(range(1, 50))

    run_virtual(check())


def test_calls_are_made_again_at_a_peer_that_was_started_again():
    async def check():
        air, probe = Air(), Probe()
        async with open_on(air, "client", listen=False) as (client, _):
            async with open_on(air, "server", port=7, handlers=probe.register) as (_, address):
                running = asyncio.ensure_future(client.call(address, "block", 1, deadline=soon(60)))
                await asyncio.sleep(3)  # it was asked about, and is known to run
                air.should_pass = lambda source, target, packet: (
                    source[0] != "server"
                )  # no answer, no goodbye
                served = asyncio.ensure_future(client.call(address, "echo", 2, deadline=soon(60)))
                await asyncio.sleep(0.25)
            air.should_pass = lambda source, target, packet: True
            probe.gate.set()
            async with open_on(air, "server", port=7, handlers=probe.register):
                assert (await running).payload == "opened"
                assert (await served).payload == 2
            assert probe.seen.count(1) == 2  # it was not run again while it ran
            assert probe.seen.count(2) >= 2

    run_virtual(check())


def test_a_peer_that_is_silent_for_long_is_greeted_again_by_new_calls():
    async def check():
        air, probe = Air(), Probe()
        async with open_on(air, "client", listen=False) as (client, _):
            async with open_on(air, "server", port=7, handlers=probe.register) as (_, address):
                await client.call(address, "echo", 1, deadline=soon())
            async with open_on(air, "server", port=7, handlers=probe.register):
                # a flood takes all answers that strangers get
                air.should_pass = lambda source, target, packet: packet[3] != PacketKind.UNKNOWN
                early = asyncio.ensure_future(client.call(address, "echo", 2, deadline=soon(40)))
                await asyncio.sleep(25)
                assert (await client.call(address, "echo", 3, deadline=soon(1))).payload == 3
                with pytest.raises(DeadlineExceeded):
                    await early
            assert probe.seen == [1, 3]

    run_virtual(check())


def test_a_session_that_is_replaced_right_after_its_welcome_leaves_nobody_behind():
    async def check():
        air, probe = Air(), Probe()
        async with (
            open_on(air, "server", handlers=probe.register) as (_, address),
            open_on(air, "client", listen=False) as (client, _),
        ):
            call = asyncio.ensure_future(client.call(address, "echo", 1, deadline=soon(5)))
            await asyncio.sleep(0)
            (caller,) = client.sessions.values()
            welcome = caller.welcome

            def replaced(*greeting):
                welcome(*greeting)
                client.open_caller(caller.target, caller.where, caller.socket)

            caller.welcome = replaced
            assert (await call).payload == 1
            assert client.num_sessions == 1  # the one that was ready has gone

    run_virtual(check())


def test_a_peer_that_comes_late_is_found_at_once_by_a_new_caller():
    async def check():
        air, probe = Air(), Probe()
        async with open_on(air, "client", listen=False) as (client, _):
            address = Address("server", 7)
            patient = asyncio.ensure_future(client.call(address, "echo", 1, deadline=soon(60)))
            for _ in range(40):
                with pytest.raises(DeadlineExceeded):
                    await client.call(address, "echo", 0, deadline=soon(0.01))
                await asyncio.sleep(0.5)
            (caller,) = client.sessions.values()
            assert len(caller.hellos) <= 4
            assert len(client.handshakes._greeting) <= 4
            assert len(caller.waiters) <= 3
            await until(lambda: 0.6 < client.loop.time() - caller.greeted_at_s < 0.8)
            async with open_on(air, "server", port=7, handlers=probe.register):
                await client.call(address, "echo", 2, deadline=soon(0.1))
                await patient

    run_virtual(check())


def test_those_who_wait_for_a_place_go_on_with_a_peer_that_was_started_again():
    async def check():
        air, probe = Air(delay_s=(0.02, 0.02)), Probe()
        options = {"port": 7, "handlers": probe.register, "limits": Limits(max_calls=2)}
        async with open_on(air, "client", listen=False) as (client, _):
            async with open_on(air, "server", **options) as (_, address):
                await client.call(address, "echo", 0, deadline=soon())
            async with open_on(air, "server", **options):
                calls = [client.call(address, "echo", n, deadline=soon()) for n in range(1, 9)]
                replies = await asyncio.gather(*calls)
                assert [reply.payload for reply in replies] == list(range(1, 9))

    run_virtual(check())


def test_those_who_wait_when_the_transport_closes_are_told():
    async def check():
        air, probe = Air(), Probe()
        options = {"handlers": probe.register, "limits": Limits(max_calls=1)}
        async with open_on(air, "server", **options) as (_, address):
            async with open_on(air, "client", listen=False) as (client, _):
                calls = [
                    asyncio.ensure_future(client.call(address, "block", n, deadline=soon())) for n in range(3)
                ]
                calls.append(
                    asyncio.ensure_future(client.call(Address("nowhere", 1), "block", 4, deadline=soon()))
                )
                await asyncio.sleep(1)
            for call in calls:
                with pytest.raises(PeerLost):
                    await call

    run_virtual(check())


def test_a_lost_cancel_is_made_up_for_by_the_next_packet():
    async def check():
        air, probe = Air(), Probe()
        async with (
            open_on(air, "server", handlers=probe.register) as (server, address),
            open_on(air, "client", listen=False) as (client, _),
        ):
            call = asyncio.ensure_future(client.call(address, "block", 1, deadline=soon(100)))
            await asyncio.sleep(1)
            air.should_pass = lambda source, target, packet: False
            call.cancel()
            await asyncio.sleep(1)
            air.should_pass = lambda source, target, packet: True
            assert server.num_calls == 1
            await client.call(address, "echo", 2, deadline=soon())
            await asyncio.sleep(0)
            assert server.num_calls == 0
            assert probe.num_cancelled == 1

    run_virtual(check())


def test_a_session_that_takes_no_new_calls_still_cancels_its_last_one():
    async def check():
        air, probe = Air(), Probe()
        async with (
            open_on(air, "server", handlers=probe.register) as (server, address),
            open_on(air, "client", listen=False) as (client, _),
        ):
            call = asyncio.ensure_future(client.call(address, "block", 1, deadline=soon(100)))
            await asyncio.sleep(1)
            (caller,) = client.sessions.values()
            caller.retire()
            call.cancel()
            await asyncio.sleep(0.1)
            assert client.num_sessions == server.num_calls == 0
            assert probe.num_cancelled == 1

    run_virtual(check())


def test_what_is_queued_is_sent_before_the_transport_closes():
    async def check():
        air, probe = Air(), Probe()
        async with open_on(air, "server", handlers=probe.register) as (_, address):
            async with open_on(air, "client", listen=False) as (client, _):
                await client.call(address, "echo", 1, deadline=soon())
                (caller,) = client.sessions.values()
                before = len(air.between("client", "server"))
                caller.queue(encode((2, 99)))
            assert len(air.between("client", "server")) == before + 1

    run_virtual(check())


@pytest.mark.parametrize("what_fails", ["leaving", "a socket"])
def test_sockets_are_closed_whatever_happens(what_fails):
    async def check():
        air = Air()

        def fail():
            raise ZeroDivisionError

        async with contextlib.AsyncExitStack() as stack:
            server, _ = await stack.enter_async_context(open_on(air, "server"))
            await server.listen(Address("server", 0))
            if what_fails == "leaving":
                server._leave = fail
            else:
                server._sockets[0].close = fail
            with pytest.raises(ZeroDivisionError):
                await server.__aexit__(None, None, None)
        await asyncio.sleep(0)
        assert air.ports == {}

    run_virtual(check())


def test_a_server_whose_sessions_are_all_busy_takes_no_more():
    async def check():
        air, probe = Air(), Probe()
        limits = Limits(max_connections=1)
        async with (
            open_on(air, "server", handlers=probe.register, limits=limits) as (server, address),
            contextlib.AsyncExitStack() as stack,
        ):
            calls = []
            for number in range(10):
                client, _ = await stack.enter_async_context(open_on(air, f"c{number}", listen=False))
                calls.append(asyncio.ensure_future(client.call(address, "block", 1, deadline=soon(60))))
            await asyncio.sleep(1)
            assert server.num_sessions == len(probe.seen) == 4
            refused = [call for call in calls if call.done()]
            assert len(refused) == 6
            for call in refused:
                with pytest.raises(PeerBusy, match="as many callers as it can"):
                    call.result()
            assert server.budget.used_bytes > 4 * 4096
            probe.gate.set()
            await asyncio.gather(*calls, return_exceptions=True)
            assert server.budget.used_bytes == 0
            await client.call(address, "echo", 2, deadline=soon())  # there is room again

    run_virtual(check())


def test_a_call_that_stays_open_does_not_hold_up_thousands_of_others():
    async def check():
        air, probe = Air(), Probe()
        async with (
            open_on(air, "server", handlers=probe.register) as (server, address),
            open_on(air, "client", listen=False) as (client, _),
        ):
            open_call = asyncio.ensure_future(client.call(address, "block", -1, deadline=soon(1000)))
            for start in range(0, 3000, 50):
                calls = [
                    client.call(address, "echo now", n, deadline=soon()) for n in range(start, start + 50)
                ]
                await asyncio.gather(*calls)
            probe.gate.set()
            assert (await open_call).payload == "opened"
            assert client.num_sessions == server.num_sessions == 1

    run_virtual(check())


def test_a_new_address_on_the_way_is_proven_before_it_is_served():
    async def check():
        air, probe, swarm = Air(), Probe(), Swarm()
        async with (
            open_on(air, "server", handlers=probe.register, membership=swarm.member()) as (server, address),
            open_on(air, "client", listen=False, membership=swarm.member()) as (client, _),
        ):
            await client.call(address, "echo", 1, deadline=soon())
            (inside,) = [where for where in air.ports if where[0] == "client"]
            air.origin[inside] = ("nat", 5)
            reply = await client.call(address, "who", deadline=soon())
            assert "nat:5" in reply.payload[0]
            assert client.num_sessions == server.num_sessions == 1
            assert client.stats.resent == 0

    run_virtual(check())


def test_sessions_that_were_not_used_for_long_make_room():
    async def check():
        air, probe = Air(), Probe()
        limits = Limits(max_connections=2)
        async with open_on(air, "server", handlers=probe.register, limits=limits) as (server, address):
            async with contextlib.AsyncExitStack() as stack:
                clients = [
                    (await stack.enter_async_context(open_on(air, f"c{n}", listen=False)))[0]
                    for n in range(30)
                ]
                for round_ in range(2):
                    for client in clients:
                        await client.call(address, "echo", round_, deadline=soon())
                        assert server.num_sessions <= 9
            assert len(probe.seen) == 60

    run_virtual(check())


def test_two_runs_are_equal_to_the_bit():
    async def one():
        air, probe = Air(5, loss=0.2, duplicate=0.2, delay_s=(0.01, 0.2)), Probe()
        network = air.host("server", is_simulated=True)
        other = air.host("client", is_simulated=True)
        async with DatagramTransport(network=network) as server, DatagramTransport(network=other) as client:
            probe.register(server)
            address = await server.listen(Address("server", 1))
            await asyncio.gather(*(client.call(address, "echo", n, deadline=soon(60)) for n in range(100)))
            return air.packets, asyncio.get_running_loop().time()

    assert run_virtual(one()) == run_virtual(one())


def test_another_version_is_told_to_the_caller(caplog):
    async def check():
        air = Air()
        async with (
            open_on(air, "server") as (_, address),
            open_on(air, "client", listen=False) as (client, _),
        ):
            send = air.send

            def other_version(source, target, packet):
                """As if the client spoke version 9."""
                if source[0] == "client":
                    packet = packet[:2] + b"\x09" + packet[3:]
                else:
                    packet = packet[:2] + b"\x08" + packet[3:]
                send(source, target, packet)

            air.send = other_version
            with pytest.raises(VersionMismatch, match=r"version of the datagram protocol \(8\)"):
                await client.call(address, "echo", deadline=soon())
            assert [packet[3] for packet in air.between("server", "client")] == [PacketKind.VERSION]
            assert client.num_sessions == 0

    run_virtual(check())
    assert caplog.text.count("speaks version 9, not 2") == 1


def test_a_server_that_is_full_says_so():
    async def check():
        air, probe = Air(), Probe()
        limits = Limits(max_message_bytes=100, max_bytes_in_flight=100)
        async with (
            open_on(air, "server", handlers=probe.register, limits=limits) as (_, address),
            open_on(air, "client", listen=False) as (client, _),
        ):
            calls = [
                asyncio.ensure_future(client.call(address, "block", "x" * 40, deadline=soon()))
                for _ in range(5)
            ]
            await asyncio.sleep(1)
            busy = [call for call in calls if call.done()]
            assert busy
            for call in busy:
                with pytest.raises(PeerBusy, match="too many calls"):
                    call.result()
            probe.gate.set()
            await asyncio.gather(*calls, return_exceptions=True)
            with pytest.raises(PeerRefused, match="101 bytes"):
                await client.call(address, "echo", None, [bytes(101)], deadline=soon())

    run_virtual(check())
