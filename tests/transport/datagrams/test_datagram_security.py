"""Who may not talk over datagrams is refused, told of once in the log, and costs nobody else anything."""

import asyncio
import logging
import random

import pytest

from shoal.core import Address, DeadlineExceeded, Peer, PeerLost, PeerRefused
from shoal.core.identity import Identity
from shoal.transport import Reply
from shoal.transport.datagrams.handshake import MAX_UNPROVEN_A_HOST, SealedHandshakeCodec
from shoal.transport.datagrams.sessions import AeadSeal
from shoal.transport.datagrams.wire import (
    HELLO_BYTES,
    PREFIX,
    SEALED,
    Hello,
    PacketKind,
    Welcome,
    encode_frames,
    encode_request,
)
from shoal.transport.frames import encode
from shoal.transport.trust.membership import Access, Membership
from transport.lossy import Air, open_on, run_virtual
from transport.members import Swarm, assert_tells_nothing
from transport.wire import soon

EVIL = ("evil", 666)


class Probe:
    def __init__(self):
        self.seen, self.num_cancelled = [], 0

    def register(self, transport):
        transport.handle("echo", self.echo)
        transport.handle("block", self.block)

    def echo(self, head, buffers):
        self.seen.append((head.peer.id, head.payload))
        return Reply(head.payload)

    async def block(self, head, buffers):
        self.seen.append((head.peer.id, head.payload))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


class Scene:
    """A server and a client of one swarm, and an attacker's view of the air between them."""

    def __init__(self, air, swarm, probe, server, client, address):
        self.air, self.swarm, self.probe = air, swarm, probe
        self.server, self.client, self.address = server, client, address
        self.where = (address.host, address.port)

    def data_packets(self, source="client"):
        target = "server" if source == "client" else "client"
        return [packet for packet in self.air.between(source, target) if packet[3] == PacketKind.DATA]

    def answers_to(self, name):
        return self.air.between("server", name)

    async def inject(self, packet, source=EVIL):
        self.air.deliver(source, self.where, packet)
        await asyncio.sleep(0.1)

    async def still_works(self):
        reply = await self.client.call(self.address, "echo", "still", deadline=soon(2))
        assert reply.payload == "still"
        assert self.client.stats.resent == 0


def stage(check, *, is_sealed=True):
    """Run `check(scene)` in virtual time."""

    async def play():
        air, swarm, probe = Air(), Swarm(), Probe()
        members = [swarm.member() if is_sealed else None for _ in range(2)]
        async with (
            open_on(air, "server", handlers=probe.register, membership=members[0]) as (server, address),
            open_on(air, "client", listen=False, membership=members[1]) as (client, _),
        ):
            await check(Scene(air, swarm, probe, server, client, address))
        return swarm

    return run_virtual(play())


def lines(caplog, text):
    return [record for record in caplog.records if text in record.getMessage()]


def test_a_wrong_secret_is_not_even_answered(caplog):
    async def check(scene):
        await scene.still_works()
        outsider = Swarm().member()
        async with open_on(scene.air, "evil", listen=False, membership=outsider) as (evil, _):
            with pytest.raises(DeadlineExceeded, match="No connection"):
                await evil.call(scene.address, "echo", 1, deadline=soon(20))
        assert scene.answers_to("evil") == []
        assert scene.server.stats.refused >= 5
        assert scene.server.num_sessions == 1
        await scene.still_works()
        assert {peer_id for peer_id, _ in scene.probe.seen} == {scene.client.peer_id}

    stage(check)
    assert len(lines(caplog, "another secret")) == 1


@pytest.mark.parametrize("has_server_secret", [True, False])
def test_no_secret_does_not_fit_to_a_secret(caplog, has_server_secret):
    async def check(scene):
        membership = None if has_server_secret else Swarm().member()
        async with open_on(scene.air, "evil", listen=False, membership=membership) as (evil, _):
            with pytest.raises(DeadlineExceeded):
                await evil.call(scene.address, "echo", 1, deadline=soon(20))
        assert scene.answers_to("evil") == []
        assert scene.probe.seen == []
        await scene.still_works()

    stage(check, is_sealed=has_server_secret)
    assert len(lines(caplog, "has no secret" if has_server_secret else "has a swarm secret")) == 1


@pytest.mark.parametrize("source", [EVIL, "its own"])
def test_a_replayed_datagram_is_refused(caplog, source):
    async def check(scene):
        await scene.client.call(scene.address, "echo", 1, deadline=soon())
        await scene.client.call(scene.address, "echo", 2, deadline=soon())
        real = next(where for where, _, _ in scene.air.packets if where[0] == "client")
        num_answers = len(scene.data_packets("server"))
        for packet in scene.data_packets():
            for _ in range(10):
                await scene.inject(packet, EVIL if source == EVIL else real)
        assert [payload for _, payload in scene.probe.seen] == [1, 2]
        assert len(scene.data_packets("server")) == num_answers
        assert scene.answers_to("evil") == []
        await scene.still_works()

    stage(check)
    assert len(lines(caplog, "came twice")) == 1


def test_a_replayed_answer_is_refused(caplog):
    async def check(scene):
        await scene.still_works()
        client = next(where for where, _, _ in scene.air.packets if where[0] == "client")
        for packet in scene.data_packets("server") * 3:
            scene.air.deliver(scene.where, client, packet)
        await asyncio.sleep(0.1)
        await scene.still_works()

    stage(check)
    assert len(lines(caplog, "came twice")) == 1


def test_a_replayed_hello_disturbs_no_session_and_proves_no_address(caplog):
    async def check(scene):
        await scene.still_works()
        (hello,) = [
            packet for packet in scene.air.between("client", "server") if packet[3] != PacketKind.DATA
        ]
        for number in range(20):
            await scene.inject(hello, ("evil", number + 1))
        assert scene.answers_to("evil") == []
        assert scene.server.num_sessions == 1
        await scene.still_works()
        assert len(scene.probe.seen) == 2

    stage(check)
    assert len(lines(caplog, "came twice")) == 1


def test_a_hello_that_is_caught_on_its_way_is_worth_nothing():
    async def check(scene):
        scene.air.should_pass = lambda source, target, packet: source[0] != "client"
        call = asyncio.ensure_future(scene.client.call(scene.address, "echo", 1, deadline=soon(30)))
        await asyncio.sleep(0.1)
        (hello,) = scene.air.between("client", "server")
        for number in range(20):
            await scene.inject(hello, ("evil", number + 1))
        answers = scene.answers_to("evil")
        assert 1 <= len(answers) <= 3
        assert all(len(answer) <= len(hello) for answer in answers)
        assert scene.probe.seen == []
        scene.air.should_pass = lambda source, target, packet: True
        assert (await call).payload == 1  # by a hello that it has sent since

    stage(check)


@pytest.mark.parametrize("gap_s", [-3600.0, 3600.0])
def test_a_hello_of_another_time_is_refused_and_the_clock_named(caplog, gap_s):
    async def check(scene):
        class Wrong:
            def now_s(self):
                return asyncio.get_running_loop().time()

            def wall_s(self):
                return scene.server.clock.wall_s() + gap_s

        async with open_on(scene.air, "late", listen=False, membership=scene.swarm.member()) as (late, _):
            late.clock = Wrong()
            for _ in range(3):
                with pytest.raises(PeerRefused, match="a clock is wrong"):
                    await late.call(scene.address, "echo", 1, deadline=soon())
        assert scene.probe.seen == []

    stage(check)
    assert len(lines(caplog, "a clock is wrong")) == 1


def test_an_outsider_cannot_speak_for_a_member(caplog):
    async def check(scene):
        await scene.still_works()
        genuine = scene.data_packets()[-1]
        client = next(where for where, _, _ in scene.air.packets if where[0] == "client")
        content = encode_frames(1, [encode_request(99, encode((0, "echo", 0, "forged")))])
        for number in range(20):  # the session's id can be seen by everybody
            header = genuine[:12] + (1000 + number).to_bytes(8, "little")
            await scene.inject(header + content + bytes(16), client)
            await scene.inject(AeadSeal(b"x" * 32, b"x" * 32).seal(header, content), client)
        assert [payload for _, payload in scene.probe.seen] == ["still"]
        await scene.still_works()

    stage(check)
    assert len(lines(caplog, "not genuine")) == 1


def test_a_member_cannot_speak_for_another(caplog):
    async def check(scene):
        await scene.still_works()
        mallory = SealedHandshakeCodec(scene.swarm.member(), random.SystemRandom())
        mallory._public_key = scene.client._membership.identity.public_key.public_bytes_raw()
        hello = Hello(b"s" * 16, mallory.ephemeral, b"session1", b"", scene.server.clock.wall_s())
        for _ in range(3):
            await scene.inject(mallory.write(PacketKind.HELLO, hello))
        assert scene.answers_to("evil") == []
        # nor with keys that it can derive from the secret and what it has seen
        packet = scene.data_packets()[-1]
        greeting = Hello(b"s" * 16, scene.client.handshakes._codec.ephemeral, b"", b"", 0.0)
        forged = mallory.session_seal(greeting, scene.server.peer_id, b"t" * 16)
        content = encode_frames(1, [encode_request(99, encode((0, "echo", 0, "forged")))])
        client = next(where for where, _, _ in scene.air.packets if where[0] == "client")
        await scene.inject(forged.seal(packet[:12] + (500).to_bytes(8, "little"), content), client)
        assert [payload for _, payload in scene.probe.seen] == ["still"]
        assert scene.server.num_sessions == 1
        await scene.still_works()

    stage(check)
    assert len(lines(caplog, "signature is not of the peer")) == 1
    assert len(lines(caplog, "not genuine")) == 1


def test_a_member_that_relays_anothers_hello_gains_nothing(caplog):
    async def check(scene):
        mallory = scene.swarm.member()
        relay = ("mallory", 5)

        class Relay(asyncio.DatagramProtocol):
            """Passes everything on between the client and the server."""

            def datagram_received(self, data, addr):
                if addr[0] == "client":
                    self.client = addr
                scene.air.send(relay, self.client if addr == scene.where else scene.where, data)

        await scene.air.host("mallory").open_datagrams(Address(*relay), _connected(Relay()))
        with pytest.raises(PeerRefused, match="another peer is expected here"):
            await scene.client.call(Peer(Address(*relay), mallory.peer_id), "echo", 1, deadline=soon(5))
        assert scene.probe.seen == []

    stage(check)
    assert len(lines(caplog, "another peer is expected here")) == 1


def _connected(protocol):
    protocol.connection_made = lambda transport: None
    return protocol


def test_a_peer_that_is_denied_in_mid_conversation_is_out(caplog):
    async def check(scene):
        await scene.still_works()
        call = asyncio.ensure_future(scene.client.call(scene.address, "block", 1, deadline=soon(60)))
        await asyncio.sleep(5)
        assert scene.server.num_calls == 1
        async with open_on(scene.air, "other", listen=False, membership=scene.swarm.member()) as (other, _):
            await other.call(scene.address, "echo", 2, deadline=soon())
            scene.server.access.deny(scene.client.peer_id)
            await asyncio.sleep(1.1)
            assert scene.probe.num_cancelled == 1
            assert scene.server.num_calls == 0
            for _ in range(3):
                with pytest.raises(PeerRefused, match="not on this peer's list"):
                    await scene.client.call(scene.address, "echo", 3, deadline=soon())
            with pytest.raises(PeerRefused, match=r"(?s)block at .*may no longer talk"):
                await call
            await other.call(scene.address, "echo", 4, deadline=soon())
        scene.server.access.allow(scene.client.peer_id)
        await scene.client.call(scene.address, "echo", 5, deadline=soon())
        assert [payload for _, payload in scene.probe.seen] == ["still", 1, 2, 4, 5]

    stage(check)
    assert len(lines(caplog, "no longer talk")) == 1
    assert len(lines(caplog, "not on this peer's list")) == 1


def test_a_list_that_changes_while_nobody_talks_counts_for_the_next_packet(tmp_path):
    async def check(scene):
        denied = tmp_path / "denied"
        denied.write_text("")
        scene.server.access = Access(deny_file=denied)
        await scene.still_works()
        await asyncio.sleep(60)
        denied.write_text(f"{scene.client.peer_id}\n")
        for why in ("no longer talk", "not on this peer's list"):
            with pytest.raises(PeerRefused, match=why):
                await scene.client.call(scene.address, "echo", 2, deadline=soon())
        assert [payload for _, payload in scene.probe.seen] == ["still"]

    stage(check)


def test_a_caller_does_not_talk_to_those_that_it_denies(caplog):
    async def check(scene):
        scene.client.access.deny(scene.server.peer_id)
        with pytest.raises(PeerRefused, match="is not asked"):
            await scene.client.call(scene.address, "echo", 1, deadline=soon())
        assert scene.probe.seen == []

    stage(check)
    assert len(lines(caplog, "asked nothing")) == 1


def test_a_peer_that_is_denied_while_it_is_asked_is_told_and_asked_no_more():
    async def check(scene):
        await scene.still_works()
        call = asyncio.ensure_future(scene.client.call(scene.address, "block", 1, deadline=soon(60)))
        await asyncio.sleep(5)
        scene.client.access.deny(scene.server.peer_id)
        with pytest.raises(PeerRefused, match=r"(?s)block at .*may no longer talk"):
            await call
        await asyncio.sleep(0.1)
        assert scene.probe.num_cancelled == 1
        assert scene.server.num_sessions == scene.client.num_sessions == 0

    stage(check)


def test_a_peer_that_is_denied_while_nobody_talks_is_not_asked():
    async def check(scene):
        await scene.still_works()
        await asyncio.sleep(60)
        scene.client.access.deny(scene.server.peer_id)
        with pytest.raises(PeerRefused, match="is not asked"):
            await scene.client.call(scene.address, "echo", 1, deadline=soon())
        assert [payload for _, payload in scene.probe.seen] == ["still"]

    stage(check)


def test_what_another_member_says_of_a_session_is_worth_nothing():
    async def check(scene):
        await scene.still_works()
        client = next(where for where, _, _ in scene.air.packets if where[0] == "client")
        async with open_on(scene.air, "third", membership=scene.swarm.member()) as (_, third):
            for packet in scene.data_packets():  # an outsider shows it to somebody who cannot know it
                scene.air.deliver(EVIL, (third.host, third.port), packet)
            await asyncio.sleep(0.1)
        answers = scene.air.between("third", "evil")
        assert [answer[3] for answer in answers] == [PacketKind.UNKNOWN]
        for answer in answers:
            scene.air.deliver(scene.where, client, answer)
        await asyncio.sleep(0.1)
        await scene.still_works()
        hellos = [packet for packet in scene.air.between("client", "server") if packet[3] != PacketKind.DATA]
        assert len(hellos) == 1

    stage(check)


@pytest.mark.parametrize(
    "changes",
    [{"session_id": b"long" * 200}, {"session_id": b""}, {"token": b"t" * 100}, {"salt": b"s"}],
    ids=["long id", "no id", "long token", "short salt"],
)
def test_a_welcome_that_does_not_follow_the_protocol_harms_only_its_own_calls(caplog, changes):
    async def check(scene):
        mallory = SealedHandshakeCodec(scene.swarm.member(), random.SystemRandom())
        where = ("mallory", 5)

        class Welcomer(asyncio.DatagramProtocol):
            def datagram_received(self, data, addr):
                fields = {"salt": b"t" * 16, "session_id": b"session2", "token": b"token678"} | changes
                hello = mallory.open(data).body
                answer = Welcome(hello.salt, ephemeral=mallory.ephemeral, max_calls=9, **fields)
                scene.air.send(where, addr, mallory.write(PacketKind.WELCOME, answer))

        await scene.air.host("mallory").open_datagrams(Address(*where), _connected(Welcomer()))
        calls = [scene.client.call(Address(*where), "echo", 1, deadline=soon(2))]
        calls += [scene.client.call(scene.address, "echo", n, deadline=soon(2)) for n in range(5)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(outcomes[0], DeadlineExceeded)
        assert [reply.payload for reply in outcomes[1:]] == list(range(5))

    stage(check)
    assert len(lines(caplog, "a welcome that does not follow")) == 1


def test_a_session_that_cannot_send_is_dropped_and_others_go_on(caplog):
    async def check(scene):
        await scene.still_works()
        options = {"handlers": scene.probe.register, "membership": scene.swarm.member()}
        async with open_on(scene.air, "second", **options) as (_, second):
            await scene.client.call(second, "echo", 1, deadline=soon())
            (broken, _) = scene.client.sessions.values()
            broken._prefix = b""
            lost = asyncio.ensure_future(scene.client.call(scene.address, "echo", 2, deadline=soon()))
            reply = await scene.client.call(second, "echo", 3, deadline=soon())
            assert reply.payload == 3
            with pytest.raises(PeerLost, match="could not be made"):
                await lost
            await scene.still_works()

    stage(check)
    assert len(lines(caplog, "packets cannot be made")) == 1


def test_a_challenge_of_the_wrong_size_is_dropped(caplog):
    async def check(scene):
        await scene.still_works()
        (callee,), (caller,) = scene.server.sessions.values(), scene.client.sessions.values()
        callee.queue(encode((10, b"t" * 1000)))
        callee.flush()
        await asyncio.sleep(0.1)
        assert caller.token is None
        await scene.still_works()

    stage(check)
    assert len(lines(caplog, "a challenge that")) == 1


def test_nothing_is_served_after_a_goodbye():
    async def check(scene):
        await scene.still_works()
        (caller,) = scene.client.sessions.values()
        caller.queue(encode((11, "leaving")))
        caller.queue(encode_request(99, encode((0, "echo", 0, "after"))))
        caller.flush()
        await asyncio.sleep(0.1)
        assert [payload for _, payload in scene.probe.seen] == ["still"]
        assert scene.server.num_sessions == 0

    stage(check)


def test_stale_hellos_cost_no_check_of_a_signature_and_few_an_answer(monkeypatch):
    async def check(scene):
        await scene.still_works()
        codec = SealedHandshakeCodec(scene.swarm.member(), random.SystemRandom())
        checked = []
        monkeypatch.setattr(scene.server.handshakes._codec, "verified", checked.append)
        for number in range(300):
            salt = number.to_bytes(16)
            hello = Hello(salt, codec.ephemeral, b"session1", b"", air_wall(scene) - 3600)
            scene.air.deliver(EVIL, scene.where, codec.write(PacketKind.HELLO, hello))
        await asyncio.sleep(0.1)
        assert checked == []
        assert 1 <= len(scene.answers_to("evil")) <= 100

    stage(check)


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_flood_from_unproven_addresses(caplog, is_sealed):
    """Answers stay below what was sent, no handler runs, and another caller notices nothing."""

    async def check(scene):
        await scene.still_works()
        air, source = scene.air, random.Random(1)
        codec = scene.client.handshakes._codec
        flood = []
        for number in range(3000):
            where = (f"victim{number % 7}", 1 + number % 50)
            hello = Hello(source.randbytes(16), codec.ephemeral, source.randbytes(8), b"", air_wall(scene))
            genuine = codec.write(PacketKind.HELLO, hello) if number % 10 == 0 else b""
            stray = PREFIX + bytes([PacketKind.DATA]) + source.randbytes(60 + number % 500)
            junk = PREFIX + bytes([PacketKind.HELLO | SEALED]) + source.randbytes(HELLO_BYTES)
            other = b"\xf0D\x07" + source.randbytes(100)
            packets = (genuine, stray, junk, other, source.randbytes(number % 1300))
            flood += [(where, packet) for packet in packets if packet]
        calls = []
        for index, (where, packet) in enumerate(flood):
            air.deliver(where, scene.where, packet)
            if index % 100 == 0:
                calls.append(
                    asyncio.ensure_future(scene.client.call(scene.address, "echo", index, deadline=soon(5)))
                )
                await asyncio.sleep(0.01)
        assert [reply.payload for reply in await asyncio.gather(*calls)] == list(range(0, len(flood), 100))
        assert scene.client.stats.resent == 0
        for number in range(7):
            name = f"victim{number}"
            received = sum(len(packet) for where, packet in flood if where[0] == name)
            answered = sum(map(len, air.between("server", name)))
            assert 0 < answered <= received
        assert {peer_id for peer_id, _ in scene.probe.seen} == {scene.client.peer_id}
        assert scene.server.num_sessions <= 1 + 7 * MAX_UNPROVEN_A_HOST

    stage(check, is_sealed=is_sealed)
    assert 1 <= len(caplog.records) <= 60  # a few for each host, not one for each packet


def air_wall(scene):
    return scene.server.clock.wall_s()


def test_a_session_whose_address_is_not_proven_runs_no_handler():
    async def check(scene):
        """Bare, where an attacker can make packets: it greets from its own address, asks from another."""
        air, codec = scene.air, scene.client.handshakes._codec
        await scene.inject(codec.write(PacketKind.HELLO, Hello(b"s" * 16, b"", b"session1", b"", 0.0)))
        (packet,) = scene.answers_to("evil")
        welcome = codec.open(packet).body
        header = PREFIX + bytes([PacketKind.DATA]) + welcome.session_id
        request = encode_request(1, encode((0, "echo", 0, "x" * 500)))
        frames = [encode((4, welcome.token)), request]
        for number, frame in enumerate((frames[1:], frames, [encode((4, b"")), request]) * 5):
            content = encode_frames(1, frame)
            await scene.inject(header + number.to_bytes(8, "little") + content, ("victim", 1))
        assert scene.probe.seen == []
        assert all(len(answer) <= 64 for answer in scene.answers_to("victim"))
        assert len(scene.answers_to("victim")) <= 15
        await scene.inject(header + (99).to_bytes(8, "little") + encode_frames(1, frames))
        assert len(scene.probe.seen) == 1  # from its own address, with its token
        await scene.inject(header + (100).to_bytes(8, "little") + encode_frames(1, frames), ("victim", 1))
        assert len(scene.probe.seen) == 1
        assert air.between("server", "victim")

    stage(check, is_sealed=False)


def test_an_outsider_cannot_end_a_session():
    async def check(scene):
        await scene.still_works()
        client = next(where for where, _, _ in scene.air.packets if where[0] == "client")
        packet = scene.data_packets()[-1]
        unknown = PREFIX + bytes([PacketKind.UNKNOWN]) + packet[4:20]
        for forged in (unknown, unknown + bytes(28), unknown[:12] + (1).to_bytes(8, "little") + bytes(28)):
            scene.air.deliver(scene.where, client, forged)
        other = PREFIX[:2] + b"\x09" + bytes([PacketKind.VERSION]) + packet[4:12]
        scene.air.deliver(scene.where, client, other)
        await asyncio.sleep(0.1)
        await scene.still_works()
        hellos = [packet for packet in scene.air.between("client", "server") if packet[3] != PacketKind.DATA]
        assert len(hellos) == 1

    stage(check)


def test_a_socket_that_only_asks_takes_no_hello():
    async def check(scene):
        await scene.still_works()
        client = next(where for where, _, _ in scene.air.packets if where[0] == "client")
        codec = scene.client.handshakes._codec
        hello = codec.write(
            PacketKind.HELLO, Hello(b"s" * 16, codec.ephemeral, b"session1", b"", air_wall(scene))
        )
        scene.air.deliver(EVIL, client, hello)
        await asyncio.sleep(0.1)
        assert scene.air.between("client", "evil") == []
        assert scene.client.num_sessions == 1

    stage(check)


@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_nonsense_is_dropped_and_counted(is_sealed, seed, caplog):
    async def check(scene):
        await scene.still_works()
        source = random.Random(seed)
        genuine = [packet for _, _, packet in scene.air.packets]
        client = next(where for where, _, _ in scene.air.packets if where[0] == "client")
        for _ in range(2000):
            packet = bytearray(source.choice(genuine))
            for _ in range(source.randint(1, 4)):
                packet[source.randrange(3, len(packet))] = source.randrange(256)
            packet = (
                bytes(packet[: source.randint(0, len(packet))]) if source.random() < 0.3 else bytes(packet)
            )
            target = source.choice([scene.where, client])
            scene.air.deliver(source.choice([EVIL, client, scene.where]), target, packet)
        await asyncio.sleep(1)
        assert scene.server.stats.refused > 100
        assert scene.client.stats.refused > 100
        if is_sealed:
            await scene.still_works()

    stage(check, is_sealed=is_sealed)


def test_nothing_secret_is_told(caplog):
    caplog.set_level(logging.DEBUG)
    told = []

    async def check(scene):
        await scene.still_works()
        async with open_on(scene.air, "evil", listen=False, membership=Swarm().member()) as (evil, _):
            with pytest.raises(DeadlineExceeded) as caught:
                await evil.call(scene.address, "echo", 1, deadline=soon(5))
            told.append(str(caught.value))
        scene.server.access.deny(scene.client.peer_id)
        await asyncio.sleep(2)
        with pytest.raises(PeerRefused) as caught:
            await scene.client.call(scene.address, "echo", 1, deadline=soon(5))
        told.append(str(caught.value))
        for transport in (scene.server, scene.client):
            told.extend(map(repr, (transport, transport.handshakes, transport.handshakes._codec)))
            told.extend(repr(session) + repr(session.seal) for session in transport.sessions.values())
            told.append(repr(transport._membership))
        key = scene.server.handshakes._codec._ephemeral_key.private_bytes_raw()
        assert not any(key.hex() in text for text in told)

    swarm = stage(check)
    assert_tells_nothing(caplog.text + "\n".join(told), swarm)


def test_peers_of_two_identities_are_told_apart():
    async def check(scene):
        await scene.still_works()
        member = Membership(Identity.generate(), scene.swarm.secret)
        async with open_on(scene.air, "third", listen=False, membership=member) as (third, _):
            await third.call(scene.address, "echo", "third", deadline=soon())
        assert scene.probe.seen == [(scene.client.peer_id, "still"), (member.peer_id, "third")]

    stage(check)
