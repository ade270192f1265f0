"""One socket: what it can reach, and that a full one loses packets rather than memory."""

import asyncio

import pytest

from shoal.core import Address
from shoal.transport.datagrams.sessions import Stats, peer_at
from shoal.transport.datagrams.transport import DatagramSocket
from shoal.transport.datagrams.wire import PREFIX


class FakeHub:
    def __init__(self):
        self.stats, self.sessions, self.is_watching = Stats(), {}, True
        self.bad, self.is_open = [], True

    def on_bad_packet(self, peer, why):
        self.bad.append(why)

    def flush(self):
        pass


class Handshakes:
    def __init__(self):
        self.heard = []

    def on_stray(self, packet, where, port):
        self.heard.append("stray")

    def on_other_version(self, packet, where, port):
        self.heard.append("version")

    def on_unknown(self, packet):
        self.heard.append("unknown")

    def on_greeting(self, kind, packet, where, port):
        self.heard.append("greeting")


class Carrier(asyncio.DatagramTransport):
    def __init__(self, where):
        super().__init__({"sockname": where})
        self.sent = []

    def sendto(self, data, addr=None):
        self.sent.append((data, addr))


def opened(where=("127.0.0.1", 1)):
    port = DatagramSocket(FakeHub(), Handshakes(), is_listening=True)
    carrier = Carrier(where)
    port.connection_made(carrier)
    return port, carrier


@pytest.mark.parametrize(
    ("here", "there", "can"),
    [
        (("127.0.0.1", 1), ("127.0.0.1", 2), True),
        (("127.0.0.1", 1), ("10.0.0.1", 2), False),
        (("0.0.0.0", 1), ("127.0.0.1", 2), True),
        (("10.0.0.1", 1), ("10.0.0.2", 2), True),
        (("0.0.0.0", 1), ("::1", 2, 0, 0), False),
        (("::", 1, 0, 0), ("::1", 2, 0, 0), True),
        (("::1", 1, 0, 0), ("fe80::1", 2, 0, 0), False),
    ],
)
def test_what_can_be_reached_from_where(here, there, can):
    assert opened(here)[0].can_reach(there) is can


def test_a_full_socket_loses_packets():
    port, carrier = opened()
    port.send(b"one", ("10.0.0.1", 1))
    port.pause_writing()
    port.send(b"lost", ("10.0.0.1", 1))
    port.resume_writing()
    port.send(b"two", ("10.0.0.1", 1))
    port.error_received(OSError())
    port.connection_lost(None)
    port.send(b"lost", ("10.0.0.1", 1))
    stats = port._stats
    assert [data for data, _ in carrier.sent] == [b"one", b"two"]
    assert (stats.packets_out, stats.bytes_out, stats.unheard) == (2, 6, 3)


def test_packets_go_to_whom_they_concern():
    port, _ = opened()
    body = bytes(60)
    for packet in (
        PREFIX + b"\x04" + body,
        PREFIX + b"\x05" + body,
        PREFIX + b"\x01" + body,
        PREFIX + b"\x81" + body,
        b"\xf0D\x09\x04" + body,
    ):
        port.datagram_received(packet, ("10.0.0.1", 1))
    assert port._handshakes.heard == ["stray", "unknown", "greeting", "greeting", "version"]
    for packet in (
        b"",
        b"\xf0",
        PREFIX,
        PREFIX + b"\x04",
        b"\xf0D\x02\x04",
        PREFIX + b"\x09" + body,
        PREFIX + b"\x04" + bytes(1200),
        PREFIX + b"\x01" + bytes(1200),
        b"GET / HTTP/1.1\r\n\r\n" * 4,
    ):
        port.datagram_received(packet, ("10.0.0.1", 1))
    assert len(port._handshakes.heard) == 5
    assert len(port._transport.bad) == 9
    port._transport.is_open = False  # closing: nobody is served any more
    port.datagram_received(PREFIX + b"\x04" + body, ("10.0.0.1", 1))
    assert len(port._handshakes.heard) == 5


def test_a_peer_is_named_by_its_sockets_address():
    assert peer_at(("::1", 5, 0, 0)).address == Address("::1", 5)
