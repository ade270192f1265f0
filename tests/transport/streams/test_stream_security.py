"""A server of a swarm, and those who should not get in: each is refused with one line in the log, and a
member that calls beside them loses no call. Nothing that is logged or raised holds a key."""

import asyncio
import contextlib
import datetime
import logging
import random
import re
import socket
import ssl
import struct
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shoal.core import (
    Address,
    ManualClock,
    Peer,
    PeerBusy,
    PeerId,
    PeerLost,
    PeerRefused,
    ProtocolError,
    ShoalError,
    UsageError,
    fork,
)
from shoal.core.identity import Identity
from shoal.transport import Limits, Reply, StreamTransport
from shoal.transport.frames import FrameKind
from shoal.transport.streams import transport as shard
from shoal.transport.trust import tls
from shoal.transport.trust.membership import Access
from shoal.transport.trust.tls import Authority, chain_pem
from transport.members import Swarm, assert_tells_nothing
from transport.wire import LOOPBACK, dial, hello, open_descriptors, parse, soon, until

DAY_S = 24 * 3600.0
NOW_S = datetime.datetime.now(datetime.UTC).timestamp()

everywhere = pytest.mark.parametrize(
    ("run", "library"),
    [(loop, library) for loop in ("uvloop", "asyncio") for library in ("aiofastnet", "loop")],
    indirect=["run"],
)


@pytest.fixture(autouse=True)
def _look_often(monkeypatch):
    monkeypatch.setattr(shard, "SWEEP_S", 0.05)


@pytest.fixture
def library():
    return None


async def echo(head, buffers):
    return Reply(head.payload, buffers)


class Scene:
    """A server of one swarm, a friend of it that calls all the time, and another swarm."""

    def __init__(self):
        self.swarm, self.other = Swarm(), Swarm()
        self.num_calls = 0
        self.num_sitting = self.num_cancelled = 0
        self.is_over = False
        self.errors = []

    async def sit(self, head, buffers):
        self.num_sitting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_cancelled += 1

    async def keep_calling(self):
        while not self.is_over:
            data = random.Random(self.num_calls).randbytes(1000)
            reply = await self.friend.call(
                Peer(self.address, self.server.peer_id), "echo", self.num_calls, [data], deadline=soon(10)
            )
            assert bytes(reply.buffers[0]) == data
            self.num_calls += 1
            await asyncio.sleep(0.005)

    async def refused(self, caller, kind=PeerRefused, *, peer=None, method="echo"):
        """What a caller is told."""
        with pytest.raises(ShoalError) as caught:
            await caller.call(peer or self.address, method, deadline=soon(10))
        self.errors.append(caught.value)
        assert type(caught.value) is kind, caught.value
        return str(caught.value)


@pytest.fixture
def perform(run, caplog, library, monkeypatch):
    """Runs attack(scene) beside the friend's calls, checks that it did no harm; the lines of the log."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(tls, "LIBRARY", library)

    def performance(attack, *, limits=None, access=None):
        scene = Scene()

        async def play():
            rules = access or Access()
            rules.allow(scene.friendship.peer_id)
            membership = scene.swarm.member(access=rules)
            async with (
                StreamTransport(membership=membership, limits=limits or Limits()) as server,
                StreamTransport(membership=scene.friendship) as friend,
            ):
                server.handle("echo", echo)
                server.handle("sit", scene.sit)
                scene.server, scene.friend = server, friend
                scene.address = await server.listen(LOOPBACK)
                calling = asyncio.ensure_future(scene.keep_calling())
                await until(lambda: calling.done() or scene.num_calls > 3)
                await attack(scene)
                await until(lambda: server.num_connections == 1, 5)
                await until(lambda: server.places.used_bytes == 1)
                num_calls = scene.num_calls
                await until(lambda: calling.done() or scene.num_calls > num_calls + 2)
                scene.is_over = True
                await calling
            assert fork._descriptors == {}

        scene.friendship = scene.swarm.member()
        run(play())
        told = caplog.text + "".join(str(error) + repr(error) for error in scene.errors)
        assert_tells_nothing(told, scene.swarm, scene.other)
        assert "PRIVATE KEY" not in told
        for record in caplog.records:
            assert record.exc_info is None, record.getMessage()
            assert "\n" not in record.getMessage()
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    return performance


def blocking_client(context, address):
    """A TLS client that does as it likes."""
    return context.wrap_socket(dial(address))


def read_all(client):
    data = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while part := client.recv(1 << 16):
            data += part
    return data


def permissive(chain=None, password=None):
    """A context that trusts everybody, and shows what it is given."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if chain is not None:
        context.load_cert_chain(chain, password=password)
    return context


def pem(*certificates):
    return b"".join(one.public_bytes(serialization.Encoding.PEM) for one in certificates)


def talk(context, address, first_words):
    """Handshake, say something, and hear the answer to the end; b'' when refused."""
    client = blocking_client(context, address)
    with contextlib.closing(client), contextlib.suppress(ConnectionError, ssl.SSLError):
        client.sendall(first_words)
        return read_all(client)
    return b""


# --- who does not belong ---


@everywhere
def test_another_secret(perform, library):
    async def attack(scene):
        async with StreamTransport(membership=scene.other.member()) as stranger:
            told = await scene.refused(stranger)
        assert "not of this swarm" in told
        assert "another swarm secret" in told
        assert "SHOAL_SECRET" in told

    (line,) = perform(attack)
    assert line.startswith("refused a connection (127.0.0.1:")
    assert "secret" in line


@everywhere
def test_no_secret(perform, library):
    async def attack(scene):
        async with StreamTransport() as stranger:
            told = await scene.refused(stranger, PeerLost)
        assert "swarm with a secret" in told
        assert "--secret-file" in told

    (line,) = perform(attack)
    assert "does not speak TLS" in line
    assert "no swarm secret" in line


@everywhere
def test_dialing_a_peer_that_has_no_secret(perform, library):
    async def attack(scene):
        async with StreamTransport() as plain:
            told = await scene.refused(scene.friend, peer=await plain.listen(LOOPBACK))
        assert "does not speak TLS" in told
        assert "no swarm secret" in told

    (line,) = perform(attack)
    assert line.startswith("closed a connection")
    assert "speaks TLS, and this peer has no swarm secret" in line


@everywhere
@pytest.mark.parametrize(("days", "word"), [(-40, "has expired"), (40, "is not valid yet")])
def test_the_wrong_time(perform, library, days, word):
    async def attack(scene):
        displaced = scene.swarm.member(clock=ManualClock(wall_s=NOW_S + days * DAY_S))
        async with StreamTransport(membership=displaced) as caller:
            with pytest.raises(
                (PeerRefused, PeerLost)
            ) as caught:  # as the library passes the alert on or not
                await caller.call(scene.address, "echo", deadline=soon())
            assert "clock" in str(caught.value)
            told = await scene.refused(scene.friend, peer=await caller.listen(LOOPBACK))
            assert word in told
            assert "clock" in told

    lines = perform(attack)
    assert len(lines) == 2  # the server's, and that of the displaced one
    assert word in lines[0]


# --- certificates that try to pass ---


def test_an_authority_of_the_same_name_with_another_key(perform, tmp_path):
    async def attack(scene):
        real, forger = Authority.of(scene.swarm.secret), Authority.of(scene.other.secret)
        identity = Identity.generate()
        leaf = Authority(forger.private_key, real.certificate).certify(identity.public_key, NOW_S)
        assert leaf.issuer == real.certificate.subject
        chain = tmp_path / "chain.pem"
        chain.write_bytes(chain_pem(leaf, identity, b"x") + pem(forger.certificate))
        assert await asyncio.to_thread(talk, permissive(chain, "x"), scene.address, hello()) == b""

    (line,) = perform(attack)
    assert "not of this swarm" in line


def test_a_leaf_that_plays_the_authority(perform, tmp_path):
    async def attack(scene):
        member, identity = scene.swarm.member().identity, Identity.generate()
        own = Authority.of(scene.swarm.secret).certify(member.public_key, NOW_S)
        leaf = Authority(member.private_key, own).certify(identity.public_key, NOW_S)
        chain = tmp_path / "chain.pem"
        chain.write_bytes(chain_pem(leaf, identity, b"x") + pem(own))
        assert await asyncio.to_thread(talk, permissive(chain, "x"), scene.address, hello()) == b""

    (line,) = perform(attack)
    assert "not of this swarm" in line


def test_no_certificate_at_all(perform):
    async def attack(scene):
        assert await asyncio.to_thread(talk, permissive(), scene.address, hello()) == b""

    (line,) = perform(attack)
    assert "showed no certificate" in line


def test_a_key_of_another_kind(perform, tmp_path):
    """A member can sign whatever it likes, but only Ed25519 keys have a peer id."""

    async def attack(scene):
        authority, key = Authority.of(scene.swarm.secret), ec.generate_private_key(ec.SECP256R1())
        until_ = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)
        since = until_ - datetime.timedelta(days=2)
        leaf = x509.CertificateBuilder(
            authority.certificate.subject, x509.Name([]), key.public_key(), 5, since, until_
        ).sign(authority.private_key, None)
        chain = tmp_path / "chain.pem"
        chain.write_bytes(
            pem(leaf)
            + key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        answer = await asyncio.to_thread(talk, permissive(chain), scene.address, hello())
        assert [kind for kind, *_ in parse(answer)] == [FrameKind.GOODBYE]

    (line,) = perform(attack)
    assert "Ed25519" in line


# --- members that would be somebody else ---


def test_a_member_that_relays_bytes_is_not_the_one_that_was_meant(perform):
    """The relay passes on every byte of the handshake; the caller sees who is really there."""

    async def attack(scene):
        mallory = scene.swarm.member()

        async def relay(reader, writer):
            there, back = await asyncio.open_connection(scene.address.host, scene.address.port)

            async def pump(source, target):
                with contextlib.suppress(ConnectionError):
                    while data := await source.read(1 << 16):
                        target.write(data)
                target.close()

            await asyncio.gather(pump(reader, back), pump(there, writer))

        listening = await asyncio.start_server(relay, "127.0.0.1", 0)
        async with listening, StreamTransport(membership=scene.swarm.member()) as caller:
            address = Address(*listening.sockets[0].getsockname())
            told = await scene.refused(caller, peer=Peer(address, mallory.peer_id))
            assert f"is {scene.server.peer_id.short}, not {mallory.peer_id.short}" in told
            # to one that means the server it is only a longer line
            meant = Peer(address, scene.server.peer_id)
            assert (await caller.call(meant, "echo", "through", deadline=soon())).payload == "through"

    assert perform(attack) == []


def test_a_member_that_claims_anothers_id(perform):
    async def attack(scene):
        context = scene.swarm.member().client_tls()
        for claim in (scene.friend.peer_id.digest, b""):
            answer = await asyncio.to_thread(talk, context, scene.address, hello(claim))
            assert [kind for kind, *_ in parse(answer)] == [FrameKind.HELLO, FrameKind.GOODBYE]

    lines = perform(attack)
    assert len(lines) == 2
    assert all(re.search(r"It says that it is .*; its certificate is ", line) for line in lines)


def test_a_server_that_claims_anothers_id(perform):
    """A member that ends TLS itself and says that it is the one who was called."""

    def impostor(listener, context, claim):
        accepted, _ = listener.accept()
        with contextlib.closing(context.wrap_socket(accepted, server_side=True)) as victim:
            victim.sendall(hello(claim))
            return read_all(victim)

    async def attack(scene):
        mallory, meant = scene.swarm.member(), scene.server.peer_id
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = Address(*listener.getsockname())
            for expected in (meant, None):
                heard = asyncio.ensure_future(
                    asyncio.to_thread(impostor, listener, mallory.server_tls(), meant.digest)
                )
                told = await scene.refused(scene.friend, ProtocolError, peer=Peer(address, expected))
                assert f"its certificate is {mallory.peer_id.short}'s" in told
                assert FrameKind.REQUEST not in [kind for kind, *_ in parse(await heard)]

    lines = perform(attack)
    assert len(lines) == 2


# --- who is not allowed ---


def test_a_peer_that_is_denied_amid_a_call(perform, tmp_path):
    deny_file = tmp_path / "denied"
    deny_file.write_text("# nobody yet\n")

    async def attack(scene):
        bad = scene.swarm.member()
        async with StreamTransport(membership=bad) as caller:
            sitting = asyncio.ensure_future(scene.refused(caller, method="sit"))
            await until(lambda: scene.num_sitting == 1)
            deny_file.write_text(f"{bad.peer_id}  # for cheating\n")
            told = await sitting
            assert "not allowed here" in told
            assert "shoal keys show" in told
            await until(lambda: scene.num_cancelled == 1)
            assert "not allowed here" in await scene.refused(caller)  # nor may it come again
            deny_file.write_text("")
            await until(lambda: scene.server.access.is_allowed(bad.peer_id))
            assert (await caller.call(scene.address, "echo", 5, deadline=soon())).payload == 5

    lines = perform(attack, access=Access(deny_file=deny_file))
    assert len(lines) == 2
    assert all(line.startswith("closed a connection (") and "not allowed here" in line for line in lines)


def test_whoever_denies_ends_its_own_calls_too(run):
    async def check():
        swarm = Swarm()
        ours, theirs = swarm.member(), swarm.member()
        async with StreamTransport(membership=ours) as one, StreamTransport(membership=theirs) as other:
            scene = Scene()
            other.handle("sit", scene.sit)
            peer = Peer(await other.listen(LOOPBACK), theirs.peer_id)
            sitting = asyncio.ensure_future(one.call(peer, "sit", deadline=soon()))
            await until(lambda: scene.num_sitting == 1)
            ours.access.deny(theirs.peer_id)
            with pytest.raises(PeerRefused, match="not allowed here"):
                await sitting
            await until(lambda: scene.num_cancelled == 1)
            with pytest.raises(PeerRefused, match="not allowed here"):
                await one.call(peer, "sit", deadline=soon())

    run(check())


def test_an_allow_list(perform, tmp_path):
    allow_file = tmp_path / "allowed"
    allow_file.touch()
    access = Access(allow_file=allow_file)

    async def attack(scene):
        newcomer = scene.swarm.member()
        async with StreamTransport(membership=newcomer) as caller:
            assert "not allowed here" in await scene.refused(caller)
            allow_file.write_text(f"{newcomer.peer_id}\n")
            await until(lambda: access.is_allowed(newcomer.peer_id))
            assert (await caller.call(scene.address, "echo", 5, deadline=soon())).payload == 5

    lines = perform(attack, access=access)
    assert len(lines) == 1
    assert "not allowed here" in lines[0]


# --- handshakes that take for ever ---


def client_hello():
    """The first flight of an honest client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = permissive().wrap_bio(incoming, outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


@everywhere
def test_a_slow_loris_in_the_handshake(perform, library):
    def drip(scene):
        silent, slow, amid = (dial(scene.address) for _ in range(3))
        amid.sendall(client_hello())
        left = iter(client_hello())
        ends_at_s = time.monotonic() + 6
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < ends_at_s:
                slow.sendall(bytes([next(left)]))
                time.sleep(0.02)
        assert time.monotonic() < ends_at_s
        for client in (silent, slow, amid):
            with client:
                read_all(client)

    async def attack(scene):
        await asyncio.to_thread(int)  # the thread that attacks keeps its descriptors
        before = open_descriptors()
        await asyncio.to_thread(drip, scene)
        await until(lambda: open_descriptors() <= before)

    lines = perform(attack, limits=Limits(handshake_s=0.5))
    assert len(lines) == 3
    assert all("No TLS handshake was made within 0.5 s" in line for line in lines)


@everywhere
def test_one_that_shakes_hands_slowly_gives_its_place_away(perform, library):
    async def attack(scene):
        with dial(scene.address) as first, dial(scene.address) as second:
            second.sendall(client_hello())
            await until(lambda: scene.server.num_connections == 3)
            async with StreamTransport(membership=scene.swarm.member()) as member:
                assert (await member.call(scene.address, "echo", 1, deadline=soon())).payload == 1
                first.settimeout(5)
                assert await asyncio.to_thread(read_all, first) == b""  # the oldest had to go

    lines = perform(attack, limits=Limits(max_connections=3))
    assert [line for line in lines if "hung up" not in line] == [line for line in lines if "silent" in line]
    assert sum("dropped a silent connection" in line for line in lines) == 1


def test_a_full_server_says_so_before_the_handshake(perform):
    async def attack(scene):
        async with (
            StreamTransport(membership=scene.swarm.member()) as second,
            StreamTransport(membership=scene.swarm.member()) as third,
        ):
            await second.call(scene.address, "echo", deadline=soon())
            assert "takes no connection now" in await scene.refused(third, PeerBusy)

    (line,) = perform(attack, limits=Limits(max_connections=2))
    assert "all 2 connections are taken" in line


# --- the rest ---


@everywhere
def test_large_buffers_arrive_whole_in_memory_that_is_used_again(run, library, monkeypatch):
    monkeypatch.setattr(tls, "LIBRARY", library)

    async def check():
        swarm = Swarm()
        async with (
            StreamTransport(membership=swarm.member()) as server,
            StreamTransport(membership=swarm.member()) as client,
        ):
            server.handle("echo", echo)
            peer = Peer(await server.listen(LOOPBACK), server.peer_id)
            numbers = random.Random(8)

            async def keep_calling():
                body, into = bytearray(5 << 20), bytearray(5 << 20)
                for _ in range(4):
                    body[:] = numbers.randbytes(len(body))
                    await client.call(peer, "echo", None, [body], deadline=soon(), into=[into])
                    assert into == body

            await asyncio.gather(*(keep_calling() for _ in range(3)))

    run(check())


def test_peers_are_known_by_their_certificate(run):
    async def check():
        swarm = Swarm()
        async with (
            StreamTransport(membership=swarm.member()) as server,
            StreamTransport(membership=swarm.member()) as client,
        ):
            seen = []
            server.handle("who", lambda head, buffers: seen.append(head.peer))
            address = await server.listen(LOOPBACK)
            await client.call(address, "who", deadline=soon())
            assert [peer.id for peer in seen] == [client.peer_id]
            with pytest.raises(PeerRefused, match="another peer has taken that address"):
                await client.call(Peer(address, PeerId(bytes(20))), "who", deadline=soon())

    run(check())


def test_a_cut_inside_the_stream_is_noticed(perform):
    """Whoever sits on the line can end a connection, and change nothing: a changed record ends it too."""

    def cut(scene):
        client = blocking_client(scene.swarm.member().client_tls(), scene.address)
        raw = socket.socket(fileno=client.detach())
        with raw:
            raw.settimeout(5)
            raw.sendall(
                struct.pack(">BHH", 23, 0x0303, 100) + bytes(100)
            )  # not under the keys of the connection
            read_all(raw)

    async def attack(scene):
        await asyncio.to_thread(cut, scene)

    assert perform(attack) == []


def test_without_a_secret_a_peer_listens_on_this_machine_only(run):
    async def check():
        async with StreamTransport() as plain, StreamTransport(is_insecure=True) as insecure:
            with pytest.raises(UsageError, match="this machine only"):
                await plain.listen(Address("0.0.0.0", 0))
            assert (await insecure.listen(Address("0.0.0.0", 0))).port
        async with StreamTransport(membership=Swarm().member()) as member:
            assert (await member.listen(Address("0.0.0.0", 0))).port

    run(check())
