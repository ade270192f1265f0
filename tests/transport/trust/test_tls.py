"""TLS over connected sockets, with every library that can carry it, on both loops."""

import asyncio
import contextlib
import logging
import random
import socket
import ssl
import struct
import sys
import tempfile
import time

import pytest

from shoal.core import (
    Address,
    IdentityError,
    Peer,
    PeerBusy,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    ProtocolError,
)
from shoal.transport.streams.decoder import FrameDecoder
from shoal.transport.trust import tls
from shoal.transport.trust.tls import peer_id_of
from transport.members import Swarm, assert_tells_nothing
from transport.wire import open_descriptors, until

LIBRARIES = ("aiofastnet", "loop")
PEER = Peer(Address("10.0.0.7", 7))
MIB = 1 << 20

everywhere = pytest.mark.parametrize(
    ("run", "library"),
    [(loop, library) for loop in ("uvloop", "asyncio") for library in LIBRARIES],
    indirect=True,
)


@pytest.fixture
def library(request, monkeypatch):
    """Sets what carries TLS."""
    if request.param == "aiofastnet":
        assert tls._aiofastnet() is not None
    monkeypatch.setattr(tls, "LIBRARY", request.param)


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


class End(asyncio.BufferedProtocol):
    """One end of a connection: collects what comes, and knows when everything has left."""

    def __init__(self):
        self.transport = None
        self.received = bytearray()
        self.is_paused = False
        self.num_pauses = 0
        self.has_eof = False
        self.lost = None
        self._buffer = bytearray(200_000)

    def connection_made(self, transport):
        self.transport = transport
        transport.set_write_buffer_limits(high=1)

    def get_buffer(self, sizehint):
        return memoryview(self._buffer)

    def buffer_updated(self, num_bytes):
        self.received += self._buffer[:num_bytes]

    def pause_writing(self):
        self.is_paused = True
        self.num_pauses += 1

    def resume_writing(self):
        assert self.transport is None or self.transport.get_write_buffer_size() == 0
        self.is_paused = False

    def eof_received(self):
        self.has_eof = True
        return False

    def connection_lost(self, error):
        self.lost = error or "closed"


async def shake(client_tls, server_tls):
    """Both ends after a handshake; an exception where it failed."""
    ours, theirs = tcp_pair()
    client, server = End(), End()
    outcomes = await asyncio.gather(
        tls.carry(client, ours, client_tls, is_server=False),
        tls.carry(server, theirs, server_tls, is_server=True),
        return_exceptions=True,
    )
    return client, server, outcomes


@contextlib.asynccontextmanager
async def connected(swarm):
    client, server, outcomes = await shake(swarm.member().client_tls(), swarm.member().server_tls())
    assert outcomes == [None, None]
    try:
        yield client, server
    finally:
        for end in (client, server):
            end.transport.abort()
        await until(lambda: client.lost and server.lost)


def proven(end):
    return peer_id_of(end.transport.get_extra_info("ssl_object").getpeercert(True))


@everywhere
def test_both_ends_know_each_other(run, library):
    swarm = Swarm()

    async def check():
        one, other = swarm.member(), swarm.member()
        client, server, _ = await shake(one.client_tls(), other.server_tls())
        assert proven(client) == other.peer_id
        assert proven(server) == one.peer_id
        assert client.transport.get_extra_info("ssl_object").version() == "TLSv1.3"
        assert client.transport.get_extra_info("socket").fileno() >= 0
        client.transport.close()  # a closing TLS connection says so, and the other side closes too
        await until(lambda: client.lost and server.lost)
        assert server.has_eof

    run(check())


@everywhere
def test_memory_may_be_used_again_when_writing_is_resumed(run, library):
    """What the outbox relies on: everything handed over while not paused is safe from later changes."""

    async def check():
        numbers = random.Random(3)
        sent = bytearray()
        async with connected(Swarm()) as (client, server):
            body = bytearray(2 * MIB)
            for _ in range(20):
                await until(lambda: not client.is_paused)
                body[:] = numbers.randbytes(len(body))
                sent += body
                view = memoryview(body)
                client.transport.writelines([view[:70_000], view[70_000:70_001], view[70_001:]])
            await until(lambda: len(server.received) == len(sent))
            assert server.received == sent
            assert client.num_pauses > 0
            await until(lambda: not client.is_paused)
            assert client.transport.get_write_buffer_size() == 0

    run(check())


@everywhere
def test_what_is_written_before_closing_arrives(run, library):
    async def check():
        data = random.Random(4).randbytes(3 * MIB)
        async with connected(Swarm()) as (client, server):
            client.transport.write(data)
            client.transport.close()
            await until(lambda: server.lost)
            assert server.received == data
            assert server.has_eof

    run(check())


@everywhere
def test_aborting_ends_both_at_once(run, library):
    async def check():
        async with connected(Swarm()) as (client, server):
            client.transport.write(bytes(8 * MIB))  # more than fits
            client.transport.abort()
            await until(lambda: client.lost and server.lost)

    run(check())


@everywhere
@pytest.mark.parametrize("size_bytes", [0, 10, 600_000])
def test_a_reset_is_noticed_also_when_bytes_came_with_it(run, library, size_bytes):
    swarm = Swarm()

    def blocking(theirs):
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MIB)
        client = swarm.member().client_tls().wrap_socket(theirs)
        client.sendall(b"ready")
        assert client.recv(10) == b"go"
        client.sendall(bytes(size_bytes))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # resets

    async def check():
        ours, theirs = tcp_pair()
        end = End()
        attack = asyncio.ensure_future(asyncio.to_thread(blocking, theirs))
        await tls.carry(end, ours, swarm.member().server_tls(), is_server=True)
        await until(lambda: end.received == b"ready")
        end.transport.write(b"go")
        time.sleep(0.05)  # noqa: ASYNC251 - bytes and reset should both be there when the loop looks
        await attack
        await until(lambda: end.lost)

    run(check())


@everywhere
def test_strangers_are_refused_by_both_sides(run, library):
    async def check():
        mine, other = Swarm(), Swarm()
        client, server, outcomes = await shake(other.member().client_tls(), mine.member().server_tls())
        assert client.transport is server.transport is None
        assert isinstance(outcomes[0], ssl.SSLCertVerificationError)
        assert isinstance(outcomes[1], ssl.SSLError)
        for error in outcomes:
            explained = tls.explain(error, PEER)
            assert "another swarm secret" in explained.cause
            assert_tells_nothing(str(explained) + repr(error), mine, other)

    run(check())


@everywhere
def test_an_end_in_the_handshake_is_no_unhandled_exception(run, library):
    async def check():
        for is_server in (True, False):
            for last_words in (b"", b"\x16\x03\x01\x02\x00\x01"):
                ours, theirs = tcp_pair()
                member = Swarm().member()
                context = member.server_tls() if is_server else member.client_tls()
                theirs.sendall(last_words)
                theirs.close()
                with pytest.raises(ssl.SSLError) as caught:
                    await tls.carry(End(), ours, context, is_server=is_server)
                assert isinstance(tls.explain(caught.value, PEER), PeerUnreachable)
                await until(lambda ours=ours: ours.fileno() == -1)

    run(check())  # fails on whatever asyncio calls unhandled


@everywhere
def test_plain_bytes_are_no_handshake(run, library):
    async def check():
        for is_server in (True, False):
            ours, theirs = tcp_pair()
            member = Swarm().member()
            context = member.server_tls() if is_server else member.client_tls()
            with theirs:
                theirs.sendall(b"SH" + bytes(100))
                with pytest.raises(ssl.SSLError) as caught:
                    await tls.carry(End(), ours, context, is_server=is_server)
            explained = tls.explain(caught.value, PEER)
            assert isinstance(explained, PeerRefused)
            assert "does not speak TLS" in explained.what

    run(check())


@everywhere
def test_a_cancelled_handshake_leaves_nothing(run, library):
    async def check():
        context = Swarm().member().server_tls()
        await asyncio.sleep(0)
        before = open_descriptors()
        ours, theirs = tcp_pair()
        end = End()
        with theirs:
            theirs.sendall(b"\x16\x03\x01")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await tls.carry(end, ours, context, is_server=True)
            theirs.settimeout(5)
            assert await asyncio.to_thread(theirs.recv, 10) == b""
        assert end.transport is None
        await until(lambda: open_descriptors() <= before + 3)  # the thread that received keeps its own

    run(check())


@everywhere
def test_a_place_that_is_taken_is_told_without_a_handshake(run, library):
    async def check():
        ours, theirs = tcp_pair()
        with theirs:
            theirs.sendall(tls.BUSY_ALERT)
            with pytest.raises(ssl.SSLError) as caught:
                await tls.carry(End(), ours, Swarm().member().client_tls(), is_server=False)
        assert isinstance(tls.explain(caught.value, PEER), PeerBusy)

    run(check())


def test_only_tls_1_3_and_no_sessions(run):
    swarm = Swarm()

    def blocking(ours, version):
        context = swarm.member().client_tls()
        context.minimum_version = context.maximum_version = version
        with contextlib.closing(context.wrap_socket(ours)) as client:
            client.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                client.read(10)  # tickets would come now
            return client.session.has_ticket if client.session else False

    async def attempt(version):
        ours, theirs = tcp_pair()
        ours.settimeout(5)
        server = End()
        attempt = asyncio.to_thread(blocking, ours, version)
        return await asyncio.gather(
            attempt,
            tls.carry(server, theirs, swarm.member().server_tls(), is_server=True),
            return_exceptions=True,
        )

    async def check():
        assert await attempt(ssl.TLSVersion.TLSv1_3) == [False, None]
        refusals = await attempt(ssl.TLSVersion.TLSv1_2)
        assert all(isinstance(refusal, (ssl.SSLError, ConnectionError)) for refusal in refusals)

    run(check())


def test_contexts_trust_one_authority_and_nobody_else():
    for context in (Swarm().member().client_tls(), Swarm().member().server_tls()):
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert len(context.get_ca_certs()) == 1
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.options & ssl.OP_NO_COMPRESSION


@pytest.mark.skipif(sys.platform != "linux", reason="files in memory are Linux's")
def test_where_there_are_files_in_memory_no_key_touches_a_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    open_files = open_descriptors()
    Swarm().member().server_tls()
    assert open_descriptors() == open_files


def test_no_key_stays_in_a_file(monkeypatch, tmp_path):
    monkeypatch.setattr(tls, "_memory_file", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []
    load = ssl.SSLContext.load_cert_chain

    def spy(context, path, *, password):
        seen.append((path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777, path.read_text()))
        load(context, path, password=password)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", spy)
    swarm = Swarm()
    swarm.member().server_tls()
    ((file_mode, folder_mode, content),) = seen
    assert (file_mode, folder_mode) == (0o600, 0o700)
    assert_tells_nothing(content, swarm)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("forbidden", ["to make it", "to read it"])
def test_where_a_file_in_memory_is_forbidden_a_temporary_one_does(monkeypatch, tmp_path, forbidden):
    load = ssl.SSLContext.load_cert_chain
    loaded = []

    def refuse(*arguments):
        raise PermissionError(1, "Operation not permitted")

    def read(context, path, *, password=None):
        if str(path).startswith("/proc"):
            refuse()
        loaded.append(path)
        load(context, path, password=password)

    if forbidden == "to make it":
        monkeypatch.setattr(tls.os, "memfd_create", refuse, raising=False)
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", read)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Swarm().member().server_tls()
    assert [path.is_relative_to(tmp_path) for path in loaded] == [True]


def verification(code):
    error = ssl.SSLCertVerificationError()
    error.verify_code = code
    return error


def failure(reason):
    error = ssl.SSLError()
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (verification(10), PeerRefused, ["has expired", "clock", "date -u"]),
        (verification(9), PeerRefused, ["is not valid yet", "clock"]),
        (verification(20), PeerRefused, ["not of this swarm", "another swarm secret", "SHOAL_SECRET"]),
        (verification(7), PeerRefused, ["not of this swarm"]),
        (failure("WRONG_VERSION_NUMBER"), PeerRefused, ["does not speak TLS", "no swarm secret"]),
        (failure("PACKET_LENGTH_TOO_LONG"), PeerRefused, ["does not speak TLS"]),
        (failure("PEER_DID_NOT_RETURN_A_CERTIFICATE"), PeerRefused, ["showed no certificate"]),
        (failure("TLSV13_ALERT_CERTIFICATE_REQUIRED"), PeerRefused, ["was shown no certificate"]),
        (
            failure("SSLV3_ALERT_CERTIFICATE_EXPIRED"),
            PeerRefused,
            ["this peer's certificate has expired", "clock"],
        ),
        (failure("SSL/TLS_ALERT_CERTIFICATE_EXPIRED"), PeerRefused, ["clock"]),
        (
            failure("TLSV1_ALERT_UNKNOWN_CA"),
            PeerRefused,
            ["does not take this peer's certificate", "another swarm"],
        ),
        (failure("TLSV1_ALERT_INTERNAL_ERROR"), PeerBusy, ["takes no connection now"]),
        (ssl.SSLEOFError(8, "eof"), PeerUnreachable, ["hung up"]),
        (failure("DECRYPTION_FAILED_OR_BAD_RECORD_MAC"), PeerLost, ["bad record mac", "changed on its way"]),
        (ssl.SSLError(), PeerLost, ["unknown"]),
    ],
)
def test_errors_in_plain_words(error, kind, words):
    explained = tls.explain(error, PEER)
    assert type(explained) is kind
    assert explained.peer == PEER
    for word in words:
        assert word in str(explained)


def test_what_aiofastnet_reports_apart_from_that_is_passed_on(run):
    async def check():
        told = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context))
        quiet = tls._LoopForAiofastnet(loop, None)
        quiet.call_exception_handler({"message": "SSL handshake failed", "exception": ConnectionResetError})
        quiet.call_exception_handler({"message": "a fault", "exception": ValueError("x")})
        assert [context["message"] for context in told] == ["a fault"]

    run(check())


def test_it_is_quiet_in_the_log(run, caplog):
    caplog.set_level(logging.INFO)
    began_s = time.monotonic()

    async def check():
        async with connected(Swarm()) as (client, _):
            client.transport.write(b"x")

    run(check())
    assert caplog.text == ""
    assert time.monotonic() - began_s < 5


def test_an_alert_is_recognised_by_one_without_a_secret():
    """It is shorter than the header of a frame, and nothing comes after it."""
    decoder = FrameDecoder(None, 1 << 20)
    target = decoder.get_buffer()
    target[: len(tls.BUSY_ALERT)] = tls.BUSY_ALERT
    with pytest.raises(
        ProtocolError, match=r"(?s)speaks TLS, and this peer has no swarm secret.*SHOAL_SECRET"
    ):
        decoder.buffer_updated(len(tls.BUSY_ALERT))


def test_no_folder_for_a_temporary_file_is_said_to_be_the_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(tls, "_memory_file", lambda: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(IdentityError, match=r"(?s)OpenSSL.*TMPDIR"):
        Swarm().member().server_tls()
