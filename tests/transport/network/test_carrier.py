"""Sending past uvloop's transport: everything arrives, in order, and ends are told."""

import asyncio
import contextlib
import errno
import os
import socket

import pytest

from shoal.core.loop import new_event_loop
from shoal.transport.network import sockets as carrier
from shoal.transport.network.sockets import DirectSender, release, sending_directly
from transport.wire import open_descriptors

pytest.importorskip("uvloop")


class Recorder(asyncio.Protocol):
    def __init__(self):
        self.events = []
        self.received = b""
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = sending_directly(transport, self)

    def pause_writing(self):
        self.events.append("full")

    def resume_writing(self):
        self.events.append("empty")

    def data_received(self, data):
        self.received += data

    def connection_lost(self, exc):
        release(self.transport)
        self.lost.set_result(exc)


def connected(check):
    """Run `check(recorder, other)` with a protocol on uvloop and the other end as a plain socket."""

    async def main():
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        _, recorder = await loop.create_connection(Recorder, sock=ours)
        assert isinstance(recorder.transport, DirectSender)
        try:
            await asyncio.wait_for(check(recorder, theirs), 20)
        finally:
            recorder.transport.abort()
            theirs.close()
            await recorder.lost

    loop = new_event_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


async def receive(theirs, num_bytes):
    theirs.setblocking(False)
    data = b""
    while len(data) < num_bytes:
        part = await asyncio.get_running_loop().sock_recv(theirs, 1 << 20)
        assert part
        data += part
    return data


def test_what_the_socket_does_not_take_at_once_follows_in_order():
    async def check(recorder, theirs):
        parts = [os.urandom(300_000) for _ in range(100)]
        recorder.transport.write(parts[0])
        recorder.transport.writelines(parts[1:99])
        recorder.transport.write(parts[99])
        assert recorder.events == ["full"]
        assert recorder.transport.get_write_buffer_size() > 0
        assert await receive(theirs, 30_000_000) == b"".join(parts)
        assert recorder.events == ["full", "empty"]
        assert recorder.transport.get_write_buffer_size() == 0
        recorder.transport.write(b"more")
        assert await receive(theirs, 4) == b"more"

    connected(check)


def test_closing_sends_the_rest_first_and_aborting_does_not():
    async def check(recorder, theirs):
        data = os.urandom(5_000_000)
        recorder.transport.write(data)
        recorder.transport.close()
        recorder.transport.write(b"too late")
        assert recorder.transport.is_closing()
        assert await receive(theirs, len(data)) == data
        await recorder.lost
        assert theirs.recv(1) == b""

    connected(check)

    async def check_abort(recorder, theirs):
        recorder.transport.write(bytes(5_000_000))
        recorder.transport.abort()
        await recorder.lost
        theirs.setblocking(True)
        received = 0
        while part := theirs.recv(1 << 20):
            received += len(part)
        assert received < 5_000_000

    connected(check_abort)


def test_an_end_of_the_other_side_is_told_even_when_sending_fails():
    async def check(recorder, theirs):
        theirs.close()
        for _ in range(3):
            recorder.transport.write(bytes(1000))
        await recorder.lost

    connected(check)


def test_a_programs_default_timeout_does_not_matter():
    socket.setdefaulttimeout(0.2)

    async def check(recorder, theirs):
        descriptor = recorder.transport.get_extra_info("socket").fileno()
        num_bytes = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                num_bytes += os.write(descriptor, bytes(1 << 20))
        recorder.transport.write(b"end")
        assert recorder.events == ["full"]
        assert (await receive(theirs, num_bytes + 3)).endswith(b"end")

    try:
        connected(check)
    finally:
        socket.setdefaulttimeout(None)


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ETIMEDOUT])
def test_what_cannot_be_sent_to_ends_and_is_read_from_before_when_it_has_left(monkeypatch, number):
    def fail(*_):
        raise OSError(number, "sent no more")

    async def check(recorder, theirs):
        monkeypatch.setattr(socket.socket, "send", fail)
        os.write(theirs.fileno(), b"bye")
        recorder.transport.write(b"hello")
        await recorder.lost
        assert recorder.received == (b"bye" if number == errno.EPIPE else b"")

    monkeypatch.setattr(carrier, "_LAST_WORDS_S", 0.1)
    connected(check)


def test_no_descriptor_stays_open():
    async def check(recorder, theirs):
        recorder.transport.write(b"hello")
        assert await receive(theirs, 5) == b"hello"

    connected(check)
    before = open_descriptors()
    for _ in range(20):
        connected(check)
    assert open_descriptors() <= before


def test_other_loops_keep_their_own_transport():
    async def main():
        ours, theirs = socket.socketpair()
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        assert sending_directly(transport, asyncio.Protocol()) is transport
        transport.close()
        theirs.close()

    loop = asyncio.SelectorEventLoop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
