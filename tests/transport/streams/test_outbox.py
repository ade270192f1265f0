"""The outbox alone, on a socket that is full when the test says so."""

import asyncio
import random

import pytest

from shoal.transport.frames import EAGER_BYTES, INLINE_BYTES, FrameKind
from shoal.transport.streams.outbox import Outbox
from transport.wire import FakeTransport, turn


class Socket:
    """An outbox on a fake transport, and its loop; stuck: every write fills the socket until `drain`."""

    def __init__(self, *, is_stuck=False):
        self.transport = FakeTransport(self)
        self.transport.is_stuck = is_stuck
        self.now_s = 0.0
        self.call_soon = asyncio.get_running_loop().call_soon
        self.outbox = Outbox(self, self.transport)

    def time(self):
        return self.now_s

    def pause_writing(self):
        self.outbox.pause()

    def resume_writing(self):
        self.outbox.resume()

    def log(self):
        return [(kind, call_id) for kind, call_id, *_ in self.transport.frames()]

    def body(self, call_id):
        return b"".join(body for kind, number, _, body in self.transport.frames() if number == call_id)


def views(*sizes, seed=0):
    rng = random.Random(seed)
    return [memoryview(rng.randbytes(size)) for size in sizes]


def test_small_messages_travel_in_one_frame_and_free_their_buffers_at_once(run):
    async def check():
        socket, freed = Socket(), []
        buffer = bytearray(b"abc")
        socket.outbox.send_message(
            FrameKind.REPLY, 1, b"head", [memoryview(buffer), memoryview(b"d")], lambda: freed.append(1)
        )
        assert freed == [1]
        buffer[:] = b"xyz"
        await turn()
        assert socket.transport.frames() == [(FrameKind.REPLY, 1, b"head", b"abcd")]
        assert len(socket.transport.written) == 1

    run(check())


def test_frames_of_one_turn_leave_in_one_write(run):
    async def check():
        socket = Socket()
        for number in range(20):
            socket.outbox.send_frame(FrameKind.CANCEL, number)
        await turn()
        assert len(socket.transport.written) == 1
        for number in range(100):
            socket.outbox.send_frame(FrameKind.CANCEL, number)
        await turn()
        assert 2 <= len(socket.transport.written) <= 5

    run(check())


def test_large_bodies_arrive_whole_in_chunks(run):
    async def check():
        socket, freed = Socket(), []
        parts = views(3_000_000, 0, 5, 700_000)
        socket.outbox.send_message(FrameKind.REPLY, 1, b"h", parts, lambda: freed.append(1))
        await turn(20)
        assert socket.log()[0] == (FrameKind.REPLY, 1)
        assert {kind for kind, _ in socket.log()[1:]} == {FrameKind.CHUNK}
        assert socket.body(1) == b"".join(parts)
        assert freed == [1]

    run(check())


def test_small_frames_pass_large_bodies(run):
    async def check():
        socket = Socket(is_stuck=True)
        socket.outbox.send_message(FrameKind.REPLY, 1, b"h", views(8 << 20), None)
        await turn()
        for _ in range(3):
            socket.transport.drain()
            await turn()
        socket.outbox.send_frame(FrameKind.CANCEL, 77)
        socket.outbox.send_message(FrameKind.REPLY, 3, b"", views(100), None)
        before = len(socket.log())
        socket.transport.drain()
        await turn()
        assert socket.log()[before : before + 2] == [(FrameKind.CANCEL, 77), (FrameKind.REPLY, 3)]

    run(check())


def test_the_shortest_goes_first_and_none_starves(run):
    async def check():
        socket = Socket(is_stuck=True)
        socket.outbox.send_message(FrameKind.REPLY, 1, b"h", views(6 << 20), None)
        await turn()
        next_id = 3
        for _ in range(60):  # short ones keep coming
            socket.outbox.send_message(FrameKind.REPLY, next_id, b"h", views(1 << 20), None)
            next_id += 2
            socket.transport.drain()
            await turn()
        order = [call_id for kind, call_id in socket.log() if kind is FrameKind.CHUNK]
        assert len(socket.body(1)) == 6 << 20, "the long one starved"
        firsts = order[:10]
        assert sum(call_id != 1 for call_id in firsts) > sum(call_id == 1 for call_id in firsts)

    run(check())


def test_buffers_are_free_only_when_the_socket_has_passed_them_on(run):
    async def check():
        socket, freed = Socket(is_stuck=True), []
        socket.outbox.send_message(FrameKind.REPLY, 1, b"h", views(60_000), lambda: freed.append(1))
        await turn()  # all of it is written, and fills the socket
        assert len(socket.body(1)) == 60_000
        assert freed == []
        socket.transport.drain()
        assert freed == [1]

    run(check())


def test_a_request_waits_for_its_grant_and_may_begin_again(run):
    async def check():
        socket = Socket()
        parts = views(EAGER_BYTES + 1_000_000)
        socket.outbox.send_message(FrameKind.REQUEST, 1, b"h", parts, None)
        await turn(50)
        assert len(socket.body(1)) == EAGER_BYTES
        assert socket.outbox.body_of(1).sent_bytes == EAGER_BYTES
        socket.outbox.grant(1)
        await turn(50)
        assert socket.body(1) == bytes(parts[0])
        assert socket.outbox.body_of(1) is None
        before = len(socket.log())
        socket.outbox.resend(1, parts)
        await turn(50)
        kinds = [kind for kind, _ in socket.log()[before:]]
        assert kinds[0] is FrameKind.CHUNK_FROM_START
        assert set(kinds[1:]) == {FrameKind.CHUNK}
        assert socket.body(1) == bytes(parts[0]) * 2

    run(check())


def test_beginning_again_in_the_middle(run):
    async def check():
        socket = Socket(is_stuck=True)
        parts = views(4 << 20)
        socket.outbox.send_message(FrameKind.REQUEST, 1, b"h", parts, None)
        await turn()
        socket.transport.drain()
        socket.transport.drain()
        socket.outbox.resend(1, parts)
        for _ in range(80):
            socket.transport.drain()
        frames = [frame for frame in socket.transport.frames() if frame[1] == 1]
        start = [kind for kind, *_ in frames].index(FrameKind.CHUNK_FROM_START)
        assert b"".join(body for *_, body in frames[start:]) == bytes(parts[0])

    run(check())


def test_asking_again_for_nothing_leaves_nothing_behind(run):
    async def check():
        socket = Socket()
        socket.outbox.resend(1, views(0))
        socket.outbox.resend(3, [])
        assert socket.outbox.body_of(1) is None
        assert socket.outbox.body_of(3) is None

    run(check())


def test_a_dropped_body_ends_and_frees_its_buffers_after_the_socket(run):
    async def check():
        socket, freed = Socket(is_stuck=True), []
        socket.outbox.send_message(FrameKind.REPLY, 1, b"h", views(8 << 20), lambda: freed.append(1))
        await turn()
        socket.transport.drain()
        socket.outbox.drop(1)
        socket.outbox.drop(1)
        assert freed == []  # the socket still holds a chunk of it
        before = len(socket.log())
        socket.transport.drain()
        await turn()
        assert freed == [1]
        assert len(socket.log()) == before

    run(check())


def test_when_sent(run):
    async def check():
        socket, told = Socket(is_stuck=True), []
        socket.outbox.when_sent(9, lambda: told.append("nothing to send"))
        assert told == ["nothing to send"]
        socket.outbox.send_message(FrameKind.REQUEST, 1, b"h", views(50_000), None)
        socket.outbox.when_sent(1, lambda: told.append("sent"))
        await turn()
        socket.outbox.when_sent(9, lambda: told.append("the socket is empty"))
        assert len(told) == 1
        socket.transport.drain()
        assert sorted(told[1:]) == ["sent", "the socket is empty"]

    run(check())


@pytest.mark.parametrize("is_stuck", [False, True])
def test_closing_frees_every_buffer_once(run, is_stuck):
    async def check():
        socket, freed = Socket(is_stuck=is_stuck), []
        for number in range(5):
            socket.outbox.send_message(
                FrameKind.REPLY, number, b"h", views(1 << 20), lambda number=number: freed.append(number)
            )
        await turn()
        if is_stuck:
            socket.transport.drain()
        socket.outbox.drop(2)
        socket.outbox.close()
        socket.outbox.close()
        await turn()
        assert sorted(freed) == [0, 1, 2, 3, 4]

    run(check())


def test_a_sealed_outbox_says_what_it_has_to_say_and_no_more(run):
    async def check():
        socket, freed = Socket(is_stuck=True), []
        socket.outbox.send_message(FrameKind.REPLY, 1, b"h", views(1 << 20), lambda: freed.append(1))
        await turn()
        socket.outbox.send_frame(FrameKind.GOODBYE, 0, b"bye")
        socket.outbox.seal()
        socket.transport.close()
        assert socket.log()[-1] == (FrameKind.GOODBYE, 0)
        socket.outbox.send_frame(FrameKind.CANCEL, 5)  # the fake transport would object to a write
        socket.outbox.send_message(FrameKind.REPLY, 7, b"h", views(10), None)
        socket.transport.drain()
        await turn()
        assert freed == []
        socket.outbox.close()
        assert freed == [1]

    run(check())


def test_what_waits_for_a_full_socket_is_counted(run):
    async def check():
        socket = Socket(is_stuck=True)
        socket.outbox.send_frame(FrameKind.CANCEL, 1)
        await turn()
        assert socket.outbox.waiting_bytes == 0  # the socket has it
        for number in range(100):
            socket.outbox.send_message(FrameKind.REPLY, number, b"h" * 100, views(INLINE_BYTES), None)
        assert socket.outbox.waiting_bytes >= 100 * (INLINE_BYTES + 100)
        socket.transport.drain()
        assert socket.outbox.waiting_bytes == 0

    run(check())


def test_a_burst_of_one_turn_is_counted_too(run):
    async def check():
        socket = Socket(is_stuck=True)
        for number in range(1000):
            socket.outbox.send_message(FrameKind.REPLY, number, b"h", views(1000), None)
        assert socket.outbox.waiting_bytes > 900_000

    run(check())


def test_chunks_grow_on_a_quick_socket_and_shrink_on_a_slow_one(run):
    async def check():
        socket = Socket(is_stuck=True)
        socket.outbox.send_message(FrameKind.REPLY, 1, b"h", views(64 << 20), None)
        await turn()
        for _ in range(10):
            socket.transport.drain()
        sizes = [len(body) for kind, _, _, body in socket.transport.frames() if kind is FrameKind.CHUNK]
        assert sizes[:5] == [64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20]
        assert sizes[-1] == 4 << 20
        for _ in range(12):
            socket.now_s += 0.5
            socket.transport.drain()
        assert len(socket.transport.frames()[-1][3]) == 64 << 10
        for _ in range(8):
            socket.transport.drain()
        assert len(socket.transport.frames()[-1][3]) > 64 << 10

    run(check())
